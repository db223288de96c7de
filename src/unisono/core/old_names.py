"""Old names of the interface: each works for one version more, and says the new one."""

from __future__ import annotations

import warnings

__all__ = ["OldNameWarning", "warn_of_old"]


class OldNameWarning(FutureWarning):
    """A script uses a name that the next version does not have. Python shows it, unlike a ``DeprecationWarning``."""


def warn_of_old(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn of an old name, by default in the line that has called the function which calls this one."""
    text = f"{old} is now called {new}: the old name works in this version, but not in the next"
    warnings.warn(text, OldNameWarning, stacklevel=stacklevel)
