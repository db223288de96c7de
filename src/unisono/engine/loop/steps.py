"""The steps of one call of ``run.steps``, as the script iterates over them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar

from unisono.engine.loop.step import Iteration

__all__ = ["Steps"]

S = TypeVar("S", bound=Iteration, covariant=True)


class Steps(Iterator[S]):
    """An iterator over the steps of one call of ``run.steps``, or over the rounds of ``run.local_steps``. Its length is
    the number of these, also of those that a worker that joins later, or a run that is resumed, has not to do again.
    """

    def __init__(self, generator: Generator[S, None, None], num_steps: int) -> None:
        self._generator = generator
        self._num_steps = num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Steps[S]:
        return self

    def __next__(self) -> S:
        return next(self._generator)

    def close(self) -> None:
        """Leave the loop, as ``break`` does for a generator."""
        self._generator.close()
