"""Checkpoints of a group that cannot be written or read, those asked for over HTTP, and what is published after one."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from policy_trainer.trainer import PolicyTrainer
from services.training.board import StatusBoard
from services.training.checkpoint import load, save
from services.training.ranks import Ranks
from services.training.saver import Saver
from services.wire.errors import CannotWrite, ConfigError, DamagedCommit
from tests.processes.cases import case
from tests.processes.cases.checkpoints import HL_GAUSS, Role, commit, join, role_in, same
from tests.processes.cases.layouts import write_model
from tests.processes.cases.served import serve
from tests.runs import post

# ---------------------------------------------------------------------------------------------------------------------
# What cannot be


@contextmanager
def disk_of(num_bytes: int, *, full: bool):
    """While `full`, no file of this process grows beyond `num_bytes`: the kernel refuses as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@case(2)
def a_rank_that_cannot_write_is_named_on_all_and_the_group_goes_on(ranks: Ranks, folder: Path) -> None:
    write_model(folder, "llama", ranks)
    role, twin = (role_in(folder, "critic", join(), ranks) for _ in range(2))
    for one in (role, twin):
        one.step()
    for broken in (1, 0):
        try:
            with disk_of(4096, full=ranks.rank == broken):
                save(folder / "commit", role.part, steps_done=1)
            raise AssertionError("it was written")
        except CannotWrite as error:
            told = str(error)
        assert f"commit: rank {broken}: " in told and f"rank {1 - broken}" not in told, told
        ranks.all_true(True)
        assert not (folder / "commit").exists()
    fresh = role_in(folder, "critic", join(), ranks)
    load(commit(folder / "commit", role), fresh.part, seed=1)
    assert fresh.step() == role.step() == twin.step()
    assert same(fresh.local(), twin.local())


@case(2)
def what_is_damaged_or_of_another_model_changes_nothing_on_any_rank(ranks: Ranks, folder: Path) -> None:
    write_model(folder, "llama", ranks)
    saved = role_in(folder, "critic", join(), ranks)
    saved.step()
    path = commit(folder / "commit", saved)

    def refused(other: Role, error: type[Exception], *words: str) -> None:
        before = other.local()
        try:
            load(path, other.part, seed=1)
            raise AssertionError("it was loaded")
        except error as refusal:
            assert all(word in str(refusal) for word in words), refusal
        assert same(other.local(), before)

    other_head = role_in(folder, "critic", join(), ranks, loss=HL_GAUSS)
    refused(other_head, ConfigError, "head.weight: float32 [1, 32] in the checkpoint, float32 [7, 32] here")
    frozen = role_in(folder, "critic", join(), ranks, freeze=["mlp"])
    refused(frozen, ConfigError, "mlp.up_proj.weight: trained in the checkpoint, is frozen here")
    fresh = role_in(folder, "critic", join(), ranks)
    if ranks.rank == 0:  # a bit of what rank 1 wrote
        (victim,) = path.glob("__1_*")
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    ranks.all_true(True)
    refused(fresh, DamagedCommit, "__1_0.distcp")


# ---------------------------------------------------------------------------------------------------------------------
# The route


@case(2)
def the_route_answers_when_all_ranks_have_written_and_refuses_another_step(ranks: Ranks, folder: Path) -> None:
    """Scenario: the group has done 2 steps of its own after 3 that it had no grid in. Result: a checkpoint of step 5
    only; where rank 1 cannot write 507, and the group still answers."""
    write_model(folder, "llama", ranks)
    role = role_in(folder, "policy", join(), ranks)
    for _ in range(2):
        role.step()
    board = StatusBoard("policy")
    board.progress(steps_done=2)
    saver = Saver(role.part, board, folder, steps_before=3)
    told = list[Any]()

    def ask(url: str) -> None:
        told.append(post(f"{url}/checkpoint", b"{"))
        told.append(post(f"{url}/checkpoint", {"step": -1}))
        told.append(post(f"{url}/checkpoint", {"step": 4}))
        told.append(post(f"{url}/checkpoint", {"step": 5}))
        (folder / "checkpoints" / ".step_000005.part" / "policy").rename(folder / "kept")
        (folder / "checkpoints" / ".step_000005.part" / "policy").write_text("a file, where a folder should be")
        told.append(post(f"{url}/checkpoint", {"step": 5}))

    serve(role, ranks, board, folder, ask, saver=saver)
    if ranks.rank == 0:
        assert [status for status, _ in told] == [400, 422, 409, 200, 507], told
        assert told[2][1] == {"error": "policy has finished 2 steps: this is not step 4"}
        written = sum(file.stat().st_size for file in (folder / "kept").iterdir())
        assert told[3][1] == {"step": 5, "role": "policy", "num_bytes": written}
        assert "cannot write" in told[4][1]["error"]
    ranks.all_true(True)
    before = role.local()
    fresh = role_in(folder, "policy", join(), ranks)
    assert load(folder / "kept", fresh.part, seed=1).steps_done == 2
    assert same(fresh.local(), before)


@case(2)
def the_policy_publishes_the_committed_version_and_forgets_what_ran_ahead(ranks: Ranks, folder: Path) -> None:
    write_model(folder, "qwen3-moe", ranks)
    role = role_in(folder, "policy", join(ep=2), ranks)
    assert isinstance(role.trainer, PolicyTrainer)
    for step in range(3):
        role.step()
        role.trainer.after_step(step)
        if step == 1:
            commit(folder / "commit", role)
    weights = folder / "weights"
    committed = (weights / "v000002" / "model.safetensors").read_bytes() if ranks.rank == 0 else b""
    ranks.all_true(True)
    if ranks.rank == 0:
        (weights / "v000002" / "model.safetensors").write_bytes(committed[:-1])  # damaged
    fresh = role_in(folder, "policy", join(ep=2), ranks)
    assert isinstance(fresh.trainer, PolicyTrainer)
    fresh.trainer.publish_again(load(folder / "commit", fresh.part, seed=1).steps_done)
    if ranks.rank == 0:
        assert sorted(path.name for path in weights.iterdir()) == ["v000001", "v000002"]
        assert (weights / "v000002" / "model.safetensors").read_bytes() == committed
        assert fresh.board.snapshot().published == {"version": 2, "path": str(weights / "v000002")}
    ranks.all_true(True)
