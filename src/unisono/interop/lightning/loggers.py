"""Loggers of a Trainer whose writing worker was lost: another one goes on with the same files."""

from __future__ import annotations

import csv

from lightning import pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

__all__ = ["take_over"]


def take_over(trainer: pl.Trainer) -> None:
    """Let the loggers of a worker that writes from now on keep what the worker before it has written."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            logger._experiment = _NextWriter(logger.log_dir)


class _NextWriter(ExperimentWriter):
    """Writes on in a file of another writer, with its columns; Lightning's own begins by removing it."""

    def _check_log_dir_exists(self) -> None:
        if self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])
