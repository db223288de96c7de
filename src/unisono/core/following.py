"""Following a head: which agents hold what a head has decided, and which head an agent listens to.

A run has one head at a time, and every head a **term**: one more than that of the head before it. A head numbers the
versions of the table's state, so (term, number) orders all of them, whoever has made them. It sends each version to its
**heirs** (the agents that joined first), and what a decision asks of others only goes out when all heirs have answered
that they hold the version that contains it (`Undelivered`). So a decision that a worker or an agent has acted on is
known to every head that may follow. An agent follows the head with the highest term that it knows (`Followed`).

A head that goes on without an heir, and a head that follows another one, begins a new **branch** of the run's history,
which all hear of before the next decision. A head takes nobody who has followed a branch that it does not know: such
a worker may have acted on decisions that this head knows nothing of. So where a network is cut, each side has heads,
generations and versions of its own, and all that the sides have in common are the bits. What they do when they
find each other again is in `unisono.core.sides`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from unisono.core.messages import HeadSnapshot, Kept
from unisono.core.settings import Partition

__all__ = [
    "GONE_S",
    "HEIR_ANSWERS_S",
    "MAX_HEIRS",
    "SUPERSEDED",
    "TURN_S",
    "Absence",
    "Followed",
    "StaleHead",
    "Undelivered",
    "age",
    "is_majority",
    "learn_term",
]

T = TypeVar("T")

MAX_HEIRS: Final = 3
HEIR_ANSWERS_S: Final = 1.0
"""An heir that has not answered for so long (its machine is slow, or stands still) is left out until it answers."""
SUPERSEDED: Final = 3
"""Exit code of a head that has given way to another one."""
GONE_S: Final = 1.0
"""When the head's machine has answered for so long that nobody listens there, the head's agent is gone as well: it
keeps the address as long as it lives."""
TURN_S: Final = 3.0
"""So much later than the heir before it an heir starts the next head."""


class StaleHead(ConnectionError):
    """The head at the other end of a connection has a lower term than another head that is known."""


class Undelivered(msgspec.Struct, Generic[T], frozen=True):
    """Versions that the heirs hold, and decisions that wait for the heirs, oldest first."""

    waiting: tuple[tuple[int, Sequence[T]], ...] = ()
    """By decision: the number of the version that contains it, and the messages to be sent."""
    since: float = 0.0
    """When the oldest of them began to wait."""
    kept: Mapping[str, int] = {}
    """Agent -> the newest version that it holds."""

    def add(self, number: int, messages: Sequence[T], now: float) -> Undelivered[T]:
        """Let these messages wait for a version."""
        since = self.since if self.waiting else now
        return msgspec.structs.replace(self, waiting=(*self.waiting, (number, messages)), since=since)

    def hold(self, agent_id: str, number: int) -> Undelivered[T]:
        """An agent holds this version, and with it all before."""
        newest = max(number, self.kept.get(agent_id, 0))
        return msgspec.structs.replace(self, kept={**self.kept, agent_id: newest})

    def after(self, number: int, messages: Sequence[T], now: float) -> Undelivered[T]:
        """Let these messages wait for a version, and all that waits already wait for them."""
        waiting = ((number, messages), *((max(number, each), later) for each, later in self.waiting))
        return msgspec.structs.replace(self, waiting=waiting, since=self.since if self.waiting else now)

    def release(self, heirs: Sequence[str], now: float) -> tuple[list[T], Undelivered[T]]:
        """Return the messages that wait for no heir any more, in the order of the decisions, and what is left."""
        held = min((self.kept.get(heir, 0) for heir in heirs), default=None)
        ready = [entry for entry in self.waiting if held is None or entry[0] <= held]
        if not ready:
            return [], self
        left = msgspec.structs.replace(self, waiting=self.waiting[len(ready) :], since=now)
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


class Followed(msgspec.Struct, frozen=True):
    """An agent's knowledge of the heads of its run."""

    term: int = 0
    """The highest term that the agent knows, from a head or because it has started a head with it."""
    snapshot: HeadSnapshot | None = None
    """The newest version of the state that it holds."""

    def learn(self, term: int) -> Followed:
        """Listen to a head of this term.

        Raises:
            StaleHead: the agent knows a higher term, and closes the connection.
        """
        return msgspec.structs.replace(self, term=learn_term(self.term, term))

    def keep(self, offered: HeadSnapshot) -> tuple[Followed, Kept]:
        """Hold this version unless it is older than the one that is held; returns the answer to the head as well."""
        followed, held = self.learn(offered.term), self.snapshot
        if held is None or (offered.term, offered.number) > (held.term, held.number):
            followed = msgspec.structs.replace(followed, snapshot=offered)
        return followed, Kept(term=offered.term, number=offered.number)

    def is_successor(self, agent_id: str) -> bool:
        """Return whether this agent starts the next head, by the newest version that it holds."""
        return self.snapshot is None or self.snapshot.successor in ("", agent_id)

    def may_start(
        self,
        agent_id: str,
        absence: Absence,
        partition: Partition,
        *,
        away_s: float,
        has_majority: bool,
        has_workers: bool,
        now: float,
    ) -> bool:
        """Return whether this agent, which does not reach the head, starts the next one now.

        Args:
            away_s: how long a head may be out of reach.
            has_majority: this machine and those that it reaches are more than half of the machines.
            has_workers: a worker of this machine runs.
        """
        if self.snapshot is None or agent_id not in self.snapshot.heirs:
            return False
        successor, holders = self.snapshot.successor, self.snapshot.holders
        if agent_id in holders and not has_workers:
            return False  # this machine has lost the state since then
        if holders == [successor] and agent_id != successor:
            return False  # the state is lost with that machine, or goes on there
        # The agent of the last head comes last: its head has given way, else it would have started another at once.
        turn = sorted(self.snapshot.heirs, key=lambda heir: heir == successor).index(agent_id) * TURN_S
        if absence.refused_since is not None and now >= absence.refused_since + GONE_S + turn:
            return partition != "majority" or has_majority
        if partition == "wait" or (partition == "majority" and not has_majority):
            return False
        return now >= absence.since + away_s + turn


def is_majority(here: Collection[str], machines: Collection[str]) -> bool:
    """Return whether these agents are more than half of all; of two halves, the one with the eldest agent counts."""
    if 2 * len(here) != len(machines):
        return 2 * len(here) > len(machines)
    return min(machines, key=age) in here


def age(agent_id: str) -> tuple[int, str]:
    """Return a key by which the agent that has joined first comes first."""
    digits = agent_id.removeprefix("agent")
    return int(digits) if digits.isdecimal() else 0, agent_id


class Absence(msgspec.Struct, frozen=True):
    """What an agent knows of a head that it has lost."""

    since: float
    refused_since: float | None = None
    """Since when the head's machine answers that nobody listens there; None: it does not answer."""

    def tried(self, refused: bool, now: float) -> Absence:
        """Note an attempt to reach the head."""
        if not refused:
            return msgspec.structs.replace(self, refused_since=None)
        return msgspec.structs.replace(self, refused_since=now if self.refused_since is None else self.refused_since)
