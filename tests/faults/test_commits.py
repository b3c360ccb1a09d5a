"""Commits under fire: processes killed at every point, power cuts, full disks, slow file systems, readers that die."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.runtime import commits as commits_module
from services.runtime import manifests as manifests_module
from services.runtime.commits import Commits
from services.runtime.faults import FAULT_VARIABLE
from services.runtime.manifests import write_manifest
from services.wire.errors import CannotWrite, CommitError, DamagedCommit
from tests.commits import FILES, ROLES, assert_whole, content, hidden, make_commit, write_role
from tests.faults import commit_child
from tests.faults.power_cuts import Disk

ROOT = Path(__file__).parents[2]
MARGIN_S = 5.0

BEFORE = [
    *("shard:half", "shard:half@3", "shard:half@5"),
    *("policy:before-manifest", "critic:before-manifest"),
    *("manifest.json:written", "manifest.json:flushed", "manifest.json:renamed", "manifest.json:written@3"),
    *("roles:between", "roles:between@2", "roles:between@3"),
    *("commit:before-marker", "COMMIT.json:written", "COMMIT.json:flushed", "COMMIT.json:renamed"),
    "commit:before-rename",
]
AFTER = ["step_000004:renamed", "remove:marked", "remove:hidden", "remove:halfway", "remove:halfway@3"]
AFTER += ["remove:marked@2", "remove:hidden@2", "remove:halfway@4"]
REPLACING = ["COMMIT.json:renamed", "remove:marked", "remove:hidden", "commit:before-rename", "step_000003:renamed"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def child(folder: Path, *args: int | str, fault: str | None = None) -> subprocess.CompletedProcess[str]:
    """`commit_child.py`, to its end."""
    env = {key: value for key, value in os.environ.items() if key != FAULT_VARIABLE} | {"PYTHONPATH": str(ROOT)}
    if fault is not None:
        env[FAULT_VARIABLE] = f"{fault}:kill"
    command = [sys.executable, "-m", "tests.faults.commit_child", str(folder), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def assert_only_whole_commits(folder: Path) -> Commits:
    """Whatever a reader is offered is one commit from top to bottom."""
    commits = Commits(folder)
    for step in commits.steps():
        assert_whole(commits.load(step))
    return commits


# ---------------------------------------------------------------------------------------------------------------------
# F30: kill -9


@pytest.mark.parametrize("fault", [*BEFORE, *AFTER])
def test_after_a_kill_anywhere_there_is_the_old_commit_or_the_new_one_whole(folder: Path, fault: str) -> None:
    """Steps 1 to 3 lie there; a process commits step 4, then keeps the last two. It dies; the next one finishes."""
    for step in (1, 2, 3):
        make_commit(Commits(folder), step)
    died = child(folder, 4, 1, 2, fault=fault)
    assert died.returncode == -9, (died.returncode, died.stderr)
    assert f"injected fault at {fault.partition('@')[0]}: SIGKILL" in died.stderr

    found = assert_only_whole_commits(folder).newest(allow_fallback=False)
    assert found is not None and found.step == (4 if fault in AFTER else 3)

    commit_child.main(folder, 4, 2, 2)
    commits = assert_only_whole_commits(folder)
    assert commits.steps() == [4, 3] and commits.load(4).epoch == 2
    assert hidden(folder) == [] and sorted(os.listdir(folder)) == ["step_000003", "step_000004"]


@pytest.mark.parametrize("fault", REPLACING)
def test_a_kill_while_a_commit_is_replaced_leaves_the_old_one_the_new_one_or_the_one_before(
    folder: Path, fault: str
) -> None:
    """Step 3 is committed again by a later epoch: the old one is out of sight before the new one is in."""
    for step in (2, 3):
        make_commit(Commits(folder), step)
    died = child(folder, 3, 2, 2, fault=fault)
    assert died.returncode == -9, died.stderr
    found = assert_only_whole_commits(folder).newest(allow_fallback=False)
    gone = fault in ("remove:hidden", "commit:before-rename")
    marked = fault == "remove:marked"
    expected = (2, 1) if gone or marked else (3, 2) if fault == "step_000003:renamed" else (3, 1)
    assert found is not None and (found.step, found.epoch) == expected
    Commits(folder).sweep()
    assert hidden(folder) == []
    assert Commits(folder).steps() == ([2] if gone else [3, 2])


def test_the_very_first_commit_is_there_or_not(folder: Path) -> None:
    assert child(folder, 1, 1, 2, fault="commit:before-rename").returncode == -9
    assert Commits(folder).newest(allow_fallback=False) is None
    assert child(folder, 1, 1, 2, fault="step_000001:renamed").returncode == -9
    found = Commits(folder).newest(allow_fallback=False)
    assert found is not None
    assert_whole(found)


# ---------------------------------------------------------------------------------------------------------------------
# Power cuts


@pytest.fixture
def disk_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Path, Callable[[Path], None]], Disk]]:
    disks: list[Disk] = []

    def watched(root: Path, check: Callable[[Path], None]) -> Disk:
        disk = Disk(root, check, tmp_path / "after-power-cuts")
        disk.watch(monkeypatch)
        disks.append(disk)
        return disk

    yield watched
    monkeypatch.undo()
    for disk in disks:
        disk.close()


def test_no_power_cut_leaves_a_mix_and_none_takes_back_a_commit_that_was_reported(
    folder: Path, disk_at: Callable[[Path, Callable[[Path], None]], Disk]
) -> None:
    """Commit, commit and remove, commit the same step again: all that the disk may hold at any moment is looked at."""
    allowed = {(1, 1)}
    make_commit(Commits(folder), 1)

    def check(copy: Path) -> None:
        found = assert_only_whole_commits(copy).newest(allow_fallback=False)
        assert found is not None and (found.step, found.epoch) in allowed

    disk = disk_at(folder, check)
    commits = Commits(folder)
    for step, epoch in ((2, 1), (3, 1), (3, 2)):
        allowed.add((step, epoch))
        make_commit(commits, step, epoch=epoch)
        allowed.clear()
        allowed.add((step, epoch))
        disk.promised()
        commits.prune(keep_last=2)
        allowed.add((2, 1))  # while step 3 is replaced
    disk.promised()
    assert disk.num_states > 100, disk.num_states


def test_a_first_commit_survives_with_the_folder_it_lies_in(
    tmp_path: Path, disk_at: Callable[[Path, Callable[[Path], None]], Disk]
) -> None:
    run_dir, reported = tmp_path / "run", []
    run_dir.mkdir()

    def check(copy: Path) -> None:
        found = Commits(copy / "checkpoints").newest(allow_fallback=False)
        assert found is not None or not reported
        if found is not None:
            assert_whole(found)

    disk = disk_at(run_dir, check)
    reported.append(make_commit(Commits(run_dir / "checkpoints"), 1))
    disk.promised()


def test_the_picture_of_a_power_cut_shows_what_carelessness_does(
    folder: Path, disk_at: Callable[[Path, Callable[[Path], None]], Disk]
) -> None:
    """Control: the same files, renamed into place without being flushed, are found damaged."""
    whole = make_commit(Commits(folder), 1).folder
    disk_at(folder, lambda copy: assert_only_whole_commits(copy).newest(allow_fallback=False))
    shutil.copytree(whole, folder / ".careless")
    with pytest.raises(DamagedCommit):
        (folder / ".careless").rename(folder / "step_000002")


# ---------------------------------------------------------------------------------------------------------------------
# F29: full disks and too large files


@pytest.fixture
def fill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], None]:
    """From a fault point on, once: whoever writes the file finds the disk full, for it leads to the device that is."""

    def arm(name: str, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # what `write_atomic` writes first

        def at_point(reached: str) -> None:
            if reached == name:
                temporary.symlink_to("/dev/full")
                monkeypatch.undo()

        for module in (commits_module, manifests_module):
            monkeypatch.setattr(module, "point", at_point)

    return arm


def roles_written(commits: Commits, step: int) -> None:
    part = commits.begin(step)
    for role in ROLES:
        write_role(part / role, step, 1)


def test_a_full_disk_costs_the_new_commit_and_never_the_old_one(
    folder: Path, fill_at: Callable[[str, Path], None]
) -> None:
    """In a shard, in a manifest, in COMMIT.json; with room again the next attempt goes through."""
    commits = Commits(folder)
    make_commit(commits, 1)

    part = commits.begin(2)
    (part / "policy").mkdir()
    (part / "policy" / "rank1.bin").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):  # the role's own write: its orchestrator gives up
        write_role(part / "policy", 2, 1)
    commits.abandon(2)

    part = commits.begin(2)
    (part / "policy").mkdir()
    (part / "policy" / "rank0.bin").write_bytes(b"x")
    fill_at("policy:before-manifest", part / "policy" / "manifest.json")
    with pytest.raises(CannotWrite, match=r"manifest\.json: No space left"):
        write_manifest(part / "policy", {})
    assert os.listdir(part / "policy") == ["rank0.bin"]
    commits.abandon(2)

    roles_written(commits, 2)
    fill_at("commit:before-marker", part / "COMMIT.json")
    with pytest.raises(CannotWrite, match=r"COMMIT\.json: No space left") as caught:
        commits.commit(2, ROLES, run_id="run", epoch=1, identity={"algorithm": "sao", "step": 2})
    assert caught.value.exit_code == 73
    assert os.listdir(folder) == ["step_000001"]
    assert_whole(commits.load(1))

    assert_whole(make_commit(commits, 2))


def test_a_folder_that_cannot_be_made_is_named(folder: Path) -> None:
    """A link that leads nowhere has its name: no folder can be made of it, whoever tries."""
    commits = Commits(folder)
    make_commit(commits, 1)
    (folder / ".step_000002.part").symlink_to(folder / "nowhere")
    with pytest.raises(CannotWrite, match=r"cannot make .*step_000002\.part: File exists"):
        commits.begin(2)
    assert_whole(commits.load(1))
    assert commits.prune(keep_last=1) == []


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ((700, 0, 0), "a shard of step 2: File too large"),
        ((4000, 5000, 0), "manifest.json: File too large"),
        ((4000, 0, 5000), "COMMIT.json: File too large"),
    ],
    ids=["shard", "manifest", "marker"],
)
def test_two_failures_in_a_row_end_the_run_with_73_and_the_old_commit_stays(
    folder: Path, limits: tuple[int, ...], named: str
) -> None:
    """RLIMIT_FSIZE: no root is needed."""
    make_commit(Commits(folder), 1)
    done = child(folder, 2, 1, 2, *limits)
    assert done.returncode == 73, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and lines[0].startswith("failed 2: ") and lines[1].startswith("failed 3: ")
    assert named in lines[0] and lines[2].startswith("two commits in a row failed: ") and named in lines[2]
    assert "step 2 is not committed, the next one is tried at its time" in done.stderr
    assert os.listdir(folder) == ["step_000001"]
    found = Commits(folder).newest(allow_fallback=False)
    assert found is not None
    assert_whole(found)


# ---------------------------------------------------------------------------------------------------------------------
# F33: slow file systems, and readers


def appear(source: Path, target: Path, *, last: str, after_s: float) -> threading.Thread:
    """Show all of a commit but one file or folder at once, and that one later: half of it first, if it is a file."""
    item = source / last
    aside = source.parent / "aside"
    item.rename(aside)
    source.rename(target)

    def late() -> None:
        time.sleep(after_s / 2)
        if aside.is_file():
            (target / last).write_bytes(aside.read_bytes()[:200])
        time.sleep(after_s / 2)
        aside.rename(target / last)

    thread = threading.Thread(target=late)
    thread.start()
    return thread


@pytest.mark.parametrize("last", ["COMMIT.json", "critic", "policy/manifest.json", "policy/rank1.bin"])
def test_a_reader_waits_for_what_a_slow_file_system_shows_late(folder: Path, last: str) -> None:
    """The folder is there, one file of it is not, then half of it, then it is."""
    commits = Commits(folder)
    made = make_commit(commits, 4)
    made.folder.rename(folder / "elsewhere")
    thread = appear(folder / "elsewhere", made.folder, last=last, after_s=0.6)
    begun = time.monotonic()
    assert_whole(commits.load(4, wait_s=20))
    assert 0.5 < time.monotonic() - begun < MARGIN_S
    thread.join()


def test_a_reader_waits_for_the_folder_itself(folder: Path) -> None:
    commits = Commits(folder)
    made = make_commit(commits, 4)
    made.folder.rename(folder / "elsewhere")
    timer = threading.Timer(0.5, lambda: (folder / "elsewhere").rename(made.folder))
    timer.start()
    assert_whole(commits.load(4, wait_s=20))
    timer.join()


def test_an_orchestrator_waits_for_the_files_of_another_host(folder: Path) -> None:
    commits = Commits(folder)
    roles_written(commits, 4)
    manifest = folder / ".step_000004.part" / "critic" / "manifest.json"
    manifest.rename(folder / "late")
    timer = threading.Timer(0.5, lambda: (folder / "late").rename(manifest))
    timer.start()
    identity = {"algorithm": "sao", "step": 4}
    assert_whole(commits.commit(4, ROLES, run_id="run", epoch=1, identity=identity, wait_s=20))
    timer.join()


@pytest.mark.parametrize("last", ["COMMIT.json", "policy/rank1.bin"])
def test_the_wait_has_an_end_and_names_what_is_missing(folder: Path, last: str) -> None:
    commits = Commits(folder)
    (make_commit(commits, 4).folder / last).unlink()
    begun = time.monotonic()
    with pytest.raises(CommitError, match=f"{last} is missing"):
        commits.load(4, wait_s=0.5)
    assert 0.5 <= time.monotonic() - begun < MARGIN_S


def test_wrong_contents_of_the_right_size_are_not_waited_for(folder: Path) -> None:
    commits = Commits(folder)
    (make_commit(commits, 4).folder / "policy" / "rank0.bin").write_bytes(b"x" * 1000)
    begun = time.monotonic()
    with pytest.raises(DamagedCommit, match=r"policy/rank0\.bin differs"):
        commits.newest(allow_fallback=False, wait_s=60)
    assert time.monotonic() - begun < MARGIN_S


def test_a_commit_stays_while_another_process_reads_it_and_goes_when_that_is_killed(folder: Path) -> None:
    commits = Commits(folder)
    make_commit(commits, 1)
    command = [sys.executable, "-m", "tests.faults.commit_child", str(folder), "hold"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
            for step in (2, 3):
                make_commit(commits, step)
            assert commits.prune(keep_last=1) == [2]
            assert_whole(commits.load(1))
        finally:
            reader.kill()
    assert commits.prune(keep_last=1) == [1]
    assert os.listdir(folder) == ["step_000003"]


def test_readers_and_a_cleaner_that_meet_never_see_a_half_commit(folder: Path) -> None:
    """Four readers of any commit against retention: each reads it to the end, or is told at once that it goes."""
    commits = Commits(folder)
    make_commit(commits, 1)
    wrong: list[BaseException] = []
    over = threading.Event()
    num_read = [0] * 4

    def read(index: int) -> None:
        while not over.is_set():
            for step in reversed(Commits(folder).steps()):  # the oldest first: those that are about to go
                try:
                    with commits.reading(step) as commit:
                        assert_whole(commit)
                        num_read[index] += 1
                except DamagedCommit as error:
                    wrong.append(error)
                except CommitError:
                    continue

    threads = [threading.Thread(target=read, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for step in range(2, 30):
        make_commit(commits, step)
        commits.prune(keep_last=1)
    over.set()
    for thread in threads:
        thread.join()
    assert wrong == [] and min(num_read) > 0
    commits.prune(keep_last=1)
    assert os.listdir(folder) == ["step_000029"]


def test_every_file_of_the_tests_commit_is_described() -> None:
    """Of the tests' own tool: the points inside a shard are passed once a file."""
    assert sum(len(names) for names in FILES.values()) == 6 and len(content("policy", "rank0.bin", 1, 1)) == 1000
