"""Members of the generation as a round uses them: exchanges, plans and telemetry."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from unisono.decisions.layout import StateLayout
from unisono.decisions.plan import Plan
from unisono.decisions.plan import plan as even_plan
from unisono.decisions.tree import Node
from unisono.exchange import Combined, Exchange, Parcel, Share, combine
from unisono.exchange.flat import FlatLayout, Slot
from unisono.exchange.slots import Slots
from unisono.exchange.spent import NOTHING, Spent
from unisono.rounds import Reporter
from unisono.rounds.balancing import Balancing
from unisono.rounds.standing import check_titles
from unisono.rounds.team import Team
from unisono.telemetry import StepTelemetry

__all__ = ["Gathered", "Members", "Summed", "Undivided"]


@dataclass(frozen=True)
class Summed:
    """Result of a sum, equal on all members but for ``spent`` and ``sent_bytes``."""

    slot: Slot
    """Gradients and float buffers are means, the rest of the tail are sums."""
    digest: int
    telemetry: Mapping[str, StepTelemetry]
    """By worker id, in the order of the ranks at the sum: a loss after it changes the members."""
    spent: Spent = NOTHING
    """Where this member's time has gone."""
    generation: int = 0
    """In which the ranks of ``spent`` count."""
    sent_bytes: int = 0
    """Data that this member has sent to other hosts."""


class _Letter(msgspec.Struct, frozen=True, array_like=True):
    """What a member gathers."""

    title: str
    """Of the round: members of different rounds must not take each other's payloads."""
    payload: bytes


class Members:
    """The exchanges of one member with the others; each method says whether it is collective.

    Args:
        team: the members of the current generation.
        reporter: takes part in every sum.
        balance: give faster members more leaves.
        layout: who holds what of the state, from the ids of the members.
    """

    def __init__(
        self, team: Team, reporter: Reporter, *, balance: bool, layout: Callable[[Sequence[str]], StateLayout]
    ) -> None:
        self.team = team
        self.balancing = Balancing(team, enabled=balance)
        self.slots = Slots()
        self.agreed_generation = 0
        """The newest planned generation whose notice all members have: they can move there at the next boundary."""
        self.drain: Callable[[], None] = _nothing
        """Waits until no sum is under way in another thread, so that this one may use the exchange."""
        self._title, self._step = "", 0
        self._reporter = reporter
        self._layout = layout
        self._delivered_bytes = 0

    @property
    def rank(self) -> int:
        return self.team.rank

    @property
    def size(self) -> int:
        return self.team.size

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Of the members, by rank."""
        return self.team.worker_ids

    def newest(self) -> str:
        """Return what the run can go on from, for an error. Local."""
        return self._reporter.newest()

    @property
    def hosts(self) -> Sequence[str]:
        """Of the members, by rank."""
        return self.team.hosts

    @property
    def arithmetic(self) -> int:
        """Fingerprint of everything that this worker's arithmetic depends on."""
        return self.team.arithmetic

    @property
    def exchange(self) -> Exchange:
        """The exchange of the current generation."""
        return self.team.exchange

    def state_layout(self, worker_ids: Sequence[str] | None = None) -> StateLayout:
        """Return who holds what of the state among these members; None: those of the current generation. Local."""
        return self._layout(self.team.worker_ids if worker_ids is None else worker_ids)

    def departing(self) -> tuple[str, ...]:
        """Return the members that will leave at the next boundary, because all have agreed on it. Local."""
        agreed = self.agreed_generation
        return self.team.departing(agreed) if agreed > self.team.generation else ()

    def predicted(self, num_leaves: int) -> Plan:
        """Return the most likely plan of the coming steps. Local."""
        return self.balancing.predicted(num_leaves)

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which this member waits for others, and so is not late itself. Local."""
        return self.team.waiting()

    @contextmanager
    def taking_part(self, title: str, step: int) -> Iterator[None]:
        """Return a context in which this member gathers what belongs to the round of this title. Local.

        Args:
            step: at which the script is, for an error.
        """
        before, (self._title, self._step) = (self._title, self._step), (title, step)
        try:
            yield
        finally:
            self._title, self._step = before

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all members, by rank. Collective.

        Raises:
            StepError: the members are in different rounds. PeerLost, DeadlineExceeded: a member was lost.
        """
        self.team.check()
        with self.team.waiting():
            self.drain()
            found = self.team.exchange.all_gather(msgspec.msgpack.encode(_Letter(self._title, payload)))
        letters = [msgspec.msgpack.decode(each, type=_Letter) for each in found]
        titles = zip(self.worker_ids, letters, strict=False)
        check_titles({worker: letter.title for worker, letter in titles if letter.title}, self._step)
        return [letter.payload for letter in letters]

    def deliver(self, parcels: Sequence[Parcel]) -> None:
        """Bring tensors from members that have them to others; see `Exchange.deliver`. Collective.

        Raises:
            PeerLost, DeadlineExceeded: a member was lost.
        """
        self.team.check()
        with self.team.waiting():
            self._delivered_bytes += self.team.exchange.deliver(parcels)

    def take_delivered_bytes(self) -> int:
        """Return, once, how much this member has sent to other hosts with `deliver`. Local."""
        number, self._delivered_bytes = self._delivered_bytes, 0
        return number

    def sum(self, share: Share, telemetry: StepTelemetry) -> Summed:
        """Add up the nodes of all members in tree order, and divide by the total weight. Collective.

        Raises:
            PeerLost, DeadlineExceeded: a member was lost, and as far as this member knows there was no commit.
        """
        self.team.check()
        with self.team.waiting():
            own = self.announce(telemetry)
            combined = combine(self.team.exchange, share, own)
        summed = self.summed(combined)
        self.note(summed)
        self.balancing.observe(list(summed.telemetry.values()), share)
        return summed

    def announce(self, telemetry: StepTelemetry) -> bytes:
        """Return what this member says to all with its sums. Local; may wait for a copy of the state in memory."""
        found = self.team.exchange.work()
        own = msgspec.structs.replace(
            telemetry,
            newest_generation=self.team.newest_generation(),
            first_of_host=self.rank if found is None else found[1][0],
            checkpoint=self._reporter.report(),
        )
        return own.pack()

    def finish_copies(self) -> None:
        """Wait until the update may change the state, of which a copy may be under way. Local."""
        with self.team.waiting():
            self._reporter.report()

    def summed(self, combined: Combined) -> Summed:
        """Return the result of a combine of the current generation. Local."""
        received = [StepTelemetry.unpack(each) for each in combined.telemetry]
        by_worker = dict(zip(self.worker_ids, received, strict=True))
        generation = self.team.generation
        return Summed(combined.slot, combined.digest, by_worker, combined.spent, generation, combined.sent_bytes)

    def note(self, summed: Summed) -> None:
        """Let what all members have said with a sum count: about checkpoints, and the next generation. Local."""
        received = summed.telemetry.values()
        self._reporter.on_reports([each.checkpoint for each in received], summed.generation, list(summed.telemetry))
        self.agreed_generation = min(each.newest_generation for each in received)

    def new_slot(self) -> Slot:
        """Return a free slot; its entries are arbitrary. Local."""
        return self.team.exchange.slot()

    def release(self, slot: Slot) -> None:
        """Give a slot back. Local."""
        self.team.exchange.release(slot)

    def release_results(self) -> None:
        """Give the results of the last sums back, but those of which the script holds a gradient. Local."""
        self.slots.release_results(self.team.exchange)


def _nothing() -> None:
    pass


class Undivided:
    """What rounds have in common whose work is not cut: they have one leaf, and after a loss begin anew."""

    num_leaves: Final = 1

    def __init__(self, members: Members) -> None:
        self._members = members

    def first_plan(self) -> Plan:
        return even_plan(self._members.size, self.num_leaves)

    def begin(self, plan: Plan) -> None:
        pass

    def interrupt(self) -> Collection[Node]:
        return ()

    def finish(self) -> None:
        pass


class Gathered:
    """Result of a round whose members exchange payloads: one payload that holds the parts of all members."""

    layout: FlatLayout | None = None

    def __init__(self, members: Members, payload: bytes) -> None:
        self._members = members
        self._payload = payload

    def stand_by(self, plan: Plan) -> None:
        """Send the slower members all parts, which they lack."""
        self._members.gather(self._payload)
