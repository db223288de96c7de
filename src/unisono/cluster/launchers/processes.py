"""Agents that are processes of this machine, or the local ends of a remote command (ssh, srun, mpirun)."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence

from unisono.cluster.launchers.protocol import AgentCommand, Handle
from unisono.core.errors import UsageError

__all__ = ["AgentProcess", "Processes"]


class AgentProcess(Handle):
    """An agent, or the local end of the command that has started one elsewhere.

    Args:
        before: a command that starts the agent's: ``("ssh", "node1")``.
        environment: of that command; default: this process's.

    Raises:
        UsageError: the command cannot be started.
    """

    def __init__(
        self, command: AgentCommand, *, before: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        words = [*before, *command.words]
        try:
            self._process = subprocess.Popen(
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
        self.pid = self._process.pid
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # the process has ended: its exit code says so
            self._stdin.write(command.secret + "\n")
            self._stdin.flush()

    @property
    def stdout(self) -> Iterable[str]:
        return self._process.stdout or ()

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self) -> int:
        return self._process.wait()

    def terminate(self) -> None:
        """End its standard input: an agent, and a holder, then end what they have started, and themselves.

        (A signal to ``ssh`` or ``srun`` would end the connection before that.)
        """
        with contextlib.suppress(OSError, ValueError):
            self._stdin.close()

    def signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()
        self._process.wait()
        self.terminate()  # its standard output is left to the thread that reads it: to close it would wait for that


class Processes:
    """Agents that were started, and are ended together."""

    def __init__(self) -> None:
        self._started: list[AgentProcess] = []

    def add(self, agent: AgentProcess) -> AgentProcess:
        self._started = [*(other for other in self._started if other.poll() is None), agent]
        return agent

    def close(self, patience_s: float = 0.0, ask: signal.Signals | None = None) -> None:
        """End those that still run: first by their standard input, after ``patience_s`` by force.

        Args:
            ask: this signal is sent as well, at once.
        """
        for agent in self._started if patience_s else ():
            agent.terminate()
            if ask is not None:
                agent.signal(ask)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and any(agent.poll() is None for agent in self._started):
            time.sleep(0.02)
        for agent in self._started:
            agent.end()
        self._started.clear()
