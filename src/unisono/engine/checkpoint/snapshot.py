"""Snapshot: one member's part of a checkpoint, copied at a step boundary.

Small tensors and all buffers are copied at once. Large parameters and optimizer states do not change before the next
update, so the writer thread copies them while the next micro-batches are computed (`LateCopy`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.core.cadence import Position, assign_parts
from unisono.core.errors import StateLost
from unisono.engine.state.packing import Packed, pack_held
from unisono.engine.state.tracked import Tracked
from unisono.record import checkpoint_files as files
from unisono.record.checkpoint_files import Entry, Manifest, Stream
from unisono.system import accelerators

__all__ = [
    "Camera",
    "LateCopy",
    "Layout",
    "Moment",
    "Snapshot",
    "tensor_names",
    "write_whole",
]

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
    lent: tuple[int, ...] = ()
    """The numbers of the tensors that no writer holds, in the order in which they stand in the last part, which has no
    others."""

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor],
        names: Sequence[str],
        num_writers: int,
        allowed: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> Layout:
        """Spread tensors over parts, one for each writer. The same on all members.

        Args:
            allowed: by number of a tensor, the writers that hold it; every writer where nothing is said. What none
                holds goes into one more part.
        """
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        order = [number for number in range(len(sizes)) if allowed.get(number, True)]
        choice = {place: allowed[number] for place, number in enumerate(order) if number in allowed}
        parts = [num_writers] * len(sizes)
        for number, part in zip(order, assign_parts([sizes[one] for one in order], num_writers, choice), strict=True):
            parts[number] = part
        num_parts = num_writers + (len(order) < len(sizes))
        ends = [0] * num_parts
        entries: list[Entry | None] = [None] * len(sizes)
        # The widest dtype first aligns every tensor without gaps, which the format does not allow.
        by_width = sorted(range(len(sizes)), key=lambda index: (-tensors[index].element_size(), index))
        for index in by_width:
            tensor, part = tensors[index], parts[index]
            kind = str(tensor.dtype).removeprefix("torch.")
            entries[index] = Entry(names[index], kind, list(tensor.shape), part, ends[part], sizes[index])
            ends[part] += sizes[index]
        known = [entry for entry in entries if entry is not None]
        headers = [files.encode_header(entry for entry in known if entry.part == part) for part in range(num_parts)]
        num_bytes = [len(header) + end for header, end in zip(headers, ends, strict=True)]
        return cls(known, headers, num_bytes, tuple(index for index in by_width if parts[index] == num_writers))


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


def write_whole(
    folder: Path, state: dict[str, Any], position: Position, fingerprint: dict[str, str], more: Mapping[str, bytes]
) -> None:
    """Write a state into a directory, at once and by this process alone, as a checkpoint of one part.

    Args:
        position: of the run.
        fingerprint: of everything that this worker's arithmetic depends on.
        more: files that belong to it, by name.

    Raises:
        OSError: it cannot be written.
    """
    packed = pack_held(state, "tracked")
    layout = Layout.of(packed.tensors, tensor_names(packed.paths), 1)
    part = folder / files.part_name(0, 1)
    stream = Stream(part)
    stream.write(memoryview(layout.headers[0]))
    for index in sorted(range(len(layout.entries)), key=lambda one: layout.entries[one].start):
        if num_bytes := layout.entries[index].num_bytes:
            tensor = packed.tensors[index].detach().cpu().contiguous()
            stream.write(files.memory_at(tensor.data_ptr(), num_bytes, tensor))
    found = {part.name: stream.close()}
    for name, data in {files.SKELETON: packed.skeleton, **more}.items():
        facts = files.write_file(folder / name, memoryview(data))
        assert facts is not None
        found[name] = facts
    manifest = Manifest(
        step=position.total, phase=position.phase, phase_step=position.step, lines=position.lines, recipe={},
        fingerprint=fingerprint, metrics={}, num_workers=1, saved=time.time(), seconds=0.0, tensors=layout.entries,
        files=found,
    )  # fmt: skip
    files.write_manifest(folder, manifest)


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


class Loan(NamedTuple):
    """A tensor that no writer holds, so that a worker that does sends it to one that writes."""

    source: str
    """The id of the worker that holds it."""
    target: str
    tensor: Tensor
    """On the source; on all others a meta tensor."""


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
    loans: tuple[Loan, ...] = ()
    """The tensors of the last part, in their order, if no writer holds them."""
    copied: Event = field(default_factory=Event)
    """Set when the late copies are made."""
    abandoned: Event = field(default_factory=Event)
    """Set when the snapshot is not needed any more."""

    @property
    def path(self) -> Path:
        """The file that this member writes."""
        assert self.part is not None
        return self.folder / files.part_name(self.part, len(self.layout.headers))

    def receive(self) -> Stream:
        """Return the file for what is lent to this member."""
        with suppress(OSError):  # the file says it in the end
            for each in (self.folder.parent, self.folder):
                each.mkdir(exist_ok=True)
        stream = Stream(self.lent_path)
        stream.write(memoryview(self.layout.headers[-1]))
        return stream

    @property
    def lent_path(self) -> Path:
        """The file for the tensors that no writer holds."""
        return self.folder / files.part_name(len(self.layout.headers) - 1, len(self.layout.headers))

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
    """As in `Manifest`."""


class Camera:
    """Takes the snapshots of one member.

    Args:
        tracked: everything that the next step depends on.
        overlaps: copy large tensors that nothing but an optimizer changes while the next step computes.

    Attributes:
        recipe, fingerprint: for every manifest.
    """

    def __init__(self, device: torch.device, tracked: Tracked, *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.recipe: dict[str, Any] = {}
        self.fingerprint: dict[str, str] = {}
        self._tracked = tracked
        self._device = device
        self._memory: Tensor = torch.empty(0, dtype=torch.uint8)
        self._filled: tuple[Layout, int] | None = None
        self._views: list[Tensor] = []
        self._layouts: dict[object, Layout] = {}

    def num_bytes(self, writers: Sequence[str], part: int) -> int:
        """Return the size of a part."""
        packed = pack_held(self._tracked.whole_state(), "tracked")
        return self._layout(packed, self._tracked.holders(packed.paths), writers).num_bytes[part]

    def reserve(self, num_bytes: int) -> None:
        """Make sure that there is memory for a part. The memory is kept, and its pages are touched in advance."""
        if self._memory.numel() < num_bytes:
            self._views, self._filled = [], None
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=accelerators.pins(self._device.type))
            self._memory.zero_()

    def take(
        self, moment: Moment, folder: Path, writers: Sequence[str], part: int | None, *, is_last: bool
    ) -> Snapshot:
        """Copy a part of the state, except what can be copied while the next step computes.

        Args:
            writers: the ids of the workers that write a part each.
            part: None: only describe the snapshot.
            is_last: no step follows at once, so the script may change the state.
        """
        began = time.monotonic()
        position = moment.position
        packed = pack_held(self._tracked.whole_state(), "tracked")
        holders = self._tracked.holders(packed.paths)
        _check_held(packed, holders, moment.worker_ids)
        layout = self._layout(packed, holders, writers)
        loans = tuple(
            Loan(next(one for one in moment.worker_ids if one in holders[number]), writers[0], packed.tensors[number])
            for number in layout.lent
        )
        data, late = memoryview(b""), tuple[LateCopy, ...]()
        if part is not None:
            later = self._choose_late(packed.tensors) if self.overlaps and not is_last else set[int]()
            data, late = self._fill(layout, part, packed.tensors, later)
        manifest = Manifest(
            step=position.total, phase=position.phase, phase_step=position.step, lines=position.lines,
            recipe=self.recipe, fingerprint=self.fingerprint, metrics=dict(moment.metrics),
            num_workers=len(moment.worker_ids), saved=0.0, seconds=0.0, tensors=layout.entries, files={},
        )  # fmt: skip
        return Snapshot(manifest, folder, layout, packed.skeleton, part, data, late, began, loans)

    def _choose_late(self, tensors: Sequence[Tensor]) -> set[int]:
        """Return the indices of the tensors that can be copied while the next step computes."""
        stable = self._tracked.updated()
        return {
            index
            for index, tensor in enumerate(tensors)
            if tensor.numel() * tensor.element_size() >= LATE_BYTES
            and tensor.data_ptr() in stable
            and tensor.is_contiguous()
        }

    def _layout(self, packed: Packed, holders: Sequence[tuple[str, ...]], writers: Sequence[str]) -> Layout:
        held = {number: ids for number, ids in enumerate(holders) if ids}
        allowed = {number: tuple(writers.index(one) for one in ids if one in writers) for number, ids in held.items()}
        kinds = tuple((tensor.dtype, tensor.shape) for tensor in packed.tensors)
        key = (len(writers), packed.skeleton, kinds, tuple(allowed.items()))
        if key not in self._layouts:
            self._layouts = {key: Layout.of(packed.tensors, tensor_names(packed.paths), len(writers), allowed)}
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
        if self._device.type != "cpu":
            accelerators.synchronize(self._device)
        copies = [LateCopy(view, tensors[i]) for view, i in zip(self._views, mine, strict=True) if i in late]
        return files.memory_at(self._memory.data_ptr(), num_bytes, self._memory), tuple(copies)

    def _view(self, offset: int, entry: Entry, tensor: Tensor) -> Tensor:
        start = offset + entry.start
        return self._memory[start : start + entry.num_bytes].view(tensor.dtype).view(tensor.shape)


def _check_held(packed: Packed, holders: Sequence[tuple[str, ...]], worker_ids: Collection[str]) -> None:
    """Raise StateLost if no worker is left that holds some tensor."""
    for path, tensor, ids in zip(packed.paths, packed.tensors, holders, strict=True):
        if tensor.is_meta and not any(one in worker_ids for one in ids):
            raise StateLost(
                f"all workers that held {tensor_names([path])[0]} were lost, so the run's state is incomplete and no "
                "checkpoint of it can be written. unisono.shard(optimizer, copies=...) sets how many workers hold "
                "each state; the run can resume from its newest checkpoint"
            )
