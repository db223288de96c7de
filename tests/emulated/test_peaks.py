"""What a step holds on a device is what docs/gpus.md says: parameters, states, and sums by the digits of the share."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.house.rooms import ROOT
from tests.waiting import WAIT_S

PASSING = 0.5
"""Activations, and a layer's gradient before it is added."""


@pytest.mark.more
def test_a_step_holds_as_much_as_is_said() -> None:
    command = [sys.executable, "-m", "tests.emulated.peaks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for microbatches, most in found["alone"].items():
        said = 1 + int(microbatches).bit_length()
        assert said <= most < said + PASSING, (microbatches, most)
    # Each has four micro-batches: three digits. Then the sum, and what the other has sent.
    for most in found["together"]:
        assert most < 1 + 3 + 2 + 2 * PASSING, found["together"]
