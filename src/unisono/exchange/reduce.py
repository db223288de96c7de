"""Reduction of rows over the members of a wire by collectives, as NCCL needs them: all-to-all, fold in tree order,
all-gather. (Between processors, `unisono.exchange.stream` does the same with messages.)

The rows are cut into buckets, so that the first can travel while the last are still being computed; every bucket
is cut into one chunk per member. Collectives are started in the same order on every member: by bucket, and
within a bucket by the position of the node in its holder's list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.decisions.tree import Node
from unisono.exchange.flat import ROW_BYTES, FlatLayout, Rows, fold_rows
from unisono.exchange.wire import Collective, Wire

__all__ = ["BUCKET_BYTES", "Reduction", "padded_rows"]

BUCKET_BYTES = 8 << 20


def padded_rows(rows: range, num_members: int) -> int:
    """Return how many rows a buffer for ``rows`` needs, so that its last bucket can be cut evenly."""
    per_bucket = _bucket_rows(num_members)
    full, rest = divmod(len(rows), per_bucket)
    return full * per_bucket + -(-rest // num_members) * num_members


def _bucket_rows(num_members: int) -> int:
    return max(1, BUCKET_BYTES // ROW_BYTES // num_members) * num_members


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
        per_bucket, padded = _bucket_rows(wire.size), padded_rows(rows, wire.size)
        # Relative to the first row of `rows`; a bucket may end in padding behind the last.
        self._buckets = [range(row, min(row + per_bucket, padded)) for row in range(0, padded, per_bucket)]
        self._sent: list[tuple[list[Collective], dict[Node, Tensor]]] = []
        self._gathers: list[tuple[Collective, Tensor, Tensor]] = []

    def send(self, nodes: Mapping[Node, Rows], rows_ready: int) -> None:
        """Send the buckets that lie within the first ``rows_ready`` rows, which are complete in all own nodes.

        Args:
            nodes: this member's, each padded to `padded_rows` from the first of the rows on.
        """
        while len(self._sent) < len(self._buckets):
            bucket = self._buckets[len(self._sent)]
            if min(bucket.stop, len(self._rows)) > rows_ready:
                return
            self._sent.append(self._send_bucket(nodes, bucket))

    def _send_bucket(self, nodes: Mapping[Node, Rows], bucket: range) -> tuple[list[Collective], dict[Node, Tensor]]:
        wire = self._wire
        chunk = len(bucket) // wire.size * ROW_BYTES
        nothing = torch.empty(0, dtype=torch.uint8, device=wire.device)
        sends, received = [], {}
        for turn in range(self._num_rounds):
            holders = [turn < len(held) for held in self._plan]
            sizes = [chunk if holds else 0 for holds in holders]
            out = torch.empty(sum(sizes), dtype=torch.uint8, device=wire.device)
            data, own_sizes = nothing, [0] * wire.size
            if holders[wire.rank]:
                own = nodes[self._plan[wire.rank][turn]]
                start = (self._rows.start - own.first_row + bucket.start) * ROW_BYTES
                data = own.memory[start : start + len(bucket) * ROW_BYTES]
                own_sizes = [chunk] * wire.size
            sends.append(wire.all_to_all(out, sizes, data, own_sizes))
            arrived = iter(out.split(chunk)) if chunk and len(out) else iter(())
            received.update({held[turn]: next(arrived) for held in self._plan if turn < len(held)})
        return sends, received

    def fold(self) -> int:
        """Receive and add, and start to gather the sums; return the digest of the chunks that this member added."""
        digest = 0
        for bucket, (sends, received) in zip(self._buckets, self._sent, strict=True):
            for each in sends:
                each.wait()
            digest += self._fold_bucket(bucket, received)
            received.clear()
        return digest & 0xFFFFFFFFFFFFFFFF

    def _fold_bucket(self, bucket: range, received: Mapping[Node, Tensor]) -> int:
        wire, first = self._wire, self._rows.start
        rows_each = len(bucket) // wire.size
        own = bucket.start + wire.rank * rows_each
        end = min(own + rows_each, len(self._rows))
        total = torch.zeros(rows_each * ROW_BYTES, dtype=torch.uint8, device=wire.device)
        digest = 0
        if own < end:
            digest = fold_rows(
                self._layout,
                {node: Rows(memory, first + own) for node, memory in received.items()},
                self._num_leaves,
                first + own,
                first + end,
                [Rows(total, first + own)],
                multipliers=self._multipliers,
            )
        sums = target = self._out[bucket.start * ROW_BYTES : bucket.stop * ROW_BYTES]
        if len(target) < len(bucket) * ROW_BYTES:  # behind it are rows of another part
            sums = torch.empty(len(bucket) * ROW_BYTES, dtype=torch.uint8, device=wire.device)
        self._gathers.append((wire.all_gather(sums, total), sums, target))
        return digest

    def gather(self) -> None:
        """Wait until the sums of all members are in the ``out`` of `fold`."""
        for collective, sums, target in self._gathers:
            collective.wait()
            if sums is not target:
                target.copy_(sums[: len(target)])
        self._gathers.clear()
