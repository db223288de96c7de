"""``unisono agent``: one task of ``srun`` or ``mpiexec``. All tasks together are one run; task 0 has the head."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from unisono import tasks
from unisono.capacity import check_open_files, check_workers, parse_workers
from unisono.cli.part import settings, take_part
from unisono.cli.run import Options, read, run_options
from unisono.errors import UsageError
from unisono.spec import MachineSpec

__all__ = ["agent"]


@click.command()
@run_options
@click.option("--per-task", type=click.IntRange(min=1), help="Workers of each task; default: one, or one for each of "
              "its GPUs. (--workers is the number of all tasks together.)")  # fmt: skip
@click.option("--rendezvous", default=".", show_default=True, metavar="DIR", help="Where task 0 writes the address of "
              "the run for the other tasks: a directory that all see.")  # fmt: skip
@click.option("--join", "going", default="", metavar="RUN", help="Join the run that is going in the directory RUN "
              "instead; without SCRIPT.")  # fmt: skip
def agent(per_task: int | None, rendezvous: str, going: str, **given: Any) -> int:
    """Be one task of a run that srun or mpiexec starts:

        mpiexec -n 4 unisono agent train.py --run-dir runs/a --resume auto -- --lr 0.01

    Every task starts workers on its machine, and all train together, with the same bits at any number of them. The
    options are those of unisono run.
    """
    options = Options(**given)
    task = tasks.here(os.environ)
    if going:
        return _join(going, options, per_task)
    if task is None:
        raise UsageError(
            "unisono agent is started by srun or mpiexec: mpiexec -n 4 unisono agent SCRIPT; without them, use unisono "
            "run SCRIPT"
        )
    options.refuse_hosts(f"the machines of unisono agent are those of {task.command}")
    return take_part(options, task, partial(read, options), per_task, rendezvous)


def _join(going: str, options: Options, per_task: int | None) -> int:
    """Join a run that is going, from another job. A signal takes the workers of this task away again."""
    from unisono.cli.join import settled
    from unisono.cli.reach import find
    from unisono.machine import agent

    if options.script or options.module:
        raise UsageError("unisono agent --join RUN runs the script of the run; give no other")
    address = find(going)
    run = settled(settings(address), run_dir=str(Path(going).resolve()), head_away_s=options.head_away_s)
    number = per_task or parse_workers(options.workers, run.threads).start
    check_workers(number)
    check_open_files(number)
    machine = MachineSpec(
        run=run,
        num_workers=number,
        num_evaluators=options.evaluators,
        start=options.start,
        simulate_hosts=options.simulate_hosts,
    )
    return agent.join(machine, address.url, address.token)
