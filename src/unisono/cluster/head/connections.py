"""The connections to the head, seen from the head."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Final

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from unisono.cluster.worker.packed import pack
from unisono.core.events import StepFinished
from unisono.core.messages import BeatOf, Happened, Message, encode
from unisono.membership.roster import State, WorkerState, seat_of

__all__ = ["ConnectionsByName", "Line", "Silences"]

MAX_QUEUED: Final = 10_000
MAX_STEPS_QUEUED: Final = 1_000
SILENT_S: Final = 2.0
BEATS: Final = 4
"""A silence is at least so many heartbeats long."""
AGAIN_S: Final = 60.0
"""Another silence of the same machine is told after this time."""


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


class ConnectionsByName(dict[str, Line]):
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
        is_step = isinstance(message, Happened) and isinstance(message.events[0], StepFinished)
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


class Silences:
    """Finds machines that were silent for some seconds, and whose workers have gone on.

    A head that stood still itself has heard nobody: only time in which it has heard somebody counts.

    Args:
        heartbeat_s: time between the heartbeats of a machine.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._now = 0.0
        self._awake_s = 0.0
        self._heard_at: dict[str, float] = {}  # by agent, in seconds awake
        self._told_at: dict[str, float] = {}

    def heard(self, state: State, agent_id: str, beats: Sequence[BeatOf], now: float) -> str:
        """Take the heartbeats of a machine, before the table does. Returns what to tell the user; "": nothing."""
        self._awake_s += min(now - self._now, 2 * self._heartbeat_s)
        self._now = now
        silent_s = self._awake_s - self._heard_at.get(agent_id, self._awake_s)
        self._heard_at[agent_id] = self._awake_s
        if silent_s < max(SILENT_S, BEATS * self._heartbeat_s) or agent_id == seat_of(state):
            return ""
        known = [state.workers[one.worker_id] for one in beats if one.worker_id in state.workers]
        held = [now - worker.heard_at for worker in known if worker.state is WorkerState.HOLDING]
        if not held or min(held) < silent_s or now - self._told_at.get(agent_id, -AGAIN_S) < AGAIN_S:
            return ""
        self._told_at[agent_id] = now
        return (
            f"nothing came from {state.agents[agent_id].host} for {min(held):.1f} s, and then it continued: the "
            "network between the machines was cut or congested, or that machine stood still. Steps waited for it"
        )
