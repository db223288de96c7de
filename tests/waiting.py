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

PATIENT: Final = [
    part for option in ("--heartbeat-timeout-s", "--aside-s", "--hang-s") for part in (option, f"{WAIT_S:g}")
]
"""Options of a run that is to lose whom the test ends, and nobody who only waits for its turn: a killed worker is known
to be gone at once, whatever these say."""
