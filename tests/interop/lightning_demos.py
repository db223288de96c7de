"""Lightning's own demos, as they are: ``unisono run lightning_demos.py -- --root DIR``.

Their loaders give one sample at a time, so a step accumulates several batches.
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

from lightning import pytorch as pl
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from unisono.interop.lightning import UnisonoStrategy

ACCUMULATE, MICROBATCHES, STEPS = 8, 4, 3
WORDS = 36 * (1 + ACCUMULATE * STEPS)  # of 35 and an end, a sample of the transformer has 35


def write_text(root: Path) -> None:
    """Write the text of the transformer, which it downloads if there is none."""
    (root / "data").mkdir(parents=True, exist_ok=True)
    lines = (" ".join(f"word{(7 * line + word) % 50}" for word in range(35)) for line in range(WORDS // 36))
    (root / "data" / "wikitext-2.txt").write_text("\n".join(lines) + "\n", encoding="utf8")


def train(root: Path) -> None:
    strategy = UnisonoStrategy(microbatches=MICROBATCHES, seed=5)
    run = strategy.run
    with run.main_first() as is_first:
        if is_first:
            write_text(root)
    os.chdir(root)

    def trainer() -> Any:
        return pl.Trainer(
            strategy=UnisonoStrategy(run, microbatches=MICROBATCHES),
            accumulate_grad_batches=ACCUMULATE,
            max_steps=STEPS,
            val_check_interval=12,  # within a step
            limit_val_batches=2,
            log_every_n_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )

    boring = trainer()
    boring.fit(model := BoringModel())
    boring.validate(model, verbose=False)
    boring.test(model, verbose=False)
    boring.predict(model)
    trainer().fit(BoringModel(), datamodule=BoringDataModule())
    trainer().fit(LightningTransformer(vocab_size=51))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    warnings.simplefilter("ignore")
    train(parser.parse_args().root)


if __name__ == "__main__":
    main()
