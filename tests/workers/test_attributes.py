"""What changes what a step computes and is in no ``state_dict`` travels with the state, or is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono
from tests.workers.models import vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.errors import DivergenceError, UsageError
from unisono.engine.state.packing import pack, quick_digest, to_bytes, unpack
from unisono.engine.state.tracked import Tracked

Change = Callable[[nn.Module, unisono.Step], object]
STEPS, CUT_AT = 6, 4


class Cut(Exception):
    """The end of a run that is resumed later."""


class Counting(torch.optim.SGD):
    """Counts its steps, in numbers and tensors that belong to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = self.state.get("count", 0) + 1
        self.state["sum"] = self.state.get("sum", torch.zeros(2)) + 1
        return super().step(closure)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh())


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(layers()), nn.Linear(8, 4))


def traced() -> nn.Module:
    return nn.Sequential(torch.jit.trace(layers()[:2], torch.ones(3, 12)), nn.Linear(8, 4))


def frozen() -> nn.Module:
    return nn.Sequential(torch.jit.freeze(torch.jit.script(layers().eval())), nn.Linear(8, 4))


def plain() -> nn.Module:
    return nn.Sequential(layers(), nn.Linear(8, 4))


def nothing(model: nn.Module, step: unisono.Step) -> None:
    pass


def train(
    run: unisono.Run,
    make: Callable[[], nn.Module],
    kind: type[torch.optim.SGD] = torch.optim.SGD,
    change: Change = nothing,
    *,
    cut: bool = False,
) -> dict[str, str]:
    """Train a model, and change something in each step; returns digests of what is tracked."""
    model = make()
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=STEPS, epochs=9):
        if cut and step.number == CUT_AT:
            raise Cut
        change(model, step)
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return run._tracked.common_digests()


def train_at(seat: Seat, place: Place, *arguments: Any) -> dict[str, str]:
    with place.run(seed=3) as run:
        return train(run, *arguments)


def resumed(directory: Path, *arguments: Any) -> dict[str, str]:
    """Train with a run that is cut and resumed."""
    with pytest.raises(Cut), unisono.Run(directory, seed=3, device="cpu", checkpoint=EVERY) as run:
        train(run, *arguments, cut=True)
    with AloneRun(directory, seed=3, checkpoint=EVERY, resume="auto") as run:
        return train(run, *arguments)


EVERY = unisono.Checkpoints(every_steps=2)

PARTS = [(scripted, torch.optim.SGD), (traced, torch.optim.SGD), (frozen, torch.optim.SGD), (plain, Counting)]


def train_all(seat: Seat, place: Place) -> list[dict[str, str]]:
    return [train_at(seat, place, *part) for part in PARTS]


def test_modules_of_torchscript_and_optimizers_with_notes_of_their_own_train_and_resume(tmp_path: Path) -> None:
    (alone,) = train_on("shared", 1, train_all)
    assert train_on("shared", 2, train_all) == [alone, alone]
    assert [resumed(tmp_path / str(number), *part) for number, part in enumerate(PARTS)] == alone


def frozen_statistics(model: nn.Module, step: unisono.Step) -> None:
    """BatchNorm is frozen from some step on; what a micro-batch or an evaluation sets is put back."""
    if step.number == 2:
        model[0][1].eval()  # type: ignore[index, union-attr, operator]


def test_modes_travel_and_are_those_of_the_boundary(tmp_path: Path) -> None:
    with AloneRun(seed=3) as run:
        alone = train(run, plain, change=frozen_statistics)
    assert resumed(tmp_path, plain, torch.optim.SGD, frozen_statistics) == alone
    ours, theirs = Tracked(), Tracked()
    ours.add({"model": (mine := plain())})
    theirs.add({"model": (yours := plain())})
    yours[0][1].eval()  # type: ignore[index]
    mine[1].eval()  # type: ignore[index]
    of_old_version = theirs.whole_state()
    del of_old_version["in_eval"]
    ours.load(of_old_version)
    assert [name for name, one in mine.named_modules() if not one.training] == ["1"]
    ours.load(theirs.state())
    assert [name for name, one in mine.named_modules() if not one.training] == ["0.1"]


def eval_on_one(seat: Seat, place: Place) -> str:
    def change(model: nn.Module, step: unisono.Step) -> None:
        model.train(seat.rank == 0 or step.number < 1)

    with pytest.raises(DivergenceError) as caught, place.run(seed=3) as run:
        train(run, lambda: nn.Sequential(nn.Linear(12, 4), nn.Identity()), change=change)
    return str(caught.value)


def test_modes_that_differ_between_workers_are_named() -> None:
    first, _ = train_on("shared", 2, eval_on_one)
    assert "modes of modules['model'] is 'eval()' on w1 and not there on w0" in first


class Settings(nn.Module):
    """Has what practitioners keep in attributes, and leaves what forward passes leave."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.temperature, self.scale = plain(), 1.0, torch.ones(())
        self.options = {"noise": [0.0, 0.1]}
        self.calls, self.longest = 0, 0
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last_input = x
        if len(x) > self.longest:
            self.longest, self.cache = len(x), torch.ones(len(x))
        noise = self.options["noise"][-1] * torch.randn(len(x), 4)
        found: Tensor = self.parts(x) * self.scale / self.temperature + noise
        return found


def annealed(model: nn.Module, step: unisono.Step) -> None:
    """Set attributes in some steps, in each way in which they are set."""
    assert isinstance(model, Settings)
    model.temperature *= 0.9
    if step.number == 1:
        model.parts[0][2].p = 0.4  # type: ignore[index]
        model.parts[0][1].momentum = 0.3  # type: ignore[index]
        model.scale *= 0.5
    if step.number == 2:
        model.options["noise"].append(0.2)
    if step.number == 3:
        model.parts[0][2].p = 0.1  # type: ignore[index]
        model.shown = ("a new one", numpy.float64(1.5))  # type: ignore[assignment]


class Forgetful(torch.optim.SGD):
    """Decreases its rate by a counter that it keeps in an attribute."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.param_groups[0]["lr"] = 0.1 / self.count
        return super().step(closure)


def test_attributes_that_a_script_sets_between_steps_travel(tmp_path: Path) -> None:
    with AloneRun(seed=3) as run:
        alone = train(run, Settings, Forgetful, annealed)
        state = run._tracked.state()["attributes"]
    assert {owner: sorted(values) for owner, values in state.items()} == {
        "model": ["options", "scale", "shown", "temperature"],
        "model.parts.0.1": ["momentum"],
        "model.parts.0.2": ["p"],
        "optimizer": ["count"],
    }
    assert resumed(tmp_path, Settings, Forgetful, annealed) == alone
    assert train_on("shared", 2, train_at, Settings, Forgetful, annealed) == [alone, alone]


def test_attributes_of_an_earlier_time_are_put_in_force_again() -> None:
    """Also those that the script had not set yet then."""
    model = Settings()
    tracked = Tracked()
    tracked.add({"model": model})
    tracked.attributes.begin()
    before, model.temperature = tracked.state(), 0.5
    after, model.options["noise"] = tracked.state(), [7.0]
    model.later = 1
    tracked.load(before)
    assert (model.temperature, model.options, hasattr(model, "later")) == (1.0, {"noise": [0.0, 0.1]}, False)
    tracked.load(after)
    assert (model.temperature, model.options) == (0.5, {"noise": [0.0, 0.1]})


def test_what_cannot_travel_is_named_when_a_state_is_taken() -> None:
    model = Settings()
    tracked = Tracked()
    tracked.add({"model": model})
    tracked.attributes.begin()
    model.activation, model.weights = F.gelu, torch.zeros(10_000)
    model._private, model.parts.longest = F.gelu, 3  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="was set between two steps") as told:
        states = [tracked.state()["attributes"] for _ in range(2)]
    assert states == [{"model.parts": {"longest": to_bytes([3, "cpu"])}}] * 2
    assert sorted(str(one.message).partition(", which")[0] for one in told) == [
        "model.activation was set between two steps and is a builtin_function_or_method",
        "model.weights was set between two steps and is a tensor (10000,)",
    ]


def test_what_a_cache_has_grown_to_does_not_travel_without_it() -> None:
    """A script's own evaluation between two steps is longer than all batches."""
    model, tracked = Settings(), Tracked()
    tracked.add({"model": model})
    tracked.attributes.begin()
    model.longest, model.cache = 100, torch.ones(100)
    assert tracked.state()["attributes"] == {}


# -- optimizers in optimizers, and schedulers ---------------------------------------------------------


class Outer(torch.optim.Optimizer):
    """Makes the steps of another optimizer, as SAM and Lookahead do, and shares its groups."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        self.inner = torch.optim.SGD(parameters, **options)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def scheduled(run: unisono.Run, names: str, *, cut: bool = False) -> dict[str, str]:
    """Train with a wrapped optimizer, and a warm-up that is made at the beginning or in the first step."""
    model = nn.Linear(12, 4)
    optimizer = Outer(model.parameters(), lr=0.1, momentum=0.9)
    made: dict[str, Any] = {"model": model, "optimizer": optimizer, "inner": optimizer.inner}
    warm_up = partial(torch.optim.lr_scheduler.LinearLR, optimizer, 0.1, total_iters=9)
    if "warm_up" in names:
        made["warm_up"] = warm_up()
    run.track(**{name: one for name, one in made.items() if name in names})
    for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=STEPS, epochs=9):
        if cut and step.number == CUT_AT:
            raise Cut
        if step.number == 0 and "warm_up" not in made:
            made["warm_up"] = warm_up()
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if "warm_up" in made:
            made["warm_up"].step()
    return {**run._tracked.common_digests(), "rate": repr(optimizer.inner.param_groups[0]["lr"])}


def test_optimizers_in_optimizers_and_schedulers_are_named_and_travel_when_tracked(tmp_path: Path) -> None:
    all_names = "model optimizer inner warm_up"
    with warnings.catch_warnings(), AloneRun(seed=3) as run:
        warnings.simplefilter("error", UserWarning)
        alone = scheduled(run, all_names)
    with pytest.raises(Cut), AloneRun(tmp_path, seed=3, checkpoint=EVERY) as run:
        scheduled(run, all_names, cut=True)
    with AloneRun(tmp_path, seed=3, checkpoint=EVERY, resume="auto") as run:
        assert scheduled(run, all_names) == alone
    with pytest.warns(UserWarning, match=".") as told, AloneRun(seed=3) as run:
        scheduled(run, "model optimizer")
    words = [str(one.message) for one in told]
    assert [one.partition(":")[0] for one in words] == [
        "optimizer.inner is an optimizer (SGD) whose state is not in that of 'optimizer'",
        "a scheduler of 'optimizer' is not tracked",
    ]
    assert "run.track(inner=optimizer.inner)" in words[0]


def test_schedulers_within_tracked_objects_are_not_named() -> None:
    """Those of a sequence are in its state; so are those of an object with a state of its own."""
    model = nn.Linear(12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5), torch.optim.lr_scheduler.StepLR(optimizer, 2)]
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])
    owner = SimpleNamespace(schedulers=[scheduler])
    for tracks in ({"scheduler": scheduler}, {"owner": _Holder(owner)}):
        tracked = Tracked()
        tracked.add({"model": model, "optimizer": optimizer, **tracks})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tracked.check(torch.device("cpu"))
            for one in (scheduler, *parts):
                tracked.check_scheduler(one)
    other = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.warns(UserWarning, match="a scheduler of 'optimizer' is not tracked"):
        tracked.check_scheduler(other)


class _Holder:
    """Keeps the state of schedulers by itself."""

    def __init__(self, owner: SimpleNamespace) -> None:
        self.owner = owner

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_an_evaluation_of_a_snapshot_has_rates_schedules_and_attributes_but_no_states_of_optimizers() -> None:
    for rate in (0.1, torch.tensor(0.2)):
        model = Settings()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        tracked = Tracked()
        tracked.add({"model": model, "optimizer": optimizer, "scheduler": scheduler, "kept": {"best": 1.0}})
        tracked.attributes.begin()
        start = pack(tracked.seen()).copied()
        scheduler.step()
        model.temperature = 0.5
        with tracked.without_states(), pytest.raises(UsageError, match="has read the state of an optimizer"):
            optimizer.state_dict()
        tracked.load_seen(unpack(start.skeleton, start.tensors))
        assert quick_digest(tracked.seen()["options"]) == quick_digest(unpack(start.skeleton, start.tensors)["options"])
        assert (float(optimizer.param_groups[0]["lr"]), model.temperature) == (pytest.approx(float(rate)), 1.0)
        optimizer.state_dict()
