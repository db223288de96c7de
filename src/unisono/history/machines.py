"""What workers and machines did over time, as a reader sees it: ``times/`` and ``use/``, by column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from unisono.journal.thinning import Row

__all__ = ["times_of", "use_of"]


def times_of(columns: Sequence[str], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the times of the workers by column; None where a worker was not there."""
    ids = sorted({worker_id for row in rows for worker_id in _dictionary(row.record.get("workers"))}, key=_natural)
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


def use_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the use of the machines by host; None where nothing is known."""
    records = [_dictionary(row.record.get("machines", row.record)) for row in rows]
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


def _dictionary(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _natural(worker_id: str) -> tuple[str, int, str]:
    head = worker_id.rstrip("0123456789")
    return head, int(worker_id[len(head) :] or 0), worker_id
