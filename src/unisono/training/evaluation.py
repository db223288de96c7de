"""Exact totals over a dataset, shared out over the workers.

A batch is a leaf: it is evaluated once, by whoever the plan says, and the totals of all batches are added in the order
of the tree in float64. So there is no padding, no sample counts twice, and the bits do not depend on the workers.

A batch must leave nothing behind: some worker has evaluated it, the others have not. So modes and buffers are put back
after each batch. With its totals each worker sends digests of everything that is tracked, as it is afterwards: workers
whose models are not the same any more would go on together and mix their results.

Now and then each worker evaluates a batch of another one as well. The totals must be equal: a function that counts or
remembers gives others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from unisono.decisions.checks import rehearsal
from unisono.decisions.plan import Plan
from unisono.decisions.plan import plan as even_plan
from unisono.decisions.tree import fold, leaf
from unisono.errors import DivergenceError, RecipeError, UsageError
from unisono.faults import point
from unisono.state import digest_of_state, pack, quick_digest, unpack
from unisono.training.agreement import USUAL_CAUSES, Digests, check_digests
from unisono.training.data import Fetcher
from unisono.training.gradients import Buffers
from unisono.training.guards import Structure
from unisono.training.randomness import seed_place
from unisono.training.rounds import Rounds
from unisono.training.team import LOST
from unisono.training.tracked import Tracked

__all__ = ["Evaluator", "Totals", "check_batches", "evaluate"]

Totals = dict[str, Any]
"""Totals by name: int, float, or a CPU tensor."""


class Evaluator:
    """Evaluates batches, and puts back what the function leaves behind. Local."""

    def __init__(
        self, fetcher: Fetcher, function: Callable[[Any], Mapping[str, Any]], tracked: Tracked, *, seed: int
    ) -> None:
        """
        Args:
            fetcher: batches are fetched as (0, batch).
            function: batch -> totals of this batch by name.
            tracked: whose modules are in the mode that they shall have.
        """
        self._fetcher = fetcher
        self._function = function
        self._seed = seed
        self._structure = Structure(tracked)
        self._buffers: Buffers = tracked.buffers()
        self._buffers.start_step()

    def comes(self, batch: int) -> bool:
        """Return whether a batch comes from where others come; see `unisono.training.data.Fetcher.comes`."""
        return self._fetcher.comes(0, batch)

    def totals(self, batch: int) -> Totals:
        """Return the totals of one batch.

        Raises:
            StepError: the function has made or replaced parameters.
        """
        data = self._fetcher.fetch(0, batch)
        seed_place(self._seed, "evaluate", batch)
        with torch.no_grad():
            totals = self._function(data)
            self._buffers.restore()
        self._structure.check(f"batch {batch} of run.evaluate")
        self._structure.restore_modes()
        if not isinstance(totals, Mapping):
            raise UsageError(
                "the function of run.evaluate must return totals by name, e.g. {'correct': 93, 'samples': 100}; "
                f"got a {type(totals).__qualname__}"
            )
        return {name: _total(value, name) for name, value in totals.items()}


def evaluate(rounds: Rounds | None, evaluator: Evaluator, *, num_batches: int, rehearses: bool, number: int) -> Totals:
    """Evaluate all batches and add up their totals. Collective.

    Args:
        rounds: None computes everything here.
        rehearses: evaluate a batch of another worker as well, to compare the totals.
        number: evaluations of the run that are done.

    Raises:
        DivergenceError: the workers do not have the same models, or a batch has other totals on another worker.
    """
    have: dict[int, Totals] = {}
    todo = even_plan(1, num_batches) if rounds is None else rounds.start("evaluation", num_batches)
    is_rehearsal = rounds is not None and rounds.team.size > 1 and rehearses
    while True:
        try:
            for batch in todo.ranges[rounds.team.rank if rounds is not None else 0]:
                if rounds is not None:
                    rounds.team.check()
                    rounds.team.at(phase=rounds.phase, step=rounds.step, microbatch=batch, evaluates=True)
                if batch not in have:
                    have[batch] = evaluator.totals(batch)
                    point("in_evaluation", batch)
            if rounds is None:
                break
            twice = _rehearse(rounds, evaluator, todo, have, number) if is_rehearsal else {}
            digests = Digests(rounds.team.arithmetic, _digests(rounds) if rounds.team.size > 1 else {})
            told = _Letter.of(have, digests, twice)
            letters = [msgspec.msgpack.decode(letter, type=_Letter) for letter in rounds.gather(told.encode())]
            for other in letters:
                have.update(_totals(other))
            by_worker = dict(zip(rounds.team.worker_ids, letters, strict=False))
            check_digests({worker: letter.digests for worker, letter in by_worker.items()})
            _check_rehearsal(by_worker, have)
            rounds.gathered(_Letter.of(have, digests, {}).encode())
            point("evaluated")
            break
        except LOST as lost:
            assert rounds is not None
            todo = rounds.recover(lost, [leaf(batch, num_batches) for batch in have])
            is_rehearsal = False
    names = have[0].keys()
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


def _rehearse(
    rounds: Rounds, evaluator: Evaluator, todo: Plan, have: Mapping[int, Totals], number: int
) -> dict[int, str]:
    """Return the digests of the totals of a batch that another member evaluates, by batch."""
    other = rehearsal(todo, rounds.team.rank, number).other
    if other is None or other in have or not evaluator.comes(other):
        return {}
    rounds.team.check()
    rounds.team.at(phase=rounds.phase, step=rounds.step, microbatch=other, evaluates=True)
    return {other: _digest(evaluator.totals(other))}


def _digests(rounds: Rounds) -> dict[str, str]:
    return {name: f"{quick_digest(value):016x}" for name, value in rounds.tracked.compared().items()}


def _digest(totals: Totals) -> str:
    return f"{digest_of_state(totals):016x}"


def _check_rehearsal(letters: Mapping[str, _Letter], have: Mapping[int, Totals]) -> None:
    arithmetics = {letter.digests.arithmetic for letter in letters.values()}
    for worker, letter in letters.items():
        for batch, digest in letter.twice.items():
            if len(arithmetics) == 1 and digest != _digest(have[batch]):
                raise DivergenceError(
                    f"batch {batch} of run.evaluate was evaluated by two workers, and its totals on {worker} are not "
                    f"{have[batch]}, which the other one got. The function must return the same totals on every "
                    f"worker. {USUAL_CAUSES}"
                )


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


class _Letter(msgspec.Struct, frozen=True):
    skeleton: bytes
    tensors: list[tuple[str, list[int], bytes]]
    digests: Digests
    twice: dict[int, str]
    """The digests of the totals of batches that other members evaluate."""

    @classmethod
    def of(cls, have: dict[int, Totals], digests: Digests, twice: dict[int, str]) -> _Letter:
        packed = pack(have)
        tensors = [(str(t.dtype), list(t.shape), t.contiguous().numpy().tobytes()) for t in packed.tensors]
        return cls(packed.skeleton, tensors, digests, twice)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def _totals(letter: _Letter) -> dict[int, Totals]:
    tensors = [
        _tensor(raw, getattr(torch, kind.removeprefix("torch."))).view(shape) for kind, shape, raw in letter.tensors
    ]
    found: dict[int, Totals] = unpack(letter.skeleton, tensors)
    return found


def _tensor(raw: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)


def check_batches(num_samples: int, batch_size: int) -> int:
    """How many batches an evaluation has.

    Raises:
        RecipeError: none.
    """
    if num_samples < 1:
        raise RecipeError("run.evaluate got an empty dataset (length 0)")
    if batch_size < 1:
        raise RecipeError(f"batch_size must be at least 1, got {batch_size}")
    return math.ceil(num_samples / batch_size)
