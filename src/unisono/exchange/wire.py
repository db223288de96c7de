"""One ``torch.distributed`` process group, and waits that end.

The group is built directly (never the global default group), so that a generation can make its own. A blocked
collective cannot be woken: neither ``abort()`` nor ``shutdown()`` does it, and deleting a group with a pending
operation blocks. So nobody waits *in* torch: the operation's future and `interrupt` set the same event, and an
abandoned group is kept, not deleted, until the process ends.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions

from unisono.errors import DeadlineExceeded, PeerLost

__all__ = ["Wire"]

SLICE_S = 0.5
_abandoned: list[Any] = []


class Wire:
    """Collectives over tensors of bytes between ``size`` members.

    Args:
        store: where the members find each other; one prefix for one group.
        device: of the tensors that will be sent.
        backend: "gloo" or "nccl".
        address: the address that gloo listens on.
        timeout_s: how long any one wait may take.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        device: torch.device,
        backend: str,
        address: str,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.waiting_s = 0.0
        self._timeout_s = timeout_s
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._pending = 0
        limit = timedelta(seconds=timeout_s)
        self._group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        elif backend == "gloo":
            gloo = dist.ProcessGroupGloo._Options()
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            gloo._timeout = limit
            self._group = dist.ProcessGroupGloo(store, rank, size, gloo)
        else:
            raise ValueError(f"the backend of an exchange is 'gloo' or 'nccl', got {backend!r}")

    def all_to_all(self, out: Tensor, out_sizes: list[int], data: Tensor, in_sizes: list[int]) -> Work:
        """Send ``in_sizes[j]`` elements of ``data`` to member j; ``out`` receives ``out_sizes[j]`` from it."""
        return self._start(self._group.alltoall_base(out, data, out_sizes, in_sizes, AllToAllOptions()), out, data)

    def all_gather(self, out: Tensor, data: Tensor) -> Work:
        """``out`` receives everyone's ``data``, by rank; equal sizes."""
        return self._start(self._group._allgather_base(out, data, AllgatherOptions()), out, data)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Everyone's ``data``, by rank. Blocks."""
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        self.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=self.device)).wait()
        lengths = [int(size) for size in sizes.tolist()]
        longest = max(max(lengths), 1)
        own = torch.zeros(longest, dtype=torch.uint8)
        if data:
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        letters = torch.empty(self.size * longest, dtype=torch.uint8, device=self.device)
        self.all_gather(letters, own.to(self.device)).wait()
        rows = letters.cpu().view(self.size, longest)
        return [bytes(rows[rank, :length].tolist()) for rank, length in enumerate(lengths)]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite ``tensor`` (contiguous, on the wire's device) with that of rank ``source``. Blocks."""
        options = BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        self._start(self._group.broadcast([tensor], options), tensor, tensor).wait()

    def interrupt(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        if self._pending:
            _abandoned.append(self._group)
        self._group = None

    def _start(self, work: Any, out: Tensor, data: Tensor) -> Work:
        self._pending += 1
        return Work(self, work, (out, data))

    def _finish(self, work: Any) -> None:
        started = time.perf_counter()
        deadline = started + self._timeout_s + SLICE_S
        if self.device.type == "cpu":
            work.get_future().then(self._notify)
            with self._changed:
                while not work.is_completed():
                    if self._error is not None:
                        raise self._error
                    if time.perf_counter() > deadline:
                        raise DeadlineExceeded(f"a collective of {self.size} members took longer than {self._timeout_s:.0f} s")
                    self._changed.wait(SLICE_S)
        try:
            work.wait()
        except RuntimeError as failure:
            if self._error is not None:
                raise self._error from failure
            if "Timed out" in str(failure):
                raise DeadlineExceeded(f"a collective took longer than {self._timeout_s:.0f} s: {failure}") from failure
            raise PeerLost(f"a member left in the middle of a collective: {failure}") from failure
        self._pending -= 1
        self.waiting_s += time.perf_counter() - started

    def _notify(self, _: Any) -> None:
        with self._changed:
            self._changed.notify_all()


class Work:
    """A collective that was started. Keeps its tensors alive."""

    def __init__(self, wire: Wire, work: Any, tensors: tuple[Tensor, ...]) -> None:
        self._wire = wire
        self._work = work
        self._tensors = tensors

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            PeerLost: a member is gone. DeadlineExceeded: it took too long.
        """
        self._wire._finish(self._work)
        self._tensors = ()
