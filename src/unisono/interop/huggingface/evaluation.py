"""Evaluation shared by the workers, within the Trainer's own evaluation loop.

The Trainer's loop goes over a loader and calls ``prediction_step`` for each batch; then it computes the metrics. Here
the loader has only the sizes of the batches. At the first call of ``prediction_step`` the workers compute all batches
together, each of them once (`unisono.Run.evaluate`), and give each other what has come out (`unisono.Run.gather`). So
the loop has on all workers what it would have on one, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size

from unisono.training.run import Run

__all__ = ["shared"]


class _Batches:
    """The batches of a loader as a dataset: ``[i]`` is (number of the batch, the batch).

    Args:
        numbers: of the batches that are in it.
    """

    def __init__(self, loader: DataLoader[Any], batches: Sequence[Sequence[int]], numbers: Sequence[int]) -> None:
        self._dataset: Any = loader.dataset
        self._collate: Any = loader.collate_fn
        self._batches = batches
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        number = self._numbers[index]
        places = self._batches[number]
        if hasattr(self._dataset, "__getitems__"):
            samples = self._dataset.__getitems__(list(places))
        else:
            samples = [self._dataset[place] for place in places]
        return number, self._collate(samples)


class _Size(dict[str, Tensor]):
    """Stands for a batch in the Trainer's loop: it has the number of samples, and no sample."""

    def __init__(self, number: int, num_samples: int) -> None:
        super().__init__(samples=torch.empty(num_samples, 0))
        self.number = number


class _Together:
    """What comes out of the batches of a loader, computed by all workers. Collective to make.

    Attributes:
        batches: the indices of the samples of each.
    """

    def __init__(self, trainer: Trainer, run: Run, loader: DataLoader[Any]) -> None:
        self._predict = trainer.prediction_step
        self._preprocess = trainer.preprocess_logits_for_metrics
        self._whole_inputs = "inputs" in trainer.args.include_for_metrics
        self._run = run
        self._loader = loader
        cuts: Any = loader.batch_sampler
        self.batches = [list(batch) for batch in cuts]
        if run.has_begun and not isinstance(cuts.sampler, SequentialSampler):
            self.batches = run.broadcast(self.batches)  # a sampler may draw from a generator of this worker
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
            loss, logits, labels = self._predict(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
            if logits is not None and self._preprocess is not None:
                logits = self._preprocess(logits, labels)
            kept = inputs if self._whole_inputs else {}
            own[number] = _on_cpu({"loss": loss, "logits": logits, "labels": labels, "inputs": dict(kept)})
            num_samples = find_batch_size(inputs) or 0
            totals = {"samples": num_samples}
            return totals if loss is None else {**totals, "loss": float(loss) * num_samples}

        missing = list(range(len(self.batches)))
        # Again for what a worker has computed that was lost before it could tell the others.
        while missing := [number for number in missing if number not in self._outcomes]:
            batches = _Batches(self._loader, self.batches, missing)
            self._run.evaluate(batches, compute, batch_size=1, collate=lambda batch: batch[0])
            for outcomes in self._run.gather(own) if self._run.has_begun else [own]:
                self._outcomes.update(outcomes)


@contextmanager
def shared(trainer: Trainer, run: Run, loader: DataLoader[Any]) -> Iterator[DataLoader[Any]]:
    """Let a trainer predict together with the other workers; yields the loader for its loop. Collective."""
    together = _Together(trainer, run, loader)
    cuts: Any = loader.batch_sampler
    batch_size = cuts.batch_size  # may be another than that of args
    sizes: DataLoader[Any] = DataLoader(
        range(sum(map(len, together.batches))),  # type: ignore[arg-type]
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
