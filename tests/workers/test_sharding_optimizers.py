"""What unisono.shard takes and what it refuses, and that a sharded optimizer is still what it was for a script."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import unisono
from tests.workers.models import Mlp, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.engine.state.spread import Spread

pytestmark = pytest.mark.more


class Sign(optim.Optimizer):
    """Separable, with a count of steps as a plain number, and one for a group."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("mean", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
                    state["step"] = state.get("step", 0) + 1
                    parameter.sub_(state["mean"].sign() * group["lr"] / state["step"])


class Clipping(Sign):
    """It looks at the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = sum(one.grad.square().sum() for one in given) ** 0.5 if given else 1.0
        for parameter in given:
            parameter.sub_(parameter.grad / norm)


class Estimating(Sign):
    """It finds a step size for all, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [one for one in group["params"] if one.grad is not None]
            group["lr"] += float(sum(one.grad.abs().sum() for one in given))
            for parameter in given:
                parameter.sub_(parameter.grad * group["lr"])


class Noisy(Sign):
    """It draws random numbers for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad + torch.randn_like(parameter))


class Remembering(Sign):
    """Its state holds a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].setdefault("past", []).append(parameter.grad.clone())


class Common(Sign):
    """It keeps a state that belongs to no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["common"] = {"number": 1}  # type: ignore[index]
        super().step()


class Averaging(Sign):
    """It has other parameters for an evaluation, as the optimizers without a schedule have."""

    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.lerp_(self.state[parameter]["mean"], 0.5)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(4, 4))]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (optim.LBFGS, "LBFGS: it looks across all parameters"),
        (optim.SparseAdam, "SparseAdam: it needs sparse gradients"),
        (Clipping, "Clipping: it looks across parameters"),
        (Estimating, "Estimating: it looks across parameters"),
        (Noisy, "Noisy: it looks across parameters, or draws random numbers"),
        (Remembering, r"Remembering: state\[...\]\['past'\] is a list"),
        (Averaging, "Averaging: its train\\(\\) and eval\\(\\) change parameters"),
        (Common, "state that belongs to no parameter"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(make: Callable[[Any], optim.Optimizer], reason: str) -> None:
    optimizer = make(parameters())
    before = [bits_of(one) for group in optimizer.param_groups for one in group["params"]]
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    with pytest.raises(unisono.UsageError, match=reason):
        unisono.shard(optimizer)
    assert torch.equal(torch.randn(3), expected), "the generators are as they were"
    assert type(optimizer) is make
    assert [bits_of(one) for group in optimizer.param_groups for one in group["params"]] == before
    assert not optimizer.state


def test_wrong_calls_are_refused() -> None:
    optimizer = optim.SGD(parameters(), lr=0.1)
    with pytest.raises(unisono.UsageError, match="at least 1; got 0"):
        unisono.shard(optimizer, copies=0)
    with pytest.raises(unisono.UsageError, match="at least 1; got '2'"):
        unisono.shard(optimizer, copies="2")  # type: ignore[arg-type]
    with pytest.raises(unisono.UsageError, match=r"at least 1; got 2\.5"):
        unisono.shard(optimizer, copies=2.5)  # type: ignore[arg-type]
    with pytest.raises(unisono.UsageError, match="got a Mlp"):
        unisono.shard(Mlp())  # type: ignore[type-var]
    scheduled = optim.SGD(parameters(), lr=0.1)
    StepLR(scheduled, 1)
    with pytest.raises(unisono.UsageError, match="then create the scheduler"):
        unisono.shard(scheduled)
    unisono.shard(optimizer)
    with pytest.raises(unisono.UsageError, match="already sharded"):
        unisono.shard(optimizer)
    with pytest.raises(unisono.UsageError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
    with pytest.raises(unisono.UsageError, match="different parameters from before"):
        optimizer.step()


def test_a_fused_optimizer_leaves_the_scale_to_the_script() -> None:
    optimizer = unisono.shard(optim.AdamW([one := nn.Parameter(torch.ones(3))], fused=True))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(one.sum()).backward()
    with pytest.raises(unisono.UsageError, match="call scaler"):
        scaler.step(optimizer)


@pytest.mark.parametrize("make", [optim.AdamW, optim.Adagrad, Sign, partial(optim.SGD, lr=0.1, momentum=0.9)])
def test_outside_of_a_run_it_is_what_it_was(make: Callable[[Any], optim.Optimizer]) -> None:
    """Its class, its steps, its state_dict."""
    outcomes = []
    for wrap in (lambda one: one, unisono.shard):
        torch.manual_seed(0)
        trained = parameters()
        optimizer = wrap(make(trained))
        scheduler = StepLR(optimizer, 1)
        calls: list[str] = []
        assert bits_of(copy.deepcopy(optimizer).state_dict()) == bits_of(optimizer.state_dict())
        assert bits_of(pickle.loads(pickle.dumps(optimizer)).state_dict()) == bits_of(optimizer.state_dict())
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        for _ in range(3):
            optimizer.zero_grad()
            sum(one.square().sum() for one in trained).backward()  # type: ignore[union-attr]
            optimizer.step()
            scheduler.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert calls == ["before", "after"] * 3
        kind: Any = make if isinstance(make, type) else optim.SGD
        assert isinstance(optimizer, kind)
        again = wrap(make(trained))
        again.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        again.load_state_dict(optimizer.state_dict())
        outcomes.append(
            (bits_of(trained), bits_of(optimizer.state_dict()), bits_of(again.state_dict()), repr(optimizer))
        )
    assert outcomes[0] == outcomes[1]
    assert isinstance(optimizer, Spread)


# -- within a run ------------------------------------------------------------------------------------


class Growing(nn.Module):
    """A layer more from the second step on, with parameters of its own in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Mlp(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x))
        return result


def train_growing(run: unisono.Run, wrap: Callable[[optim.Optimizer], optim.Optimizer]) -> tuple[str, str, list[str]]:
    model = Growing()
    optimizer = wrap(Sign(model.first.parameters()))
    run.track(model=model, optimizer=optimizer)
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(bits_of(model.state_dict())))
    for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=2):
        if step.number == 1:
            optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.02})
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        if step.number == 2:
            model.first.last.bias.grad = None  # left out on purpose
        optimizer.step()
        with torch.no_grad():
            model.first.last.weight.clamp_(-0.2, 0.2)
    states = optimizer.state_dict()["state"]
    plain = {index: state["step"] for index, state in states.items()}
    return bits_of(model.state_dict()), repr((plain, optimizer.state_dict()["param_groups"])), seen


def _growing(seat: Seat, place: Place) -> tuple[str, str, list[str]]:
    with place.run(seed=3) as run:
        return train_growing(run, partial(unisono.shard, copies=1))


def test_what_a_script_does_around_steps_is_the_same_on_all() -> None:
    """Parameters that come later, gradients left out, weights clamped after the step, hooks that see all new values,
    and plain numbers in states, which all workers know.
    """
    torch.set_num_threads(1)
    with AloneRun(seed=3) as run:
        expected = train_growing(run, lambda one: one)
    for found in train_on("shared", 3, _growing):
        assert found == expected


def _outside(seat: Seat, place: Place) -> str:
    model = Mlp()
    optimizer = unisono.shard(optim.AdamW(model.parameters()), copies=1)
    with place.run(seed=3) as run:
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(vectors(), batch_size=24, microbatches=6, max_steps=2):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        with pytest.raises(unisono.UsageError, match="copied or pickled"):
            copy.deepcopy(optimizer)
        with pytest.raises(unisono.UsageError) as raised:
            optimizer.step()
        return str(raised.value)


def train_going_back(run: unisono.Run, wrap: Callable[[optim.Optimizer], optim.Optimizer]) -> str:
    """In the middle, the script takes up a state that it has kept, as after a loss that has exploded."""
    model = Mlp()
    optimizer = wrap(optim.AdamW(model.parameters()))
    run.track(model=model, optimizer=optimizer)
    other = optim.AdamW(Mlp().parameters())
    for one in other.param_groups[0]["params"]:
        one.grad = torch.full_like(one, 0.5)
    other.step()
    for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=2):
        if step.number == 2:
            optimizer.load_state_dict(other.state_dict())
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return bits_of(model.state_dict())


def train_two(run: unisono.Run, wrap: Callable[[optim.Optimizer], optim.Optimizer]) -> str:
    """Two models, two optimizers and two passes over each batch; the second one leaves out some updates."""
    torch.manual_seed(0)
    left, right = Mlp(), Mlp()
    first, second = wrap(optim.AdamW(left.parameters())), wrap(optim.SGD(right.parameters(), lr=0.1, momentum=0.9))
    run.track(left=left, right=right, first=first, second=second)
    for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(left(x), y).backward()
        first.step()
        for x, y in step.again():
            F.cross_entropy(right(x) + left(x), y).backward()
        if step.number % 2:
            second.step()
        else:
            second.zero_grad()
    return bits_of([left.state_dict(), right.state_dict()])


def _two(seat: Seat, place: Place) -> str:
    with place.run(seed=3) as run:
        return train_two(run, partial(unisono.shard, copies=1))


def test_two_models_with_an_optimizer_each() -> None:
    torch.set_num_threads(1)
    with AloneRun(seed=3) as run:
        expected = train_two(run, lambda one: one)
    assert train_on("shared", 3, _two) == [expected] * 3


def _going_back(seat: Seat, place: Place) -> str:
    with place.run(seed=3) as run:
        return train_going_back(run, partial(unisono.shard, copies=1))


def test_a_script_may_load_a_state_in_the_middle() -> None:
    torch.set_num_threads(1)
    with AloneRun(seed=3) as run:
        expected = train_going_back(run, lambda one: one)
    assert train_on("shared", 3, _going_back) == [expected] * 3


def test_a_step_outside_of_the_loop_is_refused_where_a_part_is_elsewhere() -> None:
    for message in train_on("shared", 2, _outside):
        assert "was called outside of run.steps" in message
