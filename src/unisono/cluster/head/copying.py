"""A run directory of its own for a head that follows one of another machine, where that machine alone saw the run's."""

from __future__ import annotations

import json
from pathlib import Path

from unisono.cluster.head.pen import come_back
from unisono.core.errors import RunDirectoryError
from unisono.record.rundir import describe, holder, make

__all__ = ["go_on_in"]


def go_on_in(run_dir: str, run_id: str, facts: str) -> str:
    """Make the run's directory on this machine, for the workers here to go on in; returns a sentence for the user.

    Does nothing, and returns "", if this machine sees the run's directory.

    Args:
        facts: the run's description, as JSON.
    """
    folder = Path(run_dir)
    try:
        if come_back(folder, run_id):
            return (
                f"the run has left {folder} of this machine and comes back: journal and checkpoints go on in {folder}"
            )
        found = holder(folder)
        if found == run_id:
            return ""
        if found is not None:
            return (
                f"no machine that is left sees the run's directory, and {folder} here holds another run ({found}): the "
                "run goes on without journal and checkpoints"
            )
        make(folder)
        describe(folder, {**json.loads(facts), "run_id": run_id})
    except (OSError, ValueError, RunDirectoryError) as error:
        return (
            f"no machine that is left sees the run's directory, and {folder} cannot be made here ({error}): the run "
            "goes on without journal and checkpoints"
        )
    return (
        f"no machine that is left sees the run's directory: journal and checkpoints go on in {folder} of this machine. "
        "Lines of the journal that nobody here knows are missing there"
    )
