"""Connections in, decisions of `unisono.decisions.membership`, connections out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import hmac
import http
import json
import logging
import math
import os
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from unisono import events
from unisono.decisions.likeness import differences
from unisono.decisions.membership import Event, Hangup, Send, Tick, agent_name, next_deadline, step
from unisono.decisions.roster import ALIVE, Policy, State, Worker, WorkerState, resumed
from unisono.errors import ProtocolError
from unisono.events import StepFinished
from unisono.head.keys import Keys
from unisono.lifetime import end_group, end_when_silent, start_time
from unisono.messages import (
    AgentHello,
    Beat,
    Ended,
    Failed,
    Happened,
    Hello,
    Holding,
    Lost,
    Message,
    Ready,
    RunDirectory,
    Scale,
    Snapshot,
    StepDone,
    Stop,
    StoreCall,
    Told,
    Welcome,
    WorkerExit,
    WorkerLate,
    decode,
    encode,
)
from unisono.rundir import ADDRESS_FILE, TOKEN_FILE, is_taken

__all__ = ["Head"]

MAX_MESSAGE_BYTES = 4 * 2**20
MAX_QUEUED = 10_000
MAX_STEPS_QUEUED = 1_000
CATCH_UP_BEATS = 2  # how many heartbeats a head that was held up waits for, before it calls anybody silent
FULL_EVERY_S = 60.0  # how often it is said that there is no room for another connection
FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
LAST_WORDS_S = 1.0  # how long the head waits at its end for its last messages to go out


@dataclasses.dataclass(frozen=True)
class _Memory:
    """What a head knows and the one that follows it has to."""

    state: State
    started: float
    reason: str
    run_dir: str = ""
    """Where its address is, if the script has chosen that."""
    tried: list[tuple[tuple[int, int], tuple[str, Failed]]] = dataclasses.field(default_factory=list)
    """`State.tried`: tuples are no keys in MessagePack."""

    def encode(self) -> bytes:
        flat = dataclasses.replace(self.state, tried={})
        return msgspec.msgpack.encode(dataclasses.replace(self, state=flat, tried=list(self.state.tried.items())))

    @staticmethod
    def decode(data: bytes) -> _Memory:
        memory = msgspec.msgpack.decode(data, type=_Memory)
        return dataclasses.replace(memory, state=dataclasses.replace(memory.state, tried=dict(memory.tried)), tried=[])


class _Line:
    """One connection, and what waits to be sent over it."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_QUEUED)
        self.sender = asyncio.create_task(self._send())

    def put(self, data: bytes | None) -> None:
        """Queue a message; None closes the connection after those before it."""
        try:
            self.queue.put_nowait(data)
        except asyncio.QueueFull:
            self.connection.transport.abort()  # it does not read: its heartbeat tells the rest

    async def _send(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while (data := await self.queue.get()) is not None:
                await self.connection.send(data)
            await self.connection.close()


class Head:
    """The effects around the membership table.

    Args:
        options: what all members are told (`Welcome.options`).
        url: where others reach it, for the run directory.
        job: what the workers run, for machines that join.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        token: str,
        run_id: str,
        heartbeat_s: float,
        options: dict[str, str],
        url: str = "",
        run_dir: str = "",
        job: dict[str, Any] | None = None,
        snapshot: bytes = b"",
    ) -> None:
        memory = _Memory.decode(snapshot) if snapshot else _first(policy, job)
        state = resumed(memory.state, time.monotonic()) if snapshot else memory.state
        self._state = dataclasses.replace(state, policy=dataclasses.replace(state.policy, heartbeat_s=heartbeat_s))
        self._token = token
        self._run_id = run_id
        self._heartbeat_s = heartbeat_s
        self._options = options
        self._run_dir = memory.run_dir or run_dir
        self._lines: dict[str, _Line] = {}
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
        self._written: dict[Path, str] = {}
        self._made = memory.run_dir if snapshot else ""  # if it is gone, somebody has taken it away
        # Pids and start times of workers of this machine whose end nobody has reported. The report may have been lost
        # with the head before this one.
        self._here: dict[str, tuple[int, str]] = {}
        for worker in self._state.workers.values():
            self._note_place(worker)
        self._url = url
        self._job = job or {}
        self._informed: set[str] = set()  # who has been told how the run ended
        self.over = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Serve until the run is over and everybody has heard it, or `over` is set."""
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
            self._remove_address()
            for line in list(self._lines.values()):
                line.put(None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await asyncio.gather(*(line.sender for line in self._lines.values()), return_exceptions=True)
            server.close()

    def end_workers(self) -> None:
        """End this machine's workers, with their children, unless their agent has seen them end."""
        for pid, started in self._here.values():
            # A number is not given to another process while it is that of a group.
            if start_time(pid) in ("", started):
                end_group(pid, signal.SIGKILL)

    # -- http ----------------------------------------------------------------------------------------

    def _request(self, connection: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition("?")[0]
        if path == "/health":
            return connection.respond(http.HTTPStatus.OK, "ok\n")
        given = request.headers.get_all("Authorization")
        bearer = given[0].removeprefix("Bearer ").encode(errors="surrogateescape") if len(given) == 1 else b""
        if not hmac.compare_digest(bearer, self._token.encode()):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "the run's token is needed\n")
        if path == "/status":
            body = json.dumps(self.status()).encode()
            headers = Headers([("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
            return Response(200, "OK", headers, body)
        if path == "/":
            return None
        return connection.respond(http.HTTPStatus.NOT_FOUND, "there is /health, /status and the WebSocket at /\n")

    def status(self) -> dict[str, Any]:
        """What ``unisono status`` shows."""
        state, last = self._state, self._last
        return {
            "run_id": self._run_id,
            "state": state.word,
            "reason": self._reason,
            "generation": state.generation,
            "step": last.step if last else None,
            "num_steps": last.num_steps if last else 0,
            "loss": last.loss if last else None,
            "started": self._started,
            "url": self._url,
            "run_dir": self._run_dir,
            "job": self._job,
            "workers": [
                self._worker_status(worker)
                for worker in state.workers.values()
                if worker.info is not None and worker.state not in (WorkerState.LEFT, WorkerState.LOST)
            ],
        }

    def _worker_status(self, worker: Worker) -> dict[str, Any]:
        assert worker.info is not None
        members = self._state.members
        taking_part = worker.worker_id in members and worker.state in (WorkerState.ADMITTED, WorkerState.HOLDING)
        return {
            "worker_id": worker.worker_id,
            "rank": members.index(worker.worker_id) if taking_part else None,
            "state": worker.state.value,
            "pid": worker.info.pid,
            "host": worker.info.host,
            "device": worker.info.device,
            "step": worker.beat.step if worker.beat else -1,
            "microbatch": worker.beat.microbatch if worker.beat else -1,
        }

    # -- connections ---------------------------------------------------------------------------------

    def _trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What the event loop has to report: where there is no room for a connection, once a minute in one line."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in FULL and "socket" in context):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._full_at > FULL_EVERY_S:
            self._full_at = time.monotonic()
            self._tell_agents(
                Told(
                    text=f"the head cannot take another connection ({error.strerror}); it has {len(self._lines)} of "
                    "workers and machines. Does a program flood its port? The limit of open files is that of `ulimit "
                    "-n`"
                )
            )

    async def _serve(self, connection: ServerConnection) -> None:
        line = _Line(connection)
        name = ""
        why = "its connection closed"
        end_when_silent(connection.transport.get_extra_info("socket"))
        try:
            first = decode(_binary(await connection.recv()))
            if isinstance(first, Scale | Stop):
                self._outside(line, first)
                return
            name = self._welcome(line, first)
            async for data in connection:
                message = decode(_binary(data))
                if isinstance(message, StoreCall):
                    if message.operation in ("get", "wait"):
                        asyncio.create_task(self._store(line, message)).add_done_callback(_consume)
                    else:
                        line.put(encode(await self._keys.answer(message)))
                elif isinstance(message, RunDirectory):
                    self._tell_agents(message)
                    if self._run_dir in ("", message.path):
                        self._write_address(message.path)
                        self._remember()
                elif isinstance(message, Happened):
                    self._pass_on(message)
                else:
                    self._happens(name, message)
        except ProtocolError as error:
            why = str(error)
            line.put(encode(Told(text=why)))
        except ConnectionClosed:
            pass
        except Exception:  # of this library, not of a stranger: only who has the token comes so far
            traceback.print_exc()
            why = "the head could not deal with what it said"
        finally:
            line.put(None)
            if name and self._lines.get(name) is line:
                del self._lines[name]
                self._happens(name, Lost(reason=why))
            if self._state.ended is not None and self._all_informed():
                self.over.set()
            await line.sender

    def _all_informed(self) -> bool:
        """Whether everybody who shows the end of the run to a user has heard of it.

        The command that started the run is waited for: it may not have found this head yet, and ends it when it ends.
        """
        agents = self._state.agents
        commands = {agent_id for agent_id, agent in agents.items() if agent.primary}
        return commands <= self._informed and not agents.keys() & self._lines.keys()

    def _welcome(self, line: _Line, first: Message) -> str:
        """Take in whoever says hello; returns its name."""
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
            heartbeat_s=self._heartbeat_s,
            warnings=warnings,
            options=dict(self._options),
            agent_id=name if isinstance(first, AgentHello) else "",
        )
        line.put(encode(welcome))
        if self._state.ended is not None:
            line.put(encode(self._state.ended))
            self._informed.add(name)
            return name
        try:
            self._happens(name, first)
        except ProtocolError as error:
            # Refused, so there is no use in coming back. The name may belong to somebody else, who keeps it.
            line.put(encode(Ended(ok=False, reason=str(error), exit_code=1)))
            if isinstance(first, Hello):
                self._tell_agents(Told(text=f"a worker is refused: {error}"))
            if before is None:
                del self._lines[name]
            else:
                self._lines[name] = before
            raise
        if before is not None:
            before.put(None)  # it broke, and this end has not noticed yet
        return name

    def _outside(self, line: _Line, message: Scale | Stop) -> None:
        if self._state.ended is not None:
            line.put(encode(Told(text=f"the run is over: {self._state.ended.reason}")))
            return
        self._happens("", message)
        line.put(encode(Told(text=self._reason)))

    async def _store(self, line: _Line, call: StoreCall) -> None:
        line.put(encode(await self._keys.answer(call)))

    # -- decisions -----------------------------------------------------------------------------------

    def _happens(self, source: str, message: Message | Tick) -> None:
        """One event through the table, and what follows from it."""
        now = time.monotonic()
        if isinstance(message, Tick):
            self._timer = None
        if now > self._due + self._heartbeat_s:
            # It was stopped, or swapped out. What the others have said meanwhile lies there and has not been heard.
            self._listens_until = now + CATCH_UP_BEATS * self._heartbeat_s
        if isinstance(message, Tick) and now < self._listens_until:
            self._set_timer()
            return
        before = self._state
        self._state, actions, reason = step(before, Event(source, message), now)
        if isinstance(message, Hello):
            self._note_place(self._state.workers[source])
        elif isinstance(message, WorkerExit):
            self._here.pop(message.worker_id, None)
        if reason:
            self._reason = reason
        # Before anybody acts on it: whoever follows this head must not decide otherwise.
        # Of the steps the first: from then on there is something to lose, and nobody may begin again.
        is_first_step = before.committed < 0 <= self._state.committed
        if actions or is_first_step or not isinstance(message, Beat | StepDone | Hello | Ready | Holding):
            self._remember()
        elif not isinstance(message, Beat | StepDone):
            self._remember_soon()
        if self._state.generation > before.generation:
            # Two live at any time: this one, and the one before, which not all have left.
            self._keys.end_generations(self._state.generation - 1)
        for action in actions:
            line = self._lines.get(action.to if isinstance(action, Send) else action.worker_id)
            if line is None:
                continue
            if isinstance(action, Hangup):
                line.put(encode(Ended(ok=False, reason=action.reason, exit_code=1)))
                line.put(None)
            else:
                line.put(encode(action.message))
                if isinstance(action.message, Ended):
                    self._informed.add(action.to)
                elif isinstance(action.message, WorkerLate):
                    self._pass_on(Happened(event=events.WorkerLate(**msgspec.structs.asdict(action.message))))
        if reason and self._state.ended is None:
            self._tell_agents(Told(text=reason))
        self._set_timer()

    def _pass_on(self, message: Happened) -> None:
        """Give an event to the sinks of all machines."""
        event = message.event
        # A worker that comes back says its last step again.
        if isinstance(event, StepFinished) and (self._last is None or event.step >= self._last.step):
            self._last = event
        self._tell_agents(message)

    def _note_place(self, worker: Worker) -> None:
        agent = self._state.agents.get(worker.agent)
        if agent is not None and agent.primary and worker.info is not None and worker.state in ALIVE:
            self._here[worker.worker_id] = (worker.info.pid, start_time(worker.info.pid))

    def _remember_soon(self) -> None:
        """`_remember` what nobody acts on, and what a member says again to a head that follows.

        All members say such a thing at the same time, and what is remembered is as long as there are members.
        """
        if self._remembering is None:
            loop = asyncio.get_running_loop()
            self._remembering = loop.call_later(self._heartbeat_s / 4, self._remember)

    def _remember(self) -> None:
        """Give the agent that would start another head what that head has to know."""
        if self._remembering is not None:
            self._remembering.cancel()
            self._remembering = None
        keepers = [i for i, agent in self._state.agents.items() if agent.primary and i in self._lines]
        if keepers:
            memory = _Memory(self._state, self._started, self._reason, self._run_dir)
            data = encode(Snapshot(state=memory.encode()))
            for agent_id in keepers:
                self._lines[agent_id].put(data)

    def _tell_agents(self, message: Message) -> None:
        data = encode(message)
        for agent_id in self._state.agents:
            line = self._lines.get(agent_id)
            # An agent that is stopped for a while (Ctrl-Z) can do without the steps that were done meanwhile.
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

    # -- where others find it ------------------------------------------------------------------------

    def _write_address(self, run_dir: str) -> None:
        """Leave the head's address and token in the run directory; `_remove_address` takes them away.

        Twice does no harm: before the directory is claimed, so that machines can join, and when it is, because another
        run that wanted it may have written its own meanwhile. A directory that another run holds is left alone.
        """
        folder = Path(run_dir)
        is_there = self._written and all(_holds(path, text) for path, text in self._written.items())
        if is_there or is_taken(folder, self._run_id):
            return
        try:
            if run_dir != self._made:
                folder.mkdir(parents=True, exist_ok=True)
                self._made = run_dir
            token_file = folder / TOKEN_FILE
            token_file.unlink(missing_ok=True)
            descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(self._token)
            self._written[token_file] = self._token
            address = folder / ADDRESS_FILE
            known = {"url": self._url, "pid": os.getpid(), "token_file": str(token_file), "run_id": self._run_id}
            part = folder / f"{ADDRESS_FILE}.part"
            text = json.dumps(known) + "\n"
            part.write_text(text)
            part.rename(address)
            self._written[address] = text
            self._run_dir = run_dir
        except OSError as error:
            self._tell_agents(Told(text=f"cannot write the head's address to {run_dir}: {error}"))

    def _remove_address(self) -> None:
        for path, text in self._written.items():
            if _holds(path, text):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        self._written.clear()


def _first(policy: Policy, job: dict[str, Any] | None) -> _Memory:
    """What the first head of a run knows."""
    return _Memory(State(policy=policy, script=(job or {}).get("script", "")), time.time(), "starting")


def _silent() -> logging.Logger:
    """For websockets, which logs with a traceback whatever somebody without the token may say."""
    logger = logging.getLogger("unisono.head.websockets")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger


_SILENT = _silent()


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


def _binary(data: str | bytes) -> bytes:
    if isinstance(data, str):
        raise ProtocolError("messages are binary, got text")
    return data


def _consume(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
