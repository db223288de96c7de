"""The files of a checkpoint: whole or not there; whatever is wrong with one is found and named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from unisono.core.errors import CheckpointError
from unisono.engine.checkpoint.loading import load_weights, newest, read
from unisono.engine.checkpoint.snapshot import Layout, tensor_names
from unisono.engine.state.packing import pack
from unisono.record import checkpoint_files as files
from unisono.record.checkpoint_files import BLOCK_BYTES, CheckpointDiffers, Entry, FileFacts, Manifest

STATE = {
    "objects": {
        "model": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(7.0), "empty": torch.zeros(0, 2)}}, "lr": 0.1},
        "odd": {"complex": torch.tensor([1 + 2j], dtype=torch.complex128), "bits": torch.tensor([True, False, True])},
    },
    "hidden": {},
    "trained": [True, False],
}


def write(folder: Path, step: int, num_parts: int = 2) -> Path:
    """A checkpoint as a run would have written it."""
    packed = pack(STATE, "tracked")
    layout = Layout.of(packed.tensors, tensor_names(packed.paths), num_parts)
    partial = folder / files.partial_name(step, 1)
    partial.mkdir(parents=True)
    found = {files.SKELETON: files.write_file(partial / files.SKELETON, memoryview(packed.skeleton))}
    for part in range(num_parts):
        data = bytearray(layout.num_bytes[part])
        header = layout.headers[part]
        data[: len(header)] = header
        for entry, tensor in zip(layout.entries, packed.tensors, strict=True):
            if entry.part == part and entry.num_bytes:
                start = len(header) + entry.start
                data[start : start + entry.num_bytes] = files.memory_at(tensor.data_ptr(), entry.num_bytes, tensor)
        name = files.part_name(part, num_parts)
        found[name] = files.write_file(partial / name, memoryview(data))
    files.write_manifest(partial, manifest(step, layout.entries, {k: v for k, v in found.items() if v is not None}))
    files.publish(partial, folder / files.step_name(step))
    return folder / files.step_name(step)


def manifest(step: int, tensors: list[Entry], found: dict[str, FileFacts]) -> Manifest:
    return Manifest(
        step=step, phase=0, phase_step=step, lines=step, recipe={"seed": 3}, fingerprint={}, metrics={"loss": 0.5},
        num_workers=2, saved=0.0, seconds=0.0, tensors=tensors, files=found,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / files.FOLDER


@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_what_was_written_is_read(folder: Path, num_parts: int) -> None:
    made, state = read(write(folder, 5, num_parts))
    assert made.step == 5
    packed, again = pack(STATE), pack(state)
    assert again.skeleton == packed.skeleton
    for a, b in zip(packed.tensors, again.tensors, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_every_part_is_a_safetensors_file(folder: Path) -> None:
    """Read by the library of that format, which knows nothing of this one."""
    path = write(folder, 5, 3)
    found = {name: tensor for part in path.glob("*.safetensors") for name, tensor in load_file(part).items()}
    assert torch.equal(found["model.weight"], STATE["objects"]["model"]["weight"])  # type: ignore[index]
    assert torch.equal(found["model.bias"], STATE["objects"]["model"]["bias"])  # type: ignore[index]
    assert found["optimizer.state.0.empty"].shape == (0, 2)
    assert found["odd.complex"].dtype == torch.uint8  # the format has no such type


def test_names_are_those_of_the_objects_and_unique() -> None:
    paths = ["tracked['objects']['model']['0.weight']", "tracked['objects']['o']['state'][0]['step']"]
    assert tensor_names(paths) == ["model.0.weight", "o.state.0.step"]
    assert len(set(tensor_names(["tracked['hidden']['a.b']", "tracked['hidden']['a']['b']"]))) == 2


def flip(path: Path, place: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit]))


def part(path: Path) -> Path:
    return path / files.part_name(0, 2)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit in a part": (lambda path: flip(part(path), -1), "is damaged in bytes 0 to"),
    "a flipped bit in its header": (lambda path: flip(part(path), 20), "is damaged in bytes 0 to"),
    "a truncated part": (lambda path: os.truncate(part(path), 100), "has 100 bytes, not"),
    "an empty part": (lambda path: os.truncate(part(path), 0), "has 0 bytes, not"),
    "a longer part": (lambda path: os.truncate(part(path), 10**5), "has 100000 bytes, not"),
    "a missing part": (lambda path: part(path).unlink(), "part-00000-of-00002.safetensors is missing"),
    "a flipped bit in the skeleton": (lambda path: flip(path / files.SKELETON, 9), "skeleton.msgpack is damaged"),
    "a missing skeleton": (lambda path: (path / files.SKELETON).unlink(), "skeleton.msgpack is missing"),
    "a missing manifest": (lambda path: (path / files.MANIFEST).unlink(), "has no manifest.json"),
    "half a manifest": (lambda path: os.truncate(path / files.MANIFEST, 300), "manifest.json of step-0000000009 is"),
    "an empty manifest": (lambda path: os.truncate(path / files.MANIFEST, 0), "is damaged"),
    "another format": (
        lambda path: (path / files.MANIFEST).write_text('{"format": 7}'),
        "has format 7, but this version of the library reads 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(damage: str, folder: Path) -> None:
    write(folder, 4)
    path = write(folder, 9)
    harm, said = DAMAGES[damage]
    harm(path)
    with pytest.raises(CheckpointDiffers) as caught:
        files.verify(path)
    assert said in str(caught.value)
    found = newest(folder.parent)
    assert found is not None
    assert found.manifest.step == 4
    assert len(found.broken) == 1
    assert said in found.broken[0]
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: "):
        newest(path)  # this one was asked for


def test_no_bit_of_a_manifest_can_change_unnoticed(folder: Path) -> None:
    """Blanks may; then it still says the same."""
    path = write(folder, 9)
    whole = (path / files.MANIFEST).read_bytes()
    before = files.read_manifest(path)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        (path / files.MANIFEST).write_bytes(changed)
        try:
            assert files.read_manifest(path) == before
        except CheckpointDiffers:
            continue
        assert chr(whole[place]).isspace(), f"byte {place}, {whole[place - 20 : place + 20]!r}"


def changed(made: Manifest, number: int, **values: object) -> Manifest:
    tensors = list(made.tensors)
    tensors[number] = msgspec.structs.replace(tensors[number], **values)
    return msgspec.structs.replace(made, tensors=tensors)


def with_file(made: Manifest, name: str, num_bytes: int, num_checks: int = 1) -> Manifest:
    return msgspec.structs.replace(made, files={**made.files, name: FileFacts(num_bytes, [0] * num_checks)})


SAYS: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "a huge shape": (lambda made: changed(made, 0, shape=[10**18]), "is not what its shape takes"),
    "a huge shape without a value": (lambda made: changed(made, 3, shape=[0, 10**30]), "is not what its shape takes"),
    "a negative shape": (lambda made: changed(made, 0, shape=[-3, -4]), "is not what its shape takes"),
    "many dimensions": (lambda made: changed(made, 0, shape=[1] * 10**5 + [12]), "is not what its shape takes"),
    "another dtype": (lambda made: changed(made, 0, dtype="float64"), "is not what its shape takes"),
    "a larger tensor": (lambda made: changed(made, 0, shape=[12, 10**6], num_bytes=48 * 10**6), "and its tensors"),
    "a tensor elsewhere in its file": (lambda made: changed(made, 0, start=10**6), "lies outside of its file"),
    "a tensor before its file": (lambda made: changed(made, 0, start=-1), "lies outside of its file"),
    "another part": (lambda made: changed(made, 0, part=2), "lies in part 2 of 2"),
    "a part before the first": (lambda made: changed(made, 0, part=-1), "lies in part -1 of 2"),
    "a file elsewhere": (lambda made: with_file(made, "../../../secret", 1), "which lies elsewhere"),
    "a file of 2^50 bytes": (lambda made: with_file(made, files.part_name(0, 2), 1 << 50), "1 checksums for 67108864"),
    "a huge header": (lambda made: with_file(made, files.part_name(0, 2), 1 << 27, 8), "bytes, and its tensors"),
    "a huge skeleton": (lambda made: with_file(made, files.SKELETON, 1 << 31, 128), "of more than 1024 MiB"),
    "no skeleton": (
        lambda made: msgspec.structs.replace(
            made, files={name: facts for name, facts in made.files.items() if name != files.SKELETON}
        ),
        "it names no skeleton.msgpack",
    ),
}


@pytest.mark.parametrize("what", SAYS)
def test_a_manifest_that_says_what_no_run_writes_is_refused(what: str, folder: Path) -> None:
    """Somebody else may have written it, with right checksums."""
    change, words = SAYS[what]
    path = write(folder, 5)
    files.write_manifest(path, change(files.read_manifest(path)))
    for reads in (files.read_manifest, files.verify, load_weights):
        with pytest.raises(CheckpointError, match=f"manifest.json of step-0000000005 says what cannot be: .*{words}"):
            reads(path)


def test_a_state_for_which_there_is_no_memory_is_no_broken_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")

    write(folder, 4)
    write(folder, 5)
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(CheckpointError, match=r"takes .* no such memory: .* can't allocate memory$") as caught:
        load_weights(folder)
    assert not isinstance(caught.value, CheckpointDiffers)


def test_where_a_large_file_is_damaged_is_said(tmp_path: Path) -> None:
    data = bytearray(2 * BLOCK_BYTES + 5)
    path = tmp_path / "file"
    facts = files.write_file(path, memoryview(data))
    assert facts is not None
    assert len(facts.crc32) == 3
    files.read_blocks(path, facts)
    again = bytearray(b"x") * len(data)
    files.read_blocks(path, facts, [memoryview(again)[:777], memoryview(again)[777:]])
    assert again == data
    flip(path, BLOCK_BYTES + 1)
    with pytest.raises(CheckpointDiffers, match=f"damaged in bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES}"):
        files.read_blocks(path, facts)


def test_a_write_that_is_given_up_leaves_no_facts(tmp_path: Path) -> None:
    asked = iter([False, True])
    assert files.write_file(tmp_path / "file", memoryview(bytearray(2 * BLOCK_BYTES)), lambda: next(asked)) is None
    assert (tmp_path / "file").stat().st_size == BLOCK_BYTES


def test_all_broken_is_an_error_and_none_is_not(folder: Path) -> None:
    folder.mkdir(parents=True)
    assert newest(folder.parent) is None
    for step in (4, 9):
        (write(folder, step) / files.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"step-0000000009 has no manifest.json.*step-0000000004 has no"):
        newest(folder.parent)
    with pytest.raises(CheckpointError, match="holds no checkpoint; give the directory of a run"):
        newest(folder.parent.parent)


def test_what_killed_writers_left_is_removed_and_nothing_else(folder: Path) -> None:
    write(folder, 4)
    kept = [".step-0000000007.abandoned", ".step-0000000009-2.partial", "step-0000000006.broken"]
    for name in (".step-0000000009-1.partial", ".step-0000000004.removed", *kept):
        (folder / name).mkdir()
        (folder / name / "part").write_text("garbage")
    (folder / files.step_name(7)).mkdir()
    (folder / files.step_name(7) / "part-00000-of-00001.safetensors").touch()
    (folder / files.step_name(8)).mkdir()
    (folder / files.step_name(8) / "model.pt").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    others = ["notes.txt", "step-0000000004", "step-0000000008"]
    files.remove_partials(folder, but={".step-0000000009-2.partial"})
    assert sorted(path.name for path in folder.iterdir()) == sorted([*kept, *others])
    files.remove_abandoned(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*kept[1:], *others])


def test_publishing_again_replaces_what_has_the_name(folder: Path) -> None:
    path = write(folder, 4, num_parts=2)
    assert write(folder, 4, num_parts=3) == path
    assert len(list(path.glob("part-*"))) == 3
    assert [entry.name for entry in folder.iterdir()] == [path.name]


@pytest.mark.parametrize("number", [1, 2])
def test_killed_while_it_is_replaced_a_checkpoint_is_not_lost(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    path, rename, done = write(folder, 4), Path.rename, []

    def rename_and_end(source: Path, target: Path) -> Path:
        done.append(rename(source, target))
        if len(done) == number:
            raise Killed
        return target

    monkeypatch.setattr(Path, "rename", rename_and_end)
    with pytest.raises(Killed):
        write(folder, 4)
    monkeypatch.undo()
    assert files.complete(folder) == ([] if number == 1 else [path])
    files.remove_partials(folder)
    assert files.verify(path).step == 4
    assert [entry.name for entry in folder.iterdir()] == [path.name]


def test_steps_are_ordered_as_numbers(folder: Path) -> None:
    for step in (10**10, 9, 10**10 - 1):
        (folder / files.step_name(step)).mkdir(parents=True)
    assert [int(path.name[5:]) for path in files.complete(folder)] == [9, 10**10 - 1, 10**10]


def test_weights_are_loaded_without_a_run(folder: Path) -> None:
    path = write(folder, 9)
    for place in (folder.parent, str(folder), path):
        assert torch.equal(load_weights(place)["weight"], STATE["objects"]["model"]["weight"])  # type: ignore[index]
    assert load_weights(path, name="optimizer")["lr"] == 0.1
    module = torch.nn.Linear(4, 3)
    load_weights(path, module)
    assert torch.equal(module.weight, STATE["objects"]["model"]["weight"])  # type: ignore[index]
    with pytest.raises(CheckpointError, match="holds model, odd, optimizer; there is no 'teacher'"):
        load_weights(path, name="teacher")


def test_weights_of_the_one_before_are_loaded_with_a_warning(folder: Path) -> None:
    write(folder, 4)
    flip(write(folder, 9) / files.SKELETON, 9)
    with pytest.warns(UserWarning, match=r"skeleton.msgpack is damaged .* step-0000000004 is used"):
        assert "weight" in load_weights(folder)


def test_nothing_is_executed(folder: Path) -> None:
    """No file of a checkpoint is a pickle: it is JSON, MessagePack and safetensors."""
    path = write(folder, 4)
    msgspec.json.decode((path / files.MANIFEST).read_bytes())
    msgspec.msgpack.decode((path / files.SKELETON).read_bytes())
    assert {entry.suffix for entry in path.iterdir()} == {".json", ".msgpack", ".safetensors"}
