"""A worker's connection to the head: one thread, for which the training loop never waits without a deadline.

The thread sends heartbeats, receives notices, and wakes the threads that wait for one. When the connection breaks, the
thread tries to connect again for `RunSpec.head_away_s`, while training goes on in the current generation. The head may
have missed messages meanwhile, so the thread repeats the last `Ready`, `Holding`, `StepDone`, `Leaving` and
`Finished`, the last event of each kind, and a `Suspect` or a `TalkCall` that has no answer yet.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from unisono.decisions.following import learn_term
from unisono.errors import DeadlineExceeded, DivergenceError, PeerLost, ProtocolError, RunStopped, UsageError
from unisono.evaluationcalls import EvaluationCalls
from unisono.events import StepFinished
from unisono.invitation import shown
from unisono.lifetime import parent_is_gone
from unisono.messages import (
    Announcement,
    Convicted,
    Ended,
    EvaluationAnswer,
    EvaluationDone,
    EvaluationEnded,
    EvaluationsOpen,
    EvaluationWanted,
    Failed,
    Finished,
    Happened,
    Heads,
    Hello,
    Holding,
    Inquire,
    Leaving,
    Left,
    MemberInfo,
    Message,
    Notice,
    Ready,
    Statement,
    StepDone,
    Steps,
    StoreAnswer,
    Suspect,
    TalkAnswer,
    TalkCall,
    TalkDone,
    Welcome,
    WorkerLate,
    decode,
    encode,
)
from unisono.problems.evidence import shown_environment
from unisono.problems.kinds import kind_of
from unisono.problems.witness import about_process, main_place, own_stacks
from unisono.progress import Progress
from unisono.spec import RunSpec, WorkerSpec, is_evaluator
from unisono.stacks import in_one_line, show_stacks, trimmed_traceback
from unisono.storecalls import StoreCalls
from unisono.words import position_words

if TYPE_CHECKING:
    from unisono.beatpage import Slot
    from unisono.link import Link

__all__ = ["Member", "current", "spec"]

FLUSH_TIMEOUT_S = 5.0
RETRY_S = 0.1
LATE_S = 1.0  # when a heartbeat goes out so much too late, this whole process stood still
MAX_EVENT_BYTES = 1 << 20
STEPS_S = 0.25
"""Events of steps that come faster than this are sent together, after this time."""
MOST_STEPS = 32
"""Or when there are so many."""

_current: Member | None = None
_alone = WorkerSpec()


def current() -> Member | None:
    """This process's member of a run; None when the script runs alone."""
    return _current


def spec() -> WorkerSpec:
    """Return this process's settings as a worker; when the script runs alone, those that `settle` was given, or the
    default values.
    """
    return _current.spec if _current is not None else _alone


def settle(run: RunSpec) -> None:
    """Give this process the settings of a run in which its script is to run alone."""
    global _alone
    _alone = WorkerSpec(run=run)


@dataclass(frozen=True)
class _Raised:
    """An error of the script's, and the micro-batch that raised it."""

    error: BaseException
    step: int
    microbatch: int
    samples: list[int]
    retry: bool


class Member:
    """This worker, as a member of the run. The worker's entry point makes it; the library finds it with `current`.

    Methods may be called from any thread. None of them waits for the network, except those with a timeout.

    Args:
        spec: settings, from the agent.
        info: describes this worker; ``address`` is filled in: the one that ``spec`` names, or the one that reaches the
            head.
        fingerprint: everything that equal bits depend on.
        page: its page in shared memory (`unisono.exchange.pages.WorkerPage`), kept for the library.
        script: checksum of its script's text.
        slot: where it leaves its heartbeats for its agent; None: it always sends them to the head itself.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        info: MemberInfo,
        fingerprint: dict[str, str],
        page: Any = None,
        *,
        script: str = "",
        slot: Slot | None = None,
    ) -> None:
        self.spec = spec
        self._head_away_s = spec.run.head_away_s
        self.info = info
        self.worker_id = info.worker_id
        self.page = page
        self._fingerprint = fingerprint
        self._script = script
        self._slot = slot
        self._changed = threading.Condition()
        self._welcome: Welcome | None = None
        self._notice: Notice | None = None
        self._stopped: RunStopped | None = None
        self._ended: Ended | None = None
        self._callbacks: list[Callable[[Notice | None], None]] = []
        self._outbox: deque[bytes] = deque()
        self._steps: list[Happened] = []  # that wait to be sent together
        self._steps_sent_at = -STEPS_S
        self._steps_lock = threading.Lock()
        self._repeated: dict[str, Message] = {}  # the last one of each kind that a new connection repeats
        self._store_calls = StoreCalls(self.send)
        self.evaluations = EvaluationCalls(self._send_repeatedly)
        self._talk_answer: TalkAnswer | None = None
        self._num_received = 0
        self._generation = 0
        self._term = 0
        self._branch = ""
        self._head = spec.head
        self._where = _open(spec.where)
        self._progress = Progress()
        self._loop: tuple[int, int] | None = None
        self._has_run = False
        self._has_failed = False
        self._raised: _Raised | None = None
        self._explained: tuple[BaseException | None, str, str, str] = (None, "", "", "")
        self.has_left = False
        self.may_write = True
        """Whether this side of the run writes into the run's directory; False where another side does."""
        self._closing = False
        self._link: Link | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="unisono-member", daemon=True)
        self._pid = os.getpid()

    # -- life ----------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 30.0) -> Member:
        """Say hello to the head, and become `current`. Blocks until the head has answered.

        Raises:
            RunStopped: the head refuses this worker. DeadlineExceeded: no answer in time.
        """
        global _current
        self._thread.start()
        with self._changed:
            answered = self._changed.wait_for(lambda: self._welcome or self._stopped, timeout_s)
        if self._stopped is not None:
            raise self._stopped
        if not answered:
            raise DeadlineExceeded(f"the head at {shown(self.spec.head)} has not answered for {timeout_s:.0f} s")
        _current = self
        os.register_at_fork(after_in_child=self._forget)
        return self

    @property
    def is_evaluator(self) -> bool:
        """Whether it follows the run to evaluate, and never trains."""
        return is_evaluator(self.worker_id)

    @property
    def arithmetic(self) -> int:
        """A checksum of this worker's fingerprint; the script does not count."""
        items = sorted(item for item in self._fingerprint.items() if "script" not in item[0])
        return zlib.crc32(repr(items).encode())

    @property
    def welcome(self) -> Welcome:
        """The head's answer to the first hello."""
        assert self._welcome is not None, "connect() has returned"
        return self._welcome

    def close(self) -> None:
        """Send the messages that are not sent yet (for a few seconds at most), and end the connection."""
        global _current
        self._flush()
        self._closing = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(FLUSH_TIMEOUT_S)
        if self._slot is not None and not self._thread.is_alive():
            self._slot.close()
        if _current is self:
            _current = None

    # -- messages to the head ------------------------------------------------------------------------

    def call_others(self, number: int, kind: str, value: bytes = b"") -> TalkAnswer:
        """Make one of the calls before the training (`unisono.messages.TalkCall`). Blocks until it is decided.

        Raises:
            RunStopped: the run is over.
        """
        self._send_repeatedly(TalkCall(number=number, kind=kind, value=value))
        with self._changed:
            while self._stopped is None and (self._talk_answer is None or self._talk_answer.number != number):
                self._changed.wait(1.0)
            if self._stopped is not None:
                raise self._stopped
            assert self._talk_answer is not None
            answer, self._talk_answer = self._talk_answer, None
            return answer

    def was_first(self, number: int, *, ok: bool) -> None:
        """Report the end of a block of ``run.main_first`` that this worker was to run before the others."""
        self._send_repeatedly(TalkDone(number=number, ok=ok))

    def begin_run(self) -> None:
        """Note that the script makes its `Run`. Nothing is sent.

        Raises:
            UsageError: the script has made one before, in which the other workers may still be.
        """
        if self._has_run:
            raise UsageError(
                "a script makes one unisono.Run under `unisono run`, and this is the second; call run.steps again in "
                "the first, or start the script once for each training, with an argument that says which"
            )
        self._has_run = True

    def ready(self, phase: int) -> None:
        """Report that the script has reached call number ``phase`` of ``run.steps``."""
        self._send_repeatedly(Ready(phase=phase))

    def holding(self, generation: int) -> None:
        """Report that this worker has entered this generation and holds the run's state."""
        self._generation = generation
        self._send_repeatedly(Holding(generation=generation))

    def at(
        self,
        *,
        phase: int,
        step: int,
        microbatch: int,
        evaluates: bool = False,
        samples: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Report the loop's position, with the next heartbeat. Cheap.

        Args:
            evaluates: ``microbatch`` is a batch of an evaluation.
            samples: returns the indices of the micro-batch's samples. Called in the connection's thread when the
                micro-batch takes long: a loop that hangs cannot report them itself.
        """
        self._progress.at(phase, step, microbatch, evaluates, samples)

    def waiting(self, flag: bool) -> None:
        """Report whether the loop waits for other workers, with the next heartbeat. A loop that waits is not late.
        Cheap.
        """
        self._progress.waiting(flag)

    def in_round(self, number: int, title: str) -> None:
        """Report the round in which the loop waits, with the next heartbeat; -1: it is in none. Cheap."""
        self._progress.in_round(number, title)

    def suspect(self, generation: int, reason: str, peers: Sequence[str] = ()) -> None:
        """Report that the exchange of this generation broke; the head may not know the cause.

        Args:
            peers: ids of the workers that this one waited for, if it knows them.
        """
        self._send_repeatedly(Suspect(generation=generation, reason=reason, peers=list(peers)))

    def convict(self, convicted: Convicted) -> None:
        """Report that most members have found workers to compute wrong values."""
        self._send_repeatedly(convicted)

    def evaluated(self, number: int, totals: bytes = b"", error: str = "") -> None:
        """Report, as an evaluator, the totals of an evaluation, or why there are none."""
        self._send_repeatedly(EvaluationDone(number=number, totals=totals, error=error))

    def evaluations_open(self, numbers: Sequence[int], below: int) -> None:
        """Report that all members know the totals of all evaluations below a number, but of these."""
        self._send_repeatedly(EvaluationsOpen(numbers=list(numbers), below=below))

    def in_loop(self, position: tuple[int, int] | None) -> None:
        """Note the training loop's phase and step, for `finished`. None: the loop has come to its end. Cheap."""
        self._loop = position

    def leaving(self, phase: int, step: int, *, goes_on: bool = False) -> None:
        """Report that the script has left the training loop and takes no part in this step.

        Args:
            goes_on: the script begins another training loop. Otherwise it is at the end of ``with unisono.Run(...)``.
        """
        self._send_repeatedly(Leaving(phase=phase, step=step, goes_on=goes_on))

    def step_done(self, done: StepDone) -> None:
        """Report a committed step. One worker does this for all."""
        self._send_repeatedly(done)

    def happened(self, message: Happened) -> None:
        """Send an event to the head, for the sinks of all machines; an event that is too large for that is not sent.

        Steps that come fast are sent together, a moment later.
        """
        if isinstance(message.event, StepFinished) and message.number >= 0:
            with self._steps_lock:
                self._steps.append(message)
                is_due = len(self._steps) >= MOST_STEPS or time.monotonic() - self._steps_sent_at >= STEPS_S
            if is_due:
                self._send_steps()
            return
        self._send_steps()  # they come before it
        if len(encode(message)) > MAX_EVENT_BYTES:
            return
        if message.number < 0:  # without a number a receiver cannot recognize a repetition
            self.send(message)
        else:
            self._send_repeatedly(message, type(message.event).__name__)

    def _send_steps(self) -> None:
        """Send the events of steps that wait. Called by the training loop, or by the connection's thread."""
        with self._steps_lock:
            steps, self._steps = self._steps, []
            if not steps:
                return
            self._steps_sent_at = time.monotonic()
            message: Message = Steps(steps=steps) if len(steps) > 1 else steps[0]
            if len(encode(message)) <= MAX_EVENT_BYTES:
                self._send_repeatedly(message, StepFinished.__name__)
                return
            for step in steps:
                if len(encode(step)) <= MAX_EVENT_BYTES:
                    self._send_repeatedly(step, StepFinished.__name__)

    def finished(self) -> None:
        """Report that the script has returned."""
        if self._loop is None:
            self._send_repeatedly(Finished())
        else:  # from the middle of the loop
            phase, step = self._loop
            self._send_repeatedly(Finished(phase=phase, step=step + 1))

    def left(self) -> None:
        """Report that this worker was asked to leave, and has left at a step boundary."""
        self.has_left = True
        self._repeated.clear()
        self.send(Left())

    def raised_in(
        self, error: BaseException, *, step: int, microbatch: int, samples: Sequence[int], retry: bool = True
    ) -> None:
        """Note that computing a micro-batch raised ``error``.

        Args:
            retry: if that ends the script, another worker tries the micro-batch.
        """
        self._raised = _Raised(error, step, microbatch, list(samples), retry)

    def explained(self, error: BaseException, kind: str, detail: str, advice: str) -> None:
        """Note what this worker has found out about an error, for its report."""
        self._explained = (error, kind, detail, advice)

    def failed(self, error: BaseException, *, exit_code: int = 1) -> None:
        """Report that ``error`` has ended the script. Only the first report counts."""
        if self._has_failed:
            return
        self._has_failed = True
        self._repeated.clear()
        raised = self._raised if self._raised is not None and self._raised.error is error else None
        known, kind, detail, advice = self._explained
        if known is not error:
            kind, detail, advice = kind_of(error), "", ""
        self.send(
            Failed(
                error=in_one_line(error),
                traceback="" if isinstance(error, SystemExit) else trimmed_traceback(error),
                step=raised.step if raised is not None else -1,
                microbatch=raised.microbatch if raised is not None else -1,
                samples=raised.samples if raised is not None else [],
                retry=raised is not None and raised.retry,
                exit_code=exit_code,
                sound=error.sound if isinstance(error, DivergenceError) else -1,
                kind=kind,
                detail=detail,
                advice=advice,
            )
        )

    def send(self, message: Message) -> None:
        """Send a message, once. Does not wait until it is sent."""
        self._outbox.append(encode(message))
        self._wake()

    def _send_repeatedly(self, message: Message, kind: str = "") -> None:
        """Send a message that holds until the next of its kind, and send it again whenever the connection is new."""
        kind = kind or type(message).__name__
        self._repeated.pop(kind, None)  # the order is that of sending
        self._repeated[kind] = message
        self.send(message)

    # -- messages from the head ----------------------------------------------------------------------

    def latest(self) -> Notice | None:
        """Return the newest notice."""
        return self._notice

    def ended(self) -> RunStopped | None:
        """Return why the run is over for this worker; None: it is not."""
        return self._stopped

    def end(self) -> Ended | None:
        """Return the head's message that the run is over; None: there was none."""
        return self._ended

    def wait_notice(self, after: int, timeout_s: float | None = None) -> Notice:
        """Wait for a notice with a generation above ``after``, and return the newest one.

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
        """Wait until the run is over, and return why; None after ``timeout_s``."""
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
        """Do one operation on the head's key-value store, and return the answer. Blocks up to ``timeout_s``.

        Args:
            generation: the call ends when an immediate notice of a later generation arrives.

        Raises:
            PeerLost: that notice has arrived. DeadlineExceeded: a key did not come in time.
            RunStopped: the run is over. ProtocolError: the store does not know such a call.
        """
        if self._stopped is not None:
            raise self._stopped
        return self._store_calls.call(operation, keys, values, amount, timeout_s, generation)

    # -- the thread ----------------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"\0")

    def _flush(self) -> None:
        """Wait until all messages are handed to the operating system."""
        self._send_steps()
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        with self._changed:
            while self._thread.is_alive() and not self._closing and (left := deadline - time.monotonic()) > 0:
                link = self._link
                if link is not None and not self._outbox and not link.wants_to_write:
                    return
                self._wake()
                self._changed.wait(min(0.05, left))

    def _run(self) -> None:
        """Connect to the head, again and again, until the run is over."""
        from unisono.link import Link, Refused  # a script that runs alone needs no WebSocket

        away_since = time.monotonic()
        tried_at = -RETRY_S
        try:
            while not self._closing and self._stopped is None:
                # Wait also where the head accepts connections and closes them at once.
                time.sleep(max(0.0, tried_at + RETRY_S - time.monotonic()))
                tried_at = time.monotonic()
                try:
                    self._head = self._find_head()
                    link = Link.dial(self._head, self.spec.token)
                except Refused as refused:
                    self._stop(RunStopped(f"the head refuses this worker: {refused}"))
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
                    self._store_calls.fail_all(PeerLost(f"the connection to the head broke: {error}"))
                    self._give_up_if_away(away_since, error)
                finally:
                    self._link = None
                    link.close()
        except Exception as error:  # a bug here must not leave the loop waiting for ever
            self._stop(RunStopped(f"the connection to the head failed: {type(error).__name__}: {error}"))
            raise
        finally:
            with self._changed:
                self._changed.notify_all()

    def _give_up_if_away(self, away_since: float, error: Exception) -> None:
        """Exit if the agent is gone; stop if the head has been out of reach for too long."""
        if parent_is_gone():
            os._exit(1)
        if self._where < 0 and time.monotonic() - away_since > self._head_away_s:  # else the agent decides
            self._stop(
                RunStopped(f"the head at {shown(self._head)} has been away for {self._head_away_s:.0f} s: {error}")
            )

    def _find_head(self) -> str:
        """Return the address of the head that this worker's agent follows."""
        if self._where < 0:
            return self.spec.head
        with contextlib.suppress(OSError):
            found, whole, _ = os.pread(self._where, 4096, 0).decode(errors="replace").partition("\n")
            if whole:
                return found
        return self._head

    def _talk(self, link: Link) -> None:
        """Send and receive over one connection until it ends."""
        address = self.spec.address or link.address
        if self.info.address != address:
            self.info = msgspec.structs.replace(self.info, address=address)
        hello = Hello(
            info=self.info,
            fingerprint=self._fingerprint,
            script=self._script,
            generation=self._generation,
            term=self._term,
            branch=self._branch,
            run_id=self._welcome.run_id if self._welcome is not None else "",
        )
        link.put(encode(hello))
        if self._welcome is not None:  # not the first connection
            unsent = set(self._outbox)  # those are sent below, in their order
            for data in map(encode, list(self._repeated.values())):
                if data not in unsent:
                    link.put(data)
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
                    if self._find_head() != self._head:
                        raise ConnectionError("this worker's machine follows another head now")
                    if now - next_beat > LATE_S:  # the process was stopped, or a call held the interpreter: not a hang
                        self._progress.forgive(now - next_beat, now)
                    beat = encode(self._progress.beat(self._generation, now))
                    if self._slot is None or not self._slot.leave(beat, now):
                        link.put(beat)
                    # With the other workers of this machine, so that their agent can report all of them just then.
                    next_beat = now + self._welcome.heartbeat_s - now % self._welcome.heartbeat_s
                    self._send_steps()
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
                    self._receive(decode(data))

    def _receive(self, message: Message) -> None:
        self._num_received += 1
        match message:
            case Notice():
                self._notify(message)
            case StoreAnswer():
                self._store_calls.take_answer(message)
            case TalkAnswer():
                self._take_talk_answer(message)
            case EvaluationAnswer() | EvaluationEnded() | EvaluationWanted():
                self._take_evaluation(message)
            case Welcome():
                self._term, self._branch = learn_term(self._term, message.term), message.branch
                self.may_write = message.may_write
                with self._changed:
                    self._welcome = message
                    self._changed.notify_all()
            case Heads():
                self._branch, self.may_write = message.branch, message.may_write
            case Ended():
                self._ended = message
                self._stop(RunStopped(message.reason))
            case WorkerLate():
                show_stacks(self.worker_id)
                self._make_statement(-1)
            case Inquire():
                self._make_statement(message.number)
            case Announcement():
                if self._welcome is None:
                    self._stop(RunStopped(message.text))
            case _:
                raise ProtocolError(f"the head sent {type(message).__name__}, which workers do not understand")

    def _make_statement(self, number: int) -> None:
        """Say what this process is doing. The head asks when something has gone wrong."""
        now = self._progress.beat(self._generation, time.monotonic())
        at = position_words(now.step, now.microbatch, now.samples, evaluates=now.evaluates) or "before its training"
        doing = "waits for others" if now.waiting else "computes"
        text, place, known = f"at {at}: {doing}, for {now.seconds_at:.1f} s", "", {}
        try:
            text, place = f"{text}\n{about_process()}\n{own_stacks()}", main_place()
            known = shown_environment(os.environ)
        except Exception as error:  # evidence never ends a worker
            text += f"\n(nothing more could be found out: {in_one_line(error)})"
        self.send(Statement(number=number, text=text, place=place, environment=known))

    def _notify(self, notice: Notice) -> None:
        with self._changed:
            if self._notice is not None and notice.generation <= self._notice.generation:
                return
            self._notice = notice
            self._repeated.pop(Suspect.__name__, None)  # this is the answer
            self._changed.notify_all()
        self._store_calls.take_notice(notice)
        for callback in list(self._callbacks):
            callback(notice)

    def _take_talk_answer(self, answer: TalkAnswer) -> None:
        with self._changed:
            asked = self._repeated.get(TalkCall.__name__)
            if not isinstance(asked, TalkCall) or asked.number != answer.number:
                return  # the repetition of an answer
            del self._repeated[TalkCall.__name__]
            self._talk_answer = answer
            self._changed.notify_all()

    def _take_evaluation(self, message: EvaluationAnswer | EvaluationEnded | EvaluationWanted) -> None:
        if isinstance(message, EvaluationAnswer):
            self._repeated.pop(EvaluationWanted.__name__, None)
        self.evaluations.take(message)

    def _stop(self, error: RunStopped) -> None:
        with self._changed:
            if self._stopped is not None:
                return
            self._stopped = error
            self._changed.notify_all()
        self._store_calls.close(error)
        self.evaluations.close(error)
        for callback in list(self._callbacks):
            callback(None)

    def _forget(self) -> None:
        """Stop being a member, in a forked child, and close the connection, which must not outlive this worker."""
        global _current
        if _current is self:
            _current = None
        link = self._link
        if link is not None:
            link.sock.close()


def _open(path: str) -> int:
    """Return a descriptor of this file; -1: there is none that this process may read."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path else -1
    return -1
