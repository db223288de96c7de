"""`launch`: ``unisono run`` for a function, from Python or a notebook."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

from unisono.cluster.notebook import cell_output, with_cell_lines
from unisono.core.errors import LaunchError, UsageError
from unisono.core.settings import SETTINGS
from unisono.core.words import count
from unisono.system.lifetime import Memory, fill_standard_streams, started

__all__ = ["launch"]

T = TypeVar("T")
NAME: Final = "unisono-launch"
STOP_S: Final = 15.0
NOT_OPTIONS: Final = ("workers", "threads", "run_dir", "plain", "dry_run")
"""Settings that `launch` has as arguments of its own, or that are for scripts."""


def launch(
    main: Callable[..., T],
    *args: Any,
    workers: int | str | None = None,
    threads: int | None = None,
    run_dir: str | None = None,
    **options: Any,
) -> T:
    """Call ``main(*args)`` on workers of this machine; return the result of rank 0.

    Blocks until the run is over. ``main`` and its arguments are pickled by value (cloudpickle), so functions of a
    notebook will do; the result is pickled back. Each line of the workers' output appears here with the worker's name.
    In a notebook, one line shows how far the run is, and changes in its place.

    Args:
        workers: how many; "auto", the default: every GPU, else every core; "A:B": at least A, at most B; "2x4": 2
            groups of 4, each with one part of the model.
        threads: CPU threads of a worker, by default 1. Part of the result's bits.
        run_dir: directory of the run; wins over the one that ``main`` names.
        options: other settings of ``unisono run``, with underscores: ``exchange="gloo"``, ``overwrite=True``,
            ``heartbeat="500ms"``. Others come from ``unisono.toml`` beside the script, if it is there.

    Raises:
        LaunchError: a worker failed, or an option is wrong.
    """
    import cloudpickle

    first = {"workers": workers, "threads": threads, "run-dir": run_dir}
    more = [word for name, value in first.items() if value is not None for word in (f"--{name}", str(value))]
    more += _arguments(options)
    _check_call(main, args)
    pickled = cloudpickle.dumps(functools.partial(main, *args))
    fill_standard_streams()  # else a closed one's number goes to a `Memory`, and output is written into it
    with Memory(NAME, pickled) as function, Memory(NAME) as result, Memory(NAME) as outcome:
        own = {"function": function.path, "result": result.path, "outcome": outcome.path, "beside": _beside()}
        command = [
            *(sys.executable, "-u", "-P", "-m", "unisono", "run", *more),
            *(word for setting in own.items() for word in ("--set", "=".join(setting))),
        ]
        exit_code, words = _call(command)
        known = json.loads(outcome.read() or b"{}")
        if exit_code != 0 or not known.get("ok"):
            traceback = with_cell_lines(known.get("traceback", ""))
            raise LaunchError(known.get("reason") or words or f"exit code {exit_code}", traceback, exit_code)
        returned = result.read()
        if not returned.endswith(pickle.STOP):  # empty, or cut off where the worker was killed
            raise LaunchError(f"the run ended before the function returned: {known['reason']}", "", exit_code)
        value: T = cloudpickle.loads(returned)
        return value


def _check_call(main: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Check a call that would fail in every worker: here the traceback ends at the line to change.

    Raises:
        LaunchError: ``main`` cannot be called with these arguments.
    """
    name = getattr(main, "__qualname__", repr(main))
    if not callable(main):
        raise LaunchError(f"launch takes a function, got {name}", "", 2)
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
        LaunchError: there is no such setting, or its value is wrong.
    """
    known = {_argument(setting.name): setting for setting in SETTINGS.values() if setting.group != "internal"}
    known = {name: setting for name, setting in known.items() if name not in NOT_OPTIONS}
    found = []
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}=?" if near else f"there are {', '.join(sorted(known))}"
            raise LaunchError(f"launch has no option {name}=; {hint}", "", 2)
        try:
            found += known[name].words(None if value is None else known[name].checked(value))
        except UsageError as error:
            raise LaunchError(str(error), "", 2) from error
    return found


def _argument(name: str) -> str:
    """Return the name of a setting as an argument of `launch`."""
    return name.replace("-", "_").replace(".", "_")


def _beside() -> str:
    """Return the folder of the script that calls `launch`; the current one in a notebook."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(script)) if script else os.getcwd()


def _call(command: list[str]) -> tuple[int, str]:
    """Run the command, which ends with this process, and show its output. Return its exit code and last line."""
    last, cell = "", cell_output()
    with started(
        command,
        STOP_S,
        environment=os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if cell is not None:
                cell.show(line)
            else:
                print(line, end="", flush=True)
            last = line.strip() or last
        return process.wait(), last
