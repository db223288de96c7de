"""The journal of a run: one line of JSON a step, only ever appended.

A line is what all members agree on after a commit (step, loss, weight, digest), and how long each of them took. One
member writes: the first that sees the run's directory. Every member keeps the lines that it does not know to be in the
file, so whoever is the next to write, or finds room again on a disk that was full, leaves none out. The last line says
how the run ended, with a digest of every tracked object.

Lines by ``kind``: ``step``, ``evaluation``, ``end``, and ``gap``: all lines from ``first`` to ``last`` are lost.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

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
"""So many are kept in any case."""
MOST_KEPT_LINES = 1000
"""So many are kept of those that are not known to be in the file."""
LINES_AT_ONCE = 32
"""As long as there is no room, each step tries with so many, and not with all that are kept."""
BLOCK_BYTES = 1 << 16

Line = dict[str, Any]


class Journal:
    """The journal as one member sees it.

    Args:
        path: None keeps nothing.
        is_there: whether the directory is still that of the run; asked before every write.
    """

    def __init__(self, path: Path | None, is_there: Callable[[], bool] = lambda: True) -> None:
        self._path = path
        self._is_there = is_there
        self._recent: deque[Line] = deque()
        self._number = 0
        self._in_file = 0  # all lines before this one, as far as this member has heard
        self._last: int | None = None  # the last line of the file; None: it is not known yet
        self._failed_at: int | None = None  # so many bytes were right before a line that could not be written
        self._warned = False

    def start(self, *, writer: bool) -> None:
        """Begin, or go on as (or no longer as) the writer, at the same number as the others. Local.

        What is wrong with the journal is a warning: it is no reason to end a training.
        """
        self._last = self._failed_at = None
        if writer:
            self._write()

    def go_on_at(self, number: int, lines: Iterable[str] = ()) -> None:
        """The run has ``number`` lines already, of which these may not be in the file: what a newcomer is told."""
        if number == 0:
            return  # the run begins, and all members have said the same until here
        self._number = number
        self._recent = deque(json.loads(line) for line in lines)
        self._in_file = self._recent[0]["line"] if self._recent else number

    @property
    def number(self) -> int:
        """How many lines this member knows of."""
        return self._number

    @property
    def num_written(self) -> int:
        """How many of them the file has, to the knowledge of its writer; 0 on all others."""
        return self._last + 1 if self._last is not None else 0

    def hear(self, num_written: int) -> None:
        """The writer has said how far the file goes."""
        self._in_file = max(self._in_file, num_written)
        self._forget()

    def unwritten(self) -> list[str]:
        """The lines that are not known to be in the file, as text."""
        return [_text(line) for line in self._recent if line["line"] >= self._in_file]

    def append(self, line: Line, *, writer: bool) -> None:
        """Add a line. Every member calls it with the same; only the writer writes."""
        line = {"line": self._number, **line}
        self._number += 1
        if self._path is None:
            return
        self._recent.append(line)
        if writer:
            self._write()
        self._forget()

    def _forget(self) -> None:
        recent = self._recent
        while recent and len(recent) > (KEPT_LINES if recent[0]["line"] < self._in_file else MOST_KEPT_LINES):
            recent.popleft()

    def _write(self) -> None:
        """Write all lines that are here and not in the file: the newest, and those that there was no room for."""
        if self._path is None:
            return
        try:
            if not self._is_there():
                self._last = None  # it may come back
                return
            if self._last is None:
                self._last = _take_over(self._path)
            lines = [line for line in self._recent if line["line"] > self._last]
            if not lines:
                return
            if lines[0]["line"] > self._last + 1:
                lines = [_gap(self._last + 1, lines[0]["line"] - 1), *lines]
            with self._path.open("ab", buffering=0) as file:
                for start in range(0, len(lines), LINES_AT_ONCE):
                    self._put(file, lines[start : start + LINES_AT_ONCE])
        except OSError as error:
            # Training is worth more than its diary.
            self._say(error)

    def _put(self, file: FileIO, lines: list[Line]) -> None:
        if self._failed_at is not None:  # what follows half a line would be none either
            file.truncate(self._failed_at)
        self._failed_at = os.fstat(file.fileno()).st_size
        data = memoryview("".join(f"{_text(line)}\n" for line in lines).encode())
        while data:
            data = data[file.write(data) :]
        self._last, self._failed_at = lines[-1]["line"], None
        self._in_file = self._last + 1

    def _say(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the journal {self._path} cannot be written: {error}; training goes on, and the last "
                f"{MOST_KEPT_LINES:,} lines are kept until it can be written again",
                stacklevel=3,
            )


def _gap(first: int, last: int) -> Line:
    return {"line": last, "kind": "gap", "first": first, "last": last}


def _text(line: Line) -> str:
    return json.dumps(_plain(line))


def _plain(value: Any) -> Any:
    # JSON has no NaN and no infinity; as strings they stay readable by everything.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _take_over(path: Path) -> int:
    """The number of the last line of a journal (-1: there is none), without what follows its last whole line.

    A writer that was killed while it wrote leaves half a line; the next one writes that line again.
    """
    if not path.exists():
        return -1
    with path.open("r+b") as file:
        end, last, broken = _tail(path, file)
        file.truncate(end)
    if broken:
        warnings.warn(f"{broken}; the run goes on after its last whole line", stacklevel=2)
    return int(last["line"]) if last is not None else -1


def _backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a file from the last to the first, and where each begins. Reads no more than is asked for."""
    start, text = file.seek(0, os.SEEK_END), b""
    while start > 0:
        num_bytes = min(start, max(BLOCK_BYTES, len(text)))
        start -= num_bytes
        file.seek(start)
        text = file.read(num_bytes) + text
        while (cut := text.rfind(b"\n", 0, -1) + 1) > 0:
            yield start + cut, text[cut:]
            text = text[:cut]
    if text:
        yield 0, text


def _tail(path: Path, file: BinaryIO) -> tuple[int, Line | None, str]:
    """Where the last whole line of a journal ends, the last that can be read, and what is wrong with those after it."""
    end, broken = 0, ""
    for place, text in _backwards(file):
        if not text.endswith(b"\n"):
            continue
        end = end or place + len(text)
        try:
            line = _parse(path, text)
            return end, {**line, "line": int(line["line"])}, broken
        except (ValueError, TypeError, KeyError) as error:
            broken = broken or str(error)
    return end, None, broken


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
            yield _parse(path, text, f"line {number}")


def _parse(path: Path, text: bytes, where: str = "a line") -> Line:
    try:
        line = json.loads(text)
        whole = isinstance(line, dict) and isinstance(line["kind"], str)
    except (ValueError, KeyError):
        whole = False
    if not whole:
        shown = text[:40].decode(errors="replace").rstrip("\n")
        raise ValueError(f"{where} of {path} is not one of a journal: {shown!r}")
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
        cut = end = file.seek(0, os.SEEK_END)
        for place, text in _backwards(file):
            try:
                is_kept = text.endswith(b"\n") and int(json.loads(text)["line"]) < number
            except (ValueError, KeyError, TypeError):
                is_kept = False
            if is_kept:
                break
            cut = place
        if cut < end:
            file.truncate(cut)
            os.fsync(file.fileno())


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
    with path.open("r+b") as file:
        end, last, broken = _tail(path, file)
        if broken or (last is not None and last["kind"] == "end"):
            return
        file.truncate(end)
        file.seek(end)
        number = last["line"] + 1 if last is not None else 0
        file.write((json.dumps({"line": number, **end_line(ok=False, reason=reason)}) + "\n").encode())


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

    Lines that one of them lacks are named and not compared.

    Raises:
        Difference: they are not.
        OSError, ValueError: one of them cannot be read.
    """
    (ours, our_gaps), (theirs, their_gaps) = _comparable(a), _comparable(b)
    gaps = [f"; {_ranges(found)} missing in {path}" for path, found in ((a, our_gaps), (b, their_gaps)) if found]
    try:
        said = _compare(a, b, ours, theirs)
    except Difference as difference:
        raise Difference(f"{difference}{''.join(gaps)}") from None
    return said + "".join(gaps)


def _compare(a: Path, b: Path, ours: dict[int, Line], theirs: dict[int, Line]) -> str:
    num_steps = 0
    for number in sorted(ours.keys() & theirs.keys()):
        mine, other = ours[number], theirs[number]
        equal = f"equal for {count(num_steps, 'step')}"
        if mine["kind"] != other["kind"] or mine.get("ok") != other.get("ok"):
            raise Difference(f"{equal}; then {a} {_does(mine)}, and {b} {_does(other)}")
        for key, value in mine.items():
            if value != other.get(key):
                raise Difference(
                    f"{_name(mine)} is the first to differ: {key} is {value} in {a}, {other.get(key)} in {b}"
                )
        num_steps += mine["kind"] == "step"
    our_last, their_last = max(ours), max(theirs)
    if our_last != their_last:
        (shorter, less), (longer, more) = (
            ((a, ours), (b, theirs)) if our_last < their_last else ((b, theirs), (a, ours))
        )
        last, rest = less[max(less)], more[min(number for number in more if number > max(less))]
        why = "" if last["kind"] == "end" else " (it was killed, or is still going)"
        raise Difference(
            f"equal for {count(num_steps, 'step')}; then {longer} {_does(rest)}, and {shorter} says no more{why}"
        )
    last = ours[our_last]
    if last["kind"] != "end":
        return f"identical so far: {count(num_steps, 'step')}, neither has ended"
    if not last["ok"]:
        return f"identical: {count(num_steps, 'step')}, both failed"
    digests = "".join(f", {name} {digest}" for name, digest in (last["digests"] or {}).items())
    return f"identical: {count(num_steps, 'step')}{digests}"


def _ranges(numbers: list[int]) -> str:
    """``lines 3, 44-72 are``"""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"line {shown} is" if len(numbers) == 1 else f"lines {shown} are"


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


def _comparable(path: Path) -> tuple[dict[int, Line], list[int]]:
    """What must be equal in two runs that did the same: not times, not workers. At least one line.

    Returns:
        The lines by their number, and the numbers of those that are missing before the last one.
    """
    found: dict[int, Line] = {}
    there: set[int] = set()
    for place, line in enumerate(read(path)):
        if line["kind"] == "gap":
            continue
        number = line["line"] if isinstance(line.get("line"), int) else place
        there.add(number)
        if line["kind"] in _SAME:
            found[number] = {"kind": line["kind"], **{key: line.get(key) for key in _SAME[line["kind"]]}}
    if not found:
        raise ValueError(f"{path} holds no journal: it has no step and no end")
    return found, [number for number in range(max(there)) if number not in there]
