"""One connection to the head, seen from the head."""

from __future__ import annotations

import asyncio
import contextlib

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

__all__ = ["Line"]

MAX_QUEUED = 10_000


class Line:
    """A connection, and the messages that wait to be sent over it."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_QUEUED)
        self.sender = asyncio.create_task(self._send())

    def put(self, data: bytes | None) -> None:
        """Queue a message; None closes the connection after those before it."""
        try:
            self.queue.put_nowait(data)
        except asyncio.QueueFull:
            self.connection.transport.abort()  # the other end does not read; the table notices its silence

    async def _send(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while (data := await self.queue.get()) is not None:
                await self.connection.send(data)
            await self.connection.close()
