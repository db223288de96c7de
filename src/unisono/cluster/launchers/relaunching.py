"""When a launcher starts the agent of a machine again that was lost: after a pause, which grows while agents fail.

The pause is `FIRST_S` after the first end, twice as long after each further one, and `MOST_S` at most. An agent that
has lived for `LIVED_S` has not failed: after its end the pauses begin anew.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["FIRST_S", "LIVED_S", "MOST_S", "Attempts"]

FIRST_S: Final = 5.0
MOST_S: Final = 300.0
LIVED_S: Final = 60.0


class Attempts(msgspec.Struct, frozen=True, kw_only=True):
    """The starts of one machine's agent. Times in seconds, of one clock."""

    started_at: float
    """The last start."""
    ended_at: float | None = None
    """The end of the agent that was started then; None: it has not ended."""
    num_failed: int = 0
    """Agents in a row that have ended before `LIVED_S`."""

    def ended(self, now: float) -> Attempts:
        """Return the attempts after the end of the agent."""
        failed = self.num_failed + 1 if now - self.started_at < LIVED_S else 0
        return Attempts(started_at=self.started_at, ended_at=now, num_failed=failed)

    def started(self, now: float) -> Attempts:
        """Return the attempts after another start."""
        return Attempts(started_at=now, num_failed=self.num_failed)

    @property
    def pause_s(self) -> float:
        """The time from the end of an agent to the next start."""
        return min(FIRST_S * 2.0 ** max(self.num_failed - 1, 0), MOST_S)

    def is_due(self, now: float) -> bool:
        """Return whether the agent has ended, and the pause is over."""
        return self.ended_at is not None and now >= self.ended_at + self.pause_s
