"""A script leaves a loop whose sums are under way, and a worker is lost before all have seen the last commit."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
from torch.nn import functional as F

from tests.workers.models import bits_of
from tests.workers.processes import Seat
from tests.workers.static_team import Place, StaticRun, StaticTeam, train_on
from tests.workers.test_delay import net, vectors
from unisono.cluster.worker.member import Member
from unisono.core.errors import PeerLost
from unisono.engine.exchange import Combined
from unisono.engine.rounds import Report
from unisono.engine.rounds.team import Team
from unisono.strategies.delay.pipeline import Pipeline

pytestmark = pytest.mark.more

LOST = PeerLost("a member was lost")


class LosingTeam(StaticTeam):
    """Members that have lost another one when they say so, and meet again in the next generation."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.has_lost = False
        super().__init__(place.exchange())

    def check(self) -> None:
        if self.has_lost:
            raise LOST

    def regroup(self, report: Report, lost: Exception) -> list[Report]:
        self.has_lost = False
        self.exchange.close()
        self.exchange = self._place.exchange()
        self.generation += 1
        return self.meet(report)


class LosingRun(StaticRun):
    def __init__(self, place: Place) -> None:
        self.losing = LosingTeam(place)
        super().__init__(self.losing.exchange, None, seed=3)

    def _make_team(self, member: Member | None, *, checks: bool) -> Team:
        return self.losing


def _leave(seat: Seat, place: Place, behind: int) -> list[str]:
    """Leave the loop; ``behind`` has not seen the last commit when both hear of the loss."""
    with LosingRun(place) as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)

        def train(max_steps: int, leaves: bool) -> None:
            for step in run.steps(vectors(), batch_size=16, microbatches=4, max_steps=max_steps, delay=2):
                for inputs, labels in step:
                    F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                if leaves and step.number == 2:
                    break

        train(4, leaves=True)
        rounds = run._rounds
        assert rounds is not None
        pipeline = rounds.book
        assert isinstance(pipeline, Pipeline)
        number, (last, share) = list(pipeline._under_way._sums.items())[-1]
        last.result()
        if seat.rank == behind:
            failed: Future[Combined] = Future()
            failed.set_exception(LOST)
            pipeline._under_way._sums[number] = (failed, share)
        else:
            rounds.drain()
            run.losing.has_lost = True  # type: ignore[attr-defined]
        said = run.all_gather(f"{seat.rank}")
        train(3, leaves=False)
        assert rounds.is_level
        return [*said, bits_of(model.state_dict())]


@pytest.mark.parametrize("behind", [0, 1])
def test_who_has_not_seen_the_last_commit_of_a_loop_that_is_left_goes_on(behind: int) -> None:
    first, second = train_on("shared", 2, _leave, behind)
    assert first == second
    assert first[:2] == ["0", "1"]
