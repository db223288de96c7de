"""``unisono scale`` and ``unisono stop``: change a run from outside."""

from __future__ import annotations

import click

from unisono.cli.reach import RUN, ask_status, find, tell
from unisono.cli.saying import say
from unisono.core.errors import UsageError
from unisono.core.messages import Scale, Stop
from unisono.system.capacity import check_workers

__all__ = ["scale", "stop"]


@click.command(context_settings={"ignore_unknown_options": True}, epilog=RUN)  # -1 is a number
@click.argument("run")
@click.argument("workers", type=int)
def scale(run: str, workers: int) -> int:
    """Change the number of workers to WORKERS, from the next possible step on."""
    if workers < 1:
        raise UsageError(f"a run has at least 1 worker, got {workers}; `unisono stop` ends it")
    address = find(run)
    check_workers(workers, num_machines=len({worker["host"] for worker in ask_status(address)["workers"]}) or 1)
    say(tell(address, Scale(num_workers=workers)))
    return 0


@click.command(epilog=RUN)
@click.argument("run")
def stop(run: str) -> int:
    """End the run at the end of the step."""
    say(tell(find(run), Stop(reason="stopped by `unisono stop`")))
    return 0
