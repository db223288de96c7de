"""What comes of each pattern: the class that `measure` finds."""

from __future__ import annotations

EXPECTED: dict[str, str] = {}
