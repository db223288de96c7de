"""Times of each worker in the newest steps, beside the journal: ``times.jsonl`` in the run's directory.

A record is what the workers have told with a step, as it stands in the step's event. Most of it is about the step
before (`unisono.core.events.WorkerTimes`). Of all steps, the journal's line has the mean over the workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from unisono.core.events import Seconds, StepFinished, WorkerTimes
from unisono.record.journal.lines import NO_LINE
from unisono.record.journal.newest import newest_first

__all__ = ["COLUMNS", "TIMES", "TimesRecord", "by_step", "numbers_of", "read_times", "record_of", "with_next"]

TIMES: Final = "times.jsonl"
_SECONDS: Final = Seconds.__struct_fields__
_OF_STEP: Final = ("leaves", "data", "compute")
_NUMBERS: Final = tuple(
    field.name
    for field in msgspec.structs.fields(WorkerTimes)
    if field.type in (int, float) and field.name not in _OF_STEP
)
COLUMNS: Final = ("leaves", *_SECONDS, *_NUMBERS)
"""Names of the numbers of a worker in a step."""


class TimesRecord(msgspec.Struct, frozen=True):
    """A record: what the workers have told with a step."""

    step: int
    time: float
    workers: dict[str, WorkerTimes]
    """By id, in the order of their ranks."""


_told: Final = msgspec.json.Decoder(TimesRecord)


def record_of(event: StepFinished) -> bytes:
    """Return the record of a step."""
    return msgspec.json.encode(TimesRecord(event.step, event.time, event.workers))


def read_times(directory: Path, since: int = 0) -> list[TimesRecord]:
    """Return what the workers have told with the newest steps, by step: with those from ``since`` on that are kept.

    A record that cannot be read is left out. Of a step that was done again, its newest record counts.
    """
    found: list[TimesRecord] = []
    with contextlib.suppress(OSError):
        for text in newest_first(directory / TIMES):
            with contextlib.suppress(*NO_LINE):
                told = _told.decode(text)
                if found and told.step >= found[-1].step:
                    continue  # the run has gone back behind this step since
                if told.step < since:
                    break
                found.append(told)
    return found[::-1]


def numbers_of(told: WorkerTimes, after: WorkerTimes | None) -> list[float | None]:
    """Return the numbers of a worker in a step, by `COLUMNS`.

    Args:
        told: with this step.
        after: with the next step, about this one; None: there is none, and that is not known.
    """
    if after is None:
        parts = {"data": told.data, "compute": told.compute}
        return [told.leaves, *map(parts.get, _SECONDS), *(None for _ in _NUMBERS)]
    return [told.leaves, *msgspec.structs.astuple(after.last), *(getattr(after, name) for name in _NUMBERS)]


def by_step(directory: Path) -> dict[int, dict[str, dict[str, float | None]]]:
    """Return, of the newest steps of a run: by step, the times of each worker by name (leaves, compute, waiting ...),
    workers by rank. None: that is not known, because no step followed.
    """
    return {
        told.step: {
            worker_id: dict(zip(COLUMNS, numbers_of(times, after.get(worker_id)), strict=True))
            for worker_id, times in told.workers.items()
        }
        for told, after in with_next(read_times(directory))
    }


def with_next(found: Iterable[TimesRecord]) -> Iterator[tuple[TimesRecord, dict[str, WorkerTimes]]]:
    """Yield each record with what the workers have told in the step after it; {}: that step has no record."""
    last: TimesRecord | None = None
    for each in found:
        if last is not None:
            yield last, each.workers if each.step == last.step + 1 else {}
        last = each
    if last is not None:
        yield last, {}
