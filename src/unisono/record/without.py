"""The file of the samples that a run leaves out: the user's, and ``without.txt`` in the run's directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from unisono.core.cursor import Without
from unisono.core.errors import RunDirectoryError, UsageError
from unisono.core.without import NO_SHARDS, Shards, chosen, ranges_in
from unisono.record.rundir import WITHOUT_FILE
from unisono.system.owned import read_regular, write_whole

__all__ = ["keep", "kept", "read_ranges", "read_without"]

MOST_BYTES: Final = 64 << 20


def read_ranges(path: str, num_samples: int | None = None, shards: Shards = NO_SHARDS) -> list[range]:
    """Return the samples that a file names; see `unisono.core.without.ranges_in`.

    Raises:
        UsageError: it cannot be read, is not a regular file, is too large, or names no samples.
    """
    what = f"the list of samples to leave out, {path},"
    try:
        text = read_regular(Path(path).resolve(), MOST_BYTES).decode()
    except OSError as error:
        raise UsageError(
            f"{what} cannot be read: {error.strerror}; all workers read it at this path (one index "
            "a line, or a range: 100-199)"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{what} is not text: write one index a line") from None
    return ranges_in(text, path, num_samples, shards)


def read_without(path: str, num_samples: int, shards: Shards = NO_SHARDS) -> Without:
    """Return the samples of a data set of ``num_samples``, with these shards, that a file names.

    Raises:
        UsageError: as `read_ranges`; or a sample is not there, or they are all.
    """
    return chosen(read_ranges(path, num_samples, shards), path, num_samples)


def keep(directory: Path, without: Without | None) -> None:
    """Write the samples, if any, into the directory of their run, so that it can be gone on with.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    if without is None:
        return
    try:
        write_whole(directory / WITHOUT_FILE, without.text.encode())
    except OSError as error:
        raise RunDirectoryError(f"the run directory {directory} cannot be written: {error.strerror}") from error


def kept(directory: Path | None, facts: Mapping[str, Any]) -> str:
    """Return the path of the samples that the run in a directory leaves out; "": none.

    Args:
        facts: the run's description.
    """
    match facts.get("recipe"):
        case {"without": _} if directory is not None:
            return str((directory / WITHOUT_FILE).resolve())
    return ""
