"""What a worker and the head say to each other about evaluations that an evaluator computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from unisono.messages import EvaluationAnswer, EvaluationEnded, EvaluationWanted

__all__ = ["EvaluationCalls"]

LOOK_S: Final = 0.1


class EvaluationCalls:
    """Questions, answers and orders of one worker. Methods may be called from any thread.

    Args:
        send: sends a question to the head, and again whenever the connection is new.
    """

    def __init__(self, send: Callable[[EvaluationWanted], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._answers: dict[int, bool] = {}
        self._ended: dict[int, bytes] = {}
        self._orders: deque[EvaluationWanted] = deque()
        self._closed_by: Exception | None = None

    # -- members -------------------------------------------------------------------------------------

    def ask(self, wanted: EvaluationWanted) -> bool:
        """Return whether an evaluator computes this evaluation. Blocks until the head has answered.

        Raises:
            RunStopped: the run is over.
        """
        with self._changed:
            self._answers.pop(wanted.number, None)
        self._send(wanted)
        with self._changed:
            while wanted.number not in self._answers:
                self._check()
                self._changed.wait(1.0)
            return self._answers.pop(wanted.number)

    def outcome(self, number: int) -> bytes | None:
        """Return the totals of an evaluation; empty: no evaluator computes it any more; None: it is under way."""
        with self._changed:
            return self._ended.get(number)

    def wait(self, number: int, check: Callable[[], None]) -> bytes:
        """Block until an evaluation that was taken is over; return what `outcome` returns then.

        Args:
            check: called again and again meanwhile; raises what ends the waiting.
        """
        while True:
            check()
            with self._changed:
                self._check()
                if number in self._ended:
                    return self._ended[number]
                self._changed.wait(LOOK_S)

    def forget(self, number: int) -> None:
        """Forget an evaluation whose totals are known."""
        with self._changed:
            self._ended.pop(number, None)

    # -- evaluators ----------------------------------------------------------------------------------

    def order(self) -> EvaluationWanted:
        """Return the oldest order that is not dealt with. Blocks until there is one.

        Raises:
            RunStopped: the run is over.
        """
        with self._changed:
            while not self._orders:
                self._check()
                self._changed.wait(1.0)
            return self._orders[0]

    def dealt_with(self, number: int) -> None:
        """Note that there is nothing more to do for an order."""
        with self._changed:
            self._orders = deque(order for order in self._orders if order.number != number)

    # -- the connection's thread ---------------------------------------------------------------------

    def take(self, message: EvaluationAnswer | EvaluationEnded | EvaluationWanted) -> None:
        """Take a message of the head."""
        with self._changed:
            match message:
                case EvaluationAnswer():
                    self._answers[message.number] = message.is_taken
                case EvaluationEnded():
                    self._ended[message.number] = message.totals
                case EvaluationWanted():
                    if all(order.number != message.number for order in self._orders):
                        self._orders.append(message)
            self._changed.notify_all()

    def close(self, error: Exception) -> None:
        """End all waiting with ``error``, now and from now on: the run is over."""
        with self._changed:
            self._closed_by = error
            self._changed.notify_all()

    def _check(self) -> None:
        if self._closed_by is not None:
            raise self._closed_by
