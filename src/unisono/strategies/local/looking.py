"""The taps of a run, as the steps of a replica have them."""

from __future__ import annotations

from typing import Any

import msgspec

from unisono.core.events import StepResult
from unisono.engine.rounds.taps import Computed, Place, Tap

__all__ = ["InReplica"]


class InReplica(Tap):
    """Tells a tap about the steps of a replica.

    Args:
        step: the round, by its number in the run.
        first: the first global batch of the round, within the loop.
        aside: the replica is another member's, and is only compared.
    """

    def __init__(self, tap: Tap, *, step: int, first: int, replica: int, aside: bool) -> None:
        self._tap = tap
        self._step = step
        self._first = first
        self._replica = replica
        self._aside = aside

    def looks_at(self, place: Place) -> bool:
        return self._tap.looks_at(self._at(place))

    def before_microbatch(self, place: Place, batch: Any) -> None:
        self._tap.before_microbatch(self._at(place), batch)

    def after_microbatch(self, place: Place, computed: Computed) -> None:
        self._tap.after_microbatch(self._at(place), computed)

    def after_sum(self, place: Place, result: StepResult) -> None:
        self._tap.after_sum(self._at(place), result)

    def _at(self, place: Place) -> Place:
        return msgspec.structs.replace(
            place,
            step=self._step,
            replica=self._replica,
            inner=place.step - self._first,
            aside=place.aside or self._aside,
        )
