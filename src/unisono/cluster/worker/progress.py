"""Where the training loop is, and for how long: the content of a heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from unisono.core.messages import Beat

__all__ = ["Progress"]

LONG_S: Final = 0.1
"""A heartbeat names the samples of a micro-batch that has taken longer than this."""
WAITED_S: Final = 1.0
"""A heartbeat names the round in which the loop has waited for longer than this."""
MAX_TITLE: Final = 80
"""... in at most so many characters: a heartbeat has little room."""
NUM_SHOWN: Final = 9
"""A heartbeat names at most so many samples: one more than a message shows."""


class Progress:
    """Position of the training loop. The loop writes it, the thread that sends heartbeats reads it. Never blocks."""

    def __init__(self) -> None:
        self._position = _Position()
        self._is_waiting = False
        self._round = (-1, "")
        self._num_changes = 0
        self._num_steps = 0
        self._changed_at = time.monotonic()

    def at(
        self, *, phase: int, step: int, microbatch: int, evaluates: bool = False, samples: Samples | None = None
    ) -> None:
        """Note that the loop has got to this position.

        Args:
            evaluates: ``microbatch`` is a batch of an evaluation.
            samples: returns the indices of the micro-batch's samples. Called in the thread that sends heartbeats when
                the micro-batch takes long: a loop that hangs cannot report them itself.
        """
        if (self._position.phase, self._position.step) != (phase, step):
            self._num_steps += 1
        self._position = _Position(phase, step, microbatch, evaluates, samples)
        self._note_change()

    def waiting(self, flag: bool) -> None:
        """Note that the loop waits for other workers, or does not any more. A loop that waits is not late."""
        self._is_waiting = flag
        self._note_change()

    def in_round(self, number: int, title: str) -> None:
        """Note that the loop takes part in this round; -1: in none."""
        self._round = (number, title[:MAX_TITLE])

    def forgive(self, seconds: float, now: float) -> None:
        """Do not count ``seconds`` up to ``now``, in which the whole process stood still."""
        self._changed_at = min(self._changed_at + seconds, now)

    def beat(self, generation: int, now: float) -> Beat:
        """Return the heartbeat to send."""
        position, seconds_at = self._position, now - self._changed_at
        number, title = self._round if self._is_waiting and seconds_at > WAITED_S else (-1, "")
        return Beat(
            generation=generation,
            phase=position.phase,
            step=position.step,
            microbatch=position.microbatch,
            progress=self._num_changes,
            waiting=self._is_waiting,
            num_steps=self._num_steps,
            seconds_at=seconds_at,
            evaluates=position.evaluates,
            samples=position.first_samples() if seconds_at > LONG_S else [],
            round=number,
            title=title,
        )

    def _note_change(self) -> None:
        self._num_changes += 1
        self._changed_at = time.monotonic()


Samples = Callable[[], Sequence[int]]
"""Returns the sample indices of a micro-batch."""


@dataclass
class _Position:
    """One position of the loop: a step, and a micro-batch of it; -1 where there is none yet."""

    phase: int = -1
    step: int = -1
    microbatch: int = -1
    evaluates: bool = False
    _samples: Samples | None = None
    _first_samples: list[int] | None = None

    def first_samples(self) -> list[int]:
        """Return the first samples of the micro-batch. They are asked for once."""
        if self._first_samples is None:
            self._first_samples = list(self._samples())[:NUM_SHOWN] if self._samples is not None else []
        return self._first_samples
