"""One pattern as a script: ``unisono run runner.py -- NAME FOLDER``. Each process writes into FOLDER how it ended."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import unisono
from tests.patterns.corpus import load
from tests.workers.models import bits_of
from unisono.core.errors import UnisonoError

SEED = 5


class Watched(unisono.Run):
    """A run that knows what was tracked."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        # Without balance each worker computes the same micro-batches every time, whoever else is on the machine.
        super().__init__(directory, seed=SEED, device="cpu", balance=False)
        self.tracked: dict[str, Any] = {}

    def track(self, **objects: Any) -> None:
        self.tracked.update(objects)
        super().track(**objects)


def run_pattern(name: str, directory: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Train, and write an *ending*: the bits of all that was tracked and of what the pattern returned, or the error.

    Raises:
        Exception: what the training raised.
    """
    ending: dict[str, Any] = {"error": None, "is_library": False, "message": "", "bits": {}}
    try:
        with Watched(directory) as run:
            returned = load()[name](run)
        ending["bits"] = {key: bits_of(value.state_dict()) for key, value in run.tracked.items()}
        ending["bits"]["returned"] = bits_of(returned)
    except Exception as error:
        ending |= {"error": type(error).__name__, "is_library": isinstance(error, UnisonoError), "message": str(error)}
        raise
    finally:
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(ending))


if __name__ == "__main__":
    run_pattern(sys.argv[1], "unused", sys.argv[2])
