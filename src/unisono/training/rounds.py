"""What the members of a run do together, round by round, and how a round survives the loss of some of them.

A **round** is a step's sum or an evaluation: work that is cut into leaves, done by whoever the plan says, and put
together at the end by all. Rounds are counted. A round is over for a member when it has seen the commit; a member that
is lost at that moment can leave others who have not. So two members are never more than one round apart, and after a
loss:

1. the survivors enter the next generation and **meet**: each reports its round and the nodes of it that it has;
2. those in the earlier round plan what is missing of it from these reports, compute it, and combine. Those who are
ahead
   **stand by**: they take part in the combine, hold nothing, and throw the result away (after looking at its digest);
3. then all are in the same round, meet again, and plan what is missing of that one.

Nobody is sent gradients, nothing is rolled back, and finished nodes are never computed again. A newcomer is admitted at
a step boundary only: it gets the tracked state from the first member that has it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from unisono.decisions.balance import Balance
from unisono.decisions.cadence import Place, Word, differences, table
from unisono.decisions.plan import Plan, plan, replan
from unisono.decisions.tree import Node
from unisono.errors import DivergenceError, RecipeError, StepError, UsageError
from unisono.exchange import Combined, Share, Work, combine
from unisono.exchange.flat import FlatLayout, Slot
from unisono.faults import point
from unisono.state import Packed, digest_of_tensor, pack, unpack
from unisono.telemetry import StepTelemetry
from unisono.training.team import LOST, Report, Team
from unisono.training.tracked import Tracked

__all__ = ["Helping", "Rounds"]

TOGETHER_BYTES = 16 << 20
"""Up to this size the tensors of a state are sent together: over a long way each broadcast costs its time."""
WORK = {"step": "a step of {} micro-batches", "evaluation": "an evaluation of {} batches", "together": "a checkpoint"}
"""What a round is, by its kind, for a reader."""
LEAST_PAUSE_S = 0.0005
MOST_PAUSE_S = 0.02
"""A member that is done looks this often whether another is late: four times in the time of a micro-batch."""


class _Head(msgspec.Struct, frozen=True):
    """What goes before the tensors of a state."""

    skeleton: bytes
    kinds: list[tuple[str, list[int]]]
    """(dtype, shape) of each tensor."""
    digests: list[int] = []


@dataclass
class _Last:
    """What a member remembers of the round that it finished last, for those who have not."""

    digest: int = 0
    letter: bytes = b""
    layout: FlatLayout | None = None
    """What it summed; the next one may sum something else."""


class Helping:
    """Within one step: leave out what others have taken from this member, and take from those who are late."""

    def __init__(self, team: Team, work: Work, paces: Sequence[float], todo: Sequence[int]) -> None:
        self._team = team
        self._work = work
        self._paces = paces
        self._pause_s = min(max(min(paces) / 4, LEAST_PAUSE_S), MOST_PAUSE_S)
        self._since = time.perf_counter()
        work.show_work(todo)

    def start(self, place: int, leaf: int) -> bool:
        """Whether the leaf at this place of ``todo`` is to be computed here."""
        return self._work.start(place, leaf)

    def take(self) -> int | None:
        """A leaf of another member, now that the own ones are done; None when all others have started their last.

        Whoever takes a leaf computes it before the next combine.

        Raises:
            PeerLost, DeadlineExceeded: as the combine would.
        """
        with self._team.waiting():
            while (leaf := self._work.take(self._paces, time.perf_counter() - self._since)) is None:
                if not self._work.pause(self._pause_s):
                    return None
                self._team.check()
        return leaf


class Rounds:
    """This member's part in the rounds of a run."""

    def __init__(self, team: Team, tracked: Tracked, *, balance: bool = True) -> None:
        self.team = team
        self.tracked = tracked
        self.number = 0
        self.phase = 0
        self.step = 0
        self.lines = 0
        self.total = 0
        self.about_checkpoints: Callable[[], Word] = Word
        """What this member has to say about checkpoints with the next combine."""
        self.heard_about_checkpoints: Callable[[list[Word], int], None] = lambda words, generation: None
        """Gets what all said, by rank, and in which generation."""
        self.unwritten: Callable[[], list[str]] = list
        """The lines of the journal that a newcomer may have to write."""
        self.handed_over: list[str] = []
        """Those that this member got with the state, as a newcomer."""
        self._kind, self._num_leaves = "step", 1
        self._begun = False
        self._fresh = True
        self._layout: FlatLayout | None = None
        self._held: dict[Node, Slot] = {}
        self._result: Slot | None = None
        self._last = _Last()
        self._reports: list[Report] | None = None
        self._must_meet = False
        self._ahead: set[str] = set()  # then: what those who are a round further have begun
        self._recipe: dict[str, int | bool] = {}
        self._arrives = False  # others have seen to this boundary before this member came
        self._agreed = 0
        self._begins_at: Place | None = None
        self._arrival: tuple[Report, dict[str, Any]] | None = None
        self.telemetry: list[StepTelemetry] = []
        """By rank, what each member told with the last combine."""
        self.news = ""
        """Why the plan of this round is another than that of the one before; empty where it is not."""
        self._wants_balance = balance
        self._balance = Balance(1)
        self._balanced_generation = 0

    # -- entering ------------------------------------------------------------------------------------

    def join(self, phase: int, recipe: dict[str, int | bool], begin: Callable[[], Place | None]) -> bool:
        """Get into the run, with its state. Collective for the members of the generation that admits this one.

        Args:
            recipe: of this phase, as this member's script has it.
            begin: called on one member of a run that begins: loads the state that it shall begin with, and says where
                that is; None: at the beginning. Of a state of a later phase it loads the models only.

        Returns:
            False if that is in a later phase; call again there.

        Raises:
            RecipeError: the run has another recipe.
        """
        self.phase, self._recipe = phase, recipe
        if self._arrival is not None:
            return self._arrive(*self._arrival)
        while self._fresh:
            if self._begins_at is None:
                reports = self.team.join(phase, self._report())
            try:
                if self._begins_at is not None:
                    reports = self.team.meet(self._report())
                begins = all(report.fresh for report in reports)
                if begins:
                    self._check_recipe(reports[0])
                place = self._begin(begin) if begins else None
                if place is not None and any(report.phase < place.phase for report in reports):
                    # All know so by the reports, also who is at that place already and meets the others there.
                    self._share_models(reports)
                    self._begins_at = place
                    if place.phase > phase:
                        return False
                    continue
                if place is None:
                    source = self._share_state(reports)[self.team.rank]
                    if self._arrival is not None:
                        return self._arrive(*self._arrival)
                    place = Place(phase=source.phase, step=source.step, total=source.total, lines=source.lines)
                    self.number = source.round
                elif len(reports) > 1:
                    packed = pack(self.tracked.state(), "tracked") if self.team.rank == 0 else None
                    state = self._transfer(0, packed)
                    if self.team.rank != 0:
                        self.tracked.load(state)
            except LOST as lost:
                self.team.suspect(lost)
                self._begins_at = None
                continue
            self._take(place)
        self.team.holding()
        return True

    def enter_phase(self, phase: int, recipe: dict[str, int | bool]) -> None:
        """The next phase begins, with its own recipe. Local."""
        self.phase, self.step, self._recipe = phase, 0, recipe

    def _arrive(self, source: Report, state: dict[str, Any]) -> bool:
        """A newcomer has been given the state of the run; it is put in force where the run is.

        Before that place the script may still be about to make what it tracks.
        """
        self._arrival = (source, state)
        if source.phase > self.phase:
            # The code before the next phase may compute data with the models.
            self.tracked.load_models(state)
            return False
        self._arrival = None
        self._check_recipe(source)
        self.tracked.load(state)
        self.number = source.round
        self._take(Place(phase=source.phase, step=source.step, total=source.total, lines=source.lines))
        self._arrives = True
        self.team.holding()
        return True

    def _check_recipe(self, other: Report) -> None:
        """Before anything is summed: other micro-batches would go into it without a word."""
        if other.phase == self.phase and (rows := differences(other.recipe, self._recipe)):
            raise RecipeError(
                f"this worker's script has another recipe than the run:\n{table(rows, whose=('run', 'worker'))}\n"
                "Was the script, or what it reads, changed after the run had begun? Whoever starts now reads it anew"
            )

    def _take(self, place: Place) -> None:
        self.phase, self.step, self.total, self.lines = place.phase, place.step, place.total, place.lines
        self._fresh = False

    def _begin(self, begin: Callable[[], Place | None]) -> Place | None:
        """What rank 0 finds to begin with. Collective."""
        with self.team.waiting():
            letter = msgspec.msgpack.encode(begin()) if self.team.rank == 0 else b""
            return msgspec.msgpack.decode(self.team.exchange.all_gather(letter)[0], type=Place | None)

    def use(self, layout: FlatLayout) -> None:
        """Sum what this layout describes from now on. Collective."""
        self._layout = layout
        try:
            if self._must_meet:  # those who are ahead wait for that, and `_settle` prepares
                self._must_meet = False
                self._reports = self._settle(self.team.meet(self._report()))
                return
            with self.team.waiting():
                self.team.exchange.prepare(layout)
        except LOST as lost:
            self._reports = self._settle_after(lost)

    def halts(self) -> bool:
        """Whether the run stops or pauses at this boundary, so that its state is worth a checkpoint. To be asked once
        at every boundary, before `boundary`; the same on all members.
        """
        arrives, self._arrives = self._arrives, False
        # A loss may have brought this member here when others had gone on already: all do what these have begun.
        if self._must_meet:
            return "together" in self._ahead
        if begun := self._begun_by_others():
            return "together" in begun
        planned = self._agreed > self.team.generation and self.team.halts_with(self._agreed)
        return not arrives and (planned or self.team.paused())

    def boundary(self) -> None:
        """Between two steps: move to the planned generation that all agreed on, and wait while the run is paused.
        Collective where there is something to do.

        Raises:
            RunStopped: the run was stopped. SystemExit: this worker was asked to leave.
        """
        if not self._must_meet and self._agreed > self.team.generation:
            self._enter(self.team.switch(self._agreed, self._report()))
        # Where others have gone on already, the pause comes after the step that these have begun.
        while not self._must_meet and not self._begun_by_others() and self.team.paused():
            self._enter(self.team.wait_until_resumed(self._report()))

    def _begun_by_others(self) -> set[str]:
        return {report.kind for report in self._reports or () if report.begun}

    def _enter(self, reports: list[Report]) -> None:
        """Go on with the members of another generation. Collective."""
        try:
            reports = self._share_state(reports)
            self.team.holding()
            self._reports = self._settle(reports)
        except LOST as lost:
            self._reports = self._settle_after(lost)

    # -- a round -------------------------------------------------------------------------------------

    def start(self, kind: str, num_leaves: int) -> Plan:
        """Begin the next round; says what this member computes. Local, except after a loss."""
        self._kind, self._num_leaves, self._begun = kind, num_leaves, True
        self._held = {}
        self.news = ""
        reports, self._reports = self._reports, None
        if self._must_meet:
            self._must_meet = False
            try:
                reports = self._settle(self.team.meet(self._report()))
            except LOST as lost:
                reports = self._settle_after(lost)
        if reports is None:
            if kind == "step" and self._is_balanced():
                chosen = self._balance.decide(num_leaves)
                if self._balance.change is not None:
                    self.news = self._balance.change.say(self.team.worker_ids)
                return chosen
            return plan(self.team.size, num_leaves)
        return self._replan(reports)

    def helping(self, plan: Plan) -> Helping | None:
        """For the leaves that this member computes now; None where members do not see each other's work. Local."""
        paces, found = self._balance.paces(), self.team.exchange.work()
        if paces is None or found is None or not self._is_balanced():
            return None
        work, ranks = found
        return Helping(self.team, work, [paces[rank] for rank in ranks], plan.ranges[self.team.rank])

    def combine(self, plan: Plan, held: dict[Node, Slot], telemetry: StepTelemetry) -> Combined:
        """The sum of the step. Collective.

        Raises:
            PeerLost, DeadlineExceeded: call `recover`.
        """
        self._held = held
        self.team.check()
        combined = self._combine(Share(plan.num_leaves, plan.nodes, held), telemetry)
        self._finish(_Last(digest=combined.digest, layout=self._layout))
        self._result = combined.slot
        point("committed")
        return combined

    def release_result(self) -> None:
        """What `combine` returned is not needed any more."""
        if self._result is not None:
            self.team.exchange.release(self._result)
            self._result = None

    def gather(self, letter: bytes) -> list[bytes]:
        """Everybody's part of an evaluation, by rank. Collective.

        Raises:
            PeerLost, DeadlineExceeded: call `recover`.
        """
        self.team.check()
        with self.team.waiting():
            return self.team.exchange.all_gather(letter)

    def gathered(self, letter: bytes) -> None:
        """All parts are there; ``letter`` holds all of them, for those who have not seen it."""
        self._finish(_Last(letter=letter))

    def recover(self, lost: Exception, held: dict[Node, Slot] | Iterable[Node]) -> Plan:
        """A member was lost in this round. Meet the survivors; says what this member computes of what is missing.

        Args:
            held: the nodes that this member has finished; slots that the new members cannot reach are replaced in it.

        Raises:
            RunStopped: the run is over, or goes on without this worker.
        """
        self._held = held if isinstance(held, dict) else {}
        return self._replan(self._settle_after(lost, list(held)))

    def together(self, work: Callable[[], None], letter: bytes = b"") -> list[bytes]:
        """Do something that counts only when the first member has done it; the others wait for it. Collective.

        When that member is lost meanwhile, the next first one does it. ``work`` is called on all of them, perhaps
        more than once.

        Returns:
            What each member has given as ``letter``, by rank.
        """
        self.start("together", 1)
        while True:
            try:
                with self.team.waiting():
                    work()
                letters = self.gather(letter)
                break
            except LOST as lost:
                self.recover(lost, [])
        self.gathered(letter)
        return letters

    # -- inside --------------------------------------------------------------------------------------

    def _finish(self, last: _Last) -> None:
        self._last = last
        self._begun = False
        self._held = {}
        self.number += 1

    def _combine(self, share: Share, telemetry: StepTelemetry) -> Combined:
        found = self.team.exchange.work()
        generation = self.team.generation
        with self.team.waiting():
            own = msgspec.structs.replace(
                telemetry,
                newest_generation=self.team.newest(),
                first_of_host=self.team.rank if found is None else found[1][0],
                checkpoint=self.about_checkpoints(),  # may wait for a disk
            )
            combined = combine(self.team.exchange, share, own.pack())
        everyones = self.telemetry = [StepTelemetry.unpack(each) for each in combined.telemetry]
        self.heard_about_checkpoints([each.checkpoint for each in everyones], generation)
        # Everybody has heard of the oldest of the newest notices: at the next boundary all can move to it.
        self._agreed = min(each.newest_generation for each in everyones)
        if self._balanced_generation != self.team.generation:
            self._balanced_generation = self.team.generation
            self._balance = Balance(self.team.size, [each.first_of_host for each in everyones])
        self._balance.observe([each.leaves for each in everyones], [each.data_s + each.compute_s for each in everyones])
        # Whoever came to it last has not waited for others, but for what was sent.
        last_seconds = min(each.last.exchange + each.last.waiting for each in everyones)
        self._balance.observe_exchange(last_seconds, share.plan, share.num_leaves)
        return combined

    def predicted(self, num_leaves: int) -> Plan:
        """What the plan of the coming steps will most likely be. Local."""
        return self._balance.peek(num_leaves) if self._is_balanced() else plan(self.team.size, num_leaves)

    @property
    def is_first_of_generation(self) -> bool:
        """No step has been summed in this generation yet; the same on all members at the beginning of a step."""
        return self._balanced_generation != self.team.generation

    def _is_balanced(self) -> bool:
        # The first step of a generation knows nothing yet, on every member.
        return self._wants_balance and not self.is_first_of_generation

    def _report(self, have: Sequence[Node] = ()) -> Report:
        return Report(
            fresh=self._fresh,
            phase=self.phase,
            step=self.step,
            round=self.number,
            kind=self._kind,
            begun=self._begun,
            num_leaves=self._num_leaves,
            have=[(node.level, node.index) for node in have],
            lines=self.lines,
            total=self.total,
            recipe=self._recipe,
        )

    def _settle_after(self, lost: Exception, have: Sequence[Node] = ()) -> list[Report]:
        return self._settle(self.team.regroup(self._report(have), lost), have)

    def _settle(self, reports: list[Report], have: Sequence[Node] = ()) -> list[Report]:
        """After a meeting: stand by those who are a round behind, until all who are not behind me are in my round."""
        while True:
            try:
                # Whoever is behind with a step sums it as it was.
                behind = any(report.round < self.number and report.kind == "step" for report in reports)
                self._bring_slots(self._last.layout if behind else self._layout)
                if all(report.round == self.number for report in reports):
                    self._must_meet = False
                    self._check_alike(reports)
                    return reports
                if self.number == min(report.round for report in reports):
                    self._must_meet = True
                    self._ahead = {one.kind for one in reports if one.begun and one.round > self.number}
                    return reports
                self._stand_by(reports)
                reports = self.team.meet(self._report(have))
            except LOST as lost:
                reports = self.team.regroup(self._report(have), lost)

    def _check_alike(self, reports: list[Report]) -> None:
        """Raises: StepError: members have begun the same round as different things, and would wait for each other."""
        begun = {
            worker: WORK[report.kind].format(report.num_leaves)
            for worker, report in zip(self.team.worker_ids, reports, strict=False)
            if report.begun
        }
        if len(set(begun.values())) > 1:
            raise StepError(
                f"the workers do different things at step {self.step}: "
                f"{', '.join(f'{worker} is at {what}' for worker, what in begun.items())}. A decision of the script "
                "depends on the worker (run.rank, run.is_main, the time, a sum collected within `for batch in step`): "
                "all of them must call run.steps, run.evaluate and run.save alike"
            )

    def _bring_slots(self, layout: FlatLayout | None) -> None:
        """Make the slots that are in use those of the new exchange. Collective."""
        if layout is None:
            return
        # What a member that is ahead holds may be of the next layout: it waits in its memory until that one counts.
        held = {node: slot for node, slot in self._held.items() if slot.layout == layout}
        result = [self._result] if self._result is not None and self._result.layout == layout else []
        with self.team.waiting():
            brought = self.team.exchange.prepare(layout, [*held.values(), *result])
        self._held.update(zip(held, brought, strict=False))
        if result:
            self._result = brought[-1]

    def _stand_by(self, reports: list[Report]) -> None:
        """Take part in the round that others have not finished; its result is known here."""
        behind = min(reports, key=lambda report: report.round)
        if behind.round != self.number - 1:
            raise StepError(f"a member is in round {behind.round}, this one in {self.number}: more than one apart")
        if behind.kind != "step":
            with self.team.waiting():
                self.team.exchange.all_gather(self._last.letter)
            return
        theirs = _replan(reports, behind.round, behind.num_leaves)
        combined = self._combine(Share(behind.num_leaves, theirs.nodes, {}), StepTelemetry())
        self.team.exchange.release(combined.slot)
        if combined.digest != self._last.digest:
            raise DivergenceError(
                f"step {self.step - 1} was computed again after a loss and its sums have digest "
                f"{combined.digest:016x}, not {self._last.digest:016x}. Either a micro-batch does not give the same "
                "gradient on every worker (see docs/guarantees.md for what a micro-batch may depend on), or the "
                "hardware of a worker is broken"
            )

    def _replan(self, reports: list[Report]) -> Plan:
        return _replan(reports, self.number, self._num_leaves)

    # -- state ---------------------------------------------------------------------------------------

    def _share_state(self, reports: list[Report]) -> list[Report]:
        """Give every fresh member the state of the run; where all are fresh, agree on that of rank 0.

        Returns:
            The reports as they are now: who was fresh stands where the giver stands.
        """
        if all(report.fresh for report in reports):
            if len(reports) > 1:
                self._agree()
        elif any(report.fresh for report in reports):
            source = next(rank for rank, report in enumerate(reports) if not report.fresh)
            packed = None
            if self.team.rank == source:
                packed = pack({**self.tracked.state(), "lines": self.unwritten()}, "tracked")
            state = self._transfer(source, packed)
            if self._fresh:
                self.handed_over = state.pop("lines")
                self._arrival = (reports[source], state)
            return [reports[source] if report.fresh else report for report in reports]
        return reports

    def _share_models(self, reports: Sequence[Report]) -> None:
        """Give all members the models of rank 0, which has loaded them. Collective."""
        if len(reports) > 1:
            state = self._transfer(0, pack(self.tracked.state(), "tracked") if self.team.rank == 0 else None)
            if self.team.rank != 0:
                self.tracked.load_models(state)

    def _agree(self) -> None:
        packed = pack(self.tracked.state(), "tracked")
        head = _head(packed, digests=True)
        heads = [
            msgspec.msgpack.decode(h, type=_Head) for h in self.team.exchange.all_gather(msgspec.msgpack.encode(head))
        ]
        first = heads[0]
        different = [rank for rank, other in enumerate(heads) if other != first]
        if not different:
            return
        for rank in different:
            if heads[rank].kinds != first.kinds:
                ids = self.team.worker_ids
                raise UsageError(
                    f"{ids[rank]} tracks {len(heads[rank].kinds)} tensors whose shapes are not those of the "
                    f"{len(first.kinds)} of {ids[0]}; "
                    "all workers must build the same model"
                )
        state = self._transfer(0, packed)
        if self.team.rank != 0:
            if self.team.rank in different:
                places = [place for place, (a, b) in enumerate(zip(head.digests, first.digests, strict=True)) if a != b]
                what = (
                    f"{len(places)} tensors, the first is {packed.paths[places[0]]}"
                    if places
                    else "settings, no tensor"
                )
                warnings.warn(
                    f"{self.team.worker_ids[self.team.rank]} starts with another state than "
                    f"{self.team.worker_ids[0]}, whose "
                    f"is taken: {what}. Set the seed before the model is made (unisono.Run(seed=...) does)",
                    stacklevel=2,
                )
            self.tracked.load(state)

    def _transfer(self, source: int, packed: Packed | None) -> dict[str, Any]:
        """The state of rank ``source``. Collective."""
        exchange = self.team.exchange
        own = msgspec.msgpack.encode(_head(packed)) if packed is not None and self.team.rank == source else b""
        head = msgspec.msgpack.decode(exchange.all_gather(own)[source], type=_Head)
        mine = self.team.rank == source and packed is not None
        empty = (torch.empty(shape, dtype=getattr(torch, kind)) for kind, shape in head.kinds)
        tensors = packed.tensors if mine and packed is not None else list(empty)
        for group in _groups(tensors):
            point("in_admission")
            views = [tensor.reshape(-1).view(torch.uint8) for tensor in group]
            together = torch.cat([view.cpu() for view in views]) if len(views) > 1 else views[0]
            exchange.broadcast(together, source)
            if not mine:
                for view, piece in zip(views, together.split([len(view) for view in views]), strict=True):
                    view.copy_(piece)
        state: dict[str, Any] = unpack(head.skeleton, tensors)
        return state


def _groups(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """All of them, in their order; small ones together. The same on whoever knows their dtypes and shapes."""
    groups: list[list[torch.Tensor]] = []
    nbytes = TOGETHER_BYTES
    for tensor in tensors:
        nbytes += tensor.nbytes
        if nbytes > TOGETHER_BYTES:
            groups.append([])
            nbytes = tensor.nbytes
        groups[-1].append(tensor)
    return groups


def _head(packed: Packed, *, digests: bool = False) -> _Head:
    kinds = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in packed.tensors]
    return _Head(packed.skeleton, kinds, [digest_of_tensor(tensor) for tensor in packed.tensors] if digests else [])


def _replan(reports: Sequence[Report], number: int, num_leaves: int) -> Plan:
    if not any(report.have for report in reports) and all(report.round == number for report in reports):
        return plan(len(reports), num_leaves)
    able = [report.round == number for report in reports]
    held = [
        [Node(level, index) for level, index in report.have] if is_able else []
        for report, is_able in zip(reports, able, strict=True)
    ]
    return replan(held, able, num_leaves)
