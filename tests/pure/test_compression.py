"""Compressed tensors: bits that depend on values alone, a bounded loss, and errors that come back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unisono.engine.exchange.flat import ROW_BYTES
from unisono.strategies.local.compression import BLOCK, LARGEST_SCALE, TOGETHER, compress, compressed_bytes, decompress

sizes = st.one_of(st.integers(0, 3 * BLOCK + 1), st.sampled_from([TOGETHER - 1, TOGETHER, TOGETHER + BLOCK + 3]))


def random(numel: int, seed: int, spread: float = 3.0) -> Tensor:
    """Values of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randn(numel, generator=generator) * spread
    return torch.randn(numel, generator=generator) * 2.0**exponent


def restored(compressed: Tensor, numel: int) -> Tensor:
    return decompress(compressed, torch.full((numel,), math.nan))


def by_hand(values: list[float]) -> list[float]:
    """One block, number by number, in float32."""
    single = [torch.tensor(value) for value in values]
    scale = min(max(abs(value) for value in single) / 127, torch.tensor(LARGEST_SCALE))
    if scale < 2.0**-126:
        return [0.0] * len(values)
    return [float(torch.round(value / scale) * scale) for value in single]


def test_a_block_is_a_row_of_a_slot() -> None:
    assert BLOCK * torch.float32.itemsize == ROW_BYTES


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(0, 1000))
def test_a_value_is_lost_by_half_a_scale_at_most(numel: int, seed: int) -> None:
    value = random(numel, seed)
    back = restored(compress(value), numel)
    for start in range(0, numel, BLOCK):
        part, near = value[start : start + BLOCK], back[start : start + BLOCK]
        assert bool(((part - near).abs() <= part.abs().max() / 127 * 0.50001).all())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=BLOCK))
def test_a_block_is_what_it_is_by_hand(values: list[float]) -> None:
    assert restored(compress(torch.tensor(values)), len(values)).tolist() == by_hand(values)


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(0, 1000))
def test_what_is_lost_is_kept_and_comes_back(numel: int, seed: int) -> None:
    value, error = random(numel, seed, spread=1.0), random(numel, seed + 1, spread=1.0) / 100
    whole = value + error
    back = restored(compress(value, error), numel)
    assert torch.equal(error, whole - back)


def test_over_many_rounds_the_mean_of_what_arrives_is_the_mean_of_what_was_given() -> None:
    """Also for values that are much smaller than the scale of their block, which one round makes zero."""
    value = random(4 * BLOCK, 0)
    value[::BLOCK] = 1e3
    error, arrived = torch.zeros_like(value), torch.zeros(len(value), dtype=torch.float64)
    rounds = 400
    for _ in range(rounds):
        arrived += restored(compress(value, error), len(value))
    scale = value.view(-1, BLOCK).abs().amax(dim=1, keepdim=True) / 127
    assert bool(((arrived / rounds - value).abs().view(-1, BLOCK) <= scale / rounds).all())
    assert not torch.equal(restored(compress(value), len(value)), value)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 1000))
def test_bits_do_not_depend_on_where_a_tensor_is_cut_between_blocks(blocks: int, cut: int, seed: int) -> None:
    numel = blocks * BLOCK - 5
    at = min(cut, blocks - 1) * BLOCK
    value, error = random(numel, seed), random(numel, seed + 1)
    apart = error.clone()
    left, right = compress(value[:at], apart[:at]), compress(value[at:], apart[at:])
    together = compress(value, error)
    assert torch.equal(error.view(torch.int32), apart.view(torch.int32))
    pieces = torch.cat([restored(left, at), restored(right, numel - at)])
    assert torch.equal(restored(together, numel).view(torch.int32), pieces.view(torch.int32))


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    value = random(5 * TOGETHER + 77, 1)
    errors, found = [torch.zeros_like(value) for _ in range(2)], []
    before = torch.get_num_threads()
    try:
        for threads, error in zip((1, 4), errors, strict=True):
            torch.set_num_threads(threads)
            found.append(compress(value, error))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    assert torch.equal(errors[0].view(torch.int32), errors[1].view(torch.int32))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_is_seen_once_and_spares_its_neighbours(bad: float) -> None:
    value, error = random(3 * BLOCK, 2), torch.zeros(3 * BLOCK)
    value[BLOCK + 7] = bad
    back = restored(compress(value, error), 3 * BLOCK)
    assert bool(back[BLOCK : 2 * BLOCK].isnan().all())
    assert bool(back[:BLOCK].isfinite().all())
    assert bool(back[2 * BLOCK :].isfinite().all())
    assert bool(error.isfinite().all())


def test_the_largest_scale_is_the_largest_that_stays_finite() -> None:
    scale = torch.tensor(LARGEST_SCALE)
    assert float(scale) == LARGEST_SCALE
    assert bool((scale * 127).isfinite())
    assert bool((torch.nextafter(scale, torch.tensor(math.inf)) * 127).isinf())


def test_the_largest_and_the_smallest_numbers_stay_finite() -> None:
    largest = torch.finfo(torch.float32).max
    for value in (torch.tensor([largest, -largest, 1.0]), torch.tensor([1e-45, -1e-40, 0.0]), torch.zeros(3)):
        error = torch.zeros(3)
        back = restored(compress(value, error), 3)
        assert bool(back.isfinite().all())
        assert torch.equal(error, value - back)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_computed_with_in_float32(dtype: torch.dtype) -> None:
    value = random(300, 3, spread=1.0).to(dtype)
    assert torch.equal(compress(value.view(10, 30)), compress(value.to(torch.float32)))
    out = torch.empty(300, dtype=dtype)
    assert torch.equal(decompress(compress(value), out), restored(compress(value), 300).to(dtype))


def test_the_memory_is_a_quarter_and_may_lie_anywhere() -> None:
    value = random(1000, 4)
    assert compressed_bytes(1000) == 4 * 8 + 1000
    memory = torch.zeros(1 + compressed_bytes(1000), dtype=torch.uint8)
    memory[1:] = compress(value)
    assert torch.equal(restored(memory[1:], 1000), restored(compress(value), 1000))


def test_memory_of_another_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="300 values take 312 bytes"):
        decompress(torch.zeros(311, dtype=torch.uint8), torch.empty(300))
