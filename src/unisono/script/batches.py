"""What a script has of an evaluation that is a loop of its own: ``for batch in run.batches(...)``, ``run.total``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

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


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls a function with the sum, and with the method's other arguments."""

    def method(self: RunTotal, *others: Any) -> Any:
        return function(self.item(), *map(_value, others))

    return method


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a method that calls a function of two arguments with the sum as the second one."""

    def method(self: RunTotal, other: Any) -> Any:
        return function(other, self.item())

    return method


class RunTotal:
    """A number or tensor that is added up over all workers, and is used as such afterwards: what ``run.total`` returns.

    Its attributes are those of `tensor`: ``confusion.diag()``, ``correct.dtype``. numpy and torch take it as an array.

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
        value = self._read(self.name)
        return value.clone() if isinstance(value, Tensor) else value

    @property
    def tensor(self) -> Tensor:
        """The sum over all workers as a CPU tensor, int64 or float64, of the shape of what was added.

        Raises:
            StepError: as `item`.
        """
        value = self.item()
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        return value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of what copies, pickles or shows objects
            raise AttributeError(name)
        if name.endswith("_"):
            raise AttributeError(
                f"run.total({self.name!r}).{name} would change a copy: write a new value, e.g. total = total / n"
            )
        return getattr(self.tensor, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = self.tensor.numpy()  # always a copy
        return found if dtype is None else found.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(lambda one: one.tensor if isinstance(one, cls) else one, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<run.total({self.name!r})>"

    def __format__(self, spec: str) -> str:
        value = self.item()
        if spec and isinstance(value, Tensor) and value.dim():
            raise TypeError(
                f"run.total({self.name!r}) is a tensor of shape {tuple(value.shape)}, and the format {spec!r} is for "
                "one number: format one of its values (total[0]), or total.tolist()"
            )
        return format(value, spec)

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensor)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]

    __float__, __int__, __index__ = _forward(float), _forward(int), _forward(operator.index)
    __bool__, __str__, __round__ = _forward(bool), _forward(str), _forward(round)
    __neg__, __abs__ = _forward(operator.neg), _forward(abs)
    __add__, __radd__ = _forward(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _forward(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _forward(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _forward(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _forward(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _forward(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _forward(operator.pow), _reflected(operator.pow)
    __matmul__, __rmatmul__ = _forward(operator.matmul), _reflected(operator.matmul)
    __eq__, __ne__ = _forward(operator.eq), _forward(operator.ne)
    __lt__, __le__ = _forward(operator.lt), _forward(operator.le)
    __gt__, __ge__ = _forward(operator.gt), _forward(operator.ge)


def _value(other: Any) -> Any:
    return other.item() if isinstance(other, RunTotal) else other
