"""What the head tells: to the machines that show or write the run, to its viewers, and to who asks for its status.

Nothing is decided here: this receives what workers report and what the table has decided.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shlex
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from unisono.cluster.head.connections import ConnectionsByName
from unisono.cluster.head.directory import Directory
from unisono.cluster.head.story import Story, Uses
from unisono.cluster.head.table import Table
from unisono.cluster.head.troubles import Troubles
from unisono.cluster.head.versions import Outgoing
from unisono.cluster.head.viewing import Viewing
from unisono.cluster.trust.invitation import HeadUrl
from unisono.core import events
from unisono.core.events import Announcement, Event, MachineUsed, Once, StepFinished
from unisono.core.following import MAX_HEIRS
from unisono.core.messages import Ended, Happened, WriteStacks
from unisono.core.spec import RunSpec
from unisono.membership import Alarm, Hangup, Invite, seat_of
from unisono.membership.roster import ALIVE, Agent, State, Worker, WorkerState
from unisono.record.journal.lines import LineEvent
from unisono.record.problems.kinds import Trouble
from unisono.system.interfaces import is_local

__all__ = ["Telling", "how_to_join", "machines_status", "workers_status"]

TOGETHER_S: Final = 0.2
"""In which what several machines use is told together."""


class Telling:
    """What one head tells, and to whom.

    Args:
        url: where other machines reach the head, for invitations.
        spec: settings of the run.
        token: must not get into a file.
        directory: of the run.
        story: that is told.
        viewing: those who look at the run.
    """

    def __init__(
        self,
        table: Table,
        lines: ConnectionsByName,
        run_id: str,
        spec: RunSpec,
        token: str,
        *,
        url: str,
        directory: Directory,
        story: Story,
        viewing: Viewing,
    ) -> None:
        self._table = table
        self._lines = lines
        self._url = url
        self._directory = directory
        self._story = story
        self._viewing = viewing
        self._waiting: asyncio.TimerHandle | None = None
        self._told_uses_at = -math.inf
        self._once = Once()
        self._informed: set[str] = set()  # agents and workers that have got the end of the run
        self.uses = Uses()
        self.troubles = Troubles(table, lines, directory, run_id, spec, token, self.tell)

    def pass_on(self, told: Sequence[Event]) -> None:
        """Take what workers tell, and tell all whom it concerns, when the heirs know of all before."""
        if lines := [event for event in told if self._take(event)]:
            self._table.send_when_held(Happened(events=lines))
        if self._story.has_news:
            self._table.remember_soon()

    def _take(self, event: Event) -> bool:
        """Take an event, and return whether it is to be told as it is, because it has a line of the journal."""
        is_new = self._once.is_new(event)
        if not isinstance(event, LineEvent):
            self.tell(event)
            return False
        if is_new:
            self._story.take_line(event)
        return is_new

    def tell(self, event: Event) -> None:
        """Tell an event as a part of the story."""
        self._story.note(event)
        self._table.remember()

    def announce(self, text: str) -> None:
        """Tell a sentence that follows from no decision of the table."""
        self.tell(Announcement(time=time.time(), text=text))

    def send(self, outgoing: Outgoing) -> None:
        """Send what waits for no heir any more: a message to one, events to all, or let go on who waits to answer."""
        match outgoing:
            case asyncio.Future():
                if not outgoing.done():
                    outgoing.set_result(None)
            case Happened():
                self._deliver(outgoing)
            case Invite():
                self.announce(how_to_join(self._url, self._directory.path))
            case Alarm():
                raise AssertionError("it was taken before")
            case Hangup():
                self._lines.hang_up(outgoing.worker_id, Ended(ok=False, reason=outgoing.reason, exit_code=1))
            case _ if outgoing.to in self._lines:
                message = outgoing.message
                self._lines.send(outgoing.to, message)
                if isinstance(message, Ended):
                    self._informed.add(outgoing.to)
                elif isinstance(message, WriteStacks):
                    self.tell(events.WorkerLate(**msgspec.structs.asdict(message)))

    def is_everybody_informed(self) -> bool:
        """Return whether all agents have got the end of the run, and have disconnected.

        The agent whose child this head is counts even if it has not connected to this head yet; it ends the head when
        it ends.
        """
        state = self._table.state
        return seat_of(state) in ("", *self._informed) and not state.agents.keys() & self._lines.keys()

    def _deliver(self, message: Happened) -> None:
        for event in message.events:
            self._viewing.take(event)
            self.troubles.note(event)
        is_step = isinstance(message.events[0], StepFinished)
        self._lines.send_all(self._listeners() if is_step else self._audience(), message)

    def _listeners(self) -> list[str]:
        return [agent_id for agent_id, agent in self._table.state.agents.items() if not agent.launched]

    def _audience(self) -> list[str]:
        """Return who hears the story: who shows it, and who may write it."""
        writers = [*self._table.state.heirs, *itertools.islice(self._directory.seers, MAX_HEIRS)]
        return list(dict.fromkeys([*self._listeners(), *writers]))

    # -- what machines use -----------------------------------------------------------------------------

    def take_use(self, agent_id: str, use: MachineUsed) -> None:
        """Receive what a machine uses, from one of its agents; told together with that of others."""
        self.uses.add(agent_id, use)
        if self._waiting is None:
            due = self._told_uses_at + self.uses.wait_s(len(self._audience()))
            delay = max(TOGETHER_S, due - time.monotonic())
            self._waiting = asyncio.get_running_loop().call_later(delay, self._tell_uses)

    def _tell_uses(self) -> None:
        self._waiting, self._told_uses_at = None, time.monotonic()
        self.uses.keep(self._table.state.agents.keys())
        if self.uses.has_news:
            used = self.uses.take()
            for event in used:
                self._viewing.take(event)
            self._lines.send_all(self._audience(), Happened(events=used))

    # -- what goes wrong (`unisono.cluster.head.troubles`) ---------------------------------------------

    def take_trouble(self, trouble: Trouble) -> None:
        """Say what has gone wrong, and put the evidence together."""
        try:
            self.troubles.take(trouble)
        except Exception:  # a bug of this library: what is decided counts all the same
            traceback.print_exc()


def how_to_join(url: str, directory: str) -> str:
    """Return the sentence that says how another machine joins.

    Args:
        url: of the head.
        directory: of the run; "": it is not known.
    """
    status = shlex.join(["unisono", "watch", "--once", directory]) if directory else "unisono watch --once RUN"
    line = f"with the line that `{status}` shows"
    if is_local(HeadUrl.parse(url).host):
        return (
            f"more workers can join, on this machine, {line}; other machines cannot reach the head: for that, start "
            "the run with --bind and an address of this machine that they reach, or with --bind 0.0.0.0"
        )
    return f"other machines can join {line}"


def workers_status(state: State) -> list[dict[str, Any]]:
    """Return the workers that have connected, without those that were lost or have left."""
    ranks = {worker_id: rank for rank, worker_id in enumerate(state.members)}
    return [
        _worker_status(ranks, worker)
        for worker in state.workers.values()
        if worker.info is not None and worker.state not in (WorkerState.LEFT, WorkerState.LOST)
    ]


def machines_status(state: State, used: Sequence[MachineUsed]) -> list[dict[str, Any]]:
    """Return the machines that are connected, also those without workers, with what they use; and those on which an
    agent of a launcher has ended, and that have no other one yet.
    """
    numbers = Counter(worker.agent for worker in state.workers.values() if worker.state in ALIVE)
    uses = {use.host: use for use in used}
    found = [_machine_status(agent, numbers[agent.agent_id], uses.get(agent.host)) for agent in state.agents.values()]
    lost = () if state.policy.elastic else sorted({*state.ended_machines}.difference(state.present))
    return found + [
        _machine_status(Agent(agent_id="", host=name, primary=False, offers=0), 0, None, "lost") for name in lost
    ]


def _machine_status(agent: Agent, num_workers: int, use: MachineUsed | None, state: str = "") -> dict[str, Any]:
    return {
        "agent_id": agent.agent_id,
        "host": agent.host,
        "state": state or ("away" if agent.away_at is not None else "connected"),
        "offers": agent.offers,
        "num_workers": num_workers,
        "is_first": agent.primary,
        "use": msgspec.to_builtins(use) if use is not None else None,
    }


def _worker_status(ranks: Mapping[str, int], worker: Worker) -> dict[str, Any]:
    assert worker.info is not None
    is_member = worker.state in (WorkerState.ADMITTED, WorkerState.HOLDING)
    return {
        "worker_id": worker.worker_id,
        "part": worker.part,
        "rank": ranks.get(worker.worker_id) if is_member else None,
        "state": worker.state.value,
        "pid": worker.info.pid,
        "host": worker.info.host,
        "device": worker.info.device,
        "step": worker.beat.step if worker.beat else -1,
        "microbatch": worker.beat.microbatch if worker.beat else -1,
    }
