"""The clients for anyone, against the real application behind a real server on loopback."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.config.train import OptimConfig, TrainModelConfig, ValueConfig
from services.runtime.auth import read_token
from services.runtime.ports import PortReservation
from services.training.control import ServerThread
from services.wire.errors import ContractError, DeadlineExceeded
from tests.scoring import SEQ_LEN, VOCABULARY, serving
from value_service.client import AsyncValueClient, ValueClient

CONFIG = ValueConfig(model=TrainModelConfig(seq_len=SEQ_LEN), optim=OptimConfig(lr=0.1))
BRANCHES = [[1, 2, 3], [4]]


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """Address and token file of a service."""
    token_file = tmp_path_factory.mktemp("token") / "token"
    with (
        serving(tiny_model, CONFIG, token=read_token(token_file, make=True)) as started,
        PortReservation(["port"]) as reservation,
    ):
        url = f"http://127.0.0.1:{reservation.ports['port']}"
        server = ServerThread(started.app, url)
        server.start()
        yield url, token_file
        server.stop()


def test_the_synchronous_client_scores_from_several_threads_and_says_what_is_wrong(service) -> None:
    url, token_file = service
    with ValueClient(url, token_file=token_file) as client:
        assert (client.facts().max_model_len, client.facts().vocab_size) == (SEQ_LEN, VOCABULARY)
        reply = client.score(BRANCHES)
        assert [len(values) for values in reply.values] == [3, 1] and len(reply.bootstrap_values) == 2
        assert reply.critic_step == 0
        others: list = []
        threads = [threading.Thread(target=lambda: others.append(client.score(BRANCHES))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(others) == 4
        with pytest.raises(ContractError, match="branch 1: a token id outside the vocabulary"):
            client.score([[1], [VOCABULARY]])
        with pytest.raises(ContractError, match="batched_token_ids: no branch"):
            client.score([])
    client.close()


async def test_the_asynchronous_client_gives_the_same_and_the_synchronous_one_works_within_a_loop(service) -> None:
    url, token_file = service
    async with AsyncValueClient(url, token_file=token_file) as client:
        first, second = await asyncio.gather(client.score(BRANCHES), client.score(BRANCHES[::-1]))
    assert first.values[0] == pytest.approx(second.values[1], abs=1e-5)
    with ValueClient(url, token_file=token_file) as other:
        assert other.score(BRANCHES).values[0] == pytest.approx(first.values[0], abs=1e-5)


def test_without_the_token_nothing_is_scored(service) -> None:
    url, _ = service
    with ValueClient(url) as client, pytest.raises(ContractError, match="answered 401"):
        client.score(BRANCHES)


def test_a_service_that_is_not_there_is_named_at_the_deadline() -> None:
    with (
        ValueClient("http://127.0.0.1:9", deadline_s=0.5) as client,
        pytest.raises(DeadlineExceeded, match="cannot be reached"),
    ):
        client.score(BRANCHES)


def test_the_clients_import_no_torch() -> None:
    code = "import sys, value_service.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0
