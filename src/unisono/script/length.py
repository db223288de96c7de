"""Length of a run, as far as its script says it."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Length"]


class Length:
    """Counts the steps that a script asks for, to know how many follow.

    It counts what the calls of ``run.steps`` ask for, and not what was done, so a worker that skips the first calls
    (it has joined later, or the run was resumed) counts as the others do.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._epochs_left: int | None = None  # after this one; None: the script is not within `run.epochs`
        self._asked = 0  # steps of the calls of this epoch
        self._per_epoch = 0  # steps of the calls of the epoch before

    def epochs(self, num: int) -> Iterator[int]:
        """Yield the epochs of a ``run.epochs``; within another one they are part of an epoch of that one."""
        if self._epochs_left is not None:
            yield from range(num)
            return
        self._per_epoch = 0
        try:
            for epoch in range(num):
                self._epochs_left, self._asked = num - epoch - 1, 0
                yield epoch
                self._per_epoch = self._asked
        finally:
            self._epochs_left = None

    def steps_after(self, num_steps: int, *, is_limited: bool) -> int | None:
        """Count a call of ``run.steps``, and return how many steps of the run follow it; None: nobody knows.

        Within ``run.epochs`` each epoch has as many steps as the one before. Outside of it, the first call is the whole
        training if it says how long it is; a script with a second one may have a third.

        Args:
            is_limited: the call says for how many epochs, or steps, it trains.
        """
        self._num_calls += 1
        if self._epochs_left is None:
            return 0 if is_limited and self._num_calls == 1 else None
        self._asked += num_steps
        per_epoch = max(self._per_epoch, self._asked)
        return per_epoch - self._asked + self._epochs_left * per_epoch
