"""The round of local steps: each leaf is a replica that trains for some steps by itself; then all are averaged.

A worker computes the replicas that the plan gives it, one after the other, each from the parameters at the round's
boundary. What a replica has changed (parameters at the boundary minus parameters afterwards, times the weight of its
samples) is a leaf of the summation tree, in the place of a gradient. So the mean over the replicas has the same bits
whoever has computed which of them.

1. **place**: whoever is to compute a replica gets its state from a member that holds it. Where there are more members
   than replicas, several compute one together (`unisono.strategies.local.grouping`);
2. the replicas are computed. Nobody waits for another replica meanwhile. A member that hears of a loss finishes its
   replica, unless the loss is one of those with whom it computes that;
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

from unisono.core.errors import DivergenceError, StateLost
from unisono.core.events import Seconds
from unisono.core.holdings import Holders, computed, copied, handed_over, holders_of, keepers
from unisono.core.plan import Plan
from unisono.core.plan import plan as even_plan
from unisono.core.rehearsals import Twice
from unisono.core.telemetry import StepTelemetry, in_microseconds
from unisono.core.tree import Node, leaf, parent, sibling
from unisono.core.words import NAMES_THE_LINE, listed
from unisono.engine.exchange import Share
from unisono.engine.exchange.flat import FlatLayout, Rows, Slot, fold_rows
from unisono.engine.microbatch.folding import Fingerprint, GradientFolder
from unisono.engine.rounds import Dispute
from unisono.engine.rounds.clock import Clock
from unisono.engine.rounds.gradient import StepContext
from unisono.engine.rounds.members import Members, Summed
from unisono.engine.rounds.moving import MovingRound, move
from unisono.engine.state.packing import from_bytes
from unisono.strategies.local.changes import ERROR, Changes
from unisono.strategies.local.grouping import Grouping, Groups, Seat, groups_of
from unisono.strategies.local.replica_states import Header, Replicas, ReplicaState, Shelf, check_alike
from unisono.system.faults import point

__all__ = ["LeavingRound", "ReplicaEnd", "ReplicaRound", "Trained", "Trainer", "check_held"]

ReplicaSums = dict[str, Tensor]


class ReplicaEnd(msgspec.Struct, frozen=True):
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
    ended: ReplicaEnd
    first: Fingerprint | None = None
    """Of the first micro-batch of its first step, if it was asked for."""


class Trainer(Protocol):
    """Trains replicas from the round's boundary; yields their steps to the script."""

    def train(self, replica: int, *, compares: bool, keeps: bool) -> Generator[object, None, Trained]:
        """Train a replica for its steps, with the group that this member is in, and return what came out.

        Args:
            compares: take the fingerprint of its first micro-batch, which another member computes as well.
            keeps: leave the state with which the replica begins as it is.

        Raises:
            PeerLost, DeadlineExceeded: a member of the group was lost.
        """

    def rehearse(self, replica: int, *, fetches: bool = False) -> Generator[object, None, Fingerprint | None]:
        """Compute the first step of a replica of another member, and forget it.

        Args:
            fetches: wherever its batch comes from.

        Returns:
            The fingerprint of its first micro-batch; None: its batch does not come from where others come.
        """


@dataclass
class CommittedRound:
    """A finished round, kept so that this member can stand by when others repeat it."""

    members: Members
    replicas: Replicas
    step: int
    layout: FlatLayout
    digest: int
    ended: Mapping[int, ReplicaEnd]
    copies: int
    changes: Changes
    groups: Groups
    counts: bool = True
    """False: members have computed different values, and the round will be done again."""

    def stand_by(self, plan: Plan) -> None:
        shelf = self.replicas.before if self.copies else None
        plan = _place(self.members, shelf, plan, self.groups, able=False)[0].plan
        _tell(self.members, self.ended)
        if self.copies:
            _copy_states(self.members, self.replicas.now, self.copies)
        self.changes.average(self.members, plan, _weights(self.ended))
        summed = self.members.sum(Share(plan.num_leaves, plan.nodes, {}), StepTelemetry())
        self.members.release(summed.slot)
        digest = self.changes.digest(summed.digest)
        if digest != self.digest and self.counts:
            raise DivergenceError(
                f"round {self.step} was recomputed after a loss, and the mean of its replicas has digest "
                f"{digest:016x}, not {self.digest:016x}. Either a replica's steps do not give the same result on every "
                "worker (see docs/guarantees.md for what a step may depend on), or the hardware of a worker is "
                f"broken. If it is the script: {NAMES_THE_LINE}"
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
    unit: Final = "the first micro-batch of replica"

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
        groups: Groups,
    ) -> None:
        self.num_leaves = num_replicas
        self.title = f"a round of {num_replicas} replicas"
        self.news = ""
        self.result: Summed | None = None
        self.ended: dict[int, ReplicaEnd] = {}
        self.num_computed = 0
        self.digest = 0
        self._context = context
        self._number = number
        self._replicas = replicas
        self._trainer = trainer
        self._compared = Twice()
        self._keeps = False
        self._committed: CommittedRound | None = None
        self._changes = changes
        self._folder = folder
        self._start = start
        self._copies = copies
        self._groups = groups
        self._grouping: Grouping | None = None
        self._members = context.rounds.members
        self._trial: frozenset[int] = frozenset()  # the ranks of newcomers of which nothing is summed
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
        self._trial = trial = self._context.agreement.on_trial(self.number)
        if self._members.size - len(trial) > self.num_leaves:
            return even_plan(self._members.size, self.num_leaves)
        plan, self.news = self._members.balancing.decide(self.num_leaves, everybody=self._number == 0, trial=trial)
        return plan

    def begin(self, plan: Plan) -> None:
        agreement = self._context.agreement
        agreement.start_step(self._number, self.number)
        # The members of a group compare what they compute among themselves.
        is_each_alone = 1 < self._members.size <= self.num_leaves + len(self._trial)
        self._compared = agreement.compared(plan, 0) if is_each_alone else Twice()
        self._keeps = agreement.may_be_disputed

    def compute(self, plan: Plan) -> Iterator[object]:
        """Yield the steps of this member's replicas to the script."""
        shelf = self._replicas.now if self._copies else None
        able = self._members.rank not in self._trial
        grouping, holders = _place(self._members, shelf, plan, self._groups, able=able)
        self._grouping = grouping
        if self._copies:
            self._replicas.before = Shelf()  # whoever has come to this round has finished the one before
        point("local.placed")
        rank = self._members.rank
        together = {grouping.plan.ranges[group[0]][0]: group for group in grouping.groups if len(group) > 1}
        kept_by = keepers(holders, together, self._copies) if self._copies else {}
        for replica in grouping.replicas(rank):
            if not grouping.group_of(rank):
                self._context.rounds.team.check()
            yield from self._compute(replica, keeps=self._keeps or rank in kept_by.get(replica, ()))
        yield from self._compute_others()
        self._clock.switch("exchange")

    def _compute_others(self) -> Iterator[object]:
        """Yield the first steps of replicas of another member, whose first micro-batches are compared."""
        for other in self._compared.other:
            found = yield from self._trainer.rehearse(other, fetches=self._members.rank in self._trial)
            if found is not None:
                self._context.agreement.note_other(msgspec.structs.replace(found, leaf=other))

    def combine(self, plan: Plan) -> CommittedRound:
        """Exchange what the replicas ended with, and sum what they have changed: the commit of the round."""
        point("before_combine")
        members = self._members
        assert self._grouping is not None
        plan = self._grouping.plan
        with members.waiting():
            self.ended = _tell(members, self.ended)
            check_alike({replica: each.digests for replica, each in self.ended.items()})
            if self._copies:
                self._after.headers = {replica: each.header for replica, each in self.ended.items()}
                _copy_states(members, self._after, self._copies)
            point("local.copied")
            self._changes.average(members, plan, _weights(self.ended))
        telemetry = msgspec.structs.replace(self._telemetry(), compared=self._context.agreement.says())
        self.result = summed = members.sum(Share(self.num_leaves, plan.nodes, members.slots.nodes), telemetry)
        members.slots.results.append(summed.slot)
        self.digest = self._changes.digest(summed.digest)
        self._replicas.before, self._replicas.now = self._replicas.now, self._after
        self._committed = CommittedRound(
            members,
            self._replicas,
            self._number,
            self._changes.layout,
            self.digest,
            self.ended,
            self._copies,
            self._changes,
            self._groups,
        )
        return self._committed

    def interrupt(self) -> Collection[Node]:
        self._clock.switch("waiting")
        self._compared, self._trial = Twice(), frozenset()
        self._groups.leave()
        return list(self._members.slots.nodes)

    def finish(self) -> None:
        summed, committed = self.result, self._committed
        assert summed is not None
        assert committed is not None
        point("committed")
        committed.counts = self._context.check(summed)
        self._clock.switch("other")
        self._clock.note(summed.wait, summed.network_s, summed.generation)

    # -- where members have computed different values -----------------------------------------------------

    @property
    def dispute(self) -> Dispute | None:
        """None, once the round is over: its result counts."""
        return self._context.agreement.dispute

    def undo(self) -> None:
        """Let the states be those of the boundary again, because the round is done again. Local."""
        self._replicas.now, self._replicas.before = self._replicas.before, Shelf()

    def compute_uncounted(self, leaf: int) -> Generator[object, None, Mapping[int, int]]:
        """Yield the first step of a replica, of which nothing is summed; return the digest of its first micro-batch, at
        the only place.
        """
        self._groups.leave()  # after a loss, members may have computed a replica together; now each computes by itself
        found = yield from self._trainer.rehearse(leaf, fetches=True)
        assert found is not None
        return found.by_place

    # -- one replica ---------------------------------------------------------------------------------

    def _compute(self, replica: int, *, keeps: bool) -> Iterator[object]:
        began = time.perf_counter()
        compares = replica in self._compared.own
        trained = yield from self._trainer.train(replica, compares=compares, keeps=keeps)
        if trained.first is not None:
            self._context.agreement.note_own(msgspec.structs.replace(trained.first, leaf=replica))
        node, slot = leaf(replica, self.num_leaves), self._members.new_slot()
        self._write(replica, slot, trained)
        if self._is_handed_in(replica):
            self._merge(node, slot)
        else:
            self._members.release(slot)
        self.ended[replica] = trained.ended
        if self._copies:
            self._after.held[replica] = trained.state
        self.num_computed += 1
        self._seconds += time.perf_counter() - began
        point("local.replica_done", replica)

    def _is_handed_in(self, replica: int) -> bool:
        """Return whether this member is the one of its group that hands in the replica's change."""
        assert self._grouping is not None
        return replica in self._grouping.plan.ranges[self._members.rank]

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
            compute_s=in_microseconds(self._seconds),
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


def _tell(members: Members, ended: Mapping[int, ReplicaEnd]) -> dict[int, ReplicaEnd]:
    """Return what all replicas ended with, of which each member knows some. Collective."""
    found: dict[int, ReplicaEnd] = {}
    for payload in members.gather(msgspec.msgpack.encode(dict(ended))):
        for replica, each in msgspec.msgpack.decode(payload, type=dict[int, ReplicaEnd]).items():
            found.setdefault(replica, each)
    return dict(sorted(found.items()))


def _weights(ended: Mapping[int, ReplicaEnd]) -> dict[int, float]:
    return {replica: each.weight for replica, each in ended.items()}


def _place(
    members: Members, shelf: Shelf | None, plan: Plan, groups: Groups, *, able: bool
) -> tuple[Grouping, Holders]:
    """Form the groups, and give each member the states of the replicas that it is to compute. Collective.

    Args:
        shelf: the states at the boundary; None: replicas keep none.
        able: this member can compute replicas of this round.

    Returns:
        Who computes what, and by replica the ranks that have its state at the boundary; none where replicas keep none.

    Raises:
        StateLost: no member has a state.
    """
    todo = [replica for replicas in plan.ranges for replica in replicas]
    seats: list[Seat] = []
    if shelf is not None or members.size > len(todo):
        own = groups.seat(shelf.held if shelf is not None else (), able=able)
        seats = [msgspec.msgpack.decode(each, type=Seat) for each in members.gather(msgspec.msgpack.encode(own))]
    grouping = groups_of(plan, members.team.hosts, [seat.able for seat in seats]) if seats else Grouping(plan)
    groups.take(members, grouping, seats)
    if shelf is None:
        return grouping, {}
    now = holders_of([seat.held for seat in seats])
    check_held(members, now, shelf, todo)
    wanted = computed(now, [grouping.replicas(rank) for rank in range(members.size)])
    move(members, shelf, now, wanted)
    return grouping, wanted


def check_held(members: Members, holders: Holders, shelf: Shelf, todo: Sequence[int]) -> None:
    """Check that the states of the replicas that are to be computed are held by somebody.

    Args:
        holders: by replica, the ranks that have its state.

    Raises:
        StateLost: no member has a state.
    """
    for replica in todo:
        if replica not in holders:
            raise StateLost(
                f"the state of replica {replica} was held by {listed(shelf.holders.get(replica, ()))}, and all of them "
                f"are lost: the run cannot continue from here. Resume from {members.newest()}; with more copies= a run "
                "survives more losses within one round"
            )


def _copy_states(members: Members, shelf: Shelf, num_copies: int) -> None:
    """Bring each state to as many members as are to hold it, and note who does. Collective."""
    payloads = members.gather(msgspec.msgpack.encode(shelf.here()))
    now = holders_of([msgspec.msgpack.decode(payload, type=list[int]) for payload in payloads])
    wanted = copied(now, members.team.hosts, num_copies)
    move(members, shelf, now, wanted)
    shelf.holders = _by_id(members, wanted)


class LeavingRound(MovingRound):
    """Members that stay get the states that they would lack, with as many copies as the run wants.

    Args:
        replicas: at a boundary.
        num_copies: how many members keep the state of each replica.
    """

    def __init__(self, members: Members, replicas: Replicas, num_copies: int, clock: Clock) -> None:
        title = "the states of replicas moving to the workers that stay"
        super().__init__(members, replicas.now, title, clock)
        self._shelf = replicas.now
        self._num_copies = num_copies

    def choose(self, now: Holders, staying: Sequence[int]) -> Mapping[int, tuple[str, ...]]:
        return _by_id(self._members, handed_over(now, staying, self._num_copies))

    def finish(self) -> None:
        self._shelf.holders = self.wanted


def _by_id(members: Members, holders: Holders) -> dict[int, tuple[str, ...]]:
    return {replica: tuple(members.worker_ids[rank] for rank in ranks) for replica, ranks in holders.items()}
