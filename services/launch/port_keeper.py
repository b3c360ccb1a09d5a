"""On a node of a job: choose the ports that processes of this node will bind, hold them, and tell who took one.

Usage: `python -m services.launch.port_keeper WISHES`, WISHES being JSON, the same on every node (see `Wishes`).

Notable:
- Speaks JSON lines: one with the ports at once; then one for each line of standard input (`taken`, `lost`). The end of
  standard input, which is that of the launcher, ends it, and with it every hold.
- A port is probed where it will be bound, on this node's address, and on loopback; nothing binds all interfaces.
- Processes of the run are known by the run's id in their environment: here they are nobody's children.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from services.launch.fleet import RUN_ID_VARIABLE
from services.launch.machines import LostPorts, lost_among
from services.runtime.ports import PortReservation, foreign_owner, is_free


class NodeWishes(msgspec.Struct, frozen=True):
    """What one node is asked for."""

    address: str
    chosen: list[str] = []
    """Names that want a port."""
    fixed: dict[str, int] = {}
    """Ports that the configuration fixes on this node."""


class Wishes(msgspec.Struct, frozen=True):
    """What all nodes are asked for."""

    run_id: str
    avoid: list[int]
    nodes: dict[str, NodeWishes]
    """By the node's name, as SLURM calls it."""


class Keeper:
    """The held ports of one node."""

    def __init__(self, wishes: NodeWishes, avoid: list[int], run_id: str) -> None:
        """Choose and hold.

        Args:
            wishes: What this node is asked for.
            avoid: Ports that are somebody's already.
            run_id: Of the processes that may listen on the ports.

        Raises:
            DependencyLost: No port is left.
        """
        self._address = wishes.address
        self._run_id = run_id
        taken = {*avoid, *wishes.fixed.values()}
        self._reservation = PortReservation(wishes.chosen, avoid=taken, address=wishes.address)
        self.ports = wishes.fixed | self._reservation.ports

    def close(self) -> None:
        """Let them go."""
        self._reservation.close()

    def taken(self) -> LostPorts:
        """Ports that cannot be bound now."""
        return {name: (port, 0) for name, port in self.ports.items() if not is_free(port, self._address)}

    def lost(self) -> LostPorts:
        """Ports that a process outside the run listens on."""
        own = marked_pids(f"{RUN_ID_VARIABLE}={self._run_id}")
        return lost_among(self.ports, lambda port: foreign_owner(port, own))


def main(words: list[str]) -> int:
    """Serve the launcher until it ends."""
    wishes = msgspec.json.decode(words[0], type=Wishes)
    node = os.environ.get("SLURMD_NODENAME", "")
    keeper = Keeper(wishes.nodes[node], wishes.avoid, wishes.run_id)
    _say(node, ports=keeper.ports)
    for line in sys.stdin:
        question = line.strip()
        if question in ("taken", "lost"):
            _say(node, ports=keeper.taken() if question == "taken" else keeper.lost())
    return 0


def marked_pids(mark: str) -> list[int]:
    """Processes of this machine with a variable (NAME=VALUE) in their environment."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _carries(entry, mark.encode())]


def _carries(pid: str, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # ended, or not ours to look at


def _say(node: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"node": node, **facts}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
