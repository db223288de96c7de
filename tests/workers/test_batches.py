"""An evaluation as a loop of the script's own: the totals, the bits and the lines of ``run.evaluate``."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import unisono
from tests.workers.conftest import Unisono
from tests.workers.gates import Gates
from tests.workers.losses import ended_workers
from tests.workers.models import Cnn, Images, Mlp, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.events import EvaluationFinished
from unisono.record.history import History
from unisono.record.journal import compare, events, read
from unisono.testing import Faults, run_workers
from unisono.views.watch.charts import scalars

SCRIPT = Path(__file__).with_name("tested_training.py")


def train(run: unisono.Run, model: torch.nn.Module, num_steps: int = 1) -> None:
    run.track(model=model)
    for step in run.steps(vectors(), batch_size=8, microbatches=4, max_steps=num_steps):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))


def _both_forms(seat: Seat, place: Place) -> list[Any]:
    """The totals of a loop and of a function, and what the loop has given this member."""
    found: list[Any] = []
    with place.run(seed=1, deterministic=False) as run:
        model = Mlp()
        train(run, model)
        for num_samples, batch_size in ((53, 8), (3, 2), (1, 1)):
            data = vectors(num_samples)

            def count(batch: Any, model: Mlp = model) -> dict[str, Any]:
                x, y = batch
                loss = F.cross_entropy(model(x), y, reduction="sum")
                return {"loss": loss, "right": (model(x).argmax(1) == y).sum(), "by": torch.bincount(y, minlength=4)}

            batches = run.batches(DataLoader(data, batch_size=batch_size))
            indices = []
            for batch in batches:
                assert not torch.is_grad_enabled()
                assert not model.training
                indices.append(batches.index)
                batches.add(**count(batch))
            assert torch.is_grad_enabled()
            assert model.training
            function = run.evaluate(data, count, batch_size=batch_size)
            found.append([len(batches), indices, bits_of(batches.totals), bits_of(function)])
    return found


def test_a_loop_gives_the_bits_of_a_function() -> None:
    """Each batch once, the last one smaller; members without a batch have the totals as well."""
    (alone,) = train_on("shared", 1, _both_forms)
    three = train_on("shared", 3, _both_forms)
    for number, num_batches in enumerate((7, 2, 1)):
        length, indices, loop, function = alone[number]
        assert (length, indices) == (num_batches, list(range(num_batches)))
        assert loop == function
        by_rank = [member[number] for member in three]
        assert [each[2:] for each in by_rank] == [[loop, loop]] * 3
        assert sorted(index for each in by_rank for index in each[1]) == indices
    assert [len(member[2][1]) for member in three].count(0) == 2


def _totals(seat: Seat, place: Place) -> list[Any]:
    with place.run(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        found = []
        for _ in range(2):
            seen = run.total("seen")
            for step in run.steps(vectors(20), batch_size=8, microbatches=4):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                    seen += len(y)
                if step.index == 1:
                    inside = run.total("inside")
                    for _, y in run.batches(vectors(10), batch_size=4):
                        inside += len(y)
                    found.append(int(inside))
            loss, right, odd = run.total("loss"), run.total("right"), run.total("odd")
            batches = run.batches(vectors(53), batch_size=8)
            for x, y in batches:
                loss += F.cross_entropy(model(x), y, reduction="sum")
                right += (model(x).argmax(1) == y).sum().item()
                if batches.index == 5:
                    odd += len(y)
            loss /= 53  # from here on, a number
            assert isinstance(loss, float)
            assert (right > 3, right >= 3, 100 * right / 53, f"{right}") == (
                int(right) > 3, int(right) >= 3, 100 * int(right) / 53, str(int(right))
            )  # fmt: skip
            found += [loss, int(right), int(odd), int(seen)]
        return found


def test_variables_that_loops_count_up() -> None:
    (alone,) = train_on("shared", 1, _totals)
    assert [alone[0], *alone[3:5], alone[5]] == [10, 8, 20, 10]
    assert train_on("shared", 3, _totals) == [alone] * 3


def test_a_total_is_an_array_for_numpy_and_torch() -> None:
    """So is the variable that a plain loop counts up: a confusion matrix, or a number. Integers stay exact."""
    much = 2**53 + 1
    with AloneRun(seed=1) as run:
        model = Mlp()
        train(run, model)
        confusion, count, loss = run.total("confusion"), run.total("count"), run.total("loss")
        for _, y in run.batches(vectors(53), batch_size=8):
            confusion += torch.ones(2, 2, dtype=torch.int64).triu() * len(y)
            count += much * (len(y) == 5)
            loss += torch.tensor(0.5, dtype=torch.float64)
            with pytest.raises(unisono.StepError, match=r"value of run\.total"):
                len(confusion)
        matrix = torch.tensor([[53, 53], [0, 53]])
        by_numpy = np.asarray(confusion, dtype=float)
        assert by_numpy.tolist() == matrix.tolist()
        assert by_numpy.dtype == float
        assert (np.ones((2, 2)) * confusion).tolist() == matrix.tolist()
        for found in (
            torch.as_tensor(confusion),
            torch.tensor(confusion),
            confusion.tensor,
            confusion @ torch.eye(2).long(),
        ):
            assert bits_of(found) == bits_of(matrix)
        assert torch.as_tensor(confusion, dtype=torch.float64).dtype == torch.float64
        assert bits_of(torch.diag(confusion)) == bits_of(confusion.diag()) == bits_of(matrix.diag())
        assert (confusion[0, 0], confusion.sum(), len(confusion), confusion.shape) == (53, 159, 2, (2, 2))
        assert [row.tolist() for row in confusion] == matrix.tolist()
        assert (torch.ones(2, 2) + confusion).tolist() == (1 + confusion).tolist() == (matrix + 1).tolist()
        assert ((confusion > 0) == torch.ones(2, 2, dtype=torch.bool).triu()).all()
        f1 = 2 * confusion.diag() / (confusion.sum(0) + confusion.sum(1))
        assert f"{f1.mean():.3f}" == "0.667"
        with pytest.raises(TypeError, match=r"tensor of shape \(2, 2\), and the format '.3f'"):
            f"{confusion:.3f}"
        with pytest.raises(AttributeError, match=r"run.total\('confusion'\).div_ would change a copy"):
            confusion.div_(2)
        confusion.tensor.zero_()
        assert confusion.sum() == 159, "what was read is a copy"
        assert (int(count), float(loss), f"{loss:.1f}", f"{count}") == (much, 3.5, "3.5", str(much))
        assert np.asarray(count).tolist() == torch.as_tensor(count).item() == count.tensor.item() == much
        assert (loss.sqrt(), math.sqrt(loss), loss**2) == (math.sqrt(3.5), 3.5**0.5, 12.25)
        assert torch.as_tensor(loss).dtype == torch.float64
        assert (count // 2, -count, count % 2, max(loss, 4)) == (much // 2, -much, 1, 4)


def test_several_loops_in_an_epoch_have_a_line_each(tmp_path: Path) -> None:
    with AloneRun(tmp_path / "run", seed=1) as run:
        train(run, Mlp(), 2)
        for size in (5, 6):
            for x, _ in (batches := run.batches(vectors(size), batch_size=4)):
                batches.add(n=len(x))
    lines = [line for line in read(tmp_path / "run") if line["kind"] == "evaluation"]
    assert [(line["step"], line["totals"]) for line in lines] == [(2, {"n": 5}), (2, {"n": 6})]


def test_buffers_and_random_numbers_are_as_after_a_function() -> None:
    def trained(loop: bool) -> list[Any]:
        with AloneRun(seed=2) as run:
            model = Cnn()
            run.track(model=model)
            for step in run.steps(Images(), batch_size=24, microbatches=6, max_steps=1):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
            drawn = []
            if loop:
                for x, _ in run.batches(Images(), batch_size=16):
                    model.train()  # puts statistics into the buffers
                    drawn.append(model(x).sum().item())
            else:
                run.evaluate(
                    Images(), lambda b: {"x": drawn.append(model.train()(b[0]).sum().item()) or 0}, batch_size=16
                )
            return [drawn, bits_of(model.state_dict()), float(torch.rand(())), model.training]

    assert trained(loop=True) == trained(loop=False)


def _left(then: str) -> None:
    with AloneRun(seed=1) as run:
        train(run, Mlp())
        with contextlib.suppress(KeyError):
            for _ in run.batches(vectors(), batch_size=4):
                if then == "barrier after an exception":
                    raise KeyError
                break
        assert torch.is_grad_enabled()
        if then.startswith("barrier"):
            run.barrier()
        elif then == "steps":
            next(run.steps(vectors(), batch_size=8, microbatches=2))
        elif then == "the value":
            float(run.total("n"))


@pytest.mark.parametrize("then", ["barrier", "barrier after an exception", "steps", "the value", "the end"])
def test_a_loop_that_is_left_is_refused(then: str) -> None:
    with pytest.raises(unisono.StepError, match=r"left before its end.*Subset"):
        _left(then)


def _calls(call: Callable[[unisono.Run, Any], Any]) -> None:
    with AloneRun(seed=1) as run:
        train(run, Mlp())
        batches = run.batches(vectors(), batch_size=4)
        for _ in batches:
            call(run, batches)


@pytest.mark.parametrize(
    "call",
    [
        lambda run, batches: run.barrier(),
        lambda run, batches: run.evaluate(vectors(), len, batch_size=4),
        lambda run, batches: run.log(x=1),
        lambda run, batches: run.save(),
        lambda run, batches: next(iter(run.batches(vectors(), batch_size=4))),
        lambda run, batches: next(run.steps(vectors(), batch_size=8, microbatches=2)),
        lambda run, batches: batches.totals,
        lambda run, batches: float(run.total("n")),
    ],
)
def test_what_has_no_place_in_the_loop_is_refused(call: Callable[[unisono.Run, Any], Any]) -> None:
    with pytest.raises(unisono.StepError, match=r"inside `for batch in run\.batches"):
        _calls(call)


def _inner_loop_within() -> None:
    with AloneRun(seed=1) as run:
        run.track(model=Mlp())
        for step in run.steps(vectors(24), batch_size=8, microbatches=4):
            for _ in run.batches(vectors(24), batch_size=4):
                for _ in step:
                    pass


def test_an_inner_loop_within_it_is_refused() -> None:
    words = "a step of 4 micro-batches was begun inside an evaluation of 6 batches"
    with pytest.raises(unisono.StepError, match=words):
        _inner_loop_within()


def test_other_misuse_is_refused() -> None:
    with AloneRun(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        n = run.total("n")
        with pytest.raises(unisono.StepError, match="outside of the loops"):
            n += 1
        batches = run.batches(vectors(), batch_size=4)
        with pytest.raises(unisono.StepError, match="are known only after"):
            _ = batches.totals
        with pytest.raises(unisono.StepError, match=r"within `for batch in run\.batches"):
            batches.add(n=1)
        for step in run.steps(vectors(), batch_size=8, microbatches=4, max_steps=1):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
                n += len(y)
                with pytest.raises(unisono.StepError, match="known only after the inner loop"):
                    float(n)
                with pytest.raises(unisono.UsageError, match=r"run\.batches was called inside `for batch in step`"):
                    next(iter(run.batches(vectors(), batch_size=4)))
        for x, _ in batches:
            with pytest.raises(unisono.UsageError, match="in the training and in an evaluation"):
                n += len(x)
            for wrong in ("text", torch.ones(2, dtype=torch.complex64)):
                with pytest.raises(unisono.UsageError, match="can add up numbers"):
                    batches.add(s=wrong)
        with pytest.raises(unisono.StepError, match="was already iterated over"):
            iter(batches)


def test_figures_of_ones_own_have_a_line(tmp_path: Path) -> None:
    with AloneRun(tmp_path / "run", seed=1) as run:
        with pytest.raises(unisono.UsageError, match="after the first step of the run"):
            run.log(x=1)
        model = Mlp()
        run.track(model=model)
        for step in run.steps(vectors(), batch_size=8, microbatches=4, max_steps=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            if step.number == 0:
                run.log(inside=1)
        run.log({"val/rmse": torch.tensor(0.5)}, rate=2)
        with pytest.raises(unisono.UsageError, match="takes numbers"):
            run.log({"x": "text"})
    lines = [line for line in read(tmp_path / "run") if line["kind"] == "evaluation"]
    found = [(line["step"], line["totals"], line["logs"]) for line in lines]
    assert found == [(0, {}, {"inside": 1.0}), (2, {}, {"val/rmse": 0.5, "rate": 2.0})]
    history = History(tmp_path / "run")
    assert "evaluation/val/rmse" in history.names()
    assert history.series(["evaluation/val/rmse"])["evaluation/val/rmse"]["mean"] == [0.5]
    (event,) = [one for one in events(tmp_path / "run") if isinstance(one, EvaluationFinished) and one.step == 2]
    assert scalars(event) == {"evaluation/val/rmse": 0.5, "evaluation/rate": 2.0}


# -- with real workers ---------------------------------------------------------------------------------


def printed(lines: list[str]) -> list[str]:
    return [line.split("] ", 1)[1] for line in lines if "] epoch " in line]


@pytest.mark.usefixtures("nursery")
def test_a_worker_killed_within_the_loop_changes_no_total(tmp_path: Path) -> None:
    """Its batches come to the others, also those of which it has told the others, and given them no row."""
    calm, hurt = tmp_path / "calm", tmp_path / "hurt"
    calm_run = run_workers(SCRIPT, 1, directory=calm)
    assert calm_run.exit_code == 0, calm_run.output
    faults = Faults().kill("w1", at="in_evaluation", step=5).kill("w2", at="evaluation.collecting", step=8)
    faults = faults.kill("w0", at="deliver.staged", step=2)
    outcome = run_workers(SCRIPT, 3, directory=hurt, faults=faults)
    assert outcome.exit_code == 0, outcome.output
    assert ended_workers(outcome.output) == {"w0", "w1", "w2"}
    assert set(printed(calm_run.output.splitlines())) == set(printed(outcome.output.splitlines()))
    assert compare(calm, hurt).startswith("identical: 9 steps")
    figures = {line["step"]: line["totals"] for line in read(calm) if line["kind"] == "evaluation" and line["totals"]}
    assert len(figures) == 3
    found = {line["step"]: line["totals"] for line in read(hurt) if line["kind"] == "evaluation" and line["totals"]}
    assert found == figures


@pytest.mark.usefixtures("nursery")
def test_a_replacement_prints_the_figures_that_the_epochs_had(
    tmp_path: Path, unisono: Unisono, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In epochs that it skips, it has no model of that epoch, and gets the totals."""
    for name, value in Faults().kill("w1", at="before_combine", step=4).environment().items():
        monkeypatch.setenv(name, value)
    with Gates(tmp_path / "gates", (7,)) as gates:
        command = unisono("run", SCRIPT, "-n", 2, "--run-dir", tmp_path / "run", "--", "--gates", gates.folder)
        gates.wait(7)
        gates.open(7, command.generation("w2 joins"))
        assert command.wait() == 0, command.err
    lines = printed(command.out)
    by_epoch = {epoch: {line for line in lines if line.startswith(f"epoch {epoch}:")} for epoch in range(3)}
    assert [len(said) for said in by_epoch.values()] == [1, 1, 1], lines
    assert sum("epoch 0:" in line for line in lines) == 3, "the replacement has come to it as well"


@pytest.mark.usefixtures("nursery")
def test_a_resumed_run_has_the_totals_of_the_epochs_that_are_over(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_workers(SCRIPT, 1, directory=whole).exit_code == 0
    first = run_workers(SCRIPT, 2, directory=cut, arguments=["--epochs", "2"])
    assert first.exit_code == 0, first.output
    again = run_workers(SCRIPT, 3, directory=cut)
    assert again.exit_code == 0, again.output
    lines = [json.dumps([line.get("step"), line.get("totals"), line.get("logs")]) for line in read(cut)]
    expected = [json.dumps([line.get("step"), line.get("totals"), line.get("logs")]) for line in read(whole)]
    assert lines == expected


def test_the_best_checkpoint_by_a_figure_has_the_figure_of_its_model(tmp_path: Path) -> None:
    """The best epoch is the second; its checkpoint was written before its figure was known."""
    policy = unisono.Checkpoints(every_steps=1000, keep=1, keep_best="val/x", best="max")
    figures = {}
    with AloneRun(tmp_path / "run", seed=1, checkpoint=policy) as run:
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for figure in (1.0, 3.0, 2.0):
            for step in run.steps(vectors(24), batch_size=8, microbatches=4):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                optimizer.step()
            run.log({"val/x": figure})
            figures[bits_of(model.state_dict())] = figure
    kept = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [path.name for path in kept] == ["step-0000000006", "step-0000000009"]
    found = []
    for path in kept:
        fresh = Mlp()
        unisono.load_weights(path, fresh)
        metrics = json.loads((path / "manifest.json").read_text())["metrics"]
        found.append((metrics["val/x"], figures[bits_of(fresh.state_dict())]))
    assert found == [(3.0, 3.0), (2.0, 2.0)]
