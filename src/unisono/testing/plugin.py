"""The plugin of pytest: the fixture ``same_bits``, the option ``--unisono-update``, the marker ``unisono_slow``.

pytest imports this module whenever it starts, so it imports nothing that only a test with the fixture needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from unisono.testing.samebits import SameBits

__all__ = ["pytest_addoption", "pytest_configure", "same_bits"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("unisono").addoption(
        "--unisono-update",
        action="store_true",
        help="Write the golden bits of the tests that run, instead of comparing with them.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "unisono_slow: trains for long; -m 'not unisono_slow' leaves it out")


@pytest.fixture
def same_bits(request: pytest.FixtureRequest, tmp_path: Path) -> SameBits:
    """Compare the bits of a training at several numbers of workers, and with golden ones (`SameBits`)."""
    from unisono.testing.samebits import SameBits

    return SameBits(tmp_path, request.path, updates=bool(request.config.getoption("--unisono-update")))
