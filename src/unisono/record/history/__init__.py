"""History of a run: what its directory holds, as a view asks for it. No large file is read whole.

`History` is what the page, `unisono watch` and `unisono report` read. It works while the run goes on, and gives
whatever can be read: what cannot is in `History.notes`.
"""

from __future__ import annotations

from unisono.record.history.reading import History, without_head

__all__ = ["History", "without_head"]
