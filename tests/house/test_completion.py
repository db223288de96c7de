"""What a real bash offers after the Tab key."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.house.rooms import ROOT
from tests.waiting import WAIT_S
from unisono.cli import COMMANDS
from unisono.cli.completion import _COMPLETERS, VARIABLE, completion

BASH = shutil.which("bash") or "bash"
ASK = """
eval "$(unisono completion bash)"
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _unisono_completion unisono; echo "${COMPREPLY[@]}"; }
ask unisono comp
ask unisono run --exch
ask unisono run --exchange two
ask unisono watch run
ask unisono replay runs/a --step ""
ask unisono replay runs/a --step 11 --micro-batch ""
ask unisono --workers
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with two runs, and the command ``unisono`` beside it."""
    shutil.copytree(ROOT / "tests" / "data" / "run-0.1", tmp_path / "runs" / "a")
    shutil.copytree(ROOT / "tests" / "data" / "run-0.1", tmp_path / "runs" / "b" / "seed-1")
    (tmp_path / "data").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "unisono").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{COMMAND}" "$@"\n')
    (tmp_path / "bin" / "unisono").chmod(0o755)
    return tmp_path


COMMAND = "import sys; sys.argv[0] = 'unisono'; from unisono.cli import main; main()"


def test_bash_offers_commands_options_runs_and_steps(project: Path) -> None:
    environment = {**os.environ, "PATH": f"{project / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        [BASH, "-c", ASK], cwd=project, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.stdout.splitlines() == [
        "compare",
        "--exchange",
        "two-level",
        "runs/a runs/b/seed-1",
        "10 11",
        "0 1 2 3",
        "",
    ], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_asks_the_command(shell: str) -> None:
    from click.testing import CliRunner

    result = CliRunner().invoke(completion, [shell])
    assert f"{VARIABLE}={shell}_complete" in result.output.replace("env ", "").replace("$1 ", "")


def test_what_is_completed_by_its_name_is_a_parameter_of_some_command() -> None:
    group = click.Group()
    names: set[str | None] = set()
    for module, _ in COMMANDS.values():
        path, _, name = module.partition(":")
        command: click.Command = getattr(__import__(path, fromlist=[name]), name)
        names |= {parameter.name for parameter in command.get_params(click.Context(group))}
    assert set(_COMPLETERS) <= names
