"""Runs a script that knows nothing of tests: ``unisono run gated.py -- train.py GATES ARGUMENTS``.

Every worker stops before step N of the run while a test holds gate N (`gates`), and until its checkpoints are written.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import unisono

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.workers.disk import wait_for_disk
from tests.workers.gates import wait_at


def main() -> None:
    _, script, gates, *arguments = sys.argv
    steps = unisono.Run.steps

    def gated(run: unisono.Run, *given: Any, **named: Any) -> Iterator[unisono.Step]:
        for step in steps(run, *given, **named):
            wait_at(Path(gates) / str(step.number))
            wait_for_disk(run)
            yield step

    unisono.Run.steps = gated  # type: ignore[method-assign,assignment]
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
