"""The life of a round, and how the round survives the loss of members. Read `Rounds.play` first.

Rounds are counted. A round is over for a member that has seen the commit; when a member is lost at that moment, others
may not see the commit. So two members are never more than one round apart, and after a loss:

1. the survivors enter the next generation and **meet**: each reports its round and the nodes of it that it has;
2. the members in the earlier round plan what is missing of it from these reports, compute it, and combine. A member
   that is ahead **stands by**: it takes part in the combine, holds nothing, and drops the result after comparing its
   digest with its own;
3. then all are in the same round, meet again, and plan what is missing of that one.

No member is sent gradients, nothing is rolled back, and finished nodes are never computed again. Newcomers are admitted
between two rounds only (`unisono.engine.rounds.admission`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from unisono.core.cadence import Position
from unisono.core.cursor import Recipe
from unisono.core.errors import StepError
from unisono.core.groups import replan_groups
from unisono.core.plan import Plan, replan
from unisono.core.plan import plan as even_plan
from unisono.core.rehearsals import on_trial, without
from unisono.core.tree import Node
from unisono.engine.exchange.flat import FlatLayout
from unisono.engine.exchange.slots import Slots
from unisono.engine.rounds import FinishedRound, Nothing, Repeats, Report, Reporter, Round, check_titles
from unisono.engine.rounds.members import Members
from unisono.engine.rounds.routing import Routing
from unisono.engine.rounds.taps import Tap
from unisono.engine.rounds.team import LOST, Team
from unisono.engine.rounds.transfer import share_state
from unisono.engine.state.tracked import Tracked

__all__ = ["CHECKPOINT", "DISPUTE", "EVALUATED", "EVALUATION", "MOVING", "STEP", "Book", "Rounds"]

MOVING = "moving"
"""The kind of the round in which states that are shared out move between members."""
EVALUATED = "evaluated"
"""The kind of the round in which members take the totals that evaluators have computed beside the training."""
CHECKPOINT = "together"
"""The kind of the round in which all wait: for a checkpoint, and at the end of the run."""
STEP = "step"
"""The kind of the round that trains."""
EVALUATION = "evaluation"
"""The kind of the round in which batches are evaluated."""
IN_GROUPS = frozenset({STEP, EVALUATION})
"""The kinds of the rounds whose leaves are computed by groups, where the model has several parts."""
DISPUTE = "dispute"
"""The kind of the rounds in which members find out who has computed a wrong value (`Tap.settle`)."""

R = TypeVar("R", bound=Repeats)


@dataclass(frozen=True)
class Standing:
    """How far this member is against the others, since they have met."""

    reports: Sequence[Report] = ()
    """What each has said of itself in the last meeting after a loss; none: all members have finished the same rounds,
    and nobody holds a part of the next one.
    """
    is_behind: bool = False
    """This member is in the middle of a round that others have finished: all meet again before it begins the next."""

    @property
    def begun(self) -> frozenset[str]:
        """The kinds of the newest round that members have begun."""
        newest = max((report.round for report in self.reports), default=0)
        return frozenset(report.kind for report in self.reports if report.round == newest) - {""}


class Book:
    """The rounds of a member that are open beside the one that it plays: here none, so all of this does nothing.

    The book of a strategy in which sums are under way while the script goes on overrides it. All methods are local, but
    for `drain` and `give`.
    """

    @property
    def open(self) -> Sequence[str]:
        """The kinds of the open rounds, no two alike, in the order in which they are committed."""
        return ()

    @property
    def sends(self) -> bool:
        """Whether this member can `give` the result of its newest commit to members that have not seen it."""
        return False

    @property
    def is_under_way(self) -> bool:
        """Whether there are sums that `drain` would wait for."""
        return False

    @property
    def holds_back(self) -> bool:
        """Whether sums are computed again later, after a loss or because they are wrong: until then members do not
        change.
        """
        return False

    @property
    def is_left(self) -> bool:
        """Whether the script has left the loop of these rounds: nobody needs the book after the next commit."""
        return False

    def drain(self) -> None:
        """Wait until no sum is under way, so that the caller may use the exchange. Collective.

        Raises:
            PeerLost, DeadlineExceeded: a member was lost.
        """

    def interrupt(self) -> None:
        """Stop what is under way, because a member was lost."""

    def give(self, source: int, targets: Sequence[int]) -> None:
        """Send the result of the newest commit from rank ``source`` to the ranks that have not seen it. Collective."""
        raise AssertionError("no member can send a result, so none is requested")

    def redo(self) -> None:
        """Forget the sums that are committed and not applied, because a member that is wrong has a part in them: they
        are made again. On all members alike.
        """

    def abandon(self) -> None:
        """Stop what is under way, because the run ends in this process."""


class Rounds:
    """This member's part in the rounds of a run.

    Args:
        tracked: the state that newcomers get.
        reporter: takes part in every combine.

    Attributes:
        members: what a round exchanges with.
        position: of the run, between two steps.
        number: of the round that this member has not finished yet.
        before_departure: called at a boundary at which members leave, before they do. Collective.
        book: the rounds that are open beside the one that this member plays.
        taps: look on at the steps of this member; one of them may settle what members differ in.
        routing: says which members get the sum of which gradients of a step.
        note_round: is told the number and the title of each round that this member plays, and -1 after it.
        lag: by so many steps the update of a gradient comes later than the gradient, in the current phase.
    """

    def __init__(
        self,
        team: Team,
        tracked: Tracked,
        *,
        reporter: Reporter | None = None,
        balance: bool = True,
    ) -> None:
        self.team = team
        self.tracked = tracked
        self.reporter = reporter if reporter is not None else Reporter()
        self.members = Members(team, self.reporter, balance=balance)
        self.position = Position(phase=0, step=0, number=0, total=0, lines=0)
        self.number = 0
        self.before_departure: Callable[[], None] | None = None
        self.book = Book()
        self.members.drain = lambda: self.book.drain()
        self.taps: list[Tap] = []
        self.routing = Routing()
        self.note_round: Callable[[int, str], None] = _note_nothing
        self._recipe: Recipe = {}
        self._round: Round | None = None
        self._have: Collection[Node] = ()  # of that round, when this member is in a meeting
        self._heard: Sequence[Report] = ()  # when the members met last after a loss, and were in the same round
        self._finished: FinishedRound = Nothing()
        self._finished_title = ""
        self._standing = Standing()
        self._joined_at: tuple[int, int] | None = None  # (phase, step) where it came in as a newcomer
        self._joined = -1  # as `Report.joined`
        self.lag = 0

    @property
    def slots(self) -> Slots:
        """This member's slots in use."""
        return self.members.slots

    @property
    def judge(self) -> Tap:
        """The tap that settles what members differ in; one that does nothing where there is none."""
        return next((tap for tap in self.taps if tap.settles), Tap())

    # -- a round -------------------------------------------------------------------------------------

    def play_until_agreed(self, begin: Callable[[], R]) -> Generator[Any, None, R]:
        """Play a round, and another one as long as members have computed different values; return the one that counts.
        Collective.

        Args:
            begin: returns the round, and another one for each time that it is done again.

        Raises:
            DivergenceError: nobody can say who is wrong. RunStopped: as `play`; or the run goes back.
        """
        while True:
            round_ = begin()
            yield from self.play(round_)
            if round_.dispute is None:
                return round_
            yield from self.judge.settle(round_, round_.dispute)

    def play(self, round_: Round) -> Generator[object, None, None]:
        """Take part in a round, from its plan to its commit. Collective.

        Yields what the round yields while this member computes its leaves.

        Raises:
            RunStopped: the run is over, or goes on without this worker. StepError: another round is under way.
        """
        if self._round is not None:
            raise StepError(
                f"{round_.title} was begun inside {self._round.title}, where each worker is at a different place: "
                "begin it after that"
            )
        self.drain()
        try:
            plan = self._begin(round_)
            self.note_round(self.number, round_.title)
            round_.begin(plan)
        except BaseException:
            self._give_up(round_)
            raise
        while True:
            try:
                yield from round_.compute(plan)
                with self.members.taking_part(round_.title, self.position.number):
                    self._finished = round_.combine(plan)
                self._finished_title = round_.title
                break  # committed: whichever member is lost from here on, this one holds the result
            except LOST as lost:
                missing = self._recover(round_, lost)
                if missing is None:
                    self.note_round(-1, "")
                    return
                plan = missing
            except BaseException:
                self._give_up(round_)
                raise
        self.note_round(-1, "")
        self.number += 1
        self._close()
        if self.book.is_left:
            self.book = Book()
        round_.finish()

    def _begin(self, round_: Round) -> Plan:
        """Begin a round; returns its first plan. Local, except after a loss."""
        self._round, self.slots.kind = round_, round_.kind
        standing, self._standing = self._standing, Standing()
        if not standing.reports:
            return round_.first_plan()
        if standing.is_behind:  # the others wait for this member in a meeting
            standing = self._meet()
        return self._plan(round_, standing)

    def _give_up(self, round_: Round) -> None:
        """Note that the script has left a round by an error, so that the next report does not name it. Local."""
        if self._round is round_:
            self._close()
            self.note_round(-1, "")

    def _close(self) -> None:
        """Note that this member is in no round. Local."""
        self._round, self._have = None, ()
        self.slots.close()

    def _recover(self, round_: Round, lost: Exception) -> Plan | None:
        """A member was lost: meet the survivors; returns the plan of what is missing. Collective.

        None: another member had finished the round, and has sent the result.
        """
        self._have = round_.interrupt()
        met = self._regroup(lost)
        if self._round is None:
            self._standing = met
            return None
        return self._plan(round_, met)

    def _plan(self, round_: Round, met: Standing) -> Plan:
        self._standing, self._have = met if met.is_behind else Standing(), ()
        return self._plan_of_missing(met.reports, self.number, round_.num_leaves, round_.kind)

    def _plan_of_missing(self, reports: Sequence[Report], number: int, num_leaves: int, kind: str) -> Plan:
        """Return the plan of the leaves of a round that no member has, by what all have reported. Local.

        Args:
            number: those that have finished the round of this number can compute nothing of it.
            kind: of the round.
        """
        able = [report.round <= number for report in reports]
        held = [report.open.get(kind, []) if able else [] for report, able in zip(reports, able, strict=True)]
        in_groups = self.team.num_parts > 1 and kind in IN_GROUPS
        # All members have these reports, and so the same trial; a newcomer may be the only one that is able.
        trial = on_trial([report.joined for report in reports], min(one.total for one in reports), lag=self.lag)
        if self.team.num_parts > 1 or not any(can and rank not in trial for rank, can in enumerate(able)):
            trial = frozenset()
        if not any(held) and all(able):  # as `Balancing.decide`, for members that have met nobody
            even = self.team.even_plan(num_leaves) if in_groups else even_plan(len(held), num_leaves)
            return without(even, trial)
        able = [can and rank not in trial for rank, can in enumerate(able)]
        nodes = [[Node(level, index) for level, index in each] for each in held]
        if in_groups:
            return replan_groups(nodes, able, num_leaves, self.team.complete_groups())
        return replan(nodes, able, num_leaves)

    def plan_of_open(self, round_: Round) -> Plan:
        """Return the plan of what is missing of a round of the book, by what all have reported after a loss. Local."""
        if not self._heard:
            return self.team.even_plan(round_.num_leaves)
        return self._plan_of_missing(self._heard, self.number, round_.num_leaves, round_.kind)

    def forget_heard(self) -> None:
        """Note that rounds of the book begin anew, of which nobody has anything. Local, and on all members alike."""
        self._heard = ()

    # -- sums that are under way while the script goes on ---------------------------------------------

    def drain(self) -> None:
        """Wait until no sum is under way, so that the exchange is free. Collective where one is."""
        if not self.book.is_under_way:
            return
        try:
            with self.team.waiting():
                self.book.drain()
        except LOST as lost:
            self.regroup(lost)

    def commit(self, finished: FinishedRound) -> None:
        """Note that the oldest sum under way is committed. Local."""
        self._finished, self._finished_title = finished, ""
        self.number += 1

    def regroup(self, lost: Exception) -> None:
        """Meet the survivors of a loss that was noticed between two rounds. Collective."""
        self._standing = self._regroup(lost)

    @property
    def is_level(self) -> bool:
        """Whether all members have finished the same rounds, and none of them holds a part of the next one."""
        return not self._standing.reports

    def go_on(self) -> None:
        """Note that the script goes on among members that have just moved to a planned generation. Local."""
        self._standing = Standing()

    @property
    def finished(self) -> FinishedRound:
        """The result of the round that was committed last."""
        return self._finished

    def abandon(self) -> None:
        """Stop what is under way, because the run ends in this process. Local."""
        self.book.abandon()

    # -- meetings ------------------------------------------------------------------------------------

    def _meet(self) -> Standing:
        try:
            return self._catch_up(self.team.meet(self.report()))
        except LOST as lost:
            return self._regroup(lost)

    def _regroup(self, lost: Exception) -> Standing:
        self.book.interrupt()
        return self._catch_up(self.team.regroup(self.report(), lost))

    def _catch_up(self, reports: Sequence[Report]) -> Standing:
        """Stand by the members that are a round behind, after a meeting, until none is. Collective."""
        before = self.number
        while True:
            self.note_newcomers(reports)
            try:
                rounds = {report.round for report in reports}
                # A round that is done again sums what it summed, also where this member's next one sums something else.
                layout = self._finished.layout if min(rounds) < self.number else None
                with self.team.waiting():
                    self.slots.bring(self.team.exchange, layout or self.slots.layout)
                if rounds == {self.number}:
                    titles = zip(self.team.worker_ids, (report.title for report in reports), strict=False)
                    check_titles({worker: title for worker, title in titles if title}, self.position.number)
                    self._heard = reports
                    return Standing(reports)
                if self._is_given(reports):
                    if self.number > before:
                        self._close()
                    reports = self.team.meet(self.report())
                    continue
                if min(rounds) == self.number:
                    return Standing(reports, is_behind=True)
                self._stand_by(reports)
                reports = self.team.meet(self.report())
            except LOST as lost:
                reports = self.team.regroup(self.report(), lost)

    def _is_given(self, reports: Sequence[Report]) -> bool:
        """Have the newest result sent to the members that have not seen its commit, where one has it. Collective."""
        newest = max(report.round for report in reports)
        source = next((rank for rank, one in enumerate(reports) if one.round == newest and one.sends), None)
        if source is None:
            return False
        behind = [rank for rank, one in enumerate(reports) if one.round < newest]
        with self.team.waiting():
            self.book.give(source, behind)
        return True

    def _stand_by(self, reports: Sequence[Report]) -> None:
        """Take part in the round that others have not finished. Collective."""
        behind = min(reports, key=lambda report: (report.round, not report.kind))
        if behind.round != self.number - 1:
            raise StepError(
                f"internal error, please report it: another member is in round {behind.round}, and this one in "
                f"{self.number}: more than one round apart"
            )
        plan = self._plan_of_missing(reports, behind.round, behind.num_leaves, behind.kind)
        with self.members.taking_part(self._finished_title, self.position.number):
            self._finished.stand_by(plan)

    def report(self) -> Report:
        """Return the report that this member sends to the others when they meet."""
        current, total = self._round, self.position.total
        # Who is on trial is tried anew: in this step it may compute nothing that is compared.
        joined = total if on_trial([self._joined, -1], total, lag=self.lag) else self._joined
        open_: dict[str, Collection[Node]] = {kind: self.slots.open.get(kind, ()) for kind in self.book.open}
        if current is not None:
            open_[current.kind] = self._have
        return Report(
            fresh=False,
            phase=self.position.phase,
            step=self.position.step,
            round=self.number,
            kind=current.kind if current is not None else next(iter(open_), ""),
            title=current.title if current is not None else "",
            num_leaves=current.num_leaves if current is not None else 1,
            open={kind: [(node.level, node.index) for node in nodes] for kind, nodes in open_.items()},
            sends=self.book.sends,
            lines=self.position.lines,
            total=total,
            recipe=self._recipe,
            arithmetic=self.team.arithmetic,
            joined=joined,
        )

    # -- between two rounds --------------------------------------------------------------------------

    def enter_phase(self, recipe: Recipe, position: Position) -> None:
        """Note that a phase of the script begins, with its own recipe. Local."""
        self._recipe, self.position = recipe, position

    def start_at(self, number: int, position: Position, *, is_newcomer: bool = False) -> None:
        """Take part from this round on, with the run's state. Local.

        Args:
            is_newcomer: this member joins after the others have decided whether to stop at this boundary.
        """
        self.number, self.position = number, position
        self._joined_at = (position.phase, position.step) if is_newcomer else None
        self.team.holding()

    def note_newcomers(self, reports: Sequence[Report]) -> None:
        """Note who has joined when, by what all have reported. Local."""
        self.members.joined = dict(zip(self.team.worker_ids, (one.joined for one in reports), strict=True))
        self._joined = reports[self.team.rank].joined

    def begin_with(self, reports: Sequence[Report], total: int) -> None:
        """Note the members of a run that begins: those of another arithmetic than rank 0 count as newcomers. Local.

        Args:
            total: steps of the run that are done.
        """
        usual = reports[0].arithmetic
        self.note_newcomers(
            [msgspec.structs.replace(one, joined=-1 if one.arithmetic == usual else total) for one in reports]
        )

    def use_layout(self, layout: FlatLayout) -> None:
        """Sum what this layout describes from now on. Collective."""
        self.drain()
        self.slots.layout = layout
        if self._standing.is_behind:  # the members that are ahead wait for this member in a meeting
            self._standing = self._meet()
            return
        try:
            with self.team.waiting():
                self.slots.bring(self.team.exchange, layout)
        except LOST as lost:
            self._standing = self._regroup(lost)

    @property
    def begun(self) -> frozenset[str]:
        """The kinds of the next round that members have begun already, because this one was behind at a loss. Local."""
        return self._standing.begun

    def follows(self, kind: str) -> bool | None:
        """Return whether others have begun a round of this kind before this boundary, which this member has to play.

        None: nobody has begun anything, so all decide alike, by what they have last told each other. Local.
        """
        if self._standing.begun or self._standing.is_behind:
            return kind in self._standing.begun
        return False if self.book.holds_back else None

    def is_stop_planned(self) -> bool:
        """Return whether the run stops or pauses at this boundary, so that its state is worth a checkpoint.

        The same on all members, however often they ask, until they have called `boundary`.
        """
        # After a loss, other members may have begun the next round already: all members play the round of these.
        if (follows := self.follows(CHECKPOINT)) is not None:
            return follows
        if (self.position.phase, self.position.step) == self._joined_at:
            return False
        agreed = self.members.agreed_generation
        return (agreed > self.team.generation and self.team.stops_at(agreed)) or self.team.paused()

    def changes(self) -> bool:
        """Return whether members change at this boundary, or the run stops or pauses; the same on all members."""
        if self.is_stop_planned():
            return True
        return self.members.agreed_generation > self.team.generation and self.is_level

    def boundary(self) -> None:
        """Move to the planned generation that all have agreed on, and wait while the run is paused. Collective where
        there is something to do.

        Raises:
            RunStopped: the run was stopped. SystemExit: this worker was asked to leave.
        """
        if self.book.holds_back:
            return
        if self.before_departure is not None and self._is_departure():
            self.before_departure()
        agreed = self.members.agreed_generation
        if not self._standing.is_behind and agreed > self.team.generation:
            self._enter(lambda: self.team.switch(agreed, self.report()))
        # If other members have begun the next step already, the pause comes after that step.
        while not self._standing.is_behind and not self._standing.begun and self.team.paused():
            if self.book.holds_back:
                return
            self._wait_in_pause()

    def _wait_in_pause(self) -> None:
        """Move to the next generation as soon as there is one; who leaves then hands over what it holds. Collective."""
        team = self.team
        try:
            planned = team.next_planned()
        except LOST as lost:
            self._standing = self._regroup(lost)
            return
        if self.before_departure is not None and team.departing(planned):
            paused = team.generation
            self.members.agreed_generation = planned  # all have this notice, or will: it is the next one
            self.before_departure()
            if team.generation != paused:
                return  # a member was lost meanwhile
        self._enter(lambda: team.switch(planned, self.report()))

    def _is_departure(self) -> bool:
        """Return whether members leave at this boundary, as all have agreed; after a loss, whether others have begun to
        get ready for it.
        """
        begun = self._standing.begun
        if begun or self._standing.is_behind:
            return MOVING in begun
        return bool(self.members.departing())

    def _enter(self, meet: Callable[[], list[Report]]) -> None:
        """Go on with the members of another generation, and give newcomers the state. Collective."""
        reports = meet()
        try:
            reports, _ = share_state(self.members, self.tracked, reports, self.reporter.unwritten_lines)
            self.team.holding()
            self._standing = self._catch_up(reports)
        except LOST as lost:
            self._standing = self._regroup(lost)


def _note_nothing(number: int, title: str) -> None:
    pass
