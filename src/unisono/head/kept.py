"""What a head keeps of a run in memory, for those who look where its machine does not see the run's directory."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from unisono.chronicle import record_of as record_of_use
from unisono.events import Event, MachineUsed, Seconds, StepFinished, WorkerOutput
from unisono.history.machines import times_of, use_of
from unisono.history.series import Series
from unisono.journal.rows import Row
from unisono.journal.times import COLUMNS, record_of
from unisono.overview import Overview
from unisono.rundir import PRIVATE

__all__ = ["Kept"]

MOST_STEPS: Final = 4_000
MOST_TIMES: Final = 120
"""Steps of which the times of all workers are kept, at most one a second, and `MOST_ROWS` rows of one worker."""
MOST_ROWS: Final = 8_000
MOST_EVENTS: Final = 1_000
MOST_USES: Final = 2_000
_PARTS: Final = Seconds.__struct_fields__


class Kept:
    """The last steps and events of a run: `unisono.page.answers.Readable`, of bounded size.

    Args:
        overview: returns the run as it is now.
    """

    def __init__(self, overview: Callable[[], Overview]) -> None:
        self.overview = overview
        self.directory = ""
        self.described = ""
        """`facts`, as JSON."""
        self._steps: deque[dict[str, float]] = deque(maxlen=MOST_STEPS)
        self._times: deque[Row] = deque()
        self._before: StepFinished | None = None
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._num_events = 0
        self._uses: deque[MachineUsed] = deque(maxlen=MOST_USES)

    def take(self, event: Event) -> None:
        """Keep an event."""
        match event:
            case StepFinished():
                self._take_step(event)
            case MachineUsed():
                self._uses.append(event)
            case WorkerOutput():
                pass
            case _:
                self._events.append(event)
                self._num_events += 1

    def _take_step(self, step: StepFinished) -> None:
        if self._steps and step.step <= self._steps[-1]["step"]:
            return  # it is repeated
        total = step.seconds.total()
        values = {
            "step": step.step,
            "time": step.time,
            "loss": step.loss,
            "step_s": total,
            "sent_bytes": step.sent_bytes,
        }
        values["samples_per_s"] = step.samples / total if total > 0 else 0.0
        for part in _PARTS:
            values[f"part/{part}"] = getattr(step.seconds, part)
        for name, value in step.logs.items():
            values[f"log/{name}"] = value
        self._steps.append(values)
        self._take_times(step)

    def _take_times(self, step: StepFinished) -> None:
        """Keep the times of the step before, most of which are told with this one."""
        before, self._before = self._before, step
        if before is None or (self._times and 0 <= before.time - self._times[-1].record["time"] < 1.0):
            return
        if len(self._times) >= max(1, min(MOST_TIMES, MOST_ROWS // max(1, len(step.workers)))):
            self._times.popleft()
        self._times.append(Row(before.step, before.step, 1, record_of(before, step)))

    @property
    def notes(self) -> list[str]:
        where = f" ({self.directory})" if self.directory else ""
        return [
            f"the machine of the head does not see the run's directory{where}: this is what the head remembers, the "
            f"last {MOST_STEPS} steps at most"
        ]

    def facts(self) -> dict[str, Any]:
        try:
            found = json.loads(self.described or "{}")
        except ValueError:
            return {}
        return {key: value for key, value in found.items() if key not in PRIVATE}

    def names(self) -> list[str]:
        return sorted({name for values in self._steps for name in values} - {"step", "time"})

    def span(self) -> tuple[int, int]:
        return (int(self._steps[0]["step"]), int(self._steps[-1]["step"])) if self._steps else (0, -1)

    def series(
        self, names: Sequence[str], first: int = 0, last: int = -1, points: int = 1000
    ) -> dict[str, dict[str, Any]]:
        asked = [values for values in self._steps if _is_in(values["step"], first, last)]
        return {name: _series([values for values in asked if name in values], name, points) for name in names}

    def times(self, first: int = 0, last: int = -1, points: int = 200) -> dict[str, Any]:
        asked = [row for row in self._times if _is_in(row.first, first, last)]
        return times_of(COLUMNS, asked[:: math.ceil(len(asked) / max(1, points)) or 1])

    def events(self, after: int = 0, most: int = 500) -> dict[str, Any]:
        begin = self._num_events - len(self._events)
        start = max(begin, self._num_events + after if after < 0 else after)
        found = itertools.islice(self._events, min(start - begin, len(self._events)), None)
        told = list(itertools.islice(found, most))
        return {
            "events": [msgspec.to_builtins(event) for event in told],
            "next": min(start, self._num_events) + len(told),
        }

    def use(self, points: int = 500) -> dict[str, Any]:
        hosts = sorted({use.host for use in self._uses})
        per_host = {host: [use for use in self._uses if use.host == host] for host in hosts}
        longest = max(per_host.values(), key=len, default=[])[-points:]
        times = [use.time for use in longest]
        columns = {host: _at(uses, times) for host, uses in per_host.items()}
        records = [
            {host: record_of_use(use) for host, column in columns.items() if (use := column[number]) is not None}
            for number in range(len(times))
        ]
        return use_of([Row(time, time, 1, record) for time, record in zip(times, records, strict=True)])


def _is_in(step: float, first: int, last: int) -> bool:
    return step >= first and (last < 0 or step <= last)


def _series(values: list[dict[str, float]], name: str, points: int) -> dict[str, Any]:
    """Return at most so many points of a series, as `unisono.history.History.series` does."""
    found = Series()
    size = math.ceil(len(values) / max(1, points)) or 1
    for start in range(0, len(values), size):
        part = values[start : start + size]
        found.add(int(part[0]["step"]), part[0]["time"], [one[name] for one in part])
    return found.told()


def _at(uses: list[MachineUsed], times: Sequence[float]) -> list[MachineUsed | None]:
    """Return the newest event of a machine at each of the times; None: there was none yet."""
    found: list[MachineUsed | None] = []
    number = 0
    for time in times:
        while number < len(uses) and uses[number].time <= time + 0.5:
            number += 1
        found.append(uses[number - 1] if number else None)
    return found
