"""What a run's story says afterwards: who took part, what interrupted it for how long, what its time was used for."""

from __future__ import annotations

import msgspec
import pytest

from unisono.cli.status import _words as words_of
from unisono.cluster.head.story import KEPT_S, Story, StoryState
from unisono.core.events import (
    CheckpointWritten,
    EvaluationFinished,
    Event,
    Interruption,
    MachineGone,
    MachineJoined,
    MembershipChanged,
    Note,
    RunEnded,
    RunStarted,
    Seconds,
    StepFinished,
    WorkerGone,
    WorkerJoined,
)
from unisono.record.asides import BALANCE_S, Asides
from unisono.record.interruptions import Interruptions
from unisono.record.overview import OverviewBuilder, Past

T = 1.79e9


def step(number: int, at: float, generation: int = 1, /, **changes: object) -> StepFinished:
    found = StepFinished(
        time=at, step=number, epoch=0, loss=1.0, weight=8.0, samples=8, digest="", num_steps=99, generation=generation,
        seconds=Seconds(compute=0.1), workers={}, logs={},
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


def change(generation: int, at: float, reason: str = "w1 was killed") -> MembershipChanged:
    return MembershipChanged(time=at, generation=generation, worker_ids=("w0",), reason=reason)


# -- interruptions -----------------------------------------------------------------------------------


def test_an_interruption_is_how_much_longer_a_step_took_than_steps_usually_do() -> None:
    found = Interruptions()
    found.change(change(1, T))
    assert [found.step(step(number, T + 0.5 * number)) for number in range(5)] == [None] * 5, "the run begins"
    found.change(change(2, T + 2.1))
    interruption = found.step(step(5, T + 4.0, 2))
    assert interruption == Interruption(time=T + 4.0, generation=2, step=5, seconds=1.5, reason="w1 was killed")
    assert found.step(step(6, T + 4.5, 2)) is None


def test_a_step_that_was_finished_before_the_members_moved_ends_no_interruption() -> None:
    found = Interruptions()
    for number in range(3):
        found.step(step(number, T + number))
    found.change(change(2, T + 2.5))
    assert found.step(step(3, T + 3, 1)) is None
    interruption = found.step(step(4, T + 7, 2))
    assert interruption is not None
    assert interruption.seconds == 3.0


def test_several_losses_before_the_next_step_are_one_interruption() -> None:
    found = Interruptions()
    for number in range(3):
        found.step(step(number, T + number))
    for generation, why in ((2, "w1 was killed"), (3, "w2 was killed")):
        found.change(change(generation, T + 2.5, why))
    interruption = found.step(step(3, T + 6, 3))
    assert interruption is not None
    assert (interruption.generation, interruption.reason) == (3, "w1 was killed; w2 was killed")


def test_a_loss_that_is_known_before_the_first_steps_are_is_an_interruption() -> None:
    """A worker writes a line as soon as a step is over, and the head hears of it some moments later."""
    found = Interruptions()
    for generation, why in ((1, "all are ready"), (2, "w1 was killed"), (3, "w2 joins")):
        found.change(change(generation, T + generation, why))
        found.begin()  # that the run begins is told as late
    assert [found.step(step(number, T + 0.5 * number)) for number in range(3)] == [None] * 3
    reasons = []
    for number, generation in ((3, 2), (4, 2), (5, 3), (6, 3)):
        interruption = found.step(step(number, T + number, generation))
        reasons.append(interruption.reason if interruption is not None else "")
    assert reasons == ["w1 was killed", "", "w2 joins", ""]


def test_a_head_that_follows_measures_an_interruption_that_began_before() -> None:
    found = Interruptions(last=T, usual_s=0.5)
    found.change(change(2, T + 1))
    interruption = found.step(step(7, T + 3, 2))
    assert interruption is not None
    assert interruption.seconds == 2.5


# -- asides ------------------------------------------------------------------------------------------


def test_what_a_step_tells_besides_its_result_is_told_as_events() -> None:
    asides = Asides()
    told = asides.of(
        step(7, T, checkpoint={"step": 6, "bytes": 100, "seconds": 0.5}, balance="w0 gets 3", warnings=["w1 differs"])
    )
    assert told == [
        CheckpointWritten(time=T, step=6, bytes=100, seconds=0.5),
        Note(time=T, about="balance", step=7, text="w0 gets 3"),
        Note(time=T, about="warning", step=7, text="w1 differs"),
    ]
    assert asides.of(step(8, T + 1)) == []


def test_the_balance_is_told_once_a_minute() -> None:
    asides = Asides()
    found = [asides.of(step(number, T + number, balance=f"plan {number}")) for number in range(130)]
    assert sum(map(len, found)) == 1 + int(129 // (BALANCE_S + 1))


# -- the head's story --------------------------------------------------------------------------------


def test_the_next_head_knows_what_was_told_last_and_how_long_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [T]
    monkeypatch.setattr("unisono.cluster.head.story.time.time", lambda: now[0])
    story = Story(StoryState(), "1")
    story.add([MachineJoined(agent_id="agent0", host="a", num_workers=2)], "all are ready")
    first = story.take()
    assert [event.time for event in first] == [T, T]
    assert story.take() == [], "it is told once"
    now[0] += KEPT_S + 1
    for number in range(4):
        story.take_line(step(number, T + 0.5 * number))
    story.add([change(2, 0.0)])
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(story.kept()), type=StoryState)
    assert [event.time for event in kept.told] == [now[0]], "what is older has arrived"
    following = Story(kept, "2")
    assert following.recent == list(kept.told)
    following.add([change(3, 0.0, "a is out of reach")])
    following.take_line(step(4, T + 10, 3))  # who has gone is told before what that has cost
    *_, interrupting, interruption = following.take()
    assert isinstance(interrupting, MembershipChanged)
    assert isinstance(interruption, Interruption)
    assert interruption.seconds == 10 - 1.5 - 0.5
    now[0] += KEPT_S + 1
    next_kept = following.kept()
    assert next_kept.told == (interruption,), "of interruptions, some are handed over however old they are"
    assert next_kept.interrupted_s == 0.0


def test_an_evaluation_is_a_part_of_the_story_with_the_number_of_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.cluster.head.story.time.time", lambda: T)
    story = Story(StoryState(), "1")
    found = EvaluationFinished(time=T, number=7, step=3, totals={"right": 5})
    story.take_line(found)
    assert story.recent == [*story.kept().told] == [found]
    assert not story.has_news, "it is passed on as it is"


def test_a_step_that_the_next_head_hears_again_tells_nothing_besides() -> None:
    """What a step tells besides its result is told when the heirs hold a version that has it."""
    saved = step(4, T, checkpoint={"step": 4}, number=4)
    story = Story(StoryState(), "1")
    story.take_line(saved)
    following = Story(story.kept(), "2")
    for each in (saved, step(5, T, checkpoint={"step": 5}, number=5)):
        following.take_line(each)
    assert [event.step for event in following.take() if isinstance(event, CheckpointWritten)] == [5]


def test_the_end_has_the_digests_that_the_workers_have_told() -> None:
    story = Story(StoryState(), "1")
    story.take_line(RunEnded(ok=True, reason="", digests={"model": "5f"}))
    story.add([RunEnded(ok=True, reason="finished", digests={}, step=7)])
    (end,) = [event for event in story.take() if isinstance(event, RunEnded)]
    assert (end.digests, end.step) == ({"model": "5f"}, 7)


def test_the_efficiency_is_computing_of_all_time() -> None:
    assert OverviewBuilder().overview(T).efficiency is None
    builder = OverviewBuilder()
    for number, means in enumerate((Seconds(), Seconds(compute=3.0, data=1.0), Seconds(compute=1.0, waiting=7.0))):
        builder.take(step(number, T, means=means))
    assert builder.overview(T).efficiency == round(4 / 12, 4)


# -- afterwards --------------------------------------------------------------------------------------

TOLD: list[Event] = [
    MachineJoined(time=T, agent_id="agent0", host="a", num_workers=2),
    WorkerJoined(
        time=T + 1, worker_id="w0", host="a", device="cpu", pid=7, generation=1, step=0, reason="the run begins"
    ),
    WorkerJoined(
        time=T + 1, worker_id="w1", host="a", device="cpu", pid=8, generation=1, step=0, reason="the run begins"
    ),
    RunStarted(time=T + 1, run_id="r1", directory="run", step=0, recipe={}),
    WorkerGone(time=T + 5, worker_id="w1", host="a", how="lost", reason="was killed", step=3),
    WorkerGone(time=T + 6, worker_id="w2", host="b", how="failed", reason="no such file", step=3),
    Interruption(time=T + 7, generation=2, step=4, seconds=1.5, reason="w1 was killed"),
    MachineJoined(time=T + 8, agent_id="agent1", host="b", num_workers=1),
    MachineGone(time=T + 9, agent_id="agent1", host="b", reason="b leaves"),
    RunEnded(time=T + 20, ok=False, reason="ended by SIGTERM", digests={}, step=9),
]


def folded(*run_ids: str, events: list[Event] = TOLD) -> OverviewBuilder:
    """One run after the other in one directory."""
    builder = OverviewBuilder(run_ids[-1])
    for run_id in run_ids:
        builder.go_on_as(run_id, 0.0)
        for event in events:
            builder.take(event)
    return builder


def test_who_took_part_what_interrupted_the_run_and_how_it_ended() -> None:
    builder = folded("r0", "r1")
    overview, past = builder.overview(T + 30), builder.past()
    assert (overview.ended, overview.reason) == (T + 20, "ended by SIGTERM")
    assert overview.interrupted_s == 1.5
    assert (len(past.workers), len(past.machines), len(past.interruptions)) == (6, 4, 2)
    past = past.of("r1")
    assert [each.gone for each in past.machines] == [0.0, T + 9]
    workers = {each.worker_id: each for each in past.workers}
    assert (workers["w0"].joined, workers["w0"].gone, workers["w0"].how) == (T + 1, T + 20, ""), "until the end"
    assert (workers["w1"].how, workers["w1"].why_gone, workers["w1"].last_step) == ("lost", "was killed", 3)
    assert not workers["w2"].joined
    (interrupted,) = past.interruptions
    assert (interrupted.time, interrupted.step, interrupted.seconds) == (T + 5, 4, 1.5)
    assert [each.worker_id for each in interrupted.changes] == ["w1", "w2"]


def test_a_worker_finishes_after_the_end_was_told() -> None:
    """A worker says the end before the head says that it has gone."""
    gone = WorkerGone(time=T + 21, worker_id="w0", host="a", how="finished", reason="", step=9)
    (worker,) = [each for each in folded("r1", events=[*TOLD, gone]).past().workers if each.worker_id == "w0"]
    assert (worker.gone, worker.how) == (T + 21, "finished")


def test_a_run_that_was_killed_with_all_its_processes_has_no_end() -> None:
    builder = folded("r1", events=TOLD[:-1])
    assert builder.overview(T + 30).ended == 0.0
    assert builder.past().workers[0].gone == 0.0
    builder.go_on_as("r2", T + 12)
    assert builder.past().workers[0].gone == T + 9, "when the run was heard of last"


def test_the_next_head_goes_on_with_what_has_interrupted_the_run() -> None:
    interruption = TOLD[6]
    assert isinstance(interruption, Interruption)
    builder = OverviewBuilder("r1", interrupted_s=35.5)
    for _ in range(3):
        builder.take(interruption)
    builder.take(msgspec.structs.replace(interruption, step=9))
    overview = builder.overview(T + 30)
    assert (len(overview.interruptions), overview.interrupted_s) == (4, 41.5)


def status_of(past: Past) -> dict[str, object]:
    return {
        "past_workers": msgspec.to_builtins(past.workers),
        "machines": msgspec.to_builtins(past.machines),
        "interruptions": [msgspec.to_builtins(each.measured) for each in past.interruptions],
    }


def test_an_account_in_words_is_short_and_says_why() -> None:
    shown = words_of(
        {
            "state": "failed", "reason": "ended by SIGTERM", "step": 9, "num_steps": 40, "loss": 0.5, "started": T,
            "ended": T + 20, "efficiency": 0.63, "interrupted_s": 1.5, "workers": [], **status_of(folded("r1").past()),
        }
    )  # fmt: skip
    first, second, third, *rest = shown
    assert (first, second) == ("failed: ended by SIGTERM", "10 of 40 steps, loss 0.5000")
    assert third.endswith("20 s; 63% of the workers' time was spent on computing; interrupted for 1.5 s in all")
    text = "\n".join(rest)
    assert "machine b came" in text
    assert "(b leaves)" in text
    assert "w1 on a came" in text
    assert "after step 3 (was killed)" in text
    assert "w2 on b never took part; failed" in text
    assert "for 1.50 s, in step 4: w1 was killed" in text
    assert max(map(len, shown)) < 160


def test_of_many_workers_the_newest_are_shown() -> None:
    one = msgspec.to_builtins(folded("r1").past().workers[0])
    many = [{**one, "worker_id": f"w{number}"} for number in range(1000)]
    shown = words_of({"state": "finished", "step": 3, "past_workers": many})
    assert len(shown) < 30
    assert any("980 workers before these" in line for line in shown)


def test_a_machine_without_workers_is_seen() -> None:
    use = {
        "cores": 3.5, "num_cores": 4, "memory_bytes": 5e9, "memory_total_bytes": 16e9, "sent_bytes_per_s": 1.2e6,
        "received_bytes_per_s": 3e5,
    }  # fmt: skip
    machines = [
        {"host": "a", "num_workers": 2, "state": "connected", "use": use},
        {"host": "b", "num_workers": 0, "state": "connected", "use": None},
    ]
    shown = words_of({"state": "training", "step": 3, "machines": machines})
    assert shown[-2] == (
        "machine a: 2 workers, 3.5 of 4 cores busy, 5.0 GB of 16 GB in use, 1.2 MB/s sent, 300 kB/s received"
    )
    assert shown[-1] == "machine b: no worker"


def test_status_names_the_evidence_of_what_went_wrong() -> None:
    problem = {"time": T, "kind": "problem", "problem": "nan", "text": "the loss is nan in step 3", "step": 3}
    events = [{"time": T, "kind": "start"}, {**problem, "evidence": "problems/nan-step3.txt"}, problem]
    first, second = (line for line in words_of({"state": "failed", "events": events}) if "nan" in line)
    assert first.startswith("nan 20")
    assert first.endswith(": the loss is nan in step 3 (evidence: problems/nan-step3.txt)")
    assert second.endswith(": the loss is nan in step 3")
