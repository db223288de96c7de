"""The group of ``torch.distributed`` that a script gets: it can be taken back, whatever the script holds of it.

When a member is lost, a collective of gloo ends on the members that are connected to it, and on the others when those
close their connections. These stay open as long as anything holds the group: the script, one of its collectives, or an
exception that one of them has raised. So a script gets a group that passes calls on to another one, which only its
maker holds, and no thread of the script waits in torch: each member calls `ScriptGroup.end` when it learns that its
generation is over, in another thread, and that ends the wait.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

__all__ = ["ScriptGroup"]

CALLS: Final = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    *("send", "recv", "recv_anysource", "_get_backend", "_start_coalescing", "_end_coalescing"),
    *("all_gather_single", "all_to_all_single", "reduce_scatter_single"),
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
)
"""The methods that are passed on, as far as this version of torch has them."""
ANSWERS: Final = (
    *("get_future", "result", "exception", "is_success", "synchronize", "source_rank", "_source_rank"),
    "block_current_stream",
)
"""What a collective is asked for besides."""


class ScriptGroup(dist.ProcessGroup):
    """A group of ``torch.distributed``, until `end`.

    Args:
        inner: does the work; None: this group is over from the start.
        wakes: `end` ends the waits for collectives. Not with a library of accelerators, where the stream waits, and no
            thread.
    """

    def __init__(self, rank: int, size: int, inner: Any = None, *, wakes: bool = True) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._inner = inner
        self._wakes = wakes
        self._changed = threading.Condition()
        self._pending: list[_Collective] = []

    @classmethod
    def backed_by(
        cls, backend: Any, store: dist.Store, rank: int, size: int, device: torch.device, kind: str
    ) -> ScriptGroup:
        """Return a group whose work is done by a backend of this kind, e.g. "nccl"; "": by gloo."""
        types = dist.ProcessGroup.BackendType
        chosen = getattr(types, (kind or "gloo").upper(), types.CUSTOM)
        inner: Any = dist.ProcessGroup(store, rank, size)
        inner._set_default_backend(chosen)
        inner._register_backend(device, chosen, backend)
        return cls(rank, size, inner, wakes=not kind)

    def end(self) -> None:
        """Raise RuntimeError in all waits and all later calls. In any thread; does not block."""
        with self._changed:
            self._inner = None
            self._changed.notify_all()

    def pending(self) -> list[Any]:
        """Return the collectives that have not ended: to delete the backend before would block."""
        with self._changed:
            self._pending = [work for work in self._pending if work.holds_backend()]
            return list(self._pending)

    def _pass_on(self, name: str, *arguments: Any, **options: Any) -> Any:
        inner = self.check()
        found = getattr(inner, name)(*arguments, **options)
        if not (self._wakes and isinstance(found, dist.Work)):
            return found
        work = _Collective(self, found)
        self.pending()  # forgets those that have ended
        with self._changed:
            self._pending.append(work)
        return work

    def check(self) -> Any:
        """Return what does the work. Raises RuntimeError: this group is over."""
        inner = self._inner
        if inner is None:
            raise _over()
        return inner

    def wait_for(self, work: _Collective, timeout: timedelta) -> None:
        """Wait until a collective has ended.

        Raises:
            RuntimeError: this group has ended before, or it took too long.
        """
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: self._inner is None or work.is_completed(), timeout.total_seconds() or None
            )
            if work.is_completed():
                return
        raise _over() if in_time else RuntimeError(f"Timed out after {timeout.total_seconds():g} s")

    def notify(self, _: object = None) -> None:
        """Look again whether a collective has ended, in `wait_for`."""
        with self._changed:
            self._changed.notify_all()


class _Collective(dist.Work):
    """A collective of a script that does not wait longer for it than its group lives."""

    def __init__(self, group: ScriptGroup, work: Any) -> None:
        super().__init__()
        self._group = group
        self._work = work
        self._waiter: Future[bool] | None = None
        try:
            self._future = work.get_future()
        except RuntimeError:  # a message, or a collective that is made of messages: can be waited for in a thread only
            self._future = None

    def is_completed(self) -> bool:
        if self._future is not None:
            return bool(self._future.done())
        return self._waiter is not None and self._waiter.done()

    def holds_backend(self) -> bool:
        """Return whether a thread of torch, or one that waits in torch, still uses the backend."""
        return not self.is_completed() and (self._future is not None or self._waiter is not None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._future is not None:
            if not self._future.done():
                self._future.then(self._group.notify)
                self._group.wait_for(self, timeout)
            self._group.pending()  # forgets this one, and with it its tensors
            return bool(self._work.wait())  # at once: raises what has gone wrong
        if self._waiter is None:
            self._group.check()
            self._waiter = Future()
            threading.Thread(
                target=self._wait_in_torch, args=(self._waiter, timeout), name="unisono-message", daemon=True
            ).start()
        self._group.wait_for(self, timeout)
        self._group.pending()
        return self._waiter.result()

    def _wait_in_torch(self, waiter: Future[bool], timeout: timedelta) -> None:
        try:
            waiter.set_result(self._work.wait(timeout))  # not twice: it would wait for another message
        except Exception as error:
            waiter.set_exception(error)
        self._group.notify()


def _over() -> RuntimeError:
    return RuntimeError("this group is over, because the run's members have changed; call run.process_group() again")


def _passed_on(name: str) -> Any:
    def call(self: ScriptGroup, *arguments: Any, **options: Any) -> Any:
        return self._pass_on(name, *arguments, **options)

    call.__name__ = name
    return call


def _asked(name: str) -> Any:
    def ask(self: _Collective, *arguments: Any, **options: Any) -> Any:
        return getattr(self._work, name)(*arguments, **options)

    ask.__name__ = name
    return ask


for _name in CALLS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ScriptGroup, _name, _passed_on(_name))
for _name in ANSWERS:
    setattr(_Collective, _name, _asked(_name))
