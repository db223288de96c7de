"""Exact totals over a dataset, shared out over the workers.

A batch is a leaf: it is evaluated once, by the member that the plan names, and the totals of all batches are added in
the order of the tree in float64. So there is no padding, no sample counts twice, and the bits do not depend on the
workers.

A batch must change no state, because only one worker evaluates it. So modes and buffers are put back after each batch.
With its totals each worker sends digests of all tracked objects, taken after its last batch; without this check,
workers whose models have become different would go on together and mix their results.

Now and then each worker evaluates a batch of another one as well. The totals must be equal: a function that counts or
keeps state gives other totals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from unisono.decisions.checks import is_rehearsed, rehearsal
from unisono.decisions.plan import Plan
from unisono.decisions.plan import plan as even_plan
from unisono.decisions.tree import Node, fold, leaf
from unisono.errors import DivergenceError, RecipeError, UsageError
from unisono.faults import point
from unisono.microbatch.data import Loader, MakeFetcher
from unisono.microbatch.guards import Structure
from unisono.microbatch.randomness import seed_at
from unisono.rounds.agreement import USUAL_CAUSES, Digests, check_digests, digest_of_objects, has_minority
from unisono.rounds.auditing import Audits
from unisono.rounds.life import Rounds
from unisono.rounds.members import Gathered
from unisono.state.buffers import Buffers
from unisono.state.packing import digest_of_state, from_bytes, quick_digest, to_bytes
from unisono.state.tracked import Tracked

__all__ = ["Evaluator", "Totals", "check_batches", "evaluate"]

Totals = dict[str, Any]
"""Totals by name: int, float, or a CPU tensor."""


class Evaluator:
    """Evaluates batches, and puts back the modes and buffers that the function has changed. Local."""

    def __init__(
        self, fetcher: Loader, function: Callable[[Any], Mapping[str, Any]], tracked: Tracked, *, seed: int
    ) -> None:
        """
        Args:
            fetcher: batches are fetched as (0, batch).
            function: batch -> totals of this batch by name.
            tracked: its modules are in the mode in which they are to be evaluated.
        """
        self._fetcher = fetcher
        self._function = function
        self._seed = seed
        self._structure = Structure(tracked)
        self._carried = tracked.carried
        self._buffers: Buffers = tracked.buffers()
        self._buffers.start_step()

    def comes(self, batch: int) -> bool:
        """Return whether a batch comes from where others come; see `unisono.microbatch.data.Loader.comes`."""
        return self._fetcher.comes(0, batch)

    def totals(self, batch: int) -> Totals:
        """Return the totals of one batch.

        Raises:
            StepError: the function has made or replaced parameters.
        """
        data = self._fetcher.fetch(0, batch)
        seed_at(self._seed, "evaluate", batch)
        for carried in self._carried.values():
            carried.open()
        with torch.no_grad():
            totals = self._function(data)
            self._buffers.restore()
        written = [name for name, carried in self._carried.items() if carried.discard()]
        if written:
            raise UsageError(
                f"the function of run.evaluate has written rows of {written[0]!r} (a unisono.Carried), and another "
                "worker may evaluate the next batch of the same key. It may only read them"
            )
        self._structure.check(f"batch {batch} of run.evaluate")
        self._structure.restore_modes()
        if not isinstance(totals, Mapping):
            raise UsageError(
                "the function of run.evaluate must return totals by name, e.g. {'correct': 93, 'samples': 100}; "
                f"got a {type(totals).__qualname__}"
            )
        return {name: _total(value, name) for name, value in totals.items()}


class EvaluationRound:
    """The evaluation of all batches of a dataset.

    Args:
        rehearses: evaluate a batch of another worker as well, to compare the totals.
        number: evaluations of the run that are done.
        finds_minority: members whose state is not that of most are no error.
    """

    kind: Final = "evaluation"

    def __init__(
        self,
        rounds: Rounds,
        evaluator: Evaluator,
        *,
        num_batches: int,
        rehearses: bool,
        number: int,
        finds_minority: bool = False,
    ) -> None:
        self.is_disputed = False
        """Most members have another state than some: it is to be done again without these."""
        self.state = 0
        """The digest of this member's state, once the round is over."""
        self._finds_minority = finds_minority
        self.num_leaves = num_batches
        self.title = f"an evaluation of {num_batches} batches"
        self._members = rounds.members
        self._team = rounds.team
        self._tracked = rounds.tracked
        self._position = rounds.position
        self._evaluator = evaluator
        self._rehearses = rehearses and self._members.size > 1
        self._number = number
        self._have: dict[int, Totals] = {}
        self._twice: dict[int, str] = {}  # digests of the totals of batches that another member evaluates

    def first_plan(self) -> Plan:
        return even_plan(self._members.size, self.num_leaves)

    def begin(self, plan: Plan) -> None:
        pass

    def compute(self, plan: Plan) -> Iterator[object]:
        for batch in plan.ranges[self._members.rank]:
            if batch not in self._have:
                self._have[batch] = self._evaluate(batch)
                point("in_evaluation", batch)
        other = rehearsal(plan, self._members.rank, self._number).other if self._rehearses else None
        if other is not None and other not in self._have and self._evaluator.comes(other):
            self._twice[other] = _digest(self._evaluate(other))
        yield from ()

    def combine(self, plan: Plan) -> Gathered:
        state = self._tracked.compared() if self._members.size > 1 else {}
        digests = Digests(self._team.arithmetic, {name: f"{quick_digest(part):016x}" for name, part in state.items()})
        own = _Part.of(self._have, digests, self._twice)
        parts = [msgspec.msgpack.decode(one, type=_Part) for one in self._members.gather(own.encode())]
        for part in parts:
            self._have.update(part.totals())
        by_worker = dict(zip(self._members.worker_ids, parts, strict=False))
        found = {worker: part.digests for worker, part in by_worker.items()}
        self.state = digest_of_objects(digests)
        self.is_disputed = self._finds_minority and (any(part.disputed for part in parts) or has_minority(found))
        if not self.is_disputed:
            check_digests(found)
            _check_rehearsal(by_worker, self._have)
        return Gathered(self._members, _Part.of(self._have, digests, {}, disputed=self.is_disputed).encode())

    def interrupt(self) -> Collection[Node]:
        self._rehearses, self._twice = False, {}
        return [leaf(batch, self.num_leaves) for batch in self._have]

    def finish(self) -> None:
        point("evaluated")

    def totals(self) -> Totals:
        """Return the totals of all batches, once the round is over."""
        return _add_up(self._have)

    def _evaluate(self, batch: int) -> Totals:
        self._team.check()
        self._team.at(phase=self._position.phase, step=self._position.number, microbatch=batch, evaluates=True)
        return self._evaluator.totals(batch)


def evaluate(
    rounds: Rounds | None,
    tracked: Tracked,
    function: Callable[[Any], Mapping[str, Any]],
    make_fetcher: MakeFetcher,
    *,
    num_batches: int,
    seed: int,
    rehearses: bool,
    number: int,
    at: Callable[[int], None] = lambda batch: None,
    audits: Audits | None = None,
) -> Totals:
    """Evaluate all batches with the tracked modules in ``eval()`` mode, and add up their totals. Collective.

    Args:
        rounds: None: no member has joined yet, so every worker evaluates all batches for itself.
        function: batch -> totals of this batch by name.
        rehearses: now and then, evaluate a batch of another worker as well.
        number: evaluations of the run that are done.
        at: called before each batch where this worker is alone.
        audits: go on without the members whose state is not that of most; None: that is an error.

    Raises:
        DivergenceError: the workers do not have the same models, or a batch has other totals on another worker.
    """
    size, rank = (rounds.members.size, rounds.members.rank) if rounds is not None else (1, 0)
    rehearses = rehearses and size > 1 and is_rehearsed(number)
    shares = even_plan(size, num_batches)
    other = rehearsal(shares, rank, number).other if rehearses else None
    mine = [*shares.ranges[rank], *([other] if other is not None else [])]
    fetcher = make_fetcher(lambda: ((0, 0, batch) for batch in mine))
    before = Structure(tracked)
    for module in tracked.modules.values():
        module.eval()
    try:
        evaluator = Evaluator(fetcher, function, tracked, seed=seed)
        if rounds is None:
            return _evaluate_alone(evaluator, num_batches, at)
        finds_minority = audits is not None
        while True:
            round_ = EvaluationRound(
                rounds,
                evaluator,
                num_batches=num_batches,
                rehearses=rehearses,
                number=number,
                finds_minority=finds_minority,
            )
            for _ in rounds.play(round_):
                pass
            if audits is None or not round_.is_disputed:
                return round_.totals()
            # This ends: each time a member goes, and no more come than the run may restart. Where nobody is found
            # wrong, the next round is the last one, which raises for whatever differs.
            finds_minority = audits.settle_states(rounds, round_.state, rounds.position.total)
    finally:
        fetcher.close()
        before.restore_modes()


def _evaluate_alone(evaluator: Evaluator, num_batches: int, at: Callable[[int], None]) -> Totals:
    have = {}
    for batch in range(num_batches):
        at(batch)
        have[batch] = evaluator.totals(batch)
        point("in_evaluation", batch)
    return _add_up(have)


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


def _add_up(have: Mapping[int, Totals]) -> Totals:
    num_batches, names = len(have), have[0].keys()
    for batch, totals in have.items():
        if totals.keys() != names:
            raise UsageError(
                f"the function of run.evaluate returned the totals {sorted(names)} for batch 0 and {sorted(totals)} "
                f"for batch {batch}; it must return the same names for every batch"
            )
    return {
        name: fold(
            {leaf(batch, num_batches): have[batch][name] for batch in range(num_batches)},
            num_batches,
            lambda a, b: a + b,
        )
        for name in names
    }


def _digest(totals: Totals) -> str:
    return f"{digest_of_state(totals):016x}"


def _check_rehearsal(parts: Mapping[str, _Part], have: Mapping[int, Totals]) -> None:
    """Raise DivergenceError if a batch that two workers have evaluated has different totals."""
    if len({part.digests.arithmetic for part in parts.values()}) > 1:
        return
    for worker, part in parts.items():
        for batch, digest in part.twice.items():
            if digest != _digest(have[batch]):
                raise DivergenceError(
                    f"batch {batch} of run.evaluate was evaluated by two workers, and its totals on {worker} are not "
                    f"{have[batch]}, which the other one got. The function must return the same totals on every "
                    f"worker. {USUAL_CAUSES}"
                )


class _Part(msgspec.Struct, frozen=True):
    """Payload of one member: the totals of its batches, and digests of its tracked objects."""

    have: bytes
    """The totals by batch, as `to_bytes` gives them."""
    digests: Digests
    twice: dict[int, str]
    """The digests of the totals of batches that other members evaluate."""
    disputed: bool = False
    """The member has seen that the members' states differ."""

    @classmethod
    def of(cls, have: dict[int, Totals], digests: Digests, twice: dict[int, str], *, disputed: bool = False) -> _Part:
        return cls(to_bytes(have), digests, twice, disputed)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def totals(self) -> dict[int, Totals]:
        """Return the totals by batch."""
        found: dict[int, Totals] = from_bytes(self.have)
        return found


def _total(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        wide = torch.float64 if value.dtype.is_floating_point else torch.int64
        value = value.detach().to(device="cpu", dtype=wide)
        return value if value.dim() else value.item()
    if isinstance(value, (bool, int)):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"run.evaluate can add up numbers and tensors; the total {name!r} is a {type(value).__qualname__}"
        ) from None
