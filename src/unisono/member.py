"""A worker's connection to the head: one thread, which the training loop never waits for without a deadline.

The thread sends heartbeats with the loop's progress, receives notices and wakes whoever waits for one. When the
connection breaks, it connects again for `Door.head_away_s`, while training goes on in the generation that it has. What
the head may have missed meanwhile is said again: the last `Ready`, `Holding`, `StepDone`, `Leaving` or `Finished`, and
a `Suspect` without an answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import selectors
import socket
import threading
import time
import traceback as tracebacks
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from unisono.door import Door
from unisono.errors import (
    DeadlineExceeded,
    DivergenceError,
    PeerLost,
    ProtocolError,
    RunStopped,
    UnisonoError,
    UsageError,
)
from unisono.lifetime import parent_is_gone
from unisono.messages import (
    Beat,
    Ended,
    Failed,
    Finished,
    Hello,
    Holding,
    Leaving,
    Left,
    MemberInfo,
    Message,
    Notice,
    Ready,
    StepDone,
    StoreAnswer,
    StoreCall,
    Suspect,
    Told,
    Welcome,
    WorkerLate,
    decode,
    encode,
)

if TYPE_CHECKING:
    from unisono.link import Link

__all__ = ["Member", "current", "told", "trimmed_traceback"]

FLUSH_TIMEOUT_S = 5.0
RETRY_S = 0.1
LATE_S = 1.0  # a heartbeat that goes out so much late says that this whole process stood still
LONG_S = 0.1  # after so long at a micro-batch, a heartbeat says which samples it has
NUM_SHOWN = 9  # samples that a heartbeat names: one more than a message shows
STORE_GRACE_S = 2.0  # beyond the call's own timeout, for the answer to arrive

_current: Member | None = None


def current() -> Member | None:
    """This process's member of a run; None when the script runs alone."""
    return _current


def told() -> Door:
    """What this process's agent has told it; the default values when the script runs alone."""
    return _current.door if _current is not None else Door()


class _Call:
    """A `StoreCall` that waits for its answer."""

    def __init__(self, generation: int | None) -> None:
        self.generation = generation
        self.done = threading.Event()
        self.answer: StoreAnswer | None = None
        self.error: Exception | None = None

    def fail(self, error: Exception) -> None:
        self.error = error
        self.done.set()


class _Place:
    """Where the training loop is."""

    def __init__(
        self,
        phase: int = -1,
        step: int = -1,
        microbatch: int = -1,
        evaluates: bool = False,
        samples: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self.phase = phase
        self.step = step
        self.microbatch = microbatch
        self.evaluates = evaluates
        self._samples = samples
        self._shown: list[int] | None = None

    def shown(self) -> list[int]:
        """The first samples of the micro-batch; asked for once."""
        if self._shown is None:
            self._shown = list(self._samples())[:NUM_SHOWN] if self._samples is not None else []
        return self._shown


class Member:
    """This worker in the run. Made by the worker's entry point; the library finds it with `current`.

    Methods may be called from any thread. None of them waits for the network, except where a timeout is named.

    Args:
        door: from the agent.
        info: of this worker; its ``address`` is filled in with the interface that reaches the head.
        fingerprint: what equal bits depend on.
        board: its page in shared memory (`unisono.exchange.pages.WorkerPage`), kept for the library.
        script: checksum of its script's text.
    """

    def __init__(
        self, door: Door, info: MemberInfo, fingerprint: dict[str, str], board: Any = None, *, script: str = ""
    ) -> None:
        self.door = door
        self.info = info
        self.worker_id = info.worker_id
        self.board = board
        self._fingerprint = fingerprint
        self._script = script
        self._changed = threading.Condition()
        self._welcome: Welcome | None = None
        self._notice: Notice | None = None
        self._stopped: RunStopped | None = None
        self._ended: Ended | None = None
        self._callbacks: list[Callable[[Notice | None], None]] = []
        self._outbox: deque[bytes] = deque()
        self._standing: dict[str, Message] = {}  # what is said again to a head that may not have heard it
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._num_heard = 0
        self._generation = 0
        self._place = _Place()
        self._loop: tuple[int, int] | None = None
        self._progress = 0
        self._num_steps = 0
        self._progress_at = time.monotonic()
        self._is_waiting = False
        self._has_run = False
        self._has_failed = False
        self.has_left = False
        self._closing = False
        self._link: Link | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="unisono-member", daemon=True)
        self._pid = os.getpid()

    # -- life ----------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 30.0) -> Member:
        """Say hello to the head and become `current`. Blocks until the head has answered.

        Raises:
            RunStopped: the head does not want this worker. DeadlineExceeded: no answer in time.
        """
        global _current
        self._thread.start()
        with self._changed:
            answered = self._changed.wait_for(lambda: self._welcome or self._stopped, timeout_s)
        if self._stopped is not None:
            raise self._stopped
        if not answered:
            raise DeadlineExceeded(f"the head at {self.door.head} has not answered for {timeout_s:.0f} s")
        _current = self
        os.register_at_fork(after_in_child=self._forget)
        return self

    @property
    def arithmetic(self) -> int:
        """A checksum of this worker's fingerprint, without that of the script."""
        facts = sorted(item for item in self._fingerprint.items() if "script" not in item[0])
        return zlib.crc32(repr(facts).encode())

    @property
    def welcome(self) -> Welcome:
        assert self._welcome is not None, "connect() has returned"
        return self._welcome

    def close(self) -> None:
        """Send what is still to be sent (a few seconds at most) and end the connection."""
        global _current
        self._flush()
        self._closing = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(FLUSH_TIMEOUT_S)
        if _current is self:
            _current = None

    # -- what the loop says --------------------------------------------------------------------------

    def begin_run(self) -> None:
        """The script makes its `Run`.

        Raises:
            UsageError: it has made one before; the other workers are perhaps still in that.
        """
        if self._has_run:
            raise UsageError(
                "a script makes one unisono.Run under `unisono run`, and this is the second; call run.steps again in "
                "the first, or start the script once for each training, with an argument that says which"
            )
        self._has_run = True

    def ready(self, phase: int) -> None:
        """The script has reached call number ``phase`` of its training loop."""
        self._say(Ready(phase=phase))

    def holding(self, generation: int) -> None:
        """This worker has taken this generation and holds the run's state."""
        self._generation = generation
        self._say(Holding(generation=generation))

    def at(
        self,
        *,
        phase: int,
        step: int,
        microbatch: int,
        evaluates: bool = False,
        samples: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Progress; goes out with the next heartbeat. Cheap.

        Args:
            evaluates: ``microbatch`` is a batch of an evaluation.
            samples: gives the indices of the micro-batch's samples. Called in the connection's thread, when it takes
                long: whoever hangs cannot say what it hangs in.
        """
        if (self._place.phase, self._place.step) != (phase, step):
            self._num_steps += 1
        self._place = _Place(phase, step, microbatch, evaluates, samples)
        self._progress += 1
        self._progress_at = time.monotonic()

    def waiting(self, flag: bool) -> None:
        """Whether the loop waits for others: then it cannot be blamed. Cheap."""
        self._is_waiting = flag
        self._progress += 1
        self._progress_at = time.monotonic()

    def suspect(self, generation: int, reason: str, peers: Sequence[str] = ()) -> None:
        """The exchange of this generation broke, and maybe the head does not know."""
        self._say(Suspect(generation=generation, reason=reason, peers=list(peers)))

    def in_loop(self, place: tuple[int, int] | None) -> None:
        """The training loop is at this step (its phase and number); None: it has come to its end. Cheap."""
        self._loop = place

    def leaving(self, phase: int, step: int, *, goes_on: bool = False) -> None:
        """The script is at the end of its ``with unisono.Run(...)``, and takes no part in this step.

        Args:
            goes_on: it is not; it has left one training loop there, and begins another.
        """
        self._say(Leaving(phase=phase, step=step, goes_on=goes_on))

    def step_done(self, done: StepDone) -> None:
        """A step is committed, and this worker is the one that says so."""
        self._say(done)

    def finished(self) -> None:
        """The script has returned."""
        if self._loop is None:
            self._say(Finished())
        else:  # from the middle of the loop
            phase, step = self._loop
            self._say(Finished(phase=phase, step=step + 1))

    def left(self) -> None:
        """Drained, and out at a step boundary."""
        self.has_left = True
        self._standing.clear()
        self.send(Left())

    def failed(
        self,
        error: BaseException,
        *,
        step: int = -1,
        microbatch: int = -1,
        samples: Sequence[int] = (),
        retry: bool = False,
        exit_code: int = 1,
    ) -> None:
        """The script raised ``error``. Only the first report counts, so who knows most about it says it first."""
        if self._has_failed:
            return
        self._has_failed = True
        self._standing.clear()
        self.send(
            Failed(
                error=_in_one_line(error),
                traceback="" if isinstance(error, SystemExit) else trimmed_traceback(error),
                step=step,
                microbatch=microbatch,
                samples=list(samples),
                retry=retry,
                exit_code=exit_code,
            )
        )

    def send(self, message: Message) -> None:
        """Send any other message, soon."""
        self._outbox.append(encode(message))
        self._wake()

    # -- what the head says --------------------------------------------------------------------------

    def latest(self) -> Notice | None:
        """The newest notice."""
        return self._notice

    def ended(self) -> RunStopped | None:
        """Why there is nothing left to do, if that is so."""
        return self._stopped

    def end(self) -> Ended | None:
        """The head's own words for it, if it has said them."""
        return self._ended

    def wait_notice(self, after: int, timeout_s: float | None = None) -> Notice:
        """The newest notice with a generation above ``after``.

        Raises:
            RunStopped: the run is over. DeadlineExceeded: none within ``timeout_s``.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped is not None or (self._notice is not None and self._notice.generation > after),
                timeout_s,
            )
            if self._stopped is not None:
                raise self._stopped
            if self._notice is None or self._notice.generation <= after:
                raise DeadlineExceeded(f"no notice after generation {after} within {timeout_s} s")
            return self._notice

    def wait_ended(self, timeout_s: float | None = None) -> RunStopped | None:
        """Block until the run is over; None after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped is not None, timeout_s)
        return self._stopped

    def on_notice(self, callback: Callable[[Notice | None], None]) -> None:
        """Call ``callback`` in the connection's thread with every notice, and with None when the run has `ended`."""
        self._callbacks.append(callback)

    def call_store(
        self,
        operation: str,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        amount: int = 0,
        timeout_s: float = 60.0,
        generation: int | None = None,
    ) -> StoreAnswer:
        """One operation on the head's key-value store. Blocks up to ``timeout_s``.

        Args:
            generation: for whose sake: the call ends when an immediate notice of a later one arrives.

        Raises:
            PeerLost: that notice has arrived. DeadlineExceeded: a key did not come in time.
            RunStopped: the run is over. ProtocolError: the store does not know such a call.
        """
        if self._stopped is not None:
            raise self._stopped
        number = next(self._numbers)
        call = _Call(generation)
        self._calls[number] = call
        notice = self._notice
        if notice is not None and notice.immediate and generation is not None and notice.generation > generation:
            call.fail(PeerLost(notice.reason))
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
            self.send(request)
        try:
            call.done.wait(timeout_s + STORE_GRACE_S)
        finally:
            self._calls.pop(number, None)
        if call.error is not None:
            raise call.error
        if call.answer is None:
            raise DeadlineExceeded(f"the head has not answered {operation} {list(keys)[:3]} for {timeout_s:.1f} s")
        if call.answer.error.startswith("timeout"):
            raise DeadlineExceeded(call.answer.error)
        if call.answer.error:
            raise ProtocolError(call.answer.error)
        return call.answer

    # -- the thread ----------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        """Send something that is true until the next of its kind: a head that comes back hears it again."""
        self._standing[type(message).__name__] = message
        self.send(message)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"\0")

    def _flush(self) -> None:
        """Wait until everything is with the operating system."""
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        with self._changed:
            while self._thread.is_alive() and not self._closing and (left := deadline - time.monotonic()) > 0:
                link = self._link
                if link is not None and not self._outbox and not link.wants_to_write:
                    return
                self._wake()
                self._changed.wait(min(0.05, left))

    def _run(self) -> None:
        from unisono.link import Link, Refused  # a script that runs alone needs no WebSocket

        away_since = time.monotonic()
        tried_at = -RETRY_S
        try:
            while not self._closing and self._stopped is None:
                # Also where the head takes the connection and closes it at once.
                time.sleep(max(0.0, tried_at + RETRY_S - time.monotonic()))
                tried_at = time.monotonic()
                try:
                    link = Link(self.door.head, self.door.token)
                except Refused as refused:
                    self._stop(RunStopped(f"the head refuses this worker: {refused}"))
                    return
                except OSError as error:
                    self._look_around(away_since, error)
                    continue
                num_heard = self._num_heard
                try:
                    self._speak(link)
                except (OSError, ProtocolError) as error:
                    if self._num_heard > num_heard:  # what takes connections and says nothing is no head
                        away_since = time.monotonic()
                    self._drop_calls(PeerLost(f"the connection to the head broke: {error}"))
                    self._look_around(away_since, error)
                finally:
                    self._link = None
                    link.close()
        except Exception as error:  # a bug here must not leave the loop waiting for ever
            self._stop(RunStopped(f"the connection to the head failed: {type(error).__name__}: {error}"))
            raise
        finally:
            with self._changed:
                self._changed.notify_all()

    def _look_around(self, away_since: float, error: Exception) -> None:
        if parent_is_gone():
            os._exit(1)
        if time.monotonic() - away_since > self.door.head_away_s:
            self._stop(
                RunStopped(f"the head at {self.door.head} has been away for {self.door.head_away_s:.0f} s: {error}")
            )

    def _speak(self, link: Link) -> None:
        """Talk over one connection until it ends."""
        if self.info.address != link.address:
            self.info = msgspec.structs.replace(self.info, address=link.address)
        hello = Hello(info=self.info, fingerprint=self._fingerprint, script=self._script, generation=self._generation)
        link.put(encode(hello))
        if self._welcome is not None:  # not the first connection
            for message in list(self._standing.values()):
                link.put(encode(message))
        self._link = link
        next_beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(link.sock, selectors.EVENT_READ)
            while not self._closing:
                now = time.monotonic()
                if self._welcome is not None and now >= next_beat:
                    if parent_is_gone():
                        os._exit(1)
                    if now - next_beat > LATE_S:  # it was stopped, or one call held the interpreter: not a hang
                        self._progress_at = min(self._progress_at + now - next_beat, now)
                    link.put(encode(self._beat(now)))
                    next_beat = now + self._welcome.heartbeat_s
                while self._outbox and not link.wants_to_write:
                    link.put(self._outbox[0])
                    self._outbox.popleft()
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_to_write else 0)
                selector.modify(link.sock, events)
                if not self._outbox and not link.wants_to_write:
                    with self._changed:
                        self._changed.notify_all()
                selector.select(max(0.0, next_beat - now) if self._welcome is not None else None)
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(4096)
                link.push()
                for data in link.take():
                    self._hear(decode(data))

    def _beat(self, now: float) -> Beat:
        place, seconds_at = self._place, now - self._progress_at
        return Beat(
            generation=self._generation,
            phase=place.phase,
            step=place.step,
            microbatch=place.microbatch,
            progress=self._progress,
            waiting=self._is_waiting,
            num_steps=self._num_steps,
            seconds_at=seconds_at,
            evaluates=place.evaluates,
            samples=place.shown() if seconds_at > LONG_S else [],
        )

    def _hear(self, message: Message) -> None:
        self._num_heard += 1
        match message:
            case Notice():
                self._notify(message)
            case StoreAnswer():
                call = self._calls.get(message.call)
                if call is not None:
                    call.answer = message
                    call.done.set()
            case Welcome():
                with self._changed:
                    self._welcome = message
                    self._changed.notify_all()
            case Ended():
                self._ended = message
                self._stop(RunStopped(message.reason))
            case WorkerLate():
                _show_stacks(self.worker_id)
            case Told():
                if self._welcome is None:
                    self._stop(RunStopped(message.text))
            case _:
                raise ProtocolError(f"the head said {type(message).__name__} to a worker")

    def _notify(self, notice: Notice) -> None:
        with self._changed:
            if self._notice is not None and notice.generation <= self._notice.generation:
                return
            self._notice = notice
            self._standing.pop(Suspect.__name__, None)  # this is the answer
            self._changed.notify_all()
        if notice.immediate:
            for call in list(self._calls.values()):
                if call.generation is not None and call.generation < notice.generation:
                    call.fail(PeerLost(notice.reason))
        for callback in list(self._callbacks):
            callback(notice)

    def _stop(self, error: RunStopped) -> None:
        with self._changed:
            if self._stopped is not None:
                return
            self._stopped = error
            self._changed.notify_all()
        self._drop_calls(error)
        for callback in list(self._callbacks):
            callback(None)

    def _drop_calls(self, error: UnisonoError) -> None:
        for call in list(self._calls.values()):
            call.fail(error)

    def _forget(self) -> None:
        """In a forked child: it is no member, and must not keep the connection open when this worker dies."""
        global _current
        if _current is self:
            _current = None
        link = self._link
        if link is not None:
            link.sock.close()


def _show_stacks(worker_id: str) -> None:
    """Write where each thread of this process is to its standard error: the file, whatever ``sys.stderr`` is."""
    with contextlib.suppress(OSError):
        os.write(2, f"{worker_id} is stuck here:\n".encode())
        faulthandler.dump_traceback(2, all_threads=True)


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def trimmed_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, without this library's frames at its head.

    Of an error in the use of the library, those at its end are left out as well: what is to be changed stands above.
    """
    own = Path(__file__).parent
    found: TracebackType | None = error.__traceback__
    while found is not None and _is_inside(found.tb_frame.f_code.co_filename, own):
        found = found.tb_next
    shown = found or error.__traceback__
    lines = tracebacks.TracebackException(type(error), error, shown)
    if isinstance(error, (UsageError, DivergenceError)):
        frames = list(lines.stack)
        while frames and _is_inside(frames[-1].filename, own):
            frames.pop()
        if frames:
            lines.stack = tracebacks.StackSummary.from_list(frames)
    return "".join(lines.format())


def _is_inside(filename: str, folder: Path) -> bool:
    return filename.startswith(("<frozen ", str(folder) + os.sep)) or Path(filename).name == "runpy.py"
