"""What two runs that did the same have in common in their journals, byte by byte."""

from __future__ import annotations

from pathlib import Path

from unisono.record.journal import JOURNAL

__all__ = ["canonical"]


def canonical(run_dir: Path) -> list[str]:
    """The canonical part of each line: what stands before the time."""
    return [text.partition(', "time": ')[0] for text in (run_dir / JOURNAL).read_text().splitlines()]
