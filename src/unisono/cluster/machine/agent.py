"""Agent of a machine: starts its workers, forwards their output, and ends every process that it started.

The agent decides nothing: the head sends `Start`, `Evict`, `Ended`; the agent sends `WorkerExit`. The agent sees the
end of a process at once (a descriptor of the process becomes readable), so the other workers learn of a killed worker
within milliseconds. Workers lead a process group each, so their own children can be ended with them.

Everything runs in the main thread: the kernel ends a child with the *thread* that has started it
(`unisono.system.lifetime`).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from unisono.cluster.machine.beats import BeatReporter
from unisono.cluster.machine.children import NOT_STARTED, TERMINATE_S, Listener
from unisono.cluster.machine.condition import watch_condition
from unisono.cluster.machine.evaluators import Evaluators
from unisono.cluster.machine.head_connection import Following
from unisono.cluster.machine.headprocess import HeadProcess, Service, listen, local_url, reserve, url_of, welcome_words
from unisono.cluster.machine.holder import LOST
from unisono.cluster.machine.metering import Metering
from unisono.cluster.machine.workers import WorkerProcesses, machine_label
from unisono.cluster.trust.certificate import derived
from unisono.cluster.trust.invitation import HeadUrl, Invitation
from unisono.core import messages
from unisono.core.errors import RunDirectoryError, RunGoesBack, UsageError
from unisono.core.events import (
    Announcement,
    Event,
    MachineUsed,
    MembershipChanged,
    Once,
    RunEnded,
    StepFinished,
    WorkerOutput,
)
from unisono.core.messages import (
    AgentHello,
    Drain,
    Ended,
    Evict,
    Happened,
    Inquire,
    MachinesGone,
    Message,
    Offer,
    RunDirectoryChosen,
    Start,
    Statement,
    Stop,
    Used,
    WorkerExit,
    WriteEvidence,
)
from unisono.core.policy import Policy
from unisono.core.settings import RunSettings
from unisono.core.signals import AwaitEnd, EndRun, KillWorkers, LeaveRun, StopRun, reaction
from unisono.core.spec import MachineSpec
from unisono.core.words import count, stopping_words
from unisono.record import checkpoint_files as files
from unisono.record.chronicle import Chronicle
from unisono.record.journal import conclude
from unisono.record.problems.evidence_files import write
from unisono.record.problems.limits import memory_limit
from unisono.record.problems.witness import about_machine
from unisono.record.rundir import doubt, forget_head, holder
from unisono.system.aside import Aside
from unisono.system.descendants import end_descendants
from unisono.system.extras import need
from unisono.system.lifetime import Memory, adopt_orphans, bind_to_parent, fill_standard_streams
from unisono.system.process import IS_WATCHED
from unisono.views.watch import EventStream, Sink, is_of_agents, make, named
from unisono.views.watch.queued import print_error

__all__ = ["Machines", "join", "run"]

FINISH_S: Final = 30.0  # after a good end, for what a script does at its exit
FAIL_S: Final = 1.0  # after a bad one, until workers are asked to end
LAST_WORDS_S: Final = 0.5
SILENCE_S: Final = 1.0  # until the command says what it waits for
TELL_S: Final = 10.0  # for a head that stands still to tell the other machines that this command ends the run


class Machines(Protocol):
    """Agents on other machines that this command has started (`unisono.cluster.launchers.fleet.Fleet`)."""

    def start(
        self, listener: Listener, on_lost: Callable[[str], None], on_gone: Callable[[Collection[str]], None]
    ) -> None:
        """Start the agents.

        Args:
            on_lost: receives why none is left, while the run may not be over.
            on_gone: receives the machines on which one has ended, whenever one does.

        Raises:
            UsageError: one of them cannot be started.
        """

    def keep(self, num_workers: int, present: Collection[str]) -> None:
        """Have these machines from now on.

        Args:
            num_workers: for so many workers in all, where the launcher can get machines and give them back.
            present: machines that need no other agent, although one has ended there.
        """

    def hurry(self) -> None:
        """Wait no longer for agents that end by themselves."""

    async def close(self, patience_s: float) -> None:
        """Wait for the agents to end by themselves, then end them."""


def run(spec: MachineSpec, service: Service, machines: Callable[[str, str], Machines] | None = None) -> int:
    """Be ``unisono run``: a head and the workers of this machine. Returns the exit code.

    Args:
        machines: makes the other machines, from the head's address and the run's token; default: there are none.
    """
    _check_can_work(spec)
    bind_to_parent(signal.SIGTERM)
    fill_standard_streams()
    listener = listen(service)
    token = service.token or secrets.token_urlsafe(32)
    with listener, Memory("unisono-token", token.encode()) as secret:
        identity = service.identity(listener, token)
        url = str(url_of(service, listener, identity))
        settings = {
            "policy": service.policy,
            "run_id": (run_id := secrets.token_hex(4)),
            "local_url": (own_url := local_url(service, url)),
            "spec": spec.run,
        }
        head = HeadProcess(settings, listener, secret, url, identity)
        others = machines(url, token) if machines is not None else None
        welcome = welcome_words(Invitation(url, token), service, spec.run.settings.run_dir)
        return asyncio.run(_work(spec, own_url, token, secret, head, others, run_id=run_id, welcome=welcome))


def join(spec: MachineSpec, url: str, token: str) -> int:
    """Be ``unisono join``: more workers for a run that is going. Returns the exit code."""
    _check_can_work(spec)
    bind_to_parent(signal.SIGTERM)
    fill_standard_streams()
    if spec.launched:
        adopt_orphans(True)
    identity = derived(token) if HeadUrl.parse(url).is_secure else None
    try:
        with Memory("unisono-token", token.encode()) as secret:
            head = None
            if spec.may_have_head:
                with contextlib.suppress(OSError):  # without a port of its own this machine cannot have the next head
                    listener, own_url = reserve(url, spec.run.ports)
                    # The table's settings are a part of the state that the next head takes over.
                    settings = {"policy": Policy(start=1, maximum=1), "run_id": "", "spec": spec.run}
                    head = HeadProcess(settings, listener, secret, own_url, identity)
            return asyncio.run(_work(spec, url, token, secret, head))
    finally:
        if spec.launched:  # also what a script has put into a session of its own
            end_descendants(TERMINATE_S)


def _of_agents(settings: RunSettings) -> list[Sink]:
    """Return the sinks of the command line that agents have."""
    sinks: list[Sink] = []
    for text in filter(is_of_agents, () if settings.inspect else settings.sinks):
        try:
            if (sink := named(text)) is not None:
                sinks.append(sink)
        except UsageError as error:  # here, and not on the machine of the command, which has checked them
            print_error(f"{error}; the run continues without this sink")
    return sinks


def _check_can_work(spec: MachineSpec) -> None:
    """Raise UsageError where workers are asked for and cannot start. A machine without workers needs no torch."""
    if spec.num_workers:
        need("torch", "a worker", "torch")


async def _work(
    spec: MachineSpec,
    url: str,
    token: str,
    secret: Memory,
    head: HeadProcess | None,
    machines: Machines | None = None,
    *,
    run_id: str = "",
    welcome: Sequence[str] = (),
) -> int:
    """Be an agent.

    Args:
        run_id: of the run that this command starts; "": it is going already.
        welcome: sentences to begin with.
    """
    sinks = [make("relay" if spec.launched else "terminal")] if IS_WATCHED or not run_id else []
    agent = _Agent(spec, url, token, secret, EventStream(sinks), head, machines, is_primary=bool(run_id))
    for text in welcome:
        agent.say(text)
    try:
        return await agent.run()
    finally:
        if head is not None:
            await head.end()
            head.close()
            agent.forget_head(spec.run.settings.run_dir, token, run_id)
        await agent.close()


class _Agent:
    """Agent of this machine.

    Args:
        head: starts heads on this machine; None: there can be none.
        machines: the other machines that this command starts agents on.
        is_primary: this is the command that starts the run, and the first head.
    """

    def __init__(
        self,
        spec: MachineSpec,
        url: str,
        token: str,
        secret: Memory,
        stream: EventStream,
        head: HeadProcess | None,
        machines: Machines | None = None,
        *,
        is_primary: bool = False,
    ) -> None:
        self._spec = spec
        settings = spec.run.settings
        self._stream = stream
        self._shown: Aside[Event] = Aside(stream.emit)
        self._told = EventStream(_of_agents(settings))
        self._digests: dict[str, str] = {}
        self._is_primary = is_primary
        self._outcome = settings.outcome if is_primary else ""
        self._machines = machines
        self._host = machine_label()
        offered = 0 if spec.condition else spec.num_workers
        hello = AgentHello(
            host=self._host,
            pid=os.getpid(),
            num_workers=offered,
            primary=self._is_primary,
            launched=spec.launched,
        )
        self._following = Following(
            url, token, hello, self, away_s=settings.head_away_s, head=head, partition=settings.when_cut
        )
        self._workers = WorkerProcesses(
            spec, head=url, host=self._host, secret=secret, listener=self, on_exit=self._on_exit
        )
        self._evaluators = Evaluators(spec.num_evaluators, self, self._workers.gpu_of_evaluator)
        self._once = Once()
        self._chronicle = Chronicle(lambda: self._following.has_seat)
        self._is_run_over = False
        self._forgets = False
        self._over: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._url = url
        self._num_signals = 0
        self._checkpoint_code = -1  # see `reaction`
        self._stop: StopRun | None = None
        self._silence: asyncio.TimerHandle | None = None  # says what is waited for, if nothing happens before
        self.run_dir = ""
        """The run directory that the script has chosen; "" before."""
        self._run_dir_host = ""  # a machine that sees it

    def forget_head(self, run_dir: str, token: str, run_id: str = "") -> None:
        """Remove what a head of this machine that was killed has left in the run's directory."""
        if not self._following.has_seat:
            return
        for folder in filter(None, {run_dir, self.run_dir}):
            forget_head(Path(folder), run_id or self._following.run_id, token)

    async def run(self) -> int:
        """Work until the run is over, or this agent is asked to leave. Returns the exit code."""
        loop = asyncio.get_running_loop()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # under nohup: the run is to outlive its terminal
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            self._following.start_head()
            self._workers.open()
        except BaseException as error:
            self._following.leave()
            if isinstance(error, OSError):
                raise UsageError(f"a process of the run {NOT_STARTED.format(error)}") from error
            raise
        tasks = [asyncio.create_task(self._following.run())]
        if self._spec.condition:
            tasks.append(asyncio.create_task(watch_condition(self._spec.condition, self._on_condition)))
        reporter = BeatReporter(self._workers.slots, self._following.report, self._spec.run.settings.heartbeat_s)
        metering = None
        if IS_WATCHED:
            metering = Metering(
                self._host,
                lambda: dict(self._workers.processes()),
                lambda: self._following.num_machines,
                lambda use: self._following.report(Used(use=use)),
            )
        try:
            if self._machines is not None:
                self._machines.start(self, self._on_machines_lost, self._on_machines_gone)
            if self._spec.held:
                loop.add_reader(sys.stdin.fileno(), self._on_input)
            if self._spec.engine:
                self._watch_engine()
            if not self._spec.launched:  # the command that has started the run says so
                self._say_unless_told("starting the workers: they import torch, and what the script imports")
            ended = await self._over
        finally:
            self._following.leave()
            if metering is not None:
                metering.close()
            machines = asyncio.ensure_future(self._end_machines(self._result()))
            await self._end_workers(self._result(), reporter)
            await self._following.sent(LAST_WORDS_S)  # every end that this agent has seen
            await self._following.answered(TELL_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await machines
        self._conclude(ended)
        self._show(ended)
        self._chronicle.close()
        if self._is_primary and ended.back_to >= 0:
            run_dir = self.run_dir if self._holds_run_dir() else ""
            raise RunGoesBack(ended.reason, run_dir, ended.back_to, ended.without)
        return ended.exit_code

    # -- the head ------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        match message:
            case Start():
                self._workers.start(message.worker_ids, message.delay_s)
            case Happened():
                for event in message.events:
                    if self._once.is_new(event):
                        self._take_event(event)
                self._chronicle.use([event for event in message.events if isinstance(event, MachineUsed)])
            case messages.UserSentence():
                if not self._spec.launched:  # the command that has started the run shows it
                    self.say(message.text)
            case messages.Wanted():
                if self._machines is not None:
                    self._machines.keep(message.num_workers, message.present)
            case Evict():
                self._workers.evict(message.worker_id)
            case Inquire():
                self._following.send(Statement(number=message.number, text=self._about_machine(message.about)))
            case WriteEvidence():
                self._write_evidence(message)
            case Ended():  # of the run (which is told before), or for this machine alone
                self._end(self._with_own_exit_code(message), is_run_over=False)
            case RunDirectoryChosen():
                self._checkpoint_code = message.on_signal
                self.run_dir, self._run_dir_host = message.path, message.host
                self._chronicle.write_to(Path(message.path), self._following.run_id)
                self._evaluators.start(message.path)

    def _take_event(self, event: Event) -> None:
        """Show an event, and keep one of the story for its file."""
        if isinstance(event, MembershipChanged):
            self._hear()
        if isinstance(event, RunEnded) and not event.head:
            self._digests = event.digests  # the run ends for this machine when the head says so
            return
        if not isinstance(event, StepFinished | MachineUsed):
            self._chronicle.tell(event)
            if not isinstance(event, RunEnded):  # this agent says so, when the run has ended for it
                self._tell(event)
        if isinstance(event, Announcement) and self._stop and event.text == stopping_words(self._stop.reason):
            return  # this agent has said so at once
        # The command that has started this machine's agent shows it; this agent itself shows how the run has ended.
        if not (self._spec.launched or isinstance(event, RunEnded)):
            self._shown.put(event)

    def _tell(self, event: Event) -> None:
        """Tell those who do not look: one agent does, that of the machine with the head."""
        if self._following.has_seat:
            self._told.emit(event)

    def _about_machine(self, worker_id: str) -> str:
        """Return what the kernel knows of this machine and the workers on it, and the last that these have said.

        Args:
            worker_id: of whose output the most is wanted.
        """
        processes = [("the agent", os.getpid()), *self._workers.processes()]
        said = [f"last lines of {name}:\n{lines}" for name, lines in self._workers.last_lines(worker_id).items()]
        limit = memory_limit()
        return "\n".join([about_machine(processes, limit.words if limit is not None else ""), *said])

    def _write_evidence(self, message: WriteEvidence) -> None:
        """Write a file into the run's directory, which the head does not see."""

        def work() -> None:
            with contextlib.suppress(OSError):
                write(Path(message.directory), self._following.run_id, message.name, message.text)

        threading.Thread(target=work, name="unisono-evidence", daemon=True).start()

    def on_notice(self, text: str) -> None:
        """Show a sentence, as a part of the run's story."""
        event = Announcement(time=time.time(), text=text)
        self._chronicle.tell(event)
        self._shown.put(event)

    def say(self, text: str) -> None:
        """Show a sentence on this machine only."""
        self._shown.put(Announcement(time=time.time(), text=text))

    def _say_unless_told(self, text: str) -> None:
        """Say after a second what is waited for, unless it is over by then: nobody waits longer without a word."""
        self._hear()
        self._silence = asyncio.get_running_loop().call_later(SILENCE_S, self.say, text)

    def _hear(self) -> None:
        """Say nothing about what was waited for: it has come, or something else is waited for."""
        if self._silence is not None:
            self._silence.cancel()

    def end(self, ended: Ended) -> None:
        """End the run for this machine: there is no head any more, or this command ends the run."""
        self._end(ended, is_run_over=True)

    def _end(self, ended: Ended, *, is_run_over: bool) -> None:
        self._is_run_over = is_run_over
        self._hear()
        self._following.leave()
        if not self._over.done():
            self._over.set_result(ended)

    def known_end(self) -> Ended | None:
        """Return that the run has ended well, if its journal says so: on another side, while this one was cut off."""
        from unisono.record.history import History

        run_dir = self.run_dir or self._spec.run.settings.run_dir
        with contextlib.suppress(OSError, ValueError):
            is_own = run_dir != "" and holder(Path(run_dir)) == self._following.run_id
            if is_own and History(Path(run_dir)).overview().state == "finished":
                return Ended(ok=True, reason="finished")
        return None

    def follow(self, url: str) -> None:
        """Have the workers of this machine follow the head at this address; "": let them wait for one."""
        self._workers.follow(url)

    def has_workers(self) -> bool:
        """Return whether a worker of this machine runs."""
        return bool(self._workers.running())

    async def forget_workers(self) -> None:
        """End the workers of this machine, and report nothing about them."""
        self._forgets = True
        self._chronicle.leave()
        try:
            await self._workers.forget()
        finally:
            self._forgets = False

    # -- processes ----------------------------------------------------------------------------------

    def on_line(self, name: str, text: str, is_error: bool) -> None:
        self._shown.put(WorkerOutput(source=name, text=text, is_error=is_error))

    def _on_machines_lost(self, reason: str) -> None:
        if not self._workers.running() and self._following.num_machines == 1:
            self._end_now(reason, 1)

    def _on_machines_gone(self, names: Collection[str]) -> None:
        self._following.send(MachinesGone(names=tuple(sorted(names))))

    def _on_exit(self, message: WorkerExit) -> None:
        if self._forgets:
            return
        self._following.send(message)
        if self._num_signals:
            self._leave_when_alone()

    def _leave_when_alone(self) -> None:
        """End this agent after a signal to ``unisono join``, when its workers have left. The run goes on."""
        if not self._is_primary and not self._workers.running():
            self._end(Ended(ok=True, reason="all workers of this machine have left"), is_run_over=False)

    def _on_condition(self, holds: bool, why: str) -> None:
        """Offer this machine's workers, or take them back at the end of the step."""
        offered = self._spec.num_workers if holds and not self._num_signals else 0
        if not holds:
            self.say(f"this machine's workers are waiting: {why}")
        self._following.send(Offer(num_workers=offered, reason=f"{self._host}: {why}"))

    def _on_signal(self, number: signal.Signals) -> None:
        found = reaction(
            number,
            num_before=self._num_signals,
            is_primary=self._is_primary,
            has_workers=self._workers.have_started(),
            checkpoint_code=self._checkpoint_code,
            engine=self._spec.engine,
        )
        self._num_signals += not isinstance(found, AwaitEnd)
        self._shown.hurry()
        match found:
            case EndRun(reason, exit_code):
                self._end_now(reason, exit_code)
                again = "" if self._num_signals > 1 or self._spec.engine else " (again: kill them now)"
                self._say_unless_told(f"{reason}: waits for the workers to end{again}")
                if isinstance(found, KillWorkers):
                    self._workers.kill()
                    if self._machines is not None:
                        self._machines.hurry()
            case LeaveRun():
                self.say("the workers of this machine leave at the end of the step (again: end them now)")
                self._following.send(Drain(reason=f"{self._host} leaves"))
                self._leave_when_alone()
            case AwaitEnd(words):
                if words:
                    self.say(words)
            case StopRun(reason):
                self._stop = found
                again = "" if self._spec.engine else " (again: end it now)"
                self.say(f"{stopping_words(reason)}{again}")
                self._following.send(Stop(reason=reason))

    def _watch_engine(self) -> None:
        """End the agent with the process that has started it as a task: not all engines see to that themselves."""
        loop = asyncio.get_running_loop()
        try:
            engine = os.pidfd_open(os.getppid())
        # It has ended already, and the agent has another parent; or it is not to be seen from here; or this is macOS.
        except (AttributeError, OSError):
            return

        def on_gone() -> None:
            loop.remove_reader(engine)
            os.close(engine)
            self._end_now(f"the process of {self._spec.engine} that has started this task is gone", 1)

        loop.add_reader(engine, on_gone)

    def _on_input(self) -> None:
        """End the agent at the end of its standard input: the launcher has ended, or ends this agent."""
        data = os.read(sys.stdin.fileno(), 4096)
        if not data:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._end_now("the launcher that has started this agent is gone", 1)
        elif data == LOST:
            self._outlive_launcher()

    def _outlive_launcher(self) -> None:
        """Go on without the connection to the launcher: from now on this machine is as one that has joined by itself.

        Whether the launcher's machine is lost, or the path to it, or only that connection: `Following` finds out.
        """
        self._following.outlive_command()
        number = sys.stdin.fileno()
        asyncio.get_running_loop().remove_reader(number)
        with open(os.devnull, "r+b") as nothing:
            for stream in (number, sys.stdout.fileno(), sys.stderr.fileno()):
                os.dup2(nothing.fileno(), stream)  # closes the pipes; the holder sees that

    def _end_now(self, reason: str, exit_code: int) -> None:
        """End the run. The head gets this message before the ends of the workers, and sends it to the other machines.

        This agent waits for the head's answer (once), because other machines may have joined.
        """
        ended = Ended(ok=False, reason=reason, exit_code=exit_code)
        if self._is_primary and self._num_signals <= 1:
            self._following.say_end(ended)
        elif self._is_primary:
            self._following.send(ended)
            self._following.hurry()
        self.end(ended)

    def _with_own_exit_code(self, ended: Ended) -> Ended:
        """Return the end of the run, with the exit code of the signal where that has ended the run."""
        stop = self._stop
        if stop is not None and ended.ok and ended.reason == stop.reason:
            return msgspec.structs.replace(ended, exit_code=stop.exit_code)
        return ended

    async def _end_machines(self, ended: Ended | None) -> None:
        if self._machines is not None:
            # Theirs, to end their workers; nobody has told them of a run that could not begin.
            await self._machines.close(self._patience_s(ended) + 2 * TERMINATE_S if ended is not None else 0.0)

    def _result(self) -> Ended | None:
        """Return how the run has ended; None where this agent fails."""
        return self._over.result() if self._over.done() and not self._over.cancelled() else None

    def _patience_s(self, ended: Ended | None) -> float:
        """Return how long workers may take to end by themselves."""
        if ended is not None and ended.ok:
            return FINISH_S
        return 0.0 if ended is None or self._num_signals else FAIL_S

    async def _end_workers(self, ended: Ended | None, reporter: BeatReporter) -> None:
        """Wait for the workers that end by themselves, then end the others."""
        patience_s = self._patience_s(ended)
        if not await self._workers.ended_within(patience_s) and ended is not None and ended.ok:
            late = ", ".join(self._workers.running())
            self.on_notice(f"{late}: still running {patience_s:.0f} s after the end of the run; killing it now")
        reporter.close()
        await self._evaluators.close()
        await self._workers.close()
        self._hear()

    def _show(self, ended: Ended) -> None:
        if self._outcome:
            known = {"ok": ended.ok, "reason": ended.reason, "traceback": ended.traceback, "exit_code": ended.exit_code}
            Path(self._outcome).write_text(json.dumps(known))
        else:
            for hint in filter(None, (self._where_it_lies(), self._how_to_go_on(ended))):
                self.say(hint)
        traceback = "" if self._outcome else ended.traceback
        digests = self._digests if ended.ok else {}
        end = RunEnded(
            time=time.time(),
            ok=ended.ok,
            reason=ended.reason,
            digests=digests,
            step=ended.step,
            traceback=traceback,
        )
        self._shown.put(end)
        self._tell(end)

    async def close(self) -> None:
        """Wait until all is shown and told; after a signal not for a reader that stands still."""
        await asyncio.to_thread(self._shown.close)
        await asyncio.to_thread(self._told.close)
        self._stream.close()

    def _conclude(self, ended: Ended) -> None:
        """Write why the run has ended, where nobody else does so: no head, and for the journal no worker."""
        if self._is_run_over and not self._chronicle.has_end:
            ok, reason, step = ended.ok, ended.reason, ended.step
            self._chronicle.tell(RunEnded(time=time.time(), ok=ok, reason=reason, digests={}, step=step))
        if not ended.ok and self._holds_run_dir():
            with contextlib.suppress(OSError):  # a directory that this machine may not write to
                conclude(Path(self.run_dir), ended.reason)
            if ended.sound >= 0:
                with contextlib.suppress(RunDirectoryError):
                    doubt(Path(self.run_dir), ended.sound)

    def _holds_run_dir(self) -> bool:
        """Return whether this machine has the head, and the directory of that name is still that of this run.

        The directory may have been moved, and another run been started under its name.
        """
        if not self._following.has_seat or not self.run_dir:
            return False
        with contextlib.suppress(OSError):
            return holder(Path(self.run_dir)) == self._following.run_id
        return False

    def _where_it_lies(self) -> str:
        """Return that the run's directory is on another machine, where that is so; else ""."""
        if not self._is_primary or self._spec.num_workers or not self.run_dir or self._holds_run_dir():
            return ""
        where = self._run_dir_host or "a machine that has trained"
        return (
            f"the run's directory {self.run_dir} is not on this machine: journal and checkpoints are on {where}; next "
            "time, name a --run-dir that this machine sees as well, or have workers here too (--hosts localhost,...)"
        )

    def _how_to_go_on(self, ended: Ended) -> str:
        """Return the command to resume a run that this machine has started and that ended early; "" for other runs."""
        if (ended.ok and self._stop is None) or not self._holds_run_dir() or ended.back_to >= 0:
            return ""
        done = []
        with contextlib.suppress(OSError):  # a directory that has gone meanwhile
            done = files.complete(Path(self.run_dir) / files.FOLDER)
        if not done:
            return ""
        if ended.sound < 0:
            return f"the newest checkpoint is {done[-1].name}; to resume from it: {_command(self.run_dir)}"
        from unisono.core.audit_rules import advice  # few runs have had a worker that computes wrong values

        step, is_sound = advice(map(files.step_of, done), ended.sound)
        path = str(next(one for one in done if files.step_of(one) == step))
        if is_sound:
            return (
                f"checkpoints of more than {count(ended.sound, 'step')} may hold wrong values; to resume from before "
                f"that: {_command(path)}"
            )
        return (
            "every checkpoint may hold wrong values: start over (--overwrite), or, if you know that the oldest one is "
            f"right, resume from it: {_command(path)}"
        )


def _command(place: str) -> str:
    return shlex.join(["unisono", "run", "--resume", place])
