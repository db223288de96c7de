"""One pattern as a script: ``unisono run runner.py -- NAME FOLDER [LEG]``. Each process writes into FOLDER how it
ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import unisono
from tests.patterns.corpus import load
from tests.waiting import wait_until
from tests.workers.models import bits_of
from unisono.core.errors import UnisonoError

SEED = 5
MIDDLE = 4
"""A run that is stopped has done so many steps: of six, in two epochs."""


class Watched(unisono.Run):
    """A run that knows what was tracked, and that goes on a leg (`tests.patterns.measure.LEGS`)."""

    def __init__(self, directory: str | os.PathLike[str], leg: str) -> None:
        checkpoint = unisono.Checkpoints() if leg == "stopped" else None
        # Without balance each worker computes the same micro-batches every time, whoever else is on the machine.
        super().__init__(directory, seed=SEED, device="cpu", balance=False, checkpoint=checkpoint)
        self.tracked: dict[str, Any] = {}
        self._leg = leg

    def steps(self, *arguments: Any, **options: Any) -> Any:
        steps = super().steps(*arguments, **options)
        evaluators = Path(self.directory, "evaluations", "evaluators")
        return Led(steps, self._leg, evaluators) if self._leg in {"stopped", "evaluator"} else steps

    def track(self, **objects: Any) -> None:
        self.tracked.update(objects)
        super().track(**objects)


class Led:
    """Steps that wait for an evaluator, or are ended in the middle as a batch system ends them."""

    def __init__(self, steps: Any, leg: str, evaluators: Path) -> None:
        self._steps, self._leg, self._evaluators = steps, leg, evaluators

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[unisono.Step]:
        for step in self._steps:
            if self._leg == "evaluator":
                wait_until(self._evaluators.exists, "an evaluator is there")
            yield step
            if self._leg == "stopped" and step.number + 1 == MIDDLE:
                signal.raise_signal(signal.SIGTERM)


def run_pattern(
    name: str,
    directory: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    leg: str = "",
) -> None:
    """Train, and write an *ending*: the bits of all that was tracked and of what the pattern returned, or the error.

    Raises:
        Exception: what the training raised.
    """
    ending: dict[str, Any] = {"error": None, "is_library": False, "message": "", "bits": {}, "numbers": []}
    ending["warnings"] = seen = []
    show = warnings.showwarning

    def note(message: Warning | str, category: type[Warning], filename: str, *place: Any) -> None:
        if f"{os.sep}torch{os.sep}" not in filename:  # of the library, or of the pattern
            seen.append(f"{category.__name__}: {message}")
        show(message, category, filename, *place)

    warnings.showwarning = note
    is_evaluator = False
    try:
        with Watched(directory, leg) as run:
            is_evaluator = run.rank < 0
            returned = load()[name].train(run)
        ending["bits"] = _bits(run.tracked) | {"returned": bits_of(returned)}
        ending["numbers"] = list(numbers_of(returned))
    except SystemExit:  # the script's own
        ending["bits"] = _bits(run.tracked)
        raise
    except Exception as error:
        ending |= {"error": type(error).__name__, "is_library": isinstance(error, UnisonoError), "message": str(error)}
        raise
    finally:
        warnings.showwarning = show
        if not is_evaluator:
            Path(folder, f"{os.getpid()}.json").write_text(json.dumps(ending))


def _bits(tracked: dict[str, Any]) -> dict[str, str]:
    states = {name: one if isinstance(one, dict) else one.state_dict() for name, one in tracked.items()}
    return {name: bits_of(state) for name, state in states.items()}


def numbers_of(value: Any) -> Iterator[float]:
    """All numbers in what a pattern returned, one after the other."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers_of(item)
    elif isinstance(value, (int, float, torch.Tensor)):
        yield from torch.as_tensor(value, dtype=torch.float64).flatten().tolist()


if __name__ == "__main__":
    run_pattern(sys.argv[1], "unused", *sys.argv[2:])
