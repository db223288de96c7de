"""Start workers on this machine: forked from a nursery that has imported torch, or each by its own command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from unisono.cluster.machine.children import (
    MAX_LINE_BYTES,
    Child,
    Listener,
    Output,
    exit_code_of,
    reap_all,
    spawn,
    watch,
)
from unisono.cluster.machine.forking import Forked, ForkRequest, WorkerEnded
from unisono.core.errors import UsageError
from unisono.core.settings import StartMethod
from unisono.core.spec import WORKER, RunSpec, WorkerSpec
from unisono.system.arithmetic import variables
from unisono.system.lifetime import NURSERY, PARENT, TOKEN_FILE, Memory, adopt_orphans, end_group

__all__ = ["PLACEMENTS", "Fork", "Nursery", "Spawn", "start_method"]

SEND_TIMEOUT_S: Final = 5.0

OnStarted = Callable[[Child | OSError], None]
"""Callback: the worker's process, or the reason why there is none."""


OnEnd = Callable[[Child], None]
"""Callback: a worker's process has ended."""


def inherited_environment(run: RunSpec) -> dict[str, str]:
    """Return the environment of every process that computes: this process's, and what equal bits need."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    # Python orders sets of strings by this seed: equal on all workers of all machines, unless the user has set it.
    hashing = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED") or "0"}
    chosen = dict.fromkeys(names, str(run.threads)) | variables(run.settings.arithmetic)
    return {**os.environ, PARENT: str(os.getpid()), **hashing, **chosen}


class Spawn:
    """Starts each worker of this machine by its command. Other ways (`PLACEMENTS`) have the same methods."""

    def __init__(self, run: RunSpec, secret: Memory, listener: Listener, on_end: OnEnd) -> None:
        self._run = run
        self._secret = secret
        self._listener = listener
        self._on_end = on_end

    def open(self) -> None:
        """Start the processes that this way needs itself.

        Raises:
            OSError: one of them could not be started. UsageError: a process that was named is not there.
        """

    def start(self, spec: WorkerSpec, on_started: OnStarted) -> None:
        """Start a worker; ``on_started`` is called once, now or later."""
        command = [sys.executable, "-u", "-P", "-m", "unisono.script.worker", *self._run.arguments]
        try:
            with Memory("unisono-worker", spec.encode()) as memory:
                handed = {WORKER: str(memory.descriptor), TOKEN_FILE: self._secret.inherited_path}
                child = spawn(
                    spec.worker_id,
                    command,
                    inherited_environment(self._run) | handed,
                    (self._secret.descriptor, memory.descriptor),
                    on_line=partial(self._listener.on_line, spec.worker_id),
                    on_end=self._on_end,
                )
        except OSError as error:
            on_started(error)
        else:
            on_started(child)

    async def close(self) -> None:
        """End its own processes. All workers have ended before."""


class Fork(Spawn):
    """Forks workers from a nursery. Where the nursery has ended, each worker starts by its command instead."""

    _nursery: Nursery | None = None

    def open(self) -> None:
        self._nursery = Nursery(inherited_environment(self._run), self._secret, self._listener, self._on_end)

    def start(self, spec: WorkerSpec, on_started: OnStarted) -> None:
        nursery = self._nursery
        if nursery is None or not nursery.is_alive:
            super().start(spec, on_started)
            return

        def on_forked(result: Child | OSError) -> None:
            if isinstance(result, OSError) and not nursery.is_alive:
                Spawn.start(self, spec, on_started)
            else:
                on_started(result)

        try:
            nursery.fork(spec, inherited_environment(self._run), on_forked)
        except OSError as error:
            on_forked(error)

    async def close(self) -> None:
        if self._nursery is not None:
            await self._nursery.close()


PLACEMENTS: Final[Mapping[str, Callable[[RunSpec, Memory, Listener, OnEnd], Spawn]]] = {"fork": Fork, "spawn": Spawn}
"""By `start_method`."""


def start_method(run: RunSpec) -> StartMethod:
    """Return how the workers of this machine are started."""
    return run.settings.start or ("fork" if sys.platform == "linux" else "spawn")


class Nursery:
    """The agent's side of the process that forks workers (`unisono.script.nursery`).

    A nursery that the agent starts forks orphans, which the agent adopts where the system lets it. One that stands by
    itself (`NURSERY`) is the parent of its workers.

    Raises:
        OSError: the process could not be started. UsageError: no nursery answers at the address in `NURSERY`.
    """

    def __init__(self, environment: Mapping[str, str], secret: Memory, listener: Listener, on_end: OnEnd) -> None:
        self._loop = asyncio.get_running_loop()
        self._secret = secret
        self._listener = listener
        self._on_worker_end = on_end
        self.child: Child | None = None
        """The nursery's process; None where it stands by itself."""
        standing = os.environ.get(NURSERY, "")
        self._adopts = not standing and adopt_orphans(True)
        if self._adopts:
            self._loop.add_signal_handler(signal.SIGCHLD, reap_all)
        self._channel = _connect(standing) if standing else self._start(environment)
        self._channel.setblocking(False)
        self.is_alive = True
        self._children: dict[int, Child] = {}
        self._requests: dict[str, Callable[[Forked], None]] = {}
        self._loop.add_reader(self._channel.fileno(), self._receive)

    def _start(self, environment: Mapping[str, str]) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-u", "-P", "-m", "unisono.script.nursery", str(theirs.fileno())]
        on_line = partial(self._listener.on_line, "nursery")
        with theirs:
            self.child = spawn("nursery", command, environment, (theirs.fileno(),), on_line=on_line)
        return ours

    def fork(self, spec: WorkerSpec, environment: Mapping[str, str], on_started: OnStarted) -> None:
        """Fork a worker.

        Raises:
            OSError: there are no descriptors left for the worker's output.
        """
        name = spec.worker_id
        (out, out_end), (error, error_end), (gate, key) = os.pipe(), os.pipe(), os.pipe()

        def on_forked(answer: Forked) -> None:
            if answer.error:
                for descriptor in (out, error, key):
                    os.close(descriptor)
                on_started(OSError(answer.error))
                return
            output = Output((out, error), partial(self._listener.on_line, name))
            child = Child(name, answer.pid, output, self._on_worker_end)
            if self._adopts:
                watch(child, partial(exit_code_of, answer.pid))
            else:
                self._children[answer.pid] = child
            with contextlib.suppress(BrokenPipeError):  # the worker was killed
                os.write(key, b"1")
            os.close(key)
            on_started(child)

        self._requests[name] = on_forked
        request = ForkRequest.of(name, spec.run.arguments, environment, os.getcwd(), adopted=self._adopts)
        try:
            # A few bytes, to a process that does nothing else.
            self._channel.settimeout(SEND_TIMEOUT_S)
            with Memory("unisono-worker", spec.encode()) as memory:
                request.send(self._channel, [out_end, error_end, self._secret.descriptor, memory.descriptor, gate])
        except OSError as failure:
            self._requests.pop(name)(Forked(name, 0, f"the nursery does not answer: {failure}"))
        finally:
            self._channel.setblocking(False)
            for descriptor in (out_end, error_end, gate):
                os.close(descriptor)

    async def close(self) -> None:
        """End the nursery's process. Its workers have ended before."""
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if self.child is not None:
            await self.child.close(ask=None)  # it ends with the channel
        if self._adopts:
            self._loop.remove_signal_handler(signal.SIGCHLD)
            adopt_orphans(False)

    def _receive(self) -> None:
        while self.is_alive:
            try:
                data = self._channel.recv(MAX_LINE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._on_end()
                return
            message = msgspec.msgpack.decode(data, type=Forked | WorkerEnded)
            if isinstance(message, WorkerEnded):
                ended = self._children.pop(message.pid)
                ended.peak_bytes = message.peak_bytes
                ended.end(message.exit_code)
            elif message.name:
                self._requests.pop(message.name)(message)

    def _on_end(self) -> None:
        self.is_alive = False
        self._loop.remove_reader(self._channel.fileno())
        pid = f" (pid {self.child.pid})" if self.child is not None else ""
        what = "the workers continue, and later ones start without it" if self._adopts else "the workers end with it"
        # The user reads this before the ends of workers that end with the nursery.
        self._listener.on_notice(f"the nursery{pid}, which forks workers, has ended; {what}")
        requests, self._requests = self._requests, {}
        for name, on_forked in requests.items():
            on_forked(Forked(name, 0, "the nursery has ended"))
        for child in self._children.values():
            if child.exit_code is None:  # the worker ends with the nursery, and its own processes must end as well
                end_group(child.pid)
                child.end(-signal.SIGKILL)


def _connect(path: str) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.connect(path)
    except OSError as error:
        channel.close()
        raise UsageError(f"no nursery answers at {NURSERY}={path}: {error.strerror}") from error
    return channel
