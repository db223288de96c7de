"""Versions of the state that a head sends to its heirs, and messages that wait until the heirs hold them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from unisono.cluster.head.connections import Line
from unisono.cluster.head.story import NOTHING, StoryState
from unisono.cluster.worker.packed import pack
from unisono.core.following import HEIR_ANSWERS_S, Undelivered
from unisono.core.messages import Happened, HeadSnapshot, encode
from unisono.core.policy import Policy
from unisono.core.spec import RunSpec
from unisono.membership import Action, State, holders, keepers, seat_of

__all__ = ["HeadMemory", "Outgoing", "Versions"]

Outgoing = Action | Happened | asyncio.Future[None]
"""A message to one, or to all that listen; or a future that somebody waits for to send an answer."""


class HeadMemory(msgspec.Struct, frozen=True):
    """What the next head takes over: the state of the table, and what `unisono watch --once` shows besides."""

    state: State
    started: float
    reason: str
    run_dir: str = ""
    """The run directory, if the script has chosen it."""
    facts: str = ""
    """The run's description (`unisono.record.rundir.describe`), as JSON."""
    seers: tuple[str, ...] = ()
    """The agents on whose machines a worker has seen the run directory."""
    story: StoryState = NOTHING
    """What was told last."""
    clock: float | None = None
    """The time of this machine's clock (`time.monotonic`), of which times in ``state`` are."""

    @staticmethod
    def first(policy: Policy, run: RunSpec) -> HeadMemory:
        """Return the memory of the first head of a run."""
        return HeadMemory(State(policy=policy, settings=run.settings, script=run.script), time.time(), "starting")

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> HeadMemory:
        return msgspec.msgpack.decode(data, type=HeadMemory)


class Versions:
    """Effects around `unisono.core.following.Undelivered`.

    Args:
        lines: the connections, by worker or agent.
        send: sends a message that need not wait any more.
        leave_out: is called with an heir that has not answered in time.
        slack_s: a timer that is so much late shows that this process stood still.
    """

    def __init__(
        self,
        lines: Mapping[str, Line],
        *,
        send: Callable[[Outgoing], None],
        leave_out: Callable[[str], None],
        slack_s: float,
    ) -> None:
        self._lines = lines
        self._send = send
        self._leave_out = leave_out
        self._slack_s = slack_s
        self._heirs: Sequence[str] = ()
        self._undelivered = Undelivered[Outgoing]()
        self._timer: asyncio.TimerHandle | None = None
        self._ready: deque[Outgoing] = deque()
        self._is_sending = False
        self.number = 0
        """Number of the newest version."""

    def change_heirs(self, heirs: Sequence[str]) -> None:
        """Wait for these agents from now on; empty: send all that waits."""
        if heirs != self._heirs:
            self._heirs = heirs
            self._deliver()

    def make(self, memory: HeadMemory) -> None:
        """Send a new version to the agents that keep the state."""
        self.number += 1
        state = memory.state
        connected = [agent_id for agent_id in keepers(state) if agent_id in self._lines]
        if connected:
            snapshot = HeadSnapshot(
                term=state.term,
                number=self.number,
                state=memory.encode(),
                successor=seat_of(state),
                heirs=list(state.heirs),
                holders=holders(state),
            )
            data = pack(encode(snapshot))
            for agent_id in connected:
                self._lines[agent_id].put(data)

    def change_branch(self, heirs: Sequence[str], messages: Sequence[Outgoing]) -> None:
        """Go on with the newest version and without an heir; send these messages before all that waits already."""
        self._heirs = heirs
        self._undelivered = self._undelivered.after(self.number, messages, time.monotonic())
        self._deliver()

    def when_held(self, messages: Sequence[Outgoing]) -> None:
        """Send these when all heirs hold the newest version, after the messages that wait already."""
        if messages:
            self._undelivered = self._undelivered.add(self.number, messages, time.monotonic())
            self._deliver()

    def hold(self, agent_id: str, number: int) -> None:
        """Note that an agent holds this version."""
        self._undelivered = self._undelivered.hold(agent_id, number)
        self._deliver()

    def _deliver(self) -> None:
        now = time.monotonic()
        ready, self._undelivered = self._undelivered.release(self._heirs, now)
        self._ready += ready
        self._send_ready()
        if self._timer is None and self._undelivered.waiting:
            self._timer = asyncio.get_running_loop().call_later(HEIR_ANSWERS_S, self._look_for_silent_heirs, now)

    def _send_ready(self) -> None:
        """Send in order: what a message tells besides follows it."""
        if self._is_sending:
            return
        self._is_sending = True
        try:
            while self._ready:
                self._send(self._ready.popleft())
        finally:
            self._is_sending = False

    def _look_for_silent_heirs(self, set_at: float) -> None:
        self._timer = None
        now = time.monotonic()
        if now < set_at + HEIR_ANSWERS_S + self._slack_s:  # otherwise the answers may have arrived and are not read yet
            for agent_id in self._undelivered.silent(self._heirs, now):
                self._leave_out(agent_id)
        self._deliver()
