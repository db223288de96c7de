"""Test your own training script against lost, stuck and slow workers.

::

    from unisono.testing import Faults, run_workers

    def test_my_script_survives(tmp_path):
        calm = run_workers("train.py", 3, directory=tmp_path / "calm")
        faults = Faults().kill("w1", step=3, at="after_backward")
        hurt = run_workers("train.py", 3, directory=tmp_path / "hurt", faults=faults)
        assert hurt.digests == calm.digests

The points at which a fault can happen are the keys of `POINTS`. Runs are real: ``unisono run`` with its head, agent
and workers.

With pytest there is the fixture ``same_bits`` (`unisono.testing.plugin`). pytest loads that module whenever it starts,
so nothing is imported here before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.testing.runs import POINTS as POINTS
    from unisono.testing.runs import VALUES as VALUES
    from unisono.testing.runs import Faults as Faults
    from unisono.testing.runs import Outcome as Outcome
    from unisono.testing.runs import flip_bit as flip_bit
    from unisono.testing.runs import run_workers as run_workers
    from unisono.testing.samebits import SameBits as SameBits

__all__ = ["POINTS", "VALUES", "Faults", "Outcome", "SameBits", "flip_bit", "run_workers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'unisono.testing' has no attribute {name!r}")
    module = "unisono.testing.samebits" if name == "SameBits" else "unisono.testing.runs"
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
