"""Account of a run, from the lines of its story: who took part from when to when, what interrupted it, how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = ["account"]

MOST: Final = 10_000
"""So many workers, machines and interruptions are listed, the newest."""
_WORKER: Final = ("worker_id", "host", "device", "pid", "generation", "step")
_INTERRUPTION: Final = ("time", "generation", "step", "seconds", "reason")


def account(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the account of the last run in the story: a run that was resumed is another one.

    Returns:
        ``run_id``, ``started`` and ``ended`` (seconds since 1970; 0.0: not said), ``machines``, ``workers`` (each with
        when and why it came and went), ``interruptions``, ``interrupted_s``, and ``end``: the line about the end, {}
        where there is none.
    """
    run_id = ""
    found = _nothing()
    for line in lines:
        if line.get("run_id", run_id) != run_id:
            run_id, found = str(line["run_id"]), _nothing()
        _take(found, line)
    machines, workers = [list(found[name].values())[-MOST:] for name in ("machines", "workers")]
    interruptions = found["interruptions"][-MOST:]
    return {
        "run_id": run_id,
        "started": found["started"],
        "ended": float(found["end"].get("time", 0.0)),
        "machines": machines,
        "workers": workers,
        "interruptions": interruptions,
        "interrupted_s": round(sum((each["seconds"] for each in interruptions), 0.0), 6),
        "end": found["end"],
    }


def _nothing() -> dict[str, Any]:
    return {"started": 0.0, "machines": {}, "workers": {}, "interruptions": [], "end": {}}


def _take(found: dict[str, Any], line: Mapping[str, Any]) -> None:
    at = float(line.get("time", 0.0))
    found["started"] = found["started"] or at
    match line["kind"]:
        case "start":
            found["end"] = {}
        case "machine-joined":
            found["machines"][line["agent_id"]] = {
                "agent_id": line["agent_id"],
                "host": line["host"],
                "num_workers": line["num_workers"],
                "joined": at,
            }
        case "machine-gone" if line["agent_id"] in found["machines"]:
            found["machines"][line["agent_id"]].update(gone=at, reason=line["reason"])
        case "joined":
            worker = {name: line.get(name) for name in _WORKER}
            found["workers"][line["worker_id"]] = {**worker, "joined": at, "why_joined": line["reason"]}
        case "gone":
            worker = found["workers"].setdefault(
                line["worker_id"], {"worker_id": line["worker_id"], "host": line["host"]}
            )
            worker.update(gone=at, how=line["how"], why_gone=line["reason"], last_step=line["step"])
        case "interruption":
            found["interruptions"].append({name: line[name] for name in _INTERRUPTION})
        case "end":
            found["end"] = dict(line)
