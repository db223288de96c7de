"""Whether anybody uses a machine: a table, from what is seen every second.

A machine is in use at any input, or where other processes load it. It becomes idle after `Limits.idle_s` without both,
and in use again at the first input, or when it was loaded in `LOUD_LOOKS` looks in a row: a moment of a cron job does
not count. Between half of `Limits.load` and `Limits.load` an idle machine stays idle, and one in use stays in use.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

__all__ = ["LOUD_LOOKS", "Idleness", "Limits", "Look"]

LOUD_LOOKS: Final = 3


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    idle_s: float
    """Without input and load for this long, a machine is idle."""
    load: float
    """Cores that other processes may use on an idle machine."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen at one time. Times in seconds, of one clock."""

    at: float
    input_at: float = -math.inf
    """Time of the last input that a person has made."""
    load: float = 0.0
    """Cores in use by other processes since the look before."""


class Idleness(msgspec.Struct, frozen=True, kw_only=True):
    """State of one machine."""

    used_at: float
    """Last time at which the machine was in use; at first, the time from which on it is watched."""
    is_idle: bool = False
    num_loud: int = 0
    """Looks in a row in which the machine was loaded."""
    why: str = ""
    """Why the machine is in use, or idle: a sentence for the user at a change."""

    def after(self, look: Look, limits: Limits) -> Idleness:
        """Return the state after a look."""
        has_input = look.input_at > self.used_at
        num_loud = self.num_loud + 1 if look.load > limits.load else 0
        if self.is_idle and has_input:
            return Idleness(used_at=look.input_at, num_loud=num_loud, why="somebody uses it")
        if self.is_idle and num_loud >= LOUD_LOOKS:
            why = f"other processes use {look.load:.1f} cores"
            return Idleness(used_at=look.at, num_loud=num_loud, why=why)
        if self.is_idle:
            return msgspec.structs.replace(self, num_loud=num_loud)
        used_at = look.input_at if has_input else self.used_at
        if look.load > limits.load / 2:
            used_at = look.at
        if look.at - used_at < limits.idle_s:
            return msgspec.structs.replace(self, used_at=used_at, num_loud=num_loud)
        return Idleness(used_at=used_at, is_idle=True, why=f"nobody has used it for {limits.idle_s:.0f} s")
