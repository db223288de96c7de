"""Systems on which the library works; docs/platforms.md has the list."""

from __future__ import annotations

import sys

from unisono.core.errors import UsageError

__all__ = ["check_platform"]


def check_platform() -> None:
    """Raise UsageError on a system that has no processes to fork, no file locks and no Unix sockets."""
    if sys.platform == "win32":
        raise UsageError(
            "unisono needs Linux (or macOS, where it was not tried), and this is Windows; install it in WSL 2, which "
            "is a Linux: https://learn.microsoft.com/windows/wsl/install"
        )
