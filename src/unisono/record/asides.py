"""Asides of steps: what a step tells besides its result, as events of their own. Steps themselves are no story."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from unisono.core.events import CheckpointWritten, Event, Note, Problem, StepFinished

__all__ = ["BALANCE_S", "Asides", "written"]

BALANCE_S: Final = 60.0
"""Least time between two sentences about the balance: a run may find a better one again and again."""


class Asides:
    """Finds them. A sentence about the balance is told at most every `BALANCE_S`."""

    def __init__(self) -> None:
        self._balance_at = -math.inf

    def of(self, step: StepFinished) -> list[Event]:
        """Return the asides of a step."""
        told: list[Event] = []
        if step.checkpoint:
            told.append(written(step.time, step.checkpoint))
        if step.balance and step.time - self._balance_at > BALANCE_S:
            self._balance_at = step.time
            told.append(Note(time=step.time, about="balance", step=step.step, text=step.balance))
        told += [Note(time=step.time, about="warning", step=step.step, text=text) for text in step.warnings]
        return told


def written(time: float, news: Mapping[str, Any]) -> CheckpointWritten | Problem:
    """Return the event of a checkpoint from the news about it: it is on the disk, or could not be written."""
    if isinstance(lost := news.get("lost"), str):
        return Problem(time=time, problem="checkpoint", step=int(news.get("step", -1)), text=lost)
    numbers = {name: news[name] for name in ("bytes", "seconds") if isinstance(news.get(name), int | float)}
    return CheckpointWritten(time=time, step=int(news.get("step", -1)), **numbers)
