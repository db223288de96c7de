"""Samples in tar files, as WebDataset has them: files in a row whose names are equal up to the first dot.

The standard library's ``tarfile`` takes ten times as long for each file, and does not notice an archive that was cut
between two files.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from typing import IO, Any

import fsspec

from unisono.core.errors import RecipeError

__all__ = ["count_samples", "samples_of"]

BLOCK = 512
FILES = (b"0", b"\0", b"7")
"""Kinds of an entry that is a file."""
PART = re.compile(r"(?!__[^/]*__(/|$))(.*/)?[^/.]+\.[^/]*", re.DOTALL)
"""The name of a file that is a part of a sample: it has a dot, and is none of WebDataset's own (``__meta__``)."""
CHECKSUM = slice(148, 156)
"""Of a header: the sum of its bytes, with spaces in place of the checksum."""
SPACES = 8 * ord(" ")
BUFFER_BYTES = 1 << 18


def samples_of(path: str, first: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the samples of a shard from sample ``first`` on: the bytes of each file by its ending, and ``__key__``.

    Raises:
        RecipeError: the shard cannot be read, or was cut.
    """
    sample: dict[str, Any] = {}
    number = -1
    with _opened(path) as file:
        for name, size, at in _entries(file, path):
            key, ending = _split(name)
            if number < 0 or key != sample["__key__"]:
                if number >= first:
                    yield sample
                number, sample = number + 1, {"__key__": key}
            if number < first:
                _pass_over(file, size)
                continue
            if ending in sample:
                raise RecipeError(
                    f"the shard {path} has two files {name!r} in one sample (the second at byte {at}): the names of a "
                    "sample are equal up to the first dot, and differ after it"
                )
            sample[ending] = _content(file, size, path, at)
    if number >= first:
        yield sample


def count_samples(path: str) -> int:
    """Return the number of samples of a shard: reads the headers of its files, and passes over the rest.

    Raises:
        RecipeError: the shard cannot be read, or was cut.
    """
    number, last = 0, None
    with _opened(path) as file:
        for name, size, _ in _entries(file, path):
            key = _split(name)[0]
            number += key != last
            last = key
            _pass_over(file, size)
    return number


def _opened(path: str) -> IO[bytes]:
    try:
        file = open(path, "rb", BUFFER_BYTES) if "://" not in path and "::" not in path else fsspec.open(path).open()  # noqa: SIM115
    except Exception as error:
        raise RecipeError(
            f"the shard {path} cannot be opened ({type(error).__name__}: {error}). Every worker reads it by this path "
            "or URL; is it there, and on each machine?"
        ) from error
    return gzip.open(file) if path.endswith((".gz", ".tgz")) else file  # type: ignore[return-value]


def _entries(file: IO[bytes], path: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, bytes, position) of each file that is a part of a sample. Whoever gets it reads the bytes, or passes
    over them with those that fill up the block.
    """
    name = ""
    at = 0
    while True:
        header = _exactly(file, BLOCK, path, at)
        if header == bytes(BLOCK):
            return
        _check_header(header, path, at)
        size = _number(header[124:136], path, at)
        kind = header[156:157]
        if kind in (b"L", b"x"):  # the name of the next file, where it is long
            content = _content(file, size, path, at)
            name = _text(content) if kind == b"L" else _of_pax(content) or name
        elif kind in FILES:
            prefix = _text(header[345:500]) if header[257:262] == b"ustar" and header[263:265] == b"00" else ""
            own = _text(header[:100])
            whole = name or (f"{prefix}/{own}" if prefix else own)
            if PART.fullmatch(whole):
                yield whole, size, at
            else:
                _pass_over(file, size)
            name = ""
        else:  # a directory, a link, a comment
            _pass_over(file, size)
            name = ""
        at += BLOCK + size + -size % BLOCK


def _check_header(header: bytes, path: str, at: int) -> None:
    """Raise RecipeError if a header does not have its own checksum: its size or its name may be wrong."""
    given, rest = _number(header[CHECKSUM], path, at), header[: CHECKSUM.start] + header[CHECKSUM.stop :]
    found = sum(rest) + SPACES
    if given != found and given != found - 256 * sum(byte > 127 for byte in rest):  # old writers count signed bytes
        raise RecipeError(
            f"the shard {path} is damaged: the header of {_text(header[:100])!r} at byte {at} has the checksum "
            f"{found:o}, and says {given:o}, so its size or its name may be wrong. Copy or write it again"
        )


def _pass_over(file: IO[bytes], size: int) -> None:
    """Pass over the content of a file of ``size`` bytes, and what fills up its last block."""
    if size:
        file.seek(size + -size % BLOCK, 1)


def _content(file: IO[bytes], size: int, path: str, at: int) -> bytes:
    """Return the content of a file, and pass over what fills up its last block."""
    return _exactly(file, size + -size % BLOCK, path, at)[:size]


def _exactly(file: IO[bytes], size: int, path: str, at: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise RecipeError(
            f"the shard {path} was cut: {size} bytes are missing or incomplete after byte {at}, and an archive ends "
            "with a block of zeros. Copy or write it again"
        )
    return data


def _number(field: bytes, path: str, at: int) -> int:
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.rstrip(b"\0 ") or b"0", 8)
    except ValueError:
        raise RecipeError(f"the shard {path} is no tar archive: byte {at} begins no entry") from None


def _of_pax(content: bytes) -> str:
    """Return the name in an extended header: records ``length key=value``."""
    while content:
        length, _, rest = content.partition(b" ")
        key, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        if key == b"path":
            return value.decode()
        content = content[int(length) :]
    return ""


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")


def _split(name: str) -> tuple[str, str]:
    """Return (key, ending) of a file: ``a/b.seg.png`` is ``seg.png`` of the sample ``a/b``."""
    folder, slash, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return folder + slash + stem, ending.lower()
