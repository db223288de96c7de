"""This worker, as a member of the run: what it reports to the head, and what it waits for.

The library finds the member of its process with `current`. Its connection is that of
`unisono.cluster.worker.connection`: one thread, for which the training loop never waits without a deadline.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from unisono.cluster.trust.invitation import shown
from unisono.cluster.worker.connection import Connection, Outbox
from unisono.cluster.worker.storecalls import StoreCalls
from unisono.core.errors import DeadlineExceeded, PeerLost, ProtocolError, RunStopped, UsageError
from unisono.core.events import Event
from unisono.core.following import learn_term
from unisono.core.messages import (
    Beat,
    Convicted,
    Ended,
    Finished,
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
    StepDone,
    StoreAnswer,
    Suspect,
    TalkAnswer,
    TalkCall,
    TalkDone,
    UserSentence,
    Welcome,
    WriteStacks,
)
from unisono.core.spec import RunSpec, WorkerSpec
from unisono.record.problems.failures import Failures
from unisono.record.problems.witness import statement
from unisono.system.stacks import show_stacks

if TYPE_CHECKING:
    from unisono.cluster.worker.beatpage import BeatSlot

__all__ = ["Member", "Progress", "current", "settle", "spec"]

LONG_S: Final = 0.1
"""A heartbeat names the samples of a micro-batch that has taken longer than this."""
WAITED_S: Final = 1.0
"""A heartbeat names the round in which the loop has waited for longer than this."""
MAX_TITLE: Final = 80
"""... in at most so many characters: a heartbeat has little room."""
NUM_SHOWN: Final = 9
"""A heartbeat names at most so many samples: one more than a message shows."""

Samples = Callable[[], Sequence[int]]
"""Returns the sample indices of a micro-batch."""

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


class Member:
    """This worker, as a member of the run. The worker's entry point makes it; the library finds it with `current`.

    Methods may be called from any thread. None of them waits for the network, except those with a timeout.

    Args:
        spec: settings, from the agent.
        info: describes this worker; ``address`` is filled in: the one that ``spec`` names, or the one that reaches the
            head.
        fingerprint: everything that equal bits depend on.
        page: its page in shared memory (`unisono.engine.exchange.pages.WorkerPage`), kept for the library.
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
        slot: BeatSlot | None = None,
    ) -> None:
        self.spec = spec
        self.info = info
        self.worker_id = info.worker_id
        self.page = page
        self._fingerprint = fingerprint
        self._script = script
        self._outbox = Outbox(tells_each_step=spec.run.settings.efficiency > 0)
        self._slot = slot
        self._connection = Connection(self, spec, self._outbox, slot)
        self.store = StoreCalls(self._outbox.send)
        """The head's key-value store."""
        self.progress = Progress()
        """Where the training loop is; told with the next heartbeat."""
        self.failures = Failures()
        """What is known of the error that ends the script; told by `failed`."""
        self._changed = threading.Condition()
        self._welcome: Welcome | None = None
        self._notice: Notice | None = None
        self._stopped: RunStopped | None = None
        self._ended: Ended | None = None
        self._talk_answer: TalkAnswer | None = None
        self._callbacks: list[Callable[[Notice | None], None]] = []
        self._generation = 0
        self._term = 0
        self._branch = ""
        self._loop: tuple[int, int] | None = None
        self._has_run = False
        self._has_failed = False
        self.has_left = False
        self.trained_alone = ""
        """What the script has trained outside of the run, of which it took no step."""
        self.may_write = True
        """Whether this side of the run writes into the run's directory; False where another side does."""

    # -- life ----------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 30.0) -> Member:
        """Say hello to the head, and become `current`. Blocks until the head has answered.

        Raises:
            RunStopped: the head refuses this worker. DeadlineExceeded: no answer in time.
        """
        global _current
        self._connection.start()
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
    def arithmetic(self) -> int:
        """A checksum of this worker's fingerprint; the script does not count."""
        items = sorted(item for item in self._fingerprint.items() if "script" not in item[0])
        return zlib.crc32(repr(items).encode())

    @property
    def welcome(self) -> Welcome:
        """The head's answer to the first hello."""
        assert self._welcome is not None, "connect() has returned"
        return self._welcome

    @property
    def part(self) -> int:
        """The part of the model that this worker has, from 0, for its whole life."""
        return self._welcome.part if self._welcome is not None else 0

    def close(self) -> None:
        """Send the messages that are not sent yet (for a few seconds at most), and end the connection."""
        global _current
        self._connection.close()
        if _current is self:
            _current = None

    # -- messages to the head ------------------------------------------------------------------------

    def call_others(self, number: int, kind: str, value: bytes = b"") -> TalkAnswer:
        """Make one of the calls before the training (`unisono.core.messages.TalkCall`). Blocks until it is decided.

        Raises:
            RunStopped: the run is over.
        """
        self._outbox.send_repeatedly(TalkCall(number=number, kind=kind, value=value))
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
        self._outbox.send_repeatedly(TalkDone(number=number, ok=ok))

    def begin_run(self) -> None:
        """Note that the script makes its `Run`. Nothing is sent.

        Raises:
            UsageError: the script has made one before, in which the other workers may still be.
        """
        if self._has_run:
            raise UsageError(
                "under `unisono run` a script makes one unisono.Run, and this is the second; call run.steps again in "
                "the first, or start the script once per training, with an argument that says which"
            )
        self._has_run = True

    def ready(self, phase: int) -> None:
        """Report that the script has reached call number ``phase`` of ``run.steps``."""
        self._outbox.send_repeatedly(Ready(phase=phase))

    def holding(self, generation: int) -> None:
        """Report that this worker has entered this generation and holds the run's state."""
        self._generation = generation
        self._outbox.send_repeatedly(Holding(generation=generation))

    def suspect(self, generation: int, reason: str, peers: Sequence[str] = ()) -> None:
        """Report that the exchange of this generation broke; the head may not know the cause.

        Args:
            peers: ids of the workers that this one waited for, if it knows them.
        """
        self._outbox.send_repeatedly(Suspect(generation=generation, reason=reason, peers=list(peers)))

    def convict(self, convicted: Convicted) -> None:
        """Report that most members have found workers to compute wrong values."""
        self._outbox.send_repeatedly(convicted)

    def in_loop(self, position: tuple[int, int] | None) -> None:
        """Note the training loop's phase and step, for `finished`. None: the loop has come to its end. Cheap."""
        self._loop = position

    def leaving(self, phase: int, step: int, *, goes_on: bool = False, exits: bool = False) -> None:
        """Report that the script has left the training loop and takes no part in this step.

        Args:
            goes_on: the script begins another training loop. Otherwise it is at the end of ``with unisono.Run(...)``.
            exits: by ``sys.exit(0)``.
        """
        self._outbox.send_repeatedly(Leaving(phase=phase, step=step, goes_on=goes_on, exits=exits))

    def step_done(self, done: StepDone, *, tells: bool) -> None:
        """Note a committed step.

        Args:
            tells: this worker reports the steps for all.
        """
        if self._slot is not None:
            self._slot.note_step(done.step)
        self._outbox.step_done(done, tells=tells)

    def happened(self, event: Event) -> None:
        """Send an event to the head, for the sinks of all machines; an event that is too large for that is not sent.

        Steps that come fast are sent together, a moment later.
        """
        self._outbox.send_event(event)

    def finished(self) -> None:
        """Report that the script has returned."""
        if self._loop is None:
            self._outbox.send_repeatedly(Finished(trained_alone=self.trained_alone))
        else:  # from the middle of the loop
            phase, step = self._loop
            self._outbox.send_repeatedly(Finished(phase=phase, step=step + 1))

    def left(self) -> None:
        """Report that this worker was asked to leave, and has left at a step boundary."""
        self.has_left = True
        self._outbox.forget_all()
        self.send(Left())

    def failed(self, error: BaseException, *, exit_code: int = 1) -> None:
        """Report that ``error`` has ended the script. Only the first report counts."""
        if self._has_failed:
            return
        self._has_failed = True
        self._outbox.forget_all()
        self.send(self.failures.report(error, exit_code))

    def send(self, message: Message) -> None:
        """Send a message, once. Does not wait until it is sent."""
        self._outbox.send(message)

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

    # -- the connection's thread (`unisono.cluster.worker.connection.ConnectedWorker`) -----------------------------

    @property
    def heartbeat_s(self) -> float | None:
        return self._welcome.heartbeat_s if self._welcome is not None else None

    @property
    def is_stopped(self) -> bool:
        return self._stopped is not None

    def hello(self, address: str) -> Hello:
        address = self.spec.address or address
        if self.info.address != address:
            self.info = msgspec.structs.replace(self.info, address=address)
        return Hello(
            info=self.info,
            fingerprint=self._fingerprint,
            script=self._script,
            generation=self._generation,
            term=self._term,
            branch=self._branch,
            run_id=self._welcome.run_id if self._welcome is not None else "",
        )

    def beat(self, now: float, stood_still_s: float) -> Beat:
        if stood_still_s:
            self.progress.forgive(stood_still_s, now)
        return self.progress.beat(self._generation, now)

    def broken(self, error: Exception) -> None:
        self.store.fail_all(PeerLost(f"the connection to the head broke: {error}"))

    def stop(self, error: RunStopped) -> None:
        with self._changed:
            if self._stopped is not None:
                return
            self._stopped = error
            self._changed.notify_all()
        self.store.close(error)
        for callback in list(self._callbacks):
            callback(None)

    def receive(self, message: Message) -> None:
        match message:
            case Notice():
                self._notify(message)
            case StoreAnswer():
                self.store.take_answer(message)
            case TalkAnswer():
                self._take_talk_answer(message)
            case Welcome() if self._welcome is not None and self._welcome.part != message.part:
                self.stop(
                    RunStopped(
                        f"the head gives part {message.part} of the model to this worker, which has part "
                        f"{self._welcome.part} since its start"
                    )
                )
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
                self.stop(RunStopped(message.reason))
            case WriteStacks():
                show_stacks(self.worker_id)
                self._make_statement(-1)
            case Inquire():
                self._make_statement(message.number)
            case UserSentence():
                if self._welcome is None:
                    self.stop(RunStopped(message.text))
            case _:
                raise ProtocolError(f"the head sent {type(message).__name__}, which workers do not understand")

    def _make_statement(self, number: int) -> None:
        """Say what this process is doing. The head asks when something has gone wrong."""
        self.send(statement(number, self.progress.beat(self._generation, time.monotonic())))

    def _notify(self, notice: Notice) -> None:
        with self._changed:
            if self._notice is not None and notice.generation <= self._notice.generation:
                return
            self._notice = notice
            self._outbox.forget(Suspect)  # this is the answer
            self._changed.notify_all()
        self.store.take_notice(notice)
        for callback in list(self._callbacks):
            callback(notice)

    def _take_talk_answer(self, answer: TalkAnswer) -> None:
        with self._changed:
            asked = self._outbox.repeated(TalkCall)
            if asked is None or asked.number != answer.number:
                return  # the repetition of an answer
            self._outbox.forget(TalkCall)
            self._talk_answer = answer
            self._changed.notify_all()

    def _forget(self) -> None:
        """Stop being a member, in a forked child, and close the connection, which must not outlive this worker."""
        global _current
        if _current is self:
            _current = None
        self._connection.drop()


class Progress:
    """Position of the training loop. The loop writes it, the thread that sends heartbeats reads it. Never blocks."""

    def __init__(self) -> None:
        self._position = _Position()
        self._is_waiting = False
        self._round = (-1, "")
        self._num_changes = 0
        self._num_steps = 0
        self._changed_at = time.monotonic()

    def at(
        self, *, phase: int, step: int, microbatch: int, evaluates: bool = False, samples: Samples | None = None
    ) -> None:
        """Note that the loop has got to this position.

        Args:
            evaluates: ``microbatch`` is a batch of an evaluation.
            samples: returns the indices of the micro-batch's samples. Called in the thread that sends heartbeats when
                the micro-batch takes long: a loop that hangs cannot report them itself.
        """
        if (self._position.phase, self._position.step) != (phase, step):
            self._num_steps += 1
        self._position = _Position(phase, step, microbatch, evaluates, samples)
        self._note_change()

    def waiting(self, flag: bool) -> None:
        """Note that the loop waits for other workers, or does not any more. A loop that waits is not late."""
        self._is_waiting = flag
        self._note_change()

    def in_round(self, number: int, title: str) -> None:
        """Note that the loop takes part in this round; -1: in none."""
        self._round = (number, title[:MAX_TITLE])

    def forgive(self, seconds: float, now: float) -> None:
        """Do not count ``seconds`` up to ``now``, in which the whole process stood still."""
        self._changed_at = min(self._changed_at + seconds, now)

    def beat(self, generation: int, now: float) -> Beat:
        """Return the heartbeat to send."""
        position, seconds_at = self._position, now - self._changed_at
        number, title = self._round if self._is_waiting and seconds_at > WAITED_S else (-1, "")
        return Beat(
            generation=generation,
            phase=position.phase,
            step=position.step,
            microbatch=position.microbatch,
            progress=self._num_changes,
            waiting=self._is_waiting,
            num_steps=self._num_steps,
            seconds_at=seconds_at,
            evaluates=position.evaluates,
            samples=position.first_samples() if seconds_at > LONG_S else [],
            round=number,
            title=title,
        )

    def _note_change(self) -> None:
        self._num_changes += 1
        self._changed_at = time.monotonic()


@dataclass
class _Position:
    """One position of the loop: a step, and a micro-batch of it; -1 where there is none yet."""

    phase: int = -1
    step: int = -1
    microbatch: int = -1
    evaluates: bool = False
    _samples: Samples | None = None
    _first_samples: list[int] | None = None

    def first_samples(self) -> list[int]:
        """Return the first samples of the micro-batch. They are asked for once."""
        if self._first_samples is None:
            self._first_samples = list(self._samples())[:NUM_SHOWN] if self._samples is not None else []
        return self._first_samples
