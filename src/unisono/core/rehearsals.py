"""Checks that find a training whose bits depend on the worker: at which steps, and on which members. Without I/O.

There are two checks, at steps that all members choose alike:

* **comparison**: every member sends a digest of everything that is tracked. The digests must be equal.
* **rehearsal**: members compute, after their own micro-batches, the first micro-batch of the next rank as well.
  The digests of the two gradients must be equal. The second gradient is not summed. A worker that is alone and trains a
  recurrent model computes its own first micro-batch again, in the first steps only: a hidden state that the script
  carries over by itself is wrong even there.

A script that counts, remembers earlier micro-batches, draws from a generator of its own or reads the clock gives other
gradients to the second worker, which has computed other micro-batches before. Most such scripts do so from the first
step on; some begin later. So the checks are dense at the beginning of a run and rare afterwards.

A **newcomer** is on trial in its first steps: nothing that it computes is summed. In each of these steps it rehearses a
micro-batch of a member, and its state is compared, in the second one after an update that it has made itself. If it
differs it is sent away, and the sums are those of the others. At the beginning of a run, members of another arithmetic
than rank 0 are newcomers: they have passed the probe, which is no proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.core.cursor import seed_of
from unisono.core.plan import Plan
from unisono.core.plan import plan as even_plan
from unisono.core.telemetry import Compared

__all__ = [
    "Odd",
    "Twice",
    "balance_of_copies",
    "digest_of",
    "is_compared",
    "is_last_checked",
    "is_rehearsed",
    "key_of",
    "leaf_that_differs",
    "minority",
    "most",
    "odd_newcomers",
    "odd_ones",
    "on_trial",
    "rehearsal",
    "without",
]

_WORD = 1 << 64
_SEVERAL = 1 << 62

FIRST_STEPS = 8
"""The first steps of a run are all checked, and afterwards those whose number is a power of two."""
FIRST_STEPS_ALONE = 2
"""A run with one worker that trains a recurrent model is rehearsed in so many steps."""
TRIAL_STEPS = 2
"""In so many steps nothing that a newcomer computes is summed."""
COMPARE_EVERY = 100
REHEARSE_EVERY = 1000


def balance_of_copies(digests: Mapping[int, int], holders: Sequence[Sequence[str]], worker_id: str) -> int:
    """Return one worker's part of a sum that is 0 modulo 2**64, over all workers, where all copies are equal.

    The first holder of a state counts its digest once for each other holder, and each of these takes its own away. So
    one number is compared, whatever states a worker holds.

    Args:
        digests: of the states that the worker holds, by number; 64 bits, well mixed.
        holders: by number, the workers that hold the state.
    """
    total = 0
    for number, digest in digests.items():
        ids = holders[number]
        if worker_id in ids:
            total += digest * (len(ids) - 1 if ids[0] == worker_id else -1)
    return total % _WORD


def is_compared(step: int, *, is_last: bool = False) -> bool:
    """Return whether the members compare their states at this step.

    Args:
        step: steps of the run that are done.
        is_last: the step is the last one of its ``run.steps``.
    """
    return is_last or step < FIRST_STEPS or step % COMPARE_EVERY == 0 or _is_power_of_two(step)


def is_rehearsed(
    step: int, *, alone: bool = False, is_first_of_generation: bool = False, is_last: bool = False
) -> bool:
    """Return whether each member computes a micro-batch of another one as well at this step.

    Args:
        step: steps of the run that are done.
        alone: there is one member.
        is_first_of_generation: the members have changed since the step before.
        is_last: the step is the last one of its ``run.steps``.
    """
    if alone:
        return step < FIRST_STEPS_ALONE
    often = is_last or is_first_of_generation or step < FIRST_STEPS
    return often or step % REHEARSE_EVERY == 0 or _is_power_of_two(step)


def on_trial(joined: Sequence[int], step: int, *, lag: int = 0) -> frozenset[int]:
    """Return the ranks of the newcomers of which nothing is summed at a step; none where all members are newcomers.

    Args:
        joined: by rank, the steps that were done when the member joined; -1: it was there from the beginning.
        lag: by so many steps the update of a gradient, and its comparison, comes later than the gradient.
    """
    found = frozenset(rank for rank, at in enumerate(joined) if at >= 0 and step < at + TRIAL_STEPS + 2 * lag)
    return found if len(found) < len(joined) else frozenset()


def without(plan: Plan, ranks: Collection[int]) -> Plan:
    """Return a plan of as many members, of which some get no micro-batch."""
    if not ranks:
        return plan
    staying = [rank for rank in range(len(plan.ranges)) if rank not in ranks]
    shares = even_plan(len(staying), plan.num_leaves).ranges
    ranges: list[Sequence[int]] = [()] * len(plan.ranges)
    for rank, share in zip(staying, shares, strict=True):
        ranges[rank] = share
    return Plan(plan.num_leaves, tuple(ranges))


@dataclass(frozen=True)
class Odd:
    """How a newcomer differs."""

    member: str
    """With which it was compared."""
    leaf: int = -1
    """The micro-batch that both have computed; -1: their states differ."""


def odd_newcomers(
    said: Mapping[str, Compared], joined: Mapping[str, int], step: int, *, lag: int = 0
) -> dict[str, Odd]:
    """Return the newcomers that differ from members that were there before them, by worker.

    A newcomer on trial is compared with the members that are not, of whatever arithmetic. Afterwards it is the newer
    one of two of unequal arithmetic that has to go: that both are right cannot be. Members of equal arithmetic are left
    to `minority`.

    Args:
        said: by worker, in the order of the ranks.
        joined: by worker, as `on_trial` has it.
    """
    at = {worker: joined.get(worker, -1) for worker in said}
    trial = {[*said][rank] for rank in on_trial([*at.values()], step, lag=lag)}
    compared = {worker: one for worker, one in said.items() if one.compared_step == step}
    found: dict[str, Odd] = {}
    for worker, one in compared.items():
        for other, its in compared.items():
            is_unequal = one.arithmetic != its.arithmetic and at[worker] > at[other]
            if other in trial or not (worker in trial or is_unequal):
                continue
            if one.state_digest != its.state_digest:
                found.setdefault(worker, Odd(other))
            elif (leaf := leaf_that_differs(its, one)) >= 0 or (leaf := leaf_that_differs(one, its)) >= 0:
                found.setdefault(worker, Odd(other, leaf))
    return found


def leaf_that_differs(owner: Compared, helper: Compared) -> int:
    """Return the micro-batch of a member for which another one has got other bits; -1: there is none."""
    is_same_leaf = owner.own_leaf >= 0 and owner.own_leaf == helper.other_leaf and owner.part == helper.part
    return owner.own_leaf if is_same_leaf and owner.own_digest != helper.other_digest else -1


def is_last_checked(phase: int) -> bool:
    """Return whether the last step of a ``run.steps`` is checked. A script may call it once for each epoch.

    Args:
        phase: the number of this call in the run.
    """
    return phase < FIRST_STEPS or _is_power_of_two(phase)


@dataclass(frozen=True)
class Twice:
    """One member's part in what two members compute in a step, to compare it."""

    own: tuple[int, ...] = ()
    """Its micro-batches that another member computes as well."""
    other: tuple[int, ...] = ()
    """Micro-batches of another member (alone: of this one) that this one computes as well, after its own."""


def rehearsal(plan: Plan, rank: int, turn: int, trial: Collection[int] = ()) -> Twice:
    """Return what one member computes for a rehearsal.

    The members form a ring: each computes, as its last micro-batch, the first one of the next rank that has any. So
    whatever a script remembers differs most. In the second step of a run (and in one of four that happen to be
    rehearsed later) one member is left out: a script that goes by what it has counted in its inner loop, which is
    equal on members with equal parts, has another number there, and the next comparison finds it.

    Args:
        turn: counts rehearsals, e.g. the number of the step.
        trial: the ranks of newcomers that are on trial, which are never left out.
    """
    size = len(plan.ranges)
    if size == 1:
        return Twice((plan.ranges[0][0],), (plan.ranges[0][0],))
    following = (plan.ranges[(rank + distance) % size] for distance in range(1, size))
    is_left_out = turn % 4 == 1 and rank == turn // 4 % size and rank not in trial
    other = () if is_left_out else next((leaves[:1] for leaves in following if leaves), ())
    return Twice(tuple(plan.ranges[rank][:1]), tuple(other))


def key_of(leaves: Sequence[int]) -> int:
    """Return what stands for these micro-batches in a comparison: of one, its number."""
    return leaves[0] if len(leaves) == 1 else _SEVERAL | seed_of(0, *leaves) % _SEVERAL


def digest_of(digests: Sequence[int]) -> int:
    """Return the digest of several micro-batches together, by their digests; of one, its own."""
    return digests[0] if len(digests) == 1 else seed_of(0, *digests)


def odd_ones(digests: Mapping[str, int], arithmetics: Mapping[str, int]) -> tuple[str, ...]:
    """Return the members, by worker, whose digest is not the one that more than half of their arithmetic have."""
    usual = {
        arithmetic: most(digest for one, digest in digests.items() if arithmetics[one] == arithmetic)
        for arithmetic in {arithmetics[one] for one in digests}
    }
    return tuple(one for one, digest in digests.items() if usual[arithmetics[one]] not in (None, digest))


def most(digests: Iterable[int]) -> int | None:
    """Return the digest that more than half have; None: there is none."""
    counts = Counter(digests)
    for digest, number in counts.items():
        if 2 * number > counts.total():
            return digest
    return None


def minority(values: Sequence[Hashable]) -> list[int]:
    """Return the indices of the values that are not the most frequent one (of equally frequent values: the first)."""
    if not values:
        return []
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], -values.index(value)))
    return [index for index, value in enumerate(values) if value != usual]


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
