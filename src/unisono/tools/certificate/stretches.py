"""Stretches of a run: what is computed again in one go, which are chosen, and what their check is worth. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Stretch", "chance", "chosen", "cut"]


class Stretch(NamedTuple):
    """Steps that are computed again in one go."""

    first: int
    """Steps that are done where it begins: there is a checkpoint, or it is 0."""
    last: int
    """Steps that are done where it ends: a checkpoint, or the end of the run."""

    @property
    def num_steps(self) -> int:
        return self.last - self.first


def cut(begins: Iterable[int], end: int) -> list[Stretch]:
    """Return the stretches into which all steps of a run are cut.

    Args:
        begins: steps of which there is a checkpoint to begin with, whose bits are certified; 0 need not be among them.
        end: steps of the run.
    """
    cuts = sorted({0, *begins, end})
    return [Stretch(first, last) for first, last in pairwise(cuts) if last <= end]


def chosen(
    found: Sequence[Stretch], number: int, sample: Callable[[Sequence[Stretch], int], list[Stretch]]
) -> list[Stretch]:
    """Return so many of the stretches, drawn by ``sample`` (as `random.Random.sample`), in the order of their steps."""
    return sorted(sample(found, min(number, len(found))))


def chance(total: int, checked: int, false: int) -> float:
    """Return the probability with which a check finds an error, where ``false`` of ``total`` stretches are wrong.

    Each set of ``checked`` stretches is drawn with the same probability, and a wrong one is found when it is computed
    again: 1 - C(total - false, checked) / C(total, checked).
    """
    return 1.0 - math.comb(total - false, checked) / math.comb(total, checked)
