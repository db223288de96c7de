"""Shipping: pack the folder of a run, for machines that do not have it."""

from __future__ import annotations

import functools
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from unisono.cluster.machine.shipped import MAX_FILES, checksum, is_inside
from unisono.core.errors import UsageError
from unisono.record.journal import JOURNAL
from unisono.record.rundir import RUN_FILE
from unisono.system.lifetime import run_bound

__all__ = ["MEGABYTE", "ShippedFiles", "inspect", "pack"]

MEGABYTE: Final = 1_000_000
NEVER: Final = frozenset({".git", ".hg", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"})
LARGEST: Final = 5
GIT_S: Final = 60.0


@dataclass(frozen=True)
class ShippedFiles:
    """The files of a folder that are sent."""

    folder: str
    names: tuple[str, ...]
    num_bytes: int
    checksum: str


def inspect(folder: str, *, without: str, max_bytes: int) -> ShippedFiles:
    """Return which files of a folder are sent. Reads all of them once, for the checksum.

    What ``.gitignore`` names is left out, also where the folder is no checkout of git; and so are caches of Python and
    its tools, virtual environments, directories of runs, and what is neither a file nor a link.

    Args:
        without: a folder that is left out as well: that of the run that begins; "" for none.

    Raises:
        UsageError: the folder is too large, has a link that leaves it, or a file that cannot be read.
    """
    sizes: dict[str, int] = {}
    total = 0
    for name in _names(folder, without):
        path = os.path.join(folder, name)
        if os.path.islink(path):
            if not is_inside(folder, path):
                raise UsageError(
                    f"--ship cannot send the link {name} -> {os.readlink(path)}: it points outside the folder "
                    f"{folder}; name the link in .gitignore, or put a file in its place"
                )
            sizes[name] = 0
        elif os.path.isfile(path):
            sizes[name] = os.path.getsize(path)
            total += sizes[name]
    if total > max_bytes or len(sizes) > MAX_FILES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:LARGEST]
        shown = ", ".join(f"{name} ({sizes[name] / MEGABYTE:.1f} MB)" for name in largest)
        raise UsageError(
            f"--ship would send {total / MEGABYTE:.1f} MB in {len(sizes)} files from {folder}; the limits are "
            f"{max_bytes / MEGABYTE:g} MB and {MAX_FILES} files. The largest are {shown}. Name what the script does "
            "not need in .gitignore (data belongs at the same path on all machines), or raise --set ship-limit=MB"
        )
    digest = checksum(folder, sizes)
    if not digest:
        unreadable = next((name for name in sizes if not checksum(folder, [name])), "")
        raise UsageError(f"--ship cannot read {os.path.join(folder, unreadable)}")
    return ShippedFiles(folder, tuple(sizes), total, digest)


def pack(parcel: ShippedFiles, target: IO[bytes]) -> None:
    """Write the archive of a parcel.

    Raises:
        UsageError: a file has gone meanwhile, or cannot be read.
    """
    try:
        with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as archive:
            for name in parcel.names:
                path = os.path.join(parcel.folder, name)
                member = tarfile.TarInfo(name)  # without the names of users and groups
                if os.path.islink(path):
                    member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
                    archive.addfile(member)
                    continue
                with open(path, "rb") as file:
                    status = os.fstat(file.fileno())
                    member.size, member.mode = status.st_size, status.st_mode & 0o777
                    archive.addfile(member, file)
    except OSError as error:
        raise UsageError(f"--ship cannot pack {parcel.folder}: {error}") from error
    target.flush()


def _names(folder: str, without: str) -> Iterator[str]:
    """Yield the files and links that are not ignored, relative to the folder."""
    apart = os.path.relpath(without, folder) if without else ".."
    for name in _listed(folder):
        parts = name.split("/")
        if NEVER & set(parts) or name == apart or name.startswith(f"{apart}/"):
            continue
        parents = ["/".join(parts[:number]) for number in range(1, len(parts))]
        if not any(_is_apart(f"{folder}/{parent}") for parent in parents):
            yield name


@functools.cache
def _is_apart(folder: str) -> bool:
    """Return whether this is a virtual environment, or the directory of a run."""
    return os.path.isfile(f"{folder}/pyvenv.cfg") or all(
        os.path.isfile(f"{folder}/{name}") for name in (RUN_FILE, JOURNAL)
    )


def _listed(folder: str) -> list[str]:
    if shutil.which("git") is None:
        return list(_all_files(folder))
    ask = ["ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = run_bound(["git", "-C", folder, *ask], GIT_S)
    if found.code != 0:  # no checkout: as if it were a new one
        with tempfile.TemporaryDirectory(prefix="unisono-ship-") as empty:
            run_bound(["git", "init", "-q", "--bare", empty], GIT_S)
            there = ["git", "-C", folder, f"--git-dir={empty}", f"--work-tree={folder}", "-c", "core.bare=false"]
            found = run_bound([*there, *ask], GIT_S)
    if found.code != 0:
        words = found.errors.strip() if found.code else f"it has not ended within {GIT_S:.0f} s"
        raise UsageError(f"--ship: git cannot list the files of {folder}: {words}")
    names = []
    for name in dict.fromkeys(map(os.fsdecode, filter(None, found.data.split(b"\0")))):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):  # a checkout of its own
            names += [f"{name.rstrip('/')}/{inner}" for inner in _listed(path)]
        elif os.path.lexists(path):  # else it was removed since git has heard of it
            names.append(name)
    return names


def _all_files(folder: str) -> Iterator[str]:
    """Yield all files, where there is no git."""
    for here, folders, files in os.walk(folder):
        if ".gitignore" in files:
            raise UsageError(
                f"--ship needs git to read {os.path.join(here, '.gitignore')}; install git, or remove the file"
            )
        folders[:] = [name for name in folders if name not in NEVER]
        for name in [*files, *(name for name in folders if Path(here, name).is_symlink())]:
            yield os.path.relpath(os.path.join(here, name), folder)
