"""torchmetrics within micro-batches: each has an empty state there, and the states are added up over all workers.

A metric is defined by its states and how states of different processes are reduced to one (``dist_reduce_fx``). So a
step is exact: before each micro-batch the states are empty, after it they are added to sums, and when the sums are
known every worker has the states of the whole global batch, and adds these to those of the steps before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import MetricTracker, MinMaxMetric, Running

from unisono.core.errors import UsageError
from unisono.interop.lightning.logs import LogSums, extreme

__all__ = ["Metrics", "Rows", "metrics_of"]

State = dict[str, Any]
"""States of a metric by name: a tensor, or a list of tensors."""
Rows = dict[int, dict[str, list[Any]]]
"""By batch, then by path of a metric and name of a state: the items of its list, mostly tensors."""

_KINDS: Final[dict[Any, str]] = {
    dim_zero_sum: "sum",
    dim_zero_mean: "mean",
    dim_zero_max: "max",
    dim_zero_min: "min",
    dim_zero_cat: "rows",
}
_GROUPING: Final = ("_enable_compute_groups", "_groups", "_groups_checked", "_state_is_copy")
"""Attributes of a MetricCollection: which of its metrics share states."""
_REFUSED: Final[dict[type[nn.Module], str]] = {
    Running: (
        "counts the calls of one process, but here each worker has different micro-batches: log the value with "
        "on_step=True, and smooth it where it is shown"
    ),
    MinMaxMetric: (
        "keeps its extremes outside its states, and each worker computes them from different micro-batches: log "
        "the metric itself, and compare its values of the epochs in on_validation_epoch_end"
    ),
    MetricTracker: "makes metrics while it runs, which a worker that joins does not have: log the metric itself, and "
    "compare its values of the epochs in on_validation_epoch_end",
}
"""Wrappers, and why they cannot work."""


class Metrics:
    """The metrics of a module, see `metrics_of`.

    Attributes:
        found: by path.
        rows: of the batches of an evaluation that this worker has computed.
    """

    def __init__(self) -> None:
        self.found: dict[str, Metric] = {}
        self.rows: Rows = {}
        self._before: dict[str, tuple[int, State]] = {}
        self._grouped: list[tuple[MetricCollection, dict[str, Any]]] = []

    def find(self, module: nn.Module) -> None:
        """Find the metrics that a module has now, until `release`.

        Raises:
            UsageError: one of them keeps more than its states.
        """
        self.release()
        for path, one in module.named_modules():
            if why := next((words for kind, words in _REFUSED.items() if isinstance(one, kind)), ""):
                raise UsageError(f"the metric {path!r} is a {type(one).__qualname__}, which {why}")
        self.found = {path: one for path, one in module.named_modules() if isinstance(one, Metric)}
        self._before = {}
        for one in module.modules():
            if isinstance(one, MetricCollection):
                self._ungroup(one)

    def _ungroup(self, collection: MetricCollection) -> None:
        # Groups share states, which only spares time; here each metric has its own.
        self._grouped.append((collection, {name: getattr(collection, name) for name in _GROUPING}))
        if collection._groups_checked:
            collection._compute_groups_create_state_ref(copy=True)
        collection._enable_compute_groups, collection._groups, collection._groups_checked = False, {}, False

    def release(self) -> None:
        """Give the collections their groups back."""
        for collection, grouping in self._grouped:
            vars(collection).update(grouping)
        self._grouped = []

    def begin(self) -> None:
        """Remember the states before a step or an evaluation."""
        self._before = {path: (metric._update_count, _states(metric)) for path, metric in self.found.items()}
        self.rows = {}

    def empty(self) -> None:
        """Empty all states, before a micro-batch."""
        for metric in self.found.values():
            for name, default in metric._defaults.items():
                if isinstance(default, list):
                    setattr(metric, name, [])  # `reset` would clear the list that is remembered
            metric.reset()

    def take(self, taken: LogSums, *, keeps_rows: bool) -> None:
        """Add the states after a micro-batch to its sums.

        Args:
            keeps_rows: lists of rows are kept, in `rows`; otherwise they are refused.

        Raises:
            UsageError: states of different workers cannot be made one.
        """
        rows: dict[str, list[Any]] = {}
        for path, metric in self.found.items():
            if not (count := metric._update_count):
                continue
            taken.add(_key(path, "updates"), torch.tensor(count))
            for name, kind in _kinds(path, metric).items():
                value, key = getattr(metric, name), _key(path, name)
                if kind == "rows":
                    if not keeps_rows:
                        raise UsageError(
                            f"the metric {path!r} ({type(metric).__qualname__}) keeps the rows of all batches "
                            f"({name!r}), which are on different workers, and the training adds up numbers only. Give "
                            "it thresholds= if it has them, use it in validation_step or test_step instead, or log "
                            "the sums that it is made of"
                        )
                    if len(value):
                        rows[key] = _moved(value, torch.device("cpu"))
                elif kind in ("max", "min"):
                    taken.spread(key, kind, value.detach().to(torch.float64))
                elif kind == "mean":
                    taken.add(key, value.detach().to(torch.float64) * count)
                else:
                    taken.add(key, value.detach())
        self.rows[taken.place.number] = rows

    def finish(self, totals: Mapping[str, Any], rows: Rows, on_step: Collection[str]) -> None:
        """Give every metric the states of all micro-batches, added to those before.

        Args:
            on_step: paths of the metrics whose value over these micro-batches alone is wanted.
        """
        for path, metric in self.found.items():
            before_count, before = self._before[path]
            # It is of one micro-batch of this worker. Only a log of the step reads it, and gets the exact value below.
            metric._computed = metric._forward_cache = None
            count = int(totals.get(_key(path, "updates"), 0))
            if path in on_step and not metric._defaults:
                raise UsageError(
                    f"the metric {path!r} ({type(metric).__qualname__}) wraps others and has no states of its own, of "
                    "which the value of one step could be computed: log it with on_step=False, on_epoch=True"
                )
            if not count:
                metric._update_count = before_count
                _set(metric, before)
                continue
            now: State = {}
            for name, kind in _kinds(path, metric).items():
                key = _key(path, name)
                if kind == "rows":
                    # Not made one tensor: without dist_reduce_fx each item is a sample, or a batch, to the metric.
                    now[name] = [item for number in sorted(rows) for item in rows[number].get(key, ())]
                    continue
                total = torch.as_tensor(totals[key])
                now[name] = (
                    extreme(kind, total) if kind in ("max", "min") else total / count if kind == "mean" else total
                )
            if path in on_step:
                metric._update_count = count
                _set(metric, now)
                metric._forward_cache = metric.compute()
                metric._computed = None
            metric._update_count = before_count + count
            _set(metric, _joined(metric, before_count, before, count, now) if before_count else now)
        self._before = {}

    @property
    def has_rows(self) -> bool:
        """Whether a metric that an evaluation may use keeps rows. Equal on all workers."""
        return any(_kind_of(metric, name) == "rows" for metric in self.found.values() for name in metric._defaults)

    # -- a part of the state of the run ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        # Within a step or an evaluation each worker has other states; those of before are equal.
        now = {path: (metric._update_count, _states(metric)) for path, metric in self.found.items()}
        return {path: [*one] for path, one in (self._before or now).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for path, (count, states) in state.items():
            metric = self.found[path]
            metric._update_count, metric._computed = count, None
            _set(metric, states)


_known: WeakKeyDictionary[nn.Module, Metrics] = WeakKeyDictionary()


def metrics_of(module: nn.Module) -> Metrics:
    """Return the metrics of a module, found anew.

    It is the same object each time, as states of Trainers that a run tracks have it: within a step or an evaluation
    only this object knows the states that are equal on all workers.
    """
    metrics = _known.setdefault(module, Metrics())
    metrics.find(module)
    return metrics


def _key(path: str, name: str) -> str:
    return f"{path}.{name} [torchmetrics]"


def _states(metric: Metric) -> State:
    found: State = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        found[name] = list(value) if isinstance(value, list) else value.detach().clone()
    return found


def _set(metric: Metric, states: Mapping[str, Any]) -> None:
    for name, value in states.items():
        default = metric._defaults[name]
        if isinstance(default, Tensor):
            setattr(metric, name, value.to(dtype=getattr(metric, name).dtype, device=metric.device))
        else:
            setattr(metric, name, _moved(value, metric.device))


def _moved(items: list[Any], device: torch.device) -> list[Any]:
    """Return the items of a list state on a device; they may be tuples, or text."""
    moved: list[Any] = apply_to_collection(items, Tensor, lambda tensor: tensor.detach().to(device))
    return moved


def _kind_of(metric: Metric, name: str) -> str:
    """Return how a state is reduced; "": in a way of its own."""
    default, how = metric._defaults[name], _KINDS.get(metric._reductions[name], "")
    if isinstance(default, list):
        return "rows" if how == "rows" or metric._reductions[name] is None else ""
    return "" if how == "rows" or (how == "sum" and bool(default.any())) else how


def _kinds(path: str, metric: Metric) -> dict[str, str]:
    """Return how each state of a metric is reduced.

    Raises:
        UsageError: in a way of its own.
    """
    found = {name: _kind_of(metric, name) for name in metric._defaults}
    own = next((name for name, kind in found.items() if not kind), None)
    if own is not None:
        raise UsageError(
            f"the state {own!r} of the metric {path!r} ({type(metric).__qualname__}) has its own reduction "
            "(dist_reduce_fx), but UnisonoStrategy supports only sums, means, maxima, minima and, in evaluations, "
            "lists of rows: log the sums that the metric is made of"
        )
    return found


def _joined(metric: Metric, before_count: int, before: State, count: int, now: State) -> State:
    """Return the states of the batches before together with those of now."""
    found: State = {}
    for name in metric._defaults:
        kind, old, new = _kind_of(metric, name), before[name], now[name]
        if kind == "rows":
            found[name] = [*old, *new]
            continue
        new = new.to(old.device)
        if kind == "sum":
            found[name] = old + new.to(old.dtype)
        elif kind == "mean":
            found[name] = (old.to(torch.float64) * before_count + new * count) / (before_count + count)
        else:
            wide = old.to(torch.float64)
            found[name] = torch.maximum(wide, new) if kind == "max" else torch.minimum(wide, new)
    return found
