"""Forecasts of steps: they agree with what was measured, and follow their models where nothing was."""

from __future__ import annotations

import dataclasses

import pytest

from unisono.core.errors import UsageError
from unisono.tools.plan.forecast import ForecastInputs, Roster, Sample, candidates, expected_largest, forecast
from unisono.tools.plan.strategy_models import STRATEGIES, StrategyOptions, WorkerMemory
from unisono.tools.plan.wires import NetworkLink, Traffic, parse_link, seconds_of, sent_bytes

MB = 1_000_000
GBIT = NetworkLink(bits_per_s=1e9)


def sample(workers: int, step: float, pace: float, hosts: int = 1, scatter: float = 0.0) -> Sample:
    return Sample(
        workers=workers, hosts=hosts, step=step, spread=0.01, pace=pace, scatter=scatter, exchange=0.002, update=0.003
    )


def facts(*samples: Sample, microbatches: int = 8, room: int = 4) -> ForecastInputs:
    return ForecastInputs(
        samples=samples or (sample(1, 0.090, 0.010), sample(2, 0.052, 0.011)),
        microbatches=microbatches,
        batch_size=128,
        gradient_bytes=4 * MB,
        parameter_bytes=4 * MB,
        room=room,
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_forecast_of_what_was_measured_is_what_was_measured(workers: int) -> None:
    known = facts()
    assert forecast(known, Roster(workers=workers, per_host=4)).step == pytest.approx(known.samples[workers - 1].step)


def test_between_two_numbers_the_pace_is_on_the_line_between_them_and_beyond_it_goes_on() -> None:
    known = facts(sample(1, 0.090, 0.010), sample(3, 0.050, 0.012))
    assert forecast(known, Roster(workers=2, per_host=4)).compute == pytest.approx(4 * 0.011)
    assert forecast(known, Roster(workers=4, per_host=4)).compute == pytest.approx(2 * 0.013)


def test_a_pace_that_became_shorter_by_chance_is_not_drawn_out() -> None:
    known = facts(sample(1, 0.090, 0.010), sample(2, 0.050, 0.009))
    assert forecast(known, Roster(workers=4, per_host=4)).compute == pytest.approx(2 * 0.009)


def test_more_workers_than_the_machine_has_room_for_take_turns() -> None:
    known = facts(sample(1, 0.090, 0.010), room=2)
    assert forecast(known, Roster(workers=8, per_host=8)).compute == pytest.approx(1 * 0.010 * 4)


def test_the_largest_share_counts_and_what_it_is_above_an_equal_one_is_told() -> None:
    found = forecast(facts(sample(1, 0.090, 0.010)), Roster(workers=3, per_host=4))
    assert found.compute == pytest.approx(3 * 0.010)
    assert found.uneven == pytest.approx((3 - 8 / 3) * 0.010)


def test_a_step_waits_for_the_slowest_of_workers_that_scatter() -> None:
    scattered = facts(sample(1, 0.090, 0.010), sample(2, 0.060, 0.010, scatter=0.1))
    two, four = (forecast(scattered, Roster(workers=number, per_host=4)) for number in (2, 4))
    assert two.waiting == pytest.approx(0.040 * 0.1 * 0.5891, rel=1e-3)
    assert four.waiting / four.compute > two.waiting / two.compute


def test_the_expected_largest_of_normal_numbers_is_that_of_the_tables() -> None:
    assert [expected_largest(number) for number in (1, 2, 4, 1000)] == pytest.approx([0, 0.564, 1.029, 3.241], rel=0.05)


def test_bytes_between_hosts_are_those_of_the_network_page() -> None:
    assert sent_bytes(4 * MB, 2, 1) == 4 * MB
    assert sent_bytes(4 * MB, 4, 1) == 6 * MB
    assert sent_bytes(4 * MB, 2, 2) == 6 * MB


def test_a_link_makes_a_step_longer_by_its_bytes_and_its_round_trips() -> None:
    traffic = Traffic(hosts=2, nbytes=4 * MB, link=GBIT)
    on_the_way = 4 * MB / GBIT.bytes_per_s
    assert seconds_of(traffic) == pytest.approx(on_the_way)
    assert seconds_of(traffic, [0.010]) == pytest.approx(on_the_way - 0.010)
    far = dataclasses.replace(traffic, link=NetworkLink(bits_per_s=1e9, round_trip_s=0.020))
    assert seconds_of(far) == pytest.approx(on_the_way + 0.030)


def test_a_sum_that_is_complete_early_travels_while_the_rest_is_computed() -> None:
    traffic = Traffic(hosts=2, nbytes=4 * MB, link=GBIT)
    one = 2 * MB / GBIT.bytes_per_s
    assert seconds_of(traffic, [0.0, 0.0]) == pytest.approx(3 * one)
    assert seconds_of(traffic, [one, 0.0]) == pytest.approx(2 * one)
    assert seconds_of(traffic, [one / 2, 0.0]) == pytest.approx(2.5 * one), "the link is busy with the first"
    assert seconds_of(traffic, [9 * one, 8 * one]) == pytest.approx(one), "the sums come back at the end"


def test_where_the_link_is_fast_processors_are_what_takes_the_time() -> None:
    fast = NetworkLink(bits_per_s=1e12)
    traffic = Traffic(hosts=2, nbytes=4 * MB, link=fast, own_seconds=0.008, own_hosts=2, own_nodes=1)
    assert seconds_of(traffic) == pytest.approx(0.008)
    assert seconds_of(traffic, [0.0, 0.0]) > 0.010


def test_between_many_hosts_messages_take_the_time() -> None:
    few, many = (seconds_of(Traffic(hosts=hosts, nbytes=4 * MB, link=GBIT)) for hosts in (8, 1000))
    assert many > 10 * few


@pytest.mark.parametrize(
    ("text", "bits", "delay"), [("1gbit", 1e9, 0), ("100mbit+20ms", 1e8, 0.02), ("2.5 Gbit/s", 2.5e9, 0)]
)
def test_a_link_is_named_by_its_rate_and_its_delay(text: str, bits: float, delay: float) -> None:
    assert parse_link(text) == NetworkLink(bits_per_s=bits, round_trip_s=delay)
    assert parse_link(str(parse_link(text))) == parse_link(text)


@pytest.mark.parametrize("text", ["", "fast", "1gb", "0mbit", "-1gbit", "1gbit+x"])
def test_another_text_names_no_link(text: str) -> None:
    with pytest.raises(UsageError, match="--link is a rate"):
        parse_link(text)


def test_a_batch_that_grows_with_the_workers_keeps_the_size_of_a_micro_batch() -> None:
    known = facts(sample(1, 0.090, 0.010))
    assert forecast(known, Roster(workers=32, per_host=32), 32, 4.0).compute == pytest.approx(0.010 * 32 / 4)


def test_candidates_divide_the_batch() -> None:
    assert candidates(facts(), 2) == [1, 2, 4, 8, 16, 32]


def test_a_sharded_state_takes_less_memory_and_less_of_an_update() -> None:
    memory = WorkerMemory(parts={"parameters": 4 * MB, "optimizer state": 8 * MB}, gradient_bytes=4 * MB, leaves=8)
    roster, options, shard = Roster(workers=4, per_host=4), StrategyOptions(copies=2), STRATEGIES["shard"]
    assert shard.memory(memory, roster, options, 8) == memory.total(8) - 4 * MB
    assert shard.parts(facts(), roster, options).update == pytest.approx(
        STRATEGIES["replicated"].parts(facts(), roster, options).update / 2
    )


def test_fewer_bytes_delay_and_local_steps_each_help_on_a_slow_link() -> None:
    slow = Roster(workers=4, per_host=1, link=NetworkLink(bits_per_s=1e8))
    times = {name: one.parts(facts(), slow, StrategyOptions()).step for name, one in STRATEGIES.items()}
    assert times["bf16"] < 0.7 * times["replicated"]
    assert times["local"] < times["bf16"]
    assert times["delay"] < times["replicated"]


def test_replicas_on_hosts_of_their_own_share_no_machine() -> None:
    """Four hosts have room for one worker each: nobody takes turns, as four workers of one such machine would."""
    alone = facts(sample(1, 0.090, 0.010), room=1)
    slow = Roster(workers=4, per_host=1, link=NetworkLink(bits_per_s=1e8))
    local = STRATEGIES["local"].parts(alone, slow, StrategyOptions(inner_steps=10))
    assert (local.compute, local.crowded) == (pytest.approx(2 * 0.010), 0.0)


def test_a_delayed_sum_leaves_when_backward_is_over() -> None:
    slow = Roster(workers=4, per_host=1, link=NetworkLink(bits_per_s=1e8))
    late, plain = (STRATEGIES[name].parts(facts(), slow, StrategyOptions()) for name in ("delay", "replicated"))
    own = late.compute + late.update + late.other + late.exchange - plain.exchange
    assert late.network + own == pytest.approx(plain.network + plain.waiting + 0.5 * 0.010, rel=0.05)


def test_the_bottleneck_is_named() -> None:
    slow = Roster(workers=4, per_host=1, link=NetworkLink(bits_per_s=1e8))
    assert forecast(facts(), slow).bottleneck == "the network"
    assert forecast(facts(), Roster(workers=1, per_host=4)).bottleneck == "computation"
    crowd = forecast(facts(sample(1, 0.090, 0.010), sample(2, 0.150, 0.030)), Roster(workers=2, per_host=4))
    assert crowd.bottleneck == crowd.loss == "workers that share a machine"
    assert crowd.crowded == pytest.approx(4 * 0.020)


def test_a_strategy_that_is_in_use_already_is_not_reckoned_once_more() -> None:
    apart = Roster(workers=4, per_host=1, link=GBIT)
    rounded = dataclasses.replace(facts(), is_rounded=True)
    sharded = dataclasses.replace(facts(), is_sharded=True)
    offered = {name: one for name, one in STRATEGIES.items() if not one.refuses(facts(), apart)}
    assert list(offered) == list(STRATEGIES)
    assert [name for name, one in STRATEGIES.items() if not one.refuses(rounded, apart)] == [
        "replicated",
        "shard",
        "delay",
    ]
    assert [name for name, one in STRATEGIES.items() if not one.refuses(sharded, apart)] == ["replicated", "bf16"]


def test_strategies_that_need_several_workers_or_hosts_have_no_row_without() -> None:
    alone, together = Roster(workers=1, per_host=4), Roster(workers=3, per_host=4)
    assert [name for name, one in STRATEGIES.items() if not one.refuses(facts(), alone)] == ["replicated"]
    assert [name for name, one in STRATEGIES.items() if not one.refuses(facts(), together)] == [
        "replicated",
        "shard",
        "delay",
    ], "three replicas cannot share 8 micro-batches"
