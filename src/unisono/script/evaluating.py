"""``run.batches`` and ``run.evaluate``: exact totals over a dataset, at once, or beside the training.

With ``wait=False`` the call gives an `Evaluation`, and the training goes on while an evaluator computes the totals of a
snapshot (`unisono.strategies.evaluators.beside`); without an evaluator the members compute them at once. Totals are the
same bits in every case. The line of the journal is written where the script asks for the result (or at the end of the
run), so journals are equal, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Literal, overload

import torch

from unisono.engine.checkpoint.evaluations import Order
from unisono.engine.microbatch.iterables import Dataset
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds.evaluation import Totals
from unisono.engine.rounds.life import Rounds
from unisono.engine.state.packing import from_bytes, to_bytes
from unisono.engine.state.tracked import Tracked
from unisono.script.batches import Batches
from unisono.script.evaluator import Visiting
from unisono.script.keeping import Keeper
from unisono.script.talking import Place, Talk, at_once
from unisono.strategies.evaluators.begun import Begun, Entry, Evaluation
from unisono.strategies.evaluators.beside import BESIDE, NAME, Beside
from unisono.strategies.evaluators.requests import Request, Requests, drive

__all__ = ["About", "Evaluating", "Evaluations"]

UNKNOWN: Final = -1


@dataclass(frozen=True, kw_only=True)
class About:
    """How far the training is at a call."""

    num_steps: int
    """Of the run, that are done."""
    number_in_loop: int = 0
    """Of the step in which the call stands."""
    loss: float = math.nan
    totals: bytes = b""
    """The `Step.totals` of that step."""


class Evaluations:
    """This worker's part in the evaluations of a run.

    Args:
        find_place: returns the place of a call in the script.
        record: writes a line of the journal: (steps done at the call, totals).
        lines: returns the number of lines of the journal.
        apart: returns a context for work that is no part of the script's update.
        patience_s: after so long without progress, nobody waits for an evaluator any more.
        visiting: not None: this process is an evaluator.
    """

    def __init__(
        self,
        tracked: Tracked,
        talk: Talk,
        keeper: Keeper,
        *,
        seed: int,
        device: torch.device,
        deterministic: bool,
        find_place: Callable[[str], Place],
        record: Callable[[int, Totals], None],
        lines: Callable[[], int],
        apart: Callable[[], AbstractContextManager[None]],
        patience_s: float,
        visiting: Visiting | None = None,
    ) -> None:
        self._talk = talk
        self._seed = seed
        self._find_place = find_place
        self._record = record
        self._lines = lines
        self._apart = apart
        self.requests = Requests(tracked, seed=seed, device=device, deterministic=deterministic)
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
            apart=apart,
        )
        keeper.wait_for(self._beside)
        self._visiting = visiting
        self._handles: dict[int, Evaluation] = {}
        self._where: tuple[int, int | None] | None = None
        self._num_here = 0
        self.in_loop: Batches | None = None
        """The loop that the script is in, or has left before its end."""
        self.newest: Totals = {}
        """The totals of the loops since the newest training loop has begun."""

    # -- calls ---------------------------------------------------------------------------------------

    def play(
        self,
        place: Place,
        kind: str,
        num_steps: int,
        make: Callable[[Rounds | None, int], Generator[Any, None, Totals]],
    ) -> Generator[Any, None, Totals]:
        """Yield batches, and return the totals of all; where the run was here, only the totals. Collective.

        Args:
            kind: the call.
            make: yields the batches, for these rounds and this number of the evaluation.
        """
        number = self._begun.num_done
        self._begun.num_done += 1

        def compute() -> Generator[Any, None, tuple[Totals, int]]:
            totals = yield from make(place.rounds if place.has_joined else None, number)
            # With the number of lines after it, which a worker that skips this part of the run does not know.
            return totals, self._lines() + 1

        with self._apart():
            totals, lines = yield from self._talk.once(place, kind, compute)
        if not place.is_skipped:
            self._record(num_steps, totals)
        # Every member has evaluated other batches, and the code that follows may draw random numbers.
        seed_at(self._seed, "after", lines)
        return totals

    def now(self, place: Place, request: Request, num_steps: int) -> Totals:
        """Return the totals. Collective."""

        def compute(rounds: Rounds | None, number: int) -> Generator[Any, None, Totals]:
            return at_once(lambda: request.compute(rounds, number))

        return drive(self.play(place, "run.evaluate", num_steps, compute), lambda batch: None)

    def loop(self, place: Place, request: Request, num_steps: int, batches: Batches) -> Generator[Any, None, Totals]:
        """Yield the batches of a loop of the script's own, and return the totals of all. Collective."""
        self.in_loop = batches
        totals = yield from self.play(
            place, "run.batches", num_steps, lambda rounds, number: request.play(rounds, number, batches.sums)
        )
        self.in_loop = None
        self.newest |= totals
        return totals

    def begin(self, place: Place, request: Request, num_steps: int, about: About) -> Evaluation:
        """Begin an evaluation, and return its handle. Collective."""
        if place.is_early:  # no worker has joined, so each computes it by itself
            totals = self.now(place, request, num_steps)
            return Evaluation(num_steps, lambda: totals, lambda: True)
        call = self._call_at(place)
        if self._visiting is not None:
            self._visiting.compute(place, call, request)
        begun = self._talk.once(
            place, BESIDE, lambda: at_once(lambda: self._begin(place, request, num_steps, call, about))
        )
        number = drive(begun, lambda nothing: None)
        if number == UNKNOWN:
            return Evaluation(num_steps, lambda: request.compute(None, 0), lambda: True)
        seed_at(self._seed, "evaluation", number)
        return self._handle(self._begun.entries[number])

    def _call_at(self, place: Place) -> int:
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

    def _begin(self, place: Place, request: Request, num_steps: int, call: int, about: About) -> int:
        """Begin an evaluation; returns its number. Collective."""
        if not place.has_joined:  # and the run has no such evaluation
            return UNKNOWN
        rounds, begun = place.rounds, self._begun
        with self._apart():
            entry = begun.add(num_steps, stays=place.step is None)
            order = Order(
                number=entry.number,
                phases=place.phases,
                step=-1 if place.step is None else place.step,
                number_in_loop=about.number_in_loop,
                call=call,
                loss=about.loss,
                totals=about.totals,
                samples=request.samples,
                batch_size=request.batch_size,
                num_steps=num_steps,
            )
            if not self._beside.begin(rounds, order, request):
                entry.totals, entry.is_settled = to_bytes(request.compute(rounds, begun.num_done)), True
        begun.num_done += 1
        return entry.number

    def _handle(self, entry: Entry) -> Evaluation:
        """Return the one handle of an evaluation."""
        number = entry.number
        if number not in self._handles:

            def is_known() -> bool:
                return bool(entry.totals or self._beside.outcome(number))

            self._handles[number] = Evaluation(entry.step, lambda: self._ask(entry), is_known)
        return self._handles[number]

    def _ask(self, entry: Entry) -> Totals:
        """Return the totals of an evaluation, which the script asks for. Collective."""
        place = self._find_place("the result of an evaluation")
        if place.has_joined and not entry.is_asked:
            with self._apart():
                if not entry.is_settled:
                    self._beside.settle_some(place.rounds, [entry.number])
                self._hand_out(entry)
            seed_at(self._seed, "evaluated", entry.number)
        found: Totals = from_bytes(entry.totals)
        return found

    def _hand_out(self, entry: Entry) -> None:
        entry.is_asked = True
        self._handles.pop(entry.number, None)
        if not entry.stays:
            del self._begun.entries[entry.number]
        self._record(entry.step, from_bytes(entry.totals))


class Evaluating(ABC):
    """``run.evaluate``; the class that inherits it knows where in the script a call is made."""

    _evaluations: Evaluations

    @abstractmethod
    def _place(self, what: str) -> Place:
        """Return the place of a call in which all workers take part, in the script."""

    @abstractmethod
    def _about(self) -> About:
        """Return how far the training is."""

    @overload
    def evaluate(
        self,
        dataset: Dataset,
        function: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int | None = None,
        wait: Literal[True] = True,
    ) -> Totals: ...

    @overload
    def evaluate(
        self,
        dataset: Dataset,
        function: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int | None = None,
        wait: Literal[False],
    ) -> Evaluation: ...

    def evaluate(
        self,
        dataset: Dataset,
        function: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int | None = None,
        wait: bool = True,
    ) -> Totals | Evaluation:
        """Return exact totals over a dataset, e.g. of correct answers and samples: no padding, no duplicates, the same
        bits. Collective.

        Tracked modules are in ``eval()`` mode meanwhile, without gradients.

        Args:
            dataset: anything with ``len`` and ``[i]``; data without a length (`TarShards`, an ``IterableDataset``); or
                a ``DataLoader``, whose sampler and ``drop_last`` decide which samples count.
            function: batch -> totals of that batch by name (numbers or tensors), which are added up in float64 or as
                integers.
            batch_size: samples given to ``function`` at a time; every worker evaluates some of the batches. Default:
                that of the DataLoader.
            collate: list of samples -> batch; default: that of ``DataLoader``.
            loader_workers: processes per worker that load data ahead; default: 0, or the DataLoader's.
            wait: False: write a snapshot of the models, and let an evaluator (``unisono run --evaluators N``, ``unisono
                evaluate RUN``) compute the totals while the training goes on. Without an evaluator the workers compute
                them now. The bits are the same.

        Returns:
            The totals by name; int, float, or a CPU tensor of the shape that ``function`` gives. With ``wait=False`` an
            `Evaluation`, whose `result` gives them. Equal on all workers.

        Raises:
            RecipeError: the dataset and the options do not fit together. UsageError: called within the inner loop, or
                ``function`` returns no totals. StepError: ``function`` has made or replaced parameters.
            DivergenceError: the models of the workers, or two results of one batch, are not the same.
        """
        place = self._place("run.evaluate")
        request = self._evaluations.requests.make(
            dataset, function, batch_size=batch_size, collate=collate, loader_workers=loader_workers
        )
        about = self._about()
        if wait:
            return self._evaluations.now(place, request, about.num_steps)
        return self._evaluations.begin(place, request, about.num_steps, about)

    def batches(
        self,
        dataset: Dataset,
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int | None = None,
    ) -> Batches:
        """Return the batches of a dataset for a loop that evaluates, shared out over the workers. Collective.

        ::

            loss, right = run.total("loss"), run.total("right")
            for images, labels in run.batches(test_loader):
                logits = model(images)
                loss += F.cross_entropy(logits, labels, reduction="sum")
                right += (logits.argmax(1) == labels).sum()
            print(loss / len(test_set), right / len(test_set))

        As `evaluate`: exact totals, no padding, no duplicates, the same bits; tracked modules are in ``eval()`` mode
        meanwhile, without gradients. In a part of the run that is over the loop gives no batch, and the totals are
        those that the run had there. See docs/evaluation.md.

        Args:
            dataset, batch_size, collate, loader_workers: as of `evaluate`.

        Returns:
            An iterable with `add`, `totals`, `index` and a length. To leave its loop by ``break`` is an error.

        Raises:
            RecipeError: the dataset and the options do not fit together.
        """
        request = self._evaluations.requests.make(
            dataset, None, batch_size=batch_size, collate=collate, loader_workers=loader_workers
        )

        def play(batches: Batches) -> Generator[Any, None, Totals]:
            place = self._place("run.batches")
            return self._evaluations.loop(place, request, self._about().num_steps, batches)

        return Batches(request.num_batches, play)

    @property
    def pending(self) -> list[Evaluation]:
        """The evaluations that were begun with ``wait=False`` and whose result was not asked for, the oldest first.
        Local.

        Equal on all workers, also on one that has come later, and in a run that has resumed: their scripts have no
        variable with the handle. So ask for results by it::

            if step.number % 100 == 50:
                for evaluation in run.pending:
                    print(evaluation.step, evaluation.result())
        """
        return self._evaluations.pending
