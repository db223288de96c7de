"""The nursery of the tests with real processes, and a table of what came of the patterns."""

from __future__ import annotations

import pytest

from tests.patterns.expected import EXPECTED
from tests.patterns.measure import Verdict, table
from tests.workers.conftest import mark, nursery, standing_nursery

__all__ = ["mark", "nursery", "standing_nursery"]

PROPERTY = "pattern"


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the classes that the tests have measured."""
    verdicts = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            found = dict(getattr(report, "user_properties", ())).get(PROPERTY)
            if found is not None:
                name, kind, detail = found
                verdicts[name] = Verdict(kind, detail)
    if verdicts:
        terminalreporter.section("patterns")
        terminalreporter.write_line(table(verdicts, EXPECTED))
