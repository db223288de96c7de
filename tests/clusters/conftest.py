"""What tests with batch systems share with the tests with real processes."""

from tests.workers.conftest import mark, script, unisono

__all__ = ["mark", "script", "unisono"]
