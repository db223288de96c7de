"""Reactions to the signals that the command of a machine receives."""

from __future__ import annotations

import signal

import msgspec

__all__ = ["AwaitEnd", "EndRun", "KillWorkers", "LeaveRun", "Reaction", "StopRun", "reaction"]


class EndRun(msgspec.Struct, frozen=True):
    """End the run at once; in ``unisono join``, end this machine's part of the run."""

    reason: str
    exit_code: int


class KillWorkers(EndRun, frozen=True):
    """... and wait for nothing."""


class LeaveRun(msgspec.Struct, frozen=True):
    """Take this machine's workers out of the run at the end of the step."""


class StopRun(msgspec.Struct, frozen=True):
    """End the run at the end of the step, with a checkpoint."""

    reason: str
    """Why the run ends then."""
    exit_code: int
    """Of the command, if that is why the run has ended."""


class AwaitEnd(msgspec.Struct, frozen=True):
    """Go on: the signal went to all tasks of a job, and task 0 decides what it means."""

    words: str
    """For the user; "" where they were said before."""


Reaction = EndRun | KillWorkers | LeaveRun | StopRun | AwaitEnd


def reaction(
    number: signal.Signals,
    *,
    num_before: int,
    is_primary: bool,
    has_workers: bool,
    checkpoint_code: int,
    engine: str = "",
) -> Reaction:
    """Return what to do about a signal.

    Args:
        num_before: so many signals came before it.
        is_primary: this command has started the run.
        has_workers: this machine has started a worker.
        checkpoint_code: the exit code at SIGTERM of a run that writes a checkpoint then; -1: the run writes none.
        engine: what has started this agent as one of several tasks. It sends a signal to all of them, and SIGKILL
            when its patience is over.
    """
    code = 128 + number
    if engine and (num_before or not is_primary):
        return AwaitEnd("" if num_before else _asked(signal.Signals(number).name, engine))
    if num_before:
        return KillWorkers("ended by a second signal", code)
    if not is_primary and has_workers and number is not signal.SIGHUP:
        return LeaveRun()
    word = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    if number is signal.SIGHUP or checkpoint_code < 0:
        return EndRun(word, code)
    return StopRun(f"{word}, with a checkpoint", checkpoint_code if number == signal.SIGTERM else code)


def _asked(name: str, engine: str) -> str:
    why = (
        "the job is to end"
        if engine == "Slurm"
        else ("the job must end, or one of its tasks is lost, which ends all of them")
    )
    return f"{name} of {engine}: {why}; everything up to the newest checkpoint is kept (--resume auto)"
