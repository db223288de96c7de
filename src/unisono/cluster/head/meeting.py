"""Two heads of one run, each with its side of a network that was cut: one of them gives way (`unisono.core.sides`)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from unisono.cluster.head.connections import ConnectionsByName
from unisono.cluster.head.directory import Directory
from unisono.cluster.head.table import Table
from unisono.cluster.head.telling import Telling
from unisono.cluster.worker.link import Refused, answer_to, open_link
from unisono.core.errors import ProtocolError
from unisono.core.messages import AgentHello, Foreign, Hello, Message, Moved, Proposal, Verdict, decode, encode
from unisono.core.sides import HelloAnswer, Rank, Standpoint, admission, merged, verdict
from unisono.membership import seat_of
from unisono.membership.roster import WorkerState

__all__ = ["Meeting"]

PACE_S: Final = 2.0
"""Between two rounds of attempts, in the mean. Two heads that ask each other at the same moment answer nothing, so they
must not go on in step.
"""
ANSWER_S: Final = 3.0
MOVE_S: Final = 5.0
LOOK_S: Final = 0.02


class Meeting:
    """What this head asks other heads, answers them, and does if it is the one that gives way.

    Args:
        url: of this head.
        directory: that this side may write into.
        give_way: ends this head, and nothing else.
    """

    def __init__(
        self,
        run_id: str,
        url: str,
        *,
        table: Table,
        lines: ConnectionsByName,
        telling: Telling,
        directory: Directory,
        give_way: Callable[[], None],
    ) -> None:
        self._run_id = run_id
        self._url = url
        self._table = table
        self._lines = lines
        self._telling = telling
        self._directory = directory
        self._give_way = give_way
        self._stand = Standpoint(Rank.of(-1, table.state.term, seat_of(table.state)))
        self._they_write = False  # the other head that this one has met last
        self._moving: asyncio.Task[None] | None = None
        self._sent_away: set[str] = set()  # agents that know which head this one gives way to

    async def moved(self) -> None:
        """Wait until the machines have ended their workers, if this side ends."""
        if self._moving is not None:
            await self._moving

    # -- the questions -------------------------------------------------------------------------------

    async def search(self, token: str) -> None:
        """Ask at the addresses of lost machines for a head of this run, at a slow pace."""
        while True:
            await asyncio.sleep(PACE_S * random.uniform(0.75, 1.25))
            for url in self.lost_addresses():
                await self._ask(url, token)

    async def _ask(self, url: str, token: str) -> None:
        try:
            link = await open_link(url, token, ANSWER_S)
        except (OSError, Refused):  # no head is there, or not one of this run
            return
        with contextlib.closing(link):
            # Not before: while the way to that head was closed, this side has gone on.
            proposal = self.propose()
            if proposal is None:
                return
            answer = None
            try:
                found = decode(await answer_to(encode(proposal), link, ANSWER_S))
                answer = found if isinstance(found, Verdict) else None
            except (OSError, ProtocolError):
                pass
            finally:
                self.answered(url, answer)

    def lost_addresses(self) -> Sequence[str]:
        """Return where machines that this side has lost may have a head."""
        state = self._table.state
        if state.ended is not None:
            return []
        here = {agent.url for agent in state.agents.values()}
        return [agent.url for agent in state.absent.values() if agent.wanted and agent.url and agent.url not in here]

    def propose(self) -> Proposal | None:
        """Return what to ask another head now; None: nothing."""
        own, state = self._standpoint(), self._table.state
        if not own.may_ask or state.ended is not None:
            return None
        self._stand = msgspec.structs.replace(own, is_asking=True)
        return Proposal(
            run_id=self._run_id,
            agent_id=seat_of(state),
            term=state.term,
            step=own.rank.step,
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
        if self._table.state.ended is not None:
            return Verdict(gives_way="")
        self._stand, found = verdict(self._standpoint(), other)
        self._they_write = other.writes
        return msgspec.structs.replace(found, writes=self._directory.is_held)

    def admit(self, hello: Hello | AgentHello) -> HelloAnswer | Message:
        """Return what to answer to a worker or an agent: a message, or whether it is welcome."""
        own = self._standpoint()
        match admission(own, hello, is_own=self._table.state.is_own(hello.branch)):
            case HelloAnswer.FOREIGN:
                return Foreign(step=own.rank.step)
            case HelloAnswer.MOVED:
                assert isinstance(hello, AgentHello)
                self._sent_away.add(hello.agent_id)
                return Moved(url=own.gives_way_to)
            case answer:
                return answer

    def act(self) -> None:
        """Give way, if that is what this head has answered."""
        if self._table.state.ended is None:
            self._move_if_giving_way()

    def _standpoint(self) -> Standpoint:
        state = self._table.state
        holding = {name for name, worker in state.workers.items() if worker.state is WorkerState.HOLDING}
        is_here = not holding.isdisjoint(self._lines.keys())
        rank = Rank.of(state.committed if is_here else -1, state.term, seat_of(state))
        return msgspec.structs.replace(self._stand, rank=rank, is_waiting=bool(holding) and not is_here)

    def _move_if_giving_way(self) -> None:
        """Send all machines of this side to the head that it gives way to, and end."""
        stand, state = self._standpoint(), self._table.state
        if not stand.gives_way_to or self._moving is not None:
            return
        self._directory.put_down_pen()
        self._telling.announce(
            f"another side of the run can be reached again; it has done {stand.their_step + 1} steps, and this one "
            f"{state.committed + 1}: all machines of this side join the other one"
        )
        self._table.close()
        self._sent_away |= state.agents.keys() & self._lines.keys()
        self._lines.send_all(state.agents, Moved(url=stand.gives_way_to))
        self._directory.forget_address()
        self._moving = asyncio.create_task(self._end_when_machines_have_left())

    async def _end_when_machines_have_left(self) -> None:
        """End this head, and with it the right to write, when its workers have ended and its own agent knows why."""
        state = self._table.state
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOVE_S):
                while seat_of(state) not in self._sent_away or self._lines.keys() & state.workers.keys():
                    await asyncio.sleep(LOOK_S)
        self._directory.leave_to_other(they_write=self._they_write)
        self._give_way()
