"""Condition of a machine that is lent: a command of the user says, every few seconds, whether it takes part.

``unisono join --while COMMAND``. The command runs in a shell. It may hang, and may start processes: it has a group and
a time limit, and ends with the agent, also if that is killed (`unisono.system.lifetime.tied`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from unisono.cluster.machine.children import NOT_STARTED, TERMINATE_S, spawn
from unisono.core.words import exit_words

__all__ = ["watch_condition"]

EVERY_S: Final = 2.0
LIMIT_S: Final = 10.0
MAX_WORDS: Final = 200


async def watch_condition(command: str, on_change: Callable[[bool, str], None]) -> None:
    """Run the command again and again until cancelled, and tell when its answer changes.

    Args:
        on_change: receives whether the command has ended with 0, and why: the last line that it has printed, else how
            it has ended. It is called after the first time as well. Where the command has not ended after `LIMIT_S`, it
            is killed, and the machine does not take part.
    """
    known: bool | None = None
    while True:
        holds, why = await _ask(command)
        if holds != known:
            known = holds
            on_change(holds, why)
        await asyncio.sleep(EVERY_S)


async def _ask(command: str) -> tuple[bool, str]:
    said: list[str] = []

    def on_line(text: str, is_error: bool) -> None:
        said[:] = [text.strip()[:MAX_WORDS] or (said[0] if said else "")]

    try:
        child = spawn("condition", ["sh", "-c", command], os.environ, (), on_line=on_line, is_tied=True)
    except OSError as error:
        return False, f"`{command}` {NOT_STARTED.format(error)}"
    try:
        if not await child.ended_within(LIMIT_S):
            child.kill()
            await child.ended_within(TERMINATE_S)
            return False, f"`{command}` has not ended within {LIMIT_S:g} s"
    finally:
        child.kill()  # where this task is cancelled
    code = child.exit_code
    assert code is not None
    return code == 0, said[0] if said and said[0] else f"`{command}` {exit_words(code)}"
