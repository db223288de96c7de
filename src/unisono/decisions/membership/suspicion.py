"""Whose fault is it that exchanges break although every member beats?

A member whose exchange breaks reports it, and says for whom it has waited, where it knows. To report shows that its
main thread works; so the one to blame is who was waited for and reports nothing, whatever its heartbeats say. The same
members try again a few times before one of them has to go: a disk may be slow, a network away for a moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["MAX_TRIES", "Suspicions"]

MAX_TRIES: Final = 3
"""So often in a row the same members try again before one of them has to go."""


@dataclass(frozen=True, kw_only=True)
class Suspicions:
    """What is known of the exchanges that broke since the last step was done."""

    num_broken: int = 0
    reports: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of the exchange that is broken now: by member that has reported it, whom that member waited for."""
    silent: Mapping[str, int] = field(default_factory=dict)
    """By member: in how many of them the others waited for it while it reported nothing."""
    named: Mapping[str, int] = field(default_factory=dict)
    """By member: how many reports have named it."""

    def reported(self, worker_id: str, peers: Sequence[str]) -> Suspicions:
        """A member says that its exchange has broken, and for whom it waited."""
        return dataclasses.replace(self, reports={**self.reports, worker_id: tuple(peers)})

    def given_up(self, members: Collection[str]) -> Suspicions:
        """The broken exchange between ``members`` is over."""
        waited_for = {peer for reporter, peers in self.reports.items() for peer in peers if peer != reporter}
        reporters = self.reports.keys()
        # Where nobody knows for whom it has waited, it is one of those who say nothing.
        silent = ((waited_for - reporters) & set(members)) or (set(members) - reporters)
        return Suspicions(
            num_broken=self.num_broken + 1,
            silent=_more(self.silent, silent if reporters else ()),
            named=_more(self.named, waited_for),
        )

    def worst(self, members: Sequence[str]) -> tuple[str, bool]:
        """The member to go on without.

        Args:
            members: in the order in which they were started.

        Returns:
            Its id, and whether there is evidence against it: where all report and name nobody, it is the newest.
        """

        def guilt(worker_id: str) -> tuple[int, int]:
            return self.silent.get(worker_id, 0), self.named.get(worker_id, 0)

        worst = max(reversed(members), key=guilt)
        return worst, guilt(worst) != (0, 0)


def _more(counts: Mapping[str, int], names: Collection[str]) -> dict[str, int]:
    return {**counts, **{name: counts.get(name, 0) + 1 for name in names}}
