"""The story of a run, as the head tells it: what has happened besides the steps, in order, to all that listen.

Each event is told when the heirs hold the state from which it follows, so a head that follows knows of it. The newest
ones are a part of that state as well: the next head tells them again, and who knows them already leaves them out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from unisono.core.events import (
    Announcement,
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

__all__ = ["NOTHING", "Story", "StoryState", "Uses"]

RECENT: Final = 1_000
"""So many of the newest events are told again to an agent that connects again."""
KEPT_S: Final = 10.0
"""The events of so long a time are a part of the head's state."""
INTERRUPTIONS: Final = 20
USE_S: Final = 2.0
"""Least time between two messages about the use of machines."""
USES_PER_S: Final = 500.0
"""The use of a machine is told to a listener at most so often, all together."""


class StoryState(msgspec.Struct, frozen=True):
    """The part of the story in the head's state."""

    told: tuple[Event, ...] = ()
    last_step_at: float = 0.0
    usual_s: float = 0.0
    """The usual time of a step."""
    interruptions: tuple[Interruption, ...] = ()
    """The newest."""
    interrupted_s: float = 0.0
    """By all of them."""


NOTHING: Final = StoryState()


class Story:
    """What this head has to tell.

    Args:
        kept: of the head before this one.
    """

    def __init__(self, kept: StoryState) -> None:
        self._untold: list[Event] = []
        self._recent: deque[Event] = deque(kept.told, RECENT)
        self._interruptions = Interruptions(kept.last_step_at, kept.usual_s)
        self._digests: dict[str, str] = {}
        self._asides = Asides()
        self.interruptions: deque[Interruption] = deque(kept.interruptions, INTERRUPTIONS)
        """The newest."""
        self.interrupted_s = kept.interrupted_s
        """By which all interruptions have made the run longer."""

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
            self._untold.append(event)
        if reason:
            self._untold.append(Announcement(time=now, text=reason))

    def take(self) -> list[Event]:
        """Return, once, what is to be told."""
        told, self._untold = self._untold, []
        self._recent += told
        return told

    def announce(self, text: str) -> list[Event]:
        """Return a sentence as an event that is told now."""
        told: list[Event] = [Announcement(time=time.time(), text=text)]
        self._recent += told
        return told

    def kept(self) -> StoryState:
        """Return the part of the story that the next head needs."""
        since = time.time() - KEPT_S
        told = tuple(event for event in (*self._recent, *self._untold) if event.time >= since)
        return StoryState(
            told,
            last_step_at=self._interruptions.last,
            usual_s=self._interruptions.usual_s,
            interruptions=tuple(self.interruptions),
            interrupted_s=self.interrupted_s,
        )

    def take_step(self, event: StepFinished) -> list[Event]:
        """Return what a step tells at once besides its result; nothing where `take` tells it, after what waits."""
        told: list[Event] = []
        interruption: Interruption | None = self._interruptions.step(event)
        if interruption is not None:
            told.append(interruption)
            self.interruptions.append(interruption)
            self.interrupted_s = round(self.interrupted_s + interruption.seconds, 6)
        told += self._asides.of(event)
        if self._untold:  # such as that a worker has joined, which is what has interrupted the run
            self._untold += told
            return []
        self._recent += told
        return told

    def take_other(self, event: Event) -> None:
        """Note an event that a worker tells."""
        if isinstance(event, RunStarted):
            self._interruptions.begin()
        elif isinstance(event, RunEnded):
            self._digests = event.digests if event.ok else {}
        else:
            self._recent.append(event)


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
