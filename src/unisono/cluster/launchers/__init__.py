"""Start a run on one or more machines: `run` with a `Launcher`.

A new launcher is a file in this package with a class derived from `unisono.cluster.launchers.protocol.Launcher`, and a
row of `LAUNCHERS`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from unisono.cluster.launchers.agent_processes import AgentProcess
from unisono.cluster.launchers.fleet import Fleet
from unisono.cluster.launchers.protocol import (
    HERE,
    AgentCommand,
    Handle,
    Kind,
    Launcher,
    Machine,
    Request,
    in_allocation,
    in_ray_job,
    names_hosts,
)
from unisono.cluster.machine import agent
from unisono.cluster.machine.headprocess import Service
from unisono.core.errors import UsageError
from unisono.core.policy import Policy
from unisono.core.spec import MachineSpec, RunSpec
from unisono.system.fingerprint import script_checksum

__all__ = [
    "HERE",
    "LAUNCHERS",
    "AgentCommand",
    "AgentProcess",
    "Handle",
    "Kind",
    "Launcher",
    "Machine",
    "Policy",
    "Request",
    "RunSpec",
    "Service",
    "choose",
    "known",
    "run",
]

LAUNCHERS: Final[dict[str, Kind]] = {
    "ssh": Kind("unisono.cluster.launchers.ssh:Ssh", is_asked=names_hosts),
    "slurm": Kind("unisono.cluster.launchers.slurm:Slurm", is_asked=in_allocation),
    "ray": Kind("unisono.cluster.launchers.ray:Ray", is_asked=in_ray_job),
    "none": Kind("unisono.cluster.launchers.local:Nobody", is_asked=lambda request: False),
    "local": Kind("unisono.cluster.launchers.local:Local", is_asked=lambda request: True),
}
"""By name. Of those that a request or its environment asks for, the first is taken; "local" stays the last one."""


def known() -> Sequence[str]:
    """Return the values of ``--launcher``."""
    return ("auto", *LAUNCHERS, "kubernetes")


def choose(request: Request) -> Launcher:
    """Return the launcher that a command line asks for, by name or by its options and environment.

    Raises:
        UsageError: there is no such launcher, or it cannot do what is asked.
    """
    name = request.settings.launcher
    if name != "auto":
        if name not in LAUNCHERS:
            raise UsageError(f"the launcher {name!r} is unknown; choose one of {', '.join(known())}")
        return LAUNCHERS[name].build(request)
    return next(kind for kind in LAUNCHERS.values() if kind.is_asked(request)).build(request)


def run(
    spec: RunSpec,
    launcher: Launcher,
    service: Service | None = None,
    *,
    machines: Sequence[Machine] | None = None,
    address: str = "",
) -> int:
    """Train on the launcher's machines. Blocks until the run is over; returns the exit code.

    Call it in the main thread: the process becomes the command that keeps the head, and handles signals.

    Args:
        spec: settings of the run. The process goes to its ``folder``; default: the current one.
        machines: what ``launcher.machines()`` has returned, if it was called already.
        service: membership and address of the head; default: all workers of the machines, on the loopback interface.
        address: for the workers of this machine (`MachineSpec`).

    Raises:
        UsageError: the run cannot be started.
    """
    machines = launcher.machines() if machines is None else machines
    total = sum(machine.num_workers for machine in machines)
    if total < 1 and service is None:
        raise UsageError("a run needs at least 1 worker, and the launcher's machines have none")
    if spec.folder:
        os.chdir(spec.folder)
    spec = replace(spec, folder=os.getcwd(), script=script_checksum(spec.arguments))
    here = MachineSpec(
        run=spec,
        num_workers=sum(machine.num_workers for machine in machines if machine.name == HERE),
        num_evaluators=spec.settings.evaluators,
        address=address,
    )
    if service is None:
        parts = spec.settings.parts
        policy = Policy(start=total, minimum=parts, maximum=total, parts=parts)
        service = Service(policy=policy, settings=spec.settings)
    if launcher.is_elastic:
        service = replace(service, policy=replace(service.policy, elastic=True))
    others = [machine for machine in machines if machine.name != HERE]
    service = replace(service, policy=replace(service.policy, machines=len(others)))
    return agent.run(here, service, partial(Fleet, launcher, others))
