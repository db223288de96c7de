"""A slow sink in a thread of its own: the training hands its events over and goes on."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from unisono.core.events import Event, RunEnded, RunStarted, StepFinished
from unisono.core.words import count
from unisono.system.process import tell
from unisono.system.threads import NamedThread

__all__ = ["Batched", "Queued", "print_error"]

MOST: Final = 10_000
EVERY_S: Final = 0.5
PATIENCE_S: Final = 20.0


@runtime_checkable
class Batched(Protocol):
    """A slow sink that takes all events of a moment together. It may block and raise; it is called by one thread."""

    def emit_all(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


def print_error(text: str) -> None:
    """Print a sentence about a sink to standard error."""
    tell(f"unisono: {text}")


class Queued:
    """A sink that gives events to a slow one in a thread. It never blocks; only `close` waits, for a limited time.

    When more than ``most`` events wait, further ones are dropped, and that is said. The thread begins with the first
    event: a worker that is not the writer has none.

    Args:
        sink: a `Batched`, or a sink (`unisono.views.watch.Sink`) that may block.
        name: of the sink, for people.
        most: events that may wait.
        every_s: how often the slow sink gets what has come.
        patience_s: how long `close` waits for the slow sink.
        report: gets sentences about what was lost.
    """

    def __init__(
        self,
        sink: Any,
        *,
        name: str = "",
        most: int = MOST,
        every_s: float = EVERY_S,
        patience_s: float = PATIENCE_S,
        report: Callable[[str], None] = print_error,
    ) -> None:
        self._sink = sink
        self._name = name or type(sink).__qualname__
        self._most = most
        self._every_s = every_s
        self._patience_s = patience_s
        self._report = report
        self._queue: deque[Event] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = False
        self._num_dropped = 0
        self._first_dropped = ""
        self._has_told = False

    def emit(self, event: Event) -> None:
        if self._has_failed or self._closing.is_set():
            return
        if self._thread is None:
            self._thread = NamedThread(self._work, "unisono-sink")
            self._thread.start()
        if len(self._queue) >= self._most and not isinstance(event, RunStarted | RunEnded):
            if not self._num_dropped:
                self._first_dropped = f"step {event.step}" if isinstance(event, StepFinished) else "an event"
            self._num_dropped += 1
            return
        self._queue.append(event)

    def close(self) -> None:
        self._closing.set()
        if self._thread is None:
            return
        self._thread.join(self._patience_s)
        if self._thread.is_alive() and not self._has_failed:
            self._report(
                f"the sink {self._name} was not ready {self._patience_s:.0f} s after the end of the training: "
                f"{count(len(self._queue), 'event')} or more may be missing there"
            )
        if self._num_dropped:
            self._tell(f"{count(self._num_dropped, 'event')} in all, the first of them {self._first_dropped}")

    # -- in the thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        call = "emit"
        try:
            is_over = False
            while not is_over:
                is_over = self._closing.wait(self._every_s)
                if events := self._taken():
                    self._give(events)
                    if self._num_dropped and not self._has_told:
                        self._has_told = True
                        self._tell(f"so far {self._num_dropped}, the first of them {self._first_dropped}")
            call = "close"
            self._sink.close()
        except Exception as error:
            self._has_failed = True
            self._queue.clear()
            self._report(
                f"the sink {self._name} gets no more events: its {call}() raised {type(error).__name__}: {error}; the "
                "run continues"
            )
            if call == "emit":
                with contextlib.suppress(Exception):
                    self._sink.close()

    def _taken(self) -> list[Event]:
        """Take what waits now: what comes meanwhile is for the next time."""
        return [self._queue.popleft() for _ in range(len(self._queue))]

    def _give(self, events: list[Event]) -> None:
        if isinstance(self._sink, Batched):
            self._sink.emit_all(events)
        else:
            for event in events:
                self._sink.emit(event)

    def _tell(self, numbers: str) -> None:
        self._report(
            f"the sink {self._name} is slower than the run, so events were dropped ({numbers}); the run continues, and "
            "its journal has them"
        )
