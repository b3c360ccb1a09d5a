"""Who is named first: evidence of this start of a run counts, that of an earlier one does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.launch.blame import find_blame
from services.launch.planner import ProcessPlan

VALUE = ProcessPlan("value", ["true"], {}, 2)
INFERENCE = ProcessPlan("inference", ["true"], {}, 1)
KILLED = "failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: python\n"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def test_a_rank_that_torchrun_saw_killed_is_named(tmp_path: Path, logs: Path) -> None:
    (logs / "value.log").write_text(KILLED)
    blame = find_blame(tmp_path, [VALUE], {})
    assert blame is not None and blame.is_primary
    assert (blame.name, blame.cause, blame.exit_code) == ("value-1", "killed by SIGKILL", 69)


def test_a_rank_that_was_killed_in_an_earlier_start_is_not_named_again(tmp_path: Path, logs: Path) -> None:
    """Scenario: a run is resumed after the loss of a rank; torchrun's log goes on where it ended.
    Result: nobody is blamed, until a rank of this start is killed."""
    log = logs / "value.log"
    log.write_text(KILLED)
    starts = {"value": log.stat().st_size}
    assert find_blame(tmp_path, [VALUE], {}, starts) is None
    with log.open("a") as file:
        file.write(KILLED.replace("local_rank: 1", "local_rank: 0"))
    blame = find_blame(tmp_path, [VALUE], {}, starts)
    assert blame is not None and blame.name == "value-0"


def test_the_last_words_of_an_earlier_start_are_not_taken_for_those_of_this_one(tmp_path: Path, logs: Path) -> None:
    log = logs / "inference.log"
    log.write_text("ends normally\n")
    starts = {"inference": log.stat().st_size}
    blame = find_blame(tmp_path, [INFERENCE], {"inference": 1}, starts)
    assert blame is not None and blame.cause == "ended with code 1: no output"
    with log.open("a") as file:
        file.write("no such module\n")
    blame = find_blame(tmp_path, [INFERENCE], {"inference": 1}, starts)
    assert blame is not None and blame.cause == "ended with code 1: no such module"


def test_of_a_group_whose_ranks_could_not_even_start_the_error_is_told_and_not_the_report_around_it(
    tmp_path: Path, logs: Path
) -> None:
    report = [
        "Traceback (most recent call last):",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    ]
    lines = ["Traceback (most recent call last):", "ImportError: cannot import name 'x'", *report, "=" * 60]
    (logs / "value.log").write_text("\n".join(lines) + "\n")
    blame = find_blame(tmp_path, [VALUE], {"value": 1})
    assert blame is not None and blame.cause == "ended with code 1: ImportError: cannot import name 'x'"


# ---------------------------------------------------------------- groups that span nodes of a job

SPREAD = ProcessPlan("policy", ["true"], {}, 4, nodes=[0, 1])


def test_a_local_rank_of_the_second_node_is_counted_after_those_of_the_first(tmp_path: Path, logs: Path) -> None:
    """srun puts the node's number before each line; torchrun counts on each node from 0."""
    (logs / "policy.log").write_text(
        "1: E1130 00:49:59 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 7) of x\n"
    )
    blame = find_blame(tmp_path, [SPREAD], {})
    assert blame is not None and (blame.name, blame.cause) == ("policy-3", "killed by SIGKILL")
    table = "1:   rank      : 2 (local_rank: 0)\n1:   exitcode  : -11 (pid: 24488)  (SIGSEGV)\n"
    (logs / "policy.log").write_text(table)
    blame = find_blame(tmp_path, [SPREAD], {})
    assert blame is not None and (blame.name, blame.cause) == ("policy-2", "killed by SIGSEGV")


def test_what_srun_says_about_a_step_is_not_why_it_ended(tmp_path: Path, logs: Path) -> None:
    log = "0: ValueError: no such GPU\nsrun: error: n1: task 0: Exited with exit code 1\nslurmstepd: error: STEP 1.0\n"
    (logs / "inference.log").write_text(log)
    blame = find_blame(tmp_path, [INFERENCE], {"inference": 1})
    assert blame is not None and blame.cause == "ended with code 1: ValueError: no such GPU"


def test_slurms_kill_of_the_other_node_does_not_hide_the_rank_that_failed(tmp_path: Path, logs: Path) -> None:
    """Scenario: a rank on one node says why it fails, and SLURM kills the tasks of the other node.
    Result: the step's code is that of the kill; the rank's own is the run's."""
    folder = logs / "failures"
    folder.mkdir()
    record = {
        "name": "policy-1",
        "pid": 7,
        "exit_code": 78,
        "cause": "ConfigError: x",
        "time_s": 1.0,
        "secondary": False,
    }
    (folder / "policy-1.json").write_text(json.dumps(record))
    blame = find_blame(tmp_path, [SPREAD], {"policy": 137})
    assert blame is not None and (blame.name, blame.exit_code) == ("policy-1", 78)
    on_one_node = ProcessPlan("policy", ["true"], {}, 4)
    blame = find_blame(tmp_path, [on_one_node], {"policy": 137})
    assert blame is not None and (blame.name, blame.cause) == ("policy", "killed by SIGKILL")
