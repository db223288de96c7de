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

__all__ = ["JOURNAL", "Difference", "Journal", "compare", "conclude", "end_line", "read", "summary", "truncate"]

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
        self._warned = False

    def start(self, *, writer: bool) -> None:
        """Begin, or go on as (or no longer as) the writer, at the same number as the others. Local."""
        if self._path is None or not writer:
            self._written = -1
            return
        last = -1
        if self._path.exists():
            _drop_torn_line(self._path)
            for line in read(self._path):
                last = max(last, int(line.get("line", -1)))
        self._written = last
        for line in self._recent:
            self._write(line)

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
            self._write(line)

    def _write(self, line: Line) -> None:
        if self._path is None or line["line"] <= self._written:
            return
        self._written = line["line"]
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_plain(line)) + "\n")
        except OSError as error:
            # Training is worth more than its diary: a full disk, or a machine that does not see the directory.
            if not self._warned:
                self._warned = True
                warnings.warn(f"the journal {self._path} cannot be written: {error}; training goes on", stacklevel=2)


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


def read(path: Path) -> Iterator[Line]:
    """The lines of a journal (a file, or the directory of its run). A torn last line is left out."""
    path = path / JOURNAL if path.is_dir() else path
    with path.open(encoding="utf-8") as file:
        for text in file:
            if not text.endswith("\n"):
                return
            yield json.loads(text)


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
    """Write why a run failed whose members could not say so: all of them are gone. Does nothing where one has.

    Raises:
        OSError: the journal cannot be written.
    """
    path = directory / JOURNAL
    if not path.exists():
        return
    _drop_torn_line(path)
    lines = list(read(path))
    if lines and lines[-1]["kind"] == "end":
        return
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"line": len(lines), **end_line(ok=False, reason=reason)}) + "\n")


def summary(directory: Path) -> dict[str, Any]:
    """What the journal of a run that is over (or that nobody answers for) says about it."""
    found: dict[str, Any] = {"state": "unknown", "step": None, "loss": None, "workers": []}
    if not (directory / JOURNAL).exists():
        return found
    for line in read(directory):
        if line["kind"] == "step":
            found.update(
                state="stopped", step=line["step"], num_steps=line["num_steps"], epoch=line["epoch"], loss=line["loss"],
                digest=line["digest"], generation=line["generation"],
            )  # fmt: skip
        elif line["kind"] == "end":
            found.update(state="finished" if line["ok"] else "failed", digests=line["digests"], reason=line["reason"])
    return found


class Difference(Exception):
    """Two runs differ; the message says where first and in what."""


def compare(a: Path, b: Path) -> str:
    """Say that two runs are identical, as ``identical: 390 steps, model 5f3a...``.

    Raises:
        Difference: they are not.
        OSError: one of them cannot be read.
    """
    ours, theirs = _comparable(a), _comparable(b)
    num_steps = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine["kind"] != other["kind"]:
            raise Difference(f"after {num_steps} equal steps: {a} has {_name(mine)}, {b} has {_name(other)}")
        for key, value in mine.items():
            if value != other.get(key):
                raise Difference(
                    f"{_name(mine)} is the first to differ: {key} is {value} in {a}, {other.get(key)} in {b}"
                )
        num_steps += mine["kind"] == "step"
    if len(ours) != len(theirs):
        shorter, longer = (a, b) if len(ours) < len(theirs) else (b, a)
        rest = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
        raise Difference(f"equal for {num_steps} steps; then {shorter} ends, where {longer} has {_name(rest)}")
    end = ours[-1]["digests"] if ours and ours[-1]["kind"] == "end" else {}
    digests = "".join(f", {name} {digest}" for name, digest in end.items())
    return (
        f"identical: {num_steps} steps{digests}" if end else f"identical so far: {num_steps} steps, neither has ended"
    )


def _name(line: Line) -> str:
    if line["kind"] == "step":
        return f"step {line['step']}"
    return {"evaluation": f"the evaluation after step {line.get('step')}", "end": "the end"}.get(line["kind"], "a line")


_SAME = {
    "step": ("step", "epoch", "samples", "digest", "loss", "weight"),
    "evaluation": ("step", "totals"),
    "end": ("digests",),
}


def _comparable(path: Path) -> list[Line]:
    """What must be equal in two runs that did the same: not times, not workers."""
    return [
        {"kind": line["kind"], **{key: line.get(key) for key in _SAME[line["kind"]]}}
        for line in read(path)
        if line["kind"] in _SAME
    ]
