"""What a script has of an evaluation that is a loop of its own: ``for batch in run.batches(...)``, ``run.total``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch import Tensor

from unisono.core.errors import StepError
from unisono.engine.rounds.evaluation import BatchSums, Totals

__all__ = ["Batches", "RunTotal"]


class Batches:
    """The batches of an evaluation, shared out over the workers: what ``run.batches`` returns. Iterate over it once.

    Its length is the number of the batches of all workers.

    Args:
        num_batches: of all workers.
        play: yields the batches of this worker, and returns the totals of all. Collective.
    """

    def __init__(self, num_batches: int, play: Callable[[Batches], Generator[Any, None, Totals]]) -> None:
        self.sums = BatchSums("run.batches", fills=True)
        self._num_batches = num_batches
        self._play = play
        self._has_begun = self._is_left = False
        self._totals: Totals | None = None

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this worker; ends when the totals of all are known. Collective.

        Raises:
            StepError: it was iterated before.
        """
        if self._has_begun:
            raise StepError(
                "run.batches(...) was already iterated over: call it again for another pass over the dataset"
            )
        self._has_begun = True
        return self._run()

    def _run(self) -> Iterator[Any]:
        try:
            self._totals = yield from self._play(self)
        except GeneratorExit:
            self._is_left = True
            raise

    @property
    def index(self) -> int:
        """The number of the batch in hand, in the order of the dataset. Within the loop."""
        if self.sums.batch is None:
            raise StepError(
                "batches.index is the number of the current batch: use it within `for batch in run.batches(...)`"
            )
        return self.sums.batch

    def add(self, **values: float | Tensor) -> None:
        """Add numbers of the batch in hand to the totals.

        Args:
            values: numbers, or tensors of any shape. Integers and flags are summed as int64, others in float64.

        Raises:
            StepError: called outside of the loop. UsageError: a value is no number.
        """
        self.sums.add(values)

    @property
    def totals(self) -> Totals:
        """The sums of `add` over all batches of all workers, by name. After the loop.

        Raises:
            StepError: the loop is not over.
        """
        if self._totals is None:
            self.check_not_open("batches.totals was read")
            raise StepError("the totals of run.batches(...) are known only after `for batch in run.batches(...)`")
        return dict(self._totals)

    def check_not_open(self, what: str) -> None:
        """Check that the script is not within the loop, and has not left it before its end.

        Args:
            what: what the script has done, for the error: "run.barrier was called".

        Raises:
            StepError: it is, or has.
        """
        if self._is_left:
            raise StepError(
                "the loop `for batch in run.batches(...)` was left before its end (break, return or an exception), but "
                "the other workers wait for the rest of its batches. For fewer batches, give run.batches a smaller "
                "dataset, e.g. torch.utils.data.Subset(dataset, range(1000))"
            )
        if self._has_begun and self._totals is None:
            raise StepError(
                f"{what} inside `for batch in run.batches(...)`, where each worker is at another batch: do it after "
                "that loop"
            )


class RunTotal:
    """A number that is added up over all workers, and is used as a number afterwards: what ``run.total`` returns.

    Args:
        add: adds something of the batch in hand.
        read: returns the sum. Raises `StepError` where it is not known.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str, add: Callable[[str, Any], None], read: Callable[[str], Any]) -> None:
        self.name = name
        self._add = add
        self._read = read

    def __iadd__(self, value: float | Tensor) -> RunTotal:  # type: ignore[misc]  # it adds, where `+` reads
        """Add a number, or a tensor, of the batch in hand."""
        self._add(self.name, value)
        return self

    def item(self) -> Any:
        """Return the sum over all workers: int, float, or a CPU tensor.

        Raises:
            StepError: the loop that adds to it is not over.
        """
        return self._read(self.name)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __str__(self) -> str:
        return str(self.item())

    def __repr__(self) -> str:
        return f"<run.total({self.name!r})>"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.item(), digits)

    def __neg__(self) -> Any:
        return -self.item()

    def __add__(self, other: Any) -> Any:
        return self.item() + _value(other)

    def __radd__(self, other: Any) -> Any:
        return other + self.item()

    def __sub__(self, other: Any) -> Any:
        return self.item() - _value(other)

    def __rsub__(self, other: Any) -> Any:
        return other - self.item()

    def __mul__(self, other: Any) -> Any:
        return self.item() * _value(other)

    def __rmul__(self, other: Any) -> Any:
        return other * self.item()

    def __truediv__(self, other: Any) -> Any:
        return self.item() / _value(other)

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.item()

    def __eq__(self, other: object) -> Any:
        return self.item() == _value(other)

    def __lt__(self, other: Any) -> Any:
        return self.item() < _value(other)

    def __le__(self, other: Any) -> Any:
        return self.item() <= _value(other)

    def __gt__(self, other: Any) -> Any:
        return self.item() > _value(other)

    def __ge__(self, other: Any) -> Any:
        return self.item() >= _value(other)


def _value(other: Any) -> Any:
    return other.item() if isinstance(other, RunTotal) else other
