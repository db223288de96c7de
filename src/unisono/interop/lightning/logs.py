"""``self.log`` within a micro-batch, or a batch of an evaluation: taken, added up over all workers, and then logged.

Within a micro-batch each worker has other values than the others, so nothing may be logged there. What the module logs
is added to sums (``step.add``, or the totals of ``run.evaluate``), and when these are known, equal on all workers,
each worker logs them once. A worker that had no micro-batch does not know what was logged, so the name of a sum says
all about it: `LogEntry`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor, nn
from torchmetrics import Metric

from unisono.core.errors import UsageError
from unisono.interop.lightning.trainer_data import GlobalBatch, WholeSet

__all__ = ["BatchPlace", "LogEntry", "LogSums", "Results", "replay"]

FLAGS: Final = {
    "bar": "prog_bar",
    "logger": "logger",
    "step": "on_step",
    "epoch": "on_epoch",
    "suffix": "add_dataloader_idx",
}
"""By the word in a key, the option of ``self.log``."""
OFF: Final = ("bar", "step")
"""Those that are off unless they are asked for."""
KINDS: Final = ("mean", "sum", "max", "min", "metric")
_REDUCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "mean": ("mean", "avg", torch.mean),
    "sum": ("sum", torch.sum, sum),
    "max": ("max", torch.max, max),
    "min": ("min", torch.min, min),
}
"""What ``reduce_fx`` may be, as of Lightning, by what it means."""


@dataclass(frozen=True)
class LogEntry:
    """What one name of ``self.log`` is, as text the name of its sum: ``train_loss [training_step mean bar step]``."""

    name: str
    hook: str
    """The hook in which it was logged, with which Lightning groups its values."""
    kind: str
    """How it is reduced; "metric": it is a ``torchmetrics.Metric``."""
    flags: tuple[str, ...]
    metric: str = ""
    """The path of the metric in the module."""

    @property
    def key(self) -> str:
        words = (self.hook, self.kind, *self.flags, *([f"of={self.metric}"] if self.metric else []))
        return f"{self.name} [{' '.join(words)}]"

    @classmethod
    def parse(cls, key: str) -> LogEntry | None:
        """Return the entry of a key; None: the key is not that of an entry."""
        name, _, rest = key.removesuffix("]").rpartition(" [")
        words = rest.split()
        if len(words) < 2 or words[1] not in KINDS:
            return None
        metric = next((word.removeprefix("of=") for word in words[2:] if word.startswith("of=")), "")
        return cls(name, words[0], words[1], tuple(word for word in words[2:] if word in FLAGS), metric)


@dataclass(frozen=True)
class BatchPlace:
    """Which part of a step or of an evaluation is computed."""

    number: int
    """Of the micro-batch or batch."""
    count: int
    num_samples: int


class LogSums:
    """The sums of one micro-batch or batch.

    Attributes:
        sums: by name: what is to be added up over all of them.
    """

    def __init__(self, place: BatchPlace) -> None:
        self.place = place
        self.sums: dict[str, Tensor] = {}

    def note(self, entry: LogEntry, value: Any, batch_size: float | None) -> None:
        """Take one call of ``self.log``."""
        if entry.kind == "metric":
            self.add(entry.key, torch.ones((), dtype=torch.int64))
            return
        value = torch.as_tensor(value).detach().to(torch.float64).reshape(())
        if entry.kind in ("max", "min"):
            self.spread(entry.key, entry.kind, value)
            return
        weight = 1.0
        if entry.kind == "mean":
            weight = float(self.place.num_samples if batch_size is None else batch_size)
        self.add(entry.key, torch.stack([value * weight, torch.full_like(value, weight)]))

    def add(self, key: str, value: Tensor) -> None:
        self.sums[key] = self.sums[key] + value if key in self.sums else value

    def spread(self, key: str, kind: str, value: Tensor) -> None:
        """Note a value of which the extreme is wanted.

        A sum of zeros and one value is that value, to the bit; so each micro-batch has a row of the sum for itself.
        """
        number, count = self.place.number, self.place.count
        if (before := self.sums.get(key)) is not None:
            other = before[0, number]
            value = torch.maximum(other, value) if kind == "max" else torch.minimum(other, value)
        rows = torch.zeros((2, count, *value.shape), dtype=torch.float64, device=value.device)
        rows[0, number], rows[1, number] = value, 1.0
        self.sums[key] = rows


def extreme(kind: str, total: Tensor) -> Tensor:
    """Return the maximum or minimum over the micro-batches that have given a value, from a sum of `LogSums.spread`."""
    given = total[0][total[1].reshape(len(total[1]), -1)[:, 0] > 0]
    return given.amax(0) if kind == "max" else given.amin(0)


class Results(_ResultCollection):
    """Results of a loop of Lightning, whose ``log`` gives to `taking` what a micro-batch logs.

    Attributes:
        taking: of the micro-batch that is computed; None: outside of one.
    """

    taking: LogSums | None = None

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """See ``LightningModule.log``."""
        if self.taking is None:
            super().log(fx, name, value, **options)
            return
        kind = "metric" if isinstance(value, Metric) else _kind_of(name, options.get("reduce_fx", "mean"))
        flags = tuple(flag for flag, option in FLAGS.items() if options.get(option, flag not in OFF))
        entry = LogEntry(name, fx, kind, flags, options.get("metric_attribute") or "")
        self.taking.note(entry, value, options.get("batch_size"))

    def _extract_batch_size(self, value: Any, batch_size: int | None, meta: Any) -> int:
        if batch_size is None and isinstance(self.batch, GlobalBatch):
            return self.batch.batch_samples
        if batch_size is None and isinstance(self.batch, WholeSet):
            return self.batch.num_samples
        return super()._extract_batch_size(value, batch_size, meta)


def _kind_of(name: str, reduce: Any) -> str:
    """Return how a value is reduced over the micro-batches.

    Raises:
        UsageError: in a way that is not known.
    """
    word = reduce.lower() if isinstance(reduce, str) else reduce
    kind = next((kind for kind, known in _REDUCTIONS.items() if word in known), None)
    if kind is None:
        raise UsageError(
            f"self.log({name!r}, reduce_fx={reduce!r}): UnisonoStrategy reduces the values of micro-batches by "
            '"mean", "sum", "max" and "min"; log the parts of the value, with one of these'
        )
    return kind


def logged(totals: Mapping[str, Any]) -> Iterator[tuple[LogEntry, Any]]:
    """Yield the entries that a step or an evaluation has logged, with their sums."""
    for key, total in totals.items():
        entry = LogEntry.parse(key)
        if entry is None:
            continue
        counted = total if entry.kind == "metric" else total[1].sum()
        if counted > 0:
            yield entry, total


def replay(results: Results, connector: Any, module: nn.Module, totals: Mapping[str, Any]) -> dict[str, float]:
    """Log the totals as ``self.log`` would, on every worker.

    Args:
        results: of the loop that runs.
        connector: the logger connector of the Trainer.

    Returns:
        The logged numbers by name.
    """
    default = torch.get_default_dtype()
    dtype = default if default in (torch.float32, torch.float64) else torch.float32
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    numbers: dict[str, float] = {}
    for entry, total in logged(totals):
        if connector.should_reset_tensors(entry.hook):
            results.reset(metrics=False, fx=entry.hook)
        weight = 1.0
        if entry.kind == "metric":
            value: Any = module.get_submodule(entry.metric)
        else:
            if entry.kind in ("max", "min"):
                number = extreme(entry.kind, total)
            else:
                # An evaluation logs once, and nothing is added to it that it would have to be weighted against.
                weight = float(total[1]) if results.training else 1.0
                number = total[0] / total[1] if entry.kind == "mean" else total[0]
            value = number.to(dtype=dtype, device=device)
            numbers[entry.name] = float(value)
        results.log(
            entry.hook,
            entry.name,
            value,
            **{option: flag in entry.flags for flag, option in FLAGS.items()},
            reduce_fx="mean" if entry.kind == "metric" else entry.kind,
            batch_size=int(weight) if weight.is_integer() else weight,
            metric_attribute=entry.metric or None,
            sync_dist_fn=connector.trainer.strategy.reduce,
        )
        connector._current_fx = entry.hook
    return numbers
