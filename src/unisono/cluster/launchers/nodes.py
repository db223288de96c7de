"""Nodes of a Slurm job: their names, and the address at which they reach this machine."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from unisono.cluster.machine.headprocess import reachable
from unisono.system.lifetime import run_bound

__all__ = ["binds_to_cores", "expand", "gpus_of_nodes", "node_names", "own_address", "parse_gpus"]

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
            found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
            for family, kind, protocol, _, where in found:
                # No packet is sent: this only asks which interface the route uses.
                with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                    probe.connect(where)
                    return str(probe.getsockname()[0])
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
