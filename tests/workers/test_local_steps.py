"""Local steps: the same bits on any number of workers, whoever is lost, joins, or goes on from a checkpoint."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset, TensorDataset

import unisono
from tests.parts import ALL
from tests.waiting import PATIENT
from tests.workers.conftest import served_by
from tests.workers.losses import ended_workers
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from tests.workers.trainings import Training
from unisono.core.errors import DivergenceError, RecipeError, StepError, UsageError
from unisono.engine.state.packing import digest_of_tensor
from unisono.record.journal import compare
from unisono.strategies.local.replica_states import Replicas
from unisono.system.faults import POINTS
from unisono.testing import Faults, Outcome

pytestmark = pytest.mark.more

run = Training("local_training.py")
ROUNDS = 5
ROUND = 2
"""The round in which something happens."""
EXCHANGES = {"shared": ["shared"], "gloo": ["gloo"], "two-level": ["two-level", "--set", "simulate-hosts=2"]}
ELSEWHERE = ("local.coded", "local.grouped", "local.ungrouped")
AT = [
    *(at for at in POINTS if at.startswith("local.") and at not in ELSEWHERE),
    *("before_backward", "after_backward", "published", "reduced", "committed", "after_step", "step_head"),
]
LEFT_OUT = ("before_backward", "published", "step_head")
"""Points where the plain training is killed in each exchange, too: here only with UNISONO_TEST_ALL=1."""


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One worker to which nothing happens."""
    with served_by(standing_nursery):
        outcome = run(tmp_path_factory.mktemp("calm") / "run", 1)
    assert outcome.exit_code == 0, outcome.output
    assert len(set(outcome.digests)) == ROUNDS
    return outcome


def assert_same_bits(hurt: Outcome, calm: Outcome) -> None:
    """Means of the replicas, final state, sums and evaluations are those of the calm run."""
    assert hurt.exit_code == 0, hurt.output
    assert hurt.digests == calm.digests, hurt.output
    assert hurt.final == calm.final, hurt.output
    assert hurt.evaluations == calm.evaluations, hurt.output
    said = [
        [
            {key: line[key] for key in ("loss", "totals", "samples", "logs")}
            for line in one.lines
            if line["kind"] == "step"
        ]
        for one in (hurt, calm)
    ]
    assert said[0] == said[1], hurt.output


# -- what is computed --------------------------------------------------------------------------------


def vectors(num_samples: int = 32) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(num_samples, 12, generator=draw), torch.randint(0, 4, (num_samples,), generator=draw)
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize(("has_outer", "reduction"), [(False, "mean"), (True, "mean"), (False, "sum")])
def test_the_bits_are_those_of_diloco_written_in_plain_torch(
    has_outer: bool, reduction: Literal["mean", "sum"]
) -> None:
    """Four models with four optimizers, each trained on its quarter of each batch; then the mean of their changes is
    the gradient of the outer optimizer, also where the gradients of their steps are sums. All numbers of samples are
    powers of two, so no weight rounds anything.
    """
    data, replicas, steps = vectors(), 4, 4
    order: list[list[int]] = []
    with AloneRun(seed=5) as run:
        model = mlp()
        begin = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        run.track(model=model, optimizer=optimizer, outer=outer)
        rounds = run.local_steps(
            data,
            batch_size=16,
            microbatches=4,
            replicas=4,
            inner_steps=4,
            outer=outer if has_outer else None,
            epochs=4,
            reduction=reduction,
        )
        assert len(rounds) == 2
        for round_ in rounds:
            assert len(round_) == 4
            for step in round_:
                for x, y in step:
                    order.append(step.indices.tolist())
                    F.cross_entropy(model(x), y, reduction=reduction).backward()
                optimizer.step()

    ours = mlp()
    ours.load_state_dict(begin)
    outer = torch.optim.SGD(ours.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    models = [copy.deepcopy(ours) for _ in range(replicas)]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in models]
    x, y = data.tensors
    places = iter(order)
    for _ in range(2):
        for one, inner in zip(models, optimizers, strict=True):
            one.load_state_dict(ours.state_dict())
            for _ in range(steps):
                index = torch.tensor(next(places))
                inner.zero_grad()
                F.cross_entropy(one(x[index]), y[index], reduction=reduction).backward()
                inner.step()
        for parameter, *theirs in zip(ours.parameters(), *(one.parameters() for one in models), strict=True):
            a, b, c, d = (parameter.detach() - other.detach() for other in theirs)
            parameter.grad = ((a + b) + (c + d)) / 4
        if has_outer:
            outer.step()
        else:
            with torch.no_grad():
                for parameter in ours.parameters():
                    assert parameter.grad is not None
                    parameter -= parameter.grad
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ours.parameters(), strict=True))
    assert sorted(index for one in order for index in one) == sorted(list(range(32)) * 4), "each sample once per epoch"


def test_replicas_keep_their_states_from_one_loop_to_the_next() -> None:
    """A loop over epochs with a call for each gives the bits of one call: momentum goes on."""

    def train(calls: int) -> dict[str, int]:
        with AloneRun(seed=5) as run:
            model = mlp()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            run.track(model=model, optimizer=optimizer)
            for _ in range(calls):
                for round_ in run.local_steps(
                    vectors(), batch_size=16, microbatches=4, replicas=2, inner_steps=2, epochs=4 // calls
                ):
                    for step in round_:
                        for x, y in step:
                            F.cross_entropy(model(x), y).backward()
                        optimizer.step()
            return bits(model)

    assert train(1) == train(2)


Body = Callable[[Any], dict[str, Any]]


def train_cnn(run: unisono.Run) -> dict[str, Any]:
    """Dropout, BatchNorm, SGD with momentum, and an inner loop that clips."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Dropout(0.3), nn.Flatten(),
        nn.Linear(60, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    losses = []
    for round_ in run.local_steps(vectors(56), batch_size=24, microbatches=6, replicas=2, inner_steps=2, epochs=3,
                                  drop_last=True):  # fmt: skip
        for step in round_:
            for x, y in step:
                step.add(right=(model(x).argmax(1) == y).sum())
                F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        losses.append((round_.loss, round_.totals["right"]))
    return {"losses": losses, "model": bits(model)}


def train_phases(run: unisono.Run) -> dict[str, Any]:
    """A plain training, whose optimizer state each replica begins with; local steps; and a plain training again."""
    model = mlp().to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    outer = torch.optim.Adam(list(model.parameters())[:2], lr=0.002)
    run.track(model=model, optimizer=optimizer, outer=outer)
    x, y = vectors(40).tensors
    data = TensorDataset(x.to(torch.bfloat16), y)

    def plain() -> None:
        for step in run.steps(data, batch_size=8, microbatches=4, max_steps=2):
            for a, b in step:
                step.backward(F.cross_entropy(model(a).float(), b))
            optimizer.step()

    plain()
    losses = []
    for round_ in run.local_steps(
        data, batch_size=16, microbatches=5 * 2 - 2, replicas=4, inner_steps=3, outer=outer, epochs=2, max_steps=5,
        drop_last=True,
    ):  # fmt: skip
        for step in round_:
            for a, b in step:
                step.backward(F.cross_entropy(model(a).float(), b), weight=float(b.sum() + 1))
            optimizer.step()
        losses.append(round_.loss)
    plain()
    return {"losses": losses, "model": bits(model)}


def train_fresh(run: unisono.Run) -> dict[str, Any]:
    """Fresh inner states, sums instead of means, several passes, and a partial batch that all replicas share."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    losses = []
    for round_ in run.local_steps(vectors(46), batch_size=24, microbatches=6, replicas=3, inner_steps=3, epochs=3,
                                  inner_state="fresh", reduction="sum"):  # fmt: skip
        for step in round_:
            for x, y in step:
                F.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
            for x, y in step.again():
                F.cross_entropy(model(x + 0.1), y, reduction="sum").backward()
            optimizer.step()
        losses.append(round_.loss)
    return {"losses": losses, "model": bits(model)}


def train_int8(run: unisono.Run, inner_state: Any = "kept") -> dict[str, Any]:
    """Changes in 8 bits: blocks that parameters do not fill, and a parameter without gradient."""
    model = mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    run.track(model=model, optimizer=optimizer, outer=outer)
    losses = []
    for round_ in run.local_steps(vectors(48), batch_size=24, microbatches=3, replicas=3, inner_steps=2, epochs=4,
                                  outer=outer, delta="int8", inner_state=inner_state):  # fmt: skip
        for step in round_:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        losses.append(round_.loss)
    return {"losses": losses, "model": bits(model)}


TRAININGS: dict[str, Body] = {
    "cnn": train_cnn,
    "phases": train_phases,
    "fresh": train_fresh,
    "int8": train_int8,
    "int8 fresh": partial(train_int8, inner_state="fresh"),
}
TEAMS = {"shared": (2, 5), "gloo": (3, 5), "two-level": (4, 5)}


def bits(model: nn.Module) -> dict[str, int]:
    return {name: digest_of_tensor(value) for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    folder, before = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    torch.set_num_threads(1)
    found = {}
    for name, train in TRAININGS.items():
        with AloneRun(folder / name, seed=3) as run:
            found[name] = train(run)
    yield folder, found
    torch.set_num_threads(before)


def _train_all(seat: Seat, place: Place, folder: Path) -> dict[str, Any]:
    found = {}
    for name, train in TRAININGS.items():
        with place.run(folder / name, seed=3) as run:
            found[name] = train(run)
    return found


@pytest.mark.filterwarnings("ignore:.* workers share .* micro-batches")
@pytest.mark.filterwarnings("ignore:.* workers share .* replicas")
@pytest.mark.parametrize(("kind", "size"), [(kind, size) for kind, sizes in TEAMS.items() for size in sizes])
def test_a_team_gives_the_bits_of_one_worker(
    kind: str, size: int, alone: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, expected = alone
    for rank, found in enumerate(train_on(kind, size, _train_all, tmp_path)):
        for name in TRAININGS:
            assert found[name] == expected[name], f"{name} on rank {rank}"
    for name in TRAININGS:
        assert compare(folder / name, tmp_path / name).startswith("identical: ")


class Parents(Dataset[tuple[Tensor, Tensor, int]]):
    """Samples that know which process has loaded them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return torch.randn(12), torch.tensor(index % 4), os.getpid()


def test_loader_processes_fetch_what_the_replicas_need() -> None:
    """In the order in which a worker computes its replicas, one after the other, round after round."""

    def train(loader_workers: int) -> tuple[dict[str, int], set[int]]:
        found = set()
        with AloneRun(seed=5) as run:
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.track(model=model, optimizer=optimizer)
            for round_ in run.local_steps(
                Parents(),
                batch_size=8,
                microbatches=4,
                replicas=2,
                inner_steps=2,
                epochs=2,
                loader_workers=loader_workers,
            ):
                for step in round_:
                    for x, y, parent in step:
                        found |= set(parent.tolist())
                        F.cross_entropy(model(x), y).backward()
                    optimizer.step()
            return bits(model), found

    expected, own = train(0)
    loaded, others = train(1)
    assert loaded == expected
    assert own == {os.getpid()}
    assert os.getpid() not in others, "a batch was fetched by the worker itself: the forecast was wrong"


def _train_with_memory(seat: Seat, place: Place, replicas: int = 4) -> str:
    num_seen = 0
    try:
        with place.run(seed=3) as run:
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.track(model=model, optimizer=optimizer)
            for round_ in run.local_steps(vectors(), batch_size=16, microbatches=4, replicas=replicas, inner_steps=2):
                for step in round_:
                    for x, y in step:
                        num_seen += 1
                        F.cross_entropy(model(x) * (1.0 + 0.1 * num_seen), y).backward()
                    optimizer.step()
    except DivergenceError as error:
        return str(error)
    return ""


def test_a_script_that_remembers_other_micro_batches_is_found() -> None:
    """Each worker computes the first step of a replica of another one as well, and the two must be equal."""
    said = train_on("shared", 2, _train_with_memory)
    assert all("the first micro-batch of replica" in one and "computed by two workers" in one for one in said), said


def test_a_script_that_remembers_other_micro_batches_is_found_in_a_group() -> None:
    """Its members compute some micro-batches of each other as well, as the workers of a plain step do."""
    said = train_on("shared", 2, _train_with_memory, 1)
    assert all("was computed by two workers" in one for one in said), said


# -- losses ------------------------------------------------------------------------------------------


def cases() -> list[tuple[str, int, str, int]]:
    every = [
        (exchange, workers, at, rank)
        for exchange in EXCHANGES
        for workers in (2, 3, 4)
        for at in AT
        for rank in range(min(workers, 3))
    ]
    if ALL:
        return every
    names, points = list(EXCHANGES), [at for at in AT if at not in LEFT_OUT]
    return [(names[number % 3], 2 + number // 3 % 2, at, number % 2) for number, at in enumerate(points)]


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(("exchange", "workers", "at", "rank"), cases())
def test_a_kill_changes_no_bit(exchange: str, workers: int, at: str, rank: int, calm: Outcome, tmp_path: Path) -> None:
    """Whoever is killed, wherever it is: the others compute its replicas again from the boundary, and end alike."""
    faults = Faults().kill(f"w{rank}", step=ROUND, at=at)
    hurt = run(tmp_path / "run", workers, faults, [*PATIENT, "--exchange", *EXCHANGES[exchange]])
    if rank < workers:
        assert len(ended_workers(hurt.output)) >= 1, f"nobody was killed there:\n{hurt.output}"
    assert_same_bits(hurt, calm)


@pytest.fixture(scope="module")
def coded(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One worker whose changes are in 8 bits."""
    with served_by(standing_nursery):
        outcome = run(tmp_path_factory.mktemp("coded") / "run", 1, arguments=["--delta", "int8"])
    assert outcome.exit_code == 0, outcome.output
    return outcome


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(
    ("exchange", "workers", "at", "rank"),
    [
        ("shared", 2, "states.delivering", 0),
        ("gloo", 3, "local.coded", 0),
        ("two-level", 3, "committed", 2),
    ],
)
def test_a_kill_changes_no_bit_of_compressed_changes(
    exchange: str, workers: int, at: str, rank: int, coded: Outcome, tmp_path: Path
) -> None:
    """Nor of the errors of the replicas, which their next changes are made of."""
    faults = Faults().kill(f"w{rank}", step=ROUND, at=at)
    options = [*PATIENT, "--exchange", *EXCHANGES[exchange]]
    hurt = run(tmp_path / "run", workers, faults, options, ["--delta", "int8"])
    assert len(ended_workers(hurt.output)) >= 1, f"nobody was killed there:\n{hurt.output}"
    assert_same_bits(hurt, coded)


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(("at", "then"), [("local.replica_done", "committed"), ("local.copied", "local.placed")])
def test_one_loss_after_the_other_in_a_round(at: str, then: str, calm: Outcome, tmp_path: Path) -> None:
    """The survivors are interrupted again while they compute, or repeat, what the first loss has cost."""
    faults = Faults().kill("w1", step=ROUND, at=at).kill("w2", step=ROUND + (then == "local.placed"), at=then)
    hurt = run(tmp_path / "run", 3, faults, [*PATIENT, "--max-restarts", "0"])
    assert len(ended_workers(hurt.output)) == 2, hurt.output
    assert_same_bits(hurt, calm)


@pytest.mark.usefixtures("nursery")
def test_the_last_worker_computes_all_replicas(calm: Outcome, tmp_path: Path) -> None:
    faults = Faults().kill("w0", step=1, at="local.inner_step").kill("w2", step=3, at="committed")
    hurt = run(tmp_path / "run", 3, faults, [*PATIENT, "--max-restarts", "0"])
    assert_same_bits(hurt, calm)
    assert list(hurt.times[ROUNDS - 1]) == ["w1"]


@pytest.mark.usefixtures("nursery")
def test_an_error_that_passes_elsewhere(calm: Outcome, tmp_path: Path) -> None:
    """A micro-batch of a replica that raises on one worker only makes that worker the suspect, and costs no bit."""
    hurt = run(tmp_path / "run", 3, Faults().fail("w1", step=ROUND, at="before_backward"))
    assert_same_bits(hurt, calm)
    assert "is suspect: micro-batch" in hurt.output
    assert "another worker tries it" in hurt.output


@pytest.mark.usefixtures("nursery")
def test_a_state_that_is_lost_with_its_only_worker_ends_the_run(tmp_path: Path) -> None:
    """With one copy the momentum of a replica is gone with its worker. The error says from where the run can go on."""
    faults = Faults().kill("w1", step=ROUND, at="local.inner_step")
    hurt = run(tmp_path / "run", 3, faults, arguments=["--copies", 1])
    assert hurt.exit_code == 1, hurt.output
    assert "the state of replica 1 was held by w1, and all of them are lost" in hurt.output
    assert "Resume from " in hurt.output


def _hold(seat: Seat, place: Place) -> list[int]:
    with place.run(seed=3) as run:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for round_ in run.local_steps(vectors(), batch_size=16, microbatches=4, replicas=4, inner_steps=2):
            for step in round_:
                for x, y in step:
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
        own = run._tracked._own["replicas"]
        assert isinstance(own, Replicas)
        return sorted(own.now.held)


def test_a_worker_holds_the_states_of_its_replicas_and_a_few_copies() -> None:
    """Not all states lie on all workers: that would be as much memory as all replicas have."""
    held = train_on("shared", 4, _hold)
    assert [len(one) for one in held] == [2, 2, 2, 2]
    assert all(sum(replica in one for one in held) == 2 for replica in range(4))


# -- joining, and going on ---------------------------------------------------------------------------


@pytest.mark.usefixtures("nursery")
def test_a_worker_that_comes_later_takes_replicas_over(calm: Outcome, tmp_path: Path) -> None:
    """It gets the states of the replicas that it computes from then on."""
    faults = Faults().kill("w1", step=1, at="local.inner_step").delay("w0", 0.0, step=1, at="local.placed")
    hurt = run(tmp_path / "run", "2:2", faults)
    assert_same_bits(hurt, calm)
    workers = {worker for step in hurt.times.values() for worker, times in step.items() if times["leaves"]}
    assert len(workers - {"w0", "w1"}) == 1, hurt.output


@pytest.mark.usefixtures("nursery")
def test_a_checkpoint_goes_on_with_another_number_of_workers(coded: Outcome, tmp_path: Path) -> None:
    """Momentum of replicas and outer optimizer, and errors, are in it: the bits are those of a run that never ended."""
    first = run(tmp_path / "run", 3, arguments=["--delta", "int8", "--every", 2])
    assert first.digests == coded.digests
    resume = ["--resume", str(tmp_path / "run" / "checkpoints" / "step-0000000002")]
    for workers in (1, 2):
        again = run(tmp_path / f"again-{workers}", workers, None, [*PATIENT, *resume], ["--delta", "int8"])
        assert again.exit_code == 0, again.output
        assert again.digests == coded.digests
        assert again.final == coded.final


# -- what is refused ---------------------------------------------------------------------------------


def refused(
    *, match: str, error: type[Exception] = UsageError, tracked: Any = None, data: int = 32, **options: Any
) -> None:
    with AloneRun(seed=1) as run:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer, **(tracked(model) if tracked is not None else {}))
        given = {"batch_size": 8, "microbatches": 4, "replicas": 2, "inner_steps": 2, **options}
        with pytest.raises(error, match=match):
            run.local_steps(vectors(data), **given)


def test_what_has_no_meaning_in_rounds_is_refused_before_training() -> None:
    refused(match="replicas must be at least 1", replicas=0)
    refused(match="inner_steps must be at least 1", inner_steps=0)
    refused(match="replicas must be a whole number, got '2'", replicas="2")
    refused(match=r"inner_steps must be a whole number, got 2\.5", inner_steps=2.5)
    refused(match="copies must be a whole number, got True", copies=True)
    refused(
        match="not be divided equally among 3 replicas|cannot be divided equally among 3", error=RecipeError, replicas=3
    )
    refused(match="drop_last=True", error=RecipeError, data=34)
    refused(match="inner_state must be", inner_state="lost")
    refused(match=r"local steps no longer have a delay.*more inner_steps=.*run\.steps\(delay=1\)", delay=1)
    refused(match="a unisono.Carried", tracked=lambda _: {"hidden": unisono.Carried(torch.zeros(4, 2))})
    refused(match="a GradScaler", tracked=lambda _: {"scaler": torch.amp.GradScaler("cpu")})
    refused(match="outer is an optimizer", outer="sgd")
    refused(match="the outer optimizer is not tracked", outer=torch.optim.SGD(mlp().parameters(), lr=1.0))


def test_a_run_without_an_optimizer_of_the_replicas_is_refused() -> None:
    with AloneRun(seed=1) as run:
        model = mlp()
        outer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, outer=outer)
        with pytest.raises(UsageError, match="a tracked optimizer of their own"):
            run.local_steps(vectors(), batch_size=8, microbatches=4, replicas=2, inner_steps=2, outer=outer)


Mistake = Callable[[unisono.Run, nn.Module, dict[str, Any]], object]
MISTAKES: dict[str, tuple[Mistake, type[Exception], str]] = {
    "outer": (
        lambda run, model, tracked: tracked["outer"].step(),
        StepError,
        r"outer.step\(\) was called by the script",
    ),
    "plateau": (
        lambda run, model, tracked: tracked["plateau"].step(time.perf_counter()),
        StepError,
        "plateau is not the same after the inner steps of replica 1 as after those of replica 0",
    ),
    "values": (
        lambda run, model, tracked: tracked["values"].update(seen=time.perf_counter()),
        StepError,
        "values is not the same",
    ),
    "average": (
        lambda run, model, tracked: tracked["average"].update_parameters(model),
        StepError,
        "an AveragedModel. was updated within",
    ),
    "freezing": (
        lambda run, model, tracked: next(model.parameters()).requires_grad_(False),
        StepError,
        "frozen or unfrozen within",
    ),
    "target": (
        lambda run, model, tracked: (
            tracked["target"].weight.data.add_(1.0) is not None and tracked["target"].weight.detach().mul_(0.5)
        ),
        StepError,
        "'target.weight' needs no gradient and was written",
    ),
    "evaluate": (
        lambda run, model, tracked: run.evaluate(vectors(), lambda batch: {"n": len(batch[0])}, batch_size=8),
        UsageError,
        "inside `for step in round`",
    ),
    "barrier": (lambda run, model, tracked: run.barrier(), UsageError, "inside `for step in round`"),
    "journal": (lambda run, model, tracked: tracked["step"].log(x=1.0), StepError, "round.log"),
}


def train_with(inside: Mistake | None) -> None:
    """Train for a round; ``inside`` is called after each step of a replica, None leaves the loop there."""
    with AloneRun(seed=1) as run:
        model, target = mlp(), nn.Linear(3, 3).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = torch.optim.SGD(model.parameters(), lr=0.7)
        tracked: dict[str, Any] = {
            "outer": outer,
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            "average": AveragedModel(model),
            "target": target,
            "values": {"seen": 0.0},
        }
        run.track(model=model, optimizer=optimizer, **tracked)
        for round_ in run.local_steps(
            vectors(), batch_size=8, microbatches=4, replicas=2, inner_steps=2, outer=outer, max_steps=2
        ):
            for step in round_:
                for x, y in step:
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if inside is None:
                    break
                inside(run, model, {**tracked, "step": step})


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_within_a_round_is_an_error_that_names_it(name: str) -> None:
    """What would make replicas, or workers, differ in anything but parameters, buffers and optimizer states."""
    inside, error, match = MISTAKES[name]
    with pytest.raises(error, match=match):
        train_with(inside)


def test_a_round_that_is_left_is_an_error() -> None:
    with pytest.raises(StepError, match="round 0 was left before its end"):
        train_with(None)


@pytest.mark.parametrize("loop", ["run.local_steps", "round"])
def test_a_batch_that_is_unpacked_one_loop_too_early_is_told_where_it_belongs(loop: str) -> None:
    def unpack() -> None:
        with AloneRun(seed=1) as run:
            model = mlp()
            run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            rounds = run.local_steps(vectors(), batch_size=8, microbatches=4, replicas=2, inner_steps=2)
            for _images, _labels in rounds if loop == "run.local_steps" else next(iter(rounds)):
                pass

    with pytest.raises(StepError, match=r"has three loops|write `for images, labels in step:` within that loop"):
        unpack()


@pytest.mark.parametrize("name", ["replicas", "inner_steps", "copies"])
def test_a_number_that_is_none_is_refused_before_the_data_are_looked_at(name: str) -> None:
    counts: dict[str, Any] = {"replicas": 2, "inner_steps": 2, "copies": 2, name: "2"}
    with AloneRun(seed=1) as run, pytest.raises(UsageError, match=f"{name} must be a whole number, got '2'"):
        run.local_steps([], batch_size=8, microbatches=4, **counts)


def test_a_round_that_is_not_run_is_an_error() -> None:
    def skip() -> None:
        with AloneRun(seed=1) as run:
            model = mlp()
            run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            for round_ in run.local_steps(vectors(), batch_size=8, microbatches=4, replicas=2, inner_steps=2):
                with pytest.raises(StepError, match=r"round.loss of round 0 is known only after"):
                    _ = round_.loss

    with pytest.raises(StepError, match="round 0 was not iterated"):
        skip()


def test_modes_and_options_are_those_of_the_boundary_for_each_replica(tmp_path: Path) -> None:
    """A replica that ends in eval() mode, or with another learning rate, does not begin the next one so."""
    seen: list[tuple[int, int, bool, float]] = []
    with AloneRun(seed=1) as run:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run.track(model=model, optimizer=optimizer)
        for round_ in run.local_steps(vectors(), batch_size=8, microbatches=4, replicas=2, inner_steps=2):
            for step in round_:
                seen.append((round_.number, step.number, model.training, optimizer.param_groups[0]["lr"]))
                for x, y in step:
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.5
                model.eval()
            assert model.training
            assert optimizer.state == {}
            optimizer.param_groups[0]["lr"] += 1.0
    assert seen == [
        *[(0, 0, True, 1.0), (0, 1, False, 0.5)] * 2,
        *[(1, 2, True, 1.25), (1, 3, False, 0.625)] * 2,
    ]
