"""A grid sender with a bug: it checks nothing, and gives each data rank whatever it is told to, or nothing at all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

import zmq

from services.transport.link import Ack, decode_control, identity
from services.wire.codec import encode_item
from services.wire.grids import GridItem, Stream

POLL_MS = 100


class BrokenSender:
    """The ROUTER end of one stream."""

    def __init__(self, address: str = "tcp://127.0.0.1:*") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def deliver(self, stream: Stream, items: Mapping[int, GridItem], *, deadline_s: float) -> None:
        """Send each named data rank its item once it says hello, until all of them have acknowledged."""
        missing = {identity(stream, data_rank): item for data_rank, item in items.items()}
        greeted: set[bytes] = set()
        ends = time.monotonic() + deadline_s
        while missing:
            assert time.monotonic() < ends, f"no acknowledgement from {sorted(missing)} in {deadline_s} s"
            if not self._socket.poll(POLL_MS):
                continue
            who, *frames = self._socket.recv_multipart()
            if isinstance(decode_control(frames), Ack):
                missing.pop(who, None)
            elif who in missing and who not in greeted:
                greeted.add(who)
                self._socket.send_multipart([who, *encode_item(missing[who])])

    def __enter__(self) -> BrokenSender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._context.destroy(linger=0)
