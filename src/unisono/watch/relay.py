"""What an agent prints that a launcher has started: the command that started the run shows it, with the rest."""

from __future__ import annotations

import contextlib

from unisono.messages import Ended, StepDone

__all__ = ["Relay"]


class Relay:
    """Prints the output of the workers of this machine, and why the machine has failed."""

    def worker_line(self, worker_id: str, text: str, *, is_error: bool) -> None:
        self._print(f"[{worker_id}] {text}")

    def say(self, text: str) -> None:
        pass

    def step(self, done: StepDone) -> None:
        pass

    def close(self, ended: Ended, *, with_traceback: bool = True) -> None:
        if not ended.ok:
            self._print(f"unisono: {ended.reason}")

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone
            print(line, flush=True)
