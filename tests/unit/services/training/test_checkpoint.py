"""A role's part of a commit, written and read by one process; tests/processes/cases/checkpoints.py has the groups."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from services.config.context import RunContext
from services.config.train import OptimConfig
from services.model.head import ValueHead
from services.model.mesh import Mesh
from services.runtime.commits import Commits
from services.runtime.manifests import write_manifest
from services.training.assemble import resume
from services.training.board import StatusBoard
from services.training.checkpoint import STATE, SavedState, load, save
from services.training.optimizer import Optimizer
from services.training.parts import Part
from services.training.ranks import Ranks
from services.wire.errors import CannotWrite, CommitError, ConfigError, DamagedCommit

POINTS = [-1.0, 0.0, 1.0]
X = torch.tensor([1.0, -2.0, 0.5])


class Net(nn.Module):
    """A body, a part that may be frozen, and a value head with points."""

    def __init__(self, *, width: int = 4, points: list[float] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.body = nn.Linear(3, width)
            self.still = nn.Linear(width, width)
        self.head = ValueHead(width, init_std=0.5, seed=1, points=points or POINTS)

    def forward(self) -> torch.Tensor:
        return self.head(self.still(self.body(X).tanh()))


@dataclass
class Role:
    net: Net
    part: Part

    def step(self) -> float:
        """One update towards 1; the gradient's norm."""
        from tests.unit.services.training.test_optimizer import micro_batch

        result = self.part.optimizer.update([micro_batch()], lambda _: ((self.net() - 1).square(), {}))
        assert result.applied
        return result.grad_norm

    def bytes_of(self) -> dict[str, bytes]:
        """Everything that training changes."""
        state = self.part.optimizer.state_dict()
        own = {name: tensor.numpy().tobytes() for name, tensor in self.net.state_dict().items()}
        for name, entry in state.pop("moments").items():
            own[f"{name} moments"] = b"".join(entry[key].numpy().tobytes() for key in ("exp_avg", "exp_avg_sq"))
            own[f"{name} steps"] = str(entry["num_steps"]).encode()
        return own | {"counters": json.dumps(state).encode()}


def role_of(*, frozen: bool = False, offload: bool = False, role: Any = "critic", **shape: Any) -> Role:
    net = Net(**shape)
    net.still.requires_grad_(not frozen)
    optimizer = Optimizer(net, OptimConfig(lr=0.1, offload=offload), Ranks(), warmup_updates=5)
    return Role(net, Part(role, net, optimizer, Mesh(), Ranks()))


def commit(folder: Path, role: Role, *, steps_done: int = 2) -> Path:
    save(folder, role.part, steps_done=steps_done)
    write_manifest(folder, {})
    return folder


def rewrite_state(folder: Path, **changes: Any) -> None:
    """Another `state.json`, and a manifest that agrees with it."""
    state = json.loads((folder / STATE).read_bytes())
    (folder / STATE).write_text(json.dumps(state | changes))
    write_manifest(folder, {})


@pytest.mark.parametrize("frozen", [False, True], ids=["all of it", "a part frozen"])
@pytest.mark.parametrize("offload", [False, True], ids=["beside", "in host memory"])
def test_two_steps_saved_and_two_more_are_four_steps(tmp_path: Path, frozen: bool, offload: bool) -> None:
    """Bit for bit: weights, moments, counts, rates and norms; what never trains has no moments, and is saved."""
    plain, first, second = (role_of(frozen=frozen, offload=offload) for _ in range(3))
    with torch.no_grad():
        for role in (plain, first):  # frozen numbers that no fresh object has
            role.net.still.bias.fill_(0.25)
    norms = [plain.step() for _ in range(4)]
    for _ in range(2):
        first.step()
    state = load(commit(tmp_path / "critic", first), second.part, seed=0)
    assert second.bytes_of() == first.bytes_of()
    assert second.part.optimizer.lr == first.part.optimizer.lr == 0.1 * 3 / 5
    assert [second.step() for _ in range(2)] == norms[2:]
    assert second.bytes_of() == plain.bytes_of()
    assert ("still.weight" in state.num_steps) is not frozen and "still.weight" in state.parameters


def test_offload_may_come_and_go(tmp_path: Path) -> None:
    first, second = role_of(), role_of(offload=True)
    first.step()
    load(commit(tmp_path / "critic", first), second.part, seed=0)
    assert second.step() == first.step() and second.bytes_of() == first.bytes_of()


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        role = role_of()
        torch.manual_seed(7)
        torch.rand(5)
        path = commit(tmp_path / "critic", role)
        expected = torch.rand(3)
        torch.manual_seed(8)
        load(path, role_of().part, seed=0)
        assert torch.equal(torch.rand(3), expected)


def test_state_json_says_what_is_there_without_torch(tmp_path: Path) -> None:
    role = role_of(frozen=True)
    role.step()
    path = commit(tmp_path / "critic", role, steps_done=9)
    state = msgspec.json.decode((path / STATE).read_bytes(), type=SavedState)
    assert (state.role, state.steps_done, state.num_updates, state.skipped_in_a_row) == ("critic", 9, 1, 0)
    assert (state.layout.size, state.layout.cp, state.layout.ep) == (1, 1, 1)
    assert {name: spec.shape for name, spec in state.parameters.items()} == {
        "body.weight": [4, 3],
        "body.bias": [4],
        "still.weight": [4, 4],
        "still.bias": [4],
        "head.weight": [3, 4],
        "head.bias": [3],
    }
    assert {name: spec.shape for name, spec in state.buffers.items()} == {"head.points": [3]}
    assert state.num_steps == {"body.weight": 1, "body.bias": 1, "head.weight": 1, "head.bias": 1}
    files = json.loads((path / "manifest.json").read_bytes())["files"]
    assert set(files) == {".metadata", "__0_0.distcp", "state.json"}


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and leaves everything as it was


def assert_refused(path: Path, role: Role, error: type[Exception], *words: str) -> None:
    before = role.bytes_of()
    with pytest.raises(error) as refusal:
        load(path, role.part, seed=0)
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert role.bytes_of() == before


def saved(folder: Path, **settings: Any) -> Path:
    role = role_of(**settings)
    role.step()
    return commit(folder / "critic", role)


def test_another_shape_is_refused_with_both(tmp_path: Path) -> None:
    words = ("body.weight: float32 [4, 3] in the checkpoint, float32 [5, 3] here", "head.weight: float32 [3, 4]")
    assert_refused(saved(tmp_path), role_of(width=5), ConfigError, *words)


def test_other_points_are_refused_with_both(tmp_path: Path) -> None:
    """As many, but elsewhere: no shape tells."""
    words = ("head.points: 3 points from -1 to 1 in the checkpoint, 3 points from 0 to 1 in value.loss",)
    assert_refused(saved(tmp_path), role_of(points=[0.0, 0.5, 1.0]), ConfigError, *words)
    assert_refused(saved(tmp_path), role_of(points=[0.0, 1.0]), ConfigError, "float32 [3] in", "float32 [2] here")


def test_a_missing_head_and_an_unknown_parameter_are_refused_by_name(tmp_path: Path) -> None:
    class Headless(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.head
            self.tail = nn.Linear(4, 1)

        def forward(self) -> torch.Tensor:
            return self.tail(self.still(self.body(X)))[0]

    net = Headless()
    part = Part("critic", net, Optimizer(net, OptimConfig(lr=0.1), Ranks(), warmup_updates=0), Mesh(), Ranks())
    path = commit(tmp_path / "critic", Role(net, part))
    words = ("head.weight: float32 [3, 4] here, missing in the checkpoint", "tail.weight: float32 [1, 4] in the")
    assert_refused(path, role_of(), ConfigError, *words, "head.points")


def test_optimizer_state_that_is_missing_is_no_fresh_one(tmp_path: Path) -> None:
    """C06: a resumed run would silently start with moments of zero."""
    path = saved(tmp_path)
    rewrite_state(path, num_steps={"body.weight": 1, "body.bias": 1, "head.weight": 1, "head.bias": 1, "still.bias": 1})
    word = "still.weight: trains here, the checkpoint has no optimizer state of it"
    assert_refused(path, role_of(), ConfigError, word)


def test_another_choice_of_what_trains_is_refused(tmp_path: Path) -> None:
    assert_refused(saved(tmp_path), role_of(frozen=True), ConfigError, "still.bias: trained in the checkpoint, is")
    assert_refused(saved(tmp_path, frozen=True), role_of(), ConfigError, "still.weight: trains here")


def test_the_other_role_and_another_format_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert_refused(path, role_of(role="policy"), CommitError, "role critic", "role policy")
    rewrite_state(path, format=2)
    assert_refused(path, role_of(), CommitError, "format 2", "format 1")


@pytest.mark.parametrize("name", [".metadata", "state.json", "__0_0.distcp"])
def test_damage_is_named_before_anything_is_unpickled(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path)
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    assert_refused(path, role_of(), DamagedCommit, f"{name} differs from its manifest")
    (path / name).unlink()
    assert_refused(path, role_of(), DamagedCommit, f"{name} is missing")


def test_a_folder_without_a_manifest_or_with_one_that_leaves_metadata_out_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["files"][".metadata"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert_refused(path, role_of(), DamagedCommit, "does not name .metadata")
    (path / "manifest.json").unlink()
    assert_refused(path, role_of(), DamagedCommit, "manifest.json is missing")


def test_metadata_of_another_user_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs this test owns the file; the process says that it is somebody else: only root gives files away."""
    path, owner = saved(tmp_path), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 12345)
    word = f".metadata belongs to user {owner}, not to {owner + 12345}"
    assert_refused(path, role_of(), DamagedCommit, word)


# ---------------------------------------------------------------------------------------------------------------------
# Writing, and taking up


def test_what_an_attempt_left_is_gone(tmp_path: Path) -> None:
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "__3_0.distcp").write_text("of a larger group")
    path = saved(tmp_path)
    assert sorted(file.name for file in path.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json", "state.json"]


def test_a_folder_that_cannot_be_made_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "critic").write_text("a file")
    role, twin = role_of(), role_of()
    with pytest.raises(CannotWrite, match=r"critic: rank 0: .*File exists"):
        save(tmp_path / "critic", role.part, steps_done=0)
    assert role.step() == twin.step() and role.bytes_of() == twin.bytes_of()


def context_of(run_dir: Path, commit_dir: Path | None) -> RunContext:
    return RunContext(
        run_id="run",
        epoch=2,
        dir=str(run_dir),
        model_dir="none",
        inference_urls=[],
        policy_url="http://127.0.0.1:1",
        orchestrator_url="http://127.0.0.1:1",
        policy_grid_url="tcp://127.0.0.1:1",
        commit_dir=None if commit_dir is None else str(commit_dir),
    )


def test_a_group_takes_up_its_part_of_a_commit_and_counts_on(tmp_path: Path) -> None:
    """Scenario: step 12, two of them the critic's alone. Result: each board says what its role did; no lease stays."""
    commits, part_dir = Commits(tmp_path), Commits(tmp_path).begin(12)
    roles = {"critic": role_of(), "policy": role_of(role="policy")}
    for role in roles.values():
        role.step()
    commit(part_dir / "critic", roles["critic"], steps_done=12)
    commit(part_dir / "policy", roles["policy"], steps_done=10)
    (part_dir / "orchestrator").mkdir()
    write_manifest(part_dir / "orchestrator", {})
    commits.commit(12, [*roles, "orchestrator"], run_id="run", epoch=1, identity={})
    for name, steps_done in (("critic", 12), ("policy", 10)):
        fresh, board = role_of(role=name), StatusBoard(name)
        assert not resume(fresh.part, board, context_of(tmp_path, None), seed=0) and board.steps_done == 0
        assert resume(fresh.part, board, context_of(tmp_path, commits.path(12)), seed=0)
        assert fresh.bytes_of() == roles[name].bytes_of()
        assert (board.steps_done, board.snapshot().updates_done) == (steps_done, 1)
    assert not list(commits.path(12).glob(".reader-*"))


def test_a_folder_that_was_never_committed_is_not_taken_up(tmp_path: Path) -> None:
    commit(tmp_path / "step_000012" / "critic", role_of())
    with pytest.raises(CommitError):
        resume(role_of().part, StatusBoard("critic"), context_of(tmp_path, tmp_path / "step_000012"), seed=0)
