"""The run's directory, as the head of one side of the run deals with it.

The head decides by what it has seen of the directory last. It looks there, and writes there, in a thread (`Disk`): a
disk that stands still holds up no decision.

Of two sides that a cut network has made, one may write there (`Pen`). The head of a side holds that right for its
workers, as a lock on a file in the directory, which the kernel frees when the head ends. So where both sides see the
same directory, no file is written by two.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, cast

import msgspec

from unisono.core.errors import RunDirectoryError
from unisono.record.rundir import (
    ADDRESS_FILE,
    RUN_FILE,
    TOKEN_FILE,
    describe,
    holder,
    is_taken,
    make,
    read_facts,
)
from unisono.system.owned import write_whole

__all__ = ["AddressFiles", "Directory", "go_on_in", "in_thread", "leave"]

T = TypeVar("T")

LOOK_S: Final = 0.2
FIRST_LOOK_S: Final = 1.0
"""For so long a head waits at its start for what it finds in the directory, and goes on if the disk stands still."""
LAST_WORK_S: Final = 1.0
PEN_FILE: Final = ".head"
LEFT_FILE: Final = "run.left.json"


class AddressFiles:
    """The two files that a head writes into a run directory.

    Args:
        made: the directory that was made for an earlier head; if it is gone, it is not made again.
    """

    def __init__(self, run_id: str, url: str, token: str, made: str) -> None:
        self._run_id = run_id
        self._url = url
        self._token = token
        self._made = made
        self._written: dict[Path, str] = {}

    def write(self, run_dir: str) -> bool:
        """Write the head's address and token into the run directory; `remove` removes both.

        Called before the directory is claimed, so that machines can join, and again after the claim, because another
        run may have written its own address meanwhile. A directory that another run holds is left alone.

        Returns:
            Whether the files were written now.

        Raises:
            OSError: the directory cannot be written to.
        """
        folder = Path(run_dir)
        is_there = self._written and all(_holds(path, text) for path, text in self._written.items())
        if is_there or is_taken(folder, self._run_id):
            return False
        if run_dir != self._made:
            folder.mkdir(parents=True, exist_ok=True)
            self._made = run_dir
        known = {"url": self._url, "pid": os.getpid(), "run_id": self._run_id}
        for name, text, mode in (
            (TOKEN_FILE, self._token, 0o600),
            (ADDRESS_FILE, json.dumps(known) + "\n", 0o666),
        ):
            write_whole(folder / name, text.encode(), mode=mode)
            self._written[folder / name] = text
        return True

    def remove(self) -> None:
        """Remove the files, unless another head has written its own."""
        for path, text in self._written.items():
            if _holds(path, text):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        self._written.clear()


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


class Pen:
    """This head's part of the lock."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._descriptor: int | None = None

    def take(self, run_dir: str) -> bool:
        """Take the lock; return whether this side may write.

        It may where this machine does not see the directory, or the file system has no locks: then there is no way to
        tell.
        """
        if self._descriptor is not None or not run_dir:
            return True
        folder = Path(run_dir)
        try:
            if holder(folder) != self._run_id:
                return True
            descriptor = os.open(folder / PEN_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        self._descriptor = descriptor
        return True

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def release(self) -> None:
        """Let the other side write."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class _Found(msgspec.Struct, frozen=True):
    """What this head has found and done in the directory."""

    may_write: bool
    has_written: bool = False
    """It has written its address there now."""
    error: str = ""
    """Why it could not."""


class Directory:
    """Where the run writes, whether this side of the run may, and who sees that directory.

    Args:
        path: "": the script has not chosen it yet.
        facts: the run's description, as JSON.
        seers: the agents on whose machines a worker has seen the directory.
        address: the head's own files there.
        told: is called with a sentence for the user.
        changed: is called when the right to write has come or gone, before others hear of it.
        chosen: is called when `path` is another one.
    """

    def __init__(
        self,
        run_id: str,
        path: str,
        facts: str,
        seers: Iterable[str],
        address: AddressFiles,
        *,
        told: Callable[[str], None],
        changed: Callable[[], None],
        chosen: Callable[[], None],
    ) -> None:
        self.path = path
        self.facts = facts
        self.seers = dict.fromkeys(seers)
        self.may_write = not path  # else not before this head has looked there
        self._run_id = run_id
        self._address = address
        self._told = told
        self._changed = changed
        self._chosen = chosen
        self._disk = Disk()
        self._pen = Pen(run_id)
        self._waits_for_other = False
        self._has_left = False

    @property
    def is_held(self) -> bool:
        """This head has locked the directory for its side."""
        return self._pen.is_held

    async def open(self, *, has_moved: bool, said: Callable[[str], None], others: Iterable[str] = ()) -> None:
        """Go on with the directory: say there where this head is, if this side may write there.

        Args:
            has_moved: the head before was on another machine; this one may see another run's directory at that path.
            said: is called with a sentence if the directory is made on this machine, because the lost machine alone
                has seen it.
            others: the agents of other machines.
        """
        if not self.path:
            return
        if has_moved and self.facts and not self.seers.keys() & set(others):
            self._disk.do("go on", partial(go_on_in, self.path, self._run_id, self.facts), partial(_go_on, said))
        self.enter(self.path, is_foreign=has_moved)
        await self._disk.idle(FIRST_LOOK_S)

    async def look(self) -> None:
        """While another side of the run writes into the directory, look whether it still does."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.may_write:
                self.enter(self.path)

    def enter(self, path: str, *, is_foreign: bool = False) -> None:
        """Have this side write into the directory, and say there where this head is.

        Does nothing while another side writes there, or if this one has given way.

        Args:
            is_foreign: what this machine sees at that path may be the directory of another run, which is left alone.
        """
        if not self._has_left:
            name = f"enter {path} {is_foreign}"
            self._disk.do(name, partial(self._enter, path, is_foreign), partial(self._entered, path))

    def _enter(self, path: str, is_foreign: bool) -> _Found:
        if self._has_left or not self._pen.take(path):
            return _Found(may_write=False)
        try:
            if is_foreign and holder(Path(path)) != self._run_id:
                return _Found(may_write=True)
            return _Found(may_write=True, has_written=self._address.write(path))
        except OSError as error:
            return _Found(may_write=True, error=f"cannot write the head's address to {path}: {error}")

    def _entered(self, path: str, found: _Found) -> None:
        if self._has_left:
            return
        if found.may_write != self.may_write:
            self.may_write = found.may_write
            self._changed()
        if self._waits_for_other == found.may_write:
            self._waits_for_other = not found.may_write
            if found.may_write:
                self._told(f"this side of the run now writes into {path}")
            else:
                self._told(f"another side of the run writes into {path}: this one holds back its output")
        if found.error:
            self._told(found.error)
        if found.has_written and path != self.path:
            self.path = path
            self._chosen()

    def put_down_pen(self) -> None:
        """Write nothing more, because this side gives way: workers must not write when the other side does."""
        self._has_left = True
        self.may_write = False
        self._changed()

    def leave_to_other(self, *, they_write: bool) -> None:
        """Have no worker write here any more, if the other side, which goes on, writes into another directory.

        Args:
            they_write: the other side has locked a directory. So has this one: so these are two.
        """
        if they_write and self.is_held:
            self._disk.do("leave", partial(leave, self.path, self._run_id), _print)

    async def close(self, *, forgets_address: bool) -> None:
        """Let another head write."""
        if forgets_address:
            self.forget_address()
        self._disk.do("release", self._pen.release, lambda _: None)
        await self._disk.close(LAST_WORK_S)

    def forget_address(self) -> None:
        """Remove what says where this head is."""
        self._disk.do("forget", self._address.remove, lambda _: None)


def _go_on(said: Callable[[str], None], sentence: str) -> None:
    _print(sentence)
    if sentence:
        said(sentence)


def _print(sentence: str) -> None:
    if sentence:
        print(f"unisono: {sentence}", file=sys.stderr, flush=True)


def go_on_in(run_dir: str, run_id: str, facts: str) -> str:
    """Make the run's directory on this machine, for the workers here to go on in; returns a sentence for the user.

    Does nothing, and returns "", if this machine sees the run's directory.

    Args:
        facts: the run's description, as JSON.
    """
    folder = Path(run_dir)
    try:
        if come_back(folder, run_id):
            return (
                f"the run left {folder} of this machine and has come back: journal and checkpoints continue in {folder}"
            )
        found = holder(folder)
        if found == run_id:
            return ""
        if found is not None:
            return (
                f"no remaining machine sees the run's directory, and {folder} here holds a different run ({found}): "
                "the run continues without journal and checkpoints"
            )
        make(folder)
        describe(folder, {**json.loads(facts), "run_id": run_id})
    except (OSError, ValueError, RunDirectoryError) as error:
        return (
            f"no remaining machine sees the run's directory, and {folder} cannot be created here ({error}): the run "
            "continues without journal and checkpoints"
        )
    return (
        f"no remaining machine sees the run's directory: journal and checkpoints continue in {folder} of this machine. "
        "Journal lines that no machine here has are missing"
    )


def leave(run_dir: str, run_id: str) -> str:
    """Have no worker write into a directory any more, because the run goes on in another one; returns a sentence about
    that. What was written stays.
    """
    folder = Path(run_dir)
    try:
        if holder(folder) != run_id:
            return ""
        (folder / RUN_FILE).replace(folder / LEFT_FILE)
    except OSError as error:
        return f"{folder / RUN_FILE} cannot be renamed: {error}"
    return (
        f"the run continues in the directory of the side that is further ahead. {folder} of this machine keeps what "
        f"was written so far ({RUN_FILE} is named {LEFT_FILE})"
    )


def come_back(folder: Path, run_id: str) -> bool:
    """Let workers write into a directory again that this run has left (`leave`); return whether it had.

    Raises:
        OSError: the description cannot be renamed.
    """
    if (folder / RUN_FILE).exists() or read_facts(folder, LEFT_FILE).get("run_id") != run_id:
        return False
    (folder / LEFT_FILE).replace(folder / RUN_FILE)
    return True


async def in_thread(work: Callable[[], T]) -> T:
    """Do this in a thread that this process does not wait for at its end: the disk may stand still."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("T", result))

    def run() -> None:
        result: T | None = None
        failed: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, result, failed)

    threading.Thread(target=run, name="unisono-disk", daemon=True).start()
    return await done


class Disk:
    """Does one thing after another on a disk. The event loop orders it, and gets the result in a callback."""

    def __init__(self) -> None:
        self._orders: dict[str, Callable[[], Awaitable[None]]] = {}
        self._task: asyncio.Task[None] | None = None

    def do(self, name: str, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do ``work`` in a thread after all that was ordered before, and give its result to ``then``.

        Args:
            name: while an order of this name waits for its turn, another one is not added.
        """

        async def order() -> None:
            then(await in_thread(work))

        self._orders.setdefault(name, order)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def idle(self, limit_s: float) -> None:
        """Wait until everything that was ordered is done, for a limited time."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=limit_s)

    async def close(self, limit_s: float) -> None:
        """Give up what is not done in this time."""
        await self.idle(limit_s)
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        while self._orders:
            order = self._orders.pop(next(iter(self._orders)))
            try:
                await order()
            except Exception:  # a bug of this library: what was ordered after this is done all the same
                traceback.print_exc()
