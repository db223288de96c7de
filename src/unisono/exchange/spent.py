"""Where the time of a combine goes, besides adding and copying: for whom a member waits, what its links carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

__all__ = ["NOTHING", "Carried", "Spent"]


class Carried(NamedTuple):
    """What a link has carried, in one direction."""

    busy_s: float
    """How long something was on its way, sent and not confirmed yet."""
    nbytes: int

    def plus(self, other: Carried) -> Carried:
        return Carried(self.busy_s + other.busy_s, self.nbytes + other.nbytes)


@dataclass(frozen=True)
class Spent:
    """Of one member, in one combine or in several. Ranks are those of the generation."""

    waiting: Mapping[int, float] = field(default_factory=dict)
    """By rank, seconds in which nothing happened because that member had not come so far; rank -1: unknown whom."""
    network_s: float = 0.0
    """In which bytes were on their way, and nothing else could be done."""
    overlap_s: float = 0.0
    """For which this member was sending before it had computed everything."""
    links: Mapping[int, Carried] = field(default_factory=dict)
    """By rank at the other end, what this member has sent; empty where the system does not say."""

    @property
    def waiting_s(self) -> float:
        return sum(self.waiting.values())

    def plus(self, other: Spent) -> Spent:
        """Return what both are together."""
        waiting, links = dict(self.waiting), dict(self.links)
        for rank, seconds in other.waiting.items():
            waiting[rank] = waiting.get(rank, 0.0) + seconds
        for rank, carried in other.links.items():
            links[rank] = links[rank].plus(carried) if rank in links else carried
        return Spent(waiting, self.network_s + other.network_s, self.overlap_s + other.overlap_s, links)

    def longest_wait(self) -> tuple[int, float]:
        """Return the rank that this member has waited for longest, and how long; rank -1: it has not waited."""
        seconds, rank = max(((seconds, rank) for rank, seconds in self.waiting.items() if rank >= 0), default=(0.0, -1))
        return rank, seconds

    def busiest_link(self) -> tuple[int, Carried]:
        """Return the rank at the other end of the link that was busy longest, and what it carried; -1: none."""
        rank = max(self.links, key=lambda each: self.links[each].busy_s, default=-1)
        return rank, self.links.get(rank, Carried(0.0, 0))


NOTHING: Final = Spent()
