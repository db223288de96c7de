"""Local steps on more workers than replicas: several compute a replica together, and no bit depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unisono
from tests.parts import ALL
from tests.waiting import PATIENT
from tests.workers.conftest import served_by
from tests.workers.losses import ended_workers
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from tests.workers.test_local_steps import EXCHANGES, ROUND, assert_same_bits, vectors
from tests.workers.trainings import Training
from unisono.core.errors import CheckpointError
from unisono.engine.state.packing import digest_of_tensor
from unisono.record import checkpoint_files as files
from unisono.strategies.local.replica_states import Replicas
from unisono.system.faults import POINTS
from unisono.testing import Faults, Outcome

pytestmark = pytest.mark.more

ELSEWHERE = ("local.coded", "local.grouped", "local.ungrouped")
AT = [
    *(at for at in POINTS if at.startswith("local.") and at not in ELSEWHERE),
    *("states.delivering", "before_backward", "after_backward", "before_combine", "published", "reduced", "committed"),
    *("in_sums", "after_step"),
]


def run(
    directory: Path,
    workers: int | str,
    faults: Faults | None = None,
    options: Sequence[str] = PATIENT,
    *,
    replicas: int = 2,
    arguments: Sequence[object] = (),
) -> Outcome:
    return Training("local_training.py", "--replicas", replicas)(directory, workers, faults, options, arguments)


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    """One worker to which nothing happens, by number of replicas."""
    found = {}
    with served_by(standing_nursery):
        for replicas in (2, 3):
            found[replicas] = run(tmp_path_factory.mktemp("calm") / "run", 1, replicas=replicas)
            assert found[replicas].exit_code == 0, found[replicas].output
    return found


def cases() -> list[tuple[str, int, int, str, int]]:
    every = [
        (exchange, workers, replicas, at, rank)
        for exchange in EXCHANGES
        for workers, replicas in ((3, 2), (4, 2), (4, 3), (5, 2), (5, 3))
        for at in AT
        for rank in range(workers)
    ]
    if ALL:
        return every
    names = list(EXCHANGES)
    chosen = ("local.inner_step", "published", "committed", "local.placed", "local.copied", "states.delivering")
    return [(names[number % 3], 4 + number % 2, 2, at, number % 3) for number, at in enumerate(chosen)]


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(("exchange", "workers", "replicas", "at", "rank"), cases())
def test_a_kill_changes_no_bit(
    exchange: str, workers: int, replicas: int, at: str, rank: int, calm: dict[int, Outcome], tmp_path: Path
) -> None:
    """The rest of its group leaves the replica, the other groups finish theirs; then all survivors compute it again."""
    faults = Faults().kill(f"w{rank}", step=ROUND, at=at)
    hurt = run(tmp_path / "run", workers, faults, [*PATIENT, "--exchange", *EXCHANGES[exchange]], replicas=replicas)
    assert_same_bits(hurt, calm[replicas])
    assert len(ended_workers(hurt.output)) >= 1, f"nobody was killed there:\n{hurt.output}"


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_worker_computes(exchange: str, calm: dict[int, Outcome], tmp_path: Path) -> None:
    options = [*PATIENT, "--exchange", *EXCHANGES[exchange]]
    outcome = run(tmp_path / "run", 5, options=options)
    assert_same_bits(outcome, calm[2])
    assert all(times["leaves"] for step in outcome.times.values() for times in step.values()), outcome.output
    assert all(len(step) == 5 for step in outcome.times.values())
    assert "nothing to compute" not in outcome.output


@pytest.mark.usefixtures("nursery")
def test_one_loss_after_the_other(calm: dict[int, Outcome], tmp_path: Path) -> None:
    """While the groups come together, while one has lost a member, and while the survivors form new ones."""
    faults = (
        Faults()
        .kill("w3", at="local.grouped")
        .kill("w1", step=ROUND, at="published")
        .kill("w0", step=ROUND, at="local.ungrouped")
        .kill("w4", step=ROUND, at="local.grouped")
    )
    hurt = run(tmp_path / "run", 5, faults, [*PATIENT, "--max-restarts", "0"], arguments=["--copies", 4])
    assert len(ended_workers(hurt.output)) == 4, hurt.output
    assert_same_bits(hurt, calm[2])


@pytest.mark.usefixtures("nursery")
def test_a_member_of_a_group_that_stands_still_is_left_behind(calm: dict[int, Outcome], tmp_path: Path) -> None:
    """The others of its group wait for it, and go on without it when it is evicted."""
    limits = (
        "--set",
        "report-late-after=0.4s",
        "--set",
        "go-on-without-after=2s",
        "--set",
        "kill-after=4s",
        "--set",
        "heartbeat=0.1s",
        "--set",
        "heartbeat-timeout=2s",
    )
    faults = Faults().stop("w1", step=ROUND, at="before_combine")  # where it comes to with no micro-batch as well
    hurt = run(tmp_path / "run", 4, faults, [*map(str, limits)])
    assert_same_bits(hurt, calm[2])
    assert "w1" in hurt.output


@pytest.mark.usefixtures("nursery")
def test_an_error_that_passes_elsewhere(calm: dict[int, Outcome], tmp_path: Path) -> None:
    # Evenly: where others are faster, w1 may have nothing to compute in that step.
    hurt = run(tmp_path / "run", 4, Faults().fail("w1", step=ROUND, at="before_backward"), arguments=["--even"])
    assert_same_bits(hurt, calm[2])
    assert "another worker tries it" in hurt.output


@pytest.mark.usefixtures("nursery")
def test_a_worker_that_comes_later_computes_with_others(calm: dict[int, Outcome], tmp_path: Path) -> None:
    faults = Faults().kill("w1", step=0, at="committed")
    hurt = run(tmp_path / "run", "4:4", faults, arguments=["--rounds", 5])
    assert_same_bits(hurt, calm[2])


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("arguments", [("--delta", "int8"), ("--inner-state", "fresh")])
def test_a_kill_changes_no_bit_whatever_the_replicas_keep(arguments: tuple[str, ...], tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", 1, arguments=arguments)
    hurt = run(tmp_path / "run", 4, Faults().kill("w0", step=ROUND, at="reduced"), arguments=arguments)
    assert len(ended_workers(hurt.output)) == 1, hurt.output
    assert_same_bits(hurt, alone)


@pytest.mark.usefixtures("nursery")
def test_a_checkpoint_of_groups_goes_on_on_fewer_workers(calm: dict[int, Outcome], tmp_path: Path) -> None:
    first = run(tmp_path / "run", 5, arguments=["--every", 2])
    assert_same_bits(first, calm[2])
    resume = ["--resume", str(tmp_path / "run" / "checkpoints" / "step-0000000002")]
    for workers in (1, 4):
        again = run(tmp_path / f"again-{workers}", workers, None, [*PATIENT, *resume])
        assert again.exit_code == 0, again.output
        assert again.final == calm[2].final


# -- what a worker reads of a checkpoint -----------------------------------------------------------------


def train(run: unisono.Run, max_steps: int | None = None) -> tuple[list[int], dict[str, int]]:
    """Local steps; returns which states this worker has before the first round, and the model's bits."""
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    held: list[int] | None = None
    for round_ in run.local_steps(
        vectors(), batch_size=16, microbatches=8, replicas=4, inner_steps=2, epochs=4, max_steps=max_steps
    ):
        if held is None:
            own = run._tracked._own["replicas"]
            assert isinstance(own, Replicas)
            held = sorted(own.now.held)
        for step in round_:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert held is not None
    return held, {name: digest_of_tensor(value) for name, value in model.state_dict().items()}


def _go_on(seat: Seat, place: Place, directory: Path, resume: Path) -> tuple[list[int], dict[str, int]]:
    """Every other process does not see the checkpoint."""
    options = {"resume": str(resume)} if seat.rank == 0 else {}
    if seat.rank % 2:
        files.read_manifest = _unseen
    with place.run(directory, seed=3, **options) as run:
        return train(run)


def _unseen(checkpoint: Path) -> files.Manifest:
    raise CheckpointError(f"{checkpoint} is on another machine")


@pytest.mark.parametrize(("kind", "size"), [("shared", 2), ("gloo", 4), ("two-level", 5)])
def test_a_worker_reads_the_states_of_a_checkpoint_that_it_will_hold(kind: str, size: int, tmp_path: Path) -> None:
    """Those of the replicas that it computes, and its copies; those that do not see the checkpoint are sent them."""
    with AloneRun(tmp_path / "whole", seed=3) as run:
        _, expected = train(run)
    with AloneRun(tmp_path / "half", seed=3, checkpoint=unisono.Checkpoints(every_steps=1)) as run:
        train(run, 4)
    found = train_on(kind, size, _go_on, tmp_path / "rest", tmp_path / "half")
    assert all(bits == expected for _, bits in found)
    counts = Counter(replica for held, _ in found for replica in held)
    assert counts == dict.fromkeys(range(4), 2), "two copies of each"
    assert max(len(held) for held, _ in found) <= 8 // min(size, 4) + 1
