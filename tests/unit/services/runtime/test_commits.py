"""Commits: whole or refused by name, the newest is found, and retention never takes what somebody needs."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger

from services.runtime import faults, manifests
from services.runtime.commits import Attempts, Commits
from services.runtime.leases import DELETING, reader_lease, readers_of
from services.runtime.manifests import write_manifest
from services.wire.errors import CannotWrite, CommitError, ContractError, DamagedCommit, UsageError
from tests.commits import FILES, ROLES, assert_whole, content, hidden, make_commit, write_role

ALL_FILES = [f"{role}/{name}" for role in ROLES for name in (*FILES[role], "manifest.json")] + ["COMMIT.json"]
SUBSETS = [subset for size in range(1, 4) for subset in itertools.combinations(ROLES, size)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def commits(folder: Path) -> Commits:
    return Commits(folder)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Lines of the log, each beginning with its level."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message).rstrip()), format="{level} {message}")
    yield lines
    logger.remove(sink)


# ---------------------------------------------------------------------------------------------------------------------
# Whole


def test_a_commit_gives_back_what_every_role_wrote(commits: Commits, folder: Path) -> None:
    made = make_commit(commits, 12)
    assert made.folder == folder / "step_000012" and sorted(os.listdir(made.folder)) == sorted([*ROLES, "COMMIT.json"])
    assert hidden(folder) == []
    for found in (made, commits.load(12), commits.newest(allow_fallback=False)):
        assert found == made
        assert_whole(found)
    assert made.role("critic") == folder / "step_000012" / "critic"


def test_sums_are_those_of_the_files(commits: Commits) -> None:
    """The documents are plain JSON: anybody can check them with sha256sum."""
    made = make_commit(commits, 3)
    marker = json.loads((made.folder / "COMMIT.json").read_text())
    assert (marker["format"], marker["step"], marker["epoch"]) == (1, 3, 1)
    for role in ROLES:
        text = (made.folder / role / "manifest.json").read_bytes()
        assert marker["roles"][role] == hashlib.sha256(text).hexdigest()
        files = json.loads(text)["files"]
        assert sorted(files) == sorted(FILES[role])
        for name, entry in files.items():
            data = (made.folder / role / name).read_bytes()
            assert entry == {"size": 1000, "sha256": hashlib.sha256(data).hexdigest()}


def test_a_run_without_a_critic_says_so_when_its_critic_is_asked_for(commits: Commits) -> None:
    """known bug C06: what is missing is an error, never a default."""
    made = make_commit(commits, 1, roles=("policy", "orchestrator"))
    assert_whole(made, roles=("policy", "orchestrator"))
    with pytest.raises(CommitError, match="step_000001 was made without critic: it holds policy, orchestrator"):
        made.role("critic")
    with pytest.raises(CommitError, match="without critic"):
        made.meta("critic")


def test_meta_may_hold_the_big_integers_of_a_generator_and_identity_any_json(commits: Commits) -> None:
    state = {"state": 2**128 - 159, "has_gauss": None, "list": [1, [2.5, "x"]]}
    part = commits.begin(1)
    for role in ("policy", "orchestrator"):
        (part / role).mkdir()
        write_manifest(part / role, state)
    commits.commit(
        1, ("policy", "orchestrator"), run_id="r", epoch=7, identity={"layout": (2, 1), "bins": {10: 1, 9: 2}}
    )
    found = commits.load(1)
    assert found.meta("policy") == state and found.epoch == 7
    assert found.identity == {"layout": [2, 1], "bins": {"10": 1, "9": 2}}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_number_that_is_not_finite_is_stored(commits: Commits, folder: Path, value: float) -> None:
    part = commits.begin(1)
    (part / "policy").mkdir()
    with pytest.raises(ValueError, match="Out of range"):
        write_manifest(part / "policy", {"loss": value})
    for role in ROLES:
        write_role(part / role, 1, 1)
    with pytest.raises(ValueError, match="Out of range"):
        commits.commit(1, ROLES, run_id="run", epoch=1, identity={"gamma": value})
    assert os.listdir(folder) == []


def test_there_is_no_commit_before_the_first(commits: Commits) -> None:
    assert commits.newest(allow_fallback=False) is None and commits.steps() == []
    commits.sweep()
    assert commits.prune(keep_last=1) == []
    with pytest.raises(CommitError, match="step_000007 does not exist"):
        commits.load(7)


def test_a_role_s_files_are_on_disk_before_its_manifest_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host may be another one than the orchestrator's, which cannot flush what lies in that host's memory."""
    flushed: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        flushed.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path / "policy"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_role(tmp_path / "policy", 1, 1)
    (manifest,) = [index for index, name in enumerate(flushed) if name.startswith(".manifest.json")]
    assert sorted(flushed[:manifest]) == sorted([*FILES["policy"], ".", "optim", "optim/deep"])
    assert flushed[manifest + 1 :] == ["."]


def test_many_files_are_hashed_and_a_long_time_is_reported(
    commits: Commits, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "_PROGRESS_S", 0.0)
    part = commits.begin(1)
    for role in ROLES:
        write_role(part / role, 1, 1)
    for index in range(40):
        (part / "policy" / f"shard{index}.bin").write_bytes(os.urandom(200_000))
    write_manifest(part / "policy", {"step": 1, "epoch": 1})
    made = commits.commit(1, ROLES, run_id="run", epoch=1, identity={"algorithm": "sao", "step": 1})
    assert len(made.roles["policy"].files) == 43
    assert_whole(commits.load(1))
    assert any("hashing policy of a commit:" in line for line in log)
    assert any("hashing policy of step 1:" in line and "files to go" in line for line in log)


# ---------------------------------------------------------------------------------------------------------------------
# What is no commit


@pytest.mark.parametrize("written", [subset for subset in SUBSETS if len(subset) < 3], ids="+".join)
def test_a_role_that_wrote_nothing_means_no_commit(commits: Commits, folder: Path, written: tuple[str, ...]) -> None:
    """F32, before the commit: the roles that are missing are refused by name, and nothing is left."""
    part = commits.begin(5)
    for role in written:
        write_role(part / role, 5, 1)
    first = next(role for role in ROLES if role not in written)
    with pytest.raises(DamagedCommit, match=f"{first}/manifest.json is missing"):
        commits.commit(5, ROLES, run_id="run", epoch=1, identity={})
    assert os.listdir(folder) == [] and commits.newest(allow_fallback=False) is None


@pytest.mark.parametrize("deleted", SUBSETS, ids="+".join)
def test_a_role_that_is_deleted_later_is_damage(commits: Commits, deleted: tuple[str, ...]) -> None:
    """F32, after the commit."""
    made = make_commit(commits, 5)
    for role in deleted:
        shutil.rmtree(made.folder / role)
    with pytest.raises(DamagedCommit, match=f"{deleted[0]}/manifest.json is missing"):
        commits.newest(allow_fallback=False)


def test_roles_that_make_no_commit_are_refused(commits: Commits) -> None:
    commits.begin(1)
    for roles in (("policy",), ("critic", "orchestrator"), ("policy", "orchestrator", "reference"), ()):
        with pytest.raises(ValueError, match="policy, orchestrator and maybe critic"):
            commits.commit(1, roles, run_id="run", epoch=1, identity={})


def test_a_critic_that_wrote_but_is_not_named_is_refused(commits: Commits) -> None:
    """known bug C07: a role's state must not be lost because somebody forgot it."""
    part = commits.begin(1)
    for role in ROLES:
        write_role(part / role, 1, 1)
    with pytest.raises(DamagedCommit, match="critic belongs to none of policy, orchestrator"):
        commits.commit(1, ("policy", "orchestrator"), run_id="run", epoch=1, identity={})


def test_a_file_that_comes_after_its_manifest_is_refused(commits: Commits) -> None:
    """A rank that is still writing; what a network file system keeps of an open file is none."""
    for name, refused in (("late.bin", True), (".nfs0001", False)):
        part = commits.begin(1)
        for role in ROLES:
            write_role(part / role, 1, 1)
        (part / "critic" / "optim" / name).write_bytes(b"x")
        expectation = pytest.raises(DamagedCommit, match=f"optim/{name} is not in its manifest")
        with expectation if refused else contextlib.nullcontext():
            commits.commit(1, ROLES, run_id="run", epoch=1, identity={})


def test_a_file_that_shrinks_after_its_manifest_is_refused(commits: Commits) -> None:
    part = commits.begin(1)
    for role in ROLES:
        write_role(part / role, 1, 1)
    (part / "policy" / "rank1.bin").write_bytes(b"x" * 999)
    with pytest.raises(DamagedCommit, match=r"rank1.bin has 999 bytes, not the 1000"):
        commits.commit(1, ROLES, run_id="run", epoch=1, identity={})


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_link_out_of_a_commit_is_refused(tmp_path: Path, kind: str) -> None:
    target, role = tmp_path / "elsewhere", tmp_path / "policy"
    target.write_text("x") if kind == "file" else target.mkdir()
    role.mkdir()
    (role / "link").symlink_to(target)
    with pytest.raises(ContractError, match="link is no file of its own"):
        write_manifest(role, {})


def test_a_folder_without_a_marker_is_passed_over_with_one_warning(commits: Commits, log: list[str]) -> None:
    make_commit(commits, 1)
    (make_commit(commits, 2).folder / "COMMIT.json").unlink()
    for _ in range(3):
        found = commits.newest(allow_fallback=False)
    assert found is not None and found.step == 1
    assert len([line for line in log if "step_000002 has no COMMIT.json: it is not a commit" in line]) == 1
    with pytest.raises(CommitError, match=r"step_000002 is no commit: COMMIT.json is missing"):
        commits.load(2)


def test_names_that_only_look_alike_are_no_commits(commits: Commits, folder: Path) -> None:
    made = make_commit(commits, 1)
    for name in ("step_12", "step_000012.old", "step_x", "xstep_000012"):
        shutil.copytree(made.folder, folder / name)
    assert commits.steps() == [1]
    make_commit(commits, 1_234_567)
    assert commits.steps() == [1_234_567, 1]


# ---------------------------------------------------------------------------------------------------------------------
# Damage


@pytest.mark.parametrize("name", ALL_FILES)
def test_one_flipped_bit_anywhere_is_refused_by_name(commits: Commits, name: str) -> None:
    """F31: the first, the middle and the last byte of each file."""
    path = make_commit(commits, 4).folder / name
    data = path.read_bytes()
    for index in (0, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
        with pytest.raises(DamagedCommit, match=str(path)):
            commits.load(4)
    path.write_bytes(data)
    assert_whole(commits.load(4))


def test_every_byte_of_the_marker_counts(commits: Commits) -> None:
    """What a flipped bit leaves is refused or, between the values, read as the same commit."""
    made = make_commit(commits, 4)
    path = made.folder / "COMMIT.json"
    data, refused = path.read_bytes(), 0
    for index, bit in itertools.product(range(len(data)), (0, 5)):
        path.write_bytes(data[:index] + bytes([data[index] ^ (1 << bit)]) + data[index + 1 :])
        try:
            assert commits.load(4) == made
        except DamagedCommit:
            refused += 1
    assert refused > 1.9 * len(data.replace(b" ", b"").replace(b"\n", b""))


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("how", ["truncated", "empty", "longer", "deleted"])
def test_a_file_of_another_length_is_refused_by_name(commits: Commits, name: str, how: str) -> None:
    """F31; a commit whose marker was deleted is none, which is an error too where it was asked for."""
    path = make_commit(commits, 4).folder / name
    data = path.read_bytes()
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes({"truncated": data[:-1], "empty": b"", "longer": data + b"\0"}[how])
    with pytest.raises(CommitError if name == "COMMIT.json" else DamagedCommit, match=name):
        commits.load(4)


def test_a_commit_under_another_step_s_name_is_refused(commits: Commits) -> None:
    made = make_commit(commits, 4)
    made.folder.rename(commits.path(6))
    with pytest.raises(DamagedCommit, match=r"step_000006/COMMIT.json is of step 4"):
        commits.newest(allow_fallback=False)


def test_a_manifest_of_another_commit_is_refused(commits: Commits) -> None:
    """A mix of two whole commits is no commit."""
    old, new = make_commit(commits, 4), make_commit(commits, 6)
    shutil.rmtree(new.role("critic"))
    shutil.copytree(old.role("critic"), new.role("critic"))
    with pytest.raises(DamagedCommit, match=r"step_000006/critic/manifest.json differs from what was committed"):
        commits.load(6)


def test_a_manifest_cannot_point_outside_its_folder(commits: Commits) -> None:
    part = commits.begin(1)
    for role in ROLES:
        write_role(part / role, 1, 1)
    path = part / "policy" / "manifest.json"
    for name in ("../critic/rank0.bin", "/etc/hostname"):
        manifest = json.loads(path.read_text())
        manifest["files"] = {name: {"size": 1000, "sha256": "0"}}
        path.write_text(json.dumps(manifest))
        with pytest.raises(DamagedCommit, match=r"names '.*', which is outside its folder"):
            manifests.survey(part / "policy", None)


def test_another_format_is_refused_and_never_fallen_back_from(commits: Commits) -> None:
    make_commit(commits, 4)
    path = make_commit(commits, 6).folder / "COMMIT.json"
    body = json.loads(path.read_text()) | {"format": 2}
    del body["sha256"]
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(body))
    for allow_fallback in (False, True):
        with pytest.raises(CommitError, match="has format 2; this version reads 1") as caught:
            commits.newest(allow_fallback=allow_fallback)
        assert not isinstance(caught.value, DamagedCommit)


def test_damage_is_an_error_unless_a_fallback_is_allowed_and_then_it_is_loud(commits: Commits, log: list[str]) -> None:
    for step in (2, 4, 6):
        make_commit(commits, step)
    for step in (4, 6):
        (commits.path(step) / "policy" / "rank0.bin").write_bytes(b"x" * 1000)
    with pytest.raises(DamagedCommit, match=r"step_000006/policy/rank0.bin differs.*--allow-fallback"):
        commits.newest(allow_fallback=False)
    found = commits.newest(allow_fallback=True)
    assert found is not None and found.step == 2
    assert_whole(found)
    loud = [line for line in log if line.startswith("WARNING")]
    assert len(loud) == 3 and "step_000006/policy/rank0.bin" in loud[0] and "step_000004/policy" in loud[1]
    assert "FALLING BACK to the commit of step 2" in loud[2] and "step_000006/policy/rank0.bin" in loud[2]


def test_a_run_whose_commits_are_all_damaged_does_not_start_anew(commits: Commits) -> None:
    for step in (2, 4):
        (make_commit(commits, step).folder / "critic" / "manifest.json").unlink()
    with pytest.raises(DamagedCommit, match=r"step_000004/critic/manifest.json is missing; no older commit is whole"):
        commits.newest(allow_fallback=True)


def test_an_unreadable_marker_counts_as_the_newest_so_that_nobody_passes_over_it(commits: Commits) -> None:
    for step, epoch in ((2, 1), (4, 1), (3, 2)):
        make_commit(commits, step, epoch=epoch)
    assert commits.steps() == [3, 2]
    (commits.path(2) / "COMMIT.json").write_text("{")
    with pytest.raises(DamagedCommit, match=r"step_000002/COMMIT.json cannot be read"):
        commits.newest(allow_fallback=False)


def test_only_named_roles_are_hashed_but_every_manifest_and_size_is_compared(commits: Commits) -> None:
    """A policy rank need not read the critic."""
    made = make_commit(commits, 4)
    (made.folder / "critic" / "rank0.bin").write_bytes(b"x" * 1000)
    with commits.reading(4, verify=("policy",)) as found:
        assert found == made
    with pytest.raises(DamagedCommit, match=r"critic/rank0.bin differs"), commits.reading(4, verify=("critic",)):
        pass
    (made.folder / "critic" / "rank0.bin").write_bytes(b"x" * 999)
    with pytest.raises(DamagedCommit, match=r"critic/rank0.bin has 999 bytes"), commits.reading(4, verify=()):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# Epochs: what ran ahead of a commit that a new epoch began at is abandoned


def test_the_newest_commit_is_the_newest_epoch_s_not_the_highest_step_s(commits: Commits) -> None:
    for step in (10, 12, 14):
        make_commit(commits, step, epoch=1)
    make_commit(commits, 11, epoch=2)  # resumed from 10
    found = commits.newest(allow_fallback=False)
    assert found is not None and (found.step, found.epoch) == (11, 2)
    assert commits.steps() == [11, 10]


def test_fallback_does_not_return_to_an_abandoned_future(commits: Commits) -> None:
    for step, epoch in ((10, 1), (12, 1), (11, 2)):
        make_commit(commits, step, epoch=epoch)
    (commits.path(11) / "policy" / "rank0.bin").unlink()
    found = commits.newest(allow_fallback=True)
    assert found is not None and found.step == 10


def test_abandoned_commits_are_removed_and_do_not_count_among_the_last(commits: Commits) -> None:
    """Else one good commit and one damaged one of the past would be all that stays."""
    for step, epoch in ((8, 1), (10, 1), (12, 1), (20, 1), (11, 2)):
        make_commit(commits, step, epoch=epoch)
    assert commits.prune(keep_last=2, keep_every=20) == [8, 12, 20]
    assert commits.steps() == [11, 10]


def test_a_step_that_is_committed_again_replaces_the_old_one(commits: Commits, folder: Path) -> None:
    make_commit(commits, 10)
    (make_commit(commits, 12).folder / "critic" / "rank0.bin").write_bytes(b"damaged")
    made = make_commit(commits, 12, epoch=2)
    assert_whole(commits.load(12))
    assert made.epoch == 2 and commits.steps() == [12, 10] and hidden(folder) == []


# ---------------------------------------------------------------------------------------------------------------------
# Retention


def test_the_last_and_every_so_many_stay(commits: Commits) -> None:
    """Removed are the oldest first; 10 and 20 are multiples, 24 and 26 the last two."""
    steps = [2, 4, 10, 12, 20, 22, 24, 26]
    for step in steps:
        make_commit(commits, step)
    assert commits.prune(keep_last=2, keep_every=10, protect=(12,)) == [2, 4, 22]
    assert commits.steps() == [26, 24, 20, 12, 10]
    assert commits.prune(keep_last=1) == [10, 12, 20, 24]
    with pytest.raises(ValueError, match="the newest commit must stay"):
        commits.prune(keep_last=0)
    assert commits.steps() == [26]


def test_a_damaged_marker_is_neither_removed_nor_counted(commits: Commits) -> None:
    for step in (2, 4, 6, 8):
        make_commit(commits, step)
    (commits.path(8) / "COMMIT.json").write_text("{")
    assert commits.prune(keep_last=2) == [2]
    assert commits.steps() == [8, 6, 4]


def test_nobody_removes_what_is_being_read(commits: Commits, log: list[str]) -> None:
    for step in (2, 4, 6):
        make_commit(commits, step)
    with commits.reading(2) as held, commits.reading(2):
        assert commits.prune(keep_last=1) == [4]
        assert_whole(held)
        assert f"process {os.getpid()} on {socket.gethostname()} reads it" in "".join(log)
        with pytest.raises(CannotWrite, match=r"cannot remove .*step_000002: .* reads it"):
            make_commit(commits, 2, epoch=2)
        assert_whole(commits.load(2))
    assert commits.prune(keep_last=1) == [2]
    assert commits.steps() == [6]


def test_a_lease_counts_as_long_as_its_process_lives(commits: Commits) -> None:
    """The same pid with another start time is another process; of other hosts only the lease's age is known."""
    folder = make_commit(commits, 2).folder
    with reader_lease(folder):
        (own,) = folder.glob(".reader-*")
    start, host = own.name.split("-")[2], socket.gethostname()
    (folder / f".reader-{os.getpid()}-{int(start) - 1}-0-{host}").touch()
    (folder / f".reader-{2**22 + 1}-{start}-0-{host}").touch()
    (folder / ".reader-notes.txt").touch()
    assert readers_of(folder) == []
    assert [path.name for path in folder.glob(".reader-*")] == [".reader-notes.txt"]
    foreign = folder / f".reader-1-77-0-other-{host}"
    foreign.touch()
    assert readers_of(folder) == [f"process 1 on other-{host}"]
    os.utime(foreign, (time.time() - 5 * 3600,) * 2)  # a clock that jumped
    assert readers_of(folder) == [f"process 1 on other-{host}"]
    os.utime(foreign, (time.time() - 7 * 3600,) * 2)
    assert readers_of(folder) == [] and not foreign.exists()


def test_a_reader_that_comes_too_late_is_told_so(commits: Commits) -> None:
    """It may not read what is about to go, and a crash in between costs nothing: the next start takes the mark back."""
    make_commit(commits, 2)
    folder = make_commit(commits, 4).folder
    (commits.path(2) / DELETING).touch()
    with pytest.raises(CommitError, match="step_000002 is being removed"):
        commits.load(2)
    assert commits.steps() == [4]
    commits.sweep()
    assert_whole(commits.load(2))
    shutil.rmtree(folder)
    with pytest.raises(CommitError, match="step_000004 does not exist"), reader_lease(folder):
        pass


def test_what_a_crash_left_is_swept_and_commits_are_not(commits: Commits, folder: Path, log: list[str]) -> None:
    make_commit(commits, 2)
    write_role(commits.begin(4) / "policy", 4, 1)
    shutil.copytree(folder / "step_000002", folder / ".step_000001.trash")
    (folder / "notes.txt").touch()
    assert hidden(folder) == [".step_000001.trash", ".step_000004.part", "notes.txt"]
    Commits(folder).sweep()
    assert hidden(folder) == ["notes.txt"] and commits.steps() == [2]
    assert len([line for line in log if line.startswith("WARNING removing") and "a crash left it" in line]) == 2


def test_an_attempt_begins_with_an_empty_folder(commits: Commits) -> None:
    write_role(commits.begin(4) / "policy", 4, 1)
    assert list(commits.begin(4).iterdir()) == []
    commits.abandon(4)
    commits.abandon(4)
    assert not commits.begin(5).with_name(".step_000004.part").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Failures in a row, and fault points


def test_one_failure_is_a_warning_and_two_in_a_row_end_the_run(log: list[str]) -> None:
    attempts = Attempts()
    attempts.failed(20, CannotWrite("no space left"))
    attempts.succeeded()
    attempts.failed(60, CannotWrite("no space at 60"))
    assert len([line for line in log if line.startswith("WARNING step ")]) == 2
    with pytest.raises(
        CannotWrite, match="two commits in a row failed: no space at 60; then at step 80: still"
    ) as error:
        attempts.failed(80, CannotWrite("still none"))
    assert error.value.exit_code == 73


def test_a_fault_point_that_is_not_named_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faults.FAULT_VARIABLE, raising=False)
    faults.point("commit:before-rename")
    for armed in ("commit:before-marker:kill", "commit:before-rename@2:kill"):
        monkeypatch.setenv(faults.FAULT_VARIABLE, armed)
        faults.point("commit:before-rename")


@pytest.mark.parametrize("armed", ["commit:before-rename", "x:stop", ":kill", "x@0:kill", "x@y:kill"])
def test_a_fault_that_nobody_understands_is_refused(monkeypatch: pytest.MonkeyPatch, armed: str) -> None:
    monkeypatch.setenv(faults.FAULT_VARIABLE, armed)
    with pytest.raises(UsageError, match="is not NAME:kill or NAME@N:kill"):
        faults.point("x")


def test_files_made_by_hand_tell_roles_steps_and_epochs_apart() -> None:
    """Of the tests' own tool: a mix would show."""
    keys = itertools.product(((role, name) for role in ROLES for name in FILES[role]), (1, 2), (1, 2))
    made = [content(role, name, step, epoch) for (role, name), step, epoch in keys]
    assert len({*made}) == len(made) == 24 and {*map(len, made)} == {1000}
