"""What a script may not leave behind in a micro-batch is refused in words, or put back; alone and in a team alike."""

# ruff: noqa: PT012 (a whole loop is what raises)

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono
from tests.workers.models import Mlp, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.errors import StepError, UsageError
from unisono.engine.loop.step import Step

Body = Callable[["Training", Step, Tensor, Tensor], None]


class Training:
    """A small training whose inner loop is spoilt in one place."""

    def __init__(self, run: unisono.Run, model: nn.Module | None = None) -> None:
        self.run = run
        self.model = Mlp() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1000])
        run.track(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def train(self, body: Body, num_steps: int = 4) -> None:
        for step in self.run.steps(vectors(), batch_size=24, microbatches=6, epochs=9, max_steps=num_steps):
            for x, y in step:
                body(self, step, x, y)
            self.optimizer.step()
            self.scheduler.step()

    def backward(self, step: Step, x: Tensor, y: Tensor) -> None:
        step.backward(F.cross_entropy(self.model(x), y), weight=len(y))


def refused(body: Body, model: Callable[[], nn.Module] = Mlp) -> str:
    """What the first worker says about a training with this inner loop."""
    with pytest.raises(StepError) as caught, AloneRun(seed=1) as run:
        Training(run, model()).train(body)
    return str(caught.value)


def _bits(seat: Seat, place: Place, body: Body, model: Callable[[], nn.Module]) -> Any:
    with place.run(seed=1) as run:
        training = Training(run, model())
        training.train(body)
        return bits_of(training.model.state_dict())


def is_identical(body: Body, model: Callable[[], nn.Module] = Mlp) -> bool:
    """Whether one, two and three workers end with the same bits."""
    found = [bits for size in (1, 2, 3) for bits in train_on("shared", size, _bits, body, model)]
    return all(bits == found[0] for bits in found)


# -- parameters --------------------------------------------------------------------------------------


class Growing(nn.Module):
    """Makes its last layer when it sees the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.head: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.head is None:
            self.head = nn.Linear(hidden.shape[1], hidden.shape[1])
        found: Tensor = self.head(hidden)
        return found


class Fresh(nn.Module):
    """Makes its activation anew in every forward: no parameter comes or goes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        self.activation = nn.Tanh()
        found: Tensor = self.activation(self.body(x))
        return found


def test_a_layer_that_the_first_forward_makes_is_refused() -> None:
    words = refused(Training.backward, Growing)
    assert "'model.head.weight' appeared within the inner loop of step 0" in words
    assert "before run.steps" in words


def test_a_parameter_that_is_replaced_is_refused() -> None:
    def replace(training: Training, step: Step, x: Tensor, y: Tensor) -> None:
        training.backward(step, x, y)
        last = [module for module in training.model.modules() if isinstance(module, nn.Linear)][-1]
        last.weight = nn.Parameter(torch.ones_like(last.weight))

    assert "was replaced within the inner loop of step 0" in refused(replace)


@pytest.mark.filterwarnings("ignore:'model' was made before")
def test_a_parameter_that_goes_is_refused() -> None:
    def remove(training: Training, step: Step, x: Tensor, y: Tensor) -> None:
        training.backward(step, x, y)
        for module in training.model.modules():
            if isinstance(module, nn.Linear):
                module.bias = None  # type: ignore[assignment]

    model = torch.nn.Sequential(nn.Linear(12, 4))
    with pytest.raises(StepError, match=r"disappeared within the inner loop of step 0"), AloneRun(seed=1) as run:
        training = Training(run, model)
        training.optimizer.param_groups[0]["params"] = [model[0].weight]
        training.train(remove)


def test_a_module_without_parameters_may_be_made_anew() -> None:
    assert is_identical(Training.backward, Fresh)


def test_a_gradient_that_is_written_by_hand_is_refused() -> None:
    def write(training: Training, step: Step, x: Tensor, y: Tensor) -> None:
        training.backward(step, x, y)
        first = next(training.model.parameters())
        first.grad = torch.ones_like(first)

    words = refused(write)
    assert "has a gradient at the end of step 0, micro-batch 0" in words
    assert "Add a term to the loss" in words


# -- modes -------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Computes otherwise in train() than in eval()."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.norm = Mlp(), nn.Dropout(0.5), nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(self.drop(self.norm(x)))
        return found


def test_a_mode_that_is_left_on_is_put_back() -> None:
    """Whoever computes the next micro-batch finds the mode in which the step began."""

    def leave(training: Training, step: Step, x: Tensor, y: Tensor) -> None:
        assert training.model.training
        training.backward(step, x, y)
        training.model.eval()

    assert is_identical(leave, Dropping)


def test_the_mode_after_the_loop_is_that_before_it() -> None:
    with AloneRun(seed=1) as run:
        training = Training(run)
        training.model.eval()
        for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=1):
            for x, y in step:
                training.model.train()
                training.backward(step, x, y)
            assert not training.model.training


# -- optimizers and schedulers -----------------------------------------------------------------------


def _scheduler(kind: str, *arguments: Any) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: getattr(torch.optim.lr_scheduler, kind)(optimizer, *arguments)


@pytest.mark.parametrize(
    "make",
    [
        _scheduler("MultiStepLR", [1000]),
        _scheduler("CosineAnnealingWarmRestarts", 1000),
        _scheduler("ReduceLROnPlateau", "min", 0.1, 1000),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of")  # torch's, of the order of the two steps
def test_a_scheduler_that_changes_no_rate_is_refused_in_the_inner_loop(make: Callable[..., Any]) -> None:
    """Its count of steps would be the number of this worker's micro-batches. It need not be tracked."""
    with pytest.raises(StepError, match="scheduler was called inside"), AloneRun(seed=1) as run:
        training = Training(run)
        scheduler = make(training.optimizer)

        def body(training: Training, step: Step, x: Tensor, y: Tensor) -> None:
            training.backward(step, x, y)
            scheduler.step(*[1.0] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))

        training.train(body)


def test_the_count_of_a_scheduler_may_not_be_written_in_the_inner_loop() -> None:
    def count(training: Training, step: Step, x: Tensor, y: Tensor) -> None:
        training.backward(step, x, y)
        training.scheduler.last_epoch += 1

    assert "scheduler.last_epoch was changed within `for batch in step`" in refused(count)


def _second_step_writes(spoil: Callable[[Training], object]) -> Body:
    def body(training: Training, step: Step, x: Tensor, y: Tensor) -> None:
        training.backward(step, x, y)
        if step.number == 1:
            spoil(training)

    return body


def test_the_state_of_an_optimizer_may_not_be_written_in_the_inner_loop() -> None:
    def spoil(training: Training) -> None:
        for state in training.optimizer.state.values():
            state["exp_avg"].mul_(0.5)

    assert "the state of an optimizer was changed" in refused(_second_step_writes(spoil))


def test_the_state_of_an_optimizer_may_not_be_cleared_in_the_inner_loop() -> None:
    assert "the state of an optimizer was changed" in refused(_second_step_writes(lambda t: t.optimizer.state.clear()))


@pytest.mark.parametrize("through_data", [False, True])
def test_a_learning_rate_that_is_a_tensor_may_not_be_written_in_the_inner_loop(through_data: bool) -> None:
    def body(training: Training, step: Step, x: Tensor, y: Tensor) -> None:
        training.backward(step, x, y)
        rate = training.optimizer.param_groups[0]["lr"]
        (rate.data if through_data else rate).mul_(0.5)

    with pytest.raises(StepError, match="'lr'"), AloneRun(seed=1) as run:
        training = Training(run)
        training.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
        training.train(body)


def test_a_group_of_parameters_may_not_be_added_in_the_inner_loop() -> None:
    def body(training: Training, step: Step, x: Tensor, y: Tensor) -> None:
        training.backward(step, x, y)
        training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    assert "optimizer.param_groups[1]" in refused(body)


# -- gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_in_the_inner_loop_is_warned_of(clip: Callable[..., object]) -> None:
    """It finds no gradients there, and does nothing."""

    def body(training: Training, step: Step, x: Tensor, y: Tensor) -> None:
        training.backward(step, x, y)
        clip(training.model.parameters(), 0.1)

    with (
        pytest.warns(UserWarning, match=f"{clip.__name__} was called .* did nothing") as warned,
        AloneRun(seed=1) as run,
    ):
        Training(run).train(body, num_steps=1)
    assert all(one.filename == __file__ for one in warned)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_in_an_iteration_without_a_gradient_does_nothing(clip: Callable[..., object]) -> None:
    """The first iterations with a delay have none."""
    found = []
    with warnings.catch_warnings(), AloneRun(seed=1) as run:
        warnings.simplefilter("error")
        training = Training(run)
        for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=2, delay=1):
            for x, y in step:
                training.backward(step, x, y)
            clip(training.model.parameters(), 1e-3)
            found += [
                parameter.grad.abs().max() for parameter in training.model.parameters() if parameter.grad is not None
            ]
            training.optimizer.step()
    assert found
    assert max(found) <= 1e-3


def test_clipping_after_the_inner_loop_is_not_warned_of() -> None:
    with warnings.catch_warnings(), AloneRun(seed=1) as run:
        warnings.simplefilter("error")
        training = Training(run)
        for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=2):
            for x, y in step:
                training.backward(step, x, y)
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
            training.optimizer.step()


def accumulate(run: unisono.Run, *, drop: Callable[[Training, int], object], every: int = 2) -> None:
    """Update after every so many steps; ``drop`` is called before each step's inner loop."""
    training = Training(run)
    for step in run.steps(vectors(), batch_size=8, microbatches=4, max_steps=5):
        drop(training, step.number)
        for x, y in step:
            training.backward(step, x, y)
        if step.number % every == every - 1:
            training.optimizer.step()
            training.optimizer.zero_grad()


def test_gradients_that_a_script_accumulates_over_steps_are_not_lost_without_a_word() -> None:
    with pytest.raises(StepError, match="was not called after step 0: the gradients of that step are lost") as caught:
        with AloneRun(seed=1) as run:
            accumulate(run, drop=lambda training, number: None)
    assert "larger batch_size" in str(caught.value)


def test_an_update_may_be_left_out_on_purpose() -> None:
    """The script says so by zero_grad(), of the optimizer or of the model."""
    with AloneRun(seed=1) as run:
        accumulate(run, drop=lambda training, number: training.optimizer.zero_grad())
    with AloneRun(seed=1) as run:
        accumulate(run, drop=lambda training, number: training.model.zero_grad())


def test_an_update_may_be_left_out_by_zeros() -> None:
    with AloneRun(seed=1) as run:
        accumulate(run, drop=lambda training, number: training.optimizer.zero_grad(set_to_none=False))


def test_functions_of_torch_are_left_as_they_were_in_whatever_order_runs_end() -> None:
    def wrapped() -> list[object]:
        clip = nn.utils.clip_grad
        kind = torch.optim.Optimizer
        return [kind.zero_grad, nn.Module.zero_grad, clip._get_total_norm, clip._group_tensors_by_device_and_dtype]

    before = wrapped()
    with AloneRun(seed=1) as first, AloneRun(seed=2) as second:
        trainings = [Training(first), Training(second)]
        loops = [
            run.steps(vectors(), batch_size=24, microbatches=4, max_steps=number)
            for run, number in ((first, 1), (second, 2))
        ]
        for both in itertools.zip_longest(*loops):
            for training, step in zip(trainings, both, strict=True):
                for x, y in step or ():
                    training.backward(step, x, y)
                training.optimizer.step()
    assert wrapped() == before


def test_a_buffer_that_is_expanded_and_never_written_is_no_hindrance() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Mlp()
            self.register_buffer("mask", torch.ones(1).expand(12))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.body(x * self.mask)
            return found

    with AloneRun(seed=1) as run:
        training = Training(run, Masked())
        training.train(Training.backward, num_steps=2)
        run.evaluate(vectors(), lambda batch: {"sum": training.model(batch[0]).sum()}, batch_size=7)


def test_a_tensor_that_was_made_for_inference_only_is_refused() -> None:
    with torch.inference_mode():
        mask = torch.ones(3)
    with (
        pytest.raises(UsageError, match=r"model\.mask was created under torch\.inference_mode"),
        AloneRun(seed=1) as run,
    ):
        model = Mlp()
        model.register_buffer("mask", mask)
        Training(run, model).train(Training.backward)


def test_a_gradient_that_is_not_finite_may_be_left_out() -> None:
    with AloneRun(seed=1) as run:
        training = Training(run)
        for step in run.steps(vectors(), batch_size=8, microbatches=4, max_steps=3):
            for x, y in step:
                training.backward(step, x, y)
            if step.number == 1:
                next(training.model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
            else:
                training.optimizer.step()


# -- evaluation --------------------------------------------------------------------------------------


def _evaluated(seat: Seat, place: Place) -> Any:
    """A training whose evaluation leaves train() on, moves buffers, and counts in one of them."""
    with place.run(seed=1) as run:
        training = Training(run, Dropping())

        def count(batch: Any) -> dict[str, Any]:
            x, y = batch
            training.model.train()
            return {"loss": F.cross_entropy(training.model(x), y, reduction="sum")}

        totals = []
        for step in run.steps(vectors(), batch_size=24, microbatches=6, max_steps=3):
            for x, y in step:
                training.backward(step, x, y)
            training.optimizer.step()
            totals.append(bits_of(run.evaluate(vectors(), count, batch_size=7)))
        return totals, bits_of(training.model.state_dict())


def test_what_the_function_of_an_evaluation_leaves_behind_is_put_back() -> None:
    found = [each for size in (1, 2, 3) for each in train_on("shared", size, _evaluated)]
    assert all(each == found[0] for each in found)


def test_an_evaluation_may_not_make_parameters() -> None:
    with pytest.raises(StepError, match=r"appeared within batch 0 of run\.evaluate"), AloneRun(seed=1) as run:
        model = Growing()
        run.track(model=model)
        run.evaluate(vectors(), lambda batch: {"sum": model(batch[0]).sum()}, batch_size=7)


# -- what is made too early --------------------------------------------------------------------------


def test_a_model_that_was_made_before_the_run_is_warned_of() -> None:
    """Neither the seed nor the number of threads of the run was in force then."""
    early = Mlp()
    with pytest.warns(UserWarning, match=r"'model' was made before `unisono\.Run"), AloneRun(seed=1) as run:
        run.track(model=early)


def test_a_model_that_was_made_within_the_run_is_not() -> None:
    with warnings.catch_warnings(), AloneRun(seed=1) as run:
        warnings.simplefilter("error")
        run.track(model=Mlp(), loss=nn.CrossEntropyLoss())


def _warned(update: Callable[[nn.Module, torch.optim.Optimizer], object], **tracked: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, AloneRun(seed=1) as run:
        warnings.simplefilter("always")
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer, **tracked)
        for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=9, max_steps=4):
            optimizer.zero_grad()
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            update(model, optimizer)
    return [str(each.message) for each in caught]


def _by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data.add_(-0.1 * parameter.grad)


def test_a_forgotten_update_is_warned_of() -> None:
    told = _warned(lambda model, optimizer: None)
    assert {each[:60] for each in told} == {"no tracked parameter has changed in the last two steps, and "}
    assert _warned(lambda model, optimizer: optimizer.step()) == []
    assert _warned(lambda model, optimizer: _by_hand(model)) == []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert _warned(lambda model, optimizer: None, scaler=scaler) == []


def test_a_number_is_logged_within_its_step() -> None:
    """By keyword or by name; afterwards its line is written."""
    with AloneRun(seed=1) as run:
        training = Training(run)
        for step in run.steps(vectors(), batch_size=24, microbatches=6, max_steps=2):
            for x, y in step:
                training.backward(step, x, y)
            step.log({"a/b": torch.tensor(1.5)}, c=2)
            assert step.logs == {"a/b": 1.5, "c": 2.0}
            with pytest.raises(UsageError, match="'d' is a str"):
                step.log(d="text")
            with pytest.raises(UsageError, match="takes numbers by name"):
                step.log(3)  # type: ignore[arg-type]
        with pytest.raises(StepError, match=r"step\.log of step 1 was called after that step was over.*run\.log"):
            step.log(val=1.0)
