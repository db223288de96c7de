"""Checkpoints of a run that goes on: copied at a step boundary, written by a thread, agreed on in passing.

A member copies its part into memory of its own, which is made ready before it is needed. What is small, and all
buffers, are copied at once. Large parameters and the states of optimizers do not change before the next update; a
thread copies them while the next micro-batches are computed, and `Saver.tell`, with which every step's combine begins,
waits for the rest. Everything else happens in the thread: checksums, writing, waiting for the disk, and on one member
the manifest and the rename. What the members have to agree on travels with the combines (`unisono.decisions.cadence`).

All members hold the same bits. So it does not matter who writes what, and at the end of a training one of them writes
everything.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from unisono.checkpoint import files
from unisono.checkpoint.files import Entry, FileFacts, Manifest
from unisono.decisions.cadence import (
    NO_ATTEMPT,
    Checkpoints,
    Place,
    Status,
    Verdict,
    Word,
    assign_parts,
    choose_kept,
    choose_writer,
    is_due,
    judge,
    may_begin,
)
from unisono.errors import CheckpointError
from unisono.faults import point
from unisono.state import Packed, pack

__all__ = ["Layout", "Saver", "tensor_names"]


@dataclass(frozen=True)
class Layout:
    """Which tensor lies where in which part."""

    entries: list[Entry]
    headers: list[bytes]
    """By part."""
    num_bytes: list[int]
    """By part: header and tensors."""

    @classmethod
    def of(cls, packed: Packed, num_parts: int) -> Layout:
        """Cut a state into parts. The same on all members."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in packed.tensors]
        parts = assign_parts(sizes, num_parts)
        names = tensor_names(packed.paths)
        ends = [0] * num_parts
        entries: list[Entry | None] = [None] * len(sizes)
        # The widest first: every tensor is aligned then, without gaps, which the format does not allow.
        for place in sorted(range(len(sizes)), key=lambda place: (-packed.tensors[place].element_size(), place)):
            tensor, part = packed.tensors[place], parts[place]
            kind = str(tensor.dtype).removeprefix("torch.")
            entries[place] = Entry(names[place], kind, list(tensor.shape), part, ends[part], sizes[place])
            ends[part] += sizes[place]
        known = [entry for entry in entries if entry is not None]
        headers = [files.encode_header(entry for entry in known if entry.part == part) for part in range(num_parts)]
        return cls(known, headers, [len(header) + end for header, end in zip(headers, ends, strict=True)])


def tensor_names(paths: Sequence[str]) -> list[str]:
    """``tracked['objects']['model']['0.weight']`` as ``model.0.weight``, each once."""
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


SLOW_S = 1.0
"""A checkpoint that is still being written after this time is worth a word when the next one is due."""


LATER_BYTES = 1 << 20
"""Tensors from this size on are copied while the next step computes."""
MOVE_BYTES = 1 << 24


class _Move:
    """One tensor that is still to be copied."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self.source = target, source
        self._version = source._version

    def do(self, go_on: Callable[[], bool]) -> None:
        # Not by torch: its number of threads is of the thread that calls it, and not to be meddled with in another one.
        size = self.source.numel() * self.source.element_size()
        for start in range(0, size, MOVE_BYTES):
            if go_on():
                place = self.source.data_ptr() + start
                ctypes.memmove(self.target.data_ptr() + start, place, min(MOVE_BYTES, size - start))

    @property
    def was_changed(self) -> bool:
        return self.source._version != self._version


class _Buffer:
    """Memory that a part is copied into: kept, and touched before it is needed."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._memory: Tensor = torch.empty(0, dtype=torch.uint8)
        self._filled: tuple[Layout, int] | None = None
        self._views: list[Tensor] = []

    def reserve(self, num_bytes: int) -> None:
        if self._memory.numel() < num_bytes:
            self._views, self._filled = [], None
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._memory.zero_()

    def fill(
        self, layout: Layout, part: int, tensors: Sequence[Tensor], later: Collection[int] = ()
    ) -> tuple[memoryview, list[_Move]]:
        """Copy a part of a state, but the tensors ``later``.

        Returns:
            The whole file, and what is still to be copied into it.
        """
        header, num_bytes = layout.headers[part], layout.num_bytes[part]
        self.reserve(num_bytes)
        mine = [place for place, entry in enumerate(layout.entries) if entry.part == part]
        if self._filled is None or self._filled[0] is not layout or self._filled[1] != part:
            self._filled = (layout, part)
            self._views = [self._view(len(header), layout.entries[place], tensors[place]) for place in mine]
            self._memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        with torch.no_grad():
            for view, place in zip(self._views, mine, strict=True):
                if place not in later:
                    view.copy_(tensors[place], non_blocking=True)
        if self._pinned:
            torch.cuda.synchronize()
        moves = [_Move(view, tensors[place]) for view, place in zip(self._views, mine, strict=True) if place in later]
        return files.memory_at(self._memory.data_ptr(), num_bytes, self._memory), moves

    def _view(self, offset: int, entry: Entry, tensor: Tensor) -> Tensor:
        start = offset + entry.start
        return self._memory[start : start + entry.num_bytes].view(tensor.dtype).view(tensor.shape)


class _Task:
    """Something that a thread does. Its error is kept for who asks."""

    def __init__(self, work: Callable[[_Task], Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, args=(work,), name="unisono-checkpoint", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[_Task], Any]) -> None:
        began = time.monotonic()
        try:
            self.value = work(self)
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - began

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def go_on(self) -> bool:
        return not self.abandoned


@dataclass
class _Attempt:
    place: Place
    generation: int
    partial: Path
    layout: Layout
    skeleton: bytes
    num_workers: int
    is_committer: bool
    began: float
    task: _Task | None
    """None: this member has nothing to write."""
    metrics: dict[str, float]
    part: Path | None = None
    """The file that this member writes in an attempt of all."""
    moves: list[_Move] = field(default_factory=list)
    """What the task copies first."""
    copied: threading.Event = field(default_factory=threading.Event)
    """It has."""


class _Elsewhere(NamedTuple):
    """A checkpoint that another member publishes, and that is not known to be there yet."""

    step: int
    generation: int
    asked: bool
    """`Saver.request` asked for it: one of the same step may hold another state."""


@dataclass
class Saver:
    """This member's part in the checkpoints of a run.

    Args:
        policy: None writes one only when `request` was called.
        directory: of the run; None never writes.
        state: gives everything that the next step depends on.
        stable: the memory addresses of tensors that only an optimizer changes.
        recipe: what a checkpoint must agree with when it is loaded.
    """

    policy: Checkpoints | None
    directory: Path | None
    device: torch.device
    state: Callable[[], dict[str, Any]]
    stable: Callable[[], Collection[int]] = tuple
    recipe: dict[str, Any] = field(default_factory=dict)
    fingerprint: dict[str, str] = field(default_factory=dict)
    journal: Path | None = None
    reaches: bool = False
    """Whether this member can write into the directory."""
    reaching: frozenset[str] | None = None
    """The ids of the workers that can, as all have heard; None: nothing was said yet."""
    is_there: Callable[[], bool] = lambda: True
    """Whether the directory is still that of the run."""
    saved: int = -1
    """The step of the newest checkpoint that this member knows to be complete."""

    def __post_init__(self) -> None:
        self._buffer = _Buffer(self.device)
        self._layouts: dict[object, Layout] = {}
        self._attempt: _Attempt | None = None
        self._others: _Elsewhere | None = None
        self._publishing: _Attempt | None = None
        self._publish: _Task | None = None
        self._prepare: _Task | None = None
        self._given_up: _Task | None = None
        self._clearing: _Task | None = None
        self._prepared_for = -1
        self._wanted = self._asked = False
        self._warned_of = -1
        self._last_of = self._missed_of = -1
        self._overlaps = True
        self._is_anchored = False  # the way to the folder is on the disk
        self._began_at = time.monotonic()
        self._copy_s = self._waited_s = 0.0
        self._words: list[Word] | None = None
        self._heard_in = -1
        self._news: dict[str, Any] = {}

    @property
    def folder(self) -> Path:
        assert self.directory is not None
        return self.directory / files.FOLDER

    def request(self) -> None:
        """Write a checkpoint soon, also where there is one of this step: the state may be another by now."""
        self._wanted = self._asked = True

    # -- with every combine --------------------------------------------------------------------------

    def tell(self) -> Word:
        """What to say with the next combine. From here on the state may change."""
        every_s = self.policy.every_seconds if self.policy is not None else None
        if every_s is not None and time.monotonic() - self._began_at >= every_s:
            self._wanted = True
        self._wait_for_copy()
        wants = float(self._wanted and self.directory is not None)
        attempt, reaches = self._attempt, float(self.reaches)
        if attempt is None:
            busy = any(task is not None and not task.done for task in (self._publish, self._given_up))
            return Word(wants, NO_ATTEMPT, Status.BUSY if busy else Status.IDLE, reaches)
        status = Status.BUSY
        if attempt.task is None:
            status = Status.WRITTEN
        elif attempt.task.done:
            status = Status.WRITTEN if attempt.task.error is None else Status.FAILED
        return Word(wants, float(attempt.place.total), status, reaches)

    def _wait_for_copy(self) -> None:
        attempt = self._attempt
        if attempt is None or not attempt.moves:
            return
        began = time.monotonic()
        attempt.copied.wait()
        self._waited_s = time.monotonic() - began
        changed = sum(move.was_changed for move in attempt.moves)
        attempt.moves = []
        if changed:
            self._overlaps = False
            self._drop(again=True)
            warnings.warn(
                f"{changed} parameters or optimizer states were changed between the beginning of step "
                f"{attempt.place.total} and its update, while a checkpoint copied them; it is made again, and from "
                "now on they are copied before a step begins. "
                "unisono.Checkpoints(overlap=False) does so from the start",
                stacklevel=2,
            )

    def hear(self, words: Sequence[Word], generation: int, worker_ids: Sequence[str]) -> None:
        """What all members said with a combine, by rank."""
        self._words, self._heard_in = list(words), generation
        self.reaching = frozenset(one for one, word in zip(worker_ids, words, strict=True) if word.reaches)

    def news(self) -> dict[str, Any]:
        """What happened since it was asked last, for the journal."""
        news, self._news = self._news, {}
        return news

    # -- between two steps ---------------------------------------------------------------------------

    def boundary(self, place: Place, *, rank: int, generation: int, metrics: Mapping[str, float]) -> None:
        """Do what the words of the last combine ask for. Local.

        Raises:
            CheckpointError: one could not be written, and the policy asks to end the run then.
        """
        if self.directory is None:
            return
        self._look_after()
        self._look_at_others(generation)
        if self._attempt is not None and self._attempt.generation != generation:
            self._drop(again=True)
        if self._words is None or self._heard_in != generation:
            every = self.policy.every_steps if self.policy is not None else None
            if every and self.reaches and place.total % every == 0 and place.total not in (0, self.saved):
                self._wanted = True
            return
        self._follow(judge(self._words))
        # What was said before the end of a phase does not know of the checkpoint that was written there.
        due = place.total != self._last_of and is_due(self.policy, place.total, self._words)
        if due and self._attempt is None and may_begin(self._words):
            self._begin(place, rank, generation, metrics)
        elif due:
            self._wanted = True
            self._say_that_it_waits(place, rank)
        elif self.policy is not None and self._prepared_for != generation:
            self._get_ready(rank, generation)

    def _follow(self, verdict: Verdict) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        if verdict is Verdict.COMMIT:
            self._attempt = None
            if attempt.is_committer:
                self._publishing, self._publish = attempt, _Task(lambda task: self._finish_or_remove(attempt))
            else:
                self._others = _Elsewhere(attempt.place.total, attempt.generation, asked=False)
        elif verdict is Verdict.DROP:
            self._drop(again=True)
        elif verdict is Verdict.FAIL:
            error = attempt.task.error if attempt.task is not None else None
            self._drop(again=False)
            self._failed(attempt.place.total, error)

    def _begin(self, place: Place, rank: int, generation: int, metrics: Mapping[str, float]) -> None:
        assert self._words is not None
        self._wanted = self._asked = False
        self._waited_s = 0.0
        self._began_at = began = time.monotonic()
        writers = [peer for peer, word in enumerate(self._words) if word.reaches]
        packed = pack(self.state(), "tracked")
        layout = self._layout(packed, len(writers))
        partial = self.folder / files.partial_name(place.total, generation)
        for earlier in (self._prepare, self._given_up):
            if earlier is not None:
                earlier.wait()  # one does what the copy would have to do, the other has ended
        task, path, copied = None, None, threading.Event()
        moves: list[_Move] = []
        if rank in writers:
            part = writers.index(rank)
            data, moves = self._buffer.fill(layout, part, packed.tensors, self._choose_later(packed.tensors))
            self._copy_s = time.monotonic() - began
            mine = path = partial / files.part_name(part, len(writers))

            def work(task: _Task) -> FileFacts | None:
                try:
                    for move in moves:
                        move.do(task.go_on)
                finally:
                    copied.set()
                point("checkpoint_copied")
                return self._write_part(task, mine, data, part == 0)

            task = _Task(work)
        self._attempt = _Attempt(
            place, generation, partial, layout, packed.skeleton, len(self._words), rank == writers[0], began, task,
            dict(metrics), path, moves, copied,
        )  # fmt: skip

    def _choose_later(self, tensors: Sequence[Tensor]) -> set[int]:
        """The tensors that can be copied while the next step computes."""
        if not self._overlaps or (self.policy is not None and not self.policy.overlap) or self.device.type != "cpu":
            return set()
        stable = set(self.stable())
        return {
            place
            for place, tensor in enumerate(tensors)
            if tensor.numel() * tensor.element_size() >= LATER_BYTES
            and tensor.data_ptr() in stable
            and tensor.is_contiguous()
        }

    def _get_ready(self, rank: int, generation: int) -> None:
        """Make the memory for this member's part before it is needed."""
        assert self._words is not None
        self._prepared_for = generation
        writers = [peer for peer, word in enumerate(self._words) if word.reaches]
        tasks = (self._publish, self._given_up)
        if rank in writers and self._attempt is None and all(task is None or task.done for task in tasks):
            layout = self._layout(pack(self.state(), "tracked"), len(writers))
            num_bytes = layout.num_bytes[writers.index(rank)]
            self._prepare = _Task(lambda task: self._buffer.reserve(num_bytes))

    def _layout(self, packed: Packed, num_parts: int) -> Layout:
        key = (num_parts, packed.skeleton, tuple((tensor.dtype, tensor.shape) for tensor in packed.tensors))
        if key not in self._layouts:
            self._layouts = {key: Layout.of(packed, num_parts)}
        return self._layouts[key]

    # -- in the thread -------------------------------------------------------------------------------

    def _write_part(self, task: _Task, path: Path, data: memoryview, is_first: bool) -> FileFacts | None:
        partial = path.parent
        if not self.is_there():
            raise CheckpointError("the run's directory was removed or moved")
        if is_first:
            files.remove_partials(self.folder, but=partial.name)
        for folder in (self.folder, partial):  # and not the run's: without its other files it would not be one
            folder.mkdir(exist_ok=True)
        facts = files.write_file(path, data, task.go_on)
        if facts is not None:
            # Not synchronized: it is read in a moment, and its content goes into the manifest.
            path.with_suffix(".facts").write_bytes(msgspec.json.encode(facts))
            point("checkpoint_part_written")
        return facts

    def _finish_or_remove(self, attempt: _Attempt, write: Callable[[], object] = tuple) -> None:
        """``write`` what is missing, if anything, and make it a checkpoint; leave nothing of it where that fails."""
        try:
            if write() is not None:
                self._complete(attempt)
        except BaseException:
            shutil.rmtree(attempt.partial, ignore_errors=True)
            raise

    def _complete(self, attempt: _Attempt) -> None:
        """All parts are on the disk: make it a checkpoint."""
        partial, num_parts = attempt.partial, len(attempt.layout.headers)
        found = {files.SKELETON: files.write_file(partial / files.SKELETON, memoryview(attempt.skeleton))}
        for part in range(num_parts):
            name = files.part_name(part, num_parts)
            side = (partial / name).with_suffix(".facts")
            found[name] = msgspec.json.decode(side.read_bytes(), type=FileFacts)
            if (partial / name).stat().st_size != found[name].num_bytes:  # type: ignore[union-attr]
                raise CheckpointError(f"{name} has not the {attempt.layout.num_bytes[part]} bytes that were written")
        files.leave_only(partial, found)
        if self.journal is not None and self.journal.exists():
            files.synchronize(self.journal)
        place = attempt.place
        point("checkpoint_before_manifest")
        files.write_manifest(
            partial,
            Manifest(
                step=place.total,
                phase=place.phase,
                phase_step=place.step,
                lines=place.lines,
                recipe=self.recipe,
                fingerprint=self.fingerprint,
                metrics={name: value for name, value in attempt.metrics.items() if math.isfinite(value)},
                num_workers=attempt.num_workers,
                saved=time.time(),
                seconds=time.monotonic() - attempt.began,
                tensors=attempt.layout.entries,
                files={name: facts for name, facts in found.items() if facts is not None},
            ),
        )
        if not self._is_anchored:
            files.synchronize_above(self.folder)
            self._is_anchored = True
        files.publish(partial, self.folder / files.step_name(place.total))
        point("checkpoint_renamed")
        files.remove_abandoned(self.folder)
        self._prune(place.total)

    def _prune(self, published: int) -> None:
        if self.policy is None:
            return
        found: dict[int, Mapping[str, float]] = {}
        for path in files.complete(self.folder):
            with suppress(CheckpointError):  # a broken one is left for its owner to look at
                found[files.step_of(path)] = files.read_manifest(path).metrics
        for step in found.keys() - choose_kept(found, self.policy, published=published):
            with suppress(OSError):
                files.remove(self.folder / files.step_name(step))

    # -- what became of it ---------------------------------------------------------------------------

    def _look_after(self) -> None:
        """See whether what this member published is in its place."""
        if self._prepare is not None and self._prepare.done:
            self._prepare = None
        if self._publish is None or not self._publish.done:
            return
        attempt, error = self._publishing, self._publish.error
        assert attempt is not None
        self._publishing = self._publish = None
        if error is not None:
            self._failed(attempt.place.total, error)
            return
        self.saved = attempt.place.total
        self._news = {
            "step": self.saved,
            "bytes": sum(attempt.layout.num_bytes),
            "copy_s": round(self._copy_s, 6),
            "waited_s": round(self._waited_s, 6),
            "write_s": round(attempt.task.seconds, 6) if attempt.task is not None else None,
            "seconds": round(time.monotonic() - attempt.began, 6),
        }

    def _look_at_others(self, generation: int) -> None:
        """See whether what another member published was lost with it: then it is wanted again."""
        if self._others is None or self._words is None or self._heard_in != generation:
            return
        if any(word.attempt == NO_ATTEMPT and word.status == Status.BUSY for word in self._words):
            return  # it, or somebody, is at it still
        other, self._others = self._others, None
        if other.generation == generation or not self.reaches:
            return  # nobody was lost, and who publishes says what goes wrong
        if not other.asked and (self.folder / files.step_name(other.step)).exists():
            self.saved = max(self.saved, other.step)
        else:
            self._wanted = True

    def _drop(self, *, again: bool) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None and attempt.task is not None:
            attempt.task.abandoned = True
            self._given_up = attempt.task  # it may wait for the disk: until it has ended, its memory is not used again
            self._clear(attempt)
        self._wanted = self._wanted or again

    def _clear(self, attempt: _Attempt) -> None:
        """Remove what this member has written of an attempt, when its thread is done with it."""
        earlier = [task for task in (attempt.task, self._clearing) if task is not None]

        def clear(task: _Task) -> None:
            for each in earlier:
                each.wait()
            if attempt.part is not None:
                files.remove_part(attempt.part)

        self._clearing = _Task(clear)

    def _failed(self, step: int, error: BaseException | None) -> None:
        if error is None:
            why = f"the checkpoint of step {step} was not written: another worker could not write its part"
        else:
            known = error.strerror if isinstance(error, OSError) else None
            shown = known or str(error) or type(error).__name__
            why = f"the checkpoint of step {step} was not written into {self.folder}: {shown}"
        if self.policy is not None and self.policy.must_succeed:
            raise CheckpointError(f"{why}. The run ends because Checkpoints(must_succeed=True) asks for it") from error
        if error is not None:
            warnings.warn(f"{why}; the training goes on, and the next one is tried when it is due", stacklevel=2)

    def _say_that_it_waits(self, place: Place, rank: int) -> None:
        busy = self._attempt or self._publishing
        if rank != 0 or busy is None or self._warned_of == busy.place.total or time.monotonic() - busy.began < SLOW_S:
            return
        self._warned_of = busy.place.total
        warnings.warn(
            f"the checkpoint of step {place.total} waits: that of step {busy.place.total} has been written for "
            f"{time.monotonic() - busy.began:.1f} s ({sum(busy.layout.num_bytes) / 1e6:.0f} MB) and is not done. "
            "The disk is slower than checkpoints are asked for; write them less often",
            stacklevel=2,
        )

    # -- the end -------------------------------------------------------------------------------------

    def save_last(
        self, place: Place, *, rank: int, generation: int, worker_ids: Sequence[str], metrics: Mapping[str, float]
    ) -> None:
        """No step follows at once: one member writes the whole state. Local; `finish` waits for it.

        The others keep in mind that it was asked for, in case that the writer is lost, until all `confirm` it.
        """
        others = self._others
        if self.directory is None or (self.policy is None and not self._wanted and others is None):
            return
        self._drop(again=False)
        asked = self._asked or (others is not None and others.asked)
        self._wanted = self._asked = False
        self._last_of = place.total
        if rank != (choose_writer(worker_ids, self.reaching) or 0):
            self._others = _Elsewhere(place.total, generation, asked)
            return
        self._others = None
        if not self.reaches:
            if self._missed_of != place.total:  # the end of the run tries again what the end of its loop has tried
                self._missed_of = place.total
                self._failed(place.total, CheckpointError("no worker that is left sees it, all machines must share it"))
            return
        self.finish()
        if self.saved == place.total and not asked:
            return
        began = time.monotonic()
        packed = pack(self.state(), "tracked")
        layout = self._layout(packed, 1)
        data, _ = self._buffer.fill(layout, 0, packed.tensors)
        self._copy_s = time.monotonic() - began
        point("checkpoint_copied")
        partial = self.folder / files.partial_name(place.total, generation, last=True)
        attempt = _Attempt(
            place, generation, partial, layout, packed.skeleton, len(worker_ids), True, began, None, dict(metrics)
        )

        def write(task: _Task) -> FileFacts | None:
            return self._write_part(task, partial / files.part_name(0, 1), data, True)

        self._publishing = attempt
        self._publish = _Task(lambda task: self._finish_or_remove(attempt, lambda: write(task)))

    def confirm(self) -> None:
        """All members have waited for the last checkpoint: whoever wrote it has come to an end with it."""
        self._others = None

    def finish(self) -> None:
        """Wait until what was copied for the last checkpoint is on the disk.

        Raises:
            CheckpointError: see `boundary`.
        """
        for task in (self._prepare, self._given_up, self._clearing, self._publish):
            if task is not None:
                task.wait()
        self._look_after()

    def close(self) -> None:
        """End the threads, and remove what is not complete."""
        self._drop(again=False)
        for task in (self._prepare, self._given_up, self._clearing, self._publish):
            if task is not None:
                task.wait()
