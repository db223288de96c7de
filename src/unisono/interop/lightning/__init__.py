"""PyTorch Lightning on Unisono: ``Trainer(strategy=UnisonoStrategy(microbatches=8))``. See docs/lightning.md."""

from __future__ import annotations

from unisono.interop.lightning.trainer_strategy import UnisonoStrategy

__all__ = ["UnisonoStrategy"]
