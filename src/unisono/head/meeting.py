"""Two heads of one run, each with its side of a network that was cut: one of them gives way (`decisions.following`)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, Protocol

import msgspec

from unisono.decisions.following import Rank, Standpoint, merged, verdict
from unisono.decisions.membership import seat_of
from unisono.decisions.membership.roster import State
from unisono.errors import ProtocolError
from unisono.head.directory import Directory
from unisono.messages import Proposal, Verdict

__all__ = ["Meeting", "Party"]

MOVE_S: Final = 5.0
LOOK_S: Final = 0.02


class Party(Protocol):
    """This head (`unisono.head.server.Head`), as `Meeting` needs it."""

    @property
    def state(self) -> State:
        """The membership."""

    def move(self, url: str, text: str) -> None:
        """Send all machines to the head at this address, and say so; from now on this head decides nothing more."""

    def has_workers(self) -> bool:
        """Return whether a worker is still connected."""

    def give_way(self, term: int) -> None:
        """End this head, and nothing else."""


class Meeting:
    """What this head asks other heads, answers them, and does if it is the one that gives way.

    Args:
        url: of this head.
        directory: that this side may write into.
    """

    def __init__(self, party: Party, run_id: str, url: str, directory: Directory) -> None:
        self._party = party
        self._run_id = run_id
        self._url = url
        self._directory = directory
        self._stand = Standpoint(Rank.of(-1, party.state.term, seat_of(party.state)))
        self._they_write = False  # the other head that this one has met last
        self._moving: asyncio.Task[None] | None = None

    @property
    def is_moving(self) -> bool:
        """This side ends: its machines join the other one."""
        return self._moving is not None

    async def moved(self) -> None:
        """Wait until the machines have ended their workers, if this side ends."""
        if self._moving is not None:
            await self._moving

    # -- the questions (`unisono.head.reunion.Side`) ---------------------------------------------------

    def lost_addresses(self) -> list[str]:
        """Return where machines that this side has lost may have a head."""
        state = self._party.state
        if state.ended is not None:
            return []
        here = {agent.url for agent in state.agents.values()}
        return [agent.url for agent in state.absent.values() if agent.wanted and agent.url and agent.url not in here]

    def propose(self) -> Proposal | None:
        """Return what to ask another head now; None: nothing."""
        own, state = self._standpoint(), self._party.state
        if own.gives_way_to or state.ended is not None:
            return None
        self._stand = msgspec.structs.replace(own, is_asking=True)
        return Proposal(
            run_id=self._run_id,
            agent_id=seat_of(state),
            term=state.term,
            step=state.committed,
            url=self._url,
            writes=self._directory.is_held,
        )

    def answered(self, url: str, answer: Verdict | None) -> None:
        """Receive the answer of the head at this address; None: there is none."""
        self._stand = merged(self._standpoint(), url, answer)
        self._they_write = answer is not None and answer.writes
        self._move_if_giving_way()

    # -- the answer ----------------------------------------------------------------------------------

    def answer(self, other: Proposal) -> Verdict:
        """Return the answer to another head; `act` follows when it is sent.

        Raises:
            ProtocolError: that is the head of another run.
        """
        if other.run_id != self._run_id:
            raise ProtocolError(f"this is the head of run {self._run_id}, not of {other.run_id}")
        if self._party.state.ended is not None:
            return Verdict(gives_way="")
        self._stand, found = verdict(self._standpoint(), other)
        self._they_write = other.writes
        return msgspec.structs.replace(found, writes=self._directory.is_held)

    def act(self) -> None:
        """Give way, if that is what this head has answered."""
        if self._party.state.ended is None:
            self._move_if_giving_way()

    def _standpoint(self) -> Standpoint:
        state = self._party.state
        return msgspec.structs.replace(self._stand, rank=Rank.of(state.committed, state.term, seat_of(state)))

    def _move_if_giving_way(self) -> None:
        """Send all machines of this side to the head that it gives way to, and end."""
        stand = self._standpoint()
        if not stand.gives_way_to or self.is_moving:
            return
        self._directory.put_down_pen()
        text = (
            f"another side of the run can be reached again, and has done {stand.their_step + 1} steps where this one "
            f"has done {stand.rank.step + 1}: all machines of this side join the other one"
        )
        self._party.move(stand.gives_way_to, text)
        self._directory.forget_address()
        self._moving = asyncio.create_task(self._end_when_workers_have())

    async def _end_when_workers_have(self) -> None:
        """End this head, and with it the right to write, when the machines have ended their workers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOVE_S):
                while self._party.has_workers():
                    await asyncio.sleep(LOOK_S)
        self._directory.leave_to_other(they_write=self._they_write)
        self._party.give_way(self._party.state.term)
