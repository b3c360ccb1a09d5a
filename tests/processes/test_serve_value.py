"""`counterpoint serve-value` and `counterpoint score` as a person uses them: started, asked, told to end."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.wire.errors import ContractError
from tests.runs import ROOT, command, get, processes_of, start_cli
from value_service.client import ValueClient

CRITIC = """
[model]
path = "MODEL"
[value]
token_file = "TOKEN"
[runtime]
token = "always"
[value.head]
init_std = 0.1
[value.model]
seq_len = 64
"""


@contextmanager
def served(config: Path, run_dir: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    log = run_dir.with_suffix(".out")
    process = start_cli("serve-value", str(config), "--run.dir", str(run_dir), log=log)
    try:
        until = time.monotonic() + 90
        while "listening on" not in log.read_text():
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield log.read_text().split("listening on ")[1].split()[0], process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def counterpoint(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "critic.toml"
    path.write_text(CRITIC.replace("MODEL", str(tiny_model)).replace("TOKEN", str(tmp_path / "token")))
    return path


def test_a_critic_is_served_and_asked_and_ends_as_it_is_told(config: Path, tmp_path: Path) -> None:
    """Scenario: [model] and [value] alone; a client, `counterpoint score`, rows that are wrong; SIGTERM; again."""
    run_dir, token, rows = tmp_path / "served", tmp_path / "token", tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"token_ids": [1 + i % 200, 7, 9][: 1 + i % 3], "id": i}) + "\n" for i in range(600))
    )
    with served(config, run_dir) as (url, process):
        assert get(f"{url}/readyz") == {"state": "idle"}
        with ValueClient(url) as stranger, pytest.raises(ContractError, match="401"):
            stranger.score([[1]])
        runs_own = run_dir / "token"  # the service has a token of its own, which takes the place of the run's
        with ValueClient(url, token_file=runs_own) as other, pytest.raises(ContractError, match="401"):
            other.score([[1]])
        with ValueClient(url, token_file=token) as client:
            reply = client.score([[1, 7, 9]])
        out = tmp_path / "values.jsonl"
        done = counterpoint("score", "--url", url, str(rows), "--out", str(out), "--token-file", str(token))
        assert done.returncode == 0 and "scored 600 of 600 rows" in done.stderr, done.stderr
        scored = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["id"] for row in scored] == list(range(600))
        assert all(len(row["values"]) == len(row["token_ids"]) and row["values"][0] == 0 for row in scored)
        assert scored[200]["token_ids"] == [1, 7, 9]
        assert scored[200]["values"] == pytest.approx(reply.values[0], abs=1e-5)
        with rows.open("a") as file:
            file.write(f'{{"token_ids": [1, true]}}\n\n{json.dumps({"token_ids": [1] * 65})}\nnonsense\n')
        out.unlink()
        wrong = counterpoint("score", "--url", url, str(rows), "--out", str(out), "--token-file", str(token))
        assert wrong.returncode == 64 and not out.exists()
        assert f"{rows}:601: token_ids is not a list of integers" in wrong.stderr
        assert f"{rows}:603: 65 tokens, the service takes 64" in wrong.stderr
        assert f"{rows}:604: not a JSON object" in wrong.stderr
        secret = token.read_text().strip()
        for pid, line in processes_of(run_dir).items():
            assert secret not in line, pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
    assert not processes_of(run_dir)
    for path in run_dir.rglob("*"):
        assert not path.is_file() or secret not in path.read_text(errors="replace"), path
    with served(config, run_dir) as (url, process):
        with ValueClient(url, token_file=token) as client:
            assert client.score([[1, 7, 9]]).values[0] == pytest.approx(reply.values[0], abs=1e-5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert not processes_of(run_dir)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--value.host", "0.0.0.0", "--value.token_file", "none"], "value.host: 0.0.0.0 is every interface"),
        (["--value.host", "203.0.113.7", "--value.token_file", "none"], "can be reached from other machines"),
        (["--value.host", "localhost"], "is no IP address"),
        (["--value.host", "203.0.113.7"], "is no address of this machine"),
        (["--value", "none"], "there is no critic to serve"),
        (["--value.init_from", "nowhere"], "value.init_from"),
        (["--value.max_tokens", "5"], "value.max_tokens"),
    ],
)
def test_what_cannot_be_served_is_an_error_of_the_configuration(
    config: Path, settings: list[str], message: str
) -> None:
    done = counterpoint("serve-value", str(config), "--run.dir", str(config.parent / "run"), *settings)
    assert done.returncode == 78 and message in done.stderr, done.stderr
    assert not (config.parent / "run").exists()


def test_a_token_that_others_may_read_is_refused_by_its_file(config: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef0123")
    (tmp_path / "token").chmod(0o644)
    done = counterpoint("serve-value", str(config), "--run.dir", str(tmp_path / "run"))
    assert done.returncode == 78 and "has mode 644" in done.stderr and "0123456789" not in done.stderr, done.stderr
