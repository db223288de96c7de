"""Snapshot: one member's part of a checkpoint, copied at a step boundary.

Small tensors and all buffers are copied at once. Large parameters and optimizer states do not change before the next
update, so the writer thread copies them while the next micro-batches are computed (`LateCopy`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.checkpoint import files
from unisono.checkpoint.files import Entry, Manifest
from unisono.decisions.cadence import Position, assign_parts
from unisono.state.packing import Packed, pack

__all__ = ["Camera", "LateCopy", "Layout", "Moment", "Snapshot", "tensor_names"]

LATE_BYTES = 1 << 20
"""Tensors from this size on are copied while the next step computes."""
COPY_BYTES = 1 << 24
"""A late copy can be abandoned after each block of this size."""


@dataclass(frozen=True)
class Layout:
    """Layout of the files of a checkpoint: the position of each tensor in one of the parts."""

    entries: list[Entry]
    headers: list[bytes]
    """By part."""
    num_bytes: list[int]
    """By part: header and tensors."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor], names: Sequence[str], num_parts: int) -> Layout:
        """Spread tensors over parts. The same on all members."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        parts = assign_parts(sizes, num_parts)
        ends = [0] * num_parts
        entries: list[Entry | None] = [None] * len(sizes)
        # The widest dtype first aligns every tensor without gaps, which the format does not allow.
        for index in sorted(range(len(sizes)), key=lambda index: (-tensors[index].element_size(), index)):
            tensor, part = tensors[index], parts[index]
            kind = str(tensor.dtype).removeprefix("torch.")
            entries[index] = Entry(names[index], kind, list(tensor.shape), part, ends[part], sizes[index])
            ends[part] += sizes[index]
        known = [entry for entry in entries if entry is not None]
        headers = [files.encode_header(entry for entry in known if entry.part == part) for part in range(num_parts)]
        return cls(known, headers, [len(header) + end for header, end in zip(headers, ends, strict=True)])


def tensor_names(paths: Sequence[str]) -> list[str]:
    """Turn ``tracked['objects']['model']['0.weight']`` into ``model.0.weight``; every name is unique."""
    names: list[str] = []
    seen: set[str] = set()
    for path in paths:
        name = path.removeprefix("tracked").removeprefix("['objects']")
        name = name.replace("']['", ".").replace("'][", ".").replace("]['", ".").replace("][", ".").strip("[]'")
        unique = name
        while unique in seen or unique in ("", "__metadata__"):
            unique = f"{name}#{len(names)}"
        seen.add(unique)
        names.append(unique)
    return names


class LateCopy:
    """The copy of one tensor, to be made while the next step computes."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source = target, source
        self._version = source._version

    def run(self, is_abandoned: Callable[[], bool]) -> None:
        """Copy the tensor, until it is abandoned."""
        # Not by torch, whose number of threads belongs to the thread that trains.
        size = self._source.numel() * self._source.element_size()
        for start in range(0, size, COPY_BYTES):
            if not is_abandoned():
                source = self._source.data_ptr() + start
                ctypes.memmove(self._target.data_ptr() + start, source, min(COPY_BYTES, size - start))

    @property
    def was_changed(self) -> bool:
        """Whether the tensor has changed since the boundary, so that the copy may be spoiled."""
        return self._source._version != self._version


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at a boundary, as one member writes it."""

    manifest: Manifest
    """The manifest without its list of files, which are still to be written."""
    folder: Path
    """The directory of the checkpoint before it gets its final name."""
    layout: Layout
    skeleton: bytes
    part: int | None
    """The part that this member writes; None: this member writes nothing."""
    data: memoryview
    """The bytes of that part."""
    late: tuple[LateCopy, ...]
    """The copies that are still to be made into ``data``."""
    began: float
    """`time.monotonic` before the copy."""
    copied: Event = field(default_factory=Event)
    """Set when the late copies are made."""
    abandoned: Event = field(default_factory=Event)
    """Set when the snapshot is not needed any more."""

    @property
    def path(self) -> Path:
        """The file that this member writes."""
        assert self.part is not None
        return self.folder / files.part_name(self.part, len(self.layout.headers))

    @property
    def final(self) -> Path:
        """The directory of the checkpoint when it is complete."""
        return self.folder.with_name(files.step_name(self.manifest.step))


class Moment(NamedTuple):
    """A boundary between two steps: the position of the run, and its members."""

    position: Position
    generation: int
    worker_ids: Sequence[str]
    metrics: Mapping[str, float]
    """The newest logged numbers, by name."""


class Camera:
    """Takes the snapshots of one member.

    Args:
        state: returns everything that the next step depends on.
        stable: returns the memory addresses of tensors that nothing but an optimizer changes.
        overlaps: copy large stable tensors while the next step computes.
    """

    def __init__(
        self,
        device: torch.device,
        state: Callable[[], dict[str, Any]],
        stable: Callable[[], Collection[int]],
        *,
        overlaps: bool,
    ) -> None:
        self._overlaps = overlaps
        self._state, self._stable = state, stable
        self._pinned = device.type == "cuda"
        self._memory: Tensor = torch.empty(0, dtype=torch.uint8)
        self._filled: tuple[Layout, int] | None = None
        self._views: list[Tensor] = []
        self._layouts: dict[object, Layout] = {}
        self._recipe: dict[str, Any] = {}
        self._fingerprint: dict[str, str] = {}

    def describe(self, recipe: dict[str, Any], fingerprint: dict[str, str]) -> None:
        """Set the recipe and the fingerprint that go into every manifest."""
        self._recipe, self._fingerprint = recipe, fingerprint

    def copy_at_once(self) -> None:
        """Copy everything at the boundary from now on."""
        self._overlaps = False

    def num_bytes(self, num_parts: int, part: int) -> int:
        """Return the size of a part."""
        return self._layout(pack(self._state(), "tracked"), num_parts).num_bytes[part]

    def reserve(self, num_bytes: int) -> None:
        """Make sure that there is memory for a part. The memory is kept, and its pages are touched in advance."""
        if self._memory.numel() < num_bytes:
            self._views, self._filled = [], None
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._memory.zero_()

    def take(self, moment: Moment, folder: Path, num_parts: int, part: int | None, *, is_last: bool) -> Snapshot:
        """Copy a part of the state, except what can be copied while the next step computes.

        Args:
            part: None: only describe the snapshot.
            is_last: no step follows at once, so the script may change the state.
        """
        began = time.monotonic()
        position = moment.position
        packed = pack(self._state(), "tracked")
        layout = self._layout(packed, num_parts)
        data, late = memoryview(b""), tuple[LateCopy, ...]()
        if part is not None:
            later = self._choose_late(packed.tensors) if self._overlaps and not is_last else set[int]()
            data, late = self._fill(layout, part, packed.tensors, later)
        manifest = Manifest(
            step=position.total, phase=position.phase, phase_step=position.step, lines=position.lines,
            recipe=self._recipe, fingerprint=self._fingerprint, metrics=dict(moment.metrics),
            num_workers=len(moment.worker_ids), saved=0.0, seconds=0.0, tensors=layout.entries, files={},
        )  # fmt: skip
        return Snapshot(manifest, folder, layout, packed.skeleton, part, data, late, began)

    def _choose_late(self, tensors: Sequence[Tensor]) -> set[int]:
        """Return the indices of the tensors that can be copied while the next step computes."""
        stable = self._stable()
        return {
            index
            for index, tensor in enumerate(tensors)
            if tensor.numel() * tensor.element_size() >= LATE_BYTES
            and tensor.data_ptr() in stable
            and tensor.is_contiguous()
        }

    def _layout(self, packed: Packed, num_parts: int) -> Layout:
        key = (num_parts, packed.skeleton, tuple((tensor.dtype, tensor.shape) for tensor in packed.tensors))
        if key not in self._layouts:
            self._layouts = {key: Layout.of(packed.tensors, tensor_names(packed.paths), num_parts)}
        return self._layouts[key]

    def _fill(
        self, layout: Layout, part: int, tensors: Sequence[Tensor], late: Collection[int]
    ) -> tuple[memoryview, tuple[LateCopy, ...]]:
        """Copy one part of a state, except the tensors ``late``.

        Returns:
            The bytes of the whole file, and the copies that are still to be made into them.
        """
        header, num_bytes = layout.headers[part], layout.num_bytes[part]
        self.reserve(num_bytes)
        mine = [index for index, entry in enumerate(layout.entries) if entry.part == part]
        if self._filled is None or self._filled[0] is not layout or self._filled[1] != part:
            self._filled = (layout, part)
            self._views = [self._view(len(header), layout.entries[index], tensors[index]) for index in mine]
            self._memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        with torch.no_grad():
            for view, index in zip(self._views, mine, strict=True):
                if index not in late:
                    view.copy_(tensors[index], non_blocking=True)
        if self._pinned:
            torch.cuda.synchronize()
        copies = [LateCopy(view, tensors[i]) for view, i in zip(self._views, mine, strict=True) if i in late]
        return files.memory_at(self._memory.data_ptr(), num_bytes, self._memory), tuple(copies)

    def _view(self, offset: int, entry: Entry, tensor: Tensor) -> Tensor:
        start = offset + entry.start
        return self._memory[start : start + entry.num_bytes].view(tensor.dtype).view(tensor.shape)
