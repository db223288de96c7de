"""Clocks of two machines are compared by meetings, and the true difference is always within the bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.clocks import offset

times = st.floats(0.0, 2.0)


@given(st.floats(-1e4, 1e4), st.lists(st.tuples(times, times, times, times), min_size=1, max_size=8))
def test_the_true_difference_is_within_the_bounds(
    ahead: float, meetings: list[tuple[float, float, float, float]]
) -> None:
    """Each comes when it likes; both leave some time after the later one has come."""
    own, other, now = [], [], 100.0
    for came, other_came, leaves, other_leaves in meetings:
        all_there = now + max(came, other_came)
        own.append((now + came, all_there + leaves))
        other.append((now + other_came + ahead, all_there + other_leaves + ahead))
        now += 10.0
    found, error = offset(own, other)
    assert abs(found - ahead) <= error + 1e-6
    widths = [left - came for came, left in own], [left - came for came, left in other]
    assert error <= min(map(sum, zip(*widths, strict=True))) / 2 + 1e-6


def test_the_narrowest_meeting_counts() -> None:
    own = [(0.0, 5.0), (10.0, 10.001), (20.0, 29.0)]
    other = [(3600.0, 3605.0), (3610.0, 3610.001), (3621.0, 3629.0)]
    found, error = offset(own, other)
    assert found == pytest.approx(3600.0, abs=0.001)
    assert error == pytest.approx(0.001)
