"""What the head decides about evaluators, and about the evaluations that they compute beside the training."""

from __future__ import annotations

import msgspec
import pytest

from tests.pure.test_membership import AGENT, Story, info
from unisono.decisions.membership import next_deadline, routine_of_many
from unisono.decisions.membership.evaluators import MOST_TRIES
from unisono.decisions.membership.roster import EvaluatorStage, resumed
from unisono.head.memory import Memory
from unisono.messages import (
    AgentHello,
    Beat,
    BeatOf,
    Drain,
    Ended,
    EvaluationAnswer,
    EvaluationDone,
    EvaluationEnded,
    EvaluationsOpen,
    EvaluationWanted,
    Evict,
    Failed,
    Finished,
    Hello,
    Lost,
    Ready,
    Start,
    TalkAnswer,
    TalkCall,
    WorkerExit,
)

TOTALS = b"the totals"


def wanted(number: int = 0, step: int = 5) -> EvaluationWanted:
    return EvaluationWanted(number=number, phases=1, step=step, samples=10, batch_size=2, address="lab", port=99)


class Evaluating(Story):
    """A run that trains, and has evaluators that follow it."""

    def __init__(self, num_workers: int = 2, num_evaluators: int = 1, **policy: int | float | bool) -> None:
        super().__init__(num_workers, **policy)
        hello = AgentHello(host="lab", pid=1, num_workers=num_workers, num_evaluators=num_evaluators, primary=True)
        self.says(AGENT, hello)
        self.arrive(*(f"w{number}" for number in range(num_workers)))
        self.hold()
        for number in range(num_evaluators):
            self.follows(f"e{number}")

    def follows(self, worker_id: str, **differs: str) -> None:
        self.says(worker_id, Hello(info=info(worker_id), fingerprint={"torch": "2", **differs}))
        if self.state.evaluators[worker_id].is_alive:
            self.says(worker_id, Ready(phase=0))

    def asks(self, message: EvaluationWanted, worker_id: str = "w0") -> bool:
        """Returns whether an evaluator does it."""
        self.says(worker_id, message)
        (answer,) = self.sent(worker_id, EvaluationAnswer)
        assert answer.number == message.number
        return answer.is_taken

    def orders(self) -> dict[str, list[int]]:
        """Who has just got which orders."""
        found = {e: [each.number for each in self.sent(e, EvaluationWanted)] for e in self.state.evaluators}
        return {evaluator: numbers for evaluator, numbers in found.items() if numbers}

    def news(self) -> dict[str, list[bytes]]:
        """Whom the head has just told that an evaluation is over."""
        found = {w: [each.totals for each in self.sent(w, EvaluationEnded)] for w in self.state.workers}
        return {worker: totals for worker, totals in found.items() if totals}

    def stage(self, worker_id: str) -> EvaluatorStage:
        return self.state.evaluators[worker_id].stage

    def dies(self, worker_id: str) -> None:
        self.says(AGENT, WorkerExit(worker_id=worker_id, exit_code=-9))


def test_evaluators_are_no_members() -> None:
    story = Evaluating(2, 2)
    assert story.state.members == ("w0", "w1")
    assert set(story.state.evaluators) == {"e0", "e1"}
    assert story.stage("e1") is EvaluatorStage.FOLLOWING
    story.dies("e0")
    assert story.state.generation == 1, "the members have nothing to do with it"
    assert story.sent(AGENT, Start)[0].worker_ids == ["e2"]


def test_the_run_begins_and_ends_without_waiting_for_them() -> None:
    story = Story(1)
    story.says(AGENT, AgentHello(host="lab", pid=1, num_workers=1, num_evaluators=1, primary=True))
    story.arrive("w0")
    assert story.state.members == ("w0",)
    story.hold()
    story.says("e0", Hello(info=info("e0"), fingerprint={"torch": "2"}))
    story.says("w0", Failed(error="E", traceback="T"))
    assert story.ended is not None
    assert story.sent("e0", Ended) == [story.ended]


def test_without_an_evaluator_the_members_compute_it_at_once() -> None:
    assert not Evaluating(2, 0).asks(wanted())


def test_an_evaluator_does_one_after_the_other_and_all_members_get_the_totals() -> None:
    story = Evaluating(2, 1)
    assert story.asks(wanted(0))
    assert story.orders() == {"e0": [0]}
    assert story.asks(wanted(1))
    assert story.orders() == {}
    story.says("e0", EvaluationDone(number=0, totals=TOTALS))
    assert story.news() == {"w0": [TOTALS], "w1": [TOTALS]}
    assert story.orders() == {"e0": [1]}
    story.says("e0", EvaluationDone(number=0, totals=TOTALS))  # again, over a new connection
    assert story.news() == {}


def test_two_evaluators_work_at_the_same_time() -> None:
    story = Evaluating(2, 2)
    assert [story.asks(wanted(0)), story.orders()] == [True, {"e0": [0]}]
    assert [story.asks(wanted(1)), story.orders()] == [True, {"e1": [1]}]


def test_an_evaluation_waits_for_an_evaluator_that_is_still_being_started() -> None:
    story = Evaluating(2, 0)
    story.says("agent1", AgentHello(host="far", pid=1, num_workers=0, num_evaluators=1))
    assert story.asks(wanted())
    assert story.orders() == {}
    story.follows("e0")
    assert story.orders() == {"e0": [0]}


def test_a_member_that_asks_in_place_of_a_lost_one_gets_the_same_answer() -> None:
    """The others may know the first answer already; the models come from the one that lives."""
    story = Evaluating(3, 1)
    assert story.asks(wanted())
    story.dies("w0")
    assert story.asks(wanted(), "w1")
    assert story.state.evaluations[0].asker == "w1"
    assert story.orders() == {"e0": [0]}


def test_an_evaluation_of_a_lost_evaluator_is_done_by_the_next_one() -> None:
    story = Evaluating(2, 2)
    story.asks(wanted())
    story.dies("e0")
    assert story.orders() == {"e1": [0]}
    story.says("e1", EvaluationDone(number=0, totals=TOTALS))
    assert set(story.news()) == {"w0", "w1"}


def test_an_evaluation_that_costs_evaluators_is_left_to_the_members() -> None:
    story = Evaluating(2, MOST_TRIES + 1)
    story.asks(wanted())
    for number in range(MOST_TRIES):
        assert story.news() == {}
        story.dies(f"e{number}")
    assert story.news() == {"w0": [b""], "w1": [b""]}
    assert story.orders() == {}


def test_without_evaluators_and_without_a_source_the_members_compute_it() -> None:
    alone = Evaluating(2, 1, max_restarts=0)
    alone.asks(wanted())
    alone.dies("e0")
    assert alone.news() == {"w0": [b""], "w1": [b""]}
    lost = Evaluating(2, 1)
    lost.asks(wanted(0), "w0")
    lost.asks(wanted(1), "w0")
    lost.dies("w0")
    assert lost.news() == {"w1": [b""]}, "nobody has begun evaluation 1, and nobody is left who gives the models"
    lost.says("e0", EvaluationDone(number=0, totals=TOTALS))
    assert lost.news() == {"w1": [TOTALS]}, "of evaluation 0 the evaluator has the models perhaps"


def test_an_evaluator_says_that_it_cannot_do_it() -> None:
    story = Evaluating(2, 1)
    story.asks(wanted())
    story.says("e0", EvaluationDone(number=0, error="no such file"))
    assert "no such file; the members compute it" in story.reason
    assert story.news() == {"w0": [b""], "w1": [b""]}
    assert story.stage("e0") is EvaluatorStage.FOLLOWING


@pytest.mark.parametrize("is_open", [False, True])
def test_newcomers_wait_for_evaluations_and_evaluations_do_not_begin_while_newcomers_wait(is_open: bool) -> None:
    """A newcomer would lack the models of that step, and must not wait for one evaluation after the other."""
    story = Evaluating(2, 1, maximum=3)
    story.asks(wanted(0))
    story.agent(1, "agent1", primary=False)
    story.arrive("w2")
    assert story.state.generation == 1
    assert not story.asks(wanted(1)), "a newcomer waits"
    if is_open:
        story.says("e0", EvaluationDone(number=0, error="E"))
        assert story.state.generation == 1
        story.says("w1", EvaluationsOpen(numbers=[], below=2))
    else:
        story.says("e0", EvaluationDone(number=0, totals=TOTALS))
    assert story.state.members == ("w0", "w1", "w2")
    assert not story.asks(wanted(2)), "the newcomer is not in yet"
    story.hold()
    assert story.asks(wanted(3))


def test_a_member_that_was_away_is_told_again_until_all_know_the_totals() -> None:
    story = Evaluating(2, 1)
    story.asks(wanted())
    story.says("e0", EvaluationDone(number=0, totals=TOTALS))
    story.says("w1", Hello(info=info("w1"), fingerprint={"torch": "2"}, generation=1))
    assert story.news() == {"w1": [TOTALS]}
    story.says("w1", EvaluationsOpen(numbers=[], below=1))
    story.says("w1", Hello(info=info("w1"), fingerprint={"torch": "2"}, generation=1))
    assert story.news() == {}


def test_what_is_still_open_stays_open() -> None:
    story = Evaluating(2, 1)
    for number in range(2):
        story.asks(wanted(number))
        story.says("e0", EvaluationDone(number=number, error="E"))
    story.says("w0", EvaluationsOpen(numbers=[1], below=2))
    assert set(story.state.evaluations) == {1}
    story.says("w1", EvaluationsOpen(numbers=[], below=1))  # said before the second one was begun
    assert set(story.state.evaluations) == {1}


def test_an_evaluator_that_computes_otherwise_is_refused_and_not_replaced() -> None:
    """Its totals would have other bits, and nobody could see it."""
    story = Evaluating(2, 0)
    story.says("agent1", AgentHello(host="far", pid=1, num_workers=0, num_evaluators=1))
    story.follows("e0", torch="1")
    assert story.stage("e0") is EvaluatorStage.GONE
    assert "computes differently: torch is '1' and not '2': it is refused" in story.reason
    assert story.sent("agent1", Start) == []


def test_an_evaluator_that_hangs_is_ended() -> None:
    story = Evaluating(2, 1, hang_s=60.0)

    def beats(seconds_at: float, *, waiting: bool) -> None:
        beat = Beat(generation=0, phase=0, step=4, microbatch=0, progress=1, waiting=waiting, seconds_at=seconds_at)
        story.says("e0", beat)

    beats(100.0, waiting=True)
    assert story.stage("e0") is EvaluatorStage.FOLLOWING
    story.asks(wanted())
    beats(50.0, waiting=False)
    assert story.stage("e0") is EvaluatorStage.FOLLOWING
    beats(70.0, waiting=False)
    assert story.stage("e0") is EvaluatorStage.GONE
    assert story.sent(AGENT, Evict)[0].worker_id == "e0"


def test_an_evaluator_whose_connection_does_not_come_back_is_lost() -> None:
    story = Evaluating(2, 1, reconnect_s=1.0)
    story.says("e0", Lost())
    due = next_deadline(story.state)
    assert due is not None
    assert due <= 1.0
    story.tick(0.5)
    assert story.stage("e0") is EvaluatorStage.FOLLOWING
    story.tick(1.5)
    assert story.stage("e0") is EvaluatorStage.GONE


def test_heartbeats_that_an_agent_reports_keep_an_evaluator_alive() -> None:
    story = Evaluating(2, 1, heartbeat_timeout_s=5.0, hang_s=60.0)
    beat = Beat(generation=0, phase=0, step=4, microbatch=0, progress=1, waiting=True, seconds_at=100.0)
    own = [BeatOf(worker_id=each, seconds_ago=0.0, beat=beat) for each in ("w0", "w1", "e0")]
    for now in range(1, 200):
        story.state, rest = routine_of_many(story.state, own, float(now))
        assert not rest
    story.tick(200.0)
    assert story.stage("e0") is EvaluatorStage.FOLLOWING
    story.asks(wanted())
    hangs = msgspec.structs.replace(own[2], beat=msgspec.structs.replace(beat, waiting=False))
    _, rest = routine_of_many(story.state, [hangs], 201.0)
    assert rest == (hangs,), "something follows from it"


def test_an_evaluator_whose_script_is_over_leaves_what_it_has_not_done() -> None:
    story = Evaluating(2, 1)
    story.asks(wanted())
    story.says("e0", Finished())
    assert story.news() == {"w0": [b""], "w1": [b""]}
    assert not story.asks(wanted(1))
    assert story.sent(AGENT, Start) == []


def test_a_machine_takes_its_evaluators_away() -> None:
    story = Evaluating(2, 0)
    story.says("agent1", AgentHello(host="far", pid=1, num_workers=0, num_evaluators=2))
    story.follows("e0")
    story.asks(wanted())
    story.says("agent1", Drain())
    assert {each.worker_id for each in story.sent("agent1", Evict)} == {"e0", "e1"}
    assert story.news() == {"w0": [b""], "w1": [b""]}
    assert story.sent("agent1", Start) == []


def test_an_evaluator_gets_the_results_of_calls_before_the_training() -> None:
    story = Story(2)
    story.says(AGENT, AgentHello(host="lab", pid=1, num_workers=2, num_evaluators=1, primary=True))
    for worker_id in ("w0", "w1", "e0"):
        story.says(worker_id, Hello(info=info(worker_id), fingerprint={"torch": "2"}))
    call = TalkCall(number=0, kind="run.gather", value=b"x")
    story.says("e0", call)
    assert story.sent("e0", TalkAnswer) == []
    story.says("w0", call)
    story.says("w1", call)
    assert story.sent("e0", TalkAnswer) == [TalkAnswer(number=0, values=[b"x", b"x"])], "it is not gathered from"


def test_a_head_that_follows_knows_what_is_under_way() -> None:
    story = Evaluating(2, 1)
    story.asks(wanted())
    memory = Memory(story.state, 0.0, "")
    story.state = resumed(Memory.decode(memory.encode()).state, 2, 0.0)
    story.says("e0", Hello(info=info("e0"), fingerprint={"torch": "2"}))
    assert story.orders() == {"e0": [0]}
    assert story.asks(wanted()), "the question is repeated, too"
    story.says("e0", EvaluationDone(number=0, totals=TOTALS))
    assert set(story.news()) == {"w0", "w1"}


def test_a_run_that_begins_again_counts_its_evaluations_anew() -> None:
    story = Evaluating(1, 1)
    story.asks(wanted())
    story.dies("w0")
    story.arrive("w1")
    story.hold()
    assert story.asks(wanted(), "w1")
