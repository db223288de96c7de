"""How fast each member is, what the exchange costs, and the shares that follow from both.

All members see the same facts after every commit and run the same arithmetic on them, so all reach the same plan
without a word. A new generation begins without knowledge, for the newcomers' sake.

A member's pace is the median of its seconds per micro-batch over its last steps: one slow step does not move
work. Two steps in a row that are much slower (or faster) than what was known do: the older ones are forgotten then.
The plan changes only when the step would become shorter by more than `GAIN`, so noise does not move work either.

Between hosts a range of leaves travels node by node, and an exchange takes as long as that of the host with the most
nodes. The sums that come back weigh as much as one node more, so what a node costs is the time of an exchange divided
by that host's nodes plus one. Where that is much against a micro-batch, the edges between hosts lie at multiples of a
**grain**, a power of two: fewer nodes, and shares that fit the paces less well. Of all grains the one is taken with
which the step is over first.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unisono.decisions.plan import Plan, plan
from unisono.decisions.tree import Node, cover, schedule

__all__ = ["Balance", "Change", "balanced", "weighed"]

WINDOW: Final = 5
"""Steps that a pace is the median of."""
KNOWN: Final = (WINDOW + 1) // 2
"""From so many steps on a pace is known."""
WARM_UP: Final = 2
"""First steps of a generation that do not count: caches, compilation, page faults."""
GAIN: Final = 0.04
"""A plan is changed when the step would become shorter by more than this part of it."""
JUMP: Final = 1.25
"""Two steps in a row that differ from the pace that was known by more than this factor are another pace."""
SLOW: Final = 1.2
"""A member that takes longer than the others by this factor is named."""
REST: Final = 16
"""A member that had nothing to do gets a micro-batch after this many steps: it may be faster now."""


@dataclass(frozen=True)
class Change:
    """The plan has changed because of the members' paces."""

    counts: tuple[int, ...]
    """By rank, the micro-batches that each member gets now."""
    slowness: tuple[float, ...]
    """By rank, the time that a member takes for a micro-batch, as a multiple of that of the others (their median)."""
    recovered: frozenset[int]
    """Who was slow before and is not any more."""
    for_network: bool = False
    """Whether other shares fit the paces better, and would take longer to send."""

    def say(self, worker_ids: Sequence[str]) -> str:
        """What happened, in one sentence."""
        num_leaves = sum(self.counts)
        parts = []
        for rank, (name, count, slowness) in enumerate(zip(worker_ids, self.counts, self.slowness, strict=True)):
            if slowness >= SLOW:
                parts.append(
                    f"{name} takes {slowness:.1f}x as long as the others for a micro-batch: "
                    f"it gets {count} of {num_leaves} now"
                )
            elif rank in self.recovered:
                parts.append(f"{name} is as fast as the others again: it gets {count} of {num_leaves} now")
        if not parts:
            shares = ", ".join(f"{name} {count}" for name, count in zip(worker_ids, self.counts, strict=True))
            what = "the workers' paces and the network" if self.for_network else "the workers' paces"
            parts.append(f"the {num_leaves} micro-batches follow {what}: {shares}")
        elif self.for_network:
            parts.append("shares that fit the paces better would take longer to send")
        return "; ".join(parts)


class Balance:
    """The pace of each member of one generation, by rank, and what their exchange costs.

    Args:
        first_of_host: by rank, the first rank of that member's host; members of a host stand together. Without it all
            are of one.
    """

    def __init__(self, num_members: int, first_of_host: Sequence[int] = ()) -> None:
        self._hosts = _hosts_of(first_of_host or (0,) * num_members)
        self._node_seconds: deque[float] = deque(maxlen=WINDOW)
        self._num_nodes = 0
        self._seconds: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(num_members)]
        self._resting = [0] * num_members
        self._num_seen = 0
        self._plans: dict[int, Plan] = {}
        self._named: frozenset[int] = frozenset()
        self.change: Change | None = None
        """What the last `decide` has changed."""

    def observe(self, leaves: Sequence[float], seconds: Sequence[float]) -> None:
        """Take in a step.

        Args:
            leaves: by rank, how many micro-batches each member has computed.
            seconds: by rank, how long that took.
        """
        self._num_seen += 1
        if self._num_seen <= WARM_UP:
            return
        for rank, (number, took) in enumerate(zip(leaves, seconds, strict=True)):
            if number > 0:
                if self._resting[rank]:  # what was known of it is old
                    self._seconds[rank].clear()
                    self._seconds[rank].extend([took / number] * (KNOWN - 1))
                self._add(self._seconds[rank], took / number)
                self._resting[rank] = 0
            else:
                self._resting[rank] += 1

    def observe_exchange(self, last_seconds: float, nodes: Sequence[Sequence[Node]], num_leaves: int) -> None:
        """Take in the exchange of the step that was observed last.

        Args:
            last_seconds: what that of the step **before** took; its own time follows with the next one.
            nodes: by rank, what it has carried.
        """
        if len(self._hosts) < 2:
            return  # nothing travels
        if self._num_seen > WARM_UP:
            self._node_seconds.append(last_seconds / (self._num_nodes + 1))
        self._num_nodes = max(
            len(schedule([node for rank in host for node in nodes[rank]], num_leaves)[1]) for host in self._hosts
        )

    def node_seconds(self) -> float:
        """How much longer the exchange takes for each node of the host with the most; 0 while that is not known."""
        return statistics.median(self._node_seconds) if len(self._node_seconds) >= KNOWN else 0.0

    @staticmethod
    def _add(held: deque[float], pace: float) -> None:
        if len(held) >= KNOWN:
            known, last = statistics.median(held), held[-1]
            if min(last, pace) > JUMP * known or max(last, pace) < known / JUMP:
                held.clear()
                held.extend([last] * (KNOWN - 1))
        held.append(pace)

    def paces(self) -> list[float] | None:
        """Seconds per micro-batch by rank; None while one of them is not known."""
        if any(len(held) < KNOWN for held in self._seconds):
            return None
        return [statistics.median(held) for held in self._seconds]

    def peek(self, num_leaves: int) -> Plan:
        """What `decide` would most likely say. Changes nothing."""
        return self._plans.get(num_leaves) or plan(len(self._seconds), num_leaves)

    def decide(self, num_leaves: int) -> Plan:
        """Who computes what of the next step, of ``num_leaves`` micro-batches. Every member calls it once for each
        step.
        """
        self.change = None
        before = current = self.peek(num_leaves)
        paces = self.paces()
        if paces is None or num_leaves < 2 or len(paces) < 2:
            return current
        # Not on every digit of a measurement: equal paces to 1% are equal, and a plan is found once.
        unit, node_seconds = max(paces) / 256, self.node_seconds()
        rounded = tuple(max(1, round(pace / unit)) for pace in paces)
        tired = self._tired(num_leaves)
        found = weighed(rounded, num_leaves, tired, self._hosts, round(node_seconds / unit / 16) * 16)
        if found is not current and (
            _length(found, paces, self._hosts, node_seconds)
            < (1 - GAIN) * _length(current, paces, self._hosts, node_seconds)
            or tired
        ):
            current = found
        self._plans[num_leaves] = current
        counts = [len(own) for own in current.ranges]
        if counts != [len(own) for own in before.ranges] and not tired:
            finest = balanced(rounded, num_leaves, hosts=self._hosts)
            self._name(counts, paces, for_network=_length(finest, paces) < _length(current, paces))
        return current

    def _name(self, counts: Sequence[int], paces: Sequence[float], *, for_network: bool) -> None:
        slowness = tuple(
            pace / statistics.median([*paces[:rank], *paces[rank + 1 :]]) for rank, pace in enumerate(paces)
        )
        slow = frozenset(rank for rank, times in enumerate(slowness) if times >= SLOW)
        self.change = Change(tuple(counts), slowness, self._named - slow, for_network)
        self._named = slow

    def _tired(self, at_most: int) -> frozenset[int]:
        """Ranks that have rested for so long that they shall show their pace again."""
        tired = (rank for rank, steps in enumerate(self._resting) if steps >= REST)
        return frozenset(itertools.islice(tired, at_most))


def _hosts_of(first_of_host: Sequence[int]) -> tuple[range, ...]:
    """The ranks of each host."""
    edges = [rank for rank, first in enumerate(first_of_host) if rank == first]
    return tuple(range(a, b) for a, b in itertools.pairwise([*edges, len(first_of_host)]))


def _length(candidate: Plan, paces: Sequence[float], hosts: Sequence[range] = (), node_cost: float = 0.0) -> float:
    """How long a step takes, without what is the same for all plans."""
    computing = max(len(own) * pace for own, pace in zip(candidate.ranges, paces, strict=True))
    return computing + node_cost * max((_num_nodes(candidate, host) for host in hosts), default=0)


def _num_nodes(candidate: Plan, host: range) -> int:
    """How many nodes a host sends: members of one add up what they can before."""
    start = sum(len(own) for own in candidate.ranges[: host.start])
    stop = start + sum(len(candidate.ranges[rank]) for rank in host)
    return len(cover(start, stop, candidate.num_leaves))


@functools.lru_cache(maxsize=256)
def weighed(
    paces: tuple[int, ...],
    num_leaves: int,
    must_work: frozenset[int] = frozenset(),
    hosts: tuple[range, ...] = (),
    node_cost: int = 0,
) -> Plan:
    """The `balanced` plan of the grain with which the step is over first, if nodes cost time as well.

    Args:
        node_cost: time for each node of the host that sends the most, in the unit of the paces.
    """
    best = balanced(paces, num_leaves, must_work, hosts)
    if len(hosts) < 2 or must_work:
        return best
    length, grain = _length(best, paces, hosts, node_cost), 2
    # A coarser grain takes longer to compute, and at least one node is sent: sooner or later none is worth a look.
    while grain < num_leaves and _shortest(paces, num_leaves, must_work, hosts, grain) + node_cost < length:
        coarse = balanced(paces, num_leaves, must_work, hosts, grain)
        if (then := _length(coarse, paces, hosts, node_cost)) < length:
            best, length = coarse, then
        grain *= 2
    return best


@functools.lru_cache(maxsize=256)
def balanced(
    paces: tuple[int, ...],
    num_leaves: int,
    must_work: frozenset[int] = frozenset(),
    hosts: tuple[range, ...] = (),
    grain: int = 1,
) -> Plan:
    """The plan whose slowest member is done first; among those within 1% of it, one with few nodes.

    Ranges are contiguous, in the order of ranks. Each of them is the union of a few nodes of the tree, which are read
    one by one, so a plan may take 1% longer to compute if it saves nodes.

    Args:
        paces: by rank, time for one micro-batch, in any unit.
        must_work: ranks that get at least one micro-batch; only with a grain of 1.
        hosts: the ranks of each; together all, ascending. Without it all are of one.
        grain: where one host's leaves end and another's begin is a multiple of it.
    """
    hosts = hosts or (range(len(paces)),)
    shortest = _shortest(paces, num_leaves, must_work, hosts, grain)
    limit = shortest + shortest // 100
    last_of_host = {host.stop - 1 for host in hosts}
    # Fewest nodes with every member below the limit: a shortest path over (member, first leaf).
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    others = sum(limit // pace for pace in paces)
    for rank, pace in enumerate(paces):
        others -= limit // pace  # what those behind this member can do at most
        after: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (cost, edges) in best.items():
            least = max(start + (rank in must_work), num_leaves - others)
            for stop in range(least, min(num_leaves, start + limit // pace) + 1):
                if rank in last_of_host and stop % grain and stop != num_leaves:
                    continue
                option = (cost + len(cover(start, stop, num_leaves)), (*edges, stop))
                if stop not in after or option < after[stop]:
                    after[stop] = option
        best = after
    edges = (0, *best[num_leaves][1])
    return Plan(num_leaves, tuple(range(a, b) for a, b in itertools.pairwise(edges)))


def _shortest(
    paces: tuple[int, ...], num_leaves: int, must_work: frozenset[int], hosts: Sequence[range], grain: int
) -> int:
    """The smallest time within which all members together can compute all leaves, each host whole grains of them."""

    def enough(limit: int) -> bool:
        if any(limit < paces[rank] for rank in must_work):
            return False
        done = 0
        for host in hosts:
            most = sum(limit // paces[rank] for rank in host)
            if done + most >= num_leaves:  # the last grain need not be whole
                return True
            done += most // grain * grain
        return False

    # The answer is a whole number of micro-batches of some member.
    candidates = sorted({pace * number for pace in set(paces) for number in range(1, num_leaves + 1)})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(candidates[middle]) else (middle + 1, high)
    return candidates[low]
