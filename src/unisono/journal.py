"""The journal of a run: one line of JSON a step, only ever appended.

A line is what all members agree on after a commit (step, loss, weight, digest), and how long each of them took. Whoever
is rank 0 writes; when rank 0 dies after a commit and before its line, the next one writes it, because every member
keeps the last few. The last line says how the run ended, with a digest of every tracked object.

Lines by ``kind``: ``step``, ``evaluation``, ``end``.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.words import count

__all__ = [
    "JOURNAL",
    "Difference",
    "Journal",
    "compare",
    "conclude",
    "end_line",
    "has_steps",
    "read",
    "summary",
    "truncate",
]

JOURNAL = "journal.jsonl"
KEPT_LINES = 4

Line = dict[str, Any]


class Journal:
    """The journal as one member sees it.

    Args:
        path: None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._recent: deque[Line] = deque(maxlen=KEPT_LINES)
        self._number = 0
        self._written = -1
        self._failed_at: int | None = None  # so many bytes were right before a line that could not be written
        self._warned = False

    def start(self, *, writer: bool) -> None:
        """Begin, or go on as (or no longer as) the writer, at the same number as the others. Local.

        What is wrong with the journal is a warning: it is no reason to end a training.
        """
        self._written, self._failed_at = -1, None
        if self._path is None or not writer:
            return
        try:
            if self._path.exists():
                _drop_torn_line(self._path)
                self._written, broken = _last_number(self._path)
                if broken:
                    warnings.warn(f"{broken}; the run goes on after its last whole line", stacklevel=2)
        except OSError as error:
            self._written = self._number - 1  # nothing twice
            self._say(error)
        self._write()

    def go_on_at(self, number: int) -> None:
        """The run has ``number`` lines already: what a newcomer is told."""
        if number == 0:
            return  # the run begins, and all members have said the same until here
        self._number = number
        self._recent.clear()

    @property
    def number(self) -> int:
        """How many lines this member knows of."""
        return self._number

    def append(self, line: Line, *, writer: bool) -> None:
        """Add a line. Every member calls it with the same; only the writer writes."""
        line = {"line": self._number, **line}
        self._number += 1
        self._recent.append(line)
        if writer:
            self._write()

    def _write(self) -> None:
        """Write what is not written of the last few lines: the newest, and those that a full disk had no room for."""
        lines = [line for line in self._recent if line["line"] > self._written]
        if self._path is None or not lines:
            return
        try:
            with self._path.open("ab", buffering=0) as file:
                if self._failed_at is not None:  # what follows half a line would be none either
                    file.truncate(self._failed_at)
                self._failed_at = os.fstat(file.fileno()).st_size
                data = memoryview("".join(json.dumps(_plain(line)) + "\n" for line in lines).encode())
                while data:
                    data = data[file.write(data) :]
            self._written, self._failed_at = lines[-1]["line"], None
        except OSError as error:
            # Training is worth more than its diary: a full disk, or a machine that does not see the directory.
            self._say(error)

    def _say(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"the journal {self._path} cannot be written: {error}; training goes on", stacklevel=3)


def _plain(value: Any) -> Any:
    # JSON has no NaN and no infinity; as strings they stay readable by everything.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _drop_torn_line(path: Path) -> None:
    """A writer that was killed while it wrote leaves half a line; the next one writes that line again."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def _last_number(path: Path) -> tuple[int, str]:
    """The highest number of a whole line (-1: there is none), and what is wrong with the first that is broken."""
    last, broken = -1, ""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                last = max(last, int(_parse(path, number, text).get("line", -1)))
            except (ValueError, TypeError) as error:
                broken = broken or str(error)
    return last, broken


def read(path: Path) -> Iterator[Line]:
    """The lines of a journal (a file, or the directory of its run). A torn last line is left out.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is broken.
    """
    path = path / JOURNAL if path.is_dir() else path
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            yield _parse(path, number, text)


def _parse(path: Path, number: int, text: bytes) -> Line:
    try:
        line = json.loads(text)
        whole = isinstance(line, dict) and isinstance(line["kind"], str)
    except (ValueError, KeyError):
        whole = False
    if not whole:
        shown = text[:40].decode(errors="replace").rstrip("\n")
        raise ValueError(f"line {number} of {path} is not one of a journal: {shown!r}")
    found: Line = line
    return found


def has_steps(directory: Path) -> bool:
    """Whether the journal in ``directory`` has the line of a step. One that cannot be read has none."""
    try:
        return any(line["kind"] == "step" for line in read(directory / JOURNAL))
    except (OSError, ValueError):
        return False


def truncate(path: Path, number: int) -> None:
    """Leave the first ``number`` lines: what a run had written when it made the checkpoint that it goes on from."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        while line := file.readline():
            try:
                is_kept = int(json.loads(line)["line"]) < number
            except (ValueError, KeyError, TypeError):
                is_kept = False
            if not is_kept:
                file.seek(-len(line), os.SEEK_CUR)
                file.truncate()
                os.fsync(file.fileno())
                return


def end_line(*, ok: bool, reason: str = "", digests: dict[str, str] | None = None) -> Line:
    """The last line of a run, to be appended: ``digests`` are those of the tracked objects, by name."""
    return {"kind": "end", "ok": ok, "reason": reason, "digests": digests or {}}


def conclude(directory: Path, reason: str) -> None:
    """Write why a run failed whose members could not say so: all of them are gone.

    Does nothing where one has, and where the journal is broken.

    Raises:
        OSError: the journal cannot be written.
    """
    path = directory / JOURNAL
    if not path.exists():
        return
    _drop_torn_line(path)
    try:
        lines = list(read(path))
    except ValueError:
        return
    if lines and lines[-1]["kind"] == "end":
        return
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"line": len(lines), **end_line(ok=False, reason=reason)}) + "\n")


def summary(directory: Path) -> dict[str, Any]:
    """What the journal of a run that is over (or that nobody answers for) says about it.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    found: dict[str, Any] = {"state": "unknown", "step": None, "loss": None, "workers": []}
    if not (directory / JOURNAL).exists():
        return found
    for line in read(directory):
        if line["kind"] == "step":
            names = ("step", "num_steps", "epoch", "loss", "digest", "generation")
            found.update({name: line.get(name) for name in names}, state="stopped")
        elif line["kind"] == "end":
            state = "finished" if line.get("ok") else "failed"
            found.update(state=state, digests=line.get("digests"), reason=line.get("reason", ""))
    return found


class Difference(Exception):
    """Two runs differ; the message says where first and in what."""


def compare(a: Path, b: Path) -> str:
    """Say that two runs are identical, as ``identical: 390 steps, model 5f3a...``.

    Raises:
        Difference: they are not.
        OSError, ValueError: one of them cannot be read.
    """
    ours, theirs = _comparable(a), _comparable(b)
    num_steps = 0
    for mine, other in zip(ours, theirs, strict=False):
        equal = f"equal for {count(num_steps, 'step')}"
        if mine["kind"] != other["kind"] or mine.get("ok") != other.get("ok"):
            raise Difference(f"{equal}; then {a} {_does(mine)}, and {b} {_does(other)}")
        for key, value in mine.items():
            if value != other.get(key):
                raise Difference(
                    f"{_name(mine)} is the first to differ: {key} is {value} in {a}, {other.get(key)} in {b}"
                )
        num_steps += mine["kind"] == "step"
    if len(ours) != len(theirs):
        shorter, longer = (a, b) if len(ours) < len(theirs) else (b, a)
        last, rest = min(ours, theirs, key=len)[-1], max(ours, theirs, key=len)[min(len(ours), len(theirs))]
        why = "" if last["kind"] == "end" else " (it was killed, or is still going)"
        raise Difference(
            f"equal for {count(num_steps, 'step')}; then {longer} {_does(rest)}, and {shorter} says no more{why}"
        )
    if ours[-1]["kind"] != "end":
        return f"identical so far: {count(num_steps, 'step')}, neither has ended"
    if not ours[-1]["ok"]:
        return f"identical: {count(num_steps, 'step')}, both failed"
    digests = "".join(f", {name} {digest}" for name, digest in (ours[-1]["digests"] or {}).items())
    return f"identical: {count(num_steps, 'step')}{digests}"


def _name(line: Line) -> str:
    if line["kind"] == "end":
        return "the end"
    return f"the evaluation after step {line['step']}" if line["kind"] == "evaluation" else f"step {line['step']}"


def _does(line: Line) -> str:
    if line["kind"] == "end":
        return "has finished" if line["ok"] else "has failed"
    return f"has {_name(line)}"


_SAME = {
    "step": ("step", "epoch", "samples", "digest", "loss", "weight"),
    "evaluation": ("step", "totals"),
    "end": ("ok", "digests"),
}


def _comparable(path: Path) -> list[Line]:
    """What must be equal in two runs that did the same: not times, not workers. At least one line."""
    found = [
        {"kind": line["kind"], **{key: line.get(key) for key in _SAME[line["kind"]]}}
        for line in read(path)
        if line["kind"] in _SAME
    ]
    if not found:
        raise ValueError(f"{path} holds no journal: it has no step and no end")
    return found
