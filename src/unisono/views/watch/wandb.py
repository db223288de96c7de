"""Weights & Biases: a run with the recipe as its configuration and the scalars as its history.

Needs the package ``wandb``, which is imported in a process of its own. Its own environment variables hold, e.g.
``WANDB_MODE=offline``.
"""

from __future__ import annotations

import importlib
import os
import uuid
from pathlib import Path
from typing import Any

from unisono.core.events import EvaluationFinished, RunEnded, RunStarted, StepFinished
from unisono.system.extras import need
from unisono.views.watch.apart import Apart
from unisono.views.watch.charts import Charts, ToolBookmark, scalars
from unisono.views.watch.queued import Queued

__all__ = ["WandB"]


class WandB(Queued):
    """A sink that gives a run to Weights & Biases.

    All writers of the run, and the run when it is resumed, log under one id. The next writer goes on at the step that
    the service names (offline: at the one that is noted in the run's directory twice a second), and takes what is
    missing from the journal. So no step is missing; offline, the steps of the last half second before a worker was
    killed can stand in the files of both workers, with the same values. Steps that a resumed run does again are not
    logged again (they have the same bits). A run that is resumed with another recipe gets another id.

    Args:
        project: default: the environment's WANDB_PROJECT, else "unisono".

    Raises:
        UsageError: the package is missing.
    """

    def __init__(self, project: str = "") -> None:
        need("wandb", "Weights & Biases", "wandb")
        super().__init__(Apart(f"{__name__}:_Client", project=project), name="Weights & Biases")


class _Client(Charts):
    """Speaks with Weights & Biases, in a process of its own."""

    def __init__(self, project: str) -> None:
        super().__init__()
        self._project = project or os.environ.get("WANDB_PROJECT", "unisono")
        self._run: Any = None
        self._memory: ToolBookmark | None = None
        self._about: dict[str, Any] = {}
        self._evaluation: dict[str, float] = {}
        """Of the newest evaluation: a step can be logged once, so it goes with the step that follows."""

    def close(self) -> None:
        self._finish(0)

    def _begin(self, started: RunStarted) -> int:
        self._finish(0)
        wandb = importlib.import_module("wandb")
        self._memory = ToolBookmark(started.directory, "wandb")
        recipe = {name: value for name, value in started.recipe.items() if name != "steps"}
        same = {"project": self._project, "recipe": recipe}
        before = self._memory.read(same) or {"id": uuid.uuid4().hex[:12], "steps": 0}
        self._about = {**same, "id": before["id"]}
        self._run = wandb.init(
            project=self._project,
            id=before["id"],
            resume="allow",
            name=Path(started.directory).name or None,
            dir=started.directory or None,
            config=dict(started.recipe),
            settings=wandb.Settings(console="off", silent=True),
        )
        return max(int(before["steps"]), int(self._run.step))

    def _put(self, event: StepFinished | EvaluationFinished) -> None:
        if isinstance(event, EvaluationFinished):
            self._evaluation |= scalars(event)
            return
        evaluation, self._evaluation = self._evaluation, {}
        values = {**evaluation, **scalars(event), **({"time": event.time} if event.time else {})}
        self._run.log(values, step=event.step, commit=True)

    def _keep(self) -> None:
        if self._run is not None and self._memory is not None:
            self._memory.write({**self._about, "steps": self._next_step})

    def _end(self, ended: RunEnded) -> None:
        self._finish(0 if ended.ok else 1)

    def _finish(self, code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            if self._evaluation:
                run.log(self._evaluation, step=self._next_step, commit=True)
                self._evaluation = {}
            run.finish(exit_code=code)
