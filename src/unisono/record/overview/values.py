"""An overview, and what it is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from unisono.core.events import Interruption, MachineUsed, Seconds
from unisono.core.telemetry import in_microseconds

__all__ = [
    "CURVE_POINTS",
    "INTERRUPTIONS",
    "RECENT",
    "SCHEMA",
    "CurvePoint",
    "Overview",
    "Recent",
    "WorkerNow",
    "efficiency",
    "mean_seconds",
    "status_of",
]

SCHEMA: Final = 1
CURVE_POINTS: Final = 240
"""At most so many points show the loss of the whole run: when there are more, two become one."""
RECENT: Final = 50
"""So many of the last sentences are kept."""
INTERRUPTIONS: Final = 20
"""So many of the last ones are shown."""


class CurvePoint(msgspec.Struct, frozen=True, array_like=True):
    """Loss of some steps that follow each other."""

    step: int
    """The first of them."""
    low: float
    high: float
    mean: float


class Recent(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence about what has happened."""

    time: float
    text: str
    level: str = "info"
    """info, warning or error."""


class WorkerNow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, at the moment."""

    worker_id: str
    host: str = ""
    device: str = ""
    part: int = 0
    """The part of the model that it has (`Overview.parts`)."""
    rank: int | None = None
    """None: it is no member of the current generation."""
    state: str = ""
    """joining, training, waiting, late, leaving, lost ..."""
    share: float = 0.0
    """Its part of the micro-batches of the last steps, 0 to 1."""
    seconds: Seconds = Seconds()
    """Mean of its last steps."""
    waits_for: str = ""
    """The worker for which it has waited longest in the last steps."""
    cores: float = 0.0
    memory_bytes: int = 0


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """A run, at a moment."""

    schema: int = SCHEMA
    run_id: str = ""
    run_dir: str = ""
    script: str = ""
    state: str = "starting"
    """starting, training, paused, waiting, finished, stopped, failed, unknown."""
    reason: str = ""
    time: float = 0.0
    """Of this overview, in seconds since 1970."""
    started: float = 0.0
    ended: float = 0.0
    """0: it has not ended."""
    step: int = -1
    """The last one that was finished; -1: none."""
    first: int = 0
    """The first step since the workers have begun, here or where an earlier run of the directory has ended."""
    num_steps: int = 0
    """Steps of the whole run; 0: unknown."""
    unit: str = "step"
    """What the script calls these steps: "step", or "round" of local steps."""
    epoch: int = 0
    loss: float | None = None
    """Not a number and infinite are None, and `loss_is` says which."""
    loss_is: str = ""
    logs: dict[str, float] = {}
    """The last values of ``step.log``."""
    evaluation: dict[str, float] = {}
    """The totals of the last evaluation that are numbers."""
    samples_per_s: float = 0.0
    steps_per_s: float = 0.0
    left_s: float | None = None
    """Time left; None: nobody knows how many steps there will be."""
    generation: int = 0
    num_workers: int = 0
    """That took part in the last step; 0: unknown."""
    digest: str = ""
    """Of the last step."""
    digests: dict[str, str] = {}
    """Of every tracked object, by name, at the end."""
    efficiency: float | None = None
    """Part of the workers' time that was spent on computing, in all steps; None: no time is known."""
    interruptions: list[Interruption] = []
    """The last ones, the oldest first."""
    interrupted_s: float = 0.0
    """By which all interruptions have made the run longer."""
    checkpoint: str = ""
    """The newest one."""
    checkpoint_step: int = -1
    curve: list[CurvePoint] = []
    parts: int = 1
    """Workers of a group, each with one part of the model; 1: every worker has all of it."""
    workers: list[WorkerNow] = []
    """By rank, then those that are no members."""
    machines: list[MachineUsed] = []
    """By name of the host."""
    recent: list[Recent] = []
    """The oldest first."""

    @property
    def elapsed_s(self) -> float:
        """From the start of the run to its end, or to the moment of this overview; 0: nobody knows when it began."""
        return max(0.0, (self.ended or self.time) - self.started) if self.started else 0.0


def efficiency(computing_s: float, total_s: float) -> float | None:
    """Return the part of the workers' time that was spent on computing, 0 to 1; None: no time is known."""
    return round(computing_s / total_s, 4) if total_s > 0 else None


def mean_seconds(told: Sequence[Seconds]) -> Seconds:
    """Return the mean of each part, in whole microseconds; all 0 where there is nothing to take it of."""
    columns = zip(*map(msgspec.structs.astuple, told), strict=True)
    means = (in_microseconds(math.fsum(column) / len(told)) for column in columns)
    return Seconds(**dict(zip(Seconds.__struct_fields__, means, strict=False)))


def status_of(overview: Overview) -> dict[str, Any]:
    """Return the figures of an overview as ``unisono watch --once --json`` has them (docs/files.md)."""
    names = ("num_steps", "unit", "epoch", "efficiency", "interrupted_s")
    return {
        "step": overview.step if overview.step >= 0 else None,
        "loss": overview.loss_is or overview.loss,
        **{name: getattr(overview, name) for name in names},
    }
