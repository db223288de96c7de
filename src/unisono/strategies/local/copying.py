"""The states of replicas on their way between members: to those that compute them, and as copies.

All states that move travel at the same time, in pieces: a member that sends one state meanwhile gets another, and with
several hosts all links are busy at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import torch
from torch import Tensor

from unisono.core.copies import Move, copies, holders_after
from unisono.engine.exchange import Parcel
from unisono.engine.rounds.members import Members
from unisono.engine.state.packing import grouped, pack, unpack
from unisono.strategies.local.replica_states import Header, ReplicaState, Shelf
from unisono.system.faults import point

__all__ = ["by_replica", "copy_states", "deliver"]

MOST_BYTES: Final = 32 << 20
"""Of all pieces that one member has at a time, sent and received; a piece has one tensor at least."""
LEAST_BYTES: Final = 1 << 20
"""Of a piece, unless its state is smaller."""
ALIGNMENT: Final = 64
"""Of each tensor in a piece; what torch allocates is aligned so, too."""

Kind = tuple[str, list[int]]


def copy_states(members: Members, shelf: Shelf, num_copies: int) -> None:
    """Bring each state to as many members as are to hold it, and note who does. Collective."""
    payloads = members.gather(msgspec.msgpack.encode(sorted(shelf.held)))
    holders = by_replica([msgspec.msgpack.decode(payload, type=list[int]) for payload in payloads])
    moves = copies(holders, members.hosts, num_copies)
    shelf.held.update(deliver(members, shelf, moves))
    ids = members.worker_ids
    shelf.holders = {
        replica: tuple(ids[rank] for rank in ranks) for replica, ranks in holders_after(holders, moves).items()
    }


def by_replica(held: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return by replica who has its state, from what each rank has."""
    holders: dict[int, list[int]] = {}
    for rank, replicas in enumerate(held):
        for replica in replicas:
            holders.setdefault(replica, []).append(rank)
    return holders


def deliver(members: Members, shelf: Shelf, moves: Sequence[Move]) -> dict[int, ReplicaState]:
    """Bring states from members that have them to others. Collective.

    Args:
        shelf: has the headers of all replicas, and the states that this member sends.
        moves: equal on all members; at most one for each replica.

    Returns:
        What this member has got.
    """
    size = _piece_bytes(moves)
    journeys = [_Journey(move, shelf.headers[move.replica], shelf.held, members.rank, size) for move in moves]
    while under_way := [journey for journey in journeys if not journey.is_over]:
        point("local.delivering")
        members.deliver([journey.load() for journey in under_way])
        for journey in under_way:
            journey.unload()
    return {journey.move.replica: journey.state() for journey in journeys if journey.takes}


class _Journey:
    """A state that goes from one member to others, piece by piece, as one member sees it."""

    def __init__(
        self, move: Move, header: Header, held: Mapping[int, ReplicaState], rank: int, piece_bytes: int
    ) -> None:
        self.move = move
        self.takes = rank in move.targets
        self._gives = rank == move.source
        self._header = header
        self._left = pack(held[move.replica], "replica").tensors if self._gives else []
        self._groups = grouped(header.kinds, lambda kind: _padded(*kind), piece_bytes)
        self._next = 0
        self._piece = torch.empty(0)
        self._arrived: list[Tensor] = []

    @property
    def is_over(self) -> bool:
        return self._next == len(self._groups)

    def load(self) -> Parcel:
        """Return the next piece."""
        group = self._groups[self._next]
        sizes = [_padded(*kind) for kind in group]
        if self._gives:
            self._piece = _joined(self._left[: len(group)], sizes)
            del self._left[: len(group)]
        else:
            self._piece = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu" if self.takes else "meta")
        return Parcel(self.move.source, self.move.targets, self._piece)

    def unload(self) -> None:
        """Take what has arrived of that piece."""
        if self.takes:
            self._arrived += _cut(self._piece, self._groups[self._next])
        self._piece = torch.empty(0)
        self._next += 1

    def state(self) -> ReplicaState:
        """Return the state, after the last piece."""
        state: ReplicaState = unpack(self._header.skeleton, self._arrived)
        return state


def _piece_bytes(moves: Sequence[Move]) -> int:
    """Return the size of a piece with which no member has too much in its hands."""
    counts = Counter(rank for move in moves for rank in (move.source, *move.targets))
    return max(LEAST_BYTES, MOST_BYTES // max(counts.values(), default=1))


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def _padded(dtype: str, shape: Sequence[int]) -> int:
    return -(-_num_bytes(dtype, shape) // ALIGNMENT) * ALIGNMENT


def _joined(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    piece = torch.zeros(sum(sizes), dtype=torch.uint8)
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        piece[start : start + len(content)] = content
        start += size
    return piece


def _cut(piece: Tensor, kinds: Sequence[Kind]) -> list[Tensor]:
    tensors, start = [], 0
    for dtype, shape in kinds:
        content = piece[start : start + _num_bytes(dtype, shape)]
        tensors.append(content.view(getattr(torch, dtype)).view(shape))
        start += _padded(dtype, shape)
    return tensors
