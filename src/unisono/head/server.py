"""Connections in, decisions of `unisono.decisions.membership`, connections out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import math
import signal
import socket
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from unisono import events
from unisono.decisions.membership import (
    Action,
    Event,
    Hangup,
    Lags,
    Send,
    Tick,
    agent_name,
    heirs,
    next_deadline,
    routine_of_many,
    step,
)
from unisono.decisions.membership.likeness import differences
from unisono.decisions.membership.roster import ALIVE, Policy, State, Worker, resumed
from unisono.errors import ProtocolError
from unisono.events import StepFinished
from unisono.head.address import AddressFiles
from unisono.head.keys import Keys
from unisono.head.line import Line
from unisono.head.memory import Memory
from unisono.head.status import respond, workers_status
from unisono.head.versions import Outgoing, Versions
from unisono.lifetime import end_group, end_when_silent, start_time
from unisono.messages import (
    AgentHello,
    Announcement,
    Beat,
    Beats,
    Ended,
    Happened,
    Hello,
    Holding,
    Kept,
    Lost,
    Message,
    Ready,
    RunDirectory,
    Scale,
    StepDone,
    Stop,
    StoreCall,
    TalkCall,
    Welcome,
    WorkerExit,
    WorkerLate,
    decode,
    encode,
)
from unisono.packed import pack
from unisono.spec import RunSpec

__all__ = ["Head"]

MAX_MESSAGE_BYTES = 4 * 2**20
MAX_STEPS_QUEUED = 1_000
CATCH_UP_BEATS = 2  # a head that stood still waits for so many heartbeats before it calls a worker silent
FULL_EVERY_S = 60.0  # between two announcements that there is no room for another connection
FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_REPORTED_AGAIN = Beat | StepDone | Hello | Ready | Holding | TalkCall
"""Messages that a worker sends again to a head that follows: one without a consequence need not be remembered at once.
"""
LAST_WORDS_S = 1.0  # at its end the head waits so long for its last messages to go out


class Head:
    """Server around the membership table: receives messages, and sends what the table decides.

    Args:
        spec: settings of the run, for machines that join.
        url: address of the head, for the run directory.
        snapshot: the newest state of the head before this one (`Snapshot.state`).
        term: one more than that of the head before this one.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        token: str,
        run_id: str,
        spec: RunSpec,
        url: str = "",
        snapshot: bytes = b"",
        term: int = 1,
    ) -> None:
        memory = Memory.decode(snapshot) if snapshot else Memory.first(policy, spec.script)
        state = resumed(memory.state, term, time.monotonic()) if snapshot else memory.state
        self._state = dataclasses.replace(
            state, term=term, policy=dataclasses.replace(state.policy, heartbeat_s=spec.heartbeat_s)
        )
        self._token = token
        self._run_id = run_id
        self._spec = spec
        self._run_dir = memory.run_dir or spec.run_dir
        self._lines: dict[str, Line] = {}
        self._keys = Keys()
        self._reason = memory.reason
        self._started = memory.started
        self._last: StepFinished | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._remembering: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._listens_until = 0.0
        self._full_at = -math.inf
        self._address = AddressFiles(run_id, url, token, made=memory.run_dir if snapshot else "")
        # Pids and start times of the workers of this machine whose end was not reported to this head: the report may
        # have been lost with the head before.
        self._here: dict[str, tuple[int, str]] = {}
        for worker in self._state.workers.values():
            self._note_process(worker)
        self._url = url
        self._encoded_last: tuple[Message | None, bytes] = (None, b"")
        self._informed: set[str] = set()  # agents and workers that have got the end of the run
        self._versions = Versions(
            self._lines, send=self._send, leave_out=lambda heir: self._happens(heir, Lags()), slack_s=spec.heartbeat_s
        )
        self.superseded_by = 0
        """The term of a head that has taken over from this one."""
        self.over = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Serve until the run is over and all agents know that, or `over` is set."""
        asyncio.get_running_loop().set_exception_handler(self._trouble)
        server: Server = await serve(
            self._serve,
            sock=listener,
            process_request=self._request,
            compression=None,
            ping_interval=None,
            max_size=MAX_MESSAGE_BYTES,
            close_timeout=1.0,
            logger=_SILENT,
        )
        try:
            if self._run_dir:
                self._write_address(self._run_dir)
            await self.over.wait()
        finally:
            if not self.superseded_by:
                self._address.remove()
                self._versions.change_heirs(())
            for line in list(self._lines.values()):
                line.put(None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await asyncio.gather(*(line.sender for line in self._lines.values()), return_exceptions=True)
            server.close()

    def end_workers(self) -> None:
        """End this machine's workers, with their children, unless their agent has seen them end."""
        for pid, started in self._here.values():
            # The system does not reuse a process id as long as a group has it.
            if start_time(pid) in ("", started):
                end_group(pid, signal.SIGKILL)

    # -- http ----------------------------------------------------------------------------------------

    def _request(self, connection: ServerConnection, request: Request) -> Response | None:
        return respond(connection, request, self._token, self.status)

    def status(self) -> dict[str, Any]:
        """Return the values that ``unisono status`` shows."""
        state, last = self._state, self._last
        return {
            "run_id": self._run_id,
            "state": state.label,
            "reason": self._reason,
            "generation": state.generation,
            "step": last.step if last else None,
            "num_steps": last.num_steps if last else 0,
            "loss": last.loss if last else None,
            "started": self._started,
            "url": self._url,
            "run_dir": self._run_dir,
            "job": msgspec.to_builtins(self._spec),
            "workers": workers_status(state),
        }

    # -- connections ---------------------------------------------------------------------------------

    def _trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle errors of the event loop. A connection for which there is no room is announced, once a minute."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in FULL and "socket" in context):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._full_at > FULL_EVERY_S:
            self._full_at = time.monotonic()
            self._tell_agents(
                Announcement(
                    text=f"the head cannot take another connection ({error.strerror}); it has {len(self._lines)} of "
                    "workers and machines. Does a program flood its port? The limit of open files is that of `ulimit "
                    "-n`"
                )
            )

    async def _serve(self, connection: ServerConnection) -> None:
        line = Line(connection)
        name = ""
        why = "its connection closed"
        end_when_silent(connection.transport.get_extra_info("socket"))
        try:
            first = decode(_binary(await connection.recv()))
            if isinstance(first, Scale | Stop):
                await self._outside(line, first)
                return
            if isinstance(first, Hello | AgentHello) and first.term > self._state.term:
                self._give_way(first.term)
                return
            name = self._welcome(line, first)
            async for data in connection:
                await self._take(line, name, decode(_binary(data)))
        except ProtocolError as error:
            why = str(error)
            line.put(encode(Announcement(text=why)))
        except ConnectionClosed:
            pass
        except Exception:  # a bug of this library: connections without the token do not get here
            traceback.print_exc()
            why = "the head failed at one of its messages"
        finally:
            line.put(None)
            if name and self._lines.get(name) is line:
                del self._lines[name]
                if not self.over.is_set():  # else this head closes all connections, and decides nothing more
                    self._happens(name, Lost(reason=why))
            if self._state.ended is not None and self._all_informed():
                self.over.set()
            await line.sender

    async def _take(self, line: Line, name: str, message: Message) -> None:
        """Deal with a message of a worker or an agent that has said hello."""
        match message:
            case StoreCall(operation="get" | "wait"):
                asyncio.create_task(self._store(line, message)).add_done_callback(_consume)
            case StoreCall():
                await self._store(line, message)
            case RunDirectory():
                self._tell_agents(message)
                if self._run_dir in ("", message.path):
                    self._write_address(message.path)
                    self._remember()
            case Happened():
                self._pass_on(message)
            case Kept():
                self._kept(name, message)
            case Beats() if name in self._state.agents:
                self._take_beats(message)
            case _:
                self._happens(name, message)

    def _all_informed(self) -> bool:
        """Return whether all agents have got the end of the run, and have disconnected.

        The command that started the run counts even if it has not connected to this head yet; it ends the head when it
        ends.
        """
        agents = self._state.agents
        commands = {agent_id for agent_id, agent in agents.items() if agent.primary}
        return commands <= self._informed and not agents.keys() & self._lines.keys()

    def _welcome(self, line: Line, first: Message) -> str:
        """Answer a hello; returns the name of the worker or agent."""
        warnings: list[str] = []
        if isinstance(first, Hello):
            name = first.info.worker_id
            if self._state.fingerprint is not None:
                warnings = differences(self._state.fingerprint, first.fingerprint)
        elif isinstance(first, AgentHello):
            name = agent_name(self._state, first)
        else:
            raise ProtocolError(f"the first message of a connection is a hello, not {type(first).__name__}")
        before = self._lines.get(name)
        self._lines[name] = line
        welcome = Welcome(
            run_id=self._run_id,
            heartbeat_s=self._spec.heartbeat_s,
            term=self._state.term,
            warnings=warnings,
            agent_id=name if isinstance(first, AgentHello) else "",
        )
        line.put(encode(welcome))
        if self._state.ended is not None:
            self._versions.when_held([Send(name, self._state.ended)])
            return name
        try:
            self._happens(name, first)
        except ProtocolError as error:
            # Refused, now and later. The name may belong to another connection, which keeps it.
            line.put(encode(Ended(ok=False, reason=str(error), exit_code=1)))
            if isinstance(first, Hello):
                self._tell_agents(Announcement(text=f"a worker is refused: {error}"))
            if before is None:
                del self._lines[name]
            else:
                self._lines[name] = before
            raise
        if before is not None:
            before.put(None)  # the earlier connection broke, which the head has not noticed yet
        return name

    async def _outside(self, line: Line, message: Scale | Stop) -> None:
        if self._state.ended is not None:
            line.put(encode(Announcement(text=f"the run is over: {self._state.ended.reason}")))
            return
        self._happens("", message)
        answer = Announcement(text=self._reason)
        is_held = asyncio.get_running_loop().create_future()
        self._versions.when_held([is_held])
        await is_held
        line.put(encode(answer))

    def _give_way(self, term: int) -> None:
        """End this head, and nothing else, because another one has taken over."""
        self.superseded_by = term
        self.over.set()

    async def _store(self, line: Line, call: StoreCall) -> None:
        line.put(encode(await self._keys.answer(call)))

    # -- decisions -----------------------------------------------------------------------------------

    def _happens(self, source: str, message: Message | Tick | Lags) -> None:
        """Pass one event to the table, and act on its decisions."""
        if isinstance(message, Tick):
            self._timer = None
        now = self._look_at_clock()
        if isinstance(message, Tick) and now < self._listens_until:
            self._set_timer()
            return
        before = self._state
        self._state, actions, reason = step(before, Event(source, message), now)
        self._versions.change_heirs(heirs(self._state))
        if isinstance(message, Hello):
            self._note_process(self._state.workers[source])
        elif isinstance(message, WorkerExit):
            self._here.pop(message.worker_id, None)
        if reason:
            self._reason = reason
        # The first step is sent to the heirs at once: from then on there is something to lose.
        is_first_step = before.committed < 0 <= self._state.committed
        is_new = bool(actions) and not self._is_repetition(actions, before)
        # A head that follows waits for every worker to connect again, so that a connection is closed is no news to it.
        is_reported_again = isinstance(message, _REPORTED_AGAIN) or (
            isinstance(message, Lost) and source in before.workers
        )
        if is_new or is_first_step or not is_reported_again:
            self._remember()
        elif not isinstance(message, Beat | StepDone):
            self._remember_soon()
        if self._state.generation > before.generation:
            # Two generations live at any time: this one, and the one before, which some members have not left.
            self._keys.end_generations(self._state.generation - 1)
        following: list[Action] = list(actions)
        if reason and self._state.ended is None:
            following += [Send(agent_id, Announcement(text=reason)) for agent_id in self._listeners()]
        self._versions.when_held(following)
        self._set_timer()

    def _look_at_clock(self) -> float:
        """Return the time. Notes when this process has stood still: messages have arrived that are not read yet."""
        now = time.monotonic()
        if now > self._due + self._spec.heartbeat_s:
            self._listens_until = now + CATCH_UP_BEATS * self._spec.heartbeat_s
        return now

    def _take_beats(self, message: Beats) -> None:
        """Deal with the heartbeats of a machine's workers: together, but those from which something may follow."""
        self._state, rest = routine_of_many(self._state, message.beats, self._look_at_clock())
        while rest:
            first, *rest = rest
            self._happens(first.worker_id, first.beat)
            self._state, rest = routine_of_many(self._state, rest, time.monotonic())
        self._set_timer()

    def _is_repetition(self, actions: Sequence[Action], before: State) -> bool:
        """Return whether the heirs have heard of all of this: a worker that comes back is sent the newest notice again.

        A head that has taken over is called by all workers at once, and must have told the heirs its state once.
        """
        is_known = all(isinstance(action, Send) and action.message is before.notice for action in actions)
        return is_known and self._versions.number > 0

    # -- versions for the heirs ----------------------------------------------------------------------

    def _remember_soon(self) -> None:
        """`_remember` an event that no process acts on, and that a member reports again to a head that follows.

        All members report such an event at the same time, and a version of the state is as long as there are members.
        """
        if self._remembering is None:
            loop = asyncio.get_running_loop()
            self._remembering = loop.call_later(self._spec.heartbeat_s / 4, self._remember)

    def _remember(self) -> None:
        """Send the heirs a new version of the state."""
        if self._remembering is not None:
            self._remembering.cancel()
            self._remembering = None
        self._versions.make(Memory(self._state, self._started, self._reason, self._run_dir))

    def _kept(self, agent_id: str, message: Kept) -> None:
        """Note that an agent holds a version of the state."""
        agent = self._state.agents.get(agent_id)
        if agent is None or message.term != self._state.term:
            return
        self._versions.hold(agent_id, message.number)
        if agent.lags and message.number == self._versions.number:
            self._happens(agent_id, message)

    def _send(self, message: Outgoing) -> None:
        if isinstance(message, asyncio.Future):
            if not message.done():
                message.set_result(None)
            return
        line = self._lines.get(message.to if isinstance(message, Send) else message.worker_id)
        if line is None:
            return
        if isinstance(message, Hangup):
            line.put(encode(Ended(ok=False, reason=message.reason, exit_code=1)))
            line.put(None)
        else:
            line.put(self._encoded(message.message))
            if isinstance(message.message, Ended):
                self._informed.add(message.to)
            elif isinstance(message.message, WorkerLate):
                self._pass_on(Happened(event=events.WorkerLate(**msgspec.structs.asdict(message.message))))

    def _encoded(self, message: Message) -> bytes:
        """Return what to send for a message; one that goes to all members is encoded once."""
        known, data = self._encoded_last
        if known is not message:
            data = pack(encode(message))
            self._encoded_last = (message, data)
        return data

    def _pass_on(self, message: Happened) -> None:
        """Give an event to the sinks of all machines that have some."""
        event = message.event
        # A worker that connects again repeats its last step.
        if isinstance(event, StepFinished) and (self._last is None or event.step >= self._last.step):
            self._last = event
        self._tell(self._listeners(), message)

    def _listeners(self) -> list[str]:
        return [agent_id for agent_id, agent in self._state.agents.items() if agent.listens]

    def _note_process(self, worker: Worker) -> None:
        agent = self._state.agents.get(worker.agent)
        if agent is not None and agent.primary and worker.info is not None and worker.state in ALIVE:
            self._here[worker.worker_id] = (worker.info.pid, start_time(worker.info.pid))

    def _tell_agents(self, message: Message) -> None:
        self._tell(self._state.agents, message)

    def _tell(self, agent_ids: Iterable[str], message: Message) -> None:
        data = encode(message)
        for agent_id in agent_ids:
            line = self._lines.get(agent_id)
            # An agent that is stopped for a while (Ctrl-Z) does not need the steps of that time.
            if line is not None and not (isinstance(message, Happened) and line.queue.qsize() > MAX_STEPS_QUEUED):
                line.put(data)

    def _set_timer(self) -> None:
        now = time.monotonic()
        deadline = next_deadline(self._state)
        if self._timer is not None:
            if deadline == self._deadline and now <= self._due:
                return
            self._timer.cancel()
            self._timer = None
        self._due, self._deadline = math.inf, deadline
        if deadline is not None:
            self._due = max(now, deadline, self._listens_until)
            delay = self._due - now
            self._timer = asyncio.get_running_loop().call_later(delay, self._happens, "", Tick())

    def _write_address(self, run_dir: str) -> None:
        try:
            if self._address.write(run_dir):
                self._run_dir = run_dir
        except OSError as error:
            self._tell_agents(Announcement(text=f"cannot write the head's address to {run_dir}: {error}"))


def _silent() -> logging.Logger:
    """Return a logger that drops everything: websockets logs a traceback for whatever a stranger sends."""
    logger = logging.getLogger("unisono.head.websockets")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger


_SILENT = _silent()


def _binary(data: str | bytes) -> bytes:
    if isinstance(data, str):
        raise ProtocolError("messages are binary, got text")
    return data


def _consume(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
