"""Whatever lets a script compute other bits on another worker ends the run in words that name it."""

from __future__ import annotations

import itertools
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono
from tests.workers.models import Mlp, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import Place, train_on
from unisono.core.errors import DivergenceError
from unisono.engine.loop.step import Step
from unisono.engine.rounds.agreement import compiled_by
from unisono.engine.state.packing import digest_of_batch
from unisono.engine.state.tracked import Tracked

Loss = Callable[[Step, nn.Module, Tensor, Tensor], Tensor]


def plain(step: Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _nothing(run: unisono.Run, step: Step, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    pass


class Job:
    """A training that is spoilt in its inner loop (``loss``) or after it (``after``)."""

    def __init__(
        self,
        loss: Callable[[], Loss] = lambda: plain,
        after: Callable[..., None] = _nothing,
        model: Callable[[], nn.Module] = Mlp,
        num_steps: int = 6,
        **options: Any,
    ) -> None:
        self.loss, self.after, self.model, self.num_steps, self.options = loss, after, model, num_steps, options


def _train(seat: Seat, place: Place, job: Job) -> Any:
    """The final bits, or what the error says."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with place.run(seed=1, **job.options) as run:
                model, loss = job.model(), job.loss()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                run.track(model=model, optimizer=optimizer)
                for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=9, max_steps=job.num_steps):
                    for x, y in step:
                        step.backward(loss(step, model, x, y), weight=len(y))
                    optimizer.step()
                    job.after(run, step, optimizer, model)
    except DivergenceError as error:
        return str(error)
    return {"bits": bits_of(model.state_dict())}


def words_of(job: Job, size: int = 2, kind: str = "shared") -> str:
    """What all workers say, which is the same."""
    found = train_on(kind, size, _train, job)
    assert all(isinstance(each, str) for each in found), "a worker has ended well"
    assert len(set(found)) == 1
    words: str = found[0]
    return words


# -- what remembers, counts, or draws by itself ------------------------------------------------------


def counter() -> Loss:
    calls = itertools.count()
    return lambda step, model, x, y: plain(step, model, x, y) * (1 + 0.1 * next(calls))


def own_generator() -> Loss:
    generator = numpy.random.default_rng(0)
    return lambda step, model, x, y: plain(step, model, x + float(generator.normal()), y)


def clock() -> Loss:
    return lambda step, model, x, y: plain(step, model, x + time.perf_counter(), y)


def memory_of_the_batch_before() -> Loss:
    last: list[Tensor] = [torch.zeros(())]

    def loss(step: Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found = plain(step, model, x + last[0], y)
        last[0] = x.mean()
        return found

    return loss


def late_counter() -> Loss:
    """Harmless at first, as a warm-up is."""
    calls = itertools.count()
    return lambda step, model, x, y: plain(step, model, x, y) * (2.0 if next(calls) > 11 else 1.0)


class Hooked(nn.Module):
    """A forward hook that keeps a running mean in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.mean = 0.0
        self.body.register_forward_hook(self._scale)

    def _scale(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * float(output.detach().abs().mean())
        return output * (1 + self.mean)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


@pytest.mark.parametrize("loss", [counter, own_generator, clock, memory_of_the_batch_before, late_counter])
@pytest.mark.parametrize("size", [2, 3])
def test_a_gradient_that_depends_on_the_worker_ends_the_run(loss: Callable[[], Loss], size: int) -> None:
    words = words_of(Job(loss), size)
    assert re.search(r"micro-batch \d of step \d was computed by two workers", words)
    assert "Nothing was updated" in words
    assert "a counter" in words


@pytest.mark.parametrize("kind", ["gloo", "two-level"])
def test_it_is_found_through_every_exchange(kind: str) -> None:
    assert "was computed by two workers" in words_of(Job(counter), 3, kind)


def test_the_first_parameter_that_differs_is_named() -> None:
    words = words_of(Job(model=Hooked))
    assert "The weighted loss is" in words
    assert "'model.body." in words


def test_it_is_found_before_anything_is_updated() -> None:
    words = words_of(Job(counter))
    assert "of step 0 " in words


def test_the_advice_begins_with_the_command_that_names_the_line() -> None:
    words = words_of(Job(counter))
    assert ". Nothing was updated. `unisono check SCRIPT` names the line. Look for" in words
    assert "deterministic=False" not in words


def test_the_check_can_be_turned_off() -> None:
    """Without determinism nobody promises the same bits."""
    for each in train_on("shared", 2, _train, Job(counter, deterministic=False)):
        assert not isinstance(each, str)


def test_one_worker_computes_nothing_twice() -> None:
    seen: list[int] = []

    def loss(step: Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(len(y))
        return plain(step, model, x, y)

    with unisono.Run(seed=1, device="cpu") as run:
        model = Mlp()
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(vectors(), batch_size=24, microbatches=6, max_steps=2):
            for x, y in step:
                step.backward(loss(step, model, x, y), weight=len(y))
    assert sum(seen) == 48


def test_what_is_computed_twice_counts_once() -> None:
    alone, *others = [train_on("shared", size, _train, Job())[0] for size in (1, 2, 3, 5)]
    assert not isinstance(alone, str)
    assert all(other == alone for other in others)


# -- what drifts between the steps -------------------------------------------------------------------


def rate_by_rank(run: unisono.Run, step: Step, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    if step.number == 1:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + run.rank)


def test_an_option_that_depends_on_the_worker_is_named_with_its_values() -> None:
    words = words_of(Job(after=rate_by_rank))
    assert "at step 2 the state of w1 is not that of w0" in words
    assert "optimizer['param_groups'][0]['lr'] is 0.05 on w1 and 0.1 on w0" in words


def test_of_three_workers_the_one_that_differs_is_named() -> None:
    def after(run: unisono.Run, step: Step, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if step.number == 0 and run.rank == 0:
            optimizer.param_groups[0]["lr"] = 0.3

    assert "at step 1 the state of w0 is not that of w1" in words_of(Job(after=after), 3)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(12), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(self.norm(x))
        return found


def test_a_forward_of_the_first_worker_only_is_found() -> None:
    """In train() it moves running statistics."""

    def after(run: unisono.Run, step: Step, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if run.is_main and step.number == 1:
            model(torch.ones(4, 12))

    words = words_of(Job(after=after, model=Normed))
    assert "model['norm.running_mean']" in words or "model['norm.running_var']" in words


class Scaled(nn.Module):
    """Has a buffer that is in no ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x) * self.scale
        return found


def test_a_buffer_that_is_not_persistent_is_compared_as_well() -> None:
    def after(run: unisono.Run, step: Step, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if step.number == 1:
            model.scale.fill_(1.0 + run.rank)  # type: ignore[operator]

    assert "at step 2 the state of w1" in words_of(Job(after=after, model=Scaled))


def test_a_difference_in_the_last_step_is_found_at_the_end() -> None:
    """No step follows, and no evaluation."""

    def after(run: unisono.Run, step: Step, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if step.number == 5 and run.rank == 1:
            with torch.no_grad():
                next(model.parameters()).add_(1.0)

    assert "the workers have drifted apart: model of w1 is not that of w0" in words_of(Job(after=after))


def test_it_is_found_between_checks_at_the_next_one() -> None:
    """Steps 9 to 15 are not compared, step 16 is."""

    def after(run: unisono.Run, step: Step, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if step.number == 9:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + run.rank)

    assert "at step 16 the state of w1" in words_of(Job(after=after, num_steps=20))


def test_a_sum_of_the_inner_loop_that_is_the_same_on_all_workers_is_found() -> None:
    """Both have counted as many samples, which are not those of the batch. What is computed twice parts them."""
    seen: list[int] = []

    def loss() -> Loss:
        seen.clear()

        def counting(step: Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            seen.append(len(y))
            return plain(step, model, x, y)

        return counting

    def after(run: unisono.Run, step: Step, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / sum(seen)

    assert "at step 2 the state of w" in words_of(Job(loss, after))


# -- evaluation --------------------------------------------------------------------------------------


def _evaluate(seat: Seat, place: Place) -> str:
    try:
        with place.run(seed=1) as run:
            model, calls = Mlp(), itertools.count()
            run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            for step in run.steps(vectors(), batch_size=24, microbatches=6, max_steps=1):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
            run.evaluate(vectors(), lambda batch: {"calls": next(calls)}, batch_size=7)
    except DivergenceError as error:
        return str(error)
    return ""


def test_a_function_that_counts_its_batches_is_found() -> None:
    for words in train_on("shared", 2, _evaluate):
        assert re.search(r"batch \d of run\.evaluate was evaluated by two workers", words)


# -- what is known of a difference -------------------------------------------------------------------


def test_a_batch_has_a_digest_where_it_is_of_dense_tensors() -> None:
    x, y = torch.arange(6.0).view(2, 3), torch.tensor([1, 2])
    found = digest_of_batch([x, {"y": y, "name": "a"}])
    assert found == digest_of_batch((x.clone(), {"y": y.clone()})) != 0
    assert found != digest_of_batch([x + 1, {"y": y}])
    assert found != digest_of_batch([x.view(3, 2), {"y": y}])
    assert digest_of_batch(["text", 3]) == digest_of_batch([x, x.to_sparse()]) == 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_what_the_script_compiles_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.eval_frame as frames

    monkeypatch.setattr(frames, "cached_backends", {1: None})
    assert compiled_by(Tracked()) == ""
    monkeypatch.setattr(frames, "cached_backends", {1: None, 2: print})
    assert compiled_by(Tracked()) == "torch.compile"
    tracked = Tracked()
    tracked.add({"model": nn.Sequential(torch.jit.script(nn.Linear(2, 2)))})
    assert compiled_by(tracked) == "TorchScript"
