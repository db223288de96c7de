"""What a head keeps of a run for those who look, where it does not see the run's directory."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, cast

import msgspec
import pytest

from unisono.events import Announcement, GpuUse, MachineUsed, Seconds, StepFinished, WorkerTimes, WorkerUse
from unisono.head import reading
from unisono.head.kept import MOST_EVENTS, MOST_STEPS, MOST_TIMES, Kept
from unisono.overview import Overview
from unisono.page.answers import answer
from unisono.page.reader import reply


def step(number: int, loss: float = 1.0, time: float | None = None) -> StepFinished:
    return StepFinished(
        time=float(number) if time is None else time,
        step=number,
        epoch=0,
        loss=loss,
        weight=8.0,
        samples=8,
        digest="0" * 16,
        num_steps=100,
        generation=1,
        seconds=Seconds(compute=0.5),
        workers={"w10": WorkerTimes(), "w2": WorkerTimes(waits_for="w10", waits_s=0.5)},
        logs={},
    )


def kept() -> Kept:
    return Kept(lambda: Overview(run_id="x"))


def test_what_is_kept_has_a_bound() -> None:
    found = kept()
    for number in range(MOST_STEPS + 100):
        found.take(step(number))
        found.take(Announcement(text=str(number)))
    assert found.span() == (100, MOST_STEPS + 99)
    assert len(found.times()["step"]) == MOST_TIMES
    assert len(found.events(0, 10**6)["events"]) == MOST_EVENTS


def test_the_times_of_many_workers_are_kept_for_fewer_steps() -> None:
    found = kept()
    workers = {f"w{number}": WorkerTimes() for number in range(1000)}
    for number in range(20):
        found.take(msgspec.structs.replace(step(number), workers=workers))
    assert found.times()["step"] == list(range(11, 19)), "of the last step the times are not told yet"


def test_the_times_of_fast_steps_are_kept_once_a_second() -> None:
    found = kept()
    for number in range(100):
        found.take(step(number, time=number / 50))
    assert found.times()["step"] == [0, 50]
    assert found.times()["workers"] == ["w2", "w10"]
    assert found.times()["values"]["waits_s"][0] == [0.5, 0.0]


def test_a_thinned_series_keeps_the_lowest_and_the_highest_value() -> None:
    found = kept()
    for number in range(1000):
        found.take(step(number, loss={500: 99.0, 501: -99.0}.get(number, 1.0)))
    series = found.series(["loss"], points=10)["loss"]
    assert len(series["step"]) == 10
    assert (max(series["high"]), min(series["low"])) == (99.0, -99.0)
    assert found.series(["loss"], first=990, last=994)["loss"]["step"] == [990, 991, 992, 993, 994]


def test_values_that_json_does_not_know_are_words() -> None:
    found = kept()
    for number, loss in enumerate((1.0, math.nan, math.inf)):
        found.take(step(number, loss))
    series = found.series(["loss"])["loss"]
    assert series["mean"] == [1.0, "nan", "inf"]
    thin = found.series(["loss"], points=1)["loss"]
    assert (thin["low"], thin["high"], thin["mean"]) == ([1.0], ["inf"], ["nan"]), "as from the directory"
    json.loads(msgspec.json.encode(answer([found], {"id": 1, "get": "series", "names": ["loss"]})))


def test_a_repeated_step_counts_once() -> None:
    found = kept()
    for number in (0, 1, 1, 0, 2):
        found.take(step(number))
    assert found.series(["loss"])["loss"]["step"] == [0, 1, 2]


def test_events_are_given_from_a_number_on() -> None:
    found = kept()
    for number in range(5):
        found.take(Announcement(text=str(number)))
    told = found.events(2, 2)
    assert ([event["text"] for event in told["events"]], told["next"]) == (["2", "3"], 4)
    assert [event["text"] for event in found.events(-1)["events"]] == ["4"]
    assert found.events(4)["next"] == 5
    assert found.events(99) == {"events": [], "next": 5}


def test_the_use_of_machines_is_given_side_by_side() -> None:
    found = kept()
    for time in range(3):
        for host in ("a", "b")[: 1 + (time > 0)]:
            found.take(MachineUsed(time=time, host=host, cores=time, num_cores=4, memory_bytes=1, memory_total_bytes=2,
                                   sent_bytes_per_s=0.0, received_bytes_per_s=0.0))  # fmt: skip
    use = found.use()
    assert use["time"] == [0, 1, 2]
    assert use["machines"]["a"]["cores"] == [0, 1, 2]
    assert use["machines"]["b"]["num_cores"] == 4
    assert use["machines"]["b"]["cores"] == [None, 1, 2]


def test_the_use_of_gpus_and_of_each_worker_is_given_as_the_directory_would() -> None:
    found = kept()
    for time in range(2):
        found.take(MachineUsed(time=time, host="a", cores=1.0, num_cores=4, memory_bytes=1, memory_total_bytes=2,
                               sent_bytes_per_s=0.0, received_bytes_per_s=0.0,
                               gpus=[GpuUse(utilization=0.5, memory_bytes=3, memory_total_bytes=4)],
                               workers={"w0": WorkerUse(cores=0.5, memory_bytes=7)}))  # fmt: skip
    machine = found.use()["machines"]["a"]
    assert machine["gpu_utilization"] == [[0.5], [0.5]]
    assert machine["worker_cores"] == [{"w0": 0.5}, {"w0": 0.5}]


def test_an_answer_that_is_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kept()
    for number in range(1000):
        found.take(step(number))
    question = {"get": "series", "names": ["loss"], "points": 1000}
    assert b'"step":[0,1,2' in reply(cast("Any", found), question)
    monkeypatch.setattr("unisono.page.reader.MOST_BYTES", 1000)
    assert b"ask for fewer names or points at once" in reply(cast("Any", found), question)


def test_the_arguments_of_a_script_are_not_told() -> None:
    found = kept()
    found.described = json.dumps({"recipe": {"seed": 1}, "command": "secret"})
    assert found.facts() == {"recipe": {"seed": 1}}
    found.described = "no json"
    assert found.facts() == {}


def test_answers_from_memory_leave_the_head_most_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, []

    class Slow(Kept):
        def facts(self) -> dict[str, Any]:
            nonlocal now
            now += 0.25
            return {}

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(reading.time, "monotonic", lambda: now)
    monkeypatch.setattr(reading.asyncio, "sleep", sleep)

    async def ask() -> list[bytes]:
        found = reading.Reading("x", Slow(lambda: Overview(run_id="x")))
        return [await found.answer(f'{{"id": {number}, "get": "facts", "run": {number}}}') for number in (0, 0, 1)]

    first, second, _ = asyncio.run(ask())
    assert (first, second) == (b'{"id":0,"facts":{}}', b'{"id":0,"facts":{}}')
    assert slept == [0.0, pytest.approx(0.25 * reading.SLOWEST)], "the second is answered from what is fresh"
