"""Python's ``logging``: what happens in a run as records of the logger ``unisono``."""

from __future__ import annotations

import logging
import math
import time
from typing import Final

from unisono.core.events import (
    EvaluationFinished,
    Event,
    LinesLost,
    MembershipChanged,
    Problem,
    RunEnded,
    RunStarted,
    StepFinished,
    WorkerGone,
    WorkerLate,
)
from unisono.record.overview import recent_of

__all__ = ["EVERY_S", "Logging"]

EVERY_S: Final = 60.0
"""How often the progress is a record of level INFO; every step is one of level DEBUG."""
_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_LOGGED: Final = (
    RunStarted, EvaluationFinished, MembershipChanged, WorkerGone, WorkerLate, LinesLost, Problem, RunEnded,
)  # fmt: skip


class Logging:
    """A sink that logs events: problems as errors, what slows a run down or changes it as warnings, progress as
    information once a minute, and each step for debugging. Each record has the event as its attribute ``event``.

    A script's own configuration of ``logging`` says where the records go. Where it has none, warnings and errors go to
    standard error, as Python does it.

    Args:
        name: of the logger.
    """

    def __init__(self, name: str = "unisono") -> None:
        self._logger = logging.getLogger(name)
        self._said_at = -math.inf

    def emit(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self._step(event)
        elif isinstance(event, _LOGGED) and (found := recent_of(event)) is not None:
            self._log(_LEVELS[found.level], event, found.text)

    def close(self) -> None:
        pass

    def _step(self, step: StepFinished) -> None:
        for text in step.warnings:
            self._log(logging.WARNING, step, text)
        level, now = logging.DEBUG, time.monotonic()
        if now - self._said_at >= EVERY_S:
            self._said_at, level = now, logging.INFO
        if self._logger.isEnabledFor(level):
            done = f"step {step.step + 1} of {step.num_steps}" if step.num_steps else f"step {step.step + 1}"
            self._log(level, step, f"{done}: loss {step.loss:.6g}, {step.seconds.total():.3f} s")

    def _log(self, level: int, event: Event, text: str) -> None:
        self._logger.log(level, "%s", text, extra={"event": event})
