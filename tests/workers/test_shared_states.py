"""Optimizer states that are distributed over the workers: checkpoints are those of a replicated optimizer."""

from __future__ import annotations

import errno
import re
import uuid
import warnings
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import unisono
from tests.workers.disk import wait_for_disk
from tests.workers.models import Mlp, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, StaticRun, train_on
from tests.workers.test_checkpoint import InSight
from unisono.core.cadence import Position, assign_parts
from unisono.core.errors import DivergenceError, StateLost, UsageError
from unisono.engine.checkpoint import saving, snapshot
from unisono.engine.checkpoint.loading import read
from unisono.engine.checkpoint.snapshot import Layout, tensor_names
from unisono.engine.state.packing import digest_of_state, pack, pack_held, unpack
from unisono.engine.state.spread import held_digests, units_in
from unisono.engine.state.tracked import Tracked
from unisono.record import checkpoint_files as files
from unisono.record.checkpoint_files import FileFacts
from unisono.record.journal import read as read_journal
from unisono.record.rundir import RunDirectory
from unisono.strategies.shard.sharding import ShardedOptimizer

pytestmark = pytest.mark.more

CPU = torch.device("cpu")
NUM_PARAMETERS = 6


def whole() -> dict[str, Any]:
    """The state of a run with a replicated optimizer, as a checkpoint has it."""
    states = {
        index: {"step": torch.tensor(3.0), "momentum": torch.arange(float(8 * (index + 1))) - index}
        for index in range(NUM_PARAMETERS)
    }
    model = {f"weight{index}": torch.full((8 * (index + 1),), 1.5 * index) for index in range(NUM_PARAMETERS)}
    return {"objects": {"model": model, "optimizer": {"state": states, "param_groups": [{"lr": 0.1}]}}}


def held_by(worker_id: str, holders: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """What one worker has of it."""
    state = whole()
    states = state["objects"]["optimizer"]["state"]
    for index, ids in enumerate(holders):
        if worker_id not in ids:
            states[index] = {key: value.to("meta") for key, value in states[index].items()}
    return state


def shared(state: dict[str, Any]) -> Any:
    """An optimizer of which one worker holds some states, as far as their digests need it."""
    unit = partial(ShardedOptimizer.unit, cast(ShardedOptimizer, None))
    return SimpleNamespace(state_dict=lambda: state, unit=unit)


def tracked_by(worker_id: str, holders: Sequence[tuple[str, ...]]) -> Tracked:
    def find(paths: Sequence[str]) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = [()] * len(paths)
        for number, index in units_in(shared({}), paths, "tracked['objects']['optimizer']"):
            found[number] = holders[index]
        return found

    return cast(Tracked, SimpleNamespace(whole_state=lambda: held_by(worker_id, holders), updated=set, holders=find))


PAIRS = [("w0", "w1"), ("w1", "w2"), ("w2", "w0")] * 2


class Members:
    """The savers of one run, in this process; what they report is carried by hand."""

    def __init__(self, directory: Path, holders: Sequence[tuple[str, ...]], reaches: Sequence[bool] = (True,) * 3):
        self.ids = [f"w{rank}" for rank in range(len(reaches))]
        policy = unisono.Checkpoints(every_steps=1, keep=10)
        self.savers = [
            saving.Saver(policy, InSight(directory, one), CPU, tracked_by(me, holders))
            for me, one in zip(self.ids, reaches, strict=True)
        ]
        for me, saver in zip(self.ids, self.savers, strict=True):
            saver.join(me, {}, {})
        self.total = 0

    def step(self) -> None:
        reports = [saver.report() for saver in self.savers]
        self.total += 1
        place = Position(phase=0, step=self.total, number=self.total, total=self.total, lines=0)
        for saver in self.savers:
            saver.on_reports(reports, 1, self.ids)
            saver.boundary(snapshot.Moment(place, 1, self.ids, {}))
        for saver in self.savers:
            saver._writer.drain()


def test_a_checkpoint_is_that_of_a_replicated_optimizer_and_each_worker_writes_what_it_holds(tmp_path: Path) -> None:
    members = Members(tmp_path, PAIRS)
    for _ in range(3):
        members.step()
    found = files.complete(tmp_path / files.FOLDER)[-1]
    manifest, state = read(found)
    assert bits_of(state) == bits_of(whole())
    assert (found / files.SKELETON).read_bytes() == pack(whole(), "tracked").skeleton
    writers = {entry.name: f"w{entry.part}" for entry in manifest.tensors}
    for index, ids in enumerate(PAIRS):
        assert {writers[f"optimizer.state.{index}.{key}"] for key in ("step", "momentum")} <= set(ids)
    assert len(set(writers.values())) == 3


def test_what_no_worker_holds_any_more_is_not_written_and_named(tmp_path: Path) -> None:
    members = Members(tmp_path, [("w0",), ("gone",), *PAIRS[2:]])
    with pytest.raises(StateLost, match=r"optimizer\.state\.1\.step were lost"):
        members.step()


@given(
    st.lists(st.tuples(st.integers(0, 100), st.sets(st.integers(0, 4))), max_size=30),
    st.integers(5, 6),
)
def test_each_tensor_goes_to_one_that_has_it(sizes_and_writers: list[tuple[int, set[int]]], num_parts: int) -> None:
    allowed = {number: tuple(sorted(one)) for number, (_, one) in enumerate(sizes_and_writers) if one}
    parts = assign_parts([size for size, _ in sizes_and_writers], num_parts, allowed)
    assert all(parts[number] in one for number, one in allowed.items())


def test_what_no_writer_holds_has_a_part_of_its_own() -> None:
    packed = pack(whole(), "tracked")
    allowed = {number: (() if number % 3 == 0 else (0, 1)) for number in range(NUM_PARAMETERS, len(packed.tensors))}
    layout = Layout.of(packed.tensors, tensor_names(packed.paths), 2, allowed)
    assert len(layout.headers) == 3
    lent = [number for number, ids in allowed.items() if not ids]
    assert sorted(layout.lent) == lent == [n for n, entry in enumerate(layout.entries) if entry.part == 2]
    starts = [layout.entries[number].start for number in layout.lent]
    assert starts == sorted(starts)


def test_a_file_written_piece_by_piece_has_the_checksums_of_one_written_at_once(tmp_path: Path) -> None:
    data = torch.arange(files.BLOCK_BYTES // 2 + 1000, dtype=torch.int32).view(torch.uint8)
    memory = files.memory_at(data.data_ptr(), data.nbytes, data)
    stream = files.Stream(tmp_path / "pieces")
    for start in range(0, len(memory), 5_000_001):
        stream.write(memory[start : start + 5_000_001])
    assert stream.close() == files.write_file(tmp_path / "whole", memory)
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_file_that_cannot_be_written_says_so_in_the_end(tmp_path: Path) -> None:
    stream = files.Stream(tmp_path / "nowhere" / "file")
    stream.write(memoryview(b"abc"))
    with pytest.raises(FileNotFoundError):
        stream.close()


def test_digests_of_all_holders_make_that_of_the_replicated_optimizer() -> None:
    optimizers = [held_by(me, PAIRS)["objects"]["optimizer"] for me in ("w0", "w1", "w2")]
    others = {number: digest for one in optimizers for number, digest in held_digests(shared(one)).items()}
    expected = digest_of_state(whole()["objects"]["optimizer"])
    assert [digest_of_state(one, others) for one in optimizers] == [expected] * 3


def test_a_tensor_without_content_is_refused_where_no_worker_can_hold_it() -> None:
    state = {"weight": torch.empty(3, device="meta")}
    with pytest.raises(UsageError, match=r"state\['weight'\] is a strided tensor on meta"):
        pack(state)
    assert pack_held(state).tensors[0].is_meta


# -- whole trainings ---------------------------------------------------------------------------------


class Trained(NamedTuple):
    """What a training leaves behind."""

    final: str
    """The bits of the model."""
    digests: dict[str, str]
    """At the end of the run, as the journal has them."""
    checkpoints: dict[int, str]
    """The bits of each, by step."""


def train(run: unisono.Run, copies: int, max_steps: int | None = None) -> str:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if copies:
        unisono.shard(optimizer, copies=copies)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=2, max_steps=max_steps):
        for x, y in step:
            wait_for_disk(run)
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return bits_of(model.state_dict())


def trained(directory: Path, final: str) -> Trained:
    end = [line for line in read_journal(directory) if line["kind"] == "end"][-1]
    found = {files.step_of(one): bits_of(read(one)[1]["objects"]) for one in files.complete(directory / files.FOLDER)}
    return Trained(final, end["digests"], found)


POLICY = unisono.Checkpoints(every_steps=3, keep=100)


def run_of(seat: Seat, place: Place, directory: str, reaching: Collection[int], **options: Any) -> unisono.Run:
    """The run of a process that sees the directory, or does not."""
    uuid.uuid4 = lambda: uuid.UUID(int=7)  # one run, in processes without a head
    snapshot.LATE_BYTES = 1  # whatever can be, is copied while the next step computes
    if seat.rank > 0:
        RunDirectory.claim = lambda *_, **__: None  # type: ignore[method-assign]  # the first member claims it
    if seat.rank not in reaching:
        directory = f"{directory}-of-another-machine"
    return StaticRun(place.exchange(), directory, seed=3, checkpoint=POLICY, **options)


def _train(
    seat: Seat,
    place: Place,
    directory: str,
    reaching: Collection[int],
    copies: int,
    max_steps: int | None,
    options: dict[str, Any],
) -> str:
    with run_of(seat, place, directory, reaching, **options) as run:
        return train(run, copies, max_steps)


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("replicated") / "run"
    with AloneRun(directory, seed=3, checkpoint=POLICY) as run:
        final = train(run, 0)
    return trained(directory, final)


@pytest.mark.parametrize(
    ("kind", "size", "copies", "reaching"),
    [("shared", 3, 2, range(3)), ("shared", 3, 1, [0]), ("gloo", 4, 2, [0, 2])],
)
def test_a_run_leaves_what_one_with_a_replicated_optimizer_leaves(
    kind: str, size: int, copies: int, reaching: Collection[int], replicated: Trained, tmp_path: Path
) -> None:
    """Also where few workers see the directory: the others bring them what they do not hold."""
    finals = train_on(kind, size, _train, str(tmp_path / "run"), reaching, copies, None, {})
    assert trained(tmp_path / "run", finals[0]) == replicated
    assert set(finals) == {replicated.final}


def test_the_journal_names_the_step_of_a_checkpoint_at_the_end_of_a_loop(tmp_path: Path) -> None:
    with AloneRun(tmp_path / "run", seed=3, checkpoint=unisono.Checkpoints(every_steps=100)) as run:
        model = Mlp()
        optimizer = unisono.shard(torch.optim.AdamW(model.parameters(), lr=0.01))
        run.track(model=model, optimizer=optimizer)
        for _ in range(2):
            for step in run.steps(vectors(), batch_size=24, microbatches=6, max_steps=3):
                for x, y in step:
                    wait_for_disk(run)
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
    at = [line["checkpoint"]["step"] for line in read_journal(tmp_path / "run") if line.get("checkpoint")]
    assert at == [files.step_of(one) for one in files.complete(tmp_path / "run" / files.FOLDER)][:1]


def train_channels_last(run: unisono.Run, copies: int) -> str:
    """With states that do not lie in memory as a file has them."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(32, 2)]
    model = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if copies:
        unisono.shard(optimizer, copies=copies)
    run.track(model=model, optimizer=optimizer)
    images = list(torch.randn(24, 3, 4, 4))
    for step in run.steps(images, batch_size=24, microbatches=6, epochs=6):
        for x in step:
            wait_for_disk(run)
            model(x).square().mean().backward()
        optimizer.step()
    return bits_of(model.state_dict())


def _train_channels_last(seat: Seat, place: Place, directory: str) -> str:
    with run_of(seat, place, directory, [0]) as run:
        return train_channels_last(run, 1)


def test_what_is_lent_lies_in_a_file_as_if_its_writer_had_held_it(tmp_path: Path) -> None:
    """Also a state of a model in channels_last: its elements have another order in memory than in a file."""
    with AloneRun(tmp_path / "alone", seed=3, checkpoint=POLICY) as run:
        final = train_channels_last(run, 0)
    finals = train_on("shared", 3, _train_channels_last, str(tmp_path / "run"))
    assert trained(tmp_path / "run", finals[0]) == trained(tmp_path / "alone", final)


def _train_on_full_disk(seat: Seat, place: Place, directory: str, full: int) -> tuple[str, list[str]]:
    """The bits, and what is warned of."""

    def refuse(path: Path, *_: Any) -> FileFacts | None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    if seat.rank == full:
        files.write_file = refuse  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with run_of(seat, place, directory, range(3)) as run:
            final = train(run, 2)
    return final, [str(one.message) for one in warned if "checkpoint" in str(one.message)]


@pytest.mark.parametrize("full", [0, 1])
def test_a_disk_that_is_full_costs_the_checkpoints_and_nothing_else(
    full: int, replicated: Trained, tmp_path: Path
) -> None:
    """The members decide together that it has failed, and the one that could not write says why. The last checkpoint is
    written by the first member alone, which tries twice: at the end of the loop, and of the run.
    """
    found = train_on("shared", 3, _train_on_full_disk, str(tmp_path / "run"), full)
    assert {final for final, _ in found} == {replicated.final}
    assert list(trained(tmp_path / "run", "").checkpoints) == ([6] if full else [])
    for rank, (_, said) in enumerate(found):
        at = [int(step) for one in said for step in re.findall(r"of step (\d+) was not written .* No space left", one)]
        assert at == (([3] if full else [3, 6, 6]) if rank == full else [])
    assert not list((tmp_path / "run" / files.FOLDER).glob(".*/part-*"))


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that were stopped in the middle: with a replicated optimizer, and with one whose states are shared out."""
    found = {name: tmp_path_factory.mktemp(name) / "run" for name in ("replicated", "sharded")}
    with AloneRun(found["replicated"], seed=3, checkpoint=POLICY) as run:
        train(run, 0, 3)
    train_on("shared", 3, _train, str(found["sharded"]), range(3), 2, 3, {})
    return found


RESUMED = [
    ("replicated", "shared", 2, 2, [0, 1]),  # into fewer or more workers than it was written by
    ("replicated", "gloo", 4, 1, [0, 2]),
    ("sharded", "two-level", 4, 2, [0]),
    ("sharded", "shared", 3, 0, range(3)),
    ("sharded", "shared", 1, 2, [0]),
]


@pytest.mark.parametrize(("written", "kind", "size", "copies", "reaching"), RESUMED)
def test_a_checkpoint_is_loaded_with_and_without_shared_states(
    written: str,
    kind: str,
    size: int,
    copies: int,
    reaching: Collection[int],
    halves: dict[str, Path],
    replicated: Trained,
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    options = {"resume": str(halves[written])}
    finals = train_on(kind, size, _train, str(directory), reaching, copies, None, options)
    found = trained(directory, finals[0])
    assert found.digests == replicated.digests
    assert found.checkpoints[6] == replicated.checkpoints[6]
    assert set(finals) == {replicated.final}


def _load(seat: Seat, place: Place, directory: str, reaching: Collection[int], resume: str) -> dict[int, bool]:
    """Which states this worker has, before the first update."""
    with run_of(seat, place, directory, reaching, resume=resume) as run:
        model = Mlp()
        optimizer = unisono.shard(torch.optim.AdamW(model.parameters(), lr=0.01), copies=1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=2):
            held = {index: bool(state["exp_avg"].any()) for index, state in optimizer.held().items()}  # type: ignore[attr-defined]
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            break
        else:
            raise AssertionError("no step")
    return held


@pytest.mark.parametrize("reaching", [[0], [0, 1, 2]])
def test_each_member_loads_only_what_it_will_hold(
    reaching: Collection[int], halves: dict[str, Path], tmp_path: Path
) -> None:
    held = train_on("shared", 3, _load, str(tmp_path / "run"), reaching, str(halves["sharded"]))
    assert sorted(index for one in held for index in one) == list(range(len(list(Mlp().parameters()))))
    assert all(len(one) > 0 for one in held)
    assert all(all(one.values()) for one in held)


# -- newcomers ---------------------------------------------------------------------------------------


def tracked(*, copies: int) -> Tracked:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    if copies:
        unisono.shard(optimizer, copies=copies)
    found = Tracked()
    found.add({"model": model, "optimizer": optimizer})
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return found


def test_to_read_a_state_that_is_not_there_makes_none() -> None:
    """The states of torch are made by reading them."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    unisono.shard(optimizer)
    assert not [optimizer.state[parameter] for parameter in model.parameters() if optimizer.state[parameter]]
    assert optimizer.held() == {}  # type: ignore[attr-defined]


def test_a_newcomer_gets_no_state_and_knows_what_there_is() -> None:
    members, newcomer = tracked(copies=2), tracked(copies=2)
    packed = pack(members.state(), "tracked")
    assert not [path for path in packed.paths if "exp_avg" in path]
    newcomer.load(unpack(packed.skeleton, packed.tensors))
    optimizer = cast(ShardedOptimizer, newcomer.sharded["optimizer"])
    assert optimizer.held() == {}
    expected = members.objects["optimizer"].state_dict()["state"]
    found = optimizer.state_dict()["state"]
    assert list(found) == list(expected)
    assert all(found[index][key].is_meta for index, state in expected.items() for key in state)


@pytest.mark.parametrize(("run", "worker"), [(2, 0), (0, 2)])
def test_a_newcomer_whose_script_does_not_shard_alike_is_refused(run: int, worker: int) -> None:
    with pytest.raises(UsageError, match=r"all workers must call unisono\.shard alike"):
        tracked(copies=worker).load(tracked(copies=run).state())


def test_a_checkpoint_of_either_loads_into_the_other() -> None:
    """Here one worker holds everything: what is loaded is the same as what was saved, whoever saves and loads."""
    for ours in (0, 2):
        for theirs in (0, 2):
            saved = tracked(copies=theirs)
            loaded = tracked(copies=ours)
            loaded.load(saved.whole_state())
            assert bits_of(loaded.whole_state()) == bits_of(saved.whole_state())


# -- copies of a state -------------------------------------------------------------------------------


def _spoil(seat: Seat, place: Place, spoilt: int) -> str:
    """What the error says when a bit of one copy has changed."""
    try:
        with place.run(seed=3) as run:
            model = Mlp()
            optimizer = unisono.shard(torch.optim.AdamW(model.parameters(), lr=0.01), copies=2)
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=2):
                for x, y in step:
                    wait_for_disk(run)
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if step.number == 2 and seat.rank == spoilt:
                    state = next(iter(optimizer.held().values()))  # type: ignore[attr-defined]
                    state["exp_avg"].view(-1)[0] += 1.0
    except DivergenceError as error:
        return str(error)
    return ""


def test_a_copy_that_differs_is_named_with_who_holds_it() -> None:
    """No worker's own state tells: each has other states, and only their copies can be compared."""
    words = train_on("shared", 3, _spoil, 1)
    assert len(set(words)) == 1
    assert re.search(r"at step 3 w\d and w\d hold copies of optimizer\['state'\]\[\d\]\['exp_avg'\]", words[0]), words
    assert "w1" in words[0]
    assert "faulty" in words[0]
