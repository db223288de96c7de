"""The strategies that a training could use, each with its step and its memory by the models of this project's pages.

The base is a plain `run.steps`, which was measured. What another strategy does otherwise is reckoned:

- **shard**: a worker updates the parameters that it owns (copies / W of all), and what the others have updated comes to
  it: within a host as fast as a sum is copied, between hosts as bytes of the parameters, once to each host that lacks
  them.
- **bf16**: half the bytes between hosts; each node that is rounded is read and written once more.
- **delay**: bytes and waiting go on beside the next step's computation; what is longer counts. Nothing is sent before
  backward is over, and each worker copies the sum and the parameters once more.
- **local**: a replica for each worker, on the hosts where the workers are; changes travel once in H steps, with the
  copies of the replicas' states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from unisono.tools.plan.forecast import ForecastInputs, Parts, Roster, forecast
from unisono.tools.plan.wires import Traffic, seconds_of

__all__ = ["STRATEGIES", "StrategyModel", "StrategyOptions", "WorkerMemory"]

ROUNDING_S: Final = 2e-10
"""For each parameter of a node that is rounded to bfloat16 and back (docs/benchmarks.md)."""
ROUNDED_NODES: Final = 8
"""The lowest level of which nodes are rounded has so many at most."""
LATE_SLOTS: Final = 10
"""Gradients' worth of memory that a delay of one step takes besides, in a team (measured: docs/benchmarks.md)."""
ROUND: Final = 1.25
"""What the bytes of a round take, over what the link would take for them: they leave when the round is complete, and
nothing is computed beside them (measured on 100 Mbit/s: docs/benchmarks.md)."""
LOCAL_SLOTS: Final = 5
"""Gradients' worth of memory that local steps take besides, without copies of states (measured: docs/benchmarks.md)."""
HANDING_OVER: Final = 0.5
"""Of what sums within a host take: copying them, without adding."""
LATE_COPIES: Final = 2
"""With a delay: of the sum, which the script may write to, and of the parameters, with which losses are repaired."""


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """What a user may choose of the strategies."""

    copies: int = 2
    """Workers that hold each part of a state."""
    inner_steps: int = 10
    """H, of local steps."""


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Of one worker that trains alone, in bytes."""

    parts: Mapping[str, int] = field(default_factory=dict)
    """What does not depend on the micro-batch, by name, as in a report about memory."""
    activations: int = 0
    """Of one micro-batch, with its batch and all else."""
    gradient_bytes: int = 0
    leaves: int = 1
    """Micro-batches that it computed in a step."""

    def of(self, name: str) -> int:
        return sum(number for part, number in self.parts.items() if part.startswith(name))

    def total(self, leaves: int) -> float:
        """Return what a worker needs that computes so many micro-batches in a step."""
        slots = self.gradient_bytes * (_pending(leaves) - _pending(self.leaves))
        return max(0.0, sum(self.parts.values()) + slots + self.activations)


def _pending(leaves: int) -> int:
    """Return how many sums a worker holds at most while it adds up so many micro-batches: one for each binary digit."""
    return max(1, leaves).bit_length()


@dataclass(frozen=True, kw_only=True)
class StrategyModel:
    """One way to train."""

    name: str
    how: str
    """What a script would have to say."""
    learns: str
    """What it changes of what is learned."""
    parts: Callable[[ForecastInputs, Roster, StrategyOptions], Parts]
    memory: Callable[[WorkerMemory, Roster, StrategyOptions, int], float]
    """(memory of a worker alone, workers, options, micro-batches of the largest share) -> bytes of a worker."""
    is_measured: bool = False
    """It is what was measured; the others are reckoned from it."""

    def refuses(self, facts: ForecastInputs, roster: Roster) -> str:
        """Return why it has no meaning for these workers; "": it has one."""
        if self.is_measured:
            return ""
        if self.name == "bf16" and facts.is_rounded:
            return "the script has it already"
        if self.name == "bf16":
            return "there is only one host" if roster.hosts < 2 else ""
        if roster.workers < 2:
            return "there is only one worker"
        if facts.is_sharded:
            return "the script has it already" if self.name == "shard" else "the script has unisono.shard"
        if self.name == "local" and facts.is_rounded:
            return 'the script has wire="bf16"'
        if self.name == "local" and facts.microbatches % roster.workers != 0:
            return f"{facts.microbatches} micro-batches cannot be divided evenly among {roster.workers} replicas"
        return ""


def _plain(facts: ForecastInputs, roster: Roster, options: StrategyOptions) -> Parts:
    return forecast(facts, roster)


def _plain_memory(memory: WorkerMemory, roster: Roster, options: StrategyOptions, leaves: int) -> float:
    return memory.total(leaves)


def _shard(facts: ForecastInputs, roster: Roster, options: StrategyOptions) -> Parts:
    base = forecast(facts, roster)
    part = min(1.0, options.copies / roster.workers)
    handed_over = HANDING_OVER * base.exchange * (1 - part) if roster.workers > 1 else 0.0
    network = base.network
    if roster.hosts > 1 and roster.link is not None:
        missing = facts.parameter_bytes * max(0.0, 1 - options.copies / roster.hosts)
        network += missing / roster.link.bytes_per_s + roster.link.round_trip_s
    return dataclasses.replace(base, update=base.update * part, exchange=base.exchange + handed_over, network=network)


def _shard_memory(memory: WorkerMemory, roster: Roster, options: StrategyOptions, leaves: int) -> float:
    saved = memory.of("optimizer state") * (1 - min(1.0, options.copies / roster.workers))
    return memory.total(leaves) - saved


def _bf16(facts: ForecastInputs, roster: Roster, options: StrategyOptions) -> Parts:
    halved = dataclasses.replace(facts, gradient_bytes=max(1, facts.gradient_bytes // 2))
    base = forecast(halved, roster)
    nodes = min(facts.microbatches, ROUNDED_NODES) / roster.workers
    return dataclasses.replace(base, compute=base.compute + max(1.0, nodes) * ROUNDING_S * facts.gradient_bytes / 4)


def _delay(facts: ForecastInputs, roster: Roster, options: StrategyOptions) -> Parts:
    base = forecast(facts, roster)
    if roster.workers == 1:
        return base
    behind = base.waiting + forecast(facts, roster, is_late=True).network
    copying = LATE_COPIES * HANDING_OVER * base.exchange
    own = base.compute + base.update + base.other + copying
    return dataclasses.replace(base, waiting=0.0, exchange=base.exchange + copying, network=max(0.0, behind - own))


def _delay_memory(memory: WorkerMemory, roster: Roster, options: StrategyOptions, leaves: int) -> float:
    return memory.total(leaves) + LATE_SLOTS * memory.gradient_bytes


def _local(facts: ForecastInputs, roster: Roster, options: StrategyOptions) -> Parts:
    """A round of H steps, divided by H. As many replicas as workers, each with its part of the micro-batches."""
    if roster.workers == 1:
        return forecast(facts, roster)
    base = forecast(facts, dataclasses.replace(roster, link=None))
    network = 0.0
    if roster.hosts > 1 and roster.link is not None:
        traffic = Traffic(hosts=roster.hosts, nbytes=facts.parameter_bytes, link=roster.link)
        states = 2 * facts.parameter_bytes * (options.copies - 1) * roster.per_host / roster.link.bytes_per_s
        network = ROUND * (seconds_of(traffic) + states) / options.inner_steps
    # Replicas wait for each other once in a round, and what makes steps uneven averages out over it.
    waiting = base.waiting / options.inner_steps**0.5
    return dataclasses.replace(base, waiting=waiting, exchange=base.exchange / options.inner_steps, network=network)


def _local_memory(memory: WorkerMemory, roster: Roster, options: StrategyOptions, leaves: int) -> float:
    states = memory.of("optimizer state") * (min(options.copies, roster.workers) - 1)
    return memory.total(leaves) + LOCAL_SLOTS * memory.gradient_bytes + states


STRATEGIES: Final = {
    one.name: one
    for one in (
        StrategyModel(name="replicated", how="", learns="", parts=_plain, memory=_plain_memory,
                 is_measured=True),
        StrategyModel(
            name="shard",
            how="optimizer = unisono.shard(optimizer, copies={copies})",
            learns="the same bits",
            parts=_shard,
            memory=_shard_memory,
        ),
        StrategyModel(name="bf16", how='run.steps(..., wire="bf16")', learns="nearly the same", parts=_bf16,
                 memory=_plain_memory),
        StrategyModel(name="delay", how="run.steps(..., delay=1)", learns=(
            "slightly less progress per step"
        ), parts=_delay,
                 memory=_delay_memory),
        StrategyModel(
            name="local",
            how="run.local_steps(..., replicas={workers}, inner_steps={inner_steps})",
            learns="less progress per sample, the more replicas the less",
            parts=_local,
            memory=_local_memory,
        ),
    )
}  # fmt: skip
"""By name; the first is what was measured."""
