"""Events of a run, as frozen values. Every sink of every process gets the same ones.

An event is made once and never changed. The worker that finishes a step makes its `StepFinished`; that value is the
step's line in the journal (`unisono.record.journal.to_line`), travels to the head and from there to the sinks of every
machine. ``kind`` is the tag of an event in JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

__all__ = [
    "EQUAL_FIELDS",
    "Announcement",
    "CheckpointWritten",
    "EvaluationFinished",
    "Event",
    "GpuUse",
    "Interruption",
    "LinesLost",
    "MachineGone",
    "MachineJoined",
    "MachineUsed",
    "MembershipChanged",
    "Note",
    "Once",
    "Problem",
    "RunEnded",
    "RunStarted",
    "Seconds",
    "StepFinished",
    "StepResult",
    "WorkerGone",
    "WorkerJoined",
    "WorkerLate",
    "WorkerOutput",
    "WorkerTimes",
    "WorkerUse",
]


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the values that events are made of."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """Base of all events. A field with its default value is left out of the event's JSON."""

    time: float = 0.0
    """When, in seconds since 1970 (UTC), by the clock of the process that has made the event; 0: unknown."""
    number: int = -1
    """Of the event's line in the journal, which all members count alike; or counted by the head that has told it first.
    -1: it has none, and is never told again."""
    head: str = ""
    """The head that has counted it; "": the number is that of a line."""


class Seconds(_Value):
    """Wall time of one step on one worker, by what it was spent on. The parts add up to the whole."""

    data: float = 0.0
    compute: float = 0.0
    exchange: float = 0.0
    """To add, copy and hand over sums on this machine."""
    network: float = 0.0
    """Until the sums had come together from all machines, since the last worker was ready: bytes on their way, and
    their addition."""
    waiting: float = 0.0
    """For other workers, which had not come so far yet."""
    update: float = 0.0
    """What the script does with the step's gradients, until the next step begins."""
    other: float = 0.0

    def total(self) -> float:
        return self.data + self.compute + self.exchange + self.network + self.waiting + self.update + self.other


class WorkerTimes(_Value):
    """Times of one worker for a step."""

    leaves: int = 0
    """Micro-batches that it computed for this step."""
    data: float = 0.0
    compute: float = 0.0
    last: Seconds = Seconds()
    """The whole step **before**: the time of an exchange is known only after it. So is what follows."""
    waits_for: str = ""
    """The worker for which this one has waited longest; "": for none."""
    waits_s: float = 0.0
    """How long it has waited for that one."""
    page_faults: int = 0
    """For which the system had to read from a disk."""


# -- the run -----------------------------------------------------------------------------------------


class RunStarted(_Event, tag="start"):
    """The workers begin to train, at the beginning or where an earlier run of the directory has ended."""

    run_id: str
    directory: str
    """Empty where the run keeps nothing on a disk."""
    step: int
    """Steps of the run that are done already."""
    recipe: dict[str, int | bool | str]
    """Everything in the script that the bits depend on: batch size, micro-batches, seed ..."""


class MembershipChanged(_Event, tag="membership"):
    """Another generation has begun; its members compute from here on."""

    generation: int
    worker_ids: tuple[str, ...]
    """By rank."""
    reason: str = ""


class WorkerJoined(_Event, tag="joined"):
    """A worker has become a member."""

    worker_id: str
    host: str
    device: str
    pid: int
    generation: int
    """The first one that it is a member of."""
    step: int
    """The first step that it takes part in."""
    reason: str
    """Why it came: the run begins, another worker was lost, ``unisono scale``, a machine joined ..."""
    part: int = 0
    """The part of the model that it has, where a run has groups of workers."""


class WorkerGone(_Event, tag="gone"):
    """A worker is no member any more, or has ended before it became one."""

    worker_id: str
    host: str
    how: Literal["left", "lost", "failed", "evicted", "finished"]
    """It was asked to leave; its process died or cannot be reached; its script raised an error; the head has ended it
    because it hung; or its script has returned."""
    reason: str
    step: int
    """The last step that the run had finished."""


class MachineJoined(_Event, tag="machine-joined"):
    """An agent has connected to the run."""

    agent_id: str
    host: str
    num_workers: int
    """That the machine offers."""


class MachineGone(_Event, tag="machine-gone"):
    """An agent has left the run, or is lost."""

    agent_id: str
    host: str
    reason: str


class GpuUse(_Value):
    """Use of one GPU."""

    utilization: float
    """0 to 1."""
    memory_bytes: int
    memory_total_bytes: int


class WorkerUse(_Value):
    """What the process of a worker uses, with its own children."""

    cores: float
    """Seconds of processor time per second."""
    memory_bytes: int


class MachineUsed(_Event, tag="use"):
    """What a machine uses at the moment: a mean since the event before."""

    host: str
    cores: float
    """That are busy with anything."""
    num_cores: int
    memory_bytes: int
    """That is not available to new programs."""
    memory_total_bytes: int
    sent_bytes_per_s: float
    """Over all interfaces but loopback."""
    received_bytes_per_s: float
    gpus: list[GpuUse] = []
    workers: dict[str, WorkerUse] = {}
    """By worker id."""


class Interruption(_Event, tag="interruption"):
    """The first step of another generation is finished: how much longer it took than steps usually do."""

    generation: int
    step: int
    seconds: float
    reason: str
    """Why there is another generation."""


class CheckpointWritten(_Event, tag="checkpoint"):
    """A checkpoint is on the disk, and complete."""

    step: int
    """Steps of the run that it has."""
    bytes: int = 0
    seconds: float = 0.0
    """From the copy of the state to the end of writing; the training goes on meanwhile."""


class Note(_Event, tag="note"):
    """A sentence of a step, told besides the step."""

    about: Literal["balance", "warning"]
    step: int
    text: str


class Problem(_Event, tag="problem"):
    """Something went wrong: one sentence with the culprit, and where the evidence lies."""

    problem: str
    """hang, crash, nan, divergence, out-of-memory, failed-join ..."""
    text: str
    """What has happened, to whom, and what to do."""
    worker_id: str = ""
    step: int = -1
    evidence: str = ""
    """Name of the file in the run's directory; "": there is none."""
    ends_run: bool = False
    """The run ends with it: its `RunEnded` says the same."""


class RunEnded(_Event, tag="end"):
    """The run is over. The last event of a stream."""

    ok: bool
    reason: str
    """Why, in words; in a worker that has finished: empty."""
    digests: dict[str, str]
    """Of every tracked object, by name; empty where the run failed."""
    sha256: dict[str, str] = {}
    """Of the weights of every tracked module, by name, as a safetensors file has them (`unisono.record.weights_file`);
    where the run has a directory and has finished."""
    step: int = -1
    """The last step that was finished, where that is known; else -1."""
    traceback: str = ""
    """Of the worker whose failure has ended the run."""


# -- what its workers agree on: the lines of the journal ---------------------------------------------


class StepResult(_Event, kw_only=True):
    """Result of a step, equal on all members: the same bits for any number of workers."""

    step: int
    """Counted over the whole run from 0, however often the script calls ``run.steps``."""
    epoch: int
    loss: float
    weight: float
    samples: int
    digest: str
    """Of the sums, 16 hexadecimal digits; of all passes together if there were several."""
    totals: dict[str, Any] = {}
    """Of ``step.add``, by name: numbers, or lists of numbers."""
    losses: list[float] = []
    """Of each pass over the batch, if there were several (``step.again``); ``loss`` is that of the first."""
    unit: str = "step"
    """What a script calls it: "step", or "round" of local steps."""


EQUAL_FIELDS: Final = ("step", "epoch", "samples", "digest", "loss", "weight", "totals", "losses")
"""What is equal in two computations of a step with the same bits: fields of a `StepResult`, and of its line in the
journal."""


class StepFinished(StepResult, kw_only=True, tag="step"):
    """A step is finished: all members have its gradient, and the script has left its update."""

    num_steps: int
    """Steps of the whole run; 0: nobody knows."""
    generation: int
    seconds: Seconds
    """Wall time of the step on the worker that wrote the line."""
    means: Seconds = Seconds()
    """Mean over the workers of the wall time of the step **before**, whose exchange is known only now; all 0: there is
    no step before, or an older version has written the line."""
    workers: dict[str, WorkerTimes]
    """By worker id."""
    logs: dict[str, float]
    """From ``step.log``."""
    sent_bytes: int = 0
    """Data that the worker that wrote the line has sent to other hosts for the step's sums."""
    checkpoint: dict[str, Any] = {}
    """News of checkpoints since the step before."""
    balance: str = ""
    """Why this step's plan is another than that of the step before."""
    warnings: list[str] = []
    """About members that may compute differently, in the first step that they took part in."""
    audits: dict[str, str] = {}
    """By micro-batch, the digest of its gradient in the first pass, where two workers have computed it
    (`unisono.core.audit_rules`): 16 hexadecimal digits. Where a worker has several in a step, one digest for all of
    them, by their numbers: "3,7"."""


class EvaluationFinished(_Event, tag="evaluation"):
    """An evaluation is finished, or the script has logged figures of its own (``run.log``)."""

    step: int
    """Of the run, from 0, in which the script has called ``run.evaluate``; after a training loop, the number of steps
    that are done."""
    totals: dict[str, Any]
    """By name: numbers, or lists of numbers."""
    logs: dict[str, float] = {}
    """Of ``run.log``, which has a line of its own."""

    @property
    def values(self) -> dict[str, Any]:
        """The totals and the logged numbers."""
        return {**self.totals, **self.logs}


class LinesLost(_Event, tag="gap"):
    """Lines of the journal that could not be written for too long, e.g. because the disk was full."""

    first: int
    last: int


# -- on the way, for people --------------------------------------------------------------------------


class Announcement(_Event, tag="announcement"):
    """A sentence for the user: what the head or an agent decided, and why."""

    text: str


class WorkerLate(_Event, tag="late"):
    """A worker makes no progress while others wait for it."""

    worker_id: str
    step: int
    microbatch: int
    seconds: float


class WorkerOutput(_Event, tag="output"):
    """One line of the output of a process that an agent has started."""

    source: str
    """The worker's id, "head" or "nursery"."""
    text: str
    is_error: bool
    """It came from standard error."""


Event = (
    RunStarted
    | MembershipChanged
    | WorkerJoined
    | WorkerGone
    | MachineJoined
    | MachineGone
    | MachineUsed
    | Interruption
    | CheckpointWritten
    | Note
    | Problem
    | RunEnded
    | StepFinished
    | EvaluationFinished
    | LinesLost
    | Announcement
    | WorkerLate
    | WorkerOutput
)


class Once:
    """Lets each event of a run through once: what is told again (a worker or a head was lost, or a connection broke)
    has the same number. Nothing else recognizes a repetition.

    Args:
        newest: the newest numbers that are known, by head, and of the journal's lines.
    """

    def __init__(self, newest: Mapping[str, int] | None = None) -> None:
        self.newest = dict(newest or {})

    def is_new(self, event: Event) -> bool:
        """Return whether an event comes for the first time; what has no number always does."""
        if 0 <= event.number <= self.newest.get(event.head, -1):
            return False
        if isinstance(event, RunStarted):
            self.newest.pop("", None)  # where nothing of the run was kept, its lines are counted again
        if event.number >= 0:
            self.newest[event.head] = event.number
        return True
