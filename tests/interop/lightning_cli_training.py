"""A script with LightningCLI: ``unisono run lightning_cli_training.py -- command-line|script fit ...``.

The strategy is given on the command line, or the script names it.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from lightning import pytorch as pl
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.interop.lightning_training import BATCH_SIZE, Digits, samples

STRATEGY = {"class_path": "unisono.interop.lightning.UnisonoStrategy", "init_args": {"microbatches": 4}}


class DigitsData(pl.LightningDataModule):
    def __init__(self, batch_size: int = BATCH_SIZE) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=7)


def main() -> None:
    where, *arguments = sys.argv[1:]
    warnings.simplefilter("ignore")
    defaults = {"strategy": STRATEGY} if where == "script" else {}
    LightningCLI(Digits, DigitsData, trainer_defaults=defaults, seed_everything_default=7, args=arguments)


if __name__ == "__main__":
    main()
