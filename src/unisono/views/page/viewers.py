"""Viewers of runs: what they are told unasked, and their questions.

Two have viewers: a head, of its run (`unisono.cluster.head.viewing`), and `unisono watch --web`, of directories
(`unisono.views.page.directory_server`). Who may be one, and where answers come from, is theirs.

A head's members come first. So a run is encoded once for all viewers, at most once a second; it is sent to a few of
them at a time, between members' messages, and the more viewers there are, the rarer each is told. A viewer that does
not read what it was sent is told nothing more, and after a while its connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.protocol import State

from unisono.system.lifetime import end_when_silent

__all__ = ["EVERY_S", "MOST_EVENTS", "Feed", "Viewers"]

EVERY_S: Final = 1.0
MOST_PUSHES_PER_S: Final = 200.0
MOST_BYTES_PER_S: Final = 8e6
"""What all viewers together are sent unasked; where that is not enough, each is told more rarely."""
AT_ONCE: Final = 8
"""To so many viewers is sent between two looks at the members' messages."""
DEAF_S: Final = 30.0
"""A viewer that has not taken what it was sent for so long is dropped."""
UNSENT_BYTES: Final = 262_144
"""Of what a viewer does not take, the system keeps so much."""
PIECE_BYTES: Final = 65_536
"""Of a long answer so much is sent at once, and then members' messages are looked at."""
EVENTS_KEPT: Final = 1_000
MOST_EVENTS: Final = 200
"""So many events are told at once; of more, the last ones."""


class Feed:
    """A run as its viewers are told of it.

    Args:
        run: its number, which questions name it by.
    """

    def __init__(self, run: int = 0) -> None:
        self._run = run
        self._events: deque[bytes] = deque(maxlen=EVENTS_KEPT)
        self._frames: dict[tuple[int, int], bytes] = {}
        self.present = b""
        self.num_shown = self.num_events = 0

    def add(self, event: bytes) -> None:
        """Add an event, as JSON."""
        self._events.append(event)
        self.num_events += 1

    def show(self, present: bytes) -> None:
        """Set how the run is now, as a member of a JSON object: ``"overview":...`` or ``"error":...``.

        It is told to all, also if it is the same again: who looks sees that somebody is there.
        """
        self.present = present
        self.num_shown += 1
        self._frames.clear()

    def frame(self, told: int) -> bytes:
        """Return the frame for viewers that were told so many events: the same bytes for all of them."""
        key = told, self.num_events
        frame = self._frames.get(key)
        if frame is None:
            number = min(self.num_events - told, len(self._events), MOST_EVENTS)
            events = list(self._events)[len(self._events) - number :]
            text = b'{"run":%d,%b,"events":[%b]}' % (self._run, self.present, b",".join(events))
            frame = self._frames[key] = Frame(Opcode.TEXT, text).serialize(mask=False)
        return frame


@dataclass(eq=False)
class _Viewer:
    connection: ServerConnection
    told: list[tuple[int, int]]
    """Of each run: ``num_shown`` and ``num_events`` when it was told of it."""
    is_answered: bool = False
    """An answer is on its way, perhaps in several frames, and nothing may stand between them."""
    unsent: int = 0
    """Bytes that it had not taken when it was looked at last."""
    deaf_since: float | None = None


class Viewers:
    """Keeps the connections of viewers.

    Args:
        feeds: of the runs, by their numbers.
        refresh: brings the feeds up to date.
        answer: answers a question, a JSON object without its ``id``, with an object in JSON.
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        refresh: Callable[[], Awaitable[None]],
        answer: Callable[[dict[str, Any]], Awaitable[bytes]],
    ) -> None:
        self._feeds = feeds
        self._refresh = refresh
        self._answer = answer
        self._viewers: dict[ServerConnection, _Viewer] = {}
        self._queue: deque[_Viewer] = deque()
        self._pushing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._refreshed_at = -math.inf

    def __len__(self) -> int:
        return len(self._viewers)

    async def serve(self, connection: ServerConnection) -> None:
        """Talk to a viewer until it goes."""
        sock = connection.transport.get_extra_info("socket")
        end_when_silent(sock)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
        viewer = _Viewer(connection, [(0, max(0, feed.num_events - MOST_EVENTS)) for feed in self._feeds])
        self._viewers[connection] = viewer
        try:
            await self._look()
            self._tell(viewer)
            self._queue.append(viewer)
            if self._pushing is None or self._pushing.done():
                self._pushing = asyncio.create_task(self._push_all())
            async for asked in connection:
                await self._reply(viewer, asked)
        except ConnectionClosed:
            pass
        finally:
            del self._viewers[connection]

    def end(self) -> None:
        """Tell all viewers what was shown last, as far as they listen, and stop."""
        if self._pushing is not None:
            self._pushing.cancel()
        for viewer in self._viewers.values():
            self._tell(viewer)

    # -- questions -----------------------------------------------------------------------------------

    async def _reply(self, viewer: _Viewer, asked: str | bytes) -> None:
        # A function of its own: the variables of `serve` would keep the last answer as long as the viewer is there.
        number, question = _read(asked)
        if question is None:
            found = b'{"error":"this is no question: a JSON object with `id` and `get` is one"}'
        else:
            found = await self._answer(question)
        answer = b'{"id":%b,%b' % (number, found[1:])
        viewer.is_answered = True
        await viewer.connection.send(answer.decode() if len(answer) <= PIECE_BYTES else _pieces(answer))
        viewer.is_answered = False

    # -- what is told unasked ------------------------------------------------------------------------

    async def _push_all(self) -> None:
        """Tell all viewers, a few at a time, as long as there are some."""
        while self._viewers:
            await asyncio.sleep(self._pause(min(AT_ONCE, len(self._viewers))))
            await self._look()
            told = 0
            for _ in range(len(self._queue)):
                if told == AT_ONCE:
                    break
                viewer = self._queue.popleft()
                if self._viewers.get(viewer.connection) is not viewer:
                    continue  # it has gone
                self._queue.append(viewer)
                self._tell(viewer)
                told += 1
        self._queue.clear()

    def _pause(self, told: int) -> float:
        """Return how long to wait after so many viewers, so that each is told once in its time."""
        number = max(1, len(self._viewers))
        size = sum(len(feed.present) for feed in self._feeds)
        every_s = max(EVERY_S, number / MOST_PUSHES_PER_S, number * size / MOST_BYTES_PER_S)
        return every_s * max(1, told) / number

    async def _look(self) -> None:
        """Bring the feeds up to date, unless that was done less than a second ago."""
        async with self._lock:
            now = time.monotonic()
            if now - self._refreshed_at >= EVERY_S * 0.9:
                self._refreshed_at = now
                await self._refresh()

    def _tell(self, viewer: _Viewer) -> None:
        connection = viewer.connection
        if connection.state is not State.OPEN:
            return
        transport = connection.transport
        before, viewer.unsent = viewer.unsent, transport.get_write_buffer_size()
        if viewer.unsent:
            now = time.monotonic()
            if viewer.deaf_since is None or viewer.unsent < before:
                viewer.deaf_since = now
            if now - viewer.deaf_since > DEAF_S:
                transport.abort()
            return
        viewer.deaf_since = None
        if viewer.is_answered:
            return
        for number, feed in enumerate(self._feeds):
            newest = feed.num_shown, feed.num_events
            if feed.num_shown and viewer.told[number] != newest:
                transport.write(feed.frame(viewer.told[number][1]))
                viewer.told[number] = newest


def _read(asked: str | bytes) -> tuple[bytes, dict[str, Any] | None]:
    """Return the number of a question, as JSON, and the question without it; None: it is no question."""
    try:
        question = msgspec.json.decode(asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        question = None
    if not isinstance(question, dict):
        return b"null", None
    number = question.pop("id", None)
    return b"%d" % number if isinstance(number, int) else b"null", question


async def _pieces(answer: bytes) -> AsyncIterator[str]:
    """Give an answer in pieces."""
    text = answer.decode()
    for start in range(0, len(text), PIECE_BYTES):
        yield text[start : start + PIECE_BYTES]
