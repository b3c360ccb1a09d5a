"""Ports: unique over parallel allocations, below the ephemeral range, given back, and whose they are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.config.ports import port_names
from services.config.schema import Config
from services.launch.placement import port_hosts
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


# ---------------------------------------------------------------- where a port is probed


def test_a_port_is_probed_on_the_host_s_address_and_on_loopback() -> None:
    """127.0.0.2 stands for the host's address, 127.0.0.3 for an interface that is none of ours."""
    with PortReservation(["a"], seed=7) as first:
        port = first.ports["a"]
    for taken_on, is_passed_over in (("127.0.0.2", True), ("127.0.0.1", True), ("127.0.0.3", False)):
        with (
            socket.create_server((taken_on, port)),
            PortReservation(["a"], seed=7, address="127.0.0.2") as second,
        ):
            assert (second.ports["a"] != port) == is_passed_over, taken_on
            assert is_free(port, "127.0.0.2") != is_passed_over


def test_probing_holds_no_port_on_all_interfaces() -> None:
    """To bind all interfaces is to ask for the port on every address: a listener on any of them would be in the way."""
    with PortReservation(["a"], seed=8) as reservation, socket.create_server(("127.0.0.9", reservation.ports["a"])):
        assert is_free(reservation.ports["a"])


# ---------------------------------------------------------------- whole plans on one host


def split_node() -> Config:
    """Policy and critic on the same two nodes, two engines: every kind of port there is."""
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "algorithm": {"type": "sao"},
            "env": [{"type": "add"}],
            "value": {},
            "deployment": {
                "kind": "slurm",
                "num_train_nodes": 2,
                "num_policy_gpus": 8,
                "num_value_gpus_per_train_node": 4,
                "num_inference_nodes": 1,
                "num_inference_gpus": 2,
            },
        }
    )


def test_fifty_plans_that_are_made_at_once_on_one_host_do_not_meet() -> None:
    """As processes do; here every plan wants all names that the first node binds, in the same order of candidates."""
    names = [name for name, host in port_hosts(split_node()).items() if host == 0]
    everybody_holds = threading.Barrier(50)

    def reserve(_index: int) -> list[int]:
        with PortReservation(names, seed=9) as reservation:
            everybody_holds.wait(60.0)
            return list(reservation.ports.values())

    with ThreadPoolExecutor(50) as pool:
        chosen = [port for ports in pool.map(reserve, range(50)) for port in ports]
    assert len(names) == 10
    assert len(set(chosen)) == len(chosen) == 500


def test_the_critic_s_meeting_point_takes_no_port_of_the_policy() -> None:
    """Two groups on one node whose launchers choose by themselves, in the same order: the critic's rendezvous would
    take the port that the policy announced, before the policy has bound it.
    """
    names = port_names(split_node())
    of_critic = [name for name in names if "value" in name or "critic" in name]
    of_policy = [name for name in names if name not in of_critic]
    assert "value_rdzv_port" in of_critic and "policy_rdzv_port" in of_policy
    with (
        PortReservation(of_policy, seed=10) as policy,
        PortReservation(of_critic, seed=10) as critic,
    ):
        assert not set(policy.ports.values()) & set(critic.ports.values())
    with PortReservation(names, seed=10) as together:
        assert len(set(together.ports.values())) == len(names)
    fixed = together.ports["policy_http_port"]
    with PortReservation(of_critic, seed=10, avoid=[fixed]) as critic:
        assert fixed not in critic.ports.values()
