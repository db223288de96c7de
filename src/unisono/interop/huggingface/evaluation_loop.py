"""Evaluation shared by the workers, within the Trainer's own evaluation loop.

The Trainer's loop goes over a loader and calls ``prediction_step`` for each batch; then it computes the metrics. Here
the loader has only the sizes of the batches. At the first call of ``prediction_step`` the workers compute all batches
together, each of them once (`unisono.Run.evaluate`), and give each other what has come out (`unisono.Run.all_gather`).
So the loop has on all workers what it would have on one, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size

from unisono.engine.microbatch.randomness import seed_at
from unisono.interop.huggingface.eval_batches import EvaluationBatches
from unisono.script.run import Run

__all__ = ["shared"]


class _Size(dict[str, Tensor]):
    """Stands for a batch in the Trainer's loop: it has the number of samples, and no sample."""

    def __init__(self, number: int, num_samples: int) -> None:
        super().__init__(samples=torch.empty(num_samples, 0))
        self.number = number


class _Together:
    """What comes out of batches that all workers compute."""

    def __init__(self, trainer: Trainer, run: Run, batches: EvaluationBatches) -> None:
        self._predict = trainer.prediction_step
        self._preprocess = trainer.preprocess_logits_for_metrics
        self._whole_inputs = "inputs" in trainer.args.include_for_metrics
        self._run = run
        self._batches = batches
        self._outcomes: dict[int, dict[str, Any]] = {}

    def prediction_step(
        self, model: Any, inputs: _Size, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return what the Trainer's own method returns for a batch. Collective at the first call."""
        if not self._outcomes:
            self._compute(model, prediction_loss_only, ignore_keys)
        outcome = self._outcomes.pop(inputs.number)
        inputs.update(outcome["inputs"])
        return outcome["loss"], outcome["logits"], outcome["labels"]

    def _compute(self, model: Any, prediction_loss_only: bool, ignore_keys: list[str] | None) -> None:
        own: dict[int, dict[str, Any]] = {}

        def compute(numbered: tuple[int, Any]) -> dict[str, Any]:
            number, inputs = numbered
            seed_at(self._run.seed, "evaluation", number)
            loss, logits, labels = self._predict(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
            if logits is not None and self._preprocess is not None:
                logits = self._preprocess(logits, labels)
            kept = inputs if self._whole_inputs else {}
            own[number] = _on_cpu({"loss": loss, "logits": logits, "labels": labels, "inputs": dict(kept)})
            num_samples = find_batch_size(inputs) or 0
            totals = {"samples": num_samples}
            return totals if loss is None else {**totals, "loss": float(loss) * num_samples}

        missing = list(range(-(-self._batches.num_samples // self._batches.batch_size)))
        # Again for what a worker has computed that was lost before it could tell the others.
        while missing := [number for number in missing if number not in self._outcomes]:
            self._batches.evaluate(self._run, compute, missing)
            for outcomes in self._run.all_gather(own) if self._run.has_begun else [own]:
                self._outcomes.update(outcomes)


@contextmanager
def shared(trainer: Trainer, run: Run, batches: EvaluationBatches) -> Iterator[DataLoader[Any]]:
    """Let a trainer predict together with the other workers; yields the loader for its loop. Collective."""
    together = _Together(trainer, run, batches)
    batch_size = batches.batch_size  # may be another than that of args
    sizes: DataLoader[Any] = DataLoader(
        range(batches.num_samples),  # type: ignore[arg-type]
        batch_size=batch_size,
        collate_fn=lambda places: _Size(places[0] // batch_size, len(places)),
    )
    trainer.prediction_step = together.prediction_step
    preprocess, trainer.preprocess_logits_for_metrics = trainer.preprocess_logits_for_metrics, None
    try:
        yield trainer.accelerator.prepare_data_loader(sizes, device_placement=False)
    finally:
        del trainer.prediction_step
        trainer.preprocess_logits_for_metrics = preprocess


def _on_cpu(value: Any) -> Any:
    """Return nested tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _on_cpu(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(each) for each in value)
    return value
