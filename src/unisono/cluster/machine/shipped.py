"""Folders that a run sends to this machine (``unisono run --ship``), and what is kept of them here.

A folder is known by the checksum of its files: names, contents, which of them can be executed, where links lead. Each
lies in a private directory below ``~/.cache/unisono/shipped`` (`XDG_CACHE_HOME`), is verified before it is used again,
and is removed when it was not used for `KEEP_DAYS`.

``python -P -m unisono.cluster.machine.shipped CHECKSUM MAX_BYTES`` reads a tar archive from its standard input.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Final

from unisono.core.errors import UsageError
from unisono.core.words import count

__all__ = ["FOLDER", "LOCK", "MARK", "MAX_FILES", "checksum", "find_copy", "is_inside", "main", "receive"]

MARK: Final = "unisono-shipped "
"""Begins the line that says where the folder lies now, or why it was refused (JSON)."""
FOLDER: Final = "folder"
NAMES: Final = "names"
LOCK: Final = "lock"
KEEP_DAYS: Final = 7
MAX_FILES: Final = 20_000
MAX_COPIES: Final = 100
BLOCK_BYTES: Final = 1 << 20


def checksum(folder: str | os.PathLike[str], names: Iterable[str]) -> str:
    """Return the checksum of these files and links of a folder, in any order; "" where one cannot be read."""
    total = hashlib.sha256()
    try:
        for name in sorted(names):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                kind, content = "link", hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
            else:
                with open(path, "rb") as file:
                    kind = "program" if os.fstat(file.fileno()).st_mode & 0o100 else "file"
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(os.fsencode(f"{len(name)} {name} {kind} {content}\n"))
    except OSError:
        return ""
    return total.hexdigest()[:32]


def is_inside(folder: str | os.PathLike[str], link: str | os.PathLike[str]) -> bool:
    """Return whether a symbolic link leads to a place in this folder, whether or not there is something."""
    own = os.path.realpath(folder)
    return not os.path.isabs(os.readlink(link)) and os.path.commonpath([own, os.path.realpath(link)]) == own


def find_copy(digest: str) -> str:
    """Return where this machine has the folder with this checksum, unchanged; "" if it has none."""
    for number in range(MAX_COPIES):
        place = _place(digest, number)
        if not place.exists():
            return ""
        if _is_whole(place, digest):
            return str(place / FOLDER)
    return ""


def receive(stream: IO[bytes], digest: str, max_bytes: int) -> str:
    """Unpack an archive into the directory of its checksum; return where the folder lies.

    Only files, folders, and links that stay in the folder are taken. Nothing is written through a link, since links
    are made last. What cannot be taken, or is not what was announced, leaves nothing.

    Raises:
        UsageError: the archive is refused; says why.
    """
    base = _base()
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if base.stat().st_uid != os.getuid():
            raise UsageError(f"{base} belongs to another user")
        _remove_old(base)
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=base))
    except OSError as error:
        raise UsageError(f"{base} cannot be used: {error.strerror}") from error
    try:
        names = _unpack(stream, fresh / FOLDER, max_bytes)
        found = checksum(fresh / FOLDER, names)
        if found != digest:
            raise UsageError(f"the folder has arrived with the checksum {found}, and {digest} was sent")
        (fresh / NAMES).write_text(json.dumps(names))
        (fresh / LOCK).touch()
        for number in range(MAX_COPIES):
            place = _place(digest, number)
            with contextlib.suppress(OSError):  # it is there already: a copy that a script has changed, or a moment ago
                os.rename(fresh, place)
            if _is_whole(place, digest):
                return str(place / FOLDER)
        raise UsageError(
            f"{base} already holds {count(MAX_COPIES, 'copy')} of the folder, changed by scripts; remove them"
        )
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UsageError(f"the folder cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _base() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "unisono" / "shipped"


def _place(digest: str, number: int) -> Path:
    return _base() / (f"{digest}-{number}" if number else digest)


def _is_whole(place: Path, digest: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return checksum(place / FOLDER, json.loads((place / NAMES).read_text())) == digest
    return False


def _unpack(stream: IO[bytes], folder: Path, max_bytes: int) -> list[str]:
    """Return the names of the files and links."""
    folder.mkdir(mode=0o700)
    names: list[str] = []
    links: list[tuple[Path, str]] = []
    num_bytes = 0
    with tarfile.open(fileobj=stream, mode="r|gz") as archive:
        for member in archive:
            name = member.name
            if name.startswith("/") or not name or ".." in name.split("/") or "\0" in name:
                raise UsageError(f"the archive contains a path outside the folder: {name!r}")
            num_bytes += member.size
            if num_bytes > max_bytes or len(names) >= MAX_FILES:
                raise UsageError(f"the archive has more than {max_bytes} bytes or {MAX_FILES} files")
            path = folder / name
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            names.append(name)
            if member.issym():
                links.append((path, member.linkname))
            elif member.isreg():
                source = archive.extractfile(member)
                assert source is not None
                with open(path, "xb") as target:
                    shutil.copyfileobj(source, target, BLOCK_BYTES)
                path.chmod(0o700 if member.mode & 0o100 else 0o600)
            else:
                raise UsageError(
                    f"the archive contains something that is neither a file nor a folder nor a link: {name!r}"
                )
    for path, target_name in links:
        os.symlink(target_name, path)
    for path, target_name in links:  # when all are there: one may lead over another
        if not is_inside(folder, path):
            raise UsageError(
                f"the archive contains a link that points outside the folder: {path.name!r} -> {target_name!r}"
            )
    return names


def _remove_old(base: Path) -> None:
    """Remove folders that were not used for `KEEP_DAYS`, and are not in use."""
    before = time.time() - KEEP_DAYS * 24 * 3600
    for place in base.iterdir():
        with contextlib.suppress(OSError):
            lock = place / LOCK
            if place.name.startswith(".new-"):  # of a transfer that was killed
                if place.stat().st_mtime < before:
                    shutil.rmtree(place, ignore_errors=True)
            elif lock.stat().st_mtime < before:
                with lock.open("r+") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(place, ignore_errors=True)


def main() -> int:
    """Receive a folder; print where it lies or why it was refused."""
    digest, max_bytes = sys.argv[1], int(sys.argv[2])
    try:
        answer = {"folder": receive(sys.stdin.buffer, digest, max_bytes)}
    except UsageError as error:
        answer = {"error": str(error)}
    print(MARK + json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
