"""Checks of what crosses the network: what was sent is what has arrived.

TCP's checksum has 16 bits, and whatever lies between two network cards and two memories has none. So each member adds
up digests of what it sends to each other one and of what it gets from each, and the members exchange these numbers with
the ballot, after which a combine is committed. All see the same numbers, so all give up the combine where two differ,
and it is done again with the nodes that are still there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from unisono.core.errors import PeerLost
from unisono.core.words import listed

__all__ = ["Checks"]

_LINE: Final = 32
"""Words of a line; messages are a multiple of 256 bytes."""
_MASK: Final = (1 << 64) - 1


class Checks:
    """One member's sums of digests, of one combine.

    Args:
        size: members of the wire.
        names: their ids, by rank, for the error; empty: they have none.
    """

    def __init__(self, size: int, names: Sequence[str]) -> None:
        self.num_bytes = 2 * 8 * size
        """Of what `take` returns."""
        self._size = size
        self._names = names
        self._sent = [0] * size
        self._received = [0] * size
        self._turn = threading.Lock()
        self._multipliers = torch.empty(0, dtype=torch.int64)

    def note_sent(self, message: Tensor, target: int, tag: int) -> None:
        """Note a message that is sent.

        Args:
            message: (n,) uint8.
            tag: its number.
        """
        self._add(self._sent, target, self._digest(message, tag))

    def note_received(self, message: Tensor, source: int, tag: int) -> None:
        """Note a message that has arrived."""
        self._add(self._received, source, self._digest(message, tag))

    def take(self) -> bytes:
        """Return this member's numbers, once: by rank what it has sent, then by rank what it has got."""
        numbers = [number & _MASK for number in (*self._sent, *self._received)]
        self._sent, self._received = [0] * self._size, [0] * self._size
        return b"".join(number.to_bytes(8, "little") for number in numbers)

    def compare(self, everyones: Sequence[bytes]) -> None:
        """Compare the numbers of all members, by rank; the same on all of them.

        Raises:
            PeerLost: something has arrived as other bytes than were sent.
        """
        numbers = torch.frombuffer(bytearray(b"".join(everyones)), dtype=torch.int64).view(-1, 2, self._size)
        wrong = (numbers[:, 0] != numbers[:, 1].T).nonzero().tolist()
        if wrong:
            pairs = listed([f"{self._name(source)} to {self._name(target)}" for source, target in wrong])
            raise PeerLost(
                f"what was sent from {pairs} arrived with different bytes, so the sums are not used: a network card, a "
                "switch, or the memory of one of the two is faulty"
            )

    def _add(self, sums: list[int], rank: int, digest: int) -> None:
        with self._turn:  # the pump sends sums, and the thread of the training what is complete meanwhile
            sums[rank] += digest

    def _name(self, rank: int) -> str:
        return self._names[rank] if self._names else f"member {rank}"

    def _digest(self, message: Tensor, tag: int) -> int:
        words = message.view(torch.int64).view(-1, _LINE)
        multipliers = self._multipliers
        if len(words) > len(multipliers):
            multipliers = self._multipliers = torch.arange(len(words), dtype=torch.int64).mul_(2).add_(1)
        found = int((words.sum(dim=1) * multipliers[: len(words)]).sum().item())
        return found * (2 * tag + 1)
