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
from unisono.core.words import count

__all__ = ["EVERY_S", "Logging"]

EVERY_S: Final = 60.0
"""How often the progress is a record of level INFO; every step is one of level DEBUG."""


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
        match event:
            case RunStarted():
                where = f" in {event.directory}" if event.directory else ""
                self._log(logging.INFO, event, f"run {event.run_id} begins at step {event.step}{where}")
            case StepFinished():
                self._step(event)
            case EvaluationFinished():
                totals = ", ".join(f"{name} {value}" for name, value in event.values.items())
                self._log(logging.INFO, event, f"evaluation at step {event.step}: {totals}")
            case MembershipChanged():
                why = f": {event.reason}" if event.reason else ""
                who = count(len(event.worker_ids), "worker")
                self._log(logging.INFO, event, f"generation {event.generation} with {who}{why}")
            case WorkerGone():
                level = logging.INFO if event.how in ("left", "finished") else logging.WARNING
                self._log(
                    level, event, f"worker {event.worker_id} on {event.host} is gone ({event.how}): {event.reason}"
                )
            case WorkerLate():
                what = f"worker {event.worker_id} is late by {event.seconds:.1f} s in step {event.step}"
                self._log(logging.WARNING, event, what)
            case LinesLost():
                what = f"lines {event.first} to {event.last} of the journal could not be written"
                self._log(logging.ERROR, event, what)
            case Problem():
                self._log(logging.ERROR, event, event.text)
            case RunEnded(ok=True):
                self._log(logging.INFO, event, "run finished")
            case RunEnded():
                self._log(logging.ERROR, event, f"run failed: {event.reason}")

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
