"""What the machine of an agent uses, measured from time to time in a thread and sent to the head."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from unisono.core.events import MachineUsed
from unisono.system.threads import NamedThread
from unisono.system.usage import Gpus, Meter

__all__ = ["MESSAGES_PER_S", "Metering", "period_s"]

PERIOD_S: Final = 2.0
MESSAGES_PER_S: Final = 20.0
"""To the head, of all machines together."""
SHARE: Final = 0.001
"""Of a core, that a reading may cost at most."""
CLOSE_S: Final = 1.0


def period_s(num_machines: int, cost_s: float) -> float:
    """Return the time between two readings: long where there are many machines, and where a reading takes long.

    Args:
        cost_s: processor time of a reading.
    """
    return max(PERIOD_S, num_machines / MESSAGES_PER_S, cost_s / SHARE)


class Metering:
    """Measures until it is closed.

    Args:
        host: label of this machine.
        workers: returns the process ids of the workers that run now, by worker id.
        num_machines: returns how many machines the run has.
        send: receives what is used; called in the event loop.
    """

    def __init__(
        self,
        host: str,
        workers: Callable[[], Mapping[str, int]],
        num_machines: Callable[[], int],
        send: Callable[[MachineUsed], object],
    ) -> None:
        self._host = host
        self._workers = workers
        self._num_machines = num_machines
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._asked: queue.SimpleQueue[Mapping[str, int] | None] = queue.SimpleQueue()
        self._is_busy = False
        self._cost_s = 0.0
        self._thread = NamedThread(self._run, "unisono-meter")
        self._thread.start()
        self._timer = self._loop.call_later(PERIOD_S, self._ask)

    def close(self) -> None:
        """End the thread, but do not wait long for a system that does not answer."""
        self._timer.cancel()
        self._asked.put(None)
        self._thread.join(CLOSE_S)

    def _ask(self) -> None:
        self._timer = self._loop.call_later(period_s(self._num_machines(), self._cost_s), self._ask)
        if not self._is_busy:
            self._is_busy = True
            self._asked.put(dict(self._workers()))

    def _answer(self, use: MachineUsed | None, cost_s: float) -> None:
        self._is_busy = False
        self._cost_s = cost_s if not self._cost_s else 0.8 * self._cost_s + 0.2 * cost_s
        if use is not None:
            self._send(use)

    def _run(self) -> None:
        meter, gpus = Meter(self._host), Gpus()
        while (workers := self._asked.get()) is not None:
            began = time.thread_time()
            use = None
            with contextlib.suppress(Exception):  # a system that says no has no view of it; the run goes on
                use = msgspec.structs.replace(meter.read(workers), gpus=gpus.read())
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answer, use, time.thread_time() - began)
