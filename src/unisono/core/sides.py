"""Two sides of one run, each with a head of its own: which head gives way, and which machines join the other side.

| who | in this situation | does |
|---|---|---|
| head | an agent says hello as a new one | takes it; if it gives way itself, sends it to the other head (`Moved`) |
| head | an agent says hello with another branch or a higher term | stays, and takes new workers only (`Foreign`) |
| head | a worker says hello with a higher term | stays, and hangs up |
| head | asks another head (`Proposal`) | gives way to nobody until it has the answer or none comes |
| head | is asked, while it asks, gives way, or waits for the workers that hold its state | answers that it cannot say |
| head | is asked by a side that is behind, or that is ahead | "you give way", and stays; "I give way", and moves |
| agent | is sent to another head by its own | keeps its workers until that head answers, then joins it with new ones |
| agent | hears `Foreign` | joins anew, unless it could go on by itself and its workers have come further |
| agent | its head has given way, and it does not know to whom | looks for a head, and joins it as above |
| agent | reaches no head for long enough | starts one, if its workers hold the state (`Followed.may_start`) |

So only `verdict` and `merged` make a head give way, and whoever joins has reached a head before it lets its state go.
`tests/pure/test_sides.py` walks through all orders of these events.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from unisono.core.following import Followed, age
from unisono.core.messages import AgentHello, Foreign, Hello, Proposal, Verdict, Welcome

__all__ = ["Allegiance", "HelloAnswer", "Rank", "Standpoint", "admission", "merged", "verdict"]


class Rank(msgspec.Struct, frozen=True, order=True):
    """How far a head's side of the run is. The side with the lower rank joins the other; no two ranks are equal."""

    step: int
    """The last one that is done; -1: none, or no worker of this side holds the state."""
    term: int
    eldest: tuple[int, str]
    """By the agent whose child the head is: of two that are as far, that of the older agent goes on."""

    @staticmethod
    def of(step: int, term: int, agent_id: str) -> Rank:
        number, name = age(agent_id)
        return Rank(step, term, (-number, name))


class Standpoint(msgspec.Struct, frozen=True):
    """What a head has to do with other heads of its run. It gives way to a head only at a moment at which that head
    is bound to stay: so of two heads one goes on, whichever messages are lost.
    """

    rank: Rank
    is_asking: bool = False
    """It has sent a `Proposal`, and waits for the `Verdict`."""
    is_waiting: bool = False
    """None of the workers that hold its side's state has come back yet."""
    gives_way_to: str = ""
    """The address of the head that it has given way to."""
    their_step: int = -1
    """The last step that is done there."""

    @property
    def may_ask(self) -> bool:
        return not (self.gives_way_to or self.is_waiting)


def verdict(own: Standpoint, other: Proposal) -> tuple[Standpoint, Verdict]:
    """Return the answer to another head's proposal."""
    if own.is_asking or not own.may_ask:
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


class HelloAnswer(Enum):
    """What a head answers to a hello."""

    WELCOME = auto()
    FOREIGN = auto()
    """`Foreign`."""
    MOVED = auto()
    """`Moved`."""
    HANG_UP = auto()


def admission(own: Standpoint, hello: Hello | AgentHello, *, is_own: bool) -> HelloAnswer:
    """Return what a head answers to a worker or an agent. No hello makes a head give way.

    Args:
        is_own: the head knows the branch that the sender has followed (`State.is_own`).
    """
    knows_another = hello.term > own.rank.term
    if isinstance(hello, Hello):
        return HelloAnswer.HANG_UP if own.gives_way_to or knows_another else HelloAnswer.WELCOME
    if own.gives_way_to:
        return HelloAnswer.MOVED
    return HelloAnswer.FOREIGN if not hello.fresh and (knows_another or not is_own) else HelloAnswer.WELCOME


class Allegiance(msgspec.Struct, frozen=True):
    """Which head an agent follows, and what it brings with it to another one."""

    followed: Followed = Followed()
    branch: str = ""
    """Of the run's history."""
    has_seat: bool = False
    """The head is this agent's child."""
    joins: str = ""
    """The address of the head of another side, which this machine joins with new workers when that head answers."""
    is_fresh: bool = False
    """It has ended the workers that it had on another side."""

    def seated(self) -> Allegiance:
        """This agent starts the next head."""
        followed = self.followed.learn(self.followed.term + 1)
        return msgspec.structs.replace(self, followed=followed, has_seat=True, joins="")

    def welcomed(self, welcome: Welcome) -> Allegiance:
        """A head has taken this agent.

        Raises:
            StaleHead: the agent knows a head that has taken over from this one.
        """
        followed = self.followed.learn(welcome.term)
        return msgspec.structs.replace(self, followed=followed, branch=welcome.branch, joins="", is_fresh=False)

    def offered(self, url: str, foreign: Foreign, agent_id: str, *, has_workers: bool, last_step: int) -> Allegiance:
        """The head at ``url`` takes this machine with new workers only.

        Args:
            last_step: the last one that is done by the workers of this machine.
        """
        snapshot = self.followed.snapshot
        may_go_on = has_workers and snapshot is not None and agent_id in snapshot.heirs and agent_id in snapshot.holders
        return self if may_go_on and last_step > foreign.step else self.sent(url)

    def sent(self, url: str) -> Allegiance:
        """The head that this agent follows, or its child, has given way to the one at ``url`` ("": not known)."""
        return msgspec.structs.replace(self, has_seat=False, joins=url or self.joins)

    def joined(self) -> Allegiance:
        """The workers have ended, because the head that this agent joins has answered."""
        return Allegiance(joins=self.joins, is_fresh=True)
