"""Places: which shards of a model a worker has, and sums and wholes over all shards.

A layer is cut into T logical **shards**, each of which is computed by itself, in the same shapes on one worker and on
several. What the shards have computed is summed by a binary tree over all T, forward and backward. A worker has
neighbouring shards, whose sum is a node of that tree; workers exchange nodes and add the rest (recursive doubling).

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019:
`spread` and `join` are its functions f and g.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.core.errors import UsageError

__all__ = ["Exchange", "Place", "assembled", "cut", "join", "part_of", "spread", "whole"]

Exchange = Callable[[int, Tensor], Tensor]
"""Sends a tensor to another worker that has shards, by number, and returns its tensor of the same shape. Waits."""


class Place:
    """The shards of a model that are on this worker: all of them, until `divide`.

    Args:
        num_shards: T, a power of two.
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.number, self.size = 0, 1
        """Of this worker among those that have shards, and how many these are."""
        self.exchange: Exchange | None = None
        """Set while a model is computed on several workers."""

    def divide(self, number: int, size: int) -> None:
        """Keep the shards of one of several workers only. Local."""
        self.number, self.size = number, size

    @property
    def own(self) -> range:
        """The shards on this worker."""
        each = self.num_shards // self.size
        return range(self.number * each, (self.number + 1) * each)

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum over all shards, by the tree. Collective where several workers have shards.

        Args:
            parts: of the shards here.
        """
        own = [one.contiguous() for one in parts]  # the layout of a sum must not depend on who forms it
        while len(own) > 1:
            own = [left + right for left, right in zip(own[::2], own[1::2], strict=True)]
        total: Tensor = own[0]
        for distance in self._distances():
            other = self._exchanged(distance, total)
            total = other + total if self.number & distance else total + other
        return total

    def gathered(self, parts: Sequence[Tensor]) -> Tensor:
        """Return what all shards have, stacked: (T, ...). Collective where several workers have shards.

        Args:
            parts: of the shards here; all of one shape.
        """
        block = torch.stack([one.contiguous() for one in parts]).contiguous()
        for distance in self._distances():
            other = self._exchanged(distance, block)
            block = torch.cat([other, block] if self.number & distance else [block, other])
        return block

    def _distances(self) -> list[int]:
        """Return how far the workers are, in turn, whose shards follow those that this one has the sum of by then."""
        return [1 << level for level in range(self.size.bit_length() - 1)]

    def _exchanged(self, distance: int, own: Tensor) -> Tensor:
        if self.exchange is None:
            raise UsageError(
                "a layer that is cut into shards was called outside of step.compute and run.evaluate(...), and some of "
                "its shards are on other processes of the group: call the model there"
            )
        return self.exchange(self.number ^ distance, own.contiguous())

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        return self  # a copy of a model is carried as the model is


class _Spread(torch.autograd.Function):
    """One value to every shard here; its gradient is the sum over all shards."""

    @staticmethod
    def forward(ctx: Any, place: Place, value: Tensor) -> tuple[Tensor, ...]:
        ctx.place = place
        return tuple(value.view_as(value) for _ in place.own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, join(ctx.place, gradients)


class _Join(torch.autograd.Function):
    """The sum over all shards; each has its gradient."""

    @staticmethod
    def forward(ctx: Any, place: Place, *parts: Tensor) -> Tensor:
        ctx.place = place
        total = place.total(parts)
        return total.view_as(total) if any(total is one for one in parts) else total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_spread(ctx.place, gradient)


class _Cut(torch.autograd.Function):
    """Of one value, to every shard here its part; its gradient is put together from those of all shards."""

    @staticmethod
    def forward(ctx: Any, place: Place, dim: int, blocks: int, value: Tensor) -> tuple[Tensor, ...]:
        ctx.place, ctx.dim, ctx.blocks = place, dim, blocks
        return tuple(part_of(value, shard, place.num_shards, dim, blocks) for shard in place.own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, whole(ctx.place, gradients, ctx.dim, ctx.blocks)


class _Whole(torch.autograd.Function):
    """One value, put together from the parts of all shards; each has its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, place: Place, dim: int, blocks: int, *parts: Tensor) -> Tensor:
        ctx.place, ctx.dim, ctx.blocks = place, dim, blocks
        return assembled(place.gathered(parts), dim, blocks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *cut(ctx.place, gradient, ctx.dim, ctx.blocks)


def part_of(value: Tensor, shard: int, num_shards: int, dim: int, blocks: int = 1) -> Tensor:
    """Return the part of a tensor that belongs to a shard: a copy.

    Args:
        dim: that is cut; not negative.
        blocks: lie in this dimension one behind the other, and each is cut.
    """
    cut: Tensor = value.unflatten(dim, (blocks, num_shards, -1)).select(dim + 1, shard)
    return cut.flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)


def assembled(parts: Tensor, dim: int, blocks: int = 1) -> Tensor:
    """Return the tensor that has these parts.

    Args:
        parts: (T, ...).
        dim, blocks: as of `part_of`.
    """
    blockwise: Tensor = parts.unflatten(dim + 1, (blocks, -1))  # (T, ..., blocks, part, ...)
    return blockwise.movedim(0, dim + 1).flatten(dim, dim + 2)


def spread(place: Place, value: Tensor) -> Sequence[Tensor]:
    """Return a value for each shard here. Collective in the backward pass."""
    if torch.is_grad_enabled() and value.requires_grad:
        return _spread(place, value)
    return [value] * len(place.own)


def join(place: Place, parts: Sequence[Tensor]) -> Tensor:
    """Return the sum over all shards. Collective."""
    found: Tensor = _applied(_Join, place, *parts)
    return found


def cut(place: Place, value: Tensor, dim: int, blocks: int = 1) -> Sequence[Tensor]:
    """Return the part of a value that belongs to each shard here. Collective in the backward pass.

    Args:
        dim, blocks: as of `part_of`.
    """
    found: Sequence[Tensor] = _applied(_Cut, place, dim, blocks, value)
    return found


def whole(place: Place, parts: Sequence[Tensor], dim: int, blocks: int = 1) -> Tensor:
    """Return a value, from the part of each shard. Collective.

    Args:
        dim, blocks: as of `part_of`.
    """
    found: Tensor = _applied(_Whole, place, dim, blocks, *parts)
    return found


def _spread(place: Place, value: Tensor) -> Sequence[Tensor]:
    found: Sequence[Tensor] = _applied(_Spread, place, value)
    return found


def _applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)
