"""Runs without some samples: begun without them, or gone on with without them, with the same bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, WeightedRandomSampler

import unisono
from tests.waiting import PATIENT
from tests.workers.checkpointed_training import BATCH_SIZE, NUM_SAMPLES
from tests.workers.conftest import Unisono
from tests.workers.disk import wait_for_disk
from tests.workers.journals import canonical
from unisono.cluster.worker import member
from unisono.core.cursor import Cursor
from unisono.core.errors import RecipeError, UsageError
from unisono.core.orders import Shuffled
from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec
from unisono.record.journal import read
from unisono.record.rundir import read_facts
from unisono.testing import Faults, run_workers

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("checkpointed_training.py")
ARGUMENTS = ["--steps", "8", "--every", "2", "--keep", "100", "--wait-for-disk"]
SIZE = 96
LEFT = json.dumps({"run_id": "a", "step": 7, "checkpoint_step": 6})
Train = Callable[[Path], None]


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    yield
    member.settle(RunSpec())


def samples_of(step: int, leaf: int, **data: Any) -> list[int]:
    known = {"order": Shuffled.of(SIZE), "batch_size": 12, "microbatches": 4, "seed": 3, **data}
    return Cursor(**known).indices(step, leaf)


def listed(folder: Path, samples: list[int], name: str = "gone.txt") -> Path:
    path = folder / name
    path.write_text("".join(f"{sample}\n" for sample in samples))
    return path


# -- in this process: each strategy ------------------------------------------------------------------


class Few:
    """A data set, as no tensor but sample by sample."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.inputs, self.labels = torch.randn(SIZE, 6, generator=draw), torch.randint(0, 3, (SIZE,), generator=draw)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] + torch.rand(6), self.labels[index]


def begun(directory: Path) -> tuple[unisono.Run, nn.Module]:
    run = unisono.Run(directory, seed=3, checkpoint=unisono.Checkpoints(every_steps=2, keep=100))
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Dropout(0.3), nn.Linear(5, 3))
    return run, model


def train(directory: Path, *, lengths: tuple[int, ...] = (9,), passes: int = 1, **arguments: Any) -> None:
    run, model = begun(directory)
    with run:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        data = Few()
        for length in lengths:
            for step in run.steps(data, batch_size=12, microbatches=4, epochs=9, max_steps=length, **arguments):
                wait_for_disk(run)
                for number in range(passes):
                    for inputs, labels in step.again() if number else step:
                        assert len(step.indices) == len(labels) > 0
                        F.cross_entropy(model(inputs), labels).backward()
                        step.add(seen=len(labels))
                if step.has_gradient:
                    optimizer.step()
                    assert step.totals["seen"] == step.round.position.num_samples == step.round.weight


def train_locally(directory: Path) -> None:
    run, model = begun(directory)
    with run:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for part in run.local_steps(
            Few(), batch_size=12, microbatches=4, replicas=2, inner_steps=2, epochs=9, max_steps=13
        ):
            wait_for_disk(run)
            for step in part:
                for inputs, labels in step:
                    F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()


STRATEGIES: dict[str, tuple[Train, int, int]] = {
    "plain": (train, 7, 6),
    "two passes": (partial(train, passes=2), 7, 6),
    "sums": (partial(train, reduction="sum"), 7, 6),
    "loader processes": (partial(train, loader_workers=1), 7, 6),
    "delayed": (partial(train, delay=2), 7, 2),
    "begun at the beginning": (train, 7, 0),
    "a later loop": (partial(train, lengths=(2, 7)), 5, 4),
    "local steps": (train_locally, 3, 2),
}
"""How it is trained, the step that uses the samples first, and the newest checkpoint before it; 0: the beginning."""


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_that_leaves_another_one_has_the_bits_of_one_that_began_without_the_samples(
    name: str, tmp_path: Path
) -> None:
    """A whole micro-batch is left out and a sample more, and the checkpoint is one that still knows the samples."""
    trained, first, checkpoint = STRATEGIES[name]
    samples = [*samples_of(7, 1), samples_of(7, 2)[0]]
    if name == "a later loop":  # in the order of the second epoch, and not in the first two steps of the run
        seen = {index for step in range(2) for leaf in range(4) for index in samples_of(step, leaf)}
        samples = [index for leaf in range(2) for index in samples_of(3, leaf, first_epoch=1) if index not in seen]
    without = str(listed(tmp_path, samples))
    member.settle(RunSpec())
    trained(tmp_path / "all")
    member.settle(RunSpec(settings=RunSettings(without=without)))
    trained(tmp_path / "began")
    begin = str(tmp_path / "all" / "checkpoints" / f"step-{checkpoint:010}") if checkpoint else ""
    member.settle(RunSpec(settings=RunSettings(without=without, resume=begin, left=LEFT)))
    trained(tmp_path / "left")
    whole, began, left = (canonical(tmp_path / one) for one in ("all", "began", "left"))
    assert left == began
    assert [one == other for one, other in zip(whole, left, strict=True)].index(False) == first
    facts = read_facts(tmp_path / "left")
    assert facts["left"] == json.loads(LEFT)
    assert facts["recipe"]["without"]["samples"] == len(samples)
    assert (tmp_path / "left" / "without.txt").read_text() == "".join(f"{one}\n" for one in sorted(samples))


def test_a_checkpoint_that_has_used_a_sample_is_refused(tmp_path: Path) -> None:
    """Also where a loop before it has, of whose order the checkpoint says nothing."""
    trained: Train
    for trained, step, checkpoint in (
        (partial(train, lengths=(2, 5)), 1, 4),
        (partial(train, delay=2), 3, 2),  # the gradient of this step is under way in it
        (train_locally, 3, 2),  # of the rounds with two steps each
    ):
        folder = tmp_path / f"{step}-{checkpoint}-{trained is train_locally}"
        member.settle(RunSpec())
        trained(folder / "all")
        later = {index for at in range(5) for leaf in range(4) for index in samples_of(at, leaf, first_epoch=1)}
        used = [index for leaf in range(4) for index in samples_of(step, leaf) if index not in later]
        assert used
        without = str(listed(folder, used))
        begin = str(folder / "all" / "checkpoints" / f"step-{checkpoint:010}")
        member.settle(RunSpec(settings=RunSettings(without=without, resume=begin, left=LEFT)))
        with pytest.raises(RecipeError, match=rf"used one of them before, in step {step} of its run\.steps number 1"):
            trained(folder / "left")


def test_a_run_goes_on_only_with_the_list_that_it_has(tmp_path: Path) -> None:
    run, most = tmp_path / "run", partial(train, lengths=(3,))
    own, other = str(listed(tmp_path, [1, 2])), str(listed(tmp_path, [1, 2, 3], "other.txt"))
    member.settle(RunSpec(settings=RunSettings(without=own)))
    most(run)
    lines = canonical(run)
    for given, words in (
        ("", "made without 2 samples, SHA-256 .* would continue with all samples"),
        (other, "made without 2 samples, .* would continue without 3 samples"),
    ):
        member.settle(RunSpec(settings=RunSettings(without=given, resume=str(run))))
        with pytest.raises(RecipeError, match=words):
            train(run)
    member.settle(RunSpec(settings=RunSettings(without=str(run / "without.txt"), resume=str(run))))
    train(run)
    assert canonical(run)[:3] == lines[:3]
    member.settle(RunSpec())
    most(tmp_path / "whole")
    member.settle(RunSpec(settings=RunSettings(without=own, resume=str(tmp_path / "whole"))))
    with pytest.raises(RecipeError, match="made with all samples, and this run would continue without 2"):
        train(tmp_path / "whole")


def test_what_no_index_can_name_is_refused(tmp_path: Path) -> None:
    without = listed(tmp_path, [5])
    member.settle(RunSpec(settings=RunSettings(without=str(without))))
    run, model = begun(tmp_path / "streams")
    with run:
        run.track(model=model)
        streams = unisono.Streams(lambda stream, *_: iter(Few()), lengths=[48, 48])
        with pytest.raises(RecipeError, match="these data are streams, whose samples have none"):
            run.steps(streams, batch_size=12, microbatches=2)
    run, model = begun(tmp_path / "two")
    with run:
        run.track(model=model)
        loader = DataLoader(TensorDataset(torch.zeros(SIZE, 6)), batch_size=12)
        run.steps(loader, microbatches=4)
        run.steps(loader, microbatches=4)
        with pytest.raises(RecipeError, match="a different object from the first"):
            run.steps(TensorDataset(torch.zeros(SIZE, 6)), batch_size=12, microbatches=4)
    listed(tmp_path, [5, SIZE])
    run, model = begun(tmp_path / "large")
    with run:
        run.track(model=model)
        with pytest.raises(UsageError, match=r"gone.txt, line 2: there is no sample 96: the dataset has 96 samples"):
            run.steps(Few(), batch_size=12, microbatches=4)


def test_a_sampler_with_weights_leaves_out_by_index(tmp_path: Path) -> None:
    without = listed(tmp_path, list(range(0, SIZE, 2)))
    member.settle(RunSpec(settings=RunSettings(without=str(without))))
    run, model = begun(tmp_path / "run")
    seen: list[int] = []
    with run:
        run.track(model=model)
        sampler = WeightedRandomSampler([1.0] * SIZE, SIZE)
        for step in run.steps(Few(), batch_size=12, microbatches=4, sampler=sampler):
            for inputs, _ in step:
                model(inputs).sum().backward()
                seen += step.indices.tolist()
    assert seen
    assert all(index % 2 for index in seen)


class Parts(Few):
    """It says of which shards it is made."""

    shards: ClassVar[dict[str, range]] = {"first": range(30), "second": range(30, SIZE)}


def test_shards_are_left_out_by_name_and_by_number(tmp_path: Path) -> None:
    """A data set says them, or is made of several; the result is that of their samples, and the run says the list."""
    few = Few()
    several = ConcatDataset([Subset(few, range(30)), Subset(few, range(30, SIZE))])
    found = []
    for number, (data, text) in enumerate([(few, "0-29\n"), (Parts(), "shard first\n"), (several, "shard 0\n")]):
        gone = tmp_path / f"gone{number}.txt"
        gone.write_text(text)
        member.settle(RunSpec(settings=RunSettings(without=str(gone))))
        torch.manual_seed(0)
        with unisono.Run(tmp_path / str(number), seed=3) as run:
            model = nn.Linear(6, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(data, batch_size=48, microbatches=4, max_steps=4, epochs=9):
                for inputs, labels in step:
                    F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        found.append([line["digest"] for line in read(tmp_path / str(number)) if line["kind"] == "step"])
        assert (tmp_path / str(number) / "without.txt").read_text() == "".join(f"{one}\n" for one in range(30))
    assert found[0] == found[1] == found[2]
    assert read_facts(tmp_path / "1")["data"]["shards"] == {"first": [0, 30], "second": [30, SIZE]}
    assert read_facts(tmp_path / "2")["data"]["shards"] == {"0": [0, 30], "1": [30, SIZE]}


def test_a_step_of_which_nothing_is_left_has_no_gradient(tmp_path: Path) -> None:
    member.settle(RunSpec(settings=RunSettings(without=str(listed(tmp_path, list(range(12)))))))
    train(tmp_path / "run", shuffle=False, lengths=(3,))
    lines = [line for line in read(tmp_path / "run") if line["kind"] == "step"]
    assert [(line["weight"], line["loss"] == "nan") for line in lines] == [(0, True), (12, False), (12, False)]


# -- the commands ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nursery")
def test_replay_computes_the_rest_of_a_run_without_some_samples(tmp_path: Path, unisono: Unisono) -> None:
    """Equal to one that began without them: alone, and on three workers of which one is killed."""
    whole = run_workers(SCRIPT, 2, directory=tmp_path / "all", options=PATIENT, arguments=ARGUMENTS)
    assert whole.exit_code == 0, whole.output
    before = {path: path.read_bytes() for path in (tmp_path / "all").rglob("*") if path.is_file()}
    # Both micro-batches of the epoch's short batch have three samples: one is left out, and a sample of the other.
    data = {"order": Shuffled.of(NUM_SAMPLES), "batch_size": BATCH_SIZE, "microbatches": 8}
    samples = [*samples_of(2, 1, **data), samples_of(2, 0, **data)[0]]
    without = listed(tmp_path, samples)
    options = [*PATIENT, "--set", f"without={without}"]
    alone = run_workers(SCRIPT, 1, directory=tmp_path / "alone", options=options, arguments=ARGUMENTS)
    assert alone.exit_code == 0, alone.output
    faults = Faults().kill("w1", step=2, at="after_backward").kill("w0", step=5, at="before_combine")
    killed = run_workers(
        SCRIPT, 3, directory=tmp_path / "killed", options=options, faults=faults, arguments=[*ARGUMENTS, "--even"]
    )
    assert killed.exit_code == 0, killed.output
    assert "SIGKILL" in killed.output
    replay = unisono("replay", "all", "--without", without, "--into", "new", "--workers", "2")
    assert replay.wait() == 0, (replay.out, replay.err)
    replay.line("leaving out 4 samples, first used in step 2; starting at step 2, from ")
    replay.line("2 steps as in ")
    replay.line("of the 6 steps from step 2 on, 6 have another digest. The last loss is ")
    beginning = unisono("replay", "all", "--without", without, "--into", "anew", "--from-beginning")
    assert beginning.wait() == 0, (beginning.out, beginning.err)
    beginning.line("starting at the beginning")
    for name in ("killed", "new", "anew"):
        assert canonical(tmp_path / name) == canonical(tmp_path / "alone"), name
    assert {path: path.read_bytes() for path in before} == before, "the files of the run are as they were"
    facts = read_facts(tmp_path / "new")
    run_id = read_facts(tmp_path / "all")["run_id"]
    assert facts["left"] == {"run_id": run_id, "step": 2, "checkpoint_step": 2}
    assert facts["recipe"]["without"] == read_facts(tmp_path / "alone")["recipe"]["without"]
    assert "left" not in read_facts(tmp_path / "alone")
    # It is a run as any other one: gone on with, and replayed, with the list in its directory.
    without.unlink()
    shutil.rmtree(tmp_path / "new" / "checkpoints" / "step-0000000008")
    again = unisono("run", "--resume", "new", "--workers", "1")
    assert again.wait() == 0, (again.out, again.err)
    assert canonical(tmp_path / "new") == canonical(tmp_path / "alone")
    assert read_facts(tmp_path / "new")["left"] == facts["left"]
    step = unisono("replay", "new", "--step", "5", "--micro-batch", "1")
    assert step.wait() == 0, (step.out, step.err)


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(
    ("script", "microbatches", "options"),
    [
        ("delayed_training.py", 8, ()),
        ("local_training.py", 6, ()),
        ("checkpointed_training.py", 8, ("--audit", "0.5")),
    ],
)
def test_losing_a_worker_beside_an_empty_micro_batch_changes_no_bit(
    script: str, microbatches: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where gradients are under way, replicas train by themselves, or a second worker computes the same."""
    num_samples = 48 if "local" in script else NUM_SAMPLES
    data = {"order": Shuffled.of(num_samples), "batch_size": BATCH_SIZE, "microbatches": microbatches}
    given = [*PATIENT, "--set", f"without={listed(tmp_path, samples_of(0, 1, **data))}", *options]
    path = SCRIPT.with_name(script)
    alone = run_workers(path, 1, directory=tmp_path / "alone", options=given)
    faults = Faults().kill("w1", step=2, at="after_backward")
    killed = run_workers(path, 3, directory=tmp_path / "killed", options=given, faults=faults)
    assert (alone.exit_code, killed.exit_code) == (0, 0), alone.output + killed.output
    assert "SIGKILL" in killed.output
    assert (killed.digests, killed.final) == (alone.digests, alone.final)
    assert alone.lines[0]["samples"] % BATCH_SIZE, "something was left out"


def test_replay_refuses_what_it_cannot_leave_out(tmp_path: Path, unisono: Unisono) -> None:
    run = tmp_path / "all"
    member.settle(RunSpec(arguments=(str(SCRIPT),), folder=str(tmp_path), settings=RunSettings()))
    train(run)
    listed(tmp_path, [5])
    (tmp_path / "none.txt").write_text("# nobody\n")
    (tmp_path / "wrong.txt").write_text("5\n96\n")
    train(tmp_path / "sampled", sampler=WeightedRandomSampler([1.0] * SIZE, SIZE))
    train(tmp_path / "short", lengths=(1,))
    listed(tmp_path, samples_of(1, 0), "unseen.txt")
    for run_name, name, into, words in (
        ("all", "none.txt", "new", "none.txt names no sample"),
        ("all", "wrong.txt", "new", "wrong.txt, line 2: there is no sample 96"),
        ("all", "absent.txt", "new", "cannot be read: No such file"),
        ("all", "gone.txt", "sampled", "--into sampled holds a run"),
        ("all", "gone.txt", "all/new", "whose files must not change"),
        ("sampled", "gone.txt", "new", "is not known from its description"),
        ("short", "unseen.txt", "new", "was used in the 1 step of"),
    ):
        refused = unisono("replay", run_name, "--without", name, "--into", into)
        assert refused.wait() == 2, (refused.out, refused.err)
        refused.line(words)
    refused = unisono("run", SCRIPT, "--set", "without=none.txt", "--run-dir", "new")
    assert refused.wait() == 2, (refused.out, refused.err)
    refused.line("none.txt names no sample")
    assert not (tmp_path / "new").exists()
