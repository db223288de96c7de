"""A `DataLoader` is taken as it is; samplers give the same samples in the same order on any number of workers."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import unisono
from tests.workers.gates import Gates
from tests.workers.models import Cnn, Images, bits_of
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.cursor import Cursor
from unisono.core.errors import RecipeError
from unisono.core.orders import Sequential
from unisono.core.plan import Plan, plan
from unisono.engine.loop.strategies import Upcoming
from unisono.engine.microbatch.data import Fetcher, Loading, Request, to_device
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.members import Members
from unisono.engine.rounds.team import Team
from unisono.engine.state.tracked import Tracked
from unisono.record.journal import compare
from unisono.record.journal.times import by_step
from unisono.script.schedule import Asked, schedule
from unisono.testing import Faults, run_workers

pytestmark = pytest.mark.more

CPU = torch.device("cpu")
LENGTHS = [(17 * index) % 23 for index in range(21)]
WEIGHTS = [float(index % 4) for index in range(21)]
names = itertools.count()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Draws(Dataset[Tensor]):
    """Of each sample its index, and what the generators give for it."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()), numpy.random.rand(), random.random()], dtype=torch.float64)


def train(run: unisono.Run, data: Any, calls: int = 1, **options: Any) -> Iterator[tuple[unisono.Step, Any]]:
    """Every micro-batch that falls to this worker, of so many calls of `run.steps`."""
    weight = nn.Parameter(torch.ones(()))
    run.track(**{f"model{next(names)}": nn.ParameterList([weight])})
    for _ in range(calls):
        for step in run.steps(data, **{"microbatches": 4, **options}):
            for batch in step:
                yield step, batch
                step.backward(weight * 1.0)


def rows(data: Any, calls: int = 1, **options: Any) -> list[list[float]]:
    """Of each sample that a lone worker gets: [epoch, index, draws ...]."""
    with AloneRun(seed=1) as run:
        found = train(run, data, calls, **options)
        return [[step.epoch, *row] for step, batch in found for row in batch.tolist()]


def indices(data: Any, calls: int = 1, **options: Any) -> list[list[int]]:
    """By epoch."""
    found = rows(data, calls, **options)
    return [[int(row[1]) for row in found if row[0] == epoch] for epoch in sorted({row[0] for row in found})]


# -- a DataLoader ------------------------------------------------------------------------------------


def as_list(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples[::-1])


@pytest.mark.parametrize(
    ("of_loader", "of_steps"),
    [
        ({"batch_size": 8}, {"batch_size": 8, "shuffle": False}),
        ({"batch_size": 8, "shuffle": True}, {"batch_size": 8}),
        ({"batch_size": 4, "drop_last": True}, {"batch_size": 4, "shuffle": False, "drop_last": True}),
        ({"batch_size": 8, "collate_fn": as_list}, {"batch_size": 8, "shuffle": False, "collate": as_list}),
        ({"batch_size": 8, "num_workers": 2, "prefetch_factor": 3}, {"batch_size": 8, "shuffle": False}),
        (
            {"batch_sampler": BatchSampler(SequentialSampler(range(21)), 8, drop_last=True)},
            {"batch_size": 8, "shuffle": False, "drop_last": True},
        ),
        ({"batch_size": 8, "sampler": range(21)[::2]}, {"batch_size": 8, "sampler": [*range(0, 21, 2)]}),
    ],
)
def test_a_loader_means_what_its_arguments_say(of_loader: dict[str, Any], of_steps: dict[str, Any]) -> None:
    loader: DataLoader[Any] = DataLoader(Draws(), **of_loader)
    assert rows(loader, epochs=2) == rows(Draws(), epochs=2, **of_steps)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"batch_size": 8}, "batch_size="), ({"shuffle": False}, "shuffle="), ({"collate": as_list}, "collate=")],
)
def test_what_the_loader_says_cannot_be_said_again(options: dict[str, Any], named: str) -> None:
    with pytest.raises(RecipeError, match=f"run.steps got a DataLoader and {named}: a DataLoader has its own"):
        rows(DataLoader(Draws(), batch_size=8), **options)


def test_the_batch_size_is_needed_from_somewhere() -> None:
    with pytest.raises(RecipeError, match=r"run\.steps needs batch_size="):
        rows(Draws())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(Stream(), batch_size=2), "data that can only be iterated over, whose length is unknown"),
        (DataLoader(Draws(), batch_size=None), "the DataLoader has batch_size=None"),
        (OwnIteration(Draws(), batch_size=8), "the loader is a OwnIteration, .*overrides __iter__.*the dataset itself"),
        (
            DataLoader(Draws(), batch_sampler=OwnBatches(range(21), 8, False)),
            r"batch_sampler of an unknown kind \(OwnBatches\).*unisono.BucketSampler",
        ),
    ],
)
def test_loaders_whose_batches_cannot_be_known(loader: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        rows(loader)
    with pytest.raises(RecipeError, match=words), AloneRun() as run:
        run.evaluate(loader, lambda batch: {"n": len(batch)})


# -- samplers ----------------------------------------------------------------------------------------


def test_a_distributed_sampler_is_a_shuffle_of_everything() -> None:
    """A script that was written for DistributedDataParallel: Unisono divides the data itself."""
    for shuffle in (True, False):
        sampler = DistributedSampler(Draws(), num_replicas=3, rank=1, shuffle=shuffle, seed=5)
        sampler.set_epoch(9)
        loader: DataLoader[Any] = DataLoader(Draws(), batch_size=8, sampler=sampler)
        assert rows(loader) == rows(Draws(), batch_size=8, shuffle=shuffle)


def test_a_weighted_sampler() -> None:
    drawn = indices(Draws(), sampler=WeightedRandomSampler(WEIGHTS, 2000), batch_size=8)[0]
    counts = Counter(WEIGHTS[index] for index in drawn)
    assert len(drawn) == 2000
    assert counts.keys() == {1.0, 2.0, 3.0}
    means = {weight: 2000 * WEIGHTS.count(weight) * weight / sum(WEIGHTS) for weight in counts}
    assert all(abs(counts[weight] - mean) < 6 * mean**0.5 for weight, mean in means.items())
    once = indices(Draws(), sampler=WeightedRandomSampler(WEIGHTS, 9, replacement=False), batch_size=8, epochs=2)
    assert [len(set(epoch)) for epoch in once] == [9, 9]
    assert all(WEIGHTS[index] > 0 for epoch in once for index in epoch)
    assert once[0] != once[1]


def test_the_same_sample_is_augmented_otherwise_each_time_that_it_is_drawn() -> None:
    found = rows(Draws(), sampler=RandomSampler(range(3), replacement=True, num_samples=40), batch_size=8)
    assert {row[1] for row in found} == {0, 1, 2}
    assert len({row[2] for row in found}) == 40


def test_a_random_sampler_with_a_number_of_samples() -> None:
    (less,) = indices(Draws(), sampler=RandomSampler(Draws(), num_samples=10), batch_size=8)
    (more,) = indices(Draws(), sampler=RandomSampler(Draws(), num_samples=30), batch_size=8)
    assert len(less) == len(set(less)) == 10
    assert sorted(more[:21]) == list(range(21))
    assert len(more) == 30


def test_a_subset_is_shuffled() -> None:
    first, second = indices(Draws(), sampler=SubsetRandomSampler([2, 3, 5, 7, 11, 13]), batch_size=4, epochs=2)
    assert sorted(first) == sorted(second) == [2, 3, 5, 7, 11, 13]
    assert first != second


def test_a_trial_has_batches_of_another_size_wherever_the_script_has_said_its_own() -> None:
    sampler = unisono.BucketSampler(LENGTHS, batch_size=6, pool=3)
    loader = DataLoader(Images(21), batch_size=6, sampler=sampler)
    made = schedule(loader, "run.steps", microbatches=1, seed=5, resized=4, asked=Asked())
    assert (made.cursor.batch_size, made.num_steps) == (4, 6)
    own = unisono.BucketSampler(LENGTHS, batch_size=4, pool=3).order
    assert [*made.cursor.order.epoch(5, 0)] == [*own.epoch(5, 0)]


def test_batches_of_like_lengths() -> None:
    sampler = unisono.BucketSampler(torch.tensor(LENGTHS), batch_size=4)
    (found,) = indices(Draws(), sampler=sampler)  # the batch size is that of the sampler
    assert sorted(found) == list(range(21))
    by_length = sorted(LENGTHS[index] for index in found[:20])
    batches = [sorted(LENGTHS[index] for index in found[start : start + 4]) for start in range(0, 20, 4)]
    assert sorted(batches) == [by_length[start : start + 4] for start in range(0, 20, 4)]
    loader: DataLoader[Any] = DataLoader(Draws(), batch_size=4, sampler=sampler)
    assert indices(loader) == [found]


def test_a_bucket_sampler_works_without_unisono() -> None:
    sampler = unisono.BucketSampler(LENGTHS, batch_size=4, seed=3)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append([int(row[0]) for batch in DataLoader(Draws(), batch_size=4, sampler=sampler) for row in batch])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(len(sampler)))
    assert orders[0] != orders[1]


class Own(Sampler[int]):
    """A sampler of the script's, with an order from ``draw``."""

    def __init__(self, draw: Callable[[Own], list[int]], length: int = 21) -> None:
        self.draw, self.length, self.epoch = draw, length, -1
        self.generator = torch.Generator()
        self.state = list(range(21))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(self))


PURE = {
    "torch": lambda sampler: torch.randperm(21).tolist(),
    "numpy": lambda sampler: numpy.random.permutation(21),
    "random": lambda sampler: random.sample(range(21), 21),
    "a generator among its attributes": lambda sampler: torch.randperm(21, generator=sampler.generator),
    "set_epoch": lambda sampler: torch.randperm(21, generator=torch.Generator().manual_seed(sampler.epoch)).tolist(),
}


@pytest.mark.parametrize("kind", PURE)
def test_a_sampler_of_the_scripts_own(kind: str) -> None:
    """Its orders differ from epoch to epoch, and are the same whichever epochs were asked for before."""
    both = indices(Draws(), sampler=Own(PURE[kind]), batch_size=8, epochs=2)
    assert [sorted(epoch) for epoch in both] == [list(range(21))] * 2
    assert both[0] != both[1]
    with AloneRun(seed=1) as run:
        run.track(other=nn.Linear(1, 1))
        run.steps(Draws(), batch_size=8, microbatches=4)  # skipped, as a newcomer skips it
        found = train(run, Draws(), sampler=Own(PURE[kind]), batch_size=8)
        assert [int(row[0]) for _, batch in found for row in batch] == both[1]


def test_listing_a_sampler_leaves_the_generators_as_they_are() -> None:
    def draw(own: Own) -> list[int]:
        random.random(), numpy.random.rand(), torch.rand(())
        return torch.randperm(21, generator=own.generator).tolist()

    def state() -> list[Any]:
        return [torch.get_rng_state(), sampler.generator.get_state(), random.getstate(), numpy.random.get_state()[1:3]]

    sampler = Own(draw)
    with AloneRun(seed=1) as run:
        run.track(model=nn.Linear(1, 1))
        before = bits_of(state())
        run.steps(Draws(), sampler=sampler, batch_size=8, microbatches=4)
        assert bits_of(state()) == before


def shuffles_in_place(sampler: Own) -> list[int]:
    random.shuffle(sampler.state)
    return list(sampler.state)


class Sized:
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (Own(shuffles_in_place), "the sampler Own gave two different orders for epoch 0.*keeps state"),
        (Own(lambda _: numpy.random.default_rng().permutation(21)), "two different orders for epoch 0"),
        (Own(lambda _: list(range(20))), "gave 20 samples for epoch 0, and its length is 21"),
        (Own(lambda _: list(range(1, 22))), "gave the sample index 21, and the dataset has 21 samples"),
        (Own(lambda _: [[1, 2], [3]], 2), "gave values of type list; .*unisono.BucketSampler"),  # type: ignore[list-item]
        ([], "the sampler gives no samples"),
        (iter(range(21)), "the sampler is a range_iterator, and needs __iter__ .* and __len__"),
        (WeightedRandomSampler([1.0] * 22, 5), "made for 22 samples, and the dataset has 21"),
        (SubsetRandomSampler([3, 21]), "made for 22 samples, and the dataset has 21"),
        (unisono.BucketSampler(LENGTHS, batch_size=4), "made for batches of 4 samples, and batch_size is 8"),
        (
            type("Part", (DistributedSampler,), {})(Draws(), num_replicas=3, rank=1),
            "the sampler is a Part with num_replicas=3.*make it with num_replicas=1, rank=0",
        ),
    ],
)
def test_samplers_whose_order_cannot_be_known(sampler: Any, words: str) -> None:
    """Said by `run.steps` itself, before anything is trained."""
    with pytest.raises(RecipeError, match=words):
        rows(Draws(), sampler=sampler, batch_size=8)


def test_a_sampler_decides_alone() -> None:
    with pytest.raises(RecipeError, match="got sampler= and shuffle=True"):
        rows(Draws(), sampler=range(21), shuffle=True, batch_size=8)


def test_an_epoch_of_another_length_is_refused_when_it_comes() -> None:
    sampler = Own(lambda own: list(range(21 - max(own.epoch, 0) // 2)))
    with pytest.raises(RecipeError, match="gave 20 samples for epoch 2, and its length is 21"):
        rows(Draws(), sampler=sampler, batch_size=8, epochs=3)


# -- several workers ---------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[], DataLoader[Any]]] = {
    "weighted": lambda: DataLoader(Draws(), 8, sampler=WeightedRandomSampler(WEIGHTS, 30)),
    "buckets": lambda: DataLoader(Draws(), 8, sampler=unisono.BucketSampler(LENGTHS, batch_size=8), num_workers=1),
    "own": lambda: DataLoader(Draws(), 8, sampler=Own(PURE["torch"])),
}


def _rows(seat: Seat, place: Place, kind: str) -> list[list[float]]:
    with place.run(seed=1, deterministic=False) as run:  # so that no micro-batch is computed twice, to compare it
        found = train(run, SOURCES[kind](), 2)
        return [[step.number, step.epoch, *row] for step, batch in found for row in batch.tolist()]


@pytest.mark.parametrize("kind", SOURCES)
def test_any_number_of_workers_shares_the_same_samples(kind: str) -> None:
    (alone,) = train_on("shared", 1, _rows, kind)
    assert sorted({row[1] for row in alone}) == [0, 1]
    by_rank = train_on("shared", 3, _rows, kind)
    assert sorted(row for found in by_rank for row in found) == sorted(alone)
    assert all(0 < len(found) < len(alone) for found in by_rank)


SCRIPT = """
import random, sys, torch, unisono
from pathlib import Path
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
sys.path.insert(0, HERE)
from tests.workers.disk import wait_for_disk
from tests.workers.gates import wait_at

kind, gates = sys.argv[1], Path(sys.argv[2])
with unisono.Run(seed=3, checkpoint=unisono.Checkpoints(every_steps=2)) as run:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(54, 12, generator=generator), torch.randint(0, 4, (54,), generator=generator))
    model = torch.nn.Sequential(torch.nn.Linear(12, 33), torch.nn.Dropout(0.2), torch.nn.Linear(33, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    weights = [1.0 + (index % int(WEIGHT)) for index in range(54)]
    sampler = (
        WeightedRandomSampler(weights, 60) if kind == "weighted" else unisono.BucketSampler(weights, batch_size=16)
    )
    loader = DataLoader([data[index] for index in range(54)], batch_size=16, sampler=sampler, num_workers=1)
    for epoch in range(3):
        for step in run.steps(loader, microbatches=8):
            assert step.epoch == epoch
            number = step.number
            assert number != int(sys.argv[3]), "the power fails"
            wait_at(gates / str(number))
            wait_for_disk(run)
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
"""


def write(folder: Path, weight: int = 5) -> Path:
    script = folder / "train.py"
    script.write_text(f"HERE, WEIGHT = {str(Path(__file__).parents[2])!r}, {weight}\n{SCRIPT}")
    return script


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("kind", ["weighted", "buckets"])
def test_a_kill_a_newcomer_and_a_resume_in_the_middle_of_an_epoch(
    kind: str, tmp_path: Path, unisono: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement has skipped an epoch, and the run that goes on another one: both count epochs alike."""
    script, arguments = write(tmp_path), [kind, "/nonexistent"]
    calm, hurt, again = tmp_path / "calm", tmp_path / "hurt", tmp_path / "again"
    assert run_workers(script, 1, directory=calm, arguments=[*arguments, "-1"]).exit_code == 0
    with monkeypatch.context() as patch:
        for name, value in Faults().kill("w1", at="before_combine", step=1).environment().items():
            patch.setenv(name, value)
        with Gates(tmp_path / "gates", (7,)) as gates:
            command = unisono("run", script, "-n", 3, "--run-dir", hurt, "--", kind, gates.folder, -1)
            gates.wait(7)
            gates.open(7, command.generation("w3 joins"))
            assert command.wait() == 0, command.err
    assert compare(calm, hurt).startswith("identical: 12 steps")
    assert len(by_step(hurt)[11]) == 3

    assert run_workers(script, 2, directory=again, arguments=[*arguments, "7"]).exit_code == 1
    options = ["--resume", str(again)]
    end = run_workers(script, 3, directory=again, arguments=[*arguments, "-1"], options=options)
    assert end.exit_code == 0, end.output
    assert "resuming at step 6" in end.output
    assert compare(calm, again).startswith("identical: 12 steps")


@pytest.mark.usefixtures("nursery")
def test_other_weights_are_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    directory, arguments = tmp_path / "run", ["weighted", "/nonexistent"]
    assert run_workers(write(tmp_path), 1, directory=directory, arguments=[*arguments, "7"]).exit_code == 1
    script, options = write(tmp_path, weight=6), ["--resume", str(directory)]
    end = run_workers(script, 1, directory=directory, arguments=[*arguments, "-1"], options=options)
    assert end.exit_code == 1
    assert "was made with a different recipe" in end.output
    assert "order  drawn by weights" in end.output


# -- epochs ------------------------------------------------------------------------------------------


def test_a_call_for_each_epoch_gives_what_one_call_for_all_gives() -> None:
    """The same order and the same augmentation, another one in each epoch."""
    one = rows(Draws(), batch_size=8, epochs=3)
    assert rows(Draws(), 3, batch_size=8) == one
    assert rows(DataLoader(Draws(), 8, shuffle=True, num_workers=1), 3) == one
    assert [row[0] for row in one] == [0] * 21 + [1] * 21 + [2] * 21
    assert len({tuple(row[1] for row in one if row[0] == epoch) for epoch in range(3)}) == 3
    assert len({row[2] for row in one}) == 63


def _trained(seat: Seat, place: Place, calls: int) -> str:
    with place.run(seed=1) as run:
        model = Cnn()
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        loader = DataLoader(Images(), batch_size=24, shuffle=True)
        for _ in range(calls):
            for step in run.steps(loader, microbatches=6, epochs=2 // calls):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                optimizer.step()
    return bits_of(model.state_dict())


def test_a_model_is_trained_to_the_same_bits_by_one_call_or_by_a_call_for_each_epoch() -> None:
    assert train_on("shared", 2, _trained, 2) == train_on("shared", 1, _trained, 1) * 2


def test_epochs_that_max_steps_cuts_count_as_begun() -> None:
    """By what the script asks for, so that a worker that skips a call counts alike."""
    with AloneRun(seed=1) as run:
        epochs = []
        for options in ({"max_steps": 1}, {"epochs": 10, "max_steps": 4}, {"epochs": 2}, {"max_steps": 0}, {}):
            epochs.append([step.epoch for step, _ in train(run, Draws(), batch_size=8, **options)][::4])
    assert [sorted(set(found)) for found in epochs] == [[0], [1, 2], [3, 4], [], [5]]


def test_steps_know_their_number() -> None:
    """For a progress bar."""
    with AloneRun(seed=1) as run:
        run.track(model=nn.Linear(1, 1))
        assert len(run.steps(Draws(), batch_size=8, microbatches=4, epochs=2)) == 6
        assert len(run.steps(Draws(), batch_size=8, microbatches=4, epochs=2, drop_last=True)) == 4
        assert len(run.steps(Draws(), batch_size=8, microbatches=4, max_steps=2)) == 2
        steps = run.steps(Draws(), batch_size=8, microbatches=4)
        assert iter(steps) is steps


# -- evaluation --------------------------------------------------------------------------------------


def _seen(batch: Tensor) -> dict[str, Any]:
    return {"samples": len(batch), "sum": int(batch[:, 0].sum())}


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({}, range(21)),
        ({"drop_last": True}, range(16)),
        ({"shuffle": True, "num_workers": 1}, range(21)),
        ({"sampler": SubsetRandomSampler([2, 3, 5])}, [2, 3, 5]),
        ({"sampler": [4, 4, 1]}, [4, 4, 1]),
    ],
)
def test_an_evaluation_takes_a_loader(options: dict[str, Any], samples: Any) -> None:
    with AloneRun(seed=1) as run:
        totals = run.evaluate(DataLoader(Draws(), batch_size=8, **options), _seen)
    assert totals == {"samples": len(samples), "sum": sum(samples)}


def test_an_evaluation_of_nothing_is_refused() -> None:
    with AloneRun(seed=1) as run, pytest.raises(RecipeError, match="drop_last=True leaves nothing of 21 samples"):
        run.evaluate(DataLoader(Draws(), batch_size=22, drop_last=True), _seen)


# -- batches -----------------------------------------------------------------------------------------


class Graphs:
    """A batch of graphs, as libraries for them have it: neither a tensor nor a container."""

    def __init__(self, nodes: Tensor, edges: Tensor) -> None:
        self.nodes, self.edges = nodes, edges

    def to(self, device: torch.device) -> Graphs:
        return Graphs(self.nodes.to(device), self.edges.to(device))


class Pair(NamedTuple):
    x: Tensor
    y: Any


def test_a_collate_that_makes_objects() -> None:
    """Graphs of several sizes, joined into one."""

    def join(samples: list[Tensor]) -> Graphs:
        return Graphs(torch.cat(samples), torch.arange(len(samples)))

    data = [torch.full((1 + index % 3, 2), float(index)) for index in range(16)]
    for processes in (0, 1):
        loader: DataLoader[Any] = DataLoader(data, 8, collate_fn=join, num_workers=processes)
        with AloneRun(seed=1) as run:
            found = [batch for _, batch in train(run, loader)]
        assert [type(batch) for batch in found] == [Graphs] * 8
        assert torch.cat([batch.nodes for batch in found]).equal(torch.cat(data))


def test_all_tensors_of_a_batch_go_to_the_device() -> None:
    tensor, meta = torch.ones(2), torch.device("meta")
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"a": tensor, "b": [tensor, ("text", 3)], "c": Pair(tensor, OrderedDict(d=Graphs(tensor, tensor)))}
    moved = to_device(batch, meta)
    assert moved["a"].device == moved["b"][0].device == moved["c"].x.device == meta
    assert moved["c"].y["d"].nodes.device == meta
    assert moved["b"][1] == ("text", 3)
    assert type(moved["c"]) is Pair
    there = to_device(packed, meta)
    assert there.data.device == meta
    assert there.batch_sizes.device == CPU, "a packed sequence decides for itself"


# -- loader processes --------------------------------------------------------------------------------


def _note_start(number: int) -> None:
    os.environ["LOADER"] = str(number)


class Started(Dataset[Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, int(os.environ.get("LOADER", -1))])


def test_a_loader_process_begins_with_what_the_script_gives() -> None:
    loader = DataLoader(Started(), 8, num_workers=2, worker_init_fn=_note_start, multiprocessing_context="fork")
    with AloneRun(seed=1) as run:
        assert {int(row[1]) for _, batch in train(run, loader) for row in batch} == {0, 1}


class Marks(Dataset[Any]):
    """The index, and the process that has read it."""

    def __init__(self, length: int = 400) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[int]:
        return [index, os.getpid()]


def one_member() -> Members:
    return Rounds(Team(CPU), Tracked()).members


NUM_STEPS = 12
CURSOR = Cursor(order=Sequential.of(4 * NUM_STEPS), batch_size=4, microbatches=4, seed=1)


@contextlib.contextmanager
def ahead(
    rehearsed: Callable[[int, Plan], Sequence[int]], prefetch: int = 2
) -> Iterator[tuple[Fetcher, Upcoming, Any]]:
    """A fetcher with loader processes, the forecast that it reads, and the requests that it has sent out."""
    upcoming, sent = Upcoming(one_member(), CURSOR, NUM_STEPS, rehearsed), []

    class Noted(Cursor):
        def keys(self, step: int, leaf: int) -> list[tuple[int, int]]:
            sent.append((step, leaf))
            return super().keys(step, leaf)

    fetcher = Fetcher(
        Marks(),
        Noted(order=CURSOR.order, batch_size=4, microbatches=4, seed=1),
        device=CPU,
        loading=Loading(collate=lambda samples: samples[0], processes=2, prefetch_factor=prefetch),
        upcoming=upcoming,
    )
    try:
        yield fetcher, upcoming, sent
    finally:
        fetcher.close()


@pytest.mark.parametrize("turns", [[1] * 12, [3] * 12, [1, 2, 3, 1, 1, 2, 2, 2, 1, 3, 1, 1]])
def test_loader_processes_work_ahead_for_several_passes_over_a_batch(turns: list[int]) -> None:
    """Where the number of passes is that of the step before, all batches come from a loader process."""
    here: Counter[int] = Counter()
    with ahead(lambda number, plan: ()) as (fetcher, upcoming, _):
        for step, num_turns in enumerate(turns):
            for turn in range(num_turns):
                upcoming.note(step, plan(1, 4), (), turn)
                for leaf in range(4):
                    index, pid = fetcher.fetch(step, leaf, turn)
                    assert index == 4 * step + leaf
                    here[step] += pid == os.getpid()
    assert [step for step in range(1, 12) if turns[step] <= turns[step - 1] and here[step]] == []


def test_no_batch_is_asked_for_twice_however_far_ahead() -> None:
    with ahead(lambda number, plan: (), prefetch=6) as (fetcher, upcoming, sent):
        for step in range(NUM_STEPS):
            upcoming.note(step, plan(1, 4), ())
            for leaf in range(4):
                fetcher.fetch(step, leaf)
    assert sent == [(step, leaf) for step in range(NUM_STEPS) for leaf in range(4)]


def test_a_micro_batch_that_is_computed_a_second_time_comes_from_a_loader_process_again() -> None:
    """A lone worker rehearses with its own first micro-batch. The script may have changed the first copy in place."""
    with ahead(lambda number, plan: 0 if number < 2 else None) as (fetcher, upcoming, sent):
        for step in range(4):
            upcoming.note(step, plan(1, 4), [0] if step < 2 else [])
            for leaf in [0, 1, 2, 3, *([0] if step < 2 else [])]:
                assert fetcher.comes(step, leaf)
                index, pid = fetcher.fetch(step, leaf)
                assert index == 4 * step + leaf
                assert pid != os.getpid()
    assert Counter(sent)[0, 0] == Counter(sent)[1, 0] == 2
    assert Counter(sent)[2, 0] == 1


def test_the_forecast_is_in_the_order_of_need() -> None:
    upcoming = Upcoming(one_member(), CURSOR, 4, lambda number, _: [3] if number == 2 else [])
    whole = [0, 1, 2, 3]

    def of(step: int, turn: int, leaves: list[int]) -> list[Request]:
        return [(step, turn, leaf) for leaf in leaves]

    assert list(upcoming())[:8] == of(0, 0, whole) + of(1, 0, whole)
    upcoming.note(0, plan(1, 4), [2])
    upcoming.note(0, plan(1, 4), (), turn=1)
    assert list(upcoming())[:8] == of(0, 1, whole) + of(1, 0, whole)
    upcoming.note(1, plan(1, 4), [0])
    assert list(upcoming()) == [
        *of(1, 0, [*whole, 0]),
        *of(1, 1, whole),
        *of(2, 0, [*whole, 3]),
        *of(2, 1, whole),
        *of(3, 0, whole),
        *of(3, 1, whole),
    ]
    upcoming.note(1, plan(1, 4), (), turn=1)
    upcoming.note(2, plan(1, 4), (), turn=0)
    upcoming.note(3, plan(1, 4), (), turn=0)
    assert list(upcoming()) == of(3, 0, whole), "step 2 had one pass"
