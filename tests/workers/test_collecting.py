"""``run.collect``: the rows of all samples of an evaluation, each once, in their order, on every worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import unisono
from tests.workers.models import Mlp, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.engine.state import rows

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.float8_e5m2),
]


def train(run: unisono.Run, num_steps: int = 1) -> Mlp:
    model = Mlp()
    run.track(model=model)
    for step in run.steps(vectors(), batch_size=8, microbatches=4, max_steps=num_steps):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
    return model


def collect(run: unisono.Run, x: torch.Tensor, y: torch.Tensor) -> None:
    run.collect(
        **{str(dtype).removeprefix("torch."): x.to(dtype) for dtype in DTYPES},
        array=x.double().numpy(),
        sizes=[[0.5] * int(label) for label in y],
        ragged=[row[:label] for row, label in zip(x, y, strict=True)],
        empty=torch.empty(len(y), 0),
        part=torch.stack([y, y])[0],
        turned=x.T.contiguous().T,
    )


def _collected(seat: Seat, place: Place) -> list[Any]:
    found = []
    with place.run(seed=1) as run:
        train(run)
        for num_samples, batch_size in ((53, 8), (2, 1)):
            data = vectors(num_samples)
            for x, y in run.batches(DataLoader(data, batch_size=batch_size)):
                collect(run, x, y)
            x, y = data.tensors
            for dtype in DTYPES:
                name = str(dtype).removeprefix("torch.")
                assert bits_of(run.collected(name)) == bits_of(x.to(dtype)), name
            assert run.collected("array").tolist() == x.double().tolist()
            assert run.collected("sizes") == [[0.5] * int(label) for label in y]
            assert [len(row) for row in run.collected("ragged")] == y.tolist()
            assert run.collected("empty").shape == (num_samples, 0)
            assert bits_of(run.collected("part")) == bits_of(y)
            assert bits_of(run.collected("turned")) == bits_of(x)
            run.collected("part").zero_()
            assert bits_of(run.collected("part")) == bits_of(y), "what was read is a copy"
            totals = run.evaluate(data, lambda batch: run.collect(label=batch[1]), batch_size=batch_size)
            assert (totals, bits_of(run.collected("label"))) == ({}, bits_of(y))
            found.append(run.once(lambda: bits_of(run.collected("float32"))))
    return found


@pytest.mark.parametrize(("kind", "size"), [("shared", 1), ("shared", 3), ("gloo", 2)])
def test_every_worker_has_all_rows_once_in_the_order_of_the_data(kind: str, size: int) -> None:
    """Also with more workers than batches; batches that two workers evaluate, to compare them, count once."""
    assert train_on(kind, size, _collected) == [[bits_of(vectors(n).tensors[0]) for n in (53, 2)]] * size


def _counting(seat: Seat, place: Place) -> str:
    count = seat.rank
    try:
        with place.run(seed=1) as run:
            train(run)
            for _, y in run.batches(vectors(53), batch_size=8):
                count += 1
                run.collect(count=[count] * len(y))
    except unisono.DivergenceError as error:
        return str(error)
    return ""


def test_rows_of_a_batch_that_two_workers_evaluate_are_compared() -> None:
    for words in train_on("shared", 2, _counting):
        assert "its totals or collected rows (count) on w" in words


def refusals() -> dict[str, tuple[Callable[[unisono.Run, torch.Tensor], Any], str]]:
    return {
        "another number of rows": (lambda run, y: run.collect(x=y[1:]), r"of shape \(7,\) for a batch of 8 samples"),
        "a number": (lambda run, y: run.collect(x=y.sum()), r"of shape \(\) for a batch of 8 .*run\.total adds up"),
        "a plain number": (lambda run, y: run.collect(x=3), "a int alone for a batch of 8 samples"),
        "a short list": (lambda run, y: run.collect(x=[1, 2]), "a list of 2 items for a batch of 8"),
        "twice": (lambda run, y: (run.collect(x=y), run.collect(x=y)), "twice in one batch"),
        "an object": (lambda run, y: run.collect(x=[run] * len(y)), r"run\.collect\(x=\.\.\.\)\[0\] is a unisono"),
        "sparse": (lambda run, y: run.collect(x=y.to_sparse()), "is a sparse_coo tensor"),
        "other names": (
            lambda run, y: run.collect(x=y) if len(y) == 8 else run.collect(z=y),
            r"collected \['x'\] in batch 0 and \['z'\] in batch 6",
        ),
        "too much": (lambda run, y: run.collect(x=torch.zeros(len(y), 1000)), "has collected 21[0-9],... bytes"),
    }


@pytest.mark.parametrize("what", refusals())
def test_rows_that_are_not_one_for_each_sample_are_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, words = refusals()[what]
    if what == "too much":
        monkeypatch.setattr(rows, "MOST_BYTES", 200_000)

    def evaluate() -> None:
        with AloneRun(seed=1) as run:
            train(run)
            for _, y in run.batches(vectors(53), batch_size=8):
                call(run, y)

    with pytest.raises(unisono.UsageError, match=words):
        evaluate()


def test_rows_are_read_and_collected_where_they_are_known() -> None:
    with AloneRun(seed=1) as run:
        model = train(run)
        with pytest.raises(unisono.StepError, match="outside of an evaluation"):
            run.collect(x=[1])
        with pytest.raises(unisono.UsageError, match=r"'x'.* has collected such rows; there are none"):
            run.collected("x")
        for x, _ in run.batches(vectors(53), batch_size=8):
            run.collect(x=x[:, : 2 + (len(x) == 5)], found=np.asarray(model(x)))
            with pytest.raises(unisono.StepError, match="inside `for batch in run"):
                run.collected("x")
        assert run.collected("found").shape == (53, 4)
        with pytest.raises(unisono.UsageError, match=r"shape \(2,\) in batch 0, .* shape \(3,\) in batch 6.*x=list"):
            run.collected("x")

        def reads(batch: Any) -> dict[str, int]:
            return {"n": len(run.collected("found"))}

        with pytest.raises(unisono.StepError, match="inside an evaluation"):
            run.evaluate(vectors(53), reads, batch_size=8)
        with pytest.raises(unisono.UsageError, match=r"run\.barrier was called inside the function of run\.once"):
            run.once(run.barrier)
        for step in run.steps(vectors(), batch_size=8, microbatches=4, max_steps=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            with pytest.raises(unisono.UsageError, match="there are none"):
                run.collected("found")
            if step.index == 0:
                for _, y in run.batches(vectors(5), batch_size=8):
                    run.collect(found=y)
                assert bits_of(run.collected("found")) == bits_of(vectors(5).tensors[1])


def test_rows_are_not_collected_beside_the_training() -> None:
    def begin() -> None:
        with AloneRun(seed=1) as run:
            train(run)
            run.evaluate(vectors(53), lambda batch: run.collect(x=batch[1]), batch_size=8, wait=False)

    with pytest.raises(unisono.StepError, match="without wait=False"):
        begin()


class Cut(Exception):
    """The end of a run that is resumed later."""


def _epochs(directory: Path, *, cut: bool, how: str) -> list[float]:
    figures = []
    with AloneRun(directory, seed=1, resume="auto", checkpoint=unisono.Checkpoints(every_steps=1000)) as run:
        model = Mlp()
        run.track(model=model)
        for epoch in range(3):
            for step in run.steps(vectors(), batch_size=8, microbatches=4):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                if cut and epoch == 2:
                    raise Cut
            if how == "guarded" and run.is_catching_up:
                continue
            for x, _ in run.batches(vectors(53), batch_size=8):
                run.collect(found=model(x))
            run.save()
            figure = run.once(lambda: float(run.collected("found").sum())) if how == "once" else 0.0
            figures.append(figure or float(run.collected("found").sum()))
    return figures


@pytest.mark.filterwarnings("ignore:run.collected:UserWarning")
@pytest.mark.parametrize("how", ["once", "plain", "guarded"])
def test_a_run_that_resumes_has_the_rows_of_its_place_and_what_was_computed_of_others(how: str, tmp_path: Path) -> None:
    """Its newest checkpoint was written between the rows and what is computed of them."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        calm = _epochs(tmp_path / "calm", cut=False, how=how)
    words = [str(one.message) for one in told if "outside of run.once" in str(one.message)]
    assert [word.startswith("run.collected('found') was called between") for word in words] == [True] * 2 * (
        how == "plain"
    )
    with pytest.raises(Cut):
        _epochs(tmp_path / "cut", cut=True, how=how)
    if how == "plain":
        with pytest.raises(unisono.StepError, match="in a part of the run that is over"):
            _epochs(tmp_path / "cut", cut=False, how=how)
    else:
        again = _epochs(tmp_path / "cut", cut=False, how=how)
        assert again == calm[-len(again) :]
        assert len(again) == (3 if how == "once" else 2)
