"""MLflow: a run with the recipe as parameters and the scalars as metrics.

Needs the package ``mlflow-skinny`` (or ``mlflow``), which is imported in a process of its own.
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any, Final

from unisono.core.events import EvaluationFinished, RunEnded, RunStarted, StepFinished
from unisono.system.extras import need
from unisono.views.watch.apart import Apart
from unisono.views.watch.charts import Charts, ToolBookmark, scalars
from unisono.views.watch.queued import Queued

__all__ = ["MLflow"]

MOST_METRICS: Final = 1000
"""Of one request; MLflow takes no more."""
LONGEST_PARAMETER: Final = 500


class MLflow(Queued):
    """A sink that gives a run to MLflow.

    All writers of the run, and the run when it is resumed, log into one run of MLflow. The next writer asks for the
    newest step that is there, and takes what is missing from the journal. MLflow cannot take back a metric: the steps
    that a resumed run does again are not logged again (they have the same bits). A run that is resumed with another
    recipe begins another run of MLflow.

    Args:
        experiment: default: the environment's MLFLOW_EXPERIMENT_NAME, else "unisono".
        tracking_uri: of the server; default: the environment's MLFLOW_TRACKING_URI, else files in ``mlruns`` in the
            directory of the run.

    Raises:
        UsageError: the package is missing.
    """

    def __init__(self, experiment: str = "", tracking_uri: str = "") -> None:
        need("mlflow", "MLflow", "mlflow")
        place = f"{__name__}:_Client"
        super().__init__(Apart(place, experiment=experiment, tracking_uri=tracking_uri), name="MLflow")


class _Client(Charts):
    """Speaks with MLflow, in a process of its own."""

    def __init__(self, experiment: str, tracking_uri: str) -> None:
        super().__init__()
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "unisono")
        self._uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        self._client: Any = None
        self._make: Any = None
        self._run_id = ""
        self._metrics: list[Any] = []
        self._known: dict[str, int] = {}

    def close(self) -> None:
        self._keep()

    def _begin(self, started: RunStarted) -> int:
        uri = self._uri
        if not uri:
            if not started.directory:
                raise ValueError("the run has no directory: set MLFLOW_TRACKING_URI, or give MLflow(tracking_uri=...)")
            uri = (Path(started.directory) / "mlruns").absolute().as_uri()
        if uri.startswith("file:") or "://" not in uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow would like a database instead
        self._client = importlib.import_module("mlflow").MlflowClient(tracking_uri=uri)
        self._make = importlib.import_module("mlflow.entities")
        memory = ToolBookmark(started.directory, "mlflow")
        recipe = {name: value for name, value in started.recipe.items() if name != "steps"}
        same = {"uri": uri, "experiment": self._experiment, "recipe": recipe}
        if before := memory.read(same):
            self._run_id = before["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._new_run(started)
            memory.write({**same, "run_id": self._run_id})
        found = self._client.get_run(self._run_id).data.to_proto().metrics
        self._known = {each.key: each.step for each in found}
        return self._known.get("loss", -1) + 1

    def _new_run(self, started: RunStarted) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = (
            experiment.experiment_id if experiment is not None else self._client.create_experiment(self._experiment)
        )
        name = Path(started.directory).name or started.run_id
        tags = {"unisono.run_id": started.run_id, "unisono.directory": started.directory}
        run_id: str = self._client.create_run(number, run_name=name, tags=tags).info.run_id
        parameters = [self._make.Param(name, str(value)[:LONGEST_PARAMETER]) for name, value in started.recipe.items()]
        self._client.log_batch(run_id, params=parameters)
        return run_id

    def _put(self, event: StepFinished | EvaluationFinished) -> None:
        at = int(1000 * (event.time or time.time()))
        values = scalars(event)
        if "loss" in values:
            values["loss"] = values.pop("loss")  # the last one: where it is, the others are
        for name, value in values.items():
            if event.step > self._known.get(name, -1):
                self._metrics.append(self._make.Metric(_name(name), value, at, event.step))
        if len(self._metrics) >= MOST_METRICS:
            self._keep()

    def _keep(self) -> None:
        while self._metrics:
            now, self._metrics = self._metrics[:MOST_METRICS], self._metrics[MOST_METRICS:]
            self._client.log_batch(self._run_id, metrics=now)

    def _end(self, ended: RunEnded) -> None:
        self._keep()
        at = int(1000 * (ended.time or time.time()))
        self._client.set_terminated(self._run_id, "FINISHED" if ended.ok else "FAILED", at)


def _name(text: str) -> str:
    """Return a name that MLflow takes: letters, digits, and ``_-./ :``."""
    return "".join(each if each.isalnum() or each in "_-./ :" else "_" for each in text)
