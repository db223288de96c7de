"""Numbers and names in sentences."""

from __future__ import annotations

import signal
from collections.abc import Sequence

__all__ = ["count", "exit_words", "listed", "progress"]


def count(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str]) -> str:
    """``w1``, ``w1 and w2``, ``w1, w2 and w3``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def progress(done: int, total: int) -> str:
    """``3 of 40 steps``; ``3 steps`` where the total is 0, unknown.

    Steps by number (`Step.number`, the journal, errors) count from 0, so the screen says how many are done instead.
    """
    return f"{done} of {count(total, 'step')}" if total else count(done, "step")


def exit_words(exit_code: int) -> str:
    """How a process has ended, to follow its name."""
    if exit_code < 0:
        try:
            name = f" ({signal.Signals(-exit_code).name})"
        except ValueError:
            name = ""
        return f"was killed by signal {-exit_code}{name}"
    return f"ended with exit code {exit_code} and without a word"
