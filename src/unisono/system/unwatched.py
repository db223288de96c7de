"""Whether runs are watched. They are; only `benchmarks.watching` turns that off, to measure what it costs."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["IS_WATCHED"]

IS_WATCHED: Final = os.environ.get("UNISONO_WATCH") != "0"
"""False: no view, no journal, no events for them, no samples of machines. Internal: such a run cannot be resumed."""
