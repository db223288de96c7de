"""Steps whose sums are under way while the script goes on: the rounds of ``run.steps(delay=D)``.

In iteration t the script computes the micro-batches of step t; their sum is left to a thread (`Background`), and the
gradient that is applied is that of step t - D. So a member may be D steps ahead of the slowest one. The sums are
committed in the order of the steps, each as in `unisono.exchange`, so two members are never more than one commit apart,
however far apart their scripts are. Commits are what `unisono.rounds.life` counts.

**After a loss** the survivors meet (`unisono.rounds.life`), at whatever places of the script they are. A member that
has a commit which another has not seen sends it the result. From there on, until step n + D (n is the first step
without a commit, the same for all), nobody computes anything ahead, so all collective work comes in the order of the
script again, which is the same for all. In iteration n + D every member is in its inner loop, and needs the gradient of
step n: there all compute together what is missing of the steps n to n + D, one after the other, each with the
parameters and buffers of its own time, and go on as before.

Between two iterations nothing can be computed, because the micro-batches are the script's. Where members change, a
checkpoint is taken, or the script evaluates, the sums under way are waited for; if a member is lost just then, the
change or the checkpoint waits until they are done.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from unisono.decisions.plan import Plan
from unisono.decisions.tree import Node
from unisono.errors import DivergenceError, RunStopped, StepError
from unisono.exchange import Combined, Exchange, Share, combine
from unisono.exchange.flat import ROW_BYTES, FlatLayout, Slot
from unisono.exchange.slots import is_held
from unisono.faults import point
from unisono.microbatch.folding import GradientFolder
from unisono.microbatch.losses import Microbatch
from unisono.microbatch.randomness import seed_at
from unisono.rounds.background import Background, Task
from unisono.rounds.gradient import GradientRound, StepContext
from unisono.rounds.life import DELAYED
from unisono.rounds.members import Summed
from unisono.rounds.standing import plan_of
from unisono.rounds.sums import SumsRound
from unisono.rounds.team import LOST
from unisono.state.pending import Gradient
from unisono.state.sums import Total
from unisono.state.values import Values
from unisono.telemetry import StepTelemetry

__all__ = ["Arrived", "Pipeline"]


@dataclass
class Arrived:
    """The committed sum of a step."""

    number: int
    """Of the step within ``run.steps``."""
    slot: Slot
    """The means, in memory of this member's own."""
    digest: int
    totals: dict[str, Total]
    has_new_sums: bool
    """Micro-batches have added sums for which there was no room, and which are in nobody's totals yet."""
    summed: Summed | None = None
    """None: it has come with the state of the run."""
    share: Share | None = None
    """This member's part in the sum; None: the sum was made after a loss, or comes from another member."""
    round: DelayedRound | None = None
    is_stale: bool = False
    """What the members have said with it does not count any more."""

    @cached_property
    def scalars(self) -> tuple[float, float]:
        """The total weight, scaled, and the weighted loss. Read before the slot is used for another step."""
        weight, weighted_loss = self.slot.scalars.tolist()
        return weight, weighted_loss

    @property
    def telemetry(self) -> Mapping[str, StepTelemetry]:
        """What the members have said with it, by worker id."""
        return self.summed.telemetry if self.summed is not None else {}

    @property
    def sent_bytes(self) -> int:
        """Data that this member has sent to other hosts for it."""
        return self.summed.sent_bytes if self.summed is not None else 0


class _Gift(msgspec.Struct, frozen=True):
    """What a member sends with a result to members that have not seen the commit."""

    digest: int
    workers: list[str]
    telemetry: list[bytes]


@dataclass(frozen=True)
class _Committed:
    """The newest commit of a step, kept for members that have not seen it: they are sent the result."""

    layout: FlatLayout
    arrived: Arrived

    def stand_by(self, plan: Plan) -> None:
        raise AssertionError("the result of a delayed sum is sent to members that have not seen its commit")


class DelayedRound(GradientRound):
    """The sum of one step. It is computed ahead, or played after a loss, where it is a round like any other."""

    kind: Final = DELAYED  # type: ignore[misc]

    def __init__(self, pipeline: Pipeline, context: StepContext, number: int, folder: GradientFolder) -> None:
        super().__init__(context, context.cursor.position(number), folder)
        self.title = "the sum of an earlier step, whose gradient is applied now"
        self._pipeline = pipeline
        self.at = number
        self.layout = folder.layout
        self.num_sums = self._num_sums
        self._arrived: Arrived | None = None

    @property
    def slot(self) -> Slot:
        assert self._arrived is not None
        return self._arrived.slot

    @property
    def values(self) -> dict[int, dict[str, Tensor]]:
        """By micro-batch, what the script has added."""
        return self._values

    def compute_again(self, leaf: int) -> Iterator[object]:
        """Yield a micro-batch of a member that was lost after the commit, for its sums."""
        yield from self._compute_again(leaf)

    def compute_with(self, folder: GradientFolder) -> None:
        """Compute micro-batches with this folder, which may have room for more sums than that of the step."""
        self._folder, self._num_sums = folder, len(self._sums.extras())

    def look_back(self) -> Iterator[object]:
        """Yield a micro-batch of this step once more in a later iteration, to compare its gradient.

        Raises:
            DivergenceError: it is not the same.
        """
        own = self._context.agreement.own
        if own is None:
            return
        yield from self._aside(own.leaf)
        again = self._folder.fingerprint(own.leaf)
        if again.digest != own.digest:
            raise DivergenceError(
                f"micro-batch {own.leaf} of step {self.at} was computed again one step later, with the parameters and "
                "buffers that it had, and its gradient is not the same: "
                f"{own.difference(again, 'the first time', 'the second')}. After the loss of a worker, micro-batches "
                "of steps whose gradients are under way are computed again, and would change the result. Something in "
                "the inner loop depends on a variable that the script sets outside of it: compute it there from "
                "step.number, which is the number of the micro-batch's step, or keep it in a tracked buffer. Nothing "
                "was updated"
            )

    # -- ahead ---------------------------------------------------------------------------------------

    def plan_ahead(self) -> Plan:
        """Begin to compute ahead of the sums of earlier steps; returns the plan. Local."""
        plan = super().first_plan()
        super().begin(plan)
        return plan

    def announce(self) -> bytes:
        """Return what goes with the sum, when this member has computed its micro-batches. Local."""
        self._context.guards.finish_step(self.at)
        self._clock.switch("exchange")
        self._note_progress(-1)
        point("before_combine")
        self._folder.copy_adopted()
        return self._members.announce(self._context.agreement.add_to(self._telemetry()))

    # -- after a loss --------------------------------------------------------------------------------

    def first_plan(self) -> Plan:
        return self._pipeline.plan_of(self.at, self.num_leaves)

    def begin(self, plan: Plan) -> None:
        point("delay.again")
        self._folder.start_step(self.num_leaves, self.turn.number)
        self._context.guards.start_step()
        self._members.slots.nodes = self._members.slots.ahead.pop(self.at, {})

    def combine(self, plan: Plan) -> _Committed:  # type: ignore[override]
        self._context.guards.finish_step(self.at)
        self._clock.switch("exchange")
        self._note_progress(-1)
        point("before_combine")
        self._folder.copy_adopted()
        nodes, out = self._members.slots.nodes, self._pipeline.new_slot(self._folder.layout)
        self._members.team.check()
        with self._members.waiting():
            own = self._members.announce(self._telemetry())
            share = Share(self.num_leaves, plan.nodes, nodes)
            combined = combine(self._members.exchange, share, own, out)
        for slot in nodes.values():
            self._members.release(slot)
        return self._pipeline.note(self, combined, None)

    def finish(self) -> None:
        point("committed")
        self._pipeline.finish(self.at)
        self._clock.switch("other")

    # -- what needs the exchange while the script computes: it is in use for earlier steps ---------------

    def _helping(self, plan: Plan) -> None:
        return None

    def _offer_rows(self, plan: Plan) -> None:
        pass

    # -- when it is applied --------------------------------------------------------------------------

    def show(self, arrived: Arrived) -> None:
        """Take the committed sum as the result of this round."""
        self._arrived, self.result = arrived, arrived.summed
        self._scalars = arrived.scalars

    def check(self) -> None:
        """Compare what the members have said with the sum. Collective where they differ."""
        assert self.result is not None
        self._context.agreement.check(list(self.result.telemetry.values()))


class Pipeline:
    """The steps of one ``run.steps(delay=D)``: those that are computed, under way, and committed but not applied.

    It is the `unisono.rounds.Ahead` of the run.

    Args:
        context: of the loop; each step gets an agreement of its own.
        num_batches: global batches of the loop.
        first: iteration in which this member begins.
    """

    def __init__(self, context: StepContext, delay: int, num_batches: int, first: int) -> None:
        self._context = context
        self._delay = delay
        self._num_batches = num_batches
        self._rounds = context.rounds
        self._members = context.rounds.members
        self._tracked = context.tracked
        self._background: Background | None = None
        self._tasks: dict[int, tuple[Task[Combined], Share]] = {}
        self._open: dict[int, DelayedRound | None] = {}
        """The steps that are begun and not committed, in their order; None: this member has computed nothing of it."""
        self._first = min(first, num_batches)  # without a commit
        self._arrived: dict[int, Arrived] = {}
        self._values: dict[int, Values] = {}
        self._active: DelayedRound | None = None
        self._computing: int | None = None
        self._playing: int | None = None
        self._resumes_at: int | None = None  # the iteration in which this member computes what is missing
        self._shown: Slot | None = None
        self._free: list[Slot] = []
        self._applied: list[Arrived] = []  # their slots may still be sent to others
        self._held: list[dict[int, Sequence[tuple[int, int]]]] = []
        self._is_left = False
        # Others may have met this member after a loss already, and compute nothing ahead.
        self._is_recovering = not self._rounds.is_level
        self.news = ""
        self._layout = self._context.folder().layout
        self._device = self._context.folder().trained[0][1].device
        self._load(first)
        self.met([report.ahead for report in self._rounds.reports()])
        self._rounds.ahead = self
        self._members.drain = self.drain
        self._tracked.pending.current = self._pending

    def _load(self, first: int) -> None:
        loaded = self._tracked.pending.take()
        numbers = list(range(max(0, first - self._delay), self._first))
        if [each.number for each in loaded] != numbers:
            raise StepError(
                f"at iteration {first} of a training with delay={self._delay}, the gradients of the steps {numbers} "
                f"are not applied yet, and the state that was loaded has those of {[one.number for one in loaded]}"
            )
        for each in loaded:
            slot = each.to_slot(self._layout, self._device)
            self._arrived[each.number] = Arrived(each.number, slot, each.digest, each.totals, each.has_new_sums)

    # -- for the step --------------------------------------------------------------------------------

    @property
    def microbatch(self) -> Microbatch | None:
        """The micro-batch that is being loaded or computed; None outside of one."""
        return self._active.microbatch if self._active is not None else None

    @property
    def number(self) -> int | None:
        """The step whose micro-batches are being computed."""
        return self._active.at if self._active is not None else None

    @property
    def num_computed(self) -> int:
        """Micro-batches that this member has computed in the newest iteration."""
        return self._num_computed

    def add(self, values: Mapping[str, Any]) -> None:
        """Add numbers to the sums of the step; within a micro-batch."""
        assert self._active is not None
        self._active.add(values)

    def iterate(self, number: int) -> Generator[Any, None, Arrived | None]:
        """Yield the micro-batches of an iteration; returns the sum that is applied after it (None: there is none).

        Collective: with all members that are at the same iteration, or at the steps before.
        """
        folder = self._context.folder()
        self._check_layout(folder.layout)
        for _, parameter in folder.trained:
            parameter.grad = None
        self._has_reported = False
        self._num_computed, self.news = 0, ""
        if number < self._num_batches:
            yield from self._compute(number, folder)
        if not self._has_reported:
            self._members.finish_copies()
        due = number - self._delay
        if due < 0:
            seed_at(self._context.seed, "update", self._context.first_number + number, "delay")
            self._context.clock.switch("update")
            return None
        yield from self._arrive(due, number)
        return (yield from self._apply(due, folder))

    def _check_layout(self, layout: FlatLayout) -> None:
        """Check that the gradients under way are of the parameters that are trained now.

        Raises:
            StepError: they are of others.
        """
        ours, theirs = _shapes(layout), [_shapes(one.slot.layout) for one in self._arrived.values()]
        if (self._open and layout != self._layout) or any(ours != other for other in theirs):
            raise StepError(
                "the parameters that are trained, or the buffers of the model, have changed within run.steps(delay=), "
                "while gradients of the ones before are under way. Change them between two calls of run.steps"
            )
        self._layout = layout

    # -- computing -----------------------------------------------------------------------------------

    def _compute(self, number: int, folder: GradientFolder) -> Iterator[Any]:
        self._open[number] = None
        if self._members.size > 1 or self._is_recovering:
            self._values[number] = Values(self._tracked, self._values.get(number - 1))
        if not self._is_recovering:
            yield from self._compute_ahead(number, folder)
        if number == 0:  # the names of sums become known here, before the next step is laid out
            yield from self._arrive(0, number)
            yield from self._add_up(self._arrived[0])

    def _arrive(self, due: int, number: int) -> Iterator[Any]:
        """Wait for the commit of a step; after a loss, compute what is missing of it. Collective."""
        while due not in self._arrived:
            if self._is_recovering:
                yield from self._compute_missing(due, number)
            else:
                self._wait_for(due)

    def _compute_ahead(self, number: int, folder: GradientFolder) -> Iterator[Any]:
        self._rounds.go_on()
        self._open[number] = self._active = round_ = DelayedRound(self, self._own_context(), number, folder)
        self._computing = number
        try:
            plan = round_.plan_ahead()
            self.news = round_.news
            yield from round_.compute(plan)
            self._submit(number, round_, plan)
            self._active = None
            point("delay.under_way")
            yield from self._look_back(number - 1)
        except LOST as lost:
            self._rounds.regroup(lost)

    def _look_back(self, number: int) -> Iterator[Any]:
        """Compute a micro-batch of the step before again, where a rehearsal has left a fingerprint of it."""
        arrived = self._arrived.get(number)
        round_ = self._open.get(number) or (arrived.round if arrived is not None else None)
        if round_ is not None and number in self._values and round_.layout == self._layout:
            with self._as_of(number, round_):
                yield from round_.look_back()

    def _own_context(self) -> StepContext:
        """Return the context of one step: what several steps share, and comparisons of its own."""
        return replace(self._context, agreement=copy(self._context.agreement))

    def _submit(self, number: int, round_: DelayedRound, plan: Plan) -> None:
        own = round_.announce()
        self._has_reported, self._num_computed = True, round_.num_computed
        slots = self._members.slots
        slots.ahead[number], slots.nodes = slots.nodes, {}
        self._computing = None
        share = Share(round_.num_leaves, plan.nodes, dict(slots.ahead[number]))
        work = partial(_sum, self._members.exchange, share, own, self.new_slot(round_.layout))
        if self._background is None:
            self._background = Background(self._device)
        self._tasks[number] = (self._background.submit(work), share)

    def _wait_for(self, number: int) -> None:
        """Wait for the commit of a step, or meet the survivors of a loss. Collective."""
        self._context.clock.switch("exchange")
        point("delay.waiting")
        try:
            with self._members.waiting():
                while number not in self._arrived and self._tasks:
                    self._commit_next()
        except LOST as lost:
            self._rounds.regroup(lost)
        self._context.clock.switch("other")

    def _commit_next(self) -> None:
        number = next(iter(self._tasks))
        task, share = self._tasks[number]
        combined = task.wait()
        del self._tasks[number]
        for slot in self._members.slots.ahead.pop(number).values():
            self._members.release(slot)
        round_ = self._open[number]
        assert round_ is not None
        self._rounds.commit(self.note(round_, combined, share))
        self.finish(number)
        point("committed")

    def note(self, round_: DelayedRound, combined: Combined, share: Share | None) -> _Committed:
        """Take the committed sum of a step; returns what is kept of it for members that have not seen the commit."""
        summed = self._members.summed(combined)
        has_new = any(each.new_sums for each in summed.telemetry.values())
        totals = self._tracked.sums.read(combined.slot.extras[: round_.num_sums])
        number = round_.at
        arrived = Arrived(number, combined.slot, combined.digest, totals, has_new, summed, share, round_)
        if not self._is_left:
            self._arrived[number] = arrived
        return _Committed(combined.slot.layout, arrived)

    def finish(self, number: int) -> None:
        """Note that a step is committed."""
        self._open.pop(number, None)  # there is none where the script has left the loop, and a loss came after that
        self._first = number + 1

    # -- applying ------------------------------------------------------------------------------------

    def _apply(self, number: int, folder: GradientFolder) -> Generator[Any, None, Arrived]:
        arrived = self._arrived[number]
        if arrived.has_new_sums:
            raise StepError(
                f"step.add brought a new name in step {number}. With delay= the gradient of a step is under way "
                "while the next ones begin, so all names must be there in the first step: add zeros there"
            )
        del self._arrived[number]
        is_current = arrived.summed is not None and arrived.summed.generation == self._members.team.generation
        if arrived.summed is not None and arrived.share is not None and is_current and not arrived.is_stale:
            self._members.note(arrived.summed)
            self._members.balancing.observe(list(arrived.telemetry.values()), arrived.share)
        if arrived.round is not None:
            arrived.round.show(arrived)
            if arrived.share is not None and is_current:
                arrived.round.check()
            if number in self._values or self._members.size == 1:
                with self._as_of(number, arrived.round):
                    yield from arrived.round.find_not_finite()
        self._values.pop(number, None)
        if arrived.scalars[0] == 0.0:
            raise StepError(f"all micro-batches of step {number} have weight 0: there is no mean gradient")
        folder.buffers.start_step()
        shown = arrived.slot
        if self._members.size > 1:  # the script may write to what it gets, and others may need the sum as it is
            shown = arrived.slot.copy_to(self.new_slot(arrived.slot.layout))
            self._recycle(arrived)
        folder.show(shown)
        before, self._shown = self._shown, shown
        if before is not None and not is_held(before):
            self._free.append(before)
        seed_at(self._context.seed, "update", self._context.first_number + number)
        self._context.clock.switch("update")
        point("delay.applied")
        return arrived

    def _add_up(self, arrived: Arrived) -> Iterator[Any]:
        """Make sums with new names known, while no other sum is under way. Collective."""
        if not arrived.has_new_sums:
            return
        round_ = arrived.round
        assert round_ is not None
        sums = SumsRound(self._members, self._tracked.sums, round_.num_leaves, round_.values, round_.compute_again)
        with self._as_of(arrived.number, round_):
            yield from self._rounds.play(sums)
        arrived.totals, arrived.has_new_sums = sums.totals, False

    # -- after a loss --------------------------------------------------------------------------------

    @contextmanager
    def _as_of(self, number: int, round_: DelayedRound | None = None) -> Iterator[None]:
        """Return a context in which the parameters, buffers and modes of a step are in force.

        Args:
            round_: whose micro-batches are computed again, to be summed by nobody.
        """
        then, self._active = self._values.get(number), round_
        now = Values(self._tracked)
        try:
            if then is not None:
                then.put()
            if round_ is not None:
                folder = self._context.folder()
                folder.start_step(round_.num_leaves)
                round_.compute_with(folder)
                self._context.guards.start_step()
            yield
        finally:
            self._active = self._playing = None
            now.put()

    def _compute_missing(self, due: int, number: int) -> Iterator[Any]:
        """Compute and sum what is missing of the steps under way, one after the other. Collective."""
        done, self._resumes_at = [], number
        for step in list(self._open):
            with self._as_of(step):
                round_ = self._open[step]
                if round_ is None:
                    self._open[step] = round_ = DelayedRound(self, self._own_context(), step, self._context.folder())
                self._active, self._playing = round_, step
                yield from self._rounds.play(round_)
                self._num_computed += round_.num_computed
            done.append(step)
            if self._is_next_later(number):
                break
        else:
            self._is_recovering = False
        self._resumes_at = None
        for step in done:
            yield from self._add_up(self._arrived[step])

    def _is_next_later(self, number: int) -> bool:
        """Return whether the step that was just committed has come from a member that was through with this iteration,
        so that what is missing of the next one is computed later by all.
        """
        return any(report.at > number for report in self._rounds.reports())

    def plan_of(self, number: int, num_leaves: int) -> Plan:
        """Return the plan of what is missing of a step, by what all members have reported after the loss."""
        held = [each.get(number, ()) for each in self._held]
        return plan_of(held, [True] * len(held), num_leaves)

    # -- for the life of the rounds ------------------------------------------------------------------

    @property
    def holds_back(self) -> bool:
        return self._is_recovering and not self._is_left

    def drain(self) -> None:
        while self._tasks:
            self._commit_next()

    def interrupt(self) -> None:
        slots = self._members.slots
        if self._computing is not None:
            number, self._computing = self._computing, None
            round_ = self._open[number]
            assert round_ is not None
            round_.interrupt()
            slots.ahead[number], slots.nodes = slots.nodes, {}
            self._active = None
            if number not in self._values:
                self._values[number] = Values(self._tracked)
        if self._background is not None:
            self._background.stop()
            self._background = None
        while self._tasks and next(iter(self._tasks.values()))[0].is_done:
            self._commit_next()
        self._tasks.clear()
        self._is_recovering = True
        if self._is_left:
            self._drop()

    def sends(self) -> bool:
        return isinstance(self._rounds.finished, _Committed)

    def give(self, source: int, *, behind: bool) -> None:
        exchange, finished = self._members.exchange, self._rounds.finished
        gift = b""
        if self._members.rank == source:
            assert isinstance(finished, _Committed)
            slot, known = finished.arrived.slot, finished.arrived.telemetry
            gift = msgspec.msgpack.encode(
                _Gift(finished.arrived.digest, list(known), [each.pack() for each in known.values()])
            )
        else:
            layout = self._members.slots.layout
            assert layout is not None
            slot = self.new_slot(layout)
        said = msgspec.msgpack.decode(exchange.all_gather(gift)[source], type=_Gift)
        exchange.broadcast(slot.memory[: slot.layout.num_rows * ROW_BYTES], source)
        if not behind:
            return
        number = self._first
        telemetry = {one: StepTelemetry.unpack(each) for one, each in zip(said.workers, said.telemetry, strict=True)}
        summed = Summed(slot, said.digest, telemetry)
        has_new = any(each.new_sums for each in telemetry.values())
        if self._is_left:  # nobody applies it, and it is kept for others that have not seen the commit
            arrived = Arrived(number, slot, said.digest, {}, has_new, summed)
        else:
            round_ = self._open[number]
            assert round_ is not None
            totals = self._tracked.sums.read(slot.extras[: round_.num_sums])
            self._arrived[number] = arrived = Arrived(number, slot, said.digest, totals, has_new, summed, None, round_)
        slots = self._members.slots
        for node in (slots.nodes if number == self._playing else slots.ahead.pop(number, {})).values():
            self._members.release(node)
        self._rounds.commit(_Committed(slot.layout, arrived))
        self.finish(number)

    def report(self) -> tuple[int, int, list[tuple[int, list[Node]]]]:
        slots = self._members.slots
        at = self._first + self._delay * (self._first > 0) if self._resumes_at is None else self._resumes_at
        most = self._context.cursor.position(next(iter(self._open))).num_leaves if self._open else 1
        return (
            at,
            most,
            [
                (number, list(slots.nodes if number == self._playing else slots.ahead.get(number, {})))
                for number in self._open
            ],
        )

    def met(self, held: Sequence[Sequence[tuple[int, Sequence[tuple[int, int]]]]]) -> None:
        self._held = [dict(each) for each in held]

    # -- between two iterations ----------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for all sums under way, because the members change or a checkpoint is taken. Collective."""
        self._rounds.drain()
        for arrived in self._arrived.values():
            arrived.is_stale = True  # it was said before what happens at this boundary

    def leave(self) -> None:
        """Note that the script has left the loop. Local; sums under way are waited for when something else follows."""
        self._is_left = True
        self._tracked.pending.current = tuple
        self._arrived.clear()
        self._values.clear()
        self._shown = None
        self._applied.clear()
        self._free.clear()
        if not self._tasks:
            self._drop()
        if self._background is not None:
            self._background.end()

    def abandon(self) -> None:
        """Stop what is under way, because the run ends in this process. Local."""
        background, self._background = self._background, None
        if background is not None and self._tasks:
            self._members.exchange.interrupt(RunStopped("the run has ended in this process"))
            background.stop()
        self._tasks.clear()

    def _drop(self) -> None:
        for nodes in self._members.slots.ahead.values():
            for slot in nodes.values():
                self._members.release(slot)
        self._members.slots.ahead.clear()
        self._open.clear()

    # -- memory --------------------------------------------------------------------------------------

    def new_slot(self, layout: FlatLayout) -> Slot:
        """Return a slot for the sum of a step, in memory of this member's own. Local."""
        self._free = [slot for slot in self._free if slot.layout == layout]
        if self._free:
            return self._free.pop()
        return Slot(layout, torch.zeros(layout.slot_bytes, dtype=torch.uint8, device=self._device))

    def _recycle(self, arrived: Arrived) -> None:
        """Use the slots of sums again that are applied, but for the newest commit, which others may need. Local."""
        finished = self._rounds.finished
        newest = finished.arrived if isinstance(finished, _Committed) else None
        self._applied.append(arrived)
        self._free += [one.slot for one in self._applied if one is not newest]
        self._applied = [one for one in self._applied if one is newest]

    def _pending(self) -> list[Gradient]:
        return [
            Gradient.of(one.slot, one.number, one.digest, one.totals, has_new_sums=one.has_new_sums)
            for one in self._arrived.values()
        ]


def _shapes(layout: FlatLayout) -> list[tuple[str, torch.Size]]:
    return [(entry.name, entry.shape) for entry in (*layout.gradients, *layout.buffers)]


def _sum(exchange: Exchange, share: Share, own: bytes, out: Slot) -> Combined:
    return combine(exchange, share, own, out)
