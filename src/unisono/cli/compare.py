"""``unisono compare``: are two runs the same, to the bit?"""

from __future__ import annotations

from pathlib import Path

import click

from unisono.journal import Difference
from unisono.journal import compare as compare_runs

__all__ = ["compare"]


@click.command()
@click.argument("run_a", type=click.Path(exists=True, path_type=Path))
@click.argument("run_b", type=click.Path(exists=True, path_type=Path))
def compare(run_a: Path, run_b: Path) -> int:
    """Say whether RUN_A and RUN_B (directories, or their journals) are identical; else the first step that differs,
    and in what.

    Exit code: 0 identical, 1 different, 2 one of them cannot be read.
    """
    try:
        click.echo(compare_runs(run_a, run_b))
    except Difference as difference:
        click.echo(f"different: {difference}")
        return 1
    except (OSError, ValueError, KeyError) as error:
        click.echo(f"unisono: a journal cannot be read: {error}", err=True)
        return 2
    return 0
