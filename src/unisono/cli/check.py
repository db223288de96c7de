"""``unisono check``: does a script keep the promise, and if not, which line breaks it?"""

from __future__ import annotations

from typing import Any, Final

import click

from unisono.cli.given import script_arguments, seconds
from unisono.cli.saying import say, say_json, say_lines
from unisono.core.errors import UsageError
from unisono.core.words import count
from unisono.system.lifetime import scratch_folder
from unisono.tools.check.telling import culprit_words, doubt_words, finding_words
from unisono.tools.check.trials import Runner, TrialOutcome
from unisono.tools.check.verdict import CheckVerdict, TrialFinding, check_script
from unisono.tools.trialrun import Script

__all__ = ["check"]

WIDTH: Final = 38


@click.command()
@click.argument("script", required=False, type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "module", metavar="MODULE", help="Check a module instead of a script.")
@click.option("--steps", default=4, show_default=True, metavar="N", help="How many steps to compute.")
@click.option("--threads", type=int, default=1, show_default=True, help="CPU threads of a worker.")
@seconds("--timeout", "5m", "Time limit for one trial.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def check(
    script: str | None,
    arguments: tuple[str, ...],
    module: str | None,
    steps: int,
    threads: int,
    timeout: float,
    as_json: bool,
) -> int:
    """Compute the first steps of SCRIPT alone, alone again, on two workers, and on two with a loss and a join; tell
    whether all have the same bits and, if not, which line of the script is the cause. It also names lines
    that probably mean something else, as a loss whose micro-batches have other weights than one process gives them.

    The script runs as it is, several times, with all its own side effects. What Unisono writes goes to a temporary
    folder. Whatever follows -- is passed to the script.

    Exit code: 0 the same bits, 1 not, or such a line, 2 the script cannot be checked.
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
    return 0 if verdict.keeps and not verdict.doubts else 1


def _say(result: TrialFinding | TrialOutcome) -> None:
    name = f"  {result.trial.name}".ljust(WIDTH)
    say(f"{name} {'the others are compared with it' if isinstance(result, TrialOutcome) else finding_words(result)}")


def _conclude(verdict: CheckVerdict) -> None:
    shown: set[tuple[str, int]] = set()
    for found in verdict.found:
        culprit = found.culprit
        if culprit is not None and (culprit.file, culprit.line) not in shown:
            shown.add((culprit.file, culprit.line))
            say_lines(f"\n{culprit_words(found)}")
        elif culprit is None and found.difference is not None:
            say_lines(f"\n{found.trial.name}: {culprit_words(found)}")
        if found.failure and found.difference is None and culprit is None:
            say_lines(f"\n{found.trial.name} fails:\n{found.failure}")
    for doubt in verdict.doubts:
        say_lines(f"\n{doubt_words(doubt)}")
    say("")
    for each in verdict.unchecked:
        say(f"not checked: {each}")
    microbatches = f"{verdict.microbatches:,} micro-batch{'es' if verdict.microbatches != 1 else ''}"
    what = f"{count(verdict.steps, 'step')}, {microbatches}; later steps were not checked"
    say(f"the script {'keeps' if verdict.keeps else 'BREAKS'} the promise of the same bits ({what})")
    if verdict.doubts:
        say(f"but {count(len(verdict.doubts), 'line')} above probably means something else")


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
        "doubts": [{"file": each.file, "line": each.line, "text": each.text} for each in verdict.doubts],
        "not_checked": verdict.unchecked,
    }
