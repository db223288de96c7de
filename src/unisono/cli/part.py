"""What one task of ``srun`` or ``mpiexec`` does: task 0 has the head of the run, the others join it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from unisono.cli.join import settled, spec_of
from unisono.cli.options import Options
from unisono.cli.reach import await_status
from unisono.cli.saying import say
from unisono.cluster.launchers.slurm import own_address
from unisono.cluster.machine import agent
from unisono.cluster.machine.children import Listener
from unisono.cluster.trust.invitation import Invitation
from unisono.cluster.trust.rendezvous import Rendezvous
from unisono.core.errors import UsageError
from unisono.core.spec import MachineSpec, RunSpec
from unisono.system.capacity import Workers, check_open_files, check_workers, machine_gpus, parse_workers
from unisono.system.fingerprint import script_checksum
from unisono.system.tasks import TAKEN, Task

__all__ = ["share", "take_part"]

WAIT_S: Final = 120.0
"""For task 0, and for its head: tasks of a large job start within a minute."""


def take_part(options: Options, task: Task, read: Callable[[], tuple[RunSpec, Workers]]) -> int:
    """Be one task of a run. Returns the exit code when the run is over.

    Args:
        read: returns the settings of the run, in task 0.

    Raises:
        UsageError: something is wrong with the command line, or the tasks do not find each other.
    """
    if not task.job:
        raise UsageError(
            f"{task.engine} does not say which of its jobs this is, so the tasks cannot find each other; start the "
            "machines with unisono run --hosts, or use another mpiexec"
        )
    os.environ[TAKEN] = task.engine
    meeting = Rendezvous(Path(options.rendezvous).resolve(), task.job)
    if task.rank:
        return _follow(options, task, meeting)
    return _lead(options, task, meeting, read)


def share(options: Options, workers: Workers, task: Task) -> int:
    """Return how many workers a task starts."""
    if options.per_task is not None:
        return options.per_task
    if options.takes_all:
        return max(1, len(machine_gpus()) // task.local_size)
    whole = -(-task.size // workers.parts) * workers.parts
    number = min(workers.maximum, max(workers.start, whole))
    return number * (task.rank + 1) // task.size - number * task.rank // task.size


def _lead(options: Options, task: Task, meeting: Rendezvous, read: Callable[[], tuple[RunSpec, Workers]]) -> int:
    spec, workers = read()
    own = share(options, workers, task)
    if options.per_task is not None or options.takes_all:
        workers = Workers.found(own * task.size, options.parts)
    check_workers(own)
    check_open_files(own)
    service = options.service(workers, "" if task.is_on_one_machine else own_address(os.environ))
    service = replace(service, policy=replace(service.policy, machines=task.size - 1))
    spec = replace(spec, folder=os.getcwd(), script=script_checksum(spec.arguments))
    here = MachineSpec(
        run=spec,
        num_workers=own,
        num_evaluators=options.evaluators,
        engine=task.engine,
    )
    return agent.run(here, service, partial(_Others, meeting))


def _follow(options: Options, task: Task, meeting: Rendezvous) -> int:
    workers = parse_workers(options.workers, options.threads or 1)
    own = share(options, workers, task)
    check_workers(own)
    check_open_files(own)
    found = meeting.wait(WAIT_S, partial(_say, task))
    machine = MachineSpec(
        run=settled(spec_of(await_status(Invitation(found.url, found.token), WAIT_S))),  # the head may be starting
        num_workers=own,
        launched=f"task{task.rank}",
        engine=task.engine,
    )
    code = agent.join(machine, found.url, found.token)
    if code == 0:
        meeting.remove()  # the run is over; where task 0 was lost on the way, it has left the file
    # Task 0 says by its exit code how the run has ended. That of another task would end the others (mpiexec), which
    # may be writing the last checkpoint.
    return 0 if task.ends_with_a_task else code


def _say(task: Task, text: str) -> None:
    say(f"unisono: task {task.rank} of {task.command} {text}", err=True)


class _Others:
    """The agents of the other tasks, which ``srun`` or ``mpiexec`` has started: they need the address of the head."""

    def __init__(self, meeting: Rendezvous, url: str, token: str) -> None:
        self._meeting = meeting
        self._url = url
        self._token = token

    def start(
        self, listener: Listener, on_lost: Callable[[str], None], on_gone: Callable[[Collection[str]], None]
    ) -> None:
        self._meeting.publish(self._url, self._token)

    def keep(self, num_workers: int, present: Collection[str]) -> None:
        """Do nothing: the number of tasks is that of ``srun`` or ``mpiexec``, and a lost one stays lost."""

    def hurry(self) -> None:
        """Do nothing: the other tasks learn from the head that the run is over."""

    async def close(self, patience_s: float) -> None:
        self._meeting.remove()
