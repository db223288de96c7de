"""The evaluators of one machine (``unisono run --evaluators N``): each is a process ``unisono evaluate RUN``."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Final

from unisono.cluster.machine.children import NOT_STARTED, Child, Listener, spawn
from unisono.cluster.machine.workers import NO_GPU
from unisono.system.capacity import machine_gpus
from unisono.system.lifetime import PARENT

__all__ = ["Evaluators"]

AGAIN_S: Final = 1.0
"""After an evaluator was killed, until another one is started."""


class Evaluators:
    """Starts the evaluators of a machine when the run's directory is known, and ends them.

    An evaluator that was killed is replaced; one that has ended by itself has said why, and is not.

    Args:
        gpu: returns the GPU of an evaluator, by its number.
    """

    def __init__(self, number: int, listener: Listener, gpu: Callable[[int], int]) -> None:
        self._number = number
        self._listener = listener
        self._gpu = gpu
        self._run_dir = ""
        self._children: dict[str, Child] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._is_closing = False

    def start(self, run_dir: str) -> None:
        """Start them, if they were not started yet."""
        if not self._run_dir:
            self._run_dir = run_dir
            for number in range(self._number):
                self._start(number)

    def _start(self, number: int) -> None:
        if self._is_closing:
            return
        name, gpu = f"e{number}", self._gpu(number)
        environment = {**os.environ, PARENT: str(os.getpid())}
        if gpu != NO_GPU:
            environment["CUDA_VISIBLE_DEVICES"] = machine_gpus()[gpu].removeprefix("gpu-")

        def on_end(child: Child) -> None:
            del self._children[name]
            if child.exit_code is not None and child.exit_code < 0 and not self._is_closing:
                self._listener.on_notice(f"evaluator {name} was killed, and is being restarted")
                self._timers.append(asyncio.get_running_loop().call_later(AGAIN_S, self._start, number))

        try:
            self._children[name] = spawn(
                name,
                [sys.executable, "-P", "-m", "unisono", "evaluate", self._run_dir],
                environment,
                (),
                on_line=lambda text, is_error: self._listener.on_line(name, text, is_error),
                on_end=on_end,
            )
        except OSError as error:
            self._listener.on_notice(f"evaluator {name} {NOT_STARTED.format(error)}")

    async def close(self) -> None:
        """End them: the run is over."""
        self._is_closing = True
        for timer in self._timers:
            timer.cancel()
        await asyncio.gather(*(child.close() for child in self._children.values()))
