"""Calls of the head's key-value store: every one of them ends."""

from __future__ import annotations

import pytest

from unisono.cluster.worker.storecalls import StoreCalls
from unisono.core.errors import PeerLost, RunStopped
from unisono.core.messages import MemberInfo, Notice, StoreAnswer, StoreCall

LONG_S = 240.0
INFO = MemberInfo(worker_id="w0", host="lab", pid=1, device="cpu")


def notice(generation: int, *, immediate: bool) -> Notice:
    return Notice(generation=generation, members=[INFO], immediate=immediate, reason=f"the reason for {generation}")


def wait(calls: StoreCalls, generation: int | None) -> StoreAnswer:
    return calls.call("wait", ["key"], [], 0, LONG_S, generation)


def test_a_call_returns_the_answer_with_its_number() -> None:
    def answer(call: StoreCall) -> None:
        calls.take_answer(StoreAnswer(call=call.call + 1, amount=13))  # of a call that nobody has made
        calls.take_answer(StoreAnswer(call=call.call, amount=12))

    calls = StoreCalls(answer)
    assert wait(calls, 1).amount == 12


def test_a_call_for_a_generation_that_is_lost_ends_and_one_for_the_next_does_not() -> None:
    def lose(call: StoreCall) -> None:
        calls.take_notice(notice(call.generation + 1, immediate=True))

    def answer(call: StoreCall) -> None:
        calls.take_notice(notice(2, immediate=True))
        calls.take_answer(StoreAnswer(call=call.call, amount=1))

    calls = StoreCalls(lose)
    with pytest.raises(PeerLost, match="the reason for 2"):
        wait(calls, 1)
    calls = StoreCalls(answer)
    assert wait(calls, 2).amount == 1


def test_a_call_that_is_made_after_the_loss_is_not_sent() -> None:
    """Also where a planned generation was announced since then."""
    calls = StoreCalls(lambda call: pytest.fail("nobody would answer"))
    calls.take_notice(notice(2, immediate=True))
    calls.take_notice(notice(3, immediate=False))
    with pytest.raises(PeerLost, match="the reason for 2"):
        wait(calls, 1)


def test_a_planned_generation_ends_no_call() -> None:
    def answer(call: StoreCall) -> None:
        calls.take_notice(notice(2, immediate=False))
        calls.take_answer(StoreAnswer(call=call.call, amount=1))

    calls = StoreCalls(answer)
    assert wait(calls, 1).amount == 1


def test_the_end_of_the_run_ends_all_calls() -> None:
    calls = StoreCalls(lambda call: calls.fail_all(RunStopped("the run is over")))
    with pytest.raises(RunStopped, match="the run is over"):
        wait(calls, None)
