"""What the head decides about the calls of `run.barrier`, `run.all_gather` ... that workers make before they join."""

from __future__ import annotations

import pytest

from tests.pure.test_membership import AGENT, Story, info
from unisono.cluster.head.versions import HeadMemory
from unisono.core.errors import ProtocolError
from unisono.core.messages import Hello, Ready, TalkAnswer, TalkCall, TalkDone, WorkerExit
from unisono.membership.roster import resumed
from unisono.membership.talk_rules import MAX_BYTES

BARRIER, BROADCAST, GATHER, FIRST = "run.barrier", "run.broadcast", "run.all_gather", "run.main_first"


class Talk(Story):
    """Workers that are up, and have not reached the training loop."""

    def __init__(self, num_workers: int = 3, **policy: int) -> None:
        super().__init__(num_workers, **policy)
        self.heard: dict[str, list[TalkAnswer]] = {}
        self.starts(*self.agent(num_workers))

    def starts(self, *worker_ids: str) -> None:
        for worker_id in worker_ids:
            self.says(worker_id, Hello(info=info(worker_id), fingerprint={"torch": "2"}))

    def calls(self, worker_id: str, kind: str, value: bytes = b"", number: int = 0) -> dict[str, TalkAnswer]:
        """A worker comes to a call; returns who is answered."""
        return self.tells(worker_id, TalkCall(number=number, kind=kind, value=value))

    def tells(self, source: str, message: TalkCall | TalkDone | WorkerExit | Ready) -> dict[str, TalkAnswer]:
        self.says(source, message)
        return self.answers()

    def is_killed(self, worker_id: str) -> dict[str, TalkAnswer]:
        return self.tells(AGENT, WorkerExit(worker_id=worker_id, exit_code=-9))

    def answers(self) -> dict[str, TalkAnswer]:
        found = {worker_id: self.sent(worker_id, TalkAnswer) for worker_id in self.state.workers}
        return {worker_id: answers[0] for worker_id, answers in found.items() if answers}


def result(*values: bytes, number: int = 0) -> TalkAnswer:
    return TalkAnswer(number=number, values=list(values))


def first(number: int = 0) -> TalkAnswer:
    return TalkAnswer(number=number, is_first=True)


def test_a_barrier_opens_when_all_workers_have_come() -> None:
    talk = Talk()
    assert talk.calls("w2", BARRIER) == {}
    assert talk.calls("w0", BARRIER) == {}
    assert talk.calls("w1", BARRIER) == dict.fromkeys(("w0", "w1", "w2"), result())


def test_a_barrier_waits_for_workers_that_are_still_being_started() -> None:
    talk = Talk()
    talk.agent(1, "agent1", primary=False, host="far")
    for worker_id in ("w0", "w1", "w2"):
        assert talk.calls(worker_id, BARRIER) == {}
    talk.starts("w3")
    assert set(talk.calls("w3", BARRIER)) == {"w0", "w1", "w2", "w3"}


def test_a_barrier_waits_until_there_are_as_many_workers_as_the_run_needs() -> None:
    talk = Talk(2, minimum=2, max_restarts=0)
    talk.calls("w0", BARRIER)
    assert talk.is_killed("w1") == {}
    talk.agent(1, "agent1", primary=False, host="far")
    talk.starts("w2")
    assert set(talk.calls("w2", BARRIER)) == {"w0", "w2"}


def test_a_gather_gives_the_values_by_the_order_of_the_workers() -> None:
    talk = Talk()
    talk.calls("w2", GATHER, b"2")
    talk.calls("w0", GATHER, b"0")
    assert talk.calls("w1", GATHER, b"1") == dict.fromkeys(("w0", "w1", "w2"), result(b"0", b"1", b"2"))


def test_a_broadcast_is_that_of_the_first_worker_which_waits_for_nobody() -> None:
    talk = Talk()
    assert talk.calls("w1", BROADCAST, b"1") == {}
    assert talk.calls("w0", BROADCAST, b"0") == {"w0": result(b"0"), "w1": result(b"0")}
    assert talk.calls("w2", BROADCAST, b"2") == {"w2": result(b"0")}


def test_when_the_first_worker_is_lost_the_broadcast_is_that_of_the_next() -> None:
    talk = Talk()
    talk.calls("w1", BROADCAST, b"1")
    assert talk.is_killed("w0") == {"w1": result(b"1")}


def test_one_worker_runs_the_block_and_the_others_wait_for_that() -> None:
    talk = Talk()
    assert talk.calls("w1", FIRST) == {}
    assert talk.calls("w0", FIRST) == {"w0": first()}
    assert talk.calls("w2", FIRST) == {}
    assert talk.tells("w0", TalkDone(number=0)) == {"w1": result(), "w2": result()}


def test_when_the_worker_in_the_block_is_lost_the_next_one_runs_it() -> None:
    talk = Talk()
    talk.calls("w1", FIRST)
    talk.calls("w0", FIRST)
    assert talk.is_killed("w0") == {"w1": first()}
    assert talk.calls("w2", FIRST) == {}
    assert talk.is_killed("w1") == {"w2": first()}
    assert talk.tells("w2", TalkDone(number=0)) == {}
    talk.starts("w3")
    assert talk.calls("w3", FIRST) == {"w3": result()}


def test_when_the_block_raises_in_one_worker_the_next_one_runs_it() -> None:
    """Also if the script has caught the error and goes on."""
    talk = Talk(2)
    talk.calls("w0", FIRST)
    talk.calls("w1", FIRST)
    assert talk.tells("w0", TalkDone(number=0, ok=False)) == {"w1": first()}
    assert talk.calls("w0", BARRIER, number=1) == {}
    assert talk.tells("w1", TalkDone(number=0)) == {}
    assert set(talk.calls("w1", BARRIER, number=1)) == {"w0", "w1"}


def test_what_a_worker_says_about_a_block_that_is_not_its_own_does_not_count() -> None:
    talk = Talk(2)
    talk.calls("w0", FIRST)
    talk.calls("w1", FIRST)
    assert talk.tells("w1", TalkDone(number=0)) == {}
    assert talk.tells("w1", TalkDone(number=7)) == {}
    assert talk.tells("w0", TalkDone(number=0)) == {"w1": result()}


def test_a_worker_that_is_lost_at_a_barrier_is_replaced_there() -> None:
    talk = Talk()
    talk.calls("w0", GATHER, b"0")
    talk.calls("w1", GATHER, b"1")
    talk.is_killed("w1")
    assert talk.calls("w2", GATHER, b"2") == {}, "the replacement is not there"
    talk.starts("w3")
    assert talk.calls("w3", GATHER, b"3") == dict.fromkeys(("w0", "w2", "w3"), result(b"0", b"2", b"3"))


def test_a_barrier_opens_when_the_worker_that_it_waits_for_is_lost_and_not_replaced() -> None:
    talk = Talk(2, max_restarts=0)
    talk.calls("w0", BARRIER)
    assert talk.is_killed("w1") == {"w0": result()}


def test_a_replacement_gets_what_the_others_have_got() -> None:
    talk = Talk(2)
    talk.calls("w0", BROADCAST, b"0")
    talk.calls("w1", BROADCAST, b"1")
    for worker_id in ("w0", "w1"):
        talk.calls(worker_id, GATHER, worker_id.encode(), number=1)
    for worker_id in ("w0", "w1"):
        talk.tells(worker_id, Ready(phase=0))
    talk.hold()
    talk.is_killed("w0")
    talk.starts("w2")
    assert talk.calls("w2", BROADCAST, b"2") == {"w2": result(b"0")}
    assert talk.calls("w2", GATHER, b"w2", number=1) == {"w2": result(b"w0", b"w1", number=1)}


def test_the_next_head_knows_the_calls() -> None:
    talk = Talk(2)
    talk.calls("w0", BROADCAST, b"\xff\x00")
    talk.calls("w0", FIRST, number=1)
    talk.state = resumed(HeadMemory.decode(HeadMemory(talk.state, 0.0, "x").encode()).state, 2, talk.now)
    assert talk.calls("w1", BROADCAST, b"1") == {"w1": result(b"\xff\x00")}
    assert talk.calls("w0", FIRST, number=1) == {"w0": first(1)}, "the answer may have been lost with the head"
    assert talk.calls("w1", FIRST, number=1) == {}
    assert talk.tells("w0", TalkDone(number=1)) == {"w1": result(number=1)}


def test_a_call_that_is_repeated_counts_once() -> None:
    talk = Talk(2)
    talk.calls("w0", GATHER, b"0")
    assert talk.calls("w0", GATHER, b"0") == {}
    assert talk.calls("w1", GATHER, b"1") == dict.fromkeys(("w0", "w1"), result(b"0", b"1"))


def test_workers_at_different_calls_are_told_so() -> None:
    talk = Talk(2)
    talk.calls("w0", BARRIER)
    answers = talk.calls("w1", GATHER, b"1")
    assert set(answers) == {"w1"}
    assert "the first call before run.steps is run.all_gather on worker w1" in answers["w1"].error
    assert "was run.barrier on another worker. All workers must call run.barrier, run.broadcast" in answers["w1"].error


@pytest.mark.parametrize("waits_first", [True, False])
def test_a_worker_that_goes_on_without_a_call_is_not_waited_for(waits_first: bool) -> None:
    """It will never make the call, so who waits for it would wait for ever."""
    talk = Talk(2)
    steps = [lambda: talk.calls("w0", BARRIER), lambda: talk.tells("w1", Ready(phase=0))]
    for step in steps if waits_first else reversed(steps):
        answers = step()
    assert set(answers) == {"w0"}
    assert "worker w1 (pid 1001) reached the training loop, or its end, without the first call" in answers["w0"].error
    assert talk.tells("w1", Ready(phase=0)) == {}, "told once"


def test_a_call_of_which_the_members_of_a_training_know_nothing_ends_one_worker_only() -> None:
    talk = Talk(2)
    for worker_id in ("w0", "w1"):
        talk.tells(worker_id, Ready(phase=0))
    talk.hold()
    talk.is_killed("w1")
    talk.hold()
    talk.starts("w2")
    assert "reached the training loop" in talk.calls("w2", BARRIER)["w2"].error
    assert talk.ended is None


def test_values_have_a_limit_together() -> None:
    talk = Talk(2)
    talk.calls("w0", BROADCAST, bytes(MAX_BYTES - 10))
    assert talk.calls("w1", BROADCAST)["w1"].values == [bytes(MAX_BYTES - 10)]
    talk.calls("w0", GATHER, bytes(10), number=1)
    refused = talk.calls("w1", GATHER, bytes(1), number=1)["w1"].error
    assert refused.startswith("the values that were given to run.broadcast and run.all_gather before run.steps have")
    assert "All workers must" not in refused


def test_a_worker_cannot_leave_out_a_call() -> None:
    talk = Talk(1)
    with pytest.raises(ProtocolError, match="makes call 1 but has the results of 0"):
        talk.calls("w0", BARRIER, number=1)


def test_who_trains_has_no_call_before_the_training() -> None:
    talk = Talk(1)
    talk.tells("w0", Ready(phase=0))
    with pytest.raises(ProtocolError, match="is admitted and may not send TalkCall"):
        talk.calls("w0", BARRIER)
