"""`launch` in a notebook: one line of progress that changes in its place, and errors that show the line of the cell."""

from __future__ import annotations

import importlib
import linecache
import re
import sys
from typing import Any, Final

__all__ = ["CellOutput", "cell_output", "with_cell_lines"]

_FRAME: Final = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


def cell_output() -> CellOutput | None:
    """Return the output of the cell that is executed; None where this process is no kernel of a notebook."""
    shell = _shell()
    return CellOutput() if getattr(shell, "kernel", None) is not None else None


class CellOutput:
    """Shows lines below a cell. A line about the steps of a run takes the place of the one before it."""

    def __init__(self) -> None:
        self._progress: Any = None

    def show(self, line: str) -> None:
        """Show a line, with its end."""
        from unisono.views.watch.terminal.base import is_progress

        if not is_progress(line):
            print(line, end="", flush=True)
            return
        shown = {"text/plain": line.rstrip("\n")}
        if self._progress is None:
            display = importlib.import_module("IPython.display").display  # it is there, and no dependency
            self._progress = display(shown, raw=True, display_id=True)
        else:
            self._progress.update(shown, raw=True)


def with_cell_lines(traceback: str) -> str:
    """Return a worker's traceback with the lines of the cells that it names: a worker has only their numbers.

    Args:
        traceback: as Python prints it.
    """
    found: list[str] = []
    lines = traceback.splitlines()
    for line, following in zip(lines, [*lines, ""][1:], strict=True):
        frame = _FRAME.match(line)
        if frame is None or following.startswith("    "):
            found.append(line)
            continue
        name = _cell_name(frame["file"])
        found.append(line.replace(f'File "{frame["file"]}"', name, 1) if name else line)
        if source := linecache.getline(frame["file"], int(frame["line"])).strip():
            found.append(f"    {source}")
    return "\n".join(found)


def _cell_name(file: str) -> str:
    """Return what IPython calls a cell, "Cell In[3]", by the file's name in its code; "" for anything else."""
    name_of = getattr(getattr(_shell(), "compile", None), "format_code_name", None)
    named = name_of(file) if name_of is not None else None
    return " ".join(named) if named else ""


def _shell() -> Any:
    """Return IPython's shell; None where this process has none."""
    found = sys.modules.get("IPython")
    return found.get_ipython() if found is not None else None
