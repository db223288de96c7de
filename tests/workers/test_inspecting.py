"""Inspectors: what a run tells about its micro-batches and sums, and that being looked at changes no bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.cluster.worker import member
from unisono.core.errors import StopInspection, UsageError
from unisono.core.events import StepResult
from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec
from unisono.core.tree import leaf as leaf_node
from unisono.core.tree import level_of, schedule
from unisono.engine.rounds.taps import Computed, Loop, Place
from unisono.record.journal import JOURNAL, compare
from unisono.script.inspecting import INSPECTORS, Inspector

pytestmark = pytest.mark.more


class Notebook(Inspector):
    """Notes what it is told."""

    newest: Notebook

    def __init__(self, settings: str) -> None:
        Notebook.newest = self
        self.stop_at: int | None = json.loads(settings).get("stop_at")
        self.loops: list[Loop] = []
        self.told: list[str] = []
        self.digests: dict[Place, int] = {}
        self.gradients: dict[int, dict[int, dict[str, Tensor]]] = {}
        self.means: dict[int, dict[str, Tensor]] = {}
        self.factors: dict[int, float] = {}
        self.is_closed = False

    def before_loop(self, loop: Loop) -> None:
        self.loops.append(loop)

    def before_step(self, step: int) -> None:
        self.told.append(f"step {step}")

    def looks_at(self, place: Place) -> bool:
        return True

    def before_microbatch(self, place: Place, batch: Any) -> None:
        self.told.append(f"before {place.step}.{place.leaf}")

    def after_microbatch(self, place: Place, computed: Computed) -> None:
        self.told.append(f"after {place.step}.{place.leaf}")
        self.digests[place] = computed.fingerprint.digest
        own = {name: one.clone() for name, one in computed.gradients.items()}
        self.gradients.setdefault(place.step, {})[place.leaf] = own
        self.factors[place.step] = self.factors.get(place.step, 0.0) + computed.factor

    def after_sum(self, place: Place, result: StepResult) -> None:
        self.told.append(f"sum {place.step}")
        parameters = self.loops[-1].tracked.parameters()
        self.means[place.step] = {name: one.grad.clone() for name, one in parameters if one.grad is not None}
        if place.replica < 0 and place.step == self.stop_at:
            raise StopInspection("far enough")

    def after_step(self, result: StepResult) -> None:
        self.told.append(f"done {result.step} {result.digest}")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setitem(INSPECTORS, "notebook", f"{__name__}:Notebook")
    yield monkeypatch
    member.settle(RunSpec())


def with_inspector(name: str, settings: str, directory: Path | str = "") -> RunSpec:
    return RunSpec(settings=RunSettings(run_dir=str(directory), inspect=f"{name}:{settings}"))


def inspect_in(directory: Path, **settings: Any) -> None:
    member.settle(with_inspector("notebook", json.dumps(settings), directory))


def train(directory: Path, *, steps: int = 3, passes: int = 1, **arguments: Any) -> None:
    with unisono.Run(directory, seed=3, checkpoint=unisono.Checkpoints(every_steps=1)) as run:
        data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=12, microbatches=6, epochs=9, max_steps=steps, **arguments):
            for number in range(passes):
                for inputs, labels in step.again() if number else step:
                    F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def train_locally(directory: Path) -> None:
    with unisono.Run(directory, seed=3) as run:
        data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for part in run.local_steps(data, batch_size=8, microbatches=4, replicas=2, inner_steps=2, max_steps=4):
            for step in part:
                for inputs, labels in step:
                    F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_the_gradients_that_are_told_add_up_to_the_gradient_of_the_step(
    wire: str, inspected: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inspect_in(tmp_path / "own")
    train(tmp_path / "run", wire=wire)
    found = Notebook.newest
    rounds, lowest = wire == "bf16", level_of(8, 6)
    for step, leaves in found.gradients.items():
        for name in leaves[0]:
            held = {leaf_node(index, 6): each[name] for index, each in leaves.items()}
            for left, right, merged in schedule(held, 6)[0]:
                total = held.pop(left) + held.pop(right)
                held[merged] = total.bfloat16().float() if rounds and merged.level >= lowest else total
            (total,) = held.values()
            assert torch.equal(total / found.factors[step], found.means[step][name]), (step, name)


def test_a_run_that_is_looked_at_has_the_same_bits_and_leaves_the_other_directory_alone(
    inspected: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train(tmp_path / "run")
    before = sorted(str(path) for path in (tmp_path / "run").rglob("*"))
    inspect_in(tmp_path / "own")
    train(tmp_path / "run")
    assert compare(tmp_path / "run", tmp_path / "own").startswith("identical: 3 steps")
    assert before == sorted(str(path) for path in (tmp_path / "run").rglob("*"))
    assert not list((tmp_path / "own" / "checkpoints").glob("step-*0")), "it writes no checkpoints"
    assert Notebook.newest.is_closed


def test_everything_is_told_in_its_order(inspected: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inspect_in(tmp_path / "own")
    train(tmp_path / "run", steps=1)
    digest = json.loads((tmp_path / "own" / JOURNAL).read_text().splitlines()[0])["digest"]
    leaves = [word for leaf in range(6) for word in (f"before 0.{leaf}", f"after 0.{leaf}")]
    assert Notebook.newest.told == ["step 0", *leaves, "sum 0", f"done 0 {digest}"]
    assert Notebook.newest.loops[0].steps == range(1)


def test_each_pass_over_a_batch_is_told(inspected: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inspect_in(tmp_path / "own")
    train(tmp_path / "run", steps=1, passes=2)
    assert {place.turn for place in Notebook.newest.digests} == {0, 1}
    assert Notebook.newest.told.count("sum 0") == 2


def test_a_delayed_sum_is_told_with_its_own_number(inspected: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inspect_in(tmp_path / "own")
    train(tmp_path / "run", steps=3, delay=1)
    told = [word for word in Notebook.newest.told if word.startswith(("step", "sum"))]
    assert told == ["step 0", "step 1", "sum 0", "step 2", "sum 1", "step 3", "sum 2"]


def test_the_steps_of_replicas_are_told_with_their_places(inspected: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inspect_in(tmp_path / "own")
    train_locally(tmp_path / "run")
    places = [place for place in Notebook.newest.digests if not place.aside]
    assert {(place.step, place.replica, place.inner, place.leaf) for place in places} == {
        (step, replica, inner, leaf) for step in (0, 1) for replica in (0, 1) for inner in (0, 1) for leaf in (0, 1)
    }


def test_an_inspector_may_end_the_run(inspected: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inspect_in(tmp_path / "own", stop_at=1)
    with pytest.raises(StopInspection, match="far enough"):
        train(tmp_path / "run")
    assert Notebook.newest.told[-1] == "sum 1"
    assert Notebook.newest.is_closed


def test_an_inspector_must_be_known_and_the_directory_its_own(tmp_path: Path) -> None:
    try:
        member.settle(with_inspector("replay", "{}"))
        with pytest.raises(UsageError, match="a directory of its own"):
            unisono.Run(tmp_path)
        member.settle(with_inspector("nobody", "{}", tmp_path))
        with pytest.raises(UsageError, match="no inspector 'nobody'"):
            unisono.Run(tmp_path)
    finally:
        member.settle(RunSpec())
