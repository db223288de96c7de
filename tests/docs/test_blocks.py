"""What the documentation shows works: its Python runs, its commands have the options that they are given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.docs.commands import check_inline, check_words, commands
from tests.docs.pages import PAGES, blocks, inline_commands
from tests.house.rooms import ROOT
from tests.waiting import WAIT_S
from unisono import UsageError


def page_id(page: Path) -> str:
    return page.stem


def test_every_python_block_runs() -> None:
    """In one process for all pages, which imports torch once."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.running"],
        cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_block_that_does_not_run_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nrun.steps(train_set, batch_size=3, no_such_argument=1)\n```\n\n```python\nof_nobody\n```\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from pathlib import Path; from tests.docs import pages, running\n"
         "pages.ROOT = Path(sys.argv[1]); print(*running.failures([pages.ROOT / 'page.md']), sep='\\n')", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=True,
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first.startswith("page.md:2, line 2: ")
    assert "no_such_argument" in first
    assert second.startswith("page.md:6: 'of_nobody'")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_in_blocks_are_right(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "other.py", "slow.py"):
        Path(name).touch()
    wrong = []
    for block in blocks(page):
        for words in commands(block):
            try:
                check_words(words)
            except (click.ClickException, UsageError) as error:
                wrong.append(f"{block}: {' '.join(words)}: {getattr(error, 'message', error)}")
            except FileNotFoundError as error:
                wrong.append(f"{block}: {' '.join(words)}: {error} is not there")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_within_sentences_have_their_options(page: Path) -> None:
    wrong = {text: options for text in inline_commands(page) if (options := check_inline(text))}
    assert not wrong


@pytest.mark.parametrize(
    "command",
    ["unisono run a.py --no-such-option", "unisono run a.py --workers 0", "python examples/none.py", "make nothing"],
)
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises((click.ClickException, UsageError, FileNotFoundError)):
        check_words(command.split())


def test_there_is_something_to_check() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    assert sum(block.language == "python" for block in found) > 30
    assert sum(1 for block in found for _ in commands(block)) > 60
    assert sum(len(inline_commands(page)) for page in PAGES) > 100
