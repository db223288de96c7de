"""Comparison of two runs, to the bit, by their journals."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from unisono.journal.file import read
from unisono.journal.lines import Line
from unisono.words import count

__all__ = ["Difference", "compare"]


class Difference(Exception):
    """Two runs differ; the message names the first difference."""


def compare(a: Path, b: Path) -> str:
    """Return a sentence for identical runs: ``identical: 390 steps, model 5f3a...``.

    Lines that one of the journals lacks are named and not compared. Lines are compared as they are written: the JSON
    of a float has all its bits. Both are read line by line, however long they are.

    Raises:
        Difference: the runs are not identical.
        OSError, ValueError: a journal cannot be read.
    """
    ours, theirs = _Comparable(a), _Comparable(b)
    for each in (ours, theirs):
        if each.line is None:
            raise ValueError(f"{each.path} holds no journal: it has no step and no end")
    try:
        said = _compare(ours, theirs)
    except Difference as difference:
        raise Difference(f"{difference}{ours.missing()}{theirs.missing()}") from None
    return said + ours.missing() + theirs.missing()


def _compare(ours: _Comparable, theirs: _Comparable) -> str:
    num_steps = 0
    a, b = ours.path, theirs.path
    while (mine := ours.line) is not None and (other := theirs.line) is not None:
        if ours.number != theirs.number:
            (ours if ours.number < theirs.number else theirs).next()  # the other one lacks it
            continue
        equal = f"equal for {count(num_steps, 'step')}"
        if mine["kind"] != other["kind"] or mine.get("ok") != other.get("ok"):
            raise Difference(f"{equal}; then {a} {_does(mine)}, and {b} {_does(other)}")
        for key, value in mine.items():
            if value != other.get(key):
                raise Difference(
                    f"{_name(mine)} is the first to differ: {key} is {value} in {a}, {other.get(key)} in {b}"
                )
        num_steps += mine["kind"] == "step"
        ours.next()
        theirs.next()
    for longer, shorter in ((ours, theirs), (theirs, ours)):
        if longer.line is not None:
            why = "" if shorter.last["kind"] == "end" else " (it was killed, or is still going)"
            raise Difference(
                f"equal for {count(num_steps, 'step')}; then {longer.path} {_does(longer.line)}, and {shorter.path} "
                f"ends{why}"
            )
    last = ours.last
    if last["kind"] != "end":
        return f"identical so far: {count(num_steps, 'step')}, neither has ended"
    if not last["ok"]:
        return f"identical: {count(num_steps, 'step')}, both failed"
    digests = "".join(f", {name} {digest}" for name, digest in (last["digests"] or {}).items())
    return f"identical: {count(num_steps, 'step')}{digests}"


def _said(ranges: list[tuple[int, int]]) -> str:
    """``lines 3, 44-72 are``"""
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return f"line {shown} is" if is_one else f"lines {shown} are"


def _name(line: Line) -> str:
    if line["kind"] == "end":
        return "the end"
    return f"the evaluation after step {line['step']}" if line["kind"] == "evaluation" else f"step {line['step']}"


def _does(line: Line) -> str:
    if line["kind"] == "end":
        return "has finished" if line["ok"] else "has failed"
    return f"has {_name(line)}"


_SAME: Final = {
    "step": ("step", "epoch", "samples", "digest", "loss", "weight", "totals", "losses"),
    "evaluation": ("step", "totals"),
    "end": ("ok", "digests"),
}
"""By kind: the keys that are equal in two runs that did the same."""


class _Comparable:
    """Reads of a journal, line by line, what must be equal in two runs that did the same: not times, not workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = enumerate(read(path))
        self._seen = -1
        self._missing: list[tuple[int, int]] = []
        self.number = -1
        self.line: Line | None = None
        """None: there is none any more."""
        self.last: Line = {}
        """The last line that there was."""
        self.next()

    def next(self) -> None:
        """Go on to the next line that can be compared."""
        self.line = None
        for index, line in self._lines:
            if line["kind"] == "gap":
                continue
            number = line["line"] if isinstance(line.get("line"), int) else index
            if number > self._seen + 1:
                self._missing.append((self._seen + 1, number - 1))
            self._seen = max(self._seen, number)
            if line["kind"] in _SAME:
                self.number = number
                self.line = {"kind": line["kind"], **{key: line.get(key) for key in _SAME[line["kind"]]}}
                self.last = self.line
                return

    def missing(self) -> str:
        """Return words for the lines that are missing before the one that was read last."""
        return f"; {_said(self._missing)} missing in {self.path}" if self._missing else ""
