"""Checkpoints, read: for a run that goes on, and for everything else that wants the weights."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from unisono.checkpoint import files
from unisono.checkpoint.files import Manifest, Problem, Slice
from unisono.errors import CheckpointError
from unisono.state import unpack

__all__ = ["Loaded", "load_model", "newest", "read"]


class Loaded(NamedTuple):
    """A checkpoint in memory."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    """As the tracked objects gave it, on the CPU."""
    broken: list[str]
    """Newer checkpoints that could not be used, and why."""


def read(checkpoint: Path) -> tuple[Manifest, dict[str, Any]]:
    """Read a checkpoint and check every byte of it. Nothing in it is executed.

    Raises:
        Problem: it is broken.
    """
    manifest = files.read_manifest(checkpoint)
    tensors = _read_tensors(checkpoint, manifest, range(len(manifest.tensors)))
    skeleton = _read_skeleton(checkpoint, manifest)
    try:
        state: dict[str, Any] = unpack(skeleton, [tensors[place] for place in range(len(tensors))])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise Problem(f"{checkpoint.name}/{files.SKELETON} is not one of this version: {error}") from error
    return manifest, state


def newest(place: str | os.PathLike[str]) -> Loaded | None:
    """The newest checkpoint that is what it should be; None if a run has not written any.

    Args:
        place: a run's directory, or one checkpoint, which is then the only one that will do.

    Raises:
        CheckpointError: there are some, and all are broken; or the path holds nothing of this kind.
    """
    folder = files.find(place)
    single = folder.name != files.FOLDER and not files.complete(folder)
    candidates = [folder] if single else files.complete(folder)
    broken: list[str] = []
    for path in reversed(candidates):
        try:
            manifest, state = read(path)
        except Problem as problem:
            broken.append(str(problem))
            continue
        return Loaded(path, manifest, state, broken)
    if broken:
        raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(broken)}")
    return None


def load_model(
    place: str | os.PathLike[str], model: nn.Module | None = None, *, name: str | None = None
) -> dict[str, Any]:
    """The weights of a run, without a run.

    Reads the newest checkpoint that is what it should be (or the one that is named). No pickle is involved.

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
    folder = files.find(place)
    single = folder.name != files.FOLDER and not files.complete(folder)
    candidates = [folder] if single else files.complete(folder)
    if not candidates:
        raise CheckpointError(f"{folder} holds no checkpoint yet")
    broken: list[str] = []
    for path in reversed(candidates):
        try:
            found = _read_object(path, name)
        except Problem as problem:
            broken.append(str(problem))
            continue
        if broken:
            warnings.warn(f"{'; '.join(broken)}; {path.name} is used", stacklevel=2)
        if model is not None:
            model.load_state_dict(found)
        return found
    raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(broken)}")


def _read_object(checkpoint: Path, name: str | None) -> dict[str, Any]:
    manifest = files.read_manifest(checkpoint)
    whole = unpack(_read_skeleton(checkpoint, manifest), _Places())
    objects: dict[str, Any] = whole["objects"]
    if name is None:
        flat = [key for key, value in objects.items() if value and all(isinstance(v, _Place) for v in value.values())]
        name = "model" if "model" in objects else flat[0] if len(flat) == 1 else None
    if name is None or name not in objects:
        asked = "which one: name=..." if name is None else f"there is no {name!r}"
        raise CheckpointError(f"{checkpoint.name} holds {', '.join(sorted(objects))}; {asked}")
    places: list[int] = []
    _collect(objects[name], places)
    tensors = _read_tensors(checkpoint, manifest, places)
    found: dict[str, Any] = _replace(objects[name], tensors)
    return found


class _Place(int):
    """Stands for the tensor of this number, which was not read."""


class _Places(Sequence[Any]):
    def __getitem__(self, place: Any) -> Any:
        return _Place(place)

    def __len__(self) -> int:
        return 0


def _collect(value: Any, places: list[int]) -> None:
    if isinstance(value, _Place):
        places.append(int(value))
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, places)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, places)


def _replace(value: Any, tensors: dict[int, Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[int(value)]
    if isinstance(value, dict):
        return type(value)((key, _replace(item, tensors)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(item, tensors) for item in value)
    return value


def _read_skeleton(checkpoint: Path, manifest: Manifest) -> bytes:
    facts = manifest.files.get(files.SKELETON)
    if facts is None:
        raise Problem(f"the manifest of {checkpoint.name} names no {files.SKELETON}")
    data = bytearray(facts.num_bytes)
    files.read_blocks(checkpoint / files.SKELETON, facts, [Slice(0, memoryview(data))])
    return bytes(data)


def _read_tensors(checkpoint: Path, manifest: Manifest, places: Sequence[int]) -> dict[int, Tensor]:
    """These tensors, each in memory of its own; every byte of the parts that hold them is checked."""
    wanted = set(places)
    tensors: dict[int, Tensor] = {}
    names = sorted(name for name in manifest.files if name.startswith("part-"))
    for part in sorted({manifest.tensors[place].part for place in wanted}):
        if part >= len(names):
            raise Problem(f"the manifest of {checkpoint.name} names no part {part}")
        facts = manifest.files[names[part]]
        inside = sorted(
            (entry.start, place)
            for place, entry in enumerate(manifest.tensors)
            if entry.part == part and entry.num_bytes
        )
        start = facts.num_bytes - sum(manifest.tensors[place].num_bytes for _, place in inside)
        slices = [Slice(0, memoryview(bytearray(start)))]
        for _, place in inside:
            entry = manifest.tensors[place]
            if place in wanted:
                tensors[place] = torch.empty(entry.shape, dtype=_dtype(entry.dtype))
                data = files.memory_at(tensors[place].data_ptr(), entry.num_bytes, tensors[place])
            else:
                data = memoryview(bytearray(entry.num_bytes))
            slices.append(Slice(start, data))
            start += entry.num_bytes
        files.read_blocks(checkpoint / names[part], facts, slices)
    for place in wanted - tensors.keys():  # those without an element
        entry = manifest.tensors[place]
        tensors[place] = torch.empty(entry.shape, dtype=_dtype(entry.dtype))
    return tensors


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Problem(f"a tensor has the type {name!r}, which this torch does not know")
    return found
