"""What a user waits for before anything happens."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.waiting import WAIT_S

LIMIT_S = 0.150
TRIALS = 5


def cpu_seconds(code: str) -> float:
    """CPU seconds of a fresh interpreter that runs ``code``: unlike the wall clock, it does not see busy neighbours."""
    measured = f"import time\nstart = time.process_time()\n{code}\nprint(time.process_time() - start)"
    # An installed library is compiled once and not at every import: the first trial may do it.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", measured]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True, env=environment)
    return float(done.stdout)


def test_importing_unisono_costs_little_on_top_of_torch() -> None:
    torch_first = "import torch\nstart = time.process_time()\n"
    costs: list[float] = []
    # Whoever shares the core and its caches makes it longer, and nothing makes it shorter.
    while len(costs) < TRIALS and min(costs, default=LIMIT_S) >= LIMIT_S:
        costs.append(cpu_seconds(torch_first + "import unisono\nunisono.Run\nunisono.launch"))
    assert min(costs) < LIMIT_S, f"CPU seconds of {TRIALS} imports after torch: {costs}"


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
