"""Wait for the disk, which is slower than the steps of a small training."""

from __future__ import annotations

import unisono

__all__ = ["wait_for_disk"]


def wait_for_disk(run: unisono.Run) -> None:
    """Wait within a step for what its checkpoints have under way: so every one that is due is made."""
    run._keeper.saver._writer.drain()
