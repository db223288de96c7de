"""Notes on an exception of the script: where in the training it was raised, and what a newcomer lacks."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.cluster.worker import member as members
from unisono.core.errors import LossError, UnisonoError
from unisono.engine.loop.step import Iteration

__all__ = ["Beginning", "note_beginning", "note_idle", "note_microbatch"]

NUM_SHOWN = 8


@dataclass(frozen=True)
class Beginning:
    """The step of the run at which this worker has begun, where that is not the first.

    Args:
        is_newcomer: other workers have done the steps before it; else a run that was resumed from a checkpoint.
    """

    step: int
    is_newcomer: bool


def note_microbatch(error: BaseException, step: Iteration | None) -> bool:
    """Add to an error of the script the micro-batch that it comes from.

    Returns:
        Whether another worker tries that micro-batch: not if the error comes from none, nor if the loss is not finite,
        which it would be there as well.
    """
    is_loss = isinstance(error, LossError) and error.microbatch >= 0
    if step is None or not isinstance(error, Exception) or (isinstance(error, UnisonoError) and not is_loss):
        return False
    index = step.microbatch
    if index is None:
        return False
    samples = step.sample_indices(index)
    shown = ", ".join(map(str, samples[:NUM_SHOWN])) + (", ..." if len(samples) > NUM_SHOWN else "")
    if not is_loss:  # its message says so already
        _add(error, f"(in {step.name}, micro-batch {index}, samples {shown})")
    if (member := members.current()) is not None:
        member.failures.raised_in(error, step.number, index, samples, retry=not is_loss)
    return not is_loss


def note_beginning(error: BaseException, beginning: Beginning, num_done: int) -> None:
    """Add to an error of the script that this worker has not run the steps before.

    Args:
        num_done: steps that this worker has done itself. Later only a missing name is explained in this way.
    """
    if isinstance(error, UnisonoError) or not isinstance(error, Exception):
        return
    if num_done > 0 and not isinstance(error, NameError):
        return
    who = "this worker joined the run" if beginning.is_newcomer else "the run was resumed from a checkpoint"
    _add(
        error,
        f"({who} and began at step {beginning.step}: variables that the script sets in earlier steps do not exist "
        "here, and its own counters begin again. step.index and step.number count from the beginning)",
    )


def note_idle(error: BaseException, step: Iteration | None) -> None:
    """Add to a missing name that this worker had no micro-batch, in whose inner loop the script sets it."""
    if step is not None and isinstance(error, NameError) and step.has_no_microbatch:
        _add(
            error,
            f"(this worker had no micro-batch of {step.name}, so what the script sets within `for batch in "
            "step` is not there. Use step.loss, step.num_samples, step.index, and step.add with step.totals, which all "
            "workers have)",
        )


def _add(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
