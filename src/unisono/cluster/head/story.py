"""The story of a run, as the head tells it: what has happened besides the steps, in order, to all that listen.

Each event gets its number here, and is told when the heirs hold a state that has it. So a head that follows knows of
it, tells the newest ones again, and who knows a number already leaves the event out (`unisono.core.events.Once`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from unisono.core.events import (
    Announcement,
    EvaluationFinished,
    Event,
    Interruption,
    MachineUsed,
    MembershipChanged,
    RunEnded,
    RunStarted,
    StepFinished,
)
from unisono.record.asides import Asides
from unisono.record.interruptions import Interruptions
from unisono.record.journal.lines import LineEvent
from unisono.record.overview import INTERRUPTIONS

__all__ = ["NOTHING", "Story", "StoryState", "Uses", "interrupted_s"]

RECENT: Final = 1_000
"""So many of the newest events are told again to an agent that connects again."""
KEPT_S: Final = 10.0
"""The events of so long a time are a part of the head's state."""
USE_S: Final = 2.0
"""Least time between two messages about the use of machines."""
USES_PER_S: Final = 500.0
"""The use of a machine is told to a listener at most so often, all together."""


class StoryState(msgspec.Struct, frozen=True):
    """The part of the story in the head's state."""

    told: tuple[Event, ...] = ()
    """The newest, and the newest interruptions."""
    line: int = -1
    """The newest step of which all is told."""
    last_step_at: float = 0.0
    usual_s: float = 0.0
    """The usual time of a step."""
    interrupted_s: float = 0.0
    """By interruptions before ``told``."""


NOTHING: Final = StoryState()


class Story:
    """What this head has to tell.

    Args:
        kept: of the head before this one.
        head: a name that no other head of the run has.
    """

    def __init__(self, kept: StoryState, head: str) -> None:
        self._head = head
        self._number = 0
        self._line = kept.line
        self._untold: list[Event] = []
        self._recent: deque[Event] = deque(kept.told, RECENT)
        self._interruptions = Interruptions(kept.last_step_at, kept.usual_s)
        self._digests: dict[str, str] = {}
        self._asides = Asides()
        self._interrupted_s = kept.interrupted_s + interrupted_s(kept.told)

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._untold)

    @property
    def recent(self) -> list[Event]:
        """The newest events that were told."""
        return list(self._recent)

    def add(self, happened: Iterable[Event], reason: str = "") -> None:
        """Note what has happened now, and the sentence about what was decided; told by `take`."""
        now = time.time()
        for event in happened:
            event = msgspec.structs.replace(event, time=now)
            if isinstance(event, RunEnded) and event.ok:
                event = msgspec.structs.replace(event, digests=self._digests)
            if isinstance(event, MembershipChanged):
                self._interruptions.change(event)
            self.note(event)
        if reason:
            self.note(Announcement(time=now, text=reason))

    def note(self, event: Event) -> None:
        """Note an event; told by `take`."""
        if isinstance(event, RunStarted):
            self._interruptions.begin()
            self._line = -1
        self._untold.append(msgspec.structs.replace(event, number=self._number, head=self._head))
        self._number += 1

    def take(self) -> list[Event]:
        """Return, once, what is to be told."""
        told, self._untold = self._untold, []
        self._recent += told
        return told

    def kept(self) -> StoryState:
        """Return the part of the story that the next head needs."""
        since = time.time() - KEPT_S
        all_told = [*self._recent, *self._untold]
        interruptions = [event for event in all_told if isinstance(event, Interruption)][-INTERRUPTIONS:]
        told = tuple(event for event in all_told if event.time >= since or event in interruptions)
        return StoryState(
            told,
            line=self._line,
            last_step_at=self._interruptions.last,
            usual_s=self._interruptions.usual_s,
            interrupted_s=self._interrupted_s - interrupted_s(told),
        )

    def take_line(self, event: LineEvent) -> None:
        """Note what a step tells besides its result, an evaluation, and the digests at the end."""
        if isinstance(event, EvaluationFinished):
            self._recent.append(event)
        elif isinstance(event, RunEnded):
            self._digests = event.digests if event.ok else {}
        elif isinstance(event, StepFinished) and not 0 <= event.number <= self._line:
            self._line = event.number
            interruption = self._interruptions.step(event)
            if interruption is not None:
                self._interrupted_s += interruption.seconds
                self.note(interruption)
            for aside in self._asides.of(event):
                self.note(aside)


def interrupted_s(told: Iterable[Event]) -> float:
    """Return by how much the interruptions among some events have made the run longer."""
    return math.fsum(event.seconds for event in told if isinstance(event, Interruption))


class Uses:
    """What machines use, told together and at a bounded rate."""

    def __init__(self) -> None:
        self._newest: dict[str, MachineUsed] = {}  # by agent
        self._untold: dict[str, None] = {}  # hosts

    @property
    def newest(self) -> list[MachineUsed]:
        """Of each machine, by host."""
        return self._of(sorted({use.host for use in self._newest.values()}))

    @property
    def has_news(self) -> bool:
        """Whether there is something that was not told yet."""
        return bool(self._untold)

    def add(self, agent_id: str, use: MachineUsed) -> None:
        """Note what a machine uses, by one of its agents."""
        self._newest[agent_id] = use
        self._untold[use.host] = None

    def keep(self, agent_ids: Collection[str]) -> None:
        """Forget all but these agents."""
        for agent_id in self._newest.keys() - set(agent_ids):
            del self._newest[agent_id]
        hosts = {use.host for use in self._newest.values()}
        self._untold = {host: None for host in self._untold if host in hosts}

    def wait_s(self, num_listeners: int) -> float:
        """Return the least time between two messages about it."""
        return max(USE_S, len(self._newest) * num_listeners / USES_PER_S)

    def take(self) -> list[Event]:
        """Return, once, what is new."""
        told: list[Event] = [*self._of(self._untold)]
        self._untold = {}
        return told

    def _of(self, hosts: Iterable[str]) -> list[MachineUsed]:
        """Return the use of each machine, with the workers of all its agents."""
        known: dict[str, list[MachineUsed]] = {host: [] for host in hosts}
        for use in sorted(self._newest.values(), key=lambda use: use.time):
            if use.host in known:
                known[use.host].append(use)
        return [
            msgspec.structs.replace(
                uses[-1], workers={worker_id: use for each in uses for worker_id, use in each.workers.items()}
            )
            for uses in known.values()
        ]
