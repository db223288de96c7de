"""The checksum of a script tells two texts apart, however the script is named."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import pytest

from unisono.system.fingerprint import about_script, own_command, script_checksum


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: scripts, and a package whose import would fail."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_package" / "inner").mkdir(parents=True)
    for name in ("__init__", "train", "inner/__init__", "inner/__main__"):
        (tmp_path / "broken_package" / f"{name}.py").write_text(f"raise SystemExit({name!r})")
    (tmp_path / "train.py").write_text("pass")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["train.py", "--lr", "0.1"], "train.py"),
        (["-m", "train", "--lr", "0.1"], "train.py"),
        (["-m", "broken_package.train"], "broken_package/train.py"),
        (["-m", "broken_package.inner"], "broken_package/inner/__main__.py"),
        (["--callable", "train.py", "result"], "train.py"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_it_is_that_of_the_file_that_runs_and_nothing_is_imported(arguments: list[str], file: str) -> None:
    assert script_checksum(arguments) == f"{zlib.crc32(Path(file).read_bytes()):08x}"
    assert "broken_package" not in sys.modules
    before = script_checksum(arguments)
    Path(file).write_text("pass  # edited")
    assert script_checksum(arguments) != before


@pytest.mark.parametrize(
    "arguments", [["nowhere.py"], ["-m", "nowhere.train"], ["-m", "broken_package.nowhere"], ["-m", "sys"], [], ["."]]
)
def test_where_there_is_no_text_there_is_none(arguments: list[str]) -> None:
    assert script_checksum(arguments) == ""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["python", "-u", "-X", "dev", "train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["python", "-m", "train", "-x"], ["-m", "train", "-x"]),
        (["python", "-c", "pass"], None),
        (["python"], None),
        (["python", "gone.py"], None),
    ],
)
def test_a_script_alone_says_how_it_was_called(
    words: list[str], found: list[str] | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    assert own_command() == (None if found is None else {"folder": str(folder), "arguments": found})


def test_the_script_and_the_hash_seed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    command = {"folder": "/", "arguments": ["train.py"]}
    assert about_script(command) == {"hash seed": "5", "script": script_checksum(["train.py"])}
    assert about_script(None) == {"hash seed": "5"}
