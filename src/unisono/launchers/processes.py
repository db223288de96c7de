"""Agents that are processes of this machine, or the local ends of a remote command (ssh, srun, mpirun)."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence

from unisono.errors import UsageError
from unisono.launchers.protocol import AgentCommand

__all__ = ["Processes"]


class Processes:
    """Starts agents as processes, and ends those that still run."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, command: AgentCommand, *, before: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start an agent.

        Args:
            before: a command that starts the agent's: ``("ssh", "node1")``.
            environment: of that command; default: this process's.

        Raises:
            UsageError: the command cannot be started.
        """
        words = [*before, *command.words]
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,  # Ctrl-C is for the command that starts the run
            )
        except OSError as error:
            raise UsageError(f"{words[0]} cannot be started: {error.strerror}") from error
        self._started.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended: its exit code says so
            process.stdin.write(command.secret + "\n")
            process.stdin.flush()
        return process

    def close(self) -> None:
        """Kill the processes that still run."""
        for process in self._started:
            process.kill()
            process.wait()
            # Its standard output is left to the thread that reads it: to close it would wait for that.
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError, ValueError):
                    process.stdin.close()
        self._started.clear()
