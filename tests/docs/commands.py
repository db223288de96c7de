"""The shell commands of the documentation: their options exist, and so do the files that they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from tests.docs.pages import Block
from tests.house.rooms import ROOT
from unisono.cli import COMMANDS, _group
from unisono.cli.options import options_of
from unisono.system.capacity import parse_workers

__all__ = ["check_inline", "check_words", "commands"]

SHELL = ("", "sh", "bash", "console")
PROMPT = re.compile(r"^[\w.-]*\$ ")
FIRST = ("unisono", "python", "make", "mpiexec", "srun", "exec", "until", "ray", "pip", "UNISONO_TEST_ALL=1")
"""How a line begins that is a command, in a block without prompts."""
ENDS = {"<<<", "|", ">", "&&", "||", "&", ";", "do"}
PROCESSES = {"reader"}
"""Named in texts, but no commands."""
OWN_FILES = re.compile(r"(?:examples|benchmarks|tests|docs|requirements)/[\w./-]+\.\w+")


def commands(block: Block) -> Iterator[list[str]]:
    """All commands of a block, as words, without comments, redirections and what follows a pipe."""
    if block.language not in SHELL or block.mark.startswith("not run: "):
        return
    lines = block.text.replace("\\\n", " ").splitlines()
    prompted = [PROMPT.sub("", line) for line in lines if PROMPT.match(line)]
    for line in prompted or [line for line in lines if line.split(" ")[0] in FIRST]:
        words = []
        for word in shlex.split(line, comments=True):
            if word in ENDS:
                break
            words.append(word.rstrip(";"))
            if word.endswith(";"):
                break
        yield words


def _command(name: str) -> click.Command:
    command = _group.get_command(click.Context(_group), name)
    assert command is not None
    return command


def check_words(words: Sequence[str]) -> None:
    """Parse a command as `unisono` would, and look for the files of the project that it names.

    Runs that it names are made in the current folder.

    Raises:
        click.ClickException: unisono has no such command or option.
        UsageError: it refuses a value.
        FileNotFoundError: a file, module or target of this project is not there.
    """
    line = " ".join(words)
    for name in OWN_FILES.findall(line):
        if not (ROOT / name).exists():
            raise FileNotFoundError(name)
    if module := re.search(r"python -m ((?:benchmarks|tests)[\w.]*)", line):
        path = ROOT / module[1].replace(".", "/")
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
            raise FileNotFoundError(module[1])
    if words[0] == "make" and f"\n{words[1]}:" not in (ROOT / "Makefile").read_text():
        raise FileNotFoundError(f"make {words[1]}")
    if "unisono" in words[:-1]:
        at = words.index("unisono") + 1
        if words[at] == "--version":
            return
        if words[at] not in COMMANDS:
            raise click.UsageError(f"no such command: {words[at]}")
        for name in words[at + 1 :]:
            if name.startswith("runs/"):  # `compare` wants two that are there
                Path(name).mkdir(parents=True, exist_ok=True)
        given = _command(words[at]).make_context(words[at], list(words[at + 1 :])).params
        if words[at] == "run":
            parse_workers(options_of(given).workers, threads=1)


def check_inline(text: str) -> list[str]:
    """Return the options of a `unisono ...` within a sentence that the command does not have."""
    words = re.sub(r"[\[\]]", " ", text).split()[1:]
    if words[0] not in COMMANDS:
        return [] if words[0] in PROCESSES else [words[0]]
    options = words[1 : words.index("--")] if "--" in words else words[1:]
    known = {option for param in _command(words[0]).params for option in [*param.opts, *param.secondary_opts]}
    known |= {"--help"}
    return [word for word in options if word.startswith("--") and word.partition("=")[0].rstrip(",.") not in known]
