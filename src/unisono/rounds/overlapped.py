"""Rounds of local steps whose changes are summed while the next round is computed: ``run.local_steps(delay=1)``.

In iteration n the replicas of round n are computed. Then a thread exchanges what they have ended with, copies of their
states and their changes, while the script goes on to round n + 1; the mean change that is applied at the end of
iteration n is that of round n - 1. So a member may be one round ahead of the slowest one. Each sum is a **commit**, in
the order of the rounds, as in `unisono.rounds.pipeline`, whose way through a loss this is, too:

- whoever has a commit that another member has not seen sends the mean change. (The copies of states come before the
  sum, so all have these.)
- until all are in iteration n + 1, n the first round without a commit, nobody begins another replica;
- there all compute what is missing of round n and then of round n + 1, each from its own boundary, and sum it.

A replica of round n begins with a state that is copied to others just then, so whoever computes it takes a copy.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import msgspec
import torch
from torch import Tensor

from unisono.decisions.audits import NOTHING
from unisono.decisions.copies import deliveries
from unisono.decisions.groups import Grouping
from unisono.decisions.plan import Plan
from unisono.errors import StepError
from unisono.exchange import Combined, Share, combine
from unisono.exchange.flat import Slot
from unisono.faults import point
from unisono.microbatch.folding import GradientFolder
from unisono.microbatch.randomness import seed_at
from unisono.rounds.ahead import SumsAhead
from unisono.rounds.arrived import Arrived, Committed
from unisono.rounds.changes import ERROR, Changes
from unisono.rounds.copying import by_replica, copy_states, deliver
from unisono.rounds.gradient import StepContext
from unisono.rounds.grouping import Groups
from unisono.rounds.life import DELAYED
from unisono.rounds.line import DirectLine
from unisono.rounds.members import Summed
from unisono.rounds.replicas import Placed, ReplicaRound, Trained, Trainer, check_held, tell, weights
from unisono.rounds.team import LOST
from unisono.state.late import Late, MeanChange
from unisono.state.replicas import Replicas, ReplicaState, Shelf, check_alike, copied

__all__ = ["OWN", "Due", "LateRound", "LateTrainer", "Overlap", "Owner"]

OWN: Final = "own change"
"""Where a replica's change of the round before lies in its state, by parameter and then by buffer: no optimizer has
this name.
"""


class LateTrainer(Trainer, Protocol):
    """Trains replicas from the boundary of any round that is not committed."""

    def return_to_boundary(self) -> None:
        """Put buffers, and what all replicas have alike, back to the boundary, after a replica. Local."""


class LateRound(ReplicaRound):
    """One round. It is computed ahead of the sum of the round before, or played after a loss.

    Args:
        shelf: the states of the replicas at its boundary.
    """

    kind: Final = DELAYED  # type: ignore[misc]

    def __init__(
        self,
        owner: Overlap,
        context: StepContext,
        number: int,
        replicas: Replicas,
        num_replicas: int,
        trainer: LateTrainer,
        changes: Changes,
        folder: GradientFolder,
        start: Sequence[Tensor],
        shelf: Shelf,
        *,
        copies: int,
        groups: Groups,
    ) -> None:
        super().__init__(
            context, number, replicas, num_replicas, trainer, changes, folder, start, copies=copies, groups=groups
        )
        self.title = "the mean change of an earlier round, which is applied now"
        self.at = number
        self.after = self._after
        """The states of the replicas after it."""
        self.changes = changes
        self._late_trainer = trainer
        self._shelf = shelf
        self._owner = owner

    # -- ahead ---------------------------------------------------------------------------------------

    def plan_ahead(self) -> Plan:
        """Begin to compute; returns the plan. Local."""
        self._members.slots.nodes = {}
        plan = super().first_plan()
        super().begin(plan)
        if self.at > 0:  # a replica begins with its own change, which only its worker has
            self._compared = NOTHING
        return plan

    def place(self, plan: Plan) -> None:
        """Get the states of the replicas that this member is to compute. Collective.

        Raises:
            StateLost: no member has a state.
        """
        members, shelf = self._members, self._shelf
        held = [
            msgspec.msgpack.decode(each, type=list[int])
            for each in members.gather(msgspec.msgpack.encode(sorted(shelf.held)))
        ]
        holders = by_replica(held)
        check_held(members, holders, shelf, [replica for replicas in plan.ranges for replica in replicas])
        shelf.held.update(deliver(members, shelf, deliveries(holders, plan.ranges)))

    def compute_ahead(self, plan: Plan) -> Iterator[object]:
        """Yield the steps of this member's replicas, whose states it has."""
        self._placed = Placed(Grouping(plan), {}, {})
        for replica in plan.ranges[self._members.rank]:
            self._context.rounds.team.check()
            yield from self._compute(replica, keeps=False)
        yield from self._compute_others()

    def announce(self) -> bytes:
        """Return what goes with the sum, when this member has computed its replicas. Local."""
        return self._members.announce(self._context.agreement.add_to(self._telemetry()))

    def sum(self, line: DirectLine, combine_all: partial[Combined]) -> Combined:
        """Exchange what the replicas ended with, copies of their states, and the changes. Collective; in a thread."""
        self.ended = tell(line, self.ended)
        self._after.headers = {replica: each.header for replica, each in self.ended.items()}
        copy_states(line, self._after, self._copies)
        point("local.copied")
        self._changes.average(line, self._plan, weights(self.ended))
        combined = combine_all()
        return replace(combined, sent_bytes=combined.sent_bytes + line.sent_bytes)

    def work(self, plan: Plan, share: Share, own: bytes, out: Slot) -> partial[Combined]:
        """Return the exchange of this round, in the current generation. Local."""
        self._plan = plan
        members = self._members
        line = DirectLine(members.exchange, members.worker_ids, members.hosts)
        return partial(self.sum, line, partial(combine, members.exchange, share, own, out))

    # -- after a loss --------------------------------------------------------------------------------

    def first_plan(self) -> Plan:
        return self._owner.plan_of(self.at, self.num_leaves)

    def begin(self, plan: Plan) -> None:
        point("delay.again")
        self._compared = NOTHING
        self._members.slots.nodes = self._members.slots.ahead.pop(self.at, {})

    def compute(self, plan: Plan) -> Iterator[object]:
        self.place(plan)
        point("local.placed")
        yield from self.compute_ahead(plan)

    def combine(self, plan: Plan) -> Committed:  # type: ignore[override]
        members = self._members
        nodes, out = members.slots.nodes, self._owner.new_slot(self._changes.layout)
        members.team.check()
        with members.waiting():
            own = members.announce(self._telemetry())
            combined = self.work(plan, Share(self.num_leaves, plan.nodes, nodes), own, out)()
        for slot in nodes.values():
            members.release(slot)
        return self._owner.note(self, combined, None)

    def finish(self) -> None:
        point("committed")
        self._owner.finish(self.at)
        self._clock.switch("other")

    # -- one replica ---------------------------------------------------------------------------------

    def _write(self, replica: int, slot: Slot, trained: Trained) -> None:
        """Write a replica's change to a slot, that of its buffers from its state, and go back to the boundary."""
        weight, own, first = trained.ended.weight, trained.state[OWN], len(self._start)
        with torch.no_grad():
            for part in slot.tail:
                part.zero_()
            self._changes.write(replica, slot, trained.start, weight, trained.state.get(ERROR, {}).get(0))
            slot.scalars.copy_(torch.tensor([weight, trained.weighted_loss], dtype=torch.float64))
            for index, (out, entry) in enumerate(zip(slot.buffers, self._changes.layout.buffers, strict=True)):
                out.copy_(own[first + index])
                if entry.dtype.is_floating_point:
                    out.mul_(weight)
            for (_, parameter), start in zip(self._folder.trained, self._start, strict=True):
                parameter.copy_(start)
        self._late_trainer.return_to_boundary()

    # -- when it is applied --------------------------------------------------------------------------

    def check(self, arrived: Arrived) -> None:
        """Compare what the members have said with the sum. Collective where they differ."""
        self._context.agreement.check(arrived.telemetry)


@dataclass
class Due:
    """What is applied at the end of an iteration."""

    change: MeanChange
    arrived: Arrived | None
    """None: it has come with the state of the run."""


class Owner(Protocol):
    """The strategy whose rounds overlap. All methods are local."""

    def remember(self, number: int) -> None:
        """Remember the boundary of a round, in which the script is."""

    def as_of(self, number: int) -> AbstractContextManager[None]:
        """Return a context in which the boundary of a round is in force."""

    def make(self, overlap: Overlap, context: StepContext, number: int, shelf: Shelf) -> LateRound:
        """Return a round, whose boundary is in force."""

    def note_end(self, round_: LateRound) -> None:
        """Note what all replicas of a round have ended with, and forget its boundary."""

    def change_of(self, round_: LateRound, arrived: Arrived) -> MeanChange:
        """Return the mean change of a round that is committed."""


class Overlap(SumsAhead[LateRound]):
    """The rounds of one ``run.local_steps(delay=1)``: computed, under way, and committed but not applied.

    Args:
        num_rounds: of the loop.
        first: iteration in which this member begins.
    """

    def __init__(
        self,
        context: StepContext,
        owner: Owner,
        replicas: Replicas,
        late: Late,
        num_rounds: int,
        first: int,
        device: torch.device,
    ) -> None:
        super().__init__(context, 1, num_rounds, first, device)
        self._owner = owner
        self._replicas = replicas
        self._late = late
        self._num_rounds = num_rounds
        self._shelves = {self._first: replicas.now}
        """By number of the round, the states with which its replicas begin."""
        self._taken: dict[int, set[int]] = {}
        """By number of the round, the replicas whose states this member keeps for the copies that are under way."""
        self._due: dict[int, Due] = {}
        self._summed: dict[int, LateRound] = {}
        self._placed: tuple[int, Sequence[Sequence[int]]] | None = None  # generation, and who has computed what
        loaded = late.take()
        numbers = list(range(max(0, first - 1), self._first))
        if [each.number for each in loaded] != numbers:
            raise StepError(
                f"at round {first} of a training in rounds with delay=1, the changes of the rounds {numbers} are not "
                f"applied yet, and the state that was loaded has those of {[one.number for one in loaded]}"
            )
        self._due = {each.number: Due(each, None) for each in loaded}
        self._take_over()
        late.current = lambda: [each.change for each in self._due.values()]

    # -- for the iteration ---------------------------------------------------------------------------

    def iterate(self, number: int) -> Generator[object, None, Due | None]:
        """Yield the steps of replicas in an iteration; returns what is applied after it (None: there is nothing).

        Collective: with all members that are at the same iteration, or at the one before.
        """
        self._has_reported = False
        self.num_computed, self.news = 0, ""
        self._owner.remember(number)
        if number < self._num_rounds:
            self._open[number] = None
            if not self._is_recovering:
                yield from self._compute_ahead(number)
        if not self._has_reported:
            self._members.finish_copies()
        if number == 0:
            seed_at(self._context.seed, "update", self._context.first_number, "delay")
            self._context.clock.switch("update")
            return None
        point("delay.waiting")
        while number - 1 not in self._due:
            if self._is_recovering:
                yield from self._compute_missing(number)
            else:
                self._wait_for(number - 1)
        return self._take(number - 1)

    @property
    def playing(self) -> int | None:
        """The round that is computed after a loss; None: none is."""
        return self._playing

    def take_state(self, number: int, replica: int) -> ReplicaState:
        """Return the state with which a replica begins; the caller may change its tensors. Local."""
        shelf = self._shelves[number]
        if number <= self._first:  # all have their copies
            return shelf.take(replica)
        self._taken.setdefault(number, set()).add(replica)
        state: ReplicaState = copied(shelf.held[replica])
        return state

    # -- computing -----------------------------------------------------------------------------------

    def _compute_ahead(self, number: int) -> Iterator[object]:
        self._rounds.go_on()
        self._open[number] = round_ = self._make(number)
        self._computing = number
        try:
            plan = round_.plan_ahead()
            self.news = round_.news
            if self._moves(plan):
                with self._members.waiting():
                    self.drain()
                round_.place(plan)
            point("local.placed")
            yield from round_.compute_ahead(plan)
            self._submit(number, round_, plan)
            point("delay.under_way")
        except LOST as lost:
            self._rounds.regroup(lost)

    def _make(self, number: int) -> LateRound:
        context = replace(self._context, agreement=copy(self._context.agreement))
        round_ = self._owner.make(self, context, number, self._shelves[number])
        self._shelves[number + 1] = round_.after
        return round_

    def _moves(self, plan: Plan) -> bool:
        """Return whether states may have to move before this plan is computed; the same on all members."""
        before, self._placed = self._placed, (self._members.team.generation, plan.ranges)
        return self._members.size == 1 or before != self._placed

    def _submit(self, number: int, round_: LateRound, plan: Plan) -> None:
        own = round_.announce()
        share = self._set_aside(number, round_, plan)
        self._under_way.submit(number, share, round_.work(plan, share, own, self.new_slot(round_.changes.layout)))

    def note(self, round_: LateRound, combined: Combined, share: Share | None) -> Committed:
        """Take the committed sum of a round; returns what is kept of it for members that have not seen the commit."""
        summed = self._members.summed(combined)
        arrived = Arrived(round_.at, combined.slot, combined.digest, {}, False, summed, share)
        self._note(round_, arrived)
        return Committed(combined.slot.layout, arrived)

    def _note(self, round_: LateRound, arrived: Arrived) -> None:
        self._owner.note_end(round_)
        if not self._is_left:
            self._due[round_.at] = Due(self._owner.change_of(round_, arrived), arrived)
            self._summed[round_.at] = round_

    def finish(self, number: int) -> None:
        """Note that a round is committed: all members have their copies of the states after it."""
        round_ = self._open.pop(number, None)
        self._first = number + 1
        self._shelves.pop(number, None)
        self._taken.pop(number, None)
        if round_ is not None and not self._is_left:
            self._replicas.now = round_.after
            for replica in self._taken.pop(number + 1, ()):
                round_.after.held.pop(replica, None)

    # -- applying ------------------------------------------------------------------------------------

    def _take(self, number: int) -> Due:
        due, round_ = self._due.pop(number), self._summed.pop(number, None)
        arrived = due.arrived
        if arrived is not None and arrived.summed is not None:
            assert round_ is not None
            check_alike({replica: each.digests for replica, each in round_.ended.items()})
            is_current = arrived.summed.generation == self._members.team.generation
            if arrived.share is not None and is_current:
                if not arrived.is_stale:
                    self._members.note(arrived.summed)
                    self._members.balancing.observe(list(arrived.telemetry.values()), arrived.share)
                round_.check(arrived)
            finished = self._rounds.finished
            self._spare.retire(arrived.slot, finished.arrived.slot if isinstance(finished, Committed) else None)
        if due.change.scalars[0] == 0.0:
            raise StepError(f"all micro-batches of round {number} have weight 0: there is nothing to average")
        point("delay.applied")
        return due

    # -- after a loss --------------------------------------------------------------------------------

    def _compute_missing(self, number: int) -> Iterator[object]:
        """Compute and sum what is missing of the rounds under way, one after the other. Collective."""
        self._resumes_at = number
        for each in list(self._open):
            with self._owner.as_of(each):
                round_ = self._open[each]
                if round_ is None:
                    self._open[each] = round_ = self._make(each)
                self._playing = each
                before = round_.num_computed
                try:
                    yield from self._rounds.play(round_)
                finally:
                    self._playing = None
                self.num_computed += round_.num_computed - before
            if any(report.at > number for report in self._rounds.reports()):
                break  # that commit has come from a member that is through with this iteration
        else:
            self._is_recovering = False
        self._resumes_at = None

    # -- as `SumsAhead` needs it -----------------------------------------------------------------------

    def _arrived_sums(self) -> Iterable[Arrived]:
        return [due.arrived for due in self._due.values() if due.arrived is not None]

    def _has_arrived(self, number: int) -> bool:
        return number in self._due

    def redo(self) -> None:
        if not self._is_left:
            raise AssertionError("rounds of local steps with a delay are not audited")

    def interrupt(self) -> None:
        self._placed = None
        super().interrupt()

    def _take_given(self, number: int, summed: Summed) -> Arrived:
        arrived = Arrived(number, summed.slot, summed.digest, {}, False, summed)
        round_ = self._open.get(number)
        if round_ is not None:
            self._note(round_, arrived)
        return arrived

    def _num_leaves(self) -> int:
        return next((each.num_leaves for each in self._open.values() if each is not None), 1)

    def _forget(self) -> None:
        if self._first < self._num_rounds or self._due:  # how far the sums are is not the same on all members
            self._replicas.now = Shelf()
        self._late.current = tuple
        self._due.clear()
        self._summed.clear()
