"""What a real bash offers after the Tab key."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from unisono.cli.completion import VARIABLE, completion

BASH = shutil.which("bash") or "bash"
ASK = """
eval "$(unisono completion bash)"
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _unisono_completion unisono; echo "${COMPREPLY[@]}"; }
ask unisono comp
ask unisono run --exch
ask unisono run --exchange two
ask unisono run --launcher s
ask unisono run --sink w
ask unisono --workers
"""


COMMAND = "import sys; sys.argv[0] = 'unisono'; from unisono.cli import main; main()"


def test_bash_offers_commands_options_and_values(tmp_path: Path) -> None:
    (tmp_path / "unisono").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{COMMAND}" "$@"\n')
    (tmp_path / "unisono").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [BASH, "-c", ASK], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.stdout.splitlines() == [
        "compare",
        "--exchange",
        "two-level",
        "ssh slurm",
        "wandb webhook",
        "",
    ], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_asks_the_command(shell: str) -> None:
    from click.testing import CliRunner

    result = CliRunner().invoke(completion, [shell])
    assert f"{VARIABLE}={shell}_complete" in result.output.replace("env ", "").replace("$1 ", "")
