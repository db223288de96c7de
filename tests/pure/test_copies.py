"""Copies of checkpoints: in which order their files are written, which copies are removed, and what a place means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unisono
from unisono.core.errors import UsageError
from unisono.core.words import without_password
from unisono.engine.checkpoint import copies
from unisono.engine.checkpoint.copies import Copy
from unisono.record import checkpoint_files as files
from unisono.record.checkpoint_files import FileFacts, Manifest


def manifest(step: int, loss: float = 1.0) -> Manifest:
    return Manifest(
        step=step, phase=0, phase_step=step, lines=step, recipe={}, fingerprint={}, metrics={"loss": loss},
        num_workers=1, saved=0.0, seconds=0.0, tensors=[],
        files={"skeleton.msgpack": FileFacts(1, [0]), "part-00000-of-00001.safetensors": FileFacts(1, [0])},
    )  # fmt: skip


def copy(step: int, run_id: str = "now", name: str = "", loss: float = 1.0) -> Copy:
    return Copy(name or files.step_name(step), step, {"run_id": run_id, "earlier": ["first"]}, manifest(step, loss))


def removed(policy: unisono.Checkpoints | None, new: Copy, *others: Copy) -> list[str]:
    return [one.name for one in copies.choose_removed(others, new, policy)]


def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, new, content = tmp_path / "checkpoint", copy(3), b"the manifest"
    checkpoint.mkdir()
    for name in new.manifest.files:
        (checkpoint / name).write_bytes(b"1")
    (checkpoint / files.MANIFEST).write_bytes(content)
    store, written = copies.Store(str(tmp_path / "there")), list[str]()

    def noting(method: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            written.extend(Path(one).name for one in arguments if f"/{new.name}/" in str(one))
            return method(*arguments, **options)

        return call

    for method in ("put_file", "pipe_file", "open"):
        monkeypatch.setattr(store._fs, method, noting(getattr(store._fs, method)))
    store.write(new, content, checkpoint, tmp_path / "no journal")
    assert list(dict.fromkeys(written)) == [
        "part-00000-of-00001.safetensors",
        "skeleton.msgpack",
        "journal.jsonl.gz",
        "run.json",
        "manifest.json",
    ]


def test_the_copies_that_are_kept_are_those_of_the_run_directory() -> None:
    policy = unisono.Checkpoints(keep=2, keep_every=10, keep_best="loss")
    before = [copy(8, loss=0.5), copy(10), copy(12), copy(14), copy(16)]
    assert removed(policy, copy(18), *before) == [files.step_name(12), files.step_name(14)]
    assert removed(None, copy(18), *before) == []


def test_an_earlier_copy_of_the_same_step_goes() -> None:
    old, new = copy(8), copy(8, name=f"{files.step_name(8)}.1")
    assert removed(unisono.Checkpoints(keep=1), new, old) == [old.name]
    assert removed(None, new, old) == [old.name]


def test_later_copies_go_if_the_run_was_resumed_since_and_stay_if_another_worker_made_them() -> None:
    policy = unisono.Checkpoints(keep=5)
    assert removed(policy, copy(8), copy(6, "first"), copy(12, "first")) == [files.step_name(12)]
    assert removed(policy, copy(8), copy(6), copy(12)) == []


def test_a_copy_takes_no_name_that_is_there() -> None:
    name = files.step_name(8)
    assert copies.free_name(8, [files.step_name(9)]) == name
    assert copies.free_name(8, [name]) == f"{name}.1"
    assert copies.free_name(8, [name, f"{name}.1", f"{files.step_name(9)}.7"]) == f"{name}.2"


def test_a_run_is_all_that_it_was_resumed_from() -> None:
    assert copies.lineage({"run_id": "c", "earlier": ["a", "b"]}) == {"a", "b", "c"}
    assert copies.lineage({"run_id": "a"}) == {"a"}
    assert copies.lineage({}) == copies.lineage({"run_id": 1, "earlier": "x"}) == frozenset()


def test_a_password_is_not_shown() -> None:
    assert without_password("sftp://me:secret@host/path") == "sftp://me:***@host/path"
    assert without_password("ftp://me:p@ss/w@host/x") == "ftp://me:***@host/x"
    assert without_password("s3://bucket/a:b@c") == "s3://bucket/a:b@c"
    assert without_password("/mnt/disk") == "/mnt/disk"


def test_what_is_a_place_of_copies(tmp_path: Path) -> None:
    assert copies.is_copy("s3://bucket/run")
    assert not copies.is_copy(str(tmp_path))
    (tmp_path / copies.COPIES).write_text("{}")
    assert copies.is_copy(str(tmp_path))
    assert copies.is_copy(str(tmp_path / files.FOLDER / files.step_name(3)))


def test_places_of_a_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert unisono.Checkpoints(copies="s3://b/x").places == ("s3://b/x",)
    assert unisono.Checkpoints(copies=("s3://b/x", "/mnt")).places == ("s3://b/x", "/mnt")
    assert unisono.Checkpoints().places == ()
    assert copies.absolute("x") == str(tmp_path / "x")
    assert copies.absolute("s3://b/x") == "s3://b/x"
    for wrong in ("", ("s3://b/x", ""), tmp_path):
        with pytest.raises(UsageError, match="is a URL or a path"):
            unisono.Checkpoints(copies=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="copies_wait_s"):
        unisono.Checkpoints(copies_wait_s=-1)
    with pytest.raises(UsageError, match="copies of checkpoints cannot go to nothing://x: Protocol not known"):
        copies.check(["nothing://x"])
