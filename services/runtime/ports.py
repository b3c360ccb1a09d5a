"""Ports chosen together: unique on this host, below the kernel's ephemeral range, reserved until they are used.

Notable:
- A reservation is an abstract Unix socket named after the port. It lives in the same network namespace as the port,
  vanishes with its holder however that dies, and leaves the TCP port itself free for the child to bind (a held TCP
  socket could not be handed to uvicorn, ZeroMQ and vLLM alike). Two launchers can therefore never choose alike.
- A port is probed where it will be bound, on the host's own address, and on loopback; never by binding all interfaces,
  which would hold it against everybody for a moment.
- A foreign program can still take a port between probe and bind; `foreign_owner` tells, and the supervisor chooses
  a new set.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from services.wire.errors import DependencyLost

LOOPBACK = "127.0.0.1"
LOWEST_PORT = 10000
HIGHEST_PORT = 32767
"""Outbound connections take their ports from 32768 up (net.ipv4.ip_local_port_range)."""

_LISTEN = "0A"


class PortReservation:
    """A set of ports that no other reservation on this host holds; a context manager."""

    def __init__(
        self, names: Iterable[str], *, avoid: Iterable[int] = (), seed: int | None = None, address: str = LOOPBACK
    ) -> None:
        """Reserve one free port per name.

        Args:
            names: What the ports are for.
            avoid: Ports fixed in the configuration, or lost before.
            seed: Makes the order of candidates repeatable; None draws it.
            address: Of this host, where the ports will be bound; they are free on loopback too.

        Raises:
            DependencyLost: No free port is left in the range.
        """
        self._address = address
        candidates = list(range(LOWEST_PORT, HIGHEST_PORT + 1))
        random.Random(seed).shuffle(candidates)  # noqa: S311 - no secret
        avoided = set(avoid)
        self._holds: dict[int, socket.socket] = {}
        self.ports: dict[str, int] = {}
        for name in names:
            self.ports[name] = self._next(candidates, avoided)

    def close(self) -> None:
        """Give all reservations back."""
        for hold in self._holds.values():
            hold.close()
        self._holds.clear()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self, candidates: list[int], avoided: set[int]) -> int:
        while candidates:
            port = candidates.pop()
            if port in avoided:
                continue
            hold = hold_name(f"port-{port}")
            if hold is None:
                continue
            if not is_free(port, self._address):
                hold.close()
                continue
            self._holds[port] = hold
            return port
        self.close()
        raise DependencyLost(f"no free port between {LOWEST_PORT} and {HIGHEST_PORT} on {self._address}")


def hold_name(name: str) -> socket.socket | None:
    """Hold a host-wide name until the socket is closed or this process ends; None when somebody holds it."""
    hold = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        hold.bind(f"\0counterpoint-{name}")
    except OSError:
        hold.close()
        return None
    return hold


def is_free(port: int, address: str = LOOPBACK) -> bool:
    """Whether a server could bind `port` now, on an address of this host and on loopback."""
    return all(_can_bind(port, where) for where in {address, LOOPBACK})


def _can_bind(port: int, address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # as servers do: a port in TIME_WAIT counts as free, one that is listened on does not
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def foreign_owner(port: int, own_pids: Iterable[int]) -> int | None:
    """Who else listens on `port`.

    Args:
        port: A TCP port.
        own_pids: Processes that may listen on it.

    Returns:
        None when nobody, or one of `own_pids`, listens; else the owner's pid, 0 where it cannot be seen.
    """
    inodes = _listening_inodes(port)
    if not inodes or any(inodes & _socket_inodes(pid) for pid in own_pids):
        return None
    for entry in os.listdir("/proc"):
        if entry.isdigit() and inodes & _socket_inodes(int(entry)):
            return int(entry)
    return 0


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:
        pass  # ended, or not ours to look at
    return inodes
