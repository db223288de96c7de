"""The output of an agent that a launcher has started: the command that started the run shows it, with the rest."""

from __future__ import annotations

import contextlib

from unisono.core.events import Announcement, Event, RunEnded, WorkerOutput

__all__ = ["Relay"]


class Relay:
    """Prints the output of the workers of this machine, what their agent announces, and why the machine has failed."""

    def emit(self, event: Event) -> None:
        match event:
            case WorkerOutput():
                self._print(f"[{event.source}] {event.text}")
            case Announcement():
                self._print(f"unisono: {event.text}")
            case RunEnded(ok=False):
                self._print(f"unisono: {event.reason}")

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone
            print(line, flush=True)
