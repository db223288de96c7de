"""``run.batches`` and ``run.evaluate``: exact totals over a dataset, at once, or beside the training; ``run.log``.

With ``wait=False`` the call gives an `Evaluation`, and the training goes on while an evaluator computes the totals of a
snapshot (`unisono.strategies.evaluators.beside`); without an evaluator the members compute them at once. Totals are the
same bits in every case. The line of the journal is written where the script asks for the result (or at the end of the
run), so journals are equal, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from unisono.cluster.worker import member as members
from unisono.core.errors import StepError, UsageError
from unisono.engine.checkpoint.evaluations import EvaluationOrder
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds.evaluation import BatchSums, Totals
from unisono.engine.rounds.gathering import TalkRound
from unisono.engine.rounds.life import Rounds
from unisono.engine.state.packing import from_bytes, to_bytes
from unisono.script.batches import Batches
from unisono.script.collecting import Collecting
from unisono.script.course import Course
from unisono.script.talking import CallPlace, Talk, at_once
from unisono.script.training import Training
from unisono.strategies.evaluators.beside import BESIDE, NAME, Begun, BegunEvaluation, Beside, Evaluation
from unisono.strategies.evaluators.requests import EvaluationRequest, drive

__all__ = ["Evaluations"]

UNKNOWN: Final = -1


class Evaluations:
    """This worker's part in the evaluations of a run.

    Args:
        device: of this worker.
        patience_s: after so long without progress, nobody waits for an evaluator any more.
    """

    def __init__(
        self, course: Course, training: Training, talk: Talk, *, seed: int, device: torch.device, patience_s: float
    ) -> None:
        keeper, tracked = course.keeper, course.rounds.tracked
        self._talk = talk
        self._journal = keeper.journal
        self._training = training
        self._course = course
        self._seed = seed
        self._begun = Begun()
        tracked.own(NAME, self._begun)
        self._beside = Beside(
            tracked,
            self._begun,
            keeper.directory,
            device=device,
            patience_s=patience_s,
            reaches=lambda: keeper.reaches,
            all_reach=keeper.all_reach,
            apart=training.apart,
        )
        keeper.wait_for(self._beside)
        self._visiting = training.visiting
        self._handles: dict[int, Evaluation] = {}
        self._where: tuple[int, int | None] | None = None
        self._num_here = 0
        self._newest: tuple[int, Totals] = (0, {})
        self.collecting = Collecting(tracked, talk)
        can_resume = keeper.directory is not None or members.current() is not None
        training.on_begin = partial(self.collecting.begin_loop, is_watched=can_resume)

    @property
    def newest(self) -> Totals:
        """The totals of the loops over ``run.batches`` since the newest training loop has begun."""
        phases, totals = self._newest
        return totals if phases == self._training.phases else {}

    # -- numbers of the script -------------------------------------------------------------------------

    def log(self, place: CallPlace, own: dict[str, float]) -> None:
        """Write figures of rank 0 into a line of the journal. Collective.

        Args:
            own: those of this worker.

        Raises:
            UsageError: no step of the run has begun.
        """
        is_new = False
        if place.is_early:
            raise UsageError("run.log writes into the journal of a training: call it after the first step of the run")

        def tell() -> Generator[Any, None, dict[str, float]]:
            nonlocal is_new
            if place.is_skipped:
                return {}
            is_new, rounds = True, place.rounds
            said = TalkRound(rounds, "run.log", lambda: to_bytes(own) if rounds.members.rank == 0 else b"")
            yield from rounds.play(said)
            found: dict[str, float] = from_bytes(said.values[0])
            return found

        found = drive(self._talk.once(place, "run.log", tell), lambda nothing: None)
        if place.is_skipped:
            return
        keeper = self._course.keeper
        num_steps = self._course.num_steps
        keeper.note_after(num_steps + (place.step is not None), found)  # the step that the script is in ends with them
        self._course.evaluated(num_steps, {}, logs=found)
        if is_new and place.step is None and keeper.keep_best in found:
            self._save(place)  # the checkpoint of this step was written without the figure

    def save(self, place: CallPlace) -> None:
        """Write a checkpoint after a training loop. Collective.

        It knows of this call: a script that resumes from it repeats the code up to here, and has its state then.
        """
        is_new = False

        def note() -> bool:
            nonlocal is_new
            is_new = not place.is_skipped
            return True

        drive(self._talk.once(place, "run.save", lambda: at_once(note)), lambda nothing: None)
        if is_new:
            self._save(place)

    def _save(self, place: CallPlace) -> None:
        keeper = self._course.keeper
        keeper.saver.request()
        keeper.save_together(place.rounds)

    def add_to_total(self, name: str, value: float | Tensor) -> None:
        """Add to a `RunTotal`, in the loop that the script is in. Local."""
        loop, batches = self._training.loop, self._course.in_batches
        if batches is not None:
            self._refuse_two(name, self._training.totals)
            batches.add(**{name: value})
        elif loop is not None and loop.step is not None:
            self._refuse_two(name, self.newest)
            loop.step.add(**{name: value})
        else:
            raise StepError(
                f"run.total({name!r}) += ... stands outside of the loops that it adds up: within `for batch in step` "
                "or `for batch in run.batches(...)`. Elsewhere all workers would add the same value"
            )

    def total(self, name: str) -> Any:
        """Return the value of a `RunTotal`. Local."""
        self._course.check_not_in_batches(f"the value of run.total({name!r}) was read")
        if self._training.is_apart():
            raise StepError(f"the value of run.total({name!r}) is known only after the inner loop `for batch in step`")
        newest = self.newest
        return newest[name] if name in newest else self._training.totals.get(name, 0)

    def _refuse_two(self, name: str, others: Collection[str]) -> None:
        if name in others:
            raise UsageError(
                f"run.total({name!r}) is added up in the training and in an evaluation: give it another name in one of "
                "the two"
            )

    # -- calls ---------------------------------------------------------------------------------------

    def play(
        self,
        place: CallPlace,
        kind: str,
        make: Callable[[Rounds | None, int], Generator[Any, None, Totals]],
        sums: BatchSums,
    ) -> Generator[Any, None, Totals]:
        """Yield batches, and return the totals of all; where the run was here, only the totals. Collective.

        Args:
            kind: the call.
            make: yields the batches, for these rounds and this number of the evaluation.
            sums: takes what the script finds in them.
        """
        number = self._begun.num_done
        self._begun.num_done += 1
        is_skipped = True

        def compute() -> Generator[Any, None, tuple[Totals, int]]:
            nonlocal is_skipped
            is_skipped = False
            with self.collecting.under_way(sums, place):
                totals = yield from make(place.rounds if place.has_joined else None, number)
            # With the number of lines after it, which a worker that skips this part of the run does not know.
            return totals, self._journal.number + 1

        num_steps = self._course.num_steps
        with self._training.apart():
            totals, lines = yield from self._talk.once(place, kind, compute)
        if is_skipped:
            self.collecting.skips(place)
        if not place.is_skipped:
            self._course.evaluated(num_steps, totals)
        # Every member has evaluated other batches, and the code that follows may draw random numbers.
        seed_at(self._seed, "after", lines)
        return totals

    def now(self, place: CallPlace, request: EvaluationRequest) -> Totals:
        """Return the totals. Collective."""
        sums = BatchSums("run.evaluate", fills=False)

        def compute(rounds: Rounds | None, number: int) -> Generator[Any, None, Totals]:
            return at_once(lambda: request.compute(rounds, number, sums=sums))

        return drive(self.play(place, "run.evaluate", compute, sums), lambda batch: None)

    def loop(self, request: EvaluationRequest, batches: Batches) -> Generator[Any, None, Totals]:
        """Yield the batches of a loop of the script's own, and return the totals of all. Collective."""
        place = self._training.place("run.batches")
        self._course.in_batches = batches
        sums = batches.sums
        totals = yield from self.play(
            place, "run.batches", lambda rounds, number: request.play(rounds, number, sums), sums
        )
        self._course.in_batches = None
        self._newest = (self._training.phases, self.newest | totals)
        return totals

    def begin(self, place: CallPlace, request: EvaluationRequest) -> Evaluation:
        """Begin an evaluation, and return its handle. Collective."""
        num_steps = self._course.num_steps
        if place.is_early:  # no worker has joined, so each computes it by itself
            totals = self.now(place, request)
            return Evaluation(num_steps, lambda: totals, lambda: True)
        call = self._call_at(place)
        if self._visiting is not None:
            self._visiting.compute(place, call, request)
        begun = self._talk.once(place, BESIDE, lambda: at_once(lambda: self._begin(place, request, call)))
        number = drive(begun, lambda nothing: None)
        if number == UNKNOWN:
            return Evaluation(num_steps, lambda: request.compute(None, 0), lambda: True)
        seed_at(self._seed, "evaluation", number)
        return self._handle(self._begun.entries[number])

    def _call_at(self, place: CallPlace) -> int:
        """Count a call at a place; returns how many there were before."""
        where = (place.phases, place.step)
        if where != self._where:
            self._where, self._num_here = where, 0
        self._num_here += 1
        return self._num_here - 1

    @property
    def pending(self) -> list[Evaluation]:
        """The evaluations whose result the script has not asked for, the oldest first."""
        if self._visiting is not None:
            return []
        return [self._handle(entry) for entry in self._begun.entries.values() if not entry.is_asked]

    def end(self, rounds: Rounds) -> None:
        """Wait for all evaluations at the end of the run, and write their lines of the journal. Collective."""
        self._beside.settle(rounds)
        for entry in list(self._begun.entries.values()):
            if not entry.is_asked:
                self._hand_out(entry)

    # -- inside --------------------------------------------------------------------------------------

    def _begin(self, place: CallPlace, request: EvaluationRequest, call: int) -> int:
        """Begin an evaluation; returns its number. Collective.

        Args:
            call: number of the call at its place.
        """
        if not place.has_joined:  # and the run has no such evaluation
            return UNKNOWN
        rounds, begun, num_steps = place.rounds, self._begun, self._course.num_steps
        step = self._training.step
        known = step if step is not None and step.is_complete else None
        with self._training.apart():
            entry = begun.add(num_steps, stays=place.step is None)
            order = EvaluationOrder(
                number=entry.number,
                phases=place.phases,
                step=-1 if place.step is None else place.step,
                number_in_loop=known.number_in_loop if known is not None else 0,
                call=call,
                loss=known.loss if known is not None else math.nan,
                totals=to_bytes(known.totals) if known is not None else b"",
                samples=request.samples,
                batch_size=request.batch_size,
                num_steps=num_steps,
            )
            if not self._beside.begin(rounds, order, request):
                entry.totals, entry.is_settled = to_bytes(request.compute(rounds, begun.num_done)), True
        begun.num_done += 1
        return entry.number

    def _handle(self, entry: BegunEvaluation) -> Evaluation:
        """Return the one handle of an evaluation."""
        number = entry.number
        if number not in self._handles:

            def is_known() -> bool:
                return bool(entry.totals or self._beside.outcome(number))

            self._handles[number] = Evaluation(entry.step, lambda: self._ask(entry), is_known)
        return self._handles[number]

    def _ask(self, entry: BegunEvaluation) -> Totals:
        """Return the totals of an evaluation, which the script asks for. Collective."""
        place = self._training.place("the result of an evaluation")
        if place.has_joined and not entry.is_asked:
            with self._training.apart():
                if not entry.is_settled:
                    self._beside.settle_some(place.rounds, [entry.number])
                self._hand_out(entry)
            seed_at(self._seed, "evaluated", entry.number)
        found: Totals = from_bytes(entry.totals)
        return found

    def _hand_out(self, entry: BegunEvaluation) -> None:
        entry.is_asked = True
        self._handles.pop(entry.number, None)
        if not entry.stays:
            del self._begun.entries[entry.number]
        self._course.evaluated(entry.step, from_bytes(entry.totals))
