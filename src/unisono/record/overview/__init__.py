"""Overview of a run: all that a view shows without looking back, as one value. Folded from events, by one rule.

The head, a terminal and a reader of a finished run fold the same events, so they show the same. An overview is JSON
(`msgspec.json.encode`); ``schema`` grows when a field changes its meaning.
"""

from __future__ import annotations

from unisono.record.overview.builder import OverviewBuilder
from unisono.record.overview.past import Interrupted, MachinePresence, Past, Presence
from unisono.record.overview.sentences import recent_of, text_of, with_sentence
from unisono.record.overview.values import (
    CURVE_POINTS,
    INTERRUPTIONS,
    RECENT,
    SCHEMA,
    CurvePoint,
    Overview,
    Recent,
    WorkerNow,
    efficiency,
    mean_seconds,
    status_of,
)

__all__ = [
    "CURVE_POINTS",
    "INTERRUPTIONS",
    "RECENT",
    "SCHEMA",
    "CurvePoint",
    "Interrupted",
    "MachinePresence",
    "Overview",
    "OverviewBuilder",
    "Past",
    "Presence",
    "Recent",
    "WorkerNow",
    "efficiency",
    "mean_seconds",
    "recent_of",
    "status_of",
    "text_of",
    "with_sentence",
]
