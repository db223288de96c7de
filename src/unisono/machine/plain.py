"""A process of a plain script: ``python -m unisono.machine.plain SCRIPT ARGUMENTS``, and what torchrun would tell it.

The process becomes ``python -u SCRIPT ARGUMENTS``, and ends with its agent.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence

from unisono.lifetime import bind_to_parent
from unisono.messages import Team

__all__ = ["free_port", "main", "variables"]


def variables(team: Team, names: Sequence[str], run_id: str) -> dict[str, dict[str, str]]:
    """Return the variables that torchrun sets, for each process of this machine by its name.

    Args:
        names: of this machine's processes, by their rank.
    """
    common = {
        "WORLD_SIZE": team.world_size,
        "LOCAL_WORLD_SIZE": len(names),
        "GROUP_RANK": team.group_rank,
        "GROUP_WORLD_SIZE": team.num_groups,
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": team.world_size,
        "MASTER_ADDR": team.address,
        "MASTER_PORT": team.port,
        "TORCHELASTIC_RESTART_COUNT": team.restarts,
        "TORCHELASTIC_MAX_RESTARTS": team.max_restarts,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": False,  # the process of rank 0 listens at the port
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    found = {}
    for local_rank, name in enumerate(names):
        rank = team.first_rank + local_rank
        own = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": local_rank}
        found[name] = {key: str(value) for key, value in {**common, **own}.items()}
    return found


def free_port(host: str) -> int:
    """Return a port of this machine at which nobody listens now. Another program may take it before the script does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Become the script, which the kernel ends with the agent that has started it."""
    bind_to_parent(signal.SIGKILL)
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])


if __name__ == "__main__":
    main()
