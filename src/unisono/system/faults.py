"""Fault injection: named points of a worker's life at which a test can kill, stop or delay the worker.

The code calls `point` at each of them. The call does nothing, unless `unisono.testing` has armed this process with
faults, by a variable that the worker takes out of its environment at its start. A fault happens once in a worker's
life.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Final, Literal

import msgspec

__all__ = [
    "ENVIRONMENT",
    "POINTS",
    "VALUES",
    "Fault",
    "FaultInjected",
    "arm",
    "at_step",
    "decode",
    "encode",
    "forget_passing",
    "point",
    "spoils",
]

ENVIRONMENT: Final = "UNISONO_FAULTS"

POINTS: Final[dict[str, str]] = {
    "step_head": "the outer loop has begun a step, the inner loop has not begun",
    "before_backward": "a micro-batch was fetched, and not yet given to the script",
    "after_backward": "a micro-batch's gradient was added to this worker's partial sums",
    "before_combine": "all its micro-batches are done, and the other workers have none of their sums",
    "published": "the other workers can read its partial sums, or were sent them",
    "reduced": "it has summed its chunk of the gradient, and the others do not know yet",
    "committed": "it has seen the commit, others perhaps not",
    "in_sums": "it knows the gradient of a step whose sums have new names, and the others lack its part of these sums",
    "after_step": "the step is over for this worker: the optimizer has run",
    "in_evaluation": "a batch of an evaluation is done",
    "evaluation.collecting": "rows that were collected in an evaluation are about to travel",
    "evaluated": "it has all results of an evaluation, others perhaps not",
    "in_talk": "it has come to a call of run.barrier, run.all_gather ... between two steps, and has sent nothing yet",
    "talked": "it has the result of such a call, others perhaps not",
    "checkpoint_copied": "its part of a checkpoint is copied in memory, and not written yet",
    "checkpoint_part_written": "its part is on the disk (in the thread that writes the part)",
    "checkpoint_before_manifest": "all parts are on the disk, the manifest is not (in the thread that writes it)",
    "checkpoint_renamed": "the checkpoint has its name; older ones were not removed yet (in the same thread)",
    "shard.norms": "it is about to say the norms of the gradients that it has, to clip by the norm of all",
    "shard.updated": "it has updated the parameters that it owns, and has sent none of them",
    "shard.delivered": "it has the new values of all parameters, others perhaps not",
    "shard.committed": "it knows that all have the new values, others perhaps not",
    "lanes.prepared": "it has the sum of its part of the model, and does not know of the other parts",
    "stages.exchange": "it is about to exchange a sum over shards with a worker of its group, forward or back",
    "stages.tied": "it has all gradients of weights that are tied over stages, others perhaps not",
    "states.moving": "states that not all hold are about to move, because workers leave, were lost or have come",
    "states.delivering": "such a state goes from a worker to others, also in a round of local steps",
    "states.moved": "the states that it gets have arrived, those of others perhaps not",
    "shard.loading": "it has read its part of the states of a checkpoint, and others may lack theirs",
    "shard.in_lending": "a state that no writer of a checkpoint holds is about to travel to one that writes it",
    "evaluation.asked": "rank 0 is about to look for an evaluator",
    "evaluation.written": "a snapshot for an evaluator has its name, and the other workers do not know",
    "delay.under_way": "it has given its part of a step's sum to the thread that exchanges it, and continues",
    "delay.waiting": "it waits for the sum of a step of some steps ago",
    "delay.applied": "the gradient of an earlier step is in force, and those of later ones are under way",
    "delay.again": "after a loss it computes what is missing of a step that was under way",
    "in_recovery": "it has entered the generation after a loss, and has not exchanged anything with the others",
    "deliver.staged": "others of its host can read what it passes on of tensors, and may not have read it",
    "deliver.sent": "it has begun to send tensors to other hosts",
    "deliver.received": "it has tensors of other hosts, and has not passed them on to its own",
    "in_admission": "it is a newcomer that is receiving the state, or a member that is sending it",
    "local.grouped": "it has met the others of its group, and not all members of the run have met theirs",
    "local.ungrouped": "its group has lost a member; it has completed the step by itself, and gives the replica up",
    "local.placed": "it has the states of the replicas that it is going to compute",
    "local.inner_step": "it begins a step of a replica (``microbatch`` is the replica)",
    "local.replica_done": "a replica's change was added to its partial sums (``microbatch`` is the replica)",
    "local.coded": "it has the compressed changes of its chunk, and has not averaged them",
    "local.copied": "the other workers have copies of its replicas' new states, and the round is not committed",
}
"""Every fault point, and where the worker is then."""


VALUES: Final[dict[str, str]] = {
    "gradient": "the gradient of a micro-batch, as autograd has computed it",
    "activations": "what a part of a model in stages gives the next one",
    "parameter": "the parameters between two steps",
    "optimizer": "the state of an optimizer between two steps",
    "evaluation": "the first total of a batch of an evaluation",
    "sums": "a part of the sums that has just arrived over the network",
}
"""What a worker can be made to compute or store wrongly: one bit of the first tensor of it."""


class FaultInjected(RuntimeError):
    """Raised by the action ``fail``, as if the user's code had raised it."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, which a test injects in one worker at one point."""

    action: Literal["kill", "kill_run", "stop", "delay", "fail", "corrupt"]
    """SIGKILL to this worker; the same to the command first; SIGSTOP; sleep for ``seconds``; raise `FaultInjected`;
    flip a bit of one of the `VALUES`, which is ``at``."""
    worker: str
    """The worker's id: ``w0``, ``w1`` ... in the order of their start; "" means every worker."""
    at: str
    step: int = -1
    """Counted over the whole run, as in the journal. -1: the first step that comes to this point."""
    microbatch: int = -1
    skip: int = 0
    """Pass by that point so often before: 1 means the second pass over the batch, for a point that a pass has once."""
    seconds: float = 0.0
    bit: int = 0
    """Of the first number."""
    is_lasting: bool = False
    """Not once, but each time from then on."""
    every: int = 1
    """Of a lasting one: not each time, but every so many times."""


_armed: list[Fault] = []
_step = -1
_agent = 0


def encode(faults: list[Fault]) -> str:
    return msgspec.json.encode(faults).decode()


def decode(text: str) -> list[Fault]:
    return msgspec.json.decode(text, type=list[Fault])


def arm(text: str, worker: str, agent: int) -> None:
    """Keep those faults that are for this worker.

    Args:
        text: the value of `ENVIRONMENT`.
        agent: process id of the command, for ``kill_run``.
    """
    global _agent
    _agent = agent
    _armed[:] = [fault for fault in decode(text) if fault.worker in ("", worker)] if text else []


def at_step(step: int) -> None:
    """Note that the points that follow belong to this step of the run."""
    global _step
    _step = step


def forget_passing(text: str) -> str:
    """Return the value of `ENVIRONMENT` for a run that goes back: a value that was wrong once is not wrong again."""
    return encode([each for each in decode(text) if each.action != "corrupt" or each.is_lasting])


def point(name: str, microbatch: int = -1) -> None:
    """Trigger the faults of a named point, if this process was armed with any."""
    if not _armed:
        return
    for fault in list(_armed):
        if fault.at == name and fault.step in (-1, _step) and fault.microbatch in (-1, microbatch):
            _armed.remove(fault)
            if fault.skip:
                _armed.append(msgspec.structs.replace(fault, skip=fault.skip - 1))
            else:
                _happen(fault)


def spoils(value: str, microbatch: int = -1) -> int | None:
    """Return which bit of a value this worker is to flip now; None: none.

    Args:
        value: one of the `VALUES`.
    """
    if not _armed:
        return None
    for fault in list(_armed):
        is_now = fault.step in (-1, _step) or (fault.is_lasting and _step > fault.step)
        if fault.action == "corrupt" and fault.at == value and is_now and fault.microbatch in (-1, microbatch):
            _armed.remove(fault)
            if fault.is_lasting:
                _armed.append(msgspec.structs.replace(fault, skip=(fault.skip or fault.every) - 1))
            if not fault.skip:
                return fault.bit
    return None


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
            raise FaultInjected(f"injected fault at {fault.at!r} of step {_step}")
