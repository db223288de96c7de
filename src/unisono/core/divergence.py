"""Words about members that have computed different values: what differs, why that may be, and what to do.

By what is known. The line that names the line of the script comes first, since it is what helps most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from unisono.core.words import NAMES_THE_LINE, count

__all__ = ["OUT_OF_STEP", "USUAL_CAUSES", "Facts", "causes", "parting_words"]

OUT_OF_STEP: Final = (
    f"{NAMES_THE_LINE}. Something between the steps depends on the worker: a sum that was collected within `for batch "
    "in step` (use step.loss or run.evaluate), run.rank or run.is_main in a decision, the time, or something that "
    "changes but was not tracked when the worker joined"
)
USUAL_CAUSES: Final = (
    f"{NAMES_THE_LINE}. Look for anything that the inner loop, the model, its hooks or the dataset remember from other "
    "batches, or take from elsewhere: a counter, a running value in a plain attribute, a random generator of the "
    "script's own, a cache, the clock, the order of a set. Derive such values from step.number, draw from torch's, "
    "numpy's or Python's global generator, or keep the state in a buffer; a hidden state, a memory or a weight that "
    "belongs to a sample goes into a unisono.Carried"
)
_OF_BATCHES: Final = (
    f"The batches differ already: the cause is in the data, not in the model. {NAMES_THE_LINE}. Look for data that "
    "each worker makes by itself (a split or a shuffle before unisono.Run, samples that were chosen with the model "
    "between two loops: make them on one worker and run.broadcast them), and for what the dataset or collate_fn "
    "remembers: a random generator of its own, a cache, a counter, the order of a set"
)
_OF_COMPILED: Final = (
    "The script uses torch.compile, whose kernels depend on the shapes that a process has seen first: with "
    f"batches of several lengths use torch.compile(model, dynamic=True). If that does not help, {NAMES_THE_LINE}"
)
_OF_SCRIPTED: Final = (
    "The model has a part in TorchScript, which optimizes by the shapes that a process has seen first: with batches of "
    "several lengths call torch.jit.set_fusion_strategy([('DYNAMIC', 1)]), or train without TorchScript. If that does "
    f"not help, {NAMES_THE_LINE}"
)
_OF_BACKWARD: Final = (
    "The batch and the loss are the same, and the gradients are not, so look at what comes after the forward pass as "
    "well: hooks on gradients, a torch.autograd.Function of the script's own, random numbers in backward; or a machine "
    "computes wrongly (unisono run --audit finds out which). "
)
_OF_PROCESSORS: Final = (
    "Their processors or libraries differ (the run's output says how), and compute this model differently. Start the "
    "run with --set arithmetic=avx2, or =compatible where processors are of several makers, and with the same torch"
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a difference between two members."""

    are_batches_equal: bool | None = None
    """Of a micro-batch that both have computed; None: nobody knows."""
    is_loss_equal: bool = False
    compiled: str = ""
    """"torch.compile" or "TorchScript", where the script compiles something by it."""
    is_of_state: bool = False
    """Their states differ."""
    is_arithmetic_equal: bool = True
    joined: int = -1
    """Steps that were done when the newer of the two joined; -1: both were there from the beginning."""
    newer: str = ""
    """Which one that is."""
    num_skipped: int = 0
    """Calls of ``run.steps`` that it has skipped."""


def causes(facts: Facts) -> str:
    """Return why two members may differ, and what to do."""
    if not facts.is_arithmetic_equal:
        return _OF_PROCESSORS
    found = ""
    if facts.joined >= 0:
        found = _of_newcomer(facts)
    if facts.is_of_state:
        return found + OUT_OF_STEP
    if facts.are_batches_equal is False:
        return found + _OF_BATCHES
    if facts.compiled:
        return found + (_OF_COMPILED if facts.compiled == "torch.compile" else _OF_SCRIPTED)
    if facts.are_batches_equal and facts.is_loss_equal:
        return found + _OF_BACKWARD + USUAL_CAUSES
    return found + USUAL_CAUSES


def parting_words(worker: str, what: str, facts: Facts, *, has_counted: bool) -> str:
    """Return why a newcomer is sent away.

    Args:
        what: differs, as a sentence without its full stop.
        has_counted: micro-batches of it were summed in earlier steps.
    """
    summed = (
        f"Its micro-batches have counted since step {facts.joined}, so the bits may be others than without it: a "
        f"checkpoint of at most {count(facts.joined, 'step')} has none of them"
        if has_counted
        else "Nothing that it has computed was summed"
    )
    return f"{worker} computes other values than the members before it: {what}. {summed}. {causes(facts)}"


def _of_newcomer(facts: Facts) -> str:
    if facts.num_skipped == 0:
        return (
            f"{facts.newer} joined at step {facts.joined}: it has not done the steps before, and has of them only what "
            "is tracked. "
        )
    return (
        f"{facts.newer} joined at step {facts.joined}: it has skipped {count(facts.num_skipped, 'call')} of run.steps, "
        "and what the script computes between them (a rollout, a pool of samples, a copy of a model) it has not "
        "computed alike: run.broadcast it, or track it. "
    )
