"""What holds for all tests: how many run beside each other, how long one may hang, and what may be skipped."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

# Before torch is imported: with as many threads as cores in every process, they would wait for each other's cores.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

# Every process that runs tests imports all of them, and pytest rewrites their asserts: once, and not in each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts the tests in the background has Ctrl-C ignored, and so would all commands that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent

LEAST_TESTERS, MOST_TESTERS = 4, 16
TESTERS_PER_CORE = 2
"""Most of the time a test waits: for a process to begin, to be killed, to be missed. But each more that runs tests has
to import torch and to make what is shared."""
KIB_PER_TESTER = 1_250_000
"""A process that has imported torch, its nursery, and the workers of a run or two."""

BEYOND = ("clusters", "hosts", "interop", "patterns", "watch")
"""Folders of which all tests are marked ``more``: they need packages, programs or rights that `make test` does without,
some of them already to be imported."""

SKIPS = {
    r"`make data` fetches it": "what is fetched is not part of the project; the same code runs on data of its form",
    r"^(mount|remount) is not permitted": "it takes the right to mount, which a container cannot give itself",
    r"^network namespaces are not permitted here": "it takes root outside of a container",
    r"cannot be delayed here": "it takes /dev/net/tun, which a container cannot give itself",
    r"^no (second )?CUDA device here": "the machine has none; `make gpu-check` tries what needs one",
    r"^kubectl is older than": "the fake API server answers as servers do since then; Debian 12 has an older one",
    r"^no AVX(2|-512) here": "it is the processor's instructions that are chosen",
    r"^memory cannot be limited here": "it takes a control group, which only root can make",
    r"^no IPv6 here": "it is the machine's kernel that has none",
    r"^no digest is published for this arithmetic": "the bits of all numbers of workers were compared with each other",
}
"""What may be skipped where CI is set, by the reason that is given, and why. Any other skip is a failure there."""


def pytest_xdist_auto_num_workers() -> int:
    """How many processes ``-n auto`` runs tests in."""
    cores = len(os.sched_getaffinity(0))
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    return max(2, min(MOST_TESTERS, max(LEAST_TESTERS, TESTERS_PER_CORE * cores), available // KIB_PER_TESTER))


def _is_beyond(path: Path) -> bool:
    return any(parent.name in BEYOND and parent.parent == TESTS for parent in path.parents)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` (``-m "not more"``) does not import what it cannot import."""
    return True if config.option.markexpr == "not more" and _is_beyond(collection_path) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if _is_beyond(item.path):
        item.add_marker("more")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: while they are made there is no search for garbage, which would take a quarter
    of the time, and each later one leaves them out.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def is_permitted(reason: str) -> bool:
    """Whether a test with this reason may be skipped also where CI is set."""
    return any(re.search(pattern, reason) for pattern in SKIPS)


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not (os.environ.get("CI") and report.skipped) or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not is_permitted(reason):
        report.outcome = "failed"
        report.longrepr = f"skipped: {reason}\n(where CI is set, tests/conftest.py lists what may be skipped)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """For the long runs (`make nightly`, `make soak`): what was run, and what was found."""
    if not os.environ.keys() & {"UNISONO_TEST_ALL", "UNISONO_SOAK_S"}:
        return
    terminalreporter.section("what was run")
    for outcome in ("passed", "failed", "error"):
        reports = terminalreporter.getreports(outcome)
        ran = Counter(report.nodeid.partition("[")[0] for report in reports if report.when == "call")
        for name, times in ran.items():
            terminalreporter.write_line(f"{outcome} {times:4} x {name}")
        for report in reports:
            for _, found in report.user_properties:
                terminalreporter.write_line(f"{outcome} {report.nodeid.rpartition('::')[2]}: {found}")
