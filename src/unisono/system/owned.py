"""Files that are believed because nobody else can have written them: those of this user; and files that are whole.

A directory of somebody else may hold anything: a link to a file of this user, a pipe that is never written, an address
to which a token would be sent. So what a command sends to others, or executes, is read by `read_owned` only, and what
it only looks at is opened by `open_regular`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Final

from unisono.core.errors import UsageError

__all__ = ["NotOwned", "left_parts", "open_regular", "read_owned", "read_regular", "write_whole"]

MOST_BYTES: Final = 16 << 20
_AT_ONCE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""How a file of others is opened. Without O_NONBLOCK, opening a pipe would wait for its writer."""
ROOT: Final = 0


class NotOwned(UsageError):
    """A file is not that of this user alone; says why."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file that somebody else may have put there: a regular one of its directory itself. Waits for nobody.

    A path that the user has named may be a link: resolve it first.

    Raises:
        FileNotFoundError: there is none. OSError: it is a link, a pipe, a device or a directory, or cannot be read;
            its ``strerror`` says so.
    """
    try:
        descriptor = os.open(path, _AT_ONCE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, and no file of that directory itself", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return what a file like those of `open_regular` holds.

    Raises:
        OSError: as there; or it has more than ``most`` bytes.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return data


def read_owned(folder: Path, name: str, *, is_folder_shared: bool = False) -> bytes:
    """Return what a file holds: a regular file of this user, under no other name, in a directory of this user or root.

    Args:
        is_folder_shared: others may own the directory, as they own ``/tmp``.

    Raises:
        NotOwned: the file is not like this. FileNotFoundError: there is none. OSError: it cannot be read.
    """
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = os.open(name, _AT_ONCE, dir_fd=within)
        owner = os.fstat(within).st_uid
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOwned(f"{folder / name} is a link; it must be a file in that directory itself") from None
        raise
    finally:
        os.close(within)
    try:
        _check(folder, owner, folder / name, os.fstat(descriptor), is_folder_shared)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MOST_BYTES)
    finally:
        os.close(descriptor)


def _check(folder: Path, owner: int, file: Path, found: os.stat_result, is_folder_shared: bool) -> None:
    own = os.geteuid()
    if not is_folder_shared and owner not in (own, ROOT):
        raise NotOwned(f"{folder} belongs to {_user(owner)}, but this command runs as {_user(own)}")
    if found.st_uid != own:
        raise NotOwned(f"{file} belongs to {_user(found.st_uid)}, but this command runs as {_user(own)}")
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size > MOST_BYTES:
        raise NotOwned(
            f"{file} is not a plain file of that directory: it is a pipe, a directory or similar, has a second name "
            f"elsewhere, or has more than {MOST_BYTES >> 20} MiB"
        )


def _user(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:  # the user has no name here, as in some containers
        return f"uid {uid}"


def left_parts(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield what `write_whole` was about to write in processes that were killed, as far as the directory can be read.

    Args:
        pattern: of the names of the files, as for `Path.glob`.
    """
    with contextlib.suppress(OSError):
        yield from list(folder.glob(f".{pattern}.*.part"))


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file at once: whoever reads it finds all of this, or what was there before. Follows no link.

    Args:
        mode: of the file, less what the umask takes away.

    Raises:
        OSError: it cannot be written; what was there before is there still.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)  # of an earlier process with this number, which was killed
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.write(data)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
