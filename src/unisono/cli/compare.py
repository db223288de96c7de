"""``unisono compare``: are two runs the same, to the bit? And since which commit are they not?"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import click

from unisono.cli.given import script_arguments, seconds
from unisono.cli.saying import say, say_lines
from unisono.core.errors import UsageError
from unisono.core.words import count
from unisono.record.journal import Difference
from unisono.record.journal import compare as compare_runs
from unisono.record.rundir import read_facts

__all__ = ["compare"]


@click.command()
@click.argument("run_a", required=False, type=click.Path())
@click.argument("run_b", required=False, type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--explain", is_flag=True, help=(
    "Recompute the first step that differs, in both runs; name the parameter, micro-batch and module that differ "
    "first, and the probable cause."
))  # fmt: skip
@click.option("--bisect", nargs=2, metavar="GOOD BAD", help=(
    "Find the commit that changed a script's bits, by git bisect between two commits: compare --bisect GOOD BAD "
    "SCRIPT [-- ARGUMENTS]."
))  # fmt: skip
@click.option("--steps", default=20, show_default=True, metavar="N", type=click.IntRange(min=2),
              help="With --bisect: how many steps each commit computes.")  # fmt: skip
@click.option("--link", multiple=True, metavar="PATH", help=(
    "With --bisect: a file or folder that is not in git, e.g. data, to link into each commit's worktree."
))  # fmt: skip
@seconds("--timeout", "10m", "With --bisect: time limit for one commit.")
def compare(
    run_a: str | None,
    run_b: str | None,
    arguments: tuple[str, ...],
    explain: bool,
    bisect: tuple[str, str] | None,
    steps: int,
    link: tuple[str, ...],
    timeout: float,
) -> int:
    """Tell whether RUN_A and RUN_B (directories, or their journals) are identical; if not, which step differs first,
    and how. Lines that one of them lacks (its disk was full) are named but not compared.

    With --bisect, name the commit that changed a script's bits. Each commit runs on one worker, in a temporary worktree
    of its own; the checkout is not touched. A commit that cannot run is skipped.

    Exit code: 0 identical, 1 different, 2 one of them cannot be read, or run.
    """
    if bisect is not None:
        given = tuple(word for word in (run_b, *arguments) if word is not None)
        command = script_arguments(run_a, None, given, command="compare --bisect GOOD BAD SCRIPT")
        return _bisect(bisect, command, steps, link, timeout)
    if run_a is None or run_b is None or arguments:
        raise click.UsageError("compare takes two runs: unisono compare RUN_A RUN_B")
    for run in (run_a, run_b):
        if not Path(run).exists():
            raise click.BadParameter(f"Path {run!r} does not exist.", param_hint="RUN_A, RUN_B")
    return _compare(Path(run_a), Path(run_b), explain)


def _compare(run_a: Path, run_b: Path, explain: bool) -> int:
    try:
        said, code = compare_runs(run_a, run_b), 0
    except Difference as difference:
        said, code = f"different: {difference}", 1
        if explain:
            from unisono.cli.explain import explained

            say_lines(said)
            said = explained(run_a, run_b, difference)
        elif difference.step >= 0 and all(read_facts(run).get("command") for run in (run_a, run_b)):
            said += f"\n{shlex.join(['unisono', 'compare', str(run_a), str(run_b), '--explain'])} looks for the cause"
    except (OSError, ValueError) as error:
        raise UsageError(f"a journal cannot be read: {error}") from error
    try:
        say_lines(said)
    except BrokenPipeError:  # the reader has gone; the exit code has the result as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


def _bisect(ends: tuple[str, str], command: list[str], steps: int, links: tuple[str, ...], limit_s: float) -> int:
    from unisono.tools.bisect import bisect

    for name in (command[0], *links):
        if os.path.isabs(name) or ".." in Path(name).parts or not os.path.exists(name):
            raise UsageError(f"--bisect looks for {name} in each commit: name a file or folder below {os.getcwd()}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the worktree is removed then, too
    found = bisect(ends, command, steps, links=links, limit_s=limit_s, say=lambda words: say(words, err=True))
    if not found:
        say(f"identical: the first {count(steps, 'step')} have the same bits at both commits")
        return 0
    say(f"different: since {found[0]}")
    for each in found[1:]:
        say(f"    {each}")
    return 1
