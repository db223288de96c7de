"""Pump: the thread that waits for the messages of a wire, and does at once what follows when they are there.

A receive of gloo can be waited for in a thread only: it has no future, and its wait cannot be woken before its timeout.
So the thread of the run never waits in it. It gives **jobs** to the pump, which does them one after the other, and
waits for what a job has published with `unisono.engine.exchange.wire.Wire.await_job`, which ends at a deadline and at
an interrupt. A pump whose wire was closed ends after the message that it waits for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from unisono.system.threads import NamedThread

__all__ = ["Job", "Pump"]


class Job:
    """Something that the pump does.

    Attributes:
        failure: the exception that has ended the job, or one before it.
        is_awaited: somebody waits for the end of the job, or has begun to. Nobody is woken by the end of another one.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self.run: Callable[[], None] | None = run
        self.failure: Exception | None = None
        self.is_awaited = False

    def is_completed(self) -> bool:
        """Return whether the pump does not need the job any more."""
        return self.run is None


class Pump:
    """One thread; it starts with the first job and ends at `stop`, or at the first failure.

    Args:
        changed: is notified when a job that is awaited is over, or has failed.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._jobs: deque[Job] = deque()
        self._is_started = False
        self.is_stopped = False
        self._failure: Exception | None = None

    def add(self, job: Job) -> None:
        with self._changed:
            if self._failure is not None:
                job.failure, job.run = self._failure, None
                return
            self._jobs.append(job)
            self._changed.notify_all()
            if not self._is_started:
                self._is_started = True
                NamedThread(self._work, "unisono-pump").start()

    def stop(self) -> None:
        """Let the thread end: before its next job, and in a job at the next wait for this member."""
        with self._changed:
            self.is_stopped = True
            self._forget()
            self._changed.notify_all()

    def _forget(self) -> None:
        for job in self._jobs:
            job.failure, job.run = self._failure, None
        self._jobs.clear()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._jobs and not self.is_stopped:
                self._changed.wait()
            return None if self.is_stopped else self._jobs.popleft()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            failure: Exception | None = None
            try:
                assert job.run is not None
                job.run()
            except Exception as error:  # the thread of the run raises it
                failure = error
            with self._changed:
                job.failure, job.run = failure, None
                if failure is not None:
                    self._failure = failure
                    self._forget()
                if job.is_awaited or failure is not None:
                    self._changed.notify_all()
            del job
            if failure is not None:
                return
