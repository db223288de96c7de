"""Values that all members bring: who has heard of the end of such a round and who has not, with a scripted head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.processes import Seat, Team
from tests.workers.test_rounds import Script, ScriptedTeam, lose_after
from unisono.engine.exchange.pages import WorkerPage
from unisono.engine.rounds.admission import Admission
from unisono.engine.rounds.gathering import union
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.team import LOST
from unisono.engine.state.tracked import Tracked
from unisono.script.keeping import LENDING

pytestmark = pytest.mark.more

LOST_AFTER = [1, 2]
"""After which gather b and c notice a loss, where a goes on."""


def play(rounds: Rounds, name: str, traded: list[int]) -> list[dict[str, bytes]]:
    """What a script does: a round of names, one that trades in the first generation, and a last one."""
    team = rounds.team

    def trade() -> dict[str, bytes]:
        traded.append(team.generation)
        (first, *_) = team.exchange.all_gather(name.encode())
        return {f"{name} heard": first}

    found = [union(rounds, lambda: {f"{name} in {team.generation}": name.encode()})]
    found.append(union(rounds, trade=trade, generation=1))
    found.append(union(rounds, lambda: {name: b"last"}))
    return found


def play_boundary(rounds: Rounds, name: str, traded: list[int]) -> list[dict[str, bytes]]:
    """A step, and a boundary at which all lend in the first generation; later only if others have begun to."""
    team = rounds.team

    def trade() -> dict[str, bytes]:
        traded.append(team.generation)
        team.exchange.all_gather(b"")
        return {}

    step = union(rounds, lambda: {name: b"step"}, kind="step")
    rounds.boundary()
    if team.generation == 1:
        union(rounds, trade=trade, generation=1, kind=LENDING)
    elif LENDING in rounds.begun:
        union(rounds, kind=LENDING)
    return [step, union(rounds, lambda: {name: b"next"}, kind="step")]


def take_part(seat: Seat, what: Callable[..., Any], number: int) -> None:
    name = "abc"[seat.rank]
    page = WorkerPage()
    seat.say(page.address)
    team, tracked = ScriptedTeam(name, Script(""), page, seat.hear()), Tracked()
    rounds = Rounds(team, tracked, balance=False)
    assert Admission(rounds).join(0, {}, lambda: None)
    if name != "a":
        lose_after(rounds.members, "letters", number)
    found: list[dict[str, bytes]] = []
    traded: list[int] = []
    try:
        found = what(rounds, name, traded)
    except LOST:
        assert name == "c"
    team.exchange.close()
    seat.say((found, traded))
    seat.hear()  # others may still read this one's memory


def outcomes(what: Callable[..., Any], number: int) -> list[tuple[list[dict[str, bytes]], list[int]]]:
    with Team(3, take_part, what, number) as team:
        pages = {name: team.hear(rank) for rank, name in enumerate("abc")}
        for rank in range(3):
            team.say(rank, pages)
        found = [team.hear(rank) for rank in range(3)]
        for rank in range(3):
            team.say(rank, "done")
    return found


@pytest.mark.parametrize("number", LOST_AFTER)
def test_whoever_has_heard_of_the_end_all_have_the_same_values(number: int) -> None:
    """Also those of the lost member, if one has heard them: a decision that follows from them is the same on all."""
    (first, traded), (second, other), _ = outcomes(play, number)
    assert first == second
    assert set(traded) | set(other) <= {1}, "after a loss nobody trades"
    assert {"a in 1", "b in 1", "c in 1"} <= first[0].keys()
    assert set(first[1]) == (set() if number == 1 else {"a heard", "b heard", "c heard"})


def test_members_that_are_behind_lend_nothing_where_others_have_begun_to() -> None:
    (first, traded), (second, other), _ = outcomes(play_boundary, 1)
    assert first == second
    assert other == []
    assert set(traded) <= {1}
