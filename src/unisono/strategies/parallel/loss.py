"""Cross entropy over classes that are cut into shards: no worker has the probabilities of all classes.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3: of each position, the workers exchange the largest logit, the
sum of the exponentials, and the logit of the target. Here the sums are those of the tree over the shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unisono.strategies.parallel.place import Place
from unisono.strategies.parallel.value import Sharded, refused

__all__ = ["cross_entropy"]


class _Nats(torch.autograd.Function):
    """Of each position, minus the logarithm of the probability of its target.

    Args:
        target: (positions,) classes, within range.
        logits: by shard here, (positions, classes of the shard).
    """

    @staticmethod
    def forward(ctx: Any, place: Place, target: Tensor, *logits: Tensor) -> Tensor:
        kept = [one.float() if one.dtype in (torch.bfloat16, torch.float16) else one for one in logits]
        highest = place.gathered([one.amax(1) for one in kept]).amax(0)
        exponentials = [(one - highest[:, None]).exp_() for one in kept]
        total = place.total([one.sum(1) for one in exponentials])
        classes = kept[0].size(1)
        hits = [_Hits(target, shard * classes, classes) for shard in place.own]
        of_target = place.total([hit.of(one - highest[:, None]) for hit, one in zip(hits, kept, strict=True)])
        probabilities = [one.div_(total[:, None]) for one in exponentials]
        ctx.save_for_backward(target, *probabilities)
        ctx.first, ctx.dtype = place.own.start * classes, logits[0].dtype
        return total.log() - of_target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        target, *probabilities = ctx.saved_tensors
        found = []
        for index, one in enumerate(probabilities):
            hits = _Hits(target, ctx.first + index * one.size(1), one.size(1))
            mine = one * gradient[:, None]
            rows = torch.arange(len(target), device=target.device)
            mine[rows, hits.index] -= torch.where(hits.are_here, gradient, 0.0)
            found.append(mine.to(ctx.dtype))
        return None, None, *found


class _Hits:
    """Which targets are classes of a shard.

    Args:
        first: class of the shard, of so many.
    """

    def __init__(self, target: Tensor, first: int, number: int) -> None:
        self.are_here = (target >= first) & (target < first + number)
        self.index = torch.where(self.are_here, target - first, 0)

    def of(self, values: Tensor) -> Tensor:
        """Return the value of each target that is here; 0 of others."""
        return torch.where(self.are_here, values.gather(1, self.index[:, None])[:, 0], 0.0)


def cross_entropy(
    input: Sharded,  # noqa: A002 - the name in torch
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return ``torch.nn.functional.cross_entropy`` of logits whose classes are cut. Collective.

    Args:
        input: (positions, classes) or (positions, classes, ...).
        target: (positions, ...), classes.

    Raises:
        UsageError: the arguments are others than these.
    """
    name, dim = "cross_entropy", 0 if input.dim() == 1 else 1
    if input.cut_dim != dim or input.blocks != 1:
        raise refused(name, f"has its classes in dimension {dim} of {tuple(input.shape)}, and {input.cut_dim} is cut")
    if weight is not None or label_smoothing or size_average is not None or reduce is not None:
        raise refused(name, "has weight, label_smoothing, size_average or reduce")
    if target.is_floating_point() or target.dim() != input.dim() - 1:
        raise refused(name, f"has targets of {tuple(target.shape)} {target.dtype}: they have to be classes")
    if target.shape != input.shape[:dim] + input.shape[dim + 1 :]:
        raise ValueError(f"cross_entropy got logits of {tuple(input.shape)} and targets of {tuple(target.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction!r} is no reduction of cross_entropy")
    counts = (target != ignore_index).flatten()
    chosen = torch.where(counts, target.flatten(), 0)
    torch._assert_async(
        ((chosen >= 0) & (chosen < input.size(dim))).all(), f"a target is no class from 0 to {input.size(dim) - 1}"
    )
    parts = [part.movedim(dim, -1).reshape(-1, part.size(dim)) for part in input.parts]
    found: Tensor = _Nats.apply(input.place, chosen, *parts)  # type: ignore[no-untyped-call]
    is_mixed = torch.is_autocast_enabled(input.device.type)  # then torch computes losses in float32
    nats = torch.where(counts, found, 0.0).to(torch.float32 if is_mixed else input.dtype)
    if reduction == "mean":
        return nats.sum() / counts.sum()
    return nats.sum() if reduction == "sum" else nats.view(target.shape)
