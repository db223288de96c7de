"""A script as ``python script.py`` runs it, in a fork of the tests' own process: nothing is imported again."""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.workers.processes import Seat, Team
from unisono.script import open_runs

__all__ = ["run_script"]


def run_script(script: Path, *arguments: str | os.PathLike[str], imports: Sequence[str] = ()) -> tuple[int, str]:
    """Run a script alone, and wait for its end.

    Args:
        imports: modules that the script needs, to be imported here once for all scripts.

    Returns:
        Its exit code, and what it has printed. Its ``atexit`` functions are not called.
    """
    for module in imports:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="unisono-test-") as folder:
        output = Path(folder, "output")
        with Team(1, _run, script, [os.fspath(each) for each in arguments], output) as team:
            return team.result(0), output.read_text()


def _run(seat: Seat, script: Path, arguments: list[str], output: Path) -> int:
    sys.argv = [os.fspath(script), *arguments]
    sys.path.insert(0, os.fspath(script.parent))
    with output.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code, error = 0, None
        try:
            runpy.run_path(os.fspath(script), run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=file)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as raised:
            traceback.print_exc(file=file)
            code, error = 1, raised
        open_runs.end_all(error)
    return code
