"""Trial runs: the first steps of a script, under ``unisono run`` and with an inspector that stops it.

`unisono check` and `unisono plan` try scripts in this way: each trial is a run of its own, in a directory of its own,
and ends with the process that has started it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from unisono.lifetime import PARENT

__all__ = ["Script", "trial_run"]

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

    def run_command(self) -> list[str]:
        """Return the words after ``unisono run`` that name the script and its arguments."""
        named = 2 if self.command[0] == "-m" else 1
        return ["--threads", str(self.threads), *self.command[:named], "--", *self.command[named:]]


def trial_run(
    script: Script,
    run_dir: Path,
    inspector: tuple[str, str],
    *,
    workers: int = 1,
    hosts: int = 1,
    restarts: int = 0,
    variables: Mapping[str, str] = MappingProxyType({}),
    limit_s: float,
) -> tuple[int, str]:
    """Run a script until its inspector stops it. Blocks until the run has ended.

    Args:
        run_dir: of the run; its folder is there, and gets a file with the output.
        inspector: its name, and its settings (JSON).
        hosts: more than 1: the workers are as if on several machines.
        restarts: of workers that are lost.
        variables: more of its environment.

    Returns:
        The exit code, and the output.

    Raises:
        TimeoutError: it took longer than ``limit_s``.
    """
    command = [
        *(sys.executable, "-u", "-P", "-m", "unisono", "run", "--workers", str(workers)),
        *("--simulate-hosts", str(hosts), "--max-restarts", str(restarts), "--launcher", "local"),
        *("--run-dir", str(run_dir), "--inspect", *inspector, *script.run_command()),
    ]
    environment = {**os.environ, PARENT: str(os.getpid()), **variables}
    output = run_dir.with_name("output")
    with (
        output.open("wb") as told,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=told, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the trial took longer than {limit_s:.0f} s") from None
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                process.kill()
    return code, output.read_text(errors="replace")
