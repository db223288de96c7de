"""The thread of a worker that does everything about checkpoints that waits for a disk, one thing after the other."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from unisono.checkpoint import files
from unisono.checkpoint.files import FileFacts, Manifest
from unisono.checkpoint.snapshot import Snapshot
from unisono.decisions.cadence import Checkpoints, choose_kept
from unisono.errors import CheckpointError
from unisono.faults import point
from unisono.journal import JOURNAL
from unisono.rundir import RunDirectory

__all__ = ["Origin", "Work", "Writer"]

T = TypeVar("T")


@dataclass(frozen=True)
class Origin:
    """What the manifest of every checkpoint says about the run."""

    recipe: Mapping[str, Any] = field(default_factory=dict)
    """What the script must agree with that goes on from the checkpoint."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)


class Work:
    """A part of a snapshot that the writer copies and writes.

    Args:
        start: gives it to the writer.
    """

    def __init__(self, start: Callable[[Work], Future[None]]) -> None:
        self.copied = threading.Event()
        """The late copies are made, or came to nothing."""
        self.seconds = 0.0
        self._abandoned = threading.Event()
        self.future = start(self)

    def abandon(self) -> None:
        """Stop copying and writing at the next block."""
        self._abandoned.set()

    def goes_on(self) -> bool:
        return not self._abandoned.is_set()


class Writer:
    """A thread with a queue."""

    def __init__(self, directory: RunDirectory, policy: Checkpoints | None) -> None:
        self._directory = directory
        self._policy = policy
        self._pool = ThreadPoolExecutor(1, "unisono-checkpoint")
        self._newest: Future[Any] | None = None
        self._is_anchored = False
        """The names of the directories above the checkpoints are on the disk."""

    # -- the queue -----------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a job is waiting or running."""
        return self._newest is not None and not self._newest.done()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Do ``job`` after all earlier ones."""
        future = self._newest = self._pool.submit(job)
        return future

    def prepare(self, job: Callable[[], object]) -> None:
        """Do ``job`` after all earlier ones; it does not count as being busy."""
        self._pool.submit(job)

    def drain(self) -> None:
        """Wait until everything is done."""
        self._pool.submit(lambda: None).result()

    def close(self) -> None:
        """Do what is in the queue, and end the thread."""
        self._pool.shutdown()

    # -- the jobs ------------------------------------------------------------------------------------

    def write(self, snapshot: Snapshot) -> Work:
        """Have the part of this member written."""
        return Work(lambda work: self.submit(lambda: self._write(snapshot, work)))

    def publish(self, snapshot: Snapshot, work: Work, origin: Origin) -> Future[None]:
        """Have the snapshot made a checkpoint, once its last part, that of ``work``, is on the disk."""
        return self.submit(lambda: self._publish(snapshot, work, origin))

    def remove(self, snapshot: Snapshot) -> None:
        """Have the part of this member removed, of a snapshot that came to nothing."""
        path = snapshot.path
        if path is not None:
            self.submit(lambda: files.remove_part(path))

    def _write(self, snapshot: Snapshot, work: Work) -> None:
        began = time.monotonic()
        try:
            for copy in snapshot.late:
                copy.run(work.goes_on)
        finally:
            work.copied.set()
        point("checkpoint_copied")
        self.write_part(snapshot, work.goes_on)
        work.seconds = time.monotonic() - began

    def write_part(self, snapshot: Snapshot, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Write the part of this member, and what it must be into a file beside it.

        Raises:
            CheckpointError, OSError: that was not possible.
        """
        path, folder = snapshot.path, snapshot.folder
        assert path is not None
        if not self._directory.look():
            raise CheckpointError("the run's directory was removed or moved")
        if snapshot.part == 0:
            files.remove_partials(folder.parent, but=folder.name)
        for each in (folder.parent, folder):  # and not the run's: without its other files it would not be one
            each.mkdir(exist_ok=True)
        facts = files.write_file(path, snapshot.data, goes_on)
        if facts is not None:
            # Not synchronized: it is read in a moment, and its content goes into the manifest.
            path.with_suffix(".facts").write_bytes(msgspec.json.encode(facts))
            point("checkpoint_part_written")

    def _publish(self, snapshot: Snapshot, work: Work, origin: Origin) -> None:
        try:
            work.future.result()
            self._complete(snapshot, origin)
        except BaseException:
            shutil.rmtree(snapshot.folder, ignore_errors=True)
            raise
        files.remove_abandoned(snapshot.folder.parent)
        self._prune(snapshot)

    def _complete(self, snapshot: Snapshot, origin: Origin) -> None:
        folder, layout, place = snapshot.folder, snapshot.layout, snapshot.place
        found = {files.SKELETON: files.write_file(folder / files.SKELETON, memoryview(snapshot.skeleton))}
        for part, num_bytes in enumerate(layout.num_bytes):
            path = folder / files.part_name(part, len(layout.num_bytes))
            facts = msgspec.json.decode(path.with_suffix(".facts").read_bytes(), type=FileFacts)
            if path.stat().st_size != num_bytes or facts.num_bytes != num_bytes:
                raise CheckpointError(f"{path.name} has not the {num_bytes} bytes that were written")
            found[path.name] = facts
        files.leave_only(folder, found)
        assert self._directory.path is not None
        if (journal := self._directory.path / JOURNAL).exists():
            files.synchronize(journal)
        point("checkpoint_before_manifest")
        files.write_manifest(
            folder,
            Manifest(
                step=place.total,
                phase=place.phase,
                phase_step=place.step,
                lines=place.lines,
                recipe=dict(origin.recipe),
                fingerprint=dict(origin.fingerprint),
                metrics={name: value for name, value in snapshot.metrics.items() if math.isfinite(value)},
                num_workers=snapshot.num_workers,
                saved=time.time(),
                seconds=time.monotonic() - snapshot.began,
                tensors=layout.entries,
                files={name: facts for name, facts in found.items() if facts is not None},
            ),
        )
        if not self._is_anchored:
            files.synchronize_above(folder.parent)
            self._is_anchored = True
        files.publish(folder, folder.with_name(files.step_name(place.total)))
        point("checkpoint_renamed")

    def _prune(self, snapshot: Snapshot) -> None:
        if self._policy is None:
            return
        found: dict[int, Mapping[str, float]] = {}
        for path in files.complete(snapshot.folder.parent):
            with suppress(CheckpointError):  # a broken one is left for its owner to look at
                found[files.step_of(path)] = files.read_manifest(path).metrics
        for step in found.keys() - choose_kept(found, self._policy, published=snapshot.place.total):
            with suppress(OSError):
                files.remove(snapshot.folder.with_name(files.step_name(step)))
