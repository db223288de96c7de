"""``run.evaluate``: exact totals over a dataset, at once, or beside the training.

With ``wait=False`` the call gives an `Evaluation`, and the training goes on. Rank 0 asks the head for an evaluator
(`unisono.decisions.membership.evaluators`); if there is one, each member keeps a copy of the models, and rank 0 gives
it to the evaluator. If there is none, the members compute the totals at once. Each decision is one that all members
take together, by the results of a round, so it does not matter who has heard of what first:

* whether an evaluator computes the totals is the answer that rank 0 has got;
* `Evaluation.result` takes the totals from whoever has them; if nobody has, the members compute them from their copies.

Totals are the same bits in every case. The line of the journal is written where the script asks for the result (or at
the end of the run), so journals are equal, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol, cast, overload

import msgspec
import torch
from torch.utils.data import DataLoader

from unisono import member as members
from unisono.decisions.cursor import Cursor
from unisono.decisions.plan import Plan
from unisono.errors import StepError
from unisono.faults import point
from unisono.messages import EvaluationWanted
from unisono.microbatch.data import Fetcher, MakeFetcher, MapDataset
from unisono.microbatch.iterables import Dataset, batches_of, stream_source_of
from unisono.microbatch.loaders import source_of
from unisono.microbatch.randomness import seed_at
from unisono.microbatch.streamfetcher import StreamFetcher
from unisono.rounds.auditing import Audits
from unisono.rounds.evaluation import Totals, check_batches, evaluate
from unisono.rounds.handover import Handover
from unisono.rounds.life import CHECKPOINT, GIVEN_UP, Rounds
from unisono.rounds.talking import TalkRound
from unisono.secret import key_for
from unisono.state.kept import Kept
from unisono.state.packing import from_bytes, pack, to_bytes
from unisono.state.tracked import Tracked
from unisono.training.talking import Place, Talk

__all__ = ["SECRET", "About", "Evaluating", "Evaluation", "Evaluations", "Request"]

SECRET: Final = "models for an evaluator"
"""What the key of `unisono.rounds.handover` is derived for."""
NAME: Final = "evaluations"
TOLD: Final = ("sums", "talk", NAME)
"""What an evaluator gets besides the models: what has happened in the loops that its script skips."""
MOST_UNDER_WAY: Final = 4
"""Evaluations under way; the next call of ``run.evaluate`` waits for the oldest. Each costs a copy of the models."""


BESIDE: Final = "run.evaluate(wait=False)"
NOBODY: Final = "the evaluations that no evaluator does"
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


class Compute(Protocol):
    """Computes totals. Collective where there are rounds."""

    def __call__(self, rounds: Rounds | None, number: int, at: Callable[[int], None] = ...) -> Totals:
        """
        Args:
            rounds: None: this worker alone.
            number: of the evaluation, for rehearsals.
            at: called before each batch, where this worker is alone.
        """


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a call of ``run.evaluate`` asks for, checked."""

    samples: int
    batch_size: int
    compute: Compute


class Follows(Protocol):
    """This worker as an evaluator (`unisono.training.evaluator`)."""

    def evaluate(self, place: Place, call: int, request: Request, num_steps: int) -> Evaluation | None:
        """Compute the totals of a call, if this evaluator has the order for it; None: it has not."""

    def unknown(self, num_steps: int) -> Evaluation:
        """Return a handle whose totals an evaluator does not know."""


class _Entry(msgspec.Struct, kw_only=True):
    """One evaluation that was begun with ``wait=False``: a part of the run's state."""

    number: int
    step: int
    """Steps of the run that were done at the call."""
    totals: bytes = b""
    """As `to_bytes` gives them; empty: this member does not know them."""
    is_settled: bool = False
    """All members know the totals."""
    is_asked: bool = False
    """The script has asked for the result."""
    stays: bool = False
    """It was begun after a training loop: a worker that comes later makes the same call, and gets the same totals."""


@dataclass
class _UnderWay:
    """What this member needs of an evaluation that an evaluator computes."""

    request: Request
    kept: Kept
    handover: Handover | None = None


class _Register:
    """The evaluations that were begun with ``wait=False``: a part of the run's state.

    Args:
        heard: returns the totals of an evaluation that an evaluator has sent; empty: there are none yet.
    """

    def __init__(self, heard: Callable[[int], bytes]) -> None:
        self._heard = heard
        self.entries: dict[int, _Entry] = {}
        self.count = 0

    def add(self, step: int, *, stays: bool) -> _Entry:
        entry = _Entry(number=self.count, step=step, stays=stays)
        self.entries[entry.number] = entry
        self.count += 1
        return entry

    @property
    def unsettled(self) -> list[int]:
        return [number for number, entry in self.entries.items() if not entry.is_settled]

    def state_dict(self) -> Any:
        entries = [msgspec.structs.asdict(entry) for entry in self.entries.values()]
        for entry in entries:
            entry["totals"] = entry["totals"] or self._heard(entry["number"])
        return {"count": self.count, "entries": entries}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]
        self.entries = {entry["number"]: _Entry(**entry) for entry in state["entries"]}


class Evaluation:
    """Totals that are computed beside the training: what ``run.evaluate(..., wait=False)`` returns."""

    def __init__(self, step: int, ask: Callable[[], Totals], known: Callable[[], bool]) -> None:
        self._step = step
        self._ask = ask
        self._known = known
        self._totals: Totals | None = None

    @property
    def step(self) -> int:
        """Number of the step of the run (`Step.place`, from 0) in which the call stands; after a training loop, of the
        step that would come next.
        """
        return self._step

    @property
    def done(self) -> bool:
        """Whether `result` gives the totals at once. It becomes true at different times on different workers: for
        printing, never for deciding.
        """
        return self._totals is not None or self._known()

    def result(self) -> Totals:
        """Return the totals by name; waits for them. Collective: all workers ask at the same place of the script.

        The bits are those of ``run.evaluate(...)`` at the same step, whoever has computed them. If the evaluator was
        lost, the workers compute them now, from the copies of the models that they have kept.

        Raises:
            UsageError: called within the inner loop.
        """
        if self._totals is None:
            self._totals = self._ask()
        return dict(self._totals)

    def __repr__(self) -> str:
        return f"<evaluation of step {self._step}: {'done' if self.done else 'under way'}>"


class _SettleRound(TalkRound):
    """Makes known to all members the totals that one of them has; before that, each waits until it has heard."""

    def __init__(self, rounds: Rounds, numbers: Collection[int], hear: Callable[[int], bytes], kind: str) -> None:
        def heard() -> bytes:
            return msgspec.msgpack.encode({number: hear(number) for number in numbers})

        super().__init__(rounds, f"the result of evaluation {', '.join(map(str, numbers))}", heard)
        self.kind = kind
        self._hear = hear
        self._numbers = numbers

    def compute(self, plan: Plan) -> Iterator[object]:
        point("in_talk")
        with self._members.waiting():
            for number in self._numbers:
                self._hear(number)
        yield from ()

    @property
    def known(self) -> dict[int, bytes]:
        """The totals that a member has, by number; those that no member has are left out."""
        found: dict[int, bytes] = {}
        for value in self.values:
            heard = msgspec.msgpack.decode(value, type=dict[int, bytes])
            found.update({number: totals for number, totals in heard.items() if totals})
        return found


class Evaluations:
    """This worker's part in the evaluations of a run.

    Args:
        find_place: returns the place of a call in the script.
        record: writes a line of the journal: (steps done at the call, totals).
        lines: returns the number of lines of the journal.
        apart: returns a context for work that is no part of the script's update.
        audits: go on without workers whose state is not that of most; None: that is an error.
    """

    def __init__(
        self,
        tracked: Tracked,
        talk: Talk,
        *,
        seed: int,
        device: torch.device,
        deterministic: bool,
        find_place: Callable[[str], Place],
        record: Callable[[int, Totals], None],
        lines: Callable[[], int],
        apart: Callable[[], AbstractContextManager[None]],
        audits: Audits | None = None,
    ) -> None:
        self._tracked = tracked
        self._talk = talk
        self._audits = audits
        self._seed = seed
        self._device = device
        self._deterministic = deterministic
        self._find_place = find_place
        self._record = record
        self._lines = lines
        self._apart = apart
        self._num = 0  # for rehearsals
        self._register = _Register(lambda number: self._outcome(number) or b"")
        tracked.own(NAME, self._register)
        self._under_way: dict[int, _UnderWay] = {}
        self._handles: dict[int, Evaluation] = {}
        self._where: tuple[int, int | None] | None = None
        self._num_here = 0
        self.follower: Follows | None = None
        """Not None: this worker is an evaluator."""
        self.has_begun = False
        """An evaluation has begun since the newest reports of all members. Equal on all of them."""

    # -- calls ---------------------------------------------------------------------------------------

    def request(
        self,
        dataset: Dataset,
        function: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int | None,
        collate: Callable[[list[Any]], Any] | None,
        loader_workers: int | None,
    ) -> Request:
        """Return what a call asks for.

        Raises:
            RecipeError, UsageError: the arguments do not fit together.
        """
        options: dict[str, Any] = {"batch_size": batch_size, "collate": collate, "loader_workers": loader_workers}
        if (streams := stream_source_of(dataset, "run.evaluate", **options)) is not None:
            samples = batches_of(streams, self._seed)
            return self._request(
                lambda upcoming: StreamFetcher(
                    streams.data, samples, device=self._device, loading=streams.loading, upcoming=upcoming
                ),
                function,
                num_samples=samples.num_samples,
                num_batches=samples.num_batches,
                batch_size=streams.batch_size,
            )
        source = source_of(cast("MapDataset | DataLoader[Any]", dataset), "run.evaluate", shuffles=False, **options)
        num_batches = check_batches(source.order.num_samples, source.batch_size, drop_last=source.drop_last)
        whole = source.batch_size * num_batches  # one step, whose micro-batches are the batches
        cursor = Cursor(order=source.order, batch_size=whole, microbatches=num_batches, seed=self._seed)
        return self._request(
            lambda upcoming: Fetcher(
                source.dataset, cursor, device=self._device, loading=source.loading, upcoming=upcoming
            ),
            function,
            num_samples=source.order.num_samples,
            num_batches=num_batches,
            batch_size=source.batch_size,
        )

    def _request(
        self,
        make_fetcher: MakeFetcher,
        function: Callable[[Any], Mapping[str, Any]],
        *,
        num_samples: int,
        num_batches: int,
        batch_size: int,
    ) -> Request:
        def compute(rounds: Rounds | None, number: int, at: Callable[[int], None] = lambda batch: None) -> Totals:
            return evaluate(
                rounds,
                self._tracked,
                function,
                make_fetcher,
                num_batches=num_batches,
                seed=self._seed,
                rehearses=self._deterministic,
                number=number,
                at=at,
                audits=self._audits,
            )

        return Request(samples=num_samples, batch_size=batch_size, compute=compute)

    def now(self, place: Place, request: Request, num_steps: int) -> Totals:
        """Return the totals. Collective."""
        number, self._num = self._num, self._num + 1

        def make() -> tuple[Totals, int]:
            # With the number of lines after it, which a worker that skips this part of the run does not know.
            return request.compute(place.rounds if place.has_joined else None, number), self._lines() + 1

        with self._apart():
            totals, lines = self._talk.once(place, "run.evaluate", make)
        if not place.is_skipped:
            self._record(num_steps, totals)
        # Every member has evaluated other batches, and the code that follows may draw random numbers.
        seed_at(self._seed, "after", lines)
        return totals

    def begin(self, place: Place, request: Request, num_steps: int, about: About) -> Evaluation:
        """Begin an evaluation, and return its handle. Collective."""
        if place.is_early:  # no worker has joined, so each computes it by itself
            totals = self.now(place, request, num_steps)
            return Evaluation(num_steps, lambda: totals, lambda: True)
        call = self._call_at(place)
        if self.follower is not None and (found := self.follower.evaluate(place, call, request, num_steps)) is not None:
            return found
        number = self._talk.once(place, BESIDE, lambda: self._begin(place, request, num_steps, call, about))
        if number == UNKNOWN and self.follower is not None:
            return self.follower.unknown(num_steps)
        if number == UNKNOWN:
            return Evaluation(num_steps, lambda: request.compute(None, 0), lambda: True)
        seed_at(self._seed, "evaluation", number)
        return self._handle(self._register.entries[number])

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
        if self.follower is not None:
            return []
        return [self._handle(entry) for entry in self._register.entries.values() if not entry.is_asked]

    # -- with the training ---------------------------------------------------------------------------

    def settle(self, rounds: Rounds) -> None:
        """Wait for all evaluations that are under way, so that the state of the run has their totals. Collective."""
        self._settle(rounds, self._register.unsettled, CHECKPOINT)

    def settle_given_up(self, rounds: Rounds) -> None:
        """Compute the evaluations that no evaluator does any more, as far as a member has heard of it. Collective."""
        with self._apart():
            self._settle(rounds, self._given_up(rounds, GIVEN_UP))

    @property
    def is_given_up(self) -> bool:
        """Whether this member has heard of an evaluation that no evaluator does it any more. Local."""
        return bool(self._heard_given_up())

    def end(self, rounds: Rounds) -> None:
        """Wait for all evaluations at the end of the run, and write their lines of the journal. Collective."""
        self.settle(rounds)
        for entry in list(self._register.entries.values()):
            if not entry.is_asked:
                self._hand_out(entry)

    @property
    def is_under_way(self) -> bool:
        """Whether this member lacks totals, so that a checkpoint has to wait. Local, and not equal on all."""
        return any(not self._outcome(number) for number in self._under_way)

    def close(self) -> None:
        """Give back what is held, whatever happened."""
        for under_way in self._under_way.values():
            if under_way.handover is not None:
                under_way.handover.close()
        self._under_way.clear()

    # -- inside --------------------------------------------------------------------------------------

    def _begin(self, place: Place, request: Request, num_steps: int, call: int, about: About) -> int:
        """Begin an evaluation; returns its number. Collective."""
        if not place.has_joined:  # and the run has no such evaluation
            return UNKNOWN
        rounds = place.rounds
        with self._apart():
            if unsettled := self._register.unsettled:
                given_up = self._given_up(rounds)
                oldest = unsettled[: max(0, len(unsettled) - MOST_UNDER_WAY + 1)]
                self._settle(rounds, [one for one in unsettled if one in given_up or one in oldest])
            entry = self._register.add(num_steps, stays=place.step is None)
            wanted = EvaluationWanted(
                number=entry.number,
                phases=place.phases,
                step=-1 if place.step is None else place.step,
                number_in_loop=about.number_in_loop,
                call=call,
                loss=about.loss,
                totals=about.totals,
                samples=request.samples,
                batch_size=request.batch_size,
            )
            if self._is_taken(rounds, wanted, request):
                self.has_begun = True
            else:
                entry.totals, entry.is_settled = to_bytes(request.compute(rounds, self._num)), True
        self._num += 1
        return entry.number

    def _heard_given_up(self) -> list[int]:
        """Return the evaluations of which this member has heard that no evaluator does them. Local."""
        return [one for one in self._register.unsettled if self._outcome(one) == b""]

    def _given_up(self, rounds: Rounds, kind: str = "talk") -> list[int]:
        """Return the evaluations of which a member has heard that no evaluator does them. Collective."""
        round_ = TalkRound(rounds, NOBODY, lambda: msgspec.msgpack.encode(self._heard_given_up()))
        round_.kind = kind
        for _ in rounds.play(round_):
            pass
        return sorted({one for value in round_.values for one in msgspec.msgpack.decode(value, type=list[int])})

    def _is_taken(self, rounds: Rounds, wanted: EvaluationWanted, request: Request) -> bool:
        """Ask for an evaluator, and get ready for what it needs. Collective."""
        member = members.current()
        if member is None:
            return False
        handover: Handover | None = None

        def ask() -> bytes:  # again after a loss, when this worker may have become the first one
            nonlocal handover
            if rounds.members.rank != 0:
                return b""
            point("evaluation.asked")
            if handover is None:
                secret = key_for(member.spec.token, SECRET)
                try:
                    handover = Handover(member.info.address, secret, member.spec.run.timeout_s)
                except OSError:
                    return b""  # no port can be had here
            question = msgspec.structs.replace(wanted, address=member.info.address, port=handover.port)
            with rounds.members.waiting():
                return b"taken" if member.evaluations.ask(question) else b""

        round_ = TalkRound(rounds, BESIDE, ask)
        is_taken = False
        try:
            for _ in rounds.play(round_):
                pass
            is_taken = any(round_.values)
        finally:
            if handover is not None and not is_taken:
                handover.close()
        if not is_taken:
            return False
        kept = Kept(self._tracked)
        if handover is not None:
            handover.give(kept.packed, pack(self._tracked.own_state(TOLD)).copied())
        self._under_way[wanted.number] = _UnderWay(request, kept, handover)
        return True

    def _outcome(self, number: int) -> bytes | None:
        """Return what this member has heard of an evaluation; see `EvaluationCalls.outcome`."""
        member = members.current()
        return member.evaluations.outcome(number) if member is not None else b""

    def _hear(self, rounds: Rounds, number: int) -> bytes:
        """Return the totals of an evaluation, when an evaluator has sent them; empty: none does it any more."""
        entry, member = self._register.entries[number], members.current()
        if entry.totals or number not in self._under_way or member is None:
            return entry.totals
        return member.evaluations.wait(number, rounds.team.check)

    def _settle(self, rounds: Rounds, numbers: Sequence[int], kind: str = "talk") -> None:
        """Make the totals of evaluations known to all members. Collective."""
        if not numbers:
            return
        round_ = _SettleRound(rounds, numbers, partial(self._hear, rounds), kind)
        for _ in rounds.play(round_):
            pass
        known = round_.known
        for number in numbers:
            self._conclude(number, known.get(number) or self._compute(rounds, number))
        if (member := members.current()) is not None:
            member.evaluations_open(self._register.unsettled, below=self._register.count)

    def _compute(self, rounds: Rounds, number: int) -> bytes:
        """Compute an evaluation that no evaluator does. Collective.

        Raises:
            StepError: this member has no copy of the models.
        """
        under_way = self._under_way.get(number)
        if under_way is None:
            raise StepError(
                f"the evaluation of step {self._register.entries[number].step} was lost with its evaluator, and this "
                "worker has come later and lacks the models of that step"
            )
        with under_way.kept.in_place():
            return to_bytes(under_way.request.compute(rounds, self._num))

    def _conclude(self, number: int, totals: bytes) -> None:
        entry = self._register.entries[number]
        entry.totals, entry.is_settled = totals, True
        under_way = self._under_way.pop(number, None)
        if under_way is not None and under_way.handover is not None:
            under_way.handover.close()
        if (member := members.current()) is not None:
            member.evaluations.forget(number)

    def _handle(self, entry: _Entry) -> Evaluation:
        """Return the one handle of an evaluation."""
        number = entry.number
        if number not in self._handles:

            def is_known() -> bool:
                return bool(entry.totals or self._outcome(number))

            self._handles[number] = Evaluation(entry.step, lambda: self._ask(entry), is_known)
        return self._handles[number]

    def _ask(self, entry: _Entry) -> Totals:
        """Return the totals of an evaluation, which the script asks for. Collective."""
        place = self._find_place("the result of an evaluation")
        if place.has_joined and not entry.is_asked:
            with self._apart():
                if not entry.is_settled:
                    self._settle(place.rounds, [entry.number])
                self._hand_out(entry)
            seed_at(self._seed, "evaluated", entry.number)
        found: Totals = from_bytes(entry.totals)
        return found

    def _hand_out(self, entry: _Entry) -> None:
        entry.is_asked = True
        self._handles.pop(entry.number, None)
        if not entry.stays:
            del self._register.entries[entry.number]
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
            dataset: anything with ``len`` and ``[i]``; or a ``DataLoader``, whose sampler and ``drop_last`` decide
                which samples count.
            function: batch -> totals of that batch by name (numbers or tensors), which are added up in float64 or as
                integers.
            batch_size: samples given to ``function`` at a time; every worker evaluates some of the batches. Default:
                that of the DataLoader.
            wait: False: return at once, and let an evaluator (``unisono run --evaluators N``, ``unisono join
                --evaluate``) compute the totals while the training goes on. Without an evaluator the workers compute
                them now. The bits are the same.

        Returns:
            The totals by name; int, float, or a CPU tensor. With ``wait=False`` an `Evaluation`, whose `result` gives
            them.
        """
        place = self._place("run.evaluate")
        request = self._evaluations.request(
            dataset, function, batch_size=batch_size, collate=collate, loader_workers=loader_workers
        )
        about = self._about()
        if wait:
            return self._evaluations.now(place, request, about.num_steps)
        return self._evaluations.begin(place, request, about.num_steps, about)

    @property
    def pending(self) -> list[Evaluation]:
        """The evaluations that were begun with ``wait=False`` and whose result was not asked for, the oldest first.

        Equal on all workers, also on one that has come later, and in a run that has resumed: their scripts have no
        variable with the handle. So ask for results by it::

            if step.number % 100 == 50:
                for evaluation in run.pending:
                    print(evaluation.step, evaluation.result())
        """
        return self._evaluations.pending
