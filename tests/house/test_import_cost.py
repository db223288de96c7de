"""What a user waits for before anything happens."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.waiting import WAIT_S

LIMIT = 0.25
TRIALS = 5
MEASURED = """
import time
start = time.process_time()
import torch
torch_s = time.process_time() - start
import unisono
unisono.Run
unisono.launch
print((time.process_time() - start - torch_s) / torch_s)
"""


def cost() -> float:
    """CPU seconds of importing this library in a fresh interpreter, as a part of those of importing torch just before:
    a busy neighbour that shares the core and its caches makes both longer.
    """
    # An installed library is compiled once and not at every import: the first trial may do it.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", MEASURED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True, env=environment)
    return float(done.stdout)


def test_importing_unisono_costs_little_on_top_of_torch() -> None:
    costs: list[float] = []
    while len(costs) < TRIALS and min(costs, default=LIMIT) >= LIMIT:
        costs.append(cost())
    assert min(costs) < LIMIT, f"CPU seconds of {TRIALS} imports, as parts of those of torch: {costs}"


def test_help_answers_without_torch() -> None:
    code = """
import sys
from unisono.cli import main
try:
    sys.argv = ["unisono", "--help"]
    main()
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout
