"""The local engine asleep: memory given back, nothing sampled, and everything as it was afterwards or no engine."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.inference.local_engine import LocalEngine
from services.inference.local_request import EngineRequest
from services.inference.weights import read_snapshot
from services.model.checksum import tensors_of
from services.model.load import load_causal_lm
from services.wire.errors import ContractError
from tests.engines import PROMPT, make_snapshot

WAIT_S = 60


class Running:
    """An engine, and what came out of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.finished: queue.Queue[EngineRequest] = queue.Queue()
        self.failures: queue.Queue[BaseException] = queue.Queue()
        self.engine = LocalEngine(
            load_causal_lm(folder).eval(),
            max_num_seqs=4,
            max_model_len=512,
            deliver=lambda requests: [self.finished.put(request) for request in requests] and None,
            on_failure=self.failures.put,
        )
        self.engine.start()

    def submit(self, tokens: list[int], *, max_tokens: int, seed: int = 0) -> EngineRequest:
        request = EngineRequest(
            request_id="r",
            tokens=list(tokens),
            max_tokens=max_tokens,
            temperature=1.0,
            seed=seed,
            stop_token_ids=frozenset(),
        )
        self.engine.submit(request)
        return request

    def sample(self, tokens: list[int], *, max_tokens: int, seed: int = 0) -> EngineRequest:
        self.submit(tokens, max_tokens=max_tokens, seed=seed)
        return self.finished.get(timeout=WAIT_S)

    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for _, tensor in tensors_of(self.engine.model))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(make_snapshot(tmp_path / "v000000", 0))
    yield running
    running.engine.stop()


@torch.no_grad()
def logits(engine: LocalEngine) -> torch.Tensor:
    with torch.inference_mode():
        return engine._forward_prefill([PROMPT], [0]).clone()


def test_asleep_no_weight_and_no_cache_has_memory_and_awake_every_logit_is_what_it_was(running: Running) -> None:
    """Weights and rotary tables alike; the objects stay, so whoever holds one has it back."""
    engine = running.engine
    held = dict(tensors_of(engine.model))
    first = running.sample(PROMPT, max_tokens=40)
    before, num_bytes = logits(engine), running.num_bytes()
    slept_bytes = engine.sleep().result(WAIT_S)
    assert engine.is_asleep
    assert slept_bytes == num_bytes > 0
    assert running.num_bytes() == 0
    assert engine._kv._keys == engine._kv._values == {}
    engine.wake_up().result(WAIT_S)
    assert not engine.is_asleep
    assert running.num_bytes() == num_bytes
    assert torch.equal(logits(engine), before)
    assert all(now is held[name] or now.data_ptr() == held[name].data_ptr() for name, now in tensors_of(engine.model))
    again = running.sample(PROMPT, max_tokens=40)
    assert (again.sampled, again.logprobs) == (first.sampled, first.logprobs)


def test_a_request_in_flight_ends_as_aborted_and_goes_on_to_the_same_tokens(running: Running) -> None:
    """The draws of a position depend on seed and position alone: cut anywhere, the whole is the same."""
    whole = running.sample(PROMPT, max_tokens=400, seed=3)
    cut = running.submit(PROMPT, max_tokens=400, seed=3)
    while not cut.logprobs:
        pass_a_step(running)
    running.engine.sleep().result(WAIT_S)
    assert running.finished.get(timeout=WAIT_S) is cut
    assert cut.finish_reason == "abort"
    assert 0 < len(cut.sampled) < 400
    rest = running.submit(cut.tokens, max_tokens=400 - len(cut.sampled), seed=3)
    running.engine.wake_up().result(WAIT_S)
    assert running.finished.get(timeout=WAIT_S) is rest
    assert cut.sampled + rest.sampled == whole.sampled
    assert cut.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=1e-5)


def pass_a_step(running: Running) -> None:
    """Return after the engine thread has been between two steps."""
    running.engine.set_version_label("v0").result(WAIT_S)


def test_what_comes_meanwhile_waits_and_is_sampled_afterwards(running: Running) -> None:
    running.engine.sleep().result(WAIT_S)
    waiting = running.submit(PROMPT, max_tokens=5)
    for _ in range(20):
        pass_a_step(running)
    assert (running.engine.num_waiting, running.engine.num_running, waiting.sampled) == (1, 0, [])
    running.engine.wake_up().result(WAIT_S)
    assert running.finished.get(timeout=WAIT_S) is waiting
    assert (len(waiting.sampled), waiting.finish_reason) == (5, "length")


def test_a_second_sleep_and_a_second_wake_change_nothing(running: Running) -> None:
    """Nor does the second sleep end what waits for the first one's end."""
    engine = running.engine
    engine.sleep().result(WAIT_S)
    waiting = running.submit(PROMPT, max_tokens=5)
    assert engine.sleep().result(WAIT_S) == 0
    for _ in range(2):
        engine.wake_up().result(WAIT_S)
    assert running.finished.get(timeout=WAIT_S) is waiting
    assert waiting.finish_reason == "length"


def test_many_turns_later_the_weights_are_the_same(running: Running) -> None:
    weights = running.engine.weights_checksum().result(WAIT_S)
    for _ in range(5):
        running.engine.sleep().result(WAIT_S)
        running.engine.wake_up().result(WAIT_S)
        assert running.engine.weights_checksum().result(WAIT_S) == weights


def test_asleep_what_needs_weights_is_refused_and_the_engine_lives(running: Running, tmp_path: Path) -> None:
    """An update that was read before the sleep is refused too, and works afterwards."""
    engine = running.engine
    staged = read_snapshot(engine.model, make_snapshot(tmp_path / "v000001", 1))
    engine.sleep().result(WAIT_S)
    for asked in (engine.swap_weights(staged, "v1"), engine.weights_checksum(), engine.resume()):
        with pytest.raises(ContractError, match="asleep"):
            asked.result(WAIT_S)
    assert (engine.version_label, engine.failure) == ("v0", None)
    engine.wake_up().result(WAIT_S)
    engine.swap_weights(staged, "v1").result(WAIT_S)
    assert running.sample(PROMPT, max_tokens=3).spans == [("v1", 0, 3)]


def test_weights_that_come_back_other_than_they_went_end_the_engine_naming_one(tmp_path: Path) -> None:
    """One bit of what sleeps is turned over; no token is sampled from it."""
    running = Running(make_snapshot(tmp_path / "v000000", 0))
    running.engine.sleep().result(WAIT_S)
    running.submit(PROMPT, max_tokens=5)
    with torch.inference_mode():
        running.engine._backup._host[1000] ^= 1
    running.engine.wake_up()
    failure = running.failures.get(timeout=WAIT_S)
    assert isinstance(failure, ContractError)
    assert "model.embed_tokens.weight" in str(failure)
    assert running.engine.failure is failure
    assert running.finished.empty()


def test_an_engine_may_be_stopped_while_it_sleeps(running: Running) -> None:
    """The fixture stops it."""
    running.engine.sleep().result(WAIT_S)
    assert running.engine.is_asleep
