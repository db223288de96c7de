"""Calls of the head's key-value store that wait for their answers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from unisono.cluster.worker.packed import unpack_values
from unisono.core.errors import DeadlineExceeded, PeerLost, ProtocolError
from unisono.core.messages import Notice, StoreAnswer, StoreCall

__all__ = ["StoreCalls"]

GRACE_S: Final = 2.0
"""The answer may arrive so much later than the call's own timeout."""


class StoreCalls:
    """The store calls of one worker. Methods may be called from any thread.

    Args:
        send: sends a call to the head.
    """

    def __init__(self, send: Callable[[StoreCall], None]) -> None:
        self._send = send
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self._overtaken_by: Notice | None = None
        self._closed_by: Exception | None = None

    def call(
        self,
        operation: str,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        amount: int = 0,
        timeout_s: float = 60.0,
        generation: int | None = None,
    ) -> StoreAnswer:
        """Do one operation on the head's key-value store, and return the answer. Blocks up to ``timeout_s``.

        Args:
            generation: the call ends when an immediate notice of a later generation arrives.

        Raises:
            PeerLost: that notice has arrived. DeadlineExceeded: a key did not come in time.
            RunStopped: the run is over. ProtocolError: the store does not know such a call.
        """
        number = next(self._numbers)
        pending = _Pending(generation)
        self._pending[number] = pending  # before the look at the notices: the next one finds the call
        if self._closed_by is not None:
            pending.fail(self._closed_by)
        elif self._overtaken_by is not None and pending.is_overtaken_by(self._overtaken_by):
            pending.fail(PeerLost(self._overtaken_by.reason))
        else:
            request = StoreCall(
                call=number,
                operation=operation,
                keys=list(keys),
                values=list(values),
                amount=amount,
                timeout_s=timeout_s,
                generation=generation or 0,
            )
            self._send(request)
        try:
            pending.done.wait(timeout_s + GRACE_S)
        finally:
            self._pending.pop(number, None)
        if pending.error is not None:
            raise pending.error
        if pending.answer is None:
            raise DeadlineExceeded(f"the head has not answered {operation} {list(keys)[:3]} for {timeout_s:.1f} s")
        if pending.answer.error.startswith("timeout"):
            raise DeadlineExceeded(pending.answer.error)
        if pending.answer.error:
            raise ProtocolError(pending.answer.error)
        if pending.answer.packed:
            return msgspec.structs.replace(pending.answer, values=unpack_values(pending.answer.packed), packed=b"")
        return pending.answer

    def take_answer(self, answer: StoreAnswer) -> None:
        """Complete the call of this answer."""
        pending = self._pending.get(answer.call)
        if pending is not None:
            pending.answer = answer
            pending.done.set()

    def take_notice(self, notice: Notice) -> None:
        """End the calls for earlier generations with `PeerLost`, now and from now on, if the notice is immediate."""
        if not notice.immediate:
            return
        self._overtaken_by = notice
        for pending in list(self._pending.values()):
            if pending.is_overtaken_by(notice):
                pending.fail(PeerLost(notice.reason))

    def close(self, error: Exception) -> None:
        """End all calls with ``error``, now and from now on: the run is over."""
        self._closed_by = error
        self.fail_all(error)

    def fail_all(self, error: Exception) -> None:
        """End all calls that wait with ``error``."""
        for pending in list(self._pending.values()):
            pending.fail(error)


class _Pending:
    """A call that waits for its answer."""

    def __init__(self, generation: int | None) -> None:
        self._generation = generation
        self.done = threading.Event()
        self.answer: StoreAnswer | None = None
        self.error: Exception | None = None

    def is_overtaken_by(self, notice: Notice) -> bool:
        return self._generation is not None and self._generation < notice.generation

    def fail(self, error: Exception) -> None:
        self.error = error
        self.done.set()
