"""Whole runs as jobs of a real SLURM with two nodes: submitted by `counterpoint run`, carried out by srun's steps."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from services.runtime.commits import Commits
from tests.conftest import ROOT
from tests.runs import command, read_lines
from tests.slurm.cluster import ADDRESSES, Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

SMALL = """\
seed = 1
[algorithm]
type = "sao"
[orchestrator]
batch_size = 8
group_size = 1
[[env]]
type = "add"
max_turns = 1
max_turn_tokens = 8
max_trace_tokens = 32
[policy.model]
seq_len = 256
[value.model]
seq_len = 256
[inference]
max_model_len = 64
max_num_seqs = 8
[deployment]
kind = "slurm"
[runtime]
shutdown_grace_s = 60.0
[slurm]
time = "30"
signal_lead_s = 90
"""
DEDICATED = {"deployment.num_value_nodes": "1", "deployment.gpus_per_node": "1", "runtime.token": "always"}
SPLIT = {
    "deployment.num_train_nodes": "2",
    "deployment.num_policy_gpus": "2",
    "deployment.num_value_gpus_per_train_node": "1",
    "deployment.gpus_per_node": "3",
}
DEADLINE_S = 420.0
CREDENTIAL_S = 3.0
"""A node takes no credential that was made in the second in which it revoked the earlier ones of the job, or before."""


class Submitted:
    """A run that `counterpoint run` has submitted."""

    def __init__(self, cluster: Cluster, folder: Path, model: Path, settings: dict[str, str]) -> None:
        self._cluster = cluster
        self.dir = folder / "run"
        path = folder / "small.toml"
        path.write_text(SMALL)
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        done = subprocess.run(
            command("run", str(path), "--run.dir", str(self.dir), "--model.path", str(model), *words),
            cwd=ROOT,
            env=cluster.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"^job: +(\d+)$", done.stdout, re.MULTILINE)
        assert found is not None, done.stdout
        self.id = found[1]

    @property
    def log(self) -> str:
        """What SLURM has of the job's output."""
        path = self.dir / f"slurm-{self.id}.log"
        return path.read_text() if path.exists() else ""

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, ..."""
        return self._cluster.job(self.id).get("JobState", "")

    @property
    def exit_code(self) -> int:
        """Of the job's script."""
        return int(self._cluster.job(self.id)["ExitCode"].partition(":")[0])

    @property
    def context(self) -> dict:
        """`run.json`."""
        return json.loads((self.dir / "run.json").read_text())

    def wait_for(self, *states: str) -> None:
        """Until SLURM says one of them."""
        try:
            self._cluster.wait_until(lambda: self.state in states, DEADLINE_S)
        except TimeoutError as error:
            raise AssertionError(f"job {self.id} is {self.state}\n{self.log}\n{error}") from None

    def wait_for_steps(self, num: int) -> None:
        """Until so many policy steps are in the metrics, or the job has ended."""
        self._cluster.wait_until(lambda: len(self.rows("policy")) >= num or self.state != "RUNNING", DEADLINE_S)
        assert self.state == "RUNNING", self.log

    def rows(self, stream: str) -> list[dict]:
        """Metric rows of one stream."""
        path = self.dir / "metrics.jsonl"
        return [row for row in read_lines(path) if row["stream"] == stream] if path.exists() else []

    def events(self, kind: str) -> list[dict]:
        """Events of one kind."""
        return [event for event in read_lines(self.dir / "events.jsonl") if event["event"] == kind]

    def ranks_on(self, node: str) -> list[int]:
        """Processes of this run that a step has on a node, by what SLURM gave them."""
        marks = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_JOB_ID={self.id}".encode()}
        return [pid for pid in _all_pids() if marks <= set(_environ(pid))]


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def rank_of(job: Submitted, node: str, module: str) -> int:
    """The process of a rank on a node."""
    found = [pid for pid in job.ranks_on(node) if module in _words(pid) and b"torch.distributed.run" not in _words(pid)]
    found = [pid for pid in found if any(each.startswith(b"LOCAL_RANK=") for each in _environ(pid))]
    assert len(found) == 1, found
    return found[0]


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def test_a_critic_on_a_node_of_its_own_trains_beside_the_policy_and_the_job_ends_well(
    cluster: Cluster, tmp_path: Path, tiny_model: Path
) -> None:
    job = Submitted(cluster, tmp_path, tiny_model, DEDICATED | {"orchestrator.max_steps": "4"})
    job.wait_for("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert [row["step"] for row in job.rows("policy")] == [0, 1, 2, 3]
    assert [row["step"] for row in job.rows("critic")] == [0, 1, 2, 3]
    context = job.context
    assert {host["name"]: host["address"] for host in context["hosts"]} == ADDRESSES
    assert ADDRESSES["n1"] in context["policy_url"] and ADDRESSES["n2"] in context["value_url"]
    assert Commits(job.dir / "checkpoints").steps()[0] == 4
    assert job.events("finished")[-1]["killed"] == []
    assert job.ranks_on("n1") == [] and job.ranks_on("n2") == []


def test_groups_that_share_both_nodes_are_pre_empted_requeued_and_go_on_to_the_end(
    cluster: Cluster, tmp_path: Path, tiny_model: Path
) -> None:
    """Scenario: policy and critic have a rank on each node; SLURM tells the batch shell ahead that the job must end.
    Result: a commit, 75, the job back in the queue; started again it goes on after the commit, in the next epoch."""
    job = Submitted(cluster, tmp_path, tiny_model, SPLIT | {"orchestrator.max_steps": "60"})
    job.wait_for("RUNNING")
    job.wait_for_steps(3)
    for node in ADDRESSES:
        for module in (b"policy_trainer.main", b"value_service.main"):
            rank_of(job, node, module)
    cluster.ask("scancel", "--signal=USR1", "--batch", job.id)
    job.wait_for("PENDING")
    assert "the launcher ended with exit code 75 after USR1" in job.log
    (stopped,) = job.events("stopped_by_signal")
    committed = stopped["commits"][0]
    assert committed >= 3 and stopped["killed"] == []
    assert len(job.rows("policy")) >= committed
    cluster.wait_until_idle()  # a requeued job waits two minutes, so that its first start has wholly ended
    time.sleep(CREDENTIAL_S)
    cluster.ask("scontrol", "update", f"jobid={job.id}", "starttime=now")
    job.wait_for("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert f"going on after step {committed} " in job.log
    (resumed,) = job.events("resumed")
    assert (resumed["step"], resumed["epoch"], job.context["epoch"]) == (committed, 2, 2)
    for stream in ("policy", "critic"):
        assert [row["step"] for row in job.rows(stream)] == list(range(60))
    for rank in ("policy-0", "policy-1", "value-0", "value-1"):
        log = (job.dir / "logs" / f"{rank}.log").read_text()
        assert log.count("2 rank(s) start equal") == 2


def test_a_lost_rank_on_the_second_node_is_named_and_its_code_is_the_jobs(
    cluster: Cluster, tmp_path: Path, tiny_model: Path
) -> None:
    job = Submitted(cluster, tmp_path, tiny_model, SPLIT | {"orchestrator.max_steps": "1000"})
    job.wait_for("RUNNING")
    job.wait_for_steps(1)
    os.kill(rank_of(job, "n2", b"policy_trainer.main"), signal.SIGKILL)
    job.wait_for("FAILED", "COMPLETED", "TIMEOUT", "CANCELLED")
    assert (job.state, job.exit_code) == ("FAILED", 69), job.log
    assert "policy-1 failed first (exit code 69): killed by SIGKILL" in job.log
    assert job.ranks_on("n1") == [] and job.ranks_on("n2") == []
