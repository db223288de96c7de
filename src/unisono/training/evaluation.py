"""Exact totals over a dataset, shared out over the workers.

A batch is a leaf: it is evaluated once, by whoever the plan says, and the totals of all batches are added in the order
of the tree in float64. So there is no padding, no sample counts twice, and the bits do not depend on the workers.

With its totals each worker sends digests of what it has evaluated. Workers whose models are not the same any more would
go on together and mix their results, so that is where they are found out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from unisono.decisions.plan import plan as even_plan
from unisono.decisions.tree import fold, leaf
from unisono.errors import RecipeError, StepError, UsageError
from unisono.faults import point
from unisono.state import pack, unpack
from unisono.training.data import Fetcher
from unisono.training.randomness import seed_place
from unisono.training.rounds import Rounds
from unisono.training.team import LOST

__all__ = ["Totals", "check_batches", "evaluate"]

Totals = dict[str, Any]
"""Totals by name: int, float, or a CPU tensor."""


def evaluate(
    rounds: Rounds | None,
    fetcher: Fetcher,
    function: Callable[[Any], Mapping[str, Any]],
    *,
    num_batches: int,
    seed: int,
) -> Totals:
    """Evaluate all batches and add up what ``function`` returns for each.

    Args:
        rounds: None computes everything here.
        fetcher: batches are fetched as (0, batch).
        function: batch -> totals of this batch by name.

    Raises:
        StepError: the workers' models or optimizers are not the same.
    """
    have: dict[int, Totals] = {}
    digests = rounds.tracked.trained_digests() if rounds is not None and rounds.team.size > 1 else {}
    todo = even_plan(1, num_batches) if rounds is None else rounds.start("evaluation", num_batches)
    while True:
        try:
            for batch in todo.ranges[rounds.team.rank if rounds is not None else 0]:
                if rounds is not None:
                    rounds.team.check()
                    rounds.team.at(phase=rounds.phase, step=rounds.step, microbatch=batch, evaluates=True)
                if batch not in have:
                    have[batch] = _one(fetcher, function, batch, seed)
                    point("in_evaluation", batch)
            if rounds is None:
                break
            letters = [_decode(letter) for letter in rounds.gather(_encode(have, digests))]
            for other in letters:
                have.update(_totals(other))
            _check_alike(dict(zip(rounds.team.worker_ids, letters, strict=False)))
            rounds.gathered(_encode(have, digests))
            point("evaluated")
            break
        except LOST as lost:
            assert rounds is not None
            todo = rounds.recover(lost, [leaf(batch, num_batches) for batch in have])
    names = have[0].keys()
    for batch, totals in have.items():
        if totals.keys() != names:
            raise UsageError(
                f"the function of run.evaluate gave {sorted(names)} for batch 0 and {sorted(totals)} for batch {batch}"
            )
    return {
        name: fold(
            {leaf(batch, num_batches): have[batch][name] for batch in range(num_batches)},
            num_batches,
            lambda a, b: a + b,
        )
        for name in names
    }


def _one(fetcher: Fetcher, function: Callable[[Any], Mapping[str, Any]], batch: int, seed: int) -> Totals:
    data = fetcher.fetch(0, batch)
    seed_place(seed, "evaluate", batch)
    with torch.no_grad():
        totals = function(data)
    if not isinstance(totals, Mapping):
        raise UsageError(
            f"the function of run.evaluate must return totals by name, e.g. {{'correct': 93, 'samples': 100}}; "
            f"got a {type(totals).__qualname__}"
        )
    return {name: _total(value, name) for name, value in totals.items()}


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
            f"run.evaluate can add up numbers and tensors; {name!r} is a {type(value).__qualname__}"
        ) from None


class _Letter(msgspec.Struct, frozen=True):
    skeleton: bytes
    tensors: list[tuple[str, list[int], bytes]]
    digests: dict[str, str]
    """Of the models and optimizers that were tracked; empty where there is nobody to compare them with."""


def _encode(have: dict[int, Totals], digests: dict[str, str]) -> bytes:
    packed = pack(have)
    tensors = [(str(t.dtype), list(t.shape), t.contiguous().numpy().tobytes()) for t in packed.tensors]
    return msgspec.msgpack.encode(_Letter(packed.skeleton, tensors, digests))


def _decode(data: bytes) -> _Letter:
    return msgspec.msgpack.decode(data, type=_Letter)


def _totals(letter: _Letter) -> dict[int, Totals]:
    tensors = [
        _tensor(raw, getattr(torch, kind.removeprefix("torch."))).view(shape) for kind, shape, raw in letter.tensors
    ]
    found: dict[int, Totals] = unpack(letter.skeleton, tensors)
    return found


def _tensor(raw: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)


def _check_alike(letters: dict[str, _Letter]) -> None:
    """Args: letters: by worker. Raises: StepError: they are about different models."""
    known = {worker: letter.digests for worker, letter in letters.items() if letter.digests}
    if not known:
        return
    first = next(iter(known))
    for worker, digests in known.items():
        different = [name for name in digests if digests[name] != known[first].get(name)]
        if different:
            raise StepError(
                f"the workers have drifted apart: {', '.join(different)} of {worker} is not that of {first}. Something "
                "between the steps depends on the worker: a sum that was collected within `for batch in step` (use "
                "step.loss or run.evaluate), run.rank, the time, or something that changes and was not tracked when "
                "the worker joined"
            )


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
