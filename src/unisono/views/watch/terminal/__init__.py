"""The terminal: a live view, or plain lines where standard output is a file or a pipe."""

from __future__ import annotations

import os
import sys

from unisono.system.tasks import is_for_person
from unisono.views.watch.terminal.base import Terminal
from unisono.views.watch.terminal.canvas import is_drawable
from unisono.views.watch.terminal.plain_lines import PlainTerminal

__all__ = ["PlainTerminal", "terminal"]


def terminal() -> Terminal:
    """Make the sink that suits standard output: a live view for a terminal, else `PlainTerminal`."""
    if not is_for_person(sys.stdout, os.environ) or not is_drawable(dict(os.environ)):
        return PlainTerminal()
    from unisono.views.watch.terminal.live import Live

    return Live()
