"""A worker's thread that talks to the head, over one connection after the other, and what it has to say.

The thread sends heartbeats and what is in the outbox, and receives. When the connection breaks, it tries to connect
again for `RunSettings.head_away_s`, while the training goes on.

The head may miss messages while the connection is broken, or end with those that it has heard. So whenever the
connection is new, all that was sent by `Outbox.send_repeatedly` is sent again: of each kind the newest, also of events,
unless it was answered.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

from unisono.cluster.trust.invitation import shown
from unisono.core.errors import ProtocolError, RunStopped
from unisono.core.events import Event, StepFinished
from unisono.core.messages import Beat, Happened, Hello, Message, StepDone, decode, encode
from unisono.core.spec import WorkerSpec
from unisono.system.lifetime import parent_is_gone
from unisono.system.threads import NamedThread

if TYPE_CHECKING:
    from unisono.cluster.worker.beatpage import BeatSlot
    from unisono.cluster.worker.link import Link

__all__ = ["ConnectedWorker", "Connection", "Outbox"]

FLUSH_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 0.1
LATE_S: Final = 1.0
"""When a heartbeat goes out so much too late, this whole process stood still."""
MAX_EVENT_BYTES: Final = 1 << 20
STEPS_S: Final = 0.25
"""Steps that come faster than this are told together, after this time."""
MOST_STEPS: Final = 32
"""Or when there are so many."""

M = TypeVar("M", bound=Message)


class Outbox:
    """Messages of one worker. Methods may be called from any thread, and never wait for the network.

    Args:
        tells_each_step: steps that come fast are told one by one, for a head that decides by their times.

    Attributes:
        bell: a socket that can be read when there is something new; see `ring` and `silence`.
    """

    def __init__(self, *, tells_each_step: bool = False) -> None:
        self._step_s = 0.0 if tells_each_step else STEPS_S
        self._waiting: deque[bytes] = deque()
        self._repeated: dict[str, Message] = {}  # by kind, in the order in which they were sent
        self._steps: list[Event] = []  # that wait to be sent together
        self._steps_sent_at = -STEPS_S
        self._steps_lock = threading.Lock()
        self._done: deque[StepDone] = deque(maxlen=1)  # the newest step that is done, if it is not told yet
        self._tells_steps = False
        self._done_sent_at = -STEPS_S
        self.bell, self._rope = socket.socketpair()
        self.bell.setblocking(False)
        self._rope.setblocking(False)

    def send(self, message: Message) -> None:
        """Send a message, once; before it, the step that is done."""
        self._send_done()
        self._put(message)

    def _put(self, message: Message) -> None:
        self._waiting.append(encode(message))
        self.ring()

    def send_repeatedly(self, message: Message, kind: str = "") -> None:
        """Send a message that holds until the next of its kind, and send it again whenever the connection is new.

        Args:
            kind: default: the name of the message's class.
        """
        kind = kind or type(message).__name__
        self._send_done()
        self._repeat(message, kind)

    def _repeat(self, message: Message, kind: str) -> None:
        self._repeated.pop(kind, None)  # the order is that of sending
        self._repeated[kind] = message
        self._put(message)

    def repeated(self, kind: type[M]) -> M | None:
        """Return the message of this class that a new connection repeats."""
        return cast("M | None", self._repeated.get(kind.__name__))

    def forget(self, kind: type[Message]) -> None:
        """Repeat the message of this class no more: it is answered."""
        self._repeated.pop(kind.__name__, None)

    def forget_all(self) -> None:
        """Repeat nothing that was sent up to now."""
        self._repeated.clear()

    # -- steps ---------------------------------------------------------------------------------------

    def step_done(self, done: StepDone, *, tells: bool) -> None:
        """Take note of a step. To tell each of those that come fast would wake this worker's thread and the head again
        and again, on cores that compute; so they are told now and then, and before every other message.

        Args:
            tells: this worker tells of the steps for all; else it does only before another message of its own.
        """
        self._done.append(done)
        self._tells_steps = tells
        if tells and time.monotonic() - self._done_sent_at >= self._step_s:
            self._send_done()

    def tell_steps(self) -> None:
        """Send all that waits of steps."""
        if self._tells_steps:
            self._send_done()
        self.send_steps()

    def _send_done(self) -> None:
        with contextlib.suppress(IndexError):
            done = self._done.pop()
            self._done_sent_at = time.monotonic()
            if self._tells_steps:
                self._repeat(done, StepDone.__name__)
            else:
                self._put(done)

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


class ConnectedWorker(Protocol):
    """The worker (`unisono.cluster.worker.member.Member`), as `Connection` needs it. The connection's thread alone
    calls it.
    """

    @property
    def heartbeat_s(self) -> float | None:
        """Between two heartbeats; None: the head has not answered yet."""

    @property
    def is_stopped(self) -> bool:
        """The run is over for this worker."""

    def hello(self, address: str) -> Hello:
        """Return the first message of a connection, which reaches the head from this address."""

    def beat(self, now: float, stood_still_s: float) -> Beat:
        """Return the heartbeat to send.

        Args:
            stood_still_s: the whole process stood still for so long, up to ``now``.
        """

    def receive(self, message: Message) -> None:
        """Take a message of the head."""

    def broken(self, error: Exception) -> None:
        """Take note that the connection broke: nothing that was asked over it is answered."""

    def stop(self, error: RunStopped) -> None:
        """Take note that the run is over for this worker."""


class Connection:
    """Starts with `start`; ends with the run, or with `close`.

    Args:
        slot: where the worker leaves its heartbeats for its agent; None: they all go to the head itself.
    """

    def __init__(self, worker: ConnectedWorker, spec: WorkerSpec, outbox: Outbox, slot: BeatSlot | None) -> None:
        self._worker = worker
        self._spec = spec
        self._outbox = outbox
        self._slot = slot
        self._head = spec.head
        self._where = _open(spec.where)
        self._num_received = 0
        self._link: Link | None = None
        self._closing = False
        self._emptied = threading.Condition()
        self._thread = NamedThread(self._run, "unisono-member")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send the messages that are not sent yet (for a few seconds at most), and end the connection."""
        self._flush()
        self._closing = True
        self._outbox.ring()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(FLUSH_TIMEOUT_S)
        if self._slot is not None and not self._thread.is_alive():
            self._slot.close()

    def drop(self) -> None:
        """Close the connection in a forked child: it must not outlive this worker."""
        link = self._link
        if link is not None:
            link.sock.close()

    def _flush(self) -> None:
        """Wait until all messages are handed to the operating system."""
        self._outbox.tell_steps()
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        with self._emptied:
            while self._thread.is_alive() and not self._closing and (left := deadline - time.monotonic()) > 0:
                link = self._link
                if link is not None and self._outbox.is_empty and not link.wants_to_write:
                    return
                self._outbox.ring()
                self._emptied.wait(min(0.05, left))

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        """Connect to the head, again and again, until the run is over."""
        from unisono.cluster.worker.link import Refused  # a script that runs alone needs no WebSocket

        away_since = time.monotonic()
        tried_at = -RETRY_S
        try:
            while not self._closing and not self._worker.is_stopped:
                # Wait also where the head accepts connections and closes them at once.
                time.sleep(max(0.0, tried_at + RETRY_S - time.monotonic()))
                tried_at = time.monotonic()
                try:
                    link = self._dial()
                except Refused as refused:
                    self._worker.stop(RunStopped(f"the head rejects this worker: {refused}"))
                    return
                except OSError as error:
                    self._give_up_if_away(away_since, error)
                    continue
                num_received = self._num_received
                try:
                    self._talk(link)
                except (OSError, ProtocolError) as error:
                    if self._num_received > num_received:  # a relay without a head behind it sends nothing
                        away_since = time.monotonic()
                    self._worker.broken(error)
                    self._give_up_if_away(away_since, error)
                finally:
                    self._link = None
                    link.close()
        except Exception as error:  # a bug here must not leave the loop waiting for ever
            self._worker.stop(RunStopped(f"the connection to the head failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._note_empty()

    def _dial(self) -> Link:
        """Connect to the head that this worker's agent follows, and to no other: that may count this worker as lost.

        Raises:
            OSError: there is none, or no way to it.
        """
        from unisono.cluster.worker.link import Link

        head = self._find_head()
        if not head:
            raise ConnectionError("this worker's machine has lost the head")
        self._head = head
        link = Link.dial(head, self._spec.token)
        if self._find_head() != head:
            link.close()
            raise ConnectionError("this worker's machine now follows a different head")
        return link

    def _give_up_if_away(self, away_since: float, error: Exception) -> None:
        """Exit if the agent is gone; stop if the head has been out of reach for too long."""
        if parent_is_gone():
            os._exit(1)
        away_s = self._spec.run.settings.head_away_s
        if self._where < 0 and time.monotonic() - away_since > away_s:  # else the agent decides
            self._worker.stop(RunStopped(f"the head at {shown(self._head)} has been away for {away_s:.0f} s: {error}"))

    def _find_head(self) -> str:
        """Return the address of the head that this worker's agent follows; "": it looks for one."""
        if self._where < 0:
            return self._spec.head
        with contextlib.suppress(OSError):
            found, whole, _ = os.pread(self._where, 4096, 0).decode(errors="replace").partition("\n")
            if whole:
                return found
        return self._head

    def _talk(self, link: Link) -> None:
        """Send and receive over one connection until it ends."""
        outbox = self._outbox
        link.put(encode(self._worker.hello(link.address)))
        if self._worker.heartbeat_s is not None:  # not the first connection
            outbox.repeat(link)
        self._link = link
        next_beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(outbox.bell, selectors.EVENT_READ)
            selector.register(link.sock, selectors.EVENT_READ)
            while not self._closing:
                now, heartbeat_s = time.monotonic(), self._worker.heartbeat_s
                if heartbeat_s is not None and now >= next_beat:
                    self._beat(link, now, next_beat)
                    # With the other workers of this machine, so that their agent can report all of them just then.
                    next_beat = now + heartbeat_s - now % heartbeat_s
                    outbox.tell_steps()
                outbox.hand_over(link)
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_to_write else 0)
                selector.modify(link.sock, events)
                if outbox.is_empty and not link.wants_to_write:
                    self._note_empty()
                selector.select(max(0.0, next_beat - now) if heartbeat_s is not None else None)
                outbox.silence()
                link.push()
                for data in link.take():
                    message = decode(data)
                    self._num_received += 1
                    self._worker.receive(message)

    def _beat(self, link: Link, now: float, due: float) -> None:
        """Send a heartbeat, by the agent if there is one that reports it.

        Raises:
            ConnectionError: the head at the other end is not this worker's head any more.
        """
        if parent_is_gone():
            os._exit(1)
        if self._find_head() not in ("", self._head):
            raise ConnectionError("this worker's machine now follows a different head")
        late_s = now - due
        # The process was stopped, or a call held the interpreter: that is no hang.
        beat = encode(self._worker.beat(now, late_s if late_s > LATE_S else 0.0))
        if self._slot is None or not self._slot.leave(beat, now):
            link.put(beat)

    def _note_empty(self) -> None:
        with self._emptied:
            self._emptied.notify_all()


def _open(path: str) -> int:
    """Return a descriptor of this file; -1: there is none that this process may read."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path else -1
    return -1
