"""Evaluation is exact: every sample once, totals that do not depend on the workers, and nothing else is changed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from tests.workers.models import Cnn, Images, Mlp, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.audits import Record
from unisono.engine.rounds import evaluation
from unisono.engine.rounds.auditing import Dispute, Repeats
from unisono.engine.rounds.life import Rounds

pytestmark = pytest.mark.more


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(run: unisono.Run, model: nn.Module, data: Any, num_steps: int = 1) -> None:
    run.track(model=model)
    for step in run.steps(data, batch_size=8, microbatches=4, max_steps=num_steps):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))


def _counts(seat: Seat, place: Place, num_samples: int, batch_size: int) -> list[Any]:
    """What the team adds up over 0, 1, 2, ..., with every kind of total; and which samples this member saw."""
    seen: list[int] = []

    def count(batch: torch.Tensor) -> dict[str, Any]:
        seen.extend(batch.tolist())
        return {
            "samples": len(batch),
            "sum": batch.sum(),
            "thirds": (batch / 3).sum(),
            "by": torch.bincount(batch % 4, minlength=4),
            "any": bool((batch == 5).any()),
            "tenth": 0.1,
            "numpy": numpy.float32(0.1),
        }

    with place.run(seed=1, deterministic=False) as run:  # so that no batch is evaluated twice, to compare it
        train(run, Mlp(), vectors())
        totals = run.evaluate(list(range(num_samples)), count, batch_size=batch_size)
    return [seen, {name: type(value).__name__ for name, value in totals.items()}, bits_of(totals), totals["samples"]]


SIZES = ((53, 8), (40, 8), (3, 8), (1, 1), (2, 1))
"""Of a data set, and of a batch."""


def _counts_of_all(seat: Seat, place: Place) -> list[list[Any]]:
    return [_counts(seat, place, *sizes) for sizes in SIZES]


@pytest.fixture(scope="module")
def counted() -> list[list[Any]]:
    """What one worker counts, for each of `SIZES`."""
    (found,) = train_on("shared", 1, _counts_of_all)
    for (num_samples, _), (_, kinds, _, samples) in zip(SIZES, found, strict=True):
        assert samples == num_samples
        assert kinds == {
            "samples": "int", "sum": "int", "any": "int", "by": "Tensor",
            "thirds": "float", "tenth": "float", "numpy": "float",
        }  # fmt: skip
    return list(found)


@pytest.mark.parametrize(("kind", "size"), [("shared", 3), ("gloo", 2), ("two-level", 4)])
def test_every_sample_counts_once(kind: str, size: int, counted: list[list[Any]]) -> None:
    """No padding and no duplicates, also where members have nothing to do; bits as those of one worker."""
    members = train_on(kind, size, _counts_of_all)
    for number, (num_samples, batch_size) in enumerate(SIZES):
        by_rank = [found[number] for found in members]
        seen = sorted(index for indices, *_ in by_rank for index in indices)
        assert seen == list(range(num_samples)), f"batches of {batch_size}"
        assert {bits for _, _, bits, _ in by_rank} == {counted[number][2]}


def test_an_evaluation_in_which_nobody_is_found_wrong_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """States differ, and the member that was wrong is lost meanwhile."""
    asked: list[int] = []

    class Undecided:
        record = Record()

        def find(self, rounds: Rounds, round_: Repeats, dispute: Dispute) -> Iterator[None]:
            asked.append(round_.number)
            yield from ()

    monkeypatch.setattr(evaluation, "has_minority", lambda digests: not asked)
    with AloneRun(seed=1) as run:
        train(run, Mlp(), vectors())
        monkeypatch.setattr(run._requests, "audits", Undecided())
        totals = run.evaluate(list(range(10)), lambda batch: {"sum": batch.sum()}, batch_size=2)
    assert (asked, totals) == ([1], {"sum": 45})


def test_totals_are_added_in_double_precision() -> None:
    """16,777,217 ones in float32 would be 16,777,216."""
    with AloneRun() as run:
        data = TensorDataset(torch.tensor([2.0**24, 1.0, 1.0, 1.0]))
        totals = run.evaluate(data, lambda batch: {"sum": batch[0].sum()}, batch_size=1)
    assert totals == {"sum": 2.0**24 + 3}


def _of_nothing(seat: Seat, place: Place) -> list[torch.dtype]:
    with place.run() as run:
        data = TensorDataset(torch.zeros(2))
        totals = run.evaluate(
            data, lambda batch: {"a": torch.zeros(0, dtype=torch.int64), "b": torch.zeros(2, 0)}, batch_size=1
        )
    return [totals["a"].dtype, totals["b"].dtype]


def test_totals_without_elements_keep_their_dtype() -> None:
    assert train_on("shared", 2, _of_nothing) == [[torch.int64, torch.float64]] * 2


def test_it_is_what_a_plain_loop_computes() -> None:
    data = vectors(53)
    with AloneRun(seed=2) as run:
        model = Mlp()
        train(run, model, data, num_steps=3)

        def count(batch: Any) -> dict[str, Any]:
            assert not torch.is_grad_enabled()
            x, y = batch
            return {"correct": (model(x).argmax(1) == y).sum(), "samples": len(y)}

        totals = run.evaluate(data, count, batch_size=10)
    x, y = data.tensors
    assert totals == {"correct": int((model(x).argmax(1) == y).sum()), "samples": 53}


def test_modules_are_evaluated_and_go_on_as_they_were() -> None:
    """Dropout is off, BatchNorm keeps its statistics; a part that the user keeps in eval mode stays there."""
    with AloneRun(seed=2) as run:
        model = Cnn()
        model.drop.eval()
        train(run, model, Images())
        before = bits_of(model.state_dict())
        gradient = bits_of(model.conv.weight.grad)
        modes: list[bool] = []

        def look(batch: Any) -> dict[str, Any]:
            modes.extend(module.training for module in model.modules())
            return {"sum": model(batch[0]).sum()}

        first = run.evaluate(Images(), look, batch_size=16)
        assert not any(modes)
        assert [name for name, module in model.named_modules() if not module.training] == ["drop"]
        assert bits_of(model.state_dict()) == before
        assert bits_of(model.conv.weight.grad) == gradient
        assert run.evaluate(Images(), look, batch_size=16) == first, "augmented alike"


def test_modes_come_back_after_an_error() -> None:
    with AloneRun() as run:
        model = Cnn()
        run.track(model=model)
        with pytest.raises(ZeroDivisionError):
            run.evaluate(vectors(), lambda batch: {"x": 1 / 0}, batch_size=8)
        assert all(module.training for module in model.modules())


def _draws(seat: Seat, place: Place) -> list[list[float]]:
    """What user code draws at each place where it may be."""
    found = []

    def draw() -> None:
        found.append([float(torch.rand(())), float(numpy.random.rand()), random.random()])

    with place.run(seed=5) as run:
        draw()
        model = Cnn()
        run.track(model=model)
        run.evaluate(Images(), lambda batch: {"x": torch.rand(())}, batch_size=10)
        draw()
        for _ in range(2):
            for step in run.steps(Images(), batch_size=24, microbatches=6, epochs=1):
                draw()
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                draw()
                if step.index == 1:
                    run.evaluate(Images(), lambda batch: {"x": torch.rand(())}, batch_size=10)
                    draw()
            draw()
    return found


def test_user_code_draws_the_same_numbers_on_every_worker() -> None:
    """At the start, at the head of a step, after its inner loop, after an evaluation; and never the same twice."""
    (alone,) = train_on("shared", 1, _draws)
    assert len({tuple(draw) for draw in alone}) == len(alone) == 2 + 2 * (3 * 2 + 2)
    for size in (2, 4):
        assert train_on("shared", size, _draws) == [alone] * size
