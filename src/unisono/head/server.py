"""Connections in, decisions of `unisono.decisions.membership`, connections out."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import signal
import socket
import ssl
import time
import traceback
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from websockets.exceptions import ConnectionClosed

from unisono import events
from unisono.decisions.membership import (
    Action,
    Alarm,
    Event,
    Hangup,
    Invite,
    Lags,
    Send,
    Tick,
    TookOver,
    agent_name,
    machines,
    next_deadline,
    routine_of_many,
    seat_of,
    step,
)
from unisono.decisions.membership.likeness import differences
from unisono.decisions.membership.roster import ALIVE, State, Worker, resumed
from unisono.decisions.policy import Policy
from unisono.errors import ProtocolError
from unisono.head.address import AddressFiles
from unisono.head.directory import Directory
from unisono.head.door import Caller, open_door
from unisono.head.keys import Keys
from unisono.head.line import Line
from unisono.head.meeting import Meeting
from unisono.head.memory import Memory
from unisono.head.refusals import Refusals
from unisono.head.reunion import Reunion
from unisono.head.status import machines_status, workers_status
from unisono.head.story import Story
from unisono.head.telling import Telling, how_to_join
from unisono.head.versions import Outgoing, Versions
from unisono.head.viewing import Viewing
from unisono.head.visitors import Visitors
from unisono.journal.lines import plain
from unisono.lifetime import end_group, end_when_silent, start_time
from unisono.messages import (
    AgentHello,
    Ailing,
    Announcement,
    Beat,
    Beats,
    Ended,
    Foreign,
    Happened,
    Heads,
    Hello,
    Holding,
    Holds,
    Kept,
    Lost,
    Message,
    Moved,
    Proposal,
    Ready,
    RunDirectory,
    Scale,
    Statement,
    StepDone,
    Steps,
    Stop,
    StoreCall,
    TalkCall,
    Told,
    Used,
    Welcome,
    WorkerExit,
    WorkerLate,
    decode,
    encode,
)
from unisono.packed import pack
from unisono.page.site import WATCH
from unisono.problems.kinds import Trouble
from unisono.rundir import STATUS_SCHEMA
from unisono.spec import RunSpec
from unisono.watch.prometheus import CONTENT_TYPE, exposition
from unisono.words import script_in

__all__ = ["Head"]

MAX_STEPS_QUEUED = 1_000
CATCH_UP_BEATS = 2  # a head that stood still waits for so many heartbeats before it calls a worker silent
EVENTS_SHOWN = 20  # in a status
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
        url: where other machines reach the head, for invitations.
        local_url: where this machine does, for the run directory; "": at the same address.
        snapshot: the newest state of the head before this one (`Snapshot.state`).
        term: one more than that of the head before this one.
        seat: the agent whose child this head is; "": the command that has started the run, or that of the head before.
        name: a name that no other head of the run has.
        branch: the branch of the run's history that the agent of this head has followed.
        is_gone: the agent of the head before this one is gone; else it may be out of reach only.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        token: str,
        run_id: str,
        spec: RunSpec,
        url: str = "",
        local_url: str = "",
        snapshot: bytes = b"",
        term: int = 1,
        seat: str = "",
        name: str = "",
        branch: str = "",
        is_gone: bool = False,
    ) -> None:
        memory = Memory.decode(snapshot) if snapshot else Memory.first(policy, spec.script)
        now = time.monotonic()
        since = now if memory.clock is None else memory.clock
        state = memory.state
        self._took_over = TookOver(before=seat_of(state), is_gone=is_gone)
        if snapshot:
            state = resumed(state, term, now, seat=seat, head=name, branch=branch, since=since - now)
        self._state = msgspec.structs.replace(
            state, term=term, head=name, policy=msgspec.structs.replace(state.policy, heartbeat_s=spec.heartbeat_s)
        )
        self._token = token
        self._run_id = run_id
        self._spec = spec
        self._lines: dict[str, Line] = {}
        self._keys = Keys()
        self._reason = memory.reason
        self._started = memory.started
        self._story = Story(memory.story)
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._remembering: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._listens_until = 0.0
        self._full_at = -math.inf
        self._refusals = Refusals(
            self._announce,
            lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call),
        )
        run_dir = spec.run_dir or memory.run_dir
        self._address = AddressFiles(run_id, local_url or url, token, made=run_dir if snapshot else "")
        self._directory = Directory(
            run_id,
            run_dir,
            memory.facts,
            memory.seers,
            self._address,
            told=self._announce,
            changed=self._may_write_has_changed,
        )
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
        self._viewing = Viewing(run_id, script=script_in(spec.arguments), started=self._started, is_first=not snapshot)
        self._viewing.reads_from(run_dir, memory.facts)
        self._telling = Telling(
            self, run_id, spec, token, directory=self._directory, story=self._story, viewing=self._viewing
        )
        self._troubles = self._telling.troubles
        self._meeting = Meeting(self, run_id, url, self._directory)
        self.superseded_by = 0
        """The term of a head that has taken over from this one."""
        self.over = asyncio.Event()

    async def run(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serve until the run is over and all agents know that, or `over` is set.

        Args:
            tls: settings of TLS (`unisono.certificate.server_context`); None: connections are in the clear.
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
        server = await open_door(listener, tls, self._refusals, request=visitors.respond, handler=self._serve)
        tasks = [
            asyncio.create_task(work) for work in (Reunion(self._meeting, self._token).run(), self._directory.look())
        ]
        try:
            self._directory.take_pen()
            has_moved = self._took_over.before not in ("", seat_of(self._state))
            if has_moved:
                self._happens("", self._took_over)
                others = self._state.agents.keys() - {seat_of(self._state)}
                self._reason = self._directory.go_on_here(others) or self._reason
            self._directory.open(has_moved=has_moved)
            await self.over.wait()
        finally:
            for task in tasks:
                task.cancel()
            await self._troubles.end()
            await self._meeting.moved()  # else the other side would write while workers of this one still do
            self._directory.close(forgets_address=not self.superseded_by)
            if not self.superseded_by:
                self._versions.change_heirs(())
            await self._viewing.end()
            for line in list(self._lines.values()):
                line.put(None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await asyncio.gather(*(line.sender for line in self._lines.values()), return_exceptions=True)
            server.close()
            listener.close()

    def end_workers(self) -> None:
        """End this machine's workers, with their children, unless their agent has seen them end."""
        for pid, started in self._here.values():
            # The system does not reuse a process id as long as a group has it.
            if start_time(pid) in ("", started):
                end_group(pid, signal.SIGKILL)

    # -- http ----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the values that ``unisono status`` shows (docs/files.md)."""
        state, last, story = self._state, self._telling.last, self._story
        found = {
            "schema": STATUS_SCHEMA,
            "run_id": self._run_id,
            "state": state.label,
            "reason": self._reason,
            "generation": state.generation,
            "step": last.step if last else None,
            "num_steps": last.num_steps if last else 0,
            "unit": last.unit if last else "step",
            "epoch": last.epoch if last else 0,
            "loss": last.loss if last else None,
            "started": self._started,
            "ended": 0.0,
            "url": self._url,
            "run_dir": self._directory.path,
            "job": msgspec.to_builtins(self._spec),
            "machines": machines_status(state, self._telling.uses.newest),
            "workers": workers_status(state),
            "efficiency": story.efficiency,
            "interrupted_s": story.interrupted_s,
            "interruptions": [msgspec.to_builtins(each) for each in story.interruptions],
            "events": [msgspec.to_builtins(each) for each in story.recent[-EVENTS_SHOWN:]],
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
                f"the head cannot take another connection ({error.strerror}); it has {len(self._lines)} of workers and "
                "machines. Does a program flood its port? The limit of open files is that of `ulimit -n`"
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
            if isinstance(first, Scale | Stop):
                await self._outside(line, first)
                return
            if isinstance(first, Proposal):
                line.put(encode(self._meeting.answer(first)))
                self._meeting.act()
                return
            if self._meeting.is_moving:
                return
            if isinstance(first, Hello | AgentHello) and first.run_id not in ("", self._run_id):
                self._refuse(line, first)
                return
            if isinstance(first, AgentHello) and not first.fresh and not self._state.is_own(first.branch):
                line.put(encode(Foreign(step=self._state.committed)))
                return
            if isinstance(first, Hello | AgentHello) and first.term > self._state.term:
                self.give_way(first.term)
                return
            name = self._welcome(line, first)
            async for data in connection:
                await self._take(line, name, decode(_binary(data)))
        except ProtocolError as error:
            why = str(error)
            line.put(encode(Announcement(text=why)))
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
                self._directory.facts = message.facts or self._directory.facts
                self._viewing.reads_from(self._directory.path or message.path, self._directory.facts)
                worker = self._state.workers.get(name)
                if worker is not None and worker.agent not in self._directory.seers:
                    self._directory.seers[worker.agent] = None
                    self._remember_soon()
                if self._directory.path in ("", message.path):
                    self._directory.write_address(message.path)
                    self._directory.take_pen()
                    self._remember()
            case Happened():
                self._telling.pass_on(message)
            case Steps():
                self._telling.pass_on_steps(message)
            case Used() if name in self._state.agents:
                self._telling.take_use(name, message.use)
            case Kept():
                self._kept(name, message)
            case Statement():
                self._troubles.heard(name, message)
            case Ailing():
                self._troubles.ails(name, message)
            case Holds():
                self._troubles.holds(name, message)
            case Beats() if name in self._state.agents:
                self._take_beats(message)
            case _:
                self._happens(name, message)

    def _all_informed(self) -> bool:
        """Return whether all agents have got the end of the run, and have disconnected.

        The agent whose child this head is counts even if it has not connected to this head yet; it ends the head when
        it ends.
        """
        seat = seat_of(self._state)
        return seat in ("", *self._informed) and not self._state.agents.keys() & self._lines.keys()

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
            branch=self._state.branch_name,
            may_write=self._directory.may_write,
            num_machines=len(self._state.agents) + 1 if isinstance(first, AgentHello) else 0,
            machines=machines(self._state) if isinstance(first, AgentHello) else [],
        )
        line.put(encode(welcome))
        if isinstance(first, AgentHello) and first.agent_id == name:  # it may have missed some, also of the head before
            line.put(encode(Told(events=self._story.recent)))
        if self._state.ended is not None:
            self._versions.when_held([Send(name, self._state.ended)])
            return name
        try:
            self._happens(name, first)
        except ProtocolError as error:
            # Refused, now and later. The name may belong to another connection, which keeps it.
            line.put(encode(Ended(ok=False, reason=str(error), exit_code=1)))
            if isinstance(first, Hello):
                self._announce(f"a worker is refused: {error}")
            if isinstance(first, Hello | AgentHello):
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
        if self._state.ended is not None:
            line.put(encode(Announcement(text=f"the run is over: {self._state.ended.reason}")))
            return
        self._happens("", message)
        answer = Announcement(text=self._reason)
        is_held = asyncio.get_running_loop().create_future()
        self._versions.when_held([is_held])
        await is_held
        line.put(encode(answer))

    def _refuse(self, line: Line, first: Hello | AgentHello) -> None:
        """Send away what is left of an earlier run at this address with this token: it holds another state."""
        why = f"the head at this address is that of run {self._run_id}, and no longer of run {first.run_id}"
        line.put(encode(Ended(ok=False, reason=why, exit_code=1)))

    # -- what `unisono.head.telling.Members` and `unisono.head.meeting.Party` need ---------------------

    @property
    def state(self) -> State:
        return self._state

    @property
    def connected(self) -> Collection[str]:
        return self._lines.keys()

    def move(self, url: str, text: str) -> None:
        self._announce(text)
        self._tell_agents(Moved(url=url))

    def send_all(self, names: Iterable[str], message: Message) -> None:
        data = encode(message)
        is_step = isinstance(message, Steps) or (
            isinstance(message, Happened) and isinstance(message.event, events.StepFinished)
        )
        for name in names:
            line = self._lines.get(name)
            # An agent that is stopped for a while (Ctrl-Z) does not need the steps of that time.
            if line is not None and not (is_step and line.queue.qsize() > MAX_STEPS_QUEUED):
                line.put(data)

    def has_workers(self) -> bool:
        return bool(self._lines.keys() & self._state.workers.keys())

    def give_way(self, term: int) -> None:
        """End this head, and nothing else, because another one has taken over."""
        self.superseded_by = term
        self.over.set()

    async def _store(self, line: Line, call: StoreCall) -> None:
        line.put(encode(await self._keys.answer(call)))

    # -- decisions -----------------------------------------------------------------------------------

    def _happens(self, source: str, message: Message | Tick | Lags | TookOver) -> None:
        """Pass one event to the table, and act on its decisions."""
        if self._meeting.is_moving:
            return  # this side ends
        if isinstance(message, Tick):
            self._timer = None
        now = self._look_at_clock()
        if isinstance(message, Tick) and now < self._listens_until:
            self._set_timer()
            return
        before = self._state
        self._state, actions, reason, happened = step(before, Event(source, message), now)
        self._story.add(happened, reason if self._state.ended is None else "")
        self._change_branch(before)
        if isinstance(message, Hello) and (worker := self._state.workers.get(source)) is not None:
            self._note_process(worker)
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
        elif self._story.has_news or not isinstance(message, Beat | StepDone):
            self._remember_soon()
        if self._state.generation > before.generation:
            # Two generations live at any time: this one, and the one before, which some members have not left.
            self._keys.end_generations(self._state.generation - 1)
        if self._state.ended is not None:
            self._troubles.hurry()
        for action in actions:
            if isinstance(action, Alarm):  # not when the heirs know: the culprit may have ended by then
                self._telling.take_trouble(action.trouble)
        following: list[Action] = [action for action in actions if not isinstance(action, Invite | Alarm)]
        following += [action for action in actions if isinstance(action, Invite)]  # after the reason for it
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

    def _change_branch(self, before: State) -> None:
        """Tell all of a new branch, or of other machines that may start the next head, before the next decision."""
        state = self._state
        known = machines(state)
        heads = Heads(
            branch=state.branch_name,
            num_machines=len(state.agents),
            machines=known,
            may_write=self._directory.may_write,
        )
        if state.branch != before.branch:
            self._remember()
            told: list[Action] = [Send(agent_id, heads) for agent_id in state.agents]
            to_worker = msgspec.structs.replace(heads, machines=[], num_machines=0)
            told += [Send(worker_id, to_worker) for worker_id in state.workers]
            self._versions.change_branch(state.heirs, told)
            return
        if known != machines(before) or _tens(state) != _tens(before):
            self._tell_agents(heads)
        self._versions.change_heirs(state.heirs)

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
        memory = Memory(
            self._state,
            self._started,
            self._reason,
            self._directory.path,
            facts=self._directory.facts,
            seers=tuple(self._directory.seers),
            story=self._story.kept(),
            clock=time.monotonic(),
        )
        self._versions.make(memory)
        if told := self._story.take():
            self._versions.when_held([Told(events=told)])

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
        if isinstance(message, Told):
            self._telling.tell_story(message.events)
            return
        if isinstance(message, Invite):
            self._announce(how_to_join(self._url, self._directory.path))
            return
        assert not isinstance(message, Alarm), "it was taken before"
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
                late = events.WorkerLate(**msgspec.structs.asdict(message.message))
                self._telling.pass_on(Happened(event=late))

    def _encoded(self, message: Message) -> bytes:
        """Return what to send for a message; one that goes to all members is encoded once."""
        known, data = self._encoded_last
        if known is not message:
            data = pack(encode(message))
            self._encoded_last = (message, data)
        return data

    def _announce(self, text: str) -> None:
        self._telling.announce(text)

    def _note_process(self, worker: Worker) -> None:
        agent = self._state.agents.get(worker.agent)
        is_here = agent is not None and agent.agent_id == seat_of(self._state)
        if is_here and worker.info is not None and worker.state in ALIVE:
            self._here[worker.worker_id] = (worker.info.pid, start_time(worker.info.pid))

    def _tell_agents(self, message: Message) -> None:
        self.send_all(self._state.agents, message)

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

    def _may_write_has_changed(self) -> None:
        heads = Heads(branch=self._state.branch_name, may_write=self._directory.may_write)
        self.send_all(self._state.workers, heads)


def _tens(state: State) -> int:
    return len(state.agents) // 10


def _binary(data: str | bytes) -> bytes:
    if isinstance(data, str):
        raise ProtocolError("messages are binary, got text")
    return data


def _consume(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
