"""Condition of a machine that is lent: a command of the user says, every few seconds, whether it takes part.

``unisono join --while COMMAND``. The command runs in a shell. It may hang, and may start processes: it has a group and
a time limit, and ends with the agent, also if that is killed (`unisono.system.lifetime.tied`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from unisono.cluster.machine.children import NOT_STARTED, TERMINATE_S, Child, spawn
from unisono.core.words import exit_words

__all__ = ["Condition"]

EVERY_S: Final = 2.0
LIMIT_S: Final = 10.0
MAX_WORDS: Final = 200


class Condition:
    """Runs the command again and again, and tells when its answer changes.

    Args:
        on_change: receives whether the command has ended with 0, and why: the last line that it has printed, else how
            it has ended. It is called after the first time as well.
        limit_s: the command is killed after this time; the machine does not take part then.
    """

    def __init__(
        self,
        command: str,
        on_change: Callable[[bool, str], None],
        *,
        every_s: float = EVERY_S,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._command = command
        self._on_change = on_change
        self._every_s = every_s
        self._limit_s = limit_s

    async def run(self) -> None:
        """Ask until cancelled."""
        known: bool | None = None
        while True:
            holds, why = await self._ask()
            if holds != known:
                known = holds
                self._on_change(holds, why)
            await asyncio.sleep(self._every_s)

    async def _ask(self) -> tuple[bool, str]:
        said: list[str] = []

        def on_line(text: str, is_error: bool) -> None:
            said[:] = [text.strip()[:MAX_WORDS] or (said[0] if said else "")]

        try:
            words = ["sh", "-c", self._command]
            child = spawn("condition", words, os.environ, (), on_line=on_line, is_tied=True)
        except OSError as error:
            return False, f"`{self._command}` {NOT_STARTED.format(error)}"
        return await self._answer(child, said)

    async def _answer(self, child: Child, said: list[str]) -> tuple[bool, str]:
        try:
            if not await child.ended_within(self._limit_s):
                child.kill()
                await child.ended_within(TERMINATE_S)
                return False, f"`{self._command}` has not ended within {self._limit_s:g} s"
        finally:
            child.kill()  # where this task is cancelled
        code = child.exit_code
        assert code is not None
        return code == 0, said[0] if said and said[0] else f"`{self._command}` {exit_words(code)}"
