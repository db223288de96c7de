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

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from unisono.core.errors import DivergenceError, RunStopped, StepError
from unisono.core.plan import Plan
from unisono.engine.exchange import Share
from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.microbatch.folding import GradientFolder
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds.gradient import StepContext
from unisono.engine.rounds.life import Book
from unisono.engine.rounds.members import Summed
from unisono.engine.rounds.team import LOST
from unisono.engine.state.earlier_values import Values
from unisono.strategies.delay.delayed import Committed, DelayedRound, give, kind_of
from unisono.strategies.delay.pending import Gradient, Pending
from unisono.strategies.delay.prediction import Prediction
from unisono.strategies.delay.underway import Spare, UnderWay
from unisono.system import accelerators
from unisono.system.faults import point

__all__ = ["Pipeline"]


class Mode(Enum):
    """What a member does with the steps of a loop."""

    AHEAD = "computes each step in its own iteration, and leaves the sum to the thread"
    WAITING = "computes nothing after a loss, until all are in the iteration that needs what is missing"
    CATCHING_UP = "computes in that iteration what is missing, with all other members"
    LEFT = "has left the loop: only sums that are under way are still waited for"


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
        active: the step whose micro-batches are being computed; None outside of them.
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
        self._device = accelerators.adds_on(folder.trained[0][1].device)
        self._under_way = UnderWay(self._members, self._device)
        self._spare = Spare(self._device)
        self._shown: Slot | None = None
        # Others may have met this member after a loss already, and compute nothing ahead.
        self._mode = Mode.AHEAD if self._rounds.is_level else Mode.WAITING
        self._iteration = first
        self._steps: dict[int, DelayedRound] = {}
        """Those that are begun and not applied, in their order: first those whose sums are committed."""
        self._first = min(first, num_batches)  # without a commit
        self.active: DelayedRound | None = None
        self._unlike = ""
        """What has differed when this member has looked back; said with the next sum. One such member is faulty; where
        most say so, it is the script.
        """
        self.num_computed = 0
        self.news = ""
        self._load(first)
        self._rounds.book = self
        self._pending.current = self._gradients

    def _load(self, first: int) -> None:
        loaded = self._pending.take()
        numbers = list(range(max(0, first - self._delay), self._first))
        if [each.number for each in loaded] != numbers:
            raise StepError(
                f"at iteration {first} of a training with delay={self._delay}, the gradients of the steps {numbers} "
                f"are not applied yet, but the loaded state has those of {[one.number for one in loaded]}"
            )
        for each in loaded:
            slot = each.to_slot(self._layout, self._device)
            self._new(each.number).load(slot, each.digest, each.totals, has_new_sums=each.has_new_sums)

    def _gradients(self) -> list[Gradient]:
        return [
            Gradient.of(one.slot, one.at, one.summed.digest, one.totals, has_new_sums=one.has_new_sums)
            for one in self._arrived()
        ]

    def _new(self, number: int) -> DelayedRound:
        """Begin a step, whose comparisons are its own."""
        context = replace(self._context, agreement=copy(self._context.agreement))
        self._steps[number] = DelayedRound(self._spare, context, number, self._context.folder())
        return self._steps[number]

    def _arrived(self) -> list[DelayedRound]:
        """Return the steps whose sums are committed and not applied."""
        return [step for step in self._steps.values() if step.result is not None]

    def _open(self) -> list[DelayedRound]:
        """Return the steps that are begun and not committed, in their order."""
        return [step for step in self._steps.values() if step.result is None]

    # -- for the step --------------------------------------------------------------------------------

    def iterate(self, number: int) -> Generator[Any, None, DelayedRound | None]:
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
                has_reported = yield from self._compute(number)
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
                "the parameters that are trained, or the buffers of the model, changed within run.steps(delay=), while "
                "earlier gradients are in flight. Change them between two calls of run.steps"
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
        self._prediction.put(trained, self._delay)
        try:
            yield
        finally:
            self._prediction.take_back(trained)

    def _compute(self, number: int) -> Generator[Any, None, bool]:
        """Yield the micro-batches of a step to the script; returns whether this member has reported with its sum."""
        before, step = self._steps.get(number - 1), self._new(number)
        if self._members.size > 1 or self._mode is not Mode.AHEAD:
            step.values = Values(self._tracked, before.values if before is not None else None)
        has_reported = False
        if self._mode is Mode.AHEAD:
            has_reported = yield from self._compute_ahead(step)
        if self._mode is Mode.AHEAD and self._members.size == 1:
            yield from self._look_at_once(step)
        if number == 0:  # the names of sums become known here, before the next step is laid out
            yield from self._arrive(0)
            yield from self._add_up(self._steps[0])
        return has_reported

    def _arrive(self, due: int) -> Iterator[Any]:
        """Wait for the commit of a step; after a loss, compute what is missing of it. Collective."""
        while self._steps[due].result is None:
            if self._mode is Mode.AHEAD:
                self._wait_for(self._steps[due])
            else:
                yield from self._catch_up()

    def _compute_ahead(self, step: DelayedRound) -> Generator[Any, None, bool]:
        self._rounds.go_on()
        self.active, self._members.slots.kind, has_reported = step, step.kind, False
        try:
            plan = step.plan_ahead()
            self.news = step.news
            yield from step.compute(plan)
            self._submit(step, plan)
            has_reported, self.active = True, None
            point("delay.under_way")
            yield from self._look_back(step.at - 1)
        except LOST as lost:
            self._rounds.regroup(lost)
        return has_reported

    def _look_back(self, number: int) -> Iterator[Any]:
        """Compute a micro-batch of the step before again, where a rehearsal has left a fingerprint of it."""
        step = self._steps.get(number)
        if step is None or not step.is_rehearsed:
            return
        if step.values is not None and step.layout == self._layout:
            with self._apart(step):
                words = yield from step.look_back()
            if words and not self._rounds.judge.settles:
                raise DivergenceError(words)
            self._unlike = words

    def _look_at_once(self, step: DelayedRound) -> Iterator[Any]:
        """Find what made a sum not finite before the parameters change: a worker that is alone keeps no others."""
        self._wait_for(step)
        if step.result is not None and step.is_broken:  # else others have come into the run meanwhile, or it ends
            with self._apart(step):
                yield from step.find_not_finite()

    def _submit(self, step: DelayedRound, plan: Plan) -> None:
        """Put the nodes of a step that is computed aside, and begin with its sum."""
        own = step.announce(unlike=bool(self._unlike))
        self.num_computed = step.num_computed
        share = Share(step.num_leaves, plan.nodes, dict(self._members.slots.nodes))
        self._members.slots.kind = ""
        self._under_way.begin(step.at, share, own, self._spare.new_slot(step.layout))

    # -- commits -------------------------------------------------------------------------------------

    def _wait_for(self, step: DelayedRound) -> None:
        """Wait for the commit of a step, or meet the survivors of a loss. Collective."""
        self._context.clock.switch("exchange")
        point("delay.waiting")
        try:
            with self._members.waiting():
                while step.result is None and self._under_way:
                    self._rounds.note_round(self._rounds.number, step.title)
                    self._commit_next()
        except LOST as lost:
            self._rounds.regroup(lost)
        finally:
            self._rounds.note_round(-1, "")
        self._context.clock.switch("other")

    def _commit_next(self) -> None:
        number, combined, share = self._under_way.next()
        self._release(number)
        self._commit(number, self._members.summed(combined), share)
        point("committed")

    def _release(self, number: int) -> None:
        """Free the nodes of a step that is committed, or will be computed by nobody."""
        for slot in self._members.slots.open.pop(kind_of(number), {}).values():
            self._members.release(slot)

    def _commit(self, number: int, summed: Summed, share: Share | None) -> None:
        """Note that the first open step is committed."""
        self._rounds.commit(Committed(summed.slot.layout, summed))
        if self._mode is Mode.LEFT:  # nobody applies the sum; it is kept for others that have not seen the commit
            self._steps.pop(number, None)
        else:
            self._steps[number].receive(summed, share)
        self._first = number + 1

    # -- applying ------------------------------------------------------------------------------------

    def _agree(self, number: int) -> Generator[Any, None, bool]:
        """Let what the members have said with a sum count, and compare it. Collective where something differs.

        Returns:
            Whether the sum counts; False: it is made again, without a member that is wrong.
        """
        step = self._steps[number]
        is_own = step.share is not None and step.summed.generation == self._members.team.generation
        if step.share is not None and is_own and not step.is_stale:
            self._members.note(step.summed)
            self._members.balancing.observe(list(step.summed.telemetry.values()), step.share)
        if step.is_disputed:  # however the sum has come here
            dispute = step.remembered()
            with self._apart(step):
                yield from self._rounds.judge.settle(step, dispute)
            return False
        if is_own:
            step.check()
            self._check_unlike(step.summed)
        return True

    def _check_unlike(self, summed: Summed) -> None:
        said = [each.unlike for each in summed.telemetry.values()]
        if any(said):
            words, self._unlike = self._unlike, ""
            if words and 2 * sum(said) > len(said):
                raise DivergenceError(words)

    def redo(self) -> None:
        arrived = self._arrived()
        if self._mode is Mode.LEFT or not arrived:
            return
        if not self._open():  # else the members have met since one was lost, and know what each has of these
            self._rounds.forget_heard()
        for one in arrived:
            self._new(one.at).values = one.values
        self._first = arrived[0].at
        self._mode = Mode.WAITING

    def _apply(self, number: int, folder: GradientFolder) -> Generator[Any, None, DelayedRound]:
        step = self._steps[number]
        if step.has_new_sums:
            raise StepError(
                f"step.add brought a new name in {step.name}. With delay= the gradient of a step is still in flight "
                "when the next ones begin, so all names must occur in the first step: add zeros there"
            )
        if step.values is not None and step.is_broken:
            with self._apart(step):
                yield from step.find_not_finite()
        del self._steps[number]
        step.values = None
        folder.buffers.start_step()
        shown = step.slot
        if self._members.size > 1:  # the script may write to what it gets, and others may need the sum as it is
            shown = step.slot.copy_to(self._spare.new_slot(step.slot.layout))
            finished = self._rounds.finished
            self._spare.retire(step.slot, finished.summed.slot if isinstance(finished, Committed) else None)
        step.show(shown, folder)
        before, self._shown = self._shown, shown
        if before is not None and not before.is_shared():
            self._spare.give_back(before)
        seed_at(self._context.seed, "update", self._context.first_number + number)
        self._context.clock.switch("update")
        point("delay.applied")
        return step

    def _add_up(self, step: DelayedRound) -> Iterator[Any]:
        """Make sums with new names known, while no other sum is under way. Collective."""
        if not step.has_new_sums or (sums := step.sums()) is None:
            return
        with self._apart(step):
            yield from self._rounds.play(sums)
        step.totals, step.has_new_sums = sums.totals, False

    # -- after a loss --------------------------------------------------------------------------------

    @contextmanager
    def _as_of(self, step: DelayedRound) -> Iterator[None]:
        """Return a context in which the parameters, buffers and modes of a step are in force, to compute it."""
        self.active, now = step, Values(self._tracked)
        try:
            if step.values is not None:
                step.values.put()
            yield
        finally:
            self.active = None
            now.put()

    @contextmanager
    def _apart(self, step: DelayedRound) -> Iterator[None]:
        """Return such a context for micro-batches that are computed again, to be summed by nobody."""
        with self._as_of(step):
            folder = self._context.folder()
            folder.start_step(step.num_leaves)
            step.compute_with(folder)
            self._context.guards.start_step()
            yield

    def _catch_up(self) -> Iterator[Any]:
        """Compute and sum what is missing of the steps under way, one after the other. Collective."""
        self._mode, is_given = Mode.CATCHING_UP, False
        steps = self._open()
        for step in steps:
            with self._as_of(step):
                yield from self._rounds.play(step)
                is_given = self._first > step.at
                self._first = step.at + 1
                self.num_computed += step.num_computed
        # Who has sent the last one was through with this iteration: what is missing then is computed later by all.
        self._mode = Mode.WAITING if is_given else Mode.AHEAD
        for step in steps:
            yield from self._add_up(step)

    # -- for the life of the rounds ------------------------------------------------------------------

    @property
    def open(self) -> Sequence[str]:
        return [step.kind for step in self._open()]

    @property
    def sends(self) -> bool:
        return isinstance(self._rounds.finished, Committed)

    @property
    def is_under_way(self) -> bool:
        return bool(self._under_way)

    @property
    def holds_back(self) -> bool:
        if self._mode is Mode.LEFT:
            return False
        return self._mode is not Mode.AHEAD or any(step.is_disputed for step in self._steps.values())

    @property
    def is_left(self) -> bool:
        return self._mode is Mode.LEFT

    def drain(self) -> None:
        while self._under_way:
            self._commit_next()

    def interrupt(self) -> None:
        step, slots = self.active, self._members.slots
        if step is not None and slots.kind == step.kind and self._mode in (Mode.AHEAD, Mode.LEFT):
            step.interrupt()
            self.active, slots.kind = None, ""
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
        if summed is not None:
            self._release(self._first)
            self._commit(self._first, summed, None)

    # -- between two iterations ----------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for all sums under way, because the members change or a checkpoint is taken. Collective."""
        self._rounds.drain()
        for arrived in self._arrived():
            arrived.is_stale = True  # it was said before what happens at this boundary

    def leave(self) -> None:
        """Note that the script has left the loop. Sums under way are waited for when something else follows, and the
        newest one is kept for members that have not seen its commit until then.
        """
        self._mode = Mode.LEFT
        self._pending.current = tuple
        if self._prediction is not None:
            self._prediction.clear()
        self._shown = None
        self._spare.clear()
        self._steps = {step.at: step for step in self._open()}
        for step in self._steps.values():
            step.values = None
        if not self._under_way:
            self._drop()
        self._under_way.end()

    def abandon(self) -> None:
        if self._under_way:
            self._members.exchange.interrupt(RunStopped("the run has ended in this process"))
            self._under_way.stop()
        self._under_way.clear()

    def _drop(self) -> None:
        for number in self._steps:
            self._release(number)
        self._steps.clear()


def _shapes(layout: FlatLayout) -> list[tuple[str, torch.Size]]:
    return [(entry.name, entry.shape) for entry in (*layout.gradients, *layout.buffers)]
