"""Who has heard of the end of an update, or of a move, and who has not: a scripted head, real exchanges."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn, optim

import unisono
from tests.workers.models import bits_of
from tests.workers.processes import Seat, Team
from tests.workers.test_rounds import Script, ScriptedTeam, lose_after
from unisono.engine.exchange.pages import WorkerPage
from unisono.engine.rounds.admission import Admission
from unisono.engine.rounds.clock import Clock
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.team import LOST
from unisono.engine.state.tracked import Tracked
from unisono.strategies.shard.update import shared_updates

pytestmark = pytest.mark.more

NUM_STEPS = 4
CALLS = {
    "who has what was said": ("letters", 1),
    "states have moved": ("letters", 2),
    "an update was sent": ("deliver", 2),
    "an update is over": ("letters", 3),
    "the next update was sent": ("deliver", 3),
    "the next update is over": ("letters", 4),
}
"""After which exchange b and c notice a loss, where a may have gone on."""
HOST_CALLS = {
    "states have moved": ("letters", 2),
    "where parameters lie was said": ("letters", 3),
    "the host has one copy": ("letters", 4),
    "where new values lie was said": ("letters", 5),
    "an update is over": ("letters", 6),
    "the next update was sent": ("deliver", 4),
    "the next update is over": ("letters", 8),
}
"""The same where the host has one copy of the parameters."""
CASES = [("worker", *call) for call in CALLS.values()] + [("host", *call) for call in HOST_CALLS.values()]
NAMES = [*CALLS, *(f"host: {name}" for name in HOST_CALLS)]


def train(model: nn.Module, optimizer: optim.Optimizer, number: int) -> None:
    """One step with gradients that are known in advance; then the script changes the weights, as it may."""
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def made() -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2))
    return model, optim.AdamW(model.parameters(), lr=0.1)


def take_part(seat: Seat, parameters: Literal["worker", "host"], call: str, number: int, copies: int = 2) -> None:
    """Says the bits of the model, and of the states that it holds."""
    name = "abc"[seat.rank]
    page = WorkerPage()
    seat.say(page.address)
    team, tracked = ScriptedTeam(name, Script(""), page, seat.hear()), Tracked()
    rounds = Rounds(team, tracked, balance=False)
    model, plain = made()
    optimizer = unisono.shard(plain, copies=copies, parameters=parameters)
    tracked.add({"model": model, "optimizer": optimizer})
    assert Admission(rounds).join(0, {}, lambda: None)
    if name != "a":
        lose_after(rounds.members, call, number)
    try:
        with shared_updates(rounds, tracked, Clock()):
            for step in range(NUM_STEPS):
                train(model, optimizer, step)
    except LOST:
        assert name == "c"
    team.exchange.close()
    states = optimizer.state_dict()["state"]
    held = {index: bits_of(state) for index, state in states.items() if not state["exp_avg"].is_meta}
    seat.say((name != "c", bits_of(model.state_dict()), held))
    seat.hear()  # others may still read this one's memory


@pytest.mark.parametrize(("parameters", "call", "number"), CASES, ids=NAMES)
def test_whoever_has_heard_of_the_end_all_get_there(parameters: str, call: str, number: int) -> None:
    """A may be a round ahead, and its weights are not those of the update any more; b gets what it lacks, and no more.

    In the end the two that are left hold all states, with the bits of a replicated optimizer.
    """
    assert_all_get_there(parameters, call, number)


def test_parameters_without_states_come_together_after_a_loss() -> None:
    """With one copy of each state, before there is any: nothing is lost with their owner."""
    assert_all_get_there("host", *HOST_CALLS["where parameters lie was said"], 1)


def assert_all_get_there(*arguments: object) -> None:
    """Two of three are left; they have the bits of a replicated optimizer, and all states."""
    model, optimizer = made()
    for step in range(NUM_STEPS):
        train(model, optimizer, step)
    expected = {index: bits_of(state) for index, state in optimizer.state_dict()["state"].items()}
    states: dict[int, str] = {}
    with Team(3, take_part, *arguments) as team:
        pages = {name: team.hear(rank) for rank, name in enumerate("abc")}
        for rank in range(3):
            team.say(rank, pages)
        for is_left, found, held in [team.hear(rank) for rank in range(3)]:
            if is_left:
                assert found == bits_of(model.state_dict())
                assert arguments[-1] == 1 or held == expected
                states.update(held)
        for rank in range(3):
            team.say(rank, "done")
    assert states == expected
