"""Paces of the members, cost of the exchange, and the shares that follow from both.

All members receive the same telemetry with every commit and run the same arithmetic on it, so all reach the same plan
without sending a message. A new generation begins without paces, because its newcomers know none.

A member's pace is the median of its seconds per micro-batch over its last steps: one slow step does not move
work. Two steps in a row that are much slower (or faster) than the known pace do: the older ones are forgotten then.
The plan changes only when the step would become shorter by more than `GAIN`, so noise does not move work either.

Between hosts a range of leaves travels node by node, and an exchange takes as long as that of the host with the most
nodes. The sums that come back weigh as much as one node more, so the cost of a node is the time of an exchange
divided by that host's nodes plus one. Where this cost is high against a micro-batch, the edges between hosts lie at
multiples of a **grain**, a power of two: fewer nodes, and shares that fit the paces less well. The grain with the
shortest step is chosen.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from unisono.core.plan import Plan, plan
from unisono.core.tree import Node, cover, schedule

__all__ = ["Balance", "ShareChange", "ToldShares", "balanced", "in_units", "length_of", "num_nodes", "weighed"]

WINDOW: Final = 5
"""A pace is the median of so many steps."""
KNOWN: Final = (WINDOW + 1) // 2
"""A pace is known after so many steps."""
WARM_UP: Final = 2
"""So many steps at the beginning of a generation do not count: caches, compilation, page faults."""
GAIN: Final = 0.04
"""A plan is changed when the step would become shorter by more than this part of it."""
JUMP: Final = 1.25
"""Two steps in a row that differ from the known pace by more than this factor are a new pace."""
SLOW: Final = 1.2
"""A member that takes longer than the others by this factor is named in the message about the plan."""
MUCH: Final = 1 / 3
"""A share is told where it differs from the one that was told last by so much of the mean share."""
SELDOM_S: Final = 30.0
"""Shares are told at most once in so many seconds of computing, except for a member that has become slow."""
REST: Final = 16
"""A member without micro-batches gets one after this many steps: it may have become faster."""


@dataclass(frozen=True)
class ShareChange:
    """The plan has changed because of the members' paces."""

    counts: tuple[int, ...]
    """By rank, the micro-batches that each member gets now."""
    slowness: tuple[float, ...]
    """By rank, the time that a member takes for a micro-batch, as a multiple of that of the others (their median)."""
    recovered: frozenset[int]
    """Ranks that were slow before and are not any more."""
    for_network: bool = False
    """Other shares fit the paces better, but would take longer to send."""

    @property
    def slow(self) -> frozenset[int]:
        """The ranks that are named because they take longer than the others."""
        return frozenset(rank for rank, times in enumerate(self.slowness) if times >= SLOW)

    def say(self, worker_ids: Sequence[str]) -> str:
        """Return the change as one sentence."""
        num_leaves = sum(self.counts)
        parts = []
        for rank, (name, count, slowness) in enumerate(zip(worker_ids, self.counts, self.slowness, strict=True)):
            if slowness >= SLOW:
                parts.append(
                    f"{name} takes {slowness:.1f}x as long as the others for a micro-batch: it now gets {count} of "
                    f"{num_leaves}"
                )
            elif rank in self.recovered:
                parts.append(f"{name} is as fast as the others again: it now gets {count} of {num_leaves}")
        if not parts:
            shares = ", ".join(f"{name} {count}" for name, count in zip(worker_ids, self.counts, strict=True))
            what = "the workers' speeds and the network" if self.for_network else "the workers' paces"
            parts.append(f"the {num_leaves} micro-batches follow {what}: {shares}")
        elif self.for_network:
            parts.append("shares that match the speeds better would take longer to send")
        return "; ".join(parts)


@dataclass(frozen=True)
class ToldShares:
    """The shares that were told last."""

    counts: tuple[int, ...]
    """By rank, the micro-batches of each member."""
    slow: frozenset[int] = frozenset()
    at_s: float = -SELDOM_S
    """When that was, in seconds of computing."""
    named_s: Mapping[int, float] = field(default_factory=dict)
    """By rank, when a member was told to be slow last."""

    def is_due(self, change: ShareChange, now_s: float) -> bool:
        """Return whether a change is to be told: a member has become slow that was not named for a while, or much has
        changed and nothing was told for a while.
        """
        if any(now_s - self.named_s.get(rank, -SELDOM_S) >= SELDOM_S for rank in change.slow - self.slow):
            return True
        much = MUCH * sum(change.counts) / len(change.counts)
        is_much = any(abs(now - then) >= much for now, then in zip(change.counts, self.counts, strict=True))
        return now_s - self.at_s >= SELDOM_S and (is_much or change.slow != self.slow)

    def tell(self, change: ShareChange, now_s: float) -> ToldShares:
        """Return what was told last, once this change is told."""
        return ToldShares(change.counts, change.slow, now_s, {**self.named_s, **dict.fromkeys(change.slow, now_s)})


class Balance:
    """Pace of each member of one generation, by rank, and cost of their exchange.

    Args:
        first_of_host: by rank, the first rank of that member's host; members of a host stand together. Default: all
            members are on one host.
    """

    def __init__(self, num_members: int, first_of_host: Sequence[int] = ()) -> None:
        self._hosts = _hosts_of(first_of_host or (0,) * num_members)
        self._node_seconds: deque[float] = deque(maxlen=WINDOW)
        self._num_nodes = 0
        self._seconds: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(num_members)]
        self._resting = [0] * num_members
        self._num_seen = 0
        self._plans: dict[int, Plan] = {}
        self._computed_s = 0.0
        self._told: dict[int, ToldShares] = {}  # by the number of micro-batches
        self._untold: ShareChange | None = None
        self.change: ShareChange | None = None
        """The change that is to be told after the last `decide`; None: there is none."""

    def observe(self, leaves: Sequence[float], seconds: Sequence[float]) -> None:
        """Record a step.

        Args:
            leaves: by rank, how many micro-batches each member has computed.
            seconds: by rank, how long that took.
        """
        self._num_seen += 1
        self._computed_s += max(seconds)
        if self._num_seen <= WARM_UP:
            return
        for rank, (number, took) in enumerate(zip(leaves, seconds, strict=True)):
            if number > 0:
                if self._resting[rank]:  # the known pace is old
                    self._seconds[rank].clear()
                    self._seconds[rank].extend([took / number] * (KNOWN - 1))
                self._add(self._seconds[rank], took / number)
                self._resting[rank] = 0
            else:
                self._resting[rank] += 1

    def observe_exchange(self, last_seconds: float, nodes: Sequence[Sequence[Node]], num_leaves: int) -> None:
        """Record the exchange of the step that was observed last.

        Args:
            last_seconds: time of the exchange of the step **before**; the time of this one comes with the next call.
            nodes: by rank, the nodes that this exchange has carried.
        """
        if len(self._hosts) < 2:
            return  # nothing travels
        if self._num_seen > WARM_UP:
            self._node_seconds.append(last_seconds / (self._num_nodes + 1))
        self._num_nodes = max(
            len(schedule([node for rank in host for node in nodes[rank]], num_leaves)[1]) for host in self._hosts
        )

    def node_seconds(self) -> float:
        """Return the time of the exchange for each node of the host with the most nodes; 0 while it is unknown."""
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
        """Return the seconds per micro-batch, by rank; None while one of them is unknown."""
        if any(len(held) < KNOWN for held in self._seconds):
            return None
        return [statistics.median(held) for held in self._seconds]

    def peek(self, num_leaves: int) -> Plan:
        """Return the plan that `decide` would most likely return. Changes nothing."""
        return self._plans.get(num_leaves) or plan(len(self._seconds), num_leaves)

    def decide(self, num_leaves: int) -> Plan:
        """Return the plan of the next step, of ``num_leaves`` micro-batches. Every member calls this once a step."""
        self.change = None
        before = current = self.peek(num_leaves)
        paces = self.paces()
        if paces is None or num_leaves < 2 or len(paces) < 2:
            return current
        node_seconds = self.node_seconds()
        rounded, node_cost = in_units(paces, node_seconds)
        tired = self._tired(num_leaves)
        found = weighed(rounded, num_leaves, tired, self._hosts, node_cost)
        if found is not current and (
            length_of(found, paces, self._hosts, node_seconds)
            < (1 - GAIN) * length_of(current, paces, self._hosts, node_seconds)
            or tired
        ):
            current = found
        self._plans[num_leaves] = current
        counts = [len(own) for own in current.ranges]
        if counts != [len(own) for own in before.ranges] and not tired:
            finest = balanced(rounded, num_leaves, hosts=self._hosts)
            slowness = tuple(
                pace / statistics.median([*paces[:rank], *paces[rank + 1 :]]) for rank, pace in enumerate(paces)
            )
            for_network = length_of(finest, paces) < length_of(current, paces)
            self._untold = ShareChange(tuple(counts), slowness, frozenset(), for_network)
        self._tell(num_leaves)
        return current

    def _tell(self, num_leaves: int) -> None:
        """Make the newest change the one that is to be told, if it is time to tell it."""
        change = self._untold
        if change is None or sum(change.counts) != num_leaves:
            return
        even = tuple(len(own) for own in plan(len(change.counts), num_leaves).ranges)
        told = self._told.get(num_leaves, ToldShares(even))
        if told.is_due(change, self._computed_s):
            self.change, self._untold = replace(change, recovered=told.slow - change.slow), None
            self._told[num_leaves] = told.tell(change, self._computed_s)

    def _tired(self, at_most: int) -> frozenset[int]:
        """Return the ranks that had no micro-batch for so long that their pace must be measured again."""
        tired = (rank for rank, steps in enumerate(self._resting) if steps >= REST)
        return frozenset(itertools.islice(tired, at_most))


def _hosts_of(first_of_host: Sequence[int]) -> tuple[range, ...]:
    """Return the ranks of each host."""
    edges = [rank for rank, first in enumerate(first_of_host) if rank == first]
    return tuple(range(a, b) for a, b in itertools.pairwise([*edges, len(first_of_host)]))


def in_units(paces: Sequence[float], node_seconds: float = 0.0) -> tuple[tuple[int, ...], int]:
    """Return paces, and the time of a node, in whole units.

    Not on every digit of a measurement: equal paces to 1% are equal, and a plan is found once.
    """
    unit = max(paces) / 256
    return tuple(max(1, round(pace / unit)) for pace in paces), round(node_seconds / unit / 16) * 16


def length_of(candidate: Plan, paces: Sequence[float], hosts: Sequence[range] = (), node_cost: float = 0.0) -> float:
    """Return how long a step takes, without the time that is the same for all plans."""
    computing = max(len(own) * pace for own, pace in zip(candidate.ranges, paces, strict=True))
    return computing + node_cost * max((num_nodes(candidate, host) for host in hosts), default=0)


def num_nodes(candidate: Plan, host: range) -> int:
    """Return how many nodes a host sends, after its members have added up the nodes that they can."""
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
    """Return the `balanced` plan of the grain with the shortest step, where nodes cost time as well.

    Args:
        node_cost: time for each node of the host that sends the most, in the unit of the paces.
    """
    best = balanced(paces, num_leaves, must_work, hosts)
    if len(hosts) < 2 or must_work:
        return best
    length, grain = length_of(best, paces, hosts, node_cost), 2
    # A coarser grain takes longer to compute, and at least one node is sent: from some grain on, none is better.
    while grain < num_leaves and _shortest(paces, num_leaves, must_work, hosts, grain) + node_cost < length:
        coarse = balanced(paces, num_leaves, must_work, hosts, grain)
        if (then := length_of(coarse, paces, hosts, node_cost)) < length:
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
    """Return the plan whose slowest member is done first; among the plans within 1% of it, one with few nodes.

    Ranges are contiguous, in the order of ranks. Each of them is the union of a few nodes of the tree, which are read
    one by one, so a plan may take 1% longer to compute if it saves nodes.

    Args:
        paces: by rank, time for one micro-batch, in any unit.
        must_work: ranks that get at least one micro-batch; only with a grain of 1.
        hosts: the ranks of each host; together all ranks, ascending. Default: all members are on one host.
        grain: one host's leaves end, and the next host's begin, at a multiple of it.
    """
    hosts = hosts or (range(len(paces)),)
    shortest = _shortest(paces, num_leaves, must_work, hosts, grain)
    limit = shortest + shortest // 100
    last_of_host = {host.stop - 1 for host in hosts}
    # Fewest nodes with every member below the limit: a shortest path over (member, first leaf).
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    others = sum(limit // pace for pace in paces)
    for rank, pace in enumerate(paces):
        others -= limit // pace  # the most leaves that the members after this one can compute
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
    """Return the smallest time within which all members together can compute all leaves, each host in whole grains."""

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
