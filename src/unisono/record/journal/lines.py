"""Lines of the journal: the only module that makes lines of events, and events of lines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.core.events import EQUAL_FIELDS, EvaluationFinished, LinesLost, RunEnded, StepFinished

__all__ = [
    "CANONICAL",
    "NO_LINE",
    "Line",
    "LineEvent",
    "from_line",
    "is_number",
    "number_in",
    "parse",
    "plain",
    "text_of",
    "to_line",
]

Line = dict[str, Any]
LineEvent = StepFinished | EvaluationFinished | LinesLost | RunEnded
"""The events that have a line: all members make the same ones, in the same order."""

CANONICAL: Final = {
    "step": EQUAL_FIELDS,
    "evaluation": ("step", "totals"),
    "end": ("ok", "digests", "sha256"),
}
"""By kind: the keys that are equal in two runs that did the same. A line begins with them, so it begins with the same
bytes for any number of workers and any losses."""

NO_LINE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no line, or not one of the type that is asked for."""

_FINITE: Final = json.JSONEncoder(allow_nan=False)

_ABSENT: Final[dict[str, Line]] = {
    "step": {
        "step": -1, "epoch": 0, "loss": math.nan, "weight": 0.0, "samples": 0, "digest": "", "num_steps": 0,
        "generation": 0, "seconds": {}, "workers": {}, "logs": {},
    },
    "evaluation": {"step": -1, "totals": {}},
    "gap": {"first": -1, "last": -1},
    "end": {"ok": False, "reason": "", "digests": {}},
}  # fmt: skip
"""By kind: the keys that every line has now, and the values that are read where an old line lacks them."""


def to_line(event: LineEvent) -> Line:
    """Return the line of an event without its number: the canonical part first (`CANONICAL`), then the time and all
    else. What is told by worker is kept elsewhere (`journal.times`).
    """
    if isinstance(event, StepFinished) and event.workers:
        event = msgspec.structs.replace(event, workers={})
    known: Line = msgspec.to_builtins(event)
    for name in ("workers", "number"):
        known.pop(name, None)
    first = ("kind", *CANONICAL.get(known["kind"], ()))
    return {key: known[key] for key in first if key in known} | known


def from_line(line: Line) -> LineEvent | None:
    """Return the event of a line of this version or of an older one; None for a kind that this version does not know.

    Raises:
        ValueError: a value has the wrong type.
    """
    absent = _ABSENT.get(line["kind"])
    if absent is None:
        return None
    known = {key: value for key, value in line.items() if value is not None}
    try:
        number = known.pop("line", -1)
        event: LineEvent = msgspec.convert({**absent, **known, "number": number}, LineEvent, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"the journal's line {line.get('line', '?')} is not a line of kind {line['kind']!r}: {error}"
        ) from error
    return event


def text_of(line: Line) -> str:
    """Return a line as JSON, without its newline."""
    try:
        return _FINITE.encode(line)
    except ValueError:
        return json.dumps(plain(line))


def is_number(value: object) -> bool:
    """Return whether a value is a number, and finite."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def number_in(value: float | str | None) -> float:
    """Return a number that a line may hold as a string, because JSON has no NaN; what is no number is NaN."""
    try:
        return float(value) if value is not None else math.nan
    except (ValueError, OverflowError):
        return math.nan


def plain(value: Any) -> Any:
    """Return a value for JSON. NaN and infinity become strings, which every reader of JSON can read."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def parse(path: Path, text: bytes, where: str = "a line") -> Line:
    """Return the line in ``text``.

    Raises:
        ValueError: ``text`` is not a line of a journal; names ``where`` in ``path``.
    """
    try:
        line = json.loads(text)
        whole = isinstance(line, dict) and isinstance(line["kind"], str)
    except (ValueError, KeyError, RecursionError):
        whole = False
    if not whole:
        shown = text[:40].decode(errors="replace").rstrip("\n")
        raise ValueError(f"{where} of {path} is not a line of a journal: {shown!r}")
    found: Line = line
    return found
