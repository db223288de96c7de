"""A directory belongs to one run, and nothing in it is lost by accident."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.cli.given import check_directory
from unisono.cluster.head.directory import go_on_in, leave
from unisono.core.errors import RunDirectoryError, UsageError
from unisono.record import rundir
from unisono.record.journal import JOURNAL
from unisono.record.rundir import RUN_FILE, Lock, RunDirectory, claim, describe, forget_head, holder
from unisono.system.owned import write_whole
from unisono.views.report.html import _page


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
        f"or pass overwrite=True to unisono.Run to replace it (its files are put aside into {tmp_path / 'replaced'}), "
        'or resume="auto" to resume it'
    )
    with pytest.raises(
        RunDirectoryError, match=rf"or add --overwrite to replace it \(.*\), or --resume {tmp_path} to resume it"
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


def ours(run_id: str) -> dict[str, bytes]:
    """What a run leaves in its directory: by path, what the files begin with."""
    state = {
        "manifest.json": b'{\n "format": 1',
        "skeleton.msgpack": b"\x82\xa1",
        "part-00000-of-00001.safetensors": (60).to_bytes(8, "little") + b'{"a',
    }
    return {
        "journal.jsonl": b'{"line": 0, "kind": "step", "step": 0}\n',
        "events.jsonl": b'{"time": 17.5, "kind": "start"}\n',
        "journal.index": b'{"offset":0}\n',
        **dict.fromkeys(("times.jsonl", "times.before.jsonl"), b'{"step":0,"time":1.5}\n'),
        **dict.fromkeys(("use.jsonl", "use.before.jsonl"), b'{"time":1.5}\n'),
        "certificate.json": b'{\n  "payloadType": "application/vnd.in-toto+json"}',
        "report.html": _page("a run", "", []).encode(),
        "plan.json": b'{\n  "schema": 1}',
        **{f"checkpoints/step-0000000003/{name}": begins for name, begins in state.items()},
        **{f"checkpoints/.step-0000000004-1.partial/{name}": begins for name, begins in state.items()},
        "problems/20261123-012103-830-crash-step7.txt": b"crash",
        "profile/steps-3-9.json.gz": b"\x1f\x8b\x08",
        "tensorboard/events.out.tfevents.1795947674.000000.host": b"\x18" + bytes(11) + b"\t...\x1a\rbrain.Event:2",
        "run.json": f'{{\n  "schema": 1,\n  "run_id": "{run_id}",\n  "started": 4e9\n}}'.encode(),
    }


def foreign(own: bytes) -> dict[str, bytes]:
    """What somebody has in a directory, under names like a run's and beside them."""
    like = {
        *(f"{folder}/{name}"
          for folder in ("tools", "profile", "tensorboard", "problems", "evaluations", "times", "use")
          for name in ("mine.py", "deep/er/mine.py", "wandb.json", "steps-1-2.json.gz", "events.out.tfevents.1.h.2.0",
                       "events.out.tfevents.1795947674.000000.h", "0000000001/skeleton.msgpack", "20260101/a")),
        *(f"checkpoints/{name}" for name in ("epoch1.pt", "step-1/manifest.json", "step-0000000009/model.pt",
                                             "step-0000000003/manifest.json", "step-0000000003/notes")),
        *(f"replaced/{name}" for name in ("mine", "1/mine", "1/run.json", "2/tools/mine", "x/run.json")),
        *(name for name in ours("") if "/" not in name and name != "run.json"),
        *("without.txt", "data/events.jsonl", "use", "times", ".lock.txt"),
    }  # fmt: skip
    return {name: own + name.encode() for name in sorted(like)}


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        with contextlib.suppress(FileExistsError, NotADirectoryError):  # a file of somebody in the place of a folder
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("xb") as file:
                file.write(content)


def contents(folder: Path) -> list[bytes]:
    return sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_byte_of_somebody_else_is_lost_by_replacing_runs(data: st.DataObject) -> None:
    """Some have names like a run's, were there before it, came while it was there, or into what was put aside."""
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        theirs: set[bytes] = set()
        for number in range(data.draw(st.integers(1, 4))):
            mine = foreign(b"mine %d " % number)
            put(here, {path: mine[path] for path in data.draw(st.sets(st.sampled_from(sorted(mine)), max_size=8))})
            theirs |= {content for content in contents(here) if content.startswith(b"mine")}
            run = ours(f"r{number}")
            chosen = data.draw(st.sets(st.sampled_from(sorted(run)), max_size=8)) | {"run.json"}
            put(here, {path: run[path] for path in chosen})
            claim(here, "new", overwrite=True)
            (here / "run.json").unlink()
            assert theirs <= {*contents(here)}


def test_of_replaced_runs_the_last_one_is_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for number in (1, 2, 3):
        put(tmp_path, ours(f"r{number}"))
        claim(tmp_path, f"new{number}", overwrite=True)
        assert [path.name for path in (tmp_path / "replaced").iterdir()] == [str(number)]
        assert holder(tmp_path / "replaced" / str(number)) == f"r{number}"
        assert contents(tmp_path / "replaced") == sorted(ours(f"r{number}").values())
        assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"notes.txt", RUN_FILE}
        (tmp_path / RUN_FILE).unlink()
    # A run that has ended before its first step is no reason to remove one that has come further.
    claim(tmp_path, "r4", overwrite=False)
    directory = RunDirectory(tmp_path)
    directory.claim("r5", overwrite=False, resume=False)
    directory.release()
    assert [holder(path) for path in (tmp_path / "replaced").iterdir()] == ["r3"]


def test_what_links_lead_to_is_not_of_the_run(tmp_path: Path) -> None:
    put(tmp_path / "other", ours("r0"))
    put(tmp_path / "here", {"run.json": ours("r1")["run.json"], "journal.jsonl": ours("r1")["journal.jsonl"]})
    (tmp_path / "here" / "checkpoints").symlink_to(tmp_path / "other" / "checkpoints")
    for number in (2, 3):
        claim(tmp_path / "here", f"r{number}", overwrite=True)
        (tmp_path / "here" / JOURNAL).write_text('{"line": 0, "kind": "step"}\n')
    assert not (tmp_path / "here" / "checkpoints").exists()
    assert contents(tmp_path / "other") == sorted(ours("r0").values())


def test_a_plan_of_the_run_that_begins_stays(tmp_path: Path) -> None:
    claim(tmp_path, "r0", overwrite=False)
    describe(tmp_path, {"run_id": "r0", "started": time.time() - 3600.0})
    (tmp_path / "plan.json").write_text("{}")
    claim(tmp_path, "r1", overwrite=True)
    assert (tmp_path / "plan.json").exists()


def test_a_folder_of_the_user_stays_where_it_is(tmp_path: Path) -> None:
    """The script may need it: the run of a script in this directory has died of a typo, and begins again."""
    for name in ("tools", "profile", "tensorboard", "checkpoints", "evaluations"):
        put(tmp_path, {f"{name}/mine.py": b"mine"})
    directory = RunDirectory(tmp_path)
    claim(tmp_path, "r0", overwrite=False)
    directory.claim("r1", overwrite=False, resume=False)
    directory.release()
    assert contents(tmp_path).count(b"mine") == 5
    assert (tmp_path / "tools" / "mine.py").exists()
    assert not (tmp_path / "replaced" / "1").exists()


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
