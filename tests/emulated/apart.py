"""Modules of this folder that run in a process of their own, and print what they have found as JSON.

Torch starts a thread for each device with its first backward pass, so processes that know the device are no forks of
one that has computed; and whoever has imported it has it for good.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import torch

from tests.house.rooms import ROOT
from tests.waiting import WAIT_S

__all__ = ["found_by", "use_the_device"]


def found_by(module: str, *arguments: str, within_s: float = 2 * WAIT_S, **variables: str) -> Any:
    """Return what ``python -m tests.emulated.MODULE`` prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.emulated.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def use_the_device() -> torch.device:
    """Make the device known in this process, of which it is the accelerator from now on."""
    importlib.import_module("tests.emulated.accelerator")
    return torch.device("emu", 0)
