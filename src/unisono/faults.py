"""Named points of a worker's life at which a test lets something happen to it.

`point` stands at each of them. It does nothing unless this process was armed with faults by `unisono.testing`
(through the environment of the worker, which takes it out at its start). A fault happens once in a worker's life.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Final, Literal

import msgspec

__all__ = ["ENVIRONMENT", "POINTS", "Fault", "FaultInjected", "arm", "at_step", "decode", "encode", "point"]

ENVIRONMENT: Final = "UNISONO_FAULTS"

POINTS: Final[dict[str, str]] = {
    "step_head": "the outer loop has begun a step; its inner loop has not",
    "before_backward": "a micro-batch was fetched and not yet given to the script",
    "after_backward": "a micro-batch is folded into this worker's nodes",
    "before_combine": "all own micro-batches are done, nothing was shown to the others",
    "published": "the nodes are shown to, or sent to, the others",
    "reduced": "this worker has summed its chunk and has not said so",
    "committed": "this worker has seen the commit, others perhaps not",
    "after_step": "the step is over for this worker: the optimizer has run",
    "in_evaluation": "a batch of an evaluation is done",
    "evaluated": "this worker has seen all parts of an evaluation, others perhaps not",
    "checkpoint_copied": "this worker's part of a checkpoint is copied, nothing of it is written",
    "checkpoint_part_written": "this worker's part is on the disk (in its writing thread)",
    "checkpoint_before_manifest": "all parts are on the disk, the manifest is not (in the thread that writes it)",
    "checkpoint_renamed": "a checkpoint has got its name; older ones were not removed yet (in the same thread)",
    "in_recovery": "this worker has entered the generation after a loss, and has not met the others",
    "in_admission": "a newcomer, or a member that gives it the state, in the middle of that",
}
"""Every fault point, and where it stands."""


class FaultInjected(RuntimeError):
    """What the action ``fail`` raises: an error of the user's code."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happens to one worker at one point."""

    action: Literal["kill", "kill_run", "stop", "delay", "fail"]
    """SIGKILL (to this worker, or to the command first), SIGSTOP, sleep for ``seconds``, or raise `FaultInjected`."""
    worker: str
    """The worker's id: ``w0``, ``w1`` ... in the order of their start; "" means every worker."""
    at: str
    step: int = -1
    """-1: whichever comes first."""
    microbatch: int = -1
    seconds: float = 0.0


_armed: list[Fault] = []
_step = -1
_agent = 0


def encode(faults: list[Fault]) -> str:
    return msgspec.json.encode(faults).decode()


def decode(text: str) -> list[Fault]:
    return msgspec.json.decode(text, type=list[Fault])


def arm(text: str, worker: str, agent: int) -> None:
    """Take over the faults of this worker.

    Args:
        text: the value of `ENVIRONMENT`.
        agent: process id of the command, for ``kill_run``.
    """
    global _agent
    _agent = agent
    _armed[:] = [fault for fault in decode(text) if fault.worker in ("", worker)] if text else []


def at_step(step: int) -> None:
    """What follows belongs to this step."""
    global _step
    _step = step


def point(name: str, microbatch: int = -1) -> None:
    """The worker is at a named point."""
    if not _armed:
        return
    for fault in list(_armed):
        if fault.at == name and fault.step in (-1, _step) and fault.microbatch in (-1, microbatch):
            _armed.remove(fault)
            _happen(fault)


def _happen(fault: Fault) -> None:
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill_run":
            os.kill(_agent, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "delay":
            time.sleep(fault.seconds)
        case "fail":
            raise FaultInjected(f"the fault that was asked for at {fault.at!r} of step {_step}")
