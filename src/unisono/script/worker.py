"""A worker's process: ``python -m unisono.script.worker SCRIPT ARGUMENTS``, started by `unisono.cluster.machine.agent`.

The worker connects to the head, runs the script as ``python SCRIPT ARGUMENTS`` would, and reports how the script ended.
``-m MODULE`` runs a module; ``--callable FILE RESULT`` calls a pickled function (`unisono.launch`).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import runpy
import signal
import socket
import stat
import sys
import types
from pathlib import Path
from typing import Final

import msgspec

from unisono.cluster.worker.beatpage import open_slot
from unisono.cluster.worker.member import Member, current
from unisono.core.errors import RunStopped, StopInspection, UsageError
from unisono.core.messages import MemberInfo
from unisono.core.spec import WORKER, WorkerSpec
from unisono.script import open_runs
from unisono.system import faults
from unisono.system.arithmetic import check
from unisono.system.lifetime import TOKEN_FILE, bind_to_parent, name_process, take_inherited, take_token
from unisono.system.stacks import trimmed_traceback

__all__ = ["STACK_SIGNAL", "end_of_fork", "exit_code", "flush", "has_finalizers", "main", "run"]

_kept: Final[list[BaseException]] = []

STACK_SIGNAL: Final = "UNISONO_STACK_SIGNAL"
"""Name of the environment variable with a signal at which workers write their Python stacks, for debugging by
hand. By default there is no such signal: all signals belong to the script.
"""


def main() -> int:
    """Be a worker. Returns the exit code of the process."""
    faulthandler.enable()
    if name := os.environ.pop(STACK_SIGNAL, ""):
        faulthandler.register(signal.Signals[name], all_threads=True)
    bind_to_parent(signal.SIGKILL)
    code = [1]
    atexit.register(_end_at_once, code, os.getpid())  # the function that is registered first is called last
    code[0] = _work()
    return code[0]


def _end_at_once(code: list[int], own: int) -> None:
    """Skip the interpreter's shutdown where that would do harm.

    The shutdown would wait for a machine that is out of reach. In a fork, it would destroy objects of the worker.
    """
    wire = sys.modules.get("unisono.engine.exchange.wire")
    is_own = os.getpid() == own
    if not is_own or (wire is not None and wire.release_abandoned()):
        if is_own:
            _write_files()
        flush()
        os._exit(code[0])


def has_finalizers() -> bool:
    """Return whether the script has left an object that has something to do at its end: a file, a process, a generator.

    The kernel closes sockets.
    """
    gc.collect()
    kinds = {type(value) for value in gc.get_objects()} - {socket.socket}
    return any(hasattr(kind, "__del__") for kind in kinds)


def _write_files() -> None:
    """Write what the script has left in the buffers of files that are open."""
    for value in gc.get_objects():
        # Not isinstance: that asks proxies for their class, and some do their work then.
        if issubclass(type(value), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(Exception):  # closed, or broken
                if stat.S_ISREG(os.fstat(value.fileno()).st_mode):  # a pipe that nobody reads would be waited for
                    value.flush()


def _work() -> int:
    spec, armed = _take_spec(), os.environ.pop(faults.ENVIRONMENT, "")
    if spec is None:
        print(
            "python -m unisono.script.worker is started by `unisono run` and `unisono join`, not by hand",
            file=sys.stderr,
        )
        return 2
    if len(sys.argv) < 2:
        print("python -m unisono.script.worker needs a script", file=sys.stderr)
        return 2
    faults.arm(armed, spec.worker_id, spec.agent)
    name_process(f"unisono {spec.worker_id}")
    try:
        member = _connect(spec)
    except RunStopped:
        return 1  # the run has ended meanwhile, or the head refuses this worker: the agent shows why
    own = os.getpid()
    try:
        return _run_and_report(member, sys.argv[1:])
    finally:
        if os.getpid() == own:
            member.close()
        flush()


def _take_spec() -> WorkerSpec | None:
    """Take the worker's settings and the token out of the environment; return None where no agent started this process.

    Raises:
        UsageError: the settings or the token cannot be read.
    """
    given = os.environ.pop(WORKER, None)
    if given is None:
        return None
    try:
        return WorkerSpec.decode(take_inherited(given), take_token(os.environ))
    except (msgspec.MsgspecError, KeyError, ValueError, OSError) as error:
        raise UsageError(
            f"{WORKER} is set, but together with {TOKEN_FILE} it does not define a worker ({type(error).__name__}: "
            f"{error}); start workers with `unisono run` or `unisono join`"
        ) from error


def _connect(spec: WorkerSpec) -> Member:
    from unisono.engine.exchange.pages import WorkerPage
    from unisono.system import accelerators
    from unisono.system.fingerprint import fingerprint, script_checksum

    if wanted := spec.run.settings.arithmetic:
        check(wanted, os.environ, is_alone=False)
    device = str(accelerators.choose(spec.gpu_number))
    page = WorkerPage()
    info = MemberInfo(worker_id=spec.worker_id, host=spec.host, pid=os.getpid(), device=device, page=page.address)
    script = script_checksum(sys.argv[1:])  # the script may have been edited since the other workers began
    slot = open_slot(spec.beats, spec.local_rank)
    return Member(spec, info, fingerprint(device), page, script=script, slot=slot).connect()


def _run_and_report(member: Member, arguments: list[str]) -> int:
    """Run the script and tell the head how it ended. Returns the exit code, also in a fork of the worker."""
    own = os.getpid()
    error: BaseException | None = None
    try:
        if member.spec.run.settings.inspect:
            from unisono.script.inspecting import begin

            begin(member.spec.run)
        run(arguments)
    except BaseException as raised:
        error = raised
    if os.getpid() != own:
        return end_of_fork(error)
    return _report(member, open_runs.end_all(error))


def end_of_fork(error: BaseException | None) -> int:
    """Return the exit code of a fork of this worker at the end of the script. Sends nothing to the head."""
    if isinstance(error, SystemExit):
        return exit_code(error)
    if error is not None:
        _kept.append(error)  # its frames hold objects of the worker, which must not be freed here
        with contextlib.suppress(Exception):
            sys.stderr.write(trimmed_traceback(error))
        return 1
    return 0


def exit_code(leaving: SystemExit) -> int:
    """Return the exit code of ``sys.exit(...)``, and print its message as Python would."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    with contextlib.suppress(Exception):
        print(leaving.code, file=sys.stderr)
    return 1


def _report(member: Member, error: BaseException | None) -> int:
    """Tell the head how the script ended; return the exit code. The head shows the traceback, once."""
    if isinstance(error, StopInspection):
        return _finish(member)  # all workers do, at the same step
    if isinstance(error, RunStopped):
        # The run is over or goes on without this worker. The head knows why; the script has not failed.
        end = member.end()
        if end is not None:
            return end.exit_code
        return 0 if member.has_left else 1
    if isinstance(error, SystemExit):
        if (code := exit_code(error)) == 0:
            return _finish(member)
        member.failed(error, exit_code=code & 0xFF or 1)
        return code & 0xFF or 1
    if error is not None:
        flush()
        if "environment variable RANK expected" in str(error):  # torch.distributed's words
            error.add_note("(torchrun starts such a script; one that uses unisono.Run needs no process group)")
        member.failed(error)
        return 1
    return _finish(member)


def _finish(member: Member) -> int:
    """Wait until all workers have finished: the others may still read this worker's shared memory."""
    flush()
    if member.ended() is None and not member.has_left:
        member.progress.waiting(True)
        member.finished()
        member.wait_ended()
    return 0


def run(arguments: list[str]) -> None:
    """Run the script as ``python SCRIPT ARGUMENTS`` would.

    Args:
        arguments: ``SCRIPT ...``, ``-m MODULE ...``, or ``--callable FILE RESULT``.
    """
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "--callable":
        _call(Path(arguments[1]), Path(arguments[2]))
    else:
        _run_script(arguments)


def _run_script(arguments: list[str]) -> None:
    path = os.path.abspath(arguments[0])  # as `python` does: the script may change the working directory
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(path).resolve().parent))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module  # so that pickle, and processes that the script starts, find its functions
    with io.open_code(str(Path(path).resolve())) as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


def _call(function: Path, result: Path) -> None:
    import cloudpickle

    sys.path.insert(0, os.getcwd())
    value = cloudpickle.loads(function.read_bytes())()
    if (failure := open_runs.end_all(None)) is not None:
        raise failure
    member = current()
    notice = member.latest() if member is not None else None
    first = notice.members[0].worker_id if notice is not None and notice.members else "w0"
    if member is None or member.worker_id == first:
        result.write_bytes(cloudpickle.dumps(value))


def flush() -> None:
    """Write what is in the buffers of standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have put anything there, None included
            stream.flush()


if __name__ == "__main__":
    sys.exit(main())
