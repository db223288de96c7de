"""No launcher: the command keeps the head, and workers join by themselves (``unisono join``)."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.cluster.launchers.processes import AgentProcess
from unisono.cluster.launchers.protocol import HERE, AgentCommand, Handle, Launcher, Machine, Request

__all__ = ["Nobody"]


class Nobody(Launcher):
    """This machine has no workers, and no other one is started."""

    def __init__(self, request: Request) -> None:
        pass

    def machines(self) -> Sequence[Machine]:
        return [Machine(name=HERE, num_workers=0)]

    def start(self, machine: Machine, command: AgentCommand) -> Handle:
        """Start an agent on this machine, where somebody names one."""
        return AgentProcess(command)
