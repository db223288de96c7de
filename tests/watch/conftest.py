"""Tests of what watches a run, with the packages of `make test-more` and the fixtures of the tests of workers."""

from __future__ import annotations

from tests.workers.conftest import mark, nursery, script, standing_nursery, unisono

__all__ = ["mark", "nursery", "script", "standing_nursery", "unisono"]
