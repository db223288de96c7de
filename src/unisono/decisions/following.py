"""Following a head: which agents hold what a head has decided, and which head an agent listens to.

A run has one head at a time, and every head a **term**: one more than that of the head before it. A head numbers the
versions of the table's state, so (term, number) orders all of them, whoever has made them. It sends each version to its
**heirs** (the agents that joined first), and what a decision asks of others only goes out when all heirs have answered
that they hold the version that contains it (`Undelivered`). So a decision that a worker or an agent has acted on is
known to every head that may follow. An agent follows the head with the highest term that it knows (`Followed`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from unisono.messages import Kept, Snapshot

__all__ = ["HEIR_ANSWERS_S", "MAX_HEIRS", "SUPERSEDED", "Followed", "StaleHead", "Undelivered", "learn_term"]

T = TypeVar("T")

MAX_HEIRS: Final = 3
HEIR_ANSWERS_S: Final = 1.0
"""An heir that has not answered for so long (its machine is slow, or stands still) is left out until it answers."""
SUPERSEDED: Final = 3
"""Exit code of a head that has learned of a higher term."""


class StaleHead(ConnectionError):
    """The head at the other end of a connection has a lower term than another head that is known."""


@dataclass(frozen=True)
class Undelivered(Generic[T]):
    """Versions that the heirs hold, and decisions that wait for the heirs, oldest first."""

    waiting: tuple[tuple[int, Sequence[T]], ...] = ()
    """By decision: the number of the version that contains it, and the messages to be sent."""
    since: float = 0.0
    """When the oldest of them began to wait."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """Agent -> the newest version that it holds."""

    def add(self, number: int, messages: Sequence[T], now: float) -> Undelivered[T]:
        """Let these messages wait for a version."""
        since = self.since if self.waiting else now
        return dataclasses.replace(self, waiting=(*self.waiting, (number, messages)), since=since)

    def hold(self, agent_id: str, number: int) -> Undelivered[T]:
        """An agent holds this version, and with it all before."""
        newest = max(number, self.kept.get(agent_id, 0))
        return dataclasses.replace(self, kept={**self.kept, agent_id: newest})

    def release(self, heirs: Sequence[str], now: float) -> tuple[list[T], Undelivered[T]]:
        """Return the messages that wait for no heir any more, in the order of the decisions, and what is left."""
        held = min((self.kept.get(heir, 0) for heir in heirs), default=None)
        ready = [entry for entry in self.waiting if held is None or entry[0] <= held]
        if not ready:
            return [], self
        left = dataclasses.replace(self, waiting=self.waiting[len(ready) :], since=now)
        return [message for _, messages in ready for message in messages], left

    def silent(self, heirs: Sequence[str], now: float) -> list[str]:
        """Return the heirs that the oldest decision has waited for long enough."""
        if not self.waiting or now < self.since + HEIR_ANSWERS_S:
            return []
        return [heir for heir in heirs if self.kept.get(heir, 0) < self.waiting[0][0]]


def learn_term(seen: int, offered: int) -> int:
    """Return the highest known term when a head sends its own.

    Raises:
        StaleHead: another head has taken over from this one.
    """
    if offered < seen:
        raise StaleHead(f"this head has term {offered}, and another one has taken over with term {seen}")
    return offered


@dataclass(frozen=True)
class Followed:
    """An agent's knowledge of the heads of its run."""

    term: int = 0
    """The highest term that the agent knows, from a head or because it has started a head with it."""
    snapshot: Snapshot | None = None
    """The newest version of the state that it holds."""

    def learn(self, term: int) -> Followed:
        """Listen to a head of this term.

        Raises:
            StaleHead: the agent knows a higher term, and closes the connection.
        """
        return dataclasses.replace(self, term=learn_term(self.term, term))

    def keep(self, offered: Snapshot) -> tuple[Followed, Kept]:
        """Hold this version unless it is older than the one that is held; returns the answer to the head as well."""
        followed, held = self.learn(offered.term), self.snapshot
        if held is None or (offered.term, offered.number) > (held.term, held.number):
            followed = dataclasses.replace(followed, snapshot=offered)
        return followed, Kept(term=offered.term, number=offered.number)

    def is_successor(self, agent_id: str) -> bool:
        """Return whether this agent starts the next head, by the newest version that it holds."""
        return self.snapshot is None or self.snapshot.successor in ("", agent_id)
