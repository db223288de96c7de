"""Picture of a run in characters: a pure function of its overview and of the room there is.

The rows stay where they are while the numbers change, so the eye finds them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from unisono.core.events import Seconds
from unisono.core.words import clock_duration, count, harmless, part_words, shown_bytes
from unisono.record.overview import Overview, Recent, WorkerNow, mean_seconds
from unisono.views.watch.terminal.base import done, left_words, loss_words, progress_line
from unisono.views.watch.terminal.curve import draw_curve
from unisono.views.watch.terminal.text import Line, Span, cut, filled, time_of_day, width

__all__ = ["draw", "fitted", "header", "in_short", "levels", "made_harmless", "workers_rows"]

_NARROW: Final = 60
"""With fewer columns a worker is shown in short."""
_LOW: Final = 12
"""With fewer rows there is no curve."""
_LEAST_CURVE: Final = 4
_MOST_CURVE: Final = 12
_USE: Final = 16
"""Columns of memory and cores."""
_COMPUTE: Final = "compute"
_LEAST_LOSS: Final = 0.05
"""A part of a worker's time that is smaller is not named."""

_PARTS: Final = {
    "compute": ("█", "#", "green"),
    "exchange": ("▓", "x", "blue"),
    "network": ("▒", "n", "magenta"),
    "waiting": ("░", ".", "yellow"),
    "data": ("▞", "d", "cyan"),
    "update": ("▄", "u", "blue"),
    "other": ("·", "o", "dim"),
}
"""Part of a step's time, what is useful first -> its character, with and without Unicode, and its colour. Told apart
without colours."""
_STATES: Final = {
    "training": "good",
    "finished": "good",
    "late": "error",
    "lost": "error",
    "failed": "error",
    "evicted": "error",
    "waiting": "warning",
    "paused": "warning",
    "stopped": "warning",
}
_QUIET: Final = ("training", "waiting", "finished")
"""States of a worker that need not be seen among many."""


def draw(
    overview: Overview, columns: int, rows: int, *, unicode: bool = True, most_recent: int | None = None
) -> list[Line]:
    """Return the lines that show a run: at most so many, at most so wide.

    Args:
        most_recent: so many sentences about what has happened may be shown where there is room; default: a few, always
            as many.
        unicode: the terminal shows other characters than those of ASCII.
    """
    overview = made_harmless(overview)
    if rows < 5 or columns < 24:
        return [fitted(in_short(overview), columns, unicode=unicode)][:rows]
    lines = header(overview, columns, unicode=unicode)
    num_recent = 3 if rows < 18 else 4 if rows < 28 else 6
    room = rows - len(lines) - num_recent
    num_workers = len(overview.workers)
    if rows >= _LOW:
        most = max(_LEAST_CURVE, min(_MOST_CURVE, rows // 3))
        curve = max(_LEAST_CURVE, min(most, room - num_workers - 2))
        lines += draw_curve(overview.curve, columns, curve, last=overview.step, unicode=unicode)
        room -= curve + 1
    lines += workers_rows(overview, columns, max(1, room), unicode=unicode)
    most = num_recent if most_recent is None else most_recent
    lines += _recent(overview.recent, columns, max(0, min(most, rows - len(lines))))
    return [fitted(line, columns, unicode=unicode) for line in lines[:rows]]


def made_harmless(overview: Overview) -> Overview:
    """Return an overview whose words a terminal does not obey: some come from machines of others. Of several lines,
    the first one stays.
    """
    return msgspec.convert(_harmless(msgspec.to_builtins(overview)), Overview)


def _harmless(value: Any) -> Any:
    match value:
        case str():
            return harmless(value.partition("\n")[0])
        case dict():
            return {_harmless(name): _harmless(each) for name, each in value.items()}
        case list() | tuple():
            return [_harmless(each) for each in value]
    return value


def fitted(line: Line, columns: int, *, unicode: bool) -> Line:
    """Return what of a line fits."""
    found: Line = []
    room = columns
    for text, style in line:
        if room <= 0:
            break
        kept = cut(text, room, "…" if unicode else "~")
        found.append((kept, style))
        room -= width(kept)
    return found


# -- the run -----------------------------------------------------------------------------------------


def in_short(overview: Overview) -> Line:
    """Return a run in one line."""
    return [(f"{harmless(overview.state)}  {harmless(progress_line(overview))}", "")]


def header(overview: Overview, columns: int, *, unicode: bool) -> list[Line]:
    """Return four lines about the run as a whole."""
    name = "  ".join(filter(None, (overview.script, overview.run_dir))) or f"run {overview.run_id}"
    elapsed = clock_duration(overview.elapsed_s) if overview.started else ""
    state = f"{overview.state:<8} {elapsed:>9}" if elapsed else overview.state
    generation = f"generation {overview.generation}  " if overview.generation and columns >= _NARROW else ""
    room = columns - width(state) - 2 - len(generation)
    return [
        [
            (filled(name, room) + "  ", "bold"),
            (generation, "dim"),
            (state, _STATES.get(overview.state, "bold")),
        ],
        _progress(overview, columns, unicode=unicode),
        _speed(overview, columns),
        _news(overview),
    ]


def _progress(overview: Overview, columns: int, *, unicode: bool) -> Line:
    at, left = done(overview), left_words(overview)
    room = columns - width(at) - 2 - 14
    if room < 8 or not overview.num_steps:
        return [(f"{at}  {left}", "")]
    part = min(1.0, (overview.step + 1) / overview.num_steps)
    filling, rest = ("━", "─") if unicode else ("=", "-")
    long = int(part * room)
    return [(at + "  ", ""), (filling * long, "green"), (rest * (room - long), "dim"), (f"{left:>14}", "")]


def _speed(overview: Overview, columns: int) -> Line:
    loss = f"loss {loss_words(overview):<10}"
    style = "error" if overview.loss_is else "bold"
    if columns < _NARROW:
        return [(loss, style), (f"{overview.samples_per_s:>9,.0f} samples/s", "")]
    checkpoint = f"checkpoint {overview.checkpoint_step:,}" if overview.checkpoint_step >= 0 else ""
    return [
        (loss, style),
        (f"{overview.samples_per_s:>10,.0f} samples/s {overview.steps_per_s:>8,.2f} {overview.unit}s/s   ", ""),
        (checkpoint, "dim"),
    ]


def _news(overview: Overview) -> Line:
    """Return why the run does not train, or else the script's own numbers."""
    if overview.reason and overview.state != "training":
        return [(overview.reason, _STATES.get(overview.state, "bold"))]
    logs = "  ".join(f"{name} {value:.4g}" for name, value in overview.logs.items())
    evaluation = "  ".join(f"{name} {value:.4g}" for name, value in overview.evaluation.items())
    parts: list[Span] = [(logs, "")] if logs else []
    if evaluation:
        parts.append((("   " if logs else "") + f"evaluation: {evaluation}", ""))
    return parts


# -- its workers -------------------------------------------------------------------------------------


def workers_rows(overview: Overview, columns: int, rows: int, *, unicode: bool) -> list[Line]:
    """Return the line with the legend, and one row for each worker, or for those that need to be seen."""
    workers = overview.workers
    members = [worker for worker in workers if worker.rank is not None]
    if len(workers) > rows - 1:  # of those that have gone, the events tell
        workers = [*members, *[worker for worker in workers if worker.rank is None][: max(0, rows - 1 - len(members))]]
    several = len({worker.host for worker in workers if worker.host}) > 1
    shown, others = (workers, []) if len(workers) <= rows - 1 else _notable(workers, max(0, rows - 2))
    longest = max((width(worker.worker_id) for worker in workers), default=2)
    style = _Row(columns, several, longest, unicode, overview.parts)
    lines = [style.legend(workers, len(members))]
    lines += [style.row(worker) for worker in shown]
    if others:
        lines.append(style.summary(others, is_all=not shown))
    return lines[:rows]


def _notable(workers: Sequence[WorkerNow], most: int) -> tuple[list[WorkerNow], list[WorkerNow]]:
    """Return the workers that need to be seen, and the others, both by rank.

    First those that do not train, then those for which most others wait, then those that compute longest.
    """
    waited_for: dict[str, int] = {}
    for worker in workers:
        waited_for[worker.waits_for] = waited_for.get(worker.waits_for, 0) + 1

    def weight(worker: WorkerNow) -> tuple[bool, int, float]:
        awaited = waited_for.get(worker.worker_id, 0)
        return (worker.state not in _QUIET, awaited, worker.seconds.compute)

    chosen = {worker.worker_id for worker in sorted(workers, key=weight, reverse=True)[:most]}
    return (
        [worker for worker in workers if worker.worker_id in chosen],
        [worker for worker in workers if worker.worker_id not in chosen],
    )


class _Row:
    """Columns of the rows of workers."""

    def __init__(self, columns: int, several_hosts: bool, longest: int, unicode: bool, num_parts: int) -> None:
        self._unicode = unicode
        self._columns = columns
        self._is_narrow = columns < _NARROW
        self._id = min(8, max(3, longest))
        self._num_parts = num_parts
        self._part = 0 if self._is_narrow else len(part_words(num_parts - 1, num_parts))
        self._host = min(14, columns // 8) if several_hosts and not self._is_narrow else 0
        self._device = 0 if self._is_narrow or (self._host and columns < 100) else 7
        self._words = 0 if self._is_narrow else 18
        self._use = 0 if columns < 78 else _USE
        fixed = self._id + 1 + 8 + 1 + 5 + 1
        for part in (self._part, self._host, self._device, self._words, self._use):
            fixed += part + 1 if part else 0
        self._bar = max(4, columns - fixed)

    def legend(self, workers: Sequence[WorkerNow], number: int) -> Line:
        """Return how many members there are, and what the characters of the bars stand for."""
        line: Line = [] if self._is_narrow else [(f"{count(number, 'worker')}: ", "dim")]
        for part in _PARTS:
            key = self._key(part)
            is_seen = any(_share(worker.seconds, part) >= _LEAST_LOSS for worker in workers)
            room = self._columns - sum(width(text) for text, _ in line)
            if (is_seen or not self._is_narrow) and room >= sum(width(text) for text, _ in key) - 1:
                line += key
        return line

    def _key(self, part: str) -> Line:
        return [(self._character(part), _PARTS[part][2]), (f" {part} ", "dim")]

    def row(self, worker: WorkerNow) -> Line:
        line: Line = [(filled(worker.worker_id, self._id) + " ", "bold")]
        if self._part:
            line.append((filled(part_words(worker.part, self._num_parts), self._part) + " ", ""))
        if self._host:
            line.append((filled(worker.host, self._host) + " ", ""))
        if self._device:
            line.append((filled(worker.device, self._device) + " ", "dim"))
        line.append((filled(worker.state, 8) + " ", _STATES.get(worker.state, "")))
        if worker.rank is None:  # it does not take part
            return line
        line.append((f"{100 * worker.share:>3.0f} % ", ""))
        line += self._stack(worker.seconds)
        if self._words:
            line.append((" " + filled(_loss_words(worker), self._words), ""))
        if self._use:
            line.append((" " + _use_words(worker), "dim"))
        return line

    def summary(self, workers: Sequence[WorkerNow], *, is_all: bool) -> Line:
        """Return one row for many workers: means of them."""
        states: dict[str, int] = {}
        for worker in workers:
            states[worker.state] = states.get(worker.state, 0) + 1
        words = ", ".join(f"{number} {state}" for state, number in states.items())
        used = self._id + 1 + 8 + 1 + sum(each + 1 for each in (self._part, self._host, self._device) if each)
        share = sum(worker.share for worker in workers) / len(workers)
        head = f"{len(workers)} {'workers' if is_all else 'more'}"
        if not self._is_narrow:
            head += f", {words}"
        return [
            (filled(head, used - 1) + " ", ""),
            (f"{100 * share:>3.0f} % ", ""),
            *self._stack(mean_seconds([worker.seconds for worker in workers])),
            (" each, on average" if self._words else "", "dim"),
        ]

    def _stack(self, seconds: Seconds) -> Line:
        """Return a bar that is cut into the parts of a step."""
        total = seconds.total()
        if total <= 0:
            return [(" " * self._bar, "")]
        line: Line = []
        done, used = 0.0, 0
        for part in _PARTS:
            done += getattr(seconds, part)
            end = round(done / total * self._bar)
            line.append((self._character(part) * (end - used), _PARTS[part][2]))
            used = end
        return line

    def _character(self, part: str) -> str:
        return _PARTS[part][0 if self._unicode else 1]


def _share(seconds: Seconds, part: str) -> float:
    total = seconds.total()
    return float(getattr(seconds, part)) / total if total > 0 else 0.0


def _loss_words(worker: WorkerNow) -> str:
    """Return the largest loss of time, if there is one worth it."""
    part = max((part for part in _PARTS if part != _COMPUTE), key=lambda part: _share(worker.seconds, part))
    lost = _share(worker.seconds, part)
    if worker.seconds.total() <= 0:
        return ""
    if lost < _LEAST_LOSS:
        return f"computes {100 * _share(worker.seconds, _COMPUTE):.0f} %"
    if part == "waiting":
        return f"waits {100 * lost:.0f} %" + (f" for {worker.waits_for}" if worker.waits_for else "")
    return f"{part} {100 * lost:.0f} %"


def _use_words(worker: WorkerNow) -> str:
    if not worker.memory_bytes:
        return " " * _USE
    return f"{shown_bytes(worker.memory_bytes):>6} {worker.cores:>3.1f} cores"


# -- what has happened -------------------------------------------------------------------------------


def _recent(recent: Sequence[Recent], columns: int, rows: int) -> list[Line]:
    """Return the last sentences, with the time of the day."""
    if rows <= 0:
        return []
    lines: list[Line] = []
    for each in recent[-rows:]:
        clock = time_of_day(each.time) if columns >= _NARROW else time_of_day(each.time)[:5]
        lines.append([(clock + "  ", "dim"), (each.text, levels(each.level))])
    return lines


def levels(level: str) -> str:
    """Return the style of a sentence."""
    return {"warning": "warning", "error": "error"}.get(level, "")
