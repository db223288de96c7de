"""`launch`: ``unisono run`` for a function, from Python or a notebook."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from unisono.errors import LaunchError

__all__ = ["launch"]

T = TypeVar("T")
STOP_S: Final = 15.0


def launch(
    main: Callable[..., T], *args: Any, workers: int | str = "auto", threads: int = 1, run_dir: str = "", **options: Any
) -> T:
    """Call ``main(*args)`` on workers of this machine; returns what it returns on rank 0.

    Blocks until the run is over. ``main`` and its arguments are pickled by value (cloudpickle), so functions of a
    notebook will do; what it returns is pickled back. The workers' output appears here, told apart by worker.

    Args:
        workers: how many; "auto": every GPU, else every core; "A:B": at least A, at most B.
        threads: CPU threads of a worker. Part of the result's bits.
        run_dir: where the run is kept; wins over the one that ``main`` names.
        options: of the command ``unisono run``, with underscores: ``exchange="gloo"``, ``overwrite=True``.

    Raises:
        LaunchError: a worker failed, or an option is not right.
    """
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="unisono-launch-") as folder:  # mode 700
        function, result, outcome = (Path(folder) / name for name in ("function", "result", "outcome"))
        function.touch(mode=0o600)
        function.write_bytes(cloudpickle.dumps(functools.partial(main, *args)))
        command = [
            *(sys.executable, "-P", "-m", "unisono", "run", "--workers", str(workers), "--threads", str(threads)),
            *("--callable", str(function), "--result", str(result), "--outcome", str(outcome), "--run-dir", run_dir),
            *_arguments(options),
        ]
        exit_code, words = _call(command)
        known = json.loads(outcome.read_text()) if outcome.exists() else {}
        if exit_code != 0 or not known.get("ok"):
            raise LaunchError(
                known.get("reason") or words or f"exit code {exit_code}", known.get("traceback", ""), exit_code
            )
        if not result.exists():
            raise LaunchError(f"the run ended before the function had returned: {known['reason']}", "", exit_code)
        value: T = cloudpickle.loads(result.read_bytes())
        return value


def _arguments(options: dict[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(option)
        elif value is not False and value is not None:
            found += [option, str(value)]
    return found


def _call(command: list[str]) -> tuple[int, str]:
    """Run the command and show its output here; it ends when this process does. Returns its exit code and last line."""
    environment = {**os.environ, "UNISONO_PARENT": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
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
