"""A process that waits for others to load: what counts as loaded, what takes its place, and how the wait ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from services.runtime.after import after, has_loaded, main, split_wait, wait_for
from services.runtime.ports import PortReservation
from services.wire.errors import EXIT_DEPENDENCY_LOST, EXIT_USAGE
from tests.conftest import ROOT

SAY_PID = "import os, sys; print(os.getpid(), os.getsid(0), sys.argv[1:])"
Reply = tuple[int, bytes]


@contextmanager
def answering(reply: Callable[[], Reply], port: int = 0) -> Iterator[str]:
    """The URL of a `/readyz` that says what `reply` says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = reply()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/readyz"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def state(text: str, status: int = 503) -> Reply:
    return status, json.dumps({"state": text}).encode()


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.runtime.after", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def nobody() -> str:
    """A URL where nobody listens."""
    with PortReservation(["http_port"]) as held:
        port = held.ports["http_port"]
    return f"http://127.0.0.1:{port}/readyz"


@pytest.mark.parametrize(
    ("reply", "loaded"),
    [
        (state("asleep"), True),
        (state("idle", 200), True),
        (state("training", 200), True),
        (state("loading"), False),
        (state("loading", 200), False),
        ((200, b""), False),
        ((200, b"[]"), False),
        ((200, b'{"state": 3}'), False),
        ((404, b'{"detail": "Not Found"}'), False),
        ((200, b"\xff\xfe"), False),
    ],
)
def test_any_state_but_loading_will_do_whatever_the_status_code(reply: Reply, loaded: bool) -> None:
    with answering(lambda: reply) as url:
        assert has_loaded(url) is loaded


def test_nobody_there_is_not_yet() -> None:
    assert not has_loaded(nobody())


def test_the_wait_ends_with_the_last_of_its_urls() -> None:
    """The first has loaded at once, the second says "loading" three times and "asleep" then."""
    said: list[str] = []

    def slowly() -> Reply:
        said.append("loading" if len(said) < 3 else "asleep")
        return state(said[-1])

    with answering(lambda: state("asleep")) as first, answering(slowly) as second:
        assert wait_for([first, second], 30.0) is None
    assert said == ["loading", "loading", "loading", "asleep"]


def test_the_command_takes_the_place_of_the_wait_with_its_pid_and_its_session() -> None:
    words, command = ["loading"], [sys.executable, "-c", SAY_PID, "a b", "--", "c"]
    with (
        answering(lambda: state(words[-1])) as url,
        start(url, "--deadline-s", "60", "--", *command) as process,
    ):
        time.sleep(0.6)
        assert process.poll() is None
        words.append("asleep")
        out, _ = process.communicate(timeout=30)
    assert out.split(maxsplit=2) == [str(process.pid), str(os.getsid(0)), "['a b', '--', 'c']\n"]
    assert process.returncode == 0


def test_a_passed_deadline_names_who_had_not_loaded_in_one_line_and_is_a_lost_dependency() -> None:
    url = nobody()
    with start(url, "--deadline-s", "0.3", "--", sys.executable, "-c", SAY_PID) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (EXIT_DEPENDENCY_LOST, "", f"{url} had not loaded after 0.3 s\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_at_once_without_a_word(number: signal.Signals) -> None:
    asked = threading.Event()

    def reply() -> Reply:
        asked.set()
        return state("loading")

    with answering(reply) as url, start(url, "--deadline-s", "60", "--", sys.executable, "-c", SAY_PID) as process:
        assert asked.wait(30)
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (-number, "", "")


def test_a_long_wait_says_for_whom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("services.runtime.after.SAY_INTERVAL_S", 0.2)
    with answering(lambda: state("loading")) as url:
        assert wait_for([url], 1.0) == url
        lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 4
    assert all(line.startswith(f"waiting for {url} to load (") and line.endswith(" s)") for line in lines)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["http://127.0.0.1:1/readyz", "--deadline-s", "3", "--"],
        ["http://127.0.0.1:1/readyz", "--deadline-s", "soon", "--", "true"],
        ["http://127.0.0.1:1/readyz", "--", "true", "or", "false"],
        [",", "--deadline-s", "3", "--", "true"],
        ["127.0.0.1:1", "--deadline-s", "3", "--", "true"],
    ],
)
def test_other_words_are_a_wrong_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("usage: python -m services.runtime.after URL")


def test_a_command_that_is_not_there_is_said(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with answering(lambda: state("idle", 200)) as url, start(url, "--deadline-s", "9", "--", missing) as process:
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (69, f"cannot start {missing}: No such file or directory\n")


def test_a_command_and_its_wait_are_told_apart() -> None:
    argv = ["python", "-m", "torch.distributed.run", "--", "x"]
    waiting = after("python", ["http://n0:1/readyz", "http://n0:2/readyz"], 1800.0, argv)
    assert waiting[:6] == [
        "python",
        *("-m", "services.runtime.after"),
        "http://n0:1/readyz,http://n0:2/readyz",
        *("--deadline-s", "1800"),
    ]
    assert split_wait(waiting) == (waiting[:7], argv)
    assert split_wait(argv) == ([], argv)
