"""Link: messages between the workers of a group, which carry one model together."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from unisono.engine.exchange.wire import Wire
from unisono.engine.rounds.transfer import StateHeader
from unisono.engine.state.packing import pack_held, unpack

__all__ = ["Link"]

FIRST_BYTES = 1024
"""Of the first message of a value, which has its header, or the beginning of it."""
TAG = 1
"""Of all messages: those from one worker to another arrive in their order."""


class Link:
    """Sends trees of tensors and plain values to other workers of the group, and receives them.

    Both sides know the order of the messages between two workers. A receive waits; a send does not.

    Args:
        wire: between the members of the group, by part.
        device: where tensors that are received go.
    """

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire = wire
        self._device = device
        self._sending: list[tuple[Any, Tensor]] = []

    def send(self, target: int, value: Any) -> None:
        """Begin to send a value to a part. Its tensors must not change before `finish`.

        Raises:
            PeerLost, DeadlineExceeded: a worker of the group was lost.
        """
        packed = pack_held(value)
        header = torch.frombuffer(bytearray(msgspec.msgpack.encode(StateHeader.of(packed))), dtype=torch.uint8)
        first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
        first[:8] = torch.tensor([header.numel()]).view(torch.uint8)
        first[8 : 8 + header.numel()] = header[: FIRST_BYTES - 8]
        self._send(target, first)
        if header.numel() > FIRST_BYTES - 8:
            self._send(target, header[FIRST_BYTES - 8 :])
        for tensor in packed.tensors:
            if tensor.numel():
                self._send(target, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))

    def receive(self, source: int) -> Any:
        """Return the next value that a part has sent. Waits.

        Raises:
            PeerLost, DeadlineExceeded: a worker of the group was lost.
        """
        found: list[Any] = []

        def run() -> None:
            first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
            self._receive(source, first)
            size = int(first[:8].view(torch.int64))
            rest = torch.empty(max(0, size - (FIRST_BYTES - 8)), dtype=torch.uint8)
            if rest.numel():
                self._receive(source, rest)
            header = bytes(torch.cat([first[8 : 8 + size], rest]).tolist())
            known = msgspec.msgpack.decode(header, type=StateHeader)
            tensors = known.empty()
            for tensor in tensors:
                if tensor.numel():
                    self._receive(source, tensor.view(-1).view(torch.uint8))
            found.append(unpack(known.skeleton, [tensor.to(self._device) for tensor in tensors]))

        job = self._wire.in_background(run)
        self._wire.await_job(job, job.is_completed)
        return found[0]

    def exchange(self, partner: int, tensor: Tensor) -> Tensor:
        """Send a tensor to a part, and return what it has sent: one of the same shape and dtype. Waits.

        Raises:
            PeerLost, DeadlineExceeded: a worker of the group was lost.
        """
        own = tensor.detach().cpu().contiguous()
        found = torch.empty_like(own)
        if own.numel():
            self._send(partner, own.view(-1).view(torch.uint8))
            job = self._wire.in_background(lambda: self._receive(partner, found.view(-1).view(torch.uint8)))
            self._wire.await_job(job, job.is_completed)
        return found.to(self._device)

    def finish(self) -> None:
        """Wait until all that was sent has left.

        Raises:
            PeerLost, DeadlineExceeded: a worker of the group was lost.
        """
        job = self.let_go()
        self._wire.await_job(job, job.is_completed)

    def let_go(self) -> Any:
        """Let what was sent leave in the background, after a loss: torch must not lose it before."""
        sending, self._sending = self._sending, []

        def run() -> None:
            for work, _ in sending:
                self._wire.finish_in_background(work)

        return self._wire.in_background(run)

    def _send(self, target: int, data: Tensor) -> None:
        self._sending.append((self._wire.send(data, target, TAG), data))

    def _receive(self, source: int, out: Tensor) -> None:
        self._wire.finish_in_background(self._wire.post(out, source, TAG))
