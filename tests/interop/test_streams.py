"""Streams of torchdata, Hugging Face and WebDataset: the same bits on any number of workers, each sample once. A stream
that moves goes on from its state.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.house.rooms import ROOT
from tests.interop import streamed_training
from tests.interop.streamed_training import BATCH_SIZE, KINDS, NUM_SAMPLES, PER_SHARD, STEPS, M, train, write_shards
from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import forked, marked, run_nursery, wait_until_gone
from tests.workers.static_team import AloneRun
from unisono.core.errors import RecipeError
from unisono.core.orders import Sequential
from unisono.core.stream_plan import StreamCursor, WantedSamples
from unisono.engine.microbatch.iterables import stream_source_of
from unisono.engine.microbatch.streamreader import Reader
from unisono.record.journal import compare
from unisono.testing import Faults, Outcome, run_workers

SCRIPT = Path(streamed_training.__file__)
LATE = 20
"""A step after the workers have told each other their bookmarks, at 1024 samples of each stream."""


@pytest.fixture(scope="module")
def nursery_with_libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("nursery") / "socket")
    with run_nursery(path, also=["datasets", "webdataset", "torchdata.nodes", "torchdata.stateful_dataloader"]):
        yield path


@pytest.fixture
def quick(nursery_with_libraries: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of this test do not import the libraries each by itself."""
    monkeypatch.setenv("UNISONO_NURSERY", nursery_with_libraries)


def run(directory: Path, workers: int, kind: str, folder: Path, faults: Faults | None = None, *also: str) -> Outcome:
    return run_workers(
        SCRIPT,
        workers,
        arguments=[kind, str(folder)],
        directory=directory,
        options=[*PATIENT, *also],
        faults=faults,
        timeout_s=WAIT_S,
    )


def alone(directory: Path, kind: str, folder: Path) -> None:
    """Train in this process, and see that each sample comes once."""
    with AloneRun(directory, seed=3, deterministic=False, balance=False) as one:
        assert sorted(train(one, KINDS[kind](str(folder)))) == list(range(NUM_SAMPLES))
    for path in folder.glob("read-*"):
        path.unlink()


def reads_of_the_middle(kind: str, folder: Path) -> set[int]:
    """How often samples 300 to 600 of each stream were read, by all processes together.

    They are read again by whoever begins with the first sample of a stream, and lie behind what is read twice on
    purpose, when a training begins.
    """
    counts = Counter(int(line) for path in folder.glob("read-*") for line in path.read_text().split())
    if kind == "huggingface":  # node m of M has the shards m, m + M ...
        streams = [number // PER_SHARD % M for number in range(NUM_SAMPLES)]
    else:
        streams = [number % M for number in range(NUM_SAMPLES)]
    members = [[number for number in range(NUM_SAMPLES) if streams[number] == stream] for stream in range(M)]
    return {counts[number] for numbers in members for number in numbers[300:600]}


@pytest.mark.parametrize("kind", ["nodes", "loader", "huggingface", "webdataset"])
@pytest.mark.usefixtures("quick")
def test_a_stream_that_moves_goes_on_from_its_state(kind: str, tmp_path: Path) -> None:
    """Two of three workers are lost, and others come."""
    (folder := tmp_path / "data").mkdir()
    if kind == "webdataset":
        write_shards(folder)
    alone(tmp_path / "alone", kind, folder)
    faults = Faults().kill("w1", step=LATE, at="after_backward").kill("w2", step=LATE + 1, at="before_combine")
    hurt = run(tmp_path / "hurt", 3, kind, folder, faults)
    assert hurt.exit_code == 0, hurt.output
    assert compare(tmp_path / "alone", tmp_path / "hurt").startswith(f"identical: {STEPS} steps"), hurt.output
    if kind != "webdataset":  # it has no state
        assert reads_of_the_middle(kind, folder) == {1}, hurt.output


@pytest.mark.usefixtures("quick")
def test_a_run_goes_on_from_the_states_of_its_checkpoint(tmp_path: Path, mark: str) -> None:
    (folder := tmp_path / "data").mkdir()
    alone(tmp_path / "alone", "nodes", folder)
    directory = tmp_path / "cut"
    cut = run(directory, 2, "nodes", folder, Faults().kill_run("w0", at="checkpoint_renamed"))
    assert cut.exit_code == -signal.SIGKILL, cut.output
    wait_until_gone({*marked(mark), *forked()}, time.monotonic() + WAIT_S)  # who still ends holds the directory
    resumed = run(directory, 3, "nodes", folder, None, "--resume", str(directory))
    assert resumed.exit_code == 0, resumed.output
    assert compare(tmp_path / "alone", directory).startswith(f"identical: {STEPS} steps"), resumed.output
    assert reads_of_the_middle("nodes", folder) == {1}


def place(step: int) -> WantedSamples:
    """Return what a step needs of stream 2."""
    order = Sequential(NUM_SAMPLES, NUM_SAMPLES, "streams")
    where = StreamCursor(order=order, batch_size=BATCH_SIZE, microbatches=M, seed=1, num_steps=STEPS)
    return where.wanted(step, 2)


def test_a_shuffle_buffer_is_read_from_the_beginning(tmp_path: Path) -> None:
    """What it holds is not in the state of Hugging Face: that is noticed, and the samples are the same."""
    source = stream_source_of(KINDS["shuffled"](str(tmp_path)), "run.steps", batch_size=BATCH_SIZE)
    assert source is not None
    wanted = [place(step) for step in range(STEPS)]
    reader = Reader(source.data, 1, marks=True)
    in_a_row = [reader.read(one) for one in wanted]
    bookmarks = [bookmark for _, bookmark in reader.news().taken]
    other = Reader(source.data, 1, marks=True)
    with pytest.warns(UserWarning, match="gives different samples after load_state_dict"):
        assert other.read(wanted[LATE], bookmarks[-3]) == in_a_row[LATE]


def test_a_dataset_that_cannot_be_copied_is_read_without_states(tmp_path: Path) -> None:
    data = KINDS["huggingface"](str(tmp_path))

    def fail(memo: object) -> None:
        raise TypeError("cannot pickle '_thread.lock' object")

    data.__deepcopy__ = fail
    source = stream_source_of(data, "run.steps", batch_size=BATCH_SIZE)
    assert source is not None
    reader = Reader(source.data, 1, marks=True)
    numbers = [sample["number"] for step in range(STEPS) for sample in reader.read(place(step))]
    assert [number // PER_SHARD % M for number in numbers] == [2] * len(numbers) == [2] * (NUM_SAMPLES // M)
    assert reader.news() == (False, [])


def test_a_loader_with_a_state_is_refused_in_words() -> None:
    """It makes its batches in a way of its own; docs/data.md says what to give instead."""
    with AloneRun(seed=3) as one:
        model = torch.nn.Linear(2, 1)
        one.track(model=model)
        loader = StatefulDataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4)
        with pytest.raises(
            RecipeError, match=r"the loader is a StatefulDataLoader.*give run\.steps the dataset itself"
        ):
            one.steps(loader, microbatches=2)
    assert "`StatefulDataLoader`" in (ROOT / "docs" / "data.md").read_text()
