"""How long a test waits for what must come: one number for all of them.

It is reached only where something is broken, so it need not be near to what is usual: a machine on which every process
waits for its turn is five times as slow as an idle one, and more. Nothing that a test claims is about this time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

__all__ = ["PATIENT", "SILENCE_S", "WAIT_S", "wait_until"]

WAIT_S: Final = 240.0
"""Then the test fails, and says what everybody was doing."""

PAUSE_S: Final = 0.02

SILENCE_S: Final = 5.0
"""Seconds without a heartbeat that a test takes for a stop, where it stops somebody: no other worker is silent for as
long, also where it has to wait for its turn. Whoever is stopped costs this wait, and no work."""

PATIENT: Final = (
    "--set",
    "heartbeat-timeout=60s",
    "--set",
    "go-on-without-after=60s",
    "--set",
    f"kill-after={WAIT_S:g}s",
)
"""Options of a run in which nobody is lost for having waited for its turn: for all tests in which nobody is meant to be
silent or to hang. One lost worker more, and the next has another name, and the next generation another number. A killed
worker is known to be gone at once, whatever these say; one that is known by its silence only (its report went to a head
that had died) is still known within `WAIT_S`."""


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Block until something is so of which nobody tells; fail when it is not within `WAIT_S`."""
    pause, left = threading.Event(), WAIT_S
    while not is_so():
        assert left > 0, f"not within {WAIT_S:.0f} s: {what}"
        pause.wait(PAUSE_S)
        left -= PAUSE_S
