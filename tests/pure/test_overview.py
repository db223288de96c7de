"""The overview of a run: folded from its events, wherever they begin and however often they are told."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.test_journal import evaluation, step
from unisono.core.events import (
    Event,
    MachineGone,
    MachineJoined,
    MachineUsed,
    MembershipChanged,
    Problem,
    RunEnded,
    RunStarted,
    Seconds,
    WorkerGone,
    WorkerJoined,
    WorkerLate,
    WorkerTimes,
    WorkerUse,
)
from unisono.record.overview import CURVE_POINTS, RECENT, Overview, OverviewBuilder

START = 1_700_000_000.0


def folded(*events: Event, now: float = START) -> Overview:
    builder = OverviewBuilder()
    for event in events:
        builder.take(event)
    return builder.overview(now)


def started(done: int = 0) -> RunStarted:
    return RunStarted(time=START, run_id="r1", directory="runs/one", step=done, recipe={})


def ended(ok: bool = True, reason: str = "finished") -> RunEnded:
    return RunEnded(time=START + 100, ok=ok, reason=reason, digests={})


def joined(worker_id: str, generation: int = 1, **changes: Any) -> WorkerJoined:
    values: dict[str, Any] = {
        "time": START, "worker_id": worker_id, "host": "red", "device": "cpu", "pid": 7, "generation": generation,
        "step": 0, "reason": "all are ready",
    }  # fmt: skip
    return WorkerJoined(**{**values, **changes})


def gone(worker_id: str, how: str = "lost", **changes: Any) -> WorkerGone:
    values: dict[str, Any] = {
        "time": START + 5, "worker_id": worker_id, "host": "red", "how": how, "reason": "was killed by signal 9",
        "step": 4,
    }  # fmt: skip
    return WorkerGone(**{**values, **changes})


def members(generation: int, *worker_ids: str, reason: str = "") -> MembershipChanged:
    return MembershipChanged(time=START, generation=generation, worker_ids=worker_ids, reason=reason)


def late(worker_id: str, seconds: float = 3.0) -> WorkerLate:
    return WorkerLate(time=START + 9, worker_id=worker_id, step=1, microbatch=2, seconds=seconds)


def used(host: str, at: float = START, **workers: WorkerUse) -> MachineUsed:
    return MachineUsed(
        time=at, host=host, cores=1.5, num_cores=4, memory_bytes=1, memory_total_bytes=2, sent_bytes_per_s=0.0,
        received_bytes_per_s=0.0, workers=workers,
    )  # fmt: skip


def texts(overview: Overview) -> list[str]:
    return [each.text for each in overview.recent]


def states(overview: Overview) -> dict[str, str]:
    return {worker.worker_id: worker.state for worker in overview.workers}


# -- the run -----------------------------------------------------------------------------------------


def test_a_run_without_events_is_starting_and_its_overview_is_json() -> None:
    found = OverviewBuilder("r1", "runs/one", "train.py", START).overview(START + 2)
    assert (found.state, found.step, found.loss, found.started, found.time) == ("starting", -1, None, START, START + 2)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Overview) == found


def test_numbers_are_means_of_the_last_steps() -> None:
    steps = [step(number, num_steps=40, samples=10, seconds=Seconds(compute=0.2, other=0.3)) for number in range(20)]
    found = folded(started(), *steps)
    assert found.state == "training"
    assert (found.steps_per_s, found.samples_per_s, found.left_s) == pytest.approx((2.0, 20.0, 10.0))
    assert (found.step, found.num_steps, found.loss) == (19, 40, steps[-1].loss)


def test_the_time_that_is_left_is_unknown_where_a_script_does_not_say_its_length() -> None:
    assert folded(step(3, num_steps=0)).left_s is None
    assert folded(step(3), ended()).left_s is None


@pytest.mark.parametrize(("loss", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_loss_that_is_no_number_is_named_and_stays_out_of_the_curve(loss: float, word: str) -> None:
    found = folded(step(0, loss=2.0), step(1, loss=loss, logs={"norm": math.nan, "lr": 0.5}))
    assert (found.loss, found.loss_is, len(found.curve), found.logs) == (None, word, 1, {"lr": 0.5})
    assert b"null" in msgspec.json.encode(found)


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        (ended(), "finished", ""),
        (ended(reason="stopped by the user"), "stopped", "stopped by the user"),
        (ended(False, "w1: KeyError: 3"), "failed", "w1: KeyError: 3"),
    ],
)
def test_an_end_says_how_and_why(end: RunEnded, state: str, reason: str) -> None:
    found = folded(started(), step(0), end, now=START + 500)
    assert (found.state, found.reason, found.ended) == (state, reason, START + 100)


def test_an_end_that_two_have_told_has_the_reason_of_either() -> None:
    words = RunEnded(ok=False, reason="w1 has failed: KeyError: 3", digests={})
    for pair in ((words, RunEnded(ok=False, reason="", digests={})), (RunEnded(ok=True, reason="", digests={}), words)):
        assert folded(step(0), *pair).reason == "w1 has failed: KeyError: 3"


def test_a_resumed_run_goes_on_from_its_checkpoint() -> None:
    first = [step(number, loss=1.0) for number in range(8)]
    again = [step(number, loss=0.5) for number in range(5, 7)]
    found = folded(started(), *first, evaluation(7, right=1), ended(reason="stopped"), started(5), *again)
    assert (found.state, found.step, found.ended, found.evaluation) == ("training", 6, 0.0, {})
    assert [(point.step, point.mean) for point in found.curve] == [
        *((number, 1.0) for number in range(5)),
        (5, 0.5),
        (6, 0.5),
    ]
    assert folded(started(5)).step == 4


def test_a_run_that_begins_again_forgets_the_steps_before() -> None:
    found = folded(started(), *map(step, range(4)), started(), step(0))
    assert (found.step, len(found.curve)) == (0, 1)


def test_without_steps_for_long_the_run_waits() -> None:
    builder = OverviewBuilder()
    builder.take(members(1, "w0"))
    builder.take(step(0, time=START, workers={"w0": WorkerTimes()}))
    assert [builder.overview(START + after).state for after in (1, 4, 6)] == ["training", "training", "waiting"]
    builder.take(step(1, time=START + 7, seconds=Seconds(compute=7.0), workers={"w0": WorkerTimes()}))
    assert [builder.overview(START + 7 + after).state for after in (6, 34, 36)] == ["training", "waiting", "waiting"]


# -- the curve ---------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=1500), st.integers(0, 10**6))
def test_the_curve_has_few_points_and_keeps_extremes_and_mean(losses: list[float], first: int) -> None:
    found = folded(*(step(first + number, loss=loss) for number, loss in enumerate(losses))).curve
    assert len(found) <= CURVE_POINTS
    assert found[0].step == first
    assert [point.step for point in found] == sorted({point.step for point in found})
    assert (min(point.low for point in found), max(point.high for point in found)) == (min(losses), max(losses))
    ends = [*(point.step - first for point in found[1:]), len(losses)]
    for point, end in zip(found, ends, strict=True):
        own = losses[point.step - first : end]
        assert (point.low, point.high) == (min(own), max(own))
        assert point.mean == pytest.approx(sum(own) / len(own), abs=1e-3)


@given(st.lists(st.integers(0, 10**9), unique=True, max_size=600))
def test_the_curve_bears_steps_that_were_not_told(numbers: list[int]) -> None:
    found = folded(*(step(number, loss=1.0) for number in sorted(numbers))).curve
    assert len(found) <= min(CURVE_POINTS, len(numbers))
    assert {point.step for point in found} <= set(numbers)


# -- workers -----------------------------------------------------------------------------------------


def test_a_worker_has_its_share_and_what_its_time_goes_to() -> None:
    times = {
        "w0": WorkerTimes(leaves=6, last=Seconds(compute=0.3, update=0.1)),
        "w1": WorkerTimes(leaves=2, last=Seconds(compute=0.1, waiting=0.3), waits_for="w0", waits_s=0.3),
    }
    found = folded(members(1, "w1", "w0"), *(step(number, workers=times) for number in range(9)))
    first, second = found.workers
    assert [(worker.worker_id, worker.rank, worker.share) for worker in found.workers] == [
        ("w1", 0, 0.25),
        ("w0", 1, 0.75),
    ]
    assert (first.waits_for, second.waits_for) == ("w0", "")
    assert msgspec.structs.astuple(first.seconds) == pytest.approx(msgspec.structs.astuple(times["w1"].last))


def test_the_means_are_of_one_generation() -> None:
    """A share of before would be wrong for the members of now."""
    both = {"w0": WorkerTimes(leaves=4), "w1": WorkerTimes(leaves=4)}
    alone = {"w0": WorkerTimes(leaves=8)}
    found = folded(*(step(n, workers=both) for n in range(9)), step(9, workers=alone, generation=2))
    assert [(worker.worker_id, worker.share) for worker in found.workers] == [("w0", 1.0)]


def test_the_members_of_a_step_are_the_workers_where_nothing_else_is_known() -> None:
    found = folded(step(4, workers={"w3": WorkerTimes(), "w1": WorkerTimes()}))
    assert [(worker.worker_id, worker.rank, worker.state) for worker in found.workers] == [
        ("w3", 0, "training"),
        ("w1", 1, "training"),
    ]


def test_who_is_late_is_named_until_a_step_is_done() -> None:
    builder = OverviewBuilder()
    for event in (members(1, "w0", "w1"), step(0), late("w1"), late("w1", 7.0)):
        builder.take(event)
    found = builder.overview(START)
    assert states(found) == {"w0": "waiting", "w1": "late"}
    assert found.state == "waiting"
    assert found.reason == "w1 has made no progress for 7 s at step 1, micro-batch 2; the others wait for it"
    assert len([text for text in texts(found) if "no progress" in text]) == 1
    builder.take(step(1))
    assert (builder.overview(START).state, states(builder.overview(START))) == (
        "training",
        {"w0": "training", "w1": "training"},
    )


def test_a_paused_run_says_what_it_lacks() -> None:
    found = folded(step(0), members(2, "w0", reason="w1 was lost; paused: 1 of at least 2 workers"))
    assert (found.state, found.reason, states(found)) == ("paused", "1 of at least 2 workers", {"w0": "waiting"})


def test_a_worker_joins_trains_and_is_shown_for_a_while_after_it_has_gone() -> None:
    events = [joined("w0"), joined("w1", host="blue", device="cuda:1")]
    assert states(folded(*events)) == {"w0": "joining", "w1": "joining"}
    events += [members(1, "w0", "w1"), step(0)]
    assert states(folded(*events)) == {"w0": "training", "w1": "training"}
    lost = folded(*events, gone("w1", host="blue"), members(2, "w0"), now=START + 10)
    assert states(lost) == {"w0": "training", "w1": "lost"}
    assert (lost.workers[1].rank, lost.workers[1].host, lost.workers[1].device) == (None, "blue", "cuda:1")
    assert states(folded(*events, gone("w1"), members(2, "w0"), now=START + 600)) == {"w0": "training"}
    assert states(folded(*events, gone("w1"), members(2, "w0"), joined("w1", 3), members(3, "w0", "w1"))) == {
        "w0": "training",
        "w1": "training",
    }


def test_what_a_process_uses_is_a_part_of_its_worker() -> None:
    found = folded(members(1, "w0", "w1"), used("red", w1=WorkerUse(cores=0.9, memory_bytes=10**9)))
    assert [(worker.cores, worker.memory_bytes) for worker in found.workers] == [(0.0, 0), (0.9, 10**9)]
    assert found.workers[1].host == "red"


def test_a_machine_that_has_gone_or_is_silent_is_left_out() -> None:
    here = MachineJoined(time=START, agent_id="a1", host="red", num_workers=2)
    away = MachineGone(time=START, agent_id="a1", host="red", reason="its connection closed")
    assert [each.host for each in folded(here, used("red"), used("blue")).machines] == ["blue", "red"]
    assert [each.host for each in folded(here, used("red"), used("blue"), away).machines] == ["blue"]
    assert [each.host for each in folded(used("red"), used("blue", START + 300), now=START + 300).machines] == ["blue"]
    assert [each.host for each in folded(used("red"), ended(), now=START + 900).machines] == ["red"]


# -- sentences ---------------------------------------------------------------------------------------


def test_sentences_say_who_came_who_left_and_why() -> None:
    found = folded(
        started(),
        *(joined(f"w{number}") for number in range(3)),
        members(1, "w0", "w1", "w2", reason="all are ready"),
        gone("w1"),
        members(2, "w0", "w2", reason="w1 was lost"),
        joined("w3", 3, step=5, reason="instead of w1", host="blue"),
        members(3, "w0", "w2", "w3"),
        gone("w2", "left", reason="unisono scale"),
        gone("w0", "finished"),
    )
    assert texts(found) == [
        "the run begins",
        "w0, w1 and w2 join: all are ready",
        "w1 on red was lost after step 4: was killed by signal 9",
        "w3 joins on blue at step 5: instead of w1",
        "w2 on red has left after step 4: unisono scale",
    ]
    assert [each.level for each in found.recent] == ["info", "info", "warning", "info", "info"]


def test_a_generation_is_said_where_nobody_has_said_who_came_or_left() -> None:
    found = folded(members(1, "w0", "w1"), members(2, "w0", reason="w1 was lost"))
    assert texts(found) == ["generation 1 with 2 workers", "generation 2 with 1 worker: w1 was lost"]


def test_a_generation_is_not_said_twice_whichever_comes_first() -> None:
    first = [joined("w0"), joined("w1"), members(1, "w0", "w1")]
    orders: list[list[Event]] = [
        [gone("w1"), members(2, "w0"), joined("w2", 3, reason="instead of w1"), members(3, "w0", "w2")],
        [members(2, "w0"), gone("w1"), members(3, "w0", "w2"), joined("w2", 3, reason="instead of w1")],
    ]
    for order in orders:
        said = texts(folded(*first, *order))
        assert not [text for text in said if text.startswith(("generation 2", "generation 3"))]
        assert len([text for text in said if text.startswith(("w1 on red was lost", "w2 joins on red"))]) == 2


def test_of_checkpoints_and_evaluations_the_newest_is_said() -> None:
    news = {"bytes": 2_500_000, "seconds": 0.25}
    found = folded(
        step(0, checkpoint={"step": 0, **news}), evaluation(1, right=3), step(1, checkpoint={"step": 1, **news}),
        evaluation(2, right=4.5, rows=[1, 2]),
    )  # fmt: skip
    assert texts(found) == ["checkpoint step-0000000001, 2.5 MB in 0.2 s", "evaluation at step 2: right 4.5"]
    assert (found.checkpoint, found.checkpoint_step, found.evaluation) == ("step-0000000001", 1, {"right": 4.5})


def test_an_evaluation_of_older_models_that_is_told_later_does_not_hide_that_of_the_newest() -> None:
    found = folded(*(step(number) for number in range(7)), evaluation(7, right=9), evaluation(3, right=5))
    assert texts(found) == ["evaluation at step 7: right 9"]
    assert found.evaluation == {"right": 9}


def test_problems_are_said_with_their_level() -> None:
    found = folded(
        Problem(problem="nan", text="the loss is not a number at step 3", evidence="problems/1-nan.txt"),
        ended(False, "KeyError: 3"),
    )
    assert [(each.level, each.text) for each in found.recent] == [
        ("error", "the loss is not a number at step 3 (evidence: problems/1-nan.txt)"),
        ("error", "the run failed: KeyError: 3"),
    ]


def test_a_worker_that_has_gone_for_a_problem_is_said_once() -> None:
    problem = Problem(problem="crash", text="w1 was killed by signal 9", worker_id="w1")
    for order in ([problem, gone("w1")], [gone("w1"), problem]):
        assert texts(folded(joined("w0"), joined("w1"), members(1, "w0", "w1"), *order, members(2, "w0"))) == [
            "w0 and w1 join: all are ready",
            "w1 was killed by signal 9",
        ]


def test_workers_that_join_are_listed_in_their_order() -> None:
    names = ("w10", "w2", "w0")
    events = [joined(each, reason="the run begins") for each in names]
    for order in ([*events, started()], [started(), *events]):
        assert texts(folded(*order)) == ["w0, w2 and w10 join: the run begins"]


def test_only_the_last_sentences_are_kept() -> None:
    found = folded(*(Problem(problem="crash", text=f"problem {number}") for number in range(3 * RECENT)))
    assert texts(found) == [f"problem {number}" for number in range(2 * RECENT, 3 * RECENT)]


def test_sixty_four_workers_that_join_together_are_one_sentence() -> None:
    found = folded(*(joined(f"w{number}") for number in range(64)))
    assert texts(found) == ["64 workers (w0 ... w63) join: all are ready"]


def test_of_workers_that_come_and_go_for_months_the_newest_are_kept() -> None:
    builder = OverviewBuilder()
    builder.take(members(1, "w0"))
    for number in range(1, 1000):
        builder.take(joined(f"w{number}", time=START + number))
        builder.take(gone(f"w{number}", time=START + number))
    assert len(builder._workers) < 300
    assert set(states(builder.overview(START + 1000))) == {"w0", *(f"w{number}" for number in range(992, 1000))}
