"""Streams: each sample once, the same bits at any number of workers, and over losses, joins and a resumed run."""

# ruff: noqa: PT012 (a whole loop is what raises)

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import unisono
from tests.pure.test_bookmarks import Numbers
from tests.pure.test_streams import cursor
from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import forked, marked, wait_until_gone
from tests.workers.models import bits_of
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from tests.workers.stream_training import (
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    Iterated,
    collate,
    decode,
    made,
    shards,
    train,
    write_shards,
)
from unisono.core.errors import RecipeError
from unisono.engine.microbatch.bookmarks import Bookmark
from unisono.engine.microbatch.data import Loading
from unisono.engine.microbatch.streamfetcher import StreamFetcher
from unisono.testing import Faults, Outcome, run_workers

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("stream_training.py")


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("shards"))


def data_of(kind: str, pattern: str, processes: int) -> tuple[Any, dict[str, Any]]:
    """Data of a kind, and what to say with them."""
    if kind == "shards":
        return shards(pattern), {"epochs": 2, "loader_workers": processes}
    if kind == "function":
        return unisono.Streams(made, shuffle=5, transform=decode), {"loader_workers": processes}
    loader = DataLoader(Iterated(), batch_size=8, num_workers=processes, collate_fn=collate)
    return loader, {"batch_size": None}


def _trained(seat: Seat, place: Place, kind: str, pattern: str, processes: int) -> tuple[list[list[int]], str]:
    data, options = data_of(kind, pattern, processes)
    with place.run(seed=3) as run:
        found, model = train(run, data, max_steps=9, **options)
    assert multiprocessing.active_children() == []
    return found, bits_of(model.state_dict())


@pytest.mark.parametrize("kind", ["shards", "function", "loader"])
def test_the_number_of_workers_and_of_loader_processes_changes_no_bit(kind: str, pattern: str) -> None:
    (alone,) = train_on("shared", 1, _trained, kind, pattern, 0)
    for size, processes in ((1, 2), (2, 0), (3, 1)):
        assert train_on("shared", size, _trained, kind, pattern, processes) == [alone] * size
    by_step, _ = alone
    counts = Counter(number for step in by_step[:STEPS_PER_EPOCH] for number in step)
    assert set(counts) == set(range(NUM_SAMPLES))
    # Where the lengths are not known, the stream of 11 samples has begun again for its twelfth.
    assert counts.total() == NUM_SAMPLES + (kind != "shards")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, pattern: str) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        outcome = run(tmp_path_factory.mktemp("calm") / "run", 1, pattern)
    assert outcome.exit_code == 0, outcome.output
    seen = [line["totals"]["seen"] for line in outcome.lines if line["kind"] == "step"]
    for epoch in (seen[:STEPS_PER_EPOCH], seen[STEPS_PER_EPOCH:]):
        assert [sum(times) for times in zip(*epoch, strict=True)] == [1] * NUM_SAMPLES
    return outcome


def run(directory: Path, workers: int, pattern: str, faults: Faults | None = None, *also: str) -> Outcome:
    return run_workers(
        SCRIPT,
        workers,
        arguments=["--shards", pattern],
        directory=directory,
        options=[*PATIENT, *also],
        faults=faults,
        timeout_s=WAIT_S,
    )


def assert_same(hurt: Outcome, calm: Outcome) -> None:
    """The same gradients, the same state, the same samples in each step."""
    assert hurt.exit_code == 0, hurt.output
    assert (hurt.digests, hurt.final) == (calm.digests, calm.final), hurt.output
    assert [line.get("totals") for line in hurt.lines] == [line.get("totals") for line in calm.lines], hurt.output


@pytest.mark.usefixtures("nursery")
def test_losses_and_joins_change_no_bit_and_no_sample(calm: Outcome, pattern: str, tmp_path: Path) -> None:
    """Whoever comes for a lost worker opens its streams in the middle of an epoch."""
    faults = Faults().kill("w1", step=2, at="after_backward").kill("w0", step=7, at="before_combine")
    assert_same(run(tmp_path / "run", 3, pattern, faults), calm)


@pytest.mark.usefixtures("nursery")
def test_a_run_goes_on_at_another_number_of_workers(calm: Outcome, pattern: str, tmp_path: Path, mark: str) -> None:
    directory = tmp_path / "run"
    cut = run(directory, 2, pattern, Faults().kill_run("w0", at="checkpoint_renamed"))
    assert cut.exit_code == -signal.SIGKILL, cut.output
    wait_until_gone({*marked(mark), *forked()}, time.monotonic() + WAIT_S)  # who still ends holds the directory
    resumed = run(directory, 3, pattern, None, "--resume", str(directory))
    assert "resuming at step 8, from" in resumed.output
    assert_same(resumed, calm)


@pytest.mark.parametrize("kind", ["function", "loader"])
def test_a_call_goes_on_where_the_one_before_has_ended(kind: str) -> None:
    """Where the lengths are not known, which is where an epoch would begin anew. Each run begins at the first sample,
    and counts what a call asks for.
    """
    data = unisono.Streams(made, transform=decode) if kind == "function" else Iterated()

    def call() -> tuple[Any, dict[str, Any]]:
        if kind == "function":
            return data, {}
        return DataLoader(data, batch_size=8, collate_fn=collate), {"batch_size": None}

    with AloneRun(seed=3) as one:
        given, options = call()
        whole, _ = train(one, given, max_steps=9, **options)
    for num_done in (4, 1):
        with AloneRun(seed=3) as two:
            parts = [train_more(two, *call(), steps=4, num_done=num_done), train_more(two, *call(), steps=5)]
            with pytest.raises(RecipeError, match="as 4 streams, and microbatches is 2 now"):
                train_more(two, *call(), steps=3, microbatches=2)
        assert parts == [whole[:num_done], whole[4:]]


def train_more(
    run: unisono.Run, data: Any, options: dict[str, Any], *, steps: int, microbatches: int = 4, num_done: int = -1
) -> list[list[int]]:
    """By step, the ids of the samples; leaves the loop after ``num_done`` steps."""
    model = torch.nn.Linear(1, 1)
    run.track(**{f"model{steps}": model})
    found: list[list[int]] = []
    for step in run.steps(data, **{"batch_size": 8, "microbatches": microbatches, "max_steps": steps, **options}):
        ids: list[int] = []
        for number, _ in step:
            model(torch.ones(1)).sum().backward()
            ids += number.tolist()
        found.append(sorted(ids))
        if len(found) == num_done:
            break
    return found


def _evaluated(seat: Seat, place: Place, pattern: str) -> dict[str, Any]:
    with place.run(seed=3) as run:
        model = torch.nn.Linear(1, 1)
        run.track(model=model)
        for step in run.steps(shards(pattern), batch_size=8, microbatches=4, max_steps=1):
            for _ in step:
                model(torch.ones(1)).sum().backward()
        totals = run.evaluate(
            shards(pattern), lambda batch: {"seen": len(batch[0]), "ids": batch[0].sum()}, batch_size=3
        )
    return {name: int(value) for name, value in totals.items()}


def test_an_evaluation_sees_each_sample_once(pattern: str) -> None:
    for size in (1, 3):
        expected = {"seen": NUM_SAMPLES, "ids": sum(range(NUM_SAMPLES))}
        assert train_on("shared", size, _evaluated, pattern) == [expected] * size


def test_other_passes_over_a_batch_get_the_same_samples(pattern: str) -> None:
    with AloneRun(seed=3) as run:
        model = torch.nn.Linear(1, 1)
        run.track(model=model)
        for step in run.steps(shards(pattern), batch_size=8, microbatches=4, max_steps=2, loader_workers=1):
            passes: list[list[Any]] = []
            for batches in (step, step.again()):
                passes.append([])
                for number, row in batches:
                    passes[-1].append((number.tolist(), row.tolist()))
                    row.zero_()
                    model(torch.ones(1)).sum().backward()
            half = len(passes[0])
            assert passes[0] == passes[1][:half]


class FromItsState(Numbers):
    """May not be read far from its beginning."""

    def __iter__(self) -> Iterator[tuple[int, float]]:
        begins = self._first == 0
        for sample in super().__iter__():
            assert not begins or sample[0] < 100
            yield sample


def fetched(
    kind: type[Numbers], steps: range, known: Mapping[int, Bookmark] | None = None, *, length: int = 1000
) -> tuple[list[Any], Mapping[int, Bookmark]]:
    """What a loader process reads of two streams in these steps, and the bookmarks that it takes."""
    at = [steps.start]
    reading = StreamFetcher(
        unisono.Streams(lambda *_: kind(length), shuffle=20, lengths=[length, length]),
        cursor([length, length], 10),
        device=torch.device("cpu"),
        loading=Loading(processes=1, collate=list),
        upcoming=lambda: ((step, 0, leaf) for step in range(at[0], steps.stop) for leaf in range(2)),
        find_bookmark=lambda wanted: known[wanted.stream] if known is not None else None,
    )
    found = []
    with contextlib.closing(reading):
        for at[0] in steps:
            assert reading.comes(at[0], 0) or at[0] == steps.start
            found += [reading.fetch(at[0], leaf) for leaf in range(2)]
        assert reading._reader._open == {}  # a loader process reads these streams
        return found, reading.bookmarks()


def test_loader_processes_take_bookmarks_and_go_on_from_them() -> None:
    samples, known = fetched(Numbers, range(60))
    assert {stream: one.position for stream, one in known.items()} == {0: 520, 1: 520}
    again, _ = fetched(FromItsState, range(55, 60), known)
    assert again == samples[-10:]


def test_a_stream_that_has_moved_is_read_here_at_first() -> None:
    """It lies far, and is closed when a loader process has come to it."""
    samples, _ = fetched(Numbers, range(450, 460), length=6000)
    assert len({number for batch in samples for number, _ in batch}) == 100


def test_calls_one_after_the_other_go_on_from_states() -> None:
    """Also where a call ends as soon as it is time to tell them."""
    data, counts = unisono.Streams(lambda *_: Numbers(100_000)), []
    with AloneRun(seed=3) as run:
        model = torch.nn.Linear(1, 1)
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            Numbers.num_read = 0
            for step in run.steps(data, batch_size=128, microbatches=2, max_steps=16):
                for _, values in step:
                    model(values.float()[:, None]).mean().backward()
            counts.append(Numbers.num_read)
    assert 2 * 1024 < counts[3] < 2 * 1600


class Undivided(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(100))


def _unsteady(stream: int, num_streams: int, epoch: int) -> Any:
    return iter(os.urandom(8) for _ in range(100))


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (Undivided(), {}, "streams 0 and 1 of 4 begin with the same 16 samples.*get_worker_info"),
        (unisono.Streams(_unsteady), {}, "gave two different samples at position 0 of epoch 0 when it was made twice"),
        (unisono.Streams(lambda *_: iter(())), {}, "stream 0 of 4 gives no sample in its epoch 0"),
        (unisono.Streams(made), {"shuffle": True}, "shuffle= for data that can only be iterated"),
        (unisono.Streams(made), {"epochs": 2}, "max_steps=.*without epochs"),
        (unisono.Streams(made, lengths=[12, 12, 12]), {}, "3 lengths, and microbatches is 4"),
        (unisono.Streams(made, lengths=[12, 12, 12, 0]), {}, "stream 3 of 4 has 0 samples"),
        (unisono.Streams(made, lengths=[14, 14, 14, 14]), {}, "stream 3 of 4 has ended after 11 samples of epoch 0"),
        (unisono.Streams(made, lengths=[8, 8, 8, 8]), {}, "stream 0 of 4 gives more than 8 samples in epoch 0"),
        (DataLoader(Iterated(), batch_size=None), {"batch_size": None}, "batch_size=None"),
        (DataLoader(Iterated(), batch_size=8), {}, r"got a DataLoader and batch_size="),
        (
            DataLoader(Iterated(), batch_size=8, num_workers=1, worker_init_fn=print),
            {"batch_size": None},
            "worker_init_fn over an IterableDataset.*get_worker_info",
        ),
    ],
)
def test_streams_that_cannot_be_trained_on(data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words), AloneRun(seed=3) as run:
        model = torch.nn.Linear(1, 1)
        run.track(model=model)
        for step in run.steps(data, **{"batch_size": 8, "microbatches": 4, "max_steps": 9, **options}):
            for _ in step:
                model(torch.ones(1)).sum().backward()


def _replicated(seat: Seat, place: Place, kind: str, pattern: str, processes: int) -> tuple[list[list[int]], str]:
    data, options = data_of(kind, pattern, processes)
    found: list[list[int]] = []
    with place.run(seed=3) as run:
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Dropout(0.2), torch.nn.Linear(9, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.track(model=model, optimizer=optimizer)
        options = {"batch_size": 8, "microbatches": 4, "replicas": 2, "inner_steps": 3, "max_steps": 10, **options}
        for now in run.local_steps(data, **options):
            for step in now:
                for number, row in step:
                    functional.cross_entropy(model(row), number % 4).backward()
                    step.add(seen=functional.one_hot(number, NUM_SAMPLES).sum(0))
                optimizer.step()
            found.append([i for i, times in enumerate(now.totals["seen"].tolist()) for _ in range(times)])
    return found, bits_of(model.state_dict())


@pytest.mark.parametrize("kind", ["shards", "function", "loader"])
def test_replicas_read_streams_of_their_own(kind: str, pattern: str) -> None:
    """With two workers for a replica, one for each, and one for both."""
    (alone,) = train_on("shared", 1, _replicated, kind, pattern, 0)
    for size, processes in ((2, 1), (3, 0)):
        assert train_on("shared", size, _replicated, kind, pattern, processes) == [alone] * size
    by_round, _ = alone
    counts = Counter(number for numbers in by_round for number in numbers)
    assert len(by_round) == 4
    assert counts.total() == 80 - (kind == "shards")  # the last step of an epoch is one sample short
    assert set(counts) == set(range(NUM_SAMPLES))


def test_a_replica_needs_a_stream_in_each_step() -> None:
    data = unisono.Streams(made, lengths=[9, 8, 12, 12])
    with (
        pytest.raises(RecipeError, match=r"streams 0 to 1, which replica 0 of 2 reads.*drop_last=True"),
        AloneRun() as run,
    ):
        run.track(model=torch.nn.Linear(1, 1))
        run.local_steps(data, batch_size=8, microbatches=4, replicas=2, inner_steps=2)
