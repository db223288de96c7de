"""Fingerprints of what the arithmetic of a process depends on (`unisono.system.fingerprint`), compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["RESULTS", "other_arithmetic", "other_results"]

RESULTS: Final = "results"
"""The entry of a fingerprint with the results of a probe (`unisono.system.probe.results`): "product=1a2b, ..."."""


def other_arithmetic(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what differs between two fingerprints, in words; empty where nothing does, or the first is unknown."""
    if not before:
        return []
    found = [
        f"{name}: {before.get(name, 'none')} then, {now.get(name, 'none')} now"
        for name in sorted({*before, *now} - {RESULTS})
        if before.get(name) != now.get(name)
    ]
    return found + [f"other results of {name}" for name in other_results(before, now)]


def other_results(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the operations of the probe whose results differ in two fingerprints, of those that both have: the probe
    of another version has others, and that of an early version none.
    """
    if RESULTS not in first or RESULTS not in other:
        return []
    mine, theirs = (dict(each.split("=") for each in one[RESULTS].split(", ")) for one in (first, other))
    return [name for name, digest in mine.items() if theirs.get(name, digest) != digest]
