"""What a process of a job gets on its node: its place, its devices, its interface; and how it is asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from services.launch.on_node import interface_of, node_argv, node_env, place_of
from tests.conftest import ROOT

TORCHRUN = ["python", "-m", "torch.distributed.run", "--nnodes", "2", "-m", "policy_trainer.main"]
ADDRESSES = ["10.0.0.10", "10.0.0.9"]
REPORT = "import os, sys; print(os.environ.get('CUDA_VISIBLE_DEVICES'), sys.argv[1:])"


def start(*words: str, node: str = "n2", **env: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CUDA_VISIBLE"))}
    return subprocess.Popen(
        [sys.executable, "-m", "services.launch.on_node", *words],
        cwd=ROOT,
        env=clean | {"PYTHONPATH": str(ROOT), "SLURMD_NODENAME": node} | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_node_is_found_by_its_name_whatever_the_order_in_which_slurm_counts() -> None:
    assert place_of({"SLURMD_NODENAME": "n2", "SLURM_NODEID": "0"}, ["n1", "n2"], 2) == 1
    assert place_of({"SLURM_NODEID": "1"}, [], 2) == 1
    with pytest.raises(ValueError, match="this node is n3, not one of n1, n2"):
        place_of({"SLURMD_NODENAME": "n3"}, ["n1", "n2"], 2)
    with pytest.raises(ValueError, match="node 2 of a process that has 2"):
        place_of({"SLURM_NODEID": "2"}, [], 2)


def test_torchrun_on_several_nodes_is_told_its_rank_and_address_and_nothing_else_is() -> None:
    told = node_argv(TORCHRUN, ADDRESSES, 1)
    assert told == [*TORCHRUN[:3], "--node-rank", "1", "--local-addr", "10.0.0.9", *TORCHRUN[3:]]
    assert node_argv(TORCHRUN, ADDRESSES[:1], 0) == TORCHRUN
    assert node_argv(["python", "-m", "orchestrator.main"], ADDRESSES, 1) == ["python", "-m", "orchestrator.main"]


def test_torchrun_that_waits_for_others_first_is_told_the_same_behind_the_wait() -> None:
    wait = ["python", "-m", "services.runtime.after", "http://10.0.0.10:1/readyz", "--deadline-s", "300", "--"]
    told = node_argv([*wait, *TORCHRUN], ADDRESSES, 0)
    assert told == [*wait, *TORCHRUN[:3], "--node-rank", "0", "--local-addr", "10.0.0.10", *TORCHRUN[3:]]
    engine = [*wait, "/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert node_argv(engine, ADDRESSES, 0) == engine


def test_a_wait_before_the_command_reaches_it_whole_through_the_words_of_a_node() -> None:
    """Two "--" on one command line: the first is on_node's, the second the wait's. Nobody listens, so it ends late."""
    wait = ("services.runtime.after", "http://127.0.0.1:9/readyz", "--deadline-s", "0.1", "--")
    with start("--addresses", "127.0.0.1", "--", sys.executable, "-m", *wait, sys.executable, "-c", REPORT) as process:
        assert process.wait(timeout=30) == 69
        assert process.stderr is not None
        assert process.stderr.read() == "http://127.0.0.1:9/readyz had not loaded after 0.1 s\n"


def test_gpus_are_counted_among_those_that_slurm_left_visible() -> None:
    assert node_env({}, "10.0.0.9", ["0", "2"])["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert node_env({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "10.0.0.9", ["0", "2"])["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert node_env({"CUDA_VISIBLE_DEVICES": "4,5"}, "10.0.0.9", [])["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(ValueError, match="GPUs 0,2 are planned, but 2 are visible here"):
        node_env({"CUDA_VISIBLE_DEVICES": "4,5"}, "10.0.0.9", ["0", "2"])


def test_the_interface_is_that_of_the_nodes_address_unless_the_environment_names_one() -> None:
    assert interface_of("127.0.0.9") == "lo"
    assert interface_of("203.0.113.7") is None
    assert node_env({"NCCL_SOCKET_IFNAME": "ib0"}, "127.0.0.9", []) == {
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_the_command_runs_with_what_its_node_adds_and_its_code_is_the_steps() -> None:
    words = ("--addresses", "127.0.0.10,127.0.0.9", "--names", "n1,n2", "--gpus", "1", "--")
    with start(*words, sys.executable, "-c", REPORT + "; sys.exit(78)", "a b", CUDA_VISIBLE_DEVICES="6,7") as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "7 ['a b']"
        assert process.wait(timeout=10) == 78


def test_a_byte_on_standard_input_is_a_signal_and_its_end_is_the_end_of_everything() -> None:
    """Scenario: the launcher asks by SIGTERM, then goes away; the process ignores the first.
    Result: it gets exactly that signal, and nothing of it is left."""
    script = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    with start("--addresses", "127.0.0.1", "--", sys.executable, "-u", "-c", script) as process:
        assert process.stdout is not None and process.stdin is not None
        grandchild = int(process.stdout.readline())
        process.stdin.write(chr(signal.SIGTERM))
        process.stdin.flush()
        assert process.stdout.readline().strip() == "asked"
        process.stdin.close()
        assert process.wait(timeout=10) == 128 + signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(grandchild, 0)


def test_signals_that_slurm_sends_to_every_process_are_not_doubled() -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)\n"
    )
    with start("--addresses", "127.0.0.1", "--", sys.executable, "-c", script) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        process.communicate(input="", timeout=10)
    assert process.returncode == 128 + signal.SIGKILL
