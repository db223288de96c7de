"""The table of many runs: what they differ in, which belong together, and whose bits are equal."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.house.rooms import ROOT
from tests.pure.test_report import HOSTILE, hostile, read
from unisono.cli.report import report as command
from unisono.record.journal import JOURNAL
from unisono.views.report import RunsTable, account, report, runs_table
from unisono.views.report.runs_table import FIGURES

RECORDED = ROOT / "tests" / "data" / "run-0.1"


def run_in(
    folder: Path,
    arguments: Sequence[str],
    *,
    steps: int = 12,
    other_from: int = 12,
    recipe: dict[str, Any] | None = None,
) -> Path:
    """A run: the recorded one, with other arguments, and with other bits from a step on; begun in a way of its own."""
    shutil.copytree(RECORDED, folder)
    facts = json.loads((folder / "run.json").read_text())
    facts["command"]["arguments"] = ["train.py", *arguments]
    facts["recipe"] |= {"first_epoch": other_from, **(recipe or {})}
    facts["environment"]["hash seed"] = folder.name
    (folder / "run.json").write_text(json.dumps(facts))
    lines = []
    for text in (RECORDED / JOURNAL).read_text().splitlines():
        line = json.loads(text)
        step = line.get("step", 11 if line["kind"] == "end" else 0)
        if line["kind"] in ("step", "end") and step >= steps:
            continue
        if line["kind"] == "step" and step >= other_from:
            line |= {"digest": f"{step:016x}", "loss": line["loss"] + 1}
        lines.append(json.dumps(line))
    (folder / JOURNAL).write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Five of two settings; by name, in no order."""
    folder = tmp_path / "runs"
    run_in(folder / "a", ["--lr", "0.1", "--cut", "4"], recipe={"microbatches": 4})
    run_in(folder / "b", ["--lr=0.2", "--cut", "8"], other_from=3, recipe={"microbatches": 8})
    run_in(folder / "c", ["--lr", "0.1", "--cut", "4"])
    run_in(folder / "d", ["--lr", "0.1", "--cut", "4"], other_from=7)
    run_in(folder / "e", ["--lr", "0.1", "--cut", "4"], steps=9)
    return folder


def table_of(folder: Path) -> RunsTable:
    return runs_table([account(run) for run in sorted(folder.iterdir())])


def test_runs_stand_by_what_they_differ_in_and_equal_bits_are_said(runs: Path) -> None:
    """What follows from an argument is shown once, under the name that the user has given it."""
    table = table_of(runs)
    assert list(table.names) == ["--lr", "--cut"], "and not `microbatches` as well"
    assert [[(row.name, *row.values) for row in group] for group in table.groups] == [
        [(name, "0.1", "4") for name in "acde"],
        [("b", "0.2", "8")],
    ]
    figures = {
        row.name: dict(zip(table.columns[3:], row.figures, strict=True)) for group in table.groups for row in group
    }
    assert {name: each["bits"] for name, each in figures.items()} == {
        "a": "",
        "c": "equal to a",
        "d": "differs from a at step 7",
        "e": "equal to a for 9 steps",
        "b": "",
    }
    losses = [
        json.loads(line)["loss"] for line in (RECORDED / JOURNAL).read_text().splitlines() if '"step"' in line[:30]
    ]
    assert figures["a"]["last loss"] == f"{losses[-1]:.6g}"
    assert figures["a"]["best loss"] == f"{min(losses):.6g}"
    assert figures["a"]["steps"] == "12"
    assert figures["e"]["steps"].startswith("9")
    assert figures["a"]["state"] == "finished"


def test_runs_of_several_settings_with_equal_bits_are_said_to_be_equal(tmp_path: Path) -> None:
    """The argument that they differ in changes no bit."""
    run_in(tmp_path / "a", ["--log", "x"])
    run_in(tmp_path / "b", ["--log", "y", "more"])
    table = table_of(tmp_path)
    assert list(table.names) == ["--log"], "`more` says the same of the two"
    assert [row.figures[-1] for group in table.groups for row in group] == ["", "equal to a"]


def test_arguments_are_read_as_a_user_has_given_them(tmp_path: Path) -> None:
    run_in(tmp_path / "a", ["--shift", "-0.5", "--on", "--size", "1", "--size", "2", "file", "--token", "abc123secret"])
    run_in(tmp_path / "b", ["--shift", "0.5", "--size=3", "other", "--token", "def456secret"])
    run_in(tmp_path / "c", ["--shift", "0.5", "--on", "--size=3", "file", "--token", "def456secret"])
    table = table_of(tmp_path)
    found = {row.name: dict(zip(table.names, row.values, strict=True)) for group in table.groups for row in group}
    assert found["a"] == {"--shift": "-0.5", "--on": "yes", "--size": "1 2 file"} | {
        name: value for name, value in found["a"].items() if name == "arguments"
    }
    assert found["b"]["--on"] == ""
    assert "secret" not in str(table)


def test_the_command_prints_the_table_and_writes_no_file(runs: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(runs), "--table"], standalone_mode=False)
    assert done.return_value == 0
    lines = done.output.splitlines()
    assert re.split(r" {2,}", lines[0]) == ["run", "--lr", "--cut", *FIGURES]
    assert [line.split()[0] if line else "" for line in lines[2:]] == ["a", "c", "d", "e", "", "b"]
    assert len({line.index("  0.") for line in lines[2:] if line}) == 1, "columns are aligned"
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    file = tmp_path / "report.html"
    done = CliRunner().invoke(command, [str(runs), "--table", "-o", str(file)], standalone_mode=False)
    assert done.return_value == 0
    assert "differs from a at step 7" in file.read_text()
    assert "How the runs differ" in file.read_text()


def test_what_a_run_has_named_is_text(tmp_path: Path) -> None:
    """In the file it is escaped. A terminal gets no control character, and no line is broken by one."""
    run_in(tmp_path / "a", ["--name", HOSTILE, "\x1b[2J\nrun  state"])
    run_in(tmp_path / "b", ["--name", "calm"])
    table = table_of(tmp_path)
    shown = [hostile("a"), hostile("b")]
    page = report([dataclasses.replace(each, directory=tmp_path) for each in shown], 0.0, table)
    assert read(page)
    assert HOSTILE not in page
    done = CliRunner().invoke(command, [str(tmp_path), "--table"], standalone_mode=False)
    assert "\x1b" not in done.output
    assert len(done.output.splitlines()) == 4
