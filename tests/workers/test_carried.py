"""``unisono.Carried``: rows that go from step to step with their sample, exact at any number of workers."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from tests.workers.models import Mlp, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.errors import DivergenceError, StepError, UsageError
from unisono.script.run import Run

pytestmark = pytest.mark.more

STREAMS, LENGTH, M = 8, 6, 4


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.last = nn.Embedding(7, 5), nn.LSTM(5, 6, 2), nn.Linear(6, 7)

    def forward(self, tokens: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.cell(self.embed(tokens.t()), hidden)
        return self.last(output), hidden


def chunks() -> TensorDataset:
    """Chunk t of stream s is sample t * STREAMS + s; its key is s."""
    text = torch.randint(0, 7, (STREAMS, 3 * LENGTH + 1), generator=torch.Generator().manual_seed(1))
    samples = [
        (text[s, 3 * t : 3 * t + 3], text[s, 3 * t + 1 : 3 * t + 4]) for t in range(LENGTH) for s in range(STREAMS)
    ]
    inputs, targets = (torch.stack([pair[part] for pair in samples]) for part in (0, 1))
    return TensorDataset(inputs, targets, torch.arange(LENGTH * STREAMS) % STREAMS)


def train(run: Run) -> dict[str, str]:
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hidden = unisono.Carried((torch.zeros(2, STREAMS, 6), torch.zeros(2, STREAMS, 6)), dim=1)
    run.track(model=model, optimizer=optimizer, hidden=hidden)
    for step in run.steps(chunks(), batch_size=STREAMS, microbatches=M, shuffle=False):
        for inputs, targets, stream in step:
            output, hidden[stream] = model(inputs, hidden[stream])
            step.backward(F.cross_entropy(output.flatten(0, 1), targets.t().flatten()))
        optimizer.step()
    return {"model": bits_of(model.state_dict()), "hidden": str(hidden.rows[1].view(torch.int32).sum())}


def train_in_place(seat: Seat, place: Place) -> dict[str, str]:
    with place.run(seed=1) as run:
        return train(run)


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    with AloneRun(seed=1) as run:
        return train(run)


@pytest.mark.parametrize("kind", ["shared", "gloo", "two-level"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_carried_rows_give_the_same_bits_at_any_number_of_workers(kind: str, size: int, alone: dict[str, str]) -> None:
    assert train_on(kind, size, train_in_place) == [alone] * size


def test_a_carried_state_is_that_of_truncated_backpropagation_as_it_is_written_without_unisono() -> None:
    """One stream, so that the order of additions is the same, too."""
    text = torch.randint(0, 7, (13,), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(
        torch.stack([text[i : i + 3] for i in range(0, 12, 3)]),
        torch.stack([text[i + 1 : i + 4] for i in range(0, 12, 3)]),
    )
    torch.manual_seed(5)
    start = Recurrent().state_dict()
    plain, ours = Recurrent(), Recurrent()
    plain.load_state_dict(start)
    ours.load_state_dict(start)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    state: Any = (torch.zeros(2, 1, 6), torch.zeros(2, 1, 6))
    for inputs, targets in zip(*data.tensors, strict=True):
        output, state = plain(inputs[None], state)
        state = tuple(one.detach() for one in state)
        theirs.zero_grad()
        F.cross_entropy(output.flatten(0, 1), targets).backward()
        theirs.step()
    with AloneRun(seed=1) as run:
        ours = Recurrent()
        ours.load_state_dict(start)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
        hidden = unisono.Carried((torch.zeros(2, 1, 6), torch.zeros(2, 1, 6)), dim=1)
        run.track(model=ours, optimizer=optimizer, hidden=hidden)
        for step in run.steps(data, batch_size=1, microbatches=1, shuffle=False):
            for inputs, targets in step:
                output, hidden[0:1] = ours(inputs, hidden[0:1])
                step.backward(F.cross_entropy(output.flatten(0, 1), targets.flatten()))
            optimizer.step()
    assert bits_of(ours.state_dict()) == bits_of(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(hidden.rows, state, strict=True))


def _naive(seat: Seat | None, place: Place | None) -> str:
    """A hidden state in a variable of the script."""
    try:
        with place.run(seed=1) if place is not None else AloneRun(seed=1) as run:
            model, state = Recurrent(), None
            run.track(model=model)
            for step in run.steps(chunks(), batch_size=STREAMS, microbatches=M, shuffle=False):
                for inputs, targets, _ in step:
                    output, state = model(inputs, state)
                    state = tuple(one.detach() for one in state)
                    step.backward(F.cross_entropy(output.flatten(0, 1), targets.t().flatten()))
    except DivergenceError as error:
        return str(error)
    return "finished"


def test_a_hidden_state_in_a_variable_is_noticed_on_two_workers_and_on_one() -> None:
    for said in (_naive(None, None), *train_on("shared", 2, _naive)):
        assert "micro-batch 0 of step 0 was computed" in said or "micro-batch 2 of step 0 was computed" in said
        assert "a hidden state, a memory or a weight that belongs to a sample goes into a unisono.Carried" in said


def test_rows_are_read_as_they_were_before_the_pass_and_written_after_it() -> None:
    with AloneRun(seed=1) as run:
        model, seen = Mlp(), []
        rows = torch.arange(56, dtype=torch.float64)
        weights = unisono.Carried(rows)
        run.track(model=model, weights=weights)
        for step in run.steps(vectors(), batch_size=56, microbatches=4, epochs=2, shuffle=False):
            for x, y in step:
                before = weights[step.indices]
                step.backward(F.cross_entropy(model(x), y))
                weights[step.indices] = before + 100
                seen.append(torch.equal(weights[step.indices], before))
            assert torch.equal(weights.rows, torch.arange(56) + 100.0 * (step.number + 1))
    assert seen == [True] * 8
    assert weights.rows is not rows  # detached
    assert weights.rows.data_ptr() == rows.data_ptr()


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([-0.0, float("nan"), float("inf"), 1e-42]),
        torch.tensor([True, False, True, True]),
        torch.tensor([1, -(1 << 63), (1 << 63) - 1, 0]),
        torch.tensor([[1, 2, 3], [4, 5, 255], [0, 0, 0], [9, 9, 9]], dtype=torch.uint8),
        torch.randn(4, 3).to(torch.bfloat16),
        torch.randn(4, 2, dtype=torch.complex64),
    ],
)
def test_every_bit_of_a_row_arrives(values: Tensor) -> None:
    with AloneRun(seed=1) as run:
        model = nn.Linear(1, 1)
        carried = unisono.Carried(torch.zeros_like(values))
        run.track(model=model, carried=carried)
        data = TensorDataset(torch.ones(4, 1))
        for step in run.steps(data, batch_size=4, microbatches=4, shuffle=False):
            for (x,) in step:
                step.backward(model(x).mean())
                carried[step.indices] = values[step.indices]
    ours, theirs = (one.contiguous().view(-1).view(torch.uint8) for one in (carried.rows, values))
    assert torch.equal(ours, theirs)


def test_of_samples_that_write_one_key_the_last_in_the_batch_counts() -> None:
    with AloneRun(seed=1) as run:
        model = Mlp()
        carried = unisono.Carried(torch.zeros(2, 1))
        run.track(model=model, carried=carried)
        for step in run.steps(vectors(), batch_size=56, microbatches=4, shuffle=False):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
                carried[[0] * len(y)] = step.indices[:, None]
    assert carried.rows.tolist() == [[55.0], [0.0]]


def _write(write: Any, **options: Any) -> None:
    with AloneRun(seed=1) as run:
        model = Mlp()
        carried = unisono.Carried(torch.zeros(60, 2), **options)
        run.track(model=model, carried=carried)
        for step in run.steps(vectors(), batch_size=24, microbatches=6, max_steps=1):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
                write(carried, step)


def test_a_micro_batch_may_write_no_row() -> None:
    """As where only the samples above a loss are written."""
    with AloneRun(seed=1) as run:
        model, seen = Mlp(), unisono.Carried(torch.zeros(56))
        run.track(model=model, seen=seen)
        for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=1):
            for x, y in step:
                chosen = step.indices[: 0 if step.microbatch else 2]
                seen[chosen] = torch.ones(len(chosen))
                seen[[]] = torch.ones(0)
                step.backward(F.cross_entropy(model(x), y))
    assert seen.rows.sum() == 2


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(UsageError, match=r"keys from 60 to 60 were given, but the unisono.Carried has rows 0 to 59"):
        _write(lambda carried, step: carried.__setitem__(60, 0.0))
    with pytest.raises(UsageError, match=r"rows of shape \(2, 2\) are to be written"):
        _write(lambda carried, step: carried.__setitem__([1, 2], torch.zeros(3, 2)))
    with pytest.raises(UsageError, match="an int, a slice, a list of ints"):
        _write(lambda carried, step: carried[torch.tensor([0.5])])
    with pytest.raises(StepError, match=r"wrote 5 rows of a unisono.Carried, but there is room for 4"):
        _write(lambda carried, step: carried.__setitem__(slice(0, 5), 1.0))
    _write(lambda carried, step: carried.__setitem__(slice(0, 8), 1.0), writes_per_sample=2)
    with pytest.raises(StepError, match=r"carried.rows was written within `for batch in step`"):
        _write(lambda carried, step: carried.rows.add_(1))


@pytest.mark.parametrize(
    "rows", [torch.zeros(0, 2), torch.tensor(1.0), [torch.zeros(2, 3), torch.zeros(3, 3)], [], "rows"]
)
def test_rows_have_a_length(rows: Any) -> None:
    with pytest.raises(UsageError, match=r"unisono.Carried takes tensors with"):
        unisono.Carried(rows)


def test_an_evaluation_may_read_rows_and_not_write_them() -> None:
    with AloneRun(seed=1) as run:
        carried = unisono.Carried(torch.ones(60))
        run.track(model=Mlp(), carried=carried)
        assert run.evaluate(vectors(), lambda batch: {"sum": carried[[3, 4]].sum()}, batch_size=56) == {"sum": 2.0}

        def write(batch: Any) -> dict[str, float]:
            carried[3] = 7.0
            return {}

        with pytest.raises(UsageError, match="has written rows of 'carried'"):
            run.evaluate(vectors(), write, batch_size=56)
        assert carried.rows[3] == 1.0


@pytest.mark.parametrize("key", [2, numpy.int64(2), torch.tensor(2)])
def test_one_key_is_one_row(key: Any) -> None:
    carried = unisono.Carried(torch.arange(6.0).view(3, 2))
    assert carried[key].tolist() == [4.0, 5.0]
    carried[key] = torch.tensor([7.0, 8.0])
    assert carried.rows.tolist() == [[0.0, 1.0], [2.0, 3.0], [7.0, 8.0]]
