"""A process that has imported torch, and forks workers from there.

Importing torch takes two or three seconds of a core. Done once for all workers of a machine, four workers start in the
time of one, a replacement starts in milliseconds, and what was imported is shared memory. The nursery itself never
computes and starts no thread, so a fork copies a quiet process.

An agent starts a nursery for itself and talks to it over a pair of sockets: `ForkRequest` with the worker's output
pipes and the token attached, and back `Forked`. The worker is the agent's child, not the nursery's: it is forked by a
process that ends at once, and the agent adopts orphans. So the kernel ends the worker with the agent, and the worker
outlives the nursery.

What a worker's fingerprint says of its processor takes 0.1 s of a core to compute, so one child does that for all.

A nursery can also stand by itself and serve many runs, one after the other or at once. Workers are then its own
children; it reports their ends to the agent (`WorkerEnded`), and ends them when the agent ends. The same holds where
orphans cannot be adopted::

    python -m unisono.script.nursery --listen /run/user/1000/nursery &
    UNISONO_NURSERY=/run/user/1000/nursery unisono run train.py

Its workers order sets of strings as the nursery does: by the ``PYTHONHASHSEED`` that it was started with, else by 0.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import os
import select
import signal
import socket
import sys
from typing import Final, NoReturn

import msgspec

from unisono.cluster.machine.forking import Forked, ForkRequest, WorkerEnded
from unisono.core.spec import WORKER
from unisono.system.fingerprint import chosen_by
from unisono.system.lifetime import PARENT, TOKEN_FILE, bind_to_parent, end_group, name_process
from unisono.system.probe import results, take_results

__all__ = ["main"]

_done: Final[list[int]] = []
"""The exit code of this process, if it is a worker that has done its work."""

MAX_BYTES: Final = 16
MAX_DESCRIPTORS: Final = 8


def main() -> NoReturn:
    """Be a nursery; in a child, be a worker. Ends the process."""
    if not os.environ.get("PYTHONHASHSEED"):
        # Python reads the variable when a process starts; workers that are forked here inherit this process's.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    atexit.register(_end_worker)  # before all others, so that it is called last
    bind_to_parent(signal.SIGKILL)
    name_process("unisono nursery")
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the agent decides when it ends
    # Modules that every worker needs; the script's own imports find them loaded. There is little garbage meanwhile, and
    # looking for it would take a fifth of the time.
    gc.disable()
    import torch._dynamo  # noqa: F401 - a second's import, which the first optimizer would do

    import unisono.script.run  # noqa: F401 - and what every `Run` needs

    gc.collect()
    gc.freeze()
    gc.enable()
    if "triton" in sys.modules:  # its bindings report what is still frozen at a worker's end as leaked
        atexit.register(gc.unfreeze)
    if sys.argv[1] == "--listen":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            before = os.umask(0o177)  # whoever connects can run code as this user
            try:
                listener.bind(sys.argv[2])
            finally:
                os.umask(before)
            listener.listen(64)
            print(f"the nursery listens at {sys.argv[2]}", flush=True)
            _Nursery(listener, None).serve()
    else:
        _Nursery(None, socket.socket(fileno=int(sys.argv[1]))).serve()
    os._exit(0)  # the agent waits for it, and Python would take all modules apart first


class _Nursery:
    """Nursery for one agent (``channel``), or for all agents that connect to ``listener``."""

    def __init__(self, listener: socket.socket | None, channel: socket.socket | None) -> None:
        self._listener = listener
        self._agents = [channel] if channel is not None else []
        self._children: dict[int, socket.socket] = {}
        self._probe: _Probe | None = _Probe()
        self._results = ""
        self._awake, self._waker = os.pipe()
        for descriptor in (self._awake, self._waker):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Fork workers until the agent ends. In a child, be a worker."""
        while self._agents or self._listener is not None:
            sources: list[int | socket.socket | _Probe] = [self._awake, *self._agents]
            if self._probe is not None:
                sources.append(self._probe)
            if self._listener is not None:
                sources.append(self._listener)
            ready, _, _ = select.select(sources, [], [])
            for source in ready:
                if isinstance(source, _Probe):
                    self._take_results()
                elif source is self._listener and self._listener is not None:
                    self._agents.append(self._listener.accept()[0])
                elif isinstance(source, socket.socket):
                    worker = self._receive(source)
                    if worker is not None:
                        _be_worker(*worker)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._awake, 4096)
                    self._reap()

    def _receive(self, agent: socket.socket) -> tuple[ForkRequest, list[int]] | None:
        """Receive a message of an agent. In the child that it asks for, return the request of the child; else None."""
        try:
            data, descriptors, _, _ = socket.recv_fds(agent, MAX_BYTES, MAX_DESCRIPTORS)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._agents.remove(agent)
            agent.close()
            for pid, owner in self._children.items():
                if owner is agent:
                    end_group(pid)
            return None
        with open(descriptors.pop(), "rb") as file:
            request = msgspec.msgpack.decode(file.read(), type=ForkRequest)
        self._take_results()
        try:
            pid = _fork_orphan() if request.adopted else os.fork()
        except OSError as error:
            _send(agent, Forked(request.name, 0, str(error)))
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (self._awake, self._waker):
                    os.close(descriptor)
                for channel in (*self._agents, *([self._listener] if self._listener is not None else [])):
                    channel.close()
                if self._results and chosen_by(request.environment) == chosen_by(os.environb):
                    take_results(self._results)
                return request, descriptors
            if not request.adopted:
                _lead_group(pid)
                self._children[pid] = agent
            _send(agent, Forked(request.name, pid))
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _take_results(self) -> None:
        """Wait for the results of the probe, before the first worker is forked."""
        if self._probe is not None:
            self._results, self._probe = self._probe.results(), None

    def _reap(self) -> None:
        while self._children:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            end_group(ended.si_pid)  # before another process can get this id
            _, status, used = os.wait4(ended.si_pid, 0)
            code, peak = os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024
            _send(self._children.pop(ended.si_pid), WorkerEnded(ended.si_pid, code, peak))


class _Probe:
    """A child of the nursery that computes what `unisono.system.probe.results` returns in each of its workers."""

    def __init__(self) -> None:
        self._receiving, sending = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            os.environ[PARENT] = str(parent)
            bind_to_parent(signal.SIGKILL)
            with open(sending, "wb") as pipe:
                pipe.write(results().encode())
            os._exit(0)
        os.close(sending)

    def fileno(self) -> int:
        """Return what can be read when the results are there."""
        return self._receiving

    def results(self) -> str:
        """Return the results, as soon as they are there; "" if the child has failed, as each worker then will.

        The nursery has no other child yet.
        """
        with open(self._receiving, "rb") as pipe:
            found = pipe.read().decode()
        os.waitpid(self._pid, 0)
        return found


def _send(agent: socket.socket, message: Forked | WorkerEnded) -> None:
    with contextlib.suppress(OSError):  # the agent has ended, which `_receive` notices
        agent.sendall(msgspec.msgpack.encode(message))


def _fork_orphan() -> int:
    """Fork a child that is an orphan: its parent has ended when this returns. Returns as `os.fork` does.

    Raises:
        OSError: the child could not be forked.
    """
    receiving, sending = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(receiving)
        os.close(sending)
        raise
    if between == 0:
        os.close(receiving)
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            os.close(sending)
            return 0
        if pid > 0:
            _lead_group(pid)
        os.write(sending, b"%d" % pid)
        os._exit(0)
    os.close(sending)
    with open(receiving, "rb", buffering=0) as pipe:
        pid = int(pipe.read(32) or -errno.EAGAIN)
    os.waitpid(between, 0)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return pid


def _lead_group(pid: int) -> None:
    """Make a child the leader of its group, so that the group can be ended from now on."""
    with contextlib.suppress(OSError):  # the child has done so itself, and has perhaps ended
        os.setpgid(pid, pid)


def _be_worker(request: ForkRequest, descriptors: list[int]) -> NoReturn:
    """In the forked child: become ``python -m unisono.script.worker ARGUMENTS``, just started."""
    parent = os.getppid()
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    out, error, token, settings, gate = descriptors
    if not os.read(gate, 1):
        os._exit(1)  # the agent has ended, or does not know this worker
    os.close(gate)
    for target, descriptor in ((1, out), (2, error)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request.folder)
    os.environ.clear()
    os.environb.update(request.environment)
    if not request.adopted:
        os.environ[PARENT] = str(parent)
    os.environ[TOKEN_FILE] = f"/proc/self/fd/{token}"
    os.environ[WORKER] = str(settings)
    # A nursery that stands by itself was started with another environment than the run.
    for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(1, folder)
    sys.argv = ["unisono.script.worker", *request.arguments]
    from unisono.script.worker import main as work

    _done.append(work())
    sys.exit(_done[0])


def _end_worker() -> None:
    """End a worker without the interpreter's shutdown, if only that is left.

    The shutdown takes a third of a second of a core for torch's modules. All that it is good for are the finalizers of
    what the script has left, so it is left out where there are none.
    """
    from unisono.script.worker import flush, has_finalizers

    if _done and not has_finalizers():
        flush()
        ctypes.CDLL(None).fflush(None)  # what native code has printed
        os._exit(_done[0])


if __name__ == "__main__":
    main()
