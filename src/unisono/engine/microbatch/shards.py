"""Tar shards as streams (`TarShards`): a sample is files in a row whose names are equal up to the first dot, as
WebDataset has them.

The standard library's ``tarfile`` takes ten times as long for each file, and does not notice an archive that was cut
between two files.
"""

from __future__ import annotations

import gzip
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike, fspath
from typing import IO, Any

import fsspec

from unisono.core.cursor import Permutation
from unisono.core.errors import RecipeError
from unisono.core.orders import digest
from unisono.core.stream_plan import ShardPiece, cut
from unisono.engine.microbatch.streams import Streams

__all__ = ["TarShards", "count_samples", "samples_of"]

BLOCK = 512
FILES = (b"0", b"\0", b"7")
"""Kinds of an entry that is a file."""
PART = re.compile(r"(?!__[^/]*__(/|$))(.*/)?[^/.]+\.[^/]*", re.DOTALL)
"""The name of a file that is a part of a sample: it has a dot, and is none of WebDataset's own (``__meta__``)."""
CHECKSUM = slice(148, 156)
"""Of a header: the sum of its bytes, with spaces in place of the checksum."""
SPACES = 8 * ord(" ")
BUFFER_BYTES = 1 << 18


class TarShards(Streams):
    """Tar files with samples, as WebDataset writes and reads them, for `unisono.Run.steps`::

        data = unisono.TarShards("s3://bucket/train-{000..127}.tar", lengths=1000, shuffle=5000, transform=decode)
        for step in run.steps(data, batch_size=256, microbatches=8, epochs=10):
            for images, labels in step:
                ...

    A sample is a dict of the bytes of its files by their endings (``jpg``, ``cls``, ``json``), with ``__key__``; decode
    them with ``transform``. All samples of all shards, in a row, are cut into M streams of the same length up to one
    sample. An epoch gives each of them once.

    Args:
        shards: paths, or URLs that fsspec opens; a single text with numbers in braces stands for many.
        lengths: samples of each shard: one number for all, or a list. None: counted at the first use, by the headers of
            the files, which is quick on a local disk and reads everything over a network.
        shuffle: 0: the order of the shards. Else the shards of a stream are shuffled in each epoch, and its samples
            within windows of this many.
        transform: called with each sample that is trained on.

    Raises:
        RecipeError: there is no shard, or there are not as many lengths as shards.
    """

    draws = False

    def __init__(
        self,
        shards: str | PathLike[str] | Iterable[str | PathLike[str]],
        *,
        lengths: int | Sequence[int] | None = None,
        shuffle: int = 1000,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(self._stream, shuffle=shuffle, transform=transform)
        given = [shards] if isinstance(shards, (str, PathLike)) else list(shards)
        self.shards = [path for one in given for path in _expanded(fspath(one))]
        if not self.shards:
            raise RecipeError("unisono.TarShards got an empty list of paths")
        self._counts = [lengths] * len(self.shards) if isinstance(lengths, int) else lengths and list(lengths)
        if self._counts is not None and len(self._counts) != len(self.shards):
            raise RecipeError(
                f"unisono.TarShards got {len(self.shards)} shards and {len(self._counts)} lengths: give the samples of "
                "each shard, one number for all, or nothing"
            )

    @property
    def counts(self) -> Sequence[int]:
        """Samples of each shard."""
        if self._counts is None:
            self._counts = [count_samples(path) for path in self.shards]
        return self._counts

    @property
    def name(self) -> str:
        # Not the folders, which may be others on another machine.
        names = [path.rpartition("/")[2] for path in self.shards]
        sign = digest([*(zlib.crc32(name.encode()) for name in names), *self.counts])
        return f"{len(names)} tar shards {sign}, shuffled within {self.shuffle}"

    @property
    def num_streams(self) -> int:
        return min(len(self.shards), sum(self.counts))

    def lengths(self, num_streams: int) -> tuple[int, ...]:
        return tuple(sum(one.stop - one.first for one in pieces) for pieces in cut(self.counts, num_streams))

    def _stream(self, stream: int, num_streams: int, epoch: int) -> Iterable[Any]:
        pieces = cut(self.counts, num_streams)[stream]
        if self.shuffle:
            order = Permutation(len(pieces), random.getrandbits(63))
            pieces = [pieces[order[place]] for place in range(len(pieces))]
        return _Pieces(self.shards, self.counts, pieces)


class _Pieces:
    """The samples of parts of shards, one after the other."""

    def __init__(self, shards: Sequence[str], counts: Sequence[int], pieces: Sequence[ShardPiece]) -> None:
        self._shards, self._counts, self._pieces = shards, counts, pieces
        self._first = 0

    def seek(self, sample: int) -> None:
        """Let the next iteration begin with this sample."""
        self._first = sample

    def __iter__(self) -> Iterator[dict[str, Any]]:
        left = self._first
        for shard, first, stop in self._pieces:
            length = stop - first
            if left >= length:
                left -= length
                continue
            yield from self._of(shard, first + left, stop)
            left = 0

    def _of(self, shard: int, first: int, stop: int) -> Iterator[dict[str, Any]]:
        number, is_last = first, stop == self._counts[shard]
        for sample in samples_of(self._shards[shard], first):
            if number == stop:
                raise self._other_length("more than", shard)
            yield sample
            number += 1
            if number == stop and not is_last:
                return
        if number < stop:
            raise self._other_length(f"{number} samples, not", shard)

    def _other_length(self, found: str, shard: int) -> RecipeError:
        return RecipeError(
            f"the shard {self._shards[shard]} has {found} {self._counts[shard]} samples, which is what lengths= says: "
            "give the true number for each shard, or leave lengths out and let them be counted"
        )


def _expanded(path: str) -> list[str]:
    """Return the paths that ``{000..127}`` stands for, and ``{a,b}``.

    Raises:
        RecipeError: the first number is larger than the last.
    """
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", path)
    if found is None:
        return [path]
    first, last, choices = found.groups()
    if not choices and int(first) > int(last):
        raise RecipeError(
            f"unisono.TarShards got {path}: {found.group()} counts from {int(first)} to {int(last)}, which names no "
            "shard; put the smaller number first"
        )
    texts = choices.split(",") if choices else [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [each for text in texts for each in _expanded(path[: found.start()] + text + path[found.end() :])]


# -- tar files ---------------------------------------------------------------------------------------


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
        raise RecipeError(f"the shard {path} is not a tar archive: no entry begins at byte {at}") from None


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
