"""Runs of this folder's training scripts, with a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.waiting import PATIENT, WAIT_S
from unisono.testing import Faults, Outcome, run_workers

__all__ = ["Training"]


class Training:
    """A script, with the arguments that all runs of a test file give it."""

    def __init__(self, script: str, *arguments: object) -> None:
        self.path = Path(__file__).with_name(script)
        self.arguments = arguments

    def __call__(
        self,
        directory: Path,
        workers: int | str,
        faults: Faults | None = None,
        options: Sequence[str] = PATIENT,
        arguments: Sequence[object] = (),
    ) -> Outcome:
        """Run it on so many workers; ``arguments`` follow those that all runs have."""
        return run_workers(
            self.path,
            workers,
            directory=directory,
            options=options,
            arguments=[str(each) for each in (*self.arguments, *arguments)],
            faults=faults,
            timeout_s=WAIT_S,
        )
