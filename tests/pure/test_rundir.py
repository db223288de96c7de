"""A directory belongs to one run, and nothing in it is lost by accident."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from unisono.cli.given import check_directory
from unisono.cluster.head.directory import go_on_in, leave
from unisono.core.errors import RunDirectoryError, UsageError
from unisono.record import rundir
from unisono.record.journal import JOURNAL
from unisono.record.rundir import RUN_FILE, Lock, RunDirectory, claim, describe, forget_head, holder
from unisono.system.owned import write_whole


def test_a_directory_is_made_and_claimed(tmp_path: Path) -> None:
    claim(tmp_path / "a" / "b", "r1", overwrite=False)
    assert holder(tmp_path / "a" / "b") == "r1"
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [RUN_FILE]


def test_the_same_run_may_claim_again(tmp_path: Path) -> None:
    """As every new rank 0 does; what is there stays."""
    claim(tmp_path, "r1", overwrite=False)
    describe(tmp_path, {"run_id": "r1", "recipe": {"seed": 3}})
    (tmp_path / JOURNAL).write_text("{}\n")
    for overwrite in (False, True):
        claim(tmp_path, "r1", overwrite=overwrite)
    assert json.loads((tmp_path / RUN_FILE).read_text())["recipe"] == {"seed": 3}
    assert (tmp_path / JOURNAL).read_text() == "{}\n"


@pytest.mark.parametrize(("run_id", "left"), [("r1", []), ("r2", [".head.json.17.part", "head.json", "token"])])
def test_only_the_own_address_is_removed(run_id: str, left: list[str], tmp_path: Path) -> None:
    for name in ("head.json", ".head.json.17.part"):
        (tmp_path / name).write_text(json.dumps({"run_id": "r1"}))
    (tmp_path / "token").write_text("secret of r1")
    forget_head(tmp_path, run_id, f"secret of {run_id}")
    forget_head(tmp_path / "gone", run_id, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_files_of_others_do_not_disturb(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    claim(tmp_path, "r1", overwrite=False)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({RUN_FILE: '{"run_id": "r0"}'}, "r0"),
        ({RUN_FILE: "half a fi"}, "unreadable run.json"),
        ({RUN_FILE: "[]"}, "unreadable run.json"),
        ({RUN_FILE: '{"id": 1}'}, "unreadable run.json"),
        ({JOURNAL: "{}\n"}, "unknown, only a journal is left"),
    ],
)
def test_another_run_is_refused_and_kept(content: dict[str, str], named: str, tmp_path: Path) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RunDirectoryError) as caught:
        claim(tmp_path, "r1", overwrite=False)
    assert str(caught.value).startswith(f"{tmp_path} holds another run ({named}); choose another directory")
    assert str(caught.value).endswith(
        'or pass overwrite=True to unisono.Run to replace it, or resume="auto" to resume it'
    )
    with pytest.raises(
        RunDirectoryError, match=f"or add --overwrite to replace it, or --resume {tmp_path} to resume it"
    ):
        claim(tmp_path, "r1", overwrite=False, by_command=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == content


def test_a_run_that_is_going_is_not_to_be_overwritten(tmp_path: Path) -> None:
    """Whoever asks is not told to pass overwrite=True, which would be refused as well."""
    claim(tmp_path, "r0", overwrite=False)
    lock = Lock()
    lock.take(tmp_path, "r0")
    with pytest.raises(RunDirectoryError) as caught:
        claim(tmp_path, "r1", overwrite=False)
    assert str(caught.value).startswith(f"a run is active in {tmp_path} (r0, pid ")
    assert "overwrite" not in str(caught.value)
    lock.release()
    with pytest.raises(RunDirectoryError, match=r"holds another run .*overwrite=True"):
        claim(tmp_path, "r1", overwrite=False)


def test_a_full_disk_is_not_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    lock = Lock()
    with pytest.raises(RunDirectoryError, match="cannot be written: No space left on device"):
        lock.take(tmp_path, "r1")
    monkeypatch.undo()
    lock.take(tmp_path, "r1")
    lock.release()


def test_overwriting_removes_what_is_ours_only(tmp_path: Path) -> None:
    claim(tmp_path, "r0", overwrite=False)
    (tmp_path / JOURNAL).write_text("{}\n")
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "figures").mkdir()
    claim(tmp_path, "r1", overwrite=True)
    assert holder(tmp_path) == "r1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures", "notes.txt", RUN_FILE]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot be made: Not a directory"):
        claim(tmp_path / "file" / "run", "r1", overwrite=False)


def test_a_description_is_replaced_whole(tmp_path: Path) -> None:
    """Who reads meanwhile sees the old one or the new one; a failure leaves the old one."""
    claim(tmp_path, "r1", overwrite=False)
    describe(tmp_path, {"run_id": "r1", "started": 1.5})
    assert json.loads((tmp_path / RUN_FILE).read_text()) == {"schema": 1, "run_id": "r1", "started": 1.5}
    (tmp_path / f".{RUN_FILE}.{os.getpid()}.part").mkdir()
    with pytest.raises(RunDirectoryError, match="cannot be written: Is a directory"):
        describe(tmp_path, {"run_id": "r2"})
    assert holder(tmp_path) == "r1"


def test_who_holds_a_directory_knows_whether_it_is_still_there(tmp_path: Path) -> None:
    """By the file that it has open, or by the run's name: a copy that was put back is the run's as well."""
    here, moved = tmp_path / "run", tmp_path / "moved"
    claim(here, "r1", overwrite=False)
    lock = Lock()
    assert not lock.is_in(here, "r1"), "it is not held"
    lock.take(here, "r1")
    try:
        assert lock.is_in(here, "r1")
        here.rename(moved)
        assert not lock.is_in(here, "r1")
        claim(here, "r2", overwrite=False)
        assert not lock.is_in(here, "r1"), "another run's"
        shutil.rmtree(here)
        here.mkdir()
        assert not lock.is_in(here, "r1"), "nobody's"
        shutil.copytree(moved, here, dirs_exist_ok=True)
        assert lock.is_in(here, "r1")
        shutil.rmtree(here)
        moved.rename(here)
        assert lock.is_in(here, "r1")
    finally:
        lock.release()


def test_a_run_that_has_ended_before_its_first_step_is_replaced(tmp_path: Path) -> None:
    """It crashed in its first micro-batch, say: the next attempt needs no --overwrite."""
    claim(tmp_path, "r0", overwrite=False)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "journal.jsonl").write_text('{"line": 0, "kind": "end", "ok": false, "reason": "x"}\n')
    directory = RunDirectory(tmp_path)
    directory.claim("r1", overwrite=False, resume=False)
    assert holder(tmp_path) == "r1"
    assert not (tmp_path / "journal.jsonl").exists()
    directory.release()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("journal.jsonl", '{"line": 0, "kind": "step", "step": 0}\n'),
        ("journal.jsonl", '{"line": 0, "kind": "evaluation", "step": 0}\n'),
        ("journal.jsonl", "not a journal\n"),
        ("checkpoints/step-0000000000/manifest.json", "{}"),
        ("run.json", "{"),
    ],
    ids=["step", "evaluation", "broken journal", "checkpoint", "broken description"],
)
def test_a_run_that_has_something_to_lose_is_kept(name: str, text: str, tmp_path: Path) -> None:
    claim(tmp_path, "r0", overwrite=False)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(RunDirectoryError, match="holds another run"):
        RunDirectory(tmp_path).claim("r1", overwrite=False, resume=False)
    assert (tmp_path / name).read_text() == text


def test_a_run_that_is_at_its_first_step_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "LOCK_PATIENCE_S", 0.0)
    first = RunDirectory(tmp_path)
    first.claim("r0", overwrite=False, resume=False)
    with pytest.raises(RunDirectoryError, match="a run is active in"):
        RunDirectory(tmp_path).claim("r1", overwrite=False, resume=False)
    assert holder(tmp_path) == "r0"
    first.release()


def test_without_locks_only_the_user_can_say_that_a_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    claim(tmp_path, "r0", overwrite=False)
    with pytest.raises(RunDirectoryError, match="holds another run"):
        RunDirectory(tmp_path).claim("r1", overwrite=False, resume=False)


def test_a_run_goes_on_in_a_directory_as_long_as_its_processes_hold_it(tmp_path: Path) -> None:
    """Also where it is shared: a process id in the address of the head may be that of another machine."""
    (tmp_path / "head.json").write_text(json.dumps({"pid": os.getpid(), "url": "ws://other:1", "run_id": "a"}))
    check_directory(tmp_path)
    lock = Lock()
    lock.take(tmp_path, "a")
    try:
        with pytest.raises(UsageError, match=r"a run is active in .* \(a, pid"):
            check_directory(tmp_path)
        check_directory(tmp_path, resumes=True)  # this process is no head, so what holds it has lost its own
    finally:
        lock.release()


def test_a_side_of_the_run_comes_back_to_the_directory_that_it_has_left(tmp_path: Path) -> None:
    """Its machine has the head for the second time."""
    run_dir, facts = str(tmp_path / "run"), json.dumps({"run_id": "r1"})
    assert "continue in" in go_on_in(run_dir, "r1", facts)
    (tmp_path / "run" / JOURNAL).write_text("{}\n")
    assert "keeps what was written" in leave(run_dir, "r1")
    assert "holds a different run" in go_on_in(run_dir, "r2", facts)
    assert f"has come back: journal and checkpoints continue in {run_dir}" in go_on_in(run_dir, "r1", facts)
    assert holder(tmp_path / "run") == "r1"
    assert go_on_in(run_dir, "r1", facts) == ""


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Also where somebody has put a link in the way, or a process was killed before it was done."""
    path, other = tmp_path / "run.json", tmp_path / "of-others"
    other.write_text("theirs")
    (tmp_path / f".run.json.{os.getpid()}.part").symlink_to(other)
    write_whole(path, b"new", mode=0o600)
    assert (path.read_text(), other.read_text(), path.stat().st_mode & 0o777) == ("new", "theirs", 0o600)
    path.unlink()
    path.mkdir()
    (path / "in the way").touch()
    with pytest.raises(OSError, match="directory"):
        write_whole(path, b"newer")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["of-others", "run.json"]
