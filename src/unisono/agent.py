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
import ipaddress
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from unisono.errors import UsageError
from unisono.lifetime import PARENT, Secret, bind_to_parent, end_group
from unisono.membership import Policy
from unisono.messages import (
    AgentHello,
    Drain,
    Ended,
    Evict,
    Message,
    Start,
    StepDone,
    Told,
    Welcome,
    WorkerExit,
    WorkerLate,
    decode,
    encode,
)
from unisono.nursery import Birth, Born, Death
from unisono.watch.terminal import Terminal, terminal

__all__ = ["Job", "Service", "join", "machine_label", "run"]

LAST_LINES: Final = 20
FINISH_S: Final = 30.0  # after a good end, for what a script does at its exit
FAIL_S: Final = 1.0  # after a bad one, until workers are asked to end
TERMINATE_S: Final = 3.0  # from SIGTERM to SIGKILL
LAST_WORDS_S: Final = 0.5
SEND_TIMEOUT_S: Final = 5.0
MAX_LINE_BYTES: Final = 65536


@dataclass(frozen=True, kw_only=True)
class Job:
    """What this machine's workers run, and how."""

    arguments: list[str]
    """After ``python -m unisono.worker``."""
    num_workers: int
    threads: int = 1
    run_dir: str = ""
    overwrite: bool = False
    simulate_hosts: int = 1
    """For tests: workers get this many different host labels."""
    head_away_s: float = 60.0
    start: str = "fork"
    """fork: from a process that has imported torch; spawn: each by itself."""
    outcome: str = ""
    """Write how the run ended to this file (JSON) and do not print the traceback."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """The head that ``unisono run`` starts."""

    policy: Policy
    bind: str = "127.0.0.1"
    port: int = 0
    heartbeat_s: float = 0.5
    options: Mapping[str, str] = field(default_factory=dict)


def run(job: Job, service: Service) -> int:
    """Be ``unisono run``: a head and the workers of this machine. Returns the exit code."""
    bind_to_parent(signal.SIGTERM)
    listener = _listen(service)
    secret = Secret(token := secrets.token_urlsafe(32))
    url = _url(_reachable(service.bind), listener.getsockname()[1])
    try:
        return asyncio.run(_run(job, service, listener, secret, token, url))
    finally:
        listener.close()
        secret.close()


async def _run(job: Job, service: Service, listener: socket.socket, secret: Secret, token: str, url: str) -> int:
    settings = {
        "policy": service.policy,
        "listener": listener.fileno(),
        "run_id": secrets.token_hex(4),
        "url": url,
        "heartbeat_s": service.heartbeat_s,
        "options": dict(service.options),
        "run_dir": job.run_dir,
        "job": {"arguments": job.arguments, "threads": job.threads, "folder": os.getcwd(), "run_dir": job.run_dir},
    }
    command = [sys.executable, "-P", "-m", "unisono.head", msgspec.json.encode(settings).decode()]
    head = _spawn(
        "head",
        command,
        {**os.environ, "UNISONO_TOKEN_FILE": secret.path, PARENT: str(os.getpid())},
        (listener.fileno(), secret.descriptor),
    )
    screen = terminal()
    head.output.on_line = lambda text, is_error: screen.worker_line("head", text, is_error=is_error)
    agent = _Agent(job, url, token, secret, screen, head)
    try:
        return await agent.run()
    finally:
        os.kill(head.pid, signal.SIGTERM) if head.exit_code is None else None
        if not await head.ended_within(TERMINATE_S):
            head.kill()
            await head.ended_within(TERMINATE_S)


def join(job: Job, url: str, token: str) -> int:
    """Be ``unisono join``: more workers for a run that is going. Returns the exit code."""
    bind_to_parent(signal.SIGTERM)
    secret = Secret(token)

    async def work() -> int:
        return await _Agent(job, url, token, secret, terminal(), None).run()

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


def _listen(service: Service) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in service.bind else socket.AF_INET
        return socket.create_server((service.bind, service.port), family=family, backlog=512)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {service.bind} port {service.port}: {error.strerror or error}; use another --bind or "
            "--port (0: any)"
        ) from error


def _reachable(bind: str) -> str:
    """The address under which workers, here and elsewhere, find what listens on ``bind``."""
    with contextlib.suppress(ValueError):
        if not ipaddress.ip_address(bind).is_unspecified:
            return bind
        # No packet is sent: this only asks which interface the default route uses.
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        return "127.0.0.1"
    return bind


def _url(host: str, port: int) -> str:
    return f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}"


class _Output:
    """The standard output and error of a process of ours, line by line."""

    def __init__(self, descriptors: tuple[int, int]) -> None:
        self.on_line: Callable[[str, bool], None] = lambda text, is_error: None
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._loop = asyncio.get_running_loop()
        self._out, self._error = descriptors
        self._rest = {descriptor: bytearray() for descriptor in descriptors}
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._read, descriptor)

    def drain(self) -> None:
        """Read what is left, and close."""
        for descriptor in list(self._rest):
            while self._read(descriptor):
                pass
        for descriptor in list(self._rest):
            self._close(descriptor)

    def _read(self, descriptor: int) -> bool:
        if descriptor not in self._rest:
            return False
        try:
            data = os.read(descriptor, MAX_LINE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close(descriptor)
            return False
        *lines, tail = (self._rest[descriptor] + data).split(b"\n")
        if len(tail) > MAX_LINE_BYTES:
            lines.append(tail)
            tail = bytearray()
        self._rest[descriptor] = bytearray(tail)
        for line in lines:
            self._line(descriptor, bytes(line))
        return True

    def _line(self, descriptor: int, line: bytes) -> None:
        # Of a line that was drawn over and over ("\r") only the last state counts.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        is_error = descriptor == self._error
        if is_error:
            self.last_lines.append(text)
        self.on_line(text, is_error)

    def _close(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        rest = self._rest.pop(descriptor)
        if rest:
            self._line(descriptor, bytes(rest))
        os.close(descriptor)


class _Child:
    """A process that leads a group of its own, its output and its end. Made by `_spawn` or by the `_Nursery`."""

    def __init__(self, name: str, pid: int, output: _Output) -> None:
        self.name = name
        self.pid = pid
        self.output = output
        self.on_end: Callable[[_Child], None] = lambda child: None
        self.exit_code: int | None = None
        self._ended = asyncio.Event()

    def end(self, exit_code: int) -> None:
        """It has ended, and its group with it."""
        self.exit_code = exit_code
        self.output.drain()
        self.on_end(self)
        self._ended.set()

    def signal_group(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            end_group(self.pid, number)

    def kill(self) -> None:
        self.signal_group(signal.SIGKILL)

    async def ended_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True


def _spawn(name: str, command: list[str], environment: Mapping[str, str], pass_fds: tuple[int, ...]) -> _Child:
    """Start a process by its command."""
    (out, out_end), (error, error_end) = os.pipe(), os.pipe()
    try:
        popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out_end,
            stderr=error_end,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except OSError:
        os.close(out)
        os.close(error)
        raise
    finally:
        os.close(out_end)
        os.close(error_end)
    child = _Child(name, popen.pid, _Output((out, error)))
    loop = asyncio.get_running_loop()

    def reap() -> None:
        # Its group is ended before it is reaped: until then its number belongs to nobody else.
        end_group(popen.pid)
        child.end(popen.wait())

    try:
        pidfd = os.pidfd_open(popen.pid)
    except (AttributeError, OSError):

        def wait() -> None:
            os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(reap)

        threading.Thread(target=wait, name=f"wait-{name}", daemon=True).start()
        return child

    def readable() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        reap()

    loop.add_reader(pidfd, readable)
    return child


class _Nursery:
    """The process that forks workers (`unisono.nursery`)."""

    def __init__(self, environment: Mapping[str, str], secret: Secret, screen: Terminal, standing: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._secret = secret
        self._child: _Child | None = None
        if standing:
            self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._channel.connect(standing)
            except OSError as error:
                raise UsageError(f"no nursery answers at UNISONO_NURSERY={standing}: {error.strerror}") from error
        else:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, "-P", "-m", "unisono.nursery", str(theirs.fileno())]
            try:
                self._child = _spawn("nursery", command, environment, (theirs.fileno(),))
            finally:
                theirs.close()
            self._child.output.on_line = lambda text, is_error: screen.worker_line("nursery", text, is_error=is_error)
        self._channel.setblocking(False)
        self._alive = True
        self._children: dict[int, _Child] = {}
        self._unborn: dict[str, Callable[[Born], None]] = {}
        self._loop.add_reader(self._channel.fileno(), self._hear)

    @property
    def alive(self) -> bool:
        return self._alive

    def bear(
        self, name: str, arguments: list[str], environment: Mapping[str, str], on_born: Callable[[_Child | str], None]
    ) -> None:
        """Start a worker; ``on_born`` gets it, or the reason why there is none."""
        (out, out_end), (error, error_end) = os.pipe(), os.pipe()

        def born(message: Born) -> None:
            if message.error:
                os.close(out)
                os.close(error)
                on_born(message.error)
                return
            child = self._children[message.pid] = _Child(name, message.pid, _Output((out, error)))
            on_born(child)

        self._unborn[name] = born
        birth = msgspec.msgpack.encode(Birth(name, arguments, dict(environment), os.getcwd()))
        try:
            # A few kilobytes, to a process that does nothing else.
            self._channel.settimeout(SEND_TIMEOUT_S)
            socket.send_fds(self._channel, [birth], [out_end, error_end, self._secret.descriptor])
        except OSError as failure:
            self._unborn.pop(name)(Born(name, 0, f"the nursery does not answer: {failure}"))
        finally:
            self._channel.setblocking(False)
            os.close(out_end)
            os.close(error_end)

    async def close(self) -> None:
        """End it; its workers have ended before."""
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if self._child is not None and not await self._child.ended_within(TERMINATE_S):
            self._child.kill()
            await self._child.ended_within(TERMINATE_S)

    def _hear(self) -> None:
        while True:
            try:
                data = self._channel.recv(MAX_LINE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._alive = False
                self._loop.remove_reader(self._channel.fileno())
                for name, born in list(self._unborn.items()):
                    born(Born(name, 0, "the nursery has ended"))
                self._unborn.clear()
                for child in self._children.values():
                    if child.exit_code is None:
                        child.end(-signal.SIGKILL)  # they go with their parent
                return
            message = msgspec.msgpack.decode(data, type=Born | Death)
            if isinstance(message, Death):
                self._children.pop(message.pid).end(message.exit_code)
            elif message.name:
                self._unborn.pop(message.name)(message)


class _Agent:
    """The workers of this machine.

    Args:
        head: the head's process where this agent has started it; None in ``unisono join``.
    """

    def __init__(self, job: Job, url: str, token: str, secret: Secret, screen: Terminal, head: _Child | None) -> None:
        self._job = job
        self._url = url
        self._token = token
        self._secret = secret
        self._screen = screen
        self._head = head
        self._host = machine_label()
        self._workers: dict[str, _Child] = {}
        self._local_ranks: dict[str, int] = {}
        self._nursery: _Nursery | None = None
        self._late: list[asyncio.TimerHandle] = []
        self._connection: ClientConnection | None = None
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._over: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._is_leaving = False
        self._num_signals = 0

    async def run(self) -> int:
        """Work until the run is over, or this agent is asked to leave. Returns the exit code."""
        loop = asyncio.get_running_loop()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, number)
        if self._head is not None:
            self._head.on_end = self._head_ended
        if self._job.start == "fork":
            standing = os.environ.get("UNISONO_NURSERY", "")
            self._nursery = _Nursery(self._environment("nursery", 0), self._secret, self._screen, standing)
        talk = asyncio.create_task(self._talk())
        try:
            ended = await self._over
        finally:
            self._is_leaving = True
            for timer in self._late:
                timer.cancel()
            await self._end_workers(self._over.result() if self._over.done() and not self._over.cancelled() else None)
            if self._nursery is not None:
                await self._nursery.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._outbox.join()  # the head hears of every end that this agent has seen
            talk.cancel()
            await asyncio.gather(talk, return_exceptions=True)
        self._show(ended)
        return ended.exit_code

    # -- the head ------------------------------------------------------------------------------------

    async def _talk(self) -> None:
        """The connection to the head."""
        try:
            async with connect(
                self._url,
                additional_headers={"Authorization": f"Bearer {self._token}"},
                compression=None,
                ping_interval=None,
                open_timeout=30.0,
                close_timeout=1.0,
                max_size=None,
                proxy=None,
            ) as connection:
                await connection.send(
                    encode(
                        AgentHello(
                            host=self._host,
                            pid=os.getpid(),
                            num_workers=self._job.num_workers,
                            primary=self._head is not None,
                        )
                    )
                )
                sender = asyncio.create_task(self._send(connection))
                try:
                    async for data in connection:
                        self._hear(decode(data if isinstance(data, bytes) else data.encode()))
                finally:
                    sender.cancel()
            why = "the connection to the head has closed"
        except InvalidStatus as error:
            why = f"the head at {self._url} refuses this machine with HTTP {error.response.status_code}"
        except (OSError, InvalidHandshake, ConnectionClosed, TimeoutError) as error:
            why = f"the connection to the head at {self._url} broke: {error}"
        except Exception as error:
            self._finish(Ended(ok=False, reason=f"{type(error).__name__}: {error}", exit_code=1))
            raise
        if self._head is not None and not self._over.done():
            await self._head.ended_within(TERMINATE_S)  # `_head_ended` knows more about it
        elif self._workers and not self._over.done():
            # The workers go on without the head for a while, and end by themselves when it stays away.
            self._screen.say(f"{why}; the workers go on for {self._job.head_away_s:.0f} s")
            self._is_leaving = True
            await asyncio.gather(
                *(child.ended_within(self._job.head_away_s + TERMINATE_S) for child in self._workers.values())
            )
        self._finish(Ended(ok=False, reason=why, exit_code=1))

    async def _send(self, connection: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await connection.send(encode(await self._outbox.get()))
                self._outbox.task_done()

    def _hear(self, message: Message) -> None:
        match message:
            case Start():
                for worker_id in message.worker_ids:
                    if message.delay_s > 0:
                        loop = asyncio.get_running_loop()
                        self._late.append(loop.call_later(message.delay_s, self._start, worker_id))
                    else:
                        self._start(worker_id)
            case StepDone():
                self._screen.step(message)
            case Told():
                self._screen.say(message.text)
            case Evict():
                child = self._workers.get(message.worker_id)
                if child is not None:
                    child.kill()
            case WorkerLate():
                child = self._workers.get(message.worker_id)
                if child is not None and child.exit_code is None:
                    self._screen.say(f"{message.worker_id} is stuck here:")
                    os.kill(child.pid, signal.SIGUSR1)  # its stack goes to its standard error
            case Ended():
                self._finish(message)
            case Welcome():
                pass

    def _finish(self, ended: Ended) -> None:
        if not self._over.done():
            self._over.set_result(ended)

    def _head_ended(self, head: _Child) -> None:
        if not self._is_leaving:
            words = "".join(f"\n{line}" for line in head.output.last_lines)
            reason = f"the head (pid {head.pid}) has ended with exit code {head.exit_code}{words}"
            self._finish(Ended(ok=False, reason=reason, exit_code=1))

    # -- workers -------------------------------------------------------------------------------------

    def _start(self, worker_id: str) -> None:
        if self._is_leaving:
            return
        gone = {worker_id for worker_id, child in self._workers.items() if child.exit_code is not None}
        taken = {rank for i, rank in self._local_ranks.items() if i not in gone}
        local_rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
        self._local_ranks[worker_id] = local_rank
        environment = self._environment(worker_id, local_rank)

        def started(child: _Child | str) -> None:
            if isinstance(child, str):  # no memory, no processes left
                self._outbox.put_nowait(WorkerExit(worker_id=worker_id, exit_code=1, last_words=child))
                return
            child.output.on_line = lambda text, is_error: self._screen.worker_line(worker_id, text, is_error=is_error)
            child.on_end = self._worker_ended
            self._workers[worker_id] = child
            if self._is_leaving:
                child.kill()

        if self._nursery is not None and self._nursery.alive:
            self._nursery.bear(worker_id, self._job.arguments, environment, started)
            return
        command = [sys.executable, "-P", "-m", "unisono.worker", *self._job.arguments]
        try:
            started(_spawn(worker_id, command, environment, (self._secret.descriptor,)))
        except OSError as error:
            started(str(error))

    def _environment(self, worker_id: str, local_rank: int) -> dict[str, str]:
        job = self._job
        threads = str(job.threads)
        label = self._host
        if job.simulate_hosts > 1:
            label += f"-{local_rank * job.simulate_hosts // max(job.num_workers, local_rank + 1)}"
        return {
            **os.environ,
            PARENT: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "UNISONO_HEAD": self._url,
            "UNISONO_TOKEN_FILE": self._secret.path,
            "UNISONO_WORKER_ID": worker_id,
            "UNISONO_HOST": label,
            "UNISONO_RUN_DIR": job.run_dir,
            "UNISONO_OVERWRITE": "1" if job.overwrite else "",
            "UNISONO_THREADS": threads,
            "UNISONO_LOCAL_RANK": str(local_rank),
            "UNISONO_HEAD_AWAY_S": str(job.head_away_s),
        }

    def _worker_ended(self, child: _Child) -> None:
        assert child.exit_code is not None
        words = "\n".join(child.output.last_lines) if child.exit_code != 0 else ""
        self._outbox.put_nowait(WorkerExit(worker_id=child.name, exit_code=child.exit_code, last_words=words))
        if self._head is None and self._num_signals and all(c.exit_code is not None for c in self._workers.values()):
            self._finish(Ended(ok=True, reason="all workers of this machine have left"))

    def _signalled(self, number: signal.Signals) -> None:
        self._num_signals += 1
        code = 128 + number
        if self._num_signals > 1:
            for child in self._workers.values():
                child.kill()
            self._finish(Ended(ok=False, reason="ended by a second signal", exit_code=code))
        elif self._head is None and number is not signal.SIGHUP and self._workers:
            self._screen.say("the workers of this machine leave at the end of the step (again: end them now)")
            self._outbox.put_nowait(Drain(reason=f"{self._host} leaves"))
        else:
            word = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
            self._finish(Ended(ok=False, reason=word, exit_code=code))

    async def _end_workers(self, ended: Ended | None) -> None:
        """Wait for those who end by themselves, end the others."""
        if ended is not None and ended.ok:
            patience_s = FINISH_S
        else:
            patience_s = 0.0 if ended is None or self._num_signals else FAIL_S
        if not await self._all_ended(patience_s):
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
        self._screen.close(ended, with_traceback=not self._job.outcome)
