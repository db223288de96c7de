"""Times of each worker, beside the journal: ``times/`` in the run's directory, thinned out with age.

The key of a record is the step. Most of what a worker tells about a step is known only in the next one
(`unisono.events.WorkerTimes`): here it is with the step that it is about. The header's ``columns`` name the numbers
that a record has for each worker.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.events import Seconds, StepFinished, WorkerTimes
from unisono.journal.ranges import newest
from unisono.journal.thinning import Thinned

__all__ = ["COLUMNS", "TIMES", "Times", "by_step", "record_of", "workers_in"]

TIMES: Final = "times"
KEPT_STEPS: Final = 64
"""Every member keeps so many steps, for the case that it is the next writer: the last one may have lost them."""

_SECONDS: Final = Seconds.__struct_fields__
_OF_STEP: Final = ("leaves", "data", "compute")
_FIELDS: Final = [field for field in msgspec.structs.fields(WorkerTimes) if field.name not in (*_OF_STEP, "last")]
_NUMBERS: Final = tuple(field.name for field in _FIELDS if field.type in (int, float))
_NAMES: Final = tuple(field.name for field in _FIELDS if field.type is str)
COLUMNS: Final = ("leaves", *_SECONDS, *_NUMBERS)


class Times:
    """Writes the times of the workers, on the member that writes the journal. Never raises, and waits for no disk.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / TIMES
        self._recent: deque[StepFinished] = deque(maxlen=KEPT_STEPS)
        self._before: StepFinished | None = None
        self._thinned: Thinned | None = None

    def note(self, event: StepFinished) -> None:
        """Keep a step, on any member, before it may be written."""
        if event.workers:
            self._recent.append(event)

    def take_over(self) -> None:
        """Become the writer: write the steps that are kept, where another writer may have ended in the middle."""
        self.close()

    def take(self, event: StepFinished) -> None:
        """Write a step, on the writer."""
        if not event.workers:
            return
        if self._thinned is None:
            self._thinned = Thinned(self._path, {"columns": COLUMNS})
            kept = [each for each in self._recent if each.step < event.step]
            self._thinned.cut(kept[0].step if kept else event.step)
            for before, after in itertools.pairwise(kept):
                self._thinned.add(before.step, partial(record_of, before, after))
            self._before = kept[-1] if kept else None
        self._write_before(event)
        self._before = event

    def end(self) -> None:
        """Write the last step: none follows."""
        self._write_before(None)

    def close(self) -> None:
        """Write what there is; wait for the disk, but not long."""
        if self._thinned is not None:
            self._write_before(None)
            self._thinned.close()
            self._thinned = None

    def _write_before(self, after: StepFinished | None) -> None:
        before, self._before = self._before, None
        if before is not None and self._thinned is not None:
            self._thinned.add(before.step, partial(record_of, before, after))


def record_of(step: StepFinished, after: StepFinished | None) -> dict[str, Any]:
    """Return the record of a step.

    Args:
        after: the next step, which knows the rest about this one; None: there is none, and that is missing.
    """
    workers: dict[str, list[float | None]] = {}
    names: dict[str, dict[str, str]] = {}
    for worker_id, times in step.workers.items():
        told = after.workers.get(worker_id) if after is not None and after.step == step.step + 1 else None
        if told is None:
            parts = {"data": times.data, "compute": times.compute}
            workers[worker_id] = [times.leaves, *map(parts.get, _SECONDS), *(None for _ in _NUMBERS)]
            continue
        last = told.last
        workers[worker_id] = [
            times.leaves,
            *[getattr(last, name) for name in _SECONDS],
            *[getattr(told, name) for name in _NUMBERS],
        ]
        for name in _NAMES:
            if value := getattr(told, name):
                names.setdefault(name, {})[worker_id] = value
    return {"time": step.time, "workers": workers, **names}


def workers_in(columns: Sequence[str], now: dict[str, Any], before: dict[str, Any]) -> dict[str, WorkerTimes]:
    """Return the workers of a step's event, by id: the reverse of `record_of`.

    Args:
        now: the record of the step.
        before: that of the step before.
    """
    found: dict[str, WorkerTimes] = {}
    workers = now.get("workers")
    for worker_id, numbers in workers.items() if isinstance(workers, dict) else ():
        own = _numbers(columns, numbers)
        told = _numbers(columns, (before.get("workers") or {}).get(worker_id))
        whole = {name: value for name in _NUMBERS if (value := told.get(name)) is not None}
        names = {name: str((before.get(name) or {}).get(worker_id, "")) for name in _NAMES}
        found[worker_id] = msgspec.convert(
            {
                "leaves": round(own.get("leaves", 0)),
                "data": own.get("data", 0.0),
                "compute": own.get("compute", 0.0),
                "last": {name: told[name] for name in _SECONDS if name in told},
                **{name: round(value) if _TYPES[name] is int else value for name, value in whole.items()},
                **names,
            },
            WorkerTimes,
        )
    return found


def by_step(directory: Path) -> dict[int, dict[str, dict[str, float | None]]]:
    """Return, of the newest steps of a run, which are kept in full: by step, the times of each worker by name (leaves,
    compute, waiting ...), workers by rank. None: that is not known, because no step followed.
    """
    reading = newest(directory / TIMES, sys.maxsize)
    columns = reading.header.get("columns", ())
    return {
        int(row.first): {
            worker_id: dict(zip(columns, numbers, strict=False)) for worker_id, numbers in row.record["workers"].items()
        }
        for row in reading.rows
    }


def _numbers(columns: Sequence[str], numbers: Any) -> dict[str, float]:
    if not isinstance(numbers, list):
        return {}
    return {name: value for name, value in zip(columns, numbers, strict=False) if isinstance(value, (int, float))}


_TYPES: Final = {field.name: field.type for field in _FIELDS}
