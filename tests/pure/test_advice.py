"""What is advised follows from what was measured, and is computed with the functions that plan a step."""

from __future__ import annotations

import pytest

from unisono.core.events import Seconds
from unisono.core.plan import plan
from unisono.record.advice import Advice, AdviceSetting, Load, advise, computing_seconds, step_seconds


def team(paces: list[float], microbatches: int, *, equal: bool = True, **more: float) -> list[Load]:
    """Workers of these paces with equal shares: whoever is done waits for the last."""
    assert equal
    shares = [len(own) for own in plan(len(paces), microbatches).ranges]
    busy = [pace * share for pace, share in zip(paces, shares, strict=True)]
    last = busy.index(max(busy))
    return [
        Load(
            worker_id=f"w{rank}",
            seconds=Seconds(compute=took, waiting=max(busy) - took, **more),
            leaves=share,
            waits={f"w{last}": max(busy) - took} if rank != last else {},
        )
        for rank, (took, share) in enumerate(zip(busy, shares, strict=True))
    ]


def first(found: list[Advice]) -> Advice:
    assert found, "nothing is advised"
    return found[0]


def test_workers_that_wait_because_of_unequal_shares_are_advised_more_microbatches() -> None:
    """4 micro-batches on 3 workers: one computes two, while the others wait for half of the step."""
    found = first(advise(team([0.1, 0.1, 0.1], 4), AdviceSetting(microbatches=4, batch_size=48)))
    assert found.change == "microbatches=6"  # 12 would be as good, and is more than is needed
    assert found.gain == pytest.approx(1 - 2 / 3, abs=0.02)
    assert found.loss_seconds == pytest.approx(0.1)
    assert "waits 50 % of each step for w" in found.text
    assert "4 micro-batches cannot be divided equally among 3 workers" in found.text
    assert "microbatches=6 would save" in found.text


def test_what_is_advised_is_what_the_model_says_of_the_advised_number() -> None:
    loads, setting = team([0.1, 0.25], 4), AdviceSetting(microbatches=4, batch_size=64)
    found = first([each for each in advise(loads, setting) if each.change])
    number = int(found.change.removeprefix("microbatches="))
    assert setting.batch_size % number == 0
    saved = computing_seconds(loads, setting, 4) - computing_seconds(loads, setting, number)
    assert found.gain == pytest.approx(saved / step_seconds(loads))


def test_a_balanced_run_is_advised_nothing() -> None:
    assert advise(team([0.1, 0.1], 8), AdviceSetting(microbatches=8, batch_size=64)) == []


def test_groups_are_advised_nothing_by_models_of_workers_that_compute_alone() -> None:
    loads = team([0.1, 0.1, 0.1], 4)
    assert advise(loads, AdviceSetting(microbatches=4, batch_size=48, parts=3)) == []
    assert advise(loads, AdviceSetting(microbatches=4, batch_size=48)) != []


def test_more_workers_than_microbatches_are_named() -> None:
    loads = team([0.1] * 4, 2)
    found = first(advise(loads, AdviceSetting(microbatches=2, batch_size=16)))
    assert "4 workers share 2 micro-batches: 2 of them have nothing to compute" in found.text
    assert found.change == "microbatches=4"


def test_a_slow_worker_is_named_with_what_it_costs() -> None:
    found = first(advise(team([0.1, 0.1, 0.1, 0.4], 16), AdviceSetting(microbatches=16, batch_size=16, balance=False)))
    assert found.text.startswith("w3 takes 4.0x as long for a micro-batch as the others (400 ms, the others 100 ms)")
    assert found.gain == pytest.approx(0.75)


def test_a_worker_of_another_kind_is_not_called_slow() -> None:
    loads = [
        Load(worker_id="w0", kind="a", seconds=Seconds(compute=1.0), leaves=10),
        Load(worker_id="w1", kind="b", seconds=Seconds(compute=1.0), leaves=2),
    ]
    assert advise(loads, AdviceSetting(microbatches=12)) == []


def test_loading_is_advised_loader_processes() -> None:
    loads = [Load(worker_id="w0", seconds=Seconds(data=0.4, compute=0.6), leaves=8)]
    found = first(advise(loads, AdviceSetting(microbatches=8, batch_size=64)))
    assert found.change == "loader_workers=1"
    assert found.gain == pytest.approx(0.4)
    assert "Loading data takes 40 % of each step of w0" in found.text


def test_loading_that_takes_longer_than_computing_needs_several_loader_processes() -> None:
    loads = [Load(worker_id="w0", seconds=Seconds(data=0.9, compute=0.3), leaves=8)]
    found = first(advise(loads, AdviceSetting(microbatches=8)))
    assert found.change == "loader_workers=4"
    assert found.gain == pytest.approx(0.75)
    fewer = first(advise(loads, AdviceSetting(microbatches=8, spare_cores=2.0)))
    assert fewer.change == "loader_workers=2"
    assert fewer.gain == pytest.approx((1.2 - 0.45) / 1.2)


def test_loading_without_a_free_core_promises_nothing() -> None:
    loads = [Load(worker_id="w0", seconds=Seconds(data=0.4, compute=0.6), leaves=8)]
    found = first(advise(loads, AdviceSetting(microbatches=8, spare_cores=0.0)))
    assert (found.gain, found.change) == (0.0, "")


def test_a_larger_batch_is_advised_where_bytes_take_long() -> None:
    loads = [
        Load(
            worker_id=f"w{rank}",
            host=f"host{rank}",
            seconds=Seconds(compute=0.2, network=0.8),
            leaves=4,
        )
        for rank in range(2)
    ]
    found = first(advise(loads, AdviceSetting(microbatches=8, batch_size=64, wire="bf16")))
    assert "Transfers take 80 % of each step." in found.text
    assert found.change == "batch_size=128"
    assert found.gain == pytest.approx(1 - 1.2 / 2)


def test_half_the_bytes_are_advised_where_they_take_long() -> None:
    def loads(network: float) -> list[Load]:
        seconds = Seconds(compute=1 - network, network=network)
        return [Load(worker_id=f"w{rank}", host=f"h{rank}", seconds=seconds, leaves=4) for rank in range(2)]

    found = {each.change: each for each in advise(loads(0.6), AdviceSetting(microbatches=8))}['wire="bf16"']
    assert found.gain == pytest.approx(0.3)
    assert "take 60 % of each step" in found.text
    assert not [
        each for each in advise(loads(0.6), AdviceSetting(microbatches=8, wire="bf16")) if "wire" in each.change
    ]
    assert not [each for each in advise(loads(0.02), AdviceSetting(microbatches=8)) if "wire" in each.change]


def test_nodes_that_need_not_travel_are_advised_away() -> None:
    """6 micro-batches on 2 hosts are two nodes each; 8 are one."""
    loads = [
        Load(worker_id=f"w{rank}", host=f"h{rank}", seconds=Seconds(compute=0.1, network=0.9), leaves=3)
        for rank in range(2)
    ]
    found = first(advise(loads, AdviceSetting(microbatches=6, batch_size=48, wire="bf16")))
    assert found.change == "microbatches=8"
    assert found.gain == pytest.approx(0.9 * (1 - 2 / 3), abs=0.01)


def test_what_the_script_does_by_itself_is_named_and_nothing_is_promised() -> None:
    loads = [Load(worker_id="w0", seconds=Seconds(compute=0.5, update=0.5), leaves=4)]
    found = first(advise(loads, AdviceSetting(microbatches=4)))
    assert found.gain == 0.0
    assert "takes 50 % of each step" in found.text


def test_nodes_that_the_shares_avoid_already_are_not_promised_again() -> None:
    """6 micro-batches on 2 hosts as 4 and 2 are one node each, as 8 would be: only computing becomes shorter."""
    loads = [
        Load(worker_id="w0", host="a", seconds=Seconds(compute=0.16, network=0.5), leaves=4),
        Load(worker_id="w1", host="b", seconds=Seconds(compute=0.08, network=0.5, waiting=0.08), leaves=2),
    ]
    found = {each.change: each.gain for each in advise(loads, AdviceSetting(microbatches=6, batch_size=24))}
    assert found["microbatches=8"] == pytest.approx(0.04 / 0.66, abs=0.005)
    assert found["batch_size=48"] == pytest.approx((0.66 - 0.16) / 2 / 0.66, abs=0.005)
