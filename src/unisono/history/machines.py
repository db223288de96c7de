"""What workers and machines did over time, as a reader sees it: ``times/`` and ``use/``, by column."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from unisono.events import GpuUse, MachineUsed, Seconds
from unisono.journal.lines import is_number
from unisono.journal.rows import Row

__all__ = ["added_up", "natural", "seconds_of", "steps_of", "times_of", "use_of", "used_in"]


def times_of(columns: Sequence[str], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the times of the workers by column; None where a worker was not there."""
    ids = sorted({worker_id for row in rows for worker_id in _dictionary(row.record.get("workers"))}, key=natural)
    values: dict[str, list[list[Any]]] = {name: [] for name in columns}
    names: dict[str, list[list[str | None]]] = {"waits_for": [], "link_to": []}
    for row in rows:
        workers = _dictionary(row.record.get("workers"))
        each = [workers.get(worker_id) for worker_id in ids]
        for at, name in enumerate(columns):
            values[name].append([told[at] if isinstance(told, list) and at < len(told) else None for told in each])
        for name, found in names.items():
            told_names = _dictionary(row.record.get(name))
            found.append([told_names.get(worker_id) for worker_id in ids])
    return {
        "workers": ids,
        "step": [int(row.first) for row in rows],
        "time": [row.record.get("time") or 0.0 for row in rows],
        "values": values,
        **names,
    }


def steps_of(times: Mapping[str, Any], last: int) -> list[int]:
    """Return how many steps each point of `times_of` stands for: older points are means of more steps.

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


def seconds_of(times: Mapping[str, Any], last: int) -> dict[str, dict[str, float]]:
    """Return how long each worker was busy with what, over all steps of `times_of`: by worker, by part of a step.

    Args:
        last: the last step.
    """
    weights = steps_of(times, last)
    values = times["values"]
    return {
        worker_id: {part: added_up(values.get(part, ()), weights, place) for part in _PARTS}
        for place, worker_id in enumerate(times["workers"])
    }


def use_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the use of the machines by host; None where nothing is known."""
    records = [row.record for row in rows]
    hosts = sorted({host for record in records for host, told in record.items() if isinstance(told, dict)})
    machines: dict[str, dict[str, Any]] = {}
    for host in hosts:
        told = [_dictionary(record.get(host)) for record in records]
        columns: dict[str, Any] = {}
        for name in dict.fromkeys(name for each in told for name in each):
            column = [each.get(name) for each in told]
            is_total = name.startswith("num_") or name.endswith("_total_bytes")
            columns[name] = (
                next((value for value in reversed(column) if value is not None), None) if is_total else column
            )
        machines[host] = columns
    return {"time": [row.first if math.isfinite(row.first) else 0.0 for row in rows], "machines": machines}


def used_in(row: Row) -> list[MachineUsed]:
    """Return the events that a record of ``use/`` was made of."""
    found: list[MachineUsed] = []
    for host, told in row.record.items():
        if isinstance(told, dict):
            gpus = zip(*(told.get(f"gpu_{name}", []) for name in _GPU), strict=False)
            cores, memory = _dictionary(told.get("worker_cores")), _dictionary(told.get("worker_memory_bytes"))
            whole = {name: round(value) for name, value in told.items() if name in _WHOLE and is_number(value)}
            known = {
                **{name: value for name, value in told.items() if name in MachineUsed.__struct_fields__},
                **whole,
                "time": row.last,
                "host": host,
                "gpus": [
                    {
                        name: value if name == "utilization" else round(value)
                        for name, value in zip(_GPU, gpu, strict=True)
                    }
                    for gpu in gpus
                ],
                "workers": {
                    worker_id: {"cores": value, "memory_bytes": round(memory.get(worker_id, 0))}
                    for worker_id, value in cores.items()
                },
            }
            with contextlib.suppress(msgspec.ValidationError, TypeError):  # of another version
                found.append(msgspec.convert(known, MachineUsed))
    return found


_PARTS: Final = Seconds.__struct_fields__
_GPU: Final = GpuUse.__struct_fields__
_WHOLE: Final = frozenset(field.name for field in msgspec.structs.fields(MachineUsed) if field.type is int)


def _dictionary(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def natural(worker_id: str) -> tuple[str, int, str]:
    """Return a key by which w2 comes before w10."""
    head = worker_id.rstrip("0123456789")
    return head, int(worker_id[len(head) :] or 0), worker_id
