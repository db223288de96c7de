"""Runs of a folder: what ``unisono watch --once`` and ``unisono watch`` show of a folder that is no run itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.core.words import number, progress

__all__ = ["list_words", "runs_in"]


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """Return the runs whose directories lie in a folder, by name; none where the folder is a run itself."""
    from unisono.record import journal, rundir

    if not folder.is_dir() or rundir.holder(folder) is not None:
        return []
    found = []
    for run in sorted(folder.iterdir()):
        if not run.is_dir() or rundir.holder(run) is None:
            continue
        try:
            summary = journal.summary(run)
        except (OSError, ValueError) as error:
            summary = {"state": "unknown", "reason": f"the journal cannot be read: {error}"}
        if rundir.is_going(run):
            summary["state"] = "training"
        found.append({"run_dir": str(run), **summary})
    return found


def list_words(runs: list[dict[str, Any]]) -> str:
    """Return the runs as text, a line each."""
    columns = max(len(run["run_dir"]) for run in runs)
    lines = []
    for run in runs:
        step, loss = run.get("step"), run.get("loss")
        done = "no step yet"
        if step is not None and step >= 0:
            done = progress(step + 1, run.get("num_steps", 0), run.get("unit", "step"))
        at = done + (f", loss {number(float(loss))}" if loss is not None else "")
        lines.append(f"{run['run_dir']:<{columns}}  {run['state']:<9} {at}".rstrip())
    return "\n".join(lines)
