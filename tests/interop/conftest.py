"""The fixtures of the tests with real processes."""

from __future__ import annotations

from tests.workers.conftest import mark, nursery, script, standing_nursery, unisono

__all__ = ["mark", "nursery", "script", "standing_nursery", "unisono"]
