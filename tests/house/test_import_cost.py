"""What a user waits for before anything happens."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.house.rooms import modules
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


def test_help_answers_at_once() -> None:
    code = """
import sys
from unisono.cli import main
try:
    sys.argv = ["unisono", "--help"]
    main()
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules
own = [name for name in sys.modules if name.startswith("unisono.")]
assert len(own) <= 12, own
assert not {"asyncio", "socket", "psutil", "cryptography", "importlib.metadata"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout


COUNTED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted(sys.modules))
"""

LATE = {"torch", "numpy", "cryptography", "fsspec", "cloudpickle", "tarfile", "unisono.core.audit_rules"}


def imported(*modules: str) -> set[str]:
    """The modules that a fresh interpreter has after importing these."""
    command = [sys.executable, "-c", COUNTED, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("modules", "most", "without"),
    [
        (
            ("unisono.cli", "unisono.cli.run", "unisono.cluster.launchers", "unisono.cluster.launchers.local"),
            91,
            {*LATE, "unisono.cluster.head", "unisono.cluster.launchers.ssh", "unisono.membership"},
        ),
        (
            ("unisono.cluster.head.__main__",),
            120,
            {*LATE, "click", "psutil", "unisono.cli", "unisono.cluster.machine", "unisono.cluster.launchers"},
        ),
    ],
    ids=["the command", "the head"],
)
def test_a_run_starts_with_what_every_run_needs(modules: tuple[str, ...], most: int, without: set[str]) -> None:
    """Each run starts both anew. What only some runs need (other launchers, TLS, copies) is imported by them."""
    found = imported(*modules)
    assert found & without == set()
    own = {name for name in found if name.partition(".")[0] == "unisono"}
    assert len(own) <= most, f"{len(own)} modules of this library: {sorted(own)}"


def test_pytest_starts_with_a_plugin_that_imports_nothing() -> None:
    """It is loaded wherever Unisono is installed, also by tests that do not use it."""
    own = imported("pytest", "unisono.testing.plugin") - imported("pytest")
    assert {name.partition(".")[0] for name in own} - set(sys.stdlib_module_names) == {"unisono"}
    assert own & LATE == set()
    few = {name for name in own if name.startswith("unisono.")} - {"unisono.testing", "unisono.testing.plugin"}
    assert few <= {"unisono.core", "unisono.system", *imported("unisono")}, "only what `import unisono` brings"


WITHOUT_TORCH = (
    *("core", "system", "record", "membership", "views", "testing", "cli", "cluster.head", "cluster.launchers"),
    *("cluster.machine.agent", "cluster.machine.headprocess", "engine.checkpoint.copies"),
    *("engine.checkpoint.evaluations", "script.recording", "tools.doctor", "tools.plan.finder", "tools.plan.probing"),
    "tools.plan.told",
)
"""What need not compute: rooms, and modules of others."""
WITH_TORCH = ("system.accelerators", "system.reading")
"""The outside thing that these modules are for is torch's; the others of their room import it when they need it."""


def test_what_need_not_compute_does_not_import_torch() -> None:
    """Really imported, because what an import of an import does cannot be seen in one file."""
    rooms = tuple(f"{each}." for each in WITHOUT_TORCH)
    names = [f"unisono.{name}" for name in modules() if f"{name}.".startswith(rooms) and name not in WITH_TORCH]
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'importing {name} imports torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
