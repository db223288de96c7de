"""Directory of a run, and the lock and claim that keep it for one run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from unisono.core.errors import RunDirectoryError
from unisono.record.journal import JOURNAL, read
from unisono.record.journal.file import INDEX
from unisono.record.journal.newest import earlier
from unisono.record.journal.times import TIMES
from unisono.system.owned import left_parts, open_regular, read_regular, write_whole

__all__ = [
    "ADDRESS_FILE",
    "CERTIFICATE",
    "CHECKPOINTS",
    "EVALUATIONS",
    "EVENTS_FILE",
    "MOST_FACTS",
    "PLAN_FILE",
    "PRIVATE",
    "REPLACED",
    "REPORT_FILE",
    "RUN_FILE",
    "STATUS_SCHEMA",
    "TOKEN_FILE",
    "USE_FILE",
    "WITHOUT_FILE",
    "Lock",
    "RunDirectory",
    "check_schema",
    "claim",
    "describe",
    "doubt",
    "forget_head",
    "going",
    "holder",
    "is_blank",
    "is_going",
    "is_taken",
    "make",
    "read_facts",
    "refuse_used",
    "sound_steps",
    "user",
]

RUN_FILE = "run.json"
PRIVATE = ("command",)
"""What is not told of a run's description to those who only look: the script's arguments may be secret."""
ADDRESS_FILE = "head.json"
TOKEN_FILE = "token"
EVENTS_FILE = "events.jsonl"
USE_FILE = "use.jsonl"
WITHOUT_FILE = "without.txt"
"""The samples that the run leaves out (`unisono.record.without`)."""
RUN_SCHEMA = 1
"""Of the description."""
MOST_FACTS = 64 << 20
"""Bytes of a description."""
STATUS_SCHEMA = 1
"""Of what ``unisono watch --once --json`` says."""
LOCK_FILE = ".lock"
LOCK_PATIENCE_S = 5.0  # for the processes of a run that was killed a moment ago
LOCK_RETRY_S = 0.05
LOOK_EVERY_S = 1.0
"""How often a worker that has lost sight of the run's directory looks for it."""
CERTIFICATE = "certificate.json"
"""Where ``unisono certify`` writes, if nothing else is said."""
REPORT_FILE = "report.html"
"""Where ``unisono report`` does."""
PLAN_FILE = "plan.json"
"""Where ``unisono plan`` does."""
CHECKPOINTS = "checkpoints"
EVALUATIONS = "evaluations"
"""Snapshots that wait for an evaluator (`unisono.engine.checkpoint.evaluations`)."""
PROBLEMS = "problems"
REPLACED = "replaced"
"""Where the files of a run go that another one replaces: a run's directory for each of them, by number."""
_JSON = rb'\{\s*"'
_STATE = {
    r"manifest\.json": _JSON + b'format": ',
    r"skeleton\.msgpack": rb"[\x80-\x8f\xde\xdf]",
    r"part-\d{5}-of-\d{5}\.safetensors": rb".{8}\{",
}
_OURS = {
    **{rf"{CHECKPOINTS}/\.?step-\d{{10,}}[^/]*/{name}": begins for name, begins in _STATE.items()},
    **{rf"{EVALUATIONS}/\.?\d{{10}}[^/]*/{name}": begins for name, begins in _STATE.items()},
    rf"{PROBLEMS}/\d{{8}}-\d{{6}}-\d{{3}}-[^/]+\.txt": b"",
    r"profile/steps-\d+-\d+\.json\.gz": b"\x1f\x8b",
    r"tensorboard/events\.out\.tfevents\.\d{10}\.\d{6}\.[^/]+": b".*brain",
    r"tools/(tensorboard|mlflow|wandb)\.json": b"(?!)",
    r"(times|use)/\d+-\d{6}\.jsonl": _JSON + b'schema":',  # of version 0.1
    r"(times|use)(\.before)?\.jsonl": _JSON + b'(step|time)":',
    r"events\.jsonl": _JSON + b'time": ',
    r"journal\.index": _JSON + b'offset":',
    r"certificate\.json": _JSON + b'payloadType": "application/vnd.in-toto',
    r"report\.html": b"<!doctype html>\n<html[^\n]*\n<meta http-equiv=.Content-Security-Policy",
    r"plan\.json": _JSON + b'schema": ',
    r"without\.txt": b"(?!)",
    r"journal\.jsonl": _JSON + b'line": ',
    r"run\.json": _JSON + b'schema": ',
}
"""What a run writes into its directory: patterns of the path, and of how the file begins. ``(?!)`` matches nothing:
anybody may have written such a file.
"""
_NAMES = (
    *(CHECKPOINTS, EVALUATIONS, PROBLEMS, "profile", "tensorboard", "tools", "times", "use", EVENTS_FILE, INDEX),
    *(str(path) for name in (TIMES, USE_FILE) for path in (earlier(Path(name)), Path(name))),
    *(CERTIFICATE, REPORT_FILE, PLAN_FILE, WITHOUT_FILE, JOURNAL, RUN_FILE),
)
"""All of it, in the order in which it is put aside; last what says that there is a run."""
_BEGINNING_BYTES = 1000
_SOUND = "sound"


class Lock:
    """Lock of a directory, shared by the processes of one run: no other run gets it until the last of them has ended.

    The kernel frees the lock when a process ends, however that happens. On a file system without locks it does nothing.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._has_locks = True
        """The file system of the directory has locks."""

    @property
    def is_certain(self) -> bool:
        """Whether no process of another run holds the directory: this one does."""
        return self._descriptor is not None and self._has_locks

    def take(self, directory: Path, run_id: str) -> None:
        """Lock ``directory`` for a run; does nothing if this process holds a lock already.

        Raises:
            RunDirectoryError: the processes of another run hold it.
        """
        if self._descriptor is not None:
            return
        deadline = time.monotonic() + LOCK_PATIENCE_S
        try:
            descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RunDirectoryError(f"the run directory {directory} cannot be written: {error.strerror}") from error
        try:
            while not self._try(descriptor, run_id):
                if time.monotonic() > deadline:
                    other = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                    raise RunDirectoryError(going(directory, other))
                time.sleep(LOCK_RETRY_S)
        except OSError as error:
            os.close(descriptor)
            raise RunDirectoryError(f"the run directory {directory} cannot be written: {error.strerror}") from error
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def is_in(self, directory: Path, run_id: str) -> bool:
        """Return whether the locked directory still has this name, or a directory of this name holds the same run.

        False if the directory was removed or moved, also if another one was made under its name.
        """
        if self._descriptor is None:
            return False
        with contextlib.suppress(OSError):
            # For each line of the journal: a string is made in a tenth of the time of a path.
            if os.path.samestat(os.stat(f"{directory}/{LOCK_FILE}"), os.fstat(self._descriptor)):
                return True
        with contextlib.suppress(OSError):
            return holder(directory) == run_id  # the directory was restored from a copy
        return False

    def release(self) -> None:
        """Free the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _try(self, descriptor: int, run_id: str) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{run_id}, pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                self._has_locks = False
                return True
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # The processes of the run whose id is in the file share the lock.
        if os.pread(descriptor, 200, 0).decode(errors="replace").partition(",")[0] == run_id:
            return True
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return False


class RunDirectory:
    """Directory of a run, as one of its processes sees it.

    Args:
        path: None: the run has no directory.
        may_write: returns False while another side of the run, from which this one is cut off, writes there.
    """

    def __init__(self, path: Path | None, may_write: Callable[[], bool] = lambda: True) -> None:
        self.path = path
        self._may_write = may_write
        self._is_there = False
        self._lock = Lock()
        self._run_id = ""
        self._look_at = 0.0

    def claim(self, run_id: str, *, overwrite: bool, resume: bool, by_command: bool = False) -> None:
        """Claim the directory for run ``run_id`` and lock it; see `claim` and `Lock.take`.

        Another run that has ended before its first step (`is_blank`) is replaced in any case.
        """
        if self.path is None:
            return
        self._run_id = run_id
        make(self.path)
        if overwrite or resume or holder(self.path) in (None, run_id) or is_blank(self.path):
            self._lock.take(self.path, run_id)
        try:
            is_free = self._lock.is_certain and is_blank(self.path)  # under the lock nobody does a first step
            claim(self.path, run_id, overwrite=overwrite or is_free, resume=resume, by_command=by_command)
        except BaseException:
            self._lock.release()
            raise

    def enter(self, run_id: str) -> None:
        """Lock the directory if this process sees it and a member of run ``run_id`` has claimed it."""
        self._run_id = run_id
        if self.path is not None and self.path.is_dir() and holder(self.path) == run_id:
            self._lock.take(self.path, run_id)
            self._is_there = True

    @property
    def is_seen(self) -> bool:
        """Whether this process could write into the directory when it last looked."""
        return self._is_there and self._may_write()

    @property
    def is_left_to_others(self) -> bool:
        """Whether another side of the run writes into the directory."""
        return self.path is not None and not self._may_write()

    def look(self) -> bool:
        """Return whether the directory still exists and is still that of the run, and whether this side may write."""
        self._is_there = self.path is not None and self._lock.is_in(self.path, self._run_id)
        return self.is_seen

    def look_again(self) -> None:
        """Check from time to time whether the directory is there again, or is there now."""
        if self._is_there or self.path is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_EVERY_S
        if self._lock.is_held:
            self.look()
        elif self._run_id:
            self.enter(self._run_id)

    def release(self) -> None:
        """Let other runs have the directory."""
        self._lock.release()


def claim(directory: Path, run_id: str, *, overwrite: bool, resume: bool = False, by_command: bool = False) -> None:
    """Claim ``directory`` for run ``run_id``; does nothing if the directory is that run's already.

    Args:
        overwrite: put the files of another run aside, into a folder of ``replaced``.
        resume: go on with the run in the directory. Its id so far joins the ``earlier`` ones in the description.
        by_command: ``unisono run`` has started the script: what to do instead is an option of it.

    Raises:
        RunDirectoryError: the directory holds another run, that run is still going, it cannot be written, or a newer
            version has written it.
    """
    make(directory)
    if resume:
        check_schema(directory)
    other = holder(directory)
    if other == run_id:
        return
    if other is not None and not resume:
        if not overwrite:
            _refuse(directory, other, by_command=by_command)
        _put_aside(directory)
    facts = read_facts(directory) if resume else {}
    if "run_id" in facts:
        facts["earlier"] = [*facts.get("earlier", ()), facts["run_id"]]
    describe(directory, {**facts, "run_id": run_id})


def _put_aside(directory: Path) -> None:
    """Move the run that a directory holds into a folder of `REPLACED`, and remove the run that was replaced before.

    Others may have files and folders of the same names. So what lies in the directory is only renamed, and a folder in
    which a run has written nothing stays where it is. Of the run before is removed what is known to be a run's.

    Raises:
        RunDirectoryError: the directory cannot be written.
    """
    has_something, began = not is_blank(directory), read_facts(directory).get("started")
    try:
        before = [path for path in (directory / REPLACED).glob("*") if path.name.isdecimal()]
        aside = directory / REPLACED / str(max((int(path.name) for path in before), default=0) + 1)
        aside.mkdir(parents=True)
        for name in _NAMES:
            path = directory / name
            if any(_own_files(directory, name)):
                if name == PLAN_FILE and isinstance(began, float) and path.stat().st_mtime > began:
                    continue  # it is a plan for the run that begins
                path.rename(aside / name)
        for replaced in before if has_something else [aside]:
            _remove(replaced)
    except OSError as error:
        raise RunDirectoryError(f"the run directory {directory} cannot be written: {error.strerror}") from error


def _own_files(directory: Path, name: str) -> Iterator[tuple[Path, bytes]]:
    """Yield the files of a run under a name in its directory, as far as paths say it, with what they begin with."""
    folder = directory / name
    for path in (folder, *folder.glob("*"), *folder.glob("*/*")):
        for pattern, begins in _OURS.items():
            if re.fullmatch(pattern, path.relative_to(directory).as_posix()) and path.is_file():
                yield path, begins


def _remove(replaced: Path) -> None:
    """Remove a run that was put aside, and nobody else's file."""
    if "run_id" not in read_facts(replaced):
        return
    for name in _NAMES:
        for path, begins in _own_files(replaced, name):
            if not path.resolve().is_relative_to(replaced.resolve()):
                continue  # a link leads there
            with open_regular(path) as file:
                is_known = re.match(begins, file.read(_BEGINNING_BYTES), re.DOTALL)
            if is_known:
                path.unlink()
    for path in sorted((path for path in (replaced, *replaced.rglob("*")) if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):  # something is left there
            path.rmdir()


def refuse_used(directory: Path, run_id: str = "") -> None:
    """Raise the error that `claim` would raise in a worker later, for a new run of ``unisono run``.

    Args:
        run_id: of the new run; "": it has none yet.
    """
    other = holder(directory)
    if other not in (None, run_id) and (is_going(directory) or not is_blank(directory)):
        _refuse(directory, other, by_command=True)


def _refuse(directory: Path, other: str, *, by_command: bool) -> NoReturn:
    if (name := user(directory)) is not None:
        raise RunDirectoryError(going(directory, name))
    replace, go_on = (
        ("add --overwrite", f"--resume {directory}")
        if by_command
        else ("pass overwrite=True to unisono.Run", 'resume="auto"')
    )
    raise RunDirectoryError(
        f"{directory} holds another run ({other}); choose another directory, or {replace} to replace it (its files are "
        f"put aside into {directory / REPLACED}), or {go_on} to resume it"
    )


def check_schema(directory: Path) -> None:
    """Check that this version knows what the files of a run mean, before the run is changed or computed again.

    Raises:
        RunDirectoryError: a newer version has written the run's description.
    """
    schema = read_facts(directory).get("schema", RUN_SCHEMA)
    if not isinstance(schema, int) or schema > RUN_SCHEMA:
        raise RunDirectoryError(
            f"{directory} was written by a newer version of unisono (schema {schema} of {RUN_FILE}, this one knows "
            f"{RUN_SCHEMA}); use that version, or start a run in another directory"
        )


def going(directory: Path, user: str) -> str:
    """Return the error message for a directory whose run has not ended."""
    return (
        f"a run is active in {directory} ({user}); wait for its end, stop it (unisono stop {directory}), or choose "
        "another directory"
    )


def forget_head(directory: Path, run_id: str, token: str) -> None:
    """Remove the address and the token of the head of run ``run_id``, where they are that run's and still there."""
    for path in (directory / ADDRESS_FILE, *left_parts(directory, ADDRESS_FILE)):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(read_regular(path))["run_id"] == run_id:
                path.unlink(missing_ok=True)
    with contextlib.suppress(OSError, ValueError):
        if read_regular(directory / TOKEN_FILE).decode() == token:
            (directory / TOKEN_FILE).unlink(missing_ok=True)


def is_taken(directory: Path, run_id: str) -> bool:
    """Return whether processes of another run than ``run_id`` hold the `Lock` of a directory."""
    name = user(directory) or ""
    return name != "" and not name.startswith(f"{run_id},")


def is_going(directory: Path) -> bool:
    """Return whether a process of a run holds the `Lock` of a directory."""
    return bool(user(directory))


def user(directory: Path) -> str | None:
    """Return the holder of the `Lock` of a directory that this process does not hold; None: there is none."""
    with contextlib.suppress(OSError), open_regular(directory / LOCK_FILE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back when the file is closed
        except BlockingIOError:
            return file.read(200).decode(errors="replace").strip()
    return None


def make(directory: Path) -> None:
    """Make a directory, unless it exists.

    Raises:
        RunDirectoryError: the directory cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"the run directory {directory} cannot be made: {error.strerror}") from error


def holder(directory: Path) -> str | None:
    """Return the id of the run that a directory holds; None if it holds none."""
    file = directory / RUN_FILE
    if not file.exists():
        return "unknown, only a journal is left" if (directory / JOURNAL).exists() else None
    try:
        return str(json.loads(read_regular(file, MOST_FACTS))["run_id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"unreadable {RUN_FILE}"


def is_blank(directory: Path) -> bool:
    """Return whether a directory holds a run without a step, an evaluation or a checkpoint: nothing would be lost."""
    if "run_id" not in read_facts(directory) or any(_own_files(directory, CHECKPOINTS)):
        return False
    try:
        return not (directory / JOURNAL).exists() or all(line["kind"] == "end" for line in read(directory / JOURNAL))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_facts(directory: Path, name: str = RUN_FILE) -> dict[str, Any]:
    """Return the run's description; empty if there is none that can be read."""
    try:
        facts = json.loads(read_regular(directory / name, MOST_FACTS))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def doubt(directory: Path, sound: int) -> None:
    """Note that checkpoints of more than ``sound`` steps of the run may hold wrong values, until the run goes on.

    Raises:
        RunDirectoryError: the directory cannot be written.
    """
    describe(directory, {**read_facts(directory), _SOUND: sound})


def sound_steps(directory: Path) -> int | None:
    """Return how many steps a checkpoint of the run may have at most that is not to be doubted; None: any number."""
    found = read_facts(directory).get(_SOUND)
    return found if isinstance(found, int) else None


def describe(directory: Path, facts: dict[str, Any]) -> None:
    """Write ``facts`` (run id, recipe, fingerprint) as the run's description, all at once."""
    facts = {"schema": RUN_SCHEMA, **facts}
    try:
        write_whole(directory / RUN_FILE, f"{json.dumps(facts, indent=2)}\n".encode())
    except OSError as error:
        raise RunDirectoryError(f"the run directory {directory} cannot be written: {error.strerror}") from error
