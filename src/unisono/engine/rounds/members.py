"""Members of the generation as a round uses them: exchanges and telemetry; plans of the coming steps, from the paces in
the telemetry; and help for members that are late within a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import msgspec

from unisono.core.balance import Balance
from unisono.core.groups import expand
from unisono.core.plan import Plan
from unisono.core.plan import plan as even_plan
from unisono.core.rehearsals import on_trial, without
from unisono.core.small import OwnWork
from unisono.core.telemetry import Compared, StepTelemetry
from unisono.core.tree import Node
from unisono.core.waits import NO_WAIT, Wait, wait_of
from unisono.engine.exchange import Combined, Exchange, Parcel, Share, combine
from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.exchange.helping import HostWork
from unisono.engine.exchange.slots import Slots
from unisono.engine.rounds import Reporter, check_titles
from unisono.engine.rounds.team import Team

__all__ = ["Balancing", "Gathered", "Helping", "Letter", "Members", "Summed", "Undivided"]

LEAST_PAUSE_S = 0.0005
MOST_PAUSE_S = 0.02
"""A member that is done checks this often whether another one is late: four times in the time of a micro-batch."""


@dataclass(frozen=True)
class Summed:
    """Result of a sum, equal on all members but for ``wait``, ``network_s`` and ``sent_bytes``."""

    slot: Slot
    """Gradients and float buffers are means, the rest of the tail are sums."""
    digest: int
    telemetry: Mapping[str, StepTelemetry]
    """By worker id, in the order of the ranks at the sum: a loss after it changes the members."""
    wait: Wait = NO_WAIT
    """For whom this member has waited in it."""
    network_s: float = 0.0
    """From when all members were ready until the commit, where they are on several hosts."""
    generation: int = 0
    """In which the rank of ``wait`` counts."""
    sent_bytes: int = 0
    """Data that this member has sent to other hosts."""

    @property
    def compared(self) -> dict[str, Compared]:
        """What the members have said to compare it, by worker id."""
        return {worker: each.compared for worker, each in self.telemetry.items()}


class Letter(msgspec.Struct, frozen=True, array_like=True):
    """What a member says to all others at once."""

    title: str
    """Of the round: members of different rounds must not take each other's payloads."""
    payload: bytes
    is_final: bool = False
    """The member has finished the round: this is the result of the round, and not a part of one."""


class Helping:
    """Within one step: leave out leaves that others have claimed, and claim leaves of members that are late."""

    def __init__(self, team: Team, work: HostWork, paces: Sequence[float], todo: Sequence[int]) -> None:
        self._team = team
        self._work = work
        self._paces = paces
        self._pause_s = min(max(min(paces) / 4, LEAST_PAUSE_S), MOST_PAUSE_S)
        self._since = time.perf_counter()
        work.show_work(todo)

    def start(self, index: int, leaf: int) -> bool:
        """Return False if another member has claimed this leaf, which is number ``index`` of ``todo``."""
        return self._work.start(index, leaf)

    def take(self) -> int | None:
        """Claim a leaf of another member; None when all others have started their last one.

        A claimed leaf must be computed before the next combine.

        Raises:
            PeerLost, DeadlineExceeded: as the combine would.
        """
        with self._team.waiting():
            while (leaf := self._work.take(self._paces, time.perf_counter() - self._since)) is None:
                if not self._work.pause(self._pause_s):
                    return None
                self._team.check()
        return leaf


class Balancing:
    """Plans of the coming steps. All members compute the same, from the telemetry that came with every combine.

    Args:
        enabled: False gives all members equal parts.
    """

    def __init__(self, team: Team, *, enabled: bool) -> None:
        self._team = team
        self._enabled = enabled
        self._balance = Balance(1)
        self._generation = 0
        self.own_work = OwnWork()
        """Of this member, for the micro-batches that it computes."""

    @property
    def is_enabled(self) -> bool:
        """Whether faster members get more."""
        return self._enabled

    @property
    def is_first_of_generation(self) -> bool:
        """Whether no step was summed in this generation yet; the same on all members at the beginning of a step."""
        return self._generation != self._team.generation

    def decide(self, num_leaves: int, *, everybody: bool = False, trial: Collection[int] = ()) -> tuple[Plan, str]:
        """Return the plan of the next step, and why it differs from the plan before ("" if it does not).

        Args:
            everybody: give each member at least one leaf, if there are enough.
            trial: the ranks of newcomers that get none.
        """
        if trial:
            return without(self._team.even_plan(num_leaves), trial), ""
        team, groups = self._team, self._team.complete_groups()
        if not self._is_known:
            return team.even_plan(num_leaves), ""
        chosen, change = self._balance.decide(num_leaves), self._balance.change
        if everybody and num_leaves >= len(groups) and not all(chosen.ranges):
            return team.even_plan(num_leaves), ""
        names = [team.worker_ids[group[0]] for group in groups]
        return self._by_rank(chosen), change.say(names) if change is not None else ""

    def predicted(self, num_leaves: int) -> Plan:
        """Return the most likely plan of the coming steps. Local."""
        return self._by_rank(self._balance.peek(num_leaves)) if self._is_known else self._team.even_plan(num_leaves)

    def _by_rank(self, plan: Plan) -> Plan:
        """Return a plan by rank from one by group."""
        return plan if self._team.num_parts == 1 else expand(plan, self._team.groups, self._team.size)

    def helping(self, plan: Plan) -> Helping | None:
        """Begin to help and to be helped with a plan; None where members do not see each other's work."""
        paces, found = self._balance.paces(), self._team.exchange.work()
        if paces is None or found is None or not self._is_known:
            return None
        work, ranks = found
        return Helping(self._team, work, [paces[rank] for rank in ranks], plan.ranges[self._team.rank])

    def observe(self, telemetry: Sequence[StepTelemetry], share: Share) -> None:
        """Record the telemetry of all members, by rank, after a combine."""
        groups = self._team.groups
        if self.is_first_of_generation:
            self._generation = self._team.generation
            hosts = [each.first_of_host for each in telemetry]
            self._balance = Balance(len(groups), hosts if self._team.num_parts == 1 else [*range(len(groups))])
        if not any(share.plan):  # a vote that was repeated: nobody has computed anything
            return
        self._balance.observe(
            [telemetry[group[0]].leaves for group in groups],
            [max(telemetry[rank].data_s + telemetry[rank].compute_s for rank in group) for group in groups],
        )
        # The last member to arrive has not waited: its time is the time of the exchange itself.
        last_seconds = min(each.last.exchange + each.last.network + each.last.waiting for each in telemetry)
        self._balance.observe_exchange(last_seconds, [share.plan[group[0]] for group in groups], share.num_leaves)

    @property
    def _is_known(self) -> bool:
        # In the first step of a generation no member knows a pace yet.
        return self._enabled and not self.is_first_of_generation


class Members:
    """The exchanges of one member with the others; each method says whether it is collective.

    Args:
        team: the members of the current generation.
        reporter: takes part in every sum.
        balance: give faster members more leaves.
    """

    def __init__(self, team: Team, reporter: Reporter, *, balance: bool) -> None:
        self.team = team
        self.balancing = Balancing(team, enabled=balance)
        self.slots = Slots()
        self.joined: dict[str, int] = {}
        """By worker, how many steps of the run were done when it joined; see `unisono.core.rehearsals.on_trial`."""
        self.agreed_generation = 0
        """The newest planned generation whose notice all members have: they can move there at the next boundary."""
        self.drain: Callable[[], None] = _nothing
        """Waits until no sum is under way in another thread, so that this one may use the exchange."""
        self._title, self._step = "", 0
        self._committed_at, self._committed_in = 0.0, -1  # the last `sum`: when, and in which generation
        self._reporter = reporter
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

    def on_trial(self, step: int, lag: int) -> frozenset[int]:
        """Return the ranks of the newcomers of which nothing is summed at a step of the run; the same on all. Local."""
        if self.team.num_parts > 1:
            return frozenset()
        return on_trial([self.joined.get(worker, -1) for worker in self.worker_ids], step, lag=lag)

    def newest(self) -> str:
        """Return what the run can go on from, for an error. Local."""
        return self._reporter.newest()

    @property
    def exchange(self) -> Exchange:
        """The exchange of the current generation."""
        return self.team.exchange

    def departing(self) -> tuple[str, ...]:
        """Return the members that will leave at the next boundary, because all have agreed on it. Local."""
        agreed = self.agreed_generation
        return self.team.departing(agreed) if agreed > self.team.generation else ()

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
        """Return the payloads of all members, by rank. Collective; raises as `letters`."""
        return [letter.payload for letter in self.letters(payload)]

    def letters(self, payload: bytes, *, is_final: bool = False) -> list[Letter]:
        """Return the letters of all members, by rank. Collective.

        Args:
            is_final: this member has finished the round, and the payload is the result.

        Raises:
            StepError: the members are in different rounds. PeerLost, DeadlineExceeded: a member was lost.
        """
        self.team.check()
        with self.team.waiting():
            self.drain()
            found = self.team.exchange.all_gather(msgspec.msgpack.encode(Letter(self._title, payload, is_final)))
        letters = [msgspec.msgpack.decode(each, type=Letter) for each in found]
        titles = zip(self.worker_ids, letters, strict=False)
        check_titles({worker: letter.title for worker, letter in titles if letter.title}, self._step)
        return letters

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
            own = self._announced(telemetry)
            ready_at = time.perf_counter()
            if self._committed_in == self.team.generation:
                own = msgspec.structs.replace(own, ready_s=ready_at - self._committed_at)
            combined = combine(self.team.exchange, share, own.pack())
        self._committed_at, self._committed_in = combined.committed_at, self.team.generation
        summed = self.summed(combined)
        wait = wait_of(self.rank, [each.ready_s for each in summed.telemetry.values()])
        network_s = 0.0
        if len({*self.team.hosts}) > 1:
            network_s = max(0.0, combined.committed_at - ready_at - wait.seconds)
        summed = replace(summed, wait=wait, network_s=network_s)
        self.note(summed)
        self.balancing.observe(list(summed.telemetry.values()), share)
        return summed

    def announce(self, telemetry: StepTelemetry) -> bytes:
        """Return what this member says to all with its sums. Local; may wait for a copy of the state in memory."""
        return self._announced(telemetry).pack()

    def _announced(self, telemetry: StepTelemetry) -> StepTelemetry:
        found = self.team.exchange.work()
        return msgspec.structs.replace(
            telemetry,
            newest_generation=self.team.newest_generation(),
            first_of_host=self.rank if found is None else found[1][0],
            checkpoint=self._reporter.report(),
        )

    def finish_copies(self) -> None:
        """Wait until the update may change the state, of which a copy may be under way. Local."""
        with self.team.waiting():
            self._reporter.report()

    def summed(self, combined: Combined) -> Summed:
        """Return the result of a combine of the current generation. Local."""
        received = [StepTelemetry.unpack(each) for each in combined.telemetry]
        by_worker = dict(zip(self.worker_ids, received, strict=True))
        return Summed(
            combined.slot,
            combined.digest,
            by_worker,
            generation=self.team.generation,
            sent_bytes=combined.sent_bytes,
        )

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
    """What rounds have in common that share their leaves out evenly. As it is, the work is not cut: there is one leaf,
    and after a loss all begin anew.
    """

    num_leaves: int = 1

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
    """Result of a round in which members tell each other something, for members that have not seen its end.

    Args:
        result: what they lack.
    """

    layout: FlatLayout | None = None

    def __init__(self, members: Members, result: bytes) -> None:
        self._members = members
        self._result = result

    def stand_by(self, plan: Plan) -> None:
        self._members.letters(self._result, is_final=True)
