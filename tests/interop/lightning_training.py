"""A training with PyTorch Lightning, or (``--plain``) the same as a loop of Unisono.

``unisono run lightning_training.py -- --root DIR``; with ``--gates DIR`` as `tests.workers.small_training`. With
``--accumulate K`` a step is K batches of the loader, with as many samples altogether.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision

import unisono
from unisono.interop.lightning import UnisonoStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.workers.gates import wait_at

NUM_SAMPLES, BATCH_SIZE, MICROBATCHES = 54, 24, 4
EPOCHS = 6
STEPS = 3 * EPOCHS
HOWS = {
    "step": {"on_step": True, "on_epoch": False},
    "epoch": {"on_step": False, "on_epoch": True},
    "both": {"on_step": True, "on_epoch": True},
}
"""By name, the ways to log a metric; Lightning refuses to log it in neither."""


def samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 12, generator=draw)
    return TensorDataset(inputs, torch.randint(0, 4, (NUM_SAMPLES,), generator=draw))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 4))


class Digits(pl.LightningModule):
    """Logs in all ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.accuracy = MulticlassAccuracy(4)
        self.largest = MaxMetric()
        self.mean = MeanMetric()
        self.called = nn.ModuleDict({how: MeanMetric() for how in HOWS})
        self.both = MetricCollection([MulticlassAccuracy(4), MulticlassPrecision(4)], prefix="both_")
        self.val_accuracy = MulticlassAccuracy(4)
        self.val_both = self.both.clone(prefix="val_both_")
        self.auroc = MulticlassAUROC(4)  # keeps rows

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        scores = self.net(inputs)
        loss = F.cross_entropy(scores, labels)
        self.accuracy(scores, labels)
        self.largest.update(scores.max())
        self.mean.update(scores.mean(), weight=len(labels))
        for how, options in HOWS.items():
            self.called[how](loss)  # so it has a value of this worker's micro-batch
            self.log(f"called_{how}", self.called[how], **options)
        self.both(scores, labels)
        self.log_dict(self.both, on_step=False, on_epoch=True)
        self.log("computed", self.called["epoch"].compute(), on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("right", (scores.argmax(1) == labels).sum().float(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest_score", scores.max(), reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("largest", self.largest.compute())
        self.log("mean", self.mean.compute())
        self.largest.reset()
        self.mean.reset()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        scores = self.net(inputs)
        self.val_accuracy(scores, labels)
        self.val_both(scores, labels)
        self.log_dict(self.val_both)
        self.auroc.update(scores.softmax(1), labels)
        self.log("val_loss", F.cross_entropy(scores, labels))
        self.log_dict({"val_accuracy": self.val_accuracy, "auroc": self.auroc})

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        scores = self.net(batch[0])
        self.accuracy(scores, batch[1])  # that of the training, whose state the run tracks
        self.log("test_loss", F.cross_entropy(scores, batch[1]))
        self.log("test_accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Gate(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        wait_at(self.folder / str(trainer.global_step))


def train(root: Path, gates: Path, accumulate: int) -> None:
    strategy = UnisonoStrategy(microbatches=MICROBATCHES, seed=3, checkpoint=unisono.Checkpoints(every_steps=4))
    module = Digits()
    checkpoints = ModelCheckpoint(monitor="val_loss", save_last=True, save_top_k=2)
    trainer = pl.Trainer(
        strategy=strategy,
        max_epochs=EPOCHS,
        logger=CSVLogger(root, name="log"),
        callbacks=[Gate(gates), checkpoints, EarlyStopping("val_loss", patience=50), LearningRateMonitor()],
        gradient_clip_val=0.5,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    data = samples()
    loader = DataLoader(data, batch_size=BATCH_SIZE // accumulate, shuffle=True)
    trainer.fit(module, loader, DataLoader(data, batch_size=7))
    tested = trainer.test(module, DataLoader(data, batch_size=11), verbose=False)
    if strategy.run.is_main:
        print("tested", tested, checkpoints.best_model_path, flush=True)


def train_plain() -> None:
    """The same training, without Lightning."""
    with unisono.Run(seed=3) as run:
        model = network()
        named = nn.ModuleDict({"net": model})  # as a Digits names it
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
        run.track(model=named, optimizer=optimizer, scheduler=plateau)
        data = samples()

        def count(batch: list[Tensor]) -> dict[str, Any]:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            return {"loss": loss.double() * len(batch[1]), "samples": len(batch[1])}

        for step in run.steps(data, batch_size=BATCH_SIZE, microbatches=MICROBATCHES, epochs=EPOCHS):
            for inputs, labels in step:
                F.cross_entropy(model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if step.number % 3 == 2:
                totals = run.evaluate(data, count, batch_size=7)
                plateau.step(torch.tensor(totals["loss"] / totals["samples"], dtype=torch.float32))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("lightning"))
    parser.add_argument("--gates", type=Path, default=Path("/nonexistent"))
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.plain:
        train_plain()
    else:
        train(arguments.root, arguments.gates, arguments.accumulate)


if __name__ == "__main__":
    main()
