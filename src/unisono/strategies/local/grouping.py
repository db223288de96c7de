"""Groups: members that compute a replica of local steps together, with an exchange of their own.

Where there are more members than replicas to compute, each replica is computed by a **group**: `groups_of` says who
with whom. Its members share the micro-batches of every step of the replica, so a step of it is a step of ``run.steps``
among the group, and they exchange gradients in every step; members of one host do that at little cost. A group spans
hosts only where the run has fewer replicas than hosts.

**Coming together.** All members agree on the groups, each connects with its group, and then all members of the
generation meet once more: whoever gets through that knows that its group is there. Whoever does not, because a member
was lost meanwhile, leaves its group, and the others of the group see that at once.

**A loss.** The exchange of a group is interrupted when one of its own members is lost, and only then: the other groups
finish their replicas. What is left of the group cannot tell the script so in the middle of a step. Therefore each
survivor completes the step by itself, with the same bits, and leaves the replica afterwards (`GroupTeam.lost`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import msgspec
import torch

from unisono.core.plan import Plan
from unisono.engine.exchange import Exchange
from unisono.engine.exchange.pages import WorkerPage
from unisono.engine.rounds import Report
from unisono.engine.rounds.members import Members
from unisono.engine.rounds.team import LOST, Part, Samples, Team
from unisono.system.faults import point

__all__ = ["GroupTeam", "Grouping", "Groups", "Seat", "groups_of"]

FIRST_GENERATION: Final = 1 << 32
"""Of a group: no generation of the run has such a number, so nobody takes the ranks of one for those of the other."""


class Seat(msgspec.Struct, frozen=True):
    """What a member says at the beginning of a round of local steps."""

    able: bool
    """It can compute replicas of this round."""
    held: list[int]
    """The replicas whose states at the boundary it has."""
    number: int
    """Of its last group."""
    page: str
    """The address of its page in shared memory for groups; "": it has none."""


class GroupTeam(Team):
    """The team of a replica's steps: the members of this worker's group, or this worker alone.

    Attributes:
        round: the number of the round, within the loop, for the other members' view of this one's progress.
        lost: why the group is no more, since it was entered; None: nothing has happened.
    """

    round = 0

    def __init__(self, whole: Team, device: torch.device) -> None:
        super().__init__(device)
        self.arithmetic = whole.arithmetic
        self.lost: Exception | None = None
        self._whole = whole
        self._alone = self.exchange
        self._entered = 0
        self._lock = threading.Lock()
        self._group: Exchange | None = None
        self._is_settled = False
        self._alarm: Exception | None = None

    # -- in and out ----------------------------------------------------------------------------------

    def enter(self, part: Part) -> None:
        """Connect with the members of a group; returns when all have come. Collective in the group.

        Raises:
            PeerLost, DeadlineExceeded: a member of the run was lost meanwhile.
        """
        self.leave()
        exchange = self._whole.connect(part)
        with self._lock:
            self._group, self._is_settled, self._alarm = exchange, False, None
        self._become(exchange, part.ranks)
        self._whole.listen(self._hear)
        with self.waiting():
            exchange.all_gather(b"")

    def settle(self) -> None:
        """Note that all members of the run have entered their groups: losses elsewhere do not count any more. Local."""
        with self._lock:
            self._is_settled = True

    def leave(self) -> None:
        """Be alone. Local."""
        self.lost = None
        if self._group is None:
            return
        self._whole.listen(None)
        with self._lock:
            group, self._group = self._group, None
        group.close()
        self._become(self._alone, (self._whole.rank,))

    def _become(self, exchange: Exchange, ranks: Sequence[int]) -> None:
        whole = self._whole
        self.exchange = exchange
        self.rank, self.size = exchange.rank, exchange.size
        self.worker_ids = tuple(whole.worker_ids[rank] for rank in ranks)
        self.hosts = tuple(whole.hosts[rank] for rank in ranks)
        self._entered += 1
        self.generation = FIRST_GENERATION + self._entered

    def _hear(self, error: Exception, staying: Collection[str]) -> None:
        """Interrupt the group if one of its members is lost, or if it is not certain yet that all have come."""
        with self._lock:
            if self._group is None or (self._is_settled and set(self.worker_ids) <= set(staying)):
                return
            self._alarm = error
            self._group.interrupt(error)

    # -- as a team -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error that the group's exchange would raise; a replica that is begun is finished otherwise."""
        if self._group is not None and self._alarm is not None:
            raise self._alarm
        with contextlib.suppress(*LOST):
            self._whole.check()

    def regroup(self, report: Report, lost: Exception) -> list[Report]:
        """Go on alone, to the end of the step."""
        with contextlib.suppress(*LOST):
            self._whole.check()  # the end of the run is the end of the step as well
        self.leave()
        self.lost = lost
        return [report]

    def at(
        self, *, phase: int, step: int, microbatch: int, evaluates: bool = False, samples: Samples | None = None
    ) -> None:
        self._whole.at(phase=phase, step=self.round, microbatch=microbatch, evaluates=evaluates, samples=samples)

    def waiting(self) -> AbstractContextManager[None]:
        return self._whole.waiting() if self.size > 1 else nullcontext()


class Groups:
    """This member's group, from round to round of one loop.

    Args:
        name: of the loop; no other one of the run has it.

    Attributes:
        team: of the steps of a replica.
    """

    def __init__(self, whole: Team, device: torch.device, name: str) -> None:
        self.team = GroupTeam(whole, device)
        self._whole = whole
        self._name = name
        self._number = 0
        self._page: WorkerPage | None = None
        self._current: tuple[int, tuple[tuple[int, ...], ...]] | None = None

    def seat(self, held: Collection[int], *, able: bool) -> Seat:
        """Return what this member says at the beginning of a round. Local."""
        if self._page is None:
            self._page = self._whole.new_page()
        address = self._page.address if self._page is not None else ""
        return Seat(able, sorted(held), self._number, address)

    def take(self, members: Members, grouping: Grouping, seats: Sequence[Seat]) -> None:
        """Enter this member's group, unless it is the one that it is in. Collective where there are groups.

        Args:
            seats: by rank; not read where there is no group.

        Raises:
            PeerLost, DeadlineExceeded: a member was lost.
        """
        wanted = (self._whole.generation, grouping.groups)
        if wanted == self._current:
            return
        self.leave()
        if grouping.groups:
            self._number = max(seat.number for seat in seats) + 1
            rank = self._whole.rank
            own = grouping.group_of(rank)
            if len(own) > 1:
                name = f"{self._name}-{self._number}-{own[0]}"
                self.team.enter(Part(name, self._number, own, self._page, tuple(seats[each].page for each in own)))
            point("local.grouped")
            members.gather(b"")
            self.team.settle()
        self._current = wanted

    def leave(self) -> None:
        """Leave the group, because a member of the run was lost. Local."""
        self._current = None
        self.team.leave()

    def close(self) -> None:
        """Leave the group, and give its memory back. Local."""
        self.leave()
        if self._page is not None:
            self._page.close()
            self._page = None


@dataclass(frozen=True)
class Grouping:
    """Who computes which replicas in one round, and who hands them in."""

    plan: Plan
    """Each replica is a leaf of one member: of the first one of its group."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The ranks of each group, ascending, where members compute together; empty: each computes by itself."""

    def replicas(self, rank: int) -> Sequence[int]:
        """Return the replicas that a member computes, alone or with others."""
        group = self.group_of(rank)
        return self.plan.ranges[group[0]] if group else self.plan.ranges[rank]

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the group of a member; empty if it computes by itself, or nothing."""
        return next((group for group in self.groups if rank in group), ())


def groups_of(plan: Plan, hosts: Sequence[str], able: Sequence[bool] = ()) -> Grouping:
    """Return the groups for the replicas that a plan gives to members.

    Args:
        plan: of the round: whatever has to be computed is a leaf of some member.
        hosts: by rank; members of one host stand together.
        able: by rank, whether the member can compute replicas of this round; default: all.
    """
    todo = sorted(itertools.chain.from_iterable(plan.ranges))
    free = [rank for rank in range(len(hosts)) if not able or able[rank]]
    if not todo or len(free) <= len(todo):
        return Grouping(plan)
    by_host = [list(ranks) for _, ranks in itertools.groupby(free, key=lambda rank: hosts[rank])]
    if len(by_host) > len(todo) and len(set(hosts)) > plan.num_leaves:
        groups = [tuple(itertools.chain.from_iterable(part)) for part in _split(by_host, len(todo))]
    else:
        groups = _on_hosts(by_host, len(todo))
    ranges: list[Sequence[int]] = [()] * len(hosts)
    for replica, group in zip(todo, groups, strict=True):
        ranges[group[0]] = (replica,)
    return Grouping(Plan(plan.num_leaves, tuple(ranges), plan.kept), tuple(groups))


def _on_hosts(by_host: Sequence[list[int]], number: int) -> list[tuple[int, ...]]:
    """Return so many groups, none of which spans hosts: first one for each host, then for whoever has most members.

    With more hosts than groups, the hosts with the most members get them.
    """
    counts = [0] * len(by_host)
    largest = sorted(range(len(by_host)), key=lambda index: (-len(by_host[index]), index))
    for index in largest[:number]:
        counts[index] = 1
    for _ in range(number - sum(counts)):
        index = max(range(len(by_host)), key=lambda index: (len(by_host[index]) / (counts[index] + 1), -index))
        counts[index] += 1
    return [
        tuple(ranks[len(ranks) * part // count : len(ranks) * (part + 1) // count])
        for ranks, count in zip(by_host, counts, strict=True)
        for part in range(count)
    ]


def _split(by_host: Sequence[list[int]], number: int) -> list[Sequence[list[int]]]:
    """Return the hosts cut into so many parts, next to each other, with members as equal as whole hosts allow."""
    sizes = [len(ranks) for ranks in by_host]
    ends = list(itertools.accumulate(sizes))
    edges = [0]
    for part in range(1, number):
        wanted = ends[-1] * part / number
        first, last = edges[-1] + 1, len(sizes) - (number - part)
        edges.append(min(range(first, last + 1), key=lambda edge: abs(ends[edge - 1] - wanted)))
    return [by_host[a:b] for a, b in itertools.pairwise([*edges, len(sizes)])]
