"""Links and workers that make steps longer now, from what all members have told with their sums.

A link is **slow** while it carries far less than it usually does (or than the other links of the run, if it was never
faster), and the network part of the steps has grown with it. A worker is slow while others wait for it and it takes far
longer for a micro-batch than it did, or than the others of the run. Something is said once, when it begins, and once
when it is over. It begins only after `IN_A_ROW` looks that agree, and ends at another limit, so a single slow step says
nothing. What goes to and fro is said less and less often.

A look is taken at most every `EVERY_S` seconds of the run: there are many short steps, and nobody reads more often.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from unisono.events import Announcement, LinkSlow, WorkerTimes
from unisono.words import short_duration

__all__ = ["Slowness"]

EVERY_S: Final = 0.1
IN_A_ROW: Final = 3
SLOW_S: Final = 1.0
"""Something must be slow for so long to be named."""
WELL_S: Final = 1.0
"""It must be well for twice as long before that is said; the second time four times as long, then eight: what goes to
and fro is said less and less often."""
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
SLOW_LINK: Final = 0.5
"""A link that carries less than this part of what it usually does is slow."""
WELL_LINK: Final = 0.7
SLOW_TO_OTHERS: Final = 0.25
"""A link that was never faster is slow if it carries less than this part of what the other links do."""
RIVAL: Final = 0.7
"""Confirmations come back over a slow link, so the way back looks busy as well: a link counts as slow only where it is
busy for this part of the time of the busiest one."""
SLOW_WORKER: Final = 1.5
"""A worker that takes longer for a micro-batch by this factor is slow."""
WELL_WORKER: Final = 1.2
GRAIN_S: Final = 0.004
"""The kernel counts how long links are busy in steps of this length."""


class Look(NamedTuple):
    """One look at a link: in one step."""

    busy_s: float
    nbytes: int
    network_s: float
    """Of the member that had least of it: a slow link holds up all members, and a late member only the others."""

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / max(self.busy_s, GRAIN_S)


class _Span(NamedTuple):
    """Of a look."""

    step_s: float
    since_s: float
    """Of the run since the look before."""

    @property
    def least_s(self) -> float:
        """What is not worth a sentence."""
        return max(LEAST_S, LEAST_PART * self.step_s)


class _Usual(NamedTuple):
    """What a link is held against. Zeros: unknown."""

    bytes_per_s: float
    limit: float
    """A link that carries less is slow."""
    network_s: float
    """The network part of a step."""

    def excess_s(self, look: Look) -> float:
        """Return by how much a step is longer: what the link takes longer, as far as the network part has grown."""
        if self.bytes_per_s <= 0.0:
            return 0.0
        return max(0.0, min(look.busy_s - look.nbytes / self.bytes_per_s, look.network_s - self.network_s))


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
class _Link:
    """What was seen of one link."""

    switch: _Switch = field(default_factory=_Switch)
    recent: deque[Look] = field(default_factory=lambda: deque(maxlen=IN_A_ROW))
    usual: deque[Look] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def take(self, look: Look) -> None:
        if len(self.recent) == IN_A_ROW and self.switch.is_calm:
            self.usual.append(self.recent[0])
        self.recent.append(look)


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


def _rate(looks: deque[Look]) -> float:
    return sum(look.nbytes for look in looks) / max(sum(look.busy_s for look in looks), GRAIN_S)


class Slowness:
    """Finds what makes steps longer now. Pure: members that see the same steps find the same."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], _Link] = {}
        self._paces: dict[str, _Pace] = {}
        self._members: tuple[str, ...] = ()
        self._num_looks = 0
        self._unseen_s = EVERY_S

    def observe(self, workers: Mapping[str, WorkerTimes], hosts: Mapping[str, str]) -> list[LinkSlow | Announcement]:
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
        over: list[LinkSlow | Announcement] = []
        if members != self._members:
            self._members, self._num_looks = members, 0
            self._paces = {worker_id: self._paces.get(worker_id) or _Pace() for worker_id in members}
            over = self._forget_links({hosts.get(worker_id, "") for worker_id in members})
        self._num_looks += 1
        if self._num_looks <= WARM_UP:
            return over
        span = _Span(step_s, since_s)
        return [*self._see_links(workers, hosts, span), *self._see_workers(workers, hosts, span)]

    # -- links ---------------------------------------------------------------------------------------

    def _see_links(
        self, workers: Mapping[str, WorkerTimes], hosts: Mapping[str, str], span: _Span
    ) -> list[LinkSlow | Announcement]:
        network_s = min(times.last.network for times in workers.values())
        looks: dict[tuple[str, str], Look] = {}
        for worker_id, times in workers.items():
            link = hosts.get(worker_id, ""), hosts.get(times.link_to, "")
            if link[0] == link[1] or not all(link) or not times.link_bytes:
                continue
            look = looks.get(link, Look(0.0, 0, network_s))  # of the members of a host together
            looks[link] = Look(max(look.busy_s, times.link_s), look.nbytes + times.link_bytes, network_s)
        busiest = max((look.busy_s for look in looks.values()), default=0.0)
        said: list[LinkSlow | Announcement] = []
        for link, look in looks.items():
            known = self._links.setdefault(link, _Link())
            known.take(look)
            said += self._judge(link, known, span, is_rival=look.busy_s >= RIVAL * busiest)
        return said

    def _judge(
        self, link: tuple[str, str], known: _Link, span: _Span, *, is_rival: bool
    ) -> list[LinkSlow | Announcement]:
        usual = self._usual(link, known)
        look = known.recent[-1]
        excess = usual.excess_s(look)
        if known.switch.is_on:
            sign = look.bytes_per_s >= WELL_LINK / SLOW_LINK * usual.limit or excess < LEAST_S / 2
        else:
            sign = is_rival and look.bytes_per_s < usual.limit and excess >= span.least_s
        if not known.switch.turns(sign, span.since_s):
            return []
        return [self._told(link, known, is_over=not known.switch.is_on)]

    def _told(self, link: tuple[str, str], known: _Link, *, is_over: bool) -> LinkSlow:
        usual = self._usual(link, known)
        return LinkSlow(
            source=link[0],
            target=link[1],
            bytes_per_s=_rate(known.recent),
            usual_bytes_per_s=usual.bytes_per_s,
            seconds=statistics.fmean(usual.excess_s(each) for each in known.recent),
            is_over=is_over,
        )

    def _forget_links(self, present: set[str]) -> list[LinkSlow | Announcement]:
        """Forget the links of hosts that are not there any more; return that those are over that were slow."""
        gone = [link for link in self._links if not present.issuperset(link)]
        over: list[LinkSlow | Announcement] = [
            self._told(link, self._links[link], is_over=True) for link in gone if self._links[link].switch.is_on
        ]
        for link in gone:
            del self._links[link]
        return over

    def _usual(self, link: tuple[str, str], known: _Link) -> _Usual:
        """Return what a link is held against: what it carried before, or what the other links carry."""
        found = [_Usual(0.0, 0.0, 0.0)]
        if len(known.usual) >= KNOWN:
            rate = _rate(known.usual)
            found.append(_Usual(rate, SLOW_LINK * rate, statistics.median(each.network_s for each in known.usual)))
        others = [_rate(each.usual) for at, each in self._links.items() if at != link and len(each.usual) >= KNOWN]
        if others:
            rate = statistics.median(others)
            found.append(_Usual(rate, SLOW_TO_OTHERS * rate, 0.0))
        return max(found, key=lambda each: each.limit)

    # -- workers -------------------------------------------------------------------------------------

    def _see_workers(
        self, workers: Mapping[str, WorkerTimes], hosts: Mapping[str, str], span: _Span
    ) -> list[LinkSlow | Announcement]:
        waits = dict.fromkeys(workers, 0.0)
        for times in workers.values():
            if times.waits_for in waits:
                waits[times.waits_for] = max(waits[times.waits_for], times.waits_s)
        for worker_id, times in workers.items():
            if times.leaves > 0:
                self._paces[worker_id].take((times.data + times.compute) / times.leaves, waits[worker_id])
        said: list[LinkSlow | Announcement] = []
        for worker_id, pace in self._paces.items():
            if len(pace.recent) == IN_A_ROW and workers[worker_id].leaves > 0:
                name = f"{worker_id} on {hosts[worker_id]}" if hosts.get(worker_id) else worker_id
                said += self._judge_worker(worker_id, name, pace, workers[worker_id].leaves, span)
        return said

    def _judge_worker(
        self, worker_id: str, name: str, pace: _Pace, leaves: int, span: _Span
    ) -> list[LinkSlow | Announcement]:
        now = pace.recent[-1]
        if pace.switch.is_on:
            is_well = now < WELL_WORKER * pace.reference or leaves * (now - pace.reference) < LEAST_S / 2
            if pace.switch.turns(is_well, span.since_s):
                return [Announcement(text=f"{name} is not slow any more: {short_duration(now)} for a micro-batch")]
            return []
        if pace.waits[-1] < span.least_s:
            pace.switch.turns(sign=False, seconds=span.since_s)
            return []
        reference, than = self._reference(worker_id, pace)
        if not pace.switch.turns(0.0 < SLOW_WORKER * reference <= now, span.since_s):
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
