"""Grid items for one data rank: a thread receives, checks and acknowledges them, the trainer takes them in order.

Notable:
- Idempotent on (epoch, stream, step, rank): a repeated item is acknowledged and dropped, the same key with other
  content is a GridConflict. Late, early, foreign and undecodable items are dropped and counted, never trained.
- An item is acknowledged once it decodes (digest and schema checked) and stands in the queue.
- The thread only ever polls, so `close` ends it in bounded time, and so does the end of the process.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import uuid
from collections import Counter, deque

import zmq
from zmq.utils.monitor import recv_monitor_message

from services.runtime.auth import Token
from services.transport.curve import LinkKeys
from services.transport.link import (
    CONNECT_INTERVAL_MS,
    LINGER_MS,
    MAX_CONNECT_INTERVAL_MS,
    Ack,
    Hello,
    Nack,
    NackReason,
    Position,
    check_address,
    encode_control,
    identity,
    set_options,
)
from services.wire.codec import decode_item, item_digest
from services.wire.errors import CodecError, ContractError, DeadlineExceeded, DependencyLost, GridConflict
from services.wire.grids import STREAM_ARRAYS, GridHeader, GridItem, Stream

HELLO_INTERVAL_S = 0.5
NUM_REMEMBERED_STEPS = 64
"""Digests of so many accepted steps are kept, to tell a repeated item from a conflicting one."""
NUM_ANNOUNCED_STEPS = 4
MAX_ITEM_BYTES = 4 * 2**30

_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_LINK_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILURES


class GridReceiver:
    """The receiving end of one data rank of one stream.

    Args:
        address: tcp://HOST:PORT of the sender; it may come up later, go away and come back
        stream: "policy" or "critic"
        run_id: items of another run are dropped
        epoch: likewise
        data_rank: whose items
        num_data_ranks: how many ranks the sender must think there are
        first_step: the first step to accept; steps are consecutive from there
        max_item_bytes: a larger item is dropped, before it is held in memory where one frame alone is too large
        credit: items held here that were not taken yet
        key: the run's grid key: the sender must have it too; None = a plain link, on loopback only

    Raises:
        ConfigError: the address is beyond loopback, and there is no key.
    """

    def __init__(
        self,
        address: str,
        *,
        stream: Stream,
        run_id: str,
        epoch: int,
        data_rank: int,
        num_data_ranks: int,
        first_step: int = 0,
        max_item_bytes: int = MAX_ITEM_BYTES,
        credit: int = 1,
        key: Token | None = None,
    ) -> None:
        check_address(address, listens=False, is_secured=key is not None)
        self._keys = LinkKeys(key) if key is not None else None
        self.failure: Exception | None = None
        """why nothing more will be accepted, None while all is well"""
        self._address = address
        self._stream: Stream = stream
        self._run_id = run_id
        self._epoch = epoch
        self._data_rank = data_rank
        self._num_data_ranks = num_data_ranks
        self._max_item_bytes = max_item_bytes
        self._credit = credit
        self._instance = uuid.uuid4().hex
        self._connection = 0
        self._expected_step = first_step
        self._accepted: dict[int, str] = {}
        self._ready: deque[GridItem] = deque()
        self._counters: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._thread = threading.Thread(target=self._run, name=f"{stream}-grid-receiver-{data_rank}", daemon=True)
        self._thread.start()

    @property
    def counters(self) -> dict[str, int]:
        """Items accepted, and items dropped by reason, since the start."""
        with self._changed:
            return dict(self._counters)

    def waiting_step(self) -> int | None:
        """Return the step of the oldest item that can be taken, without waiting; None where there is none."""
        with self._changed:
            return self._ready[0].header.step if self._ready else None

    def take(self, step: int, *, deadline_s: float) -> GridItem:
        """Wait for the item of `step` and take it; its room is granted to the sender again.

        Raises:
            ContractError: the oldest item is of a later step, so this one will never come.
            DeadlineExceeded: nothing came in time.
            GridConflict: the sender contradicted itself.
        """
        what = f"{self._stream} grid of step {step} for data rank {self._data_rank}"
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self.failure or self._stopping.is_set(), deadline_s)
            if self.failure is not None:
                raise self.failure
            if not self._ready:
                if self._stopping.is_set():
                    raise DependencyLost(f"the receiver was closed while it waited for {what}")
                raise DeadlineExceeded(what, deadline_s)
            if self._ready[0].header.step != step:
                ready = self._ready[0].header.step
                raise ContractError(f"{self._stream} step {step} was asked for, the oldest item is of step {ready}")
            item = self._ready.popleft()
        self._wake()
        return item

    def close(self) -> None:
        """End the thread, handing over a last acknowledgement if that takes no longer than half a second."""
        self._stopping.set()
        if self._thread.is_alive():
            self._wake()
            self._thread.join(timeout=5 + LINGER_MS / 1000)
        with self._changed:
            self._changed.notify_all()
        if self._wake_write >= 0 and not self._thread.is_alive():
            os.close(self._wake_write)
            os.close(self._wake_read)
            self._wake_write = -1

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread just as well
            os.write(self._wake_write, b".")

    def _run(self) -> None:
        """Thread boundary: whatever ends the thread is what `take` raises."""
        try:
            with zmq.Context() as context:
                self._receive(context)
        except Exception as error:
            self._fail(error)

    def _receive(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with context.socket(zmq.DEALER) as socket:
            set_options(socket, self._address, max_message_bytes=self._max_item_bytes)
            if self._keys is not None:
                self._keys.secure_receiver(socket)
            socket.set(zmq.IDENTITY, identity(self._stream, self._data_rank))
            socket.set(zmq.RECONNECT_IVL, CONNECT_INTERVAL_MS)
            socket.set(zmq.RECONNECT_IVL_MAX, MAX_CONNECT_INTERVAL_MS)
            socket.set(zmq.IMMEDIATE, 1)  # nothing piles up for a sender that is not there
            with socket.get_monitor_socket(_LINK_EVENTS) as monitor:
                self._serve(socket, monitor)
                socket.disable_monitor()

    def _serve(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        for source in (socket, monitor, self._wake_read):
            poller.register(source, zmq.POLLIN)
        # no Hello before the connection is numbered: the sender would take the numbered one for a new connection
        hello_due_s, connect_due_s, connected = 0.0, 0.0, False
        while not self._stopping.is_set():
            now_s = time.monotonic()
            if now_s >= connect_due_s:
                socket.connect(self._address)
                connect_due_s = math.inf
            if now_s >= hello_due_s:
                if connected:
                    self._say(socket, self._hello())
                hello_due_s = now_s + HELLO_INTERVAL_S
            events = dict(poller.poll(int((min(hello_due_s, connect_due_s) - now_s) * 1000) + 1))
            if self._wake_read in events:
                os.read(self._wake_read, 4096)
                hello_due_s = 0.0
            if monitor in events:
                event = recv_monitor_message(monitor)["event"]
                connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                if event & _FAILURES:
                    self._count("refused_handshake")
                if connected:
                    self._connection += 1
                    hello_due_s = 0.0
                else:
                    # libzmq itself never comes back from a broken protocol or an oversized message: connect anew
                    with contextlib.suppress(zmq.ZMQError):
                        socket.disconnect(self._address)
                    connect_due_s = time.monotonic() + CONNECT_INTERVAL_MS / 1000
            if socket in events:
                frames = self._read_message(socket)
                self._say(socket, self._drop("oversized") if frames is None else self._judge(frames))

    def _read_message(self, socket: zmq.Socket[bytes]) -> list[memoryview] | None:
        """Read one multipart; None where it is larger than an item may be (then it is read and let go)."""
        frames: list[memoryview] = []
        num_bytes, fits = 0, True
        while True:
            frame = socket.recv(copy=False)
            num_bytes += len(frame)
            fits = fits and num_bytes <= self._max_item_bytes and len(frames) <= len(STREAM_ARRAYS[self._stream])
            if fits:
                frames.append(frame.buffer)
            else:
                frames.clear()
            if not frame.more:
                return frames if fits else None

    def _judge(self, frames: list[memoryview]) -> Hello | Ack | Nack:
        """Accept one message into the queue, or drop it; return what to answer."""
        try:
            item = decode_item(frames, max_bytes=self._max_item_bytes)
        except CodecError:
            return self._drop("undecodable")
        header = item.header
        if header.run_id != self._run_id or header.stream != self._stream or header.epoch > self._epoch:
            return self._refuse(header, "foreign")
        if header.epoch < self._epoch:
            return self._refuse(header, "old_epoch")
        if (header.data_rank, header.num_data_ranks) != (self._data_rank, self._num_data_ranks):
            return self._refuse(header, "foreign")
        digest = item_digest(frames[0])
        known = self._accepted.get(header.step)
        if known is not None:
            if known == digest:
                self._count("duplicate")
                return self._ack(header.step, digest)
            self._fail(GridConflict(f"{header.stream} step {header.step} came again with other content"))
            return self._refuse(header, "conflict")
        if header.step != self._expected_step:
            return self._refuse(header, "late" if header.step < self._expected_step else "early")
        if self.failure is not None or self._room() == 0:
            return self._refuse(header, "no_credit")
        self._accept(item, digest)
        return self._ack(header.step, digest)

    def _accept(self, item: GridItem, digest: str) -> None:
        with self._changed:
            self._ready.append(item)
            self._accepted[item.header.step] = digest
            self._accepted.pop(item.header.step - NUM_REMEMBERED_STEPS, None)
            self._expected_step += 1
            self._counters["accepted"] += 1
            self._changed.notify_all()

    def _room(self) -> int:
        with self._changed:
            return 0 if self.failure is not None else self._credit - len(self._ready)

    def _drop(self, reason: str) -> Hello:
        """Count a message without a readable key; where this receiver stands is answer enough."""
        self._count(reason)
        return self._hello()

    def _refuse(self, header: GridHeader, reason: NackReason) -> Nack:
        self._count(reason)
        return Nack(position=self._position(), step=header.step, reason=reason)

    def _ack(self, step: int, digest: str) -> Ack:
        return Ack(position=self._position(), step=step, digest=digest)

    def _hello(self) -> Hello:
        recent = sorted(self._accepted)[-NUM_ANNOUNCED_STEPS:]
        have = {step: self._accepted[step] for step in recent}
        return Hello(position=self._position(), instance=self._instance, connection=self._connection, have=have)

    def _position(self) -> Position:
        return Position(
            run_id=self._run_id,
            epoch=self._epoch,
            stream=self._stream,
            data_rank=self._data_rank,
            num_data_ranks=self._num_data_ranks,
            expected_step=self._expected_step,
            credit=self._room(),
        )

    def _say(self, socket: zmq.Socket[bytes], message: Hello | Ack | Nack) -> None:
        with contextlib.suppress(zmq.Again):  # no connection just now: the next Hello says it all again
            socket.send(encode_control(message), zmq.DONTWAIT)

    def _count(self, what: str) -> None:
        with self._changed:
            self._counters[what] += 1

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()
