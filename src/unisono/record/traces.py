"""Traces of several workers as one, on one clock: a process of its own, ``python -m unisono.record.traces FOLDER
FILE``.

A trace is what torch.profiler exports, in the format of chrome://tracing and Perfetto: its times are microseconds after
``baseTimeNanoseconds``, by the clock of the worker's machine.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

__all__ = ["ABOUT", "About", "TracePart", "main", "merge", "part_name"]

ABOUT: Final = "about.json"
_OF_WORKER: Final = 1_000_000
"""Processes, and flows between events, of one worker have numbers of this million."""


class TracePart(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of whom there is a trace."""

    worker_id: str
    host: str
    pid: int
    """Of the worker; other processes of its trace are e.g. GPUs."""
    ahead_s: float = 0.0
    """By how much its clock is ahead of the common one."""
    error_s: float = 0.0
    """By how much that may be wrong, at most."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the traces in a folder are about."""

    first: int
    stop: int
    """Steps of the run, from the first up to but without this one."""
    parts: list[TracePart]
    """By rank."""


def part_name(worker_id: str) -> str:
    """Return the name of a worker's trace in the folder."""
    return f"{worker_id}.json.gz"


def merge(folder: Path, target: Path) -> list[str]:
    """Write the traces in a folder as one, all at once; then remove the folder. Returns the workers whose trace it has.

    A trace that is missing or broken is left out.

    Raises:
        OSError: the file cannot be written. ValueError: the folder holds no traces.
    """
    about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    base, events, known = 0.0, [], []
    for number, part in enumerate(about.parts):
        try:
            with gzip.open(folder / part_name(part.worker_id), "rt", encoding="utf-8") as file:
                trace = json.load(file)
            began = int(trace.get("baseTimeNanoseconds", 0)) / 1e3 - part.ahead_s * 1e6  # microseconds
            found = [dict(event) for event in trace["traceEvents"]]
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
            continue
        base = base or began
        events += _on_common_clock(found, part, number, began - base)
        known.append(part.worker_id)
    if not known:
        raise ValueError(f"{folder} holds no readable trace")
    merged = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": round(base * 1e3),
        "traceEvents": events,
        "unisono": {"steps": [about.first, about.stop], "workers": msgspec.to_builtins(about.parts)},
    }
    scratch = target.with_name(f".{target.name}.part")
    try:
        with gzip.open(scratch, "wt", encoding="utf-8", compresslevel=5) as file:
            json.dump(merged, file)
        scratch.replace(target)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    return known


def _on_common_clock(events: list[dict[str, Any]], part: TracePart, number: int, later: float) -> list[dict[str, Any]]:
    """Return the events of a worker, later by so many microseconds, as those of processes with the worker's name."""
    processes: dict[Any, int] = {part.pid: number * _OF_WORKER}
    changed = []
    for event in events:
        if "pid" in event:
            event["pid"] = processes.setdefault(event["pid"], number * _OF_WORKER + len(processes))
        if isinstance(event.get("ts"), int | float):
            event["ts"] += later
        if isinstance(event.get("id"), int):
            event["id"] += number * _OF_WORKER
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_sort_index", "process_labels"):
            if event["pid"] == number * _OF_WORKER:
                continue
            if event["name"] == "process_name":
                event["args"] = {"name": f"{part.worker_id}: {event['args'].get('name', '')}"}
        changed.append(event)
    own = {"ph": "M", "pid": number * _OF_WORKER, "tid": 0, "ts": 0}
    name = f"{part.worker_id} on {part.host}"
    return [
        {**own, "name": "process_name", "args": {"name": name}},
        {**own, "name": "process_sort_index", "args": {"sort_index": number}},
        *changed,
    ]


def main(folder: str, target: str) -> int:
    """Merge, and say where the trace lies."""
    os.nice(10)
    try:
        known = merge(Path(folder), Path(target))
    except (OSError, ValueError) as error:
        print(f"unisono: the trace {target} could not be written: {error}", file=sys.stderr)
        return 1
    print(f"unisono: the trace of {', '.join(known)} is {target}; open it at https://ui.perfetto.dev", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
