"""How long a test waits for what must come: one number for all of them.

It is reached only where something is broken, so it need not be near to what is usual: a machine on which every process
waits for its turn is five times as slow as an idle one, and more. Nothing that a test claims is about this time.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PATIENT", "SILENCE_S", "WAIT_S"]

WAIT_S: Final = 240.0
"""Then the test fails, and says what everybody was doing."""

SILENCE_S: Final = 5.0
"""Seconds without a heartbeat that a test takes for a stop, where it stops somebody: no other worker is silent for as
long, also where it has to wait for its turn. Whoever is stopped costs this wait, and no work."""

PATIENT: Final = ("--heartbeat-timeout-s", "60", "--aside-s", "60", "--hang-s", f"{WAIT_S:g}")
"""Options of a run in which nobody is lost for having waited for its turn: for all tests in which nobody is meant to be
silent or to hang. One lost worker more, and the next has another name, and the next generation another number. A killed
worker is known to be gone at once, whatever these say; one that is known by its silence only (its report went to a head
that had died) is still known within `WAIT_S`."""
