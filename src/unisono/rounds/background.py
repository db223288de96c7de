"""A thread for the exchanges of one generation: it sums one step after the other while the script goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

__all__ = ["Background", "Task"]

T = TypeVar("T")


class Task(Generic[T]):
    """A piece of work that a thread does, or has done."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._over = threading.Event()
        self._values: list[T] = []
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether it is over, and well."""
        return self._over.is_set() and bool(self._values)

    def run(self) -> bool:
        """Do the work; returns whether all went well."""
        work, self._work = self._work, None
        assert work is not None
        try:
            self._values.append(work())
        except BaseException as error:
            self._error = error
        self._over.set()
        return self._error is None

    def drop(self) -> None:
        """Give it up before it has begun."""
        self._work = None
        self._over.set()

    def wait(self) -> T:
        """Return the result, when the work is done.

        Raises:
            Exception: the one of the work. RuntimeError: the work was dropped.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error
        if not self._values:
            raise RuntimeError("this work was dropped before it began")
        return self._values[0]


class Background:
    """Does tasks in their order, in a thread of its own. After one that fails it does no more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tasks: queue.SimpleQueue[Task[object] | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], T]) -> Task[T]:
        """Have work done after all that was submitted before."""
        task = Task(work)
        self._tasks.put(task)  # type: ignore[arg-type]
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unisono-sums", daemon=True)
            self._thread.start()
        return task

    def end(self) -> None:
        """Let the thread end when all is done. Waits for nothing."""
        self._tasks.put(None)

    def stop(self) -> None:
        """Drop what has not begun, and wait until the thread is over. The task under way must not wait for ever."""
        self._is_stopped = True
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (task := self._tasks.get()) is not None:
            if self._is_stopped:
                task.drop()
            elif not task.run():
                self._is_stopped = True
