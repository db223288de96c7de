"""Nodes of a Slurm job: their names, and the address at which they reach this machine."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from unisono.machine.headprocess import reachable

__all__ = ["binds_to_cores", "expand", "node_names", "own_address"]

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
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=SCONTROL_S, check=True)
        return done.stdout
    return ""
