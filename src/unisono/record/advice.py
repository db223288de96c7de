"""Advice from measured times: where the largest losses of a run are, what to do about each, what it would bring.

Each piece of advice has a model, which its function says, and is computed with the same functions that plan a step. A
model promises no more than its inputs hold: times of the kind of step that was measured, on the machines that it was
measured on. What cannot be computed has no gain (0), and says only what is lost.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from unisono.core.balance import balanced, in_units, length_of, num_nodes, weighed
from unisono.core.events import Seconds
from unisono.core.plan import Plan, plan
from unisono.core.words import short_duration

__all__ = ["Advice", "AdviceSetting", "Load", "advise", "shorter_pace"]

LEAST: Final = 0.05
"""Of a step's time: a smaller loss, or a smaller gain, is not worth a sentence."""
FIXED_S: Final = 0.001
"""Of a micro-batch's time, what does not become less with fewer samples (Python, starting operations); at most half."""
ENOUGH: Final = 0.9
"""The smallest change that brings this part of the most that can be had is advised."""
MOST_EACH: Final = 16
"""Micro-batches for each worker, at most, that are advised."""
SLOW: Final = 1.3
"""A worker that takes longer than others of its kind for a micro-batch, by this factor, is named."""
FAULTS: Final = 1.0
"""Page faults a step from which on memory is called short."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one worker did in a step, as a mean over some steps of the same members."""

    worker_id: str
    seconds: Seconds
    leaves: float
    """Micro-batches."""
    host: str = ""
    kind: str = ""
    """What it computes on, e.g. the name of a GPU: workers of one kind should be equally fast."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """By worker id, seconds that it has waited for each."""
    page_faults: float = 0.0

    @property
    def pace(self) -> float:
        """Seconds for one micro-batch, with its data; 0: it has computed none."""
        return (self.seconds.data + self.seconds.compute) / self.leaves if self.leaves > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class AdviceSetting:
    """How the run was set, as far as advice depends on it. Zero: unknown."""

    microbatches: int
    batch_size: int = 0
    balance: bool = True
    loader_workers: int = 0
    """Loader processes of each worker."""
    spare_cores: float = math.inf
    """Cores of the busiest machine that nothing uses."""
    wire: str = "fp32"
    """As what sums of gradients travel."""
    parts: int = 1
    """Workers of a group. Those of one wait for each other within a micro-batch, which no model here foretells."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One loss of time, what to do about it, and what that would bring."""

    text: str
    """Whole sentences, for people."""
    loss_seconds: float
    """Of each step, on the workers that lose most by it."""
    gain: float = 0.0
    """Part of a step's time (for each sample) that the change would save, by its model; 0: it cannot be computed."""
    change: str = ""
    """What to change, as one would write it: ``microbatches=16``; "": nothing that can be written so."""


def advise(loads: Sequence[Load], setting: AdviceSetting) -> list[Advice]:
    """Return what would make steps shorter, the largest gain first; what has no gain follows, by its loss.

    Args:
        loads: of all workers, by rank.
    """
    if not loads or step_seconds(loads) <= 0.0 or not setting.microbatches:
        return []
    found = [*_loading(loads, setting), *_update(loads), *_memory(loads)]
    if setting.parts == 1:
        found += [
            *_idle_workers(loads, setting),
            *_slow_workers(loads, setting),
            *_uneven_shares(loads, setting),
            *_network(loads, setting),
            *_wire(loads, setting),
        ]
    worth = [each for each in found if each.loss_seconds >= LEAST * step_seconds(loads)]
    return sorted(worth, key=lambda each: (-each.gain, -each.loss_seconds))


def step_seconds(loads: Sequence[Load]) -> float:
    """Return the wall time of a step: all members begin and end together, so the longest is that of all."""
    return max(load.seconds.total() for load in loads)


# -- the models --------------------------------------------------------------------------------------


def computing_seconds(loads: Sequence[Load], setting: AdviceSetting, microbatches: int) -> float:
    """Return how long the slowest worker would compute with so many micro-batches of the same global batch.

    The model: a micro-batch with half the samples takes half the time, but for a fixed part (`FIXED_S`, at most half of
    it); and shares are planned as the run plans them. For the number that was measured, it is what was measured: where
    the largest share goes from worker to worker, no mean shows it, but all of them compute or wait so long.
    """
    if microbatches == setting.microbatches:
        longest = max(load.seconds.data + load.seconds.compute for load in loads)
        return max(longest, min(each.seconds.data + each.seconds.compute + each.seconds.waiting for each in loads))
    shares, paces = _planned(loads, setting, microbatches)
    return length_of(shares, paces)


def sending_seconds(loads: Sequence[Load], setting: AdviceSetting, microbatches: int) -> float:
    """Return how long bytes would be on their way with so many micro-batches of the same global batch.

    The model is that of `unisono.core.balance`: the host that sends most sends one sum for each node of the tree
    that its micro-batches add up to, and the sums that come back take as long as one more.
    """
    if microbatches == setting.microbatches:
        return max(load.seconds.network for load in loads)
    shares, _ = _planned(loads, setting, microbatches)
    return _node_seconds(loads, setting) * (_num_nodes(loads, shares) + 1)


def _saved(loads: Sequence[Load], setting: AdviceSetting, microbatches: int) -> float:
    """Return by how much a step would be shorter."""
    now, then = (
        computing_seconds(loads, setting, number) + sending_seconds(loads, setting, number)
        for number in (setting.microbatches, microbatches)
    )
    return now - then


def _planned(loads: Sequence[Load], setting: AdviceSetting, microbatches: int) -> tuple[Plan, list[float]]:
    """Return the plan of the run with so many micro-batches, and the paces that it would have."""
    smaller = setting.microbatches / microbatches
    paces = [max(1e-9, shorter_pace(load.pace, smaller)) for load in loads]
    if not setting.balance:
        return plan(len(paces), microbatches), paces
    rounded, node_cost = in_units(paces, _node_seconds(loads, setting))
    return weighed(rounded, microbatches, hosts=_hosts(loads), node_cost=node_cost), paces


def shorter_pace(pace: float, part: float) -> float:
    """Return the pace of micro-batches that have this part of the samples."""
    fixed = min(FIXED_S, pace / 2)
    return fixed + (pace - fixed) * part


def _node_seconds(loads: Sequence[Load], setting: AdviceSetting) -> float:
    """Return how long one node of the host that sends most is on its way."""
    if len(_hosts(loads)) < 2:
        return 0.0
    return max(load.seconds.network for load in loads) / (_num_nodes(loads, _measured(loads, setting)) + 1)


def _measured(loads: Sequence[Load], setting: AdviceSetting) -> Plan:
    """Return the plan of the measured steps, as far as the means show it."""
    counts = [round(load.leaves) for load in loads]
    if sum(counts) != setting.microbatches:
        return plan(len(loads), setting.microbatches)
    edges = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
    return Plan(setting.microbatches, tuple(range(first, stop) for first, stop in itertools.pairwise(edges)))


def _hosts(loads: Sequence[Load]) -> tuple[range, ...]:
    """Return the ranks of each host, where workers of one stand together."""
    edges = [rank for rank in range(len(loads)) if rank == 0 or loads[rank].host != loads[rank - 1].host]
    return tuple(range(first, stop) for first, stop in itertools.pairwise([*edges, len(loads)]))


def _num_nodes(loads: Sequence[Load], shares: Plan) -> int:
    """Return how many nodes of the summation tree the host that sends most has."""
    return max(1, *(num_nodes(shares, host) for host in _hosts(loads)))


def _candidates(loads: Sequence[Load], setting: AdviceSetting) -> list[int]:
    """Return the numbers of micro-batches that the batch can be cut into, up to `MOST_EACH` for each worker."""
    most = MOST_EACH * len(loads)
    if not setting.batch_size:
        return [setting.microbatches * times for times in range(2, most // setting.microbatches + 1)]
    numbers = range(setting.microbatches + 1, min(most, setting.batch_size) + 1)
    return [number for number in numbers if setting.batch_size % number == 0]


# -- one kind of loss each ---------------------------------------------------------------------------


def _uneven_shares(loads: Sequence[Load], setting: AdviceSetting) -> Iterable[Advice]:
    """Workers wait because the micro-batches cannot be distributed well: with more and smaller ones they can."""
    step = step_seconds(loads)
    waiting = max(loads, key=lambda load: load.seconds.waiting)
    gains = {number: _saved(loads, setting, number) / step for number in _candidates(loads, setting)}
    best = max(gains.values(), default=0.0)
    if best < LEAST or setting.microbatches < len(loads):
        return
    number = min(number for number, gain in gains.items() if gain >= ENOUGH * best)
    yield Advice(
        text=(
            f"{_waits(waiting, step)}: {_few(loads, setting)}. microbatches={number} would save "
            f"{_percent(gains[number])} of the step's time. (A different number of micro-batches is a different "
            "recipe: the results differ from this run's.)"
        ),
        loss_seconds=waiting.seconds.waiting,
        gain=gains[number],
        change=f"microbatches={number}",
    )


def _idle_workers(loads: Sequence[Load], setting: AdviceSetting) -> Iterable[Advice]:
    """There are fewer micro-batches than workers."""
    if setting.microbatches >= len(loads):
        return
    step = step_seconds(loads)
    idle = len(loads) - setting.microbatches
    numbers = [number for number in _candidates(loads, setting) if number % len(loads) == 0]
    gains = {number: _saved(loads, setting, number) / step for number in numbers}
    number, gain = max(gains.items(), key=lambda each: (each[1], -each[0]), default=(0, 0.0))
    what = f": {idle} of them {'has' if idle == 1 else 'have'} nothing to compute. "
    if gain >= LEAST:
        what += (
            f"microbatches={number} would save {_percent(gain)} of the step's time (a different recipe: different "
            "results)."
        )
    else:
        what += f"{setting.microbatches} workers would be as fast."
    yield Advice(
        text=f"{len(loads)} workers share {setting.microbatches} micro-batches{what}",
        loss_seconds=max(load.seconds.waiting for load in loads),
        gain=max(0.0, gain) if gain >= LEAST else 0.0,
        change=f"microbatches={number}" if gain >= LEAST else f"workers={setting.microbatches}",
    )


def _slow_workers(loads: Sequence[Load], setting: AdviceSetting) -> Iterable[Advice]:
    """A worker takes longer for a micro-batch than others of its kind. Gain: as if it were as fast as these."""
    step, now = step_seconds(loads), computing_seconds(loads, setting, setting.microbatches)
    for load in loads:
        others = [one.pace for one in loads if one is not load and one.kind == load.kind and one.pace > 0.0]
        if not others or load.pace < SLOW * statistics.median(others):
            continue
        usual = statistics.median(others)
        then = _computing_with([usual if one is load else max(1e-9, one.pace) for one in loads], loads, setting)
        gain = max(0.0, now - then) / step
        waits = max(one.seconds.waiting for one in loads if one is not load)
        yield Advice(
            text=(
                f"{_named(load)} takes {load.pace / usual:.1f}x as long for a micro-batch as the others "
                f"({short_duration(load.pace)}, the others {short_duration(usual)}): check what else runs there, "
                "its power limit and temperature, and whether threads share cores. As fast as the others, it "
                f"would save {_percent(gain)} of the step's time."
            ),
            loss_seconds=max(waits, now - then),
            gain=gain,
        )


def _computing_with(paces: Sequence[float], loads: Sequence[Load], setting: AdviceSetting) -> float:
    """Return how long the slowest worker computes at these paces."""
    shares = plan(len(paces), setting.microbatches)
    if setting.balance:
        rounded, _ = in_units(paces)
        shares = balanced(rounded, setting.microbatches, hosts=_hosts(loads))
    return length_of(shares, paces)


def _loading(loads: Sequence[Load], setting: AdviceSetting) -> Iterable[Advice]:
    """Workers wait for data. Loader processes load while the worker computes: then only what does not fit waits."""
    step = step_seconds(loads)
    slowest = max(loads, key=lambda load: load.seconds.data)
    data, rest = slowest.seconds.data, step - slowest.seconds.data
    if data < LEAST * step:
        return
    # With loaders, what they have done in the rest of the step is not seen, and all of them were busy all the time.
    work = data if not setting.loader_workers else setting.loader_workers * step
    needed = max(setting.loader_workers + 1, math.ceil(work / max(rest, 1e-9) * 1.1))
    can = int(min(needed, setting.loader_workers + max(0.0, setting.spare_cores / len(loads))))
    says = f"Loading data takes {_percent(data / step)} of each step of {slowest.worker_id}"
    if can <= setting.loader_workers:
        yield Advice(
            text=f"{says}, and no core is free for loader processes: make a sample cheaper to load (decode once, "
            "smaller files, fewer augmentations), or use machines with more cores.",
            loss_seconds=data,
        )
        return
    gain = max(0.0, step - max(rest, work / can)) / step
    yield Advice(
        text=(
            f"{says}: loader_workers={can} (now {setting.loader_workers}) would load while it computes, and save "
            f"{_percent(gain)} of the step's time."
        ),
        loss_seconds=data,
        gain=gain,
        change=f"loader_workers={can}",
    )


def _network(loads: Sequence[Load], setting: AdviceSetting) -> Iterable[Advice]:
    """Bytes are on their way: a larger batch needs no more of them, and hosts x 2^k micro-batches need fewest."""
    step = step_seconds(loads)
    slowest = max(loads, key=lambda load: load.seconds.network)
    network = slowest.seconds.network
    if network < LEAST * step:
        return
    says = f"Transfers take {_percent(network / step)} of each step."
    hosts, nodes = len(_hosts(loads)), _num_nodes(loads, _measured(loads, setting))
    fewest = [number for number in _candidates(loads, setting) if _is_ring(number, hosts) and number >= len(loads)]
    gain = _saved(loads, setting, number := fewest[0]) / step if nodes > 1 and fewest else 0.0
    if gain >= LEAST:
        yield Advice(
            text=(
                f"{says} microbatches={number} (hosts x 2^k) makes each host send the least, and would save "
                f"{_percent(gain)} of the step's time."
            ),
            loss_seconds=network,
            gain=gain,
            change=f"microbatches={number}",
        )
        return
    # Twice the samples: what computes and loads takes twice as long, all else as long as before.
    work = computing_seconds(loads, setting, setting.microbatches)
    gain = 1 - (step + work) / (2 * step)
    batch = f"batch_size={2 * setting.batch_size}" if setting.batch_size else "a batch twice as large"
    yield Advice(
        text=f"{says} A larger batch sends no more: {batch} would save {_percent(gain)} of the time per sample.",
        loss_seconds=network,
        gain=gain,
        change=f"batch_size={2 * setting.batch_size}" if setting.batch_size else "",
    )


def _wire(loads: Sequence[Load], setting: AdviceSetting) -> Iterable[Advice]:
    """Bytes are on their way, and could be half as many: by the model, for half of the time."""
    network, step = max(load.seconds.network for load in loads), step_seconds(loads)
    if setting.wire == "bf16":
        return
    yield Advice(
        text=f'wire="bf16" sends gradients in half the bytes, which now take {_percent(network / step)} of each step, '
        f"and would save {_percent(network / 2 / step)}. It rounds sums: check the effect on the loss.",
        loss_seconds=network,
        gain=network / 2 / step,
        change='wire="bf16"',
    )


def _is_ring(microbatches: int, hosts: int) -> bool:
    each, rest = divmod(microbatches, hosts)
    return rest == 0 and each & (each - 1) == 0


def _update(loads: Sequence[Load]) -> Iterable[Advice]:
    """What the script does between two steps is done by all workers, and gains nothing from more of them."""
    step = step_seconds(loads)
    update = max(load.seconds.update for load in loads)
    if update >= 0.1 * step:
        yield Advice(
            text=(
                "What the script does with the gradient (optimizer, logging, printing) takes "
                f"{_percent(update / step)} of each step, on every worker: try the fused or foreach form of the "
                "optimizer, and log less often."
            ),
            loss_seconds=update,
        )


def _memory(loads: Sequence[Load]) -> Iterable[Advice]:
    """Pages are read from a disk again: memory is short, or files are mapped."""
    step = step_seconds(loads)
    worst = max(loads, key=lambda load: load.page_faults)
    if worst.page_faults >= FAULTS:
        yield Advice(
            text=(
                f"{_named(worst)} reads memory from a disk {worst.page_faults:.0f} times a step (page faults): its "
                "machine is short of memory, or data lies in mapped files that do not fit. Fewer workers there, "
                "or more memory, would avoid that."
            ),
            loss_seconds=LEAST * step,
        )


# -- words -------------------------------------------------------------------------------------------


def _waits(load: Load, step_s: float) -> str:
    share = _percent(load.seconds.waiting / step_s)
    if not load.waits:
        return f"{load.worker_id} waits {share} of each step"
    return f"{load.worker_id} waits {share} of each step for {max(load.waits, key=load.waits.__getitem__)}"


def _few(loads: Sequence[Load], setting: AdviceSetting) -> str:
    if setting.microbatches % len(loads) and setting.microbatches < 4 * len(loads):
        return f"{setting.microbatches} micro-batches cannot be divided equally among {len(loads)} workers"
    if not setting.balance:
        return "all get equal shares (balance=False), but are not equally fast"
    return f"{setting.microbatches} micro-batches are too few for shares that match the workers' speeds"


def _named(load: Load) -> str:
    return f"{load.worker_id} on {load.host}" if load.host else load.worker_id


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"
