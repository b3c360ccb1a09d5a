"""Which of torch's errors mean that a peer was lost, and what is known of the peer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from services.training.ranks import Ranks, is_lost_peer
from services.wire.errors import PeerLost

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:34696. This is typically caused by"),
        RuntimeError(f"{GLOO}pair.cc:537] Read error [127.0.0.1]:8583: Connection reset by peer."),
        RuntimeError(f"{GLOO}unbound_buffer.cc:129] Timed out waiting 3000ms for send operation to complete"),
        RuntimeError("Application timeout caused pair closure"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error, ncclRemoteError"),
        dist.DistNetworkError("The client socket has timed out after 5000ms"),
        dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cpu//0"),
    ],
    ids=lambda error: str(error)[-40:],
)
def test_a_dead_a_frozen_and_an_unreachable_peer_are_lost(error: RuntimeError) -> None:
    """The first four are what torch 2.13 says over gloo: killed, killed while it was read from, stopped, and after."""
    assert is_lost_peer(error)
    with pytest.raises(PeerLost, match="rank 0 lost its peers in a forward pass of step 3") as caught:  # noqa: SIM117
        with Ranks().during("step 3", collective="a forward pass"):
            raise error
    assert caught.value.__cause__ is error and caught.value.exit_code == 69


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError(f"[enforce fail at {GLOO[1:]}pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"),
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp, invalid usage, ncclInvalidUsage"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=lambda error: type(error).__name__ + str(error)[-20:],
)
def test_a_rank_s_own_error_passes_as_it_is(error: RuntimeError) -> None:
    assert not is_lost_peer(error)
    with pytest.raises(type(error)) as caught, Ranks().during("step 3", collective="a forward pass"):
        raise error
    assert caught.value is error


def test_the_phase_ends_with_its_block_also_after_an_error() -> None:
    ranks = Ranks()
    with pytest.raises(PeerLost, match=r"in a gather of step 1 \("), ranks.during("step 1", collective="a gather"):
        raise RuntimeError("Application timeout caused pair closure")
    with pytest.raises(PeerLost, match=r"in a gather of step 2 \("), ranks.during("step 2", collective="a gather"):
        raise RuntimeError("Application timeout caused pair closure")


def test_a_peer_of_this_machine_is_told_as_stopped_then_as_gone_and_not_at_all_while_it_runs() -> None:
    peer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        ranks = Ranks(0, 3)
        ranks.know_peers({1: os.getpid(), 2: peer.pid})

        def told() -> str:
            with pytest.raises(PeerLost) as caught, ranks.during("step 1", collective="a gather"):
                raise RuntimeError("Application timeout caused pair closure")
            return str(caught.value)

        assert "pid" not in told()
        peer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, peer.pid, os.WSTOPPED | os.WNOWAIT)
        assert f"rank 2 (pid {peer.pid}) is stopped; " in told()
        peer.kill()
        peer.wait()
        assert f"rank 2 (pid {peer.pid}) is gone; " in told() and "rank 1" not in told()
    finally:
        peer.kill()
        peer.wait()
