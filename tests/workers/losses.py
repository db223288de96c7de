"""Which workers a run says that it has lost because they ended."""

from __future__ import annotations

import re

__all__ = ["ended_workers"]

_ENDED = re.compile(r"worker (w\d+) \(pid \d+\) (?:was killed by signal 9|has closed its connection)")


def ended_workers(output: str) -> set[str]:
    """The ids of those that were killed. Their connections close first: where the command of their machine hears late
    of the end of a process, that is what is told.
    """
    return set(_ENDED.findall(output))
