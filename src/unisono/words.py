"""Numbers and names in sentences."""

from __future__ import annotations

import signal
from collections.abc import Sequence

__all__ = ["count", "exit_words", "listed", "place_words", "progress"]


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


def place_words(step: int, microbatch: int, samples: Sequence[int] = (), *, evaluates: bool = False) -> str:
    """``step 4, micro-batch 2 (samples 17, 3)``; what is -1 is not known. "" where nothing is."""
    if step < 0:
        return ""
    if evaluates:
        return f"step {step}, batch {microbatch} of an evaluation"
    text = f"step {step}" + (f", micro-batch {microbatch}" if microbatch >= 0 else "")
    if samples:
        text += f" (samples {', '.join(map(str, samples[:8]))}{', ...' if len(samples) > 8 else ''})"
    return text


def exit_words(exit_code: int) -> str:
    """How a process has ended, to follow its name."""
    if exit_code < 0:
        try:
            name = f" ({signal.Signals(-exit_code).name})"
        except ValueError:
            name = ""
        return f"was killed by signal {-exit_code}{name}"
    return f"ended with exit code {exit_code} and without a word"
