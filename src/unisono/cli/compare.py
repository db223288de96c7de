"""``unisono compare``: are two runs the same, to the bit?"""

from __future__ import annotations

import os
from pathlib import Path

import click

from unisono.cli.saying import say_lines
from unisono.core.errors import UsageError
from unisono.record.journal import Difference
from unisono.record.journal import compare as compare_runs

__all__ = ["compare"]


@click.command()
@click.argument("run_a", type=click.Path(exists=True, path_type=Path))
@click.argument("run_b", type=click.Path(exists=True, path_type=Path))
@click.option("--explain", is_flag=True, help="Compute the first step that differs again, in both runs: name the "
              "parameter, the micro-batch and the module that differ first, and the probable cause.")  # fmt: skip
def compare(run_a: Path, run_b: Path, explain: bool) -> int:
    """Say whether RUN_A and RUN_B (directories, or their journals) are identical; else the first step that differs,
    and in what. Lines that one of them lacks (its disk was full) are named and not compared.

    Exit code: 0 identical, 1 different, 2 one of them cannot be read.
    """
    try:
        said, code = compare_runs(run_a, run_b), 0
    except Difference as difference:
        said, code = f"different: {difference}", 1
        if explain:
            from unisono.cli.explain import explained

            say_lines(said)
            said = explained(run_a, run_b, difference)
    except (OSError, ValueError) as error:
        raise UsageError(f"a journal cannot be read: {error}") from error
    try:
        say_lines(said)
    except BrokenPipeError:  # the reader has gone; the exit code has the result as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code
