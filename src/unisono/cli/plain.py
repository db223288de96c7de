"""``unisono run --plain``: start torchrun on the machines of the command line, or in one task of ``srun``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from unisono.cli.saying import say
from unisono.cluster import launchers
from unisono.cluster.launchers import HERE, Launcher, Machine, Request
from unisono.cluster.launchers.slurm import own_address
from unisono.cluster.trust.rendezvous import Rendezvous
from unisono.core.errors import UsageError
from unisono.system import tasks
from unisono.system.capacity import check_open_files, check_workers

if TYPE_CHECKING:
    from unisono.cluster.launchers.torchrun import Torchruns

__all__ = ["start", "take_part"]

LAUNCHERS: Final = ("auto", "local", "ssh", "slurm")
SCHEME: Final = "tcp://"
WAIT_S: Final = 120.0
"""For task 0: tasks of a large job start within a minute."""


def start(request: Request, max_restarts: int) -> int:
    """Start the script on the machines that the command line names. Returns the exit code.

    Args:
        max_restarts: how often torchrun starts all processes again.

    Raises:
        UsageError: something is wrong with the command line. Nothing was started.
    """
    from unisono.cluster.launchers.torchrun import fewest, open_store

    named = request.settings.launcher
    if named not in LAUNCHERS:
        raise UsageError(f"--plain starts torchrun with the launchers {', '.join(LAUNCHERS)}; got {named}")
    workers, launcher = request.workers, launchers.choose(request)
    machines = [machine for machine in launcher.machines() if machine.num_workers]
    torchruns = _torchruns(request, max_restarts, launcher)
    if len(machines) == 1:
        if not workers.grows:
            raise UsageError(
                f"--workers {workers.minimum}:{workers.maximum} is for several machines (--hosts, Slurm): torchrun "
                "continues with fewer machines, but not with fewer processes on one; give a number"
            )
        return torchruns.run(machines)
    numbers = [machine.num_workers for machine in machines]
    least = len(machines) if workers.grows else fewest(numbers, workers.minimum)
    bind = launcher.bind() or "127.0.0.1"
    with open_store(request.bind or bind, request.port) as endpoint:
        return torchruns.run(machines, nodes=(least, len(machines)), endpoint=endpoint)


def take_part(request: Request, max_restarts: int, task: tasks.Task, number: int, meeting: Rendezvous) -> int:
    """Be one task of a script that ``srun`` or ``mpiexec`` has started. Returns the exit code.

    Args:
        number: of processes of this task.
        meeting: where task 0 says at which store all torchruns meet.

    Raises:
        UsageError: something is wrong with the command line, or the tasks do not find each other.
    """
    from unisono.cluster.launchers.torchrun import open_store

    check_workers(number)
    check_open_files(number)
    torchruns = _torchruns(request, max_restarts)
    machines, nodes = [Machine(name=HERE, num_workers=number)], (task.size, task.size)
    if task.rank:
        found = meeting.wait(WAIT_S, lambda text: say(f"unisono: task {task.rank} of {task.command} {text}", err=True))
        return torchruns.run(machines, nodes=nodes, endpoint=found.url.removeprefix(SCHEME), name=task.job)
    bind = "127.0.0.1" if task.is_on_one_machine else own_address(os.environ)
    with open_store(request.bind or bind, request.port) as endpoint:
        meeting.publish(SCHEME + endpoint, "")
        try:
            return torchruns.run(machines, nodes=nodes, endpoint=endpoint, name=task.job)
        finally:
            meeting.remove()


def _torchruns(request: Request, max_restarts: int, launcher: Launcher | None = None) -> Torchruns:
    from unisono.cluster.launchers.torchrun import Torchruns

    variables = {"OMP_NUM_THREADS": str(request.spec.threads)}
    return Torchruns(request.spec.arguments, os.getcwd(), variables, max_restarts, launcher)
