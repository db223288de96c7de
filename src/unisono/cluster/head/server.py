"""The run's one server: takes connections, and gives each message to the part of the head that it is for.

`unisono.cluster.head.table` decides who is in the run, `unisono.cluster.head.telling` sends what was decided and passes
on what happens in the run, and `unisono.cluster.head.keystore` is the store in which members find each other.
"""

from __future__ import annotations

import asyncio
import errno
import math
import signal
import socket
import ssl
import time
import traceback
from typing import Any, Final

import msgspec
from websockets.exceptions import ConnectionClosed

from unisono.cluster.head.connections import ConnectionsByName, Line, Silences
from unisono.cluster.head.directory import AddressFiles, Directory
from unisono.cluster.head.door import Caller, Refusals, open_door
from unisono.cluster.head.keystore import Keys
from unisono.cluster.head.meeting import Meeting
from unisono.cluster.head.story import Story
from unisono.cluster.head.table import Table
from unisono.cluster.head.telling import Telling, machines_status, workers_status
from unisono.cluster.head.versions import HeadMemory
from unisono.cluster.head.viewing import Viewing
from unisono.cluster.head.visitors import Visitors
from unisono.core.errors import ProtocolError
from unisono.core.messages import (
    AgentHello,
    Ailing,
    Beats,
    Ended,
    Happened,
    Heads,
    Hello,
    Holds,
    Kept,
    Lost,
    Message,
    Proposal,
    RunDirectoryChosen,
    Scale,
    Statement,
    Stop,
    StoreCall,
    Used,
    UserSentence,
    Welcome,
    WorkerExit,
    decode,
    encode,
)
from unisono.core.policy import Policy
from unisono.core.sides import HelloAnswer
from unisono.core.spec import RunSpec
from unisono.core.words import script_in
from unisono.membership import Event, Send, TookOver, agent_name, machines, part_of, seat_of
from unisono.membership.hellos import differences
from unisono.membership.roster import ALIVE, State, Worker, resumed
from unisono.record.journal.lines import plain
from unisono.record.overview import OverviewBuilder, status_of
from unisono.record.problems.kinds import Trouble
from unisono.record.rundir import STATUS_SCHEMA
from unisono.system.lifetime import end_group, end_when_silent, start_time
from unisono.views.page.site import WATCH
from unisono.views.watch.prometheus import CONTENT_TYPE, exposition

__all__ = ["Head", "Settings"]

EVENTS_SHOWN: Final = 20  # in a status
FULL_EVERY_S: Final = 60.0  # between two announcements that there is no room for another connection
FULL: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
LAST_WORDS_S: Final = 1.0  # at its end the head waits so long for its last messages to go out


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the head. They hold the arguments of the script, which are not for other users of the machine."""

    policy: Policy
    run_id: str
    spec: RunSpec
    """Settings of the run, for machines that join."""
    listener: int = -1
    """File descriptor of the socket that listens; the agent has bound it and keeps it."""
    url: str = ""
    """Where other machines reach the head, for invitations."""
    local_url: str = ""
    """Where this machine does, for the run directory; "": at the same address."""
    term: int = 1
    """One more than that of the head before this one."""
    identity: str = ""
    """The file with the head's certificate and private key (`Memory.inherited_path`); "": connections are in the clear.
    """
    seat: str = ""
    """The agent whose child this head is; "": the command that has started the run, or that of the head before."""
    branch: str = ""
    """The branch of the run's history that the agent of this head has followed."""
    before: str = ""
    """"gone": the machine of the head before this one answers, and no agent is there; "away": it is out of reach."""
    name: str = ""
    """A name that no other head of the run has."""


class Head:
    """Server around the membership table: receives messages, and sends what the table decides.

    Args:
        snapshot: the newest state of the head before this one (`HeadSnapshot.state`); empty for the first head.
    """

    def __init__(self, settings: Settings, token: str, snapshot: bytes = b"") -> None:
        spec, run_id, url = settings.spec, settings.run_id, settings.url
        term, name = settings.term, settings.name
        memory = HeadMemory.decode(snapshot) if snapshot else HeadMemory.first(settings.policy, spec)
        now = time.monotonic()
        since = now if memory.clock is None else memory.clock
        state = memory.state
        self._took_over = TookOver(before=seat_of(state), is_gone=settings.before == "gone")
        if snapshot:
            state = resumed(state, term, now, seat=settings.seat, head=name, branch=settings.branch, since=since - now)
        state = msgspec.structs.replace(state, term=term, head=name)
        self._token = token
        self._run_id = run_id
        self._spec = spec
        self._url = url
        self._full_at = -math.inf
        self._lines = ConnectionsByName()
        self._keys = Keys()
        self._silences = Silences(spec.settings.heartbeat_s)
        self._story = Story(memory.story, f"{term}{name}")
        self._processes = Processes(state)
        self._refusals = Refusals(
            self._announce,
            lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call),
        )
        run_dir = spec.settings.run_dir or memory.run_dir
        self._address = AddressFiles(run_id, settings.local_url or url, token, made=run_dir if snapshot else "")
        self._directory = Directory(
            run_id,
            run_dir,
            memory.facts,
            memory.seers,
            self._address,
            told=self._announce,
            changed=self._may_write_has_changed,
            chosen=lambda: self.table.remember(),
        )
        self._overviews = OverviewBuilder(
            run_id,
            script=script_in(spec.arguments),
            started=memory.started,
            interrupted_s=memory.story.interrupted_s,
        )
        for event in memory.story.told:
            self._overviews.take(event)
        self._viewing = Viewing(self._overviews, run_id, is_first=not snapshot)
        self._viewing.reads_from(run_dir, memory.facts)
        self.table = Table(
            state,
            memory,
            lines=self._lines,
            directory=self._directory,
            story=self._story,
            follow=self._follow,
            alarm=lambda trouble: self._telling.take_trouble(trouble),
            send=lambda message: self._telling.send(message),
            heartbeat_s=spec.settings.heartbeat_s,
        )
        self._telling = Telling(
            self.table,
            self._lines,
            run_id,
            spec,
            token,
            url=url,
            directory=self._directory,
            story=self._story,
            viewing=self._viewing,
        )
        self._troubles = self._telling.troubles
        self._meeting = Meeting(
            run_id,
            url,
            table=self.table,
            lines=self._lines,
            telling=self._telling,
            directory=self._directory,
            give_way=self._give_way,
        )
        self.has_given_way = False
        """This head has ended because another side of the run goes on."""
        self.over = asyncio.Event()

    async def run(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serve until the run is over and all agents know that, or `over` is set.

        Args:
            tls: settings of TLS (`unisono.cluster.trust.certificate.server_context`); None: connections are in the
                clear.
        """
        asyncio.get_running_loop().set_exception_handler(self._trouble)
        visitors = Visitors(
            self._token,
            self._url,
            is_secure=tls is not None,
            status=self.status,
            metrics=lambda: (CONTENT_TYPE, exposition(self._viewing.overview())),
            may_watch=self._viewing.why_not,
            refused=lambda why, connection: self._refusals.note(why, connection.where),
        )
        await self._begin()
        server = await open_door(listener, tls, self._refusals, request=visitors.respond, handler=self._serve)
        tasks = [asyncio.create_task(work) for work in (self._meeting.search(self._token), self._directory.look())]
        try:
            await self.over.wait()
        finally:
            for task in tasks:
                task.cancel()
            await self._troubles.end()
            await self._meeting.moved()  # else the other side would write while workers of this one still do
            await self._directory.close(forgets_address=not self.has_given_way)
            if not self.has_given_way:
                self.table.release()
            await self._viewing.end()
            await self._lines.close(LAST_WORDS_S)
            server.close()
            listener.close()

    def end_workers(self) -> None:
        """End this machine's workers, with their children, unless their agent has seen them end."""
        self._processes.end()

    async def _begin(self) -> None:
        """Go on from the head before this one, and with the run's directory."""
        has_moved = self._took_over.before not in ("", seat_of(self.state))
        if has_moved:
            self.table.take("", self._took_over)
        others = self.state.agents.keys() - {seat_of(self.state)}
        await self._directory.open(has_moved=has_moved, said=self.table.say, others=others)

    # -- http ----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the values that ``unisono watch --once`` shows (docs/files.md)."""
        state, overview = self.state, self._viewing.overview(is_fresh=True)
        found = {
            "schema": STATUS_SCHEMA,
            "run_id": self._run_id,
            "state": state.label,
            "reason": self.table.reason,
            "generation": state.generation,
            **status_of(overview),
            "started": self.table.started,
            "ended": 0.0,
            "url": self._url,
            "run_dir": self._directory.path,
            "job": msgspec.to_builtins(self._spec),
            "machines": machines_status(state, self._telling.uses.newest),
            "parts": state.policy.parts,
            "workers": workers_status(state),
            "interruptions": [msgspec.to_builtins(each) for each in overview.interruptions],
            "events": [msgspec.to_builtins(each) for each in self._story.recent[-EVENTS_SHOWN:]],
        }
        shown: dict[str, Any] = plain(found)
        return shown

    # -- connections ---------------------------------------------------------------------------------

    def _trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle errors of the event loop. A connection for which there is no room is announced, once a minute."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in FULL and "socket" in context):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._full_at > FULL_EVERY_S:
            self._full_at = time.monotonic()
            self._announce(
                f"the head cannot accept another connection ({error.strerror}); it has {len(self._lines)} of workers "
                "and machines. Is a program flooding its port? `ulimit -n` is the limit of open files"
            )

    async def _serve(self, connection: Caller) -> None:
        if connection.request is not None and connection.request.path.partition("?")[0] == WATCH:
            await self._viewing.serve(connection)
            return
        line = Line(connection)
        name = ""
        why = "its connection closed"
        end_when_silent(connection.transport.get_extra_info("socket"))
        try:
            first = decode(_binary(await connection.recv()))
            name = await self._admit(line, first)
            if not name:
                return
            async for data in connection:
                await self._take(line, name, decode(_binary(data)))
        except ProtocolError as error:
            why = str(error)
            line.put(encode(UserSentence(text=why)))
            if not name and self._refusals.note(f"with the run's token ({why})", connection.where):
                self._troubles.say(Trouble(kind="failed-join", host=connection.where, error=why))
        except ConnectionClosed:
            pass
        except Exception:  # a bug of this library: connections without the token do not get here
            traceback.print_exc()
            why = "the head failed at one of its messages"
        finally:
            line.put(None)
            if name and self._lines.get(name) is line:
                del self._lines[name]
                self._troubles.gone(name)
                if not self.over.is_set():  # else this head closes all connections, and decides nothing more
                    self.table.take(name, Lost(reason=why))
            if self.state.ended is not None and self._telling.is_everybody_informed():
                self.over.set()
            await line.sender

    async def _admit(self, line: Line, first: Message) -> str:
        """Answer the first message of a connection.

        Returns:
            The name of the worker or agent; "": the connection is of no use any more.

        Raises:
            ProtocolError: refused.
        """
        match first:
            case Scale() | Stop():
                await self._outside(line, first)
            case Proposal():
                line.put(encode(self._meeting.answer(first)))
                self._meeting.act()
            case Hello() | AgentHello() if first.run_id not in ("", self._run_id):
                self._refuse(line, first)
            case Hello() | AgentHello():
                answer = self._meeting.admit(first)
                if isinstance(answer, Message):
                    line.put(encode(answer))
                return self._welcome(line, first) if answer is HelloAnswer.WELCOME else ""
            case _:
                raise ProtocolError(f"the first message of a connection must be a hello, not {type(first).__name__}")
        return ""

    async def _take(self, line: Line, name: str, message: Message) -> None:
        """Deal with a message of a worker or an agent that has said hello."""
        match message:
            case StoreCall(operation="get" | "wait"):
                asyncio.create_task(self._store(line, message)).add_done_callback(_consume)
            case StoreCall():
                await self._store(line, message)
            case RunDirectoryChosen():
                self._take_directory(name, message)
            case Happened():
                self._telling.pass_on(message.events)
            case Used() if name in self.state.agents:
                self._telling.take_use(name, message.use)
            case Kept():
                self.table.take_kept(name, message)
            case Statement():
                self._troubles.heard(name, message)
            case Ailing():
                self._troubles.ails(name, message)
            case Holds():
                self._troubles.holds(name, message)
            case Beats() if name in self.state.agents:
                if words := self._silences.heard(self.state, name, message.beats, time.monotonic()):
                    self._announce(words)
                self.table.take_beats(message)
            case _:
                self.table.take(name, message)

    def _take_directory(self, name: str, message: RunDirectoryChosen) -> None:
        """Note where the run writes, and that this worker sees it there."""
        worker = self.state.workers.get(name)
        host = worker.info.host if worker is not None and worker.info is not None else ""
        self.tell_agents(msgspec.structs.replace(message, host=host))
        self._directory.facts = message.facts or self._directory.facts
        self._viewing.reads_from(self._directory.path or message.path, self._directory.facts)
        if worker is not None and worker.agent not in self._directory.seers:
            self._directory.seers[worker.agent] = None
            self.table.remember_soon()
        if self._directory.path in ("", message.path):
            self._directory.enter(message.path)
            self.table.remember_soon()

    def _welcome(self, line: Line, first: Hello | AgentHello) -> str:
        """Answer a hello; returns the name of the worker or agent."""
        warnings: list[str] = []
        if isinstance(first, Hello):
            name = first.info.worker_id
            if self.state.fingerprint is not None:
                warnings = differences(self.state.fingerprint, first.fingerprint)
        else:
            name = agent_name(self.state, first)
        before = self._lines.get(name)
        self._lines[name] = line
        welcome = Welcome(
            run_id=self._run_id,
            heartbeat_s=self._spec.settings.heartbeat_s,
            term=self.state.term,
            warnings=warnings,
            agent_id=name if isinstance(first, AgentHello) else "",
            part=part_of(self.state, name) if isinstance(first, Hello) else 0,
            branch=self.state.branch_name,
            may_write=self._directory.may_write,
            num_machines=len(self.state.agents) + 1 if isinstance(first, AgentHello) else 0,
            machines=machines(self.state) if isinstance(first, AgentHello) else [],
        )
        line.put(encode(welcome))
        if isinstance(first, AgentHello) and first.agent_id == name:  # it may have missed some, also of the head before
            line.put(encode(Happened(events=self._story.recent)))
        if self.state.ended is not None:
            self.table.send_when_held(Send(name, self.state.ended))
            return name
        try:
            self.table.take(name, first)
        except ProtocolError as error:
            # Refused, now and later. The name may belong to another connection, which keeps it.
            line.put(encode(Ended(ok=False, reason=str(error), exit_code=1)))
            if isinstance(first, Hello):
                self._announce(f"a worker was rejected: {error}")
            who, host = (name, first.info.host) if isinstance(first, Hello) else ("", first.host)
            self._troubles.take(Trouble(kind="failed-join", worker_id=who, host=host, error=str(error)))
            if before is None:
                del self._lines[name]
            else:
                self._lines[name] = before
            raise
        if before is not None:
            before.put(None)  # the earlier connection broke, which the head has not noticed yet
        return name

    async def _outside(self, line: Line, message: Scale | Stop) -> None:
        """Answer a command, when the heirs know of it."""
        if self.state.ended is not None:
            line.put(encode(UserSentence(text=f"the run is over: {self.state.ended.reason}")))
            return
        self.table.take("", message)
        answer = UserSentence(text=self.table.reason)
        await self.table.held()
        line.put(encode(answer))

    def _refuse(self, line: Line, first: Hello | AgentHello) -> None:
        """Send away what is left of an earlier run at this address with this token: it holds another state."""
        why = f"the head at this address now belongs to run {self._run_id}, not to run {first.run_id}"
        line.put(encode(Ended(ok=False, reason=why, exit_code=1)))

    # -- what the parts of the head call -------------------------------------------------------------

    @property
    def state(self) -> State:
        """The membership."""
        return self.table.state

    def _follow(self, before: State, event: Event) -> None:
        state, message = self.state, event.message
        if isinstance(message, Hello) and (worker := state.workers.get(event.source)) is not None:
            self._processes.note(worker, state)
        elif isinstance(message, WorkerExit):
            self._processes.has_ended(message.worker_id)
        if state.generation > before.generation:
            # Two generations live at any time: this one, and the one before, which some members have not left.
            self._keys.end_generations(state.generation - 1)
        if state.ended is not None:
            self._troubles.hurry()

    def _give_way(self) -> None:
        self.has_given_way = True
        self.over.set()

    def _announce(self, text: str) -> None:
        self._telling.announce(text)

    def tell_agents(self, message: Message) -> None:
        self._lines.send_all(self.state.agents, message)

    def _may_write_has_changed(self) -> None:
        heads = Heads(branch=self.state.branch_name, may_write=self._directory.may_write)
        self._lines.send_all(self.state.workers, heads)

    async def _store(self, line: Line, call: StoreCall) -> None:
        line.put(encode(await self._keys.answer(call)))


class Processes:
    """The workers on the head's own machine, as processes that the head may have to end.

    Those whose end was not reported to this head: the report may have been lost with the head before.

    Args:
        state: what this head goes on from.
    """

    def __init__(self, state: State) -> None:
        self._known: dict[str, tuple[int, str]] = {}
        for worker in state.workers.values():
            self.note(worker, state)

    def note(self, worker: Worker, state: State) -> None:
        """Note a worker, if it lives on this machine."""
        agent = state.agents.get(worker.agent)
        is_here = agent is not None and agent.agent_id == seat_of(state)
        if is_here and worker.info is not None and worker.state in ALIVE:
            self._known[worker.worker_id] = (worker.info.pid, start_time(worker.info.pid))

    def has_ended(self, worker_id: str) -> None:
        """Note that the agent has seen the end of a worker."""
        self._known.pop(worker_id, None)

    def end(self) -> None:
        """End the workers that are left, with their children."""
        for pid, started in self._known.values():
            # The system does not reuse a process id as long as a group has it.
            if start_time(pid) in ("", started):
                end_group(pid, signal.SIGKILL)


def _binary(data: str | bytes) -> bytes:
    if isinstance(data, str):
        raise ProtocolError("messages are binary, got text")
    return data


def _consume(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
