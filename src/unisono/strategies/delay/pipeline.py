"""Steps whose sums are under way while the script goes on: the rounds of ``run.steps(delay=D)``.

In iteration t the script computes the micro-batches of step t; their sum is left to a thread (`UnderWay`), and the
gradient that is applied is that of step t - D. So a member may be D steps ahead of the slowest one. The sums are
committed in the order of the steps, each as in `unisono.engine.exchange`, so two members are never more than one commit
apart, however far apart their scripts are. Commits are what `unisono.engine.rounds.life` counts.

**After a loss** the survivors meet (`unisono.engine.rounds.life`), at whatever places of the script they are. A member
that has a commit which another has not seen sends it the result. From there on, until step n + D (n is the first step
without a commit, the same for all), nobody computes anything ahead, so all collective work comes in the order of the
script again, which is the same for all. In iteration n + D every member is in its inner loop, and needs the gradient of
step n: there all compute together what is missing of the steps n to n + D, one after the other, each with the
parameters and buffers of its own time, and go on as before.

**Where members have computed different values**, and a tap settles that (`unisono.engine.rounds.taps`), it is known
with the commit, and settled when the gradient is to be applied: all are in the same iteration then, and have the values
of that step. A member that is wrong has a part in the later sums as well, so all that are not applied are forgotten and
computed again, as after a loss. Until then members do not change and no checkpoint is taken, as newcomers could not
know of it.

Between two iterations nothing can be computed, because the micro-batches are the script's. Where members change, a
checkpoint is taken, or the script evaluates, the sums under way are waited for; if a member is lost just then, the
change or the checkpoint waits until they are done.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from unisono.core.errors import DivergenceError, RunStopped, StepError
from unisono.core.plan import Plan
from unisono.engine.exchange import Share
from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.microbatch.folding import GradientFolder
from unisono.engine.microbatch.losses import Microbatch
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds.book import Book
from unisono.engine.rounds.gradient import StepContext
from unisono.engine.rounds.standing import Open, plain, plan_of
from unisono.engine.rounds.sums import SumsRound
from unisono.engine.rounds.team import LOST
from unisono.engine.state.values import Values
from unisono.strategies.delay.arrived import Arrived, Committed, give
from unisono.strategies.delay.delayed import DelayedRound
from unisono.strategies.delay.pending import Gradient, Pending
from unisono.strategies.delay.prediction import Prediction
from unisono.strategies.delay.underway import Spare, UnderWay
from unisono.system.faults import point

__all__ = ["Pipeline"]


class Mode(Enum):
    """What a member does with the steps of a loop."""

    AHEAD = "computes each step in its own iteration, and leaves the sum to the thread"
    WAITING = "computes nothing after a loss, until all are in the iteration that needs what is missing"
    CATCHING_UP = "computes in that iteration what is missing, with all other members"
    LEFT = "has left the loop: only sums that are under way are still waited for"


@dataclass
class OpenStep:
    """A step that is begun, and not applied."""

    round_: DelayedRound | None = None
    """None: this member has computed nothing of it, or the state of the run that was loaded has its sum."""
    values: Values | None = None
    """With what it is computed, where it may have to be computed again."""
    arrived: Arrived | None = None
    """Its sum, once that is committed."""
    is_disputed: bool = False
    """Members have computed different values of it."""


class Pipeline(Book):
    """The steps of one ``run.steps(delay=D)``: those that are computed, under way, and committed but not applied.

    Methods are local where they do not say that they are collective.

    Args:
        context: of the loop; each step gets an agreement of its own.
        delay: so many iterations after its own the sum of a step is applied.
        num_batches: global batches of the loop.
        first: iteration in which this member begins.
        pending: tells newcomers and checkpoints of the gradients under way, and has those of the state that was loaded.
        prediction: of the parameters with which micro-batches are computed; None: with those that are in force.

    Attributes:
        num_computed: micro-batches that this member has computed in the newest iteration.
        news: why the newest plan differs from the one before; "" where it does not.
    """

    def __init__(
        self,
        context: StepContext,
        delay: int,
        num_batches: int,
        first: int,
        pending: Pending,
        prediction: Prediction | None = None,
    ) -> None:
        folder = context.folder()
        self._context = context
        self._rounds = context.rounds
        self._members = context.rounds.members
        self._tracked = context.tracked
        self._delay = delay
        self._num_batches = num_batches
        self._pending = pending
        self._prediction = prediction
        if prediction is not None and first == 0:
            prediction.clear()
        self._layout = folder.layout
        self._device = folder.trained[0][1].device
        self._under_way = UnderWay(self._members, self._device)
        self._spare = Spare(self._device)
        self._shown: Slot | None = None
        # Others may have met this member after a loss already, and compute nothing ahead.
        self._mode = Mode.AHEAD if self._rounds.is_level else Mode.WAITING
        self._iteration = first
        self._steps: dict[int, OpenStep] = {}
        """In their order: first those whose sums are committed."""
        self._first = min(first, num_batches)  # without a commit
        self._in_slots: int | None = None
        """The step whose nodes are `Slots.nodes`: it is being computed. Those of others are `Slots.ahead`."""
        self._active: DelayedRound | None = None
        self._unlike = ""
        """What has differed when this member has looked back; said with the next sum. One such member is faulty; where
        most say so, it is the script.
        """
        self.num_computed = 0
        self.news = ""
        self._load(first)
        self._held: list[dict[int, Sequence[tuple[int, int]]]] = []
        self.met([report.open for report in self._rounds.reports()])
        self._rounds.book = self
        self._members.drain = self.drain
        self._pending.current = self._gradients

    def _load(self, first: int) -> None:
        loaded = self._pending.take()
        numbers = list(range(max(0, first - self._delay), self._first))
        if [each.number for each in loaded] != numbers:
            raise StepError(
                f"at iteration {first} of a training with delay={self._delay}, the gradients of the steps {numbers} "
                f"are not applied yet, and the state that was loaded has those of {[one.number for one in loaded]}"
            )
        for each in loaded:
            slot = each.to_slot(self._layout, self._device)
            arrived = Arrived(each.number, slot, each.digest, each.totals, each.has_new_sums)
            self._steps[each.number] = OpenStep(arrived=arrived)

    def _gradients(self) -> list[Gradient]:
        return [
            Gradient.of(one.slot, one.number, one.digest, one.totals, has_new_sums=one.has_new_sums)
            for one in self._arrived()
        ]

    def _arrived(self) -> list[Arrived]:
        """Return the sums that are committed and not applied."""
        return [step.arrived for step in self._steps.values() if step.arrived is not None]

    def _open(self) -> list[int]:
        """Return the steps that are begun and not committed, in their order."""
        return [number for number, step in self._steps.items() if step.arrived is None]

    # -- for the step --------------------------------------------------------------------------------

    @property
    def microbatch(self) -> Microbatch | None:
        """The micro-batch that is being loaded or computed; None outside of one."""
        return self._active.microbatch if self._active is not None else None

    @property
    def number(self) -> int | None:
        """The step whose micro-batches are being computed."""
        return self._active.at if self._active is not None else None

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
        self._iteration, has_reported = number, False
        self.num_computed, self.news = 0, ""
        if number < self._num_batches:
            with self._predicted(folder):
                has_reported = yield from self._compute(number, folder)
        if not has_reported:
            self._members.finish_copies()
        due = number - self._delay
        if due < 0:
            seed_at(self._context.seed, "update", self._context.first_number + number, "delay")
            self._context.clock.switch("update")
            return None
        counts = False
        while not counts:
            yield from self._arrive(due)
            counts = yield from self._agree(due)
        return (yield from self._apply(due, folder))

    def _check_layout(self, layout: FlatLayout) -> None:
        """Check that the gradients under way are of the parameters that are trained now.

        Raises:
            StepError: they are of others.
        """
        ours, theirs = _shapes(layout), [_shapes(one.slot.layout) for one in self._arrived()]
        if (self._open() and layout != self._layout) or any(ours != other for other in theirs):
            raise StepError(
                "the parameters that are trained, or the buffers of the model, have changed within run.steps(delay=), "
                "while gradients of the ones before are under way. Change them between two calls of run.steps"
            )
        self._layout = layout

    # -- computing -----------------------------------------------------------------------------------

    @contextmanager
    def _predicted(self, folder: GradientFolder) -> Iterator[None]:
        """Return a context in which the predicted parameters are in force, where the script has asked for them."""
        if self._prediction is None:
            yield
            return
        trained = [parameter for _, parameter in folder.trained]
        self._prediction.put(trained)
        try:
            yield
        finally:
            self._prediction.take_back(trained)

    def _compute(self, number: int, folder: GradientFolder) -> Generator[Any, None, bool]:
        """Yield the micro-batches of a step to the script; returns whether this member has reported with its sum."""
        self._steps[number] = step = OpenStep()
        if self._members.size > 1 or self._mode is not Mode.AHEAD:
            before = self._steps.get(number - 1)
            step.values = Values(self._tracked, before.values if before is not None else None)
        has_reported = False
        if self._mode is Mode.AHEAD:
            has_reported = yield from self._compute_ahead(number, folder)
        if self._mode is Mode.AHEAD and self._members.size == 1:
            yield from self._look_at_once(number)
        if number == 0:  # the names of sums become known here, before the next step is laid out
            yield from self._arrive(0)
            yield from self._add_up(0)
        return has_reported

    def _arrive(self, due: int) -> Iterator[Any]:
        """Wait for the commit of a step; after a loss, compute what is missing of it. Collective."""
        while self._steps[due].arrived is None:
            if self._mode is Mode.AHEAD:
                self._wait_for(due)
            else:
                yield from self._catch_up()

    def _compute_ahead(self, number: int, folder: GradientFolder) -> Generator[Any, None, bool]:
        self._rounds.go_on()
        round_ = DelayedRound(self._spare, self._own_context(), number, folder)
        self._steps[number].round_ = self._active = round_
        self._in_slots, has_reported = number, False
        try:
            plan = round_.plan_ahead()
            self.news = round_.news
            yield from round_.compute(plan)
            self._submit(number, round_, plan)
            has_reported, self._active = True, None
            point("delay.under_way")
            yield from self._look_back(number - 1)
        except LOST as lost:
            self._rounds.regroup(lost)
        return has_reported

    def _look_back(self, number: int) -> Iterator[Any]:
        """Compute a micro-batch of the step before again, where a rehearsal has left a fingerprint of it."""
        step = self._steps.get(number)
        round_ = step.round_ if step is not None else None
        if step is None or round_ is None or not round_.is_rehearsed:
            return
        if step.values is not None and round_.layout == self._layout:
            with self._as_of(number, round_):
                words = yield from round_.look_back()
            if words and not self._rounds.judge.settles:
                raise DivergenceError(words)
            self._unlike = words

    def _look_at_once(self, number: int) -> Iterator[Any]:
        """Find what made a sum not finite before the parameters change: a worker that is alone keeps no others."""
        self._wait_for(number)
        step = self._steps[number]
        round_ = step.round_
        if round_ is None or step.arrived is None:
            return  # others have come into the run meanwhile, or it ends
        round_.show(step.arrived)
        if round_.is_broken:
            with self._as_of(number, round_):
                yield from round_.find_not_finite()

    def _own_context(self) -> StepContext:
        """Return the context of one step: what several steps share, and comparisons of its own."""
        return replace(self._context, agreement=copy(self._context.agreement))

    def _submit(self, number: int, round_: DelayedRound, plan: Plan) -> None:
        """Put the nodes of a step that is computed aside, and begin with its sum."""
        own = round_.announce(unlike=bool(self._unlike))
        self.num_computed = round_.num_computed
        self._set_aside(number)
        share = Share(round_.num_leaves, plan.nodes, dict(self._members.slots.ahead[number]))
        self._under_way.begin(number, share, own, self._spare.new_slot(round_.layout))

    def _set_aside(self, number: int) -> None:
        slots = self._members.slots
        slots.ahead[number], slots.nodes = slots.nodes, {}
        self._in_slots = None

    # -- commits -------------------------------------------------------------------------------------

    def _wait_for(self, number: int) -> None:
        """Wait for the commit of a step, or meet the survivors of a loss. Collective."""
        self._context.clock.switch("exchange")
        point("delay.waiting")
        step = self._steps[number]
        title = step.round_.title if step.round_ is not None else ""
        try:
            with self._members.waiting():
                while step.arrived is None and self._under_way:
                    self._rounds.note_round(self._rounds.number, title)
                    self._commit_next()
        except LOST as lost:
            self._rounds.regroup(lost)
        finally:
            self._rounds.note_round(-1, "")
        self._context.clock.switch("other")

    def _commit_next(self) -> None:
        number, combined, share = self._under_way.next()
        for slot in self._members.slots.ahead.pop(number).values():
            self._members.release(slot)
        round_ = self._steps[number].round_
        assert round_ is not None
        self._commit(round_.receive(self._members.summed(combined), share))
        point("committed")

    def _commit(self, arrived: Arrived) -> None:
        self._rounds.commit(Committed(arrived.slot.layout, arrived))
        self._take(arrived)

    def _take(self, arrived: Arrived) -> None:
        """Note that the first open step is committed."""
        number = arrived.number
        if self._mode is Mode.LEFT:  # nobody applies the sum
            self._steps.pop(number, None)
        else:
            step = self._steps[number]
            assert step.round_ is not None
            step.arrived, step.is_disputed = arrived, step.round_.differs(arrived)
        self._first = number + 1

    # -- applying ------------------------------------------------------------------------------------

    def _agree(self, number: int) -> Generator[Any, None, bool]:
        """Let what the members have said with a sum count, and compare it. Collective where something differs.

        Returns:
            Whether the sum counts; False: it is made again, without a member that is wrong.
        """
        step = self._steps[number]
        arrived, round_ = step.arrived, step.round_
        assert arrived is not None
        is_current = arrived.summed is not None and arrived.summed.generation == self._members.team.generation
        is_own = is_current and arrived.share is not None
        if arrived.summed is not None and arrived.share is not None and is_current and not arrived.is_stale:
            self._members.note(arrived.summed)
            self._members.balancing.observe(list(arrived.telemetry.values()), arrived.share)
        if round_ is None:
            return True
        round_.show(arrived)
        if step.is_disputed:  # however the sum has come here
            dispute = round_.remembered()
            with self._as_of(number, round_):
                yield from self._rounds.judge.settle(round_, dispute)
            return False
        if is_own:
            round_.check()
            self._check_unlike(arrived)
        return True

    def _check_unlike(self, arrived: Arrived) -> None:
        said = [each.unlike for each in arrived.telemetry.values()]
        if any(said):
            words, self._unlike = self._unlike, ""
            if words and 2 * sum(said) > len(said):
                raise DivergenceError(words)

    def redo(self) -> None:
        arrived = self._arrived()
        if self._mode is Mode.LEFT or not arrived:
            return
        if not self._open():  # else the members have met since one was lost, and know what each has of these
            self._held = [{} for _ in range(self._members.size)]
        for one in arrived:
            self._steps[one.number] = OpenStep(values=self._steps[one.number].values)
        self._first = arrived[0].number
        self._mode = Mode.WAITING

    def _apply(self, number: int, folder: GradientFolder) -> Generator[Any, None, Arrived]:
        step = self._steps[number]
        arrived, round_ = step.arrived, step.round_
        assert arrived is not None
        if arrived.has_new_sums:
            raise StepError(
                f"step.add brought a new name in {self._context.name(number)}. With delay= the gradient of a step is "
                "under way while the next ones begin, so all names must be there in the first step: add zeros there"
            )
        if round_ is not None and step.values is not None and round_.is_broken:
            with self._as_of(number, round_):
                yield from round_.find_not_finite()
        del self._steps[number]
        if arrived.scalars[0] == 0.0:
            raise StepError(
                f"all micro-batches of {self._context.name(number)} have weight 0: there is no mean gradient"
            )
        folder.buffers.start_step()
        shown = arrived.slot
        if self._members.size > 1:  # the script may write to what it gets, and others may need the sum as it is
            shown = arrived.slot.copy_to(self._spare.new_slot(arrived.slot.layout))
            finished = self._rounds.finished
            self._spare.retire(arrived.slot, finished.arrived.slot if isinstance(finished, Committed) else None)
        folder.show(shown)
        before, self._shown = self._shown, shown
        if before is not None and not before.is_shared():
            self._spare.give_back(before)
        seed_at(self._context.seed, "update", self._context.first_number + number)
        self._context.clock.switch("update")
        point("delay.applied")
        return arrived

    def _add_up(self, number: int) -> Iterator[Any]:
        """Make sums with new names known, while no other sum is under way. Collective."""
        arrived, round_ = self._steps[number].arrived, self._steps[number].round_
        assert arrived is not None
        if not arrived.has_new_sums:
            return
        assert round_ is not None
        sums = SumsRound(self._members, self._tracked.sums, round_.num_leaves, round_.values, round_.compute_again)
        with self._as_of(number, round_):
            yield from self._rounds.play(sums)
        arrived.totals, arrived.has_new_sums = sums.totals, False

    # -- after a loss --------------------------------------------------------------------------------

    @contextmanager
    def _as_of(self, number: int, round_: DelayedRound | None = None) -> Iterator[None]:
        """Return a context in which the parameters, buffers and modes of a step are in force.

        Args:
            round_: whose micro-batches are computed again, to be summed by nobody.
        """
        then, self._active = self._steps[number].values, round_
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
            self._active = self._in_slots = None
            now.put()

    def _catch_up(self) -> Iterator[Any]:
        """Compute and sum what is missing of the steps under way, one after the other. Collective."""
        done, self._mode = [], Mode.CATCHING_UP
        for number in self._open():
            step = self._steps[number]
            with self._as_of(number):
                if (round_ := step.round_) is None:
                    step.round_ = round_ = DelayedRound(
                        self._spare, self._own_context(), number, self._context.folder()
                    )
                self._active, self._in_slots = round_, number
                round_.missing = self._missing(number, round_.num_leaves)
                yield from self._rounds.play(round_)
                if round_.came is not None:  # else another member has sent it
                    self._take(round_.came)
                self.num_computed += round_.num_computed
            done.append(number)
            if self._is_next_later():
                self._mode = Mode.WAITING
                break
        else:
            self._mode = Mode.AHEAD
        for number in done:
            yield from self._add_up(number)

    def _missing(self, number: int, num_leaves: int) -> Plan:
        """Return the plan of what is missing of a step, by what all members have reported after the loss."""
        held = [each.get(number, ()) for each in self._held]
        return plan_of(held, [True] * len(held), num_leaves)

    def _is_next_later(self) -> bool:
        """Return whether the step that was just committed has come from a member that was through with this iteration,
        so that what is missing of the next one is computed later by all.
        """
        return any(report.open.at > self._iteration for report in self._rounds.reports())

    # -- for the life of the rounds ------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        return bool(self._under_way)

    @property
    def holds_back(self) -> bool:
        if self._mode is Mode.LEFT:
            return False
        return self._mode is not Mode.AHEAD or any(step.is_disputed for step in self._steps.values())

    def drain(self) -> None:
        while self._under_way:
            self._commit_next()

    def interrupt(self) -> None:
        if self._in_slots is not None and self._mode in (Mode.AHEAD, Mode.LEFT):
            step = self._steps[self._in_slots]
            assert step.round_ is not None
            step.round_.interrupt()
            self._set_aside(self._in_slots)
            self._active = None
            if step.values is None:
                step.values = Values(self._tracked)
        self._under_way.stop()
        while self._under_way.has_done:
            self._commit_next()
        self._under_way.clear()
        if self._mode is Mode.LEFT:
            self._drop()
        elif self._mode is Mode.AHEAD:
            self._mode = Mode.WAITING
        self._members.agreed_generation = 0

    def give(self, source: int, targets: Sequence[int]) -> None:
        summed = give(self._members, source, targets, self._rounds.finished, self._spare.new_slot)
        if summed is None:
            return
        number, slots = self._first, self._members.slots
        for node in (slots.nodes if number == self._in_slots else slots.ahead.pop(number, {})).values():
            self._members.release(node)
        step = self._steps.get(number)
        if step is not None and step.round_ is not None:
            self._commit(step.round_.receive(summed, None))
        else:  # the script has left the loop; the sum is kept for others that have not seen the commit
            self._commit(Arrived(number, summed.slot, summed.digest, {}, has_new_sums=False, summed=summed))

    def report(self) -> Open:
        slots, numbers = self._members.slots, self._open()
        return Open(
            at=self._iteration if self._mode is Mode.CATCHING_UP else self._first + self._delay * (self._first > 0),
            num_leaves=self._context.cursor.position(numbers[0]).num_leaves if numbers else 1,
            have=[
                (number, plain(slots.nodes if number == self._in_slots else slots.ahead.get(number, {})))
                for number in numbers
            ],
            sends=isinstance(self._rounds.finished, Committed),
        )

    def met(self, reports: Sequence[Open]) -> None:
        self._held = [dict(each.have) for each in reports]

    # -- between two iterations ----------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for all sums under way, because the members change or a checkpoint is taken. Collective."""
        self._rounds.drain()
        for arrived in self._arrived():
            arrived.is_stale = True  # it was said before what happens at this boundary

    def leave(self) -> None:
        """Note that the script has left the loop. Sums under way are waited for when something else follows."""
        self._mode = Mode.LEFT
        self._pending.current = tuple
        if self._prediction is not None:
            self._prediction.clear()
        self._shown = None
        self._spare.clear()
        self._steps = {number: OpenStep(self._steps[number].round_) for number in self._open()}
        if not self._under_way:
            self._drop()
        self._under_way.end()

    def abandon(self) -> None:
        if self._under_way:
            self._members.exchange.interrupt(RunStopped("the run has ended in this process"))
            self._under_way.stop()
        self._under_way.clear()

    def _drop(self) -> None:
        for nodes in self._members.slots.ahead.values():
            for slot in nodes.values():
                self._members.release(slot)
        self._members.slots.ahead.clear()
        self._steps.clear()


def _shapes(layout: FlatLayout) -> list[tuple[str, torch.Size]]:
    return [(entry.name, entry.shape) for entry in (*layout.gradients, *layout.buffers)]
