"""Team: the peers of this worker in the current generation, and the way into the next.

A run alone has a team of one. Otherwise the head numbers the generations and names the members of each. The members
call the same collective methods in the same order. When a member is lost, the survivors meet in the next
generation and report their rounds and the nodes that they have of these; see `unisono.engine.rounds.life`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from unisono.cluster.worker.member import Member
from unisono.core.errors import DeadlineExceeded, PeerLost, RunStopped
from unisono.core.groups import Groups, check_parts, expand, groups_of, lane_of
from unisono.core.messages import Notice
from unisono.core.ownership import MemberPlace
from unisono.core.plan import Plan, plan
from unisono.engine.exchange import Exchange
from unisono.engine.exchange.alone import Alone
from unisono.engine.exchange.pages import WorkerPage
from unisono.engine.exchange.wire import Wire, wire_of_one
from unisono.engine.rounds import Report
from unisono.system.faults import point

__all__ = ["LOST", "HeadTeam", "LeftBehind", "Listener", "Part", "Team", "places"]

LOST = (PeerLost, DeadlineExceeded)
"""Errors that end a generation for its members, which meet again in the next."""
Samples = Callable[[], Sequence[int]]
"""Returns the indices of a micro-batch's samples."""
Listener = Callable[[Exception, Collection[str]], None]
"""Is told, in another thread, that a generation is over, and the ids of the workers that go on."""


class LeftBehind(RunStopped):
    """The run goes on without this worker. Its process ends, and a new one may join."""


@dataclass(frozen=True)
class Part:
    """Some members of a generation, among them this one, which exchange something among themselves."""

    name: str
    """No other part of this generation has the same."""
    number: int
    """Grows from one part of a worker to the next."""
    ranks: tuple[int, ...]
    """In the generation, ascending."""
    page: WorkerPage | None
    """This worker's page in shared memory for parts; None: it has none."""
    pages: tuple[str, ...]
    """The addresses of those of all members of the part."""


class Team:
    """The members of the current generation, as a run sees them.

    As it is, a team is one worker, which opens nothing and waits for nobody; `HeadTeam` has others.
    """

    exchange: Exchange
    """Of the current generation."""
    rank = 0
    size = 1
    generation = 1
    worker_ids: tuple[str, ...] = ("w0",)
    hosts: tuple[str, ...] = ("",)
    """By rank; members of one host share memory."""
    num_parts = 1
    """Of a model, each of which a worker of every group carries."""
    parts: tuple[int, ...] = (0,)
    """By rank, the part that the member carries."""
    part = 0
    """That of this worker."""
    reason = "the run begins"
    """Why there is this generation."""
    arithmetic = 0
    """Fingerprint of everything that this worker's arithmetic depends on."""
    _wire: Wire | None = None

    def __init__(self, device: torch.device) -> None:
        self.exchange = Alone(device)
        self._device = device

    @property
    def groups(self) -> Groups:
        """The groups that compute micro-batches; where a model has one part, each member is one."""
        if self.num_parts == 1:
            return tuple((rank,) for rank in range(self.size))
        return groups_of(self.parts, self.worker_ids, self.num_parts)

    def lane(self, part: int) -> tuple[int, ...]:
        """Return the ranks of the members that carry a part; where a model has one part, all."""
        return lane_of(self.parts, part) if self.num_parts > 1 else tuple(range(self.size))

    def even_plan(self, num_leaves: int) -> Plan:
        """Return the plan that shares leaves out over the groups evenly. Local.

        Raises:
            StateLost: no member is left that carries some part.
        """
        if self.num_parts == 1:
            return plan(self.size, num_leaves)
        return expand(plan(len(self.complete_groups()), num_leaves), self.groups, self.size)

    def complete_groups(self) -> Groups:
        """Return the groups, of which there is one at least.

        Raises:
            StateLost: no member is left that carries some part.
        """
        if self.num_parts > 1:
            check_parts(self.parts, self.num_parts)
        return self.groups

    def join(self, phase: int, report: Report) -> list[Report]:
        """Get into the run: wait to be admitted, and meet the others. Returns their reports, by rank."""
        return [report]

    def meet(self, report: Report) -> list[Report]:
        """Exchange reports within the generation. Collective."""
        with self.waiting():
            payloads = self.exchange.all_gather(msgspec.msgpack.encode(report))
        return [msgspec.msgpack.decode(payload, type=Report) for payload in payloads]

    def regroup(self, report: Report, lost: Exception) -> list[Report]:
        """Enter the generation of the survivors after a loss, and meet them. Returns their reports, by rank."""
        raise lost

    def suspect(self, lost: Exception) -> None:
        """Report to the head that this member's exchange failed, which the head may not have seen."""

    def is_evicted(self) -> bool:
        """Return whether the others continue without this worker, which has not noticed yet."""
        return False

    def check(self) -> None:
        """Raise the error that an exchange would raise now, without waiting: a lost peer, or the end of the run."""

    def newest_generation(self) -> int:
        """Return the newest planned generation that this member has a notice of; 0 if none is to come."""
        return 0

    def stops_at(self, generation: int) -> bool:
        """Return whether the run stops or pauses at this planned generation."""
        return False

    def departing(self, generation: int) -> tuple[str, ...]:
        """Return the members that take no part in this planned generation; () if the run stops there."""
        return ()

    def switch(self, generation: int, report: Report) -> list[Report]:
        """Move to a planned generation at a step boundary that all members agreed on, and meet its members."""
        return [report]

    def paused(self) -> bool:
        """Return whether fewer members are left than the run wants, so that they wait at the next boundary."""
        return False

    def next_planned(self) -> int:
        """Wait, in a pause at a step boundary, for the next planned generation; returns its number.

        Raises:
            PeerLost: a member was lost.
        """
        return self.generation

    def holding(self) -> None:
        """Report to the head that this worker has the run's state."""

    def at(
        self, *, phase: int, step: int, microbatch: int, evaluates: bool = False, samples: Samples | None = None
    ) -> None:
        """Note progress, for the next heartbeat.

        Args:
            evaluates: ``microbatch`` is a batch of an evaluation.
            samples: gives the samples of the micro-batch; called in another thread when it takes long.
        """

    def in_loop(self, position: tuple[int, int] | None) -> None:
        """Note that the training loop is at this step (phase and number); None: the loop has ended on all members."""

    def leaving(self, phase: int, step: int, *, goes_on: bool = False, exits: bool = False) -> None:
        """Report that the script takes no part in this step: it is at the end of its run, or begins another loop."""

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which this worker waits for others: its lack of progress is then not its own fault."""
        return nullcontext()

    def take_warnings(self) -> list[str]:
        """Return, once, the warnings about members that were admitted and may compute differently."""
        return []

    def new_page(self) -> WorkerPage | None:
        """Return a new page in shared memory, for a `Part`; None where this worker has no shared memory."""
        return None

    def connect(self, part: Part) -> Exchange:
        """Begin to connect some members of the current generation; waits for nobody. The caller closes the exchange."""
        return Alone(self._device)

    def listen(self, listener: Listener | None) -> None:
        """Have a listener told, at once and from now on, when the generation is over because of a loss, or the run."""

    def process_group(self) -> dist.ProcessGroup:
        """Return the group of ``torch.distributed`` of the current generation; makes it at the first call. Collective.

        Raises:
            PeerLost, DeadlineExceeded: a member was lost.
        """
        if self._wire is None:
            self._wire = wire_of_one(self._device)
        return self._wire.process_group()

    def close(self) -> None:
        self.exchange.close()
        if self._wire is not None:
            self._wire.close()


def places(team: Team) -> list[MemberPlace]:
    """Return the members of the current generation with their hosts, in the order of the ranks."""
    return [MemberPlace(*one) for one in zip(team.worker_ids, team.hosts, strict=True)]


class HeadTeam(Team):
    """The members of a generation that a head announced.

    Args:
        member: this worker's connection to the head.
        build: makes the exchange of a generation (`unisono.engine.rounds.connect.build_exchange`), without waiting for
            the others.
        connect: makes the wire of a generation for the script's own collectives; does not wait either.
        build_part: makes the exchange of some members of a generation (`unisono.engine.rounds.connect.build_part`);
            alike.
    """

    def __init__(
        self,
        member: Member,
        build: Callable[[Notice, int], Exchange],
        connect: Callable[[Notice, int], Wire],
        build_part: Callable[[Notice, Part, int], Exchange] | None = None,
    ) -> None:
        self._member = member
        self._build = build
        self._connect = connect
        self._build_part = build_part
        self._listener: Listener | None = None
        self._wire: Wire | None = None
        self._notices: dict[int, Notice] = {}
        self._alarm: Exception | None = None
        self._changed = threading.Condition()
        self._exchange: Exchange | None = None
        self._notice: Notice | None = None
        self.generation = 0
        self.rank, self.size = 0, 1
        self.worker_ids: tuple[str, ...] = ()
        self.hosts: tuple[str, ...] = ()
        self.num_parts, self.part = member.spec.run.settings.parts, member.part
        self.parts: tuple[int, ...] = ()
        self.reason = ""
        self.arithmetic = member.arithmetic
        self._warnings: dict[str, None] = {}
        self._said_ready = False
        self._num_waits = 0
        member.on_notice(self._receive)
        if (notice := member.latest()) is not None:
            self._receive(notice)

    @property
    def exchange(self) -> Exchange:  # type: ignore[override]
        if self._exchange is None:
            raise RunStopped("this worker is in no generation")
        return self._exchange

    # -- the connection's thread ---------------------------------------------------------------------

    def _receive(self, notice: Notice | None) -> None:
        with self._changed:
            if notice is None:
                self._alarm = self._member.ended()
            elif notice.generation not in self._notices:
                self._notices[notice.generation] = notice
                if notice.immediate and notice.generation > self.generation and not isinstance(self._alarm, RunStopped):
                    self._alarm = PeerLost(notice.reason)
            self._tell()
            if self._alarm is not None:
                for connected in (self._exchange, self._wire):
                    if connected is not None:
                        connected.interrupt(self._alarm)
            self._changed.notify_all()

    def _tell(self) -> None:
        """Tell the listener that the generation is over, if it is."""
        if self._listener is None or self._alarm is None:
            return
        later = None if isinstance(self._alarm, RunStopped) else self._newest(_is_immediate)
        self._listener(self._alarm, [info.worker_id for info in later.members] if later is not None else ())

    # -- the main thread -----------------------------------------------------------------------------

    def join(self, phase: int, report: Report) -> list[Report]:
        if not self._said_ready:
            self._said_ready = True
            self._member.ready(phase)
        while True:
            notice = self._await(lambda n: self._rank_in(n) >= 0)
            try:
                self._enter(notice)
                return self.meet(report)
            except LOST as lost:
                self.suspect(lost)

    def regroup(self, report: Report, lost: Exception) -> list[Report]:
        while True:
            self.check_ended()
            if self._newest(_is_immediate) is None:
                self.suspect(lost)
            notice = self._await(_is_immediate)
            if self._rank_in(notice) < 0:
                raise LeftBehind(
                    f"generation {notice.generation} continues without this worker ({notice.reason}); this worker "
                    "ends, and a new one may join"
                )
            try:
                self._enter(notice)
                point("in_recovery")
                reports = self.meet(report)
            except LOST as again:
                lost = again
                continue
            self.holding()
            return reports

    def suspect(self, lost: Exception) -> None:
        peers = lost.peers if isinstance(lost, LOST) else ()
        self._member.suspect(self.generation, str(lost), [peer for peer in peers if peer != self._member.worker_id])

    def is_evicted(self) -> bool:
        later = self._newest(_is_immediate)
        return later is not None and self._rank_in(later) < 0

    def check(self) -> None:
        if self._alarm is not None:
            raise self._alarm

    def check_ended(self) -> None:
        if isinstance(self._alarm, RunStopped):
            raise self._alarm

    def newest_generation(self) -> int:
        planned = self._newest(lambda notice: not notice.immediate)
        return planned.generation if planned is not None else 0

    def stops_at(self, generation: int) -> bool:
        notice = self._notices.get(generation)
        return notice is not None and (notice.paused or not notice.members)

    def departing(self, generation: int) -> tuple[str, ...]:
        notice = self._notices.get(generation)
        if notice is None or not notice.members:
            return ()
        staying = {info.worker_id for info in notice.members}
        return tuple(one for one in self.worker_ids if one not in staying)

    def switch(self, generation: int, report: Report) -> list[Report]:
        notice = self._notices[generation]
        if not notice.members:
            self._member.left()
            raise RunStopped(notice.reason)
        if self._rank_in(notice) < 0:
            self._member.left()
            raise SystemExit(0)
        try:
            self._enter(notice)
            return self.meet(report)
        except LOST as lost:
            return self.regroup(report, lost)

    def paused(self) -> bool:
        return self._notice is not None and self._notice.paused

    def next_planned(self) -> int:
        notice = self._await(lambda n: True)
        if notice.immediate:
            raise PeerLost(notice.reason)
        return notice.generation

    def holding(self) -> None:
        self._member.holding(self.generation)

    def at(
        self, *, phase: int, step: int, microbatch: int, evaluates: bool = False, samples: Samples | None = None
    ) -> None:
        self._member.progress.at(phase=phase, step=step, microbatch=microbatch, evaluates=evaluates, samples=samples)

    def in_loop(self, position: tuple[int, int] | None) -> None:
        self._member.in_loop(position)

    def leaving(self, phase: int, step: int, *, goes_on: bool = False, exits: bool = False) -> None:
        self._member.leaving(phase, step, goes_on=goes_on, exits=exits)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._num_waits += 1
        self._member.progress.waiting(True)
        try:
            yield
        finally:
            self._num_waits -= 1
            self._member.progress.waiting(self._num_waits > 0)

    def take_warnings(self) -> list[str]:
        warnings, self._warnings = self._warnings, {}
        return list(warnings)

    def new_page(self) -> WorkerPage | None:
        return WorkerPage() if self._member.page is not None else None

    def connect(self, part: Part) -> Exchange:
        assert self._notice is not None
        assert self._build_part is not None
        try:
            return self._build_part(self._notice, part, self.rank)
        except (OSError, RuntimeError) as error:
            raise PeerLost(f"a part of generation {self.generation} could not be connected: {error}") from error

    def listen(self, listener: Listener | None) -> None:
        with self._changed:
            self._listener = listener
            self._tell()

    def process_group(self) -> dist.ProcessGroup:
        self.check()
        assert self._notice is not None
        if self._wire is None:
            wire = self._connect(self._notice, self.rank)
            with self._changed:
                self._wire = wire
                if self._alarm is not None:
                    wire.interrupt(self._alarm)
        return self._wire.process_group()

    def close(self) -> None:
        exchange, self._exchange = self._exchange, None
        wire, self._wire = self._wire, None
        for connected in (exchange, wire):
            if connected is not None:
                connected.close()

    # -- inside --------------------------------------------------------------------------------------

    def _rank_in(self, notice: Notice) -> int:
        ids = [info.worker_id for info in notice.members]
        return ids.index(self._member.worker_id) if self._member.worker_id in ids else -1

    def _newest(self, wanted: Callable[[Notice], bool]) -> Notice | None:
        """Return the newest ``wanted`` notice of a later generation; None: there is none."""
        with self._changed:
            later = (n for n in self._notices.values() if n.generation > self.generation and wanted(n))
            return max(later, key=lambda n: n.generation, default=None)

    def _await(self, wanted: Callable[[Notice], bool]) -> Notice:
        """Wait for a ``wanted`` notice of a later generation, and return the newest. Raises at the end of the run."""
        with self.waiting(), self._changed:
            while True:
                self.check_ended()
                if (found := self._newest(wanted)) is not None:
                    return found
                self._changed.wait(1.0)

    def _enter(self, notice: Notice) -> None:
        """Leave the old exchange, and build the exchange of a generation."""
        self.close()
        with self._changed:
            self.generation = notice.generation
            self._notice = notice
            self._notices = {n: held for n, held in self._notices.items() if n > notice.generation}
            self.rank, self.size, self.reason = self._rank_in(notice), len(notice.members), notice.reason
            self.worker_ids = tuple(info.worker_id for info in notice.members)
            self.hosts = tuple(info.host for info in notice.members)
            self.parts = tuple(info.part for info in notice.members)
            self._warnings |= dict.fromkeys(notice.warnings)
            if not isinstance(self._alarm, RunStopped):
                later = [held for held in self._notices.values() if held.immediate]
                self._alarm = PeerLost(later[-1].reason) if later else None
        self.check()
        try:
            exchange = self._build(notice, self.rank)
        except (OSError, RuntimeError) as error:
            raise PeerLost(f"the members of generation {notice.generation} could not be connected: {error}") from error
        with self._changed:
            self._exchange = exchange
            if self._alarm is not None:
                exchange.interrupt(self._alarm)


def _is_immediate(notice: Notice) -> bool:
    """Return whether a generation begins at once, because a member was lost; others begin at a step's boundary."""
    return notice.immediate
