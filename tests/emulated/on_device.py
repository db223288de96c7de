"""A training script of tests/workers, on the emulated device: ``unisono run on_device.py -- NAME ARGUMENTS``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
importlib.import_module("tests.emulated.accelerator")
del sys.argv[0]
importlib.import_module(f"tests.workers.{sys.argv[0]}").main()
