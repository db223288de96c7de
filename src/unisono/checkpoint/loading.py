"""Reading of checkpoints, for a run that goes on and for everything else that needs the weights."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from unisono.checkpoint import files
from unisono.checkpoint.files import Manifest, Problem
from unisono.errors import CheckpointError
from unisono.state.packing import pack, unpack

__all__ = ["Loaded", "load_model", "newest", "read"]

T = TypeVar("T")


class Loaded(NamedTuple):
    """A checkpoint in memory."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    """The states of the tracked objects, on the CPU."""
    broken: list[str]
    """By newer checkpoint, why it could not be used."""


def read(checkpoint: Path) -> tuple[Manifest, dict[str, Any]]:
    """Read a checkpoint and check every byte of it. Nothing in it is executed.

    Raises:
        Problem: the checkpoint is broken.
    """
    return _read(checkpoint, lambda state: state)


def newest(location: str | os.PathLike[str]) -> Loaded | None:
    """Read the newest checkpoint that is not broken; None if a run has not written any.

    Args:
        location: a run's directory, or one checkpoint: then no other one is used.

    Raises:
        CheckpointError: all checkpoints are broken, or the path holds neither a run nor a checkpoint.
    """
    found = _first_whole(location, read)
    return Loaded(found[0], *found[1], found[2]) if found is not None else None


def load_model(
    place: str | os.PathLike[str], model: nn.Module | None = None, *, name: str | None = None
) -> dict[str, Any]:
    """Return the weights of a run, without a run.

    Reads the newest checkpoint that is not broken (or the one that is named). No pickle is involved.

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

    def read_object(path: Path) -> dict[str, Any]:
        weights: dict[str, Any] = _read(path, lambda state: _choose(state["objects"], name, path))[1]
        return weights

    found = _first_whole(place, read_object)
    if found is None:
        raise CheckpointError(f"{place} holds no checkpoint yet")
    path, weights, broken = found
    if broken:
        warnings.warn(f"{'; '.join(broken)}; {path.name} is used", stacklevel=2)
    if model is not None:
        model.load_state_dict(weights)
    return weights


def _first_whole(location: str | os.PathLike[str], read_one: Callable[[Path], T]) -> tuple[Path, T, list[str]] | None:
    """Return the newest checkpoint that can be read, its content, and why newer ones cannot be read."""
    folder = files.find(location)
    broken: list[str] = []
    for path in reversed(files.candidates(folder)):
        try:
            return path, read_one(path), broken
        except Problem as problem:
            broken.append(str(problem))
    if broken:
        raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(broken)}")
    return None


def _choose(objects: dict[str, Any], name: str | None, checkpoint: Path) -> Any:
    """Return the state of the object of this name, or of the only module."""
    if name is None:
        modules = [
            key for key, value in objects.items() if value and all(isinstance(v, Tensor) for v in value.values())
        ]
        name = "model" if "model" in objects else modules[0] if len(modules) == 1 else None
    if name is None or name not in objects:
        asked = "which one: name=..." if name is None else f"there is no {name!r}"
        raise CheckpointError(f"{checkpoint.name} holds {', '.join(sorted(objects))}; {asked}")
    return objects[name]


def _read(checkpoint: Path, choose: Callable[[dict[str, Any]], Any]) -> tuple[Manifest, Any]:
    """Read the part of a state that ``choose`` returns. The tensors have no content yet when ``choose`` is called."""
    manifest = files.read_manifest(checkpoint)
    tensors = [torch.empty(entry.shape, dtype=_dtype(entry.dtype)) for entry in manifest.tensors]
    try:
        state: dict[str, Any] = unpack(_read_skeleton(checkpoint, manifest), tensors)
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise Problem(
            f"{checkpoint.name}/{files.SKELETON} cannot be read by this version of unisono: {error}"
        ) from error
    chosen = choose(state)
    _fill(checkpoint, manifest, tensors, {one.data_ptr() for one in pack(chosen).tensors if one.numel()})
    return manifest, chosen


def _read_skeleton(checkpoint: Path, manifest: Manifest) -> bytes:
    facts = manifest.files.get(files.SKELETON)
    if facts is None:
        raise Problem(f"the manifest of {checkpoint.name} names no {files.SKELETON}")
    data = bytearray(facts.num_bytes)
    files.read_blocks(checkpoint / files.SKELETON, facts, [memoryview(data)])
    return bytes(data)


def _fill(checkpoint: Path, manifest: Manifest, tensors: Sequence[Tensor], wanted: Collection[int]) -> None:
    """Read the tensors at the addresses ``wanted``, and check every byte of the parts that hold them."""
    names = sorted(name for name in manifest.files if name.startswith("part-"))
    pairs = sorted(zip(manifest.tensors, tensors, strict=True), key=lambda pair: pair[0].start)
    for part in sorted({entry.part for entry, tensor in pairs if tensor.data_ptr() in wanted}):
        if part >= len(names):
            raise Problem(f"the manifest of {checkpoint.name} names no part {part}")
        facts = manifest.files[names[part]]
        inside = [(entry, tensor) for entry, tensor in pairs if entry.part == part and entry.num_bytes]
        header = facts.num_bytes - sum(entry.num_bytes for entry, _ in inside)
        memory = [memoryview(bytearray(header))]
        for entry, tensor in inside:
            address, size = tensor.data_ptr(), entry.num_bytes
            memory.append(files.memory_at(address, size, tensor) if address in wanted else memoryview(bytearray(size)))
        files.read_blocks(checkpoint / names[part], facts, memory)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Problem(f"a tensor has the type {name!r}, which this torch does not know")
    return found
