"""The round of local steps: each leaf is a replica that trains for some steps by itself; then all are averaged.

A worker computes the replicas that the plan gives it, one after the other, each from the parameters at the round's
boundary. What a replica has changed (parameters at the boundary minus parameters afterwards, times the weight of its
samples) is a leaf of the summation tree, in the place of a gradient. So the mean over the replicas has the same bits
whoever has computed which of them.

1. **place**: whoever is to compute a replica gets its state from a member that holds it;
2. the replicas are computed. Nobody waits for anybody meanwhile. A member that hears of a loss finishes its replica;
3. the members exchange what the replicas ended with, and copies of their new states;
4. the changes are summed: the **commit**.

Until the next round begins on all members, each keeps the states of this one: members that have not seen the commit
compute the replicas of a lost member again, from the states at the boundary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import torch
from torch import Tensor

from unisono.decisions.checks import Rehearsal
from unisono.decisions.copies import Move, copies, deliveries, holders_after
from unisono.decisions.plan import Plan
from unisono.decisions.tree import Node, leaf, parent, sibling
from unisono.errors import DivergenceError, StateLost, StepError
from unisono.events import Seconds
from unisono.exchange import Parcel, Share
from unisono.exchange.flat import FlatLayout, Rows, Slot, fold_rows
from unisono.faults import point
from unisono.microbatch.folding import Fingerprint, GradientFolder
from unisono.rounds.changes import ERROR, Changes
from unisono.rounds.gradient import StepContext
from unisono.rounds.members import Members, Summed
from unisono.state.packing import from_bytes, pack, unpack
from unisono.state.replicas import Header, Replicas, ReplicaState, Shelf, check_alike
from unisono.telemetry import StepTelemetry
from unisono.words import listed

__all__ = ["Ended", "ReplicaRound", "Trained", "Trainer"]

GROUP_BYTES: Final = 16 << 20
"""States travel in pieces of at most this size, or of one tensor."""
ALIGNMENT: Final = 64
"""Of each tensor in a piece; what torch allocates is aligned so, too."""

ReplicaSums = dict[str, Tensor]


class Ended(msgspec.Struct, frozen=True):
    """What a replica ended its round with, besides its parameters, buffers and state."""

    digests: dict[str, str]
    """Of everything that all replicas have alike, by name."""
    sums: bytes
    """The sums of ``step.add`` over its steps, as `to_bytes` gives them."""
    header: Header
    """Of its state."""
    weight: float
    """The sum of the weights of its steps, scaled."""
    common: bytes = b""
    """What all replicas have alike; only of the first one."""


@dataclass(frozen=True)
class Trained:
    """A replica whose steps are done, with its parameters and buffers in the model."""

    weighted_loss: float
    state: ReplicaState
    ended: Ended
    first: Fingerprint | None = None
    """Of the first micro-batch of its first step, if it was asked for."""


class Trainer(Protocol):
    """Trains replicas from the round's boundary; yields their steps to the script."""

    def train(self, replica: int, *, compares: bool) -> Generator[object, None, Trained]:
        """Train a replica for its steps, and return what came out.

        Args:
            compares: take the fingerprint of its first micro-batch, which another member computes as well.
        """

    def rehearse(self, replica: int) -> Generator[object, None, Fingerprint | None]:
        """Compute the first step of a replica of another member, and forget it.

        Returns:
            The fingerprint of its first micro-batch; None: its batch does not come from where others come.
        """


@dataclass(frozen=True)
class CommittedRound:
    """A finished round, kept so that this member can stand by when others repeat it."""

    members: Members
    replicas: Replicas
    step: int
    layout: FlatLayout
    digest: int
    ended: Mapping[int, Ended]
    copies: int
    changes: Changes

    def stand_by(self, plan: Plan) -> None:
        if self.copies:
            _place(self.members, self.replicas.before, plan)
        _tell(self.members, self.ended)
        if self.copies:
            _copy(self.members, self.replicas.now, self.copies)
        self.changes.average(self.members, plan, _weights(self.ended))
        summed = self.members.sum(Share(plan.num_leaves, plan.nodes, {}), StepTelemetry())
        self.members.release(summed.slot)
        digest = self.changes.digest(summed.digest)
        if digest != self.digest:
            raise DivergenceError(
                f"round {self.step} was computed again after a loss, and the mean of its replicas has digest "
                f"{digest:016x}, not {self.digest:016x}. Either a replica's steps do not give the same result "
                "on every worker (see docs/guarantees.md for what a step may depend on), or the hardware of a worker "
                "is broken"
            )


class ReplicaRound:
    """One round: all replicas train from the same parameters, and what they have changed is averaged.

    Args:
        number: of this round within the loop.
        trainer: trains the replicas.
        start: the parameters at the boundary, in the order of the folder's.
        copies: how many members keep the new state of each replica; 0: replicas keep no state.

    Attributes:
        news: why the plan differs from that of the round before; "" where it does not.
        result: the means, once the round is over.
        ended: what the replicas ended with, by number, once the round is over.
        digest: of the means, once the round is over.
    """

    kind: Final = "local"

    def __init__(
        self,
        context: StepContext,
        number: int,
        replicas: Replicas,
        num_replicas: int,
        trainer: Trainer,
        changes: Changes,
        folder: GradientFolder,
        start: Sequence[Tensor],
        *,
        copies: int,
    ) -> None:
        self.num_leaves = num_replicas
        self.title = f"a round of {num_replicas} replicas"
        self.news = ""
        self.result: Summed | None = None
        self.ended: dict[int, Ended] = {}
        self.num_computed = 0
        self.digest = 0
        self._context = context
        self._number = number
        self._replicas = replicas
        self._trainer = trainer
        self._rehearsal: Rehearsal | None = None
        self._changes = changes
        self._folder = folder
        self._start = start
        self._copies = copies
        self._members = context.rounds.members
        self._after = Shelf()
        self._seconds = 0.0
        self._clock = context.clock
        folder.buffers.start_step()

    @property
    def number(self) -> int:
        """Number of this round within the run."""
        return self._context.first_number + self._number

    # -- the round -----------------------------------------------------------------------------------

    def first_plan(self) -> Plan:
        plan, self.news = self._members.balancing.decide(self.num_leaves, everybody=self._number == 0)
        return plan

    def begin(self, plan: Plan) -> None:
        agreement = self._context.agreement
        agreement.start_step(self._number, self.number)
        self._rehearsal = agreement.rehearsal(plan) if self._members.size > 1 else None

    def compute(self, plan: Plan) -> Iterator[object]:
        """Yield the steps of this member's replicas to the script."""
        if self._copies:
            arrived = _place(self._members, self._replicas.now, plan)
            self._replicas.before = Shelf()  # whoever has come to this round has finished the one before
            self._replicas.now.held.update(arrived)
        point("local.placed")
        for replica in plan.ranges[self._members.rank]:
            self._context.rounds.team.check()
            yield from self._compute(replica)
        rehearsal = self._rehearsal
        if rehearsal is not None and rehearsal.other is not None:
            found = yield from self._trainer.rehearse(rehearsal.other)
            if found is not None:
                self._context.agreement.note_other(msgspec.structs.replace(found, leaf=rehearsal.other))
        self._clock.switch("exchange")

    def combine(self, plan: Plan) -> CommittedRound:
        """Exchange what the replicas ended with, and sum what they have changed: the commit of the round."""
        point("before_combine")
        members = self._members
        with members.waiting():
            self.ended = _tell(members, self.ended)
            check_alike({replica: each.digests for replica, each in self.ended.items()})
            if self._copies:
                self._after.headers = {replica: each.header for replica, each in self.ended.items()}
                _copy(members, self._after, self._copies)
            point("local.copied")
            self._changes.average(members, plan, _weights(self.ended))
        telemetry = self._context.agreement.add_to(self._telemetry())
        self.result = summed = members.sum(Share(self.num_leaves, plan.nodes, members.slots.nodes), telemetry)
        members.slots.results.append(summed.slot)
        self.digest = self._changes.digest(summed.digest)
        self._replicas.before, self._replicas.now = self._replicas.now, self._after
        return CommittedRound(
            members,
            self._replicas,
            self._number,
            self._changes.layout,
            self.digest,
            self.ended,
            self._copies,
            self._changes,
        )

    def interrupt(self) -> Collection[Node]:
        self._clock.switch("waiting")
        self._rehearsal = None
        return list(self._members.slots.nodes)

    def finish(self) -> None:
        summed = self.result
        assert summed is not None
        point("committed")
        self._context.agreement.check(list(summed.telemetry.values()))
        if summed.slot.scalars[0] == 0.0:
            raise StepError(f"all micro-batches of round {self._number} have weight 0: there is nothing to average")
        self._clock.switch("other")
        self._clock.note(summed.spent, summed.generation)

    # -- one replica ---------------------------------------------------------------------------------

    def _compute(self, replica: int) -> Iterator[object]:
        began = time.perf_counter()
        compares = self._rehearsal is not None and self._rehearsal.own == replica
        trained = yield from self._trainer.train(replica, compares=compares)
        if trained.first is not None:
            self._context.agreement.note_own(msgspec.structs.replace(trained.first, leaf=replica))
        node, slot = leaf(replica, self.num_leaves), self._members.new_slot()
        self._write(replica, slot, trained)
        self._merge(node, slot)
        self.ended[replica] = trained.ended
        if self._copies:
            self._after.held[replica] = trained.state
        self.num_computed += 1
        self._seconds += time.perf_counter() - began
        point("local.replica_done", replica)

    def _write(self, replica: int, slot: Slot, trained: Trained) -> None:
        """Write a replica's change to a slot, and put parameters and buffers back to the boundary."""
        weight = trained.ended.weight
        error = trained.state.get(ERROR, {}).get(0)
        with torch.no_grad():
            for part in slot.tail:
                part.zero_()
            self._changes.write(replica, slot, self._start, weight, error)
            for (_, parameter), start in zip(self._folder.trained, self._start, strict=True):
                parameter.copy_(start)
            slot.scalars.copy_(torch.tensor([weight, trained.weighted_loss], dtype=torch.float64))
            self._folder.buffers.take_changes(slot.buffers, weight)

    def _merge(self, node: Node, slot: Slot) -> None:
        """Add a leaf to the nodes of this member, as far up the tree as it goes."""
        nodes, layout, num_leaves = self._members.slots.nodes, self._changes.layout, self.num_leaves
        while (other := sibling(node, num_leaves)) is not None and other in nodes:
            held = nodes.pop(other)
            out = Rows(slot.memory, 0)
            fold_rows(layout, {node: out, other: Rows(held.memory, 0)}, num_leaves, 0, layout.num_rows, [out])
            self._members.release(held)
            node = parent(node, num_leaves)
        nodes[node] = slot

    def _telemetry(self) -> StepTelemetry:
        team = self._members.team
        return StepTelemetry(
            leaves=self.num_computed,
            compute_s=self._seconds,
            last=Seconds(**self._clock.last),
            times=self._clock.times if self._clock.generation == team.generation else self._clock.times.of_workers(),
        )

    # -- results -------------------------------------------------------------------------------------

    @property
    def scalars(self) -> tuple[float, float]:
        """Total weight, scaled, and weighted loss. After the round."""
        if self.result is None:
            return math.nan, math.nan
        weight, weighted_loss = self.result.slot.scalars.tolist()
        return weight, weighted_loss

    def sums(self) -> dict[int, ReplicaSums]:
        """Return the sums of ``step.add`` by replica. After the round."""
        return {replica: from_bytes(self.ended[replica].sums) for replica in range(self.num_leaves)}


# -- between members ---------------------------------------------------------------------------------


def _tell(members: Members, ended: Mapping[int, Ended]) -> dict[int, Ended]:
    """Return what all replicas ended with, of which each member knows some. Collective."""
    found: dict[int, Ended] = {}
    for payload in members.gather(msgspec.msgpack.encode(dict(ended))):
        for replica, each in msgspec.msgpack.decode(payload, type=dict[int, Ended]).items():
            found.setdefault(replica, each)
    return dict(sorted(found.items()))


def _weights(ended: Mapping[int, Ended]) -> dict[int, float]:
    return {replica: each.weight for replica, each in ended.items()}


def _place(members: Members, shelf: Shelf, plan: Plan) -> dict[int, ReplicaState]:
    """Give each member the states of the replicas that it is to compute. Collective.

    Returns:
        What this member has got.

    Raises:
        StateLost: no member has a state.
    """
    holders = _holders(members, shelf)
    for replicas in plan.ranges:
        for replica in replicas:
            if replica not in holders:
                raise StateLost(
                    f"the state of replica {replica} was held by {listed(shelf.holders.get(replica, ()))}, and all of "
                    'them are lost: the run cannot go on from here. Go on from the newest checkpoint (resume="auto", '
                    "or unisono resume); with more copies= it survives more losses within one round"
                )
    return _deliver(members, shelf, deliveries(holders, plan.ranges))


def _copy(members: Members, shelf: Shelf, num_copies: int) -> None:
    """Bring each state to as many members as are to hold it, and note who does. Collective."""
    holders = _holders(members, shelf)
    moves = copies(holders, members.team.hosts, num_copies)
    shelf.held.update(_deliver(members, shelf, moves))
    ids = members.worker_ids
    shelf.holders = {
        replica: tuple(ids[rank] for rank in ranks) for replica, ranks in holders_after(holders, moves).items()
    }


def _holders(members: Members, shelf: Shelf) -> dict[int, list[int]]:
    """Return by replica the ranks that have its state. Collective."""
    holders: dict[int, list[int]] = {}
    for rank, payload in enumerate(members.gather(msgspec.msgpack.encode(sorted(shelf.held)))):
        for replica in msgspec.msgpack.decode(payload, type=list[int]):
            holders.setdefault(replica, []).append(rank)
    return holders


def _deliver(members: Members, shelf: Shelf, moves: Sequence[Move]) -> dict[int, ReplicaState]:
    """Bring states from one rank to others. Collective.

    Returns:
        What this member has got.
    """
    arrived: dict[int, ReplicaState] = {}
    for move in moves:
        point("local.delivering")
        header = shelf.headers[move.replica]
        takes = members.rank in move.targets
        own = pack(shelf.held[move.replica], "replica").tensors if move.source == members.rank else []
        tensors: list[Tensor] = []
        first = 0
        for group in _groups(header.kinds):
            sizes = [_padded(dtype, shape) for dtype, shape in group]
            if move.source == members.rank:
                piece = _joined(own[first : first + len(group)], sizes)
            else:
                piece = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu" if takes else "meta")
            members.deliver([Parcel(move.source, move.targets, piece)])
            if takes:
                tensors += _cut(piece, group, sizes)
            first += len(group)
        if takes:
            arrived[move.replica] = unpack(header.skeleton, tensors)
    return arrived


Kind = tuple[str, list[int]]


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def _padded(dtype: str, shape: Sequence[int]) -> int:
    return -(-_num_bytes(dtype, shape) // ALIGNMENT) * ALIGNMENT


def _groups(kinds: Sequence[Kind]) -> list[list[Kind]]:
    """Return the tensors that travel together, in their order."""
    groups: list[list[Kind]] = []
    size = GROUP_BYTES
    for kind in kinds:
        size += _padded(*kind)
        if size > GROUP_BYTES or not groups:
            groups.append([])
            size = _padded(*kind)
        groups[-1].append(kind)
    return groups


def _joined(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    piece = torch.zeros(sum(sizes), dtype=torch.uint8)
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        piece[start : start + len(content)] = content
        start += size
    return piece


def _cut(piece: Tensor, kinds: Sequence[Kind], sizes: Sequence[int]) -> list[Tensor]:
    tensors, start = [], 0
    for (dtype, shape), size in zip(kinds, sizes, strict=True):
        content = piece[start : start + _num_bytes(dtype, shape)]
        tensors.append(content.view(getattr(torch, dtype)).view(shape))
        start += size
    return tensors
