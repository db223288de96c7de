"""Sums under way: a thread makes them, one after the other, while the script goes on; and the memory for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from unisono.engine.exchange import Combined, Exchange, Share, combine
from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.rounds.members import Members
from unisono.system import accelerators
from unisono.system.threads import NamedThread

__all__ = ["Spare", "UnderWay"]

_Begun = tuple[Future[tuple[Combined, Any]], Callable[[], tuple[Combined, Any]]]
"""What gets a sum and the event after it, and what makes them."""


class UnderWay:
    """The sums of some steps, in the order in which they were begun. All methods are local, but for `next`.

    On an accelerator the thread launches on a stream of its own, so that sums do not stand behind what the script has
    launched meanwhile. A sum begins after what was launched before its `begin`, and it has ended before what is
    launched after `next` begins.

    After one that fails the thread makes no more, until `stop`. It is a daemon, so it does not hold up the end of a
    process whose script has failed, as the thread of an executor does.
    """

    def __init__(self, members: Members, device: torch.device) -> None:
        self._members = members
        self._device = device
        self._sums: dict[int, tuple[Future[tuple[Combined, Any]], Share]] = {}
        self._queue: queue.SimpleQueue[_Begun | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._ended: Any = None  # after what the thread has launched

    def __bool__(self) -> bool:
        return bool(self._sums)

    def begin(self, number: int, share: Share, own: bytes, out: Slot) -> None:
        """Sum the nodes of a step, after those that were begun before.

        Args:
            own: what this member says with it.
            out: for the result.
        """
        future: Future[tuple[Combined, Any]] = Future()
        self._sums[number] = (future, share)
        written = accelerators.mark(self._device)
        self._queue.put((future, partial(self._combine, written, self._members.exchange, share, own, out)))
        if self._thread is None:
            self._thread = NamedThread(self._run, "unisono-sums")
            self._thread.start()

    def next(self) -> tuple[int, Combined, Share]:
        """Wait for the oldest one; returns the step, its sum, and this member's part of it. Collective.

        Raises:
            PeerLost, DeadlineExceeded: a member was lost. The sum stays under way.
        """
        number = next(iter(self._sums))
        future, share = self._sums[number]
        combined, summed = future.result()
        accelerators.follow(self._device, summed)
        del self._sums[number]
        return number, combined, share

    @property
    def has_done(self) -> bool:
        """Whether the oldest one is over, and well: `next` waits for nobody."""
        future, _ = next(iter(self._sums.values()), (None, None))
        return future is not None and future.done() and not future.cancelled() and future.exception() is None

    def stop(self) -> None:
        """Begin no other one, and wait until the thread is over. The one under way must not wait for ever."""
        self._is_stopped = True
        self.end()
        if self._thread is not None:
            self._thread.join()
            accelerators.follow(self._device, self._ended)
        self._thread, self._queue, self._is_stopped = None, queue.SimpleQueue(), False

    def clear(self) -> None:
        """Forget those that are left."""
        self._sums.clear()

    def end(self) -> None:
        """Let the thread end when all are done. Waits for nothing."""
        self._queue.put(None)

    def _combine(self, written: Any, exchange: Exchange, share: Share, own: bytes, out: Slot) -> tuple[Combined, Any]:
        accelerators.follow(self._device, written)
        return combine(exchange, share, own, out), accelerators.mark(self._device)

    def _run(self) -> None:
        accelerators.use_own_stream(self._device)
        while self._make_next():
            pass
        self._ended = accelerators.mark(self._device)

    def _make_next(self) -> bool:
        """Make the next sum; returns whether there may be another one. Keeps nothing of it while it waits for that."""
        if (begun := self._queue.get()) is None:
            return False
        future, work = begun
        if self._is_stopped:
            future.cancel()
            return True
        try:
            future.set_result(work())
        except BaseException as error:
            self._is_stopped = True
            future.set_exception(error)
        return True


class Spare:
    """Slots in memory of a worker's own, for sums that outlive the next combine; used again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Slot] = []
        self._applied: list[Slot] = []  # they may still be sent to others

    def new_slot(self, layout: FlatLayout) -> Slot:
        """Return a slot; its entries are arbitrary."""
        self._free = [slot for slot in self._free if slot.layout == layout]
        if self._free:
            return self._free.pop()
        return Slot(layout, torch.zeros(layout.slot_bytes, dtype=torch.uint8, device=self._device))

    def give_back(self, slot: Slot) -> None:
        """Take back a slot that nobody reads any more."""
        self._free.append(slot)

    def retire(self, slot: Slot, newest: Slot | None) -> None:
        """Take back the slot of a sum that is applied, once it is not ``newest`` any more, which others may need."""
        self._applied.append(slot)
        self._free += [one for one in self._applied if one is not newest]
        self._applied = [one for one in self._applied if one is newest]

    def clear(self) -> None:
        """Forget all slots."""
        self._applied.clear()
        self._free.clear()
