"""Agents that are processes of this machine, or the local ends of a remote command (ssh, srun, mpirun)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence

from unisono.cluster.launchers.protocol import AgentCommand, Handle
from unisono.cluster.machine.children import TERMINATE_S, Child, spawn
from unisono.core.errors import UsageError

__all__ = ["AgentProcess"]


class AgentProcess(Handle):
    """An agent, or the local end of the command that has started one elsewhere.

    Args:
        before: a command that starts the agent's: ``("ssh", "node1")``.
        environment: of that command; default: this process's.
        patience_s: for that command to end what it has started, before it is killed.
        ask: a signal that asks for it.

    Raises:
        UsageError: the command cannot be started.
    """

    def __init__(
        self,
        command: AgentCommand,
        *,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
        ask: signal.Signals | None = None,
    ) -> None:
        self._patience_s = patience_s
        self._ask = ask
        self._on_line: Callable[[str], None]
        self._on_end: Callable[[int], None]
        words = [*before, *command.words]
        try:
            # Ctrl-C is for the command that starts the run: a child has a session of its own. A connection that
            # several commands share outlives each of them.
            self._child = spawn(
                words[0],
                words,
                os.environ if environment is None else environment,
                (),
                given=command.secret + "\n",
                is_together=True,
                keeps_group=True,
                on_line=lambda text, is_error: self._on_line(text),
                on_end=self._note_end,
            )
        except OSError as error:
            raise UsageError(f"{words[0]} cannot be started: {error.strerror}") from error

    @property
    def exit_code(self) -> int | None:
        return self._child.exit_code

    def follow(self, on_line: Callable[[str], None], on_end: Callable[[int], None]) -> None:
        self._on_line, self._on_end = on_line, on_end

    def terminate(self) -> None:
        """End its standard input: an agent, and a holder, then end what they have started, and themselves.

        (A signal to ``ssh`` or ``srun`` would end the connection before that.)
        """
        self._child.close_input()

    async def close(self) -> None:
        if self.exit_code is None and self._ask is not None:
            os.kill(self._child.pid, self._ask)
        if not await self._child.ended_within(self._patience_s):
            os.kill(self._child.pid, signal.SIGKILL)
            await self._child.ended_within(TERMINATE_S)

    def _note_end(self, child: Child) -> None:
        assert child.exit_code is not None
        self._on_end(child.exit_code)
