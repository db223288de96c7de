"""Copies of checkpoints: nobody's disk is the only one, and no place of copies, however broken, disturbs a run."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from tests.waiting import WAIT_S
from tests.workers.conftest import Unisono, forked, marked, wait_until_gone
from tests.workers.disk import wait_for_disk
from tests.workers.test_checkpoint import ROOT, SCRIPT, same, train
from unisono.core.errors import CheckpointError, UsageError
from unisono.engine.checkpoint import copies
from unisono.record import checkpoint_files as files
from unisono.record.journal import JOURNAL, compare
from unisono.record.rundir import read_facts
from unisono.testing import run_workers

pytestmark = pytest.mark.more


def copied(place: object) -> list[int]:
    """The steps of the whole copies in a place."""
    return [copy.step for _, copy in reversed([*copies.find([str(place)])])]


def wait_for_copies(run: unisono.Run, step: unisono.Step | None = None) -> None:
    """Wait until what is written is copied as well, so that no checkpoint is left out."""
    wait_for_disk(run)
    run._keeper.saver.copies.wait()


def policy(place: object, **settings: Any) -> unisono.Checkpoints:
    return unisono.Checkpoints(**{"every_steps": 2, "copies": str(place), **settings})


@pytest.fixture
def url() -> Iterator[str]:
    """A place in the memory of this process."""
    name = uuid.uuid4().hex
    yield f"memory://{name}/digits"
    if (memory := fsspec.filesystem("memory")).exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


class Unsteady(MemoryFileSystem):
    """A file system that refuses or holds what is written to it, when the test says so."""

    protocol = "unsteady"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    refused: ClassVar[str] = ""
    """Files with this in their name cannot be written."""
    free = threading.Event()
    """A copy waits for this."""

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        assert self.free.wait(WAIT_S)
        if self.refused and self.refused in rpath:
            raise PermissionError(13, "Permission denied")
        super().put_file(lpath, rpath, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        if self.refused and self.refused in path:
            raise PermissionError(13, "Permission denied")
        super().pipe_file(path, value, **options)


@pytest.fixture
def unsteady() -> Iterator[type[Unsteady]]:
    fsspec.register_implementation("unsteady", Unsteady, clobber=True)
    Unsteady.store.clear()
    Unsteady.pseudo_dirs[:] = [""]
    Unsteady.refused = ""
    Unsteady.free.set()
    yield Unsteady
    Unsteady.free.set()


# -- there and back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["path", "file", "memory"])
def test_a_run_whose_directory_is_lost_goes_on_from_a_copy_with_the_same_bits(
    kind: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"path": str(tmp_path / "disk"), "file": f"file://{tmp_path}/disk", "memory": url}[kind]
    train(tmp_path / "a", checkpoint=policy(place, keep=2), wait=True, at_step=wait_for_copies)
    assert copied(place) == [4, 6]
    shutil.rmtree(tmp_path / "a")
    model, seen = train(tmp_path / "a", num_steps=9, checkpoint=policy(place, keep=2), resume=place)
    other, expected = train(tmp_path / "b", num_steps=9)
    assert same(model, other)
    assert seen.samples == expected.samples
    assert compare(tmp_path / "a", tmp_path / "b").startswith("identical: 9 steps")
    assert "resuming at step 6" in capsys.readouterr().err
    assert copied(place)[-1] == 9
    for path in files.complete(tmp_path / "a" / files.FOLDER):
        files.verify(path)


def test_a_copy_has_the_bytes_of_the_checkpoint_and_the_journal_up_to_it(tmp_path: Path) -> None:
    train(tmp_path / "run", checkpoint=policy(tmp_path / "disk"), wait=True, at_step=wait_for_copies)
    done = files.complete(tmp_path / "run" / files.FOLDER)
    assert [files.step_of(path) for path in done] == copied(tmp_path / "disk") == [2, 4, 6]
    for path in done:
        there = tmp_path / "disk" / files.FOLDER / path.name
        for file in path.iterdir():
            assert (there / file.name).read_bytes() == file.read_bytes()
        lines = gzip.decompress((there / copies.COPIED_JOURNAL).read_bytes())
        assert (tmp_path / "run" / JOURNAL).read_bytes().startswith(lines)
        assert lines.count(b"\n") == files.read_manifest(path).lines


def test_a_single_copy_is_where_a_run_goes_back_to(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    train(tmp_path / "a", checkpoint=policy(place), wait=True, at_step=wait_for_copies)
    one = place / files.FOLDER / files.step_name(4)
    model, _ = train(tmp_path / "a", num_steps=5, checkpoint=policy(place, every_steps=100), resume=one)
    other, _ = train(tmp_path / "b", num_steps=5)
    assert same(model, other)
    assert compare(tmp_path / "a", tmp_path / "b").startswith("identical: 5 steps")
    assert copied(place) == [2, 4, 5], "the copy of step 6 is of the course that was left"
    assert [files.step_of(path) for path in files.complete(tmp_path / "a" / files.FOLDER)] == [2, 4, 5]


@pytest.mark.usefixtures("nursery")
def test_a_run_that_is_killed_with_its_machine_goes_on_elsewhere_with_other_workers(
    unisono: Unisono, mark: str, tmp_path: Path
) -> None:
    """Everything gets SIGKILL, and no file of the run directory is left."""
    place = f"file://{tmp_path}/disk"
    options = ["--workers", 2, "--run-dir", tmp_path / "a", "--copies-to", place]
    command = unisono("run", *options, SCRIPT, "--", "--steps", 10**6, "--keep", 2)
    deadline = time.monotonic() + WAIT_S
    number = 0
    while not any(step >= 6 for step in copied(place)):
        assert time.monotonic() < deadline
        command.line(f"did step {number}")  # another look when another step is done
        number += 1
    os.kill(command.pid, signal.SIGKILL)
    wait_until_gone({*marked(mark), *forked()}, time.monotonic() + WAIT_S)
    shutil.rmtree(tmp_path / "a")
    newest = copied(place)[-1]
    total = ["--steps", str(newest + 3)]
    again = run_workers(SCRIPT, 3, directory=tmp_path / "b", options=["--resume", place], arguments=total)
    assert again.exit_code == 0, again.output
    assert f"resuming at step {newest}" in again.output
    calm = run_workers(SCRIPT, 1, directory=tmp_path / "calm", arguments=total)
    assert (again.digests, again.final) == (calm.digests, calm.final)
    assert compare(tmp_path / "b", tmp_path / "calm").startswith(f"identical: {newest + 3} steps")


@pytest.mark.usefixtures("nursery")
def test_the_command_resumes_a_copy_with_the_scripts_own_command_and_lists_copies(
    unisono: Unisono, tmp_path: Path
) -> None:
    options = ["--workers", 2, "--run-dir", tmp_path / "a", "--copies-to", "disk"]
    first = unisono("run", *options, SCRIPT, "--", "--steps", 4, "--every", 2)
    assert first.wait() == 0, first.err
    shutil.rmtree(tmp_path / "a")
    again = unisono("run", "--resume", "disk", "--run-dir", "b", "--workers", 1)
    assert again.wait() == 0, again.err
    again.line(f"resuming {SCRIPT} --steps 4 --every 2")
    again.line("nothing is left to do: 4 of 4 steps are done")
    listed = unisono("checkpoints", f"file://{tmp_path}/disk", "check")
    assert listed.wait() == 0, listed.err
    assert listed.out[-1].startswith(files.step_name(4))
    assert listed.out[-1].endswith("every byte is correct")
    unknown = unisono("run", "--copies-to", "nothing://x", SCRIPT)
    assert unknown.wait() == 2
    unknown.line("copies of checkpoints cannot go to nothing://x: Protocol not known")


HELD = """
import os, sys
from functools import partial
import fsspec
from fsspec.implementations.local import LocalFileSystem
sys.path.insert(0, {root!r})
import unisono
from unisono.cluster.worker import member
from tests.workers import checkpointed_training

class Held(LocalFileSystem):
    protocol = "held"

    def put_file(self, source, target, **options):
        if member.current().worker_id == "w0":
            print("pid", os.getpid(), flush=True)
            open({fifo!r}).read()  # nobody writes
        super().put_file(source, target, **options)

fsspec.register_implementation("held", Held)
unisono.Checkpoints = partial(unisono.Checkpoints, copies="held://" + {place!r})
checkpointed_training.main()
"""


@pytest.mark.usefixtures("nursery")
def test_the_next_worker_makes_the_last_copy_if_the_one_that_makes_it_is_lost(
    unisono: Unisono, script: Callable[[str], str], tmp_path: Path
) -> None:
    """The others stand by while it is made, and all of them end well."""
    place, fifo = tmp_path / "disk", tmp_path / "fifo"
    os.mkfifo(fifo)
    name = script(HELD.format(root=ROOT, fifo=str(fifo), place=str(place)))
    command = unisono("run", "-n", 2, "--run-dir", "run", name, "--", "--steps", 4, "--every", 0)
    number = int(command.line("pid ").split()[-1])
    command.line("waits until step-0000000004 is copied")
    os.kill(number, signal.SIGKILL)
    assert command.wait() == 0, command.err
    assert copied(place) == [4]


# -- what is there when ----------------------------------------------------------------------------------


def test_the_same_script_goes_on_from_its_copies_where_the_directory_is_gone(tmp_path: Path) -> None:
    """resume="auto": begins where there is nothing, and goes on from whatever is newest."""
    place = tmp_path / "disk"
    settings: dict[str, Any] = {"resume": "auto", "checkpoint": policy(place, every_steps=100)}
    train(tmp_path / "a", num_steps=3, **settings)
    train(tmp_path / "b", num_steps=5, **settings)  # on another machine
    model, _ = train(tmp_path / "a", num_steps=7, **settings)  # on the first one again, whose own newest is of step 3
    other, _ = train(tmp_path / "c", num_steps=7)
    assert same(model, other)
    assert compare(tmp_path / "a", tmp_path / "c").startswith("identical: 7 steps")
    resumed = read_facts(tmp_path / "a")["resumed"]
    assert [each["step"] for each in resumed] == [3, 5]
    assert copied(place)[-3:] == [3, 5, 7]


def test_a_copy_that_was_cut_short_is_not_taken(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    train(tmp_path / "a", checkpoint=policy(place), wait=True, at_step=wait_for_copies)
    (place / files.FOLDER / files.step_name(6) / files.MANIFEST).unlink()
    assert copied(place) == [2, 4]
    model, _ = train(tmp_path / "b", num_steps=7, checkpoint=policy(place, every_steps=100), resume=str(place))
    other, _ = train(tmp_path / "c", num_steps=7)
    assert same(model, other)
    assert [each["step"] for each in read_facts(tmp_path / "b")["resumed"]] == [4]
    assert sorted(path.name for path in (place / files.FOLDER).iterdir()) == [files.step_name(n) for n in (2, 4, 7)]


@pytest.mark.parametrize("hurt", ["part", "journal"])
def test_a_damaged_copy_is_named_and_the_one_before_is_used(hurt: str, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    train(tmp_path / "a", checkpoint=policy(place), wait=True, at_step=wait_for_copies)
    newest = place / files.FOLDER / files.step_name(6)
    file = next(newest.glob("part-*")) if hurt == "part" else newest / copies.COPIED_JOURNAL
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.warns(UserWarning, match=rf"{file.name} is .*damaged.*; {files.step_name(4)} is used instead"):
        train(tmp_path / "b", num_steps=7, resume=str(place))
    train(tmp_path / "c", num_steps=7)
    assert compare(tmp_path / "b", tmp_path / "c").startswith("identical: 7 steps")
    shutil.rmtree(place / files.FOLDER)
    with pytest.raises(CheckpointError, match="has no complete copy of a checkpoint"):
        train(tmp_path / "d", resume=str(place))


def test_what_is_saved_again_at_the_same_step_replaces_its_copy(tmp_path: Path) -> None:
    """The new copy has another name: with keep=1, too, there is a whole copy at every moment."""
    place = tmp_path / "disk"
    with unisono.Run(tmp_path / "a", checkpoint=policy(place, every_steps=None, keep=1)) as run:
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(TensorDataset(torch.ones(16, 5)), batch_size=8, microbatches=2):
            for (inputs,) in step:
                step.backward(model(inputs).sum())
            optimizer.step()
        wait_for_copies(run)
        assert os.listdir(place / files.FOLDER) == [files.step_name(2)]
        with torch.no_grad():
            model.weight.zero_()
        run.save()
    assert os.listdir(place / files.FOLDER) == [f"{files.step_name(2)}.1"]
    with unisono.Run(tmp_path / "b", resume=str(place)) as run:
        model = nn.Linear(5, 3)
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        assert list(run.steps(TensorDataset(torch.ones(16, 5)), batch_size=8, microbatches=2)) == []
    assert not unisono.load_weights(tmp_path / "b")["weight"].any()


def test_copies_of_another_run_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "disk"
    train(tmp_path / "a", num_steps=4, checkpoint=policy(place))
    before = copied(place)
    train(tmp_path / "b", num_steps=8, checkpoint=policy(place))
    assert copied(place) == before
    assert "it holds copies of another run" in capsys.readouterr().err


# -- places that fail ------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_written_disturbs_nothing_and_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "disk"
    model, _ = train(tmp_path / "a", checkpoint=policy(place), wait=True, at_step=wait_for_copies)
    other, _ = train(tmp_path / "b")
    assert same(model, other)
    assert compare(tmp_path / "a", tmp_path / "b").startswith("identical: 6 steps")
    said = capsys.readouterr().err
    assert said.count(f"was not copied to {place}") == 1
    assert f"the newest checkpoint has no copy in {place}" in said


@pytest.mark.parametrize("refused", ["part-", "manifest.json", "copies.json"])
def test_a_place_that_works_again_is_told_and_gets_the_next_checkpoint(
    refused: str, unsteady: type[Unsteady], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = "unsteady://bucket/digits"

    def fail_for_a_while(run: unisono.Run, step: unisono.Step) -> None:
        wait_for_copies(run, step)
        unsteady.refused = refused if step.number < 6 else ""

    train(tmp_path / "a", num_steps=10, checkpoint=policy(place, keep=9), wait=True, at_step=fail_for_a_while)
    said = capsys.readouterr().err
    assert said.count(f"was not copied to {place}: Permission denied") == 1
    assert said.count(f"checkpoints are copied to {place} again") == 1
    assert copied(place)[-2:] == [8, 10]
    inside = [name.partition(f"/{files.FOLDER}/")[2] for name in Unsteady.store]
    names = {name.partition("/")[0] for name in inside if name}
    assert names == {files.step_name(step) for step in copied(place)}, "what was cut short is gone"


def test_a_slow_place_holds_up_no_step_and_keeps_what_it_still_copies(unsteady: type[Unsteady], tmp_path: Path) -> None:
    place = "unsteady://bucket/digits"
    held: list[list[int]] = []

    def look(run: unisono.Run, step: unisono.Step) -> None:
        wait_for_disk(run)
        if step.number == 9:
            unsteady.free.set()
        held.append([files.step_of(path) for path in files.complete(tmp_path / "a" / files.FOLDER)])

    unsteady.free.clear()
    train(tmp_path / "a", num_steps=10, checkpoint=policy(place, keep=1), wait=True, at_step=look)
    assert held[-1][0] == 2, "the first one is being copied, and stays"
    assert len(held[-1]) <= 3
    assert copied(place) == [10]
    assert [files.step_of(path) for path in files.complete(tmp_path / "a" / files.FOLDER)] == [10]


def test_the_end_waits_for_a_copy_for_a_limited_time(
    unsteady: type[Unsteady], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unsteady.free.clear()
    place = "unsteady://bucket/digits"
    train(tmp_path / "a", num_steps=2, checkpoint=policy(place, copies_wait_s=0.05))
    said = capsys.readouterr().err
    assert f"the copy of {files.step_name(2)} to {place} was not finished within 0 s and was abandoned" in said
    unsteady.free.set()


def test_where_copies_cannot_be_read_a_run_does_not_begin_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    broken = policy(f"file://{tmp_path}/file/disk")
    with pytest.raises(CheckpointError, match="cannot be read"):
        train(tmp_path / "a", checkpoint=broken, resume="auto")
    train(tmp_path / "b", num_steps=2, checkpoint=policy(tmp_path / "disk"))
    with pytest.warns(UserWarning, match="cannot be read.*; the run continues from"):
        train(tmp_path / "b", num_steps=4, checkpoint=broken, resume="auto")


def test_an_unknown_place_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="copies of checkpoints cannot go to nothing://x"):
        train(tmp_path / "a", checkpoint=policy("nothing://x"))
