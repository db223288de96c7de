"""Threads in which the head reads and writes files: a disk that stands still holds up no decision."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

__all__ = ["Disk", "in_thread"]

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Do this in a thread that this process does not wait for at its end: the disk may stand still."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("T", result))

    def run() -> None:
        result: T | None = None
        failed: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, result, failed)

    threading.Thread(target=run, name="unisono-disk", daemon=True).start()
    return await done


class Disk:
    """Does one thing after another on a disk. The event loop orders it, and gets the result in a callback."""

    def __init__(self) -> None:
        self._orders: dict[str, Callable[[], Awaitable[None]]] = {}
        self._task: asyncio.Task[None] | None = None

    def do(self, name: str, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do ``work`` in a thread after all that was ordered before, and give its result to ``then``.

        Args:
            name: while an order of this name waits for its turn, another one is not added.
        """

        async def order() -> None:
            then(await in_thread(work))

        self._orders.setdefault(name, order)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def idle(self, limit_s: float) -> None:
        """Wait until everything that was ordered is done, for a limited time."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=limit_s)

    async def close(self, limit_s: float) -> None:
        """Give up what is not done in this time."""
        await self.idle(limit_s)
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        while self._orders:
            order = self._orders.pop(next(iter(self._orders)))
            try:
                await order()
            except Exception:  # a bug of this library: what was ordered after this is done all the same
                traceback.print_exc()
