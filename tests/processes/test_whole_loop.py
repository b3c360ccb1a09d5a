"""Whole runs by the command line: every process real, every promise read from what they left behind."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from services.wire.samples import StopReason
from tests.engines import full_logprobs
from tests.runs import ROOT, Finished, get, processes_of, read_lines, run_cli

PPO, GRPO = (str(ROOT / "tests" / "processes" / "configs" / f"{name}.toml") for name in ("ppo", "grpo"))


class Strangers:
    """Ask the critic for values from a thread, once it answers: without a token, with a wrong one, with its own."""

    def __init__(self, run_dir: Path, token_file: Path) -> None:
        self.told: dict[str, int] = {}
        self._run_dir, self._token_file = run_dir, token_file
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_once, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def _ask_once(self) -> None:
        path = self._run_dir / "run.json"
        while not self._stop.wait(0.2):
            url = json.loads(path.read_text())["value_url"] if path.is_file() else None
            if url is not None and get(f"{url}/readyz") is not None:
                own = self._token_file.read_text().strip()
                for name, token in (("nobody", None), ("stranger", own[:-1] + "?"), ("friend", own)):
                    self.told[name] = self._ask(f"{url}/v1/score", token)
                return

    @staticmethod
    def _ask(url: str, token: str | None) -> int:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(url, data=b'{"token_ids": [7, 8]}', headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code


@pytest.fixture(scope="module")
def guarded_ppo(tmp_path_factory) -> tuple[Finished, Strangers]:
    """PPO with groups on `reverse` and `add`: policy on two ranks, critic on one, two mini-batches; the critic asks for
    a token of its own, and strangers come."""
    folder = tmp_path_factory.mktemp("ppo")
    run_dir, token_file = folder / "run", folder / "critic.token"
    strangers = Strangers(run_dir, token_file)
    try:
        run = run_cli(run_dir, PPO, "--value.token_file", str(token_file))
    finally:
        strangers.close()
    return run, strangers


@pytest.fixture(scope="module")
def ppo(guarded_ppo: tuple[Finished, Strangers]) -> Finished:
    """That run alone."""
    return guarded_ppo[0]


@pytest.fixture(scope="module")
def grpo(tmp_path_factory) -> Finished:
    """GRPO: no value table; policy on one data rank of two context ranks."""
    return run_cli(tmp_path_factory.mktemp("grpo") / "run", GRPO)


@pytest.mark.parametrize("name", ["sao", "ppo", "grpo"])
def test_run_ends_normally_and_leaves_nothing_running(name: str, request) -> None:
    run: Finished = request.getfixturevalue(name)
    assert run.code == 0, run.output[-3000:]
    assert not processes_of(run.dir)
    assert not list((run.dir / "logs").glob("failures/*"))


@pytest.mark.parametrize(("name", "policy_ranks", "value_ranks"), [("sao", 1, 2), ("ppo", 2, 1)])
def test_one_grid_item_per_rank_and_step_on_distinct_processes(name, policy_ranks, value_ranks, request) -> None:
    run: Finished = request.getfixturevalue(name)
    num_steps = len(run.rows("rollout"))
    assert num_steps == 4
    pids: list[int] = list(run.context["pids"].values())
    for stream, ranks in (("policy", policy_ranks), ("critic", value_ranks)):
        ledger = read_lines(run.dir / "logs" / f"ledger-{stream}.jsonl")
        assert [(e["step"], e["rank"], e["data_rank"]) for e in ledger] == [
            (s, r, r) for s in range(num_steps) for r in range(ranks)
        ]
        assert len({e["item"] for e in ledger}) == num_steps * ranks
        own = {e["rank"]: e["pid"] for e in ledger}
        assert len(set(own.values())) == ranks
        pids += own.values()
    assert len(set(pids)) == len(pids)


def test_a_critic_with_a_token_of_its_own_serves_the_run_and_no_stranger(guarded_ppo) -> None:
    run, strangers = guarded_ppo
    assert strangers.told == {"nobody": 401, "stranger": 401, "friend": 200}
    assert run.context["token_file"] is None and len(run.rows("critic")) == 4


def test_context_ranks_of_a_data_rank_train_the_same_item(grpo: Finished) -> None:
    ledger = read_lines(grpo.dir / "logs" / "ledger-policy.jsonl")
    assert [(e["step"], e["rank"], e["data_rank"]) for e in ledger] == [(s, r, 0) for s in range(4) for r in range(2)]
    items = [(one["item"], other["item"]) for one, other in zip(ledger[::2], ledger[1::2], strict=True)]
    assert all(one == other for one, other in items) and len(set(items)) == 4


def test_metrics_have_the_documented_names(sao: Finished) -> None:
    (rollout, critic, policy) = (sao.rows(stream)[-1] for stream in ("rollout", "critic", "policy"))
    assert {"reward/mean", "reward/mean_admitted", "rollout/length", "rollout/staleness"} <= rollout.keys()
    assert {"tokens_per_s/inference", "tokens_per_s/policy", "tokens_per_s/value"} <= rollout.keys()
    assert {
        "value/loss",
        "value/explained_variance",
        "value/explained_variance_at_scoring",
        "value/grad_norm",
    } <= critic.keys()
    assert {"policy/loss", "policy/ratio_mean", "policy/dis_reject_low", "policy/dis_reject_high"} <= policy.keys()
    assert {"policy/entropy", "policy/kl_rollout", "policy/grad_norm"} <= policy.keys()
    for row in read_lines(sao.dir / "metrics.jsonl"):
        assert {"step", "stream", "time_s"} <= row.keys()


def test_critic_makes_k_updates_a_step_and_the_policy_one(sao: Finished) -> None:
    assert [row["value/updates"] for row in sao.rows("critic")] == [2, 4, 6, 8]
    assert [row["policy/version"] for row in sao.rows("policy")] == [1, 2, 3, 4]


def test_log_probabilities_agree_at_zero_staleness(sao: Finished, ppo: Finished, grpo: Finished) -> None:
    for run in (sao, ppo, grpo):
        rows = [row for row in run.rows("policy") if row["policy/mismatch_tokens"] > 0]
        assert rows and max(row["policy/mismatch_max"] for row in rows) < 1e-4


def test_staleness_is_above_zero_and_within_its_limit(sao: Finished) -> None:
    staleness = [row["rollout/staleness"] for row in sao.rows("rollout")]
    assert np.mean(staleness) > 0
    assert max(row["rollout/staleness_max"] for row in sao.rows("rollout")) <= 1


def test_each_span_of_a_trace_with_two_versions_is_what_its_snapshot_says(sao: Finished) -> None:
    traces = [t for t in read_lines(sao.dir / "traces.jsonl") if len({v for _, _, v in t["version_spans"]}) > 1]
    assert traces, "no trace met an update"
    for trace in traces[:8]:
        for start, end, version in trace["version_spans"]:
            folder = sao.dir / "weights" / f"v{version:06d}" if version else Path(sao.context["model_dir"])
            own = full_logprobs(folder, trace["token_ids"][:end])[start - 1 : end - 1]
            assert np.abs(own - np.array(trace["logprobs"][start:end])).max() < 1e-4


def test_several_turns_keep_observations_out_of_the_action_mask(sao: Finished) -> None:
    traces = read_lines(sao.dir / "traces.jsonl")
    turns = [t for t in traces if t["num_turns"] > 1]
    assert turns
    for trace in turns:
        mask = np.array(trace["action_mask"])
        rises = int((np.diff(mask) == 1).sum())
        assert rises == trace["num_turns"]
        off = mask == 0
        for name in ("logprobs", "advantages", "returns"):
            assert not np.array(trace[name])[off].any()
    assert {t["stop_reason"] for t in traces} <= set(StopReason)
    assert {"terminated", "truncated_turns"} <= {t["stop_reason"] for t in traces}


def test_values_are_scored_before_the_grid_that_they_train(sao: Finished) -> None:
    for trace in read_lines(sao.dir / "traces.jsonl"):
        assert 0 <= trace["critic_step"] <= trace["step"]
        assert trace["values"][0] == 0.0


def test_grpo_has_no_value_process_and_no_value_port(grpo: Finished) -> None:
    assert grpo.context["value_url"] is None and grpo.context["critic_grid_url"] is None
    assert not any("value" in name for name in grpo.context["pids"])
    assert not list((grpo.dir / "logs").glob("value*")) and not grpo.rows("critic")
    assert all(row["credit/action_tokens"] > 0 for row in grpo.rows("credit"))


def test_fully_on_policy_run_has_no_staleness(grpo: Finished) -> None:
    """`max_off_policy_steps = 0`."""
    assert all(row["rollout/staleness_max"] == 0 for row in grpo.rows("rollout"))


def test_run_directory_holds_what_the_readme_says(sao: Finished) -> None:
    for name in (
        "config.resolved.toml",
        "run.json",
        "metrics.jsonl",
        "traces.jsonl",
        "events.jsonl",
        "weights",
        "logs",
    ):
        assert (sao.dir / name).exists()
    manifest = json.loads((sao.dir / "weights" / "v000004" / "manifest.json").read_text())
    assert manifest["version"] == 4 and "model.safetensors" in manifest["files"]


def test_used_run_directory_is_refused_and_so_is_a_resume_as_another_run(grpo: Finished) -> None:
    again = run_cli(grpo.dir, GRPO)
    assert again.code == 78 and "--overwrite" in again.output
    resumed = run_cli(grpo.dir, GRPO, "--resume", "--algorithm.type", "running_mean", "--seed", "8")
    assert resumed.code == 78
    assert "algorithm.type: 'running_mean' here, 'grpo' in" in resumed.output
    assert "seed: 8 here, 7 in" in resumed.output
    assert (grpo.dir / "metrics.jsonl").exists()


def test_report_draws_the_run(sao: Finished) -> None:
    import subprocess

    from tests.runs import command

    done = subprocess.run(command("report", str(sao.dir)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "reward" in done.stdout
    assert (sao.dir / "report.png").read_bytes()[:4] == b"\x89PNG"
