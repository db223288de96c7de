"""Window of a stream: how many pieces a member sends ahead of those that it has received from all others.

Between two members the pieces queue on the only way there is. Among three and more, a member that sends all it has to
all others at once leaves it to TCP which of them gets its part first; the others cannot add up the first pieces, and
have nothing to send back. So few pieces are under way at the same time, where the way is short. On a long way few
pieces leave the link empty until the answer comes. Which it is shows in the time that a stream takes.
"""

from __future__ import annotations

import statistics
from typing import Final

__all__ = ["Window"]

CHOICES: Final = (2, 4, 16)
WARM_UP: Final = 2
"""So many streams at the beginning do not count."""
TRIES: Final = 3
"""Streams with each of the choices, before one is kept."""
GAIN: Final = 0.97
"""A larger window must take at most this part of the time of a smaller one."""


class Window:
    """The window of a wire's streams. What it says changes when bytes travel, and no bit of them."""

    def __init__(self, num_members: int) -> None:
        self._is_needed = num_members > 2
        self._num_begun = 0
        self._times: dict[int, list[float]] = {choice: [] for choice in CHOICES}
        self._kept = 0

    def of_next(self, num_pieces: int) -> int:
        """Return the window of the next stream. All members try the choices in the same streams."""
        if not self._is_needed or num_pieces <= CHOICES[0]:
            return num_pieces
        if self._kept:
            return self._kept
        self._num_begun += 1
        return CHOICES[max(0, self._num_begun - WARM_UP - 1) % len(CHOICES)]

    def observe(self, window: int, seconds: float) -> None:
        """Record how long a stream with this window has taken."""
        if self._kept or window not in self._times or self._num_begun <= WARM_UP:
            return
        self._times[window].append(seconds)
        if all(len(times) >= TRIES for times in self._times.values()):
            best = CHOICES[0]
            for choice in CHOICES[1:]:
                if statistics.median(self._times[choice]) < GAIN * statistics.median(self._times[best]):
                    best = choice
            self._kept = best
