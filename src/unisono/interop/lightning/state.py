"""State of a Trainer that the next step depends on, as an object that a run tracks.

It is read at the boundary of two steps, and loaded there on a worker that joins, or in a run that resumes: in both
cases Lightning's loops are at the place where they ask for the next batch. So counters are put in place, and none of
what Lightning does after loading a checkpoint is wanted.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from lightning import pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor
from torchmetrics import Metric

from unisono.core.errors import UsageError
from unisono.engine.state.packing import is_same_state
from unisono.interop.lightning.logs import Results
from unisono.interop.lightning.metrics import Metrics

__all__ = ["TrainerState"]

SAVED: Final = ("current_score", "_last_global_step_saved", "_last_checkpoint_saved")
"""Attributes of a ModelCheckpoint that its ``load_state_dict`` leaves out; they decide whether it saves."""
HERE: Final = "<dirpath>/"
"""In the state, the folder of a ModelCheckpoint."""
FIELDS: Final = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "dataloader_idx"),
    "metric_attribute",
)
"""Of what a result was logged with."""


class TrainerState:
    """Counters of the loops, states of the callbacks, logged values, and metrics of a Trainer."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer: Any = trainer  # its connectors add attributes, undeclared
        self._metrics: list[Metrics] = []

    def use(self, metrics: Metrics) -> None:
        """Add the metrics of the module that the Trainer trains now; it may have trained others."""
        self._metrics = [metrics, *(one for one in self._metrics if one is not metrics)]

    def state_dict(self) -> dict[str, Any]:
        trainer, connector = self.trainer, self.trainer._logger_connector
        loop = trainer.fit_loop.epoch_loop
        return {
            "progress": {path: one.state_dict() for path, one in _trackers(trainer.fit_loop)},
            "batches_that_stepped": loop._batches_that_stepped,
            "should_stop": trainer.should_stop,
            "callbacks": {one.state_key: _callback_state(one) for one in trainer.callbacks},
            "metrics": [one.state_dict() for one in self._metrics],
            "results": [_result_state(key, one) for key, one in loop._results.items()],
            "logged": {
                "progress_bar": dict(connector._progress_bar_metrics),
                "logged": dict(connector._logged_metrics),
                "callback": dict(connector._callback_metrics),
            },
            "hook": connector._current_fx,
            "is_first": connector._first_loop_iter,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer, connector = self.trainer, self.trainer._logger_connector
        loop = trainer.fit_loop.epoch_loop
        for path, one in _trackers(trainer.fit_loop):
            _load_progress(one, state["progress"][path])
        loop._batches_that_stepped = state["batches_that_stepped"]
        trainer.should_stop = state["should_stop"]
        for callback in trainer.callbacks:
            if found := state["callbacks"].get(callback.state_key):
                _load_callback(callback, found)
                if not is_same_state(_callback_state(callback), found):
                    raise UsageError(
                        f"the callback {type(callback).__qualname__} has a different state_dict() after "
                        "load_state_dict(), so a worker that joins, or a run that resumes, would not continue as the "
                        "others do"
                    )
        for metrics, found in zip(self._metrics, state["metrics"], strict=True):
            metrics.load_state_dict(found)
        results = loop._results
        results.clear()
        for found in state["results"]:
            results[found["key"]] = _result_of(found, self._find_metric, trainer.strategy.reduce)
        connector._progress_bar_metrics = dict(state["logged"]["progress_bar"])
        connector._logged_metrics = dict(state["logged"]["logged"])
        connector._callback_metrics = dict(state["logged"]["callback"])
        connector._current_fx = state["hook"]
        connector._first_loop_iter = state["is_first"]
        if (fetcher := trainer.fit_loop._data_fetcher) is not None:
            fetcher.fetched = loop.batch_progress.current.ready

    def _find_metric(self, path: str) -> Metric:
        return next(one.found[path] for one in self._metrics if path in one.found)


def install_results(trainer: pl.Trainer) -> None:
    """Give the loops of a Trainer results that know of micro-batches."""
    fit = trainer.fit_loop.epoch_loop
    if not isinstance(fit._results, Results):
        fit._results = Results(training=True)
    for loop in (fit.val_loop, trainer.validate_loop, trainer.test_loop):
        if not isinstance(loop._results, Results):
            loop._results = Results(training=False)


def _trackers(loop: _Loop, path: str = "") -> Iterator[tuple[str, _BaseProgress]]:
    """Yield the counters of a loop and of those within it, by path."""
    for name, value in vars(loop).items():
        if isinstance(value, _BaseProgress):
            yield path + name, value
        elif isinstance(value, _Loop):
            yield from _trackers(value, f"{path}{name}.")


def _load_progress(tracker: _BaseProgress, state: Mapping[str, Any]) -> None:
    """Load counters, also where they are nested, without replacing the objects."""
    for name, value in state.items():
        own = getattr(tracker, name)
        if isinstance(own, _BaseProgress):
            _load_progress(own, value)
        else:
            setattr(tracker, name, value)


def _callback_state(callback: pl.Callback) -> dict[str, Any]:
    state = dict(callback.state_dict())
    if isinstance(callback, ModelCheckpoint):
        folder = f"{state.pop('dirpath', '')}{os.sep}"
        state["saved"] = {name: getattr(callback, name) for name in SAVED}
        # So the digest of the state does not say where the checkpoints lie.
        state = _renamed(state, lambda path: path.replace(folder, HERE, 1) if path.startswith(folder) else path)
    return state


def _load_callback(callback: pl.Callback, state: dict[str, Any]) -> None:
    state = copy.deepcopy(state)
    if isinstance(callback, ModelCheckpoint):
        folder = f"{callback.dirpath}{os.sep}"
        state = _renamed(state, lambda path: path.replace(HERE, folder, 1) if path.startswith(HERE) else path)
        for name, value in state.pop("saved").items():
            setattr(callback, name, value)
        state["dirpath"] = callback.dirpath
    callback.load_state_dict(state)


def _renamed(state: Any, rename: Callable[[str], str]) -> Any:
    """Return a state with other strings, also as keys."""
    if isinstance(state, dict):
        return {_renamed(key, rename): _renamed(value, rename) for key, value in state.items()}
    return rename(state) if isinstance(state, str) else state


def _result_state(key: str, result: _ResultMetric) -> dict[str, Any]:
    """Return one name of ``self.log``, with its value so far."""
    meta = result.meta
    values = {}
    if result.is_tensor:
        values = {name: getattr(result, name) for name in result._defaults}
    return {
        "key": key,
        "meta": {name: getattr(meta, name) for name in FIELDS},
        "reduce": meta.reduce_fx.__name__,
        "is_tensor": result.is_tensor,
        "values": values,
        "cache": result._forward_cache if isinstance(result._forward_cache, Tensor) else None,
        "has_reset": result.has_reset,
        "count": result._update_count,
    }


def _result_of(
    state: Mapping[str, Any], find_metric: Callable[[str], Metric], reduce: Callable[..., Any]
) -> _ResultMetric:
    # The reduction is given as a word, and is made a function of torch by `_Metadata`.
    meta = _Metadata(**state["meta"], reduce_fx=state["reduce"])
    meta.sync = _Sync(fn=reduce)  # as `LightningModule.log` gives it; it is compared
    result = _ResultMetric(meta, state["is_tensor"])
    for name, value in state["values"].items():
        setattr(result, name, value)
    if not state["is_tensor"]:
        result.value = find_metric(state["meta"]["metric_attribute"])
    result._forward_cache = state["cache"]
    result.has_reset = state["has_reset"]
    result._update_count = state["count"]
    return result
