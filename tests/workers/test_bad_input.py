"""Bad input gets an error that says what, the numbers and what to do, before any training where possible."""

# ruff: noqa: PT012 (a whole loop is what raises)

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import unisono
from tests.workers.models import Mlp, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.errors import (
    DeadlineExceeded,
    DivergenceError,
    LossError,
    RecipeError,
    RunDirectoryError,
    StepError,
    UsageError,
)
from unisono.core.plan import Plan
from unisono.engine.loop.step import Step
from unisono.engine.rounds import Report
from unisono.engine.rounds.gathering import Together
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.members import Members
from unisono.engine.rounds.team import Team
from unisono.engine.state.tracked import Tracked
from unisono.record.journal import read


def says(*parts: str) -> str:
    """A pattern: all of these in this order, whatever is between."""
    return "(?s)" + ".*".join(re.escape(part) for part in parts)


class Loop:
    """A model and its usual loop, to be spoilt in one place."""

    def __init__(self, run: unisono.Run, model: nn.Module | None = None) -> None:
        self.run, self.model = run, Mlp() if model is None else model
        self.optimizer = AdamW(self.model.parameters(), lr=0.01)
        self.start = bits_of(self.model.state_dict())
        run.track(model=self.model, optimizer=self.optimizer)

    def steps(self, data: Any = None, **options: Any) -> Iterator[Step]:
        return self.run.steps(vectors() if data is None else data, **{"batch_size": 24, "microbatches": 4, **options})

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def train(self, backward: Callable[[Step, Any], object] | None = None, **options: Any) -> None:
        for step in self.steps(**options):
            for batch in step:
                if backward is None:
                    step.backward(self.loss(batch))
                else:
                    backward(step, batch)
            self.optimizer.step()

    @property
    def untouched(self) -> bool:
        return bits_of(self.model.state_dict()) == self.start


class SpoiltError(Exception):
    """Ends the run of a test: it has no gradient, and says so again if it ends well."""


@pytest.fixture
def loop() -> Iterator[Loop]:
    with contextlib.suppress(SpoiltError), AloneRun(seed=1) as run:
        yield Loop(run)
        raise SpoiltError


# -- before any training -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"microbatches": 7}, ("24 samples", "7 equal", "24 % 7 = 3", "microbatches=2, 3, 4, 6 or 8", "batch_size=21")),
        ({"microbatches": 0}, ("microbatches must be at least 1", "got 0")),
        ({"batch_size": 0}, ("batch_size must be at least 1", "got 0")),
        ({"batch_size": 96, "drop_last": True}, ("drop_last", "56 samples", "batch_size=96", "at most 56")),
        ({"epochs": 0}, ("epochs must be at least 1", "got 0")),
        ({"data": [], "batch_size": "8"}, ("batch_size must be a whole number", "got '8'")),
        ({"data": [], "microbatches": 2.0}, ("microbatches must be a whole number", "got 2.0")),
        ({"data": [], "max_steps": True}, ("max_steps must be a whole number", "got True")),
        ({"data": [], "delay": 0.5}, ("delay must be a number of steps", "got 0.5")),
        ({"data": []}, ("dataset is empty", "length 0", "at least 1 sample")),
    ],
)
def test_recipes_that_do_not_fit(loop: Loop, options: dict[str, Any], parts: tuple[str, ...]) -> None:
    """Said by `run.steps` itself, not by its first step."""
    with pytest.raises(UsageError, match=says(*parts)):
        loop.steps(**options)
    assert loop.untouched


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (Stream(), ("can only be iterated", "whose length is unknown", "max_steps", "unisono.Streams")),
        (iter(range(8)), ("range_iterator", "can only be iterated")),
        (NoLength(), ("NoLength", "__len__")),
        (DataLoader(vectors()), ("got a DataLoader", "batch_size=", "has its own")),
    ],
)
def test_datasets_that_cannot_be_indexed(loop: Loop, data: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError, match=says(*parts)):
        loop.steps(data)
    with pytest.raises(RecipeError, match=says(*parts[:2])):
        loop.run.evaluate(data, lambda batch: {"samples": len(batch)}, batch_size=2)


def test_nothing_is_tracked() -> None:
    with AloneRun() as run:
        with pytest.raises(UsageError, match=says("nothing to train", "run.track(model=model, optimizer=optimizer)")):
            run.steps(vectors(), batch_size=24, microbatches=4)
        run.track(model=Mlp().requires_grad_(False))
        with pytest.raises(UsageError, match="nothing to train"):
            run.steps(vectors(), batch_size=24, microbatches=4)


@pytest.mark.parametrize("thing", [3, [torch.ones(1)], Mlp, torch.nn.Parameter(torch.ones(1))])
def test_what_is_tracked_needs_a_state(thing: Any) -> None:
    with AloneRun() as run:
        with pytest.raises(UsageError, match=says("run.track(thing=...)", "without state_dict() and load_")):
            run.track(thing=thing)


def test_a_name_is_tracked_once(loop: Loop) -> None:
    loop.run.track(model=loop.model)  # again, the same: a cell of a notebook was run twice
    with pytest.raises(UsageError, match=says("run.track(model=...)", "a different object", "a different name")):
        loop.run.track(model=Mlp())


def test_tracking_within_the_loop(loop: Loop) -> None:
    with pytest.raises(UsageError, match=says("run.track", "inside run.steps", "before the loop")):
        for _ in loop.steps():
            loop.run.track(other=Mlp())


def test_evaluating_within_the_inner_loop(loop: Loop) -> None:
    """Each worker is at another micro-batch, and all would wait for each other."""
    with pytest.raises(UsageError, match="inside `for batch in step`"):
        loop.train(lambda step, batch: loop.run.evaluate(vectors(), lambda batch: {"n": torch.ones(())}, batch_size=4))


def test_an_optimizer_of_other_parameters() -> None:
    """As after `model.to(device)` of a model that makes new ones."""
    with AloneRun() as run:
        optimizer, model = AdamW(Mlp().parameters()), Mlp()
        run.track(model=model, optimizer=optimizer)
        told = says("no tracked optimizer has a parameter of 'model'", "model.to(run.device)")
        with pytest.warns(UserWarning, match=told):
            run.steps(vectors(), batch_size=24, microbatches=4)


def test_an_optimizer_without_its_model() -> None:
    with AloneRun() as run:
        run.track(optimizer=AdamW(Mlp().parameters()))
        with pytest.warns(UserWarning, match=says("no module", "running statistics", "run.track(model=model)")):
            run.steps(vectors(), batch_size=24, microbatches=4)


def test_an_average_needs_no_optimizer() -> None:
    with AloneRun() as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Mlp()
        run.track(model=model, optimizer=AdamW(model.parameters()), average=torch.optim.swa_utils.AveragedModel(model))
        run.steps(vectors(), batch_size=24, microbatches=4)


def test_parameters_on_another_device(loop: Loop) -> None:
    loop.model.register_parameter("away", nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(
        UsageError, match=says("model.away is on meta", "this worker computes on cpu", "model.to(run.device)")
    ):
        loop.steps()


def test_batch_norm_over_all_workers(loop: Loop) -> None:
    loop.model.add_module("norm", nn.SyncBatchNorm(3))
    with pytest.raises(
        UsageError, match=says("model.norm is a SyncBatchNorm", "16 micro-batches", "memory", "BatchNorm", "GroupNorm")
    ):
        loop.steps()


class Buffered(nn.Module):
    """Changes a buffer in forward."""

    def __init__(self, start: Tensor, change: Callable[[Tensor, Tensor], Tensor | None] = lambda kept, x: kept) -> None:
        super().__init__()
        self.register_buffer("kept", start)
        self.change, self.inner = change, Mlp()

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.change(self.kept, x.detach())
        result: Tensor = self.inner(x)
        return result


@pytest.mark.parametrize(
    ("part", "parts"),
    [
        (lambda: nn.LazyLinear(12), ("model.part.weight has no shape yet", "through the model before run.steps")),
        (lambda: nn.BatchNorm1d(12, momentum=None), ("model.part is a BatchNorm with momentum=None", "set a momentum")),
        (
            lambda: Buffered(torch.eye(12).to_sparse()),
            ("model.part.kept is sparse (torch.sparse_coo)", "make it dense"),
        ),
    ],
)
def test_modules_that_cannot_be_trained(loop: Loop, part: Callable[[], nn.Module], parts: tuple[str, ...]) -> None:
    loop.model.add_module("part", part())
    with pytest.raises(UsageError, match=says(*parts)):
        loop.steps()


@pytest.mark.parametrize(
    ("start", "change", "parts"),
    [
        (
            torch.zeros(0, 12),
            lambda kept, x: torch.cat([kept, x]),
            ("shape (0, 12) and has (6, 12)", "persistent=False"),
        ),
        (torch.tensor(torch.inf), lambda kept, x: torch.minimum(kept, x.min()), ("was infinite", "one forward pass")),
        (torch.zeros(3, dtype=torch.cfloat), lambda kept, x: kept + 1j, ("torch.complex64", "view_as_real")),
        (torch.zeros(3), lambda kept, x: None, ("is None or missing", "Keep it a tensor")),
    ],
)
def test_changes_of_buffers_that_have_no_mean(
    start: Tensor, change: Callable[[Tensor, Tensor], Tensor | None], parts: tuple[str, ...]
) -> None:
    with pytest.raises(StepError, match=says("buffer 'model.kept'", *parts)), AloneRun(seed=1) as run:
        Loop(run, Buffered(start, change)).train()


def test_a_run_that_has_ended() -> None:
    run = AloneRun()
    run.close()
    with pytest.raises(UsageError, match=says("run.steps was called after the end of the run", "run.close()")):
        run.steps(vectors(), batch_size=24, microbatches=4)
    with pytest.raises(UsageError, match=says("run.evaluate was called after the end of the run")):
        run.evaluate(vectors(), lambda batch: {}, batch_size=4)
    with pytest.raises(UsageError, match=says("with run was called after the end of the run")), run:
        pass


@pytest.mark.parametrize("threads", [0, -2])
def test_threads(threads: int) -> None:
    with pytest.raises(UsageError, match=f"threads must be at least 1, got {threads}"):
        AloneRun(threads=threads)


# -- losses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda loss: torch.stack([loss, loss]), ("the loss has shape (2,)", "scalar", "mean")),
        (lambda loss: loss.detach(), ("the loss has no gradient", "detached", "torch.no_grad()", "frozen")),
        (lambda loss: loss.item(), ("needs the loss as a tensor", "got a float")),
        (lambda loss: loss * torch.nan, ("is nan", "(samples [", "nothing was updated", "unisono replay RUN --step")),
        (lambda loss: loss + torch.inf, ("is inf", "nothing was updated")),
    ],
)
def test_losses_that_cannot_be_trained_on(loop: Loop, spoil: Callable[[Tensor], Any], parts: tuple[str, ...]) -> None:
    """Micro-batch 2 of the first step: both are named."""

    def backward(step: Step, batch: Any) -> None:
        loss = loop.loss(batch)
        step.backward(spoil(loss) if step.microbatch == 2 else loss)

    with pytest.raises(LossError, match="step 0, micro-batch 2") as caught:
        loop.train(backward)
    assert caught.match(says(*parts))
    assert loop.untouched


def test_a_loss_that_is_not_a_number_names_its_samples(loop: Loop) -> None:
    with pytest.raises(LossError) as caught:
        loop.train(lambda step, batch: step.backward(loop.loss(batch) * torch.nan))
    first = loop.run._training.loop.step.sample_indices(0)
    assert len(first) == 6
    assert f"(samples {first})" in str(caught.value)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), torch.tensor(-0.5)])
def test_weights_that_are_none(loop: Loop, weight: Any) -> None:
    with pytest.raises(LossError, match=says("step 0, micro-batch 0", "finite and at least 0", f"got {float(weight)}")):
        loop.train(lambda step, batch: step.backward(loop.loss(batch), weight=weight))
    assert loop.untouched


def test_two_weights_for_one_micro_batch(loop: Loop) -> None:
    def backward(step: Step, batch: Any) -> None:
        step.backward(loop.loss(batch), weight=6)
        step.backward(loop.loss(batch), weight=3)

    with pytest.raises(LossError, match=says("step 0, micro-batch 0", "weights 6 and 3", "same weight")):
        loop.train(backward)


def test_a_weight_that_the_dtype_of_the_loss_cannot_hold(loop: Loop) -> None:
    told = says("step 0, micro-batch 0", "the weight 1e+06 is too large for a loss of torch.float16", "loss.float()")
    with pytest.raises(LossError, match=told):
        loop.train(lambda step, batch: step.backward(loop.loss(batch).half(), weight=1_000_000))
    assert loop.untouched


@pytest.mark.parametrize("weight", [0.1, 257, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_weights_are_equal_in_every_dtype(loop: Loop, weight: float, dtype: torch.dtype) -> None:
    def backward(step: Step, batch: Any) -> None:
        step.backward(loop.loss(batch).to(dtype), weight=weight)
        step.backward(loop.loss(batch).to(dtype), weight=weight)

    loop.train(backward, max_steps=1)
    assert not loop.untouched


@pytest.mark.parametrize("first_with_two", [1, 2])
def test_more_losses_than_the_first_micro_batch_had(loop: Loop, first_with_two: int) -> None:
    """Whether the micro-batch is the left or the right of its pair."""

    def backward(step: Step, batch: Any) -> None:
        step.backward(loop.loss(batch))
        if step.microbatch == first_with_two:
            step.backward(loop.loss(batch))

    with pytest.raises(StepError, match=says("2 times for this micro-batch and 1 times", "the same number of times")):
        loop.train(backward)
    assert loop.untouched


# -- the loops ---------------------------------------------------------------------------------------


def test_leaving_the_inner_loop_early(loop: Loop, tmp_path: Path) -> None:
    with pytest.raises(StepError, match=says("inner loop of step 0 was left before its end", "weight=0")):
        for step in loop.steps():
            for batch in step:
                step.backward(loop.loss(batch))
                break


def test_leaving_both_loops_early(tmp_path: Path) -> None:
    """Seen at the end of the run, which is not said to have gone well."""
    with pytest.raises(StepError, match=says("inner loop of step 1 was left before its end")):
        with AloneRun(tmp_path) as run:
            loop = Loop(run)
            for step in loop.steps():
                for batch in step:
                    step.backward(loop.loss(batch))
                    if step.number == 1:
                        break
                if step.number == 1:
                    break
    lines = list(read(tmp_path))
    assert [line["kind"] for line in lines] == ["step", "end"]
    assert not lines[-1]["ok"]
    assert "left before its end" in lines[-1]["reason"]


def test_leaving_the_outer_loop_at_the_head_of_a_step(tmp_path: Path) -> None:
    """The step was not begun, so nothing is missing."""
    with AloneRun(tmp_path) as run:
        loop = Loop(run)
        for step in loop.steps():
            if step.number == 1:
                break
            for batch in step:
                step.backward(loop.loss(batch))
    assert [(line["kind"], line.get("ok")) for line in read(tmp_path)] == [("step", None), ("end", True)]


def test_iterating_a_step_twice(loop: Loop) -> None:
    with pytest.raises(StepError, match=says("step 0 was already iterated over", "only once per step")):
        for step in loop.steps():
            for _ in range(2):
                for batch in step:
                    step.backward(loop.loss(batch))


def test_a_step_that_nobody_iterates(loop: Loop) -> None:
    with pytest.raises(StepError, match=says("step 0 was not iterated", "for batch in step:", "step.backward(loss)")):
        for _ in loop.steps():
            loop.optimizer.step()


def test_a_micro_batch_without_backward(loop: Loop) -> None:
    with pytest.raises(StepError, match=says("micro-batch 0 of step 0 ended without step.backward", "weight=0")):
        loop.train(lambda step, batch: loop.loss(batch))


def test_a_batch_that_is_unpacked_from_the_step(loop: Loop) -> None:
    """As a script for a DataLoader has it."""
    with pytest.raises(StepError, match=says("unpacked one loop too early", "for images, labels in step:")):
        for _inputs, _labels in loop.steps():
            pass


def test_a_step_that_is_taken_for_a_batch(loop: Loop) -> None:
    for step in loop.steps():
        with pytest.raises(TypeError, match=says("step 0", "is not a batch", "for batch in step:")):
            step[0]
        break


def test_backward_outside_of_the_loop(loop: Loop) -> None:
    with pytest.raises(StepError, match=says("step.backward was called outside", "inner loop", "step 0")):
        for step in loop.steps():
            for batch in step:
                step.backward(loop.loss(batch))
            step.backward(loop.loss(batch))


def _write(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def _write_unseen(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.5)


def _exchange(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 0.5


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("write", [_write, _write_unseen, _exchange])
def test_parameters_that_a_micro_batch_writes(loop: Loop, write: Callable[[Any], None], is_frozen: bool) -> None:
    """Data-dependent initial values, clipped weights, averages: a worker would keep them to itself."""
    loop.model.first.weight.requires_grad_(not is_frozen)

    def backward(step: Step, batch: Any) -> None:
        step.backward(loop.loss(batch))
        write(loop.model.first.weight)

    with pytest.raises(StepError, match=says("'model.first.weight' was changed within", "after the inner loop")):
        loop.train(backward)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_freezing_and_thawing_within_a_micro_batch(loop: Loop, is_frozen: bool) -> None:
    weight = loop.model.first.weight.requires_grad_(not is_frozen)

    def backward(step: Step, batch: Any) -> None:
        weight.requires_grad_(is_frozen)
        step.backward(loop.loss(batch))

    word = "unfrozen" if is_frozen else "frozen"
    with pytest.raises(StepError, match=says(f"'model.first.weight' was {word}", "before the inner loop")):
        loop.train(backward)


def test_freezing_for_a_part_of_a_micro_batch(loop: Loop) -> None:
    """As a discriminator is while the generator learns; but nothing may thaw and learn alone."""

    def generate(step: Step, batch: Any) -> None:
        loop.model.first.requires_grad_(False)
        step.backward(loop.loss(batch))
        loop.model.first.requires_grad_(True)

    loop.train(generate, max_steps=1)
    assert loop.model.first.weight.grad is None
    loop.model.first.requires_grad_(False)

    def learn(step: Step, batch: Any) -> None:
        loop.model.first.requires_grad_(True)
        step.backward(loop.loss(batch))
        loop.model.first.requires_grad_(False)

    with pytest.raises(
        StepError, match=says("'model.first.weight' was unfrozen", "sure that a frozen parameter gets no gradient")
    ):
        loop.train(learn)


def test_a_gradient_of_ones_own_making_is_no_thawing(loop: Loop) -> None:
    """What is frozen for autograd can be moved by hand."""
    weight = loop.model.first.weight.requires_grad_(False)
    for step in loop.steps(max_steps=2):
        for batch in step:
            step.backward(loop.loss(batch))
        weight.grad = torch.ones_like(weight)
        loop.optimizer.step()
    assert not loop.untouched


def test_settings_that_the_inner_loop_changes(loop: Loop) -> None:
    """Each worker would do it as often as it has micro-batches."""

    def backward(step: Step, batch: Any) -> None:
        step.backward(loop.loss(batch))
        loop.optimizer.param_groups[0]["lr"] *= 0.5

    wanted = says(
        "optimizer.param_groups[0]['lr'] was changed within", "it was 0.01 and is 0.000625", "scheduler.step()"
    )
    with pytest.raises(StepError, match=wanted):
        loop.train(backward)


def test_a_buffer_that_the_first_micro_batch_makes() -> None:
    model = Buffered(torch.zeros(3), lambda kept, x: x.mean(0))
    model.kept = None
    wanted = says("model.kept was changed within", "it was None and is a buffer", "before run.steps")
    with pytest.raises(StepError, match=wanted), AloneRun(seed=1) as run:
        Loop(run, model).train()


def test_an_update_within_the_inner_loop() -> None:
    def backward(step: Step, batch: Any) -> None:
        step.backward(loop.loss(batch))  # type: ignore[attr-defined]
        loop.optimizer.step()  # type: ignore[attr-defined]

    wanted = says("optimizer.step() was called inside", "micro-batch 0", "after that loop")
    with pytest.raises(StepError, match=wanted), AloneRun(seed=1) as run:
        loop = Loop(run)
        loop.train(backward)
    loop.optimizer.step()  # without the loop it is an optimizer like others


def test_a_log_within_the_inner_loop(loop: Loop) -> None:
    with pytest.raises(StepError, match=says("step.log was called inside", "after that loop")):
        loop.train(lambda step, batch: step.log(loss=loop.loss(batch)))


def test_the_loss_of_a_step_before_its_end(loop: Loop) -> None:
    with pytest.raises(StepError, match=says("step.loss of step 0", "after the inner loop")):
        loop.train(lambda step, batch: step.loss)


def test_loops_within_loops(loop: Loop) -> None:
    with pytest.raises(UsageError, match=says("run.steps was called inside another run.steps")):
        for _ in loop.steps():
            for _ in loop.steps():
                pass


def test_sparse_gradients() -> None:
    with pytest.raises(StepError, match=says("gradient of 'model.0.weight' is sparse", "sparse=False")):
        with AloneRun() as run:
            model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))
            run.track(model=model)
            for step in run.steps(list(range(10)), batch_size=4, microbatches=2):
                for batch in step:
                    step.backward(model(batch).mean())


def test_an_error_of_user_code_says_where_it_came_from(loop: Loop) -> None:
    """The traceback is the user's own; a note names the place in the data."""

    def backward(step: Step, batch: Any) -> None:
        if step.microbatch == 1:
            raise KeyError("of the user")
        step.backward(loop.loss(batch))

    with pytest.raises(KeyError, match="of the user") as caught:
        with AloneRun(seed=1) as run:
            loop = Loop(run)
            loop.train(backward)
    (note,) = caught.value.__notes__
    samples = ", ".join(map(str, run._training.loop.step.sample_indices(1)))
    assert note == f"(in step 0, micro-batch 1, samples {samples})"


def test_after_an_error_everything_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    """The settings of torch, and the model: plain PyTorch goes on with it, as it does in a notebook."""

    def settings() -> tuple[object, ...]:
        return (
            dict(os.environ),
            torch.backends.cudnn.benchmark,
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            sys.excepthook,
            signal.getsignal(signal.SIGTERM),
            torch.Tensor.backward,
            torch.nn.utils.clip_grad_norm_,
            [*optimizers._global_optimizer_post_hooks],
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    torch.use_deterministic_algorithms(True, warn_only=True)
    before = settings()
    with pytest.raises(LossError), AloneRun(tmp_path) as run:
        loop = Loop(run)
        steps = loop.steps()  # held by a name, so it does not end by itself
        for step in steps:
            for batch in step:
                step.backward(loop.loss(batch) * torch.nan)
    assert settings() == before
    torch.use_deterministic_algorithms(False)
    loop.loss(vectors()[:4]).backward()
    assert loop.model.first.weight.grad is not None
    assert json.loads((tmp_path / "journal.jsonl").read_text().splitlines()[-1])["ok"] is False


# -- directories -------------------------------------------------------------------------------------


def test_a_directory_that_holds_another_run(tmp_path: Path) -> None:
    with AloneRun(tmp_path / "run") as run:
        Loop(run).train(max_steps=1)
    kept = (tmp_path / "run" / "journal.jsonl").read_bytes()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    told = says(f"{tmp_path}/run", "holds another run", "overwrite=True")
    with pytest.raises(RunDirectoryError, match=told):
        AloneRun(tmp_path / "run")
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == kept

    with AloneRun(tmp_path / "run", overwrite=True) as run:
        Loop(run).train(max_steps=2)
    assert [line["kind"] for line in read(tmp_path / "run")] == ["step", "step", "end"]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=says(f"{tmp_path}/file/run", "cannot be made", "Not a directory")):
        AloneRun(tmp_path / "file" / "run")
    (tmp_path / "run" / f".run.json.{os.getpid()}.part").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match=says(f"{tmp_path}/run", "cannot be written", "Is a directory")):
        AloneRun(tmp_path / "run")


# -- evaluation --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (lambda batch: 3, ("must return totals by name", "got a int")),
        (lambda batch: {"name": "x"}, ("numbers and tensors", "'name' is a str")),
        (lambda batch: {"a": 1} if len(batch[1]) == 10 else {"b": 1}, ("['a'] for batch 0", "['b'] for batch 5")),
    ],
)
def test_evaluations_that_add_up_to_nothing(loop: Loop, function: Callable[[Any], Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=says(*parts)):
        loop.run.evaluate(vectors(), function, batch_size=10)


@pytest.mark.parametrize(
    ("data", "batch_size", "parts"),
    [([], 4, ("empty dataset", "length 0")), ([1], 0, ("batch_size must be at least 1", "got 0"))],
)
def test_evaluations_of_nothing(loop: Loop, data: Any, batch_size: int, parts: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError, match=says(*parts)):
        loop.run.evaluate(data, lambda batch: {"n": 1}, batch_size=batch_size)


# -- teams -------------------------------------------------------------------------------------------


def _warnings_of_a_start(
    seat: Seat, place: Place, spoil: Callable[[int, Mlp], None], microbatches: int
) -> tuple[list[str], str]:
    with place.run(seed=1) as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Mlp()
        spoil(seat.rank, model)
        loop = Loop(run, model)
        loop.train(microbatches=microbatches, max_steps=2)
    return [str(warning.message) for warning in caught], bits_of(model.state_dict())


def _nothing(rank: int, model: Mlp) -> None:
    pass


def _other_parameters(rank: int, model: Mlp) -> None:
    if rank == 1:
        with torch.no_grad():
            model.first.bias.add_(1.0)
            model.last.weight.mul_(2.0)


def _other_shapes(rank: int, model: Mlp) -> None:
    if rank == 1:
        model.last = nn.Linear(33, 5)


def test_workers_that_start_with_other_parameters() -> None:
    """Those of rank 0 are taken, and whose were not is told which was the first."""
    right = train_on("shared", 1, _warnings_of_a_start, _nothing, 4)[0][1]
    for kind in ("shared", "gloo"):
        by_rank = train_on(kind, 3, _warnings_of_a_start, _other_parameters, 4)
        assert [bits for _, bits in by_rank] == [right] * 3
        assert [len(told) for told, _ in by_rank] == [0, 1, 0]
        (told,) = by_rank[1][0]
        assert "w1 starts with a different state from w0's, and uses that of w0" in told
        assert "2 tensors, the first is tracked['objects']['model']['first.bias']" in told
        assert "Set the seed" in told


def _error_of_a_start(seat: Seat, place: Place) -> str:
    with pytest.raises(UsageError) as caught:
        _warnings_of_a_start(seat, place, _other_shapes, 4)
    return str(caught.value)


def test_workers_that_build_other_models() -> None:
    for said in train_on("shared", 3, _error_of_a_start):
        assert "w1 tracks" in said
        assert "shapes are not those" in said
        assert "of w0; all workers must build the same model" in said


def test_more_workers_than_micro_batches() -> None:
    """They idle, the result is right, and one of them says so."""
    right = train_on("shared", 1, _warnings_of_a_start, _nothing, 2)[0][1]
    by_rank = train_on("shared", 3, _warnings_of_a_start, _nothing, 2)
    assert [bits for _, bits in by_rank] == [right] * 3
    assert [len(told) for told, _ in by_rank] == [1, 0, 0]
    (told,) = by_rank[0][0]
    assert "3 workers share 2 micro-batches: 1 of them have nothing to compute" in told
    assert "more micro-batches or fewer workers" in told


def _follow_own_losses(seat: Seat, place: Place) -> str:
    """A learning rate that follows the losses that this worker happened to see."""
    with contextlib.suppress(SpoiltError), place.run(seed=1) as run:
        loop, seen = Loop(run), 0.0
        for step in loop.steps(max_steps=1):
            for batch in step:
                step.backward(loss := loop.loss(batch))
                seen += loss.item()
            loop.optimizer.param_groups[0]["lr"] = seen / 100
            loop.optimizer.step()
        with pytest.raises(DivergenceError) as caught:
            run.evaluate(vectors(), lambda batch: {"n": len(batch[1])}, batch_size=8)
        raise SpoiltError
    return str(caught.value)


class Divided(Team):
    """Two workers, of which the other is at a step: the script of this one has evaluated alone."""

    worker_ids = ("w0", "w1")

    def regroup(self, report: Report, lost: Exception) -> list[Report]:
        return [report, msgspec.structs.replace(report, kind="step", title="a step of 8 micro-batches")]


class WaitingEvaluation(Together):
    def __init__(self, members: Members) -> None:
        super().__init__(members, lambda: None)
        self.kind, self.title = "evaluation", "an evaluation of 3 batches"

    def combine(self, plan: Plan) -> Any:
        raise DeadlineExceeded("waited")


def test_workers_that_do_different_things() -> None:
    """Both wait for the other until a deadline; when they meet then, they find out, and do not try again for ever."""
    rounds = Rounds(Divided(torch.device("cpu")), Tracked())
    with pytest.raises(StepError, match=says("w0 is at an evaluation of 3", "w1 is at a step of 8", "run.is_main")):
        list(rounds.play(WaitingEvaluation(rounds.members)))


def test_workers_that_have_drifted_apart() -> None:
    (said,) = set(train_on("shared", 2, _follow_own_losses))
    assert "the workers have drifted apart: model, optimizer of w1 is not that of w0" in said
    assert "use step.loss or run.evaluate" in said


def test_a_parameter_that_is_written_in_a_micro_batch_is_refused() -> None:
    """`max_norm` writes the weight in forward, only for the rows that this worker sees: members would drift apart."""
    wanted = r"parameter 'model\.0\.weight' was changed within a micro-batch"
    with pytest.raises(StepError, match=wanted), unisono.Run(seed=1) as run:
        model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 2))
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        data = TensorDataset(torch.arange(16).view(8, 2) % 10, torch.arange(8) % 2)
        for step in run.steps(data, batch_size=4, microbatches=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
