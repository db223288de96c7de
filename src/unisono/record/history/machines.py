"""What workers did in the newest steps, and machines in the newest time, as a reader sees it: by column."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from unisono.core.events import GpuUse, MachineUsed
from unisono.record.journal.lines import NO_LINE
from unisono.record.journal.newest import newest_first
from unisono.record.journal.times import COLUMNS, TimesRecord, numbers_of, with_next

__all__ = ["added_up", "in_parts", "natural", "read_use", "steps_of", "times_of", "use_of"]

T = TypeVar("T")
Numbers = list[float | None]
_used: Final = msgspec.json.Decoder(list[MachineUsed])
_USED: Final = ("cores", "num_cores", "memory_bytes", "memory_total_bytes", "sent_bytes_per_s", "received_bytes_per_s")
_GPU: Final = GpuUse.__struct_fields__


def times_of(told: Sequence[TimesRecord], last: int, points: int) -> dict[str, Any]:
    """Return the times of the workers by column, in at most so many means of steps that follow each other.

    Args:
        told: with some steps, and with the one after ``last``, if there is one: it knows the rest about the last.

    Returns:
        As `unisono.record.history.History.times`; None where a worker was not there.
    """
    steps = [(now, after) for now, after in with_next(told) if now.step <= last]
    ids = sorted({worker_id for each, _ in steps for worker_id in each.workers}, key=natural)
    found: dict[str, Any] = {"workers": ids, "step": [], "time": [], "values": {name: [] for name in COLUMNS}}
    found["waits_for"] = []
    for part in in_parts(steps, points):
        found["step"].append(part[0][0].step)
        found["time"].append(part[0][0].time)
        rows = [
            _means([numbers_of(own, after.get(each)) for now, after in part if (own := now.workers.get(each))])
            for each in ids
        ]
        for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True):
            found["values"][name].append(list(column))
        newest = [[after[each].waits_for for _, after in part if each in after] for each in ids]
        found["waits_for"].append([next((who for who in reversed(names) if who), None) for names in newest])
    return found


def _means(rows: Sequence[Numbers]) -> Numbers:
    """Return the mean of each column, of the numbers that there are; None: there is none."""
    if len(rows) == 1:
        return rows[0]
    columns: Iterable[Sequence[float | None]] = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
    return [_mean(column) for column in columns]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def steps_of(times: Mapping[str, Any], last: int) -> list[int]:
    """Return how many steps each point of `times_of` stands for.

    Args:
        last: the last step.
    """
    steps = times["step"]
    return [after - before for before, after in itertools.pairwise([*steps, last + 1])]


def added_up(rows: Sequence[Sequence[float | None]], weights: Sequence[int], place: int) -> float:
    """Return the sum over the steps of a column of `times_of`, for the worker at this place.

    Args:
        weights: by point, how many steps it stands for.
    """
    return math.fsum(weight * (row[place] or 0.0) for row, weight in zip(rows, weights, strict=False))


def read_use(path: Path, since: float = -math.inf) -> list[list[MachineUsed]]:
    """Return the newest records of what machines use, by time: those after ``since`` that are kept.

    Args:
        path: of the file. A record that cannot be read is left out.
    """
    found: list[list[MachineUsed]] = []
    with contextlib.suppress(OSError):
        for text in newest_first(path):
            with contextlib.suppress(*NO_LINE):
                used = _used.decode(text)
                if used and used[0].time <= since:
                    break
                found += [used] if used else []
    return found[::-1]


def use_of(records: Sequence[Sequence[MachineUsed]], points: int) -> dict[str, Any]:
    """Return the use of the machines by host, in at most so many means; None where nothing is known."""
    parts = list(in_parts(records, points))
    machines: dict[str, dict[str, Any]] = {}
    for host in sorted({used.host for record in records for used in record}):
        told = [[used for record in part for used in record if used.host == host] for part in parts]
        newest = next(uses[-1] for uses in reversed(told) if uses)
        columns: dict[str, Any] = {}
        for name in _USED:
            column = [_mean(getattr(used, name) for used in uses) for uses in told]
            columns[name] = getattr(newest, name) if _is_total(name) else column
        for name in _GPU if newest.gpus else ():
            gpus = [_by_place([[getattr(gpu, name) for gpu in used.gpus] for used in uses]) for uses in told]
            columns[f"gpu_{name}"] = [getattr(gpu, name) for gpu in newest.gpus] if _is_total(name) else gpus
        columns["worker_cores"] = [
            {worker_id: use.cores for worker_id, use in uses[-1].workers.items()} if uses else None for uses in told
        ]
        machines[host] = columns
    return {"time": [part[0][0].time for part in parts], "machines": machines}


def _is_total(name: str) -> bool:
    return name.startswith("num_") or name.endswith("_total_bytes")


def _by_place(rows: Sequence[Sequence[float]]) -> list[float | None] | None:
    """Return the mean of each column; None: there is no row."""
    return [_mean(column) for column in itertools.zip_longest(*rows)] if rows else None


def in_parts(values: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Cut values into at most so many parts of equally many that follow each other; the last one may have fewer."""
    size = max(1, math.ceil(len(values) / max(1, most)))
    return (values[start : start + size] for start in range(0, len(values), size))


def natural(worker_id: str) -> tuple[str, int, str]:
    """Return a key by which w2 comes before w10."""
    head = worker_id.rstrip("0123456789")
    return head, int(worker_id[len(head) :] or 0), worker_id
