"""SHA-256 of checkpoints and of files with weights: the same for any number of workers that have written them.

Files may be those of somebody else: each is a regular file of the directory itself, of a bounded size, and is only
read.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from unisono.core.errors import CheckpointError, UsageError
from unisono.record import checkpoint_files as files
from unisono.record import weights_file
from unisono.record.checkpoint_files import CheckpointDiffers, Manifest
from unisono.record.weights_file import Weight
from unisono.system.owned import open_regular

__all__ = ["check_regular", "state_sha256", "weights_sha256"]

PIECE: Final = 1 << 22
_DTYPES: Final = {kind: dtype for dtype, kind in files.KINDS.items()}


def state_sha256(checkpoint: Path, manifest: Manifest) -> str:
    """Return the digest ``unisonoState1`` of a checkpoint.

    It is the SHA-256 of the text ``unisono state 1``, of the position, of each tensor in the order of the manifest
    (name, dtype and shape as JSON, then the SHA-256 of its bytes), and of the SHA-256 of the skeleton. How the tensors
    are spread over files does not count.

    Raises:
        CheckpointError: a tensor lies outside of its file.
    """
    total = hashlib.sha256(b"unisono state 1\n")
    total.update(_json([manifest.step, manifest.phase, manifest.phase_step, manifest.lines]))
    parts = files.part_names(manifest)
    opened: dict[int, tuple[BufferedReader, int]] = {}
    try:
        for entry in manifest.tensors:
            if entry.part not in opened:
                file = open_regular(checkpoint / parts[entry.part])
                opened[entry.part] = (file, 8 + int.from_bytes(file.read(8), "little"))
            file, begin = opened[entry.part]
            total.update(_json([entry.name, entry.dtype, entry.shape]))
            total.update(_sha256(file, begin + entry.start, entry.num_bytes, f"{checkpoint.name}: {entry.name}"))
    finally:
        for file, _ in opened.values():
            file.close()
    with open_regular(checkpoint / files.SKELETON) as file:
        total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def weights_sha256(path: Path) -> set[str]:
    """Return the SHA-256 of a file with weights, and that of its weights as a safetensors file has them.

    The second is the same whoever has written the file, and with which metadata.

    Raises:
        UsageError: it cannot be read, or holds what a file with weights does not hold.
    """
    path = path.resolve()  # the user has named it, and caches hold weights as links
    try:
        with open_regular(path) as file:
            found = {hashlib.file_digest(file, "sha256").hexdigest()}
            file.seek(0)
            if file.read(4) == b"PK\x03\x04":
                return found | {_of_torch(path, file)}
            file.seek(0)
            return found | {_of_safetensors(path, file)}
    except CheckpointError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _of_safetensors(path: Path, file: BufferedReader) -> str:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(files.MOST_HEADER, size - 8):
        raise UsageError(f"{path} is neither a safetensors file nor one of torch.save")
    try:
        entries: Any = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        places = {name: one["data_offsets"] for name, one in entries.items()}
        weights = [
            Weight(name, _DTYPES[one["dtype"]], one["shape"], places[name][1] - places[name][0])
            for name, one in entries.items()
        ]
        if any(not (0 <= start <= end <= size - 8 - length) for start, end in places.values()):
            raise ValueError
        if sum(end - start for start, end in places.values()) > size:
            raise ValueError
        total = hashlib.sha256()

        def content(at: int) -> Iterator[bytes]:
            start, end = places[weights[at].name]
            return _pieces(file, 8 + length + start, end - start, str(path))

        weights_file.write(weights, content, total.update)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise UsageError(f"{path} is neither a safetensors file nor one of torch.save") from None
    return total.hexdigest()


def _of_torch(path: Path, file: BufferedReader) -> str:
    try:
        with zipfile.ZipFile(file) as archive:
            packed = [one.filename for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED]
            size = sum(one.file_size for one in archive.infolist())
    except (zipfile.BadZipFile, ValueError, RuntimeError) as error:
        raise UsageError(f"{path} is not a file of torch.save: {error}") from None
    if packed or size > os.fstat(file.fileno()).st_size:
        raise UsageError(f"{path} holds compressed data, which torch.save does not write; it is not unpacked")
    import torch

    from unisono.engine.state.weights import sha256_of_weights

    found = ""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # A tensor may be a few bytes that are shown as many (`expand`): these would have to be made.
        if isinstance(state, dict) and all(one.nbytes <= one.untyped_storage().nbytes() for one in state.values()):
            found = sha256_of_weights({str(name): one for name, one in state.items()})
    except Exception as error:  # torch raises anything for a file that somebody has made up
        raise UsageError(f"{path} cannot be loaded as weights: {str(error).partition(chr(10))[0]}") from None
    if not found:
        raise UsageError(f"{path} holds no state dict of tensors")
    return found


def check_regular(folder: Path, name: str) -> None:
    """Check that a file of a run, if it is there, can be read.

    Raises:
        UsageError: it cannot, or is no regular file of the directory.
    """
    try:
        open_regular(folder / name).close()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{name} of {folder} cannot be read: {error.strerror}") from None


def _sha256(file: BufferedReader, start: int, num_bytes: int, name: str) -> bytes:
    found = hashlib.sha256()
    for piece in _pieces(file, start, num_bytes, name):
        found.update(piece)
    return found.digest()


def _pieces(file: BufferedReader, start: int, num_bytes: int, name: str) -> Iterator[bytes]:
    if start < 0 or num_bytes < 0 or start + num_bytes > os.fstat(file.fileno()).st_size:
        raise CheckpointDiffers(f"{name} lies outside of its file")
    file.seek(start)
    while num_bytes:
        piece = file.read(min(PIECE, num_bytes))
        if not piece:
            raise CheckpointDiffers(f"{name} lies outside of its file")
        num_bytes -= len(piece)
        yield piece


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
