"""A script that runs alone and is inspected, in a process of its own: ``python -m unisono.script.inspected``.

`run_inspected` starts the process with a run (`unisono.core.spec.RunSpec`), whose setting `RunSettings.inspect` names
the inspector; there is no head and no agent, and the process has the terminal of its caller, e.g. for a debugger.
The process ends with its caller.
"""

from __future__ import annotations

import bdb
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from unisono.cluster.machine.placement import inherited_environment
from unisono.cluster.worker import member
from unisono.core.errors import StopInspection
from unisono.core.replay_rules import LEFT
from unisono.core.spec import RunSpec
from unisono.script import open_runs
from unisono.script.worker import end_of_fork, exit_code, run
from unisono.system.extras import need
from unisono.system.fingerprint import SWITCHES
from unisono.system.lifetime import Memory, bind_to_parent, take_inherited
from unisono.system.stacks import trimmed_traceback

__all__ = ["INTERRUPTED", "main", "run_inspected"]

SETTINGS: Final = "UNISONO_INSPECTED"
"""Name of the environment variable with the descriptor of the settings of the run (JSON)."""
INTERRUPTED: Final = 128 + signal.SIGINT
"""Exit code of a script that was interrupted."""
ENDINGS: Final = (signal.SIGINT, signal.SIGCHLD)
POLL_S: Final = 0.5
"""How often is looked, in case that another thread has taken the signal."""


def run_inspected(
    spec: RunSpec, *, variables: Mapping[str, str] = MappingProxyType({}), stdout: int | None = None
) -> int:
    """Run a script alone, with an inspector, in a child process; returns its exit code: that of a `StopInspection`.

    Args:
        spec: with ``arguments``, ``folder``, and the settings ``inspect`` and a ``run_dir`` of its own.
        variables: more of its environment; a library's switch (`unisono.system.fingerprint.SWITCHES`) that is not in it
            is not set.
        stdout: a file descriptor for what the script prints; None: that of this process.

    Raises:
        UsageError: torch is not installed.
    """
    need("torch", "a worker", "torch")
    inherited = {name: value for name, value in inherited_environment(spec).items() if name not in SWITCHES}
    command = [sys.executable, "-P", "-m", "unisono.script.inspected", *spec.arguments]
    with (
        Memory("unisono-inspected", msgspec.json.encode(spec)) as memory,
        subprocess.Popen(
            command,
            env={**inherited, **variables, SETTINGS: str(memory.descriptor)},
            cwd=spec.folder or None,
            stdout=stdout,
            pass_fds=(memory.descriptor,),
        ) as child,
    ):
        before = signal.signal(signal.SIGINT, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
        try:
            code = _wait_for(child)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
            signal.signal(signal.SIGINT, before)
        return code if code >= 0 else 128 - code


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """Wait for a process, and pass on an interrupt. One from the terminal goes to all processes there by itself, e.g.
    to a debugger, which goes on.
    """
    while (code := child.poll()) is None:
        if not hasattr(signal, "sigtimedwait"):  # macOS: what is sent to this process alone waits for the end
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(POLL_S)
            continue
        found = signal.sigtimedwait(ENDINGS, POLL_S)
        if found is not None and found.si_signo == signal.SIGINT and found.si_pid:
            child.send_signal(signal.SIGINT)
    return code


def main() -> int:
    """Be that process. Returns its exit code."""
    bind_to_parent(signal.SIGKILL)
    given = os.environ.pop(SETTINGS, None)
    if given is None:
        print("python -m unisono.script.inspected is started by commands of unisono, not by hand", file=sys.stderr)
        return 2
    member.settle(msgspec.json.decode(take_inherited(given), type=RunSpec))
    own = os.getpid()
    error: BaseException | None = None
    try:
        run(sys.argv[1:])
    except BaseException as raised:
        error = raised
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the end
    if os.getpid() != own:
        return end_of_fork(error)
    return _report(open_runs.end_all(error))


def _report(error: BaseException | None) -> int:
    """Show how the script has ended; returns the exit code."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return exit_code(error)
    if isinstance(error, bdb.BdbQuit):
        print("unisono: left in the debugger", file=sys.stderr)  # of the script's own breakpoint()
        return LEFT
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    sys.stdout.flush()
    if isinstance(error, StopInspection):
        if str(error):
            print(error, flush=True)
        return error.code
    sys.stderr.write(trimmed_traceback(error))
    return 1


if __name__ == "__main__":
    sys.exit(main())
