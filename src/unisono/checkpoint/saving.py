"""One member's part in the checkpoints of a run that goes on: what it reports, and what it does about the reports.

`Saver.report` and `Saver.on_reports` belong to every combine, `Saver.boundary` comes between two steps. What the
reports mean for all members is decided in `unisono.decisions.cadence`; whatever waits for a disk is done by the
`Writer`. All members hold the same bits, so any of them can write any part, and at the end of a training one member
writes everything.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.checkpoint import files
from unisono.checkpoint.snapshot import LateCopy, Layout, Memory, Snapshot, choose_late
from unisono.checkpoint.writer import Origin, Work, Writer
from unisono.decisions.cadence import (
    CheckpointReport,
    Checkpoints,
    Place,
    Status,
    Verdict,
    is_due,
    judge,
    may_begin,
)
from unisono.decisions.layout import EVERYTHING, replicated
from unisono.errors import CheckpointError
from unisono.rundir import RunDirectory
from unisono.state import Packed, pack

__all__ = ["Moment", "Saver"]

SLOW_S = 1.0
"""A checkpoint that has been written for this time when the next one is due is worth a warning."""


class Moment(NamedTuple):
    """A boundary between two steps: the position of the run, and its members."""

    place: Place
    generation: int
    worker_ids: Sequence[str]
    metrics: Mapping[str, float]
    """What was logged last, by name."""


@dataclass
class _UnderWay:
    """A checkpoint that is not known to be complete."""

    step: int
    generation: int
    publisher: int
    """The rank in that generation of the member that publishes it."""
    snapshot: Snapshot | None = None
    """None: another member writes all of it."""
    work: Work | None = None
    """None: this member writes nothing."""
    publication: Future[None] | None = None
    """None: this member does not publish it, or not yet."""
    asked: bool = False
    """Another member replaces a checkpoint of this step, because `Saver.request` asked for it."""
    copy_s: float = 0.0
    waited_s: float | None = None
    """How long the update waited for late copies; None: it has not waited yet."""
    was_reported: bool = False
    """The other members may know that the part of this one is on the disk, so it may be published at any time."""
    is_ordered: bool = False
    """All parts are on the disk, and the publisher knows."""


class Saver:
    """This member's part in the checkpoints of a run.

    Args:
        policy: None writes a checkpoint only when `request` was called.
        directory: of the run; without a path nothing is written.
        state: returns everything that the next step depends on.
        stable: returns the memory addresses of tensors that only an optimizer changes.
    """

    def __init__(
        self,
        policy: Checkpoints | None,
        directory: RunDirectory,
        device: torch.device,
        state: Callable[[], dict[str, Any]],
        stable: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.policy = policy
        self.reaching: frozenset[str] | None = None
        """The ids of the workers that see the directory, by the newest reports; None: there were no reports yet."""
        self.saved = -1
        """The step of the newest checkpoint that this member knows to be complete."""
        self._directory = directory
        self._device = device
        self._state, self._stable = state, stable
        self._writer = Writer(directory, policy)
        self._memory = Memory(device)
        self._layouts: dict[object, Layout] = {}
        self._worker_id, self._origin = "", Origin()
        self._under_way: _UnderWay | None = None
        self._failure: tuple[int, BaseException | None] | None = None
        self._wanted = self._asked = False
        self._overlaps = device.type == "cpu" and (policy is None or policy.overlap)
        self._reports: Sequence[CheckpointReport] = ()
        """Those that the next boundary decides by."""
        self._generation = -1
        """That of the newest reports."""
        self._step = 0
        self._taken_at = time.monotonic()
        self._prepared_for = self._warned_of = self._last_step = self._missed_step = -1
        self._news: dict[str, Any] = {}

    @property
    def folder(self) -> Path:
        assert self._directory.path is not None
        return self._directory.path / files.FOLDER

    def join(self, worker_id: str, origin: Origin, *, is_newcomer: bool) -> None:
        """This member is in the run, and the directory is claimed.

        Args:
            is_newcomer: the others know who writes, and this member does not until it has their reports.
        """
        self._worker_id, self._origin = worker_id, origin
        if is_newcomer:
            self.reaching = frozenset()
        if self._directory.is_seen:
            found = files.complete(self.folder)
            self.saved = files.step_of(found[-1]) if found else -1

    def request(self) -> None:
        """Take a snapshot soon, also if there is a checkpoint of this step: the state may have changed since."""
        self._wanted = self._asked = True

    def choose_publisher(self, worker_ids: Sequence[str]) -> str | None:
        """Return the member that writes whatever one member writes for all; None: nobody sees the directory."""
        able = worker_ids if self.reaching is None else self.reaching
        return replicated(worker_ids).publisher(able)

    def news(self) -> dict[str, Any]:
        """Return what became of a checkpoint since the last call, for the journal."""
        news, self._news = self._news, {}
        return news

    # -- with every combine --------------------------------------------------------------------------

    def report(self) -> CheckpointReport:
        """Return the report that goes with the next combine. When it returns, the update may change the state."""
        every_s = self.policy.every_seconds if self.policy is not None else None
        if every_s is not None and time.monotonic() - self._taken_at >= every_s:
            self._wanted = True
        status = self._status()
        wants = self._wanted and self._directory.path is not None
        return CheckpointReport(wants, self._step, status, self._directory.is_seen)

    def _status(self) -> Status:
        under_way = self._under_way
        if under_way is None:
            return Status.BUSY if self._writer.is_busy else Status.IDLE
        if (publication := under_way.publication) is not None:
            if not publication.done():
                return Status.PUBLISHING
            return Status.PUBLISHED if publication.exception() is None else Status.FAILED
        if (work := under_way.work) is not None:
            if self._was_changed(under_way, work):
                return Status.CHANGED
            if not work.future.done():
                return Status.BUSY
            if work.future.exception() is not None:
                return Status.FAILED
        under_way.was_reported = True
        return Status.WRITTEN

    def _was_changed(self, under_way: _UnderWay, work: Work) -> bool:
        """Wait for the late copies of a snapshot; give it up if the script has changed what they copied."""
        if under_way.waited_s is not None or under_way.snapshot is None:
            return False
        began = time.monotonic()
        self._wait_for_copy(work)
        under_way.waited_s = time.monotonic() - began
        changed = sum(copy.was_changed for copy in under_way.snapshot.late)
        if changed:
            self._overlaps = False
            self._give_up(was_heard=True)
            self._wanted = True
            warnings.warn(
                f"{changed} parameters or optimizer states were changed between the beginning of step "
                f"{under_way.step} and its update, while a checkpoint copied them; it is made again, and from "
                "now on they are copied before a step begins. "
                "unisono.Checkpoints(overlap=False) does so from the start",
                stacklevel=2,
            )
        return changed > 0

    def _wait_for_copy(self, work: Work) -> None:
        work.copied.wait()

    def on_reports(self, reports: Sequence[CheckpointReport], generation: int, worker_ids: Sequence[str]) -> None:
        """Receive the reports of all members, by rank."""
        self._reports, self._generation = reports, generation
        self.reaching = frozenset(one for one, report in zip(worker_ids, reports, strict=True) if report.reaches)
        under_way = self._under_way
        if under_way is None:
            return
        same = under_way.generation == generation
        verdict = judge(reports, publisher=under_way.publisher, same_generation=same)
        if verdict is Verdict.PUBLISH:
            under_way.is_ordered = True
            if worker_ids[under_way.publisher] == self._worker_id:
                self._publish(under_way)
        elif verdict is Verdict.DONE:
            self._under_way = None
            self._conclude(under_way)
        elif verdict is Verdict.FAIL:
            self._give_up(was_heard=True)
            self._failure = (under_way.step, _error_of(under_way))
        elif verdict is Verdict.RETAKE:
            self._give_up(was_heard=True)
            self._wanted = True
        elif verdict is Verdict.LOST:
            self._retake_unless_published(under_way)

    def _publish(self, under_way: _UnderWay) -> None:
        assert under_way.snapshot is not None
        assert under_way.work is not None
        under_way.publication = self._writer.publish(under_way.snapshot, under_way.work, self._origin)

    def _conclude(self, under_way: _UnderWay) -> None:
        """The publisher has come to an end."""
        if under_way.publication is not None and (error := _error_of(under_way)) is not None:
            self._failure = (under_way.step, error)
            return
        self.saved = max(self.saved, under_way.step)
        if under_way.publication is not None and under_way.snapshot is not None and under_way.work is not None:
            self._news = {
                "step": self.saved,
                "bytes": sum(under_way.snapshot.layout.num_bytes),
                "copy_s": round(under_way.copy_s, 6),
                "waited_s": round(under_way.waited_s or 0.0, 6),
                "write_s": round(under_way.work.seconds, 6),
                "seconds": round(time.monotonic() - under_way.snapshot.began, 6),
            }

    def _retake_unless_published(self, under_way: _UnderWay) -> None:
        """The members have changed, and nobody publishes the checkpoint now."""
        self._give_up(was_heard=True)
        if under_way.publication is not None:
            self._conclude(under_way)
        elif under_way.asked:
            self._wanted = self._asked = True
        elif self._directory.is_seen:
            self._writer.submit(partial(self._look_for, under_way.step))

    def _look_for(self, step: int) -> None:
        if (self.folder / files.step_name(step)).exists():
            self.saved = max(self.saved, step)
        else:
            self._wanted = True

    def _give_up(self, *, was_heard: bool) -> None:
        """Forget the checkpoint that is under way, and remove the part of this member unless it may be published yet.

        Args:
            was_heard: by the reports, nobody publishes it now or later.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None or under_way.publication is not None:
            return  # who publishes leaves nothing where that fails
        if under_way.work is not None and under_way.snapshot is not None:
            under_way.work.abandon()
            if was_heard or not under_way.was_reported:
                self._writer.remove(under_way.snapshot)

    # -- between two steps ---------------------------------------------------------------------------

    def boundary(self, moment: Moment) -> None:
        """Take a snapshot if the newest reports ask for one. Local.

        Raises:
            CheckpointError: a checkpoint could not be written, and the policy asks to end the run then.
        """
        if self._directory.path is None:
            return
        self._step = step = moment.place.total
        self._raise_failure()
        reports, self._reports = self._reports, ()
        if not reports or self._generation != moment.generation:
            is_known = step in (0, self.saved, self._last_step)
            if self._directory.is_seen and not is_known and is_due(self.policy, step):
                self._wanted = True
        elif is_due(self.policy, step, reports):
            if self._under_way is None and may_begin(reports):
                self._begin(moment)
            else:
                self._wanted = True
                self._warn_of_delay(moment)
        elif self.policy is not None and self._prepared_for != moment.generation:
            self._prepared_for = moment.generation
            self._prepare(moment.worker_ids)

    def _begin(self, moment: Moment) -> None:
        assert self.reaching is not None
        self._wanted = self._asked = False
        self._taken_at = time.monotonic()
        members = replicated(moment.worker_ids)
        writers, publisher = members.writers(EVERYTHING, self.reaching), members.publisher(self.reaching)
        assert publisher is not None
        snapshot = self._take(moment, writers, is_last=False)
        self._under_way = _UnderWay(
            step=moment.place.total,
            generation=moment.generation,
            publisher=moment.worker_ids.index(publisher),
            snapshot=snapshot,
            work=self._writer.write(snapshot) if snapshot.part is not None else None,
            copy_s=time.monotonic() - snapshot.began,
        )

    def _take(self, moment: Moment, writers: Sequence[str], *, is_last: bool) -> Snapshot:
        """Copy the part of this member, except what can be copied while the next step computes."""
        began = time.monotonic()
        packed = pack(self._state(), "tracked")
        layout = self._layout(packed, len(writers))
        self._writer.drain()  # it may still use the memory
        part = writers.index(self._worker_id) if self._worker_id in writers else None
        data, late = memoryview(b""), tuple[LateCopy, ...]()
        if part is not None:
            # After the last step of a loop, the script may change the state at once.
            chosen = choose_late(packed.tensors, self._stable()) if self._overlaps and not is_last else set[int]()
            data, late = self._memory.fill(layout, part, packed.tensors, chosen)
        return Snapshot(
            place=moment.place,
            generation=moment.generation,
            folder=self.folder / files.partial_name(moment.place.total, moment.generation, last=is_last),
            layout=layout,
            skeleton=packed.skeleton,
            metrics=dict(moment.metrics),
            num_workers=len(moment.worker_ids),
            began=began,
            part=part,
            data=data,
            late=late,
        )

    def _prepare(self, worker_ids: Sequence[str]) -> None:
        """Have the memory for this member's part made before it is needed."""
        writers = replicated(worker_ids).writers(EVERYTHING, self.reaching or ())
        if self._worker_id in writers:
            layout = self._layout(pack(self._state(), "tracked"), len(writers))
            self._writer.prepare(partial(self._memory.reserve, layout.num_bytes[writers.index(self._worker_id)]))

    def _layout(self, packed: Packed, num_parts: int) -> Layout:
        key = (num_parts, packed.skeleton, tuple((tensor.dtype, tensor.shape) for tensor in packed.tensors))
        if key not in self._layouts:
            self._layouts = {key: Layout.of(packed, num_parts)}
        return self._layouts[key]

    # -- the end -------------------------------------------------------------------------------------

    def save_last(self, moment: Moment) -> None:
        """Have one member write the whole state, because no step follows at once. Local; `finish` waits for the disk.

        The other members remember that it was asked for, in case that the writer is lost, until they `confirm` it.

        Raises:
            CheckpointError: see `boundary`.
        """
        if self._directory.path is None:
            return
        if self._under_way is not None and self._under_way.publication is not None:
            self.finish()
        if not self._needs_last(moment.generation):
            return
        asked = self._asked or (self._under_way is not None and self._under_way.asked)
        self._give_up(was_heard=False)
        self._wanted = self._asked = False
        self._reports = ()  # they do not know of this checkpoint
        step = self._last_step = moment.place.total
        publisher = moment.worker_ids.index(self.choose_publisher(moment.worker_ids) or moment.worker_ids[0])
        if moment.worker_ids[publisher] != self._worker_id:
            self._under_way = _UnderWay(step, moment.generation, publisher, asked=asked)
        elif self._directory.is_seen:
            self.finish()
            if self.saved != step or asked:
                self._write_last(moment, publisher)
        elif self._missed_step != step:  # the end of the run tries again what the end of its loop has tried
            self._missed_step = step
            self._failure = (step, CheckpointError("no worker that is left sees it, all machines must share it"))
            self._raise_failure()

    def _needs_last(self, generation: int) -> bool:
        under_way = self._under_way
        if self.policy is not None or self._wanted:
            return True
        return under_way is not None and not (under_way.is_ordered and under_way.generation == generation)

    def _write_last(self, moment: Moment, publisher: int) -> None:
        snapshot = self._take(moment, [self._worker_id], is_last=True)
        copy_s = time.monotonic() - snapshot.began
        self._under_way = under_way = _UnderWay(
            moment.place.total, moment.generation, publisher, snapshot, self._writer.write(snapshot), copy_s=copy_s
        )
        self._publish(under_way)

    def confirm(self) -> None:
        """All members have waited for the last checkpoint: whoever wrote it has come to an end with it."""
        self._under_way = None

    def finish(self) -> None:
        """Wait until all that this member writes is on the disk.

        Raises:
            CheckpointError: see `boundary`.
        """
        self._writer.drain()
        under_way = self._under_way
        if under_way is not None and under_way.publication is not None:
            self._under_way = None
            self._conclude(under_way)
        self._raise_failure()

    def close(self) -> None:
        """End the thread, and remove what is not complete."""
        self._give_up(was_heard=False)
        self._writer.close()

    # -- what goes wrong -----------------------------------------------------------------------------

    def _raise_failure(self) -> None:
        """Say that a checkpoint was not written, if one was not."""
        if self._failure is None:
            return
        (step, error), self._failure = self._failure, None
        if error is None:
            why = f"the checkpoint of step {step} was not written: another worker could not write it"
        else:
            known = error.strerror if isinstance(error, OSError) else None
            shown = known or str(error) or type(error).__name__
            why = f"the checkpoint of step {step} was not written into {self.folder}: {shown}"
        if self.policy is not None and self.policy.must_succeed:
            raise CheckpointError(f"{why}. The run ends because Checkpoints(must_succeed=True) asks for it") from error
        if error is not None:
            warnings.warn(f"{why}; the training goes on, and the next one is tried when it is due", stacklevel=2)

    def _warn_of_delay(self, moment: Moment) -> None:
        busy = self._under_way.snapshot if self._under_way is not None else None
        is_first = moment.worker_ids[0] == self._worker_id
        if not is_first or busy is None or self._warned_of == busy.place.total:
            return
        seconds = time.monotonic() - busy.began
        if seconds >= SLOW_S:
            self._warned_of = busy.place.total
            warnings.warn(
                f"the checkpoint of step {moment.place.total} waits: that of step {busy.place.total} has been written "
                f"for {seconds:.1f} s ({sum(busy.layout.num_bytes) / 1e6:.0f} MB) and is not done. "
                "The disk is slower than checkpoints are asked for; write them less often",
                stacklevel=2,
            )


def _error_of(under_way: _UnderWay) -> BaseException | None:
    """Return why this member could not do its part, which is over."""
    for future in (under_way.work.future if under_way.work is not None else None, under_way.publication):
        if future is not None and future.done() and (error := future.exception()) is not None:
            return error
    return None
