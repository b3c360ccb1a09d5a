"""uvicorn's HTTP protocol with an end to everything that a client can draw out: headers, bodies, connections.

Notable:
- uvicorn bounds only the silence between two requests. A client that sends one byte of a header a second, or of a body
  that was refused long ago, or that does not read its reply, would hold its connection for ever.
- Over the limit of connections the oldest one that has no whole request under way is closed: who holds a thousand of
  them open cannot keep the health routes from answering. Where all have one, the newcomer is told to come back.
"""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_DEADLINE_S = 10.0
"""From a connection's, or a request's, first byte to the end of its headers."""
MAX_HEADER_BYTES = 64 * 1024
MAX_CONNECTIONS = 4096
OTHER_FILES = 256
"""Open files that are no connections."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """One connection; `bounded` makes the class for one server."""

    header_deadline_s: ClassVar[float] = HEADER_DEADLINE_S
    body_deadline_s: ClassVar[float] = 60.0
    max_connections: ClassVar[int] = MAX_CONNECTIONS

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._opened_at = time.monotonic()
        self._deadline: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._in_headers = True
        self._arm(self.header_deadline_s)
        if len(self.connections) > self.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, as long as headers stay small."""
        if self._in_headers:
            if self._deadline is None:
                self._arm(self.header_deadline_s)
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._arm(self.body_deadline_s)

    def resume_writing(self) -> None:
        """It reads."""
        self._disarm()
        super().resume_writing()

    def on_headers_complete(self) -> None:
        """Begin to wait for the body."""
        self._in_headers, self._num_header_bytes = False, 0
        self._arm(self.body_deadline_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is here; the next one's headers may begin."""
        self._in_headers = True
        self._disarm()
        super().on_message_complete()

    @property
    def is_working(self) -> bool:
        """Whether a whole request waits for its answer."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _arm(self, delay_s: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(delay_s, self._give_up)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.abort()

    def _make_room(self) -> None:
        others = [c for c in self.connections if isinstance(c, BoundedProtocol) and not c.is_working and c is not self]
        oldest = min(others, key=lambda c: c._opened_at, default=None)
        if oldest is not None:
            oldest.transport.abort()
            return
        self.transport.write(_FULL)
        self.transport.close()


def bounded(*, body_deadline_s: float) -> type[BoundedProtocol]:
    """The protocol of one server.

    Args:
        body_deadline_s: From the end of a request's headers to the end of its body, answered or not.
    """
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(16, min(MAX_CONNECTIONS, soft_limit - OTHER_FILES))
    return type(
        "BoundedHttpProtocol", (BoundedProtocol,), {"body_deadline_s": body_deadline_s, "max_connections": most}
    )
