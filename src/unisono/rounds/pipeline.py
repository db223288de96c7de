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

**Where members have computed different values** (`unisono.rounds.auditing`), that is known with the commit, and settled
when the gradient is to be applied: all are in the same iteration then, and have the values of that step. A member that
is wrong has a part in the later sums as well, so all that are not applied are forgotten and computed again, as after a
loss. Until then members do not change and no checkpoint is taken, as newcomers could not know of it.

Between two iterations nothing can be computed, because the micro-batches are the script's. Where members change, a
checkpoint is taken, or the script evaluates, the sums under way are waited for; if a member is lost just then, the
change or the checkpoint waits until they are done.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from unisono.decisions.plan import Plan
from unisono.errors import DivergenceError, StepError
from unisono.exchange import Combined, Share
from unisono.exchange.flat import FlatLayout, Slot
from unisono.faults import point
from unisono.microbatch.folding import GradientFolder
from unisono.microbatch.losses import Microbatch
from unisono.microbatch.randomness import seed_at
from unisono.rounds.ahead import SumsAhead
from unisono.rounds.arrived import Arrived, Committed
from unisono.rounds.delayed import DelayedRound
from unisono.rounds.gradient import StepContext
from unisono.rounds.members import Summed
from unisono.rounds.sums import SumsRound
from unisono.rounds.team import LOST
from unisono.state.pending import Gradient
from unisono.state.prediction import Prediction
from unisono.state.values import Values

__all__ = ["Pipeline"]


class Pipeline(SumsAhead[DelayedRound]):
    """The steps of one ``run.steps(delay=D)``: those that are computed, under way, and committed but not applied.

    Args:
        context: of the loop; each step gets an agreement of its own.
        num_batches: global batches of the loop.
        first: iteration in which this member begins.
        prediction: of the parameters with which micro-batches are computed; None: with those that are in force.
    """

    def __init__(
        self, context: StepContext, delay: int, num_batches: int, first: int, prediction: Prediction | None = None
    ) -> None:
        folder = context.folder()
        super().__init__(context, delay, num_batches, first, folder.trained[0][1].device)
        self._num_batches = num_batches
        self._prediction = prediction
        if prediction is not None and first == 0:
            prediction.clear()
        self._tracked = context.tracked
        self._summed: dict[int, DelayedRound] = {}
        """The steps that are committed and not applied, as far as this member has begun them."""
        self._arrived: dict[int, Arrived] = {}
        self._disputed: set[int] = set()
        """Those of them in which members have computed different values."""
        self._values: dict[int, Values] = {}
        self._unlike = ""
        """What has differed when this member has looked back; said with the next sum. One such member is faulty; where
        most say so, it is the script.
        """
        self._active: DelayedRound | None = None
        self._shown: Slot | None = None
        self._layout = folder.layout
        self._load(first)
        self._take_over()
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
        self.num_computed, self.news = 0, ""
        if number < self._num_batches:
            with self._predicted(folder):
                yield from self._compute(number, folder)
        if not self._has_reported:
            self._members.finish_copies()
        due = number - self._delay
        if due < 0:
            seed_at(self._context.seed, "update", self._context.first_number + number, "delay")
            self._context.clock.switch("update")
            return None
        counts = False
        while not counts:
            yield from self._arrive(due, number)
            counts = yield from self._agree(due)
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

    def _compute(self, number: int, folder: GradientFolder) -> Iterator[Any]:
        self._open[number] = None
        if self._members.size > 1 or self._is_recovering:
            self._values[number] = Values(self._tracked, self._values.get(number - 1))
        if not self._is_recovering:
            yield from self._compute_ahead(number, folder)
        if not self._is_recovering and self._members.size == 1:
            yield from self._look_at_once(number)
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
        round_ = self._open.get(number) or self._summed.get(number)
        if round_ is None or not round_.is_rehearsed:
            return
        if number in self._values and round_.layout == self._layout:
            with self._as_of(number, round_):
                words = yield from round_.look_back()
            if words and self._context.audits is None:
                raise DivergenceError(words)
            self._unlike = words

    def _look_at_once(self, number: int) -> Iterator[Any]:
        """Find what made a sum not finite before the parameters change: a worker that is alone keeps no others."""
        self._wait_for(number)
        round_, arrived = self._summed.get(number), self._arrived.get(number)
        if round_ is None or arrived is None:
            return  # others have come into the run meanwhile, or it ends
        round_.show(arrived)
        if round_.is_broken:
            with self._as_of(number, round_):
                yield from round_.find_not_finite()

    def _own_context(self) -> StepContext:
        """Return the context of one step: what several steps share, and comparisons of its own."""
        return replace(self._context, agreement=copy(self._context.agreement))

    def _submit(self, number: int, round_: DelayedRound, plan: Plan) -> None:
        own = round_.announce(unlike=bool(self._unlike))
        share = self._set_aside(number, round_, plan)
        self._under_way.begin(number, share, own, self.new_slot(round_.layout))

    def _wait_for(self, number: int) -> None:
        self._context.clock.switch("exchange")
        point("delay.waiting")
        super()._wait_for(number)

    def note(self, round_: DelayedRound, combined: Combined, share: Share | None) -> Committed:
        """Take the committed sum of a step; returns what is kept of it for members that have not seen the commit."""
        summed = self._members.summed(combined)
        has_new = any(each.new_sums for each in summed.telemetry.values())
        totals = self._tracked.sums.read(combined.slot.extras[: round_.num_sums])
        number = round_.at
        arrived = Arrived(number, combined.slot, combined.digest, totals, has_new, summed, share)
        if not self._is_left:
            self._take(arrived, round_)
        return Committed(combined.slot.layout, arrived)

    def _take(self, arrived: Arrived, round_: DelayedRound) -> None:
        number = arrived.number
        self._arrived[number], self._summed[number] = arrived, round_
        if round_.differs(arrived):
            self._disputed.add(number)

    def finish(self, number: int) -> None:
        """Note that a step is committed."""
        self._open.pop(number, None)  # there is none where the script has left the loop, and a loss came after that
        self._first = number + 1

    # -- applying ------------------------------------------------------------------------------------

    def _agree(self, number: int) -> Generator[Any, None, bool]:
        """Let what the members have said with a sum count, and compare it. Collective where something differs.

        Returns:
            Whether the sum counts; False: it is made again, without a member that is wrong.
        """
        arrived, round_ = self._arrived[number], self._summed.get(number)
        is_current = arrived.summed is not None and arrived.summed.generation == self._members.team.generation
        is_own = is_current and arrived.share is not None
        if arrived.summed is not None and arrived.share is not None and is_current and not arrived.is_stale:
            self._members.note(arrived.summed)
            self._members.balancing.observe(list(arrived.telemetry.values()), arrived.share)
        if round_ is None:
            return True
        round_.show(arrived)
        if number in self._disputed:  # however the sum has come here
            round_.audit()
            with self._as_of(number, round_):
                return (yield from round_.settle())
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
        if self._is_left or not self._arrived:
            return
        if not self._open:  # else the members have met since one was lost, and know what each has of these
            self._held = [{} for _ in range(self._members.size)]
        self._open = {**dict.fromkeys(self._arrived), **self._open}
        self._first = next(iter(self._open))
        for number in self._arrived:
            self._summed.pop(number, None)
        self._arrived.clear()
        self._disputed.clear()
        self._is_recovering = True

    @property
    def holds_back(self) -> bool:
        return super().holds_back or (bool(self._disputed) and not self._is_left)

    def _apply(self, number: int, folder: GradientFolder) -> Generator[Any, None, Arrived]:
        arrived = self._arrived[number]
        if arrived.has_new_sums:
            raise StepError(
                f"step.add brought a new name in {self._context.name(number)}. With delay= the gradient of a step is "
                "under way while the next ones begin, so all names must be there in the first step: add zeros there"
            )
        del self._arrived[number]
        round_ = self._summed.pop(number, None)
        if round_ is not None and number in self._values and round_.is_broken:
            with self._as_of(number, round_):
                yield from round_.find_not_finite()
        self._values.pop(number, None)
        if arrived.scalars[0] == 0.0:
            raise StepError(
                f"all micro-batches of {self._context.name(number)} have weight 0: there is no mean gradient"
            )
        folder.buffers.start_step()
        shown = arrived.slot
        if self._members.size > 1:  # the script may write to what it gets, and others may need the sum as it is
            shown = arrived.slot.copy_to(self.new_slot(arrived.slot.layout))
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

    def _add_up(self, arrived: Arrived) -> Iterator[Any]:
        """Make sums with new names known, while no other sum is under way. Collective."""
        if not arrived.has_new_sums:
            return
        round_ = self._summed[arrived.number]
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
                self.num_computed += round_.num_computed
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

    # -- as `SumsAhead` needs it -----------------------------------------------------------------------

    def _arrived_sums(self) -> Iterable[Arrived]:
        return self._arrived.values()

    def _has_arrived(self, number: int) -> bool:
        return number in self._arrived

    def interrupt(self) -> None:
        computing = self._computing
        super().interrupt()
        if computing is not None:
            self._active = None
            if computing not in self._values:
                self._values[computing] = Values(self._tracked)

    def _take_given(self, number: int, summed: Summed) -> Arrived:
        slot = summed.slot
        has_new = any(each.new_sums for each in summed.telemetry.values())
        if self._is_left:  # nobody applies it, and it is kept for others that have not seen the commit
            return Arrived(number, slot, summed.digest, {}, has_new, summed)
        round_ = self._open[number]
        assert round_ is not None
        totals = self._tracked.sums.read(slot.extras[: round_.num_sums])
        arrived = Arrived(number, slot, summed.digest, totals, has_new, summed)
        self._take(arrived, round_)
        return arrived

    def _num_leaves(self) -> int:
        return self._context.cursor.position(next(iter(self._open))).num_leaves if self._open else 1

    def _forget(self) -> None:
        self._tracked.pending.current = tuple
        if self._prediction is not None:
            self._prediction.clear()
        self._arrived.clear()
        self._disputed.clear()
        self._summed.clear()
        self._values.clear()
        self._shown = None

    def _pending(self) -> list[Gradient]:
        return [
            Gradient.of(one.slot, one.number, one.digest, one.totals, has_new_sums=one.has_new_sums)
            for one in self._arrived.values()
        ]


def _shapes(layout: FlatLayout) -> list[tuple[str, torch.Size]]:
    return [(entry.name, entry.shape) for entry in (*layout.gradients, *layout.buffers)]
