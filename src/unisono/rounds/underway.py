"""Sums under way: a thread makes them, one after the other, while the script goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from unisono.exchange import Combined, Share, combine
from unisono.exchange.flat import Slot
from unisono.rounds.background import Background, Task
from unisono.rounds.members import Members

__all__ = ["UnderWay"]


class UnderWay:
    """The sums of some steps, in the order in which they were begun. All methods are local, but for `next`."""

    def __init__(self, members: Members, device: torch.device) -> None:
        self._members = members
        self._device = device
        self._background: Background | None = None
        self._tasks: dict[int, tuple[Task[Combined], Share]] = {}

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def begin(self, number: int, share: Share, own: bytes, out: Slot) -> None:
        """Sum the nodes of a step, after those that were begun before.

        Args:
            own: what this member says with it.
            out: for the result.
        """
        self.submit(number, share, partial(combine, self._members.exchange, share, own, out))

    def submit(self, number: int, share: Share, work: Callable[[], Combined]) -> None:
        """Do work whose result is the sum of a step, after those that were begun before."""
        if self._background is None:
            self._background = Background(self._device)
        self._tasks[number] = (self._background.submit(work), share)

    def next(self) -> tuple[int, Combined, Share]:
        """Wait for the oldest one; returns the step, its sum, and this member's part of it. Collective.

        Raises:
            PeerLost, DeadlineExceeded: a member was lost. The sum stays under way.
        """
        number = next(iter(self._tasks))
        task, share = self._tasks[number]
        combined = task.wait()
        del self._tasks[number]
        return number, combined, share

    @property
    def has_done(self) -> bool:
        """Whether the oldest one is over, and well: `next` waits for nobody."""
        return bool(self._tasks) and next(iter(self._tasks.values()))[0].is_done

    def stop(self) -> None:
        """Begin no other one, and wait until the thread is over. The one under way must not wait for ever."""
        background, self._background = self._background, None
        if background is not None:
            background.stop()

    def clear(self) -> None:
        """Forget those that are left."""
        self._tasks.clear()

    def end(self) -> None:
        """Let the thread end when all are done."""
        if self._background is not None:
            self._background.end()
