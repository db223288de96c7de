"""Following a head: which agents hold what a head has decided, and which head an agent listens to.

A run has one head at a time, and every head a **term**: one more than that of the head before it. A head numbers the
versions of the table's state, so (term, number) orders all of them, whoever has made them. It sends each version to its
**heirs** (the agents that joined first), and what a decision asks of others only goes out when all heirs have answered
that they hold the version that contains it (`Undelivered`). So a decision that a worker or an agent has acted on is
known to every head that may follow. An agent follows the head with the highest term that it knows (`Followed`).

A head that goes on without an heir, and a head that follows another one, begins a new **branch** of the run's history,
which all hear of before the next decision. A head takes nobody who has followed a branch that it does not know: such
a worker may have acted on decisions that this head knows nothing of. So where a network is cut, each side has heads,
generations and versions of its own, and all that the sides have in common are the bits. When the sides find each other
again, `verdict` says which of them ends and joins the other with new workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from unisono.messages import Kept, Proposal, Snapshot, Verdict
from unisono.spec import Partition

__all__ = [
    "GONE_S",
    "HEIR_ANSWERS_S",
    "MAX_HEIRS",
    "SUPERSEDED",
    "TURN_S",
    "Absence",
    "Followed",
    "Rank",
    "StaleHead",
    "Standpoint",
    "Undelivered",
    "is_majority",
    "learn_term",
    "merged",
    "verdict",
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
    snapshot: Snapshot | None = None
    """The newest version of the state that it holds."""

    def learn(self, term: int) -> Followed:
        """Listen to a head of this term.

        Raises:
            StaleHead: the agent knows a higher term, and closes the connection.
        """
        return msgspec.structs.replace(self, term=learn_term(self.term, term))

    def keep(self, offered: Snapshot) -> tuple[Followed, Kept]:
        """Hold this version unless it is older than the one that is held; returns the answer to the head as well."""
        followed, held = self.learn(offered.term), self.snapshot
        if held is None or (offered.term, offered.number) > (held.term, held.number):
            followed = msgspec.structs.replace(followed, snapshot=offered)
        return followed, Kept(term=offered.term, number=offered.number)

    def is_successor(self, agent_id: str) -> bool:
        """Return whether this agent starts the next head, by the newest version that it holds."""
        return self.snapshot is None or self.snapshot.successor in ("", agent_id)

    def may_start(
        self, agent_id: str, absence: Absence, partition: Partition, *, away_s: float, has_majority: bool, now: float
    ) -> bool:
        """Return whether this agent, which does not reach the head, starts the next one now.

        Args:
            away_s: how long a head may be out of reach.
            has_majority: this machine and those that it reaches are more than half of the machines.
        """
        if self.snapshot is None or agent_id not in self.snapshot.heirs:
            return False
        if self.snapshot.holders == [self.snapshot.successor]:
            return False  # the state is lost with that machine, or goes on there
        turn = [heir for heir in self.snapshot.heirs if heir != self.snapshot.successor].index(agent_id) * TURN_S
        if absence.refused_since is not None and now >= absence.refused_since + GONE_S + turn:
            return partition != "majority" or has_majority
        if partition == "wait" or (partition == "majority" and not has_majority):
            return False
        return now >= absence.since + away_s + turn


def is_majority(here: Collection[str], machines: Collection[str]) -> bool:
    """Return whether these agents are more than half of all; of two halves, the one with the eldest agent counts."""
    if 2 * len(here) != len(machines):
        return 2 * len(here) > len(machines)
    return min(machines, key=_age) in here


def _age(agent_id: str) -> tuple[int, str]:
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


# -- two heads of one run ----------------------------------------------------------------------------


class Rank(msgspec.Struct, frozen=True, order=True):
    """How far a head's side of the run is. The side with the lower rank joins the other; no two ranks are equal."""

    step: int
    term: int
    eldest: tuple[int, str]
    """By the agent whose child the head is: of two that are as far, that of the older agent goes on."""

    @staticmethod
    def of(step: int, term: int, agent_id: str) -> Rank:
        number, name = _age(agent_id)
        return Rank(step, term, (-number, name))


class Standpoint(msgspec.Struct, frozen=True):
    """What a head has to do with other heads of its run. It gives way to a head only at a moment at which that head
    is bound to stay: so of two heads one goes on, whichever messages are lost.
    """

    rank: Rank
    is_asking: bool = False
    """It has sent a `Proposal`, and waits for the `Verdict`."""
    gives_way_to: str = ""
    """The address of the head that it has given way to."""
    their_step: int = -1
    """The last step that is done there."""


def verdict(own: Standpoint, other: Proposal) -> tuple[Standpoint, Verdict]:
    """Return the answer to another head's proposal."""
    if own.is_asking or own.gives_way_to:
        return own, Verdict(gives_way="")
    if Rank.of(other.step, other.term, other.agent_id) < own.rank:
        return own, Verdict(gives_way="you", step=own.rank.step)
    own = msgspec.structs.replace(own, gives_way_to=other.url, their_step=other.step)
    return own, Verdict(gives_way="me", step=own.rank.step)


def merged(own: Standpoint, url: str, answer: Verdict | None) -> Standpoint:
    """Return the standpoint after the answer to this head's proposal, from the head at ``url``; None: there was none.

    A head whose answer was lost has either given way, or stays: this one stays as well, and asks again.
    """
    own = msgspec.structs.replace(own, is_asking=False)
    if answer is not None and answer.gives_way == "you":
        return msgspec.structs.replace(own, gives_way_to=url, their_step=answer.step)
    return own
