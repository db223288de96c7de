"""Coded messages: every bit comes back, no message is longer than its bound, and none that is spoiled takes memory."""

from __future__ import annotations

import contextlib
import ctypes
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unisono.engine.exchange.coding import HEAD, LEAST_BYTES, CodingError, decode, encode, most_bytes

zstandard = pytest.importorskip("zstandard")

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
STRANGE = {
    2: [0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFF81, 0x0001, 0x8001, 0x007F, 0xFFFF],
    4: [0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFF812345, 0x00000001, 0x80000001, 0x007FFFFF, 0xFFFFFFFF],
    8: [0x8000000000000000, 0x7FF0000000000001, 0xFFF8DEADBEEF0000, 1, 0x8000000000000001, 0xFFFFFFFFFFFFFFFF],
}
"""-0, infinities, quiet and signalling NaNs with payloads, denormals, all ones."""
widths = st.sampled_from([2, 4, 8])
seeds = st.integers(0, 2**31)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def numbers(seed: int, count: int, width: int, kind: str) -> Tensor:
    """(count * width,) uint8: gradients, any bits at all, or zeros; with strange numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (count * width,), generator=generator, dtype=torch.uint8)
    if kind == "gradients":
        data = bytes_of((1e-3 * torch.randn(count, generator=generator)).to(DTYPES[width])).clone()
    elif kind == "zeros":
        data.zero_()
    strange = b"".join(each.to_bytes(width, "little") for each in STRANGE[width])[: data.numel()]
    data[: len(strange)] = torch.frombuffer(bytearray(strange), dtype=torch.uint8) if strange else data[:0]
    return data


def sent(data: Tensor, width: int, earlier: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A message, and what it gives in a room of the bound, in which something else lay."""
    message = encode(data, width, earlier)
    assert message.numel() <= most_bytes(data.numel())
    room = torch.full((most_bytes(data.numel()),), 0xA5, dtype=torch.uint8)
    room[: message.numel()] = message
    out = torch.full_like(data, 0x5A)
    assert decode(room, out, earlier) == message.numel()
    return message, out


@given(seeds, st.integers(0, 5000), widths, st.sampled_from(["gradients", "any", "zeros"]), st.integers(0, 7))
def test_all_bits_come_back(seed: int, count: int, width: int, kind: str, rest: int) -> None:
    """NaNs with their payloads, denormals and -0 among them; also where numbers do not end with the data."""
    data = torch.cat([numbers(seed, count, width, kind), torch.arange(rest, dtype=torch.uint8)])
    before = data.clone()
    _, out = sent(data, width)
    assert same(out, before)
    assert same(data, before), "the data were changed"


@given(seeds, st.integers(0, 5000), widths, st.integers(0, 7), st.sampled_from(["gradients", "any"]))
def test_a_change_gives_the_new_value(seed: int, count: int, width: int, rest: int, kind: str) -> None:
    earlier = torch.cat([numbers(seed, count, width, kind), torch.arange(rest, dtype=torch.uint8)])
    data = earlier.clone()
    data[seed % 3 :: 3] += 1
    _, out = sent(data, width, earlier)
    assert same(out, data)
    message = encode(data, width, earlier)
    decode(message, earlier, earlier)  # in place
    assert same(earlier, data)


@given(seeds, widths, st.integers(1, 7))
def test_numbers_may_lie_anywhere(seed: int, width: int, shift: int) -> None:
    data = numbers(seed, 3000, width, "any")[shift:]
    message = encode(data, width, data.clone())
    room = torch.empty(data.numel() + shift, dtype=torch.uint8)[shift:]
    decode(message, room, data)
    assert same(room, data)


def test_gradients_and_changes_of_parameters_get_smaller() -> None:
    for width, most in ((4, 0.86), (2, 0.72), (8, 0.95)):
        message, _ = sent(numbers(1, 40_000, width, "gradients"), width)
        assert message.numel() <= most * 40_000 * width
    earlier = torch.randn(40_000, generator=torch.Generator().manual_seed(1))
    later = earlier * (1 - 1e-4) - 1e-4 * torch.randn(40_000, generator=torch.Generator().manual_seed(2))
    message, _ = sent(bytes_of(later), 4, bytes_of(earlier))
    assert message.numel() <= 0.72 * 4 * 40_000
    noise = torch.randint(0, 256, (160_000,), dtype=torch.uint8)
    assert encode(noise, 4).numel() <= most_bytes(160_000)


@pytest.mark.parametrize("nbytes", [0, 1, 3, LEAST_BYTES - 1])
def test_little_travels_as_it_is(nbytes: int) -> None:
    message, out = sent(torch.zeros(nbytes, dtype=torch.uint8), 4)
    assert (message.numel(), out.tolist()) == (most_bytes(nbytes), [0] * nbytes)


def test_a_change_of_other_values_is_refused() -> None:
    earlier = numbers(1, 3000, 4, "gradients")
    message = encode(numbers(2, 3000, 4, "gradients"), 4, earlier)
    other = earlier.clone()
    other[4000] ^= 1
    for wrong in (other, None):
        with pytest.raises(CodingError):
            decode(message, torch.empty_like(earlier), wrong)


# -- messages that nobody of ours has made -------------------------------------------------------------


@given(st.binary(max_size=400), st.integers(0, 400), st.booleans())
def test_any_bytes_are_decoded_or_refused(data: bytes, nbytes: int, is_change: bool) -> None:
    """Nothing else is raised, and nothing is written beside the memory."""
    memory = torch.full((nbytes + 64,), 7, dtype=torch.uint8)
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    earlier = torch.zeros(nbytes, dtype=torch.uint8) if is_change else None
    with contextlib.suppress(CodingError):
        decode(message, memory[32 : 32 + nbytes], earlier)
    assert memory[:32].tolist() + memory[32 + nbytes :].tolist() == [7] * 64


@given(seeds, st.data(), widths)
def test_a_spoiled_message_is_decoded_or_refused(seed: int, data: st.DataObject, width: int) -> None:
    content = numbers(seed, 3000, width, "gradients")
    message = encode(content, width).clone()
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, message.numel() - 1))] = data.draw(st.integers(0, 255))
    memory = torch.full((content.numel() + 64,), 7, dtype=torch.uint8)
    with contextlib.suppress(CodingError):
        decode(message[: data.draw(st.integers(0, message.numel()))], memory[32:-32])
    assert memory[:32].tolist() + memory[-32:].tolist() == [7] * 64


def hand_made(nbytes: int, *planes: bytes, width: int = 4) -> Tensor:
    """A message of these compressed planes."""
    said = HEAD.pack(width, 0, 0) + struct.pack(f"<{width}I", *map(len, planes))
    return torch.frombuffer(bytearray((said + b"".join(planes)).ljust(most_bytes(nbytes), b"\0")), dtype=torch.uint8)


def test_a_plane_cannot_grow() -> None:
    """One that says that it is large is not opened; one that says nothing, or lies, either."""
    nbytes = 40_000
    right = zstandard.compress(bytes(nbytes // 4))
    decode(hand_made(nbytes, right, right, right, right), out := torch.empty(nbytes, dtype=torch.uint8))
    assert not out.any()
    huge = zstandard.compress(bytes(1 << 28))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(nbytes // 4))
    longer = bytearray(zstandard.compress(bytes(range(256)) * 200))
    for plane in (huge, silent, bytes(longer), right + right, right[:-1], b"", b"\x28\xb5\x2f\xfd"):
        with pytest.raises(CodingError):
            decode(hand_made(nbytes, right, plane or b"\0", right, right), torch.empty(nbytes, dtype=torch.uint8))


def test_what_is_behind_a_message_is_not_read() -> None:
    """A plane that would lie beyond the longest message is refused, whatever lies there."""
    nbytes = 40_000
    far = HEAD.pack(4, 0, 0) + struct.pack("<4I", 0, 0, 0, 1 << 31)
    room = (ctypes.c_ubyte * most_bytes(nbytes))(*far)
    message = torch.frombuffer(room, dtype=torch.uint8)
    with pytest.raises(CodingError, match=f"continues to byte {1 << 31}|continues"):
        decode(message, torch.empty(nbytes, dtype=torch.uint8))
