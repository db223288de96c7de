"""The launcher inside an allocation of Slurm (a batch script, or the shell of ``salloc``): an agent on each node.

One ``srun`` a node starts the agent there, so each agent has an output and an exit code of its own, and a lost node is
not the others' end. The node that the command runs on needs none. ``srun`` passes standard input on, and its end: so an
agent ends with the command that has started it, also after ``kill -9``. Where ``srun`` itself is killed the agent goes
on; the head ends it with the run, and Slurm with the job.
"""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from unisono.cluster.launchers.asked import in_allocation
from unisono.cluster.launchers.nodes import binds_to_cores, gpus_of_nodes, node_names, own_address
from unisono.cluster.launchers.processes import AgentProcess
from unisono.cluster.launchers.protocol import HERE, AgentCommand, Handle, Launcher, Machine, Request
from unisono.core.errors import UsageError
from unisono.system.capacity import check_open_files, check_workers
from unisono.system.tasks import counts

__all__ = ["Slurm"]

END_S: Final = 5.0
_CHOSEN: Final = (
    "CPU_BIND",
    "DISTRIBUTION",
    "EXACT",
    "EXCLUSIVE",
    "HINT",
    "HOSTFILE",
    "NPROCS",
    "NTASKS",
    "OVERCOMMIT",
)
"""What ``srun`` would read from its environment, and is meant for other programs of the batch script."""
_CHOSEN_PER: Final = ("NTASKS_PER_", "CPUS_PER_", "GPUS", "MEM_PER_", "TRES_PER_", "THREADS_PER_")


class Slurm(Launcher):
    """Starts agents on the nodes of the allocation that the command runs in."""

    def __init__(self, request: Request) -> None:
        if not in_allocation(request):
            raise UsageError("--launcher slurm works in a batch script or a shell of Slurm (sbatch, salloc), not here")
        self._environment = request.environment
        nodes = node_names(request.environment)
        room, gpus = capacities(request.environment, nodes, request.spec.threads)
        self._gpus = dict(zip(nodes, gpus, strict=True))
        wanted = sum(room)
        if not request.takes_all:
            wanted = min(request.workers.maximum, max(request.workers.start, wanted))
        own = _own_node(request.environment, nodes)
        self._machines = [
            Machine(name=HERE if name == own else name, num_workers=number)
            for name, number in zip(nodes, shares(wanted, room), strict=True)
            if number
        ]
        others = [machine.name for machine in self._machines if machine.name != HERE]
        if others and shutil.which("srun") is None:
            raise UsageError(
                f"the job of Slurm has {', '.join(others)} as well, and there is no srun here to start agents there "
                "(in a container?); use --launcher local for this node alone"
            )
        check_workers(wanted, len(nodes))
        check_open_files(max(machine.num_workers for machine in self._machines))

    def machines(self) -> Sequence[Machine]:
        return self._machines

    def bind(self) -> str:
        """Return the address at which the nodes reach this machine; "" where no other takes part."""
        return own_address(self._environment) if any(machine.name != HERE for machine in self._machines) else ""

    def start(self, machine: Machine, command: AgentCommand) -> Handle:
        before = ["srun", "--nodelist", machine.name, "--nodes=1", "--ntasks=1", "--overlap", "--no-kill", "--mem=0"]
        before += ["--job-name=unisono"]
        if gpus := self._gpus[machine.name]:
            before += [f"--gres=gpu:{gpus}"]
        environment = step_environment(self._environment)
        # At the end SIGTERM asks ``srun`` to kill its agent: ``kill -9`` would leave that alone.
        return AgentProcess(command, before=before, environment=environment, patience_s=END_S, ask=signal.SIGTERM)


def capacities(environment: Mapping[str, str], nodes: Sequence[str], threads: int) -> tuple[list[int], list[int]]:
    """Return how many workers each node has room for, and how many GPUs it has: a worker for each GPU of the job, else
    for each task that was asked for, else for each core. A node without GPUs takes no part where others have some.

    Raises:
        UsageError: Slurm's variables cannot be read.
    """
    try:
        cores = counts(environment.get("SLURM_JOB_CPUS_PER_NODE", "1"))
        tasks = counts(environment.get("SLURM_TASKS_PER_NODE", "1"))
        gpus = gpus_of_nodes(environment, nodes)
    except ValueError as error:
        raise UsageError(f"the variables of Slurm cannot be read: {error}") from error
    num_nodes = len(nodes)
    cores += cores[-1:] * (num_nodes - len(cores))
    if any(gpus):
        return gpus, gpus
    if len(tasks) == num_nodes and sum(tasks) > num_nodes:
        return tasks, gpus
    return [max(1, number // threads) for number in cores[:num_nodes]], gpus


def shares(number: int, room: Sequence[int]) -> list[int]:
    """Return how many of so many workers each node gets: in proportion to its room."""
    given = [0] * len(room)
    for _ in range(number):
        able = (node for node, most in enumerate(room) if most)
        node = min(able, key=lambda node: ((given[node] + 1) / room[node], node))
        given[node] += 1
    return given


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of ``srun``: a batch script's wishes for its own steps are not those for an agent."""
    names = [name.removeprefix("SLURM_") for name in environment if name.startswith("SLURM_")]
    dropped = {f"SLURM_{name}" for name in names if name in _CHOSEN or name.startswith(_CHOSEN_PER)}
    kept = {name: value for name, value in environment.items() if name not in dropped}
    # An agent's workers use all cores that the job has on the node. (Where Slurm binds nothing, it complains.)
    return {**kept, "SLURM_CPU_BIND": "none"} if binds_to_cores() else kept


def _own_node(environment: Mapping[str, str], nodes: Sequence[str]) -> str:
    """Return the node that this process runs on; "" where it is none of the job's (a shell of ``salloc``)."""
    name = environment.get("SLURMD_NODENAME", "")
    short = socket.gethostname().partition(".")[0]
    return next((node for node in nodes if node == name or (not name and node.partition(".")[0] == short)), "")
