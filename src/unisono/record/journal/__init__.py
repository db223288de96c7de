"""The journal of a run: one line of JSON a step, only ever appended.

A line is an event (`unisono.core.events`) that all members agree on: the result of a step (step, loss, weight, digest)
and the members' times; the totals of an evaluation; the end of the run, with a digest of every tracked object. Lines by
``kind``: ``step``, ``evaluation``, ``end``, and ``gap``: all lines from ``first`` to ``last`` are lost.

One member writes: the first that sees the run's directory. Every member keeps the lines that may be missing in
the file, so the next writer, or a writer whose full disk has room again, writes all of them.
"""

from __future__ import annotations

from unisono.record.journal.comparing import Difference, compare
from unisono.record.journal.file import JOURNAL, conclude, end_of, events, has_steps, lines_from, read, truncate
from unisono.record.journal.lines import Line, from_line, to_line
from unisono.record.journal.writing import MOST_KEPT_LINES, Journal

__all__ = [
    "JOURNAL",
    "MOST_KEPT_LINES",
    "Difference",
    "Journal",
    "Line",
    "compare",
    "conclude",
    "end_of",
    "events",
    "from_line",
    "has_steps",
    "lines_from",
    "read",
    "to_line",
    "truncate",
]
