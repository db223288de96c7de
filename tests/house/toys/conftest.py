"""The toys train with the fixtures of the tests of workers: nothing is left behind, and torch is imported once."""

from __future__ import annotations

from tests.workers.conftest import mark, nursery, standing_nursery

__all__ = ["mark", "nursery", "standing_nursery"]
