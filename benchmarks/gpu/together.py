"""How many tokens a second several devices train: with the library, and with DDP. The global batch is the same.

Each side is a run of its own, which is started, compiles, trains and ends; sides take turns.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Final

from benchmarks.gpu.checks import Check, Place, run_words
from benchmarks.gpu.report import Result, shortened
from benchmarks.gpu.sides import MICROBATCHES, Turn
from benchmarks.gpu.speed import rate, ratio

__all__ = ["together"]

ROUNDS: Final = 3
SIDES: Final = {
    "ddp": ("plain", "DDP"),
    "ddp deterministic": ("plain deterministic", "DDP with deterministic kernels"),
    "unisono": ("unisono", "the library, as it is by default (deterministic)"),
    "unisono free": ("unisono free", "the library, with deterministic=False"),
}
GOAL: Final = 1.0


def together(place: Place) -> list[Check]:
    """Return the measurements on 2, 4 and 8 devices, as far as there are as many; on the CPU: on 2 processes."""
    most = 2 if place.device == "cpu" else place.num_gpus
    sizes = [size for size in (2, 4, 8) if size <= most and MICROBATCHES % size == 0]
    return [Check(f"together: {size}", functools.partial(_together, place, size)) for size in sizes] or [
        Check("together", lambda: iter([Result("together", "skipped", words="takes two accelerators")]))
    ]


def _together(place: Place, size: int) -> Iterator[Result]:
    began, rounds = time.monotonic(), []
    for number in range(ROUNDS):
        found = {}
        for name, (side, _) in SIDES.items():
            folder = place.folder / f"together{size}-{number}"
            folder.mkdir(exist_ok=True)
            out = folder / f"{name.replace(' ', '-')}.json"
            words = (side, *place.words, "--told-to", str(out))
            if name.startswith("ddp"):
                torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
                code, output = place.run(sys.executable, *torchrun, "-m", "benchmarks.gpu.sides", *words)
            else:
                command = run_words("benchmarks.gpu.sides", folder / name.replace(" ", "-"), size)
                code, output = place.run(*command, "--", *words)
            if code or not out.exists():
                yield Result(f"together: {name} on {size}", "failed", time.monotonic() - began, shortened(output))
                return
            found[name] = Turn(*json.loads(out.read_text()))
            shutil.rmtree(folder / name.replace(" ", "-"), ignore_errors=True)
        rounds.append(found)
    for name, (_, says) in SIDES.items():
        yield rate(f"together: {name} on {size}", [one[name] for one in rounds], says, " each")
    seconds = time.monotonic() - began
    for above, below in (("unisono free", "ddp"), ("unisono", "ddp deterministic")):
        ratios = [one[above].tokens_per_s / one[below].tokens_per_s for one in rounds]
        goal = GOAL if place.is_large else None
        yield ratio(f"together: {above} on {size}, beside DDP", ratios, SIDES[below][1], goal, seconds)
