"""Comparison of two runs, to the bit, by their journals."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from unisono.core.words import count
from unisono.record.journal.file import read
from unisono.record.journal.lines import CANONICAL, Line

__all__ = ["Difference", "compare"]


LATER: Final = ("sha256",)
"""Keys that lines of earlier versions lack: what one of the lines lacks is not compared."""


class Difference(Exception):
    """Two runs differ; the message names the first difference.

    Args:
        step: the step to look into, for the cause: the first that differs, or the last one before what differs; -1:
            there is none.
        digests: of that step, in the two journals; "" where they are equal.
    """

    def __init__(self, message: str, step: int = -1, digests: tuple[str, str] = ("", "")) -> None:
        super().__init__(message)
        self.step = step
        self.digests = digests


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
            raise ValueError(f"{each.path} is not a journal: it has no step and no end")
    try:
        said = _compare(ours, theirs)
    except Difference as difference:
        more = f"{ours.missing()}{theirs.missing()}"
        raise Difference(f"{difference}{more}", difference.step, difference.digests) from None
    return said + ours.missing() + theirs.missing()


def _compare(ours: _Comparable, theirs: _Comparable) -> str:
    num_steps, newest = 0, -1
    a, b = ours.path, theirs.path
    while (mine := ours.line) is not None and (other := theirs.line) is not None:
        if ours.number != theirs.number:
            (ours if ours.number < theirs.number else theirs).next()  # the other one lacks it
            continue
        equal = f"equal for {count(num_steps, 'step')}"
        if mine["kind"] != other["kind"] or mine.get("ok") != other.get("ok"):
            step, pair = _unequal(mine, other)
            raise Difference(f"{equal}; then {a} {_does(mine)}, and {b} {_does(other)}", step, pair)
        for key, value in mine.items():
            # As they are written: 0.0 is not -0.0, and 1 not True. What stands for them in Python shows the same.
            if repr(value) != repr(other.get(key)) and not (key in LATER and None in (value, other.get(key))):
                words = f"{_parted(mine)}: {key} is {value} in {a}, {other.get(key)} in {b}"
                if mine["kind"] != "step":
                    raise Difference(words, newest)
                raise Difference(words, mine["step"], (str(mine["digest"]), str(other["digest"])))
        if mine["kind"] == "step":
            num_steps, newest = num_steps + 1, mine["step"]
        ours.next()
        theirs.next()
    for longer, shorter in ((ours, theirs), (theirs, ours)):
        if longer.line is not None:
            why = "" if shorter.last["kind"] == "end" else " (it was stopped or killed, or is still running)"
            raise Difference(
                f"equal for {count(num_steps, 'step')}; then {longer.path} {_does(longer.line)}, and {shorter.path} "
                f"ends{why}"
            )
    last = ours.last
    if last["kind"] != "end":
        return f"identical so far: {count(num_steps, 'step')}, neither has ended"
    if not last["ok"]:
        return f"identical: {count(num_steps, 'step')}, both failed: {_reasons(ours, theirs)}"
    digests = "".join(f", {name} {digest}" for name, digest in (last["digests"] or {}).items())
    return f"identical: {count(num_steps, 'step')}{digests}"


def _unequal(mine: Line, other: Line) -> tuple[int, tuple[str, str]]:
    """Return the step that one run has where the other has failed, and its digests; -1 if it is no such place."""
    has_failed = [line["kind"] == "end" and not line["ok"] for line in (mine, other)]
    if mine["kind"] == "step" and has_failed[1]:
        return mine["step"], (str(mine["digest"]), "")
    if other["kind"] == "step" and has_failed[0]:
        return other["step"], ("", str(other["digest"]))
    return -1, ("", "")


def _reasons(ours: _Comparable, theirs: _Comparable) -> str:
    """Return why the runs have failed, in words; a reason may name a worker, so it is shown and not judged."""
    first, second = (each.reason or "no reason is known" for each in (ours, theirs))
    if first == second:
        return first
    return f"{ours.path}: {first}; {theirs.path}: {second}. The reasons are not compared"


def _said(ranges: list[tuple[int, int]]) -> str:
    """``lines 3, 44-72 are``"""
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return f"line {shown} is" if is_one else f"lines {shown} are"


def _parted(line: Line) -> str:
    if line["kind"] == "end":
        return "all steps are equal, the final state differs"
    return f"{_name(line)} is the first to differ"


def _name(line: Line) -> str:
    return f"the evaluation at step {line['step']}" if line["kind"] == "evaluation" else f"step {line['step']}"


def _does(line: Line) -> str:
    if line["kind"] == "end":
        return "has finished" if line["ok"] else "has failed"
    return f"has {_name(line)}"


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
        self.reason = ""
        """Why the run has failed, as far as the journal says so."""
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
            if line["kind"] in CANONICAL:
                self.number = number
                self.line = {"kind": line["kind"], **{key: line.get(key) for key in CANONICAL[line["kind"]]}}
                self.last = self.line
                self.reason = str(line.get("reason", ""))
                return

    def missing(self) -> str:
        """Return words for the lines that are missing before the one that was read last."""
        return f"; {_said(self._missing)} missing in {self.path}" if self._missing else ""
