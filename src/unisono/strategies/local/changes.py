"""How the changes of the replicas travel and are averaged: in float32, or in 8 bits with error feedback.

`Changes` lie in the slot in the place of gradients, and are summed as these are: 8 bytes for each parameter are
sent and received by each host.

`Coded` changes are compressed replica by replica (`unisono.strategies.local.compression`). What is lost by that is the
replica's error, which is added to its next change, and moves with its state. Each member averages one chunk of all
replicas' changes, in float32 and in the order of the tree, and all get the means as bfloat16: 3 bytes for each
parameter. A chunk begins where a block begins, so no bit depends on the number of members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from unisono.core.cursor import mix
from unisono.core.plan import Plan
from unisono.core.routes import split_rows
from unisono.core.tree import fold, leaf, leaves
from unisono.engine.exchange import Parcel
from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.microbatch.folding import GradientFolder
from unisono.engine.rounds.members import Members
from unisono.engine.state.packing import digest_of_tensor
from unisono.strategies.local.compression import BLOCK, compress, compressed_bytes, decompress
from unisono.system.faults import point

__all__ = ["ERROR", "Changes", "Coded"]

ERROR: Final = "error feedback"
"""Where the error lies in a replica's state: no optimizer has this name."""
BLOCKS_AT_ONCE: Final = 1 << 14
"""Of each replica, which are averaged together: 8 MiB."""


class Changes:
    """The changes of one round's replicas, on one member: in the slots, in float32 (float64 for parameters in float64).

    Attributes:
        layout: of the slots.
    """

    def __init__(self, folder: GradientFolder) -> None:
        self.layout = self.layout_of(folder)
        self._parameters: list[nn.Parameter] = [parameter for _, parameter in folder.trained]

    @staticmethod
    def layout_of(folder: GradientFolder) -> FlatLayout:
        """Return the layout of slots with changes in the place of gradients: means, also where gradients are sums, and
        without the sums of ``step.add``, which are known replica by replica.
        """
        return FlatLayout(folder.trained, folder.buffers.named())

    def write(self, replica: int, slot: Slot, start: Sequence[Tensor], weight: float, error: Tensor | None) -> None:
        """Take a replica's change from the parameters. Local.

        Args:
            slot: the replica's leaf; its tail is written by the caller.
            start: the parameters at the boundary.
            weight: of the replica.
            error: what was lost of the replica's changes before; replaced.
        """
        for parameter, before, change in zip(self._parameters, start, slot.gradients, strict=True):
            first, now = before.to(change), parameter.detach().to(change)  # the slot may be on the CPU
            torch.sub(first, now, out=change).mul_(weight)
        slot.used.fill_(1)

    def average(self, members: Members, plan: Plan, weights: Mapping[int, float]) -> None:
        """Average what does not lie in the slots, before the commit. Collective.

        Args:
            weights: of all replicas.
        """

    def means(self, slot: Slot) -> list[Tensor]:
        """Return the mean change of each parameter, in the dtype of sums. After the commit.

        Args:
            slot: the sum of the slots.
        """
        return slot.gradients

    def digest(self, summed: int) -> int:
        """Return the digest of the round, from that of the sum of the slots."""
        return summed


class Coded(Changes):
    """Changes in 8 bits, replica by replica."""

    def __init__(self, folder: GradientFolder) -> None:
        super().__init__(folder)
        self._num_blocks = self.num_values(folder) // BLOCK
        self._coded: dict[int, Tensor] = {}
        self._means = torch.empty(0)

    @staticmethod
    def layout_of(folder: GradientFolder) -> FlatLayout:
        """Return the layout of slots without gradients."""
        return FlatLayout([], folder.buffers.named())

    @staticmethod
    def num_values(folder: GradientFolder) -> int:
        """Return the length of an error: each parameter begins with a block of its own."""
        return sum(_padded(parameter) for _, parameter in folder.trained)

    def write(self, replica: int, slot: Slot, start: Sequence[Tensor], weight: float, error: Tensor | None) -> None:
        assert error is not None
        change = torch.zeros(self._num_blocks * BLOCK, dtype=torch.float32, device=error.device)
        first = 0
        for parameter, before in zip(self._parameters, start, strict=True):
            own = change[first : first + parameter.numel()].view(parameter.shape)
            torch.sub(before.to(torch.float32), parameter.detach().to(torch.float32), out=own)
            first += _padded(parameter)
        self._coded[replica] = compress(change, error).cpu()

    def average(self, members: Members, plan: Plan, weights: Mapping[int, float]) -> None:
        replicas = range(plan.num_leaves)
        giver = {
            replica: rank
            for rank, nodes in enumerate(plan.nodes)
            for node in nodes
            for replica in leaves(node, plan.num_leaves)
        }
        chunks = split_rows(range(self._num_blocks), members.size)
        own = chunks[members.rank]
        parts = {replica: _pieces(own) for replica in replicas}
        parcels = []
        for replica in replicas:
            for rank, chunk in enumerate(chunks):
                if not chunk:
                    continue
                if giver[replica] == members.rank:
                    pieces = self._cut(self._coded[replica], chunk)
                    if rank == members.rank:
                        parts[replica] = pieces
                else:
                    pieces = parts[replica] if rank == members.rank else _pieces(chunk, "meta")
                if rank != giver[replica]:
                    parcels += [Parcel(giver[replica], (rank,), piece) for piece in pieces]
        members.deliver(parcels)
        point("local.coded")
        self._means = torch.empty(self._num_blocks * BLOCK, dtype=torch.bfloat16)
        self._average(own, parts, weights)
        parcels = []
        for rank, chunk in enumerate(chunks):
            others = tuple(other for other in range(members.size) if other != rank)
            if chunk and others:
                parcels.append(Parcel(rank, others, self._means[chunk.start * BLOCK : chunk.stop * BLOCK]))
        members.deliver(parcels)

    def means(self, slot: Slot) -> list[Tensor]:
        found, first = [], 0
        for parameter in self._parameters:
            mean = self._means[first : first + parameter.numel()].to(parameter.device, torch.float32)
            found.append(mean.view(parameter.shape))
            first += _padded(parameter)
        return found

    def digest(self, summed: int) -> int:
        return mix(summed ^ digest_of_tensor(self._means))

    # -- inside --------------------------------------------------------------------------------------

    def _average(self, own: range, parts: Mapping[int, Sequence[Tensor]], weights: Mapping[int, float]) -> None:
        """Average this member's chunk, in the order of the tree."""
        number = len(parts)
        total = fold({leaf(replica, number): weights[replica] for replica in parts}, number, lambda a, b: a + b)
        for start in range(0, len(own), BLOCKS_AT_ONCE):
            blocks = range(start, min(start + BLOCKS_AT_ONCE, len(own)))
            values = {}
            for replica, (scales, codes) in parts.items():
                one = torch.empty(compressed_bytes(len(blocks) * BLOCK), dtype=torch.uint8)
                one[: 4 * len(blocks)] = scales[4 * blocks.start : 4 * blocks.stop]
                one[4 * len(blocks) :] = codes[BLOCK * blocks.start : BLOCK * blocks.stop]
                change = decompress(one, torch.empty(len(blocks) * BLOCK))
                values[leaf(replica, number)] = change.mul_(weights[replica])
            mean = fold(values, number, torch.add).div_(total or 1.0)
            first = (own.start + blocks.start) * BLOCK
            self._means[first : first + len(mean)] = mean

    def _cut(self, coded: Tensor, chunk: range) -> list[Tensor]:
        """Return the scales and codes of some blocks."""
        codes = 4 * self._num_blocks
        return [
            coded[4 * chunk.start : 4 * chunk.stop],
            coded[codes + BLOCK * chunk.start : codes + BLOCK * chunk.stop],
        ]


def _pieces(chunk: range, device: str = "cpu") -> list[Tensor]:
    """Return memory for the scales and codes of a chunk; on "meta" where this member neither has nor gets them."""
    return [torch.empty(size * len(chunk), dtype=torch.uint8, device=device) for size in (4, BLOCK)]


def _padded(parameter: Tensor) -> int:
    return -(-parameter.numel() // BLOCK) * BLOCK
