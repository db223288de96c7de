"""What each process of a group is expected to hold, by the formula of docs/memory.md."""

from __future__ import annotations

import msgspec
import pytest

from tests.pure.test_forecast import sample
from unisono.core.errors import UsageError
from unisono.tools.plan.found import PROGRAM, StageFindings, WorkerFindings
from unisono.tools.plan.layouts import check_layouts, forecast_groups, sizes_of

MB = 1 << 20
FIXED = {PROGRAM: 100 * MB, "parameters": 40 * MB, "buffers": 0, "gradients": 160 * MB, "optimizer state": 80 * MB}


def found(*held: int, activations: int = 0) -> WorkerFindings:
    """A worker alone, with 8 micro-batches, whose stages have so many MB of parameters each."""
    return WorkerFindings(
        first=0,
        done=16,
        device="cpu",
        recipe={"microbatches": 8},
        is_sharded=False,
        parameter_bytes=40 * MB,
        gradient_bytes=40 * MB,
        parts=FIXED,
        peak=sum(FIXED.values()) + activations,
        limit=None,
        stages=[StageFindings(held=one * MB, states=2 * one * MB, gradient=one * MB) for one in held],
    )


def memory(of: WorkerFindings, groups: int, parts: int) -> list[float]:
    (one,) = forecast_groups(of, sample(1, 0.090, 0.010), [(groups, parts)], room=64)
    return [number / MB for number in one.memory_bytes]


def test_a_process_holds_its_stages_their_sums_and_that_of_its_part() -> None:
    """W parameters, 2 W states, W (log2(m) + 1) sums and gradients, W for the part's sum."""
    even = found(10, 10, 10, 10)
    assert memory(even, 1, 1) == [100 + 40 * (1 + 2 + 4)]
    assert memory(even, 1, 2) == [100 + 20 * (1 + 2 + 4 + 1)] * 2
    assert memory(even, 1, 4) == [100 + 10 * (1 + 2 + 4 + 1)] * 4
    assert memory(even, 2, 4) == [100 + 10 * (1 + 2 + 3 + 1)] * 4  # four micro-batches for each group
    assert memory(found(4, 6, 30), 1, 2) == [100 + 4 * 8, 100 + 36 * 8]


def test_the_first_part_has_the_most_micro_batches_under_way() -> None:
    several = found(0, 0, 0, 0, activations=40 * MB)
    assert memory(several, 1, 4) == [100 + 40, 100 + 30, 100 + 20, 100 + 10]
    assert memory(several, 1, 2) == [100 + 2 * 20, 100 + 20]
    assert memory(several, 4, 4) == [100 + 20, 100 + 20, 100 + 20, 100 + 10]  # a group computes two


def test_a_step_waits_for_the_first_and_the_last_micro_batch_and_for_cores() -> None:
    one = sample(1, 0.090, 0.010)
    roomy, crowded = (forecast_groups(found(10, 10), one, [(1, 2)], room=room)[0] for room in (2, 1))
    assert roomy.least_step_s == pytest.approx((8 + 2 - 1) / 2 * one.pace + one.update / 2)
    assert crowded.least_step_s == pytest.approx(8 * one.pace + one.update / 2)


def test_shards_divide_what_is_cut() -> None:
    cut = msgspec.structs.replace(found(20, 20), shards=4)
    stages = [msgspec.structs.replace(one, cut=0.5) for one in cut.stages]
    cut = msgspec.structs.replace(cut, stages=stages)
    assert memory(cut, 1, 2) == [100 + 20 * (1 + 2 + 4 + 1)] * 2
    assert memory(cut, 1, 4) == [100 + 20 * 0.75 * (1 + 2 + 4 + 1)] * 4
    assert memory(cut, 1, 8) == [100 + 20 * 0.625 * (1 + 2 + 4 + 1)] * 8
    assert sizes_of(cut) == [2, 4, 8]
    assert sizes_of(msgspec.structs.replace(cut, stages=stages[:1])) == [2, 4]
    assert sizes_of(msgspec.structs.replace(cut, stages=stages * 2 + stages[:1])) == [2, 4, 5, 8, 16]
    with pytest.raises(UsageError, match="has 2 stages with layers in 4 shards"):
        check_layouts([(1, 6)], cut)


def test_sizes_of_groups() -> None:
    assert sizes_of(found()) == []
    assert sizes_of(found(1)) == []
    assert sizes_of(found(1, 1)) == [2]
    assert sizes_of(found(*[1] * 6)) == [2, 4, 6]


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"2x4 is about groups .* tracks no unisono.Stages"):
        check_layouts([(2, 4)], found())
    with pytest.raises(UsageError, match=r"1x4: unisono.Stages of the script has 2 stages"):
        check_layouts([(1, 4)], found(1, 1))
    check_layouts([(3, 2)], found(1, 1))
