"""Reduction of rows over the members of a wire by collectives, as NCCL needs them: all-to-all, fold in tree order,
all-gather. (Between processors, `unisono.engine.exchange.stream` does the same with messages.)

The rows are cut into buckets, so that the first can travel while the last are still being computed; every bucket
is cut into one chunk per member. What is received waits in memory until it is folded, so only some buckets are under
way at a time. Collectives are started in the same order on every member, S being the messages of a bucket and G the
gathering of its sums: S0 ... S(k-1), then G0, Sk, G1, S(k+1) and so on; within an S by the position of the node in its
holder's list. That holds since k depends on the plan alone, since no G begins before the last call of `send`, in which
all rows are complete, and since `fold` takes the buckets one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.core.tree import Node, root
from unisono.engine.exchange.flat import ROW_BYTES, FlatLayout, Rows, digest_there, fold_rows
from unisono.engine.exchange.row_packing import narrowed, regions, widened
from unisono.engine.exchange.wire import Collective, Wire

__all__ = ["BUCKET_BYTES", "Reduction"]

BUCKET_BYTES = 8 << 20
RECEIVED_BYTES = 256 << 20
"""Of the chunks that wait to be folded, on each member: so many, or those of one bucket."""


@dataclass(frozen=True)
class _Bucket:
    """Rows that travel together, counted from the first of the reduction's."""

    rows: range
    """A multiple of the members. The last ones may be padding, which lies where other rows do."""
    stop: int
    """Where the padding begins."""
    rounded: bool
    """Whether the layout rounds these rows."""
    may_overwrite: bool
    """Whether there is nothing behind the rows that the padding would spoil."""


def _cut(layout: FlatLayout, rows: range, num_members: int) -> list[_Bucket]:
    """Return the buckets of ``rows``: of each of its regions by itself. Pure: the same on all members."""
    per_bucket, buckets = max(1, BUCKET_BYTES // ROW_BYTES // num_members) * num_members, []
    for part, rounded in regions(layout, rows):
        first, stop = part.start - rows.start, part.stop - rows.start
        for start in range(first, stop, per_bucket):
            end = min(start + per_bucket, start + -(-(stop - start) // num_members) * num_members)
            buckets.append(
                _Bucket(range(start, end), min(end, stop), rounded, may_overwrite=end <= stop or stop == len(rows))
            )
    return buckets


class Reduction:
    """The sum of one range of rows, in three moves: `send`, `fold`, `gather`.

    Args:
        rows: of the layout; the same on all members of the wire.
        plan: by rank of the wire, the nodes of each member.
        out: receives the sums: the rows, and padding, if there is room for it. None of the nodes.
        multipliers: of the layout, for the digest.
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
    ) -> None:
        self._out = out.memory[(rows.start - out.first_row) * ROW_BYTES :]
        self._multipliers = multipliers
        self._wire = wire
        self._layout = layout
        self._rows = rows
        self._plan = plan
        self._num_leaves = num_leaves
        self._num_rounds = max(len(nodes) for nodes in plan)
        self._root = root(num_leaves)
        self._buckets = _cut(layout, rows, wire.size)
        bucket_bytes = BUCKET_BYTES // wire.size * sum(len(nodes) for nodes in plan)
        self._most_sent = max(1, RECEIVED_BYTES // max(1, bucket_bytes))
        """Buckets that are sent and not folded yet."""
        self._num_folded = 0
        self._sent: list[tuple[list[Collective], dict[Node, Tensor]]] = []
        self._gathers: list[tuple[Collective, Tensor, _Bucket]] = []

    def send(self, nodes: Mapping[Node, Rows], rows_ready: int) -> None:
        """Send the buckets within the first ``rows_ready`` rows, which are complete in all own nodes, as far as there
        is room to receive them. The last call is with all rows; `fold` sends the rest.

        Args:
            nodes: this member's, each with room behind its rows for as many as there are members.
        """
        self._nodes = nodes
        while len(self._sent) < min(len(self._buckets), self._num_folded + self._most_sent):
            bucket = self._buckets[len(self._sent)]
            if bucket.stop > rows_ready:
                return
            self._sent.append(self._send_bucket(nodes, bucket))

    def _is_narrow(self, bucket: _Bucket, node: Node) -> bool:
        """Return whether the rows of a bucket travel as bfloat16 for this node."""
        return bucket.rounded and self._layout.rounds(node, self._num_leaves)

    def _send_bucket(self, nodes: Mapping[Node, Rows], bucket: _Bucket) -> tuple[list[Collective], dict[Node, Tensor]]:
        wire = self._wire
        chunk = len(bucket.rows) // wire.size * ROW_BYTES
        nothing = torch.empty(0, dtype=torch.uint8, device=wire.device)
        sends, received = [], {}
        for turn in range(self._num_rounds):
            held = [nodes_of[turn] if turn < len(nodes_of) else None for nodes_of in self._plan]
            sizes = [0 if node is None else chunk // 2 if self._is_narrow(bucket, node) else chunk for node in held]
            out = torch.empty(sum(sizes), dtype=torch.uint8, device=wire.device)
            data, own_sizes = nothing, [0] * wire.size
            if (node := held[wire.rank]) is not None:
                own = nodes[node]
                start = (self._rows.start - own.first_row + bucket.rows.start) * ROW_BYTES
                data = own.memory[start : start + len(bucket.rows) * ROW_BYTES]
                if self._is_narrow(bucket, node):
                    data = narrowed(data)
                own_sizes = [sizes[wire.rank]] * wire.size
            sends.append(wire.all_to_all(out, sizes, data, own_sizes))
            received.update({node: each for node, each in zip(held, out.split(sizes), strict=True) if node is not None})
        return sends, received

    def fold(self) -> int:
        """Receive and add, and start to gather the sums; return the digest of the chunks that this member added."""
        digest = torch.zeros((), dtype=torch.int64, device=self._wire.device)  # read once, at the end
        for bucket in self._buckets:
            sends, received = self._sent[self._num_folded]
            for each in sends:
                each.wait()
            self._fold_bucket(bucket, received, digest)
            sends.clear()
            received.clear()
            self._num_folded += 1
            self.send(self._nodes, len(self._rows))
        return int(digest) & 0xFFFFFFFFFFFFFFFF

    def _fold_bucket(self, bucket: _Bucket, received: Mapping[Node, Tensor], digest: Tensor) -> None:
        wire, first = self._wire, self._rows.start
        rows_each = len(bucket.rows) // wire.size
        own = bucket.rows.start + wire.rank * rows_each
        end = min(own + rows_each, bucket.stop)
        total = torch.zeros(rows_each * ROW_BYTES, dtype=torch.uint8, device=wire.device)
        if own < end:
            fold_rows(
                self._layout,
                {
                    node: Rows(widened(memory) if self._is_narrow(bucket, node) else memory, first + own)
                    for node, memory in received.items()
                },
                self._num_leaves,
                first + own,
                first + end,
                [Rows(total, first + own)],
            )
            digest += digest_there(Rows(total, first + own), self._multipliers, first + own, first + end)
        if self._is_narrow(bucket, self._root):
            total = narrowed(total)
        target = self._out[bucket.rows.start * ROW_BYTES : bucket.rows.stop * ROW_BYTES]
        is_in_place = bucket.may_overwrite and len(target) == wire.size * len(total)
        sums = target if is_in_place else torch.empty(wire.size * len(total), dtype=torch.uint8, device=wire.device)
        self._gathers.append((wire.all_gather(sums, total), sums, bucket))

    def gather(self) -> None:
        """Wait until the sums of all members are in the ``out`` of `fold`."""
        for collective, sums, bucket in self._gathers:
            collective.wait()
            if self._is_narrow(bucket, self._root):
                sums = widened(sums)
            target = self._out[bucket.rows.start * ROW_BYTES : bucket.stop * ROW_BYTES]
            if sums.data_ptr() != target.data_ptr():
                target.copy_(sums[: len(target)])
        self._gathers.clear()
