"""Reading of checkpoints, for a run that goes on and for everything else that needs the weights."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from unisono.core.errors import CheckpointError
from unisono.core.words import shown_bytes
from unisono.engine.state.packing import digest_of_state, pack, pack_held, unpack
from unisono.record import checkpoint_files as files
from unisono.record.checkpoint_files import CheckpointDiffers, Entry, Manifest
from unisono.record.journal import JOURNAL, lines_from

__all__ = ["Apart", "Loaded", "load_weights", "newest", "read", "read_tensors"]

T = TypeVar("T")
Apart = Callable[[Sequence[str]], Collection[int]]
"""Gets the paths of a checkpoint's tensors; returns the numbers of some."""


class Loaded(NamedTuple):
    """A checkpoint in memory."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    """The states of the tracked objects, on the CPU. Meta tensors stand for those that were not to be read."""
    broken: list[str]
    """By newer checkpoint, why it could not be used."""


def read(checkpoint: Path, apart: Apart | None = None) -> tuple[Manifest, dict[str, Any]]:
    """Read a checkpoint and check every byte of it. Nothing in it is executed.

    Args:
        apart: says which tensors are not kept: meta tensors stand for them. None: all are.

    Raises:
        Problem: the checkpoint is broken.
    """
    return _read(checkpoint, lambda state: state, apart)


def newest(location: str | os.PathLike[str], apart: Apart | None = None, *, most: int | None = None) -> Loaded | None:
    """Read the newest checkpoint that is not broken; None if a run has not written any.

    Args:
        location: a run's directory, or one checkpoint: then no other one is used.
        apart: says which tensors are not kept: meta tensors stand for them. None: all are.
        most: steps that it may have; None: any number.

    Raises:
        CheckpointError: all checkpoints are broken, or the path holds neither a run nor a checkpoint.
    """
    found = _first_whole(location, partial(read, apart=apart), most)
    return Loaded(found[0], *found[1], found[2]) if found is not None else None


def load_weights(
    place: str | os.PathLike[str], model: nn.Module | None = None, *, name: str | None = None
) -> dict[str, Any]:
    """Return the weights of a run, without a run.

    Reads the newest checkpoint that is not broken (or the one that is named). No pickle is involved. Warns if it is the
    last one of a run that has finished, and the script has changed the object after it.

    Args:
        place: a run's directory or one of its checkpoints.
        model: loads them into this module as well.
        name: which of the tracked objects, as it was called in ``run.track``. Default: "model" if there is one, else
            the only module.

    Returns:
        The ``state_dict`` of that object, on the CPU.

    Raises:
        CheckpointError: there is no checkpoint, all are broken, or the object is not in it.
    """

    def read_object(path: Path) -> tuple[Manifest, tuple[str, dict[str, Any]]]:
        return _read(path, lambda state: _choose(state["objects"], name, path))

    found = _first_whole(place, read_object)
    if found is None:
        raise CheckpointError(f"{place} holds no checkpoint yet")
    path, (manifest, (chosen, weights)), broken = found
    if broken:
        warnings.warn(f"{'; '.join(broken)}; {path.name} is used", stacklevel=2)
    if _is_changed_later(path, manifest, chosen, weights):
        warnings.warn(
            f"{path.name} is from the end of the last run.steps, and the script has changed {chosen!r} after that, as "
            "scheduler.step() changes an optimizer: the run ended with other values. (A run that resumes repeats that "
            "code.) A checkpoint has them if the change is made within the loop, `if step.is_last_of_epoch: "
            "scheduler.step()`, or if run.save() follows it in each epoch",
            stacklevel=2,
        )
    if model is not None:
        model.load_state_dict(weights)
    return weights


def _first_whole(
    location: str | os.PathLike[str], read_one: Callable[[Path], T], most: int | None = None
) -> tuple[Path, T, list[str]] | None:
    """Return the newest checkpoint that can be read, its content, and why newer ones cannot be read."""
    folder = files.find(location)
    broken: list[str] = []
    for path in reversed(files.candidates(folder)):
        if most is not None and files.step_of(path) > most:
            continue
        try:
            return path, read_one(path), broken
        except CheckpointDiffers as problem:
            broken.append(str(problem))
    if broken:
        raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(broken)}")
    return None


def _is_changed_later(checkpoint: Path, manifest: Manifest, name: str, state: Any) -> bool:
    """Return whether a run has finished without a step after this checkpoint, and with another state of an object."""
    with suppress(OSError, ValueError):  # a checkpoint may be used without a journal beside it
        *between, last = lines_from(checkpoint.parent.parent / JOURNAL, manifest.lines)
        if last["kind"] == "end" and last.get("ok") and all(one["kind"] == "evaluation" for one in between):
            return last["digests"].get(name, "") not in ("", f"{digest_of_state(state):016x}")
    return False


def _choose(objects: dict[str, Any], name: str | None, checkpoint: Path) -> tuple[str, Any]:
    """Return name and state of the object of this name, or of the only module."""
    if name is None:
        modules = [
            key for key, value in objects.items() if value and all(isinstance(v, Tensor) for v in value.values())
        ]
        name = "model" if "model" in objects else modules[0] if len(modules) == 1 else None
    if name is None or name not in objects:
        asked = "which one: name=..." if name is None else f"there is no {name!r}"
        raise CheckpointError(f"{checkpoint.name} holds {', '.join(sorted(objects))}; {asked}")
    return name, objects[name]


def read_tensors(checkpoint: Path, manifest: Manifest, numbers: Collection[int]) -> dict[int, Tensor]:
    """Read some tensors of a checkpoint, by their numbers in the manifest, and check the blocks in which they lie.

    Raises:
        Problem: the checkpoint is broken.
    """
    found = {number: _empty(manifest.tensors[number]) for number in numbers}
    names = files.part_names(manifest)
    for part in sorted({manifest.tensors[number].part for number in numbers}):
        facts = manifest.files[names[part]]
        header = facts.num_bytes - sum(entry.num_bytes for entry in manifest.tensors if entry.part == part)
        pieces = []
        for number in sorted(numbers, key=lambda number: manifest.tensors[number].start):
            entry = manifest.tensors[number]
            if entry.part == part and entry.num_bytes:
                memory = files.memory_at(found[number].data_ptr(), entry.num_bytes, found[number])
                pieces.append((header + entry.start, memory))
        files.read_some(checkpoint / names[part], facts, pieces)
    return found


def _read(
    checkpoint: Path, choose: Callable[[dict[str, Any]], Any], apart: Apart | None = None
) -> tuple[Manifest, Any]:
    """Read the part of a state that ``choose`` returns. The tensors have no content yet when ``choose`` is called."""
    manifest = files.read_manifest(checkpoint)
    skeleton = _read_skeleton(checkpoint, manifest)
    away: Collection[int] = ()
    try:
        tensors = [_empty(entry) for entry in manifest.tensors]
        state: dict[str, Any] = unpack(skeleton, tensors)
        if apart is not None and (away := apart(pack(state, "tracked").paths)):
            for number in away:
                tensors[number] = tensors[number].to("meta")
            state = unpack(skeleton, tensors)
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointDiffers(
            f"{checkpoint.name}/{files.SKELETON} cannot be read by this version of unisono: {error}"
        ) from error
    chosen = choose(state)
    wanted = {one.data_ptr() for one in pack_held(chosen).tensors if one.numel() and not one.is_meta}
    _fill(checkpoint, manifest, tensors, wanted, checks_all=bool(away))
    return manifest, chosen


def _read_skeleton(checkpoint: Path, manifest: Manifest) -> bytes:
    facts = manifest.files[files.SKELETON]
    data = bytearray(facts.num_bytes)
    files.read_blocks(checkpoint / files.SKELETON, facts, [memoryview(data)])
    return bytes(data)


def _fill(
    checkpoint: Path, manifest: Manifest, tensors: Sequence[Tensor], wanted: Collection[int], *, checks_all: bool
) -> None:
    """Read the tensors at the addresses ``wanted``, and check every byte of the parts that hold them.

    Args:
        checks_all: check every byte of all other parts too.
    """
    names = files.part_names(manifest)
    pairs = sorted(zip(manifest.tensors, tensors, strict=True), key=lambda pair: pair[0].start)
    needed = {entry.part for entry, tensor in pairs if not tensor.is_meta and tensor.data_ptr() in wanted}
    for part in sorted({*needed, *range(len(names))} if checks_all else needed):
        facts = manifest.files[names[part]]
        inside = [(entry, tensor) for entry, tensor in pairs if entry.part == part and entry.num_bytes]
        header = facts.num_bytes - sum(entry.num_bytes for entry, _ in inside)
        files.read_blocks(checkpoint / names[part], facts, _memory(header, inside, wanted))


def _memory(header: int, inside: Sequence[tuple[Entry, Tensor]], wanted: Collection[int]) -> Iterator[memoryview]:
    """Yield memory for a part: that of the tensors that are wanted, and some that is dropped for the others."""
    yield memoryview(bytearray(header))
    for entry, tensor in inside:
        if not tensor.is_meta and (address := tensor.data_ptr()) in wanted:
            yield files.memory_at(address, entry.num_bytes, tensor)
        else:
            for start in range(0, entry.num_bytes, files.BLOCK_BYTES):
                yield memoryview(bytearray(min(files.BLOCK_BYTES, entry.num_bytes - start)))


def _empty(entry: Entry) -> Tensor:
    dtype = _dtype(entry.dtype)
    if math.prod(entry.shape) * dtype.itemsize != entry.num_bytes:
        what = f"{entry.num_bytes} bytes, which is not what its shape takes"
        raise CheckpointDiffers(f"the tensor {entry.name!r} has {what}")
    try:
        return torch.empty(entry.shape, dtype=dtype)
    except RuntimeError as error:
        raise CheckpointError(
            f"the tensor {entry.name!r} takes {shown_bytes(entry.num_bytes)}, and this process gets no such memory: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointDiffers(f"a tensor has the type {name!r}, which this version of torch does not have")
    return found
