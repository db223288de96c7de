"""The chain of a journal: SHA-256 over the canonical parts of its lines, in their order.

Each line holds the value of the chain up to it, under ``chain``: the SHA-256 of the value before it (32 bytes) and of
the line's canonical part (`lines.CANONICAL`) as JSON. So who has noted one value can tell later whether a line before
it was changed. The value is the same for any number of workers and any losses. It is cut with the journal when a run
is resumed. It begins anew, with 32 zero bytes, after a line ``gap``, and where the line before has none, because an
earlier version has written it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple

from unisono.record.journal.lines import CANONICAL, Line, text_of

__all__ = ["BEGIN", "Link", "canonical", "linked", "links", "value_in", "written"]

BEGIN: Final = bytes(32)
_DIGITS: Final = 64


class Link(NamedTuple):
    """A line of a journal with its place in the chain."""

    number: int
    line: Line
    value: bytes
    """Of the chain, up to this line, by its canonical part."""
    begins: bool
    """The chain begins anew with this line."""
    is_told: bool
    """The line names a value, and so was chained when it was written."""
    is_right: bool
    """It names this value, or none."""


def canonical(line: Line) -> bytes:
    """Return the canonical part of a line as JSON, in the order of `CANONICAL`; empty for a line that has none."""
    keys = CANONICAL.get(line["kind"])
    if keys is None:
        return b""
    return text_of({"kind": line["kind"], **{key: line[key] for key in keys if key in line}}).encode()


def linked(before: bytes, part: bytes) -> bytes:
    """Return the next value of the chain, (32,) bytes.

    Args:
        before: the value so far.
        part: the canonical part of the next line.
    """
    return hashlib.sha256(before + part).digest()


def written(number: int, line: Line, before: bytes) -> tuple[str, bytes]:
    """Return the text of a line, without its newline, and the value of the chain up to it.

    Args:
        line: without its number, the canonical part first (`lines.to_line`).
        before: the value up to the line before.
    """
    names = CANONICAL.get(line["kind"])
    if names is None:
        return text_of({"line": number, **line}), BEGIN
    first: Line = {"kind": line["kind"]}
    rest: Line = {}
    for name, value in line.items():
        if name != "kind":
            (first if name in names else rest)[name] = value
    part = text_of(first)
    value = linked(before, part.encode())
    rest["chain"] = value.hex()
    return f'{{"line": {number}, {part[1:-1]}, {text_of(rest)[1:]}', value


def value_in(line: Line | None) -> bytes:
    """Return the value of the chain that a line names; the beginning of a chain where it names none."""
    return _told(line) or BEGIN


def links(lines: Iterable[Line], value: bytes = BEGIN, begins_at: Collection[int] = ()) -> Iterator[Link]:
    """Yield the lines that are in the chain, with their values.

    Args:
        lines: of a journal, in their order. Where some are missing, a line ``gap`` says so, or the next is not right.
        value: of the chain before them.
        begins_at: numbers of lines with which the chain begins anew, besides those that say so themselves.

    Raises:
        ValueError: a line has no number, or a smaller one than the line before.
    """
    newest, begins, was_told = -1, value == BEGIN, True
    for line in lines:
        number = line.get("line")
        if not isinstance(number, int) or number <= newest:
            raise ValueError(f"a line of the journal has the number {number!r}, after line {newest}")
        newest = number
        if line["kind"] not in CANONICAL:  # a gap, or what a later version writes
            begins = True
            continue
        told = _told(line)
        begins = begins or number in begins_at or (told is not None and not was_told)
        value = linked(BEGIN if begins else value, canonical(line))
        yield Link(number, line, value, begins, told is not None, told in (None, value))
        begins, was_told = False, told is not None


def _told(line: Line | None) -> bytes | None:
    """Return the value that a line names; None: it names none that could be one."""
    text: Any = line.get("chain") if line is not None else None
    if not isinstance(text, str) or len(text) != _DIGITS:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None
