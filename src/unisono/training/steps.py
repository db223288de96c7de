"""The steps of one call of ``run.steps``, as the script iterates over them."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from unisono.training.step import Step

__all__ = ["Steps"]


class Steps(Iterator[Step]):
    """An iterator over the steps of one call of ``run.steps``. Its length is the number of these steps, also of those
    that a worker that joins later, or a run that is resumed, has not to do again.
    """

    def __init__(self, generator: Generator[Step, None, None], num_steps: int) -> None:
        self._generator = generator
        self._num_steps = num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Step:
        return next(self._generator)

    def close(self) -> None:
        """Leave the loop, as ``break`` does for a generator."""
        self._generator.close()
