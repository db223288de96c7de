"""Calls of ``run.barrier``, ``run.gather`` ... that workers make before they join: there is no exchange yet."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["EarlyCall"]


class EarlyCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call, the same on all workers: every worker counts its own calls, so the number says which it is.

    A result stays for the rest of the run: a replacement gets what the others have got.
    """

    kind: str
    """"run.barrier", "run.broadcast", "run.gather" or "run.main_first"."""
    came: Mapping[str, bytes] = {}
    """Worker that has come to the call -> its value. Empty once the call is decided."""
    first: str = ""
    """Of `run.main_first`: the worker that runs the block now."""
    failed: tuple[str, ...] = ()
    """The workers whose block has raised an error."""
    is_decided: bool = False
    values: tuple[bytes, ...] = ()
    """The result."""
