"""The sum of a step's gradients over its micro-batches: the round that trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from torch import Tensor

from unisono.core.cursor import Cursor, StepPosition
from unisono.core.errors import DivergenceError
from unisono.core.events import Seconds
from unisono.core.plan import Plan
from unisono.core.rehearsals import Twice, is_compared
from unisono.core.routes import Ranges, Route, rows_for
from unisono.core.telemetry import StepTelemetry, in_microseconds
from unisono.core.tree import Node
from unisono.core.waits import Wait
from unisono.core.words import NAMES_THE_LINE
from unisono.engine.exchange import Share
from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.microbatch.data import BatchSource
from unisono.engine.microbatch.doubts import Doubts
from unisono.engine.microbatch.folding import Fingerprint, GradientFolder
from unisono.engine.microbatch.guards import Guards
from unisono.engine.microbatch.losses import Microbatch, Reduction, check_losses
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds import Dispute, Round
from unisono.engine.rounds.agreement import Agreement
from unisono.engine.rounds.clock import Clock
from unisono.engine.rounds.finite import Finiteness, NotFinite
from unisono.engine.rounds.gathering import SumsRound
from unisono.engine.rounds.life import DISPUTE, STEP, Rounds
from unisono.engine.rounds.members import Helping, Members, Summed
from unisono.engine.rounds.taps import Computed, Place, Tap
from unisono.engine.rounds.team import LOST
from unisono.engine.state.carried import Carried
from unisono.engine.state.packing import digest_of_batch
from unisono.engine.state.sums import Total, as_sum
from unisono.engine.state.tracked import Tracked
from unisono.system import accelerators
from unisono.system.faults import point
from unisono.system.reading import read

__all__ = ["CommittedStep", "GradientRound", "Pass", "StepContext"]


@dataclass
class StepContext:
    """Everything that the steps of one ``run.steps`` share."""

    rounds: Rounds
    folder: Callable[[], GradientFolder]
    """Returns the folder of the parameters that are trained now. Collective if these have changed."""
    fetcher: BatchSource
    cursor: Cursor
    seed: int
    phase: int
    first_number: int
    """Steps that earlier calls of ``run.steps`` made: random numbers never repeat within a run."""
    note_plan: Callable[[int, Plan, Sequence[int], int], None]
    """Callback: (step, its plan, micro-batches that are computed as well to compare them, pass), for loader processes.
    """
    guards: Guards
    agreement: Agreement
    clock: Clock
    tracked: Tracked
    finiteness: Finiteness
    doubts: Doubts
    reduction: Reduction = "mean"
    """What the losses are, over the samples of a micro-batch."""
    replica: str = ""
    """The replica and the round whose steps these are, as messages name them; "": they are the steps of the run."""
    first_of_round: int = 0
    """The first step of that round."""

    def name(self, number: int) -> str:
        """Return a step of this loop as messages name it: by its number within the run."""
        if self.replica:
            return f"inner step {number - self.first_of_round} of {self.replica}"
        return f"step {self.first_number + number}"

    def check(self, summed: Summed) -> bool:
        """Compare what all members have sent with a sum; return whether the sum counts. Collective where some differ.

        Raises:
            DivergenceError: members of equal arithmetic have other bits.
        """
        return self.agreement.check(summed.compared, is_disputed=bool(self.rounds.follows(DISPUTE)))


@dataclass(frozen=True)
class Pass:
    """One pass over the global batch of a step."""

    number: int = 0
    """From 0."""
    reseed: bool = False
    """Other random numbers than in the first pass."""

    def seed(self, seed: int, place: str, *position: int) -> None:
        """Set all generators for a position of this pass."""
        own = ("pass", self.number) if self.number and (self.reseed or place == "update") else ()
        seed_at(seed, place, *position, *own)


@dataclass
class CommittedStep:
    """A finished step, kept so that this member can stand by when others repeat it."""

    members: Members
    name: str
    layout: FlatLayout
    digest: int
    new_sums: bool
    routes: Callable[[], tuple[Route, ...]] = tuple
    """Returns those of this step, between the members that there are."""
    counts: bool = True
    """False: members have computed different values, and the step will be done again."""

    def stand_by(self, plan: Plan) -> None:
        telemetry = StepTelemetry(new_sums=self.new_sums)
        summed = self.members.sum(Share(plan.num_leaves, plan.nodes, {}, self.routes()), telemetry)
        self.members.release(summed.slot)
        if summed.digest != self.digest and self.counts:
            raise DivergenceError(
                f"{self.name} was recomputed after a loss and its sums have digest {summed.digest:016x}, not "
                f"{self.digest:016x}. Either a micro-batch does not give the same gradient on every worker (see "
                "docs/guarantees.md for what a micro-batch may depend on), or the hardware of a worker is broken. If "
                f"it is the script: {NAMES_THE_LINE}"
            )


class _Read(NamedTuple):
    """What Python looks at in the sum of a step, on the CPU, beside the total weight and the weighted loss."""

    used: Sequence[int]
    may_break: bool
    """Of the buffers; see `unisono.engine.state.buffers.Buffers.may_break`."""
    totals: Mapping[str, Total]
    """Of ``step.add``."""
    seen: Sequence[float]
    """Of the gradients; see `unisono.engine.rounds.finite.Finiteness.sums_of`."""


class GradientRound:
    """One pass over a global batch: each member's micro-batches go to the script, and their gradients are summed.

    Attributes:
        microbatch: the one that is being loaded or computed; None outside of one.
        news: why the plan differs from that of the step before; "" where it does not.
        result: the means, once the round is over.
        totals: of ``step.add``, by name, once the result is applied.
        position: of the step within ``run.steps``.
    """

    kind = STEP
    unit: Final = "micro-batch"

    def __init__(
        self, context: StepContext, position: StepPosition, folder: GradientFolder, turn: Pass | None = None
    ) -> None:
        self.turn = turn if turn is not None else Pass()
        self.num_leaves = position.num_leaves
        nth = f"pass {self.turn.number + 1} over " if self.turn.number else ""
        self.title = f"{nth}a step of {position.num_leaves} micro-batches"
        self.totals: dict[str, Total] = {}
        self._sums = context.tracked.sums
        self._num_sums = len(self._sums.extras())
        self._carried = list(context.tracked.carried.values())
        self._values: dict[int, dict[str, Tensor]] = {}  # by leaf, what the script has added
        self._new_sums = False
        self._committed: CommittedStep | None = None
        self.microbatch: Microbatch | None = None
        self.news = ""
        self.result: Summed | None = None
        self._context = context
        self._members = context.rounds.members
        self.position = position
        self._clock = context.clock
        self._folder = folder
        self._compared = Twice()
        self._batches: dict[int, int] = {}  # the digests of those of a rehearsal, by leaf
        self._computed: list[int] = []
        self._is_scaled = False
        self._unread: list[Microbatch] = []  # with losses that nobody has looked at yet
        self._read: _Read | None = None
        self._routing = context.rounds.routing
        self._rows_here: Ranges = (range(folder.layout.tail_row),)  # of the sum: the gradients that this member gets
        self._stand_ins: Sequence[Tensor | None] = ()  # by parameter, for those that it does not get
        self._weight_of_last: float | Tensor = 0.0  # of the micro-batch that was folded last, scaled
        self._helped_s = 0.0  # waited for members that may need help
        self._scalars = (math.nan, math.nan)  # total weight, and weighted loss
        self._before = dict(context.clock.parts)
        folder.start_step(position.num_leaves, self.turn.number, compares=is_compared(self.number))
        context.guards.start_step()

    @property
    def slot(self) -> Slot:
        """The sums. After the round."""
        return self._members.slots.results[-1]  # it may have moved since the commit

    @property
    def num_computed(self) -> int:
        """Micro-batches that this member has computed."""
        return len(self._computed)

    @property
    def number(self) -> int:
        """Number of this step within the run."""
        return self._context.first_number + self.position.number

    @property
    def name(self) -> str:
        """The step, as messages name it."""
        return self._context.name(self.position.number)

    @property
    def loss(self) -> float:
        """The mean loss; where losses are sums, their sum; NaN where nothing counts. After the round."""
        weight, weighted_loss = self._scalars
        if not weight:
            return math.nan
        return weighted_loss / weight if self._context.reduction == "mean" else weighted_loss

    @property
    def has_gradient(self) -> bool:
        """Whether any micro-batch counts. After the round."""
        return self._scalars[0] != 0.0

    @property
    def mean_weight(self) -> float:
        """Weight of this step's loss in the mean over steps; 0 where nothing counts. After the round."""
        return self.weight if self._context.reduction == "mean" or not self.has_gradient else 1.0

    @property
    def weight(self) -> float:
        """The sum of the weights of all micro-batches. After the round."""
        return self._scalars[0] * self.scale

    def add(self, values: Mapping[str, Any]) -> None:
        """Add numbers to the sums of the step; within a micro-batch."""
        assert self.microbatch is not None
        own = self._values.setdefault(self.microbatch.leaf, {})
        for name, value in values.items():
            given = as_sum(name, value)
            own[name] = own[name] + given if name in own else given

    def sums(self) -> SumsRound | None:
        """Return the round that is to follow before the result is applied, if a sum's name is new."""
        summed = self.result
        assert summed is not None
        if not _has_new_sums(summed):
            return None
        return SumsRound(self._members, self._sums, self.num_leaves, self._values, self._compute_again)

    def more(self) -> Iterator[Round]:
        """Yield the rounds that are to follow before the result is applied, beside that of `sums`."""
        return iter(())

    @property
    def is_broken(self) -> bool:
        """Whether the sum is not finite, for the first time in the run, and this member has computed a part of it.

        With a loss scaler such gradients are expected, and the scaler skips their step. After the round.
        """
        if self._read is None or self._is_scaled or not self._computed:
            return False
        return self._context.finiteness.is_broken(self.slot, self.number, self._read.seen, self._rows_here)

    def find_not_finite(self) -> Iterator[Any]:
        """Yield micro-batches of this member to the script once more, to find the one that made the sum not finite.

        Does nothing where it is not `is_broken`. Local: no member waits for another.
        """
        if not self.is_broken:
            return
        found = NotFinite(step=self.number, microbatch=-1)
        try:
            for leaf in sorted(self._computed):
                yield from self._aside(leaf)
                if names := self._folder.not_finite():
                    samples = self._context.cursor.indices(self.position.number, leaf)
                    found = NotFinite(
                        step=self.number,
                        microbatch=leaf,
                        samples=list(samples),
                        parameters=names,
                        num_parameters=len(self._folder.trained),
                    )
                    break
        except LOST:  # the next round finds out who is lost
            pass
        self._clock.switch("other")
        self._context.finiteness.report(found)

    def apply(self, totals: Mapping[str, Total] | None = None) -> None:
        """Make the means the parameters' ``.grad``, and put buffers and carried rows in force.

        Args:
            totals: of the step's sums, if their round has given them.
        """
        slot, known = self.slot, self._read
        assert known is not None
        self.totals = dict(known.totals if totals is None else totals)
        self._folder.show(slot, known.used, may_break=known.may_break, stand_ins=self._stand_ins)
        for carried, views in self._with_views(slot.extras):
            carried.apply(views)
        self.turn.seed(self._context.seed, "update", self.number)
        self._clock.switch("update")

    @property
    def dispute(self) -> Dispute | None:
        """None, once the round is over: its result counts."""
        return self._context.agreement.dispute

    def compute_uncounted(self, leaf: int) -> Generator[Any, None, Mapping[int, int]]:
        """Yield a micro-batch to the script, of which nothing is summed; return its digests by place."""
        yield from self._aside(leaf)
        return self._folder.fingerprint(leaf).by_place

    # -- the round -----------------------------------------------------------------------------------

    def first_plan(self) -> Plan:
        # In the first step of a loop everybody computes something: what the script reads after its inner loop is set.
        is_first = self.position.number == 0
        trial = self._context.agreement.on_trial(self.number)
        plan, self.news = self._members.balancing.decide(self.num_leaves, everybody=is_first, trial=trial)
        return plan

    def begin(self, plan: Plan) -> None:
        agreement = self._context.agreement
        agreement.start_step(self.position.number, self.number)
        self._compared = agreement.compared(plan, self.turn.number)

    def compute(self, plan: Plan) -> Iterator[Any]:
        """Yield this member's micro-batches to the script, and fold the gradients."""
        compared = self._compared
        self._context.note_plan(self.position.number, plan, compared.other, self.turn.number)
        todo = plan.ranges[self._members.rank]
        helping = self._helping(plan)
        for index, leaf in enumerate(todo):
            if helping is not None and not helping.start(index, leaf):
                continue
            is_last = index == len(todo) - 1
            is_compared = leaf in compared.own
            following = None if is_last or is_compared else todo[index + 1]
            yield from self._compute_leaf(leaf, following, plan if is_last else None)
            if is_compared:
                self._context.agreement.note_own(self._fingerprint(leaf))
        # A newcomer's loader processes give what it asks for first, which nobody could foresee.
        fetcher, is_new = self._context.fetcher, self._members.rank in self._context.agreement.on_trial(self.number)
        for other in compared.other:
            at = self.position.number
            if fetcher.is_near(at, other) if is_new else fetcher.comes(at, other, self.turn.number):
                yield from self._rehearse(other)
        if helping is not None:
            yield from self._help(helping)
        self._clock.switch("exchange")

    def combine(self, plan: Plan) -> CommittedStep:
        """Sum the nodes of all members: the commit of the step."""
        self._close()
        nodes = self._members.slots.nodes
        telemetry = msgspec.structs.replace(self._telemetry(), compared=self._context.agreement.says())
        routes, layout, members = self._routes(), self._folder.layout, self._members
        self.result = summed = members.sum(Share(self.num_leaves, plan.nodes, nodes, routes), telemetry)
        members.slots.results.append(summed.slot)
        self._committed = CommittedStep(members, self.name, layout, summed.digest, _has_new_sums(summed), self._routes)
        if routes:
            ids = members.worker_ids
            self._rows_here = rows_for(routes, members.rank, range(layout.tail_row))
            self._stand_ins = self._routing.stand_ins(self._folder.trained, ids, ids[members.rank])
        return self._committed

    def _routes(self) -> tuple[Route, ...]:
        return self._routing.routes(self._folder.layout, self._folder.trained, self._members.worker_ids)

    def interrupt(self) -> Collection[Node]:
        self._clock.switch("waiting")
        self._compared = Twice()
        self._folder.copy_adopted()
        return list(self._members.slots.nodes)

    def finish(self) -> None:
        summed, committed = self.result, self._committed
        assert summed is not None
        assert committed is not None
        point("committed")
        self._note_progress(-1)
        committed.counts = self._context.check(summed)
        self._read_from(summed.slot)
        self._clock.switch("other")
        rank, seconds = summed.wait  # whoever was waited for last was late before as well
        self._clock.note(Wait(rank, seconds + self._helped_s), summed.network_s, summed.generation)

    def _read_from(self, slot: Slot) -> _Read:
        """Note and return what Python looks at in the sum, with one wait for the device."""
        sums = slot.extras[: self._num_sums]
        looks = bool(self._computed) and not self._is_scaled
        seen = self._context.finiteness.sums_of(slot, self.number, self._rows_here) if looks else []
        may_break = self._folder.buffers.may_break(slot.buffers)
        scalars, used, breaks, *others = read([slot.scalars, slot.used, may_break, *sums, *seen])
        weight, weighted_loss = scalars.tolist()
        self._scalars = weight, weighted_loss
        totals = self._sums.read(others[: len(sums)])
        self._read = _Read(used.tolist(), bool(breaks), totals, [*map(float, others[len(sums) :])])
        return self._read

    def _close(self) -> None:
        """Note that this member has computed its micro-batches."""
        self._check_losses()
        self._context.guards.finish_step(self.name)
        self._clock.switch("exchange")
        self._note_progress(-1)
        point("before_combine")
        self._folder.copy_adopted()
        self._folder.forget_last()

    def _check_losses(self) -> None:
        """Look at the losses of the micro-batches that this member has computed."""
        unread, self._unread = self._unread, []
        check_losses(unread)

    # -- one micro-batch -----------------------------------------------------------------------------

    def _compute_leaf(self, leaf: int, following: int | None, last_of: Plan | None) -> Iterator[Any]:
        """Yield one micro-batch, and fold its gradient.

        Args:
            following: the leaf that will probably be computed after this one.
            last_of: the plan, if this is the last leaf of it for this member.
        """
        self._clock.switch("data")
        batch = self._fetch(leaf)
        self._clock.switch("compute")
        point("before_backward", leaf)
        began = time.perf_counter()
        place = self._place(leaf, aside=False)
        taps = self._looking_at(place)
        self._folder.start_leaf(leaf, self._members.new_slot, following, keep=bool(taps))
        if last_of is not None:
            self._offer_rows(last_of)
        self.turn.seed(self._context.seed, "microbatch", self.number, leaf)
        for tap in taps:
            tap.before_microbatch(place, batch)
        given = time.perf_counter()
        if not self._is_empty:
            yield batch
        script_s = time.perf_counter() - given
        for slot in self._fold():
            self._members.release(slot)
        self._members.balancing.own_work.note(time.perf_counter() - began - script_s, script_s)
        self._tell(taps, place)
        self._computed.append(leaf)
        point("after_backward", leaf)

    def _rehearse(self, leaf: int) -> Iterator[Any]:
        """Yield a micro-batch that another member computes and sums, to compare the two gradients."""
        yield from self._aside(leaf)
        self._context.agreement.note_other(self._fingerprint(leaf))

    def _fingerprint(self, leaf: int) -> Fingerprint:
        return msgspec.structs.replace(self._folder.fingerprint(leaf), batch=self._batches.pop(leaf, 0))

    def _aside(self, leaf: int) -> Iterator[Any]:
        """Yield a micro-batch of which nothing is summed."""
        self._clock.switch("other")  # this time must not count for the pace of this member
        known = self._values.pop(leaf, None)
        try:
            yield from self._compute_apart(leaf)
        finally:  # also if a member is lost meanwhile
            self._values.pop(leaf, None)
            if known is not None:
                self._values[leaf] = known

    def _compute_apart(self, leaf: int) -> Iterator[Any]:
        """Yield a micro-batch whose gradient is not summed."""
        batch = self._fetch(leaf)
        place = self._place(leaf, aside=True)
        taps = self._looking_at(place)
        self._folder.start_leaf(leaf, self._members.new_slot, apart=True)
        self.turn.seed(self._context.seed, "microbatch", self.number, leaf)
        for tap in taps:
            tap.before_microbatch(place, batch)
        if not self._is_empty:
            yield batch
        self._fold()
        self._check_losses()
        self._tell(taps, place)

    def _compute_again(self, leaf: int) -> Iterator[Any]:
        """Yield a micro-batch of a member that was lost after the commit, for its sums."""
        self._clock.switch("other")
        yield from self._compute_apart(leaf)

    def _place(self, leaf: int, *, aside: bool) -> Place:
        return Place(step=self.number, turn=self.turn.number, leaf=leaf, aside=aside)

    def _looking_at(self, place: Place) -> list[Tap]:
        return [tap for tap in self._context.rounds.taps if tap.looks_at(place)]

    def _tell(self, taps: Sequence[Tap], place: Place) -> None:
        """Tell the taps that look at a micro-batch what it has given."""
        if not taps:
            return
        self._check_losses()
        fingerprint, factor = self._folder.fingerprint(place.leaf), float(self._weight_of_last)
        is_mean = self._context.reduction == "mean"
        loss = fingerprint.weighted_loss
        if is_mean:
            loss = loss / factor if factor else math.nan
        computed = Computed(
            fingerprint=fingerprint,
            gradients=self._folder.gradients_of_last(),
            weight=factor * self.scale,
            factor=factor if is_mean else 1.0,
            loss=loss,
        )
        for tap in taps:
            tap.after_microbatch(place, computed)

    def _helping(self, plan: Plan) -> Helping | None:
        return self._members.balancing.helping(plan)

    def _help(self, helping: Helping) -> Iterator[Any]:
        """Yield micro-batches of members that are late, as long as there is room for their sums."""
        while len(self._members.slots.nodes) <= 2 + self.num_leaves.bit_length():
            self._clock.switch("exchange")
            taken = helping.take()
            self._helped_s += self._clock.switch("exchange")
            if taken is None:
                return
            yield from self._compute_leaf(taken, None, None)

    def _fetch(self, leaf: int) -> Any:
        self._context.rounds.team.check()
        samples = partial(self._context.cursor.indices, self.position.number, leaf)
        self._note_progress(leaf, samples)
        self.microbatch = Microbatch(
            self._folder,
            self.name,
            leaf,
            num_samples=len(self.position.leaf(leaf)),
            samples=samples,
            scale=self.scale,
            doubts=self._context.doubts,
            num_microbatches=self.num_leaves,
            reduction=self._context.reduction,
        )
        for carried in self._carried:
            carried.open()
        if self._is_empty:
            return None
        batch = self._context.fetcher.fetch(self.position.number, leaf, self.turn.number)
        self.microbatch.note_batch(batch)
        if self._context.agreement.rehearses and leaf in (*self._compared.own, *self._compared.other):
            self._batches[leaf] = digest_of_batch(batch)  # before the script may change it
        return batch

    @property
    def _is_empty(self) -> bool:
        """Whether all samples of the current micro-batch are left out."""
        return self.microbatch is not None and self.microbatch.is_empty

    def _fold(self) -> list[Any]:
        """Fold the gradients of the micro-batch that the script has computed; returns slots that are free again."""
        microbatch, self.microbatch = self.microbatch, None
        assert microbatch is not None
        microbatch.finish()
        self._weight_of_last = microbatch.weight
        self._is_scaled |= microbatch.is_scaled
        if microbatch.unread:
            self._unread.append(microbatch)
        write = partial(self._write_extras, microbatch)
        # Where the script computes: it may go on there, and give memory back, before the sums here are done.
        with accelerators.on_stream(microbatch.stream):
            freed = self._folder.finish_leaf(microbatch.weight, microbatch.weighted_loss, write)
        self._context.guards.finish_microbatch(microbatch.where, self._folder.trained)
        return freed

    def _write_extras(self, microbatch: Microbatch, views: Sequence[Tensor]) -> None:
        values = self._values.setdefault(microbatch.leaf, {})
        if self._sums.fits(values):
            self._sums.write(values, views[: self._num_sums])
        else:
            self._new_sums = True
        for carried, own in self._with_views(views):
            carried.close(own, microbatch.leaf, microbatch.where)

    def _with_views(self, extras: Sequence[Tensor]) -> Iterator[tuple[Carried, Sequence[Tensor]]]:
        """Yield the tracked `Carried` with the extras of each."""
        start = self._num_sums
        for carried in self._carried:
            yield carried, extras[start : start + carried.num_extras]
            start += carried.num_extras

    def _offer_rows(self, plan: Plan) -> None:
        """Let the exchange know, while the last backward runs, which rows of this member's nodes are complete."""
        node, slot = self._folder.target
        planned = plan.nodes[self._members.rank]
        nodes = self._members.slots.nodes
        slots = {**{held: nodes[held] for held in nodes if held in planned}, node: slot}
        if set(slots) != set(planned):
            return
        share, folder = Share(plan.num_leaves, plan.nodes, slots, self._routes()), self._folder
        exchange = self._members.exchange

        def offer(rows_ready: int) -> None:
            try:
                exchange.offer(share, rows_ready)
            except LOST:
                folder.watch_rows(None)  # the combine will raise the same

        folder.watch_rows(offer)
        offer(0)

    # -- progress and telemetry ----------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """Power of two that divides all weights, without rounding, so that gradients have the magnitude of a mean."""
        if self._context.reduction == "sum":
            return 1.0
        return float(2.0 ** math.floor(math.log2(self.position.microbatch_size)))

    def _note_progress(self, leaf: int, samples: Callable[[], Sequence[int]] | None = None) -> None:
        team = self._context.rounds.team
        team.at(phase=self._context.phase, step=self.number, microbatch=leaf, samples=samples)

    def _telemetry(self) -> StepTelemetry:
        now, before, last = self._clock.parts, self._before, self._clock.last
        team = self._members.team
        return StepTelemetry(
            leaves=self.num_computed,
            data_s=in_microseconds(now["data"] - before["data"]),
            compute_s=in_microseconds(now["compute"] - before["compute"]),
            last=Seconds(**last),
            times=self._clock.times if self._clock.generation == team.generation else self._clock.times.of_workers(),
            new_sums=self._new_sums,
        )


def _has_new_sums(summed: Summed) -> bool:
    return any(each.new_sums for each in summed.telemetry.values())
