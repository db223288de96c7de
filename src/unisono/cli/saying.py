"""The door through which commands write, to people and to programs.

What a command says of a run was written by others: workers, other machines, whoever has made the directory. A terminal
obeys control characters, so no text goes out with any, wherever it comes from (`harmless`).
"""

from __future__ import annotations

import json
import re
from typing import Final

import click
import msgspec

from unisono.core.words import harmless

__all__ = ["say", "say_json", "say_lines"]

_NO_ASCII: Final = re.compile(r"[^\n -~]")


def say(line: str, *, err: bool = False) -> None:
    """Write one line; of a text in it that has several lines, nothing begins a line of its own."""
    click.echo(harmless(line.replace("\n", " ")), err=err)


def say_lines(text: str, *, err: bool = False) -> None:
    """Write a text of one or several lines."""
    click.echo("\n".join(map(harmless, text.split("\n"))), err=err)


def say_json(value: object, *, in_one_line: bool = False) -> None:
    """Write a value as JSON. What a terminal might obey is escaped, so a program reads what was there."""
    data = msgspec.json.encode(value)
    click.echo(_NO_ASCII.sub(_escaped, (data if in_one_line else msgspec.json.format(data)).decode()))


def _escaped(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]
