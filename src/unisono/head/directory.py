"""The run's directory, as the head of one side of the run deals with it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from unisono.head.address import AddressFiles
from unisono.head.copying import go_on_in
from unisono.head.pen import Pen, leave
from unisono.rundir import holder

__all__ = ["Directory"]

PEN_S: Final = 0.2


class Directory:
    """Where the run writes, whether this side of the run may, and who sees that directory.

    Args:
        path: "": the script has not chosen it yet.
        facts: the run's description, as JSON.
        seers: the agents on whose machines a worker has seen the directory.
        address: the head's own files there.
        told: is called with a sentence for the user.
        changed: is called when the right to write has come or gone, before others hear of it.
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
    ) -> None:
        self.path = path
        self.facts = facts
        self.seers = dict.fromkeys(seers)
        self.may_write = True
        self._run_id = run_id
        self._address = address
        self._told = told
        self._changed = changed
        self._pen = Pen(run_id)
        self._has_left = False

    @property
    def is_held(self) -> bool:
        """This head has locked the directory for its side."""
        return self._pen.is_held

    def open(self, *, has_moved: bool) -> None:
        """Say there where this head is.

        Args:
            has_moved: the head before was on another machine; this one may see another run's directory at that path.
        """
        if self.path and (not has_moved or holder(Path(self.path)) == self._run_id):
            self.write_address(self.path)

    async def look(self) -> None:
        """While another side of the run writes into the directory, look whether it still does."""
        while True:
            await asyncio.sleep(PEN_S)
            if not self.may_write:
                self.take_pen()

    def take_pen(self) -> None:
        """Have this side write into the directory, unless another side does, or this one has given way."""
        if self._has_left:
            return
        before, self.may_write = self.may_write, self._pen.take(self.path)
        if self.may_write == before:
            return
        self._changed()
        if self.may_write:
            self.write_address(self.path)
            text = f"this side of the run writes into {self.path} now"
        else:
            text = f"another side of the run writes into {self.path}: this one keeps what it has to write"
        self._told(text)

    def go_on_here(self, others: Iterable[str]) -> str:
        """Make the directory on this machine, if the lost machine alone has seen it; returns a sentence about that.

        Args:
            others: the agents of other machines.
        """
        if not self.path or not self.facts or self.seers.keys() & set(others):
            return ""
        if said := go_on_in(self.path, self._run_id, self.facts):
            print(f"unisono: {said}", file=sys.stderr, flush=True)
            self.take_pen()
        return said

    def write_address(self, path: str) -> None:
        """Say there where this head is, if this side may write."""
        if not self.may_write:
            return
        try:
            if self._address.write(path):
                self.path = path
        except OSError as error:
            self._told(f"cannot write the head's address to {path}: {error}")

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
        if they_write and self.is_held and (said := leave(self.path, self._run_id)):
            print(f"unisono: {said}", file=sys.stderr, flush=True)

    def close(self, *, forgets_address: bool) -> None:
        """Let another head write."""
        self._pen.release()
        if forgets_address:
            self.forget_address()

    def forget_address(self) -> None:
        """Remove what says where this head is."""
        self._address.remove()
