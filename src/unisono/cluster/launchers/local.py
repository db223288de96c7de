"""The launcher of ``unisono run``: this machine, with all workers or (``--launcher none``) with none."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.cluster.launchers.agent_processes import AgentProcess
from unisono.cluster.launchers.protocol import HERE, AgentCommand, Handle, Launcher, Machine, Request
from unisono.system.capacity import check_open_files, check_workers

__all__ = ["Local", "Nobody"]


class Nobody(Launcher):
    """The command keeps the head, and workers join by themselves (``unisono join``)."""

    _num_workers = 0

    def __init__(self, request: Request) -> None:
        pass

    def machines(self) -> Sequence[Machine]:
        return [Machine(name=HERE, num_workers=self._num_workers)]

    def start(self, machine: Machine, command: AgentCommand) -> Handle:
        """Start one more agent on this machine."""
        return AgentProcess(command)


class Local(Nobody):
    """All workers are on this machine, started by the command itself."""

    def __init__(self, request: Request) -> None:
        self._num_workers = request.workers.on_one_machine(request.spec.threads)
        check_workers(self._num_workers)
        check_open_files(self._num_workers)
