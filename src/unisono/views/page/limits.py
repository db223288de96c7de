"""How long an answer to those who look may be."""

from __future__ import annotations

from typing import Final

__all__ = ["MOST_BYTES"]

MOST_BYTES: Final = 16 * 2**20
