"""Rendezvous: how the tasks of ``srun`` or ``mpiexec`` learn where the head of their run is.

Task 0 has the head, and writes its address and the run's token into a file that the others wait for. The file can be
read by its user only, in a directory that all tasks see. Its name has the identity of the job, so a file that an
earlier job has left (its task 0 was killed) is never taken for that of this one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from unisono.core.errors import UsageError
from unisono.system.lifetime import start_time
from unisono.system.owned import NotOwned, left_parts, read_owned, write_whole

__all__ = ["MeetingPoint", "Rendezvous"]

PREFIX: Final = ".unisono-tasks-"
LOOK_S: Final = 0.05
SAY_S: Final = 10.0
ANSWER_S: Final = 2.0


class MeetingPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says."""

    url: str
    """The head's address."""
    token: str
    """The run's token."""
    host: str
    """Host name of task 0."""
    pid: int
    began: str
    """When task 0 began (`unisono.system.lifetime.start_time`)."""

    def __repr__(self) -> str:
        return f"Meeting({self.url!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("url", self.url)]


class Rendezvous:
    """The file of one job.

    Args:
        directory: one that all tasks of the job see.
        job: identity of the job (`unisono.system.tasks.Task.job`).
    """

    def __init__(self, directory: Path, job: str) -> None:
        self._directory = directory
        self._file = directory / f"{PREFIX}{job}"

    def publish(self, url: str, token: str) -> None:
        """Write the file, and remove those of jobs that are over.

        Raises:
            UsageError: the directory cannot be written to.
        """
        self._tidy()
        pid = os.getpid()
        meeting = MeetingPoint(url=url, token=token, host=os.uname().nodename, pid=pid, began=start_time(pid))
        try:
            write_whole(self._file, msgspec.json.encode(meeting), mode=0o600)
        except OSError as error:
            raise UsageError(
                f"the address of the run cannot be written to {self._directory} for the other tasks: {error.strerror}; "
                "give a directory that all tasks see with --set rendezvous=DIR"
            ) from error

    def wait(self, seconds: float, say: Callable[[str], None]) -> MeetingPoint:
        """Wait for the file; ``say`` receives a sentence now and then.

        Raises:
            UsageError: the file has not come within this time.
        """
        began = said_at = time.monotonic()
        while (meeting := self._read()) is None:
            now = time.monotonic()
            if now - began > seconds:
                raise UsageError(
                    f"task 0 has not written the address of the run to {self._file} within {seconds:.0f} s; look at "
                    "the output of task 0, and give a directory that all tasks see with --set rendezvous=DIR"
                )
            if now - said_at > SAY_S:
                said_at = now
                say(f"waits for task 0 to write the address of the run to {self._file}, {now - began:.0f} s so far")
            time.sleep(LOOK_S)
        return meeting

    def remove(self) -> None:
        """Remove the file, and again those of jobs that are over: one may have been ending when this one began."""
        self._tidy()
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _read(self) -> MeetingPoint | None:
        # A directory of a network file system is looked up anew when it is listed.
        with contextlib.suppress(OSError):
            os.listdir(self._directory)
        return _meeting(self._file)

    def _tidy(self) -> None:
        """Remove the files of jobs whose task 0 has been killed, as far as that is known."""
        with contextlib.suppress(OSError):
            for file in (*self._directory.glob(f"{PREFIX}*"), *left_parts(self._directory, f"{PREFIX}*")):
                if file != self._file and (meeting := _meeting(file)) is not None and _is_over(meeting):
                    file.unlink(missing_ok=True)


def _meeting(file: Path) -> MeetingPoint | None:
    """Return what a file of this user says; in a folder that several users share, others may have made one."""
    with contextlib.suppress(OSError, NotOwned, msgspec.DecodeError):
        return msgspec.json.decode(read_owned(file.parent, file.name, is_folder_shared=True), type=MeetingPoint)
    return None


def _is_over(meeting: MeetingPoint) -> bool:
    """Return whether task 0 is known to have ended."""
    if meeting.host == os.uname().nodename and start_time(meeting.pid) == meeting.began:
        return False
    try:
        where = urlsplit(meeting.url)
        if meeting.host != os.uname().nodename and (where.hostname or "").startswith("127."):
            return False  # it is another machine's loopback interface
        socket.create_connection((where.hostname or "", where.port or 80), ANSWER_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # a network that is away says nothing about the job
        return False
    return False
