"""How decisions of the membership leave the head, when the heirs know of them."""

from __future__ import annotations

import asyncio

import msgspec

from unisono.cluster.head.directory import Directory
from unisono.cluster.head.lines import Lines
from unisono.cluster.head.telling import Telling, how_to_join
from unisono.cluster.head.versions import Outgoing
from unisono.core import events
from unisono.core.messages import Ended, Happened, Told, WorkerLate
from unisono.membership import Alarm, Hangup, Invite, seat_of
from unisono.membership.roster import State

__all__ = ["Delivery"]


class Delivery:
    """Sends what waited for the heirs (`unisono.cluster.head.versions.Versions`).

    Args:
        url: where other machines reach the head, for invitations.
        directory: of the run, for the same.
    """

    def __init__(self, lines: Lines, telling: Telling, *, url: str, directory: Directory) -> None:
        self._lines = lines
        self._telling = telling
        self._url = url
        self._directory = directory
        self._informed: set[str] = set()  # agents and workers that have got the end of the run

    def send(self, outgoing: Outgoing) -> None:
        """Send a message to one, tell a part of the story to all, or let go on who waits to answer."""
        match outgoing:
            case asyncio.Future():
                if not outgoing.done():
                    outgoing.set_result(None)
            case Told():
                self._telling.tell_story(outgoing.events)
            case Invite():
                self._telling.announce(how_to_join(self._url, self._directory.path))
            case Alarm():
                raise AssertionError("it was taken before")
            case Hangup():
                self._lines.hang_up(outgoing.worker_id, Ended(ok=False, reason=outgoing.reason, exit_code=1))
            case _ if outgoing.to in self._lines:
                message = outgoing.message
                self._lines.send(outgoing.to, message)
                if isinstance(message, Ended):
                    self._informed.add(outgoing.to)
                elif isinstance(message, WorkerLate):
                    late = events.WorkerLate(**msgspec.structs.asdict(message))
                    self._telling.pass_on(Happened(event=late))

    def is_everybody_informed(self, state: State) -> bool:
        """Return whether all agents have got the end of the run, and have disconnected.

        The agent whose child this head is counts even if it has not connected to this head yet; it ends the head when
        it ends.
        """
        seat = seat_of(state)
        return seat in ("", *self._informed) and not state.agents.keys() & self._lines.keys()
