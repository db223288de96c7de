"""A machine that was silent for some seconds and has gone on is told, once; a head that stood still tells nothing."""

from __future__ import annotations

import msgspec
import pytest

from unisono.cluster.head.connections import AGAIN_S, Silences
from unisono.core.messages import Beat, BeatOf
from unisono.core.policy import Policy
from unisono.membership.roster import Agent, State, Worker, WorkerState

BEAT = Beat(generation=1, phase=0, step=1, microbatch=-1, progress=1, waiting=True)


class Scene:
    """Two machines with a worker each; the head is on that of a0."""

    def __init__(self) -> None:
        self.now = 100.0
        self.silences = Silences(0.5)
        agents = {name: Agent(agent_id=name, host=f"host of {name}", primary=name == "a0") for name in ("a0", "a1")}
        workers = {
            f"w{number}": Worker(worker_id=f"w{number}", agent=f"a{number}", state=WorkerState.HOLDING, heard_at=100.0)
            for number in (0, 1)
        }
        self.state = State(policy=Policy(start=2, maximum=2), seat="a0", agents=agents, workers=workers)

    def beat(self, number: int) -> str:
        worker_id = f"w{number}"
        said = self.silences.heard(self.state, f"a{number}", [BeatOf(worker_id, 0.0, BEAT)], self.now)
        worker = msgspec.structs.replace(self.state.workers[worker_id], heard_at=self.now)
        self.state = msgspec.structs.replace(self.state, workers={**self.state.workers, worker_id: worker})
        return said

    def passes(self, seconds: float, *who: int) -> list[str]:
        """Heartbeats of these machines meanwhile."""
        said = []
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            said += [self.beat(number) for number in who]
        return [each for each in said if each]


@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_a_cut_that_has_healed_is_told_once(seconds: float) -> None:
    scene = Scene()
    assert scene.passes(5, 0, 1) == []
    assert scene.passes(seconds, 0) == []
    told = scene.passes(5, 0, 1)
    if seconds < 2:
        assert told == []
        return
    (words,) = told
    assert words.startswith("nothing came from host of a1 for 3.5 s, and then it continued")
    scene.passes(3, 0)
    assert scene.passes(5, 0, 1) == [], "not again at once"
    scene.passes(AGAIN_S, 0, 1)
    scene.passes(3, 0)
    assert len(scene.passes(5, 0, 1)) == 1


def test_a_head_that_stood_still_has_heard_nobody() -> None:
    scene = Scene()
    scene.passes(5, 0, 1)
    scene.now += 10.0
    assert scene.passes(5, 1, 0) == []


def test_the_machine_of_the_head_is_not_cut_off_from_it() -> None:
    scene = Scene()
    scene.passes(5, 0, 1)
    scene.passes(3, 1)
    assert scene.passes(5, 0, 1) == []
