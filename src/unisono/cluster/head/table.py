"""The membership of the run at work: events and times in, decisions out as soon as the heirs hold them.

What is decided is a pure function of the state (`unisono.membership.step`). This gives it the events one
after the other, wakes it at its next deadline, and keeps the state: a version of it goes to the heirs, and the messages
that were decided wait until these hold it (`unisono.cluster.head.versions`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from unisono.cluster.head.connections import ConnectionsByName
from unisono.cluster.head.directory import Directory
from unisono.cluster.head.story import Story
from unisono.cluster.head.versions import HeadMemory, Outgoing, Versions
from unisono.core.messages import (
    Beat,
    Beats,
    Happened,
    Heads,
    Hello,
    Holding,
    Kept,
    Lost,
    Message,
    Ready,
    StepDone,
    TalkCall,
)
from unisono.membership import (
    Action,
    Alarm,
    Event,
    Invite,
    Lags,
    Send,
    Tick,
    TookOver,
    is_first_elsewhere,
    machines,
    routine_of_many,
    step,
)
from unisono.membership.roster import State
from unisono.record.problems.kinds import Trouble

__all__ = ["Table"]

CATCH_UP_BEATS: Final = 2
"""A head that stood still waits for so many heartbeats before it calls a worker silent."""
_REPORTED_AGAIN: Final = Beat | StepDone | Hello | Ready | Holding | TalkCall
"""Messages that a worker sends again to a head that follows: one without a consequence need not be remembered at once.
"""


class DeadlineTimer:
    """A timer for the next deadline of the membership.

    Args:
        heartbeat_s: a timer that is so much late shows that this process stood still.
        ring: is called when the deadline has come.
    """

    def __init__(self, heartbeat_s: float, ring: Callable[[], None]) -> None:
        self._heartbeat_s = heartbeat_s
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._due = math.inf
        self._listens_until = 0.0

    def look(self) -> float:
        """Return the time. Notes when this process has stood still: messages have arrived that are not read yet."""
        now = time.monotonic()
        if now > self._due + self._heartbeat_s:
            self._listens_until = now + CATCH_UP_BEATS * self._heartbeat_s
        return now

    def listens(self, now: float) -> bool:
        """Return whether nobody is to be called silent yet."""
        return now < self._listens_until

    def set(self, deadline: float | None) -> None:
        """Ring at this time; None: never."""
        now = time.monotonic()
        if self._timer is not None:
            if deadline == self._deadline and now <= self._due:
                return
            self._timer.cancel()
            self._timer = None
        self._due, self._deadline = math.inf, deadline
        if deadline is not None:
            self._due = max(now, deadline, self._listens_until)
            self._timer = asyncio.get_running_loop().call_later(self._due - now, self._strike)

    def _strike(self) -> None:
        self._timer = None
        self._ring()


class Table:
    """The state of the run's membership, with the clock, and with the heirs that hold it.

    Args:
        state: of ``memory``, as this head goes on from it.
        memory: of the head before, or the first one.
        follow: does what follows from an event besides the messages that were decided; gets the state before it.
        alarm: says at once what has gone wrong: when the heirs know, the culprit may have ended.
        send: sends a message that was decided, when the heirs hold the state behind it.
    """

    def __init__(
        self,
        state: State,
        memory: HeadMemory,
        *,
        lines: ConnectionsByName,
        directory: Directory,
        story: Story,
        follow: Callable[[State, Event], None],
        alarm: Callable[[Trouble], None],
        send: Callable[[Outgoing], None],
        heartbeat_s: float,
    ) -> None:
        self.state = state
        self.reason = memory.reason
        """The sentence about what was decided last."""
        self.started = memory.started
        """When the run was, in seconds since 1970."""
        self._follow = follow
        self._alarm = alarm
        self._lines = lines
        self._directory = directory
        self._story = story
        self._heartbeat_s = heartbeat_s
        self._clock = DeadlineTimer(heartbeat_s, lambda: self.take("", Tick()))
        self._versions = Versions(lines, send=send, leave_out=lambda heir: self.take(heir, Lags()), slack_s=heartbeat_s)
        self._remembering: asyncio.TimerHandle | None = None
        self._is_closed = False

    # -- events --------------------------------------------------------------------------------------

    def take(self, source: str, message: Message | Tick | Lags | TookOver) -> None:
        """Decide what follows from one event.

        Args:
            source: the worker or agent that it comes from; "": none.

        Raises:
            ProtocolError: no such message is expected from there. Nothing has changed.
        """
        if self._is_closed:
            return
        now = self._clock.look()
        if isinstance(message, Tick) and self._clock.listens(now):
            self._set_clock()
            return
        before, event = self.state, Event(source, message)
        self.state, actions, reason, happened = step(before, event, now)
        self._story.add(happened, reason if self.state.ended is None else "")
        self._change_branch(before)
        self.reason = reason or self.reason
        self._remember_event(event, actions, before)
        self._follow(before, event)
        for action in actions:
            if isinstance(action, Alarm):
                self._alarm(action.trouble)
        following: list[Action] = [action for action in actions if not isinstance(action, Invite | Alarm)]
        following += [action for action in actions if isinstance(action, Invite)]  # after the reason for it
        self._versions.when_held(following)
        self._set_clock()

    def take_beats(self, message: Beats) -> None:
        """Take the heartbeats of a machine's workers: together, but those from which something may follow."""
        self.state, rest = routine_of_many(self.state, message.beats, self._clock.look())
        while rest:
            first, *rest = rest
            self.take(first.worker_id, first.beat)
            self.state, rest = routine_of_many(self.state, rest, time.monotonic())
        self._set_clock()

    def take_kept(self, agent_id: str, message: Kept) -> None:
        """Note that an agent holds a version of the state."""
        agent = self.state.agents.get(agent_id)
        if agent is None or message.term != self.state.term:
            return
        self._versions.hold(agent_id, message.number)
        if agent.lags and message.number == self._versions.number:
            self.take(agent_id, message)

    def say(self, reason: str) -> None:
        """Say why the run is as it is, where that was not decided here."""
        self.reason = reason

    def close(self) -> None:
        """Decide nothing more: this side of the run ends."""
        self._is_closed = True

    def _set_clock(self) -> None:
        self._clock.set(self.state.due_at)

    # -- what the heirs know -------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Number of the newest version of the state; 0: there is none yet."""
        return self._versions.number

    def send_when_held(self, message: Outgoing) -> None:
        """Send a message when the heirs hold all that was decided up to now."""
        self._versions.when_held([message])

    async def held(self) -> None:
        """Wait until the heirs hold all that was decided up to now."""
        is_held = asyncio.get_running_loop().create_future()
        self.send_when_held(is_held)
        await is_held

    def release(self) -> None:
        """Wait for no heir any more: send all that was decided."""
        if self._story.has_news:
            self.remember()
        self._versions.change_heirs(())

    def remember(self) -> None:
        """Send the heirs a new version of the state."""
        if self._remembering is not None:
            self._remembering.cancel()
            self._remembering = None
        memory = HeadMemory(
            self.state,
            self.started,
            self.reason,
            self._directory.path,
            facts=self._directory.facts,
            seers=tuple(self._directory.seers),
            story=self._story.kept(),
            clock=time.monotonic(),
        )
        self._versions.make(memory)
        if told := self._story.take():
            self.send_when_held(Happened(events=told))

    def remember_soon(self) -> None:
        """`remember` an event that no process acts on, and that a member reports again to a head that follows.

        All members report such an event at the same time, and a version of the state is as long as there are members.
        """
        if self._remembering is None:
            loop = asyncio.get_running_loop()
            self._remembering = loop.call_later(self._heartbeat_s / 4, self.remember)

    def _remember_event(self, event: Event, actions: Sequence[Action], before: State) -> None:
        """Remember an event now, or soon, or with the next one."""
        message = event.message
        # The first step is sent to the heirs at once: from then on there is something to lose.
        is_first_step = before.committed < 0 <= self.state.committed
        is_new = bool(actions) and not self._is_repetition(actions, before)
        # A head that follows waits for every worker to connect again, so that a connection is closed is no news to it.
        is_reported_again = isinstance(message, _REPORTED_AGAIN) or (
            isinstance(message, Lost) and event.source in before.workers
        )
        # An agent that has not heard that the state is on its machine as well starts no head when this one is lost.
        is_spread = is_first_elsewhere(before, self.state, event.source)
        if is_new or is_first_step or is_spread or not is_reported_again:
            self.remember()
        elif self._story.has_news or not isinstance(message, Beat | StepDone):
            self.remember_soon()

    def _is_repetition(self, actions: Sequence[Action], before: State) -> bool:
        """Return whether the heirs have heard of all of this: a worker that comes back is sent the newest notice again.

        A head that has taken over is called by all workers at once, and must have told the heirs its state once.
        """
        is_known = all(isinstance(action, Send) and action.message is before.notice for action in actions)
        return is_known and self.version > 0

    def _change_branch(self, before: State) -> None:
        """Tell all of a new branch, or of other machines that may start the next head, before the next decision."""
        state = self.state
        known = machines(state)
        heads = Heads(
            branch=state.branch_name,
            num_machines=len(state.agents),
            machines=known,
            may_write=self._directory.may_write,
        )
        if state.branch != before.branch:
            self.remember()
            told: list[Action] = [Send(agent_id, heads) for agent_id in state.agents]
            to_worker = msgspec.structs.replace(heads, machines=[], num_machines=0)
            told += [Send(worker_id, to_worker) for worker_id in state.workers]
            self._versions.change_branch(state.heirs, told)
            return
        if known != machines(before) or _tens(state) != _tens(before):
            self._lines.send_all(state.agents, heads)
        self._versions.change_heirs(state.heirs)


def _tens(state: State) -> int:
    return len(state.agents) // 10
