"""The SHA-256 of the weights of a model that no member has as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import torch
from torch import Tensor

from unisono.core.plan import Plan
from unisono.engine.exchange import Parcel
from unisono.engine.rounds.members import Gathered, Members, Undivided
from unisono.engine.state.tracked import Apart, Tracked
from unisono.engine.state.weights import sha256_of_weights

__all__ = ["WeightsRound"]


class WeightsRound(Undivided):
    """Rank 0 gets the weights tensor by tensor, and tells all members the SHA-256 of the file that would hold them.

    Attributes:
        sha256: by name of the tracked module, once the round is over; "": no such file can hold it.
    """

    kind: Final = "weights"
    title: Final = "the SHA-256 of the weights"

    def __init__(self, members: Members, tracked: Tracked) -> None:
        super().__init__(members)
        self.sha256: dict[str, str] = {}
        self._tracked = tracked

    def compute(self, plan: Plan) -> Iterator[object]:
        yield from ()

    def combine(self, plan: Plan) -> Gathered:
        said = next((letter.payload for letter in self._members.letters(b"") if letter.is_final), None)
        if said is None:
            found = {
                name: self._sha256(self._tracked.spread_apart[name])
                for name in self._tracked.modules
                if name in self._tracked.spread_apart
            }
            said = self._members.gather(msgspec.msgpack.encode(found))[0]
        self.sha256 = msgspec.msgpack.decode(said, type=dict[str, str])
        return Gathered(self._members, said)

    def _sha256(self, part: Apart) -> str:
        members, holders = self._members, part.holders

        def fetch(name: str, tensor: Tensor) -> Tensor:
            unit = part.unit(f"[{name!r}]")
            source = 0 if unit is None else members.worker_ids.index(holders[unit][0])
            found = tensor
            if members.rank == 0 and source:
                found = torch.empty_like(tensor, device="cpu")
            if source:
                members.deliver([Parcel(source, (0,), found)])
            return found if members.rank == 0 else torch.empty(0)

        return sha256_of_weights(part.state_dict(), fetch)
