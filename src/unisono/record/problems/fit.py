"""What held the memory when it was used up, and which setting makes the training fit. Numbers in, text out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from unisono.core.words import count, shown_bytes

__all__ = ["FitSetting", "Held", "advice", "asked_bytes", "table"]

REST: Final = "activations, batches, all else"
UNTIL_ITS_END: Final = 2.0
"""What a micro-batch would have needed in all, by what it had when memory was used up. Rather too much than too little:
the advice is to come true."""
SPARE: Final = 0.9
"""So much of the room may be used: allocators need more than they are asked for."""
_UNITS: Final = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ASKED: Final = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one process. In bytes."""

    kinds: Mapping[str, int]
    """What does not depend on the size of a micro-batch, by name: parameters, gradients ..."""
    used: int
    """All that the process had."""
    asked: int = 0
    """What it could not get; 0: unknown."""
    limit: int = 0
    """What it could have had at most; 0: unknown."""
    of: str = "memory"
    """What the limit is one of."""
    shared: int = 0
    """What all workers of this machine together could have; 0: they do not share it, or it is unknown."""
    biggest: Sequence[tuple[str, int]] = ()
    """The largest tensors, by name."""

    @property
    def fixed(self) -> int:
        return sum(self.kinds.values())

    @property
    def rest(self) -> int:
        """What a micro-batch needs, about: it had got somewhere between its beginning and its end."""
        return int(UNTIL_ITS_END * max(0, self.used + self.asked - self.fixed))


class FitSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What could be set otherwise."""

    batch_size: int = 0
    """0: unknown, as is the next."""
    microbatches: int = 0
    num_workers: int = 1
    """On the machine."""


def asked_bytes(text: str) -> int:
    """Return how much memory an error of torch says that it was asked for; 0 where it does not say so."""
    found = _ASKED.search(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def table(held: Held) -> str:
    """Return what held the memory, a line each."""
    rows = [*held.kinds.items(), (REST, max(0, held.used - held.fixed))]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {shown_bytes(number):>8}" for name, number in rows if number]
    limit = f" of {shown_bytes(held.limit)} of {held.of}" if held.limit else ""
    asked = f"; refused: {shown_bytes(held.asked)} more" if held.asked else ""
    lines = ["what held the memory of this process:", *lines, f"together {shown_bytes(held.used)}{limit}{asked}"]
    if held.biggest:
        lines += ["the largest tensors:", *(f"  {shown_bytes(number):>8}  {name}" for name, number in held.biggest)]
    return "\n".join(lines)


def advice(held: Held, setting: FitSetting) -> str:
    """Return which setting makes the training fit, computed from the numbers; "" where they are not known."""
    if not held.limit or not setting.microbatches:
        return ""
    room = SPARE * held.limit - held.fixed
    workers = _fewer_workers(held, setting)
    if room <= 0:
        alone = (
            f"Parameters, gradients, optimizer state and the program alone need {shown_bytes(held.fixed)} of "
            f"{shown_bytes(held.limit)}, so no number of micro-batches makes it fit"
        )
        return f"{alone}: {workers or 'use a smaller model, an optimizer with less state, or more memory'}"
    if not held.rest:
        return ""
    wanted = setting.microbatches * math.ceil(held.rest / room)
    fitting = _divisor(setting.batch_size, max(wanted, setting.microbatches + 1))
    if not fitting:
        least = shown_bytes(held.fixed + held.rest * setting.microbatches / setting.batch_size)
        text = f"Even micro-batches of 1 sample would need about {least} of {shown_bytes(held.limit)}"
        return f"{text}: {workers or 'use a smaller model, smaller samples, or more memory'}"
    need = shown_bytes(held.fixed + held.rest * setting.microbatches / fitting)
    samples = count(setting.batch_size // fitting, "sample")
    text = (
        f"microbatches={fitting} instead of {setting.microbatches}, so {samples} each of the same batch, would need "
        f"about {need} of {shown_bytes(held.limit)} (the number affects the bits)"
    )
    return f"{text}; or {workers}" if workers else text


def _fewer_workers(held: Held, setting: FitSetting) -> str:
    if setting.num_workers < 2:
        return ""
    fitting = min(setting.num_workers - 1, int(SPARE * held.shared / (held.fixed + held.rest)))
    if fitting < 1:
        return ""
    return f"{count(fitting, 'worker')} on this machine instead of {setting.num_workers} (the bits stay the same)"


def _divisor(number: int, least: int) -> int:
    """Return the smallest divisor of ``number`` that is at least so large; 0: there is none."""
    return next((each for each in range(least, number + 1) if number % each == 0), 0)
