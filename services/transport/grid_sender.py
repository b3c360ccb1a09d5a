"""Grid items to the data ranks of one trainer: kept until acknowledged, sent again until then.

Notable:
- An item leaves only when its rank said that it has room for that step, and is forgotten only when the rank said that
  it has it, with the same digest. In between it survives cut connections and restarted receivers.
- A new connection or a new receiver is answered at once; otherwise an item is sent again after `resend_after_s`, then
  after twice that, and so on.
- Everything runs on the caller's event loop: a task that reads control messages and sends what is due, one that counts
  peers who do not manage to shake hands, and one that answers who may come in, where the link has keys.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from services.runtime.auth import Token
from services.transport.curve import Gate, LinkKeys
from services.transport.link import (
    MAX_CONTROL_BYTES,
    Ack,
    Hello,
    Nack,
    Position,
    check_address,
    decode_control,
    identity,
    set_options,
)
from services.wire.codec import encode_item, item_digest
from services.wire.errors import CodecError, ContractError, DeadlineExceeded, DependencyLost, GridConflict
from services.wire.grids import GridItem, Stream

TICK_S = 0.1
MAX_RESEND_AFTER_S = 30.0
SLOWEST_BYTES_PER_S = 20e6
"""Sending and checking may take this long before a missing acknowledgement means anything."""


@dataclass(slots=True)
class _Pending:
    """One item that its rank has not acknowledged."""

    frames: list[bytes | memoryview]
    digest: str
    done: asyncio.Future[None]
    started_s: float
    num_sends: int = 0
    due_s: float = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(len(frame) for frame in self.frames)


@dataclass(slots=True)
class _Rank:
    """What is known of one data rank."""

    position: Position | None = None
    heard_s: float = 0.0
    link: tuple[str, int] = ("", 0)
    """instance and connection of its last Hello"""


@dataclass(slots=True)
class _State:
    ranks: list[_Rank]
    pending: dict[tuple[int, int], _Pending] = field(default_factory=dict)
    """by (data rank, step)"""
    counters: Counter[str] = field(default_factory=Counter)


class GridSender:
    """The sending end of one stream; make it inside a running event loop.

    Args:
        address: tcp://HOST:PORT to listen on; port 0 takes a free one, `address` then tells which
        stream: "policy" or "critic"
        run_id: items and receivers of another run are refused
        epoch: likewise
        num_data_ranks: receivers of this stream
        resend_after_s: first wait before an unacknowledged item is sent again
        key: the run's grid key: receivers must have it too; None = a plain link, on loopback only

    Raises:
        ConfigError: the address is beyond loopback and there is no key, or it is every interface.
        DependencyLost: the port cannot be bound.
    """

    def __init__(
        self,
        address: str,
        *,
        stream: Stream,
        run_id: str,
        epoch: int,
        num_data_ranks: int,
        resend_after_s: float = 2.0,
        key: Token | None = None,
    ) -> None:
        check_address(address, listens=True, is_secured=key is not None)
        keys = LinkKeys(key) if key is not None else None
        self._stream: Stream = stream
        self._run_id = run_id
        self._epoch = epoch
        self._resend_after_s = resend_after_s
        self._state = _State(ranks=[_Rank() for _ in range(num_data_ranks)])
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        set_options(self._socket, address, max_message_bytes=MAX_CONTROL_BYTES)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._gate = None
        if keys is not None:
            self._gate = Gate(self._context, keys, self._state.counters)
            keys.secure_sender(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise DependencyLost(f"cannot listen on {address} for {stream} grids: {error}") from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._serve(), name=f"{stream}-grid-sender")
        self._helpers = [loop.create_task(self._count_strangers(), name=f"{stream}-grid-monitor")]
        if self._gate is not None:
            self._helpers.append(loop.create_task(self._gate.serve(), name=f"{stream}-grid-gate"))

    async def send(self, items: list[GridItem], *, deadline_s: float) -> None:
        """Deliver one grid: return when every data rank has acknowledged its item.

        Args:
            items: one item per data rank, of one step
            deadline_s: seconds from now

        Raises:
            CodecError: an item that no receiver would accept.
            ContractError: items that are not one whole grid of this sender, or a rank that refuses this sender.
            DeadlineExceeded: naming the stream, the step and the first silent rank.
            GridConflict: a rank has other content for this step.
        """
        step = self._check_grid(items)
        encoded = [encode_item(item) for item in items]
        loop, started_s = asyncio.get_running_loop(), time.monotonic()
        grid = {
            (data_rank, step): _Pending(frames, item_digest(frames[0]), loop.create_future(), started_s)
            for data_rank, frames in enumerate(encoded)
        }
        self._state.pending.update(grid)
        self._send_due()
        try:
            async with asyncio.timeout(deadline_s):
                await self._first_failure_or_all([item.done for item in grid.values()])
        except TimeoutError:
            raise DeadlineExceeded(self._describe_wait(step), deadline_s) from None
        finally:
            for key, item in grid.items():
                self._state.pending.pop(key, None)
                item.done.cancel()

    def status(self) -> dict[str, Any]:
        """Return who waits for whom: each rank's position, what is unacknowledged, and the counters."""
        now_s = time.monotonic()
        return {
            "stream": self._stream,
            "address": self.address,
            "ranks": [
                {
                    "data_rank": data_rank,
                    "silent_s": round(now_s - rank.heard_s, 3) if rank.position else None,
                    "expected_step": rank.position.expected_step if rank.position else None,
                    "credit": rank.position.credit if rank.position else None,
                }
                for data_rank, rank in enumerate(self._state.ranks)
            ],
            "unacknowledged": [
                {
                    "data_rank": data_rank,
                    "step": step,
                    "num_sends": item.num_sends,
                    "age_s": round(now_s - item.started_s, 3),
                }
                for (data_rank, step), item in sorted(self._state.pending.items())
            ],
            "counters": dict(+self._state.counters),
        }

    async def close(self) -> None:
        """Stop sending and free the port; what was not acknowledged is forgotten."""
        tasks = [self._task, *self._helpers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # what ended it early was raised by `send`
        self._socket.disable_monitor()
        self._socket.close(linger=0)
        self._monitor.close(linger=0)
        if self._gate is not None:
            self._gate.close()
        await asyncio.to_thread(self._context.term)

    def _check_grid(self, items: list[GridItem]) -> int:
        headers = [item.header for item in items]
        num_data_ranks = len(self._state.ranks)
        if [header.data_rank for header in headers] != list(range(num_data_ranks)):
            raise ContractError(f"a {self._stream} grid has one item for each of {num_data_ranks} data ranks, in order")
        step = headers[0].step
        for header in headers:
            if (header.run_id, header.epoch, header.stream) != (self._run_id, self._epoch, self._stream):
                raise ContractError(f"an item of another run, epoch or stream: {header.key}")
            if header.step != step or header.num_data_ranks != num_data_ranks:
                raise ContractError(f"items of different grids: {header.key}")
            if (header.data_rank, step) in self._state.pending:
                raise ContractError(f"{self._stream} step {step} is being sent already")
        return step

    async def _first_failure_or_all(self, done: Sequence[asyncio.Future[None]]) -> None:
        """Wait for all ranks; a failing rank, or the sender's own task ending, ends the wait."""
        everything = asyncio.gather(*done)
        try:
            await asyncio.wait([everything, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not everything.done():
                if not self._task.cancelled():
                    self._task.result()  # raises what ended it
                raise DependencyLost(f"the {self._stream} grid sender was closed while it was sending")
            await everything
        finally:
            everything.cancel()

    async def _serve(self) -> None:
        while True:
            if await self._socket.poll(int(TICK_S * 1000)):
                sender_id, *frames = await self._socket.recv_multipart()
                self._handle(sender_id, frames)
            self._send_due()

    async def _count_strangers(self) -> None:
        """Connections whose handshake did not succeed: another protocol, or other keys. `_serve` never hears them."""
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            self._state.counters["strangers"] += 1 if event == zmq.EVENT_ACCEPTED else -1

    def _handle(self, sender_id: bytes, frames: list[bytes]) -> None:
        try:
            message = decode_control(frames)
        except CodecError:
            self._state.counters["garbage"] += 1
            return
        position = message.position
        if not self._is_ours(sender_id, position):
            self._state.counters["foreign"] += 1
            return
        rank = self._state.ranks[position.data_rank]
        rank.position = position
        rank.heard_s = time.monotonic()
        if isinstance(message, Hello):
            self._handle_hello(rank, message)
        elif isinstance(message, Ack):
            self._handle_ack(position.data_rank, message.step, message.digest)
        else:
            self._handle_nack(message)

    def _is_ours(self, sender_id: bytes, position: Position) -> bool:
        return (
            (position.run_id, position.epoch, position.stream) == (self._run_id, self._epoch, self._stream)
            and position.num_data_ranks == len(self._state.ranks)
            and 0 <= position.data_rank < position.num_data_ranks
            and sender_id == identity(self._stream, position.data_rank)
        )

    def _handle_hello(self, rank: _Rank, hello: Hello) -> None:
        for step, digest in hello.have.items():
            self._handle_ack(hello.position.data_rank, step, digest)
        if rank.link != (hello.instance, hello.connection):
            rank.link = (hello.instance, hello.connection)
            for (data_rank, _), item in self._state.pending.items():
                if data_rank == hello.position.data_rank:
                    item.due_s = 0.0

    def _handle_ack(self, data_rank: int, step: int, digest: str) -> None:
        item = self._state.pending.get((data_rank, step))
        if item is None:
            return
        if digest != item.digest:
            self._fail(item, GridConflict(f"data rank {data_rank} has other content for {self._stream} step {step}"))
        elif not item.done.done():
            self._state.counters["acknowledged"] += 1
            item.done.set_result(None)
        del self._state.pending[(data_rank, step)]

    def _handle_nack(self, nack: Nack) -> None:
        data_rank = nack.position.data_rank
        self._state.counters[f"refused_{nack.reason}"] += 1
        item = self._state.pending.get((data_rank, nack.step))
        if item is None or nack.reason in ("early", "no_credit"):
            return  # its position, noted above, decides when the item goes out again
        what = f"{self._stream} step {nack.step}"
        if nack.reason == "late":
            # a receiver that starts above this step has trained it before: the receiver is the authority on that
            if not item.done.done():
                item.done.set_result(None)
        elif nack.reason == "conflict":
            self._fail(item, GridConflict(f"data rank {data_rank} has other content for {what}"))
        else:
            self._fail(item, ContractError(f"data rank {data_rank} refused {what}: {nack.reason}"))
        del self._state.pending[(data_rank, nack.step)]

    @staticmethod
    def _fail(item: _Pending, error: ContractError) -> None:
        if not item.done.done():
            item.done.set_exception(error)

    def _send_due(self) -> None:
        now_s = time.monotonic()
        for (data_rank, step), item in sorted(self._state.pending.items()):
            position = self._state.ranks[data_rank].position
            if position is None or now_s < item.due_s or step >= position.expected_step + position.credit:
                continue
            if not self._try_send(data_rank, item):
                item.due_s = now_s + TICK_S
                continue
            self._state.counters["sent" if item.num_sends == 0 else "sent_again"] += 1
            wait_s = min(self._resend_after_s * 2**item.num_sends, MAX_RESEND_AFTER_S)
            item.due_s = now_s + wait_s + item.num_bytes / SLOWEST_BYTES_PER_S
            item.num_sends += 1

    def _try_send(self, data_rank: int, item: _Pending) -> bool:
        message = [identity(self._stream, data_rank), *item.frames]
        sending = asyncio.ensure_future(self._socket.send_multipart(message, flags=zmq.DONTWAIT, copy=False))
        error = sending.exception()  # with DONTWAIT the future is done when it is returned
        if error is None:
            return True
        if isinstance(error, zmq.ZMQError) and error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            return False  # not connected just now, or its queue is full: the next Hello or tick tries again
        raise error

    def _describe_wait(self, step: int) -> str:
        for data_rank, rank in enumerate(self._state.ranks):
            if (data_rank, step) in self._state.pending:
                if rank.position is None:
                    where = "which never connected"
                else:
                    silent_s = time.monotonic() - rank.heard_s
                    where = f"which expects step {rank.position.expected_step}, last heard {silent_s:.1f} s ago"
                return f"data rank {data_rank} to acknowledge {self._stream} step {step}, {where}"
        return f"acknowledgements of {self._stream} step {step}"
