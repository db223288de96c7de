"""Forecast of a step: its time, by parts, from what was measured of a few steps at a few numbers of workers.

What is measured (`Sample`) is a step of one kind: the same micro-batches, on workers that are alike. A forecast plans
such a step for other workers with the functions that plan the run's own steps, and adds up the parts:

- **compute**: the largest share of the micro-batches, at the pace that so many workers of one machine have. Workers
  share caches, memory and the power of a processor, so the pace depends on their number: between two numbers that were
  measured it is on the line between them, beyond the last one on the line of the last two, and where there are more
  workers than the machine has room for, these take turns.
- **waiting**: a step ends with the slowest worker. If the times of the workers for their shares scatter by a standard
  deviation of s, the slowest of W takes longer than the mean by s times the expected largest of W normal numbers (Blom,
  *Statistical Estimates and Transformed Beta-Variables*, 1958).
- **exchange**: sums within a host. Each worker reads its part of all nodes, and copies the whole sum; measured, and
  drawn out as the pace is.
- **network**: `unisono.tools.plan.wires`.
- **update**: what every worker does with the gradients by itself; measured, and drawn out as the pace is.
- **other**: what a step took above all of these where it was measured, so that a forecast of what was measured is what
  was measured; that of the nearest number of workers.

What a forecast cannot know: that a machine is not like the one that was measured, and what else will run on it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from unisono.core.balance import in_units, num_nodes, weighed
from unisono.core.plan import Plan, plan
from unisono.core.tree import leaves
from unisono.record.advice import shorter_pace
from unisono.tools.plan.wires import NetworkLink, Traffic, seconds_of

__all__ = ["ForecastInputs", "Parts", "Roster", "Sample", "candidates", "expected_largest", "forecast", "shares_of"]

MOST_EACH: Final = 16
"""Micro-batches for each worker, at most, that are considered."""
CROWDED: Final = "workers that share a machine"
BACKWARD: Final = 0.5
"""Of a micro-batch's time: from when the first gradients are complete, to its end."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Means of some steps with one number of workers. Times in seconds."""

    workers: int
    hosts: int = 1
    """All on one machine; more than 1: as if on several, whose sums travel over its loopback device."""
    step: float
    """The median."""
    spread: float
    """Of the step's time: half of the interval that has the middle 95% of what a repetition would give, over it."""
    pace: float
    """For one micro-batch, with its data; the mean of the workers."""
    scatter: float
    """Standard deviation of a worker's time for its share, over that time."""
    exchange: float = 0.0
    update: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ForecastInputs:
    """What a forecast is made from."""

    samples: Sequence[Sample]
    """At least one; the first is that of the fewest workers."""
    microbatches: int
    batch_size: int
    gradient_bytes: int
    """Of one node of the summation tree, as it travels."""
    parameter_bytes: int
    room: int
    """Workers that the machine has cores or GPUs for."""
    is_rounded: bool = False
    """What was measured sends sums as bfloat16."""
    is_sharded: bool = False
    """What was measured shares out the states of an optimizer."""
    paces: Mapping[int, float] = field(default_factory=dict)
    """Of one worker, where they were measured: by the number of micro-batches into which the same batch is cut."""


@dataclass(frozen=True, kw_only=True)
class Roster:
    """Workers that a forecast is for: on equal hosts, as many on each as fit."""

    workers: int
    per_host: int
    link: NetworkLink | None = None
    """Between two hosts; None: there is one host."""
    on_one_machine: bool = False
    """The hosts are simulated: all workers share the cores and the memory of one."""

    @property
    def hosts(self) -> int:
        return math.ceil(self.workers / self.per_host)

    @property
    def neighbours(self) -> int:
        """Workers that share a machine with one of them, itself included."""
        return self.workers if self.on_one_machine else min(self.workers, self.per_host)

    @property
    def ranks(self) -> tuple[range, ...]:
        """The ranks of each host; sizes differ by at most one."""
        edges = [host * self.workers // self.hosts for host in range(self.hosts + 1)]
        return tuple(range(first, stop) for first, stop in itertools.pairwise(edges))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Time of a step by what it is spent on, on the worker that is last. In seconds."""

    compute: float
    waiting: float = 0.0
    exchange: float = 0.0
    network: float = 0.0
    update: float = 0.0
    other: float = 0.0
    uneven: float = 0.0
    """Of ``compute``: what the largest share is above an equal one."""
    crowded: float = 0.0
    """Of the rest of ``compute``: what it is above that of a worker that has a machine for itself."""

    @property
    def step(self) -> float:
        return self.compute + self.waiting + self.exchange + self.network + self.update + self.other

    @property
    def bottleneck(self) -> str:
        """What takes the most time, in words; "computation" is what a step is for."""
        own = {"computation": self.compute - self.uneven - self.crowded, **self._losses}
        return max(own, key=lambda name: own[name])

    @property
    def loss(self) -> str:
        """What takes the most time besides what a step is for, in words."""
        return max(self._losses, key=lambda name: self._losses[name])

    @property
    def _losses(self) -> dict[str, float]:
        return {
            CROWDED: self.crowded,
            "uneven shares": self.uneven,
            "waiting for the slowest worker": self.waiting,
            "sums within a host": self.exchange,
            "the network": self.network,
            "the update": self.update,
            "other costs of a step": self.other,
        }


def forecast(
    facts: ForecastInputs, roster: Roster, microbatches: int = 0, batches: float = 1.0, *, is_late: bool = False
) -> Parts:
    """Return the step of these workers, all of which hold everything.

    Args:
        microbatches: into which the batch is cut; 0: as it was measured.
        batches: the size of the batch, as a multiple of the one that was measured.
        is_late: no sum is sent before all is computed.
    """
    number = microbatches or facts.microbatches
    neighbours = roster.neighbours
    pace = _pace(facts, _drawn(facts, lambda one: one.pace, neighbours), number, batches)
    traffic = _traffic(facts, roster)
    shares = shares_of(roster, number, pace, seconds_of(traffic) if traffic is not None else 0.0)
    largest = max(len(own) for own in shares.ranges)
    computing = largest * pace
    network = 0.0
    if traffic is not None:
        for host in roster.ranks:
            complete = [0.0] * num_nodes(shares, host) if is_late else _complete(shares, host, pace)
            network = max(network, seconds_of(traffic, complete))
    return Parts(
        compute=computing,
        uneven=computing - number * pace / roster.workers,
        crowded=max(0.0, pace - _pace(facts, _together(facts)[0].pace, number, batches)) * number / roster.workers,
        waiting=computing * _scatter(facts, roster.workers) * expected_largest(roster.workers),
        exchange=_drawn(facts, lambda one: one.exchange, min(neighbours, roster.per_host)),
        network=network,
        update=_drawn(facts, lambda one: one.update, neighbours),
        other=_remainder(facts, min(_together(facts), key=lambda one: abs(one.workers - neighbours))),
    )


def shares_of(roster: Roster, microbatches: int, pace: float, node_seconds: float) -> Plan:
    """Return which of these workers, which are equally fast, computes which micro-batches: as the run would plan it."""
    rounded, node_cost = in_units([pace] * roster.workers, node_seconds)
    hosts = roster.ranks if roster.hosts > 1 else ()
    return weighed(rounded, microbatches, hosts=hosts, node_cost=node_cost)


def candidates(facts: ForecastInputs, workers: int) -> list[int]:
    """Return the numbers of micro-batches that the batch can be cut into, up to `MOST_EACH` for each worker."""
    most = min(facts.batch_size, max(MOST_EACH * workers, facts.microbatches))
    return [number for number in range(1, most + 1) if facts.batch_size % number == 0]


def expected_largest(number: int) -> float:
    """Return the expected largest of so many standard normal numbers, by Blom's approximation; 0 for one."""
    return statistics.NormalDist().inv_cdf((number - 0.375) / (number + 0.25)) if number > 1 else 0.0


def _pace(facts: ForecastInputs, pace: float, number: int, batches: float) -> float:
    """Return the pace with another number of micro-batches: as it was measured, or by the model of the advice."""
    if batches == 1.0 and number in facts.paces and facts.microbatches in facts.paces:
        return pace * facts.paces[number] / facts.paces[facts.microbatches]
    return shorter_pace(pace, facts.microbatches * batches / number)


def _scatter(facts: ForecastInputs, workers: int) -> float:
    """Return the scatter of a worker's time, as the sample with the nearest number of several workers has it."""
    several = [one for one in facts.samples if one.workers > 1] or facts.samples
    return min(several, key=lambda one: abs(one.workers - workers)).scatter


def _complete(shares: Plan, host: range, pace: float) -> list[float]:
    """Return for each node of a host how long before the end of all computing its sum can leave.

    A worker alone on its host sends a node as soon as backward has passed through the last micro-batch of it. Several
    add up their nodes first, which those wait for that are last.
    """
    if len(host) > 1:
        return [0.0] * num_nodes(shares, host)
    longest = max(len(own) for own in shares.ranges)
    own = shares.ranges[host.start]
    done = itertools.accumulate(len(leaves(node, shares.num_leaves)) for node in shares.nodes[host.start])
    return [pace * (longest - number + BACKWARD) for number in done] if own else []


def _traffic(facts: ForecastInputs, roster: Roster) -> Traffic | None:
    if roster.hosts < 2 or roster.link is None:
        return None
    traffic = Traffic(hosts=roster.hosts, nbytes=facts.gradient_bytes, link=roster.link)
    apart = min((one for one in facts.samples if one.hosts > 1), key=lambda one: one.workers, default=None)
    if apart is None:
        return traffic
    shares = shares_of(Roster(workers=apart.workers, per_host=1), facts.microbatches, apart.pace, 0.0)
    nodes = max(len(own) for own in shares.nodes)
    return dataclasses.replace(
        traffic,
        own_seconds=max(0.0, apart.step - _drawn(facts, lambda one: one.step, apart.workers)),
        own_hosts=apart.hosts,
        own_nodes=nodes,
    )


def _remainder(facts: ForecastInputs, one: Sample) -> float:
    """Return what a step that was measured took above its other parts."""
    shares = plan(one.workers, facts.microbatches)
    computing = max(len(own) for own in shares.ranges) * one.pace
    waiting = computing * one.scatter * expected_largest(one.workers)
    return max(0.0, one.step - computing - waiting - one.exchange - one.update)


def _drawn(facts: ForecastInputs, part: Callable[[Sample], float], workers: int) -> float:
    """Return a part of the step with so many workers on a machine, from the samples of one host.

    Between two samples on the line between them; beyond, on that of the last two, which is not followed downwards.
    Workers beyond the machine's room take turns.
    """
    known = _together(facts)
    within = min(workers, max(facts.room, known[0].workers))
    value = _on_line([(one.workers, part(one)) for one in known], within)
    return value * max(1.0, workers / within)


def _together(facts: ForecastInputs) -> list[Sample]:
    """Return the samples of one host, that of the fewest workers first."""
    return sorted((one for one in facts.samples if one.hosts == 1), key=lambda one: one.workers)


def _on_line(points: Sequence[tuple[int, float]], at: int) -> float:
    if len(points) == 1:
        return points[0][1]
    for (left, low), (right, high) in itertools.pairwise(points):
        if at <= right:
            return low + (high - low) * (max(at, left) - left) / (right - left)
    (left, low), (right, high) = points[-2:]
    return max(high, high + (high - low) * (at - right) / (right - left))
