"""Audits: micro-batches that a second member computes as well, to find one that computes wrong values. Without I/O.

All functions give the same on all members, from what all of them know.

* **Who computes what again** (`parts`). The share of the work that is audited is spread over the steps: in an audited
  step each member has the same number of its micro-batches audited, so that nobody waits for one member's more work;
  where one has too few that can be audited, others have more. The helper of a member is the one at a fixed distance in
  the order of the ranks, which is drawn for each step; of all distances those count that give most members a helper on
  another machine. Of two micro-batches that are a pair of the tree and that one member computes, only the first can be
  audited, because the gradient of the other one is added to its sum while it is computed. A share of more than
  `MOST_AUDITED` cannot be reached in general.
* **Who is wrong** (`judge`). Where the two results of a micro-batch differ, all members compute it once more, and the
  result of most of them is the right one. Two members cannot tell who of them is wrong, and where several results
  differ, the micro-batch is not deterministic, and nobody is wrong.
* **What is to be doubted** (`Record`). An audit that a member has passed shows that this one micro-batch was right, and
  that the parameters were when its step began. It says nothing of the member's other micro-batches, of that step or
  before it: a fault that spoils a part q of them passes n audits with a probability of (1 - q) ** n. So all compute
  more micro-batches of the step (`tried`), which tells a fault that is always there (q = 1) from one that comes and
  goes. Of the first kind the last `IN_DOUBT_OF_LASTING` audits that the member has passed are in doubt: whatever q is,
  a fault that looks like that was there before them with a probability of at most 0.16%, the largest value of
  q ** 8 * (1 - q) ** 3. Of the second kind the last `IN_DOUBT` are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from unisono.core.cursor import seed_of
from unisono.core.groups import Groups, plan_of_groups
from unisono.core.plan import Plan
from unisono.core.rehearsals import Twice, most

__all__ = [
    "AuditVerdict",
    "Record",
    "advice",
    "judge",
    "parts",
    "too_few",
    "tried",
]

IN_DOUBT: Final = 100
"""A fault that comes and goes puts so many passed audits in doubt. One that spoils each 20th micro-batch passes them
with a probability of 0.6%."""
IN_DOUBT_OF_LASTING: Final = 3
"""A fault that was there each time puts so many in doubt."""
TRIED: Final = 8
"""So many micro-batches of a step all members compute again to find out who is wrong."""

_WORD: Final = 1 << 64


def parts(
    plan: Plan,
    hosts: Sequence[str],
    arithmetics: Sequence[int],
    *,
    groups: Groups = (),
    share: float,
    seed: int,
    step: int,
    turn: int = 0,
) -> tuple[Twice, ...]:
    """Return the part of each member in the audit of a step, by rank.

    Args:
        plan: of the step, in which nothing is computed yet.
        hosts: by rank, the member's machine.
        arithmetics: by rank; only members with equal ones compute the same bits.
        groups: of members that compute micro-batches together; what is said here of members is true of these. (): each
            member by itself.
        share: of the work that is audited, from 0 to `MOST_AUDITED`.
        step: of the run.
        turn: pass over the step's global batch.
    """
    if any(len(group) > 1 for group in groups):
        return _parts_of_groups(plan, hosts, arithmetics, groups, share=share, seed=seed, step=step, turn=turn)
    size = len(plan.ranges)
    busy = [rank for rank in range(size) if plan.ranges[rank]]
    wanted = share * plan.num_leaves / len(busy) if busy else 0.0  # of each member
    number = int(wanted) + (seed_of(seed, "audit", step, turn) / _WORD < wanted % 1.0)
    if number == 0 or size < 2:
        return (Twice(),) * size
    helper = helpers(tuple(hosts), tuple(arithmetics), seed_of(seed, "helper", step, turn))
    candidates = [_candidates(plan.ranges[rank]) if helper[rank] is not None else [] for rank in range(size)]
    numbers = _numbers([len(each) for each in candidates], number * len(busy))
    own = [_some(candidates[rank], numbers[rank], seed_of(seed, "leaves", step, turn, rank)) for rank in range(size)]
    other: list[tuple[int, ...]] = [()] * size
    for owner, one in enumerate(helper):
        if one is not None:
            other[one] = own[owner]
    return tuple(map(Twice, own, other))


def _parts_of_groups(
    plan: Plan, hosts: Sequence[str], arithmetics: Sequence[int], groups: Groups, **draws: Any
) -> tuple[Twice, ...]:
    """Return the part of each member, by rank; members that are in no group have none."""
    places = [" ".join(dict.fromkeys(hosts[rank] for rank in group)) for group in groups]
    alike = [seed_of(0, *(arithmetics[rank] for rank in group)) for group in groups]
    found = [Twice()] * len(plan.ranges)
    for group, twice in zip(groups, parts(plan_of_groups(plan, groups), places, alike, **draws), strict=True):
        for rank in group:
            found[rank] = twice
    return tuple(found)


def helpers(hosts: tuple[str, ...], arithmetics: tuple[int, ...], draw: int) -> tuple[int | None, ...]:
    """Return who computes a member's micro-batches again, by rank; nobody helps two. None: no other member can.

    Args:
        draw: chooses among what is equally good.
    """
    found: list[int | None] = [None] * len(hosts)
    for arithmetic in dict.fromkeys(arithmetics):
        ranks = [rank for rank, one in enumerate(arithmetics) if one == arithmetic]
        good = _distances(tuple(hosts[rank] for rank in ranks))
        if good:
            distance = good[draw % len(good)]
            for position, rank in enumerate(ranks):
                found[rank] = ranks[(position + distance) % len(ranks)]
    return tuple(found)


@functools.lru_cache(maxsize=64)
def _distances(hosts: tuple[str, ...]) -> tuple[int, ...]:
    """Return the distances at which most members are on another host; () for one member."""
    size = len(hosts)
    away = {d: sum(hosts[i] != hosts[(i + d) % size] for i in range(size)) for d in range(1, size)}
    best = max(away.values(), default=0)
    return tuple(distance for distance, number in away.items() if number == best)


def _numbers(most: Sequence[int], total: int) -> list[int]:
    """Share out a number as evenly as can be, where each has a limit; the first ones get what is left over."""
    found = [0] * len(most)
    while (left := total - sum(found)) > 0 and (able := [i for i, one in enumerate(most) if found[i] < one]):
        each = max(min(left // len(able), min(most[i] - found[i] for i in able)), 1)
        for i in able[:left]:
            found[i] += each
    return found


def _candidates(leaves: Sequence[int]) -> list[int]:
    """Return the micro-batches of a member that begin a pair: their sibling is computed after them, or elsewhere."""
    own = frozenset(leaves)
    return [leaf for leaf in leaves if leaf % 2 == 0 or leaf - 1 not in own]


def _some(leaves: Sequence[int], number: int, draw: int) -> tuple[int, ...]:
    chosen = sorted(leaves, key=lambda leaf: seed_of(draw, leaf))[:number]
    return tuple(sorted(chosen))


def too_few(size: int, noun: str = "worker") -> str:
    """Return what so few members cannot find out, in words; "" where there are enough.

    Args:
        noun: of what computes a micro-batch: "worker" or "group".
    """
    match size:
        case 1:
            return f"one {noun} cannot audit: there is no second one to compute the same (two can find a difference)"
        case 2:
            return (
                f"two {noun}s can find that one of them is wrong, but not which one, and the run then ends; use three"
            )
    return ""


# -- who is wrong ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditVerdict:
    """What follows from results that differ."""

    kind: Literal["convicted", "two", "many"]
    """The members named are wrong; two members differ, and no third can say who is wrong (one of them may be lost
    meanwhile); or so many results differ that it is not one member that is wrong."""
    wrong: tuple[str, ...] = ()
    """The members that are wrong, also those that are lost meanwhile. Of two: the one that has computed two results."""
    is_lasting: bool = False
    """They were wrong in everything that all have computed again. Of two: these differ in all of it."""
    is_of_state: bool = False
    """Their state is wrong, and not a micro-batch."""


def tried(disputed: int, num_leaves: int) -> list[int]:
    """Return the micro-batches that all compute again: the disputed one, then others of the step; in a small step some
    of them several times.
    """
    others = (leaf for leaf in range(num_leaves) if leaf != disputed)
    once = [disputed, *itertools.islice(others, TRIED - 1)]
    return list(itertools.islice(itertools.cycle(once), TRIED))


def judge(first: Mapping[str, int], again: Mapping[str, int], others: Sequence[Mapping[str, int]] = ()) -> AuditVerdict:
    """Judge the results of one micro-batch that differ.

    Args:
        first: digests by worker, of the two members that computed it in the step, as far as they are known.
        again: digests by worker, of all members of the same arithmetic, which have computed it again.
        others: the same of each other micro-batch that these have computed meanwhile.
    """
    usual = most(again.values())
    if len(again) == 1 and len(set(first.values())) > 1:
        return AuditVerdict("two")
    wrong = [worker for worker in again if first.get(worker, usual) != usual or again[worker] != usual]
    num_right = len(again) - len(wrong)
    if len(again) <= 2 and wrong:
        always_differ = all(len(set(each.values())) > 1 for each in (again, *others))
        return AuditVerdict("two", tuple(worker for worker in wrong if usual is not None), always_differ)
    both_differ = len(first) > 1 and usual not in first.values()
    if usual is None or both_differ or 2 * num_right <= len(again):
        return AuditVerdict("many")
    wrong += [worker for worker in first if worker not in again and len(again) > 1 and first[worker] != usual]
    is_lasting = all(
        worker in each and each[worker] != most(each.values()) for worker in wrong for each in (again, *others)
    )
    return AuditVerdict("convicted", tuple(wrong), is_lasting)


# -- what is to be doubted ---------------------------------------------------------------------------


@dataclass
class Record:
    """When the members of a run were seen to be right, and what is to be doubted where one of them is wrong."""

    lag: int = 0
    """By so many steps the update of a gradient comes later than the gradient (``delay=``)."""
    passed: dict[str, list[int]] = field(default_factory=dict)
    """By worker, the step of the run of each micro-batch of it that was audited and was right: the last `IN_DOUBT`,
    oldest first."""
    begins: int = 0
    """The step at which the run has begun, or has gone on from a checkpoint; 0 where that is not known."""
    compared: int = 0
    """The updates that were done when all members were last seen to have the same state; 0 where that is not known."""
    _hosts: dict[str, str] = field(default_factory=dict)

    def right(self, step: int, workers: Iterable[str], number: int = 1) -> None:
        """Note that these workers were audited at a step, with so many micro-batches, and were right."""
        for worker in workers:
            self.passed[worker] = sorted([*self.passed.get(worker, ()), *[step] * number])[-IN_DOUBT:]

    def same(self, step: int) -> None:
        """Note that all members had the same state when they began a step."""
        self.compared = max(0, step - self.lag)

    def seen(self, step: int, hosts: Mapping[str, str]) -> None:
        """Note the workers that take part in a step, and their hosts.

        A new worker has done nothing before, which is as good as having passed all audits; but where a worker of its
        host is gone, it may be the same machine that has computed before, so it has passed what that worker has.
        """
        for worker in hosts.keys() - self._hosts.keys() if self._hosts else ():
            gone = [one for one, host in self._hosts.items() if host == hosts[worker] and one not in hosts]
            known = [self.passed.get(one, []) for one in gone]
            self.passed[worker] = min(known, key=_knowledge, default=[step] * IN_DOUBT)
        self._hosts.update(hosts)

    def learn(self, passed: Mapping[str, list[int]], begins: int, compared: int) -> None:
        """Note what another member knows."""
        self.begins = max(self.begins, begins)
        self.compared = max(self.compared, compared)
        for worker, steps in passed.items():
            self.passed[worker] = max(self.passed.get(worker, []), steps, key=_knowledge)

    def doubtful_from(self, workers: Iterable[str], *, is_lasting: bool = False) -> int:
        """Return the first step of the run that is to be doubted, because one of these workers has taken part.

        It is a step in which that worker has passed an audit: its other micro-batches there are not known.
        """
        number = IN_DOUBT_OF_LASTING if is_lasting else IN_DOUBT
        known = (self.passed.get(worker, []) for worker in workers)
        return max(min((each[-number] if len(each) >= number else 0 for each in known), default=0), self.begins)

    def sound(self, workers: Iterable[str], *, is_lasting: bool = False) -> int:
        """Return how many steps a checkpoint may have at most, of which nothing is to be doubted though these workers
        have written parts of it.

        Right gradients in a step show that the parameters were right when it began, and the states of the optimizers
        when the step before it began: a wrong state shows one update later. With a delay, so many updates are done at
        the beginning of a step as there are steps before it, less the delay. A fault that comes and goes may have
        spoilt what few gradients depend on (a row of an embedding): only a comparison of the states shows that.
        """
        most = self.doubtful_from(workers, is_lasting=is_lasting) - 1 - self.lag
        return max(most if is_lasting else min(most, self.compared), self.begins)

    @property
    def alike(self) -> int:
        """The updates up to which nothing is to be doubted because of a state that differs."""
        return max(self.compared, self.begins)


def _knowledge(passed: list[int]) -> tuple[int, list[int]]:
    return len(passed), passed


def advice(steps: Iterable[int], sound: int) -> tuple[int, bool]:
    """Return the steps of the checkpoint that a run should go on from, and whether nothing of it is to be doubted.

    Args:
        steps: of the checkpoints that there are, of which there is at least one.
        sound: a checkpoint of more steps may hold wrong values.

    Returns:
        The newest one that is not to be doubted; if all are, the oldest one.
    """
    known = sorted(steps)
    good = [step for step in known if step <= sound]
    return (good[-1], True) if good else (known[0], False)
