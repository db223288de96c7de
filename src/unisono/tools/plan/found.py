"""What a trial is asked for, and what it leaves in its directory besides the run's own files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import msgspec

from unisono.core.cursor import Recipe
from unisono.core.rehearsals import FIRST_STEPS

__all__ = [
    "FILE",
    "IN_A_ROW",
    "IN_A_ROW_ALONE",
    "NUM_COUNTED",
    "PROGRAM",
    "WARM_UP",
    "ProbeSettings",
    "StageFindings",
    "WorkerFindings",
    "found_in",
]

WARM_UP: Final = 3
"""Steps at the beginning of a number of workers that do not count: caches, page faults."""
NUM_COUNTED: Final = 4
"""Steps that count, at least: of fewer, the median is one of the two extremes or lies between them."""
IN_A_ROW: Final = FIRST_STEPS + 1 + NUM_COUNTED + 2
"""Steps from the beginning of a run, with the same workers, from which a plan can be made. Those that are compared do
not count (`unisono.core.rehearsals`: the first of a run, and the one after them), the times of a step come with the
next one, and a trial ends within its last step.
"""
IN_A_ROW_ALONE: Final = WARM_UP + NUM_COUNTED + 2
"""The same with one worker, which compares nothing. Several workers need as many later in a run."""
FILE: Final = "probe.json"
PROGRAM: Final = "the program, and data"


class ProbeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is measured. Of the arguments of ``run.steps``, zeros leave the script's own."""

    steps: int
    """Steps of one training, at least."""
    workers: int = 1
    seconds: float = 0.0
    """Where a run has one worker: it goes on until they have taken so long, or the loop is at its end."""
    microbatches: int = 0
    batch_size: int = 0
    room: int | None = None
    """Bytes by which the memory of a worker may grow from the beginning of its training; None: there is no limit."""


class StageFindings(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage of a model holds, in bytes."""

    held: int
    """Parameters and buffers."""
    states: int
    """Of optimizers."""
    gradient: int
    """Of one sum."""
    cut: float = 0.0
    """The part of its parameters that lies in shards, from 0 to 1."""


class WorkerFindings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has found besides the times, which are among the run's own files."""

    first: int
    """The first step of the training that was measured, by its number in the run."""
    done: int
    """Steps of it that were done."""
    device: str
    recipe: Recipe
    is_sharded: bool
    """An optimizer's state is shared out."""
    parameter_bytes: int
    gradient_bytes: int
    """Of one node of the summation tree."""
    parts: dict[str, int]
    """Memory that does not depend on the size of a micro-batch, by name, in bytes."""
    peak: int
    """The most memory that the process has had in the loop; of what it shares with others, its part."""
    limit: int | None
    """What it could have had; None: unknown."""
    stages: list[StageFindings] = []
    """Of a model in stages; [] of any other."""
    shards: int = 1
    """Into which layers of such a model are cut."""
    held_up: float = 0.0
    """Part of the time for which the worker could have run, and had no core: other programs use the machine."""


def found_in(directory: Path) -> WorkerFindings | None:
    """Return what the first worker of a run has found; None: it has not come so far."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((directory / FILE).read_bytes(), type=WorkerFindings)
    return None
