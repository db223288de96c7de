"""A worker's process: ``python -m unisono.machine.worker SCRIPT ARGUMENTS``, started by `unisono.machine.agent`.

It connects to the head, runs the script as ``python SCRIPT ARGUMENTS`` would, and reports how it went. ``-m MODULE``
runs a module; ``--callable FILE RESULT`` calls a pickled function (`unisono.launch`).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import os
import runpy
import signal
import sys
import types
from pathlib import Path

from unisono import faults
from unisono.errors import RunStopped
from unisono.lifetime import bind_to_parent, name_process
from unisono.member import Door, Member
from unisono.messages import MemberInfo

__all__ = ["main"]


def main() -> int:
    """Be a worker. Returns the exit code of the process."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    bind_to_parent(signal.SIGKILL)
    faults.arm(os.environ)
    code = [1]
    atexit.register(_end_at_once, code)  # the first one registered is the last one called
    code[0] = _work()
    return code[0]


def _end_at_once(code: list[int]) -> None:
    """Leave the process where its orderly end would wait for a machine that is out of reach."""
    wire = sys.modules.get("unisono.exchange.wire")
    if wire is not None and wire.release_abandoned():
        _flush()
        os._exit(code[0])


def _work() -> int:
    door = Door.from_environment()
    if door is None:
        print(
            "python -m unisono.machine.worker is started by `unisono run` and `unisono join`, not by hand",
            file=sys.stderr,
        )
        return 2
    if len(sys.argv) < 2:
        print("python -m unisono.machine.worker needs a script", file=sys.stderr)
        return 2
    name_process(f"unisono {door.worker_id}")
    try:
        member = _connect(door)
    except RunStopped:
        return 1  # the run has ended meanwhile, or this worker was refused: the head has told the agent why
    try:
        return _report(member, sys.argv[1:])
    finally:
        member.close()
        _flush()


def _connect(door: Door) -> Member:
    from unisono.exchange.host import Board
    from unisono.fingerprint import fingerprint, script_checksum

    device = _device(door.local_rank)
    board = Board.create()
    info = MemberInfo(worker_id=door.worker_id, host=door.host, pid=os.getpid(), device=device, board=board.address)
    script = script_checksum(sys.argv[1:])  # it may have been edited since the others began
    return Member(door, info, fingerprint(device), board, script=script).connect()


def _device(local_rank: int) -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    device = f"cuda:{local_rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device


def _report(member: Member, arguments: list[str]) -> int:
    """Run the script and tell the head how it ended. The traceback goes to the head, which shows it once."""
    try:
        _run(arguments)
    except RunStopped:
        # The run is over, or goes on without this worker. Either way the head knows why, and nobody failed here.
        end = member.end()
        if end is not None:
            return end.exit_code
        return 0 if member.has_left else 1
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            return _finish(member)
        code = leaving.code if isinstance(leaving.code, int) else 1
        if not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
        member.failed(leaving, exit_code=code & 0xFF or 1)
        return code & 0xFF or 1
    except BaseException as error:
        _flush()
        place = getattr(error, "unisono_place", None)  # set where a micro-batch's computation raised
        if place is None:
            member.failed(error)
        else:
            step, microbatch, samples = place
            member.failed(error, step=step, microbatch=microbatch, samples=samples, retry=True)
        return 1
    return _finish(member)


def _finish(member: Member) -> int:
    """Stay until all have finished: the others may still read this worker's shared memory."""
    _flush()
    if member.ended() is None and not member.has_left:
        member.waiting(True)
        member.finished()
        member.wait_ended()
    return 0


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "--callable":
        _call(Path(arguments[1]), Path(arguments[2]))
    else:
        _run_script(arguments)


def _run_script(arguments: list[str]) -> None:
    path = os.path.abspath(arguments[0])  # as `python` does: a script may change the directory
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

    from unisono import member as members

    sys.path.insert(0, os.getcwd())
    value = cloudpickle.loads(function.read_bytes())()
    member = members.current()
    notice = member.latest() if member is not None else None
    first = notice.members[0].worker_id if notice is not None and notice.members else "w0"
    if member is None or member.worker_id == first:
        result.write_bytes(cloudpickle.dumps(value))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


if __name__ == "__main__":
    sys.exit(main())
