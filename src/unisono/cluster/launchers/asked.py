"""Which launcher a request asks for, or the environment that the command runs in.

Apart from the launchers, because a command asks about all of them and imports the one that it takes.
"""

from __future__ import annotations

from typing import Final

from unisono.cluster.launchers.protocol import Request
from unisono.system.tasks import FIRST_SPECIAL_STEP

__all__ = ["RAY_JOB", "in_allocation", "in_ray_job", "names_hosts"]

RAY_JOB: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets this variable for the command of ``ray job submit``."""


def names_hosts(request: Request) -> bool:
    """Return whether a command line names machines."""
    return bool(request.settings.hosts or request.settings.hostfile)


def in_allocation(request: Request) -> bool:
    """Return whether this is a batch script or a shell in an allocation of Slurm, and no task of ``srun``."""
    environment = request.environment
    step = environment.get("SLURM_STEP_ID", "")
    is_task = step.isdecimal() and int(step) < FIRST_SPECIAL_STEP
    return "SLURM_JOB_ID" in environment and "SLURM_JOB_NODELIST" in environment and not is_task


def in_ray_job(request: Request) -> bool:
    """Return whether the command runs in a job of Ray."""
    return RAY_JOB in request.environment
