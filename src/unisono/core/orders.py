"""Orders of the samples: pure functions of (seed, epoch), each with the number of samples of an epoch.

Orders that need no memory (shuffled, drawn with replacement) are evaluated at any position. The others are computed
once for each epoch and kept for the last few epochs.

Numbers are integers and float64 and sums go from left to right, so that a machine of another kind gets the same order.
Only `WeightedOnce` needs a function of the system's library, the logarithm.
"""

from __future__ import annotations

import abc
import itertools
import math
import operator
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from unisono.core.cursor import EpochOrder, Permutation, mix, seed_of
from unisono.core.errors import RecipeError

__all__ = [
    "Buckets",
    "Drawn",
    "Listed",
    "Sequential",
    "Shuffled",
    "ShuffledSubset",
    "Weighted",
    "WeightedOnce",
    "digest",
    "floats",
]

GAMMA = 0x9E3779B97F4A7C15
KEPT_EPOCHS = 3
"""Orders of so many epochs are kept: loader processes work ahead of the end of an epoch."""


def floats(values: Iterable[float], what: str) -> array[float]:
    """Return numbers as float64.

    Args:
        what: the name of such a number in an error, e.g. "weight".

    Raises:
        RecipeError: a number is negative, infinite or not a number; or there is none.
    """
    found = array("d", values)
    for index, value in enumerate(found):
        if not 0.0 <= value < math.inf:
            raise RecipeError(f"the {what} of sample {index} is {value}; each {what} must be a finite number >= 0")
    if not found:
        raise RecipeError(f"a sampler needs the {what} of each sample, got an empty list")
    return found


def digest(values: Sequence[float]) -> str:
    """Return a 64-bit digest of integers or float64 numbers, which is the same on every machine."""
    kind = "d" if isinstance(values, array) and values.typecode == "d" else "q"
    return blake2b(struct.pack(f"<{len(values)}{kind}", *values), digest_size=8).hexdigest()


def _bits(start: int, position: int) -> int:
    """Return the 64 random bits at a position of the sequence of SplitMix64 that begins with ``start``."""
    return mix(start + position * GAMMA)


# -- without a stored order --------------------------------------------------------------------------


@dataclass(frozen=True)
class Sequential:
    """The order of the dataset, in each epoch; or that of streams, which alone decide about it."""

    num_samples: int
    num_indices: int
    """More than samples where streams give the indices (`unisono.core.stream_plan.StreamCursor`)."""
    name: str = "sequential"
    repeats: bool = False

    @classmethod
    def of(cls, num_samples: int) -> Sequential:
        """Return the order of so many samples, each of which comes once."""
        return cls(num_samples, num_samples)

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        return range(self.num_samples)


@dataclass(frozen=True)
class Shuffled:
    """A new permutation of ``range(num_indices)`` in each epoch. If an epoch has another number of samples: several of
    them in a row, or a part of one.
    """

    num_indices: int
    num_samples: int

    @classmethod
    def of(cls, num_samples: int) -> Shuffled:
        """Return the order in which each sample comes once."""
        return cls(num_samples, num_samples)

    @property
    def name(self) -> str:
        return "shuffled" if self.num_samples == self.num_indices else f"shuffled from {self.num_indices}"

    @property
    def repeats(self) -> bool:
        return self.num_samples > self.num_indices

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        first = Permutation(self.num_indices, seed_of(seed, "order", epoch))
        if self.num_samples == self.num_indices:
            return first
        others = [
            Permutation(self.num_indices, seed_of(seed, "order", epoch, number))
            for number in range(1, -(-self.num_samples // self.num_indices))
        ]
        rounds = [first, *others]
        return _Mapped(self.num_samples, lambda position: rounds[position // len(first)][position % len(first)])


@dataclass(frozen=True)
class Drawn:
    """Samples drawn from ``range(num_indices)`` with replacement, all alike."""

    num_indices: int
    num_samples: int

    @property
    def name(self) -> str:
        return f"drawn from {self.num_indices} with replacement"

    @property
    def repeats(self) -> bool:
        return True

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        start = seed_of(seed, "draw", epoch)
        return _Mapped(self.num_samples, lambda position: _bits(start, position) * self.num_indices >> 64)


class Weighted:
    """Samples drawn with replacement, each with a probability that is proportional to its weight.

    Raises:
        RecipeError: a weight is negative or not finite, or all are 0.
    """

    repeats = True

    def __init__(self, weights: Iterable[float], num_samples: int) -> None:
        given = floats(weights, "weight")
        self.num_samples, self.num_indices = num_samples, len(given)
        self.name = f"drawn by weights {digest(given)}"
        self._sums = array("d", itertools.accumulate(given))
        if not 0.0 < self._sums[-1] < math.inf:
            raise RecipeError(f"the sum of the weights is {self._sums[-1]}; it must be finite and more than 0")

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        start, sums, total = seed_of(seed, "draw", epoch), self._sums, self._sums[-1]
        most = math.nextafter(total, 0.0)  # tiny weights are rounded coarsely

        def draw(position: int) -> int:
            uniform = (_bits(start, position) >> 11) * 2.0**-53
            # A number below the total; a sample of weight 0 has no place between two sums.
            return bisect_right(sums, min(uniform * total, most))

        return _Mapped(self.num_samples, draw)


class _Mapped:
    """The order of an epoch as a function of the position."""

    def __init__(self, length: int, at: Callable[[int], int]) -> None:
        self._length, self._at = length, at

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self._length:
            raise IndexError(f"position {position} is outside an epoch of {self._length}")
        return self._at(position)


# -- with an order that is computed once for each epoch ----------------------------------------------


class _Stored(abc.ABC):
    """An order that is computed as a whole, and kept for the last epochs."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Sequence[int]] = {}

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        key = (seed, epoch)
        if key not in self._kept:
            while len(self._kept) >= KEPT_EPOCHS:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = array("q", self._compute(seed, epoch))
        return self._kept[key]

    @abc.abstractmethod
    def _compute(self, seed: int, epoch: int) -> Iterable[int]: ...


class WeightedOnce(_Stored):
    """Samples drawn one after the other without replacement, each with a probability that is proportional to its weight
    among those that are left.

    Each sample waits for an exponential time of the rate of its weight; the order is that in which they come
    (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", IPL 2006).

    Raises:
        RecipeError: a weight is negative or not finite, or too few are more than 0.
    """

    repeats = False

    def __init__(self, weights: Iterable[float], num_samples: int) -> None:
        super().__init__()
        self._weights = floats(weights, "weight")
        self.num_samples, self.num_indices = num_samples, len(self._weights)
        self.name = f"drawn by weights {digest(self._weights)} without replacement"
        possible = sum(weight > 0 for weight in self._weights)
        if num_samples > possible:
            raise RecipeError(
                f"{num_samples} samples cannot be drawn without replacement: only {possible} of {self.num_indices} "
                f"have a weight of more than 0; use num_samples={possible} or replacement=True"
            )

    def _compute(self, seed: int, epoch: int) -> Iterable[int]:
        start = seed_of(seed, "draw", epoch)
        times = []
        for index, weight in enumerate(self._weights):
            if weight > 0:
                uniform = ((_bits(start, index) >> 12) + 0.5) * 2.0**-52  # exact, and never 0 or 1
                times.append((-math.log(uniform) / weight, index))
        return [index for _, index in sorted(times)[: self.num_samples]]


class ShuffledSubset:
    """Some samples of the dataset, in a new order in each epoch."""

    def __init__(self, indices: Iterable[int]) -> None:
        self._indices = array("q", map(operator.index, indices))
        self.num_samples = len(self._indices)
        self.num_indices = max(self._indices, default=-1) + 1
        self.name = f"subset {digest(self._indices)}, shuffled"
        self.repeats = len(set(self._indices)) < len(self._indices)
        if min(self._indices, default=0) < 0:
            raise RecipeError(f"a subset of the samples has the index {min(self._indices)}; indices count from 0")

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        places = Permutation(self.num_samples, seed_of(seed, "order", epoch))
        return _Mapped(self.num_samples, lambda position: self._indices[places[position]])


class Buckets(_Stored):
    """Batches of samples of like lengths: each sample comes once in an epoch.

    The shuffled samples are taken in pools of ``pool`` batches. Each pool is sorted by length and cut into batches, and
    then all batches are shuffled. What does not fill a batch is left over before the pools are sorted, so a sample of
    any length may be in the last, partial batch of the epoch.

    Raises:
        RecipeError: a length is negative or not finite, or a number is below 1.
    """

    repeats = False

    def __init__(self, lengths: Iterable[float], batch_size: int, pool: int) -> None:
        super().__init__()
        if batch_size < 1 or pool < 1:
            raise RecipeError(f"batch_size and pool must be at least 1, got {batch_size} and {pool}")
        self._lengths = floats(lengths, "length")
        self.batch_size, self.pool = batch_size, pool
        self.num_samples = self.num_indices = len(self._lengths)
        self.name = f"batches of {batch_size} of like lengths {digest(self._lengths)}, from pools of {pool}"

    def resized(self, batch_size: int) -> Buckets:
        """Return the order of the same samples for batches of another size."""
        return Buckets(self._lengths, batch_size, self.pool)

    def _compute(self, seed: int, epoch: int) -> Iterable[int]:
        size = self.batch_size
        shuffled = _shuffled(self.num_samples, seed_of(seed, "order", epoch))
        num_full = self.num_samples // size * size
        pooled: list[int] = []
        for start in range(0, num_full, size * self.pool):
            # Stable: samples of one length stay in the order of the permutation.
            pooled += sorted(shuffled[start : min(start + size * self.pool, num_full)], key=self._lengths.__getitem__)
        if num_full:
            batches = _shuffled(num_full // size, seed_of(seed, "batches", epoch))
            pooled = [index for batch in batches for index in pooled[batch * size : (batch + 1) * size]]
        return pooled + shuffled[num_full:]


def _shuffled(length: int, start: int) -> list[int]:
    """Return ``range(length)`` in a random order. Faster than a `Permutation` where the whole order is needed."""
    bits = [_bits(start, index) for index in range(length)]
    return sorted(range(length), key=bits.__getitem__)


class Listed(_Stored):
    """An order that something else gives as a list.

    Args:
        num_indices: all indices are below this number.
        take: (seed, epoch) -> the sample indices of that epoch. A pure function.
        name: in words, for the recipe.
    """

    repeats = True  # nobody knows

    def __init__(
        self, num_samples: int, num_indices: int, take: Callable[[int, int], Iterable[int]], name: str
    ) -> None:
        super().__init__()
        self.num_samples, self.num_indices, self.name = num_samples, num_indices, name
        self._take = take

    def _compute(self, seed: int, epoch: int) -> Iterable[int]:
        return self._take(seed, epoch)
