"""`launch`: ``unisono run`` for a function, from Python or a notebook."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

from unisono.errors import LaunchError
from unisono.lifetime import PARENT, Memory, fill_standard_streams
from unisono.words import count

__all__ = ["launch"]

T = TypeVar("T")
NAME: Final = "unisono-launch"
STOP_S: Final = 15.0
NOT_OPTIONS: Final = ("module", "callable", "result", "outcome", "plain")
"""Options of the command that `launch` sets itself, or that are for scripts."""


def launch(
    main: Callable[..., T], *args: Any, workers: int | str = "auto", threads: int = 1, run_dir: str = "", **options: Any
) -> T:
    """Call ``main(*args)`` on workers of this machine; return the result of rank 0.

    Blocks until the run is over. ``main`` and its arguments are pickled by value (cloudpickle), so functions of a
    notebook will do; the result is pickled back. Each line of the workers' output appears here with the worker's name.

    Args:
        workers: how many; "auto": every GPU, else every core; "A:B": at least A, at most B.
        threads: CPU threads of a worker. Part of the result's bits.
        run_dir: directory of the run; wins over the one that ``main`` names.
        options: of the command ``unisono run``, with underscores: ``exchange="gloo"``, ``overwrite=True``.

    Raises:
        LaunchError: a worker failed, or an option is wrong.
    """
    import cloudpickle

    more = _arguments(options)
    _check_call(main, args)
    pickled = cloudpickle.dumps(functools.partial(main, *args))
    fill_standard_streams()  # else a closed one's number goes to a `Memory`, and output is written into it
    with Memory(NAME, pickled) as function, Memory(NAME) as result, Memory(NAME) as outcome:
        command = [
            *(sys.executable, "-u", "-P", "-m", "unisono", "run", "--workers", str(workers), "--threads", str(threads)),
            *("--callable", function.path, "--result", result.path, "--outcome", outcome.path, "--run-dir", run_dir),
            *more,
        ]
        exit_code, words = _call(command)
        known = json.loads(outcome.read() or b"{}")
        if exit_code != 0 or not known.get("ok"):
            raise LaunchError(
                known.get("reason") or words or f"exit code {exit_code}", known.get("traceback", ""), exit_code
            )
        returned = result.read()
        if not returned.endswith(pickle.STOP):  # empty, or cut off where the worker was killed
            raise LaunchError(f"the run ended before the function had returned: {known['reason']}", "", exit_code)
        value: T = cloudpickle.loads(returned)
        return value


def _check_call(main: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Check a call that would fail in every worker: here the traceback ends at the line to change.

    Raises:
        LaunchError: ``main`` cannot be called with these arguments.
    """
    name = getattr(main, "__qualname__", repr(main))
    if not callable(main):
        raise LaunchError(f"launch calls a function, got {name}", "", 2)
    try:
        inspect.signature(main).bind(*args)
    except ValueError:
        return  # a builtin without a signature
    except TypeError as error:
        raise LaunchError(
            f"launch cannot call {name} with the {count(len(args), 'argument')} given: {error}", "", 2
        ) from None


def _arguments(options: dict[str, Any]) -> list[str]:
    """Return the options as words of the command line of ``unisono run``.

    Raises:
        LaunchError: the command has no such option.
    """
    from unisono.cli.run import run

    known = {option: param for param in run.params for option in param.opts if option.startswith("--")}
    found = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if option not in known or name in NOT_OPTIONS:
            names = sorted(
                other[2:].replace("-", "_")
                for other, param in known.items()
                if not getattr(param, "hidden", False)
                and other not in ("--workers", "--threads", "--run-dir", "--plain")
            )
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}=?" if near else f"there are {', '.join(names)}"
            raise LaunchError(f"launch has no option {name}=; {hint}", "", 2)
        if getattr(known[option], "is_flag", False):
            found += [option] if value else [] if value is None else known[option].secondary_opts
        elif getattr(known[option], "multiple", False):
            found += [word for each in value for word in (option, str(each))]
        elif value is not None:
            found += [option, str(value)]
    return found


def _call(command: list[str]) -> tuple[int, str]:
    """Run the command, which ends with this process, and show its output. Return its exit code and last line."""
    environment = {**os.environ, PARENT: str(os.getpid())}
    last = ""
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)  # by Python's own stream, which a notebook shows
                last = line.strip() or last
            return process.wait(), last
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
                process.kill()
