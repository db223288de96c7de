"""What members, agents, the head and the watchers say to each other: frozen, validated, without pickle.

Every message is a msgspec struct with its class name as tag, encoded as MessagePack; `decode` refuses whatever is not
one. Members and agents speak to the head only. A `Notice` is the head's decision about the membership::

    worker                           head                          agent
      Hello   ------------------->          <-------------------  AgentHello
              <-------------------  Welcome  ------------------->
      Ready   ------------------->  "admit me at a step boundary"
              <-------------------  Notice (a generation, with its reason)
      Holding ------------------->  "I have the run's state"
      Beat    ------------------->  every heartbeat_s, with progress
      StepDone (rank 0) --------->
      Happened (rank 0) --------->  Happened  ------------------>  terminal and other sinks
      Failed / Finished --------->          <-------------------  WorkerExit
                                 Announcement ----------------->  "what was decided, and why"
              <-------------------  Ended    ------------------->

`Scale` and `Stop` may also come from outside (``unisono scale``, ``unisono stop``): they are then the first and only
message of their connection, and the answer is `Announcement`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from unisono.errors import ProtocolError
from unisono.events import Event

__all__ = [
    "AgentHello",
    "Announcement",
    "Beat",
    "Drain",
    "Ended",
    "Evict",
    "Failed",
    "Finished",
    "Happened",
    "Hello",
    "Holding",
    "Kept",
    "Leaving",
    "Left",
    "Lost",
    "MemberInfo",
    "Message",
    "Notice",
    "Ready",
    "RunDirectory",
    "Scale",
    "Snapshot",
    "Start",
    "StepDone",
    "Stop",
    "StoreAnswer",
    "StoreCall",
    "Suspect",
    "Welcome",
    "WorkerExit",
    "WorkerLate",
    "decode",
    "encode",
    "is_refusal",
]

PROTOCOL = 1


def is_refusal(status: int) -> bool:
    """Whether an HTTP status says that this connection is not wanted, now or later.

    A server error is not such a word: a head that is about to end answers 503, and whoever asks looks for it again.
    """
    return status < 500


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class MemberInfo(Message):
    """A worker as its peers need to know it. ``worker_id`` is stable for the worker's life."""

    worker_id: str
    host: str
    """Workers with equal ``host`` can share memory."""
    pid: int
    device: str
    board: str = ""
    """Address of its page in shared memory (`unisono.exchange.pages`); empty where the host has none."""
    address: str = "127.0.0.1"
    """The interface that its data connections listen on."""


# -- worker to head ----------------------------------------------------------------------------------


class Hello(Message):
    """First message of a worker."""

    info: MemberInfo
    fingerprint: dict[str, str]
    """What equal bits depend on: instruction set, torch, threads ... (`unisono.fingerprint`)."""
    script: str = ""
    """Checksum of the text of its script; empty where that is not one file."""
    generation: int = 0
    """The newest generation that it holds: not 0 when it comes back after its connection broke."""
    term: int = 0
    """The highest term of a head that it has heard of."""
    protocol: int = PROTOCOL


class Ready(Message):
    """The script has reached its training loop: admit this worker at a step boundary."""

    phase: int
    """Which call of ``run.steps``, counted from 0."""


class Holding(Message):
    """This worker holds the run's state since the start of this generation: it may finish a step with others."""

    generation: int


class Beat(Message):
    """Heartbeat, with progress. Sent by a thread, so it says "the process lives"; ``progress`` says "it works"."""

    generation: int
    phase: int
    step: int
    microbatch: int
    """The leaf being computed; -1 outside of one."""
    progress: int
    """Grows whenever the main thread gets anywhere; the same value for long means that it hangs."""
    waiting: bool
    """The main thread waits for others: no progress is no reproach. Only while somebody waits can another be late."""
    num_steps: int = 0
    """In how many steps of the run it has been; in its first one a worker may be slow."""
    seconds_at: float = 0.0
    """How long the main thread has been at this progress value."""
    evaluates: bool = False
    """``microbatch`` is a batch of an evaluation."""
    samples: list[int] = []
    """The first ones of that micro-batch, when it has been there for a while."""


class Suspect(Message):
    """This member's exchange failed in a way that the head may not have seen (a cut link, a deadline)."""

    generation: int
    reason: str
    peers: list[str] = []
    """Whom it suspects, where it knows."""


class StepDone(Message):
    """A step is finished, from rank 0: what the membership table needs of it."""

    step: int
    """Counted over the whole run, however often the script calls ``run.steps``."""
    seconds: float


class Happened(Message):
    """An event, from rank 0 or the head, on its way to the sinks of every machine."""

    event: Event
    number: int = -1
    """Of the event's line in the journal; -1: it has none. The same event has the same number, whoever tells it."""


class Failed(Message):
    """User code raised (or the script used the library wrongly)."""

    error: str
    """Class and message, one line."""
    traceback: str
    step: int = -1
    """Counted over the whole run, as in `StepDone`."""
    microbatch: int = -1
    samples: list[int] = []
    """Indices of the samples of that micro-batch."""
    retry: bool = False
    """The error came out of a micro-batch's computation, so another worker may try it."""
    exit_code: int = 1
    """What the command shall exit with: the script's own where it called ``sys.exit``."""


class Leaving(Message):
    """The script is at the end of its ``with unisono.Run(...)``, and waits there for the others.

    Or it has left a training loop before its end, and begins another.
    """

    phase: int
    step: int
    """The first step that it has no part in."""
    goes_on: bool = False
    """It begins another ``run.steps``."""


class Finished(Message):
    """The script has returned."""

    phase: int = -1
    step: int = -1
    """The first step that it had no part in, where it left the training loop before its end. -1: it did not."""


class Left(Message):
    """Drained: this worker is out at a step boundary and ends by itself."""


class RunDirectory(Message):
    """The script chose this run directory; the head leaves its address there."""

    path: str
    on_signal: int = -1
    """At SIGTERM, stop the run at the end of the step, where it writes a checkpoint, and exit with this code.
    -1: end at once."""


class StoreCall(Message):
    """One operation on the key-value store: what ``torch.distributed`` needs to connect a generation."""

    call: int
    operation: str
    """set, get, add, compare_set, wait, check, delete, num_keys"""
    keys: list[str]
    values: list[bytes] = []
    amount: int = 0
    timeout_s: float = 60.0
    generation: int = 0
    """For whose sake: its keys go when it is over. 0: they stay."""


# -- head to worker ----------------------------------------------------------------------------------


class Welcome(Message):
    """The answer to a hello."""

    run_id: str
    heartbeat_s: float
    term: int = 1
    """Of the head (`unisono.decisions.following`)."""
    warnings: list[str] = []
    """E.g. how this worker's fingerprint differs from the first one's."""
    agent_id: str = ""
    """To an agent: what it is called here."""


class Notice(Message):
    """A decision about the membership. Notices are numbered; only the newest counts."""

    generation: int
    members: list[MemberInfo]
    """By rank. Members of one host stand together."""
    immediate: bool
    """True: the old generation is broken, move now and keep finished nodes. All members hold the state (or, when a
    worker is lost before the first step, none does). False: move together at a step boundary, when all members have
    seen this. No members at all: everybody leaves there."""
    paused: bool = False
    """Finish the step, then wait for another notice before the next."""
    reason: str = ""
    warnings: list[str] = []
    """Of those who are new in it and may compute differently; the journal says so."""


class StoreAnswer(Message):
    """The answer to a `StoreCall`."""

    call: int
    values: list[bytes] = []
    amount: int = 0
    error: str = ""


class Ended(Message):
    """The run is over, well or not. Also the last thing that agents hear."""

    ok: bool
    reason: str
    worker_id: str = ""
    """Whose failure it was."""
    traceback: str = ""
    exit_code: int = 0
    step: int = -1
    """The last step that is done, counted over the whole run."""


# -- agent and head ----------------------------------------------------------------------------------


class AgentHello(Message):
    """First message of an agent (``unisono run`` or ``unisono join``)."""

    host: str
    pid: int
    num_workers: int
    primary: bool = False
    """It started the head: when it goes, the run ends."""
    agent_id: str = ""
    """What a `Welcome` has called it: it comes back after the head was away."""
    term: int = 0
    """The highest term of a head that it has heard of."""
    protocol: int = PROTOCOL


class WorkerExit(Message):
    """A worker's process has ended: what a closed connection cannot say."""

    worker_id: str
    exit_code: int
    """Negative: killed by that signal."""
    last_words: str = ""
    """The end of its standard error."""


class Start(Message):
    """Agent, start these workers. An id is never used again."""

    worker_ids: list[str]
    delay_s: float = 0.0
    reason: str = ""


class Evict(Message):
    """Agent, end this worker's process."""

    worker_id: str
    reason: str


class Snapshot(Message):
    """A version of the head's state, for the head that may follow. The head's heirs keep the newest."""

    term: int
    number: int
    """Counted by the head of this term."""
    state: bytes
    successor: str = ""
    """The agent that starts the next head, by this version."""


class Kept(Message):
    """Agent to head: the answer to a `Snapshot`. This version, or a newer one, is held."""

    term: int
    number: int


class WorkerLate(Message):
    """To a worker that makes no progress: its Python stacks are wanted on its standard error."""

    worker_id: str
    step: int
    microbatch: int
    seconds: float


class Drain(Message):
    """Take these workers out at the end of the step (all of this agent's where empty)."""

    worker_ids: list[str] = []
    reason: str = ""


class Scale(Message):
    """From outside: make it this many workers."""

    num_workers: int


class Stop(Message):
    """From outside: end the run at the end of the step."""

    reason: str


class Announcement(Message):
    """Agent, show this: what the head decided, and why."""

    text: str


class Lost(Message):
    """Inside the head only: the connection of a worker or an agent has closed."""

    reason: str = ""


_ALL = (
    Hello | Ready | Holding | Beat | Suspect | StepDone | Happened | Failed | Leaving | Finished | Left | RunDirectory
    | StoreCall | Welcome | Notice | StoreAnswer | Ended
    | AgentHello | WorkerExit | Start | Evict | WorkerLate | Drain | Scale | Stop | Announcement | Snapshot | Kept
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_ALL)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Any:
    """The message in ``data``.

    Raises:
        ProtocolError: it is none that this version knows.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not a message of protocol {PROTOCOL}: {error}") from error
