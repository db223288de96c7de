"""Files of a checkpoint: how they are written, checked, listed and removed.

    RUN/checkpoints/step-0000000120/
        part-00000-of-00002.safetensors     tensors, whole; every part is a safetensors file of its own
        part-00001-of-00002.safetensors
        skeleton.msgpack                    settings and where each tensor belongs (`unisono.engine.state.packing`)
        manifest.json                       step, recipe, every tensor, every file with its size and checksums

Parts are written by different processes into one directory with a name that begins with a dot. When all of them are on
the disk, one process writes the manifest, and renames the directory into place. Every file is synchronized before the
manifest, the manifest before the rename, and the parent after it; those above the parent once in a run, before the
first rename. So a directory under its final name was complete when it got that name, and every directory with a dot or
without a manifest is garbage of a process that was killed, with two exceptions: ``.replaced`` is the earlier checkpoint
of the same step, and gets its name back if its replacement was not completed; ``.abandoned`` is a newer checkpoint that
a run keeps when it goes back to an older one, until it has written a checkpoint of its own.

Checksums (CRC-32) are those of the bytes in memory, not of the bytes read back from a file, one for every 16 MiB: files
are checked by several threads, and damage is reported with its position in the file. Checksums find errors of disks and
copies; they do not resist an adversary.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import reduce
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import msgspec

from unisono.core.errors import CheckpointError
from unisono.system.owned import open_regular, read_regular

__all__ = [
    "BLOCK_BYTES",
    "FOLDER",
    "KINDS",
    "MANIFEST",
    "SKELETON",
    "CheckpointDiffers",
    "Entry",
    "FileFacts",
    "Manifest",
    "Stream",
    "Threads",
    "candidates",
    "complete",
    "encode_header",
    "find",
    "leave_only",
    "memory_at",
    "move_away",
    "parse_manifest",
    "part_name",
    "part_names",
    "partial_name",
    "publish",
    "read_blocks",
    "read_manifest",
    "read_some",
    "remove",
    "remove_abandoned",
    "remove_part",
    "remove_partials",
    "step_name",
    "step_of",
    "synchronize",
    "synchronize_above",
    "take_over",
    "verify",
    "write_file",
    "write_manifest",
]

P = ParamSpec("P")
T = TypeVar("T")

FOLDER: Final = "checkpoints"
MANIFEST: Final = "manifest.json"
SKELETON: Final = "skeleton.msgpack"
FORMAT: Final = 1
BLOCK_BYTES: Final = 1 << 24
HEADER_ALIGNMENT: Final = 64
MAX_THREADS: Final = 4
MOST_MANIFEST: Final = 256 << 20
MOST_SKELETON: Final = 1 << 30
MOST_HEADER: Final = 100 << 20
"""Of a safetensors file; the library's own limit."""
MOST_DIMENSIONS: Final = 64
"""Of a tensor of torch."""
MOST_ITEM: Final = 16
"""Bytes of a value of any dtype."""

_PART: Final = re.compile(r"part-\d{5}-of-\d{5}\.|skeleton\.msgpack")
_ABANDONED: Final = ".abandoned"
_REPLACED: Final = ".replaced"

KINDS: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "int16": "I16",
    "uint16": "U16", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32",
    "complex64": "C64", "float64": "F64", "int64": "I64", "uint64": "U64",
}  # fmt: skip
"""By dtype, as torch calls it, its name in safetensors files; in the order in which that library ranks them."""
_ITEM_BYTES: Final = {dtype: int("".join(re.findall(r"\d+", kind)[:1]) or 8) // 8 for dtype, kind in KINDS.items()}
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Threads(ThreadPoolExecutor):
    """A thread pool whose jobs the caller does when the interpreter exits: from then on no thread takes one."""

    _is_closed = False

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_closed = True
        super().shutdown(wait, cancel_futures=cancel_futures)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            if self._is_closed:
                raise
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as failure:
            done.set_exception(failure)
        return done


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    """As torch calls it: ``float32``."""
    shape: list[int]
    part: int
    start: int
    """Its first byte in the part, counted from the end of the part's header."""
    num_bytes: int


class FileFacts(msgspec.Struct, frozen=True):
    """Expected size and checksums of a file."""

    num_bytes: int
    crc32: list[int]
    """Of each `BLOCK_BYTES` of it."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a checkpoint. Written last."""

    format: int = FORMAT
    step: int
    """Steps of the run that are done."""
    phase: int
    """Which call of ``run.steps``, from 0."""
    phase_step: int
    """Steps of that phase that are done."""
    lines: int
    """Lines of the journal at that moment."""
    recipe: dict[str, Any]
    fingerprint: dict[str, str]
    metrics: dict[str, float]
    """By name: the loss of the last step, the newest numbers of ``step.log``, and those of ``run.log`` of that step."""
    num_workers: int
    saved: float
    """When it was made, in seconds since 1970."""
    seconds: float
    """From the copy to the manifest."""
    tensors: list[Entry]
    files: dict[str, FileFacts]
    crc32: int = 0
    """Of this manifest, written with 0 here."""

    @property
    def num_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(facts.num_bytes for facts in self.files.values())


def memory_at(address: int, num_bytes: int, owner: object) -> memoryview:
    """Return memory of ``owner``, e.g. of a tensor, as bytes. They keep the owner alive."""
    array: Any = (ctypes.c_ubyte * num_bytes).from_address(address)
    array.owner = owner
    return memoryview(array).cast("B")


# -- names -------------------------------------------------------------------------------------------


def step_name(step: int) -> str:
    return f"step-{step:010d}"


def step_of(checkpoint: Path) -> int:
    """Return the step that the name of a checkpoint says."""
    return int(checkpoint.name[5:])


def partial_name(step: int, generation: int, *, last: bool = False) -> str:
    """Return the name of the directory of a checkpoint that is not complete. No two snapshots of a run share one.

    An earlier run that was killed can have left a directory of the same name: see `leave_only`.

    Args:
        last: one member writes all of it; others may still be writing their parts of a snapshot of the same step.
    """
    return f".{step_name(step)}-{generation}{'-last' if last else ''}.partial"


def part_name(part: int, num_parts: int) -> str:
    return f"part-{part:05d}-of-{num_parts:05d}.safetensors"


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints in a ``checkpoints`` folder that have their final name, the newest last."""
    try:
        names = sorted(path for path in folder.iterdir() if re.fullmatch(r"step-\d{10,}", path.name))
    except FileNotFoundError:
        return []
    return sorted(names, key=step_of)


def find(location: str | os.PathLike[str]) -> Path:
    """Return the ``checkpoints`` folder or the single checkpoint that a user means by a path.

    Raises:
        CheckpointError: there is neither.
    """
    path = Path(location)
    if (path / FOLDER).is_dir():
        return path / FOLDER
    if path.is_dir() and (re.fullmatch(r"step-\d{10,}", path.name) or (path / MANIFEST).exists() or complete(path)):
        return path
    raise CheckpointError(f"{path} holds no checkpoint; give the directory of a run, or one of its checkpoints")


def candidates(folder: Path) -> list[Path]:
    """Return the checkpoints that a result of `find` stands for, the newest last."""
    return complete(folder) or ([] if folder.name == FOLDER else [folder])


# -- writing -----------------------------------------------------------------------------------------


def encode_header(entries: Iterable[Entry], alignment: int = HEADER_ALIGNMENT) -> bytes:
    """Return the header of a safetensors file with these tensors, padded to a multiple of ``alignment`` bytes."""
    tensors: dict[str, Any] = {}
    for entry in entries:
        kind, shape = KINDS.get(entry.dtype), entry.shape
        if kind is None:  # as bytes; the manifest has their dtype
            kind, shape = "U8", [entry.num_bytes]
        end = entry.start + entry.num_bytes
        tensors[entry.name] = {"dtype": kind, "shape": shape, "data_offsets": [entry.start, end]}
    text = json.dumps(tensors, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, data: memoryview, is_abandoned: Callable[[], bool] = lambda: False) -> FileFacts | None:
    """Write a file and wait until it is on the disk.

    Args:
        is_abandoned: asked before every block; None is returned when it is.
    """
    starts = range(0, max(len(data), 1), BLOCK_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for start in starts:
            if is_abandoned():
                return None
            block = data[start : start + BLOCK_BYTES]
            while block:
                block = block[os.write(descriptor, block) :]
        with Threads(1, "unisono-fsync") as pool:
            synchronized = pool.submit(os.fsync, descriptor)
            # While the disk works:
            checks = [zlib.crc32(data[start : start + BLOCK_BYTES]) for start in starts]
            synchronized.result()
    finally:
        os.close(descriptor)
    return FileFacts(len(data), checks)


class Stream:
    """A file that is written piece by piece. What cannot be written is said at the end."""

    def __init__(self, path: Path) -> None:
        self._checks: list[int] = []
        self._check, self._num_bytes = 0, 0
        self._error: OSError | None = None
        try:
            self._file: FileIO | None = path.open("wb", buffering=0)
        except OSError as error:
            self._file, self._error = None, error

    def write(self, data: memoryview) -> None:
        """Append to the file."""
        if self._file is None or self._error is not None:
            return
        try:
            rest = data
            while rest:
                piece = rest[: BLOCK_BYTES - self._num_bytes % BLOCK_BYTES]
                piece = piece[: self._file.write(piece)]
                self._check = zlib.crc32(piece, self._check)
                self._num_bytes, rest = self._num_bytes + len(piece), rest[len(piece) :]
                if self._num_bytes % BLOCK_BYTES == 0:
                    self._checks.append(self._check)
                    self._check = 0
        except OSError as error:
            self._error = error

    def close(self) -> FileFacts:
        """Wait until the file is on the disk.

        Raises:
            OSError: it could not be written.
        """
        file, self._file = self._file, None
        try:
            if self._error is not None:
                raise self._error
            assert file is not None
            os.fsync(file.fileno())
        finally:
            if file is not None:
                file.close()
        last = [self._check] if self._num_bytes % BLOCK_BYTES or not self._checks else []
        return FileFacts(self._num_bytes, [*self._checks, *last])


def remove_part(path: Path) -> None:
    """Remove the part that one process has written of a useless snapshot, and the directory with the last part."""
    for name in (path, path.with_suffix(".facts")):
        with suppress(OSError):
            name.unlink()
    with suppress(OSError):
        path.parent.rmdir()


def synchronize(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def synchronize_above(folder: Path) -> None:
    """Wait until the names of a directory and of all directories above it are on the disk: any of them may be new.

    A directory that this process may not open was not made by it either.
    """
    for above in folder.resolve().parents:
        with suppress(OSError):
            synchronize(above)


def leave_only(folder: Path, names: Collection[str]) -> None:
    """Remove all files of a directory but these, as far as that is possible."""
    for path in folder.iterdir():
        if path.name not in names:
            with suppress(OSError):
                path.unlink()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes a directory complete."""
    checked = msgspec.structs.replace(manifest, crc32=_check_of(manifest))
    write_file(folder / MANIFEST, memoryview(msgspec.json.format(msgspec.json.encode(checked), indent=1)))
    synchronize(folder)


def publish(partial: Path, final: Path) -> None:
    """Give a complete directory its final name. A directory that has this name already is replaced; see `take_over`."""
    old = final.with_name(f".{final.name}{_REPLACED}")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    synchronize(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def take_over(folder: Path) -> None:
    """Give a replaced checkpoint its name back if its replacement was not completed, because a process was killed.

    Only the process that holds the run's directory may call this.
    """
    for old in folder.glob(f".step-*{_REPLACED}"):
        final = old.with_name(old.name[1:].removesuffix(_REPLACED))
        if not final.exists():
            old.rename(final)
            synchronize(folder)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint. A process that is killed meanwhile leaves garbage, and no half of a checkpoint."""
    gone = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def move_away(checkpoints: Iterable[Path], *, broken: bool) -> list[Path]:
    """Rename checkpoints so that a run that goes on from another one does not take them for its newest.

    Args:
        broken: keep them for inspection; otherwise they are kept until `remove_abandoned`.

    Returns:
        Their new paths.
    """
    moved = []
    for checkpoint in checkpoints:
        other = checkpoint.with_name(f"{checkpoint.name}.broken" if broken else f".{checkpoint.name}{_ABANDONED}")
        shutil.rmtree(other, ignore_errors=True)
        checkpoint.rename(other)
        moved.append(other)
    for folder in {path.parent for path in moved}:
        synchronize(folder)
    return moved


def remove_abandoned(folder: Path) -> None:
    """Remove the checkpoints that a run has left behind by going back, now that it has written a new one."""
    for path in folder.glob(f".step-*{_ABANDONED}"):
        shutil.rmtree(path, ignore_errors=True)


def remove_partials(folder: Path, *, but: Collection[str] = ()) -> None:
    """Remove the garbage of killed processes. Only the process that holds the run's directory may call this.

    Args:
        but: the names of what may still become a checkpoint.
    """
    take_over(folder)
    for path in folder.glob(".step-*"):
        if path.name not in but and not path.name.endswith(_ABANDONED):
            shutil.rmtree(path, ignore_errors=True)
    for path in complete(folder):
        if not (path / MANIFEST).exists() and all(_PART.match(each.name) for each in path.iterdir()):
            shutil.rmtree(path, ignore_errors=True)


def _check_of(manifest: Manifest) -> int:
    return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(manifest, crc32=0)))


# -- reading -----------------------------------------------------------------------------------------


class CheckpointDiffers(CheckpointError):
    """A checkpoint differs from its manifest."""


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check it.

    Raises:
        CheckpointDiffers: the manifest is missing or damaged.
    """
    try:
        data = read_regular(checkpoint / MANIFEST, MOST_MANIFEST)
    except FileNotFoundError:
        raise CheckpointDiffers(f"{checkpoint.name} has no {MANIFEST}: it was never completed") from None
    except OSError as error:
        raise CheckpointDiffers(f"{MANIFEST} of {checkpoint.name} cannot be read: {error.strerror}") from error
    return parse_manifest(data, checkpoint.name)


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Return the manifest of the checkpoint of this name from its bytes, and check it.

    Raises:
        CheckpointDiffers: the manifest is damaged.
    """
    try:
        version = msgspec.json.decode(data, type=dict[str, Any]).get("format")
        if version != FORMAT:
            raise CheckpointDiffers(f"{name} has format {version}, but this version of the library reads {FORMAT}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDiffers(f"{MANIFEST} of {name} is damaged: {error}") from error
    if manifest.crc32 != _check_of(manifest):
        raise CheckpointDiffers(f"{MANIFEST} of {name} is damaged: its checksum does not match its content")
    if words := _misformed(manifest):
        raise CheckpointDiffers(f"{MANIFEST} of {name} says what cannot be: {words}")
    return manifest


def _misformed(manifest: Manifest) -> str:
    """Return what a manifest says that no run has written, in a sentence; "": nothing. It may be somebody else's.

    Whoever reads the checkpoint relies on this: files lie in its directory, tensors in their files, and none takes more
    memory than its bytes.
    """
    for name, facts in manifest.files.items():
        if not _NAME.fullmatch(name):
            return f"it names a file {name!r}, which lies elsewhere"
        num_blocks = max(-(-facts.num_bytes // BLOCK_BYTES), 1)
        if facts.num_bytes < 0 or len(facts.crc32) != num_blocks:
            return f"{name} has {len(facts.crc32)} checksums for {num_blocks} blocks"
    if SKELETON not in manifest.files or manifest.files[SKELETON].num_bytes > MOST_SKELETON:
        return f"it names no {SKELETON}, or one of more than {MOST_SKELETON >> 20} MiB"
    parts = part_names(manifest)
    sizes = [0] * len(parts)
    for entry in manifest.tensors:
        if not 0 <= entry.part < len(parts):
            return f"the tensor {entry.name!r} lies in part {entry.part} of {len(parts)}"
        if not _fits(entry):
            return f"the tensor {entry.name!r} has {entry.num_bytes} bytes, which is not what its shape takes"
        sizes[entry.part] += entry.num_bytes
    for entry in manifest.tensors:
        if not 0 <= entry.start <= sizes[entry.part] - entry.num_bytes:
            return f"the tensor {entry.name!r} lies outside of its file"
    for name, size in zip(parts, sizes, strict=True):
        if not 0 <= manifest.files[name].num_bytes - size <= MOST_HEADER:
            return f"{name} has {manifest.files[name].num_bytes} bytes, and its tensors {size}"
    return ""


def _fits(entry: Entry) -> bool:
    """Return whether a tensor of this shape and dtype has so many bytes; of an unknown dtype, about so many."""
    if len(entry.shape) > MOST_DIMENSIONS or not all(0 <= size < 1 << 62 for size in entry.shape):
        return False
    if math.prod(max(size, 1) for size in entry.shape) >= 1 << 62:
        return False
    numel = math.prod(entry.shape)
    item = _ITEM_BYTES.get(entry.dtype)
    return entry.num_bytes == numel * item if item is not None else numel <= entry.num_bytes <= numel * MOST_ITEM


def part_names(manifest: Manifest) -> list[str]:
    """Return the names of the files with tensors, by the number of the part."""
    return sorted(name for name in manifest.files if name.startswith("part-"))


def read_blocks(path: Path, facts: FileFacts, into: Iterable[memoryview] | None = None) -> None:
    """Read a file into memory, and check every byte of it.

    Args:
        into: memory for the whole file, in order, taken as it is needed; without it the file is only checked.

    Raises:
        CheckpointDiffers: the file differs from ``facts``; the message says how and where.
    """
    name = f"{path.parent.name}/{path.name}"
    try:
        with open_regular(path) as file, Threads(MAX_THREADS, "unisono-check") as pool:
            size = os.fstat(file.fileno()).st_size
            if size != facts.num_bytes:
                raise CheckpointDiffers(f"{name} has {size} bytes, not {facts.num_bytes}: it was cut off or changed")
            # One thread reads in order, which is fastest on most disks; others compute the checksums.
            checks = []
            for pieces in _scratch(size) if into is None else _blocks(into):
                for piece in pieces:
                    _read_into(file, piece, name)
                checks.append(pool.submit(reduce, lambda check, piece: zlib.crc32(piece, check), pieces, 0))
            for number, check in enumerate(checks):
                if check.result() != facts.crc32[number]:
                    start = number * BLOCK_BYTES
                    raise CheckpointDiffers(
                        f"{name} is damaged in bytes {start} to {min(start + BLOCK_BYTES, size)}: CRC-32 "
                        f"{check.result():08x}, not {facts.crc32[number]:08x}"
                    )
    except FileNotFoundError:
        raise CheckpointDiffers(f"{name} is missing") from None
    except OSError as error:
        raise CheckpointDiffers(f"{name} cannot be read: {error.strerror}") from error


def read_some(path: Path, facts: FileFacts, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """Read some pieces of a file into memory, and check the blocks in which they lie. Needs room for one block.

    Args:
        pieces: by their first byte in the file, ascending.

    Raises:
        CheckpointDiffers: the file differs from ``facts``.
    """
    name = f"{path.parent.name}/{path.name}"
    block, number = bytearray(), -1
    try:
        with open_regular(path) as file:
            for first, piece in pieces:
                done = 0
                while done < len(piece):
                    needed, offset = divmod(first + done, BLOCK_BYTES)
                    if needed != number:
                        start = needed * BLOCK_BYTES
                        block, number = bytearray(min(BLOCK_BYTES, facts.num_bytes - start)), needed
                        file.seek(start)
                        _read_into(file, memoryview(block), name)
                        if zlib.crc32(block) != facts.crc32[needed]:
                            raise CheckpointDiffers(f"{name} is damaged in bytes {start} to {start + len(block)}")
                    size = min(len(piece) - done, len(block) - offset)
                    piece[done : done + size] = block[offset : offset + size]
                    done += size
    except FileNotFoundError:
        raise CheckpointDiffers(f"{name} is missing") from None
    except OSError as error:
        raise CheckpointDiffers(f"{name} cannot be read: {error.strerror}") from error


def _blocks(memory: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Cut memory into blocks; each of them may consist of several pieces."""
    pieces: list[memoryview] = []
    room = BLOCK_BYTES
    for each in memory:
        rest = each
        while rest:
            pieces.append(rest[:room])
            rest, room = rest[room:], room - len(pieces[-1])
            if room == 0:
                yield pieces
                pieces, room = [], BLOCK_BYTES
    if pieces:
        yield pieces


def _scratch(size: int) -> Iterator[list[memoryview]]:
    for start in range(0, size, BLOCK_BYTES):
        yield [memoryview(bytearray(min(BLOCK_BYTES, size - start)))]


def _read_into(file: BufferedReader, piece: memoryview, name: str) -> None:
    while piece:
        number = file.readinto(piece)
        if not number:
            raise CheckpointDiffers(f"{name} ends before byte {file.tell() + len(piece)}")
        piece = piece[number:]


def verify(checkpoint: Path) -> Manifest:
    """Check every byte of a checkpoint.

    Raises:
        CheckpointDiffers: the checkpoint is broken; the message says how.
    """
    manifest = read_manifest(checkpoint)
    for name, facts in manifest.files.items():
        read_blocks(checkpoint / name, facts)
    return manifest
