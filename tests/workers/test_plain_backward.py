"""Plain ``loss.backward()`` in the inner loop is ``step.backward(loss)``; everywhere else it is torch's."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from tests.workers.models import Mlp, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.errors import LossError, StepError
from unisono.engine.microbatch.graphs import divided_by, is_sum

SEED = 3
MICROBATCHES = {"batch_size": 24, "microbatches": 4, "max_steps": 3}


def once(step: Any, model: nn.Module, x: Tensor, y: Tensor, scaler: Any, plain: bool) -> None:
    loss = F.cross_entropy(model(x), y)
    loss.backward() if plain else step.backward(loss)


def twice(step: Any, model: nn.Module, x: Tensor, y: Tensor, scaler: Any, plain: bool) -> None:
    scores = model(x)
    first, second = F.cross_entropy(scores, y), scores.square().mean()
    first.backward(retain_graph=True) if plain else step.backward(first, retain_graph=True)
    second.backward() if plain else step.backward(second)


def with_a_penalty(step: Any, model: nn.Module, x: Tensor, y: Tensor, scaler: Any, plain: bool) -> None:
    """Of the gradient with respect to the inputs, by plain backward of a copy of the model, and by `autograd.grad`."""
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    frozen = nn.Linear(x.shape[1], 1)
    frozen(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[0], frozen.weight[0]), "torch's own, not scaled by any weight"
    loss = F.cross_entropy(model(x), y) + slope.square().mean()
    loss.backward() if plain else step.backward(loss)


def scaled(step: Any, model: nn.Module, x: Tensor, y: Tensor, scaler: Any, plain: bool) -> None:
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward() if plain else step.backward(loss, scaler=scaler)


def recomputed(step: Any, model: nn.Module, x: Tensor, y: Tensor, scaler: Any, plain: bool) -> None:
    """All parameters lie within a function whose graph does not show them."""
    x = x.requires_grad_()
    loss = checkpoint(lambda inputs: F.cross_entropy(model(inputs), y), x, use_reentrant=True)
    loss.backward() if plain else step.backward(loss)


KINDS = {each.__name__: each for each in (once, twice, with_a_penalty, scaled, recomputed)}


def train(run: Any, kind: str, plain: bool, *, tracks_scaler: bool = True) -> list[tuple[str, float]]:
    """The digest and the loss of each step."""
    found = []
    with run:
        model = Mlp()
        optimizer = AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        run.track(model=model, optimizer=optimizer, **({"scaler": scaler} if tracks_scaler else {}))
        for step in run.steps(vectors(), **MICROBATCHES):
            for x, y in step:
                optimizer.zero_grad()
                KINDS[kind](step, model, x, y, scaler, plain)
            if kind == "scaled":
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            found.append((step.result().digest, step.loss))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_it_gives_the_bits_of_step_backward(kind: str) -> None:
    expected = train(AloneRun(seed=SEED), kind, plain=False)
    assert len(expected) == 3
    assert train(AloneRun(seed=SEED), kind, plain=True) == expected
    if kind == "scaled":
        assert train(AloneRun(seed=SEED), kind, plain=True, tracks_scaler=False) == expected
        assert max(loss for _, loss in expected) < 10.0, "the loss without the scale"


def _train_all(seat: Seat, place: Place) -> list[list[tuple[str, float]]]:
    return [train(place.run(seed=SEED), kind, plain=True) for kind in KINDS]


def test_it_gives_the_same_bits_on_workers() -> None:
    expected = [train(AloneRun(seed=SEED), kind, plain=False) for kind in KINDS]
    assert train_on("shared", 2, _train_all) == [expected, expected]


def train_with(
    inside: Callable[[Mlp, AdamW, Tensor, Tensor], object],
    after: Callable[[Any, Any, AdamW], object] = lambda run, step, optimizer: optimizer.step(),
) -> None:
    """Train with this inner loop, which is left where ``inside`` returns "break"."""
    with AloneRun(seed=SEED) as run:
        model = Mlp()
        optimizer = AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(vectors(), **MICROBATCHES):
            for x, y in step:
                if inside(model, optimizer, x, y) == "break":
                    break
            after(run, step, optimizer)


def test_a_loss_that_is_not_finite_is_refused() -> None:
    with pytest.raises(LossError, match=r"the loss of step 0, micro-batch 0 is nan"):
        train_with(lambda model, _, x, y: (model(x).mean() * torch.nan).backward())


def test_outside_of_a_micro_batch_it_is_torch_s_own() -> None:
    before = torch.Tensor.backward, torch.amp.GradScaler.scale
    with AloneRun(seed=SEED) as run:
        model, other = Mlp(), nn.Linear(2, 1)
        run.track(model=model)
        for step in run.steps(vectors(), **MICROBATCHES):
            other(torch.ones(1, 2)).sum().backward()
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
        assert other.weight.grad is not None
        assert other.weight.grad.tolist() == [[3.0, 3.0]]
        assert (torch.Tensor.backward, torch.amp.GradScaler.scale) == before


def in_a_thread(loss: Tensor) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            loss.backward()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise failures[0]


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss: loss.backward(torch.ones(())),
        lambda loss: loss.backward(create_graph=True),
        lambda loss: torch.stack([loss, loss]).backward(torch.ones(2)),
        torch.autograd.backward,
        in_a_thread,
    ],
    ids=["gradient", "create_graph", "two elements", "torch.autograd.backward", "thread"],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_call_that_may_be_meant_in_another_way_is_refused(backward: Callable[[Tensor], None]) -> None:
    wanted = r"the gradient of 'model\..*' was computed by a call that cannot stand for step\.backward\(loss\)"
    with pytest.raises(StepError, match=wanted):
        train_with(lambda model, _, x, y: backward(F.cross_entropy(model(x), y)))


def test_a_gradient_that_the_script_drops_within_a_micro_batch_is_refused() -> None:
    """It was added to the step already; alone, without Unisono, it would not count."""

    def inside(model: Mlp, optimizer: AdamW, x: Tensor, y: Tensor) -> None:
        x = x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        optimizer.zero_grad()
        assert x.grad is not None
        F.cross_entropy(model(x + x.grad.sign()), y).backward()

    wanted = r"zero_grad\(\) was called between two loss\.backward\(\) of step 0, micro-batch 0"
    with pytest.raises(StepError, match=wanted):
        train_with(inside)


def test_a_loss_of_a_model_that_is_not_tracked_is_named() -> None:
    other = Mlp()
    wanted = (
        r"micro-batch 0 of step 0 ended without step\.backward\(loss\), and its loss\.backward\(\) reaches no trained"
    )
    with pytest.raises(StepError, match=wanted):
        train_with(lambda model, _, x, y: F.cross_entropy(other(x), y).backward())


# -- warnings ----------------------------------------------------------------------------------------


def warnings_of(loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
    """What a run of two steps warns of, at the line of this file that calls backward."""
    with warnings.catch_warnings(record=True) as caught, AloneRun(seed=SEED) as run:
        warnings.simplefilter("always")
        model = Mlp()
        run.track(model=model)
        for step in run.steps(vectors(), **MICROBATCHES):
            for x, y in step:
                loss_of(model(x), y).backward()
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def test_a_division_for_accumulation_is_warned_of_once() -> None:
    (told,) = warnings_of(lambda scores, y: F.cross_entropy(scores, y) / 4)
    assert told.startswith("the loss of step 0, micro-batch 0 is a mean divided by 4.")


def test_a_sum_is_warned_of_once() -> None:
    (told,) = warnings_of(lambda scores, y: F.cross_entropy(scores, y, reduction="sum"))
    assert told.startswith("the loss of step 0, micro-batch 0 is a sum over its 6 samples")
    assert "reduction='sum'" in told


SCORES = torch.randn(6, 3, requires_grad=True)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
SAMPLE_LOSSES = F.cross_entropy(SCORES, LABELS, reduction="none")
MEAN = F.cross_entropy(SCORES, LABELS)


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss(SCORES, torch.zeros(6, 3), reduction="sum"),
        SAMPLE_LOSSES.sum(),
        (SCORES - 1.0).pow(2).sum(),
        -0.5 * torch.sum(1 + SCORES - SCORES.pow(2) - SCORES.exp()),
        2 * SAMPLE_LOSSES.sum() + F.l1_loss(SCORES + 1, torch.zeros(6, 3), reduction="sum"),
    ],
    ids=["mse", "by hand", "squares", "vae", "two"],
)
def test_what_is_a_sum(loss: Tensor) -> None:
    assert is_sum(loss, 6)
    assert not is_sum(loss, 1)


@pytest.mark.parametrize(
    "loss",
    [
        MEAN,
        SAMPLE_LOSSES.mean(),
        SAMPLE_LOSSES.sum() / 6,
        SAMPLE_LOSSES.sum() * (1 / 6),
        (SAMPLE_LOSSES * (torch.ones(6) / 6)).sum(),
        (SAMPLE_LOSSES / 6).sum(),
        torch.stack([MEAN] * 6).sum(),
        MEAN + 0.01 * SCORES.pow(2).sum(),
        MEAN + (SCORES - 1.0).pow(2).sum(),
        SCORES.pow(2).sum(),
    ],
    ids=["mean", "by hand", "divided", "multiplied", "weights", "below", "stacked", "penalty", "both", "a parameter"],
)
def test_what_is_no_sum(loss: Tensor) -> None:
    assert not is_sum(loss, 6)
    assert divided_by(loss) is None


@pytest.mark.parametrize(
    ("loss", "number"),
    [
        (MEAN / 8, 8),
        (0.5 * MEAN / 2, 2),
        ((MEAN + SAMPLE_LOSSES.mean()) / 2, None),
        ((MEAN + 0.5 * SAMPLE_LOSSES.mean()) / 4, None),
        (SAMPLE_LOSSES.sum() / 4, None),
        (MEAN / 1.5, None),
        (MEAN / torch.tensor([4.0, 4.0]).sum().requires_grad_(), None),
        (MEAN * 0.25, None),
    ],
)
def test_what_is_divided(loss: Tensor, number: int | None) -> None:
    assert divided_by(loss) == number


# -- an inner loop that is left ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "after",
    [
        lambda run, step, optimizer: optimizer.step(),
        lambda run, step, optimizer: step.loss,
        lambda run, step, optimizer: step.log(number=1),
        lambda run, step, optimizer: run.evaluate(vectors(), lambda batch: {}, batch_size=4),
        lambda run, step, optimizer: None,
    ],
    ids=["step", "loss", "log", "evaluate", "next"],
)
def test_a_break_in_the_inner_loop_is_named_wherever_it_is_noticed(after: Callable[..., Any]) -> None:
    def inside(model: Mlp, optimizer: AdamW, x: Tensor, y: Tensor) -> str:
        F.cross_entropy(model(x), y).backward()
        return "break"

    with pytest.raises(StepError, match=r"the inner loop of step 0 was left before its end \(break"):
        train_with(inside, after)
