"""One per machine: starts the workers of that machine, forwards their output, and ends every process that it started.

It decides nothing: the head says `Start`, `Evict`, `Ended`; the agent says `WorkerExit`. It sees the end of a process
at once (a descriptor of the process becomes readable), which is how the others learn of a killed worker
within milliseconds. Workers lead a process group each, so their own children can be ended with them.

Everything runs in the main thread: the kernel ends a child with the *thread* that has started it (`unisono.lifetime`).
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
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from unisono.checkpoint import files
from unisono.decisions.signals import EndRun, KillWorkers, LeaveRun, StopRun, reaction
from unisono.errors import UsageError
from unisono.journal import conclude
from unisono.lifetime import Memory, bind_to_parent, end_when_silent, fill_standard_streams
from unisono.machine.children import TERMINATE_S, Child, Listener
from unisono.machine.headprocess import MAX_HEADS, HeadProcess, Service, address, listen, reachable
from unisono.machine.workers import NOT_STARTED, Workers, machine_label
from unisono.messages import (
    AgentHello,
    Drain,
    Ended,
    Evict,
    Message,
    RunDirectory,
    Snapshot,
    Start,
    StepDone,
    Stop,
    Told,
    Welcome,
    WorkerExit,
    decode,
    encode,
    is_refusal,
)
from unisono.rundir import forget_head, holder
from unisono.spec import MachineSpec
from unisono.watch.relay import Relay
from unisono.watch.terminal import Terminal, terminal
from unisono.words import exit_words

__all__ = ["Machines", "join", "run"]

FINISH_S: Final = 30.0  # after a good end, for what a script does at its exit
FAIL_S: Final = 1.0  # after a bad one, until workers are asked to end
LAST_WORDS_S: Final = 0.5
TELL_S: Final = 10.0  # for a head that stands still to tell the other machines that this command ends the run
OPEN_S: Final = 10.0
RETRY_S: Final = 0.05


class Machines(Protocol):
    """Agents on other machines that this command has started (`unisono.launchers.fleet.Fleet`)."""

    def start(self, listener: Listener, on_lost: Callable[[str], None]) -> None:
        """Start the agents. ``on_lost`` receives why none is left, while the run may not be over.

        Raises:
            UsageError: one of them cannot be started.
        """

    async def close(self, patience_s: float) -> None:
        """Wait for the agents to end by themselves, then end them."""


def run(spec: MachineSpec, service: Service, machines: Callable[[str, str], Machines] | None = None) -> int:
    """Be ``unisono run``: a head and the workers of this machine. Returns the exit code.

    Args:
        machines: makes the other machines, from the head's address and the run's token; default: there are none.
    """
    bind_to_parent(signal.SIGTERM)
    fill_standard_streams()
    listener = listen(service)
    token = secrets.token_urlsafe(32)
    secret = Memory("unisono-token", token.encode())
    url = address(reachable(service.bind), listener.getsockname()[1])
    try:
        others = machines(url, token) if machines is not None else None
        return asyncio.run(_run(spec, service, listener, secret, token, url, others))
    finally:
        listener.close()
        secret.close()


async def _run(
    spec: MachineSpec,
    service: Service,
    listener: socket.socket,
    secret: Memory,
    token: str,
    url: str,
    machines: Machines | None,
) -> int:
    settings = {
        "policy": service.policy,
        "listener": listener.fileno(),
        "run_id": (run_id := secrets.token_hex(4)),
        "url": url,
        "spec": spec.run,
    }
    head = HeadProcess(settings, listener, secret)
    agent = _Agent(spec, url, token, secret, terminal(), head, machines)
    try:
        return await agent.run()
    finally:
        await head.end()
        for run_dir in filter(None, {spec.run.run_dir, agent.run_dir}):
            forget_head(Path(run_dir), run_id, token)  # where the last head was killed


def join(spec: MachineSpec, url: str, token: str) -> int:
    """Be ``unisono join``: more workers for a run that is going. Returns the exit code."""
    bind_to_parent(signal.SIGTERM)
    fill_standard_streams()
    secret = Memory("unisono-token", token.encode())

    async def work() -> int:
        return await _Agent(spec, url, token, secret, Relay() if spec.launched else terminal(), None).run()

    try:
        return asyncio.run(work())
    finally:
        secret.close()


class _Agent:
    """The workers of this machine.

    Args:
        head: the head where this agent starts it; None in ``unisono join``.
        machines: the other machines that this command starts agents on.
    """

    def __init__(
        self,
        spec: MachineSpec,
        url: str,
        token: str,
        secret: Memory,
        screen: Terminal,
        head: HeadProcess | None,
        machines: Machines | None = None,
    ) -> None:
        self._spec = spec
        self._url = url
        self._token = token
        self._screen = screen
        self._head = head
        self._machines = machines
        self._host = machine_label()
        self._workers = Workers(spec, head=url, host=self._host, secret=secret, listener=self, on_exit=self._on_exit)
        self._agent_id = ""
        self._run_id = ""
        self._away_since: float | None = None
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._unsent: Message | None = None
        self._over: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._is_told = asyncio.Event()
        self._is_told.set()
        self._head_is_done = False
        self._is_connected = False
        self._lost_head: Child | None = None  # what it said last is not all heard
        self._is_leaving = False
        self._num_signals = 0
        self._checkpoint_code = -1  # see `reaction`
        self._stop: StopRun | None = None
        self.run_dir = ""
        """Where the script wants the run to be, when it has said so."""

    async def run(self) -> int:
        """Work until the run is over, or this agent is asked to leave. Returns the exit code."""
        loop = asyncio.get_running_loop()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # under nohup: the run is to outlive its terminal
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            self._start_helpers()
        except BaseException as error:
            self._is_leaving = True  # the head that is ended now is followed by none
            if isinstance(error, OSError):
                raise UsageError(f"a process of the run {NOT_STARTED.format(error)}") from error
            raise
        talk = asyncio.create_task(self._talk())
        try:
            if self._machines is not None:
                self._machines.start(self, self._on_machines_lost)
            if self._spec.launched:
                loop.add_reader(sys.stdin.fileno(), self._on_input)
            ended = await self._over
        finally:
            self._is_leaving = True
            machines = asyncio.ensure_future(self._end_machines(self._result()))
            await self._end_workers(self._result())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._outbox.join()  # the head hears of every end that this agent has seen
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_S):
                    await self._is_told.wait()
            talk.cancel()
            await asyncio.gather(talk, return_exceptions=True)
            await machines
        self._conclude(ended)
        self._show(ended)
        return ended.exit_code

    def _start_helpers(self) -> None:
        if self._head is not None:
            self._head.start(self._printer("head"), self._head_ended)
        self._workers.open()

    # -- the head ------------------------------------------------------------------------------------

    async def _talk(self) -> None:
        """The connection to the head; made again while the head is away. Each absence has its own time."""
        while not self._over.done():
            try:
                why = await self._connect()
            except (OSError, InvalidHandshake, ConnectionClosed, TimeoutError) as error:
                why = f"the connection to the head at {self._url} broke: {error}"
                if isinstance(error, InvalidStatus) and is_refusal(status := error.response.status_code):
                    why = f"the head at {self._url} refuses this machine with HTTP {status}"
                    self._finish(Ended(ok=False, reason=why, exit_code=1))
            except Exception as error:
                self._finish(Ended(ok=False, reason=f"{type(error).__name__}: {error}", exit_code=1))
                raise
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                if not self._over.done() and self._head is None:
                    self._screen.say(f"{why}; the workers go on for {self._spec.run.head_away_s:.0f} s")
            if now - self._away_since > self._spec.run.head_away_s or (not self._agent_id and self._head is None):
                self._finish(Ended(ok=False, reason=why, exit_code=1))
            await asyncio.sleep(RETRY_S)
            if self._head_is_done:
                why = (
                    "the head has ended the run, and its last word was not heard: it was asked to end, or this command"
                )
                self._finish(Ended(ok=False, reason=f"{why} was stopped for too long", exit_code=1))

    async def _connect(self) -> str:
        async with connect(
            self._url,
            additional_headers={"Authorization": f"Bearer {self._token}"},
            compression=None,
            ping_interval=None,
            # Where nothing comes back, an attempt must not outlast by much what the head may be away.
            open_timeout=min(OPEN_S, 1.0 + self._spec.run.head_away_s) if self._agent_id else OPEN_S,
            close_timeout=1.0,
            max_size=None,
            proxy=None,
        ) as connection:
            end_when_silent(connection.transport.get_extra_info("socket"))
            hello = AgentHello(
                host=self._host,
                pid=os.getpid(),
                num_workers=self._spec.num_workers,
                primary=self._head is not None,
                agent_id=self._agent_id,
            )
            await connection.send(encode(hello))
            sender = asyncio.create_task(self._send(connection))
            self._is_connected = True
            try:
                async for data in connection:
                    self._hear(decode(data if isinstance(data, bytes) else data.encode()))
            finally:
                sender.cancel()
                self._is_connected = False
                lost, self._lost_head = self._lost_head, None
                if lost is not None and not self._is_leaving:
                    self._follow(lost)
        return "the connection to the head has closed"

    async def _send(self, connection: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                # What could not be sent is the first thing that is sent over the next connection.
                if self._unsent is None:
                    self._unsent = await self._outbox.get()
                await connection.send(encode(self._unsent))
                self._unsent = None
                self._outbox.task_done()

    def _hear(self, message: Message) -> None:
        match message:
            case Start():
                self._workers.start(message.worker_ids, message.delay_s)
            case StepDone():
                self._screen.step(message)
            case Told():
                self._screen.say(message.text)
            case Evict():
                self._workers.evict(message.worker_id)
            case Ended():
                self._is_told.set()
                self._finish(self._with_own_exit_code(message))
            case RunDirectory():
                self._checkpoint_code = message.on_signal
                self.run_dir = message.path
            case Welcome():
                if self._agent_id:
                    self._workers.report_again()
                self._agent_id = message.agent_id
                self._run_id = message.run_id
                self._away_since = None
            case Snapshot():
                if self._head is not None:
                    self._head.snapshot = message.state

    def _finish(self, ended: Ended) -> None:
        if not self._over.done():
            self._over.set_result(ended)

    def _head_ended(self, child: Child) -> None:
        self._is_told.set()  # as far as it will be
        if self._is_leaving or self._head is None:
            return
        if child.exit_code == 0:
            self._head_is_done = True  # `_talk` hears first what it has said last
        elif self._is_connected:
            self._lost_head = child  # so does the head that follows: its memory is among that
        else:
            self._follow(child)

    def _follow(self, child: Child) -> None:
        """Start another head after one that has died."""
        assert self._head is not None
        words = "".join(f"\n{line}" for line in child.output.last_lines)
        reason = f"the head (pid {child.pid}) {exit_words(child.exit_code or 0)}{words}"
        if not self._head.may_start_again():
            self._finish(Ended(ok=False, reason=f"{reason}; {MAX_HEADS} heads in a row have ended", exit_code=1))
            return
        try:
            self._head.start(self._printer("head"), self._head_ended)
        except OSError as error:
            self._finish(Ended(ok=False, reason=f"{reason}; another one {NOT_STARTED.format(error)}", exit_code=1))
        else:
            self._screen.say(f"{reason}; another one takes over, the workers go on")

    def _printer(self, name: str) -> Callable[[str, bool], None]:
        return lambda text, is_error: self._screen.worker_line(name, text, is_error=is_error)

    # -- processes ----------------------------------------------------------------------------------

    def on_line(self, name: str, text: str, is_error: bool) -> None:
        self._screen.worker_line(name, text, is_error=is_error)

    def on_notice(self, text: str) -> None:
        self._screen.say(text)

    def _on_machines_lost(self, reason: str) -> None:
        if not self._workers.running():
            self._end_now(reason, 1)

    def _on_exit(self, message: WorkerExit) -> None:
        self._outbox.put_nowait(message)
        if self._num_signals:
            self._leave_when_alone()

    def _leave_when_alone(self) -> None:
        """In ``unisono join``, after a signal: the run goes on, and nobody of this machine takes part in it."""
        if self._head is None and not self._workers.running():
            self._finish(Ended(ok=True, reason="all workers of this machine have left"))

    def _on_signal(self, number: signal.Signals) -> None:
        found = reaction(
            number,
            num_before=self._num_signals,
            is_primary=self._head is not None,
            has_workers=self._workers.have_started(),
            checkpoint_code=self._checkpoint_code,
        )
        self._num_signals += 1
        match found:
            case EndRun(reason, exit_code):
                self._end_now(reason, exit_code)
                if isinstance(found, KillWorkers):
                    self._workers.kill()
            case LeaveRun():
                self._screen.say("the workers of this machine leave at the end of the step (again: end them now)")
                self._outbox.put_nowait(Drain(reason=f"{self._host} leaves"))
                self._leave_when_alone()
            case StopRun(word, reason):
                self._stop = found
                self._screen.say(f"{word}: the run ends at the end of the step, with a checkpoint (again: end it now)")
                self._outbox.put_nowait(Stop(reason=reason))

    def _on_input(self) -> None:
        """Notice the end of standard input: whatever has started this agent is gone, or wants it to end."""
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._end_now("the launcher that has started this agent is gone", 1)

    def _end_now(self, reason: str, exit_code: int) -> None:
        """The head hears of it before it hears of the ends of the workers, and tells the other machines.

        It tells this one as well, which is waited for (once) where others may have joined.
        """
        ended = Ended(ok=False, reason=reason, exit_code=exit_code)
        if self._head is not None:
            self._outbox.put_nowait(ended)
        if self._head is not None and self._agent_id and self._num_signals == 1:
            self._is_told.clear()
        else:
            self._is_told.set()
        self._finish(ended)

    def _with_own_exit_code(self, ended: Ended) -> Ended:
        """Return the end of the run, with the exit code of the signal where that has ended the run."""
        stop = self._stop
        if stop is not None and ended.ok and ended.reason == stop.reason:
            return msgspec.structs.replace(ended, exit_code=stop.exit_code)
        return ended

    async def _end_machines(self, ended: Ended | None) -> None:
        if self._machines is not None:
            await self._machines.close(self._patience_s(ended) + 2 * TERMINATE_S)  # theirs, to end their workers

    def _result(self) -> Ended | None:
        """Return how the run has ended; None where this agent fails."""
        return self._over.result() if self._over.done() and not self._over.cancelled() else None

    def _patience_s(self, ended: Ended | None) -> float:
        """Return how long workers may take to end by themselves."""
        if ended is not None and ended.ok:
            return FINISH_S
        return 0.0 if ended is None or self._num_signals else FAIL_S

    async def _end_workers(self, ended: Ended | None) -> None:
        """Wait for the workers that end by themselves, then end the others."""
        patience_s = self._patience_s(ended)
        if not await self._workers.ended_within(patience_s) and ended is not None and ended.ok:
            late = ", ".join(self._workers.running())
            self._screen.say(f"{late}: still there {patience_s:.0f} s after the end of the run; ended now")
        await self._workers.close()

    def _show(self, ended: Ended) -> None:
        if self._spec.outcome:
            known = {"ok": ended.ok, "reason": ended.reason, "traceback": ended.traceback, "exit_code": ended.exit_code}
            Path(self._spec.outcome).write_text(json.dumps(known))
        elif hint := self._how_to_go_on(ended):
            self._screen.say(hint)
        self._screen.close(ended, with_traceback=not self._spec.outcome)

    def _conclude(self, ended: Ended) -> None:
        """Write into the journal why the run failed, where no worker is left to do so."""
        if not ended.ok and self._holds_run_dir():
            with contextlib.suppress(OSError):  # a directory that this machine may not write to
                conclude(Path(self.run_dir), ended.reason)

    def _holds_run_dir(self) -> bool:
        """Whether this machine has started the run, and what has the name of its directory is still that of this run.

        It may have been moved, and another run been started under its name.
        """
        if self._head is None or not self.run_dir:
            return False
        with contextlib.suppress(OSError):
            return holder(Path(self.run_dir)) == self._run_id
        return False

    def _how_to_go_on(self, ended: Ended) -> str:
        """For a run that this machine has started and that ended before its time."""
        if (ended.ok and self._stop is None) or not self._holds_run_dir():
            return ""
        done = []
        with contextlib.suppress(OSError):  # a directory that has gone meanwhile
            done = files.complete(Path(self.run_dir) / files.FOLDER)
        if not done:
            return ""
        again = shlex.join(["unisono", "run", "--resume", self.run_dir])
        return f"the newest checkpoint is {done[-1].name}; to go on from it: {again}"
