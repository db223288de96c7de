"""Admission of a member to a run, with the run's state: as one of the first members, or as a newcomer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from unisono.core.cadence import Position, differences, table
from unisono.core.cursor import Recipe
from unisono.core.errors import RecipeError
from unisono.engine.rounds import Report
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.spread_loading import load_shares, without_shares
from unisono.engine.rounds.team import LOST
from unisono.engine.rounds.transfer import send_state, share_state

__all__ = ["Admission"]

Begin = Callable[[], Position | None]


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
            whole = self._tracked.whole_state
            packed = without_shares(whole(), self._tracked) if self._team.rank == 0 else None
            state = send_state(self._team.exchange, 0, range(1, len(reports)), packed)
            if state is not None:
                (self._tracked.load_models if some_are_earlier else self._tracked.load)(state)
        if some_are_earlier:
            self._state = _BeginsLater(position)
            return None
        load_shares(self._team, self._tracked, self._checkpoint())
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
                f"this worker's script has another recipe than the run:\n{table(rows, whose=('run', 'worker'))}\n"
                "Was the script, or a file that it reads, changed after the run had begun? A worker that starts "
                "later reads the new version"
            )


def _position(phase: int, step: int, total: int, lines: int = 0) -> Position:
    """Return the position with which a member begins, before its loop knows how many steps are under way there."""
    return Position(phase=phase, step=step, number=total, total=total, lines=lines)
