"""Where the processes of a run start, as the supervisor sees it: hosts, their ports, and how a process gets there.

Notable:
- Two implementations: this machine (here), and the nodes of a SLURM job (`services.launch.slurm_machines`).
- Ports are chosen together and held until the run ends, whoever binds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from services.config.context import Host
from services.config.ports import fixed_ports, port_names
from services.config.schema import Config
from services.launch.planner import LOCAL, ProcessPlan, Site
from services.runtime.ports import PortReservation, foreign_owner, is_free

LostPorts = dict[str, tuple[int, int]]
"""name -> (port, pid of who has it; 0 where that cannot be seen)"""


class Ports(Protocol):
    """All ports of one start, held."""

    ports: dict[str, int]
    """One for every name of `port_names(config)`."""

    def taken(self) -> LostPorts:
        """Ports that somebody listens on already: the moment before the start."""
        ...

    def lost(self, own_pids: Iterable[int]) -> LostPorts:
        """Ports that a process outside the run listens on: after a failure.

        Args:
            own_pids: Processes of the run on this machine, as far as the fleet knows.
        """
        ...


class Machines(Protocol):
    """Where a run takes place."""

    hosts: Sequence[Host]
    """In the plan's order; the launcher is on the first."""
    site: Site
    """Checkout and interpreter of the processes."""

    def reserve(self, config: Config, avoid: Iterable[int], run_id: str) -> AbstractContextManager[Ports]:
        """Choose and hold the ports of a start.

        Args:
            config: Fixes some of them.
            avoid: Ports that were lost before.
            run_id: What processes of the run carry in their environment.

        Raises:
            DependencyLost: A host has none left, or does not answer.
        """
        ...

    def placed(self, process: ProcessPlan) -> ProcessPlan:
        """The process as the fleet starts it: with command and environment that bring it onto its nodes."""
        ...

    def end_leftovers(self) -> None:
        """End what a process that was ended by force may have left on other machines."""
        ...


class LocalPorts:
    """Ports of this machine's loopback."""

    def __init__(self, ports: dict[str, int]) -> None:
        self.ports = ports

    def taken(self) -> LostPorts:
        """Ports that cannot be bound now."""
        return {name: (port, 0) for name, port in self.ports.items() if not is_free(port)}

    def lost(self, own_pids: Iterable[int]) -> LostPorts:
        """Ports of other owners."""
        return lost_among(self.ports, lambda port: foreign_owner(port, own_pids))


class LocalMachine:
    """This machine alone."""

    hosts: Sequence[Host] = (LOCAL,)

    def __init__(self, site: Site) -> None:
        self.site = site

    @contextmanager
    def reserve(self, config: Config, avoid: Iterable[int], run_id: str) -> Iterator[LocalPorts]:
        """Choose and hold the ports of a start."""
        fixed = fixed_ports(config)
        chosen = [name for name in port_names(config) if name not in fixed]
        with PortReservation(chosen, avoid={*avoid, *fixed.values()}) as reservation:
            yield LocalPorts(fixed | reservation.ports)

    def placed(self, process: ProcessPlan) -> ProcessPlan:
        """As planned."""
        return process

    def end_leftovers(self) -> None:
        """Guards leave nothing."""


def lost_among(ports: dict[str, int], owner_of: Callable[[int], int | None]) -> LostPorts:
    """The ports that somebody else has."""
    owners = {name: owner_of(port) for name, port in ports.items()}
    return {name: (ports[name], owner) for name, owner in owners.items() if owner is not None}
