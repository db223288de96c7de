"""When the torchruns of several machines have done their work, or have failed."""

from __future__ import annotations

import pytest

from unisono.cluster.launchers.torchrun import exit_code, fewest
from unisono.core.errors import UsageError


@pytest.mark.parametrize(
    ("codes", "least", "expected"),
    [
        ([], 2, None),
        ([0], 2, None),
        ([0, 0], 2, None),
        ([0, 0, 0], 3, 0),
        ([1], 3, 1),
        ([1], 2, None),
        ([255, 3], 2, 255),
        ([255, 0, 0], 2, 0),
        ([-9], 3, 137),
    ],
)
def test_the_training_ends_well_if_enough_machines_do(codes: list[int], least: int, expected: int | None) -> None:
    by_machine = {f"m{number}": code for number, code in enumerate(codes)}
    assert exit_code(by_machine, 3, least) == expected


def test_any_machines_of_this_number_have_enough_processes() -> None:
    assert fewest([4, 4, 4], 8) == 2
    assert fewest([8, 1, 1], 2) == 2
    assert fewest([8, 1, 1], 3) == 3
    assert fewest([2], 1) == 1
    with pytest.raises(UsageError, match="the machines have room for 3 of at least 4 processes"):
        fewest([2, 1], 4)
