"""Local steps with a delay: the same bits on any number of workers, with a change under way when one is lost."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.waiting import PATIENT
from tests.workers.conftest import served_by
from tests.workers.losses import ended_workers
from tests.workers.static_team import AloneRun
from tests.workers.test_local_steps import EXCHANGES
from tests.workers.test_local_steps import assert_same_bits as assert_same_rounds
from tests.workers.trainings import Training
from unisono.errors import StepError, UsageError
from unisono.testing import Faults, Outcome

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

run = Training("local_training.py", "--delay", 1)
ROUNDS = 5
ROUND = 2
IN_THREAD = ("published", "reduced", "local.copied")
"""Points of the thread that sums, while the script is in any round: counted, and not by the round of the script."""
AT = [
    "step_head",
    "before_backward",
    "after_backward",
    *IN_THREAD,
    "committed",
    "after_step",
    "local.placed",
    "local.inner_step",
    "local.replica_done",
    "delay.under_way",
    "delay.waiting",
    "delay.applied",
    "delay.again",
    "in_recovery",
]
Case = tuple[str, int, str, int]
"""Exchange, number of workers, point, rank."""
KINDS = {"kept": [], "int8": ["--delta", "int8"], "fresh": ["--inner-state", "fresh", "--average"]}


def cases() -> Iterator[Case]:
    if os.environ.get("UNISONO_TEST_ALL"):
        for exchange in EXCHANGES:
            for workers in (2, 3, 4):
                for at in AT:
                    for rank in range(min(workers, 3)):
                        yield exchange, workers, at, rank
        return
    names = list(EXCHANGES)
    points = ["local.copied", "local.replica_done", "reduced", "committed", *(at for at in AT if "delay." in at)]
    for number, at in enumerate(points):
        yield names[number % 3], 2 + number % 2, at, number % 2


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """By kind, one worker to which nothing happens."""
    found = {}
    for kind, arguments in KINDS.items():
        with served_by(standing_nursery):
            found[kind] = outcome = run(tmp_path_factory.mktemp("calm") / "run", 1, arguments=arguments)
        assert outcome.exit_code == 0, outcome.output
        assert len(set(outcome.digests)) == ROUNDS
    return found


def assert_same_bits(hurt: Outcome, calm: Outcome) -> None:
    """As without a delay, and with every line of the journal once."""
    assert_same_rounds(hurt, calm)
    assert [line["line"] for line in hurt.lines] == list(range(len(calm.lines))), "a line is missing, or there twice"


@pytest.mark.parametrize(
    ("kind", "exchange", "workers"),
    [("kept", "two-level", 4), ("int8", "gloo", 3), ("fresh", "shared", 2)],
)
def test_a_team_gives_the_bits_of_one_worker(
    kind: str, exchange: str, workers: int, calm: dict[str, Outcome], tmp_path: Path
) -> None:
    """With fewer workers than replicas, as many, and more."""
    options = [*PATIENT, "--exchange", *EXCHANGES[exchange]]
    assert_same_bits(run(tmp_path / "run", workers, None, options, KINDS[kind]), calm[kind])


@pytest.mark.parametrize(("exchange", "workers", "at", "rank"), list(cases()))
def test_a_kill_changes_no_bit(
    exchange: str, workers: int, at: str, rank: int, calm: dict[str, Outcome], tmp_path: Path
) -> None:
    """Whoever is killed, wherever it is: the others finish the round under way, and all that follow."""
    options = [*PATIENT, "--exchange", *EXCHANGES[exchange]]
    if at in ("in_recovery", "delay.again"):
        first = (rank + 1) % workers
        faults = Faults().kill(f"w{first}", step=ROUND, at="local.replica_done").kill(f"w{rank}", at=at)
        options, num_lost = [*options, "--max-restarts", "0"], 2
    elif at in IN_THREAD:
        faults, num_lost = Faults().kill(f"w{rank}", at=at, skip=ROUND), 1
    else:
        faults, num_lost = Faults().kill(f"w{rank}", step=ROUND, at=at), 1
    arguments = ["--copies", 3] if num_lost == 2 else []
    hurt = run(tmp_path / "run", max(workers, 1 + num_lost), faults, options, arguments)
    assert len(ended_workers(hurt.output)) >= num_lost, f"nobody was killed there:\n{hurt.output}"
    assert_same_bits(hurt, calm["kept"])


@pytest.mark.parametrize("seed", range(120) if os.environ.get("UNISONO_TEST_ALL") else (1,))
def test_two_losses_at_any_points_change_no_bit(seed: int, calm: dict[str, Outcome], tmp_path: Path) -> None:
    """The second while the others make up for the first: whoever has seen a commit sends the change to the others."""
    draw = random.Random(seed)
    exchange, workers, kind = draw.choice(list(EXCHANGES)), 3, draw.choice(list(KINDS))
    first, second = draw.sample(range(workers), 2)
    after_computing = ("local.replica_done", "delay.under_way", "delay.waiting", "delay.applied", "after_step")
    faults = Faults().kill(f"w{first}", step=draw.randrange(1, ROUNDS), at=draw.choice(after_computing))
    faults = faults.kill(f"w{second}", at=draw.choice(["delay.again", "in_recovery", "delay.waiting", "committed"]))
    options = [*PATIENT, "--exchange", *EXCHANGES[exchange]]
    hurt = run(tmp_path / "run", workers, faults, options, ["--copies", 3, *KINDS[kind]])
    assert ended_workers(hurt.output), hurt.output
    assert_same_bits(hurt, calm[kind])


@pytest.mark.parametrize(
    ("step", "at", "rank"),
    [(0, "local.replica_done", 1), (ROUNDS, "delay.waiting", 1)],
)
def test_a_kill_in_the_first_and_the_last_iteration(
    step: int, at: str, rank: int, calm: dict[str, Outcome], tmp_path: Path
) -> None:
    """In the last one, which has no steps of its own, the others compute what is missing of the last round."""
    hurt = run(tmp_path / "run", 3, Faults().kill(f"w{rank}", step=step, at=at), [*PATIENT, "--max-restarts", "0"])
    assert len(ended_workers(hurt.output)) == 1, hurt.output
    assert_same_bits(hurt, calm["kept"])


def test_a_newcomer_gets_the_change_under_way(calm: dict[str, Outcome], tmp_path: Path) -> None:
    """With a minimum of workers, the others wait for the newcomer at a boundary."""
    hurt = run(tmp_path / "run", "2:2", Faults().kill("w1", step=1, at="local.inner_step"))
    assert len(ended_workers(hurt.output)) == 1, hurt.output
    assert_same_bits(hurt, calm["kept"])
    assert "w2" in hurt.times[ROUNDS - 1], hurt.output


@pytest.mark.parametrize("kind", ["int8"])
def test_a_checkpoint_goes_on_with_another_number_of_workers(
    kind: str, calm: dict[str, Outcome], tmp_path: Path
) -> None:
    """The change under way, and each replica's own, are in it; the bits are those of a run that never ended."""
    arguments = [*KINDS[kind], "--every", 2]
    first = run(tmp_path / "run", 3, arguments=arguments)
    assert first.digests == calm[kind].digests, first.output
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(checkpoints) >= 2, first.output
    resume = ["--resume", str(checkpoints[0])]
    for workers in (1, 2):
        again = run(tmp_path / f"again-{workers}", workers, None, [*PATIENT, *resume], arguments)
        assert again.exit_code == 0, again.output
        assert again.digests == calm[kind].digests, again.output
        assert again.final == calm[kind].final


def test_a_state_that_is_lost_with_its_only_worker_ends_the_run(tmp_path: Path) -> None:
    """With one copy a replica's state is gone with its worker. The error says from where the run can go on."""
    hurt = run(tmp_path / "run", 3, Faults().kill("w1", step=ROUND, at="local.inner_step"), PATIENT, ["--copies", "1"])
    assert hurt.exit_code == 1, hurt.output
    assert "the state of replica 1 was held by w1, and all of them are lost" in hurt.output


# -- what is computed --------------------------------------------------------------------------------


def vectors() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(32, 12, generator=draw), torch.randint(0, 4, (32,), generator=draw))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("has_outer", [False, True])
def test_the_bits_are_those_of_the_definition_in_plain_torch(has_outer: bool) -> None:
    """Four models with four optimizers: each goes on with its own change, and gets the mean one round later. All
    numbers of samples are powers of two, so no weight rounds anything.
    """
    data, order, seen = vectors(), list[list[int]](), list[tuple[int, int, float]]()
    with AloneRun(seed=5) as run:
        model = mlp()
        begin = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler, outer=outer)
        rounds = run.local_steps(
            data,
            batch_size=16,
            microbatches=4,
            replicas=4,
            inner_steps=2,
            outer=outer if has_outer else None,
            epochs=3,
            delay=1,
        )
        for round_ in rounds:
            number = 0
            for step in round_:
                number += 1
                for x, y in step:
                    order.append(step.indices.tolist())
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
            seen.append((round_.number, number, scheduler.get_last_lr()[0]))
    lr = 0.01
    assert seen == [(0, 8, lr), (1, 8, lr / 4), (2, 8, lr / 16), (3, 0, lr / 64)], "the rate of a round ago"

    ours = mlp()
    ours.load_state_dict(begin)
    outer = torch.optim.SGD(ours.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    models = [copy.deepcopy(ours) for _ in range(4)]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=lr) for one in models]
    own: list[list[Tensor]] = []
    means: list[Tensor] = []

    def update() -> None:
        for parameter, mean in zip(ours.parameters(), means, strict=True):
            parameter.grad = mean
            if not has_outer:
                with torch.no_grad():
                    parameter -= mean
        if has_outer:
            outer.step()

    x, y = data.tensors
    places = iter(order)
    for round_number in range(3):
        changes = []
        for k, (one, inner) in enumerate(zip(models, optimizers, strict=True)):
            with torch.no_grad():
                for index, (there, here) in enumerate(zip(one.parameters(), ours.parameters(), strict=True)):
                    there.copy_(here - own[k][index] if own else here)
            starts = [parameter.detach().clone() for parameter in one.parameters()]
            for number in range(2):
                inner.param_groups[0]["lr"] = lr * 0.5 ** (2 * round_number + number)
                sample = torch.tensor(next(places))
                inner.zero_grad()
                F.cross_entropy(one(x[sample]), y[sample]).backward()
                inner.step()
            changes.append([a - b.detach() for a, b in zip(starts, one.parameters(), strict=True)])
        if own:
            update()
        own = changes
        means = [((a + b) + (c + d)) / 4 for a, b, c, d in zip(*changes, strict=True)]
    update()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ours.parameters(), strict=True))


def train(body: Any = None, **options: Any) -> dict[str, Tensor]:
    with AloneRun(seed=5) as run:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        values = {"seen": 0}
        run.track(model=model, optimizer=optimizer, values=values)
        for call in range(2):
            given = {"microbatches": 4, "batch_size": 16, "replicas": 2, "inner_steps": 2, "epochs": 3, **options}
            for round_ in run.local_steps(vectors(), **given):
                for step in round_:
                    for x, y in step:
                        F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    if body is not None:
                        body("step", values)
                if body is not None and body("round", values):
                    break
            if call == 0 and options.get("delay"):
                assert not optimizer.state
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_a_loop_that_is_left_drops_the_change_under_way_and_the_next_one_begins_anew() -> None:
    rounds = 0

    def leave(where: str, values: dict[str, int]) -> bool:
        nonlocal rounds
        rounds += where == "round"
        return where == "round" and rounds == 2

    first = train(leave, delay=1)
    rounds = 0
    assert all(
        torch.equal(one, other) for one, other in zip(first.values(), train(leave, delay=1).values(), strict=True)
    )


def test_what_replicas_change_must_not_be_changed_between_two_rounds() -> None:
    """The replicas are a round ahead of it."""

    def change(where: str, values: dict[str, int]) -> None:
        values["seen"] += 1

    with pytest.raises(StepError, match="values was changed after `for step in round` of round 0"):
        train(change, delay=1)


def test_only_a_delay_of_one_round_is_there() -> None:
    with pytest.raises(UsageError, match=r"delay of run\.local_steps is 0, or 1"):
        train(delay=2)
