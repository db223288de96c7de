"""The launcher of ``unisono run``: this machine."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.launchers.processes import Processes
from unisono.launchers.protocol import HERE, AgentCommand, Handle, Machine

__all__ = ["Local"]


class Local:
    """All workers are on this machine, started by the command itself."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._processes = Processes()

    def machines(self) -> Sequence[Machine]:
        return [Machine(name=HERE, num_workers=self._num_workers)]

    def start(self, machine: Machine, command: AgentCommand) -> Handle:
        """Start one more agent on this machine."""
        return self._processes.start(command)

    def close(self) -> None:
        self._processes.close()
