"""Ports: unique over parallel allocations, below the ephemeral range, given back, and whose they are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from services.runtime.ports import HIGHEST_PORT, LOWEST_PORT, PortReservation, foreign_owner, hold_name, is_free

ROOT = Path(__file__).parents[4]
ALLOCATE = """
import sys
from services.runtime.ports import PortReservation
with PortReservation([str(i) for i in range(6)], seed=1) as reservation:  # all draw in the same order
    print(*reservation.ports.values(), flush=True)
    sys.stdin.read()
"""


def test_fifty_parallel_allocations_on_one_host_are_unique():
    """50 processes choose at once and hold; the same order of candidates makes them meet at every port."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ALLOCATE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(50)
    ]
    chosen = []
    for process in processes:
        assert process.stdout is not None
        chosen += [int(port) for port in process.stdout.readline().split()]
    for process in processes:
        process.communicate()
    assert len(chosen) == 300
    assert len(set(chosen)) == 300
    assert all(LOWEST_PORT <= port <= HIGHEST_PORT < 32768 for port in chosen)


def test_a_reservation_leaves_the_port_itself_free_and_is_given_back():
    with PortReservation(["a"], seed=5) as first:
        port = first.ports["a"]
        assert is_free(port)
        with PortReservation(["a"], seed=5) as second:
            assert second.ports["a"] != port
    with PortReservation(["a"], seed=5) as third:
        assert third.ports["a"] == port


def test_ports_to_avoid_and_ports_in_use_are_passed_over():
    with PortReservation(["a"], seed=6) as first:
        port = first.ports["a"]
    with PortReservation(["a"], seed=6, avoid=[port]) as second:
        assert second.ports["a"] != port
    with socket.create_server(("127.0.0.1", port)), PortReservation(["a"], seed=6) as third:
        assert third.ports["a"] != port


def test_a_name_is_held_once_and_free_again_after_its_holder():
    name = f"test-{os.getpid()}"
    hold = hold_name(name)
    assert hold is not None
    assert hold_name(name) is None
    hold.close()
    again = hold_name(name)
    assert again is not None
    again.close()


def test_the_owner_of_a_port_is_named_unless_it_is_ours():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert foreign_owner(port, []) == os.getpid()
        assert foreign_owner(port, [os.getpid()]) is None
    assert foreign_owner(port, []) is None
