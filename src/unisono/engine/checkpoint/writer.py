"""Writer thread of a worker: does all work on checkpoints that waits for a disk, one job after the other."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from unisono.core.cadence import Checkpoints, choose_kept
from unisono.core.errors import CheckpointError
from unisono.engine.checkpoint.copies import Copies
from unisono.engine.checkpoint.snapshot import Snapshot
from unisono.record import checkpoint_files as files
from unisono.record.checkpoint_files import FileFacts
from unisono.record.journal import JOURNAL
from unisono.record.rundir import RunDirectory
from unisono.system.faults import point

__all__ = ["Writer", "write_facts"]

T = TypeVar("T")


class Writer:
    """A thread with a queue of jobs for the checkpoints.

    Args:
        copies: where checkpoints are copied to when they are complete.
    """

    def __init__(self, directory: RunDirectory, policy: Checkpoints | None, copies: Copies) -> None:
        self._directory = directory
        self._policy = policy
        self._copies = copies
        self._pool = files.Threads(1, "unisono-checkpoint")
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
        """Do ``job`` after all earlier ones. The writer does not count as busy with it."""
        self._pool.submit(job)

    def drain(self) -> None:
        """Wait until everything is done."""
        self._pool.submit(lambda: None).result()

    def close(self) -> None:
        """Do what is in the queue, and end the thread."""
        self._pool.shutdown()

    # -- the jobs ------------------------------------------------------------------------------------

    def write(self, snapshot: Snapshot) -> Future[float]:
        """Make the late copies and write the part of this member; gives the seconds that it took."""
        return self.submit(lambda: self._write(snapshot))

    def publish(self, snapshot: Snapshot, written: Future[float]) -> Future[None]:
        """Make the snapshot a checkpoint, once the last part, that of this member, is ``written``."""
        return self.submit(lambda: self._publish(snapshot, written))

    def remove(self, snapshot: Snapshot) -> None:
        """Remove the part of this member, of a snapshot that came to nothing."""
        self.submit(lambda: files.remove_part(snapshot.path))

    def _write(self, snapshot: Snapshot) -> float:
        began = time.monotonic()
        try:
            for copy in snapshot.late:
                copy.run(snapshot.abandoned.is_set)
        finally:
            snapshot.copied.set()
        point("checkpoint_copied")
        if not self._directory.look():
            raise CheckpointError("the run's directory was removed or moved")
        folder = snapshot.folder
        if snapshot.part == 0:
            files.remove_partials(folder.parent, but={folder.name})
        for each in (
            folder.parent,
            folder,
        ):  # not the run's directory: it must not be made again without its other files
            each.mkdir(exist_ok=True)
        facts = files.write_file(snapshot.path, snapshot.data, snapshot.abandoned.is_set)
        if facts is not None:
            # Not synchronized: the publisher reads this file soon, and its content goes into the manifest.
            write_facts(snapshot.path, facts)
            point("checkpoint_part_written")
        return time.monotonic() - began

    def _publish(self, snapshot: Snapshot, written: Future[float]) -> None:
        try:
            written.result()
            self._complete(snapshot)
        except BaseException:
            shutil.rmtree(snapshot.folder, ignore_errors=True)
            raise
        self._copies.submit(snapshot.final)
        files.remove_abandoned(snapshot.folder.parent)
        self._prune(snapshot.final)

    def _complete(self, snapshot: Snapshot) -> None:
        folder, sizes = snapshot.folder, snapshot.layout.num_bytes
        found = {files.SKELETON: files.write_file(folder / files.SKELETON, memoryview(snapshot.skeleton))}
        for part, num_bytes in enumerate(sizes):
            path = folder / files.part_name(part, len(sizes))
            found[path.name] = facts = _read_facts(path)
            if path.stat().st_size != num_bytes or facts.num_bytes != num_bytes:
                raise CheckpointError(f"{path.name} does not have the {num_bytes} bytes that were written to it")
        files.leave_only(folder, found)
        assert self._directory.path is not None
        if (journal := self._directory.path / JOURNAL).exists():
            files.synchronize(journal)
        point("checkpoint_before_manifest")
        complete = msgspec.structs.replace(
            snapshot.manifest,
            metrics={name: value for name, value in snapshot.manifest.metrics.items() if math.isfinite(value)},
            saved=time.time(),
            seconds=time.monotonic() - snapshot.began,
            files=found,
        )
        files.write_manifest(folder, complete)
        if not self._is_anchored:
            files.synchronize_above(folder.parent)
            self._is_anchored = True
        files.publish(folder, snapshot.final)
        point("checkpoint_renamed")

    def prune(self, newest: Path) -> None:
        """Remove old checkpoints that were still being copied when this was done last."""
        self.submit(lambda: self._prune(newest))

    def _prune(self, newest: Path) -> None:
        if self._policy is None:
            return
        held = self._copies.held
        found: dict[int, Mapping[str, float]] = {}
        for path in files.complete(newest.parent):
            with suppress(CheckpointError):  # a broken checkpoint is kept for inspection
                found[files.step_of(path)] = files.read_manifest(path).metrics
        for step in found.keys() - choose_kept(found, self._policy, published=files.step_of(newest)):
            path = newest.with_name(files.step_name(step))
            if path not in held:
                with suppress(OSError):
                    files.remove(path)


def write_facts(part: Path, facts: FileFacts) -> None:
    """Leave the facts of a part for the worker that publishes the checkpoint."""
    part.with_suffix(".facts").write_bytes(msgspec.json.encode(facts))


def _read_facts(part: Path) -> FileFacts:
    """Return what the worker that has written a part says of it."""
    return msgspec.json.decode(part.with_suffix(".facts").read_bytes(), type=FileFacts)
