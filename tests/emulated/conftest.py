"""What tests of devices share with the tests with real processes."""

from tests.workers.conftest import mark, nursery, standing_nursery

__all__ = ["mark", "nursery", "standing_nursery"]
