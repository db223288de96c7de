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

It may also collect rows, one for each sample. When the members have told each other which batches each of them has,
each row travels from one of these to the members that lack it, and only then a batch counts as evaluated for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from unisono.core.divergence import USUAL_CAUSES
from unisono.core.errors import DivergenceError, RecipeError, StepError, UsageError
from unisono.core.plan import Plan
from unisono.core.plan import plan as even_plan
from unisono.core.rehearsals import is_rehearsed, rehearsal, without
from unisono.core.tree import Node, fold, leaf
from unisono.engine.exchange import Parcel
from unisono.engine.exchange.flat import FlatLayout, with_flipped_bit
from unisono.engine.microbatch.data import Loader, MakeFetcher
from unisono.engine.microbatch.guards import Structure
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds import Dispute
from unisono.engine.rounds.agreement import Digests, check_digests, digest_of_objects, has_minority, odd_in_objects
from unisono.engine.rounds.life import DISPUTE, EVALUATION, Rounds
from unisono.engine.rounds.members import Members, Undivided
from unisono.engine.state.buffers import Buffers
from unisono.engine.state.packing import digest_of_each, digest_of_state, from_bytes, grouped, quick_digest, to_bytes
from unisono.engine.state.rows import check_bytes, pack
from unisono.engine.state.tracked import Tracked
from unisono.system.faults import point, spoils

__all__ = ["BatchSums", "Evaluator", "Totals", "check_batches", "evaluate"]

Totals = dict[str, Any]
"""Totals by name: int, float, or a CPU tensor."""
PackedRows = dict[str, Tensor]
"""Rows of one batch by name, packed: (n,) uint8."""
TOGETHER_BYTES: Final = 16 << 20
"""Rows up to this size together are sent at once."""


@dataclass
class Outcome:
    """What the script has found in one batch."""

    totals: Totals = field(default_factory=dict)
    rows: PackedRows = field(default_factory=dict)

    def described(self) -> dict[str, tuple[int, int]]:
        """Return the size in bytes and the digest of the rows, by name."""
        digests = digest_of_each(list(self.rows.values()))
        return {name: (one.nbytes, digest) for (name, one), digest in zip(self.rows.items(), digests, strict=True)}

    def digest(self) -> int:
        return _digest(self.totals, self.described())


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
        self.collected: dict[str, list[Tensor]] = {}
        """Of all batches, in their order, when the evaluation is over: the packed rows by name."""
        self._outcome: Outcome | None = None
        self._num_samples = 0

    def begin(self, batch: int, num_samples: int) -> None:
        self.batch, self._num_samples, self._outcome = batch, num_samples, Outcome()

    def end(self) -> Outcome | None:
        """Return the outcome of the batch in hand, which is done; None: another worker of the group has it."""
        self.batch = None
        return self._outcome

    def pass_on(self) -> None:
        """Note that another worker of the group has the outcome of the batch in hand."""
        self._outcome = None

    @property
    def has_rows(self) -> bool:
        """Whether rows of the batch in hand were collected."""
        return self._outcome is not None and bool(self._outcome.rows)

    def collect(self, rows: Mapping[str, Any]) -> None:
        """Take rows of the batch in hand, one for each of its samples.

        Raises:
            StepError: there is no batch in hand. UsageError: see `unisono.engine.state.rows.pack`; or there are rows of
                this name.
        """
        if self.batch is None:
            raise StepError(
                "run.collect(...) was called between two batches: collect rows of the batch in hand, within `for batch "
                "in run.batches(...)`, or in the function of run.evaluate"
            )
        assert self._outcome is not None
        for name, value in rows.items():
            if name in self._outcome.rows:
                raise UsageError(
                    f"run.collect({name}=...) was called twice in one batch, and takes all its rows at once"
                )
            self._outcome.rows[name] = pack(name, value, self._num_samples)

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
        assert self._outcome is not None
        totals = self._outcome.totals
        for name, value in values.items():
            total = _total(value, name)
            totals[name] = totals[name] + total if name in totals else total


class Evaluator:
    """Gives batches to the script, and puts back the modes and buffers that the script has changed. Local."""

    def __init__(
        self, fetcher: Loader, sums: BatchSums, tracked: Tracked, *, samples_of: Callable[[int], int], seed: int
    ) -> None:
        """
        Args:
            fetcher: batches are fetched as (0, batch).
            sums: where the script adds up what it finds in a batch.
            tracked: its modules are in the mode in which they are to be evaluated.
            samples_of: batch -> the number of its samples.
        """
        self._fetcher = fetcher
        self.sums = sums
        self._samples_of = samples_of
        self._seed = seed
        self._structure = Structure(tracked)
        self._carried = tracked.carried
        self._buffers: Buffers = tracked.buffers()
        self._buffers.start_step()

    def comes(self, batch: int) -> bool:
        """Return whether a batch comes from where others come; see `unisono.engine.microbatch.data.Loader.comes`."""
        return self._fetcher.comes(0, batch)

    def play(self, batch: int) -> Generator[Any, None, Outcome | None]:
        """Yield one batch; returns its outcome. None: another worker of the group has it.

        Raises:
            StepError: the script has made or replaced parameters.
        """
        data = self._fetcher.fetch(0, batch)
        seed_at(self._seed, "evaluate", batch)
        for carried in self._carried.values():
            carried.open()
        self.sums.begin(batch, self._samples_of(batch))
        with torch.no_grad():
            yield data
            self._buffers.restore()
        outcome = self.sums.end()
        written = [name for name, carried in self._carried.items() if carried.discard()]
        if written:
            raise UsageError(
                f"a batch of {self.sums.what} has written rows of {written[0]!r} (a unisono.Carried). It may only read "
                "them, because another worker may evaluate the next batch of the same key"
            )
        self._structure.check(f"batch {batch} of {self.sums.what}")
        self._structure.restore_modes()
        return outcome


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
        self._have: dict[int, Outcome] = {}
        self._twice: dict[int, int] = {}  # digests of the outcomes of batches that another member evaluates

    def compute(self, plan: Plan) -> Iterator[object]:
        for batch in plan.ranges[self._members.rank]:
            if batch not in self._have:
                if (outcome := (yield from self._evaluate(batch))) is not None:
                    self._have[batch] = outcome
                point("in_evaluation", batch)
        trial = self._trial()
        for other in rehearsal(plan, self._members.rank, self._number, trial).other if self._rehearses else ():
            if other not in self._have and self._evaluator.comes(other):
                self._twice[other] = _digest_of((yield from self._evaluate(other)))

    def combine(self, plan: Plan) -> _Finished:
        state = self._tracked.compared() if self._members.size > 1 else {}
        digests = Digests(self._team.arithmetic, {name: f"{quick_digest(part):016x}" for name, part in state.items()})
        described = {batch: one.described() for batch, one in self._have.items() if one.rows}
        own_totals = {batch: one.totals for batch, one in self._have.items()}
        parts = _tell(self._members, _Part(to_bytes(own_totals), digests, self._twice, described))
        twice = {batch for part in parts for batch in part.twice}
        own_digests = {batch: self._have[batch].digest() for batch in self._have if batch in twice}
        totals = {batch: one for part in parts for batch, one in from_bytes(part.have).items()}
        by_worker = dict(zip(self._members.worker_ids, parts, strict=False))
        found = {worker: part.digests for worker, part in by_worker.items()}
        odd = odd_in_objects(self._rounds, found, _differing_newcomers(by_worker, totals, self._trial()))
        by_worker = {worker: part for worker, part in by_worker.items() if worker not in odd}
        found = {worker: part.digests for worker, part in by_worker.items()}
        settles = self._rounds.judge.settles
        is_disputed = settles and (bool(self._rounds.follows(DISPUTE)) or has_minority(found))
        if not is_disputed:
            check_digests(found)
            words = _differing(by_worker, totals, self._evaluator.sums.what)
            is_disputed = settles and bool(words)
            if words and not settles:
                raise DivergenceError(words, sound=-1)
        if is_disputed:
            known = {batch: {0: digest} for batch, digest in (own_digests | self._twice).items()}
            self.dispute = Dispute(known, digest_of_objects(digests))
            return _Finished(self._members, _Part(to_bytes(totals), digests, {}, None), {})
        rows = _bring(self._members, parts, {batch: one.rows for batch, one in self._have.items()})
        self._have = {batch: Outcome(one, rows.get(batch, {})) for batch, one in totals.items()}
        described = {batch: each for part in parts if part.rows for batch, each in part.rows.items()}
        return _Finished(self._members, _Part(to_bytes(totals), digests, {}, described), rows)

    def first_plan(self) -> Plan:
        return without(self._team.even_plan(self.num_leaves), self._trial())

    def _trial(self) -> frozenset[int]:
        return self._members.on_trial(self._position.number, self._rounds.lag)

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
        return {0: _digest_of((yield from self._evaluate(leaf)))}

    def totals(self) -> Totals:
        """Return the totals of all batches, once the round is over."""
        return _add_up(self._have, self._evaluator.sums)

    def _evaluate(self, batch: int) -> Generator[Any, None, Outcome | None]:
        self._team.check()
        self._team.at(phase=self._position.phase, step=self._position.number, microbatch=batch, evaluates=True)
        outcome = yield from self._evaluator.play(batch)
        if outcome is not None and (bit := spoils("evaluation", batch)) is not None:
            _spoil(outcome, bit)
        return outcome


def evaluate(
    rounds: Rounds | None,
    tracked: Tracked,
    sums: BatchSums,
    make_fetcher: MakeFetcher,
    *,
    num_batches: int,
    samples_of: Callable[[int], int],
    seed: int,
    rehearses: bool,
    number: int,
    at: Callable[[int], None] = lambda batch: None,
) -> Generator[Any, None, Totals]:
    """Yield the batches of this worker with the tracked modules in ``eval()`` mode, and return the totals of all
    batches. Collective.

    Args:
        rounds: None: no member has joined yet, so every worker evaluates all batches for itself.
        sums: where the script adds up what it finds in a batch; has the rows of all batches afterwards.
        samples_of: batch -> the number of its samples.
        rehearses: now and then, evaluate a batch of another worker as well.
        number: evaluations of the run that are done.
        at: called before each batch where this worker is alone.

    Raises:
        DivergenceError: the workers do not have the same models, or a batch has other totals on another worker.
    """
    size, rank = (rounds.members.size, rounds.members.rank) if rounds is not None else (1, 0)
    is_one_part = rounds is None or rounds.team.num_parts == 1
    trial = rounds.members.on_trial(rounds.position.number, rounds.lag) if rounds is not None else frozenset[int]()
    rehearses = rehearses and size > 1 and is_one_part and (bool(trial) or is_rehearsed(number))
    shares = even_plan(1, num_batches) if rounds is None else without(rounds.team.even_plan(num_batches), trial)
    mine = [*shares.ranges[rank], *(rehearsal(shares, rank, number, trial).other if rehearses else ())]
    fetcher = make_fetcher(lambda: ((0, 0, batch) for batch in mine))
    before = Structure(tracked)
    before.enter("evaluation")
    for module in tracked.modules.values():
        module.eval()
    try:
        evaluator = Evaluator(fetcher, sums, tracked, samples_of=samples_of, seed=seed)
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
        before.leave("evaluation")


def _evaluate_alone(evaluator: Evaluator, num_batches: int, at: Callable[[int], None]) -> Generator[Any, None, Totals]:
    have = {}
    for batch in range(num_batches):
        at(batch)
        outcome = yield from evaluator.play(batch)
        assert outcome is not None
        have[batch] = outcome
        point("in_evaluation", batch)
    _check_bytes({batch: one.described() for batch, one in have.items()})
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


def _tell(members: Members, part: _Part, *, is_final: bool = False) -> list[_Part]:
    """Return what all members have said, by rank. Collective."""
    letters = members.letters(msgspec.msgpack.encode(part), is_final=is_final)
    return [msgspec.msgpack.decode(letter.payload, type=_Part) for letter in letters]


def _bring(members: Members, parts: Sequence[_Part], have: Mapping[int, PackedRows]) -> dict[int, PackedRows]:
    """Return the rows of all batches. Collective.

    Args:
        parts: of all members, by rank.
        have: the rows of this member.

    Raises:
        UsageError: they are too many, before any of them travels. PeerLost, DeadlineExceeded: a member was lost.
    """
    held = [part.rows for part in parts if part.rows is not None]
    if len(held) < len(parts):
        return {}  # a member that is ahead knows that the round is to be done again
    known = {batch: each for rows in held for batch, each in rows.items()}
    _check_bytes(known)
    found: dict[int, PackedRows] = {}
    parcels = []
    for batch, described in sorted(known.items()):
        holders = [rank for rank, rows in enumerate(held) if batch in rows]
        lacking = tuple(rank for rank in range(len(held)) if rank not in holders)
        found[batch] = {}
        for name, (nbytes, _) in described.items():
            is_here = members.rank in holders
            found[batch][name] = have[batch][name] if is_here else torch.empty(nbytes, dtype=torch.uint8)
            if lacking:
                parcels.append(Parcel(holders[0], lacking, found[batch][name]))
    for group in grouped(parcels, lambda parcel: parcel.tensor.nbytes, TOGETHER_BYTES):
        point("evaluation.collecting")
        members.deliver(group)
    return found


def _check_bytes(known: Mapping[int, Mapping[str, tuple[int, int]]]) -> None:
    sizes: dict[str, int] = {}
    for described in known.values():
        for name, (nbytes, _) in described.items():
            sizes[name] = sizes.get(name, 0) + nbytes
    check_bytes(sizes)


def _digest(totals: Totals, rows: Mapping[str, tuple[int, int]]) -> int:
    """Return a fingerprint of what was found in a batch, of whose rows the sizes and digests are given."""
    return digest_of_state([totals, {name: [*each] for name, each in rows.items()}] if rows else totals)


def _digest_of(outcome: Outcome | None) -> int:
    return digest_of_state(None) if outcome is None else outcome.digest()


def _spoil(outcome: Outcome, bit: int) -> None:
    """Flip a bit, as a machine that computes wrong values does."""
    values: dict[str, Any] = outcome.totals or outcome.rows
    name = next(iter(values))
    wrong = with_flipped_bit(torch.as_tensor(values[name]), bit)
    values[name] = wrong if wrong.dim() else wrong.item()


def _add_up(have: Mapping[int, Outcome], sums: BatchSums) -> Totals:
    """Return the totals of all batches, and let ``sums`` have their rows."""
    num_batches = len(have)
    names = have[0].rows.keys()
    if other := next((batch for batch in range(num_batches) if have[batch].rows.keys() != names), 0):
        raise UsageError(
            f"{sums.what} has collected {sorted(names)} in batch 0 and {sorted(have[other].rows)} in batch {other}; "
            "run.collect must be given the same names in every batch"
        )
    sums.collected = {name: [have[batch].rows[name] for batch in range(num_batches)] for name in names}
    values: dict[str, dict[int, Any]] = {}
    for batch in range(num_batches):
        totals = have[batch].totals
        if not sums.fills and totals.keys() != have[0].totals.keys():
            raise UsageError(
                f"the function of {sums.what} returned the totals {sorted(have[0].totals)} for batch 0 and "
                f"{sorted(totals)} for batch {batch}; it must return the same names for every batch"
            )
        for name, value in totals.items():
            values.setdefault(name, {})[batch] = value
    return {name: _sum(found, num_batches) for name, found in values.items()}


def _sum(found: Mapping[int, Any], num_batches: int) -> Any:
    """Add up the totals of one name in the order of the tree; a batch that has none counts as zero."""
    first = next(iter(found.values()))
    zero = torch.zeros_like(first) if isinstance(first, Tensor) else 0
    leaves = {leaf(batch, num_batches): found.get(batch, zero) for batch in range(num_batches)}
    return fold(leaves, num_batches, lambda a, b: a + b)


def _differences(parts: Mapping[str, _Part], have: Mapping[int, Totals]) -> Iterator[tuple[str, int, str]]:
    """Yield the worker, the batch, and what differs, for batches that have other totals or rows on a second worker."""
    rows = {batch: each for part in parts.values() for batch, each in (part.rows or {}).items()}
    for worker, part in parts.items():
        for batch, digest in part.twice.items():
            if digest != _digest(have[batch], rows.get(batch, {})):
                names = f"totals or collected rows ({', '.join(rows[batch])})" if batch in rows else "totals"
                yield worker, batch, names


def _differing_newcomers(
    parts: Mapping[str, _Part], have: Mapping[int, Totals], trial: Collection[int]
) -> dict[str, str]:
    """Return in words, by newcomer on trial, which batch differs there; those that have none are not in it."""
    workers = [*parts]
    return {
        worker: f"the {noun} of batch {batch} of an evaluation are not {have[batch] or 'those'}, the others' {noun}"
        for worker, batch, noun in _differences(parts, have)
        if workers.index(worker) in trial
    }


def _differing(parts: Mapping[str, _Part], have: Mapping[int, Totals], what: str) -> str:
    """Return in words which batch has other totals or rows on a second worker; "": none has."""
    if len({part.digests.arithmetic for part in parts.values()}) > 1:
        return ""
    for worker, batch, noun in _differences(parts, have):
        return (
            f"batch {batch} of {what} was evaluated by two workers, and its {noun} on {worker} are not "
            f"{have[batch] or 'those'}, the {noun} of the other one. Either the script computes different "
            f"{noun} on different workers, or one of the two machines computes wrong values; three workers and "
            f"unisono run --audit find out which. The totals were not used. For the script: {USUAL_CAUSES}"
        )
    return ""


class _Part(msgspec.Struct, frozen=True):
    """Payload of one member: the totals of its batches, what rows it has, and digests of its tracked objects."""

    have: bytes
    """The totals by batch, as `to_bytes` gives them."""
    digests: Digests
    twice: dict[int, int]
    """The digests of the outcomes of batches that other members evaluate."""
    rows: dict[int, dict[str, tuple[int, int]]] | None
    """By batch and name, size and digest of the rows that this member has. None: no rows travel, because the round will
    be done again."""


class _Finished:
    """Result of an evaluation, for members that have not seen its end.

    Args:
        part: what this member tells them.
        rows: of all batches.
    """

    layout: FlatLayout | None = None

    def __init__(self, members: Members, part: _Part, rows: dict[int, PackedRows]) -> None:
        self._members = members
        self._part = part
        self._rows = rows

    def stand_by(self, plan: Plan) -> None:
        _bring(self._members, _tell(self._members, self._part, is_final=True), self._rows)


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
