"""The samples of a step: a pure function of the recipe and the step's number.

The order of an epoch is a pure function of ``(seed, epoch)``, so a position in the data is a step number and nothing
else. The usual order, a permutation, can be evaluated at any position without storing it; `unisono.core.orders`
has the others.

The permutation is a Feistel network over pairs ``(left, right)`` with ``left < a`` and ``right < b``,
``a * b >= n``: each round adds a keyed hash of one half to the other, modulo its size, which is
invertible whatever the hash is. Positions that land outside ``[0, n)`` walk on until they are inside
(cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). With
``a = ceil(sqrt(n))`` fewer than one position in ``sqrt(n)`` has to.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from unisono.core.errors import RecipeError
from unisono.core.words import count, listed

__all__ = [
    "Cursor",
    "EpochOrder",
    "PartOfCursor",
    "Permutation",
    "Recipe",
    "SampleOrder",
    "StepPosition",
    "Without",
    "check_parts",
    "mix",
    "seed_of",
]

Recipe = dict[str, int | bool | str]
"""The parts of a recipe by name."""

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


class EpochOrder(Protocol):
    """The order of one epoch: position -> sample index."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> int: ...


class SampleOrder(Protocol):
    """A rule for the order of the samples: a pure function of (seed, epoch)."""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, the same in each."""

    @property
    def num_indices(self) -> int:
        """All sample indices are below this number."""

    @property
    def name(self) -> str:
        """The order in words, for the recipe. Orders that differ in anything have other names."""

    @property
    def repeats(self) -> bool:
        """Whether a sample may come more than once in an epoch."""

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""


@dataclass(frozen=True, eq=False)
class Without:
    """Samples that a run leaves out of the micro-batches in which they would be."""

    samples: frozenset[int]
    """Their indices."""
    text: str
    """The same, ascending, one a line."""

    @property
    def sha256(self) -> str:
        """The SHA-256 of the text, 64 hexadecimal digits."""
        return sha256(self.text.encode()).hexdigest()

    @property
    def name(self) -> str:
        """In words, for the recipe."""
        return f"{count(len(self.samples), 'sample')}, SHA-256 {self.sha256}"


@dataclass(frozen=True)
class StepPosition:
    """Position of a step in the data: a function of the recipe and ``number`` alone."""

    number: int
    epoch: int
    """Counted over the whole run."""
    first: int
    num_samples: int
    """Without those that are left out."""
    microbatch_size: int
    left_out: frozenset[int] = frozenset()
    """Positions whose samples are left out. The batch is cut as if they were there, so a micro-batch may be empty."""

    @property
    def stop(self) -> int:
        """The position after the last one of the batch."""
        return self.first + self.num_samples + len(self.left_out)

    @property
    def num_leaves(self) -> int:
        """Micro-batches of this step: M, or fewer in an epoch's last, partial batch."""
        return -(-(self.stop - self.first) // self.microbatch_size)

    def leaf(self, index: int) -> Sequence[int]:
        """Return the positions of micro-batch ``index`` in the epoch's order. Only the last one may be short, where no
        samples are left out.
        """
        start = self.first + index * self.microbatch_size
        positions = range(start, min(start + self.microbatch_size, self.stop))
        return [one for one in positions if one not in self.left_out] if self.left_out else positions


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The data part of a recipe: from a step number to sample indices."""

    order: SampleOrder
    batch_size: int
    """Samples of one global batch."""
    microbatches: int
    """M: equal cuts of a global batch; part of the recipe, never derived from the worker count."""
    seed: int
    drop_last: bool = False
    """Leave out an epoch's last batch when it is partial; otherwise it is trained, weighted exactly."""
    first_epoch: int = 0
    """Epochs of the run before step 0."""
    without: Without | None = None
    """Samples that are left out, wherever the order has them."""

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
                f"or batch_size={self.batch_size - rest or self.microbatches}{self._whole()}"
            )
        if self.drop_last and self.num_samples < self.batch_size:
            raise RecipeError(
                f"drop_last=True leaves nothing of {self.num_samples} samples at batch_size={self.batch_size}; use a "
                f"batch_size of at most {self.num_samples}, or drop_last=False"
            )

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.order.num_samples

    @property
    def recipe(self) -> Recipe:
        """Everything that the data of a step depend on, by name, in words."""
        return {
            "num_samples": self.num_samples,
            "batch_size": self.batch_size,
            "microbatches": self.microbatches,
            "seed": self.seed,
            "order": self.order.name,
            "drop_last": self.drop_last,
            "first_epoch": self.first_epoch,
            **({"without": self.without.name} if self.without is not None else {}),
        }

    def _whole(self) -> str:
        """Return what else a batch of all samples can be."""
        if self.batch_size != self.num_samples:
            return ""
        above = -(-self.batch_size // self.microbatches) * self.microbatches
        return f" (or batch_size={above}, of which all {self.num_samples} samples are one partial batch)"

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.num_samples, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def single(self, num_steps: int) -> StepPosition | None:
        """Return the last batch of an epoch if its last micro-batch has one sample, and others have more.

        Args:
            num_steps: of ``run.steps``.
        """
        if self.microbatches == self.batch_size or num_steps < self.steps_per_epoch:
            return None
        last = self.position(self.steps_per_epoch - 1)
        return last if len(last.leaf(last.num_leaves - 1)) == 1 else None

    def position(self, step: int) -> StepPosition:
        """Return the position of step ``step``, counted from 0 within ``run.steps``."""
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self.batch_size
        positions = range(first, min(first + self.batch_size, self.num_samples))
        left_out = (
            _left_out(self, self.first_epoch + epoch, positions) if self.without is not None else frozenset[int]()
        )
        return StepPosition(
            number=step,
            epoch=self.first_epoch + epoch,
            first=first,
            num_samples=len(positions) - len(left_out),
            microbatch_size=self.batch_size // self.microbatches,
            left_out=left_out,
        )

    def first_left_out(self, num_steps: int) -> int | None:
        """Return the first of so many steps in which a sample is left out; None: there is none."""
        return next((step for step in range(num_steps) if self.position(step).left_out), None)

    def indices(self, step: int, leaf: int) -> list[int]:
        """Return the sample indices of one micro-batch."""
        position = self.position(step)
        places = self.order.epoch(self.seed, position.epoch)
        return [places[index] for index in position.leaf(leaf)]

    def keys(self, step: int, leaf: int) -> list[tuple[int, int]]:
        """Return (sample index, seed of its augmentation) of each sample of a micro-batch.

        The seed is that of (seed, epoch, sample index); where a sample may come more than once in an epoch, each of
        its places has another one.
        """
        position = self.position(step)
        epoch_seed = seed_of(self.seed, "sample", position.epoch)
        places = zip(position.leaf(leaf), self.indices(step, leaf), strict=True)
        if self.order.repeats:
            return [(index, seed_of(epoch_seed, index, place)) for place, index in places]
        return [(index, seed_of(epoch_seed, index)) for _, index in places]


@dataclass(frozen=True, kw_only=True)
class PartOfCursor(Cursor):
    """One of several equal parts of each global batch: the micro-batches that one replica trains on.

    The parts of a batch are next to each other. Micro-batches are counted from 0 within the part.
    """

    part: int
    num_parts: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.microbatches, self.num_parts)
        rest = self.num_samples % self.batch_size
        least = self.batch_size // self.num_parts * (self.num_parts - 1)
        if rest and not self.drop_last and rest <= least:
            raise RecipeError(
                f"the last batch of an epoch has {rest} of {self.batch_size} samples, so some of the {self.num_parts} "
                f"replicas would have no sample of it (more than {least} samples are needed); leave it out with "
                "drop_last=True"
            )

    @classmethod
    def of(cls, cursor: Cursor, part: int, num_parts: int) -> PartOfCursor:
        """Return one part of a cursor.

        Raises:
            RecipeError: the batches cannot be cut so.
        """
        known = {field.name: getattr(cursor, field.name) for field in dataclasses.fields(cursor)}
        return cls(**known, part=part, num_parts=num_parts)

    def position(self, step: int) -> StepPosition:
        whole = super().position(step)
        size = self.batch_size // self.num_parts
        first = whole.first + self.part * size
        positions = range(first, min(first + size, whole.stop))
        left_out = whole.left_out.intersection(positions)
        num_samples = len(positions) - len(left_out)
        return dataclasses.replace(whole, first=first, num_samples=num_samples, left_out=left_out)


@functools.lru_cache(maxsize=64)
def _left_out(cursor: Cursor, epoch: int, positions: range) -> frozenset[int]:
    """Return the positions of an epoch's order whose samples are left out. Kept: all micro-batches of a step ask."""
    assert cursor.without is not None
    places, samples = cursor.order.epoch(cursor.seed, epoch), cursor.without.samples
    return frozenset(position for position in positions if places[position] in samples)


def check_parts(microbatches: int, num_parts: int) -> None:
    """Raise RecipeError unless micro-batches can be distributed equally to replicas."""
    if num_parts < 1 or microbatches % num_parts:
        raise RecipeError(
            f"{microbatches} micro-batches cannot be divided equally among {num_parts} replicas; microbatches= counts "
            f"those of all replicas together, so use a multiple of {num_parts}"
        )


def _choices(cursor: Cursor) -> str:
    divisors = (number for number in range(1, cursor.batch_size + 1) if cursor.batch_size % number == 0)
    near = sorted(divisors, key=lambda divisor: abs(divisor - cursor.microbatches))[:5]
    return listed([str(divisor) for divisor in sorted(near)], "or")
