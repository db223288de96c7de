"""The checksum of a script tells two texts apart, however the script is named."""

from __future__ import annotations

import itertools
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.operations import SETTINGS, TABLE
from unisono.cli.resume import Resumed
from unisono.core.errors import UsageError
from unisono.core.fingerprints import RESULTS, other_arithmetic, other_results
from unisono.system.arithmetic import check, name_of, variables
from unisono.system.fingerprint import about_script, own_command, script_checksum
from unisono.system.probe import results


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


def test_the_instructions_of_an_environment_have_the_name_by_which_they_were_asked_for() -> None:
    assert name_of({"PATH": "/bin", **variables("compatible")}) == "compatible"
    assert name_of({}) == name_of({"ATEN_CPU_CAPABILITY": "avx2"}) == ""
    assert variables(None) == {}


def test_operations_with_other_results_are_named() -> None:
    first, other = {RESULTS: "product=aa, sums=bb, norm=cc"}, {RESULTS: "product=aa, sums=b0, gelu=dd"}
    assert other_results(first, other) == ["sums"], "another version's probe has other operations"
    assert other_results(first, first) == other_results(first, {"torch": "2"}) == []
    assert other_arithmetic({"torch": "2"}, {"torch": "2", **first}) == [], "an earlier version has no results"
    assert other_arithmetic(first, {**first, RESULTS: "product=aa, sums=b0, norm=cc"}) == ["other results of sums"]


def test_the_probe_tells_every_two_settings_apart_that_differ_in_any_of_a_thousand_operations() -> None:
    """As digests of a processor with AVX-512 have it; `tests.operations` makes the table."""
    table = json.loads(TABLE.read_text())
    assert list(table) == list(SETTINGS)
    for one, other in itertools.combinations(table.values(), 2):
        told = other_results({RESULTS: one["probe"]}, {RESULTS: other["probe"]})
        assert told or one["operations"] == other["operations"]
    assert {"softmax of several widths", "losses", "recurrent layer"} <= {
        *other_results({RESULTS: table["aten avx2"]["probe"]}, {RESULTS: table["aten avx512"]["probe"]})
    }
    names = [[each.split("=")[0] for each in probe.split(", ")] for probe in (results(), table["none"]["probe"])]
    assert names[0] == names[1], "the probe computes something else than the table: python -m tests.operations --table"


def test_the_probe_gives_the_same_whatever_the_script_has_set() -> None:
    found = results()
    before = torch.get_rng_state(), torch.get_num_threads()
    results.cache_clear()
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu"), torch.device("meta"):
            assert results() == found
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="one of avx2, avx512, compatible"):
        check("sse", {}, is_alone=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "found"),
    [({"recipe": {"arithmetic": "avx2"}}, "avx2"), ({"recipe": {"arithmetic": []}}, None), ({}, None)],
)
def test_a_run_goes_on_with_the_instructions_that_it_was_held_to(facts: dict[str, Any], found: str | None) -> None:
    assert Resumed("", "", facts).arithmetic() == found
