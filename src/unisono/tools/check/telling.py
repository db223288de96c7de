"""What `unisono check` and `unisono.testing` say of a trial whose bits are not those of the script alone."""

from __future__ import annotations

import os
from typing import Final

from unisono.tools.check.records import DoubtRecord
from unisono.tools.check.trials import ALONE
from unisono.tools.check.verdict import TrialFinding

__all__ = ["culprit_words", "doubt_words", "finding_words"]

UNSEEN: Final = (
    "no statement was found that reads or writes a different value. Look for what cannot be seen here: state in C code "
    "or in an installed package, a process that loads data"
)


def finding_words(found: TrialFinding) -> str:
    """Return in one line whether a trial has the same bits as the script alone, and where it differs."""
    if found.difference is not None:
        return f"DIFFERS at {found.difference.said()}"
    return f"FAILS: {found.failure.splitlines()[-1]}" if found.failure else "the same bits"


def doubt_words(doubt: DoubtRecord) -> str:
    """Return what a line of the script probably means otherwise, with its file and line."""
    return f"{_shown(doubt.file)}:{doubt.line}: {doubt.text}"


def culprit_words(found: TrialFinding) -> str:
    """Return the statement that makes a trial differ, with its file and line, why, and what to do."""
    culprit = found.culprit
    if culprit is None:
        return UNSEEN
    head = f"{_shown(culprit.file)}:{culprit.line}: {culprit.text}"
    alone, other = culprit.values
    way = f"in the trial '{found.trial.name}'" if found.trial.name != ALONE.name else "the second time"
    match culprit.kind:
        case "reads" if culprit.reader is None:
            return (
                f"{head}\n    reads {culprit.path}, which is\n    {alone} alone, and\n    {other} {way}.\n"
                f"    {_advice(found)}"
            )
        case "reads":
            reader = f"line {culprit.reader[1]}" if culprit.reader is not None else ""
            return (
                f"{head}\n    writes {culprit.path}. Where {reader} reads it for the same computation, it is\n"
                f"    {alone} alone, and\n    {other} {way}.\n    {_advice(found)}"
            )
        case "writes":
            what = culprit.path if culprit.path != "return" else "what it returns"
            return (
                f"{head}\n    reads the same values, but {what} is\n    {alone} alone, and\n    {other} {way}.\n"
                f"    It depends on {_source(found)}."
            )
        case "changes":
            return (
                f"{head}\n    changes the parameter {culprit.path} within a micro-batch, on one worker only.\n"
                "    Change parameters between the steps. In the model, use the value without writing it:\n"
                "    scale.clamp(low, high) instead of scale.data.clamp_(low, high)."
            )
        case _:
            return (
                f"{head}\n    decides differently {way} than alone, on the same values. It depends on {_source(found)}."
            )


def _shown(file: str) -> str:
    path = os.path.relpath(file)
    return file if path.startswith("..") else path


def _source(found: TrialFinding) -> str:
    if found.trial.hashing:
        return "the order of a set of strings (use sorted), or on an address in memory"
    if found.trial.workers > 1:
        return (
            "the worker (its rank, how many there are, its process), on an address in memory,\n"
            "    or on what is remembered where it cannot be seen (an iterator, an object of a library)"
        )
    return "the clock, the operating system's random numbers, or an address in memory"


def _advice(found: TrialFinding) -> str:
    difference = found.difference
    if difference is not None and difference.where.stage == "leaf":
        return (
            "A micro-batch may not depend on those before it, which another worker may compute. Derive the value from\n"
            "    step.number, keep it in a buffer or a unisono.Carried, or draw from the global generators."
        )
    return (
        "A worker that joins, and a run that resumes, has only what is tracked; and a worker's inner loop sees its\n"
        "    own micro-batches only. Keep the value in what run.track names; for sums take step.loss or step.add."
    )
