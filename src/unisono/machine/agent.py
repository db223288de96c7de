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
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from unisono.checkpoint import files
from unisono.door import Door
from unisono.errors import UsageError
from unisono.events import Announcement, RunEnded, WorkerOutput
from unisono.fingerprint import script_checksum
from unisono.journal import conclude
from unisono.lifetime import PARENT, TOKEN_FILE, Memory, bind_to_parent, end_when_silent, fill_standard_streams
from unisono.machine.children import TERMINATE_S, Child, Nursery, spawn
from unisono.machine.headprocess import MAX_HEADS, HeadProcess, Service, address, listen, reachable
from unisono.messages import (
    AgentHello,
    Drain,
    Ended,
    Evict,
    Happened,
    Message,
    RunDirectory,
    Snapshot,
    Start,
    Stop,
    Told,
    Welcome,
    WorkerExit,
    decode,
    encode,
    is_refusal,
)
from unisono.rundir import forget_head, holder
from unisono.watch import Stream, make
from unisono.words import exit_words

__all__ = ["Job", "join", "machine_label", "run"]

FINISH_S: Final = 30.0  # after a good end, for what a script does at its exit
FAIL_S: Final = 1.0  # after a bad one, until workers are asked to end
LAST_WORDS_S: Final = 0.5
TELL_S: Final = 10.0  # for a head that stands still to tell the other machines that this command ends the run
OPEN_S: Final = 10.0
RETRY_S: Final = 0.05
NOT_STARTED: Final = "could not be started: {}; see the limits of processes, open files and memory (ulimit -a)"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What this machine's workers run, and how."""

    arguments: list[str]
    """After ``python -m unisono.machine.worker``."""
    num_workers: int
    threads: int = 1
    run_dir: str = ""
    overwrite: bool = False
    resume: str = ""
    """The run or the checkpoint to go on from."""
    resume_anyway: tuple[str, ...] = ()
    """What of the recipe may differ then."""
    simulate_hosts: int = 1
    """For tests: workers get this many different host labels."""
    head_away_s: float = 60.0
    start: str = "fork"
    """fork: from a process that has imported torch; spawn: each by itself."""
    outcome: str = ""
    """Write how the run ended to this file (JSON) and do not print the traceback."""

    def told(self) -> dict[str, Any]:
        """What machines that join are told: their workers may be the first ones to begin."""
        return {
            "arguments": self.arguments,
            "threads": self.threads,
            "folder": os.getcwd(),
            "run_dir": self.run_dir,
            "overwrite": self.overwrite,
            "resume": self.resume,
            "resume_anyway": self.resume_anyway,
            "script": script_checksum(self.arguments),
        }

    @property
    def command(self) -> str:
        """What ``unisono run --resume`` needs to know (JSON); "" for a function, which has no name."""
        if self.arguments[0] == "--callable":
            return ""
        return json.dumps({"folder": os.getcwd(), "arguments": self.arguments})


def run(job: Job, service: Service) -> int:
    """Be ``unisono run``: a head and the workers of this machine. Returns the exit code."""
    bind_to_parent(signal.SIGTERM)
    fill_standard_streams()
    listener = listen(service)
    token = secrets.token_urlsafe(32)
    secret = Memory("unisono-token", token.encode())
    url = address(reachable(service.bind), listener.getsockname()[1])
    try:
        return asyncio.run(_run(job, service, listener, secret, token, url))
    finally:
        listener.close()
        secret.close()


async def _run(job: Job, service: Service, listener: socket.socket, secret: Memory, token: str, url: str) -> int:
    settings = {
        "policy": service.policy,
        "listener": listener.fileno(),
        "run_id": (run_id := secrets.token_hex(4)),
        "url": url,
        "heartbeat_s": service.heartbeat_s,
        "options": dict(service.options),
        "run_dir": job.run_dir,
        "job": job.told(),
    }
    head = HeadProcess(settings, listener, secret)
    agent = _Agent(job, url, token, secret, Stream([make("terminal")]), head)
    try:
        return await agent.run()
    finally:
        await head.end()
        for run_dir in filter(None, {job.run_dir, agent.run_dir}):
            forget_head(Path(run_dir), run_id, token)  # where the last head was killed


def join(job: Job, url: str, token: str) -> int:
    """Be ``unisono join``: more workers for a run that is going. Returns the exit code."""
    bind_to_parent(signal.SIGTERM)
    fill_standard_streams()
    secret = Memory("unisono-token", token.encode())

    async def work() -> int:
        return await _Agent(job, url, token, secret, Stream([make("terminal")]), None).run()

    try:
        return asyncio.run(work())
    finally:
        secret.close()


def machine_label() -> str:
    """Equal for processes that can share memory: the host's name, and a mark of its kernel and process namespace."""
    marks = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            marks.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())
    return f"{socket.gethostname()}-{zlib.crc32(' '.join(marks).encode()) & 0xFFFF:04x}"


class _Agent:
    """The workers of this machine.

    Args:
        head: the head where this agent starts it; None in ``unisono join``.
    """

    def __init__(
        self, job: Job, url: str, token: str, secret: Memory, stream: Stream, head: HeadProcess | None
    ) -> None:
        self._job = job
        self._url = url
        self._token = token
        self._secret = secret
        self._stream = stream
        self._digests: dict[str, str] = {}
        self._head = head
        self._host = machine_label()
        self._workers: dict[str, Child] = {}
        self._local_ranks: dict[str, int] = {}
        self._nursery: Nursery | None = None
        self._late: dict[str, asyncio.TimerHandle] = {}
        self._ordered: set[str] = set()
        self._evicted: set[str] = set()
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
        self._on_signal = -1
        self.run_dir = ""
        """Where the script wants the run to be, when it has said so."""
        self._stops_for = ""
        self._stop_code = 0

    async def run(self) -> int:
        """Work until the run is over, or this agent is asked to leave. Returns the exit code."""
        loop = asyncio.get_running_loop()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # under nohup: the run is to outlive its terminal
            loop.add_signal_handler(number, self._signalled, number)
        try:
            self._start_helpers()
        except BaseException as error:
            self._is_leaving = True  # the head that is ended now is followed by none
            if isinstance(error, OSError):
                raise UsageError(f"a process of the run {NOT_STARTED.format(error)}") from error
            raise
        talk = asyncio.create_task(self._talk())
        try:
            ended = await self._over
        finally:
            self._is_leaving = True
            for timer in self._late.values():
                timer.cancel()
            await self._end_workers(self._over.result() if self._over.done() and not self._over.cancelled() else None)
            if self._nursery is not None:
                await self._nursery.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._outbox.join()  # the head hears of every end that this agent has seen
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_S):
                    await self._is_told.wait()
            talk.cancel()
            await asyncio.gather(talk, return_exceptions=True)
        self._conclude(ended)
        self._show(ended)
        return ended.exit_code

    def _start_helpers(self) -> None:
        if self._head is not None:
            self._head.start(self._printer("head"), self._head_ended)
        if self._job.start == "fork":
            standing = os.environ.get("UNISONO_NURSERY", "")
            self._nursery = Nursery(self._environment(), self._secret, standing)
            self._nursery.on_end = self._say
            if self._nursery.child is not None:
                self._nursery.child.output.on_line = self._printer("nursery")

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
                    self._say(f"{why}; the workers go on for {self._job.head_away_s:.0f} s")
            if now - self._away_since > self._job.head_away_s or (not self._agent_id and self._head is None):
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
            open_timeout=min(OPEN_S, 1.0 + self._job.head_away_s) if self._agent_id else OPEN_S,
            close_timeout=1.0,
            max_size=None,
            proxy=None,
        ) as connection:
            end_when_silent(connection.transport.get_extra_info("socket"))
            hello = AgentHello(
                host=self._host,
                pid=os.getpid(),
                num_workers=self._job.num_workers,
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
                for worker_id in message.worker_ids:
                    if worker_id in self._ordered:
                        continue  # by a head that has died
                    self._ordered.add(worker_id)
                    if message.delay_s > 0:
                        loop = asyncio.get_running_loop()
                        self._late[worker_id] = loop.call_later(message.delay_s, self._start, worker_id)
                    else:
                        self._start(worker_id)
            case Happened(event=RunEnded() as event):
                self._digests = event.digests  # the run ends for this machine when the head says so
            case Happened():
                self._stream.emit(message.event, number=message.number)
            case Told():
                self._say(message.text)
            case Evict():
                self._evict(message.worker_id)
            case Ended():
                self._is_told.set()
                self._finish(self._left_by_signal(message))
            case RunDirectory():
                self._on_signal = message.on_signal
                self.run_dir = message.path
            case Welcome():
                if self._agent_id:
                    self._repeat_exits()
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
            self._say(f"{reason}; another one takes over, the workers go on")

    def _printer(self, name: str) -> Callable[[str, bool], None]:
        return lambda text, is_error: self._stream.emit(WorkerOutput(source=name, text=text, is_error=is_error))

    def _say(self, text: str) -> None:
        self._stream.emit(Announcement(text=text))

    # -- workers -------------------------------------------------------------------------------------

    def _start(self, worker_id: str) -> None:
        self._late.pop(worker_id, None)
        if self._is_leaving:
            return
        gone = {worker_id for worker_id, child in self._workers.items() if child.exit_code is not None}
        taken = {rank for i, rank in self._local_ranks.items() if i not in gone}
        local_rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
        self._local_ranks[worker_id] = local_rank
        environment = self._environment() | self._door(worker_id, local_rank).environment()

        def started(child: Child | str) -> None:
            if isinstance(child, str):
                self._ordered.discard(worker_id)
                del self._local_ranks[worker_id]
                words = f"it {NOT_STARTED.format(child)}"
                self._outbox.put_nowait(WorkerExit(worker_id=worker_id, exit_code=1, last_words=words))
                return
            child.output.on_line = self._printer(worker_id)
            child.on_end = self._worker_ended
            self._workers[worker_id] = child
            if self._is_leaving or worker_id in self._evicted:
                child.kill()

        def start_by_itself() -> None:
            told = {**environment, TOKEN_FILE: self._secret.inherited_path}
            command = [sys.executable, "-u", "-P", "-m", "unisono.machine.worker", *self._job.arguments]
            try:
                started(spawn(worker_id, command, told, (self._secret.descriptor,)))
            except OSError as error:
                started(str(error))

        nursery = self._nursery
        if nursery is None or not nursery.alive:
            start_by_itself()
            return

        def born(child: Child | str) -> None:
            if isinstance(child, str) and not nursery.alive:
                start_by_itself()
            else:
                started(child)

        try:
            nursery.bear(worker_id, self._job.arguments, environment, born)
        except OSError as error:
            born(str(error))

    def _evict(self, worker_id: str) -> None:
        """End a worker; one whose start is delayed does not begin, one that is being forked ends as it is there."""
        self._evicted.add(worker_id)
        timer = self._late.pop(worker_id, None)
        if timer is not None:
            timer.cancel()
        child = self._workers.get(worker_id)
        if child is not None:
            child.kill()

    def _environment(self) -> dict[str, str]:
        """What every process that computes inherits."""
        threads = str(self._job.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        # Python orders sets of strings by it: on all workers alike, on all machines, unless the user has another wish.
        hashing = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED") or "0"}
        return {**os.environ, PARENT: str(os.getpid()), **hashing, **dict.fromkeys(names, threads)}

    def _door(self, worker_id: str, local_rank: int) -> Door:
        job = self._job
        label = self._host
        if job.simulate_hosts > 1:
            label += f"-{local_rank * job.simulate_hosts // max(job.num_workers, local_rank + 1)}"
        return Door(
            head=self._url,
            worker_id=worker_id,
            host=label,
            agent=os.getpid(),
            run_dir=job.run_dir,
            overwrite=job.overwrite,
            resume=job.resume,
            resume_anyway=job.resume_anyway,
            command=job.command,
            threads=job.threads,
            local_rank=local_rank,
            head_away_s=job.head_away_s,
        )

    def _worker_ended(self, child: Child) -> None:
        self._tell_exit(child)
        if self._num_signals:
            self._leave_when_alone()

    def _tell_exit(self, child: Child) -> None:
        assert child.exit_code is not None
        words = "\n".join(child.output.last_lines) if child.exit_code != 0 else ""
        self._outbox.put_nowait(WorkerExit(worker_id=child.name, exit_code=child.exit_code, last_words=words))

    def _repeat_exits(self) -> None:
        """Say again who has ended: what was said into a connection that broke is lost. Whoever knows it, ignores it."""
        for child in self._workers.values():
            if child.exit_code is not None:
                self._tell_exit(child)

    def _leave_when_alone(self) -> None:
        """In ``unisono join``, after a signal: the run goes on, and nobody of this machine takes part in it."""
        if self._head is None and all(child.exit_code is not None for child in self._workers.values()):
            self._finish(Ended(ok=True, reason="all workers of this machine have left"))

    def _signalled(self, number: signal.Signals) -> None:
        self._num_signals += 1
        code = 128 + number
        if self._num_signals > 1:
            self._end_now("ended by a second signal", code)
            for child in self._workers.values():
                child.kill()
        elif self._head is None and number is not signal.SIGHUP and self._workers:
            self._say("the workers of this machine leave at the end of the step (again: end them now)")
            self._outbox.put_nowait(Drain(reason=f"{self._host} leaves"))
            self._leave_when_alone()
        else:
            word = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
            if number is signal.SIGHUP or self._on_signal < 0:
                self._end_now(word, code)
                return
            self._stops_for = f"{word}, with a checkpoint"
            self._stop_code = self._on_signal if number == signal.SIGTERM else code
            self._say(f"{word}: the run ends at the end of the step, with a checkpoint (again: end it now)")
            self._outbox.put_nowait(Stop(reason=self._stops_for))

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

    def _left_by_signal(self, ended: Ended) -> Ended:
        """With the exit code that is due where it was a signal that has ended the run."""
        if self._stops_for and ended.ok and ended.reason == self._stops_for:
            return msgspec.structs.replace(ended, exit_code=self._stop_code)
        return ended

    async def _end_workers(self, ended: Ended | None) -> None:
        """Wait for those who end by themselves, end the others."""
        if ended is not None and ended.ok:
            patience_s = FINISH_S
        else:
            patience_s = 0.0 if ended is None or self._num_signals else FAIL_S
        if not await self._all_ended(patience_s):
            if ended is not None and ended.ok:
                late = ", ".join(name for name, child in self._workers.items() if child.exit_code is None)
                self._say(f"{late}: still there {patience_s:.0f} s after the end of the run; ended now")
            for child in self._workers.values():
                child.signal_group(signal.SIGTERM)
            if not await self._all_ended(TERMINATE_S):
                for child in self._workers.values():
                    child.kill()
                await self._all_ended(TERMINATE_S)

    async def _all_ended(self, seconds: float) -> bool:
        return all(await asyncio.gather(*(child.ended_within(seconds) for child in self._workers.values())))

    def _show(self, ended: Ended) -> None:
        if self._job.outcome:
            known = {"ok": ended.ok, "reason": ended.reason, "traceback": ended.traceback, "exit_code": ended.exit_code}
            Path(self._job.outcome).write_text(json.dumps(known))
        elif hint := self._how_to_go_on(ended):
            self._say(hint)
        traceback = "" if self._job.outcome else ended.traceback
        digests = self._digests if ended.ok else {}
        self._stream.emit(
            RunEnded(ok=ended.ok, reason=ended.reason, digests=digests, step=ended.step, traceback=traceback)
        )
        self._stream.close()

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
        if (ended.ok and not self._stops_for) or not self._holds_run_dir():
            return ""
        done = []
        with contextlib.suppress(OSError):  # a directory that has gone meanwhile
            done = files.complete(Path(self.run_dir) / files.FOLDER)
        if not done:
            return ""
        again = shlex.join(["unisono", "run", "--resume", self.run_dir])
        return f"the newest checkpoint is {done[-1].name}; to go on from it: {again}"
