"""Checks of several machines together: what must be equal, and how far they are from each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from unisono.core.words import listed
from unisono.tools.doctor.checks import Finding
from unisono.tools.doctor.facts import MachineFacts

__all__ = ["Known", "Path", "check_together"]

CLOCKS_S: Final = 1.0
FAR_S: Final = 0.005
SLOW: Final = 50e6  # bytes a second
EXAMPLE_BYTES: Final = 100e6
GLOO_MENDED: Final = (2, 14)
"""The first version of torch whose gloo checks the lengths that it is sent one by one."""


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """A measured way from one machine to another."""

    source: str
    target: str
    address: str = ""
    latency_s: float = 0.0
    """Of a message and its answer."""
    bandwidth: float = 0.0
    """Bytes a second."""
    error: str = ""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of all machines."""

    facts: Mapping[str, MachineFacts]
    """By name on the command line."""
    clocks: Mapping[str, float] = {}
    """Seconds by which a machine's clock is ahead of the one here."""
    paths: list[Path] = []
    sees_run_dir: Mapping[str, bool] = {}
    """Whether a file that was made in the run directory of the first machine is seen by a machine."""


def check_together(known: Known) -> list[Finding]:
    """Return the findings about all machines; none where there is only one."""
    if len(known.facts) < 2:
        return []
    return [finding for test in CHECKS for finding in test(known)]


def _versions(known: Known) -> list[Finding]:
    found = []
    for name in ("unisono", "torch", "numpy", "Python"):
        versions = {host: facts.versions.get(name, "") for host, facts in known.facts.items()}
        if len(set(versions.values())) > 1:
            places = [f"{version or 'missing'} on {host}" for host, version in versions.items()]
            seen = f"{name} is {listed(places)}"
            because = (
                "machines with a different version of unisono are rejected"
                if name == "unisono"
                else "they may compute different bits (run --strict rejects them)"
            )
            found.append(Finding(check="versions", seen=seen, because=because, do="install the same on all machines"))
    return found or [Finding(check="versions", seen="the same on all machines")]


def _gloo(known: Known) -> list[Finding]:
    """Return a warning where gloo has a known hole. Nothing hurts the run, and there may be no newer torch."""
    versions = {host: facts.versions.get("torch", "") for host, facts in known.facts.items()}
    old = [host for host, version in versions.items() if _release(version) < GLOO_MENDED]
    if not old:
        return [Finding(check="gloo", seen="has no known vulnerability")]
    return [
        Finding(
            check="gloo",
            seen=(
                f"beware: with torch {versions[old[0]]} on {listed(old)}, anyone who reaches a worker's port, "
                "which is open while a generation begins, can write into the worker's memory (pytorch/gloo#509); "
                "keep strangers out of the network between these machines (docs/security.md)"
            ),
        )
    ]


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; an unknown one is a new one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else GLOO_MENDED


def _processors(known: Known) -> list[Finding]:
    kinds = {host: facts.arithmetic for host, facts in known.facts.items()}
    if len(set(kinds.values())) == 1:
        return [Finding(check="processors", seen="the same on all machines")]
    seen = listed([f"{kind} on {host}" for host, kind in kinds.items()])
    return [
        Finding(
            check="processors",
            seen=seen,
            because=(
                "kernels for different instructions may compute different bits (a worker that differs is reported, "
                "and rejected with --strict)"
            ),
            do="use machines of one kind if you need the same bits at any number of workers",
        )
    ]


def _clocks(known: Known) -> list[Finding]:
    found = []
    for host, ahead_s in known.clocks.items():
        if abs(ahead_s) > CLOCKS_S:
            found.append(
                Finding(
                    check="clock",
                    host=host,
                    seen=f"{abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}",
                    because="timestamps in logs and ages of files do not agree (the run itself does not need them)",
                    do="timedatectl set-ntp true",
                )
            )
    worst = max((abs(ahead_s) for ahead_s in known.clocks.values()), default=0.0)
    return found or [Finding(check="clocks", seen=f"{worst * 1e3:.0f} ms apart at most")]


def _run_dir(known: Known) -> list[Finding]:
    blind = [host for host, sees in known.sees_run_dir.items() if not sees]
    if not known.sees_run_dir:
        return []
    if not blind:
        return [Finding(check="run directory", seen="shared by all machines")]
    return [
        Finding(
            check="run directory",
            seen=f"not seen by {listed(blind)}; only machines that see it write its journal and checkpoints",
        )
    ]


def _paths(known: Known) -> list[Finding]:
    return [_path(path) for path in known.paths]


def _path(path: Path) -> Finding:
    name = f"{path.source} to {path.target}"
    if path.error:
        return Finding(
            check=name,
            seen=path.error,
            because="workers of these two machines cannot exchange gradients",
            do=f"let the firewall of {path.target} pass TCP from {path.source}, or name another interface with unisono "
            "run --set interface=NAME",
        )
    seen = f"{path.latency_s * 1e3:.2f} ms there and back, {path.bandwidth / 1e6:.0f} MB/s"
    if path.bandwidth < SLOW:
        seconds = EXAMPLE_BYTES / max(path.bandwidth, 1.0)
        return Finding(
            check=name,
            seen=seen,
            because=f"a step of a model with 25 million parameters (100 MB) waits for about {seconds:.1f} s",
            do="use a faster network or interface, larger batches, or fewer machines",
        )
    if path.latency_s > FAR_S:
        return Finding(
            check=name,
            seen=seen,
            because=f"each step waits for several round trips, {path.latency_s * 1e3:.0f} ms each",
            do="use machines that are closer together, or larger batches",
        )
    return Finding(check=name, seen=seen)


CHECKS: Final[tuple[Callable[[Known], list[Finding]], ...]] = (_versions, _gloo, _processors, _clocks, _run_dir, _paths)
