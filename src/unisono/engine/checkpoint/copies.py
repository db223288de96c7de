"""Copies of checkpoints on other disks, on other hosts or in an object store, by fsspec.

    URL/
        copies.json                      this place holds copies, and no run directory
        checkpoints/step-0000000120/
            part-..., skeleton.msgpack   the files of the checkpoint, as they are
            journal.jsonl.gz             the journal's lines up to the checkpoint
            run.json                     the run's description
            manifest.json                last: a directory without it is a copy that was cut short

Each copy stands alone, so copies come and go without a file that they share. A copy that replaces another one of the
same step gets a name of its own (``step-0000000120.1``), and the earlier one is removed after it: at every moment the
newest whole copy stays.

A place belongs to one run, with all that it was resumed from: the ids in the ``run.json`` of its copies say so.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from unisono.core.cadence import Checkpoints, choose_kept
from unisono.core.errors import CheckpointError, UsageError
from unisono.core.words import listed, without_password
from unisono.record import checkpoint_files as files
from unisono.record.checkpoint_files import CheckpointDiffers, Manifest
from unisono.record.journal import JOURNAL, end_of
from unisono.record.rundir import RUN_FILE, read_facts
from unisono.system.process import tell
from unisono.system.threads import NamedThread

__all__ = [
    "Copies",
    "Copy",
    "Store",
    "absolute",
    "check",
    "choose_removed",
    "find",
    "free_name",
    "in_words",
    "is_copy",
    "lineage",
]

COPIES: Final = "copies.json"
COPIED_JOURNAL: Final = f"{JOURNAL}.gz"
SAY_AFTER_S: Final = 2.0
"""The end of a run that waits for a copy says so after this time."""
_NAME: Final = re.compile(r"step-(\d{10,})(?:\.(\d+))?")


class Copy(NamedTuple):
    """A whole copy of a checkpoint."""

    name: str
    """Of its directory."""
    step: int
    facts: Mapping[str, Any]
    """The description of its run."""
    manifest: Manifest


# -- decisions ---------------------------------------------------------------------------------------


def lineage(facts: Mapping[str, Any]) -> frozenset[str]:
    """Return the ids of a run: its own, and those that it had before it was resumed."""
    earlier = facts.get("earlier")
    ids = [facts.get("run_id"), *(earlier if isinstance(earlier, list) else ())]
    return frozenset(one for one in ids if isinstance(one, str))


def free_name(step: int, taken: Iterable[str]) -> str:
    """Return a name for a copy of a checkpoint that is not among those that are taken."""
    name, names = files.step_name(step), set(taken)
    numbers = [int(found[2] or 0) for one in names if (found := _NAME.fullmatch(one)) and int(found[1]) == step]
    return f"{name}.{max(numbers) + 1}" if numbers else name


def choose_removed(copies: Sequence[Copy], new: Copy, policy: Checkpoints | None) -> list[Copy]:
    """Return the copies to remove when ``new`` is whole.

    Copies of later steps that were made before the run was resumed are of a course that it has left. Those of later
    steps that it has made since are kept: another worker of it has come further.

    Args:
        policy: None keeps one copy of every step.
    """
    own = new.facts.get("run_id")
    others = [copy for copy in copies if copy.name != new.name]
    left = {copy.name for copy in others if copy.step > new.step and copy.facts.get("run_id") != own}
    saved = {copy.step: copy.manifest.metrics for copy in others if copy.name not in left}
    saved[new.step] = new.manifest.metrics
    kept = choose_kept(saved, policy, published=new.step) if policy is not None else set(saved)
    return [copy for copy in others if copy.name in left or copy.step == new.step or copy.step not in kept]


# -- places ------------------------------------------------------------------------------------------


def absolute(location: str) -> str:
    """Return a URL as it is, and a path as an absolute one."""
    return location if "://" in location or "::" in location else os.path.abspath(os.path.expanduser(location))


def check(urls: Iterable[str]) -> None:
    """Check that this installation knows the protocols of these URLs. Opens no connection.

    Raises:
        UsageError: it does not.
    """
    from fsspec import get_filesystem_class

    for url in urls:
        protocol = url.partition("::")[0].partition("://")[0] if "://" in url else "file"
        try:
            get_filesystem_class(protocol)
        except (ValueError, ImportError) as error:
            raise UsageError(f"copies of checkpoints cannot go to {without_password(url)}: {error}") from error


def is_copy(location: str) -> bool:
    """Return whether a place that a run is to be resumed from is one of copies: a URL, or a directory of copies."""
    return "://" in location or (Path(_split(location)[0]) / COPIES).is_file()


def _split(location: str) -> tuple[str, str]:
    """Return the place of copies that a location means, and the name of a single copy in it, or ""."""
    root, _, name = location.rstrip("/").rpartition("/")
    if _NAME.fullmatch(name) and root.rpartition("/")[2] == files.FOLDER:
        return root.rpartition("/")[0], name
    return location, ""


class Store:
    """A place of copies. To be used by the thread that has made it.

    Every method raises what the file system raises.

    Args:
        location: a URL of fsspec, or a path; of all copies or of a single one.
    """

    def __init__(self, location: str) -> None:
        from fsspec.core import url_to_fs

        self.url, self._only = _split(location)
        self._fs, root = url_to_fs(self.url)
        self._root = str(root).rstrip("/")
        self._known: dict[str, Copy] = {}
        self.cut_short: set[str] = set()
        """The directories without a manifest, by the newest call of `copies`."""

    def copies(self) -> list[Copy]:
        """Return the whole copies, the newest last. Those whose manifest is damaged are left out."""
        self._fs.invalidate_cache()
        self.cut_short = set()
        known = {}
        for name in self._names(files.FOLDER):
            if not _NAME.fullmatch(name) or self._only not in ("", name):
                continue
            if name not in self._known and files.MANIFEST not in self._names(files.FOLDER, name):
                self.cut_short.add(name)
                continue
            with suppress(CheckpointDiffers):
                known[name] = self._known[name] if name in self._known else self._read(name)
        self._known = known
        return sorted(known.values(), key=_age)

    def _read(self, name: str) -> Copy:
        manifest = files.parse_manifest(self._fs.cat_file(self._at(files.FOLDER, name, files.MANIFEST)), name)
        try:
            facts = json.loads(self._fs.cat_file(self._at(files.FOLDER, name, RUN_FILE)))
        except (FileNotFoundError, ValueError) as error:
            raise CheckpointDiffers(f"{RUN_FILE} of {name} cannot be read: {error}") from error
        return Copy(name, manifest.step, facts if isinstance(facts, dict) else {}, manifest)

    def folder_of(self, copy: Copy) -> Path | None:
        """Return the directory of a copy; None where it is on no file system of this machine."""
        from fsspec.implementations.local import LocalFileSystem

        return Path(self._at(files.FOLDER, copy.name)) if isinstance(self._fs, LocalFileSystem) else None

    def write(self, new: Copy, manifest: bytes, checkpoint: Path, journal: Path) -> None:
        """Copy a checkpoint.

        Args:
            manifest: the bytes of its manifest.
            journal: of its run.

        Raises:
            CheckpointError: the checkpoint was replaced or removed meanwhile, or the copy does not have its size.
        """
        folder = self._at(files.FOLDER, new.name)
        self._fs.makedirs(folder, exist_ok=True)
        marker = self._at(COPIES)
        if not self._fs.exists(marker):
            text = {"format": 1, "what": "copies of a run's checkpoints; to resume: unisono run --resume (this place)"}
            self._fs.pipe_file(marker, json.dumps(text).encode() + b"\n")
        for name in sorted(new.manifest.files):
            self._fs.put_file(str(checkpoint / name), f"{folder}/{name}")
        with self._fs.open(f"{folder}/{COPIED_JOURNAL}", "wb") as target:
            _write_journal(journal, new.manifest.lines, target)
        self._fs.pipe_file(f"{folder}/{RUN_FILE}", json.dumps(dict(new.facts), indent=2).encode() + b"\n")
        self._check_written(new, manifest, checkpoint)
        self._fs.pipe_file(f"{folder}/{files.MANIFEST}", manifest)  # last: it makes the copy whole
        self._known[new.name] = new

    def _check_written(self, new: Copy, manifest: bytes, checkpoint: Path) -> None:
        self._fs.invalidate_cache()
        for name, file in new.manifest.files.items():
            if (size := self._fs.size(self._at(files.FOLDER, new.name, name))) != file.num_bytes:
                raise CheckpointError(f"{name} has {size} bytes there, not {file.num_bytes}")
        if (checkpoint / files.MANIFEST).read_bytes() != manifest:
            raise CheckpointError(f"{checkpoint.name} was replaced while it was copied")

    def remove(self, name: str) -> None:
        """Remove a copy, its manifest first: what is left by a process that is killed meanwhile is no copy."""
        self._known.pop(name, None)
        folder = self._at(files.FOLDER, name)
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{folder}/{files.MANIFEST}")
        with suppress(FileNotFoundError):
            self._fs.rm(folder, recursive=True)

    def fetch(self, copy: Copy, folder: Path) -> None:
        """Bring the files of a copy into a new directory, and check every byte. The journal is unpacked beside them.

        Raises:
            Problem: the copy is broken.
        """
        there = self._at(files.FOLDER, copy.name)
        folder.mkdir()
        for name in (*copy.manifest.files, files.MANIFEST):
            try:
                self._fs.get_file(f"{there}/{name}", str(folder / name))
            except FileNotFoundError:
                raise CheckpointDiffers(f"{copy.name}/{name} is missing") from None
        files.verify(folder)
        try:
            with self._fs.open(f"{there}/{COPIED_JOURNAL}", "rb") as source, gzip.open(source) as lines:
                with (folder / JOURNAL).open("wb") as target:
                    shutil.copyfileobj(lines, target)
        except (EOFError, FileNotFoundError, gzip.BadGzipFile, zlib.error) as error:
            raise CheckpointDiffers(f"{copy.name}/{COPIED_JOURNAL} is missing or damaged: {error}") from error

    def verify(self, copy: Copy) -> None:
        """Read a copy and check every byte of it; nothing is kept.

        Raises:
            Problem: the copy is broken.
        """
        for name, facts in copy.manifest.files.items():
            try:
                with self._fs.open(self._at(files.FOLDER, copy.name, name), "rb") as file:
                    checks = [zlib.crc32(block) for block in iter(partial(file.read, files.BLOCK_BYTES), b"")]
            except FileNotFoundError:
                raise CheckpointDiffers(f"{copy.name}/{name} is missing") from None
            if (checks or [0]) != facts.crc32:
                raise CheckpointDiffers(f"{copy.name}/{name} is damaged: its checksums are not those of the manifest")

    def _names(self, *below: str) -> list[str]:
        try:
            found = self._fs.ls(self._at(*below), detail=False)
        except FileNotFoundError:
            return []
        return sorted({str(name).rstrip("/").rpartition("/")[2] for name in found})

    def _at(self, *below: str) -> str:
        return "/".join((self._root, *below))


def _age(copy: Copy) -> tuple[int, int]:
    found = _NAME.fullmatch(copy.name)
    assert found is not None
    return copy.step, int(found[2] or 0)


def _write_journal(journal: Path, lines: int, target: Any) -> None:
    """Write the first lines of a journal, compressed."""
    with gzip.GzipFile(fileobj=target, mode="wb", compresslevel=6, mtime=0) as packed:
        if not journal.exists():
            return
        left = end_of(journal, lines)
        with journal.open("rb") as source:
            while left > 0 and (block := source.read(min(left, files.BLOCK_BYTES))):
                packed.write(block)
                left -= len(block)


def find(locations: Iterable[str]) -> Iterator[tuple[Store, Copy]]:
    """Return the whole copies at these places, the newest first.

    Raises:
        CheckpointError: a place cannot be read.
    """
    found = []
    for location in locations:
        try:
            store = Store(location)
            found += [(store, copy) for copy in store.copies()]
        except Exception as error:  # of any library that stands behind fsspec
            raise CheckpointError(
                f"the copies in {without_password(location)} cannot be read: {in_words(error)}"
            ) from error
    return iter(sorted(found, key=lambda one: _age(one[1]), reverse=True))


def in_words(error: BaseException) -> str:
    """Return an error of a disk, or of a library behind fsspec, in words."""
    known = error.strerror if isinstance(error, OSError) else None
    return known or str(error) or type(error).__name__


# -- the thread --------------------------------------------------------------------------------------


class Copier:
    """A thread that copies the checkpoints of a run to one place. Errors are told, and never raised.

    If checkpoints come faster than they can be copied, those in between are left out.

    Args:
        directory: of the run.
    """

    def __init__(self, url: str, policy: Checkpoints | None, directory: Path) -> None:
        self._url = url
        self._policy = policy
        self._directory = directory
        self._store: Store | None = None
        self._garbage: set[str] = set()
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._current: Path | None = None
        self._is_closed = False
        self._copied = -1
        self._said = ""
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> frozenset[Path]:
        """The checkpoints that are being copied, or will be: they must not be removed yet."""
        with self._changed:
            return frozenset(path for path in (self._waiting, self._current) if path is not None)

    def submit(self, checkpoint: Path) -> None:
        """Copy a complete checkpoint soon."""
        with self._changed:
            self._waiting = checkpoint
            if self._thread is None:
                self._thread = NamedThread(self._work, "unisono-copies")
                self._thread.start()
            self._changed.notify_all()

    def is_idle_within(self, seconds: float) -> bool:
        """Wait until all is copied or has failed, at most for so long; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._current is None, max(seconds, 0.0))

    def say_missing(self, waited_s: float) -> None:
        """Say at the end of the run if its newest checkpoint is not copied."""
        if held := self.held:
            newest = f"that of step {self._copied} is the newest" if self._copied >= 0 else "there is none yet"
            name = max(path.name for path in held)
            tell(
                f"unisono: the copy of {name} to {without_password(self._url)} was not finished within {waited_s:.0f} "
                f"s and was abandoned; of this worker's copies, {newest}. Checkpoints(copies_wait_s=...) waits longer"
            )
        elif self._said:
            tell(f"unisono: the newest checkpoint has no copy in {without_password(self._url)}: {self._said}")

    def close(self) -> None:
        """End the thread. A copy that is under way stays cut short if the process ends before it is done."""
        with self._changed:
            self._is_closed, self._waiting = True, None
            self._changed.notify_all()
            is_idle = self._current is None
        if self._thread is not None and is_idle:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
                if self._waiting is None:
                    return
                self._current, self._waiting = self._waiting, None
            try:
                self._copy(self._current)
            except Exception as error:  # of any library that stands behind fsspec
                self._fail(self._current, in_words(error))
            finally:
                with self._changed:
                    self._current = None
                    self._changed.notify_all()

    def _fail(self, checkpoint: Path, why: str) -> None:
        self._store = None  # a connection that broke is made again
        if not self._said:
            tell(
                f"unisono: {checkpoint.name} was not copied to {without_password(self._url)}: {why}. Training "
                "continues; copying is tried again with the next checkpoint"
            )
        self._said = why

    def _copy(self, checkpoint: Path) -> None:
        content = (checkpoint / files.MANIFEST).read_bytes()
        manifest = files.parse_manifest(content, checkpoint.name)
        facts = read_facts(self._directory)
        if self._store is None:
            self._store = Store(self._url)
            copies = self._store.copies()
            self._garbage |= self._store.cut_short
        else:
            copies = self._store.copies()
        self._check_owner(copies, facts)
        if all(copy.manifest != manifest for copy in copies):
            taken = {copy.name for copy in copies} | self._store.cut_short
            new = Copy(free_name(manifest.step, taken), manifest.step, facts, manifest)
            self._garbage.add(new.name)
            self._store.write(new, content, checkpoint, self._directory / JOURNAL)
            self._garbage.discard(new.name)
            for copy in choose_removed(copies, new, self._policy):
                self._store.remove(copy.name)
        for name in sorted(self._garbage):
            self._store.remove(name)
        self._garbage.clear()
        self._copied = manifest.step
        if self._said:
            self._said = ""
            tell(f"unisono: checkpoints are copied to {without_password(self._url)} again; {checkpoint.name} is there")

    def _check_owner(self, copies: Sequence[Copy], facts: Mapping[str, Any]) -> None:
        for copy in copies:
            if not lineage(copy.facts) & lineage(facts):
                raise CheckpointError(
                    f"it holds copies of another run ({copy.facts.get('run_id')}), which are left alone; to continue "
                    "that run, use --resume; otherwise choose another place"
                )


class Copies:
    """The places to which a run copies its checkpoints.

    Args:
        directory: of the run; None copies nothing.
    """

    def __init__(self, urls: Sequence[str], policy: Checkpoints | None, directory: Path | None) -> None:
        self.urls = tuple(urls)
        self._wait_s = (policy or Checkpoints()).copies_wait_s
        self._copiers = [Copier(url, policy, directory) for url in urls] if directory is not None else []
        self._newest: Path | None = None
        self._is_over = True
        """Nothing was submitted since the end of the run has waited."""
        self._deadline: float | None = None
        self._say_at = math.inf

    @property
    def held(self) -> frozenset[Path]:
        """The checkpoints that must not be removed yet."""
        return frozenset[Path]().union(*(copier.held for copier in self._copiers))

    def submit(self, checkpoint: Path) -> None:
        """Copy a complete checkpoint to all places."""
        self._newest = checkpoint
        self._is_over = False
        for copier in self._copiers:
            copier.submit(checkpoint)

    def submit_unless_done(self, checkpoint: Path) -> None:
        """Copy a complete checkpoint, unless it was the last that was submitted."""
        if checkpoint != self._newest:
            self.submit(checkpoint)

    @property
    def is_awaited(self) -> bool:
        """Whether the end of the run waits for a copy, or has still to say that one is missing."""
        return bool(self._copiers) and not self._is_over

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until all is copied, at most for so long. Says that it waits, and in the end what is missing.

        All calls together wait for the time that the policy gives.
        """
        if not self.is_awaited:
            return
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._wait_s
            self._say_at = now + SAY_AFTER_S
        until = min(now + seconds, self._deadline)
        if not self._is_idle_by(min(until, self._say_at)) and time.monotonic() >= self._say_at:
            self._say_at = math.inf
            names = sorted({path.name for path in self.held})
            verb = "is" if len(names) == 1 else "are"
            tell(f"unisono: waits until {listed(names)} {verb} copied, {self._wait_s:.0f} s at most")
        if self._is_idle_by(until) or time.monotonic() >= self._deadline:
            self._is_over, self._deadline = True, None
            for copier in self._copiers:
                copier.say_missing(self._wait_s)

    def _is_idle_by(self, until: float) -> bool:
        return all(copier.is_idle_within(until - time.monotonic()) for copier in self._copiers)

    def close(self) -> None:
        """End the threads."""
        for copier in self._copiers:
            copier.close()
