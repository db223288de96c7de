"""Stream: the sum of a range of rows over the members of a wire, piece by piece, message by message.

The rows are cut into **pieces**, and each piece into one chunk per member. As soon as the rows of a piece are complete
on a member, it sends each chunk to its owner, for each node that it holds. An owner that has a chunk of all members
adds it up in tree order and sends the sum to all others, while later pieces are still on their way, or still being
computed. So a link carries something from the first piece to the last one, in both directions. Where the sums have
routes (`unisono.core.routes`), a chunk is what its owner is to add up, and its sum goes to those that need it.

The **window** says how many pieces a member sends ahead of those that it has received from all others. Between two
members the pieces queue on the only way there is, and all of them may be under way. Among three and more, a member that
sends all it has to all others at once leaves it to TCP which of them gets its part first; the others cannot add up the
first pieces, and have nothing to send back. On a long way a window that is too small leaves the link empty until the
answer comes. `WINDOW` is one number for all links: the one that came first or near it on each that was tried
(docs/decisions.md has the figures).

A member may code what it sends (`unisono.engine.exchange.coder`). What the sums need is the same, and so are all bits;
all know of each member whether it does, from the ballot before. A coded message is shorter than its receive, which has
room for the longest one: gloo allows that, and ends the process of a receiver to which more is sent.

The messages of a piece have numbers of their own, so no order between the pieces is needed; and all receives are posted
when the stream begins, because gloo holds a message back until its receiver has said that it is ready for it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.core.routes import Ranges, Route, routed, split_rows
from unisono.core.tree import Node, root
from unisono.engine.exchange.coder import WORD_BYTES
from unisono.engine.exchange.coding import most_bytes
from unisono.engine.exchange.flat import ROW_BYTES, FlatLayout, Rows, fold_rows, with_flipped_bit
from unisono.engine.exchange.row_packing import Packing
from unisono.engine.exchange.wire import DIGEST_BYTES, Wire, count_votes
from unisono.system.faults import spoils

__all__ = ["PIECE_BYTES", "Ballot", "RangeSum", "cut"]

PIECE_BYTES = 1 << 20
"""Of a stream's pieces, about."""
LAST_BYTES = 256 << 10
"""Of the last one. When nothing is left to compute, its way there and back is all that is waited for."""
MAX_PIECES = 96
"""A stream of many rows has larger pieces rather than more: every piece costs all members some Python and wake-ups."""
WINDOW = 4
"""Pieces under way at the same time, among three members and more."""


def cut(rows: range) -> list[range]:
    """Return the pieces of ``rows``: of nearly equal size, and smaller ones at the end, each half of the one before.
    Pure: the same on all members.
    """
    last: list[range] = []
    stop, size = rows.stop, LAST_BYTES // ROW_BYTES
    while size * ROW_BYTES < PIECE_BYTES and stop - rows.start >= 2 * size:
        last.append(range(stop - size, stop))
        stop, size = stop - size, 2 * size
    first = range(rows.start, stop)
    num_pieces = min(max(1, -(-len(first) * ROW_BYTES // PIECE_BYTES)), MAX_PIECES - len(last))
    return [*split_rows(first, num_pieces), *reversed(last)]


class _Arrival(NamedTuple):
    """Packed rows that are to come."""

    sender: int
    tag: int
    memory: Tensor
    """Where they are to be."""
    message: Tensor
    """What is received: the same memory, where they come as they are."""
    receive: Any


class RangeSum:
    """The sum of one range of rows, in three moves: `send`, `fold`, `gather`.

    Making one is collective, in the same order on all members of the wire.

    Args:
        rows: of the layout; the same on all members of the wire.
        plan: by rank of the wire, the nodes of each member.
        out: receives the sums of all rows; none of the nodes.
        multipliers: of the layout, for the digest.
        routes: between the members of the wire.
    """

    def __init__(
        self,
        wire: Wire,
        layout: FlatLayout,
        rows: range,
        plan: Sequence[Sequence[Node]],
        num_leaves: int,
        out: Rows,
        multipliers: Tensor,
        routes: Sequence[Route] = (),
    ) -> None:
        self._wire = wire
        self._layout = layout
        self._plan = plan
        self._num_leaves = num_leaves
        self._root = root(num_leaves)
        self._packing = Packing(layout, num_leaves)
        self._is_coded = wire.coder.senders  # a vote may change it when this sum is over
        self._out = out
        self._multipliers = multipliers
        pieces = cut(rows)
        self._ends = [piece.stop - rows.start for piece in pieces]
        self._pieces = [routed(piece, wire.size, routes) for piece in pieces]
        self._others = [(wire.rank + distance) % wire.size for distance in range(1, wire.size)]
        self._tags_each = max(len(nodes) for nodes in plan) + 1  # of a piece: one for each node of a member, and a sum
        self._first_tag = wire.reserve_tags(len(pieces) * self._tags_each)
        self._nodes: Mapping[Node, Rows] = {}
        self._turn = threading.Lock()  # the pump sends too
        self._num_ready = 0
        self._num_sent = 0
        self._num_folded = 0
        self._digest = 0
        self._sending: list[Any] = []
        self._window = WINDOW if wire.size > 2 else len(pieces)
        self._job = wire.in_background(self._run)

    def send(self, nodes: Mapping[Node, Rows], rows_ready: int) -> None:
        """Send the pieces that lie within the first ``rows_ready`` rows, which are complete in all own nodes."""
        num_ready = self._num_ready
        while num_ready < len(self._ends) and self._ends[num_ready] <= rows_ready:
            num_ready += 1
        if num_ready == self._num_ready:
            return
        with self._wire.changed:
            self._nodes = nodes
            self._num_ready = num_ready
            self._wire.changed.notify_all()
        self._send_on()

    def fold(self) -> int:
        """Wait until this member has added all of its chunks; return their digest. Their sums are on their way."""
        self._wire.await_job(self._job, lambda: self._num_folded == len(self._pieces))
        return self._digest & 0xFFFFFFFFFFFFFFFF

    def gather(self) -> None:
        """Wait until the sums that this member needs are in ``out``."""
        self._wire.await_job(self._job, self._job.is_completed)

    # -- inside --------------------------------------------------------------------------------------

    def _send(self, packed: Tensor, message: Tensor, other: int, tag: int) -> None:
        """Begin to send rows, as they are or coded."""
        if self._wire.checks is not None:
            self._wire.checks.note_sent(packed, other, tag)
        self._sending.append(self._wire.send(message, other, tag))

    def _post(self, memory: Tensor, other: int, tag: int) -> _Arrival:
        """Begin to receive packed rows."""
        message = memory
        if self._is_coded[other]:
            message = torch.empty(most_bytes(memory.numel()), dtype=torch.uint8)
        return _Arrival(other, tag, memory, message, self._wire.post(message, other, tag))

    def _finish(self, arrival: _Arrival) -> Tensor:
        """Wait until packed rows have arrived, and return them; in the thread of the pump."""
        other, tag, memory, message, receive = arrival
        self._wire.finish_in_background(receive)
        if message is not memory:
            self._wire.coder.decode(message, memory, other)
        if (bit := spoils("sums")) is not None:
            memory.copy_(with_flipped_bit(memory, bit))
        if self._wire.checks is not None:
            self._wire.checks.note_received(memory, other, tag)
        return memory

    def _tag(self, piece: int, turn: int = -1) -> int:
        """Return the number of the message with a member's node ``turn``, or with the sum."""
        return self._first_tag + piece * self._tags_each + turn % self._tags_each

    def _post_chunks(self, piece: int) -> list[tuple[Node, _Arrival]]:
        """Post the receives of this member's chunk of a piece, of all others."""
        own = self._pieces[piece].added[self._wire.rank]
        posted: list[tuple[Node, _Arrival]] = []
        for other in self._others if own else ():
            for turn, node in enumerate(self._plan[other]):
                memory = torch.empty(self._packing.num_bytes(own, node), dtype=torch.uint8)
                posted.append((node, self._post(memory, other, self._tag(piece, turn))))
        return posted

    def _post_sums(self, piece: int) -> list[tuple[Ranges, _Arrival]]:
        """Post the receives of the other chunks' sums, with their rows."""
        posted: list[tuple[Ranges, _Arrival]] = []
        for other in self._others:
            if chunk := self._pieces[piece].sum_for(other, self._wire.rank):
                memory = self._packing.room(self._out, chunk, self._root)
                posted.append((chunk, self._post(memory, other, self._tag(piece))))
        return posted

    def _send_on(self) -> None:
        """Send the pieces that are ready, as far as the window allows."""
        with self._turn:
            while self._num_sent < min(self._num_ready, self._num_folded + self._window):
                piece = self._num_sent
                for turn, node in enumerate(self._plan[self._wire.rank]):
                    for other in self._others:
                        if chunk := self._pieces[piece].added[other]:
                            packed = self._packing.pack(self._nodes[node], chunk, node)
                            message = self._wire.coder.encode(packed, partial(self._packing.width, chunk, node))
                            self._send(packed, message, other, self._tag(piece, turn))
                self._num_sent += 1

    def _run(self) -> None:
        """Add up, piece by piece, what has arrived; in the thread of the pump."""
        wire = self._wire
        arriving = [self._post_chunks(piece) for piece in range(len(self._pieces))]
        gathers = [self._post_sums(piece) for piece in range(len(self._pieces))]
        for piece, chunks in enumerate(self._pieces):
            if not wire.wait_in_background(lambda piece=piece: self._num_ready > piece):  # type: ignore[misc]
                return
            own = chunks.added[wire.rank]
            nodes = [{node: self._nodes[node] for node in self._plan[wire.rank]} for _ in own]
            for node, arrival in arriving[piece]:
                for held, rows in zip(nodes, self._packing.unpack(self._finish(arrival), own, node), strict=True):
                    held[node] = rows
            for part, held in zip(own, nodes, strict=True):
                self._digest += fold_rows(
                    self._layout,
                    held,
                    self._num_leaves,
                    part.start,
                    part.stop,
                    [self._out],
                    multipliers=self._multipliers,
                )
            sums: dict[Ranges, tuple[Tensor, Tensor]] = {}
            for other in self._others:
                if part_of := chunks.sum_for(wire.rank, other):
                    if part_of not in sums:
                        packed = self._packing.pack(self._out, part_of, self._root)
                        message = wire.coder.encode(packed, partial(self._packing.width, part_of, self._root))
                        sums[part_of] = packed, message
                    self._send(*sums[part_of], other, self._tag(piece))
            arriving[piece] = []
            wire.look_at_links()
            self._num_folded += 1
            if self._num_folded == self._num_ready:  # nobody waits for less
                with wire.changed:
                    wire.changed.notify_all()
            self._send_on()
        for receives in gathers:
            wire.look_at_links()
            for chunk, arrival in receives:
                self._packing.unpack(self._finish(arrival), chunk, self._root, self._out)
            receives.clear()
        for each in self._sending:  # gloo forgets a message that nobody holds
            wire.finish_in_background(each)
        self._sending.clear()


class Ballot:
    """The word of all members of a wire that they hold all sums. Its receives are posted before, so it takes one way.

    Making one is collective, in the same order on all members of the wire.

    Args:
        nbytes: of the data that each member adds; equal on all members.
    """

    def __init__(self, wire: Wire, nbytes: int) -> None:
        self._wire = wire
        self._word_at = DIGEST_BYTES + nbytes
        self._checks_at = self._word_at + WORD_BYTES
        nbytes += WORD_BYTES
        nbytes += wire.checks.num_bytes if wire.checks is not None else 0
        self._tag = wire.reserve_tags(1)
        self._others = [rank for rank in range(wire.size) if rank != wire.rank]
        self._words = [torch.empty(DIGEST_BYTES + nbytes, dtype=torch.uint8) for _ in range(wire.size)]
        self._receives: list[Any] = []
        wire.in_background(self._post)

    def vote(self, digest: int, data: bytes) -> tuple[int, list[bytes]]:
        """Announce to all members that this one holds all sums, when the streams before this ballot have gathered them;
        wait until every member has announced it.

        Args:
            digest: of the sums of this member.

        Returns:
            The digest of all sums, and the ``data`` of all members, by rank.

        Raises:
            PeerLost: something has arrived as other bytes than were sent.
        """
        own = digest.to_bytes(DIGEST_BYTES, "little") + data + self._wire.coder.word(self._wire.link_uses())
        room = bytearray(own.ljust(self._words[0].numel(), b"\0"))
        self._words[self._wire.rank] = torch.frombuffer(room, dtype=torch.uint8)
        job = self._wire.in_background(self._run)
        self._wire.await_job(job, job.is_completed)
        words = [ctypes.string_at(word.data_ptr(), word.numel()) for word in self._words]
        if self._wire.checks is not None:
            self._wire.checks.compare([word[self._checks_at :] for word in words])
        self._wire.coder.hear(b"".join(word[self._word_at : self._checks_at] for word in words))
        return count_votes([word[: self._word_at] for word in words])

    def _post(self) -> None:
        self._receives = [self._wire.post(self._words[rank], rank, self._tag) for rank in self._others]

    def _run(self) -> None:
        wire = self._wire
        own = self._words[wire.rank]
        if wire.checks is not None:
            ctypes.memmove(own.data_ptr() + self._checks_at, wire.checks.take(), wire.checks.num_bytes)
        sending = [wire.send(own, rank, self._tag) for rank in self._others]
        for each in (*self._receives, *sending):
            wire.finish_in_background(each)
