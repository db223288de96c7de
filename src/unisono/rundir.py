"""The directory of a run, and who may use it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from unisono.errors import RunDirectoryError
from unisono.journal import JOURNAL

__all__ = ["RUN_FILE", "claim", "describe"]

RUN_FILE = "run.json"
_OURS = (RUN_FILE, JOURNAL, "checkpoints")


def claim(directory: Path, run_id: str, *, overwrite: bool) -> None:
    """Make ``directory`` the one of run ``run_id``; nothing happens if it is already.

    Args:
        overwrite: remove what another run has left there (this library's files only).

    Raises:
        RunDirectoryError: it holds another run, or it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"the run directory {directory} cannot be made: {error.strerror}") from error
    other = holder(directory)
    if other == run_id:
        return
    if other is not None:
        if not overwrite:
            raise RunDirectoryError(
                f"{directory} holds another run ({other}); choose another directory, or pass overwrite=True "
                "(--overwrite on the command line) to replace it"
            )
        for name in _OURS:
            path = directory / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    describe(directory, {"run_id": run_id})


def holder(directory: Path) -> str | None:
    """The id of the run that a directory holds; None if it holds none."""
    file = directory / RUN_FILE
    if not file.exists():
        return "unknown, only a journal is left" if (directory / JOURNAL).exists() else None
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["run_id"])
    except (ValueError, KeyError, TypeError):
        return f"unreadable {RUN_FILE}"


def describe(directory: Path, facts: dict[str, Any]) -> None:
    """Write ``facts`` (run id, recipe, fingerprint) as the run's description, all at once."""
    file = directory / RUN_FILE
    temporary = file.with_name(f".{RUN_FILE}.new")
    try:
        temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise RunDirectoryError(f"the run directory {directory} cannot be written: {error.strerror}") from error
