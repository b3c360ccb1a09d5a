"""A TCP proxy between two ends of a link that cuts it, holds it, or swallows one direction."""

from __future__ import annotations

import asyncio
from types import TracebackType


class TcpProxy:
    """Forwards to `target_port`; "down" is from the target (the sender) to whoever connects (the receiver)."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.cuts: list[int] = []
        """bytes down after which each of the next connections is cut, both ways at once"""
        self.swallow_up_after: int | None = None
        """bytes down after which nothing goes up any more"""
        self.num_cut = 0
        self.swallowed = asyncio.Event()
        """something was swallowed"""
        self._held: set[asyncio.Transport] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.close()
        self.cut_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut_all(self) -> None:
        """Cut every connection there is."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def hold_all(self) -> None:
        """Forward nothing more on the connections there are, without closing them; new ones are not held."""
        self._held.update(writer.transport for writer in self._writers)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, up_writer]
        limit = self.cuts.pop(0) if self.cuts else None
        num_down = [0]
        for copy in (
            self._copy_down(up_reader, writer, up_writer, limit, num_down),
            self._copy_up(reader, up_writer, writer, num_down),
        ):
            task = asyncio.create_task(copy)
            self._tasks.add(task)

    async def _copy_down(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
        limit: int | None,
        num_down: list[int],
    ) -> None:
        try:
            while data := await reader.read(65536):
                if writer.transport in self._held:
                    continue
                if limit is not None and num_down[0] + len(data) > limit:
                    writer.write(data[: limit - num_down[0]])
                    await writer.drain()
                    await asyncio.sleep(0.05)  # let the half reach the other end before the cut
                    self.num_cut += 1
                    break
                num_down[0] += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.transport.abort()
        other.transport.abort()

    async def _copy_up(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
        num_down: list[int],
    ) -> None:
        try:
            while data := await reader.read(65536):
                if writer.transport in self._held:
                    continue
                if self.swallow_up_after is not None and num_down[0] > self.swallow_up_after:
                    self.swallowed.set()
                    continue
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.transport.abort()
        other.transport.abort()
