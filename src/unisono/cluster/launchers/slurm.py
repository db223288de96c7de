"""The launcher inside an allocation of Slurm (a batch script, or the shell of ``salloc``): an agent on each node.

One ``srun`` a node starts the agent there, so each agent has an output and an exit code of its own, and a lost node is
not the others' end. The node that the command runs on needs none. ``srun`` passes standard input on, and its end: so an
agent ends with the command that has started it, also after ``kill -9``. Where ``srun`` itself is killed the agent goes
on; the head ends it with the run, and Slurm with the job.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from unisono.cluster.launchers.agent_processes import AgentProcess
from unisono.cluster.launchers.hosts import Host, spread
from unisono.cluster.launchers.protocol import HERE, AgentCommand, Handle, Launcher, Machine, Request, in_allocation
from unisono.cluster.machine.headprocess import reachable
from unisono.core.errors import UsageError
from unisono.system.capacity import check_open_files, check_workers
from unisono.system.interfaces import route_to
from unisono.system.lifetime import run_bound
from unisono.system.tasks import counts

__all__ = ["Slurm", "binds_to_cores", "expand", "gpus_of_nodes", "node_names", "own_address", "parse_gpus"]

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
            raise UsageError("--launcher slurm works in a Slurm batch script or shell (sbatch, salloc), not here")
        self._environment = request.environment
        nodes = node_names(request.environment)
        room, gpus = capacities(request.environment, nodes, request.spec.threads)
        self._gpus = dict(zip(nodes, gpus, strict=True))
        numbers = spread(request.workers, [Host(node) for node in nodes], room, is_auto=request.settings.takes_all)
        own = _own_node(request.environment, nodes)
        self._machines = [
            Machine(name=HERE if name == own else name, num_workers=number)
            for name, number in zip(nodes, numbers, strict=True)
            if number
        ]
        others = [machine.name for machine in self._machines if machine.name != HERE]
        if others and shutil.which("srun") is None:
            raise UsageError(
                f"the Slurm job has {', '.join(others)} as well, and there is no srun here to start agents there (in a "
                "container?); use --launcher local for this node alone"
            )
        check_workers(sum(numbers), len(nodes))
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
        raise UsageError(f"Slurm's variables cannot be read: {error}") from error
    num_nodes = len(nodes)
    cores += cores[-1:] * (num_nodes - len(cores))
    if any(gpus):
        return gpus, gpus
    if len(tasks) == num_nodes and sum(tasks) > num_nodes:
        return tasks, gpus
    return [max(1, number // threads) for number in cores[:num_nodes]], gpus


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


SCONTROL_S: Final = 10.0
ANY: Final = "0.0.0.0"
_PART: Final = re.compile(r"((?:[^,\[]|\[[^\]]*\])+)")


def node_names(environment: Mapping[str, str]) -> list[str]:
    """Return the nodes that ``srun`` or ``sbatch`` has given to this process; none outside of Slurm."""
    text = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if not text:
        return []
    return _scontrol("show", "hostnames", text).split() or expand(text)


def expand(text: str) -> list[str]:
    """Return the names in ``n[1-3,07],login``, as ``scontrol show hostnames`` does."""
    names = []
    for part in _PART.findall(text):
        front, bracket, rest = part.partition("[")
        if not bracket:
            names.append(front)
            continue
        inside, _, back = rest.partition("]")
        for numbers in inside.split(","):
            low, _, high = numbers.partition("-")
            for number in range(int(low), int(high or low) + 1):
                names += [f"{front}{number:0{len(low)}}{end}" for end in (expand(back) or [""])]
    return names


def gpus_of_nodes(environment: Mapping[str, str], nodes: Sequence[str]) -> list[int]:
    """Return how many GPUs the job has on each of its nodes; where Slurm does not say: as on the node of this process.

    Raises:
        ValueError: the variables of Slurm cannot be read.
    """
    here = int(environment.get("SLURM_GPUS_ON_NODE", "0") or 0)
    if len(nodes) > 1 and any(name.startswith("SLURM_") and "GPU" in name for name in environment):
        known = parse_gpus(_scontrol("show", "job", "--details", environment.get("SLURM_JOB_ID", "")))
        if known.keys() >= set(nodes):
            return [known[node] for node in nodes]
    return [here] * len(nodes)


def parse_gpus(details: str) -> dict[str, int]:
    """Return how many GPUs a job has on each node, from what ``scontrol show job --details`` prints."""
    found = {}
    for names, resources in re.findall(r"^\s*Nodes=(\S+) CPU_IDs=(.*)$", details, re.MULTILINE):
        gpus = [int(number) for number in re.findall(r"\bgpu(?::[^:,()\s]+)?:(\d+)\(", resources)]
        found.update(dict.fromkeys(expand(names), sum(gpus)))
    return found


def own_address(environment: Mapping[str, str]) -> str:
    """Return the address at which the other nodes of the job reach this machine: that of the route to one of them.

    Without Slurm, or where a node's address is not found: that of the default route.
    """
    own = {environment.get("SLURMD_NODENAME", ""), socket.gethostname()}
    others = [name for name in node_names(environment) if name not in own]
    for address in _addresses(others[:1]):
        with contextlib.suppress(OSError):
            return route_to(address)[1]
    return reachable(ANY)


def binds_to_cores() -> bool:
    """Return whether Slurm gives a task cores of its own."""
    return re.search(r"^TaskPlugin +=.*(affinity|cgroup)", _scontrol("show", "config"), re.MULTILINE) is not None


def _addresses(names: Sequence[str]) -> list[str]:
    """Return what may reach these nodes: the address that Slurm uses, which need not be the name, and the name."""
    known = [found for name in names for found in re.findall(r"\bNodeAddr=(\S+)", _scontrol("show", "node", name))]
    return [*known, *names]


def _scontrol(*words: str) -> str:
    """Return what ``scontrol`` prints; "" where that does not work."""
    with contextlib.suppress(OSError):  # there is none
        done = run_bound(["scontrol", *words], SCONTROL_S)
        return done.output if done.code == 0 else ""
    return ""
