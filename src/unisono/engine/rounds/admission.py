"""Admission of a member to a run, with the run's state: as one of the first members, or as a newcomer.

Of a checkpoint each gets what it is to hold, also of that which not all members hold (`engine.state.spread`). A member
that sees the checkpoint reads its states itself; to the others they are sent, a few tensors at a time. So no member
ever has all states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from unisono.core.cadence import Position, differences, table
from unisono.core.cursor import Recipe
from unisono.core.errors import CheckpointError, RecipeError
from unisono.core.holdings import Holders, Move, moves
from unisono.engine.checkpoint.loading import read_tensors
from unisono.engine.checkpoint.snapshot import tensor_names
from unisono.engine.exchange import Parcel
from unisono.engine.rounds import Report
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.team import LOST, Team, places
from unisono.engine.rounds.transfer import send_state, share_state
from unisono.engine.state.packing import Packed, grouped, pack_held, unpack
from unisono.engine.state.tracked import Tracked
from unisono.record import checkpoint_files as files
from unisono.record.checkpoint_files import Manifest
from unisono.system.faults import point

__all__ = ["Admission"]

Begin = Callable[[], Position | None]
TOGETHER_BYTES = 16 << 20
"""Tensors up to this size together are read and sent at once."""


@dataclass(frozen=True)
class _Fresh:
    """This member has nothing of the run's state."""


@dataclass(frozen=True)
class _BeginsLater:
    """The run begins in a later phase, at this position, and this member has the models of that position."""

    position: Position


@dataclass(frozen=True)
class _Arrived:
    """This member, a newcomer, has received the run's state, and loads it when the script reaches the state's phase."""

    source: Report
    state: dict[str, Any]


class Admission:
    """This member's way into a run.

    A script may have several phases (calls of ``run.steps``); `join` is called at the head of each until it succeeds.

    Args:
        checkpoint: returns, on the member that begins a run, what it has begun with.

    Attributes:
        lines: of the journal, which this member got with the state as a newcomer: those that it may have to write.
    """

    def __init__(self, rounds: Rounds, checkpoint: Callable[[], Path | None] = lambda: None) -> None:
        self._rounds = rounds
        self._checkpoint = checkpoint
        self._team = rounds.team
        self._tracked = rounds.tracked
        self._state: _Fresh | _BeginsLater | _Arrived = _Fresh()
        self.lines: list[str] = []

    def join(self, phase: int, recipe: Recipe, begin: Begin, first_step: int = 0) -> bool:
        """Get into the run, with its state. Collective for the members of the generation that admits this one.

        Args:
            recipe: of this phase, as this member's script has it.
            begin: called on one member of a run that begins. Loads the state to begin with, and returns the position of
                that state; None: the beginning. Of a state of a later phase it loads the models only.
            first_step: the step of the beginning; the steps before it count as done.

        Returns:
            False if the run is in a later phase; call again there.

        Raises:
            RecipeError: the run has another recipe.
        """
        self._rounds.enter_phase(recipe, _position(phase, first_step, first_step))
        while not isinstance(self._state, _Arrived):
            try:
                reports = self._meet(phase)
                if all(report.fresh for report in reports):
                    if (position := self._begin_together(reports, phase, recipe, begin)) is not None:
                        self._rounds.begin_with(reports, position.total)
                        self._rounds.start_at(0, position)
                        return True
                    if isinstance(self._state, _BeginsLater) and self._state.position.phase > phase:
                        return False
                else:
                    self._receive(reports)
            except LOST as lost:
                self._team.suspect(lost)
                self._state = _Fresh()
        return self._arrive(self._state, phase, recipe)

    def keep(self) -> Callable[[], None]:
        """Copy what this member holds of the state, and return what loads it once more. Both are local."""
        tracked = self._tracked
        packed = pack_held(tracked.whole_state(), "tracked")
        kept = packed._replace(tensors=[one if one.is_meta else one.to("cpu", copy=True) for one in packed.tensors])

        def load() -> None:
            common = _without_shares(kept, tracked) if tracked.is_spread else kept
            tracked.load(unpack(common.skeleton, common.tensors))
            if tracked.is_spread:
                _hold_shares(self._team, tracked, unpack(kept.skeleton, kept.tensors))

        return load

    def _meet(self, phase: int) -> list[Report]:
        own = msgspec.structs.replace(self._rounds.report(), fresh=True)
        if isinstance(self._state, _BeginsLater):  # this member is in the generation already
            return self._team.meet(own)
        return self._team.join(phase, own)

    def _begin_together(self, reports: list[Report], phase: int, recipe: Recipe, begin: Begin) -> Position | None:
        """Begin a run that no member has the state of. Collective.

        Returns:
            The position at which all begin now; None: not all scripts have reached its phase yet.
        """
        self._check_recipe(reports[0], phase, recipe)
        position = self._load(begin)
        if position is None:
            own = reports[self._team.rank]
            share_state(self._rounds.members, self._tracked, reports)
            return _position(own.phase, own.step, own.total, own.lines)
        # All see from the reports whether a member is at an earlier phase; those at the position already wait for it.
        some_are_earlier = any(report.phase < position.phase for report in reports)
        if len(reports) > 1:
            packed = None
            if self._team.rank == 0:
                packed = _without_shares(pack_held(self._tracked.whole_state(), "tracked"), self._tracked)
            state = send_state(self._team.exchange, 0, range(1, len(reports)), packed)
            if state is not None:
                (self._tracked.load_models if some_are_earlier else self._tracked.load)(state)
        if some_are_earlier:
            self._state = _BeginsLater(position)
            return None
        _load_shares(self._team, self._tracked, self._checkpoint())
        return position

    def _load(self, begin: Begin) -> Position | None:
        """Return the position that rank 0 has loaded a state for; None: the beginning. Collective."""
        with self._team.waiting():
            payload = msgspec.msgpack.encode(begin()) if self._team.rank == 0 else b""
            return msgspec.msgpack.decode(self._team.exchange.all_gather(payload)[0], type=Position | None)

    def _receive(self, reports: list[Report]) -> None:
        """Get the state of a run that is under way. Collective."""
        now, state = share_state(self._rounds.members, self._tracked, reports)
        assert state is not None
        self._rounds.note_newcomers(now)
        self.lines = state.pop("lines")
        self._state = _Arrived(now[self._team.rank], state)

    def _arrive(self, arrived: _Arrived, phase: int, recipe: Recipe) -> bool:
        """Load the received state if the script has reached its phase, else only the models.

        The code before the next phase may compute data with the models. Objects of that phase may not exist yet.
        """
        source = arrived.source
        if source.phase > phase:
            self._tracked.load_models(arrived.state)
            return False
        self._check_recipe(source, phase, recipe)
        self._tracked.load(arrived.state)
        self._state = _Fresh()  # let go of the state: it is as large as all models and optimizers
        position = _position(source.phase, source.step, source.total, source.lines)
        self._rounds.start_at(source.round, position, is_newcomer=True)
        return True

    def _check_recipe(self, other: Report, phase: int, recipe: Recipe) -> None:
        """Raise RecipeError if this worker's recipe differs. Unchecked, it would silently contribute other leaves."""
        if other.phase == phase and (rows := differences(other.recipe, recipe)):
            raise RecipeError(
                "this worker's script has a different recipe from the "
                f"run's:\n{table(rows, whose=('run', 'worker'))}\nWas the script, or a file that it reads, changed "
                "after the run had begun? A worker that starts later reads the new version"
            )


def _position(phase: int, step: int, total: int, lines: int = 0) -> Position:
    """Return the position with which a member begins, before its loop knows how many steps are under way there."""
    return Position(phase=phase, step=step, number=total, total=total, lines=lines)


# -- what not all members hold -------------------------------------------------------------------------


class _Seen(msgspec.Struct, frozen=True):
    """A checkpoint, as the member names it that has chosen it."""

    path: str = ""
    crc32: int = 0


def _without_shares(packed: Packed, tracked: Tracked) -> Packed:
    """Return a whole state in which meta tensors stand for all that `_hold_shares` loads."""
    tensors = list(packed.tensors)
    for number in tracked.apart_in(packed.paths):
        tensors[number] = tensors[number].to("meta")
    return packed._replace(tensors=tensors)


def _load_shares(team: Team, tracked: Tracked, checkpoint: Path | None) -> None:
    """Load what not all members hold, when all else of a checkpoint is loaded. Collective.

    When this returns, all members have what they are to hold. Until then a member that is lost takes nothing with it:
    the others begin from the checkpoint again.

    Args:
        checkpoint: on rank 0, from where; whatever it is on other members.

    Raises:
        CheckpointError: the checkpoint was changed meanwhile. PeerLost, DeadlineExceeded: a member was lost.
    """
    if not tracked.is_spread:
        return
    packed = _without_shares(pack_held(tracked.whole_state(), "tracked"), tracked)
    found, seen_by = _find(team, checkpoint)
    if found is not None and tensor_names(packed.paths) != [entry.name for entry in found[1].tensors]:
        raise CheckpointError(f"{found[0]} does not hold the tensors that this worker has loaded from it")
    wanted = _wanted(team, tracked, packed)
    here = dict[int, Tensor]()
    if found is not None:
        here = read_tensors(*found, [number for number, ranks in wanted.items() if team.rank in ranks])
    # A tensor comes from a member that has read it anyway, else from any that sees the checkpoint.
    now = {number: [rank for rank in ranks if rank in seen_by] or sorted(seen_by) for number, ranks in wanted.items()}
    sent = moves(now, wanted, lambda number: packed.tensors[number].nbytes)
    for group in grouped(sent, lambda move: packed.tensors[move.unit].nbytes, TOGETHER_BYTES):
        here |= _send(team, group, packed.tensors, found, here)
    point("shard.loading")
    team.exchange.all_gather(b"")
    tensors = [here.get(number, tensor) for number, tensor in enumerate(packed.tensors)]
    _hold_shares(team, tracked, unpack(packed.skeleton, tensors))


def _hold_shares(team: Team, tracked: Tracked, whole: Mapping[str, Any]) -> None:
    """Load what this member is to hold of the states that not all members hold. Local."""
    for (kind, name), part in tracked.spread.items():
        part.load_shares(whole[kind][name], part.plan(places(team)))


def _find(team: Team, checkpoint: Path | None) -> tuple[tuple[Path, Manifest] | None, set[int]]:
    """Return the checkpoint as this member sees it, and the ranks of those that see it. Collective."""
    own = _Seen()
    if team.rank == 0:
        assert checkpoint is not None
        own = _Seen(str(checkpoint.resolve()), files.read_manifest(checkpoint).crc32)
    named = msgspec.msgpack.decode(team.exchange.all_gather(msgspec.msgpack.encode(own))[0], type=_Seen)
    found = None
    try:
        manifest = files.read_manifest(Path(named.path))
        found = (Path(named.path), manifest) if manifest.crc32 == named.crc32 else None
    except CheckpointError:
        pass  # this member does not see it
    answers = team.exchange.all_gather(b"" if found is None else b"sees")
    return found, {rank for rank, answer in enumerate(answers) if answer}


def _wanted(team: Team, tracked: Tracked, packed: Packed) -> Holders:
    """Return by number of a tensor the members that are to have it; equal on all."""
    rank = {worker: number for number, worker in enumerate(team.worker_ids)}
    holders = {key: part.plan(places(team)) for key, part in tracked.spread.items()}
    return {
        number: tuple(sorted(rank[one] for one in holders[key][unit]))
        for number, key, unit in tracked.units_in(packed.paths)
    }


def _send(
    team: Team,
    group: Sequence[Move],
    tensors: Sequence[Tensor],
    found: tuple[Path, Manifest] | None,
    here: Mapping[int, Tensor],
) -> dict[int, Tensor]:
    """Send tensors to those that do not see the checkpoint; returns what this member gets. Collective.

    Args:
        tensors: of the checkpoint; meta tensors.
        here: those that this member has read.
    """
    missing = [move.unit for move in group if move.source == team.rank and move.unit not in here]
    read = read_tensors(*found, missing) if found is not None else {}
    got, parcels = dict[int, Tensor](), []
    for number, source, targets in group:
        tensor = tensors[number]
        if team.rank in targets:
            tensor = got[number] = torch.empty_like(tensor, device="cpu")
        elif team.rank == source:
            tensor = here[number] if number in here else read[number]
        parcels.append(Parcel(source, targets, tensor))
    team.exchange.deliver(parcels)
    return got
