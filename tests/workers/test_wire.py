"""``wire="bf16"``: a definition that knows no workers, and the same bits on any number of them, whoever is lost."""

from __future__ import annotations

import dataclasses
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
from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import served_by
from tests.workers.losses import ended_workers
from tests.workers.models import RECIPES, Outcome
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on, trained_alone
from unisono.core.errors import RecipeError, UsageError
from unisono.core.tree import Node, leaf, level_of, schedule
from unisono.record.journal import compare
from unisono.system.faults import POINTS
from unisono.testing import Faults, run_workers
from unisono.testing import Outcome as RunOutcome

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("small_training.py")
SEED = 3

# -- the definition ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_leaves", "level"), [(1, 0), (2, 0), (8, 0), (9, 1), (16, 1), (17, 2), (32, 2), (33, 3), (64, 3), (100, 4)]
)
def test_the_level_is_the_lowest_with_eight_nodes_at_most(num_leaves: int, level: int) -> None:
    assert level_of(8, num_leaves) == level
    assert -(-num_leaves // 2**level) <= 8
    assert level == 0 or -(-num_leaves // 2 ** (level - 1)) > 8


def by_hand(gradients: list[Tensor], *, rounds: bool) -> Tensor:
    """The sum of the micro-batches' gradients, by the definition alone."""
    number = len(gradients)
    lowest = level_of(8, number)

    def formed(node: Node, value: Tensor) -> Tensor:
        return value.bfloat16().float() if rounds and node.level >= lowest else value

    held = {leaf(index, number): formed(leaf(index, number), each) for index, each in enumerate(gradients)}
    for left, right, merged in schedule(held, number)[0]:
        held[merged] = formed(merged, held.pop(left) + held.pop(right))
    (total,) = held.values()
    return total


@pytest.mark.parametrize("microbatches", [1, 3, 8, 9, 17, 40])
@pytest.mark.parametrize("is_rare", [False, True])
def test_a_gradient_is_what_the_definition_says(microbatches: int, is_rare: bool) -> None:
    """Adopted gradients, leaves that are first in their chain, and a parameter that some micro-batches do not use."""
    with unisono.Run(seed=SEED, device="cpu") as run:
        model = nn.ModuleDict({"always": nn.Linear(7, 5), "rare": nn.Linear(7, 5), "wide": nn.Linear(5, 3).double()})
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            hidden = model["always"](x)
            if is_rare and x[0, 0] > 0:
                hidden = hidden + model["rare"](x)
            return F.cross_entropy(model["wide"](hidden.double()), y)

        data = TensorDataset(torch.randn(2 * microbatches, 7), torch.randint(0, 3, (2 * microbatches,)))
        for step in run.steps(data, batch_size=2 * microbatches, microbatches=microbatches, wire="bf16"):
            batches = []
            for x, y in step:
                batches.append((x, y))
                loss_of(x, y).backward()
            found = {name: parameter.grad for name, parameter in model.named_parameters()}
            by_name: dict[str, list[Tensor]] = {name: [] for name in found}
            for x, y in batches:
                parts = torch.autograd.grad(loss_of(x, y), list(model.parameters()), allow_unused=True)
                for (name, parameter), part in zip(model.named_parameters(), parts, strict=True):
                    by_name[name].append(torch.zeros_like(parameter) if part is None else part)
            for name, each in by_name.items():
                total = by_hand(each, rounds=not name.startswith("wide"))  # float64 is not rounded
                gradient = found[name]
                mean = gradient if gradient is not None else torch.zeros_like(total)
                assert torch.equal(total / microbatches, mean), name


# -- the same bits -----------------------------------------------------------------------------------

NAMES = (
    [name for name in RECIPES if name != "float64"]
    if ALL
    else ["cnn", "transformer", "rare", "thawing", "bfloat16", "mixed"]
)
JOBS = [(name, microbatches) for name in NAMES for microbatches in (6, 12, 24)]
TEAMS = [("shared", 3), ("gloo", 2), ("gloo", 3), ("two-level", 4)]
"""24 samples in micro-batches of 4, 2 and 1: rounded from the leaves, the sums of 2, and the sums of 4 on."""
Outcomes = dict[tuple[str, int], Outcome]


def train_in(folder: Path, job: tuple[str, int], make_run: Callable[..., unisono.Run]) -> Outcome:
    name, microbatches = job
    with make_run(folder / f"{name} {microbatches}", seed=SEED) as run:
        return dataclasses.replace(RECIPES[name], wire="bf16").train(run, microbatches)


def _train_all(seat: Seat | None, place: Place, jobs: list[tuple[str, int]], folder: Path) -> Outcomes:
    return {job: train_in(folder, job, place.run) for job in jobs}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcomes]:
    return trained_alone(JOBS, train_in, tmp_path_factory)


@pytest.mark.parametrize("number", range(len(TEAMS)), ids=[f"{kind}-{size}" for kind, size in TEAMS])
def test_a_team_gives_the_bits_of_one_worker(number: int, alone: tuple[Path, Outcomes], tmp_path: Path) -> None:
    """Each team trains a third of the recipes, each time others; all of them if all is asked for."""
    folder, expected = alone
    jobs = JOBS if ALL else [job for index, job in enumerate(JOBS) if (index + index // 3 + number) % 3 == 0]
    for outcomes in train_on(*TEAMS[number], _train_all, jobs, tmp_path):
        assert outcomes == {job: expected[job] for job in jobs}
    for name, microbatches in jobs:
        place = f"{name} {microbatches}"
        assert compare(folder / place, tmp_path / place).startswith("identical: ")


def sharded_adamw(parameters: Any) -> torch.optim.Optimizer:
    return unisono.shard(torch.optim.AdamW(parameters, lr=0.01))


def _train_sharded(seat: Seat, place: Place) -> tuple[str, str]:
    with place.run(None, seed=SEED) as run:
        outcome = dataclasses.replace(RECIPES["cnn"], wire="bf16", optimizer=sharded_adamw).train(run, 12)
    return outcome.final["model"], outcome.losses


@pytest.mark.parametrize(("kind", "size"), [("shared", 3), ("gloo", 2)])
def test_a_sharded_optimizer_gets_the_same_gradients(kind: str, size: int, alone: tuple[Path, Outcomes]) -> None:
    _, expected = alone
    right = expected["cnn", 12].final["model"], expected["cnn", 12].losses
    assert train_on(kind, size, _train_sharded) == [right] * size


def _train_delayed(seat: Seat, place: Place) -> Outcome:
    with place.run(None, seed=SEED) as run:
        return dataclasses.replace(RECIPES["cnn"], wire="bf16").train(run, 12, delay=1)


@pytest.mark.parametrize(("kind", "size"), [("shared", 2), ("gloo", 3)])
def test_delayed_gradients_are_rounded_as_well(kind: str, size: int) -> None:
    outcomes = {}
    for wire in ("fp32", "bf16"):
        with AloneRun(seed=SEED) as run:
            outcomes[wire] = dataclasses.replace(RECIPES["cnn"], wire=wire).train(run, 12, delay=1)  # type: ignore[arg-type]
    assert outcomes["fp32"] != outcomes["bf16"]
    assert train_on(kind, size, _train_delayed) == [outcomes["bf16"]] * size


def test_what_is_compared_is_rounded(alone: tuple[Path, Outcomes], tmp_path: Path) -> None:
    """It would differ from a run that is not."""
    _, outcomes = alone
    for name in NAMES:
        with AloneRun(tmp_path / name, seed=SEED) as run:
            plain = RECIPES[name].train(run, 6)
        assert plain.final["model"] != outcomes[name, 6].final["model"], name


# -- losses, and resumes -----------------------------------------------------------------------------

ELSEWHERE = ("checkpoint", "in_", "evaluat", "talk")
"""Points that no plain step of 5 comes to, or where something else must happen first."""
EVERY = [
    (exchange, workers, microbatches, at, rank)
    for exchange in ("shared", "gloo", "two-level")
    for workers, microbatches in ((2, 12), (3, 8))
    for at in POINTS
    if "." not in at and not at.startswith(ELSEWHERE)
    for rank in range(workers)
]
SAMPLE = [
    ("shared", 3, 8, "after_backward", 1),
    ("shared", 2, 12, "published", 0),
    ("gloo", 3, 12, "before_combine", 2),
    ("gloo", 2, 8, "reduced", 1),
    ("two-level", 3, 12, "after_backward", 0),
    ("two-level", 3, 8, "committed", 2),
]
CASES = EVERY if ALL else SAMPLE
OPTIONS = {"two-level": ["--set", "simulate-hosts=2"]}


def train(directory: Path, workers: int, microbatches: int, *options: str, **more: Any) -> RunOutcome:
    arguments = ["--steps", "5", "--wire", "bf16", "--microbatches", str(microbatches)]
    chosen = [*PATIENT, *options]
    return run_workers(
        SCRIPT, workers, directory=directory, options=chosen, arguments=arguments, timeout_s=WAIT_S, **more
    )


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, RunOutcome]:
    found = {}
    with served_by(standing_nursery):
        for microbatches in (8, 12):
            found[microbatches] = train(tmp_path_factory.mktemp("calm") / "run", 1, microbatches)
            assert found[microbatches].exit_code == 0, found[microbatches].output
    return found


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(("exchange", "workers", "microbatches", "at", "rank"), CASES)
def test_a_kill_changes_no_bit(
    exchange: str, workers: int, microbatches: int, at: str, rank: int, calm: dict[int, RunOutcome], tmp_path: Path
) -> None:
    """Survivors keep what they have rounded, and form what is missing."""
    faults = Faults().kill(f"w{rank}", step=3, at=at)  # a whole batch: everybody has a part
    options = ["--exchange", exchange, *OPTIONS.get(exchange, [])]
    hurt = train(tmp_path / "run", workers, microbatches, *options, faults=faults)
    assert hurt.exit_code == 0, hurt.output
    assert ended_workers(hurt.output), "nobody was killed"
    assert (hurt.digests, hurt.final) == (calm[microbatches].digests, calm[microbatches].final), hurt.output


def steps_of(folder: Path, wire: Any, num_steps: int, **more: Any) -> None:
    with unisono.Run(folder, seed=1, device="cpu", checkpoint=unisono.Checkpoints(every_steps=2), **more) as run:
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(32, 6), torch.randint(0, 4, (32,)))
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=32, microbatches=16, epochs=9, max_steps=num_steps, wire=wire):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_it_is_a_part_of_the_recipe(tmp_path: Path) -> None:
    """A run goes on with the same bits, and not by chance with another wire."""
    steps_of(tmp_path / "whole", "bf16", 6)
    steps_of(tmp_path / "cut", "bf16", 4)
    with pytest.raises(RecipeError, match=r"wire +bf16"):
        steps_of(tmp_path / "cut", "fp32", 6, resume="auto")
    steps_of(tmp_path / "cut", "bf16", 6, resume="auto")
    assert compare(tmp_path / "whole", tmp_path / "cut").startswith("identical: 6 steps")
    with pytest.warns(UserWarning, match="a different recipe"):
        steps_of(tmp_path / "cut", "fp32", 8, resume="auto", resume_anyway={"wire"})


def test_a_wire_that_would_change_nothing_is_refused(tmp_path: Path) -> None:
    with (
        AloneRun(tmp_path, seed=SEED) as run,
        pytest.raises(UsageError, match="the parameters of this model are float64"),
    ):
        dataclasses.replace(RECIPES["float64"], wire="bf16").train(run, 6)


def test_another_wire_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'fp16'"):
        steps_of(tmp_path, "fp16", 1)
