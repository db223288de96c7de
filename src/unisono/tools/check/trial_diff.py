"""Comparison of two trials: where they differ first, and where in the script to look for the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from unisono.record.explaining import unequal
from unisono.tools.check.records import LeafRecord, Record, Section, StateRecord, Sum, Where

__all__ = ["TrialDifference", "differences", "first_difference", "places_of", "sections_of"]

Rank = tuple[int, ...]


@dataclass(frozen=True)
class TrialDifference:
    """The first difference of two trials.

    Attributes:
        where: the micro-batch, the sum, or the step before which a state differs (stage ``state``).
        worker: of the second trial.
        part: the first parameter or state that differs; "" where only a loss or a sum does.
        more: how many others differ there, too.
        values: of what differs, in both trials.
        aside: the worker has computed the micro-batch only to compare it.
    """

    where: Where
    worker: str
    part: str = ""
    more: int = 0
    values: tuple[str, str] = ("", "")
    aside: bool = False
    rank: Rank = field(default=(), compare=False)

    def said(self) -> str:
        """Return the difference in words."""
        where = self.where
        more = f" (and {self.more} more)" if self.more else ""
        if where.stage == "leaf":
            inner = f" of step {where.inner} of replica {where.replica} of round {where.step}"
            at = f"micro-batch {where.leaf}{inner if where.replica >= 0 else f' of step {where.step}'}"
            losses = _short(*self.values)
            loss = f"its loss is {losses[0]} and {losses[1]}" if self.values[0] != self.values[1] else ""
            part = f"the first gradient that differs is that of {self.part!r}{more}" if self.part else ""
            return f"{at}: {'; '.join(each for each in (loss, part) if each)}"
        if where.stage == "state":
            before = f"the state before step {where.step}" if where.step else "the state before the first step"
            return f"{before}: {self.part} is {self.values[0]} and {self.values[1]}{more}"
        if where.stage == "evaluation":
            after = f"after step {where.step - 1}" if where.step else "before the first step"
            return f"the evaluation {after}: {self.values[0]} and {self.values[1]}"
        what = self.part or "the sum of the gradients"
        return f"step {where.step}: {what} is {self.values[0]} and {self.values[1]}"


def _short(first: str, second: str) -> tuple[str, str]:
    """Return two floats with as few digits as tell them apart, and no fewer than 6; other texts as they are."""
    try:
        numbers = float(first), float(second)
    except ValueError:
        return first, second
    for digits in range(6, 17):
        short = f"{numbers[0]:.{digits}g}", f"{numbers[1]:.{digits}g}"
        if short[0] != short[1]:
            return short
    return first, second


def first_difference(reference: Sequence[Record], workers: Mapping[str, Sequence[Record]]) -> TrialDifference | None:
    """Return the first difference of the workers of a trial from the reference; None: they computed the same.

    Args:
        reference: of the one worker that has computed everything.
        workers: by id.
    """
    states: dict[int, list[dict[str, str]]] = {}
    leaves: dict[Where, LeafRecord] = {}
    sums: dict[Where, Sum] = {}
    for record in reference:
        match record:
            case StateRecord():
                states.setdefault(record.step, []).append(record.parts)
            case LeafRecord() if not record.aside:
                leaves[record.where] = record
            case Sum():
                sums[record.where] = record
    found = []
    for worker, records in workers.items():
        for record in records:
            match record:
                case StateRecord() if record.step in states and record.parts not in states[record.step]:
                    found.append(_states(states[record.step][-1], record, worker))
                case LeafRecord() if record.where in leaves:
                    other = leaves[record.where]
                    if (other.loss, other.parts) != (record.loss, record.parts):
                        found.append(_leaves(other, record, worker))
                case Sum() if record.where in sums and sums[record.where] != record:
                    found.append(_sums(sums[record.where], record, worker))
    return min(found, key=lambda each: each.rank, default=None)


def differences(reference: Sequence[Record], workers: Mapping[str, Sequence[Record]]) -> list[str]:
    """Return the first difference of two trials in words, and the first one of a micro-batch where that is another."""
    leaves = [[each for each in records if isinstance(each, LeafRecord)] for records in (reference, *workers.values())]
    found = (
        first_difference(reference, workers),
        first_difference(leaves[0], dict(zip(workers, leaves[1:], strict=True))),
    )
    return list(dict.fromkeys(each.said() for each in found if each is not None))


def _states(ours: Mapping[str, str], theirs: StateRecord, worker: str) -> TrialDifference:
    paths = unequal(ours, theirs.parts)
    values = ours.get(paths[0], "not there"), theirs.parts.get(paths[0], "not there")
    where = Where(theirs.step, "state")
    return TrialDifference(where, worker, paths[0], len(paths) - 1, values, rank=(theirs.step, 0))


def _leaves(ours: LeafRecord, theirs: LeafRecord, worker: str) -> TrialDifference:
    paths = unequal(ours.parts, theirs.parts)
    at = ours.where
    rank = (at.step, 1, at.turn, at.replica, at.inner, theirs.aside, at.leaf)
    return TrialDifference(
        at, worker, paths[0] if paths else "", max(0, len(paths) - 1), (ours.loss, theirs.loss), theirs.aside, rank
    )


def _sums(ours: Sum, theirs: Sum, worker: str) -> TrialDifference:
    names, at = unequal(ours.totals, theirs.totals), ours.where
    rank = (at.step, 2 if at.replica < 0 else 1, at.turn, at.replica, at.inner, 2)
    if ours.digest != theirs.digest or not names:
        return TrialDifference(at, worker, values=(ours.digest, theirs.digest), rank=rank)
    values = ours.totals.get(names[0], "nothing"), theirs.totals.get(names[0], "nothing")
    return TrialDifference(at, worker, f"the total {names[0]!r}", len(names) - 1, values, rank=rank)


def sections_of(records: Sequence[Record]) -> list[Section]:
    """Return the traced sections among records, in the order of time."""
    return [record for record in records if isinstance(record, Section)]


def places_of(difference: TrialDifference, sections: Sequence[Section]) -> list[Where]:
    """Return where to look for the reason of a difference: what lies nearest before it comes first.

    Args:
        sections: of the worker that has computed the other way.
    """
    where = difference.where
    if where.stage == "evaluation":
        evaluated = [each.where for each in sections if each.where.stage == "evaluation"]
        # One that only one of the two has was decided on between the steps.
        return [*evaluated, *(each.where for each in sections if each.where.leaf < 0)]
    places = [each.where for each in sections if each.aside == difference.aside or each.where.leaf < 0]
    setup = Where(-1, "setup")
    own = [msgspec.structs.replace(where, stage="fetch"), where] if where.stage == "leaf" else []
    if where.stage == "state" and where.step == 0:
        return [setup, Where(0, "head")]
    last = where.step if where.stage != "state" else where.step - 1
    near = [each for each in places if each.step == last and each.leaf < 0]
    before = [each for each in places if each.step == last - 1 and each.leaf < 0]
    inner = [each for each in places if each.step == last and each.leaf >= 0] if where.stage != "leaf" else []
    return list(dict.fromkeys((*own, *near, *inner, *before, setup)))
