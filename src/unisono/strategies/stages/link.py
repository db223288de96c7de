"""Link: messages between the workers of a group, which carry one model together.

Two workers on one host pass them through shared memory (`unisono.engine.exchange.pairs`), in the thread that calls.
Others send them over a wire, in several messages, and a receive waits for the thread of the wire.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from unisono.engine.exchange.pairs import Pairs
from unisono.engine.rounds.transfer import StateHeader
from unisono.engine.state.packing import pack_held, unpack

__all__ = ["Link"]

FIRST_BYTES = 1024
"""Of the first message of a value on a wire, which has its header, or the beginning of it."""
SIZE_BYTES = 8
"""Of the size of the header, which it begins with."""
ALIGNMENT = 64
"""Of tensors in shared memory."""
TAG = 1
"""Of all messages: those from one worker to another arrive in their order."""


class Link:
    """Sends trees of tensors and plain values to other workers of the group, and receives them.

    Both sides know the order of the messages between two workers. A receive waits; a send does not, except for the
    first time until all of the group have come.

    Args:
        pairs: between the members of the group, by part.
        device: where tensors that are received go.
    """

    def __init__(self, pairs: Pairs, device: torch.device) -> None:
        self._pairs = pairs
        self._wire = pairs.wire
        self._device = device
        self._sending: list[tuple[Any, Tensor]] = []

    def send(self, target: int, value: Any) -> None:
        """Begin to send a value to a part. Its tensors must not change before `finish`.

        Raises:
            PeerLost, DeadlineExceeded: a worker of the group was lost.
        """
        packed = pack_held(value)
        header = msgspec.msgpack.encode(StateHeader.of(packed))
        prefix = len(header).to_bytes(SIZE_BYTES, "little") + header
        if self._pairs.shares(target):
            starts, end = _starts(len(prefix), packed.tensors)
            memory = self._pairs.slot(target, end)
            ctypes.memmove(memory.data_ptr(), prefix, len(prefix))
            for start, tensor in zip(starts, packed.tensors, strict=True):
                _place(memory, start, tensor).copy_(tensor)
            self._pairs.post(target)
            return
        self._send(target, _tensor_of(prefix[:FIRST_BYTES].ljust(FIRST_BYTES, b"\0")))
        if len(prefix) > FIRST_BYTES:
            self._send(target, _tensor_of(prefix[FIRST_BYTES:]))
        for tensor in packed.tensors:
            if tensor.numel():
                self._send(target, _bytes_of(tensor.cpu()))

    def receive(self, source: int) -> Any:
        """Return the next value that a part has sent. Waits.

        Raises:
            PeerLost, DeadlineExceeded: a worker of the group was lost.
        """
        if not self._pairs.shares(source):
            return self._received(source)
        memory = self._pairs.message(source)
        size = int.from_bytes(ctypes.string_at(memory.data_ptr(), SIZE_BYTES), "little")
        known = _decoded(ctypes.string_at(memory.data_ptr() + SIZE_BYTES, size))
        kinds = known.empty(is_target=False)
        starts, _ = _starts(SIZE_BYTES + size, kinds)
        tensors = [
            _place(memory, start, kind).to(self._device, copy=True) for start, kind in zip(starts, kinds, strict=True)
        ]
        self._pairs.take(source)
        return unpack(known.skeleton, tensors)

    def exchange(self, partner: int, tensor: Tensor) -> Tensor:
        """Give a part a tensor, and return the one that it gives: of the same shape, dtype and device. Waits.

        No other message may be under way between the two.

        Raises:
            PeerLost, DeadlineExceeded: a worker of the group was lost.
        """
        given = tensor.detach().contiguous().cpu()
        found = torch.empty_like(given)
        if self._pairs.shares(partner):
            self._pairs.swap(partner, given, found)
            return found.to(tensor.device)
        if not given.numel():
            return found.to(tensor.device)
        self._send(partner, _bytes_of(given))
        sent, _ = self._sending[-1]

        def run() -> None:
            self._receive(partner, _bytes_of(found))
            self._wire.finish_in_background(sent)

        job = self._wire.in_background(run)
        self._wire.await_job(job, job.is_completed)
        self._sending.pop()
        return found.to(tensor.device)

    def finish(self) -> None:
        """Wait until all that was sent has left; what others of the host have not read may be a little.

        Raises:
            PeerLost, DeadlineExceeded: a worker of the group was lost.
        """
        self._pairs.settle()
        if self._sending:
            job = self.let_go()
            self._wire.await_job(job, job.is_completed)

    def let_go(self) -> Any:
        """Let what was sent leave in the background, after a loss: torch must not lose it before."""
        sending, self._sending = self._sending, []

        def run() -> None:
            for work, _ in sending:
                self._wire.finish_in_background(work)

        return self._wire.in_background(run)

    def _received(self, source: int) -> Any:
        """Return the next value that a part on another host has sent."""
        found: list[Any] = []

        def run() -> None:
            first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
            self._receive(source, first)
            size = int(first[:SIZE_BYTES].view(torch.int64))
            rest = torch.empty(max(0, SIZE_BYTES + size - FIRST_BYTES), dtype=torch.uint8)
            if rest.numel():
                self._receive(source, rest)
            header = bytes(torch.cat([first[SIZE_BYTES : SIZE_BYTES + size], rest]).tolist())
            known = _decoded(header)
            tensors = known.empty()
            for tensor in tensors:
                if tensor.numel():
                    self._receive(source, _bytes_of(tensor))
            found.append(unpack(known.skeleton, [tensor.to(self._device) for tensor in tensors]))

        job = self._wire.in_background(run)
        self._wire.await_job(job, job.is_completed)
        return found[0]

    def _send(self, target: int, data: Tensor) -> None:
        self._sending.append((self._wire.send(data, target, TAG), data))

    def _receive(self, source: int, out: Tensor) -> None:
        self._wire.finish_in_background(self._wire.post(out, source, TAG))


def _decoded(header: bytes) -> StateHeader:
    return msgspec.msgpack.decode(header, type=StateHeader)


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _starts(start: int, tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where tensors lie in a message whose header ends at ``start``, and where the last one ends."""
    found = []
    for tensor in tensors:
        start = -(-start // ALIGNMENT) * ALIGNMENT
        found.append(start)
        start += tensor.nbytes
    return found, start


def _place(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the part of memory for a tensor."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
