"""A group that sleeps between its steps takes the same steps, in every layout, and one wrong bit ends all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.model.checksum import tensors_of
from services.training.board import StatusBoard
from services.training.ranks import Ranks
from services.training.saver import Saver
from services.training.sleeper import Sleeper
from services.wire.errors import ContractError
from tests.processes.cases import case
from tests.processes.cases.checkpoints import Role, join, role_in, same, without_time
from tests.processes.cases.layouts import write_model
from tests.processes.cases.served import serve
from tests.runs import get, post


def resident_bytes(role: Role) -> int:
    """Of parameters, buffers, gradients and moments on this rank."""
    part = role.part
    held = [tensor for _, tensor in [*tensors_of(part.model), *part.optimizer.tensors(part.mesh.device)]]
    held += [p.grad for p in part.model.parameters() if p.grad is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())


def steps_are_the_same(
    ranks: Ranks, folder: Path, role: str, name: str, *, cp: int = 1, ep: int = 1, **more: Any
) -> None:
    """Two roles, one of which sleeps before, between and after its steps: numbers equal bit for bit."""
    write_model(folder, name, ranks)
    mesh = join(cp=cp, ep=ep)
    awake, sleeping = (role_in(folder, role, mesh, ranks, **more) for _ in range(2))
    sleeper = Sleeper(sleeping.part, StatusBoard(role))
    for _ in range(3):
        whole = resident_bytes(sleeping)
        assert sleeper.fall_asleep() > 0 and sleeper.is_asleep
        assert resident_bytes(sleeping) == 0 < whole
        assert sleeper.fall_asleep() == 0, "a second time changes nothing"
        assert sleeper.wake_up() > 0 and not sleeper.is_asleep
        assert sleeper.wake_up() == 0
        assert without_time(sleeping.step()) == without_time(awake.step())
    assert same(sleeping.local(), awake.local())


@case(2)
def critic_llama_dp2(ranks: Ranks, folder: Path) -> None:
    steps_are_the_same(ranks, folder, "critic", "llama")


@case(2)
def policy_llama_cp2_with_adapters(ranks: Ranks, folder: Path) -> None:
    steps_are_the_same(ranks, folder, "policy", "llama", cp=2, lora={"rank": 4})


@case(4)
def policy_qwen3_moe_cp2_ep2(ranks: Ranks, folder: Path) -> None:
    steps_are_the_same(ranks, folder, "policy", "qwen3-moe", cp=2, ep=2)


@case(2)
def a_head_that_comes_back_otherwise_on_one_rank_ends_all_by_its_name(ranks: Ranks, folder: Path) -> None:
    write_model(folder, "llama", ranks)
    role = role_in(folder, "critic", join(), ranks)
    sleeper = Sleeper(role.part, StatusBoard("critic"))
    sleeper.fall_asleep()
    backup = sleeper._backup
    if ranks.rank == 0:  # it holds the head's only row
        victim = next(block for block in backup._asleep if block.name == "head.weight")
        backup._bytes_of(victim)[3] ^= 64
    try:
        sleeper.wake_up()
        raise AssertionError("nobody noticed")
    except ContractError as error:
        assert str(error) == "critic woke with other numbers than it went to sleep with: rank 0: head.weight", error


@case(2)
def a_group_that_sleeps_says_so_and_its_grids_and_checkpoints_wait(ranks: Ranks, folder: Path) -> None:
    """Scenario: asked over HTTP to sleep twice, for a checkpoint, to wake twice, for a checkpoint."""
    write_model(folder, "llama", ranks)
    role = role_in(folder, "policy", join(), ranks)
    board, told = StatusBoard("policy"), list[Any]()

    def ask(url: str) -> None:
        told.extend(post(f"{url}/sleep", {}) for _ in range(2))
        told.append((get(f"{url}/status") or {})["state"])
        told.append(post(f"{url}/checkpoint", {"step": 0}))
        told.extend(post(f"{url}/wake_up", {}) for _ in range(2))
        told.append(post(f"{url}/checkpoint", {"step": 0}))

    before, num_bytes = role.local(), resident_bytes(role)
    saver, sleeper = Saver(role.part, board, folder), Sleeper(role.part, board)
    serve(role, ranks, board, folder, ask, saver=saver, sleeper=sleeper)
    if ranks.rank == 0:
        asleep, again, state, refused, awake, still, written = told
        assert asleep[0] == 200 and asleep[1]["state"] == "asleep" and asleep[1]["num_bytes"] == num_bytes
        assert again == (200, again[1]) and again[1]["state"] == "asleep" and again[1]["num_bytes"] == 0
        assert state == "asleep"
        assert refused == (409, {"error": "asleep: nothing is in memory to write; POST /wake_up first"})
        assert awake[1]["state"] == "idle" and awake[1]["num_bytes"] == num_bytes
        assert still[1]["state"] == "idle" and still[1]["num_bytes"] == 0
        assert written[0] == 200
    ranks.all_true(True)
    assert same(role.local(), before)
