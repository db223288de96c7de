"""What is told of a run's machines and workers: who came and went, how and why, by one rule for all ways."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from tests.pure.test_membership import AGENT, Story, Unvisited, counting, info
from unisono.core.events import Event, MachineGone, MachineJoined, MembershipChanged, RunEnded, WorkerGone, WorkerJoined
from unisono.core.messages import (
    Drain,
    Failed,
    Finished,
    Hello,
    Holding,
    Left,
    Lost,
    Message,
    Ready,
    Scale,
    StepDone,
    Stop,
    WorkerExit,
)
from unisono.membership import Event as Said
from unisono.membership import TookOver, happenings, step


class Told(Story):
    """A story that keeps all that has happened."""

    def __init__(self, start: int = 3, **policy: int | float | bool) -> None:
        super().__init__(start, **policy)
        self.all: list[Event] = []

    def says(self, source: str, message: object) -> list[object]:  # type: ignore[override]
        before = self.state
        found = super().says(source, message)  # type: ignore[arg-type]
        assert self.happened == happenings(before, self.state), "of all workers as well"
        self.all += self.happened
        return found  # type: ignore[return-value]

    def gone(self) -> list[tuple[str, str, str]]:
        return [(event.worker_id, event.how, event.reason) for event in self.all if isinstance(event, WorkerGone)]

    def joined(self) -> list[tuple[str, int, str]]:
        return [(event.worker_id, event.step, event.reason) for event in self.all if isinstance(event, WorkerJoined)]


def trains(start: int = 3, **policy: int | float | bool) -> Told:
    """A run of so many workers that has done ten steps."""
    told = Told(start, **policy)
    told.arrive(*told.agent(start))
    told.hold()
    told.says("w0", StepDone(step=9, seconds=0.1))
    return told


def test_a_run_begins_with_its_machine_its_workers_and_its_first_generation() -> None:
    told = trains(2)
    assert told.all == [
        MachineJoined(agent_id=AGENT, host="lab", num_workers=2),
        WorkerJoined(worker_id="w0", host="lab", device="cpu", pid=1000, generation=1, step=0, reason="the run begins"),
        MembershipChanged(generation=1, worker_ids=("w0", "w1"), reason="all are ready; generation 1 with 2 workers"),
        WorkerJoined(worker_id="w1", host="lab", device="cpu", pid=1001, generation=1, step=0, reason="the run begins"),
    ]


def test_a_worker_that_is_killed_is_told_at_once_and_the_one_that_replaces_it_when_it_takes_part() -> None:
    told = trains()
    told.all.clear()
    told.exits("w1")
    why = "worker w1 (pid 1001) was killed by signal 9 (SIGKILL)"
    assert told.all == [WorkerGone(worker_id="w1", host="lab", how="lost", reason=why, step=9)]
    told.arrive("w3")
    assert told.joined() == []
    told.hold("w0", "w2")
    told.hold("w0", "w2", "w3")
    (w3,) = (event for event in told.all if isinstance(event, WorkerJoined))
    assert (w3.worker_id, w3.step, w3.reason) == ("w3", 10, "replaces w1")
    changes = [event for event in told.all if isinstance(event, MembershipChanged)]
    assert [event.worker_ids for event in changes] == [("w0", "w2"), ("w0", "w2", "w3")]
    assert why in changes[0].reason
    assert "w3 joins" in changes[1].reason


def test_who_is_asked_to_leave_has_left_for_the_reason_that_was_given() -> None:
    told = trains()
    told.says("", Scale(num_workers=2))
    told.hold("w0", "w1")
    told.says("w2", Left())
    assert told.gone() == [("w2", "left", "scaled to 2 workers, from 3")]
    told.says(AGENT, Drain(worker_ids=["w1"], reason="lab is needed"))
    told.hold("w0")
    told.says("w1", Left())
    assert told.gone()[1:] == [("w1", "left", "lab is needed")]


def test_a_stop_is_told_of_each_worker_and_as_the_end_of_the_run() -> None:
    told = trains(2)
    told.says("", Stop(reason="stopped by `unisono stop`"))
    for worker_id in ("w0", "w1"):
        told.says(worker_id, Left())
    assert told.gone() == [(worker_id, "left", "stopped by `unisono stop`") for worker_id in ("w0", "w1")]
    assert told.all[-1] == RunEnded(ok=True, reason="stopped by `unisono stop`", digests={}, step=9)


def test_a_run_that_is_finished_says_so_of_each_worker() -> None:
    told = trains(2)
    told.says("w0", Finished())
    told.says("w1", Finished())
    assert told.gone() == [(worker_id, "finished", "its script has returned") for worker_id in ("w0", "w1")]
    assert told.all[-1] == RunEnded(ok=True, reason="finished", digests={}, step=9)


def test_an_error_of_a_script_is_told_as_a_failure_and_ends_the_run_with_its_traceback() -> None:
    told = trains(2)
    told.says("w1", Failed(error="ValueError: no", traceback="Traceback ...", step=10))
    end = told.all[-1]
    assert isinstance(end, RunEnded)
    assert (end.ok, end.traceback) == (False, "Traceback ...")
    assert "w1" in end.reason
    assert "ValueError: no" in end.reason


def test_a_worker_that_fails_before_it_takes_part_is_told_as_well() -> None:
    told = trains(2, maximum=3)
    (w2,) = told.agent(1, "agent1", primary=False, host="other")
    told.says(w2, Hello(info=info(w2, "other"), fingerprint={"torch": "2"}))
    told.says(w2, Failed(error="FileNotFoundError: data", traceback="..."))
    worker_id, how, reason = told.gone()[0]
    assert (worker_id, how) == (w2, "failed")
    assert "FileNotFoundError: data" in reason
    assert w2 not in [each[0] for each in told.joined()]


def test_a_worker_that_hangs_is_evicted_when_the_others_go_on_without_it() -> None:
    told = trains(3, late_s=1.0, aside_s=2.0, hang_s=4.0)
    told.now = 10.0
    told.beat("w0", waiting=True)
    told.beat("w1", waiting=True)
    told.beat("w2", seconds_at=3.0)
    ((worker_id, how, reason),) = told.gone()
    assert (worker_id, how) == ("w2", "evicted")
    assert "left aside" in reason
    told.exits("w2")
    assert len(told.gone()) == 1, "it is told once"


def test_machines_join_with_what_they_offer_and_go_with_the_reason() -> None:
    told = trains(2)
    told.agent(1, "agent1", primary=False, host="other")
    assert told.all[-1] == MachineJoined(agent_id="agent1", host="other", num_workers=1)
    told.arrive("w2", host="other")
    told.hold()
    assert told.joined()[-1] == ("w2", 10, "other has joined")
    told.says("agent1", Drain(reason="other leaves"))
    told.hold("w0", "w1")
    told.says("w2", Left())
    told.says("agent1", Lost(reason="its connection closed"))
    assert told.gone() == [("w2", "left", "other leaves")]
    assert told.all[-1] == MachineGone(agent_id="agent1", host="other", reason="other leaves")


def test_a_machine_that_is_lost_with_the_head_is_told_by_the_next_head() -> None:
    told = trains(1, maximum=2)
    told.agent(1, "agent1", primary=False, host="other")
    told.arrive("w1", host="other")
    told.hold()
    told.all.clear()
    told.says("", TookOver(before=AGENT))
    kinds = [type(event).__name__ for event in told.all]
    assert kinds == ["WorkerGone", "MachineGone"]
    assert told.gone()[0][:2] == ("w0", "lost")
    assert "out of reach, with the head" in told.gone()[0][2]


def test_any_order_of_events_is_told_alike_from_what_was_touched_and_from_all() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        told = trains(3, maximum=6)
        for _ in range(60):
            told.now += rng.random()
            ids = list(told.state.workers)
            worker_id = rng.choice(ids)
            message: Message = rng.choice(
                [
                    Ready(phase=0),
                    Hello(info=info(worker_id), fingerprint={"torch": "2"}),
                    Holding(generation=told.state.generation),
                    Finished(),
                    Left(),
                    StepDone(step=told.state.committed + 1, seconds=0.1),
                    Failed(error="E", traceback="", step=3, microbatch=1, retry=True),
                    Lost(),
                ]
            )
            other = rng.choice([WorkerExit(worker_id=worker_id, exit_code=-9), Scale(num_workers=rng.randint(1, 5))])
            source, what = rng.choice([(worker_id, message), (AGENT, other)])
            if told.state.ended is None:
                _try(told, source, what)
        gone = [event.worker_id for event in told.all if isinstance(event, WorkerGone)]
        joined = [event.worker_id for event in told.all if isinstance(event, WorkerJoined)]
        assert len(gone) == len(set(gone)), "who has gone has gone once"
        assert len(joined) == len(set(joined)), "who has joined has joined once"


def _try(told: Told, source: str, message: object) -> None:
    from unisono.core.errors import ProtocolError

    try:
        told.says(source, message)
    except ProtocolError:
        return


@pytest.mark.parametrize("what", ["one worker", "no worker"])
def test_what_has_happened_is_found_without_a_look_at_all_workers(what: str) -> None:
    def calls(num_workers: int) -> int:
        told = trains(num_workers)
        before = told.state
        after, *_ = step(before, Said(AGENT, WorkerExit(worker_id="w1", exit_code=-9)), 1.0)
        before = msgspec.structs.replace(before, workers=Unvisited(before.workers))
        after = msgspec.structs.replace(after, workers=Unvisited(after.workers))
        touched: Sequence[str] = ["w1"] if what == "one worker" else []
        with counting() as found:
            happened = happenings(before, after, touched)
        assert len(happened) == len(touched)
        return len(found)

    assert calls(8) == calls(64)
