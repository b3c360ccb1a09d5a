"""What somebody on the same machine sees of a run while it is on: command lines, sockets, and how strangers are met."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from services.runtime.guard import descendants
from services.transport.link import Hello, Position, encode_control

ROUTES = {
    "orchestrator_url": ("GET /livez", "GET /status"),
    "policy_url": ("GET /livez", "GET /status", "GET /metrics", "POST /checkpoint"),
    "value_url": ("GET /livez", "GET /status", "GET /v1/models", "POST /v1/score", "POST /load"),
    "inference_urls": ("GET /health", "GET /v1/models", "POST /pause?mode=abort", "POST /inference/v1/generate"),
}
"""The first route of each is its health route."""


@dataclass(frozen=True)
class Listening:
    """One listening TCP socket of the run."""

    address: str
    port: int
    pid: int
    command: str


@dataclass
class Seen:
    """What a look at a run found."""

    commands: dict[int, str] = field(default_factory=dict)
    """command lines and environments, by pid"""
    sockets: list[Listening] = field(default_factory=list)
    answers: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """HTTP statuses by listener, route and who asked: "nobody", "stranger", "friend" """
    grid_replies: list[bytes] = field(default_factory=list)
    """what a stranger with a perfect Hello got from the grid links"""
    token: str = ""
    grid_key: str = ""
    modes: dict[str, int] = field(default_factory=dict)
    error: str = ""


class Spy:
    """Looks once, from a thread, when the run has done a step."""

    def __init__(self, run_dir: Path) -> None:
        self.seen = Seen()
        self._run_dir = run_dir
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.1):
                context = self._context()
                if context is not None and self._has_begun(context):
                    self._look(context)
                    return
            self.seen.error = "the run never did a step"
        except Exception as error:  # told by the tests
            self.seen.error = repr(error)

    def _context(self) -> dict | None:
        path = self._run_dir / "run.json"
        context = json.loads(path.read_text()) if path.is_file() else None
        return context if context and context["pids"] else None

    def _has_begun(self, context: dict) -> bool:
        token = Path(context["token_file"]).read_text().strip()
        status, body = _ask(context["orchestrator_url"], "GET /status", token)
        return status == 200 and json.loads(body)["step"] >= 1

    def _look(self, context: dict) -> None:
        seen, files = self.seen, {name: self._run_dir / name for name in ("token", "grid.key")}
        seen.token, seen.grid_key = (path.read_text().strip() for path in files.values())
        seen.modes = {name: path.stat().st_mode & 0o777 for name, path in files.items()}
        launcher = context["pids"]["launcher"]
        pids = [launcher, *descendants(launcher)]
        seen.commands = {pid: _words(pid, "cmdline") + _words(pid, "environ") for pid in pids}
        seen.sockets = list(listening(pids))
        for name, routes in ROUTES.items():
            urls = context[name] if isinstance(context[name], list) else [context[name]]
            for url in urls:
                for route in routes:
                    seen.answers[name, route, "nobody"] = _ask(url, route, None)[0]
                    seen.answers[name, route, "stranger"] = _ask(url, route, seen.token[:-1] + "?")[0]
                    if route.startswith("GET"):
                        seen.answers[name, route, "friend"] = _ask(url, route, seen.token)[0]
        for stream in ("policy", "critic"):
            seen.grid_replies += _knock(context[f"{stream}_grid_url"], context, stream)


def _words(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def listening(pids: list[int]):
    """TCP sockets on which these processes listen."""
    owners = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
                with contextlib.suppress(OSError):  # closed meanwhile; the others count
                    link = os.readlink(entry)
                    if link.startswith("socket:["):
                        owners[link[len("socket:[") : -1]] = pid
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in owners:
                address, _, port = words[1].partition(":")
                pid = owners[words[9]]
                yield Listening(_address(address), int(port, 16), pid, _words(pid, "cmdline"))


def _address(text: str) -> str:
    """From the kernel's hexadecimal words in host order."""
    words = [struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _ask(url: str, route: str, token: str | None) -> tuple[int, bytes]:
    method, path = route.split()
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {token}"} if token else {})
        reply = connection.getresponse()
        return reply.status, reply.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def _knock(url: str, context: dict, stream: str) -> list[bytes]:
    """Call oneself a rank of the run, in plain, and wait for its items."""
    position = Position(
        run_id=context["run_id"],
        epoch=context["epoch"],
        stream=stream,  # pyright: ignore[reportArgumentType]
        data_rank=0,
        num_data_ranks=1 if stream == "policy" else 2,
        expected_step=0,
        credit=100,
    )
    hello = encode_control(Hello(position=position, instance="spy", connection=1, have={}))
    with zmq.Context() as zmq_context, zmq_context.socket(zmq.DEALER) as peer:
        peer.set(zmq.LINGER, 0)
        peer.set(zmq.IDENTITY, f"{stream}-0".encode())
        peer.connect(url)
        ends_s = time.monotonic() + 2
        while time.monotonic() < ends_s:
            peer.send(hello)
            if peer.poll(200):
                return peer.recv_multipart()
    return []
