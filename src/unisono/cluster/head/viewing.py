"""Those who look at the run: what they are told unasked, and their questions.

Members come first. An overview is put together and encoded once for all viewers, at most once a second; it is sent to a
few of them at a time, between members' messages, and the more viewers there are, the rarer each is told. Who does not
read what it was sent is told nothing more, and after a while its connection is closed. Questions are answered by a
process of its own (`unisono.cluster.head.reading`).
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

import msgspec
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.protocol import State

from unisono.cluster.head.door import Allowance, Caller
from unisono.cluster.head.reading import Present, Reading
from unisono.core.events import Event, MachineUsed, StepFinished, WorkerOutput
from unisono.record.overview import Overview, OverviewBuilder
from unisono.system.lifetime import end_when_silent

__all__ = ["Viewing", "most_viewers"]

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
QUESTIONS_BYTES: Final = 32_768
"""So much of a viewer is read at once; in the mean `QUESTION_BYTES_PER_S`, and of all together `ALL_BYTES_PER_S`."""
QUESTION_BYTES_PER_S: Final = 8_192.0
ALL_BYTES_PER_S: Final = 131_072.0
PIECE_BYTES: Final = 65_536
"""Of a long answer so much is sent at once, and then members' messages are looked at."""
EVENTS_KEPT: Final = 1_000
MOST_EVENTS: Final = 200
"""So many events are told at once; of more, the last ones."""
FEWEST_VIEWERS, MOST_VIEWERS = 32, 4096


def most_viewers() -> int:
    """Return how many viewers there may be: they must leave descriptors for the members."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_VIEWERS
    return max(FEWEST_VIEWERS, min(MOST_VIEWERS, limit // 4))


@dataclass(eq=False)
class _Viewer:
    connection: Caller
    told: int
    """The number of the first event that it was not told."""
    is_answered: bool = False
    """An answer is on its way, perhaps in several frames, and nothing may stand between them."""
    unsent: int = 0
    """Bytes that it had not taken when it was looked at last."""
    deaf_since: float | None = None


@dataclass
class _Push:
    """What is told unasked."""

    overview: bytes
    made_at: float
    frames: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """With the events from one number to another."""


async def _pieces(answer: bytes) -> AsyncIterator[str]:
    """Give an answer in pieces."""
    text = answer.decode()
    for start in range(0, len(text), PIECE_BYTES):
        yield text[start : start + PIECE_BYTES]


class Viewing:
    """Keeps those who look at the run, and what they are to see.

    Args:
        overviews: folds the run that is shown.
        is_first: this head has seen the whole run; else what its viewers are told is read from the run's directory, if
            that can be seen here.
    """

    def __init__(self, overviews: OverviewBuilder, run_id: str, *, is_first: bool) -> None:
        self._run_id = run_id
        self._overviews = overviews
        self._is_whole = is_first
        self._present = Present(self.overview)
        self._reading = Reading(run_id, self._present)
        self._viewers: dict[Caller, _Viewer] = {}
        self._queue: deque[_Viewer] = deque()
        self._events: deque[bytes] = deque(maxlen=EVENTS_KEPT)
        self._num_events = 0
        self._most = most_viewers()
        self._push: _Push | None = None
        self._pushing: asyncio.Task[None] | None = None
        self._overview: Overview | None = None
        self._has_failed = False

    # -- what happens --------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Count an event of the run. Called for each, so it only notes it.

        An error in what shows the run is no error of the run: it is printed once.
        """
        try:
            self._overviews.take(event)
        except Exception:
            self._fail()
        if not isinstance(event, StepFinished | MachineUsed | WorkerOutput):
            self._events.append(msgspec.json.encode(event))
            self._num_events += 1

    def _fail(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            print("unisono: what is shown of the run may be wrong from here on; the run goes on", file=sys.stderr)
            traceback.print_exc()

    def reads_from(self, run_dir: str, facts: str) -> None:
        """Note the run's directory, and its description (JSON)."""
        self._reading.directory = run_dir
        self._present.directory = run_dir
        self._present.described = facts

    def overview(self) -> Overview:
        """Return the run as it is now; put together at most once a second."""
        now, known = time.time(), self._overview
        if known is not None and 0 <= now - known.time < EVERY_S / 2:
            return known
        try:
            found = self._overviews.overview(now)
        except Exception:
            self._fail()
            found = known or Overview(run_id=self._run_id, time=now)
        self._overview = msgspec.structs.replace(found, run_dir=found.run_dir or self._reading.directory)
        return self._overview

    # -- viewers -------------------------------------------------------------------------------------

    def why_not(self) -> str:
        """Return why nobody else may watch now; "": somebody may."""
        if len(self._viewers) < self._most:
            return ""
        return (
            f"{self._most} watch this run already, and no more can; the limit is a quarter of `ulimit -n`, at most 4096"
        )

    async def serve(self, connection: Caller) -> None:
        """Talk to a viewer until it goes."""
        sock = connection.transport.get_extra_info("socket")
        end_when_silent(sock)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
        connection.slow_down(Allowance(QUESTIONS_BYTES, self._bytes_per_s, time.monotonic))
        viewer = _Viewer(connection, max(0, self._num_events - MOST_EVENTS))
        self._viewers[connection] = viewer
        try:
            await self._look()
            self._tell(viewer)
            self._queue.append(viewer)
            if self._pushing is None or self._pushing.done():
                self._pushing = asyncio.create_task(self._push_all())
            async for asked in connection:
                await self._answer(viewer, asked)
        except ConnectionClosed:
            pass
        finally:
            del self._viewers[connection]

    async def _answer(self, viewer: _Viewer, asked: str | bytes) -> None:
        # A function of its own: the variables of `serve` would keep the last answer as long as the viewer is there.
        answer = await self._reading.answer(asked)
        viewer.is_answered = True
        await viewer.connection.send(answer.decode() if len(answer) <= PIECE_BYTES else _pieces(answer))
        viewer.is_answered = False

    def _bytes_per_s(self) -> float:
        return min(QUESTION_BYTES_PER_S, ALL_BYTES_PER_S / max(1, len(self._viewers)))

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
        size = len(self._push.overview) if self._push is not None else 0
        every_s = max(EVERY_S, number / MOST_PUSHES_PER_S, number * size / MOST_BYTES_PER_S)
        return every_s * max(1, told) / number

    async def _look(self) -> None:
        """Put together what is told, unless that was done less than a second ago."""
        now = time.monotonic()
        if self._push is not None and now - self._push.made_at < EVERY_S * 0.9:
            return
        found = msgspec.json.encode(self.overview())
        if not self._is_whole:
            found = await self._reading.overview() or found
        self._push = _Push(found, now)

    def _tell(self, viewer: _Viewer) -> None:
        connection = viewer.connection
        if connection.state is not State.OPEN or self._push is None:
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
        transport.write(self._frame(viewer.told))
        viewer.told = self._num_events

    def _frame(self, told: int) -> bytes:
        """Return the frame for those who were told all events before this number: the same bytes for all of them."""
        assert self._push is not None
        key = told, self._num_events
        frame = self._push.frames.get(key)
        if frame is None:
            number = min(self._num_events - told, len(self._events), MOST_EVENTS)
            events = list(self._events)[len(self._events) - number :]
            text = b'{"overview":%b,"events":[%b]}' % (self._push.overview, b",".join(events))
            frame = self._push.frames[key] = Frame(Opcode.TEXT, text).serialize(mask=False)
        return frame

    async def end(self) -> None:
        """Tell all viewers what was the last, as far as they listen, and stop."""
        if self._pushing is not None:
            self._pushing.cancel()
        self._overview = self._overview and msgspec.structs.replace(self._overview, time=0.0)
        self._push = _Push(msgspec.json.encode(self.overview()), time.monotonic())
        for viewer in self._viewers.values():
            self._tell(viewer)
        await self._reading.end()
