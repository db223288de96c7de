"""What a worker has to say to the head: messages that wait to be sent, and those that a new connection repeats.

The head may miss messages while the connection is broken, or end with those that it has heard. So whenever the
connection is new, all that was sent by `Outbox.send_repeatedly` is sent again: of each kind the newest, also of events,
unless it was answered.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar, cast

from unisono.core.events import Event, StepFinished
from unisono.core.messages import Happened, Message, encode

if TYPE_CHECKING:
    from unisono.cluster.worker.link import Link

__all__ = ["Outbox"]

MAX_EVENT_BYTES: Final = 1 << 20
STEPS_S: Final = 0.25
"""Events of steps that come faster than this are sent together, after this time."""
MOST_STEPS: Final = 32
"""Or when there are so many."""

M = TypeVar("M", bound=Message)


class Outbox:
    """Messages of one worker. Methods may be called from any thread, and never wait for the network.

    Attributes:
        bell: a socket that can be read when there is something new; see `ring` and `silence`.
    """

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._repeated: dict[str, Message] = {}  # by kind, in the order in which they were sent
        self._steps: list[Event] = []  # that wait to be sent together
        self._steps_sent_at = -STEPS_S
        self._steps_lock = threading.Lock()
        self.bell, self._rope = socket.socketpair()
        self.bell.setblocking(False)
        self._rope.setblocking(False)

    def send(self, message: Message) -> None:
        """Send a message, once."""
        self._waiting.append(encode(message))
        self.ring()

    def send_repeatedly(self, message: Message, kind: str = "") -> None:
        """Send a message that holds until the next of its kind, and send it again whenever the connection is new.

        Args:
            kind: default: the name of the message's class.
        """
        kind = kind or type(message).__name__
        self._repeated.pop(kind, None)  # the order is that of sending
        self._repeated[kind] = message
        self.send(message)

    def repeated(self, kind: type[M]) -> M | None:
        """Return the message of this class that a new connection repeats."""
        return cast("M | None", self._repeated.get(kind.__name__))

    def forget(self, kind: type[Message]) -> None:
        """Repeat the message of this class no more: it is answered."""
        self._repeated.pop(kind.__name__, None)

    def forget_all(self) -> None:
        """Repeat nothing that was sent up to now."""
        self._repeated.clear()

    # -- events --------------------------------------------------------------------------------------

    def send_event(self, event: Event) -> None:
        """Send an event; one that is too large for that is not sent. Steps that come fast are sent together."""
        if isinstance(event, StepFinished) and event.number >= 0:
            with self._steps_lock:
                self._steps.append(event)
                is_due = len(self._steps) >= MOST_STEPS or time.monotonic() - self._steps_sent_at >= STEPS_S
            if is_due:
                self.send_steps()
            return
        self.send_steps()  # they come before it
        self._send_events([event])

    def _send_events(self, events: list[Event]) -> bool:
        """Send events of one kind together; return False if they are too large for that."""
        message = Happened(events=events)
        if len(encode(message)) > MAX_EVENT_BYTES:
            return False
        if events[0].number < 0:  # without a number a receiver cannot recognize a repetition
            self.send(message)
        else:
            self.send_repeatedly(message, type(events[0]).__name__)
        return True

    def send_steps(self) -> None:
        """Send the events of steps that wait."""
        with self._steps_lock:
            steps, self._steps = self._steps, []
            if not steps:
                return
            self._steps_sent_at = time.monotonic()
            if not self._send_events(steps):
                for step in steps:
                    self._send_events([step])

    # -- the connection's thread ---------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether everything was handed over."""
        return not self._waiting

    def hand_over(self, link: Link) -> None:
        """Hand messages over as long as the link takes them; one at which it fails stays."""
        while self._waiting and not link.wants_to_write:
            link.put(self._waiting[0])
            self._waiting.popleft()

    def repeat(self, link: Link) -> None:
        """Hand over what a new link repeats."""
        unsent = set(self._waiting)  # those follow, in their order
        for data in map(encode, list(self._repeated.values())):
            if data not in unsent:
                link.put(data)

    def ring(self) -> None:
        """Wake the thread that waits for `bell`."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._rope.send(b"\0")

    def silence(self) -> None:
        """Make `bell` wait for the next `ring`."""
        with contextlib.suppress(BlockingIOError):
            self.bell.recv(4096)
