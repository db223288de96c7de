"""What tests with batch systems share with the tests with real processes."""

from tests.workers.conftest import mark, nursery, script, standing_nursery, unisono

__all__ = ["mark", "nursery", "script", "standing_nursery", "unisono"]
