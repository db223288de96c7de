"""Trial runs: the first steps of a script, under ``unisono run`` and with an inspector that stops it.

`unisono check` and `unisono plan` try scripts in this way: each trial is a run of its own, in a directory of its own,
and ends with the process that has started it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from unisono.record.journal import JOURNAL
from unisono.system.extras import need
from unisono.system.lifetime import started
from unisono.system.process import tell

__all__ = ["Script", "trial_run"]

TELL_EVERY_S: Final = 5.0
"""How often a trial that goes on says how far it is."""
END_S: Final = 20.0
"""Between the request to end and the kill of a trial that takes too long."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script that is tried."""

    command: Sequence[str]
    """``SCRIPT [ARGUMENTS]`` or ``-m MODULE [ARGUMENTS]``."""
    threads: int = 1
    """CPU threads of a worker."""
    directory: Path
    """Trials leave their runs in folders of it."""
    options: Sequence[str] = ()
    """More options of ``unisono run``."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More of its environment."""
    folder: Path | None = None
    """Where it begins; None: where this process is."""
    function: Path | None = None
    """The file with a pickled function that is called instead of a script."""

    def run_command(self) -> list[str]:
        """Return the words after ``unisono run`` that name the script and its arguments."""
        words = ["--threads", str(self.threads), *self.options]
        if self.function is not None:
            result = self.function.with_suffix(".result")
            return [*words, "--set", f"function={self.function}", "--set", f"result={result}"]
        named = 2 if self.command[0] == "-m" else 1
        return [*words, *self.command[:named], "--", *self.command[named:]]


def trial_run(
    script: Script,
    run_dir: Path,
    inspector: tuple[str, str],
    *,
    workers: int = 1,
    hosts: int = 1,
    restarts: int = 0,
    variables: Mapping[str, str] = MappingProxyType({}),
    resume: Path | None = None,
    without: str = "",
    limit_s: float,
    name: str,
    steps: int,
) -> tuple[int, str]:
    """Run a script until its inspector stops it, and tell how far it is. Blocks until the run has ended.

    Args:
        name: of the trial, in words.
        steps: how many it is to compute.
        run_dir: of the run; its folder is there, and gets a file with the output.
        inspector: its name, and its settings (JSON).
        hosts: more than 1: the workers are as if on several machines.
        restarts: of workers that are lost.
        variables: more of its environment, besides those of the script.
        resume: a checkpoint to begin with; None: it begins with step 0.
        without: the file of the samples that it leaves out; "": none.

    Returns:
        The exit code, and the output.

    Raises:
        TimeoutError: it took longer than ``limit_s``.
        UsageError: torch is not installed.
    """
    need("torch", "a worker", "torch")
    command = [
        *(sys.executable, "-u", "-P", "-m", "unisono", "run", "--workers", str(workers)),
        *("--set", f"simulate-hosts={hosts}", "--max-restarts", str(restarts), "--launcher", "local"),
        *(("--resume", str(resume)) if resume is not None else ()),
        *(("--set", f"without={without}") if without else ()),
        *("--run-dir", str(run_dir), "--set", f"inspect={':'.join(inspector)}", *script.run_command()),
    ]
    environment = {**os.environ, **script.variables, **variables}
    output = run_dir.with_name("output")
    with output.open("wb") as told:
        streams = {"stdin": subprocess.DEVNULL, "stdout": told, "stderr": subprocess.STDOUT}
        with started(command, END_S, environment=environment, cwd=script.folder, **streams) as process:
            try:
                code = _wait(process, run_dir, limit_s, name, steps)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"the trial took longer than {limit_s:.0f} s") from None
    return code, output.read_text(errors="replace")


def _wait(process: subprocess.Popen[bytes], run_dir: Path, limit_s: float, name: str, steps: int) -> int:
    """Return the exit code of a trial, and tell meanwhile how many of its steps are done.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``limit_s``.
    """
    began = time.monotonic()
    while True:
        left_s = began + limit_s - time.monotonic()
        try:
            return process.wait(min(TELL_EVERY_S, left_s))
        except subprocess.TimeoutExpired:
            if left_s <= TELL_EVERY_S:
                raise
        tell(f"unisono: {name}: {_num_steps(run_dir)} of {steps} steps after {time.monotonic() - began:.0f} s")


def _num_steps(run_dir: Path) -> int:
    try:
        return (run_dir / JOURNAL).read_bytes().count(b'"kind":"step"')
    except OSError:
        return 0
