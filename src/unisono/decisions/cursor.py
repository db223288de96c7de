"""The samples of a step: a pure function of the recipe and the step's number.

The order of an epoch is a permutation of ``(seed, epoch)`` that can be evaluated at any position
without storing it, so a position in the data is a step number and nothing else.

The permutation is a Feistel network over pairs ``(left, right)`` with ``left < a`` and ``right < b``,
``a * b >= n``: each round adds a keyed hash of one half to the other, modulo its size, which is
invertible whatever the hash is. Positions that land outside ``[0, n)`` walk on until they are inside
(cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). With
``a = ceil(sqrt(n))`` fewer than one position in ``sqrt(n)`` has to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from unisono.errors import RecipeError

__all__ = ["Cursor", "Permutation", "StepPosition", "mix", "seed_of"]

MASK = (1 << 64) - 1
ROUNDS = 8


def mix(value: int) -> int:
    """Return a bijective 64-bit hash (the finalizer of SplitMix64: Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def seed_of(seed: int, *path: int | str) -> int:
    """Return a 64-bit seed for one position in a run, e.g. ``seed_of(7, "microbatch", step, index)``."""
    value = mix(seed & MASK)
    for part in path:
        number = int.from_bytes(part.encode()[:8].ljust(8, b"\0"), "little") if isinstance(part, str) else part
        value = mix(value ^ (number & MASK))
    return value


class Permutation:
    """A pseudo-random permutation of ``range(length)``, evaluated position by position.

    Holds a few integers, whatever the length.
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError(f"a permutation needs a length of at least 1, got {length}")
        self.length = length
        self._a = math.isqrt(length - 1) + 1
        self._b = -(-length // self._a)
        self._keys = [seed_of(seed, "round", number) for number in range(ROUNDS)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.length:
            raise IndexError(f"position {position} is outside a permutation of {self.length}")
        a, b = self._a, self._b
        while True:
            left, right = position // b, position % b
            for number, key in enumerate(self._keys):
                if number & 1:
                    right = (right + mix(left ^ key)) % b
                else:
                    left = (left + mix(right ^ key)) % a
            position = left * b + right
            if position < self.length:
                return position


@dataclass(frozen=True)
class StepPosition:
    """Position of a step in the data: a function of the recipe and ``number`` alone."""

    number: int
    epoch: int
    first: int
    num_samples: int
    microbatch_size: int

    @property
    def num_leaves(self) -> int:
        """Micro-batches of this step: M, or fewer in an epoch's last, partial batch."""
        return -(-self.num_samples // self.microbatch_size)

    def leaf(self, index: int) -> range:
        """Return the positions of micro-batch ``index`` in the epoch's order. Only the last one may be short."""
        start = self.first + index * self.microbatch_size
        return range(start, min(start + self.microbatch_size, self.first + self.num_samples))


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The data part of a recipe: from a step number to sample indices."""

    num_samples: int
    """Length of the dataset."""
    batch_size: int
    """Samples of one global batch."""
    microbatches: int
    """M: equal cuts of a global batch; part of the recipe, never derived from the worker count."""
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    """Leave out an epoch's last batch when it is partial; otherwise it is trained, weighted exactly."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise RecipeError("the dataset is empty (length 0); a run needs at least 1 sample")
        if self.batch_size < 1:
            raise RecipeError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.microbatches < 1:
            raise RecipeError(f"microbatches must be at least 1, got {self.microbatches}")
        if self.batch_size % self.microbatches:
            rest = self.batch_size % self.microbatches
            raise RecipeError(
                f"a batch of {self.batch_size} samples cannot be cut into {self.microbatches} equal micro-batches "
                f"({self.batch_size} % {self.microbatches} = {rest}); use microbatches={_choices(self)} "
                f"or batch_size={self.batch_size - rest or self.microbatches}"
            )
        if self.drop_last and self.num_samples < self.batch_size:
            raise RecipeError(
                f"drop_last=True leaves nothing of {self.num_samples} samples at batch_size={self.batch_size}; "
                f"use a batch_size of at most {self.num_samples} or drop_last=False"
            )

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.num_samples, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def position(self, step: int) -> StepPosition:
        """Return the position of step ``step``, counted from 0 within ``run.steps``."""
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self.batch_size
        return StepPosition(
            number=step,
            epoch=epoch,
            first=first,
            num_samples=min(self.batch_size, self.num_samples - first),
            microbatch_size=self.batch_size // self.microbatches,
        )

    def order(self, epoch: int) -> Permutation | range:
        """Return the order of an epoch: position -> sample index."""
        if not self.shuffle:
            return range(self.num_samples)
        return Permutation(self.num_samples, seed_of(self.seed, "order", epoch))

    def indices(self, step: int, leaf: int) -> list[int]:
        """Return the sample indices of one micro-batch."""
        position = self.position(step)
        order = self.order(position.epoch)
        return [order[index] for index in position.leaf(leaf)]


def _choices(cursor: Cursor) -> str:
    near = sorted(_divisors(cursor.batch_size), key=lambda divisor: abs(divisor - cursor.microbatches))[:5]
    return ", ".join(str(divisor) for divisor in sorted(near)[:-1]) + f" or {max(near)}" if len(near) > 1 else "1"


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)
