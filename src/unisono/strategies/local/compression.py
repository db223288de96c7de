"""Numbers of 32 bits in 8: by block, with error feedback. Four times fewer bytes, where a delta travels.

A **block** is 128 neighbours of a tensor that is laid out flat. It has one float32 **scale**, ``largest / 127``, and
each of its values is kept as the nearest multiple of that, a **code** between -127 and 127. What is lost by it, at most
half a scale for each value, is the **error**, and belongs to whoever compresses: it is added to what is compressed
next, so over time nothing is lost (error feedback: Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy
et al., "Error Feedback Fixes SignSGD", 2019).

All of it is elementwise arithmetic of IEEE float32 (a maximum, a division, a rounding to even, a product, a
difference), and blocks do not know of each other. So the bits depend on the values alone: not on who compresses, the
number of threads, or how a tensor is cut, as long as it is cut between blocks.

A compressed tensor is ``scales (float32) | codes (int8)``, one run of bytes that can be sent, kept in a checkpoint, and
compared by its digest.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BLOCK", "compress", "compressed_bytes", "decompress"]

BLOCK = 128
"""Values with one scale: 1.03 bytes for each value. One row of a slot (`unisono.engine.exchange.flat.ROW_BYTES`)."""

LARGEST = 127
"""Of the codes. Not -128: codes and their negatives are then alike."""

LARGEST_SCALE = 8454659 * 2.0**98
"""The largest float32 that, multiplied by the largest code, is still finite."""

SMALLEST_SCALE = 2.0**-126
"""Below it numbers are subnormal, and processors may take them for zero."""

TOGETHER = 1 << 16
"""Values that are compressed together, a multiple of `BLOCK`: what is computed with them stays in the cache."""


def compressed_bytes(numel: int) -> int:
    """Return the bytes of a compressed tensor with so many values."""
    return 4 * _num_blocks(numel) + numel


def compress(value: Tensor, error: Tensor | None = None) -> Tensor:
    """Return ``value + error`` compressed, and keep in ``error`` what is lost by that.

    Where a value of a block is not finite, the whole block is NaN when it is decompressed, and its error is zero: what
    is broken is seen once, and does not come back. Blocks whose scale would be subnormal are zero; the error keeps
    them.

    Args:
        value: of any floating dtype and shape; computed with in float32. Not modified.
        error: float32, contiguous, with as many values; replaced by the new error. None: the loss is not kept.

    Returns:
        (`compressed_bytes`,) uint8, on the device of ``value``.
    """
    flat = value.detach().reshape(-1)
    numel = flat.numel()
    out = torch.empty(compressed_bytes(numel), dtype=torch.uint8, device=value.device)
    scales, codes = _parts(out, numel)
    errors = error.detach().view(-1) if error is not None else None
    for start, stop in _cuts(numel):
        given = flat[start:stop].to(torch.float32)
        whole = given.clone() if errors is None else given + errors[start:stop]
        rows = _blocks(whole)
        largest = rows.abs().amax(dim=1)
        broken = ~largest.isfinite()
        scale = largest.div_(LARGEST).clamp_(max=LARGEST_SCALE)
        scale.masked_fill_(scale < SMALLEST_SCALE, 0.0)
        divisor = torch.where((scale > 0.0) & ~broken, scale, torch.inf)
        code = torch.div(rows, divisor[:, None]).round_().nan_to_num_(0.0, 0.0, 0.0)
        codes[start:stop] = code.view(-1)[: stop - start].to(torch.int8)
        scale.masked_fill_(broken, torch.nan)
        first = start // BLOCK
        scales[4 * first : 4 * (first + len(scale))] = scale.view(torch.uint8)
        if errors is not None:
            lost = rows.sub_(code.mul_(scale[:, None])).masked_fill_(broken[:, None], 0.0)
            errors[start:stop] = lost.view(-1)[: stop - start]
    return out


def decompress(compressed: Tensor, out: Tensor) -> Tensor:
    """Write what `compress` has returned to ``out``, and return that.

    Args:
        compressed: (`compressed_bytes` of the number of values,) uint8. Need not be aligned.
        out: of any floating dtype, contiguous, with as many values.

    Raises:
        ValueError: ``compressed`` is not that of so many values.
    """
    numel = out.numel()
    if compressed.numel() != compressed_bytes(numel):
        raise ValueError(
            f"{numel} values take {compressed_bytes(numel)} bytes when compressed; got {compressed.numel()}"
        )
    scales, codes = _parts(compressed, numel)
    flat = out.view(-1)
    for start, stop in _cuts(numel):
        rows = _blocks(codes[start:stop].to(torch.float32))
        first = start // BLOCK
        scale = scales[4 * first : 4 * (first + len(rows))].clone().view(torch.float32)
        flat[start:stop] = rows.mul_(scale[:, None]).view(-1)[: stop - start]
    return out


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _parts(memory: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the scales, as bytes, and the codes."""
    end = 4 * _num_blocks(numel)
    return memory[:end], memory[end : end + numel].view(torch.int8)


def _cuts(numel: int) -> list[tuple[int, int]]:
    return [(start, min(start + TOGETHER, numel)) for start in range(0, numel, TOGETHER)]


def _blocks(values: Tensor) -> Tensor:
    """Return values as rows of one block each; the last one is filled with zeros."""
    spare = -len(values) % BLOCK
    filled = torch.nn.functional.pad(values, (0, spare)) if spare else values
    return filled.view(-1, BLOCK)
