"""Exact totals over a dataset, shared out over the workers.

A batch is a leaf: it is evaluated once, by the member that the plan names, and the totals of all batches are added in
the order of the tree in float64. So there is no padding, no sample counts twice, and the bits do not depend on the
workers.

A batch must change no state, because only one worker evaluates it. So modes and buffers are put back after each batch.
With its totals each worker sends digests of all tracked objects, taken after its last batch; without this check,
workers whose models have become different would go on together and mix their results.

Now and then each worker evaluates a batch of another one as well. The totals must be equal: code that counts or keeps
state gives other totals, and so does a machine that computes wrong values. A tap that settles what members differ in
finds out which it is, as for a micro-batch (`unisono.engine.rounds.taps`).

The script gets the batches one by one, and adds up what it finds in them (`BatchSums`): in a loop of its own
(``run.batches``), or by a function (``run.evaluate``), which is a loop as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from functools import partial
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from unisono.core.errors import DivergenceError, RecipeError, StepError, UsageError
from unisono.core.plan import Plan
from unisono.core.plan import plan as even_plan
from unisono.core.rehearsals import is_rehearsed, rehearsal
from unisono.core.tree import Node, fold, leaf
from unisono.engine.exchange.flat import with_flipped_bit
from unisono.engine.microbatch.data import Loader, MakeFetcher
from unisono.engine.microbatch.guards import Structure
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds import Dispute
from unisono.engine.rounds.agreement import USUAL_CAUSES, Digests, check_digests, digest_of_objects, has_minority
from unisono.engine.rounds.life import DISPUTE, EVALUATION, Rounds
from unisono.engine.rounds.members import Gathered, Undivided
from unisono.engine.state.buffers import Buffers
from unisono.engine.state.packing import digest_of_state, from_bytes, quick_digest, to_bytes
from unisono.engine.state.tracked import Tracked
from unisono.system.faults import point, spoils

__all__ = ["BatchSums", "Evaluator", "Totals", "check_batches", "evaluate"]

Totals = dict[str, Any]
"""Totals by name: int, float, or a CPU tensor."""


class BatchSums:
    """What an evaluation adds up for the batch in hand.

    Args:
        what: the call of the script, for errors.
        fills: a batch that says nothing of a name counts as zero; otherwise all batches name the same.
    """

    def __init__(self, what: str, *, fills: bool) -> None:
        self.what, self.fills = what, fills
        self.batch: int | None = None
        """The batch in hand; None: there is none."""
        self._totals: Totals | None = {}

    def begin(self, batch: int) -> None:
        self.batch, self._totals = batch, {}

    def end(self) -> Totals | None:
        """Return the totals of the batch in hand, which is done; None: another worker of the group has them."""
        self.batch = None
        return self._totals

    def pass_on(self) -> None:
        """Note that another worker of the group has the totals of the batch in hand."""
        self._totals = None

    def add(self, values: Mapping[str, Any]) -> None:
        """Add numbers of the batch in hand.

        Raises:
            StepError: there is no batch in hand. UsageError: a value is no number.
        """
        if self.batch is None:
            raise StepError(
                "numbers are added up within `for batch in run.batches(...)`; outside that loop all workers would add "
                "the same value; what is known there needs no sum"
            )
        assert self._totals is not None
        for name, value in values.items():
            total = _total(value, name)
            self._totals[name] = self._totals[name] + total if name in self._totals else total


class Evaluator:
    """Gives batches to the script, and puts back the modes and buffers that the script has changed. Local."""

    def __init__(self, fetcher: Loader, sums: BatchSums, tracked: Tracked, *, seed: int) -> None:
        """
        Args:
            fetcher: batches are fetched as (0, batch).
            sums: where the script adds up what it finds in a batch.
            tracked: its modules are in the mode in which they are to be evaluated.
        """
        self._fetcher = fetcher
        self.sums = sums
        self._seed = seed
        self._structure = Structure(tracked)
        self._carried = tracked.carried
        self._buffers: Buffers = tracked.buffers()
        self._buffers.start_step()

    def comes(self, batch: int) -> bool:
        """Return whether a batch comes from where others come; see `unisono.engine.microbatch.data.Loader.comes`."""
        return self._fetcher.comes(0, batch)

    def play(self, batch: int) -> Generator[Any, None, Totals | None]:
        """Yield one batch; returns its totals. None: another worker of the group has them.

        Raises:
            StepError: the script has made or replaced parameters.
        """
        data = self._fetcher.fetch(0, batch)
        seed_at(self._seed, "evaluate", batch)
        for carried in self._carried.values():
            carried.open()
        self.sums.begin(batch)
        with torch.no_grad():
            yield data
            self._buffers.restore()
        totals = self.sums.end()
        written = [name for name, carried in self._carried.items() if carried.discard()]
        if written:
            raise UsageError(
                f"a batch of {self.sums.what} has written rows of {written[0]!r} (a unisono.Carried). It may only read "
                "them, because another worker may evaluate the next batch of the same key"
            )
        self._structure.check(f"batch {batch} of {self.sums.what}")
        self._structure.restore_modes()
        return totals


class EvaluationRound(Undivided):
    """The evaluation of all batches of a dataset.

    Args:
        rehearses: evaluate a batch of another worker as well, to compare the totals.
        number: evaluations of the run that are done.
    """

    kind: Final = EVALUATION
    unit: Final = "evaluation batch"

    def __init__(self, rounds: Rounds, evaluator: Evaluator, *, num_batches: int, rehearses: bool, number: int) -> None:
        super().__init__(rounds.members)
        self.dispute: Dispute | None = None
        """What this member remembers, once the round is over, where members have other totals or another state than
        others: it is to be done again without those that are wrong.
        """
        self.num_leaves = num_batches
        self.title = f"an evaluation of {num_batches} batches"
        self._rounds = rounds
        self._team = rounds.team
        self._tracked = rounds.tracked
        self._position = rounds.position
        self._evaluator = evaluator
        self._rehearses = rehearses and self._members.size > 1
        self._number = number
        self._have: dict[int, Totals] = {}
        self._twice: dict[int, int] = {}  # digests of the totals of batches that another member evaluates

    def compute(self, plan: Plan) -> Iterator[object]:
        for batch in plan.ranges[self._members.rank]:
            if batch not in self._have:
                if (totals := (yield from self._evaluate(batch))) is not None:
                    self._have[batch] = totals
                point("in_evaluation", batch)
        for other in rehearsal(plan, self._members.rank, self._number).other if self._rehearses else ():
            if other not in self._have and self._evaluator.comes(other):
                self._twice[other] = digest_of_state((yield from self._evaluate(other)))

    def combine(self, plan: Plan) -> Gathered:
        state = self._tracked.compared() if self._members.size > 1 else {}
        digests = Digests(self._team.arithmetic, {name: f"{quick_digest(part):016x}" for name, part in state.items()})
        own = msgspec.msgpack.encode(_Part(to_bytes(self._have), digests, self._twice))
        parts = [msgspec.msgpack.decode(one, type=_Part) for one in self._members.gather(own)]
        twice = {batch for part in parts for batch in part.twice}
        own_digests = {batch: digest_of_state(totals) for batch, totals in self._have.items() if batch in twice}
        for part in parts:
            self._have.update(from_bytes(part.have))
        by_worker = dict(zip(self._members.worker_ids, parts, strict=False))
        found = {worker: part.digests for worker, part in by_worker.items()}
        settles = self._rounds.judge.settles
        is_disputed = settles and (bool(self._rounds.follows(DISPUTE)) or has_minority(found))
        if not is_disputed:
            check_digests(found)
            words = _differing(by_worker, self._have, self._evaluator.sums.what)
            is_disputed = settles and bool(words)
            if words and not settles:
                raise DivergenceError(words, sound=-1)
        if is_disputed:
            known = {batch: {0: digest} for batch, digest in (own_digests | self._twice).items()}
            self.dispute = Dispute(known, digest_of_objects(digests))
        return Gathered(self._members, msgspec.msgpack.encode(_Part(to_bytes(self._have), digests, {})))

    def first_plan(self) -> Plan:
        return self._team.even_plan(self.num_leaves)

    def interrupt(self) -> Collection[Node]:
        self._rehearses, self._twice = False, {}
        if self._team.num_parts > 1:  # the group of a batch may be another one now, and computes it together
            self._have.clear()
        return [leaf(batch, self.num_leaves) for batch in self._have]

    def finish(self) -> None:
        point("evaluated")

    @property
    def number(self) -> int:
        """Number of the next step of the run."""
        return self._position.total

    def compute_uncounted(self, leaf: int) -> Generator[Any, None, Mapping[int, int]]:
        """Yield a batch whose totals are not added; return their digest, at the only place."""
        return {0: digest_of_state((yield from self._evaluate(leaf)))}

    def totals(self) -> Totals:
        """Return the totals of all batches, once the round is over."""
        return _add_up(self._have, self._evaluator.sums)

    def _evaluate(self, batch: int) -> Generator[Any, None, Totals | None]:
        self._team.check()
        self._team.at(phase=self._position.phase, step=self._position.number, microbatch=batch, evaluates=True)
        totals = yield from self._evaluator.play(batch)
        if totals is not None and (bit := spoils("evaluation", batch)) is not None:
            name = next(iter(totals))
            wrong = with_flipped_bit(torch.as_tensor(totals[name]), bit)
            totals[name] = wrong if wrong.dim() else wrong.item()
        return totals


def evaluate(
    rounds: Rounds | None,
    tracked: Tracked,
    sums: BatchSums,
    make_fetcher: MakeFetcher,
    *,
    num_batches: int,
    seed: int,
    rehearses: bool,
    number: int,
    at: Callable[[int], None] = lambda batch: None,
) -> Generator[Any, None, Totals]:
    """Yield the batches of this worker with the tracked modules in ``eval()`` mode, and return the totals of all
    batches. Collective.

    Args:
        rounds: None: no member has joined yet, so every worker evaluates all batches for itself.
        sums: where the script adds up what it finds in a batch.
        rehearses: now and then, evaluate a batch of another worker as well.
        number: evaluations of the run that are done.
        at: called before each batch where this worker is alone.

    Raises:
        DivergenceError: the workers do not have the same models, or a batch has other totals on another worker.
    """
    size, rank = (rounds.members.size, rounds.members.rank) if rounds is not None else (1, 0)
    is_one_part = rounds is None or rounds.team.num_parts == 1
    rehearses = rehearses and size > 1 and is_one_part and is_rehearsed(number)
    shares = even_plan(1, num_batches) if rounds is None else rounds.team.even_plan(num_batches)
    mine = [*shares.ranges[rank], *(rehearsal(shares, rank, number).other if rehearses else ())]
    fetcher = make_fetcher(lambda: ((0, 0, batch) for batch in mine))
    before = Structure(tracked)
    for module in tracked.modules.values():
        module.eval()
    try:
        evaluator = Evaluator(fetcher, sums, tracked, seed=seed)
        if rounds is None:
            return (yield from _evaluate_alone(evaluator, num_batches, at))
        begin = partial(
            EvaluationRound,
            rounds,
            evaluator,
            num_batches=num_batches,
            rehearses=rehearses,
            number=number,
        )
        round_ = yield from rounds.play_until_agreed(begin)
        rounds.judge.agreed(rounds.position.total)
        return round_.totals()
    finally:
        fetcher.close()
        before.restore_modes()


def _evaluate_alone(evaluator: Evaluator, num_batches: int, at: Callable[[int], None]) -> Generator[Any, None, Totals]:
    have = {}
    for batch in range(num_batches):
        at(batch)
        totals = yield from evaluator.play(batch)
        assert totals is not None
        have[batch] = totals
        point("in_evaluation", batch)
    return _add_up(have, evaluator.sums)


def check_batches(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return how many batches an evaluation has.

    Raises:
        RecipeError: the dataset is empty, the batch size is below 1, or no batch is left.
    """
    if num_samples < 1:
        raise RecipeError("run.evaluate got an empty dataset (length 0)")
    if batch_size < 1:
        raise RecipeError(f"batch_size must be at least 1, got {batch_size}")
    if drop_last and num_samples < batch_size:
        raise RecipeError(
            f"drop_last=True leaves nothing of {num_samples} samples at batch_size={batch_size}; for an evaluation use "
            "drop_last=False"
        )
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


def _add_up(have: Mapping[int, Totals], sums: BatchSums) -> Totals:
    num_batches = len(have)
    values: dict[str, dict[int, Any]] = {}
    for batch in range(num_batches):
        if not sums.fills and have[batch].keys() != have[0].keys():
            raise UsageError(
                f"the function of {sums.what} returned the totals {sorted(have[0])} for batch 0 and "
                f"{sorted(have[batch])} for batch {batch}; it must return the same names for every batch"
            )
        for name, value in have[batch].items():
            values.setdefault(name, {})[batch] = value
    return {name: _sum(found, num_batches) for name, found in values.items()}


def _sum(found: Mapping[int, Any], num_batches: int) -> Any:
    """Add up the totals of one name in the order of the tree; a batch that has none counts as zero."""
    first = next(iter(found.values()))
    zero = torch.zeros_like(first) if isinstance(first, Tensor) else 0
    leaves = {leaf(batch, num_batches): found.get(batch, zero) for batch in range(num_batches)}
    return fold(leaves, num_batches, lambda a, b: a + b)


def _differing(parts: Mapping[str, _Part], have: Mapping[int, Totals], what: str) -> str:
    """Return in words which batch has other totals on a second worker; "": none has."""
    if len({part.digests.arithmetic for part in parts.values()}) > 1:
        return ""
    for worker, part in parts.items():
        for batch, digest in part.twice.items():
            if digest != digest_of_state(have[batch]):
                return (
                    f"batch {batch} of {what} was evaluated by two workers, and its totals on {worker} are not "
                    f"{have[batch]}, the totals of the other one. Either the script computes different totals on "
                    "different workers, or one of the two machines computes wrong values; three workers and unisono "
                    f"run --audit find out which. The totals were not used. For the script: {USUAL_CAUSES}"
                )
    return ""


class _Part(msgspec.Struct, frozen=True):
    """Payload of one member: the totals of its batches, and digests of its tracked objects."""

    have: bytes
    """The totals by batch, as `to_bytes` gives them."""
    digests: Digests
    twice: dict[int, int]
    """The digests of the totals of batches that other members evaluate."""


def _total(value: Any, name: str) -> Any:
    if isinstance(value, Tensor) and not value.is_complex():
        wide = torch.float64 if value.dtype.is_floating_point else torch.int64
        value = value.detach().cpu().to(wide)
        return value if value.dim() else value.item()
    if isinstance(value, (bool, int)):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last one from a complex tensor
        raise UsageError(
            f"an evaluation can add up numbers and tensors of real numbers; the total {name!r} is a "
            f"{type(value).__qualname__}"
        ) from None
