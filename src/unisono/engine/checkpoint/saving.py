"""One member's part in the checkpoints of a run: its reports, and its reactions to the reports of all members.

`Saver.report` and `Saver.on_reports` belong to every combine, `Saver.boundary` comes between two steps.
`unisono.core.cadence` decides what the reports mean for all members; all work that waits for a disk is done by the
`Writer`. A part is written by a member that holds it; of what is replicated, all do. At the end of a training one
member writes everything, and what it does not hold is lent to it (`unisono.script.keeping`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from unisono.core.cadence import CheckpointReport, Checkpoints, SnapshotDecision, Status, is_due, judge, may_begin
from unisono.core.errors import CheckpointError
from unisono.engine.checkpoint.copies import Copies, in_words
from unisono.engine.checkpoint.snapshot import Camera, Moment, Snapshot
from unisono.engine.checkpoint.writer import Writer
from unisono.engine.state.tracked import Tracked
from unisono.record import checkpoint_files as files
from unisono.record.rundir import RunDirectory

__all__ = ["Saver", "Wish"]

UNSEEN: Final = "no remaining worker sees that directory, which all machines must share"
SLOW_S = 1.0
"""A checkpoint that takes longer than this, and is not done when the next one is due, causes a warning."""


class Wish(msgspec.Struct, frozen=True):
    """What a member knows of whether a last checkpoint is to be written."""

    generation: int
    """The one in which the member says so."""
    wants: bool = False
    asked: bool = False
    """One is to be written also if there is one of this step."""
    saved: int = -1
    """The step of the newest checkpoint that the member knows to exist."""
    reaches: bool = False
    """The member sees the run's directory, and may write there."""
    is_left: bool = False
    """Another side of the run writes into the directory."""


@dataclass
class _UnderWay:
    """A checkpoint that is not known to be complete."""

    step: int
    generation: int
    publisher: int
    """The rank in that generation of the member that publishes it."""
    snapshot: Snapshot | None = None
    """None: it was taken in another generation."""
    written: Future[float] | None = None
    """None: this member writes nothing."""
    publication: Future[None] | None = None
    """None: this member does not publish it, or not yet."""
    asked: bool = False
    """Another member replaces a checkpoint of this step, because `Saver.request` asked for it."""
    copy_s: float = 0.0
    waited_s: float | None = None
    """How long the update waited for late copies; None: it has not waited yet."""
    was_reported: bool = False
    """The other members may know that this member's part is on the disk, so the checkpoint may be published."""

    @property
    def error(self) -> BaseException | None:
        """The error that ended this member's share of the work; None: there was none so far."""
        futures = (future for future in (self.written, self.publication) if future is not None and future.done())
        return next((error for future in futures if (error := future.exception()) is not None), None)


class Saver:
    """This member's part in the checkpoints of a run.

    Args:
        policy: None writes a checkpoint only when `request` was called.
        directory: of the run; without a path nothing is written.
        tracked: everything that the next step depends on.
        copies: where checkpoints are copied to.
    """

    def __init__(
        self,
        policy: Checkpoints | None,
        directory: RunDirectory,
        device: torch.device,
        tracked: Tracked,
        copies: Sequence[str] = (),
    ) -> None:
        self.reaching: frozenset[str] | None = None
        """The ids of the workers that see the directory, by the newest reports; None: there were no reports yet."""
        self.saved = -1
        """The step of the newest checkpoint that existed at the beginning or that this member has published."""
        self._policy = policy
        self._directory = directory
        self.copies = Copies(copies, policy, directory.path)
        self._writer = Writer(directory, policy, self.copies)
        overlaps = device.type == "cpu" and (policy is None or policy.overlap)
        self._camera = Camera(device, tracked, overlaps=overlaps)
        self._worker_id = ""
        self._under_way: _UnderWay | None = None
        self._failure: tuple[int, BaseException | None] | None = None
        self._wanted = self._asked = False
        self._reports: Sequence[CheckpointReport] = ()
        """The reports by which the next boundary decides."""
        self._generation = -1
        """The generation of the newest reports."""
        self._step = 0
        self._taken_at = time.monotonic()
        self._prepared_for = self._warned_of = self._last_step = self._missed_step = -1
        self._news: dict[str, Any] = {}

    @property
    def folder(self) -> Path:
        assert self._directory.path is not None
        return self._directory.path / files.FOLDER

    def join(
        self, worker_id: str, recipe: dict[str, Any], fingerprint: dict[str, str], *, is_newcomer: bool = False
    ) -> None:
        """Note that this member is in the run, and that the directory is claimed.

        Args:
            recipe: of the run, for the manifests.
            is_newcomer: this member does not know which members see the directory until it has their reports.
        """
        self._worker_id = worker_id
        self.describe(recipe, fingerprint)
        if is_newcomer:
            self.reaching = frozenset()
        if self._directory.is_seen and (found := files.complete(self.folder)):
            self.saved = files.step_of(found[-1])

    def describe(self, recipe: dict[str, Any], fingerprint: dict[str, str]) -> None:
        """Set what goes into the manifests from now on: another phase of the script has begun."""
        self._camera.recipe, self._camera.fingerprint = recipe, fingerprint

    def copy_at_once(self) -> None:
        """Copy everything at the boundary from now on: the next step changes the state before its combine."""
        self._camera.overlaps = False

    def request(self) -> None:
        """Take a snapshot soon, also if there is a checkpoint of this step: the state may have changed since."""
        self._wanted = self._asked = True

    def choose_publisher(self, worker_ids: Sequence[str]) -> str | None:
        """Return the member that writes for all members; None: no member sees the directory."""
        return next(iter(_writers(worker_ids, worker_ids if self.reaching is None else self.reaching)), None)

    def news(self, *, keep: bool = False) -> dict[str, Any]:
        """Return the news of checkpoints since the last call, for the journal.

        Args:
            keep: the next call returns them once more.
        """
        news, self._news = self._news, self._news if keep else {}
        return news

    # -- with every combine --------------------------------------------------------------------------

    def report(self) -> CheckpointReport:
        """Return the report that goes with the next combine. When it returns, the update may change the state."""
        every_s = self._policy.every_seconds if self._policy is not None else None
        if every_s is not None and time.monotonic() - self._taken_at >= every_s:
            self._wanted = True
        status = self._status()
        wants = self._wanted and self._directory.path is not None
        return CheckpointReport(wants, self._step, status, self._directory.is_seen)

    def _status(self) -> Status:
        under_way = self._under_way
        if under_way is None:
            return Status.BUSY if self._writer.is_busy else Status.IDLE
        if self._was_changed(under_way):
            return Status.CHANGED
        written, publication = under_way.written, under_way.publication
        if under_way.error is not None:
            return Status.FAILED
        if publication is not None:
            return Status.PUBLISHED if publication.done() else Status.PUBLISHING
        if written is not None and not written.done():
            return Status.BUSY
        under_way.was_reported = True
        return Status.WRITTEN

    def _was_changed(self, under_way: _UnderWay) -> bool:
        """Wait for the late copies of a snapshot; give it up if the script has changed what they copied."""
        if under_way.written is None or under_way.snapshot is None or under_way.waited_s is not None:
            return False
        began = time.monotonic()
        self._wait_for_copy(under_way.snapshot)
        under_way.waited_s = time.monotonic() - began
        changed = sum(copy.was_changed for copy in under_way.snapshot.late)
        if changed:
            self._camera.overlaps = False
            self._give_up(is_final=True)
            self._wanted = True
            warnings.warn(
                f"{changed} parameters or optimizer states were changed between the beginning of step "
                f"{under_way.step} and its update, while a checkpoint was copying them; it is repeated, and from now "
                "on they are copied before a step begins. unisono.Checkpoints(overlap=False) does so from the start",
                stacklevel=2,
            )
        return changed > 0

    def _wait_for_copy(self, snapshot: Snapshot) -> None:
        snapshot.copied.wait()

    def on_reports(self, reports: Sequence[CheckpointReport], generation: int, worker_ids: Sequence[str]) -> None:
        """Receive the reports of all members, by rank."""
        self._reports, self._generation = reports, generation
        self.reaching = frozenset(one for one, report in zip(worker_ids, reports, strict=True) if report.reaches)
        under_way = self._under_way
        if under_way is None:
            return
        is_same = under_way.generation == generation
        verdict = judge(reports, publisher=under_way.publisher, same_generation=is_same)
        if verdict is SnapshotDecision.PUBLISH and worker_ids[under_way.publisher] == self._worker_id:
            self._publish(under_way)
        elif verdict is SnapshotDecision.DONE:
            self._conclude(under_way)
        elif verdict is SnapshotDecision.FAIL:
            self._give_up(is_final=True)
            self._failure = (under_way.step, under_way.error)
        elif verdict is SnapshotDecision.RETAKE:
            self._give_up(is_final=True)
            self._wanted = True
        elif verdict is SnapshotDecision.LOST:
            self._conclude(under_way)
            self._retake_unless_published(under_way)

    def _publish(self, under_way: _UnderWay) -> None:
        if under_way.publication is not None:
            return  # these reports were on their way already: with a delay, those of several steps are
        assert under_way.snapshot is not None
        assert under_way.written is not None
        under_way.publication = self._writer.publish(under_way.snapshot, under_way.written)

    def _conclude(self, under_way: _UnderWay) -> None:
        """Conclude a checkpoint that is published or given up. If this member has published it, note the result."""
        self._give_up(is_final=True)
        snapshot, written = under_way.snapshot, under_way.written
        if under_way.publication is None or snapshot is None or written is None:
            return
        if (error := under_way.error) is not None:
            self._failure = (under_way.step, error)
            return
        self.saved = under_way.step
        self._news = {
            "step": self.saved,
            "bytes": sum(snapshot.layout.num_bytes),
            "copy_s": round(under_way.copy_s, 6),
            "waited_s": round(under_way.waited_s or 0.0, 6),
            "write_s": round(written.result(), 6),
            "seconds": round(time.monotonic() - snapshot.began, 6),
        }

    def _retake_unless_published(self, under_way: _UnderWay) -> None:
        """Ask for another snapshot, unless the checkpoint is published: the publisher may be lost."""
        if under_way.publication is None and under_way.asked:
            self.request()
        elif under_way.publication is None and self._directory.is_seen:
            self._writer.submit(partial(self._look_for, self.folder / files.step_name(under_way.step)))

    def _look_for(self, checkpoint: Path) -> None:
        if not checkpoint.exists():
            self._wanted = True

    def _give_up(self, *, is_final: bool) -> None:
        """Forget the checkpoint that is under way. Remove this member's part unless the checkpoint may be published.

        Args:
            is_final: the reports show that no member publishes the checkpoint, now or later.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None or under_way.snapshot is None or under_way.publication is not None:
            return  # a publisher that fails removes the whole directory
        under_way.snapshot.abandoned.set()
        if under_way.written is not None and (is_final or not under_way.was_reported):
            self._writer.remove(under_way.snapshot)

    # -- between two steps ---------------------------------------------------------------------------

    def begins(self, moment: Moment) -> bool:
        """Return whether `boundary` would take a snapshot; the same on all members. Local."""
        reports = self._reports
        if self._directory.path is None or not reports or self._generation != moment.generation:
            return False
        return is_due(self._policy, moment.position.total, reports) and self._under_way is None and may_begin(reports)

    def boundary(self, moment: Moment, *, is_held: bool = False) -> Snapshot | None:
        """Take a snapshot if the newest reports ask for one. Local.

        Args:
            is_held: not at this boundary. Equal on all members.

        Returns:
            A snapshot of which no writer holds all tensors, on all members: they are sent to one that does next.

        Raises:
            CheckpointError: a checkpoint could not be written, and the policy asks to end the run then.
        """
        if self._directory.path is None:
            return None
        self._step = step = moment.position.total
        self._raise_failure()
        reports, self._reports = self._reports, ()
        if not reports or self._generation != moment.generation:
            is_known = step in (0, self.saved, self._last_step)
            if self._directory.is_seen and not is_known and is_due(self._policy, step):
                self._wanted = True
        elif is_due(self._policy, step, reports):
            if self._under_way is None and may_begin(reports) and not is_held:
                snapshot = self._begin(moment)
                return snapshot if snapshot.loans else None
            self._wanted = True
            self._warn_of_delay(moment)
        elif self._policy is not None and self._prepared_for != moment.generation:
            self._prepared_for = moment.generation
            self._prepare(moment.worker_ids)
        return None

    def note_lent(self, error: OSError) -> None:
        """Note that what was lent to this member for its newest snapshot could not be written. Local."""
        assert self._under_way is not None
        failed: Future[float] = Future()
        failed.set_exception(error)
        self._under_way.written = failed

    def _begin(self, moment: Moment) -> Snapshot:
        assert self.reaching is not None
        self._wanted = self._asked = False
        self._taken_at = time.monotonic()
        writers = _writers(moment.worker_ids, self.reaching)
        snapshot = self._take(moment, writers, is_last=False)
        self._start(moment, moment.worker_ids.index(writers[0]), snapshot)
        return snapshot

    def _start(self, moment: Moment, publisher: int, snapshot: Snapshot) -> _UnderWay:
        copy_s = time.monotonic() - snapshot.began
        written = self._writer.write(snapshot) if snapshot.part is not None else None
        step = moment.position.total
        self._under_way = _UnderWay(step, moment.generation, publisher, snapshot, written, copy_s=copy_s)
        return self._under_way

    def _take(self, moment: Moment, writers: Sequence[str], *, is_last: bool) -> Snapshot:
        """Copy the part of this member."""
        folder = self.folder / files.partial_name(moment.position.total, moment.generation, last=is_last)
        part = writers.index(self._worker_id) if self._worker_id in writers else None
        self._writer.drain()  # the writer may still use the memory
        return self._camera.take(moment, folder, writers, part, is_last=is_last)

    def _prepare(self, worker_ids: Sequence[str]) -> None:
        """Have the memory for this member's part made before it is needed."""
        writers = _writers(worker_ids, self.reaching or ())
        if self._worker_id in writers:
            num_bytes = self._camera.num_bytes(writers, writers.index(self._worker_id))
            self._writer.prepare(partial(self._camera.reserve, num_bytes))

    # -- the end -------------------------------------------------------------------------------------

    def wish(self, generation: int) -> Wish:
        """Return what this member knows of whether a last checkpoint is to be written. Local.

        Raises:
            CheckpointError: see `boundary`.
        """
        if self._directory.path is None:
            return Wish(generation)
        if self._under_way is None:
            self._writer.drain()  # the writer may be about to find that a checkpoint was lost
        elif self._under_way.publication is not None:
            self.finish()
        under_way, asked = self._under_way, self._asked
        if under_way is not None and under_way.asked:  # and who was to write it is lost, or was not lent everything
            asked = asked or under_way.written is not None or under_way.generation != generation
        wants = asked or self._policy is not None or self._wanted or under_way is not None
        return Wish(generation, wants, asked, self.saved, self._directory.is_seen, self._directory.is_left_to_others)

    def begin_last(self, moment: Moment, wishes: Mapping[str, Wish]) -> bool:
        """Begin the last checkpoint, because no step follows at once. Local.

        The first member that sees the directory writes it, with what others lend it: it goes on by `publish_last`. The
        others remember the checkpoint until they `confirm` it, in case that member is lost.

        Args:
            wishes: of all members, by their ids.

        Returns:
            Whether one is to be written: the same on all members.

        Raises:
            CheckpointError: see `boundary`.
        """
        known, step = wishes.values(), moment.position.total
        asked = any(one.asked for one in known)
        is_done = max(one.saved for one in known) == step and not asked
        self.reaching = frozenset(worker for worker, one in wishes.items() if one.reaches)
        self._give_up(is_final=False)
        self._wanted = self._asked = False
        self._reports = ()  # these reports do not include this checkpoint
        self._last_step = step
        if is_done or not any(one.wants for one in known):
            return False
        if not self.reaching:
            if not any(one.is_left for one in known):  # else they write this checkpoint, with the same content
                self._miss(moment)
            return False
        publisher = self.choose_publisher(moment.worker_ids)
        if publisher is None:  # it was lost just now: all hear of it before they go on
            self._under_way = _UnderWay(step, moment.generation, 0, asked=asked)
            return True
        snapshot = self._take(moment, [publisher], is_last=True)
        self._start(moment, moment.worker_ids.index(publisher), snapshot).asked = asked
        return True

    def _miss(self, moment: Moment) -> None:
        """Say that nobody can write the last checkpoint: once, although the end of the run follows that of its loop."""
        if self._missed_step != moment.position.total:
            self._missed_step = moment.position.total
            tells = self._worker_id == moment.worker_ids[0]
            self._failure = (self._missed_step, CheckpointError(UNSEEN) if tells else None)
            self._raise_failure()

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest snapshot, as long as it is under way."""
        return self._under_way.snapshot if self._under_way is not None else None

    def publish_last(self) -> None:
        """Publish the last checkpoint where this member writes it, when all that it lacked was lent to it. Local."""
        if self._under_way is not None and self._under_way.written is not None:
            self._publish(self._under_way)

    def confirm(self) -> None:
        """Forget the last checkpoint: all members have waited until its writer was done."""
        self._under_way = None

    def finish(self) -> bool:
        """Wait until all that this member writes is on the disk; return whether it has published a checkpoint, or has
        tried to.

        Raises:
            CheckpointError: see `boundary`.
        """
        self._writer.drain()
        under_way = self._under_way
        publishes = under_way is not None and under_way.publication is not None
        if under_way is not None and publishes:
            self._conclude(under_way)
        self._raise_failure()
        return publishes

    def copy_newest(self) -> None:
        """Have the newest checkpoint copied, if this member has not done so and sees the directory."""
        if self.copies.urls and self._directory.look() and (found := files.complete(self.folder)):
            self.copies.submit_unless_done(found[-1])

    def wait_for_copies(self, seconds: float = math.inf) -> None:
        """Wait until what this member has written is copied, for a limited time."""
        held = self.copies.held
        self.copies.wait(seconds)
        if held and not self.copies.held and self._directory.look():
            self._writer.prune(max(held, key=files.step_of))

    def close(self) -> None:
        """End the threads, and remove incomplete files."""
        self._give_up(is_final=False)
        self._writer.close()
        self.copies.close()

    # -- what goes wrong -----------------------------------------------------------------------------

    def _raise_failure(self) -> None:
        """Raise or warn if a checkpoint could not be written."""
        if self._failure is None:
            return
        (step, error), self._failure = self._failure, None
        why = f"the checkpoint of step {step} was not written: another worker could not write it"
        if error is not None:
            into = f" into {self.folder}" if self._directory.path is not None else ""
            why = f"the checkpoint of step {step} was not written{into}: {in_words(error)}"
        if self._policy is not None and self._policy.must_succeed:
            raise CheckpointError(f"{why}. The run ends because Checkpoints(must_succeed=True) asks for it") from error
        why += "; training continues, and the next one is tried when it is due"
        self._news = {"step": step, "lost": why}
        if error is not None:
            warnings.warn(why, stacklevel=2)

    def _warn_of_delay(self, moment: Moment) -> None:
        busy = self._under_way.snapshot if self._under_way is not None else None
        if moment.worker_ids[0] != self._worker_id or busy is None or self._warned_of == busy.manifest.step:
            return
        if (seconds := time.monotonic() - busy.began) >= SLOW_S:
            self._warned_of = busy.manifest.step
            warnings.warn(
                f"the checkpoint of step {moment.position.total} is waiting: that of step {busy.manifest.step} has "
                f"been writing for {seconds:.1f} s ({sum(busy.layout.num_bytes) / 1e6:.0f} MB) and is not finished. "
                "The disk is too slow for so many checkpoints; write them less often",
                stacklevel=2,
            )


def _writers(worker_ids: Sequence[str], reaching: Collection[str]) -> list[str]:
    """Return the members that see the directory, in the order of ranks: each writes a part, the first one publishes."""
    return [one for one in worker_ids if one in reaching]
