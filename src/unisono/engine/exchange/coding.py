"""Lossless coding of numbers that cross a slow link: fewer bytes, the same bits.

The bytes of floating-point numbers are not equally random. Gradients that lie beside each other have exponents of
nearly the same size, and mantissas that are noise; a parameter and its next value agree in sign, exponent and the upper
bits of the mantissa. So the numbers are cut into **planes**: all lowest bytes, all second bytes, and so on. Numbers are
turned left by one bit before, so that the exponent of float32 or bfloat16 fills the uppermost plane, with the sign in
the lowest one; numbers whose earlier value the receiver has become the exclusive or of both. Planes that a sample shows
to be compressible are compressed by zstandard, the others travel as they are.

A message says by itself how it is coded::

    head    1 byte   width of the numbers in bytes: 2, 4 or 8; 0: the data follow as they are
            1 byte   1: the exclusive or with the earlier value; 0: the numbers, turned
            2 bytes  0
    sizes   4 bytes for each plane, the lowest first: of the compressed plane; 0: it is as it is
    sum     8 bytes  of the earlier numbers, where there are any: those of the receiver have to be the same
    planes, and what is left of the data where the width does not divide them

Both ends know how long the data are, so a receiver has a bound for the message (`most_bytes`) before it comes. What is
decoded fills exactly these data, or is refused: a compressed plane that says it has another size is never opened.

Pure: bytes in, bytes out.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import struct
import threading
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["CodingError", "can_code", "decode", "encode", "most_bytes"]

HEAD: Final = struct.Struct("<BBH")
SUM_BYTES: Final = 8
LEAST_BYTES: Final = 2048
"""Less than this travels as it is."""
SAMPLE_BYTES: Final = 1024
"""Of a sample of a plane, which is taken in so many pieces:"""
SAMPLES: Final = 4
WORTH: Final = 0.95
"""A plane is compressed if its sample shrinks at least to this share. (Mantissas of gradients reach 0.97, which costs
more time than all that the exponents cost.)"""
_NUMBERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_local = threading.local()


class CodingError(ValueError):
    """A message is none of `encode`."""


def can_code() -> bool:
    """Return whether this process has the package zstandard."""
    return importlib.util.find_spec("zstandard") is not None  # imported with the first message


def most_bytes(nbytes: int) -> int:
    """Return how long the message of so many bytes of data is at most."""
    return HEAD.size + nbytes


def encode(data: Tensor, width: int, earlier: Tensor | None = None) -> Tensor:
    """Return a message: (at most `most_bytes`,) uint8.

    Args:
        data: (n,) uint8.
        width: bytes of the numbers that most of the data are; another one than 2, 4 or 8: they are not numbers.
        earlier: (n,) uint8, an earlier value of the same numbers, which the receiver has.
    """
    nbytes = data.numel()
    if width not in _NUMBERS or nbytes < LEAST_BYTES:
        return _as_it_is(data)
    stop = nbytes - nbytes % width
    numbers, check = _aligned(data[:stop], width).view(_NUMBERS[width]), b""
    if earlier is not None:
        before = _aligned(earlier[:stop], width).view(_NUMBERS[width])
        numbers, check = numbers ^ before, _sum_of(before)
    else:
        numbers = (numbers << 1).sub_(numbers >> (8 * width - 1))  # the shifted sign is 0 or -1
    turned, length = numbers.view(torch.uint8), stop // width
    start = HEAD.size + 4 * width + len(check)
    message = torch.empty(start + nbytes, dtype=torch.uint8)
    sizes = [0] * width
    for number in range(width):
        plane = turned[number::width]
        packed = _compressed(plane.contiguous()) if _is_worth(plane) else b""
        if packed and len(packed) < length:
            sizes[number] = len(packed)
            ctypes.memmove(message.data_ptr() + start, packed, len(packed))
            start += len(packed)
        else:
            message[start : start + length].copy_(plane)
            start += length
    total = start + nbytes - stop
    if total > most_bytes(nbytes):
        return _as_it_is(data)
    message[start:total].copy_(data[stop:])
    head = HEAD.pack(width, earlier is not None, 0) + struct.pack(f"<{width}I", *sizes) + check
    ctypes.memmove(message.data_ptr(), head, len(head))
    return message[:total]


def decode(message: Tensor, out: Tensor, earlier: Tensor | None = None) -> int:
    """Write the data of a message to ``out``, and return the length of the message.

    Args:
        message: (at least that length,) uint8; what is behind it is not read.
        out: (n,) uint8, as long as the data were; it may be ``earlier`` itself.
        earlier: as in `encode`; None: there is none.

    Raises:
        CodingError: this is no message of so many bytes of data. ``out`` is arbitrary.
    """
    nbytes, most = out.numel(), min(message.numel(), most_bytes(out.numel()))
    width: int
    width, is_change, _ = HEAD.unpack(_bytes(message, 0, HEAD.size, most))
    if not width:
        out.copy_(_part(message, HEAD.size, HEAD.size + nbytes, most))
        return most_bytes(nbytes)
    if width not in _NUMBERS or is_change not in (0, 1) or (is_change and earlier is None):
        raise CodingError(f"a message begins with {width} and {is_change}, which nothing that was asked for does")
    start = HEAD.size + 4 * width
    sizes = struct.unpack(f"<{width}I", _bytes(message, HEAD.size, start, most))
    stop = nbytes - nbytes % width
    numbers = torch.empty(stop // width, dtype=_NUMBERS[width])
    if is_change:
        assert earlier is not None  # looked at above
        before, start = _aligned(earlier[:stop], width).view(numbers.dtype), start + SUM_BYTES
        if _bytes(message, start - SUM_BYTES, start, most) != _sum_of(before):
            raise CodingError("it is the change of numbers that this member has otherwise")
    turned = numbers.view(torch.uint8)
    for number, size in enumerate(sizes):
        end = start + (size or stop // width)
        plane = _part(message, start, end, most)
        turned[number::width].copy_(_opened(plane, stop // width) if size else plane)
        start = end
    if is_change:
        numbers ^= before
    else:
        signs = numbers << (8 * width - 1)
        numbers.bitwise_right_shift_(1).bitwise_and_(torch.iinfo(numbers.dtype).max).bitwise_or_(signs)
    end = start + nbytes - stop
    rest = _part(message, start, end, most)
    out[:stop].copy_(turned)
    out[stop:].copy_(rest)
    return end


def _as_it_is(data: Tensor) -> Tensor:
    message = torch.empty(most_bytes(data.numel()), dtype=torch.uint8)
    ctypes.memmove(message.data_ptr(), HEAD.pack(0, 0, 0), HEAD.size)
    message[HEAD.size :].copy_(data)
    return message


def _sum_of(numbers: Tensor) -> bytes:
    return (int(numbers.sum()) & 0xFFFFFFFFFFFFFFFF).to_bytes(SUM_BYTES, "little")


def _aligned(data: Tensor, width: int) -> Tensor:
    """Return these bytes where numbers can lie."""
    return data.clone() if data.storage_offset() % width or data.data_ptr() % width else data


def _is_worth(plane: Tensor) -> bool:
    """Return whether a plane is probably made smaller by compressing it."""
    length = plane.numel()
    if length <= SAMPLES * SAMPLE_BYTES:
        return True
    starts = [(length - SAMPLE_BYTES) * number // (SAMPLES - 1) for number in range(SAMPLES)]
    sample = torch.cat([plane[start : start + SAMPLE_BYTES] for start in starts])
    return len(_compressed(sample)) <= WORTH * sample.numel()


def _compressed(plane: Tensor) -> bytes:
    """Return (n,) uint8, in one run, compressed."""
    found: bytes = _tools()[0].compress(_view(plane))
    return found


def _opened(packed: Tensor, nbytes: int) -> Tensor:
    """Return a compressed plane as it was: (nbytes,) uint8."""
    zstandard, view = _zstandard(), _view(packed)
    try:
        said = zstandard.frame_content_size(view)
        if said != nbytes:  # before memory is taken for it
            raise CodingError(f"a compressed plane says that it has {said} bytes, and this one has {nbytes}")
        found: bytes = _tools()[1].decompress(view, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as failure:
        raise CodingError(f"a plane of a message cannot be opened: {failure}") from failure
    if len(found) != nbytes:
        raise CodingError(f"a compressed plane has {len(found)} bytes instead of {nbytes}")
    return torch.frombuffer(bytearray(found), dtype=torch.uint8)


def _tools() -> tuple[Any, Any]:
    """Return this thread's (compressor, decompressor)."""
    if not hasattr(_local, "tools"):
        zstandard = _zstandard()
        # Hardly any search for repetitions: exponents have none, and what is nearly all zeros is found all the same.
        fast = zstandard.ZstdCompressionParameters(
            window_log=17, hash_log=12, chain_log=6, search_log=1, min_match=7, strategy=zstandard.STRATEGY_FAST
        )
        _local.tools = zstandard.ZstdCompressor(compression_params=fast), zstandard.ZstdDecompressor()
    found: tuple[Any, Any] = _local.tools
    return found


@functools.cache
def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as missing:
        raise CodingError("this process does not have the package zstandard") from missing


def _view(data: Tensor) -> Any:
    """Return a run of bytes as the buffer that Python's libraries take."""
    return (ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())


def _part(message: Tensor, start: int, end: int, most: int) -> Tensor:
    if end > most:
        raise CodingError(f"a message continues to byte {end}, but may have {most} at most")
    return message[start:end]


def _bytes(message: Tensor, start: int, end: int, most: int) -> bytes:
    return ctypes.string_at(_part(message, start, end, most).data_ptr(), end - start)
