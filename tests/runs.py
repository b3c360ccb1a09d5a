"""Real runs for tests: the command line as a child process, or some of a run's processes under a fleet of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config.context import RunContext
from services.config.resolve import resolve
from services.config.schema import Config
from services.launch.models import MODELS_DIR
from services.launch.partial import partial_run

ROOT = Path(__file__).parents[1]


def command(*args: str) -> list[str]:
    """The `counterpoint` command line in this interpreter."""
    return [sys.executable, "-m", "services.launch", *args]


def start_cli(*args: str, log: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start the command from the project root, `env` added to its environment; its output goes to `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command(*args),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"COLUMNS": "200"} | (env or {}),
        )


@dataclass
class Finished:
    """A run that has ended."""

    code: int
    output: str
    dir: Path

    def rows(self, stream: str) -> list[dict[str, Any]]:
        """Metric rows of one stream."""
        return [row for row in read_lines(self.dir / "metrics.jsonl") if row["stream"] == stream]

    @property
    def context(self) -> dict[str, Any]:
        """`run.json`."""
        return json.loads((self.dir / "run.json").read_text())


def run_cli(run_dir: Path, config: str, *overrides: str, timeout_s: float = 240) -> Finished:
    """Carry out a whole run; afterwards nothing that names its directory may be left."""
    log = run_dir.with_suffix(".out")
    process = start_cli("run", config, "--run.dir", str(run_dir), *overrides, log=log)
    try:
        code = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(timeout=30)
        raise AssertionError(f"the run did not end in {timeout_s} s:\n{log.read_text()[-3000:]}") from None
    return Finished(code, log.read_text(), run_dir)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def processes_of(run_dir: Path) -> dict[int, str]:
    """Living processes whose command line names the run directory, by pid; the test's own children aside."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if str(run_dir) in line and state != "Z":
            found[int(entry.name)] = line
    return found


def wait_until(condition, *, deadline_s: float, what: str) -> None:
    """Poll until a condition holds."""
    ends = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends, f"waited {deadline_s} s for {what}"
        time.sleep(0.1)


def get(url: str) -> dict[str, Any] | None:
    """JSON of a GET, or None while nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return json.load(reply)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def post(url: str, body: bytes | dict[str, Any], *, timeout_s: float = 60) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        text = error.read()
        return error.code, json.loads(text) if text else {}


@contextmanager
def processes(
    run_dir: Path, names: list[str], config_path: str, *overrides: tuple[str, str]
) -> Iterator[tuple[Config, RunContext]]:
    """Some processes of a planned run, ready to work; the test plays the others."""
    config = resolve([ROOT / config_path], [("run.dir", str(run_dir)), *overrides]).config
    with partial_run(config, names, run_id="test", models_dir=ROOT / MODELS_DIR) as run:
        yield config, run.plan.context
    assert not processes_of(run_dir)
