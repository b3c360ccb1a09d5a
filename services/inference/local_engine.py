"""The local engine: continuous batching of one transformers model, in a thread that alone touches it.

Legend: N rows of a step.

Notable:
- Requests that wait together are prefilled together as one packed row; everything running decodes together.
- Other threads only append to an inbox; between two steps the engine thread runs it, so pausing, swapping weights and
  aborting happen at a token boundary, and each token carries the version that sampled it, exactly.
- A pause that clears the cache marks every live request for a new prefill (prompt and answer so far) under whatever
  weights are loaded then: each version's log-probabilities equal a full forward of its own snapshot.
- Asleep it holds neither weights nor cache: a pause that aborts, and memory that is given back. Weights that come back
  other than they went end the engine.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Literal, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from services.inference.kv_slots import KVSlots
from services.inference.local_request import EngineCounters, EngineRequest, promise
from services.inference.sampling import sample
from services.inference.weights import StagedWeights, swap
from services.model.checksum import tensors_of, weights_checksum
from services.model.layout import PackedLayout
from services.model.sleep import HostBackup, own_memory
from services.wire.errors import ConfigError, ContractError

T = TypeVar("T")
PauseMode = Literal["abort", "wait", "keep"]
PREFILL_TOKENS = 4096
"""Tokens of one packed prefill (more only for a single longer sequence): bounds its memory and the pause it causes."""


class LocalEngine:
    """Owns a model and samples from it; every public method may be called from any thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int,
        max_model_len: int,
        version_label: str = "v0",
        deliver: Callable[[list[EngineRequest]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Prepare; `start` runs it.

        Args:
            model: with the packed attention, in eval mode.
            max_num_seqs: sequences decoded together.
            max_model_len: longest sequence, prompt and answer together.
            version_label: label of the weights the model has now.
            deliver: called in the engine thread with the requests that finished in a step.
            on_failure: called in the engine thread once, when it ends by an error.
        """
        self.model = model
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.version_label = version_label
        self.counters = EngineCounters()
        self.failure: BaseException | None = None
        self._deliver = deliver
        self._on_failure = on_failure
        self._device = model.device
        self._kv = KVSlots(max_num_seqs, max_model_len)
        own_memory(model)
        self._backup = HostBackup(lambda: tensors_of(model))
        self._free = list(range(max_num_seqs))
        self._waiting: deque[EngineRequest] = deque()
        self._to_prefill: list[EngineRequest] = []
        self._running: dict[int, EngineRequest] = {}  # slot -> request
        self._finished: list[EngineRequest] = []
        self._paused: PauseMode | None = None
        self._draining: list[Future[None]] = []
        self._stopping = False
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # ---- from any thread -------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @property
    def is_paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._paused is not None

    @property
    def is_asleep(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return self._backup.is_asleep

    def start(self) -> None:
        """Check the model and start the engine thread.

        Raises:
            ConfigError: when decoding from the slots does not equal a full forward.
        """
        self._self_check()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step, aborting what is in flight."""
        self._post(self._stop)
        self._thread.join()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; it waits until a slot is free and the engine is not paused."""
        self._post(lambda: self._add(request))

    def abort(self, requests: Iterable[EngineRequest]) -> None:
        """Finish these requests as "abort" with what they have."""
        chosen = list(requests)
        self._post(lambda: self._abort(chosen))

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """Stop sampling; see the modes of vLLM's `/pause`.

        Args:
            mode: "abort" finishes all requests as "abort"; "wait" lets running ones finish; "keep" freezes them.
            clear_cache: recompute the cache of kept requests before their next token.

        Returns:
            Done when nothing samples any more.
        """
        done: Future[None] = promise()
        self._post(lambda: self._pause(mode, clear_cache, done))
        return done

    def resume(self) -> Future[None]:
        """Go on after a pause; refused asleep (`ContractError`)."""
        return self._call_awake("resume", lambda: setattr(self, "_paused", None))

    def sleep(self) -> Future[int]:
        """Finish all requests as "abort" and give back weights and cache; what comes meanwhile waits.

        Returns:
            Bytes of weights given back; 0 where it slept already.
        """
        return self._call(self._sleep)

    def wake_up(self) -> Future[None]:
        """Take the weights again, check them, and go on; weights that are not what slept end the engine."""
        return self._call(self._wake_up)

    def weights_checksum(self) -> Future[str]:
        """Sum all weights between two steps; refused asleep (`ContractError`)."""
        return self._call_awake("weights_checksum", lambda: weights_checksum(self.model))

    def swap_weights(self, staged: StagedWeights, version_label: str) -> Future[None]:
        """Swap in checked weights and their label between two steps; refused asleep (`ContractError`)."""

        def work() -> None:
            swap(staged)
            self.version_label = version_label
            self.counters.updates += 1

        return self._call_awake("swap_weights", work)

    def set_version_label(self, label: str) -> Future[None]:
        """Label what is sampled from now on."""
        return self._call(lambda: setattr(self, "version_label", label))

    # ---- the engine thread -----------------------------------------------------------------------------------------

    def _post(self, work: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def _call(self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = promise()
        self._post(lambda: done.set_result(work()))
        return done

    def _call_awake(self, what: str, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = promise()

        def run() -> None:
            if self.is_asleep:
                done.set_exception(ContractError(f"the engine is asleep: {what} needs wake_up first"))
            else:
                done.set_result(work())

        self._post(run)
        return done

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    with self._wake:
                        while not self._inbox and not self._has_work():
                            self._wake.wait()
                        inbox, self._inbox = self._inbox, deque()
                    for work in inbox:
                        work()
                    if self._has_work() and not self._stopping:
                        self._step()
                    self._flush()
        except BaseException as error:  # a thread's own process boundary: the main thread re-raises it
            self.failure = error
            self._on_failure(error)

    def _has_work(self) -> bool:
        if self._paused is None:
            return bool(self._running or self._waiting)
        return self._paused == "wait" and bool(self._running)

    def _step(self) -> None:
        started = time.monotonic()
        if self._paused is None:
            self._admit()
        if self._to_prefill:
            self._prefill()
        else:
            self._decode()
        self.counters.last_progress = time.monotonic()
        self.counters.busy_s += self.counters.last_progress - started

    def _admit(self) -> None:
        while self._waiting and self._free:
            request = self._waiting.popleft()
            request.slot = heapq.heappop(self._free)
            self._running[request.slot] = request
            self._to_prefill.append(request)

    def _prefill(self) -> None:
        total, count = 0, 0
        for request in self._to_prefill:
            total += len(request.tokens)
            if count and total > PREFILL_TOKENS:
                break
            count += 1
        batch, self._to_prefill = self._to_prefill[:count], self._to_prefill[count:]
        logits = self._forward_prefill([request.tokens for request in batch], [request.slot for request in batch])
        self.counters.prefills += 1
        self.counters.prefilled_tokens += sum(len(request.tokens) for request in batch)
        self._accept(batch, logits)

    def _decode(self) -> None:
        batch = [self._running[slot] for slot in sorted(self._running)]
        logits = self._forward_decode(
            [request.tokens[-1] for request in batch],
            [request.slot for request in batch],
            [len(request.tokens) - 1 for request in batch],
        )
        self.counters.decodes += 1
        self._accept(batch, logits)

    def _accept(self, batch: list[EngineRequest], logits: torch.Tensor) -> None:
        """Sample a token for each row of `logits [N, V]` and finish what is finished."""
        tokens, logprobs = sample(
            logits,
            np.array([request.temperature for request in batch], dtype=np.float32),
            np.array([request.seed for request in batch], dtype=np.uint64),
            np.array([len(request.tokens) for request in batch], dtype=np.uint64),
        )
        self.counters.sampled_tokens += len(batch)
        label = self.version_label
        for request, token, logprob in zip(batch, tokens, logprobs, strict=True):
            num_sampled = len(request.logprobs)
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if request.spans and request.spans[-1][0] == label:
                request.spans[-1] = (label, request.spans[-1][1], num_sampled + 1)
            else:
                request.spans.append((label, num_sampled, num_sampled + 1))
            if token in request.stop_token_ids:
                self._finish(request, "stop")
            elif num_sampled + 1 >= request.max_tokens or len(request.tokens) >= self.max_model_len:
                self._finish(request, "length")

    def _finish(self, request: EngineRequest, reason: str) -> None:
        request.finish_reason = reason
        if request.slot >= 0:
            del self._running[request.slot]
            heapq.heappush(self._free, request.slot)
            request.slot = -1
        self._finished.append(request)

    def _flush(self) -> None:
        """Hand over what finished, and end the pauses that waited for the running requests."""
        if self._finished:
            finished, self._finished = self._finished, []
            self._deliver(finished)
        if self._draining and not self._running:
            for done in self._draining:
                done.set_result(None)
            self._draining = []

    # ---- what the inbox asks for ---------------------------------------------------------------------------------

    def _add(self, request: EngineRequest) -> None:
        self.counters.requests += 1
        self._waiting.append(request)

    def _abort(self, requests: list[EngineRequest]) -> None:
        chosen = {id(request) for request in requests if request.finish_reason is None}
        self._waiting = deque(request for request in self._waiting if id(request) not in chosen)
        self._to_prefill = [request for request in self._to_prefill if id(request) not in chosen]
        for request in requests:
            if request.finish_reason is None:
                self._finish(request, "abort")

    def _pause(self, mode: PauseMode, clear_cache: bool, done: Future[None]) -> None:
        self._paused = mode
        if mode == "abort":
            self._abort([*self._running.values(), *self._waiting])
        elif mode == "keep" and clear_cache:
            self._to_prefill = [self._running[slot] for slot in sorted(self._running)]
        if mode == "wait" and self._running:
            self._draining.append(done)
        else:
            self._flush()
            done.set_result(None)

    def _sleep(self) -> int:
        if self.is_asleep:
            return 0
        self._pause("abort", True, promise())
        self._kv = KVSlots(self.max_num_seqs, self.max_model_len)
        return self._backup.put_to_sleep()

    def _wake_up(self) -> None:
        changed = self._backup.wake()
        if changed:
            raise ContractError(f"weights woke up other than they fell asleep: {', '.join(changed[:3])}")
        self._paused = None

    def _stop(self) -> None:
        self._abort([*self._running.values(), *self._waiting])
        self._stopping = True

    # ---- forwards ------------------------------------------------------------------------------------------------

    def _forward_prefill(self, sequences: list[list[int]], slots: list[int]) -> torch.Tensor:
        """Store whole sequences and return the logits after each, `[N, V]`."""
        lengths = [len(tokens) for tokens in sequences]
        layout = PackedLayout.of(lengths, self._device)
        length_N = torch.tensor(lengths, device=self._device)
        self._kv.begin_prefill(torch.tensor(slots, device=self._device).repeat_interleave(length_N), layout)
        ids = torch.tensor([token for tokens in sequences for token in tokens], device=self._device)
        return self._forward(ids, layout.position_ids, length_N.cumsum(0) - 1)

    def _forward_decode(self, last_tokens: list[int], slots: list[int], positions: list[int]) -> torch.Tensor:
        """Store one more token of each slot and return the logits after it, `[N, V]`."""
        position_N = torch.tensor(positions, device=self._device)
        self._kv.begin_decode(torch.tensor(slots, device=self._device), position_N, max(positions) + 1)
        return self._forward(torch.tensor(last_tokens, device=self._device), position_N[None], 0)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | int) -> torch.Tensor:
        out = self.model(
            input_ids=ids[None], position_ids=positions, use_cache=False, logits_to_keep=keep, kv_slots=self._kv
        )
        return out.logits[0]

    @torch.inference_mode()
    def _self_check(self, tolerance: float | None = None) -> None:
        """Compare prefill plus decode with one full prefill: finds layers that keep a state besides keys and values."""
        tolerance = tolerance or (1e-4 if self.model.dtype == torch.float32 else 5e-2)
        length = min(6, self.max_model_len)
        generator = torch.Generator().manual_seed(0)
        vocab_size = self.model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportIndexIssue]
        tokens = torch.randint(int(vocab_size), (length,), generator=generator).tolist()
        full = self._forward_prefill([tokens], [0])
        self._forward_prefill([tokens[:-2]], [0])
        for position in (length - 2, length - 1):
            stepped = self._forward_decode([tokens[position]], [0], [position])
        difference = float((stepped - full).abs().max() / full.abs().max())
        if not difference <= tolerance:
            raise ConfigError(
                [
                    f"model.path: {type(self.model).__name__} decodes differently from a full forward (relative "
                    f'difference {difference:.1e}); fix: inference.engine = "vllm"'
                ]
            )
