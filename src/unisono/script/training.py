"""The training loops of a run on one worker, one after the other, and the places of calls within and between them."""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from unisono.cluster.worker import member as members
from unisono.core.audit_rules import too_few
from unisono.core.cadence import Position
from unisono.core.errors import UsageError
from unisono.core.messages import RunDirectoryChosen
from unisono.engine.loop.process_settings import Arithmetic
from unisono.engine.loop.step import Iteration, Steps
from unisono.engine.loop.strategies import Strategy
from unisono.engine.microbatch.data import MakeFetcher
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds.admission import Admission
from unisono.record.rundir import read_facts
from unisono.script.course import Course
from unisono.script.evaluator import Visiting
from unisono.script.loop import Summing, TrainingLoop
from unisono.script.schedule import Asked, Schedule
from unisono.script.talking import CallPlace, Talk
from unisono.system.process import Process

__all__ = ["Length", "Training"]


class Length:
    """Counts the steps that a script asks for, to know how many follow.

    It counts what the calls of ``run.steps`` ask for, and not what was done, so a worker that skips the first calls
    (it has joined later, or the run was resumed) counts as the others do.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._epochs_left: int | None = None  # after this one; None: the script is not within `run.epochs`
        self._asked = 0  # steps of the calls of this epoch
        self._per_epoch = 0  # steps of the calls of the epoch before

    def epochs(self, num: int) -> Iterator[int]:
        """Yield the epochs of a ``run.epochs``; within another one they are part of an epoch of that one."""
        if self._epochs_left is not None:
            yield from range(num)
            return
        self._per_epoch = 0
        try:
            for epoch in range(num):
                self._epochs_left, self._asked = num - epoch - 1, 0
                yield epoch
                self._per_epoch = self._asked
        finally:
            self._epochs_left = None

    def steps_after(self, num_steps: int, *, is_limited: bool) -> int | None:
        """Count a call of ``run.steps``, and return how many steps of the run follow it; None: nobody knows.

        Within ``run.epochs`` each epoch has as many steps as the one before. Outside of it, the first call is the whole
        training if it says how long it is; a script with a second one may have a third.

        Args:
            is_limited: the call says for how many epochs, or steps, it trains.
        """
        self._num_calls += 1
        if self._epochs_left is None:
            return 0 if is_limited and self._num_calls == 1 else None
        self._asked += num_steps
        per_epoch = max(self._per_epoch, self._asked)
        return per_epoch - self._asked + self._epochs_left * per_epoch


class Training:
    """The training loops of a run on this worker, one after the other.

    Attributes:
        loop: the training loop that has begun last.
        phases: the number of those that have begun.
        asked: what the calls of the script have asked for, whatever was done of it.
        length: the same, as a number of steps.
        visiting: not None: this process is an evaluator.
        on_begin: called where a training loop begins.

    Args:
        device: of this worker.
    """

    def __init__(
        self, course: Course, talk: Talk, process: Process, arithmetic: Arithmetic, device: torch.device
    ) -> None:
        self.loop: TrainingLoop | None = None
        self.phases = 0
        self.asked = Asked(members.spec().run.settings.without)
        self.length = Length()
        self.on_begin: Callable[[], None] = _nothing
        self._rounds = course.rounds
        self._keeper = course.keeper
        self._process = process
        self._course = course
        self._talk = talk
        self._arithmetic = arithmetic
        self._device = device
        self.visiting = course.inspector if isinstance(course.inspector, Visiting) else None
        self._admission = Admission(course.rounds, course.keeper.checkpoint)
        self._steps: weakref.ref[Steps[Any]] | None = None  # weak: after a `break` nobody holds it
        self._calls: set[str] = set()
        self._num_updates = 0
        self._updates = register_optimizer_step_post_hook(self._count_update)

    def begin(self, planned: Schedule, strategy: Strategy, summing: Summing, *, first_step: int = 0) -> Steps[Any]:
        """Return the iterations of a training loop, which begins with the first of them.

        Args:
            first_step: how many of them count as done when the run begins.

        Raises:
            UsageError: nothing is tracked that could be trained.
        """
        self._rounds.tracked.check(self._device)
        # By what the script asks for, not by what was done: a worker that skips this call must count alike.
        self.asked.begins(planned)
        planned.begins(self._rounds.tracked)
        self._course.troubles.begins(planned.dataset)
        self._keeper.note_data(getattr(planned.dataset, "_fingerprint", ""), planned.dataset)
        more = self.length.steps_after(planned.num_iterations, is_limited=planned.is_limited)
        loop = TrainingLoop(
            self._course, self._process, self._arithmetic, planned=planned, strategy=strategy, summing=summing
        )
        # The loop's checks come here, and not with its first step.
        train = self._train(loop, planned.fetcher(self._device), first_step, more)
        steps = Steps(train, planned.num_iterations + strategy.num_more)
        self._steps = weakref.ref(steps)
        return steps

    def close(self) -> None:
        """Forget what is only looked at before the first training loop. Does nothing the second time."""
        self._updates.remove()

    def _count_update(self, *_: Any) -> None:
        self._num_updates += 1

    def trained_alone(self) -> str:
        """Return what the script has trained outside of the run, of which it took no step; "": nothing.

        A script that evaluates together, or that has only sent values around, needs no step.
        """
        if self.phases or self.visiting is not None or self._calls & {"run.evaluate", "run.batches"}:
            return ""
        tracked = self._rounds.tracked
        if self._num_updates + sum(parameter.grad is not None for _, parameter in tracked.parameters()) == 0:
            return ""
        if tracked.modules or tracked.optimizers:
            return "run.track was called, but the script took no step of run.steps"
        return "" if self._calls else "a model was trained, but the script took no step of run.steps"

    @property
    def steps(self) -> Steps[Any] | None:
        """The iterations of the newest training loop, if the script has not left it."""
        return self._steps() if self._steps is not None else None

    @property
    def step(self) -> Iteration | None:
        """The iteration that the script is in; None: it is in none."""
        return self.loop.step if self.loop is not None and self.is_open else None

    @property
    def is_open(self) -> bool:
        """Whether the script is between the first step of a training loop and its end."""
        return self.loop is not None and self.loop.is_open

    @property
    def totals(self) -> dict[str, Any]:
        """The sums of ``step.add`` in the newest epoch of the newest training loop."""
        return self._rounds.tracked.sums.totals(self.phases - 1)

    def is_apart(self) -> bool:
        """Return whether the script is within a loop in which each worker is at a part of its own.

        Raises:
            StepError: the script has left such a loop before its end.
        """
        return self.loop is not None and self.loop.is_apart()

    def apart(self) -> AbstractContextManager[None]:
        """Return a context for what is done together between two steps, which is no update of the script's."""
        return self.loop.apart() if self.loop is not None else nullcontext()

    def place(self, what: str) -> CallPlace:
        """Return the place of a call in which all workers take part, in the script.

        Args:
            what: the call, for errors: "run.barrier".

        Raises:
            UsageError: the run has ended, or the call stands where each worker is at a part of its own. StepError: the
                script has left such a loop before its end.
        """
        self._process.check(what)
        self._calls.add(what)
        self._course.check_not_in_batches(f"{what} was called")
        if self.visiting is not None:
            visited = self.visiting.step
            at = visited.number if visited is not None else None
            return CallPlace(rounds=self._rounds, phases=self.phases, step=at, has_joined=False)
        if self.loop is not None and self.loop.is_apart():
            where = "`for batch in step`, where each worker is at another micro-batch"
            if not self.loop.is_in_microbatch():
                where = "`for step in round`, where each worker is at another replica"
            raise UsageError(f"{what} was called inside {where}: call it after that loop")
        if self.loop is not None and not self.loop.is_open:
            self.loop.leave()  # by `break`: what is called now comes after its last step
        return CallPlace(
            rounds=self._rounds,
            phases=self.phases,
            step=self.step.number if self.step is not None else None,
            has_joined=self._course.has_joined,
        )

    # -- the outer loop ------------------------------------------------------------------------------

    def _train(
        self, loop: TrainingLoop, make_fetcher: MakeFetcher, first_step: int, more: int | None
    ) -> Generator[Iteration, None, None]:
        """Yield the iterations of a training loop. Collective.

        Args:
            more: steps of the run after it; None: nobody knows.
        """
        rounds = self._rounds
        self._course.check_not_in_batches("run.steps was called")
        self.on_begin()
        if self.visiting is not None:
            phase, self.phases = self.phases, self.phases + 1
            yield from self.visiting.visit(phase, loop, rounds.tracked, self._device)
            seed_at(loop.cursor.seed, "after loop", phase)
            return
        if self.is_open:
            raise UsageError(
                "run.steps was called inside another run.steps, which is not finished. For another pass over the same "
                "global batch: `for batch in step.again()`. For two datasets in one loop: one run.steps over a dataset "
                "that gives a sample of each, e.g. torch.utils.data.StackDataset(a, b)"
            )
        if self.loop is not None and self.loop.step is not None:
            self.loop.leave()
            if self._course.has_joined:
                rounds.team.leaving(rounds.position.phase, rounds.position.number, goes_on=True)
        phase, self.phases = self.phases, self.phases + 1
        self.close()
        was_in = self._course.has_joined
        first = self._join(phase, loop, first_step)
        if first != 0:  # what is skipped was done: torch warns of a scheduler whose optimizer has made no step
            for optimizer in rounds.tracked.optimizers.values():
                optimizer._opt_called = True  # type: ignore[attr-defined]
        if first is not None:
            self.loop, self._course.num_more = loop, more
            # The state was saved behind this loop. What the script changes until it comes there again, it has changed.
            is_left = not was_in and self._talk.repeats(self.phases)
            if is_left:
                self._talk.when_repeated(self._admission.keep())
            try:
                yield from loop.run(phase, first, make_fetcher, is_left=is_left)
            except GeneratorExit:  # the script has left the loop by `break`
                if self.phases == phase + 1:
                    seed_at(loop.cursor.seed, "after loop", phase)
                raise
        # A worker that skips this loop, now or when the run is resumed, draws what the others draw after it.
        seed_at(loop.cursor.seed, "after loop", phase)

    def _join(self, phase: int, loop: TrainingLoop, first_step: int) -> int | None:
        """Join the run; returns the step to begin with, None if the run is past this phase."""
        rounds, keeper = self._rounds, self._keeper
        recipe = keeper.recipe(loop.recipe, loop.num_steps)
        if self._course.has_joined:
            self._talk.check_repeated()
            rounds.enter_phase(recipe, msgspec.structs.replace(rounds.position, phase=phase, step=0))
            keeper.enter_phase(loop.recipe)
            return 0
        if not self._admission.join(phase, recipe, partial(self._load, phase, loop), first_step):
            return None
        self._course.joins()
        keeper.joined(loop.recipe, rounds, self._admission.lines)
        # Every member that sees the directory: the first may be lost before, or have no such path on its machine.
        directory, member = keeper.directory, members.current()
        if keeper.reaches and directory is not None and member is not None:
            code = keeper.policy.exit_code_on_sigterm if keeper.policy is not None else None
            on_signal = -1 if code is None else code
            facts = json.dumps(read_facts(directory))
            member.send(RunDirectoryChosen(path=str(directory.resolve()), on_signal=on_signal, facts=facts))
        size, microbatches = len(rounds.team.groups), loop.cursor.microbatches
        noun = "worker" if rounds.team.num_parts == 1 else "group"
        if size > microbatches and rounds.team.rank == 0:
            warnings.warn(
                f"{size} {noun}s share {microbatches} micro-batches: {size - microbatches} of them "
                f"have nothing to compute; use more micro-batches or fewer {noun}s",
                stacklevel=4,
            )
        if self._course.audits is not None and rounds.team.rank == 0 and (words := too_few(size, noun)):
            warnings.warn(f"audit: {words}", stacklevel=4)
        self._course.started(keeper.run_id, recipe)
        return rounds.position.step

    def _load(self, phase: int, loop: TrainingLoop) -> Position | None:
        """Load what the run goes on from, on the one worker that begins it; returns its position."""
        if (position := self._keeper.begin(phase, loop.recipe, self.asked)) is not None:
            self.asked.bookmarks.try_again()  # the script may have been corrected
        return position


def _nothing() -> None:
    pass
