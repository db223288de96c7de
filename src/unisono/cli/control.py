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
@click.argument("run", type=click.Path())
@click.argument("workers", type=int)
def scale(run: str, workers: int) -> int:
    """Change the number of workers to WORKERS, as soon as possible.

    For a run with groups of workers (--workers 2x4), WORKERS is the number of groups.
    """
    from unisono.cli.join import spec_of

    if workers < 1:
        raise UsageError(f"a run needs at least 1 worker, got {workers}; `unisono stop` ends it")
    address = find(run)
    status = ask_status(address)
    number = workers * spec_of(status).settings.parts
    check_workers(number, num_machines=len({worker["host"] for worker in status["workers"]}) or 1)
    say(tell(address, Scale(num_workers=number)))
    return 0


@click.command(epilog=RUN)
@click.argument("run", type=click.Path())
def stop(run: str) -> int:
    """Stop the run at the end of its current step."""
    say(tell(find(run), Stop(reason="stopped by `unisono stop`")))
    return 0
