"""The launcher of ``unisono run``: this machine."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.cluster.launchers.processes import AgentProcess
from unisono.cluster.launchers.protocol import HERE, AgentCommand, Handle, Launcher, Machine, Request
from unisono.system.capacity import check_open_files, check_workers

__all__ = ["Local"]


class Local(Launcher):
    """All workers are on this machine, started by the command itself."""

    def __init__(self, request: Request) -> None:
        self._num_workers = request.workers.on_one_machine(request.spec.threads)
        check_workers(self._num_workers)
        check_open_files(self._num_workers)

    def machines(self) -> Sequence[Machine]:
        return [Machine(name=HERE, num_workers=self._num_workers)]

    def start(self, machine: Machine, command: AgentCommand) -> Handle:
        """Start one more agent on this machine."""
        return AgentProcess(command)
