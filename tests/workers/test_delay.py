"""Delay: the gradient of step s is applied after step s + D, with the same bits on any number of workers."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from tests.parts import ALL
from tests.workers.models import RECIPES, Outcome
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on, trained_alone
from unisono.core.errors import DivergenceError, StepError, UsageError
from unisono.record.journal import compare
from unisono.strategies.delay.pipeline import Pipeline

pytestmark = pytest.mark.more

SEED = 3
REFUSED = {"scaler", "thawing"}
"""What a delay cannot have: a GradScaler, and parameters that are trained from some step on."""
SAMPLED = ("rare", "fused", "two phases")
ROUNDED = "bf16 between hosts"
"""The recipe ``rare`` with sums that are rounded on their way."""
NAMES = [name for name in RECIPES if name not in REFUSED] if ALL else SAMPLED
PREDICTED = "predicted parameters"
"""The recipe ``rare``, computed with the parameters that are expected when a gradient is applied."""
JOBS = [*((name, delay) for name in NAMES for delay in (1, 2)), (ROUNDED, 2), (PREDICTED, 2)]
TEAMS = [("shared", 2), ("shared", 3), ("gloo", 3), ("two-level", 3)]
if ALL:
    TEAMS += [("shared", 4), ("shared", 5), ("shared", 8), ("gloo", 2), ("two-level", 4)]
Outcomes = dict[tuple[str, int], Outcome]


def place_of(folder: Path, job: tuple[str, int]) -> Path:
    return folder / f"{job[0]} {job[1]}"


def train(run: unisono.Run, name: str, delay: int) -> Outcome:
    if name == ROUNDED:
        return RECIPES["rare"].train(run, 6, delay=delay, wire="bf16")
    if name == PREDICTED:
        return RECIPES["rare"].train(run, 6, delay=delay, predict=True)
    return RECIPES[name].train(run, 6, delay=delay)


def train_in(folder: Path, job: tuple[str, int], make_run: Callable[..., unisono.Run]) -> Outcome:
    with make_run(place_of(folder, job), seed=SEED) as run:
        return train(run, *job)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcomes]:
    """Every recipe as one process trains it, and where its journals are."""
    return trained_alone(JOBS, train_in, tmp_path_factory)


def _train_all(seat: Seat, place: Place, folder: Path) -> Outcomes:
    return {job: train_in(folder, job, place.run) for job in JOBS}


@pytest.mark.filterwarnings("ignore:.* workers share .* micro-batches")
@pytest.mark.parametrize(("kind", "size"), TEAMS)
def test_a_team_gives_the_bits_of_one_worker(
    kind: str, size: int, alone: tuple[Path, Outcomes], tmp_path: Path
) -> None:
    """Digests of all steps, losses, evaluation, and the final state of all that is tracked, on every member."""
    folder, expected = alone
    for rank, outcomes in enumerate(train_on(kind, size, _train_all, tmp_path)):
        for job in JOBS:
            assert outcomes[job] == expected[job], f"{job} on rank {rank}"
    for job in JOBS:
        assert compare(place_of(folder, job), place_of(tmp_path, job)).startswith("identical: ")


def test_each_delay_is_a_training_of_its_own(alone: tuple[Path, Outcomes]) -> None:
    """What is compared would differ if anything did."""
    _, outcomes = alone
    for name in NAMES:
        assert len({outcomes[name, delay].final["model"] for delay in (1, 2)}) == 2, name
    assert len({outcomes[name, 2].final["model"] for name in ("rare", ROUNDED, PREDICTED)}) == 3


# -- the definition ----------------------------------------------------------------------------------


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 33), nn.ReLU(), nn.Linear(33, 4))


def vectors(num_samples: int = 64) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(num_samples, 12, generator=draw), torch.randint(0, 4, (num_samples,), generator=draw)
    )


@pytest.mark.parametrize("delay", [1, 3])
def test_it_is_what_a_plain_loop_with_a_queue_of_gradients_does(delay: int) -> None:
    """To the bit, against torch alone: each gradient waits D updates, and the last ones are applied at the end."""
    with AloneRun(seed=SEED) as run:
        model, plain = net(), net()
        plain.load_state_dict(model.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        other = torch.optim.AdamW(plain.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        waiting: list[tuple[float, list[Tensor]]] = []
        steps = run.steps(vectors(), batch_size=16, microbatches=1, epochs=2, delay=delay)
        assert len(steps) == 8 + delay
        for step in steps:
            inner = 0
            for inputs, labels in step:
                inner += 1
                F.cross_entropy(model(inputs), labels).backward()
                other.zero_grad()
                loss = F.cross_entropy(plain(inputs), labels)
                loss.backward()
                waiting.append((loss.item(), [parameter.grad.clone() for parameter in plain.parameters()]))
            optimizer.step()
            assert inner == (1 if step.number < 8 else 0)
            assert step.has_gradient == (step.number >= delay)
            if step.number < delay:
                assert math.isnan(step.loss)
                assert all(parameter.grad is None for parameter in model.parameters())
                continue
            value, gradients = waiting.pop(0)
            assert step.loss == value
            for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                parameter.grad = gradient
            other.step()
            assert all(map(torch.equal, model.parameters(), plain.parameters())), step.number
        assert not waiting


@pytest.mark.parametrize("delay", [1, 3])
def test_predicted_parameters_are_those_in_force_and_the_newest_update_again_for_each_gradient_under_way(
    delay: int,
) -> None:
    """To the bit, against torch alone, over two loops: gradients of predicted parameters meet the true ones."""
    with AloneRun(seed=SEED) as run:
        model, plain = net(), net()
        plain.load_state_dict(model.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        other = torch.optim.AdamW(plain.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for _ in range(2):
            waiting: list[list[Tensor]] = []
            before = [parameter.detach().clone() for parameter in plain.parameters()]
            for step in run.steps(vectors(), batch_size=16, microbatches=1, delay=delay, predict=True):
                true = [parameter.detach().clone() for parameter in plain.parameters()]
                for inputs, labels in step:
                    F.cross_entropy(model(inputs), labels).backward()
                    with torch.no_grad():
                        for parameter, earlier in zip(plain.parameters(), before, strict=True):
                            parameter.add_((parameter - earlier) * delay)
                    assert all(map(torch.equal, model.parameters(), plain.parameters())), step.number
                    other.zero_grad()
                    F.cross_entropy(plain(inputs), labels).backward()
                    waiting.append([parameter.grad.clone() for parameter in plain.parameters()])
                    plain.load_state_dict(dict(zip(plain.state_dict(), true, strict=True)))
                    before = true
                optimizer.step()
                if step.has_gradient:
                    for parameter, gradient in zip(plain.parameters(), waiting.pop(0), strict=True):
                        parameter.grad = gradient
                    other.step()
                assert all(map(torch.equal, model.parameters(), plain.parameters())), step.number


def test_no_delay_is_the_plain_training(tmp_path: Path) -> None:
    """``delay=0`` is not in the recipe, and changes no bit."""
    outcomes = []
    for options in ({}, {"delay": 0}):
        with AloneRun(tmp_path / str(len(options)), seed=SEED) as run:
            outcomes.append(RECIPES["mlp"].train(run, 4, **options))
    assert outcomes[0] == outcomes[1]
    assert compare(tmp_path / "0", tmp_path / "1").startswith("identical: ")


def test_the_journal_has_one_line_for_each_step(tmp_path: Path) -> None:
    """A line is about the step whose gradient is applied, so a training of N steps has N of them."""
    from unisono.record.journal import read

    with AloneRun(tmp_path, seed=SEED) as run:
        RECIPES["mlp"].train(run, 4, delay=2)
    lines = [line for line in read(tmp_path) if line["kind"] == "step"]
    assert [line["step"] for line in lines] == list(range(6))
    assert [line["epoch"] for line in lines] == [0, 0, 0, 1, 1, 1]
    assert [line["samples"] for line in lines] == [24, 24, 8] * 2
    assert all(math.isfinite(line["loss"]) for line in lines)


def test_the_loss_of_a_step_stays_its_own() -> None:
    """A script may keep steps, and read their losses when the memory of their gradients holds later ones."""
    steps, losses = [], []
    with AloneRun(seed=SEED) as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(vectors(), batch_size=16, microbatches=4, epochs=2, delay=2):
            for inputs, labels in step:
                F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            steps.append(step)
            losses.append(step.loss)
    assert [step.loss for step in steps[2:]] == losses[2:]


def test_a_call_in_an_iteration_has_the_place_that_the_script_reads() -> None:
    """An evaluator gets this place as ``step.number``, by which a script may decide whether it evaluates."""
    places = []
    with AloneRun(seed=SEED) as run:
        model = net()
        run.track(model=model)
        for _ in range(2):
            for step in run.steps(vectors(), batch_size=16, microbatches=4, delay=2):
                for inputs, labels in step:
                    F.cross_entropy(model(inputs), labels).backward()
                assert run._training.place("run.evaluate").step == step.number
                places.append(step.number)
    assert places == [*range(6), *range(4, 10)]


# -- what the inner loop may depend on ----------------------------------------------------------------


def _train_with(seat: Seat, place: Place, inside: bool) -> str:
    """A factor that changes from step to step, computed within the inner loop or outside of it."""
    try:
        with place.run(None, seed=SEED) as run:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(vectors(), batch_size=16, microbatches=4, delay=2):
                outside = 1.0 + 0.1 * step.number
                for inputs, labels in step:
                    factor = 1.0 + 0.1 * step.number if inside else outside
                    (factor * F.cross_entropy(model(inputs), labels)).backward()
                optimizer.step()
    except DivergenceError as error:
        return str(error)
    return ""


def test_what_changes_outside_of_the_inner_loop_is_found_before_a_loss_makes_it_count() -> None:
    for said in train_on("shared", 2, _train_with, False):
        assert "was recomputed one step later" in said
        assert "compute it there from step.number" in said
    assert train_on("shared", 2, _train_with, True) == ["", ""]


# -- a gradient that is not finite --------------------------------------------------------------------


class Moving(nn.Module):
    """A parameter that each update changes; micro-batches with sample 17 have no finite gradient before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = nn.Parameter(torch.zeros(2))

    def forward(self, index: Tensor) -> Tensor:
        is_broken = 17 in index.tolist() and not self.moved.any()
        loss: Tensor = self.moved.sum() + (torch.sqrt(self.moved.abs().sum()) if is_broken else 0.0)
        return loss


def _break(make_run: Callable[..., unisono.Run]) -> list[tuple[int, str]]:
    """Step and text of what is said, by this worker; step 1 is broken, when no update is done yet."""
    seen: list[Any] = []

    class Sink:
        def emit(self, event: Any) -> None:
            seen.append(event)

        def close(self) -> None:
            pass

    with make_run(None, seed=SEED, sinks=[Sink()]) as run:
        model = Moving()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        data = TensorDataset(torch.arange(48))
        for step in run.steps(data, batch_size=16, microbatches=4, shuffle=False, delay=2):
            for (index,) in step:
                model(index).backward()
            if step.number != 3:  # what is applied then is the gradient of step 1
                optimizer.step()
    return [(event.step, event.text) for event in seen if isinstance(event, unisono.core.events.Problem)]


def _break_in_team(seat: Seat, place: Place) -> list[tuple[int, str]]:
    return _break(place.run)


def test_what_made_a_gradient_not_finite_is_looked_for_with_the_parameters_that_it_had() -> None:
    """When it is applied the parameters are others, with which its micro-batches may have finite gradients."""
    for found in ([_break(AloneRun)], train_on("shared", 2, _break_in_team)):
        said = [one for of_worker in found for one in of_worker]
        assert {step for step, _ in said} == {1}
        where = "the gradient is not finite in step 1, micro-batch 0 (samples 16, 17, 18, 19)"
        assert sum(text.startswith(where) for _, text in said) == 1


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [-1, 1.5, True, 65, "1"])
def test_a_delay_is_a_small_number_of_steps(delay: Any) -> None:
    with AloneRun(seed=SEED) as run:
        run.track(model=net())
        with pytest.raises(UsageError, match="delay must be a number of steps"):
            run.steps(vectors(), batch_size=16, microbatches=4, delay=delay)


def test_without_a_delay_there_is_nothing_to_predict() -> None:
    with AloneRun(seed=SEED) as run:
        run.track(model=net())
        with pytest.raises(UsageError, match="Give a delay, or leave it out"):
            run.steps(vectors(), batch_size=16, microbatches=4, predict=True)


def test_it_is_said_that_an_update_without_momentum_predicts_nothing() -> None:
    with AloneRun(seed=SEED) as run:
        model = net()
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.warns(UserWarning, match="'optimizer' is an SGD without momentum"):
            run.steps(vectors(), batch_size=16, microbatches=4, delay=1, predict=True)


def test_what_needs_the_update_at_once_is_refused_before_training() -> None:
    with AloneRun(seed=SEED) as run:
        model = net()
        run.track(model=model, scaler=torch.amp.GradScaler("cpu"))
        with pytest.raises(UsageError, match="'scaler' is a GradScaler"):
            run.steps(vectors(), batch_size=16, microbatches=4, delay=1)
    with AloneRun(seed=SEED) as run:
        model = net()
        run.track(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
        with pytest.raises(UsageError, match="'optimizer' is an LBFGS"):
            run.steps(vectors(), batch_size=16, microbatches=4, delay=1)
    with AloneRun(seed=SEED) as run:
        run.track(model=net(), memory=unisono.Carried(torch.zeros(64, 4)))
        with pytest.raises(UsageError, match=r"'memory' is a unisono.Carried"):
            run.steps(vectors(), batch_size=16, microbatches=4, delay=1)


def test_another_pass_over_the_batch_is_refused() -> None:
    with AloneRun(seed=SEED) as run:
        model = net()
        run.track(model=model)
        for step in run.steps(vectors(), batch_size=16, microbatches=4, delay=1):
            for inputs, labels in step:
                F.cross_entropy(model(inputs), labels).backward()
            with pytest.raises(StepError, match="belong to no update"):
                step.again()
            break


def test_parameters_that_change_while_gradients_are_under_way_are_refused() -> None:

    def freeze(run: unisono.Run) -> None:
        model = nn.Sequential(nn.Linear(12, 33), nn.Linear(33, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(vectors(), batch_size=16, microbatches=4, delay=1):
            model[0].requires_grad_(step.number != 2)
            for inputs, labels in step:
                F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    run = AloneRun(seed=SEED)
    with pytest.raises(StepError, match="changed within run"), run:
        freeze(run)


def test_what_follows_a_loop_goes_on_without_its_gradients() -> None:
    """They are kept for members that have not seen the last commit, until the next one."""
    with AloneRun(seed=SEED) as run:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.track(model=model, optimizer=optimizer)
        kept = []
        for delay in (1, 0):
            for step in run.steps(list(torch.randn(12, 4)), batch_size=6, microbatches=2, delay=delay):
                for batch in step:
                    step.backward(model(batch).square().mean())
                optimizer.step()
            assert run._rounds is not None
            kept.append(weakref.ref(run._rounds.book))
            assert isinstance(run._rounds.book, Pipeline) == (delay > 0)
        del step
        gc.collect()
        assert [book() is not None for book in kept] == [False, True]


def test_loops_that_are_made_before_the_first_begins_share_what_is_a_part_of_the_state() -> None:
    """The gradients that wait, and the parameters to predict by, whichever loop they belong to."""
    with AloneRun(seed=SEED) as run:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        run.track(model=model, optimizer=optimizer)
        data = list(torch.randn(12, 4))
        loops = [run.steps(data, batch_size=6, microbatches=2, delay=1, predict=True) for _ in range(2)]
        waiting, before = [], []
        for loop in loops:
            for step in loop:
                for batch in step:
                    step.backward(model(batch).square().mean())
                optimizer.step()
                own = run._tracked.whole_state()["own"]
                waiting.append(len(own["pending"]))
                before.append(len(own["prediction"]))
    assert 1 in waiting[:2]
    assert before[:2] == [2, 2]
