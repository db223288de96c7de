"""New spelling of commands, options and words that an earlier version had: an error names it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unisono.core.settings import OLD_NAMES, SETTINGS

__all__ = ["COMMANDS", "OPTIONS", "WORDS", "respelled"]

COMMANDS: Final = {
    "agent": "unisono run SCRIPT (under srun or mpiexec, it is one task of the run); for --join RUN: unisono join RUN",
    "ray": "unisono run SCRIPT --launcher ray",
    "kubernetes": "unisono run SCRIPT --launcher kubernetes",
    "audit": "unisono replay RUN --step S --micro-batch I",
    "status": "unisono watch --once RUN",
}
"""Commands that are gone."""
OPTIONS: Final[dict[str, dict[str, str]]] = {
    "run": {
        "--ports": "--set port=A:B",
        "--tensorboard": "--sink tensorboard",
        "--no-tls": "--set tls=no",
    },
    "join": {
        **dict.fromkeys(("--head-away-s", "--head-away"), "--set head-away=TIME of unisono run, for all machines"),
        "--wait-s": "--wait TIME",
    },
    "slurm": {"--warn-s": "--warn TIME"},
    "check": {"--timeout-s": "--timeout TIME"},
    "replay": {"--microbatch": "--micro-batch", "--leaf": "--micro-batch"},
}
"""Options that have another spelling, by command. Those of ``unisono run`` that have become settings are not listed."""
WORDS: Final[dict[str, dict[str, str]]] = {"checkpoints": {"verify": "unisono checkpoints RUN check"}}
"""Words that a command has taken, and their new form."""


def respelled(words: Sequence[str]) -> str:
    """Return how a command, an option of it or a word of it is written now; "" where no version has had them.

    Args:
        words: the command; or the command, and the option or word.
    """
    command, *rest = words
    if not rest:
        return COMMANDS.get(command, "")
    word = rest[0]
    if found := {**OPTIONS.get(command, {}), **WORDS.get(command, {})}.get(word):
        return found
    name = word.removeprefix("--")
    setting = SETTINGS.get(OLD_NAMES.get(name, name))
    if command != "run" or setting is None or not word.startswith("--"):
        return ""
    return f"--set {setting.name}={'yes' if setting.is_flag else setting.form}"
