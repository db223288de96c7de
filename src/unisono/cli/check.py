"""``unisono check``: does a script keep the promise, and if not, which line breaks it?"""

from __future__ import annotations

import os
from typing import Any, Final

import click

from unisono.cli.given import script_arguments, seconds
from unisono.cli.saying import say, say_json, say_lines
from unisono.core.errors import UsageError
from unisono.core.words import count
from unisono.system.lifetime import scratch_folder
from unisono.tools.check.blame import Culprit
from unisono.tools.check.trials import ALONE, Runner, TrialOutcome
from unisono.tools.check.verdict import CheckVerdict, TrialFinding, check_script
from unisono.tools.trialrun import Script

__all__ = ["check"]

WIDTH: Final = 38
UNSEEN: Final = (
    "no statement was found that reads or writes another value. Look for what cannot be seen here: a state in C code "
    "or in an installed package, a process that loads data"
)


@click.command()
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "module", metavar="MODULE", help="Check a module instead of a script.")
@click.option("--steps", default=4, show_default=True, metavar="N", help="How many steps are computed.")
@click.option("--threads", type=int, default=1, show_default=True, help="CPU threads of a worker.")
@seconds("--timeout", "5m", "How long one trial may take.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def check(
    script: str | None,
    arguments: tuple[str, ...],
    module: str | None,
    steps: int,
    threads: int,
    timeout: float,
    as_json: bool,
) -> int:
    """Compute the first steps of SCRIPT alone, alone again, by two workers, and by two with a loss and a join; say
    whether all have the same bits, and if not, which line of the script is the reason.

    The script runs as it is, several times: what it writes by itself, it writes. What Unisono writes lies in a
    temporary folder. What stands after -- are the script's own arguments.

    Exit code: 0 the same bits, 1 not, 2 the script cannot be checked.
    """
    try:
        if steps < 2:
            raise UsageError(f"a check needs 2 steps or more, so that the second can depend on the first; got {steps}")
        command = script_arguments(script, module, arguments, command="check SCRIPT")
        with scratch_folder("unisono-check-") as folder:
            tried = Script(command=command, threads=threads, directory=folder)
            with Runner(tried, steps, timeout) as runner:
                verdict = check_script(runner, (lambda _: None) if as_json else _say)
    except UsageError as error:
        if not as_json:
            raise
        say_json({"error": str(error)})
        return 2
    if as_json:
        say_json(_plain(verdict))
    else:
        _conclude(verdict)
    return 0 if verdict.keeps else 1


def _say(result: TrialFinding | TrialOutcome) -> None:
    name = f"  {result.trial.name}".ljust(WIDTH)
    if isinstance(result, TrialOutcome):
        say(f"{name} the others are compared with it")
    elif result.difference is not None:
        say(f"{name} DIFFERS at {result.difference.said()}")
    elif result.failure:
        say(f"{name} FAILS: {result.failure.splitlines()[-1]}")
    else:
        say(f"{name} the same bits")


def _conclude(verdict: CheckVerdict) -> None:
    shown: set[tuple[str, int]] = set()
    for found in verdict.found:
        culprit = found.culprit
        if culprit is not None and (culprit.file, culprit.line) not in shown:
            shown.add((culprit.file, culprit.line))
            say_lines(f"\n{_said(culprit, found)}")
        elif culprit is None and found.difference is not None:
            say_lines(f"\n{found.trial.name}: {UNSEEN}")
        if found.failure and found.difference is None and culprit is None:
            say_lines(f"\n{found.trial.name} fails:\n{found.failure}")
    say("")
    for each in verdict.unchecked:
        say(f"not checked: {each}")
    microbatches = f"{verdict.microbatches:,} micro-batch{'es' if verdict.microbatches != 1 else ''}"
    what = f"{count(verdict.steps, 'step')}, {microbatches}; what comes later was not looked at"
    say(f"the script {'keeps' if verdict.keeps else 'BREAKS'} the promise of the same bits ({what})")


def _said(culprit: Culprit, found: TrialFinding) -> str:
    path = os.path.relpath(culprit.file)
    name = culprit.file if path.startswith("..") else path
    head = f"{name}:{culprit.line}: {culprit.text}"
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
                f"{head}\n    decides otherwise {way} than alone, on the same values. It depends on {_source(found)}."
            )


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


def _plain(verdict: CheckVerdict) -> dict[str, Any]:
    return {
        "keeps": verdict.keeps,
        "steps": verdict.steps,
        "microbatches": verdict.microbatches,
        "trials": [
            {
                "name": each.trial.name,
                "same": each.is_same,
                "difference": each.difference.said() if each.difference is not None else "",
                "failure": each.failure,
                "culprit": None
                if each.culprit is None
                else {
                    "kind": each.culprit.kind,
                    "file": each.culprit.file,
                    "line": each.culprit.line,
                    "text": each.culprit.text,
                    "path": each.culprit.path,
                    "values": each.culprit.values,
                },
            }
            for each in verdict.found
        ],
        "not_checked": verdict.unchecked,
    }
