"""Coder of a wire: who codes what it sends (`unisono.core.coding_rules`), how (`unisono.engine.exchange.coding`), and
what that takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from unisono.core.coding_rules import CodingRule, Mode, coding_members
from unisono.core.errors import PeerLost
from unisono.core.link_speed import LinkUse
from unisono.core.words import listed
from unisono.engine.exchange.coding import CodingError, can_code, decode, encode
from unisono.system.extras import install_words
from unisono.system.process import tell

__all__ = ["WORD_BYTES", "Coder"]

WORD_BYTES: Final = 1
"""Of what a member says with its vote."""
TRIAL_BYTES: Final = range(32 << 10, 256 << 10)
"""Of a message that is coded as a trial: at least, and at most."""

_told: set[tuple[str, ...]] = set()
"""Workers without a coder, and this process has said so."""


class Coder:
    """One member's coder. The thread of the run and the pump use it.

    Args:
        rank: of this member on the wire.
        size: members of the wire.
        names: the ids of their workers, by rank; empty: they have none.
    """

    def __init__(self, rank: int, size: int, mode: Mode, names: Sequence[str] = ()) -> None:
        self.senders = (False,) * size
        """By rank: whether what the member sends is coded; equal on all members between two votes."""
        self._rank = rank
        self._names = names or [f"rank {each}" for each in range(size)]
        self._rule = CodingRule(mode, can_code=can_code())
        self._turn = threading.Lock()

    @property
    def is_used(self) -> bool:
        """Whether anybody codes what it sends; equal on all members."""
        return any(self.senders)

    def word(self, uses: Sequence[LinkUse]) -> bytes:
        """Return what this member says with its next vote.

        Args:
            uses: of its links since the last one.
        """
        with self._turn:
            self._rule.note_link(uses)
            return bytes([self._rule.word()])

    def hear(self, words: bytes) -> None:
        """Go by what all members have said, by rank."""
        self.senders = coding_members(words)
        missing = tuple(self._names[rank] for rank in self._rule.misses(words))
        if missing and missing not in _told:
            _told.add(missing)
            tell(
                "unisono: the link to other machines is slow, and messages would be compressed (with the same bits) "
                f"if {listed(missing)} had the package zstandard: {install_words('coding')}"
            )

    def encode(self, data: Tensor, width: Callable[[], int], earlier: Tensor | None = None) -> Tensor:
        """Return a message, if this member codes what it sends; else ``data``.

        Args:
            width: returns the bytes of the numbers that most of the data are; called where they are coded.
        """
        if self.senders[self._rank]:
            return self._encoded(data, width(), earlier)
        if self._rule.wants_trial and data.numel() >= TRIAL_BYTES.start:
            sample = data[: TRIAL_BYTES.stop]
            encode(sample, own_width := width())  # what the first call of a thread makes is not measured
            self._decoded(self._encoded(sample, own_width, None), torch.empty_like(sample), None)
        return data

    def decode(self, message: Tensor, out: Tensor, sender: int, earlier: Tensor | None = None) -> int:
        """Write the data of a coded message to ``out``, and return the length of the message.

        Raises:
            PeerLost: it is none.
        """
        try:
            return self._decoded(message, out, earlier)
        except CodingError as failure:
            raise PeerLost(f"what {self._names[sender]} has sent cannot be decoded: {failure}") from failure

    def _encoded(self, data: Tensor, width: int, earlier: Tensor | None) -> Tensor:
        began = time.thread_time()
        message = encode(data, width, earlier)
        with self._turn:
            self._rule.note_coded(data.numel(), message.numel(), time.thread_time() - began)
        return message

    def _decoded(self, message: Tensor, out: Tensor, earlier: Tensor | None) -> int:
        began = time.thread_time()
        length = decode(message, out, earlier)
        with self._turn:
            self._rule.note_decoded(out.numel(), time.thread_time() - began)
        return length
