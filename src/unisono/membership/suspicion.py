"""Suspicion: which member makes exchanges break, although every member sends heartbeats.

A member whose exchange breaks reports that, and names the members that it has waited for, where it knows them. A report
shows that the reporter's main thread works; so the member to blame is one that was waited for and reports nothing,
whatever its heartbeats say. The same members try again a few times before one of them has to go: a disk may be slow, or
a network be down for a moment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

__all__ = ["MAX_TRIES", "Suspicions"]

MAX_TRIES: Final = 3
"""The same members try again so many times in a row before one of them has to go."""


class Suspicions(msgspec.Struct, frozen=True, kw_only=True):
    """The exchanges that broke since the last step was done."""

    num_broken: int = 0
    reports: Mapping[str, tuple[str, ...]] = {}
    """Reporter -> the members that it waited for, of the exchange that is broken now."""
    reasons: Mapping[str, str] = {}
    """Reporter -> its name and error, of the same exchange."""
    silent: Mapping[str, int] = {}
    """Member -> number of broken exchanges in which others waited for it and it reported nothing."""
    named: Mapping[str, int] = {}
    """Member -> number of reports that have named it."""

    def reported(self, worker_id: str, peers: Sequence[str], reason: str = "") -> Suspicions:
        """Add a member's report: its exchange broke while it waited for these peers."""
        return msgspec.structs.replace(
            self, reports={**self.reports, worker_id: tuple(peers)}, reasons={**self.reasons, worker_id: reason}
        )

    def anew(self) -> Suspicions:
        """Forget the reports: they were of another exchange, and a loss has explained that."""
        return msgspec.structs.replace(self, reports={}, reasons={})

    @property
    def reason(self) -> str:
        """The error to tell: of the reporter that most others have waited for, as they only saw that it had left."""

        def num_waiting(worker_id: str) -> int:
            return sum(worker_id in peers for reporter, peers in self.reports.items() if reporter != worker_id)

        return self.reasons[max(self.reasons, key=num_waiting)] if self.reasons else ""

    def given_up(self, members: Collection[str]) -> Suspicions:
        """Count the broken exchange between ``members``, which is over."""
        waited_for = {peer for reporter, peers in self.reports.items() for peer in peers if peer != reporter}
        reporters = self.reports.keys()
        # If no report names a member, the cause is one of the members that report nothing.
        silent = ((waited_for - reporters) & set(members)) or (set(members) - reporters)
        return Suspicions(
            num_broken=self.num_broken + 1,
            silent=_more(self.silent, silent if reporters else ()),
            named=_more(self.named, waited_for),
        )

    def worst(self, members: Sequence[str]) -> tuple[str, bool]:
        """Return the member to go on without.

        Args:
            members: in the order in which they were started.

        Returns:
            Its id, and whether there is evidence against it: where all report and name nobody, it is the newest member.
        """

        def guilt(worker_id: str) -> tuple[int, int]:
            return self.silent.get(worker_id, 0), self.named.get(worker_id, 0)

        worst = max(reversed(members), key=guilt)
        return worst, guilt(worst) != (0, 0)


def _more(counts: Mapping[str, int], names: Collection[str]) -> dict[str, int]:
    return {**counts, **{name: counts.get(name, 0) + 1 for name in names}}
