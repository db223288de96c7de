"""``unisono audit``: compute one micro-batch of a run again, and check it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click import argument, option

from unisono.cli.replay import NUMBER, play
from unisono.decisions.replaying import Replay

__all__ = ["audit"]


@click.command()
@argument("run", type=click.Path(path_type=Path))
@argument("script", nargs=-1, type=click.UNPROCESSED)
@option("--step", type=NUMBER, required=True, metavar="S", help="The step; of local steps, the round.")
@option("--leaf", type=NUMBER, required=True, metavar="I", help="The micro-batch.")
@option("--replica", type=NUMBER, metavar="R", help="Of local steps: which replica.")
@option("--inner-step", type=NUMBER, metavar="N", help="Of local steps: which step of the replica in its round.")
def audit(run: Path, script: tuple[str, ...], step: int, leaf: int, replica: int | None, inner_step: int | None) -> int:
    """Compute a micro-batch of a step of RUN (a directory) again, on this machine, and print its digest.

    It is compared with the digest that the run has audited (unisono run --audit), where the journal has one, and the
    step with its digest in any case. Nothing is written into RUN.

    \b
        unisono audit runs/digits --step 350 --leaf 3

    Exit code: 0 all as in the journal, 1 something is not, or the script has failed, 2 it cannot be computed.
    """
    wanted: dict[str, Any] = {"replica": replica, "inner": inner_step}
    asked = {name: value for name, value in wanted.items() if value is not None}
    return play(run, script, Replay(run="", step=step, leaf=leaf, looks=True, **asked))
