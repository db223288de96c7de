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
    of a float has all its bits.

    Raises:
        Difference: the runs are not identical.
        OSError, ValueError: a journal cannot be read.
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
        raise Difference(f"equal for {count(num_steps, 'step')}; then {longer} {_does(rest)}, and {shorter} ends{why}")
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


_SAME: Final = {
    "step": ("step", "epoch", "samples", "digest", "loss", "weight", "totals", "losses"),
    "evaluation": ("step", "totals"),
    "end": ("ok", "digests"),
}
"""By kind: the keys that are equal in two runs that did the same."""


def _comparable(path: Path) -> tuple[dict[int, Line], list[int]]:
    """Read what must be equal in two runs that did the same: not times, not workers.

    Returns:
        The lines by their number, at least one; and the numbers of the lines that are missing before the last one.

    Raises:
        ValueError: the journal has no line.
    """
    found: dict[int, Line] = {}
    there: set[int] = set()
    for index, line in enumerate(read(path)):
        if line["kind"] == "gap":
            continue
        number = line["line"] if isinstance(line.get("line"), int) else index
        there.add(number)
        if line["kind"] in _SAME:
            found[number] = {"kind": line["kind"], **{key: line.get(key) for key in _SAME[line["kind"]]}}
    if not found:
        raise ValueError(f"{path} holds no journal: it has no step and no end")
    return found, [number for number in range(max(there)) if number not in there]
