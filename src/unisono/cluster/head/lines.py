"""The connections to the head, seen from the head."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Final

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from unisono.cluster.worker.packed import pack
from unisono.core.events import StepFinished
from unisono.core.messages import Happened, Message, Steps, encode

__all__ = ["Line", "Lines"]

MAX_QUEUED: Final = 10_000
MAX_STEPS_QUEUED: Final = 1_000


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


class Lines(dict[str, Line]):
    """The connections of the workers and agents that have said hello, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._encoded_last: tuple[Message | None, bytes] = (None, b"")

    def send(self, name: str, message: Message) -> None:
        """Send a message to one, if it is connected. A message that goes to many, one by one, is encoded once."""
        line = self.get(name)
        if line is not None:
            line.put(self._encoded(message))

    def send_all(self, names: Iterable[str], message: Message) -> None:
        """Send a message to those of these that are connected."""
        data = encode(message)
        is_step = isinstance(message, Steps) or (
            isinstance(message, Happened) and isinstance(message.event, StepFinished)
        )
        for name in names:
            line = self.get(name)
            # An agent that is stopped for a while (Ctrl-Z) does not need the steps of that time.
            if line is not None and not (is_step and line.queue.qsize() > MAX_STEPS_QUEUED):
                line.put(data)

    def hang_up(self, name: str, message: Message) -> None:
        """Send a message, and close the connection."""
        line = self.get(name)
        if line is not None:
            line.put(encode(message))
            line.put(None)

    async def close(self, timeout_s: float) -> None:
        """Close all connections, and wait up to ``timeout_s`` for their last messages to go out."""
        for line in list(self.values()):
            line.put(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(line.sender for line in self.values()), return_exceptions=True)

    def _encoded(self, message: Message) -> bytes:
        known, data = self._encoded_last
        if known is not message:
            data = pack(encode(message))
            self._encoded_last = (message, data)
        return data
