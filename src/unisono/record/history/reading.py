"""`History`: reads what a run has left in its directory, and what it adds meanwhile."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.core.events import Seconds
from unisono.core.words import count
from unisono.record.history.from_files import Fold
from unisono.record.history.index import (
    Block,
    Extremes,
    Odd,
    Placed,
    Scanned,
    block_of,
    columns_of,
    extremes_of,
)
from unisono.record.history.journal_blocks import Lines
from unisono.record.history.machines import in_parts, read_use, times_of, use_of
from unisono.record.history.story_events import StoryLines
from unisono.record.journal import JOURNAL
from unisono.record.journal.lines import number_in
from unisono.record.journal.times import read_times
from unisono.record.overview import CURVE_POINTS, CurvePoint, Overview, Past, efficiency, status_of
from unisono.record.rundir import EVENTS_FILE, MOST_FACTS, RUN_FILE, RUN_SCHEMA, USE_FILE, is_going
from unisono.system.owned import read_regular

__all__ = ["EXACT_STEPS", "History", "without_head"]

EXACT_STEPS: Final = 1 << 13
"""Where a question is about so few steps, their lines are read, and not only the index."""
NO_END: Final = "no process reported how the run ended: all were killed, or their machines were lost"
NO_HEAD: Final = "a process of the run holds its directory, but no head answers from here"
_FACTS: Final = {"run_id": str, "recipe": dict, "command": dict, "environment": dict, "resumed": list, "earlier": list}
"""What ``run.json`` has, where it is as this version knows it."""
_ORDER: Final = ("loss", "samples_per_s", "step_s", "sent_bytes")
_HIDDEN: Final = ("samples",)


class History:
    """What the directory of a run holds. `refresh` looks at what is new; everything else answers from what it found.

    Not thread-safe: one thread at a time. No method raises for what the files hold.

    Args:
        directory: of the run; or its journal, wherever that lies.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory if directory.is_dir() or not directory.exists() else directory.parent
        self._lines = Lines(directory.resolve() if directory.is_file() else directory / JOURNAL)
        self._facts: dict[str, Any] = {}
        self._facts_note = ""
        self._story = StoryLines(self.directory / EVENTS_FILE)
        self._fold = Fold(self.directory, self._lines, self._story)
        self._curve: tuple[int, int, list[CurvePoint]] = (0, -1, [])
        """First and last step, and the loss of them."""
        self.refresh()

    # -- what there is -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look at what the files have now. Cheap if little is new."""
        self._read_facts()
        turn = self._lines.turn
        self._lines.refresh()
        if self._lines.turn != turn or self._lines.missing:
            self._curve = (0, -1, [])
        self._story.refresh()

    def complete(self, within_s: float = math.inf) -> None:
        """Read all that has no index, or what can be read in this time; the next `refresh` goes on."""
        deadline = time.monotonic() + within_s
        while self._lines.missing and not self._lines.error and time.monotonic() < deadline:
            self._lines.refresh(budget_s=1.0)
            self._curve = (0, -1, [])

    def facts(self) -> dict[str, Any]:
        """Return the run's description (``run.json``); empty if there is none."""
        return dict(self._facts)

    def names(self) -> list[str]:
        """Return the names of all series: loss, step_s, part/compute, log/NAME, evaluation/NAME ..."""
        found = self._lines.names
        first = [name for name in _ORDER if name in found]
        return first + [name for name in found if name not in first and name not in _HIDDEN]

    def span(self) -> tuple[int, int]:
        """Return the first and the last step; (0, -1) if there is none."""
        blocks = self._lines.with_steps
        return (blocks[0].first, blocks[-1].last) if blocks else (0, -1)

    @property
    def notes(self) -> list[str]:
        """What could not be read, or not yet, in sentences."""
        found = [self._facts_note] if self._facts_note else []
        return found + self._journal_notes() + self._story.notes

    @property
    def is_unreadable(self) -> bool:
        """Whether the journal cannot be read, or has lines and none that is one of a journal."""
        return bool(self._lines.error) or self._is_foreign

    # -- series --------------------------------------------------------------------------------------

    def series(
        self, names: Iterable[str], first: int = 0, last: int = -1, points: int = 1000
    ) -> dict[str, dict[str, list[Any]]]:
        """Return numbers by step, in at most ``points`` points. Extremes are kept: a point has the lowest and the
        highest value of its steps.

        Args:
            names: as in `names`; an unknown one has no points.
            first: the first step.
            last: the last step; negative: counted from the end, -1 is the newest.

        Returns:
            By name: ``step`` (the first of each point), ``time`` (of that step, in seconds since 1970; 0: unknown),
            ``low``, ``high`` and ``mean``. NaN and infinite values are the strings "nan", "inf" and "-inf". The mean of
            points in which a value is NaN is "nan", and their extremes are those of their other values.
        """
        points = max(1, points)
        begin, end = self.span()
        last = end + 1 + last if last < 0 else last
        first = max(first, begin)
        wanted = list(dict.fromkeys(names))
        found: dict[str, _Series] = {name: _Series() for name in wanted}
        by_step = [name for name in wanted if not name.startswith("evaluation/")]
        blocks = self._lines.between(first, last)
        if by_step and blocks:
            if sum(block.steps for block in blocks) <= max(EXACT_STEPS, 0):
                self._exact(by_step, blocks, first, last, points, found)
            else:
                self._from_blocks(by_step, blocks, first, last, points, found)
        for name in wanted:
            if name.startswith("evaluation/"):
                self._evaluations(name, first, last, points, found[name])
        return {name: each.told() for name, each in found.items()}

    def _exact(
        self, names: list[str], blocks: Sequence[Block], first: int, last: int, points: int, found: dict[str, _Series]
    ) -> None:
        steps = [line for line in self._read(blocks) if line.kind == "step" and first <= line.step <= last]
        columns = columns_of(steps)
        for name in names:
            for part in in_parts([*zip(steps, columns.get(name, ()), strict=False)], points):
                there = [(step, value) for step, value in part if value is not None]
                if there:
                    begin = there[0][0]
                    mean = _rate(step for step, _ in part) if name == "samples_per_s" and len(part) > 1 else None
                    found[name].add(begin.step, begin.time, [value for _, value in there], mean)

    def _from_blocks(
        self, names: list[str], blocks: Sequence[Block], first: int, last: int, points: int, found: dict[str, _Series]
    ) -> None:
        for part in in_parts(self._clipped(blocks, first, last), points):
            for name in names:
                found[name].add_blocks(name, part)

    def _clipped(self, blocks: Sequence[Block], first: int, last: int) -> list[Block]:
        """Return the blocks without the steps outside of a range: a zoom has the extremes of what it shows."""
        kept = list(blocks)
        for at in {0, len(kept) - 1}:
            if kept[at].first < first or kept[at].last > last:
                lines = [line for line in self._read([kept[at]]) if line.kind == "step" and first <= line.step <= last]
                if lines:
                    kept[at] = block_of([Placed(0, 0, line) for line in lines])
        return kept

    def _evaluations(self, name: str, first: int, last: int, points: int, series: _Series) -> None:
        key = name.partition("/")[2]
        there = sorted(  # the line of an evaluation beside the training may come after those of later ones
            (step, time, number_in(totals[key]))
            for block in self._lines.blocks
            for step, time, totals in block.evaluations
            if key in totals and first <= step <= last + 1
        )
        for part in in_parts(there, points):
            series.add(part[0][0], part[0][1], [value for _, _, value in part])

    def _read(self, blocks: Sequence[Block]) -> Iterator[Scanned]:
        with contextlib.suppress(OSError):
            yield from self._lines.read(blocks)

    # -- workers, machines, events -------------------------------------------------------------------

    def times(self, first: int = 0, last: int = -1, points: int = 200) -> dict[str, Any]:
        """Return what the time of the workers went into, by step, of the newest steps
        (`unisono.record.journal.newest`): means of several steps where there are more than ``points``. Of all steps,
        the series ``mean/compute`` ... have the mean over the workers.

        Args:
            first: the first step.
            last: the last step; negative: counted from the end.

        Returns:
            ``workers``: ids; ``step`` (the first of each point) and ``time``; ``values``: by name (leaves, compute,
            waiting, waits_s ...), by point, by worker; ``waits_for``: worker ids, by point, by worker.
            None: the worker was not there, or that is not known.
        """
        begin, end = self.span()
        last = end + 1 + last if last < 0 else last
        told = read_times(self.directory, max(first, begin))
        return times_of([each for each in told if each.step <= last + 1], last, points)

    def use(self, points: int = 200) -> dict[str, Any]:
        """Return what the machines used, in the newest time: ``time``; ``machines``: by host, by name, by point."""
        return use_of(read_use(self.directory / USE_FILE), points)

    def events(self, after: int = 0, most: int = 500) -> dict[str, Any]:
        """Return what has happened besides steps, the oldest first: ``events``, and the number of the ``next`` one.

        Args:
            after: number of the first one; negative: the last so many.
        """
        found, following = self._story.read(after, most)
        return {"events": found, "next": following}

    def every_event(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """Yield the events of these kinds, the oldest first; without kinds, all: there may be many of them."""
        return self._story.every(len(self._story), kinds)

    def overview(self) -> Overview:
        """Return the run as it is now, or as it has ended."""
        found = self._fold.overview(self._facts, time.time())
        here = str(self.directory.absolute())  # and not where the run was, of which this may be a copy
        found = msgspec.structs.replace(found, curve=self._whole_curve(), efficiency=self._efficiency(), run_dir=here)
        return found if is_going(self.directory) else without_head(found)

    def status(self) -> dict[str, Any]:
        """Return the figures of the run, as no head tells them (``unisono watch --once --json``)."""
        overview = self.overview()
        state, reason = overview.state, overview.reason
        if is_going(self.directory):
            state, reason = "training", NO_HEAD
        elif not overview.ended:
            state = "stopped" if overview.step >= 0 else "unknown"
            reason = NO_END if overview.started else ""
        return {
            "run_id": overview.run_id,
            "run_dir": str(self.directory),
            "state": state,
            "reason": reason or (state if state == "finished" else ""),
            **status_of(overview),
            "generation": overview.generation,
            "digest": overview.digest,
            "digests": overview.digests,
            "workers": [],
            "started": overview.started,
            "ended": overview.ended,
        }

    def past(self) -> Past:
        """Return who took part in the runs of the directory, and what interrupted them."""
        return self._fold.past(self._facts)

    def _efficiency(self) -> float | None:
        """Return the efficiency in all steps; of lines without means, that of the workers that wrote them."""
        kind = "mean" if "mean/compute" in self._lines.names else "part"
        sums = {
            part: math.fsum(block.values[name][2] for block in self._lines.blocks if name in block.values)
            for part in Seconds.__struct_fields__
            if (name := f"{kind}/{part}")
        }
        return efficiency(sums["compute"], math.fsum(sums.values()))

    def _whole_curve(self) -> list[CurvePoint]:
        """Return the loss of the whole run; without the newest steps, as long as they are less than a point."""
        first, last = self.span()
        begin, end, known = self._curve
        if begin == first and end <= last and (last - end) * CURVE_POINTS < last - first and known:
            return known
        curve = self.series(["loss"], points=CURVE_POINTS)["loss"]
        points = zip(curve["step"], curve["low"], curve["high"], curve["mean"], strict=True)
        shown = [
            CurvePoint(step, low, high, (low + high) / 2 if isinstance(mean, str) else mean)
            for step, low, high, mean in points
            if not isinstance(low, str) and not isinstance(high, str)
        ]
        self._curve = (first, last, shown)
        return shown

    # -- notes ---------------------------------------------------------------------------------------

    @property
    def _is_foreign(self) -> bool:
        return 0 < self._lines.num_broken == sum(block.lines for block in self._lines.blocks)

    def _journal_notes(self) -> list[str]:
        lines, found = self._lines, []
        if lines.error:
            found.append(lines.error)
        elif not lines.size and not lines.blocks:
            found.append(
                f"{lines.path} is empty: no step is finished" if lines.path.exists() else f"there is no {lines.path}"
            )
        elif lines.head:
            is_begun = lines.head.startswith(b'{"line"')
            what = "has no complete line yet" if is_begun else "is not a journal"
            found.append(f"{lines.path} {what}: it begins with {lines.head.decode(errors='replace')!r}")
        if self._is_foreign:
            found.append(f"{lines.path} is not a journal: it begins with {lines.first_broken!r}")
        elif lines.num_broken:
            found.append(
                f"{count(lines.num_broken, 'line')} of {lines.path} cannot be read and "
                f"{'is' if lines.num_broken == 1 else 'are'} left out; the first begins with {lines.first_broken!r}"
            )
        if lines.missing:
            found.append(f"{lines.path} is long, and {lines.missing:.0%} of it has not been read yet")
        elif lines.with_steps and (lost := self._last_told()) > (last := self.span()[1]):
            found.append(
                f"{lines.path} ends with step {last}, and the run ended after step {lost}: the last lines were cut "
                "off, or could not be written (the disk was full, or all workers were killed)"
            )
        return found

    def _last_told(self) -> int:
        """Return the last step of a run whose story has an end; else -1."""
        told, _ = self._story.read(-1, 1)
        return int(told[0].get("step", -1)) if told and told[0]["kind"] == "end" else -1

    def _read_facts(self) -> None:
        self._facts_note = ""
        path = self.directory / RUN_FILE
        try:
            facts = json.loads(read_regular(path, MOST_FACTS))
            if not isinstance(facts, dict):
                raise ValueError("it holds no object")
        except FileNotFoundError:
            self._facts, self._facts_note = {}, f"there is no {path}"
            return
        except (OSError, ValueError, RecursionError) as error:
            self._facts, self._facts_note = {}, f"{path} cannot be read: {error}"
            return
        odd = [name for name, kind in _FACTS.items() if name in facts and not isinstance(facts[name], kind)]
        self._facts = {name: value for name, value in facts.items() if name not in odd}
        schema = facts.get("schema", RUN_SCHEMA)
        if odd:
            self._facts_note = f"{path} has no usable {', '.join(odd)}; everything else is shown"
        if not isinstance(schema, int) or schema > RUN_SCHEMA:
            self._facts_note = (
                f"{path} was written by a newer version (schema {schema}, this one knows {RUN_SCHEMA}); what this "
                "version does not know is left out"
            )


def without_head(overview: Overview) -> Overview:
    """Return what to show of a run that no process is seen of: it may go on elsewhere, unless it has an end."""
    if overview.state not in ("starting", "waiting"):
        return overview
    reason = (
        "no head answers, and the journal has no end: the run was killed, or continues where it cannot be seen "
        "from here"
    )
    return msgspec.structs.replace(overview, state="unknown", reason=reason, left_s=None)


def _rate(lines: Iterable[Scanned]) -> float | None:
    samples, seconds = 0, 0.0
    for line in lines:
        samples += line.samples
        seconds += line.seconds.total()
    return samples / seconds if seconds > 0 else None


class _Series:
    """Points of one series of numbers, each of one step or more: `told` gives them as a view gets them."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float, Any, Any, Any]] = []

    def add(self, step: int, time: float, values: list[float], mean: float | None = None) -> None:
        """Add the point of some values, at least one."""
        self._add(step, time, *extremes_of(values), mean)

    def add_blocks(self, name: str, blocks: Sequence[Block]) -> None:
        """Add the point of the values in some blocks, if there are any."""
        there = [block for block in blocks if name in block.values]
        finite = [block.values[name] for block in there if block.values[name][3]]
        odds = [block.odd[name] for block in there if name in block.odd]
        if not finite and not odds:
            return
        lows, highs, sums, numbers = zip(*finite, strict=True) if finite else ((0.0,), (0.0,), (0.0,), (0,))
        num_nan, num_high, num_low = (sum(column) for column in zip((0, 0, 0), *odds, strict=True))
        mean = None
        if name == "samples_per_s":
            seconds = sum(block.values["step_s"][2] for block in blocks if "step_s" in block.values)
            samples = sum(block.values["samples"][2] for block in blocks if "samples" in block.values)
            mean = samples / seconds if seconds else None
        extremes = min(lows), max(highs), sum(sums), sum(numbers)
        self._add(there[0].first, there[0].since, extremes, (num_nan, num_high, num_low), mean)

    def _add(self, step: int, time: float, extremes: Extremes, odd: Odd, mean: float | None) -> None:
        num_nan, num_high, num_low = odd
        lowest, highest, total, number = extremes
        low: Any = "-inf" if num_low else lowest if number else "inf" if num_high else "nan"
        high: Any = "inf" if num_high else highest if number else "-inf" if num_low else "nan"
        told: Any = mean if mean is not None else total / number if number else 0.0
        if num_nan or (num_high and num_low):
            told = "nan"
        elif num_high or num_low:
            told = "inf" if num_high else "-inf"
        self._points.append((step, time, low, high, told))

    def told(self) -> dict[str, list[Any]]:
        """Return the points by column: ``step``, ``time``, ``low``, ``high`` and ``mean``."""
        steps, times, lows, highs, means = map(list, zip(*self._points, strict=True)) if self._points else ([],) * 5
        return {"step": steps, "time": times, "low": lows, "high": highs, "mean": means}
