"""What a step holds on a device is what docs/gpus.md says: parameters, states, and sums by the digits of the share."""

from __future__ import annotations

import pytest

from tests.emulated.apart import found_by
from tests.waiting import WAIT_S

PASSING = 0.5
"""Activations, and a layer's gradient before it is added."""


@pytest.mark.more
def test_a_step_holds_as_much_as_is_said() -> None:
    found = found_by("peaks", within_s=WAIT_S)
    for microbatches, most in found["alone"].items():
        said = 1 + int(microbatches).bit_length()
        assert said <= most < said + PASSING, (microbatches, most)
    # Each has four micro-batches: three digits. Then the sum, and what the other has sent.
    for most in found["together"]:
        assert most < 1 + 3 + 2 + 2 * PASSING, found["together"]
