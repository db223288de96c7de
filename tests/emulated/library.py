"""A library that connects emulated cards, "emuccl", in the place of NCCL: a process group of Python, over gloo.

As NCCL it connects its members with their first collective, in the thread that asks for it. It says which that was, and
it can fail then or later: see `Failure`.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.emulated.accelerator import NAME

__all__ = ["LIBRARY", "Failure", "failure", "made"]

LIBRARY = "emuccl"


class Failure:
    """What goes wrong in this process: "hang", "raise" or "garbage"; "": nothing does."""

    made = ""
    """While the members are connected."""
    used = ""
    """In all later collectives."""

    @staticmethod
    def hangs() -> None:
        """Is called before the first hang."""


failure = Failure()
made: list[Library] = []


class _Forever:
    """A collective that does not end."""

    def is_completed(self) -> bool:
        return False

    def wait(self, *_: Any) -> bool:
        threading.Event().wait()
        return True


class Library:
    """A group, as `Wire` uses one."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._arguments = (store, rank, size, timeout)
        self._group: Any = None
        self.connected_in = ""
        """Name of the thread."""
        self.is_aborted = False
        made.append(self)

    def _connected(self) -> Any:
        """Return the group; None: the collective hangs."""
        what = failure.made if self._group is None else failure.used
        if what == "hang":
            failure.hangs()
        if what == "raise":
            raise RuntimeError("emuccl: unhandled system error")
        if self._group is None:
            self.connected_in = threading.current_thread().name
            if what == "hang":
                threading.Event().wait()
            self._group = dist.ProcessGroupGloo(*self._arguments)
        return None if what == "hang" else self._group

    def alltoall_base(self, out: Any, data: Any, out_sizes: list[int], in_sizes: list[int], options: Any) -> Any:
        if (group := self._connected()) is None:
            return _Forever()
        return group.alltoall_base(out._inner, data._inner, out_sizes, in_sizes, options)

    def _allgather_base(self, out: Any, data: Any, options: Any) -> Any:
        is_first = self._group is None
        if (group := self._connected()) is None:
            return _Forever()
        if (failure.made if is_first else failure.used) == "garbage":
            data = data + 1
        return group._allgather_base(out._inner, data._inner, options)

    def abort(self) -> None:
        self.is_aborted = True


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Library:
    return Library(store, rank, size, timeout)


dist.Backend.register_backend(LIBRARY, _create, devices=[NAME])
