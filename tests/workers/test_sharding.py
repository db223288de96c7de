"""Optimizers whose states are shared out: the same bits as without, each state on as many workers as asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.nn import functional as F

import unisono
from tests.parts import ALL
from tests.workers.models import RECIPES, Mlp, Recipe, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on

pytestmark = pytest.mark.more

Make = Callable[[Any], optim.Optimizer]
Held = dict[int, dict[str, str]]
"""By parameter and key, the bits of a state."""

KERNELS: dict[str, list[dict[str, Any]]] = {
    "": [{}],
    "each": [{"foreach": False}, {"foreach": True}],
    "fused": [{"foreach": False}, {"foreach": True}, {"fused": True}],
}
KINDS: list[tuple[type[optim.Optimizer], str, dict[str, Any]]] = [
    (optim.SGD, "fused", {"lr": 0.1}),
    (optim.SGD, "fused", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.Adam, "fused", {"lr": 0.01, "amsgrad": True}),
    (optim.AdamW, "fused", {"lr": 0.01}),
    (optim.Adagrad, "each", {"lr": 0.1}),
    (optim.Adagrad, "", {"lr": 0.1, "fused": True}),
    (optim.Adadelta, "each", {}),
    (optim.Adamax, "each", {}),
    (optim.ASGD, "each", {"t0": 2}),
    (optim.NAdam, "each", {"momentum_decay": 0.004}),
    (optim.RAdam, "each", {}),
    (optim.RMSprop, "each", {"momentum": 0.9, "centered": True}),
    (optim.Rprop, "each", {}),
    (optim.Adafactor, "each", {"lr": 0.01}),
]
OPTIMIZERS: dict[str, Make] = {
    f"{kind.__name__} {options | way}": partial(kind, **options, **way)
    for kind, ways, options in KINDS
    for way in KERNELS[ways]
}


def muon(parameters: Any) -> optim.Optimizer:
    """It takes matrices only."""
    return optim.Muon([one for one in parameters if one.dim() == 2], lr=0.02)


OPTIMIZERS["Muon"] = muon


def held_by(optimizer: Any) -> Held:
    """The bits of the states that are here."""
    return {
        index: {key: bits_of(value) for key, value in state.items() if isinstance(value, Tensor)}
        for index, state in optimizer.state_dict()["state"].items()
        if not any(isinstance(value, Tensor) and value.is_meta for value in state.values())
    }


def train(run: unisono.Run, make: Make) -> tuple[str, Held]:
    """The bits of the model, and of the states that this worker has."""
    model = Mlp()
    optimizer = make(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return bits_of(model.state_dict()), held_by(optimizer)


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "host": {"parameters": "host"},
    "owners": {"gradients": "owners"},
    "both": {"parameters": "host", "gradients": "owners"},
}


def sharded(make: Make, copies: int, way: str, parameters: Any) -> optim.Optimizer:
    return unisono.shard(make(parameters), copies=copies, **WAYS[way])


def _train_all(seat: Seat, place: Place, copies: int, way: str) -> dict[str, tuple[str, Held]]:
    found = {}
    for name, make in OPTIMIZERS.items():
        with place.run(seed=3) as run:
            found[name] = train(run, partial(sharded, make, copies, way))
    return found


@pytest.fixture(scope="module")
def replicated() -> Iterator[dict[str, tuple[str, Held]]]:
    """What one process gets without sharing anything."""
    before, found = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    for name, make in OPTIMIZERS.items():
        with AloneRun(seed=3) as run:
            found[name] = train(run, make)
    yield found
    torch.set_num_threads(before)


def assert_shared_out(
    results: list[dict[str, tuple[str, Held]]], whole: dict[str, tuple[str, Held]], copies: int
) -> None:
    """All have the model's bits; each state is that of the whole, and on so many members."""
    for name, (model, states) in whole.items():
        for rank, each in enumerate(results):
            assert each[name][0] == model, f"{name} on rank {rank}"
            for index, state in each[name][1].items():
                assert state == states[index], f"{name}, state of parameter {index} on rank {rank}"
        for index, state in states.items():
            if state:
                number = sum(index in each[name][1] for each in results)
                assert number == min(copies, len(results)), f"{name}, parameter {index}"


@pytest.mark.parametrize(
    ("kind", "size", "copies", "way"),
    [("shared", 3, 1, "whole"), ("two-level", 4, 2, "whole"), ("shared", 3, 2, "host"), ("gloo", 3, 1, "both")],
)
def test_each_optimizer_has_the_same_bits_as_without(
    kind: str, size: int, copies: int, way: str, replicated: dict[str, tuple[str, Held]]
) -> None:
    assert_shared_out(train_on(kind, size, _train_all, copies, way), replicated, copies)


@pytest.mark.parametrize("way", ["whole", "both"])
def test_one_worker_holds_everything(way: str, replicated: dict[str, tuple[str, Held]]) -> None:
    found = {}
    for name, make in OPTIMIZERS.items():
        with AloneRun(seed=3) as run:
            found[name] = train(run, partial(sharded, make, 2, way))
    assert found == replicated


# -- whole trainings ---------------------------------------------------------------------------------

SAMPLE = ("rare", "thawing", "mixed", "channels last", "momentum", "fused", "scaler", "two phases")
NAMES = tuple(RECIPES) if ALL else SAMPLE
READING = ("scaler",)
"""Those that read the gradients of all parameters."""


def train_recipe(run: unisono.Run, recipe: Recipe, copies: int, way: str = "whole") -> tuple[Any, Held]:
    """What the training gives, but for the optimizer's state; and the states that are here."""
    made: list[optim.Optimizer] = []

    def make(parameters: Any) -> optim.Optimizer:
        made.append(sharded(recipe.optimizer, copies, way, parameters) if copies else recipe.optimizer(parameters))
        return made[0]

    clipping = unisono.clip_grad_norm_ if "gradients" in WAYS[way] else recipe.clipping
    outcome = replace(recipe, optimizer=make, clipping=clipping).train(run, 6)
    final = {name: bits for name, bits in outcome.final.items() if name != "optimizer"}
    return (final, outcome.totals, outcome.losses), held_by(made[0])


def _train_recipes(
    seat: Seat, place: Place, names: Sequence[str], copies: int, way: str
) -> dict[str, tuple[Any, Held]]:
    found = {}
    for name in names:
        with place.run(seed=3) as run:
            found[name] = train_recipe(run, RECIPES[name], copies, way)
    return found


@pytest.fixture(scope="module")
def recipes() -> Iterator[dict[str, tuple[Any, Held]]]:
    before, found = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    for name in NAMES:
        with AloneRun(seed=3) as run:
            found[name] = train_recipe(run, RECIPES[name], 0)
    yield found
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "size", "copies", "way"),
    [
        ("shared", 2, 1, "whole"),
        ("shared", 4, 2, "whole"),
        ("gloo", 3, 2, "whole"),
        ("shared", 3, 2, "host"),
        ("gloo", 3, 1, "owners"),
        ("two-level", 4, 2, "both"),
    ],
)
def test_a_training_has_the_same_bits_as_without(
    kind: str, size: int, copies: int, way: str, recipes: dict[str, tuple[Any, Held]]
) -> None:
    """Rare and frozen layers, several dtypes, schedulers, a scaler, averages, phases."""
    names = [name for name in NAMES if way in ("whole", "host") or name not in READING]
    whole = {name: recipes[name] for name in names}
    assert_shared_out(train_on(kind, size, _train_recipes, names, copies, way), whole, copies)
