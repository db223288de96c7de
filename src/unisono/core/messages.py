"""The messages between workers, agents, the head and commands: frozen, validated, without pickle.

Every message is a msgspec struct with its class name as tag, encoded as MessagePack; `decode` refuses everything else.
Workers and agents send messages to the head only. A `Notice` is the head's decision about the membership::

    worker                           head                          agent
      Hello   ------------------->          <-------------------  AgentHello
              <-------------------  Welcome  ------------------->
      Ready   ------------------->  "admit me at a step boundary"
                                    Snapshot ------------------>  held for a head that may follow
                                          <-------------------  Kept
              <-------------------  Notice (a generation, with its reason)
      TalkCall  ----------------->  before `Ready`: "I am at this run.barrier, run.all_gather ..."
              <-------------------  TalkAnswer (its result)
      Holding ------------------->  "I have the run's state"
                                          <-------------------  Beats, every heartbeat_s, with the workers' progress
      Beat    ------------------->  the same, of a worker whose agent does not report
      StepDone (rank 0) --------->
      Convicted ----------------->  "this worker computes wrong values"
      Happened (rank 0) --------->  Happened ------------------->  terminal and other sinks, the story's file
                                          <-------------------  Used: what the machine uses
      Failed / Finished --------->          <-------------------  WorkerExit
              <-------------------  Inquire  ------------------>  something has gone wrong
      Statement ----------------->          <-------------------  Statement
                                 Announcement ----------------->  "what was decided, and why"
              <-------------------  Ended    ------------------->

`Scale` and `Stop` may also come from outside (``unisono scale``, ``unisono stop``): they are then the first and only
message of their connection, and the answer is an `UserSentence`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from unisono.core.errors import ProtocolError
from unisono.core.events import Event, MachineUsed

__all__ = [
    "AgentHello",
    "Ailing",
    "Beat",
    "BeatOf",
    "Beats",
    "Convicted",
    "Drain",
    "Ended",
    "Evict",
    "Failed",
    "Finished",
    "Foreign",
    "Happened",
    "HeadSnapshot",
    "Heads",
    "Hello",
    "Holding",
    "Holds",
    "Inquire",
    "Kept",
    "Leaving",
    "Left",
    "Lost",
    "MachineInfo",
    "MachinesGone",
    "MemberInfo",
    "Message",
    "Moved",
    "Notice",
    "Offer",
    "Proposal",
    "Ready",
    "RunDirectoryChosen",
    "Scale",
    "Start",
    "Statement",
    "StepDone",
    "Stop",
    "StoreAnswer",
    "StoreCall",
    "Suspect",
    "TalkAnswer",
    "TalkCall",
    "TalkDone",
    "Used",
    "UserSentence",
    "Verdict",
    "Wanted",
    "Welcome",
    "WorkerExit",
    "WriteEvidence",
    "WriteStacks",
    "decode",
    "encode",
    "is_refusal",
]

PROTOCOL = 8


def is_refusal(status: int) -> bool:
    """Return whether an HTTP status refuses this connection, now and later.

    A server error does not: a head that is about to end answers 503, and another one may follow.
    """
    return status < 500


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class MemberInfo(Message):
    """Description of a worker for its peers. ``worker_id`` is the same for the worker's whole life."""

    worker_id: str
    host: str
    """Workers with equal ``host`` can share memory."""
    pid: int
    device: str
    page: str = ""
    """Address of its page in shared memory (`unisono.engine.exchange.pages`); empty where the host has none."""
    address: str = "127.0.0.1"
    """The interface on which it listens for data connections."""
    part: int = 0
    """The part of the model that it has. The table fills it in; in a `Hello` it says nothing."""


# -- worker to head ----------------------------------------------------------------------------------


class Hello(Message):
    """First message of a worker."""

    info: MemberInfo
    fingerprint: dict[str, str]
    """Everything that the bits of a result depend on: instruction set, torch, threads ...
    (`unisono.system.fingerprint`)."""
    script: str = ""
    """Checksum of the text of its script; empty where that is not one file."""
    generation: int = 0
    """The newest generation that it holds; not 0 when the worker connects again after its connection broke."""
    term: int = 0
    """The highest term of a head that the sender knows."""
    branch: str = ""
    """The branch of the run's history that the sender has followed (`unisono.core.following`); "": none yet."""
    run_id: str = ""
    """The run that it takes part in, if it knows that already."""
    protocol: int = PROTOCOL


class Ready(Message):
    """The script has reached its training loop: admit this worker at a step boundary."""

    phase: int
    """Which call of ``run.steps``, counted from 0."""


class Holding(Message):
    """This worker has held the run's state since the start of this generation, so it can finish a step with others."""

    generation: int


class Beat(Message):
    """Heartbeat, sent by a thread: it shows that the process lives; ``progress`` shows whether the script gets on."""

    generation: int
    phase: int
    step: int
    microbatch: int
    """The leaf being computed; -1 outside of one."""
    progress: int
    """Grows whenever the main thread gets on; the same value for a long time means that the main thread hangs."""
    waiting: bool
    """The main thread waits for other workers, so it is not late itself. A worker is only late while others wait."""
    num_steps: int = 0
    """Steps of the run in which the worker has taken part; in its first one a worker may be slow."""
    seconds_at: float = 0.0
    """Seconds since ``progress`` has grown."""
    evaluates: bool = False
    """``microbatch`` is a batch of an evaluation."""
    samples: list[int] = []
    """The first samples of that micro-batch, if the worker has been computing it for a while."""
    round: int = -1
    """The number of the round in which the worker has waited for others for a while; -1: in none."""
    title: str = ""
    """What that round is: "a step of 8 micro-batches"."""


class BeatOf(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A heartbeat that a worker has left for its agent to report."""

    worker_id: str
    seconds_ago: float
    """How long before the report the worker has left it."""
    beat: Beat


class Beats(Message):
    """The new heartbeats of an agent's workers, every heartbeat_s. A worker that is not named has left none."""

    beats: list[BeatOf]


class Suspect(Message):
    """This member's exchange failed for a reason that the head may not know (a cut cable, a deadline)."""

    generation: int
    reason: str
    peers: list[str] = []
    """The workers that this member waited for, where it knows them."""


class StepDone(Message):
    """A step is finished, from rank 0, for the membership table. Of steps that come fast only some are told; before any
    other message a worker tells the step that it has done last.
    """

    step: int
    """Counted over the whole run, however often the script calls ``run.steps``."""
    seconds: float
    samples: int = 0


class Happened(Message):
    """Events in their order: from rank 0 to the head, and from the head to agents, which show or write them. Those of a
    moment are told together, because a message costs each that takes it more than what is in it. What has been told
    already may come again, with the same number, after a head has taken over or a connection broke.
    """

    events: list[Event]


class Used(Message):
    """Agent to head: what its machine uses."""

    use: MachineUsed


class Convicted(Message):
    """Most members have found that these workers compute wrong values (`unisono.core.audit_rules`)."""

    worker_ids: list[str]
    step: int
    """Counted over the whole run."""
    doubtful_from: int
    """The first step in which what they have computed is to be doubted; `step` or later: there is none."""
    sound: int
    """A checkpoint of more steps may hold wrong values."""
    goes_back: bool
    """The run goes back to a state from before the steps that are to be doubted."""
    what: str
    """What was wrong: "micro-batch 3", "its state"."""
    is_lasting: bool
    """They were wrong each time, and not once."""


class Failed(Message):
    """The script raised an error, of its own or because it used the library wrongly."""

    error: str
    """Class and message, one line."""
    traceback: str
    step: int = -1
    """Counted over the whole run, as in `StepDone`."""
    microbatch: int = -1
    samples: list[int] = []
    """Indices of the samples of that micro-batch."""
    retry: bool = False
    """The computation of a micro-batch raised the error, so another worker may try that micro-batch."""
    sound: int = -1
    """A checkpoint of more steps may hold wrong values, because workers have different ones; -1: none does."""
    goes_on: bool = False
    """This worker has joined last, and computes other values than the members before it: they go on without it."""
    kind: str = "error"
    """What the error shows (`unisono.record.problems.kinds.Kind`)."""
    detail: str = ""
    """What the worker has found out about it: what held the memory, which values are not finite."""
    advice: str = ""
    """What to do, where the worker knows more than the error says."""
    exit_code: int = 1
    """Exit code for the command: the script's own if it called ``sys.exit``."""


class Ailing(Message):
    """The gradient of a step is not finite, though the loss of each of its micro-batches is."""

    step: int
    """Counted over the whole run."""
    microbatch: int
    """The first of this worker's micro-batches whose gradient is not finite; -1: there is none."""
    samples: list[int] = []
    detail: str = ""


class Holds(Message):
    """What holds the memory of this worker: if the kernel kills it for its memory, it cannot say so then. Told once,
    after the first step; before that, its limit alone.
    """

    kinds: dict[str, int] = {}
    """Bytes of what does not depend on the size of a micro-batch, by name; {}: not known yet."""
    batch_size: int = 0
    microbatches: int = 0
    limit_bytes: int = 0
    """What its control group may have, which may be another one than that of the agent; 0: it has no limit."""


class Statement(Message):
    """The answer to a `Inquire`, of a worker or an agent; or what a worker says when it is told that it is late."""

    number: int
    """Of the question; -1: the worker is late."""
    text: str
    place: str = ""
    """The line of the script at which the worker's main thread is."""
    environment: dict[str, str] = {}
    """The environment variables that may be shown."""


class Leaving(Message):
    """The script waits for the others at the end of its ``with unisono.Run(...)``.

    Or it has left a training loop before the loop's end, and begins another one.
    """

    phase: int
    step: int
    """The first step in which the worker takes no part."""
    goes_on: bool = False
    """The script begins another ``run.steps``."""
    exits: bool = False
    """By ``sys.exit(0)``: a worker that alone does so is lost, and the others go on."""


class Finished(Message):
    """The script has returned."""

    phase: int = -1
    step: int = -1
    """The first step in which the worker took no part, if it left the training loop before its end; else -1."""
    trained_alone: str = ""
    """What was trained outside of the run, by a script that took no step of it; "": nothing."""


class Left(Message):
    """This worker has left the run at a step boundary, as it was asked to, and ends by itself."""


class RunDirectoryChosen(Message):
    """The script has chosen this run directory; the head writes its address there."""

    path: str
    on_signal: int = -1
    """At SIGTERM, stop the run at the end of the step, with a checkpoint, and exit with this code.
    -1: end at once."""
    facts: str = ""
    """The run's description in that directory, as JSON."""
    host: str = ""
    """To agents: a machine that sees the directory."""


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
    """The generation that needs the keys: they are deleted when it is over. 0: they stay."""


class TalkCall(Message):
    """The script has come to a call of ``run.barrier``, ``run.all_gather`` ... before its first ``run.steps``."""

    number: int
    """Of the call, on this worker, from 0."""
    kind: str
    """"run.barrier", "run.broadcast", "run.all_gather" or "run.main_first"."""
    value: bytes = b""


class TalkDone(Message):
    """The block of ``run.main_first`` of this number is over on the worker that was to run it first."""

    number: int
    ok: bool = True
    """False: the block has raised an error, so another worker has to run it."""


# -- head to worker ----------------------------------------------------------------------------------


class Welcome(Message):
    """The answer to a hello."""

    run_id: str
    heartbeat_s: float
    term: int = 1
    """Of the head (`unisono.core.following`)."""
    warnings: list[str] = []
    """E.g. how this worker's fingerprint differs from the first one's."""
    agent_id: str = ""
    """To an agent: the name that the head has given it."""
    part: int = 0
    """To a worker: the part of the model that it has for its whole life."""
    branch: str = ""
    """The branch of the run's history that the head goes on with."""
    may_write: bool = True
    """False: another side of the run writes into the run's directory."""
    num_machines: int = 0
    machines: list[MachineInfo] = []
    """To an agent: see `Heads`."""


class Heads(Message):
    """Where the next head will be found; sent before every decision that one of the earlier heirs does not know."""

    branch: str
    num_machines: int = 0
    """To agents: how many there are."""
    machines: list[MachineInfo] = []
    """To agents: the machines of the run. The first of them may start the next head."""
    may_write: bool = True
    """See `Welcome`."""


class Notice(Message):
    """The next generation. Only the newest notice counts."""

    generation: int
    members: list[MemberInfo]
    """By rank. Members of one host stand together."""
    immediate: bool
    """True: the old generation is broken, move now and keep finished nodes. All members hold the state (or, when a
    worker is lost before the first step, none does). False: move together at a step boundary, when all members have
    this notice. Without members: all workers leave there."""
    paused: bool = False
    """Finish the step, then wait for another notice before the next."""
    reason: str = ""
    warnings: list[str] = []
    """One for each new member that may compute differently; the journal records them."""


class TalkAnswer(Message):
    """The answer to a `TalkCall`."""

    number: int
    values: list[bytes] = []
    """The result: the values of all workers, or the one of a broadcast."""
    is_first: bool = False
    """There is no result yet: this worker runs the block of ``run.main_first`` before the others."""
    error: str = ""
    """Why there is no result, and never will be."""


class StoreAnswer(Message):
    """The answer to a `StoreCall`."""

    call: int
    values: list[bytes] = []
    packed: bytes = b""
    """Many values (`unisono.cluster.worker.packed.pack_values`), in place of `values`."""
    amount: int = 0
    error: str = ""


class Ended(Message):
    """The run is over, well or not: the last message to workers and agents."""

    ok: bool
    reason: str
    worker_id: str = ""
    """The worker that failed, where one did."""
    traceback: str = ""
    exit_code: int = 0
    step: int = -1
    """The last step that is done, counted over the whole run."""
    back_to: int = -1
    """The run is to be started again from a checkpoint of at most so many steps, because later ones may hold what a
    worker has computed wrongly; -1: it is over."""
    without: list[str] = []
    """The hosts of these workers, which are to take no part then."""
    sound: int = -1
    """As in `Failed`."""


# -- agent and head ----------------------------------------------------------------------------------


class MachineInfo(Message):
    """A machine, as those know it that may need it when the head is away."""

    agent_id: str
    url: str
    """Where its agent lets a head listen."""


class AgentHello(Message):
    """First message of an agent (``unisono run`` or ``unisono join``)."""

    host: str
    pid: int
    num_workers: int
    primary: bool = False
    """The command that has started the run: its `Ended` ends the run for all."""
    launched: str = ""
    """Name of the machine, where a launcher of the command that started the run has started the agent; else ""."""
    agent_id: str = ""
    """The agent's name, from a `Welcome`, if it connects again."""
    term: int = 0
    """The highest term of a head that the sender knows."""
    url: str = ""
    """Where a head that this agent starts can be reached; "": it starts none."""
    branch: str = ""
    """The branch of the run's history that the agent has followed; "": none yet."""
    fresh: bool = False
    """The agent continued under another head, and has ended the workers that it had there."""
    run_id: str = ""
    """The run that it takes part in, if it knows that already."""
    protocol: int = PROTOCOL


class WorkerExit(Message):
    """A worker's process has ended; a closed connection alone does not show that."""

    worker_id: str
    exit_code: int
    """Negative: killed by that signal."""
    last_output: str = ""
    """The end of its standard error."""
    place: str = ""
    """The line of the script at which native code has failed, where that is known."""
    killed_for: str = ""
    """Why the kernel has killed the process, where that is known: for its memory."""
    peak_bytes: int = 0
    """The most memory that the process has had; 0: unknown."""
    limit_bytes: int = 0
    """What all processes together could have, where the kernel has killed it for its memory; 0: unknown."""
    step: int = -1
    """The step that it has done last, as in `StepDone`; -1: none, or unknown."""


class Start(Message):
    """Order to an agent: start these workers. An id is never used again."""

    worker_ids: list[str]
    delay_s: float = 0.0
    reason: str = ""


class Wanted(Message):
    """To the agent of the command: have these machines."""

    num_workers: int
    """For so many workers in all, those of the command's machine included (`Policy.elastic`)."""
    present: tuple[str, ...] = ()
    """Of the machines on which an agent has ended (`MachinesGone`), those that need no other one: one is connected, or
    was sent away."""


class Evict(Message):
    """Order to an agent: end this worker's process."""

    worker_id: str
    reason: str


class HeadSnapshot(Message):
    """A version of the head's state, for the head that may follow. The head's heirs keep the newest."""

    term: int
    number: int
    """Counted by the head of this term."""
    state: bytes
    successor: str = ""
    """The agent whose child the head is: it starts the next head, as long as its machine lives."""
    heirs: list[str] = []
    """The agents that start the next head if that machine is lost, in their order."""
    holders: list[str] = []
    """The agents on whose machines workers hold the run's state; empty: nobody does yet."""


class Kept(Message):
    """Agent to head: the answer to a `HeadSnapshot`. This version, or a newer one, is held."""

    term: int
    number: int


class Foreign(Message):
    """Head to agent: the agent has followed another branch of the run's history. It may only join with new workers."""

    step: int
    """The last step that is done here."""


class Moved(Message):
    """Head to agent: the head yields to the one at this address, which all machines are to join as new ones."""

    url: str


class Proposal(Message):
    """A head to another head of the same run, which it has found: one of the two gives way."""

    run_id: str
    agent_id: str
    """The agent whose child the sender is."""
    term: int
    step: int
    """The last step that is done there."""
    url: str
    writes: bool = False
    """That head has the right to write into a directory of the run that it sees."""


class Verdict(Message):
    """The answer to a `Proposal`."""

    gives_way: str
    """"you": the sender of the proposal; "me": the other one, now; "": neither, try again later."""
    step: int = -1
    """The last step that is done at the other one."""
    writes: bool = False
    """See `Proposal`."""


class Inquire(Message):
    """Question to workers and agents when something has gone wrong: what are you, and your processes, doing?"""

    number: int
    about: str = ""
    """The worker of whose output the most is wanted."""


class WriteEvidence(Message):
    """Order to an agent that sees the run's directory: write this file of evidence into it."""

    directory: str
    name: str
    text: str


class WriteStacks(Message):
    """Order to a worker that makes no progress: write the Python stacks to standard error."""

    worker_id: str
    step: int
    microbatch: int
    seconds: float


class Drain(Message):
    """Request of an agent: take these workers out at the end of the step (empty: all of this agent's workers)."""

    worker_ids: list[str] = []
    reason: str = ""


class Offer(Message):
    """Request of an agent: have at most so many workers on its machine from now on, which may be fewer or more."""

    num_workers: int
    reason: str = ""


class MachinesGone(Message):
    """Report of the command: the agents that it has started on these machines have ended, once at least."""

    names: tuple[str, ...]


class Scale(Message):
    """Request from outside: change the number of workers."""

    num_workers: int


class Stop(Message):
    """Request from outside: end the run at the end of the step."""

    reason: str


class UserSentence(Message):
    """A sentence for the user, e.g. what the head has decided and why. Agents show it."""

    text: str


class Lost(Message):
    """The connection of a worker or an agent has closed. Inside the head only, never sent."""

    reason: str = ""


_ALL = (
    Hello | Ready | Holding | Beat | Beats | Suspect | StepDone | Happened | Failed | Leaving | Finished | Left
    | RunDirectoryChosen | StoreCall | TalkCall | TalkDone | Welcome | Notice | StoreAnswer | TalkAnswer | Ended
    | AgentHello | MachinesGone | WorkerExit | Start | Evict | WriteStacks | Drain | Offer | Scale | Stop | UserSentence
    | HeadSnapshot | Kept | Wanted | Heads | Foreign | Moved | Proposal | Verdict
    | Ailing | Convicted | Holds | Inquire | Statement | WriteEvidence | Used
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_ALL)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Any:
    """Return the message in ``data``.

    Raises:
        ProtocolError: this version does not know such a message.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not a message of protocol {PROTOCOL}: {error}") from error
