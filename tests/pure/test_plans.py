"""Plans: samples of a run's times, the forecasts made from them, and what came."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
import pytest

from tests.pure.test_forecast import facts, sample
from unisono.cli.plan import _numbers
from unisono.cli.plan import plan as command
from unisono.core.errors import UsageError
from unisono.record.rundir import PLAN_FILE
from unisono.tools.plan.forecast import Roster
from unisono.tools.plan.measuring import sample_of
from unisono.tools.plan.plans import (
    PlanRecord,
    best_microbatches,
    came,
    differs,
    forecasts,
    read_plan,
    roster_of,
    write_plan,
)
from unisono.tools.plan.strategy_models import StrategyOptions, WorkerMemory
from unisono.tools.plan.told import (
    shown_came,
    shown_conclusions,
    shown_cost,
    shown_missing,
    shown_strategies,
    shown_workers,
)
from unisono.tools.plan.wires import NetworkLink


def times(leaves: int, compute: float, waiting: float = 0.0) -> dict[str, float | None]:
    return {
        "leaves": float(leaves),
        "data": 0.0,
        "compute": compute,
        "exchange": 0.002,
        "network": 0.0,
        "waiting": waiting,
        "update": 0.003,
        "other": 0.001,
    }


def plan_of(*rosters: Roster) -> PlanRecord:
    return PlanRecord(
        time=1.0,
        script="train.py",
        link="",
        per_host=4,
        batch_size=128,
        microbatches=8,
        spread=0.01,
        forecasts=forecasts(facts(), {}, rosters, StrategyOptions(), price=2.0),
    )


def test_a_sample_has_the_medians_of_its_steps() -> None:
    found = sample_of([{"w0": times(4, 0.040), "w1": times(4, 0.044)} for _ in range(5)], workers=2)
    assert found.step == pytest.approx(0.050)
    assert found.pace == pytest.approx(0.0105)
    assert found.spread == 0.0


def test_what_makes_all_workers_slower_is_no_scatter_among_them() -> None:
    steps = [{"w0": times(4, 0.040 * slow), "w1": times(4, 0.040 * slow)} for slow in (1.0, 2.0, 1.0, 3.0, 1.0)]
    assert sample_of(steps, workers=2).scatter == pytest.approx(0.0)


def test_a_worker_without_micro_batches_has_no_pace() -> None:
    """Over a slow link the plan gives all micro-batches to fewer workers than there are."""
    steps = [{"w0": times(4, 0.040), "w1": times(4, 0.040), "w2": times(0, 0.0)} for _ in range(5)]
    found = sample_of(steps, workers=3)
    assert (found.workers, found.pace, found.scatter) == (3, pytest.approx(0.010), pytest.approx(0.0))


def test_the_cost_is_that_of_all_workers_for_the_time_of_the_steps() -> None:
    one, two = (each for each in plan_of(roster_of(1, 4, None), roster_of(2, 4, None)).forecasts if each.was_measured)
    assert one.cost == pytest.approx(2.0 * 1 * 90 / 3600)
    assert two.cost == pytest.approx(2.0 * 2 * 52 / 3600)
    assert two.efficiency == pytest.approx(0.090 / 0.052 / 2)


@pytest.mark.parametrize(
    ("cost", "shown"), [(1234.5, "1,234.50"), (12.345, "12.35"), (0.5, "0.50"), (0.0999, "0.100"), (0.00031, "0.00031")]
)
def test_a_small_cost_is_not_shown_as_nothing(cost: float, shown: str) -> None:
    assert shown_cost(cost) == shown


def test_as_many_micro_batches_as_workers_need_are_found() -> None:
    number, gain = best_microbatches(facts(), Roster(workers=16, per_host=16))
    assert number % 16 == 0
    assert 0.0 < gain < 1.0


def test_where_nothing_is_worth_it_the_present_number_stays() -> None:
    assert best_microbatches(facts(), Roster(workers=1, per_host=4)) == (8, 0.0)


def test_a_plan_is_kept_and_compared_with_what_came(tmp_path: Path) -> None:
    write_plan(tmp_path / PLAN_FILE, plan_of(roster_of(1, 4, None), roster_of(2, 4, None)))
    kept = read_plan(tmp_path)
    assert kept is not None
    (found,) = came(kept, [sample(2, 0.050, 0.011), sample(5, 0.030, 0.011)])
    assert found.error == pytest.approx(0.04)
    assert "+4.0%" in shown_came([found])


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', "\xff"])
def test_a_file_that_is_no_plan_is_said_to_be_unreadable(tmp_path: Path, text: str) -> None:
    assert read_plan(tmp_path) is None, "there is none yet"
    (tmp_path / PLAN_FILE).write_text(text)
    with pytest.raises(UsageError, match=r"plan\.json cannot be read .*remove it, or write another one"):
        read_plan(tmp_path)


def test_a_plan_is_only_about_the_batches_that_it_was_made_for() -> None:
    made = plan_of(roster_of(1, 4, None))
    assert differs(made, {"batch_size": 128, "microbatches": 8, "seed": 1}) == ""
    assert differs(made, {"batch_size": 64, "microbatches": 8}) == "batch_size=128 in the plan and 64 in the run"


def test_no_micro_batches_of_one_sample_are_advised() -> None:
    number, _ = best_microbatches(facts(), Roster(workers=100, per_host=100))
    assert number <= 64


def test_a_strategy_without_a_row_has_a_reason() -> None:
    said = shown_missing(facts(), roster_of(3, 4, None))
    assert "bf16 (there is only one host)" in said
    assert "8 micro-batches cannot be divided evenly among 3 replicas" in said
    assert shown_missing(facts(), roster_of(4, 1, NetworkLink(bits_per_s=1e9))) == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--inner-steps", "0"), "inner-steps|0 is not in the range"),
        (("--inner-steps", "-5"), "-5 is not in the range"),
        (("--copies", "0"), "0 is not in the range"),
        (("--per-host", "0"), "0 is not in the range"),
        (("--threads", "0"), "0 is not in the range"),
        (("--price", "-1"), "--price is the price of one worker"),
        (("--price", "nan"), "--price is the price of one worker"),
        (("--workers", "1:1000000", "--link", "1gbit"), "up to 1024 workers"),
        (("--run-dir", "/proc/x"), "--run-dir /proc/x cannot be written"),
        (("--find", "foo"), "--find foo: it can find"),
    ],
)
def test_what_means_nothing_is_refused_by_name_before_anything_is_measured(
    arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises((UsageError, click.BadParameter), match=words):
        command.main([*arguments, __file__], standalone_mode=False)


def test_without_a_script_the_command_names_itself() -> None:
    with pytest.raises(UsageError, match="unisono plan SCRIPT"):
        command.main([], standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--find", "foo"), "--find is for trials of a script"),
        (("--steps", "20"), "--steps is for trials of a script"),
        (("--run-dir", "x"), "--run-dir is for trials of a script"),
        (("--", "--lr", "0.1"), "takes no arguments of a script, got --lr 0.1"),
    ],
)
def test_what_is_about_trials_is_refused_where_a_run_is_given(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        command.main([str(tmp_path), *arguments], standalone_mode=False)


def test_the_text_says_what_takes_the_time_and_where_it_ends() -> None:
    link = NetworkLink(bits_per_s=1e8)
    rosters = [roster_of(number, 1, link) for number in range(1, 5)]
    made = plan_of(*rosters)
    assert "1*" in shown_workers(made, price=2.0)
    assert "the network" in shown_workers(made, price=0.0)
    assert "replicas=4" in shown_strategies(made, 4, StrategyOptions())
    assert any("adds less than half" in said for said in shown_conclusions(facts(), made, rosters[-1], None))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("3", [3]),
        ("2:4", [2, 3, 4]),
        ("1:100", [*range(1, 17), 32, 64, 100]),
        ("90:100", [*range(90, 101)]),
        ("20:100", [32, 64, 100]),
    ],
)
def test_of_many_numbers_of_workers_some_have_a_row(text: str, wanted: list[int]) -> None:
    found = _numbers(text, room=4, per_host=0, has_link=True)
    assert found[0] == int(text.split(":")[0])
    assert [*found][-len(wanted) :] == wanted


def test_without_numbers_of_workers_a_link_brings_a_few_hosts() -> None:
    assert [*_numbers("", room=4, per_host=0, has_link=False)] == [1, 2, 3, 4]
    assert [*_numbers("", room=4, per_host=0, has_link=True)] == [*range(1, 17)]
    assert [*_numbers("", room=4, per_host=2, has_link=False)] == [1, 2]


def test_what_does_not_fit_into_the_memory_is_said() -> None:
    roster = roster_of(4, 4, None)
    memory = WorkerMemory(parts={"parameters": 30 << 20}, activations=10 << 20, gradient_bytes=0, leaves=2)
    made = msgspec.structs.replace(
        plan_of(roster), forecasts=forecasts(facts(), {1: memory}, [roster], StrategyOptions(), price=0.0)
    )
    assert any("only 2 of 4 fit" in said for said in shown_conclusions(facts(), made, roster, 100 << 20))
    one = shown_conclusions(facts(), made, roster_of(1, 4, None), 200 << 20)
    assert any("1 worker fits on it" in said for said in one)
    assert any("4 workers fit" in said for said in shown_conclusions(facts(), made, roster, 200 << 20))


def test_the_memory_that_was_measured_with_the_nearest_number_of_workers_counts() -> None:
    alone = WorkerMemory(parts={"parameters": 1 << 20}, gradient_bytes=0, leaves=8)
    four = WorkerMemory(parts={"parameters": 5 << 20}, gradient_bytes=0, leaves=2)
    made = forecasts(
        facts(), {1: alone, 4: four}, [roster_of(number, 4, None) for number in (1, 3, 4)], StrategyOptions()
    )
    assert [one.memory_bytes >> 20 for one in made if one.strategy == "replicated"] == [1, 5, 5]
