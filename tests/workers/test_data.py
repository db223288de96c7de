"""Data: every sample once an epoch, the same augmentation whoever loads it, and loader processes that end."""

# ruff: noqa: PT012 (a whole loop is what raises)

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import unisono
from tests.waiting import WAIT_S
from tests.workers.conftest import Command, marked, wait_until_gone
from tests.workers.models import Cnn, Images, Mlp, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.errors import StepError
from unisono.engine.microbatch.data import Fetcher, Loading, Request, culprits

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Scale(nn.Module):
    """A model for any batch: only the data matter here."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.double().mean()


def batches(run: unisono.Run, data: Any, **options: Any) -> Iterator[tuple[unisono.Step, Any]]:
    """Every micro-batch that falls to this worker."""
    model = Scale()
    run.track(model=model)
    for step in run.steps(data, **{"batch_size": 8, "microbatches": 4, **options}):
        for batch in step:
            yield step, batch
            step.backward(model(torch.ones(1)))


class Draws(Dataset[Tensor]):
    """What each of the generators gives for a sample: (index, torch, numpy, random)."""

    def __init__(self, num_samples: int = 21) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        if index == 3:  # a sample that draws more than the others changes nothing for the next
            torch.rand(7), numpy.random.rand(7), random.random()
        return torch.tensor([index, torch.rand(()), numpy.random.rand(), random.random()], dtype=torch.float64)


# -- who gets what -----------------------------------------------------------------------------------


def _draws(seat: Seat, place: Place, options: dict[str, Any]) -> list[tuple[int, list[float]]]:
    with place.run(seed=1, deterministic=False) as run:  # so that no micro-batch is computed twice, to compare it
        found = [(step.epoch, row) for step, batch in batches(run, Draws(), **options) for row in batch.tolist()]
    assert multiprocessing.active_children() == []
    return found


def test_every_sample_is_seen_once_an_epoch_with_the_same_augmentation() -> None:
    """On any number of workers, with and without loader processes, also in the last, partial batch (21 = 8 + 8 + 5)."""
    (alone,) = train_on("shared", 1, _draws, {"epochs": 2})
    for epoch in range(2):
        assert sorted(row[0] for number, row in alone if number == epoch) == list(range(21))
    orders = [[row[0] for number, row in alone if number == epoch] for epoch in range(2)]
    assert orders[0] != orders[1]
    for column in (1, 2, 3):
        assert len({row[column] for _, row in alone}) == 42, "every sample of every epoch is augmented otherwise"

    for size, loader_workers in ((2, 0), (3, 0), (1, 2), (3, 1)):
        by_rank = train_on("shared", size, _draws, {"epochs": 2, "loader_workers": loader_workers})
        assert sorted(seen for found in by_rank for seen in found) == sorted(alone)
        assert all(len(found) < len(alone) for found in by_rank) == (size > 1)


class Pids(Dataset[Tensor]):
    """In which process a sample was read."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([os.getpid()])


def _readers(seat: Seat, place: Place) -> tuple[int, set[int]]:
    """The pid of this worker, and of whoever has read samples for it; every step is a rehearsal."""
    found: set[int] = set()
    with place.run(seed=1, balance=False) as run:
        model = nn.Linear(1, 1)
        run.track(model=model)
        for step in run.steps(Pids(), batch_size=8, microbatches=4, loader_workers=1):
            for batch in step:
                found.update(batch.flatten().tolist())
                step.backward(model(torch.ones(1)).sum())
        run.evaluate(Pids(), lambda batch: found.update(batch.flatten().tolist()) or {}, batch_size=6, loader_workers=1)
    return os.getpid(), found


def test_what_is_computed_twice_is_read_by_loader_processes_too() -> None:
    """A dataset that opens its file at the first sample must not do so in the process that the next ones come from."""
    for worker, readers in train_on("shared", 2, _readers):
        assert worker not in readers


@pytest.mark.parametrize(("options", "expected"), [({"shuffle": False}, [*range(21)]), ({"drop_last": True}, None)])
def test_order_and_end_of_an_epoch(options: dict[str, Any], expected: list[int] | None) -> None:
    with AloneRun(seed=1) as run:
        seen = [int(row[0]) for _, batch in batches(run, Draws(), **options) for row in batch]
    if expected is None:
        assert len(seen) == len(set(seen)) == 16
    else:
        assert seen == expected


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [8, 8, 5]), (True, [8, 8])])
def test_a_step_knows_its_epoch_and_the_end_of_it(drop_last: bool, sizes: list[int]) -> None:
    model = Scale()
    told = []
    with AloneRun(seed=1) as run:
        run.track(model=model)
        for step in run.steps(Draws(), batch_size=8, microbatches=4, epochs=2, drop_last=drop_last):
            told.append((step.number, step.epoch, step.num_samples, step.is_last_of_epoch))
            for _ in step:
                step.backward(model(torch.ones(1)))
    count = len(sizes)
    assert told == [(n, n // count, sizes[n % count], n % count == count - 1) for n in range(2 * count)]


@pytest.mark.parametrize(("options", "epochs"), [({}, [3, 3, 2]), ({"epochs": 2}, [3, 3]), ({"epochs": 5}, [3, 3, 2])])
@pytest.mark.parametrize("is_stream", [False, True])
def test_steps_go_on_over_epochs_until_there_are_as_many_as_asked_for(
    options: dict[str, Any], epochs: list[int], is_stream: bool
) -> None:
    data = unisono.Streams(lambda stream, of, epoch: range(stream, 24, of), lengths=[6] * 4) if is_stream else range(24)
    seen: dict[int, list[int]] = {}
    with AloneRun(seed=1) as run:
        for step, batch in batches(run, data, max_steps=8, **options):
            seen.setdefault(step.epoch, []).extend(batch.tolist())
        assert next(run.steps(data, batch_size=8, microbatches=4)).epoch == len(epochs), "the next call goes on"
    assert [len(samples) // 8 for samples in seen.values()] == epochs
    assert all(len(samples) == len(set(samples)) for samples in seen.values())


def _trained(seat: Seat, place: Place, loader_workers: int) -> str:
    with place.run(seed=1) as run:
        model = Cnn()
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(Images(), batch_size=24, microbatches=6, epochs=2, loader_workers=loader_workers):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        totals = run.evaluate(
            Images(), lambda batch: {"sum": model(batch[0]).sum()}, batch_size=10, loader_workers=loader_workers
        )
    assert multiprocessing.active_children() == []
    return bits_of([model.state_dict(), totals])


def test_loader_processes_change_no_bit() -> None:
    (expected,) = train_on("shared", 1, _trained, 0)
    assert train_on("shared", 1, _trained, 2) == [expected]
    assert train_on("shared", 2, _trained, 2) == [expected] * 2


# -- what batches look like --------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: int


@pytest.mark.parametrize("loader_workers", [0, 1])
@pytest.mark.parametrize(
    ("sample", "check"),
    [
        (
            lambda i: {"x": torch.full((2,), i), "name": f"n{i}"},
            lambda b: b["x"].shape == (2, 2) and len(b["name"]) == 2,
        ),
        (lambda i: Pair(torch.full((2,), i), i), lambda b: type(b) is Pair and b.x[:, 0].equal(b.y)),
        (lambda i: (numpy.full(2, i), float(i)), lambda b: b[0].shape == (2, 2) and b[1].dtype == torch.float64),
    ],
)
def test_batches_are_those_of_a_data_loader(
    sample: Callable[[int], Any], check: Callable[[Any], bool], loader_workers: int
) -> None:
    with AloneRun(seed=1) as run:
        data = [sample(index) for index in range(16)]
        found = [check(batch) for _, batch in batches(run, data, loader_workers=loader_workers)]
    assert found == [True] * 8


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_a_collate_of_the_users(loader_workers: int) -> None:
    """Sequences of several lengths, padded."""

    def pad(samples: list[Tensor]) -> tuple[Tensor, list[int]]:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True), [len(sample) for sample in samples]

    with AloneRun(seed=1) as run:
        data = [torch.arange(1 + index) for index in range(16)]
        for _, (padded, lengths) in batches(run, data, collate=pad, loader_workers=loader_workers):
            assert padded.shape == (2, max(lengths))


class Slow(TensorDataset):
    """Not a `TensorDataset` itself, so indexed sample by sample."""


def test_tensors_that_are_indexed_at_once_give_the_same_batches() -> None:
    tensors = vectors(21).tensors
    found = []
    for data in (TensorDataset(*tensors), Slow(*tensors)):
        with AloneRun(seed=1) as run:
            found.append([batch for _, batch in batches(run, data, epochs=2)])
    for fast, slow in zip(*found, strict=True):
        assert type(fast) is type(slow) is list
        assert all(a.dtype == b.dtype and a.equal(b) for a, b in zip(fast, slow, strict=True))


def test_a_batch_may_be_changed_in_place() -> None:
    """It is the loop's own: the data set stays as it is."""
    data = vectors(16)
    before = bits_of(list(data.tensors))
    with AloneRun(seed=1) as run:
        for _, (x, _) in batches(run, data, shuffle=False):
            x.zero_()
    assert bits_of(list(data.tensors)) == before


# -- errors ------------------------------------------------------------------------------------------


class Broken(Draws):
    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            raise LookupError(f"the file of sample {index} is gone")
        return super().__getitem__(index)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_an_error_of_the_dataset_says_where_it_came_from(loader_workers: int) -> None:
    """Its own class, message and traceback; and notes with the sample, the step and the micro-batch."""
    with pytest.raises(LookupError, match="the file of sample 5 is gone") as caught:
        with AloneRun(seed=1) as run:
            for _ in batches(run, Broken(), shuffle=False, loader_workers=loader_workers):
                pass
    *noted, last = caught.value.__notes__
    assert last == "(in step 0, micro-batch 2)"
    assert culprits(caught.value) == [5]
    if loader_workers:
        assert "in __getitem__" in str(caught.value)
        assert "(in sample 5)" in str(caught.value)
    else:
        assert caught.traceback[-1].name == "__getitem__"
        assert noted == ["(in sample 5)"]
    assert multiprocessing.active_children() == []


class Uneven(Draws):
    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(19 if index == 5 else 20)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_batch_that_cannot_be_made_names_its_samples_and_those_that_torch_knows_as_an_entry(
    loader_workers: int,
) -> None:
    with pytest.raises(RuntimeError, match=r"at entry 1|resize storage") as caught, AloneRun(seed=1) as run:
        for _ in batches(run, Uneven(), shuffle=False, loader_workers=loader_workers):
            pass
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    # In a loader process torch copies into shared memory, and has other words.
    entries = "" if loader_workers else "; entry 0 is sample 4; entry 1 is sample 5"
    assert f"(in collate, of samples 4, 5{entries})" in text
    assert caught.value.__notes__[-1] == "(in step 0, micro-batch 2)"
    assert culprits(caught.value) == [4, 5]


@pytest.mark.parametrize("how", ["exception", "break", "left early"])
def test_loader_processes_end_with_the_loop(how: str) -> None:
    """Also where the steps are held by a name, and so do not end by themselves."""
    during = []
    with pytest.raises((KeyError, StepError)) as caught:
        with AloneRun(seed=1) as run:
            model = Mlp()
            run.track(model=model)
            steps = run.steps(Slow(*vectors().tensors), batch_size=8, microbatches=4, loader_workers=2)
            for step in steps:
                for x, y in step:
                    during.append(len(multiprocessing.active_children()))
                    if how == "exception":
                        raise KeyError(how)
                    if how == "left early":
                        break
                    step.backward(F.cross_entropy(model(x), y))
                if how != "exception":
                    break
            if how == "break":
                raise KeyError(how)
    assert (caught.type is StepError) == (how == "left early")
    assert set(during) == {2}
    assert multiprocessing.active_children() == []


KILLED = """
import multiprocessing, signal, torch, unisono
from torch import nn

model = nn.Linear(2, 1)
with unisono.Run(device="cpu") as run:
    run.track(model=model)
    for step in run.steps([torch.ones(2)] * 64, batch_size=8, microbatches=4, loader_workers=2):
        for batch in step:
            print("loaders", *[child.pid for child in multiprocessing.active_children()], flush=True)
            signal.pause()
"""


def test_loader_processes_end_with_a_worker_that_is_killed(tmp_path: Path, mark: str) -> None:
    (tmp_path / "script.py").write_text(KILLED)
    command = Command([sys.executable, "script.py"], tmp_path, mark)
    try:
        loaders = {int(pid) for pid in command.line("loaders").split()[1:]}
        assert len(loaders) == 2
        assert loaders <= marked(mark).keys()
        os.kill(command.pid, signal.SIGKILL)
        wait_until_gone(loaders, time.monotonic() + WAIT_S)
        assert not loaders & marked(mark).keys()
    finally:
        command.end()


# -- fetching ahead ----------------------------------------------------------------------------------


class Indices:
    """Micro-batches of one sample."""

    def __init__(self, index: Callable[[int, int], int]) -> None:
        self._index = index

    def indices(self, step: int, leaf: int) -> list[int]:
        return [self._index(step, leaf)]

    def keys(self, step: int, leaf: int) -> list[tuple[int, int]]:
        return [(self._index(step, leaf), 1)]


class Sums(Dataset[Tensor]):
    """What is summed in another order by two threads than by one."""

    images = torch.randn(4, 1_000_000, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index].sum()


def test_a_loader_process_computes_as_the_worker_does() -> None:
    """A batch that was not fetched ahead is made in the worker, which may have more threads than a loader."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    fetcher = Fetcher(
        Sums(),
        Indices(lambda _, leaf: leaf),
        device=CPU,
        loading=Loading(processes=1),
        upcoming=lambda: iter([(0, 0, leaf) for leaf in range(4)]),
    )
    try:
        loaded = [fetcher.fetch(0, leaf) for leaf in range(4)]
        own = [fetcher.fetch(0, leaf) for leaf in range(4)]  # asked for again: not on its way
    finally:
        fetcher.close()
        torch.set_num_threads(before)
    assert [value.item() for value in loaded] == [value.item() for value in own]


class Marks(Dataset[int]):
    """The index, and the process that read it."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> list[int]:
        return [index, os.getpid()]


def test_a_plan_that_changes_while_data_are_on_their_way() -> None:
    """What is still useful is kept, what nobody had asked for is fetched here, and nothing is mistaken for another."""
    plan = {step: [0, 1] for step in range(30)}
    position = (-1, 0)

    def upcoming() -> Iterator[Request]:
        return ((step, 0, leaf) for step in sorted(plan) for leaf in plan[step] if (step, leaf) > position)

    fetcher = Fetcher(
        Marks(),
        Indices(lambda step, leaf: 3 * step + leaf),
        device=CPU,
        loading=Loading(collate=lambda samples: samples[0], processes=2),
        upcoming=upcoming,
    )
    try:
        here = []
        for step in range(30):
            if step == 7:  # a member was lost: this one computes more, from now on
                plan.update({later: [2, 0, 1] for later in range(7, 30)})
            if step == 19:  # and less
                plan.update({later: [2] for later in range(19, 30)})
            for leaf in plan[step]:
                position = (step, leaf)
                index, pid = fetcher.fetch(step, leaf)
                assert index == 3 * step + leaf
                if pid == os.getpid():
                    here.append((step, leaf))
        assert here[0] == (7, 2)
        assert {leaf for _, leaf in here} == {2}
        assert len(here) < 6, "ahead again soon"
    finally:
        fetcher.close()
    assert multiprocessing.active_children() == []
