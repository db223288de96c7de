"""Events as numbers by name: the same names in every tool."""

from __future__ import annotations

from typing import Any

import msgspec

from unisono.core.events import EvaluationFinished, StepFinished

__all__ = ["scalars"]


def scalars(event: StepFinished | EvaluationFinished) -> dict[str, float]:
    """Return the numbers of an event by their names.

    ``loss``, ``samples_per_s``, ``step_s``, ``epoch``, ``workers``, ``seconds/PART``, ``log/NAME``, ``total/NAME``, and
    ``evaluation/NAME``. Totals that are lists are left out.
    """
    if isinstance(event, EvaluationFinished):
        return _numbers("evaluation", event.values)
    whole = event.seconds.total()
    found = {
        "loss": event.loss,
        "samples_per_s": event.samples / whole if whole > 0 else 0.0,
        "step_s": whole,
        "epoch": float(event.epoch),
        **_numbers("seconds", msgspec.structs.asdict(event.seconds)),
        **_numbers("log", event.logs),
        **_numbers("total", event.totals),
    }
    if event.workers:  # a line of the journal has them no more
        found["workers"] = float(len(event.workers))
    return found


def _numbers(group: str, values: dict[str, Any]) -> dict[str, float]:
    return {f"{group}/{name}": value for name, each in values.items() if (value := _number(each)) is not None}


def _number(value: Any) -> float | None:
    """Return a number, also one that JSON has as a string; None for anything else."""
    if isinstance(value, str) and value.lower() in ("nan", "inf", "-inf"):
        return float(value)
    return float(value) if isinstance(value, int | float) else None
