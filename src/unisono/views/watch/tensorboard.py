"""TensorBoard: event files with the scalars of a run, and its recipe as hyperparameters.

Needs the package ``tensorboard`` (not TensorFlow), which is imported when the run begins, in the sink's thread.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from unisono.core.events import EvaluationFinished, RunEnded, RunStarted, StepFinished
from unisono.system.extras import need
from unisono.views.watch.charts import Charts, ToolBookmark, scalars
from unisono.views.watch.queued import Queued

__all__ = ["TensorBoard"]

PREFIX: Final = "events.out.tfevents"
NUMBER: Final = 6
"""Digits of a file's number in its name: TensorBoard reads the files of a directory in the order of their names."""


class TensorBoard(Queued):
    """A sink that writes event files for TensorBoard.

    Each writer of the run, and each time that the run is resumed, begins another file. It says from which step on it
    replaces what stands in earlier files, and takes what they lack from the journal; so every step is shown once.

    Args:
        directory: default: ``tensorboard`` in the directory of the run.

    Raises:
        UsageError: the package is missing.
    """

    def __init__(self, directory: str | os.PathLike[str] = "") -> None:
        need("tensorboard", "TensorBoard", "tensorboard")
        super().__init__(_EventFile(os.fspath(directory)), name="TensorBoard")


class _EventFile(Charts):
    """One event file of one writer."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._chosen = directory
        self._directory = Path()
        self._proto: Any = None
        self._writer: Any = None
        self._memory: ToolBookmark | None = None

    def close(self) -> None:
        if self._writer is not None:
            self._keep()
            self._writer.close()
            self._writer = None

    def _begin(self, started: RunStarted) -> int:
        self.close()
        if not self._chosen and not started.directory:
            raise ValueError(
                "the run has no directory; say where the files go: TensorBoard(DIR), --sink tensorboard=DIR"
            )
        self._directory = directory = Path(self._chosen or Path(started.directory) / "tensorboard").absolute()
        self._proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
        records = importlib.import_module("tensorboard.summary.writer.record_writer")
        directory.mkdir(parents=bool(self._chosen), exist_ok=True)
        before = [path.name for path in directory.glob(f"{PREFIX}.*")]
        self._memory = ToolBookmark(started.directory, "tensorboard")
        first = self._first(started, has_files=bool(before))
        self._writer = records.RecordWriter((directory / _name(before)).open("xb"))
        self._write(step=first, file_version="brain.Event:2")
        # What earlier files say of this step and later ones does not count.
        self._write(step=first, session_log=self._proto.SessionLog(status=self._proto.SessionLog.START))
        self._write(step=first, summary=_hparams(started.recipe))
        return first

    def _first(self, started: RunStarted, *, has_files: bool) -> int:
        """Return the first step that the files of earlier writers may lack, or that this run does again."""
        if not started.directory:
            return started.step
        assert self._memory is not None
        known = self._memory.read({"directory": str(self._directory)})
        return min(started.step, int(known["steps"])) if has_files and known else 0

    def _keep(self) -> None:
        if self._writer is not None and self._memory is not None:
            self._writer.flush()
            self._memory.write({"directory": str(self._directory), "steps": self._next_step})

    def _put(self, event: StepFinished | EvaluationFinished) -> None:
        summary = _summary()
        for tag, value in scalars(event).items():
            summary.value.add(tag=tag, simple_value=value)
        self._write(step=event.step, at=event.time, summary=summary)

    def _end(self, ended: RunEnded) -> None:
        api = importlib.import_module("tensorboard.plugins.hparams.api_pb2")
        plugin = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
        status = api.STATUS_SUCCESS if ended.ok else api.STATUS_FAILURE
        end = plugin.SessionEndInfo(status=status, end_time_secs=ended.time or time.time())
        self._write(summary=_hparam_summary({"session_end_info": end}), at=ended.time)

    def _write(self, *, step: int = 0, at: float = 0.0, **values: Any) -> None:
        event = self._proto.Event(wall_time=at or time.time(), step=step, **values)
        self._writer.write(event.SerializeToString())


def _summary() -> Any:
    return importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary()


def _hparams(recipe: dict[str, int | bool | str]) -> Any:
    """Return the recipe as hyperparameters, with the loss as what they are compared by."""
    api = importlib.import_module("tensorboard.plugins.hparams.api_pb2")
    plugin = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    start = plugin.SessionStartInfo(start_time_secs=time.time())
    infos = []
    for name, value in recipe.items():
        match value:
            case bool():
                start.hparams[name].bool_value = value
                kind = api.DATA_TYPE_BOOL
            case int():
                start.hparams[name].number_value = value
                kind = api.DATA_TYPE_FLOAT64
            case _:
                start.hparams[name].string_value = str(value)
                kind = api.DATA_TYPE_STRING
        infos.append(api.HParamInfo(name=name, type=kind))
    metrics = [api.MetricInfo(name=api.MetricName(tag="loss"))]
    experiment = api.Experiment(hparam_infos=infos, metric_infos=metrics)
    return _hparam_summary({"experiment": experiment, "session_start_info": start})


def _hparam_summary(parts: dict[str, Any]) -> Any:
    plugin = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    metadata = importlib.import_module("tensorboard.plugins.hparams.metadata")
    summary = _summary()
    for name, part in parts.items():
        data = plugin.HParamsPluginData(**{name: part})
        value = summary.value.add(tag=f"_hparams_/{name}", metadata=metadata.create_summary_metadata(data))
        value.tensor.CopyFrom(metadata.NULL_TENSOR)
    return summary


def _name(before: Sequence[str]) -> str:
    """Return a name for a file that is read after these, which may be of machines whose clocks go ahead."""
    fields = [name.removeprefix(f"{PREFIX}.").split(".") for name in before]
    newest = max([int(time.time()), *(int(each[0]) for each in fields if each[0].isdecimal())])
    numbers = [int(each[1]) for each in fields if len(each) > 1 and each[1].isdecimal() and len(each[1]) == NUMBER]
    return f"{PREFIX}.{newest:010d}.{max(numbers, default=-1) + 1:0{NUMBER}d}.{socket.gethostname()}"
