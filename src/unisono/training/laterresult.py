"""What iterations have in common that end with the result of an earlier one: delayed steps, rounds with a delay."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TypeVar

from unisono.rounds.arrived import Arrived
from unisono.telemetry import StepTelemetry
from unisono.training.step import CommonRound, Played

__all__ = ["LaterResult"]

R = TypeVar("R", bound=CommonRound)


class LaterResult(Played[R]):
    """Several rounds are under way at the same time, so what an iteration says of itself it notes by itself."""

    _begun = False
    _news = ""
    _num_computed = 0

    @property
    @abstractmethod
    def _came(self) -> Arrived | None:
        """The sum whose result this iteration has; None: there is none, or it was loaded."""

    @property
    def has_begun(self) -> bool:
        return self._begun

    @property
    def has_no_microbatch(self) -> bool:
        return self.is_complete and self._num_computed == 0

    @property
    def telemetry(self) -> Mapping[str, StepTelemetry]:
        return self._came.telemetry if self._came is not None else {}

    @property
    def news(self) -> str:
        return self._news

    @property
    def sent_bytes(self) -> int:
        return self._came.sent_bytes if self._came is not None else 0
