"""Gates at which `small_training` waits for the test: at the head of a step, all workers, and exactly there."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

__all__ = ["Gates"]


class Gates:
    """Closed gates at the heads of these steps. Leaving the ``with`` (or the death of this process) opens all."""

    def __init__(self, folder: Path, steps: Iterable[int]) -> None:
        self.folder = folder
        folder.mkdir()
        self._files = {step: (folder / str(step)).open("w") for step in steps}
        for file in self._files.values():
            fcntl.flock(file, fcntl.LOCK_EX)

    def open(self, step: int) -> None:
        self._files.pop(step).close()

    def __enter__(self) -> Gates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for step in list(self._files):
            self.open(step)
