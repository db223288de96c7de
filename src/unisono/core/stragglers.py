"""Workers that make steps longer now, from what all members have told with their sums.

A worker is slow while others wait for it and it takes far longer for a micro-batch than it did, or than the others of
the run. That is said once, when it begins, and once when it is over. It begins only after `IN_A_ROW` looks that agree,
and ends at another limit, so a single slow step says nothing. What goes to and fro is said less and less often.

A look is taken at most every `EVERY_S` seconds of the run: there are many short steps, and nobody reads more often.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from unisono.core.events import Announcement, WorkerTimes
from unisono.core.words import short_duration

__all__ = ["Stragglers"]

EVERY_S: Final = 0.1
IN_A_ROW: Final = 3
SLOW_S: Final = 1.0
"""A worker must be slow for so long to be named."""
WELL_S: Final = 1.0
"""It must be fast again for twice as long before that is said; the second time four times as long, then eight: what
goes to and fro is said less and less often."""
MOST_DOUBLED: Final = 10
KNOWN: Final = 4
"""So many looks make what is usual."""
WINDOW: Final = 32
"""Looks that what is usual is taken from."""
WARM_UP: Final = 2
"""Looks at new members that do not count: caches, compilation, first connections."""
LEAST_S: Final = 0.02
"""A step that is longer by less is not worth a sentence."""
LEAST_PART: Final = 0.1
"""Nor is one that is longer by less than this part of it."""
SLOW_WORKER: Final = 1.5
"""A worker that takes longer for a micro-batch by this factor is slow."""
WELL_WORKER: Final = 1.2


@dataclass
class _Switch:
    """Slow or not, with hysteresis."""

    is_on: bool = False
    num_signs: int = 0
    """Looks in a row that speak against the present state."""
    signs_s: float = 0.0
    """Of the run, that they stand for."""
    num_times: int = 0
    """That it was slow."""

    def turns(self, sign: bool, seconds: float) -> bool:
        """Count a look that speaks against the present state, or does not; return whether the state changes now.

        Args:
            seconds: of the run since the look before.
        """
        self.num_signs, self.signs_s = (self.num_signs + 1, self.signs_s + seconds) if sign else (0, 0.0)
        least_s = WELL_S * 2 ** min(self.num_times, MOST_DOUBLED) if self.is_on else SLOW_S
        if self.num_signs < IN_A_ROW or self.signs_s < least_s:
            return False
        self.is_on, self.num_signs, self.signs_s = not self.is_on, 0, 0.0
        self.num_times += self.is_on
        return True

    @property
    def is_calm(self) -> bool:
        """Whether what is seen is what is usual."""
        return not self.is_on and not self.num_signs


@dataclass
class _Pace:
    """What was seen of one worker."""

    switch: _Switch = field(default_factory=_Switch)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=IN_A_ROW))
    """Seconds for a micro-batch."""
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=IN_A_ROW))
    """Seconds that another member has waited for it."""
    reference: float = 0.0
    """The pace that it is compared with, while it is slow."""

    def take(self, pace: float, waits_s: float) -> None:
        if len(self.recent) == IN_A_ROW and self.switch.is_calm:
            self.usual.append(self.recent[0])
        self.recent.append(pace)
        self.waits.append(waits_s)


class Stragglers:
    """Finds who makes steps longer now. Pure: members that see the same steps find the same."""

    def __init__(self) -> None:
        self._paces: dict[str, _Pace] = {}
        self._members: tuple[str, ...] = ()
        self._num_looks = 0
        self._unseen_s = EVERY_S

    def observe(self, workers: Mapping[str, WorkerTimes], hosts: Mapping[str, str]) -> list[Announcement]:
        """Record a step; return what is to be said now. Without a time.

        Args:
            workers: of the step's event.
            hosts: by worker id.
        """
        step_s = max((times.last.total() for times in workers.values()), default=0.0)
        self._unseen_s += step_s
        if self._unseen_s < EVERY_S or step_s <= 0.0:
            return []
        since_s, self._unseen_s = self._unseen_s, 0.0
        members = tuple(workers)
        if members != self._members:
            self._members, self._num_looks = members, 0
            self._paces = {worker_id: self._paces.get(worker_id) or _Pace() for worker_id in members}
        self._num_looks += 1
        if self._num_looks <= WARM_UP:
            return []
        waits = dict.fromkeys(workers, 0.0)
        for times in workers.values():
            if times.waits_for in waits:
                waits[times.waits_for] = max(waits[times.waits_for], times.waits_s)
        for worker_id, times in workers.items():
            if times.leaves > 0:
                self._paces[worker_id].take((times.data + times.compute) / times.leaves, waits[worker_id])
        least_s = max(LEAST_S, LEAST_PART * step_s)
        said: list[Announcement] = []
        for worker_id, pace in self._paces.items():
            if len(pace.recent) == IN_A_ROW and workers[worker_id].leaves > 0:
                name = f"{worker_id} on {hosts[worker_id]}" if hosts.get(worker_id) else worker_id
                said += self._judge(worker_id, name, pace, workers[worker_id].leaves, least_s, since_s)
        return said

    def _judge(
        self, worker_id: str, name: str, pace: _Pace, leaves: int, least_s: float, since_s: float
    ) -> list[Announcement]:
        """Return what is to be said of a worker.

        Args:
            name: what it is called.
            least_s: what is not worth a sentence.
            since_s: of the run since the look before.
        """
        now = pace.recent[-1]
        if pace.switch.is_on:
            is_well = now < WELL_WORKER * pace.reference or leaves * (now - pace.reference) < LEAST_S / 2
            if pace.switch.turns(is_well, since_s):
                return [Announcement(text=f"{name} is no longer slow: {short_duration(now)} for a micro-batch")]
            return []
        if pace.waits[-1] < least_s:
            pace.switch.turns(sign=False, seconds=since_s)
            return []
        reference, than = self._reference(worker_id, pace)
        if not pace.switch.turns(0.0 < SLOW_WORKER * reference <= now, since_s):
            return []
        pace.reference = reference
        took, waited = statistics.median(pace.recent), statistics.median(pace.waits)
        return [
            Announcement(
                text=f"{name} takes {took / reference:.1f}x as long for a micro-batch as {than} "
                f"({short_duration(took)} instead of {short_duration(reference)}): the others wait "
                f"{short_duration(waited)} for it in each step"
            )
        ]

    def _reference(self, worker_id: str, pace: _Pace) -> tuple[float, str]:
        """Return the smaller of the worker's own usual pace and that of the others, and what it is called."""
        found = []
        if len(pace.usual) >= KNOWN:
            found.append((statistics.median(pace.usual), "before"))
        others = [
            statistics.median(each.recent)
            for other, each in self._paces.items()
            if other != worker_id and len(each.recent) == IN_A_ROW
        ]
        if others:
            found.append((statistics.median(others), "the others"))
        return min(found, default=(0.0, ""))
