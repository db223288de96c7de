"""What is used on two streams has an event in between: looked for by the reasoning of torch's sanitizer for CUDA."""

from __future__ import annotations

import pytest

from tests.emulated.apart import found_by


@pytest.mark.more
def test_what_is_used_on_two_streams_is_in_order() -> None:
    """Sums under way have a stream of their own, and a script may have one, which waits for the current one only."""
    found = found_by("ordered")
    for where, one in found.items():
        assert one["streams"] == 1 + ("own stream" in where) + ("under way" in where), where
        if where.startswith("without events"):  # else this test could not fail
            assert one["found"], where
        else:
            assert not one["found"], f"{where}: {one['found'][0]}"
