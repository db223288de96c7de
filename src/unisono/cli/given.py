"""What is given on a command line, checked before anything is started."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import click

from unisono.errors import UsageError

__all__ = ["check_text", "seconds"]


def seconds(name: str, default_s: float, words: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """An option that is a time above 0, and one that passes."""
    return click.option(name, default=default_s, show_default=True, callback=_check_seconds, help=words)


def _check_seconds(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if not 0 < value < math.inf:
        raise UsageError(f"{param.opts[0]} is a time in seconds above 0, got {value}")
    return value


def check_text(what: str, *texts: str) -> None:
    """Refuse what cannot be sent to other processes: Python reads bytes that are not UTF-8 as half characters."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{what} is not UTF-8: {os.fsencode(text)!r}; use another name") from None
