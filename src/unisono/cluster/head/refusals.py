"""What the head refuses, said once: the first at once, all others as a number, once a minute."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from unisono.core.words import count, listed

__all__ = ["EVERY_S", "Refusals"]

EVERY_S: Final = 60.0


class Refusals:
    """Counts refused connections.

    Args:
        tell: shows a sentence to the user.
        later: calls a function after so many seconds.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._later = later
        self._clock = clock
        self._since: float | None = None
        self._untold: Counter[str] = Counter()
        self._last = ""

    def note(self, why: str, where: str) -> bool:
        """Count one.

        Args:
            why: ends the sentence "a connection ...": "without the run's token".
            where: the address that it came from.

        Returns:
            Whether it was told at once.
        """
        self._last = where
        if self._since is None:
            self._since = self._clock()
            self._tell(f"the head has refused a connection {why}, from {where}; the run goes on")
            self._later(EVERY_S, self._tell_number)
            return True
        self._untold[why] += 1
        return False

    def _tell_number(self) -> None:
        assert self._since is not None
        now = self._clock()
        seconds, self._since = now - self._since, None
        if not self._untold:
            return
        total = count(self._untold.total(), "more connection")
        kinds = listed([f"{number} {why}" for why, number in self._untold.most_common()])
        self._tell(f"the head has refused {total} in {seconds:.0f} s ({kinds}), the last from {self._last}")
        self._untold.clear()
        self._since = now
        self._later(EVERY_S, self._tell_number)
