"""The launcher of ``unisono run``: this machine."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.capacity import check_open_files, check_workers
from unisono.launchers.processes import Processes
from unisono.launchers.protocol import HERE, AgentCommand, Handle, Machine, Request

__all__ = ["Local"]


class Local:
    """All workers are on this machine, started by the command itself."""

    def __init__(self, request: Request) -> None:
        self._num_workers = request.workers.on_one_machine(request.threads)
        check_workers(self._num_workers)
        check_open_files(self._num_workers)
        self._processes = Processes()

    def machines(self) -> Sequence[Machine]:
        return [Machine(name=HERE, num_workers=self._num_workers)]

    def start(self, machine: Machine, command: AgentCommand) -> Handle:
        """Start one more agent on this machine."""
        return self._processes.start(command)

    def close(self) -> None:
        self._processes.close()
