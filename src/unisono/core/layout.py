"""Layout of a run's state: which worker holds which part, and in how many copies.

A run's state is cut into named **parts**; each part is held by one or more workers. Survival of a loss, admission of
newcomers, checkpoints and the comparison of the workers ask the layout instead of assuming that every worker
holds everything. A new layout is a new function that makes a `StateLayout` from the members of a generation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["EVERYTHING", "StateLayout", "replicated"]

EVERYTHING: Final = "everything"
"""The only part of a replicated state."""


@dataclass(frozen=True)
class StateLayout:
    """Which workers hold each part of the state. Equal on all members of a generation.

    Args:
        holders: part -> ids of the workers that hold it, in the order of their ranks.
    """

    holders: Mapping[str, tuple[str, ...]]

    def parts_of(self, worker_id: str) -> list[str]:
        """Return the parts that a worker holds."""
        return [part for part, holders in self.holders.items() if worker_id in holders]

    def lost(self, survivors: Collection[str]) -> list[str]:
        """Return the parts of which no survivor holds a copy."""
        return [part for part, holders in self.holders.items() if not any(one in survivors for one in holders)]

    def survives(self, survivors: Collection[str]) -> bool:
        """Return whether the survivors together hold the whole state."""
        return not self.lost(survivors)

    def source(self, part: str, able: Collection[str]) -> str | None:
        """Return the worker that gives a part to newcomers.

        Args:
            able: workers that have the part now.

        Returns:
            The first holder in the order of ranks that is able; None if there is none.
        """
        return next(iter(self.writers(part, able)), None)

    def writers(self, part: str, able: Collection[str]) -> tuple[str, ...]:
        """Return the workers that share the work of writing a part into a checkpoint, in the order of ranks.

        Args:
            able: workers that see the run's directory.
        """
        return tuple(one for one in self.holders[part] if one in able)

    def publisher(self, able: Collection[str]) -> str | None:
        """Return the worker that publishes a checkpoint, and writes whatever one worker writes for all.

        Args:
            able: workers that see the run's directory.

        Returns:
            The first worker that is able; None if there is none.
        """
        return next((one for part in self.holders for one in self.writers(part, able)), None)

    def alike(self) -> list[tuple[str, ...]]:
        """Return the groups of workers that hold the same parts, and so must hold the same bits."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for worker_id in dict.fromkeys(one for holders in self.holders.values() for one in holders):
            groups.setdefault(tuple(self.parts_of(worker_id)), []).append(worker_id)
        return [tuple(group) for group in groups.values()]


def replicated(worker_ids: Sequence[str]) -> StateLayout:
    """Return the layout of data-parallel training: every worker holds everything."""
    return StateLayout({EVERYTHING: tuple(worker_ids)})
