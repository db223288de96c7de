"""Tests hold on any machine: no test has a deadline of its own, claims anything by the clock, or sleeps."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.rooms import ROOT, parse

TESTS = ROOT / "tests"
DEADLINES = {"timeout", "deadline_s", "limit_s"}
"""Arguments that say how long to wait for what must come."""
CLOCKS = {"monotonic", "perf_counter", "time"}
MAY_SLEEP = {"linked_training.py", "uneven_training.py"}
"""Whose time it takes is what is tested."""
LONG_S = 1.0
"""A shorter deadline is one that shall pass."""


@functools.cache
def modules() -> list[Path]:
    return [path for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)]


def calls(node: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """All calls in this tree, and the last part of what is called."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            name = call.func
            yield call, name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")


def is_long(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float) and value.value >= LONG_S


def is_nothing(call: ast.Call) -> bool:
    """``asyncio.sleep(0)`` lets other tasks run, and takes no time."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


def is_duration(value: ast.expr) -> bool:
    """What a clock says, less what it said before."""
    return isinstance(value, ast.BinOp) and any(name in CLOCKS for _, name in calls(value))


def found(path: Path) -> Iterator[str]:
    for call, name in calls(parse(path)):
        place = f"{path.relative_to(ROOT)}:{call.lineno}"
        if any(keyword.arg in DEADLINES and is_long(keyword.value) for keyword in call.keywords):
            yield f"{place}: a deadline of its own; WAIT_S (tests/waiting.py) is for all"
        if name == "timeout" and call.args and is_long(call.args[0]):
            yield f"{place}: pyproject.toml says how long a test may hang"
        if name == "sleep" and path.name not in MAY_SLEEP and not is_nothing(call):
            yield f"{place}: it sleeps; wait for what must come (tests/workers/gates.py)"
    for comparison in ast.walk(parse(path)):
        if isinstance(comparison, ast.Compare):
            lefts = [comparison.left, *comparison.comparators]
            for left, operator in zip(lefts, comparison.ops, strict=False):
                if isinstance(operator, ast.Lt | ast.LtE) and is_duration(left):
                    place = f"{path.relative_to(ROOT)}:{comparison.lineno}"
                    yield f"{place}: on a busy machine it takes longer; claim what could not have happened otherwise"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(TESTS)))
def test_tests_hold_on_a_busy_machine(path: Path) -> None:
    assert list(found(path)) == []


def test_the_rules_find_what_they_forbid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.house.test_waits.ROOT", tmp_path)
    path = tmp_path / "test_hasty.py"
    path.write_text(
        "pytestmark = pytest.mark.timeout(20)\n"
        "subprocess.run(command, timeout=30)\n"
        "time.sleep(0.1)\n"
        "assert time.perf_counter() - since < 2.0\n"
        "assert time.perf_counter() - since >= 2.0\n"
        "queue.get(timeout=0.1)\n"
    )
    assert [line.split(":")[1] for line in found(path)] == ["1", "2", "3", "4"]
