"""Inspectors of a run, by name: taps (`unisono.engine.rounds.taps`) that the settings of a run name.

An inspected run has a directory of its own, and does not touch that of another run: it may begin from a checkpoint of
that run. It writes only the checkpoints that its inspector asks for, gives its events to no sinks, and is not profiled.
To add an inspector: a module with an `Inspector` that is made of its settings (JSON), and its row in `INSPECTORS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from unisono.core.errors import UsageError
from unisono.core.events import StepResult
from unisono.core.spec import RunSpec
from unisono.engine.microbatch.doubts import Doubt
from unisono.engine.rounds.taps import Tap

__all__ = ["INSPECTORS", "Inspector", "begin", "inspector_of"]

INSPECTORS: Final[dict[str, str]] = {
    "check": "unisono.tools.check.checked:Checked",
    "evaluate": "unisono.script.evaluator:Visiting",
    "dissect": "unisono.tools.replay.dissecting:Dissecting",
    "replay": "unisono.tools.replay.replaying:Replaying",
    "recompute": "unisono.tools.certificate.recomputing:Recomputing",
    "probe": "unisono.tools.plan.probe_inspector:Probe",
}
"""By name, the module and the class of an inspector, imported when a run names it."""


class Inspector(Tap):
    """A tap that the settings of a run name: it also sees the script's calls, its updates, and the end of the run."""

    def arguments(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what ``run.steps`` is to take instead of the arguments that the script has given, for a trial.

        Args:
            given: ``microbatches``, ``batch_size``, ``wire`` and ``delay``.
        """
        return given

    def after_step(self, result: StepResult) -> None:
        """Receive the result of a step as it goes into the journal, when the script has made its update."""

    def doubted(self, doubt: Doubt) -> None:
        """Receive what the script probably means otherwise than a step takes it."""

    def saves_at(self, step: int) -> bool:
        """Return whether a checkpoint is written when so many steps of the run are done; the same on all members."""
        return False

    def saved(self, step: int) -> None:
        """Note that this checkpoint is on the disk. May raise `StopInspection`, on all members."""

    def at_end(self) -> None:
        """Note that the script has reached its end: the run has done all its steps. May raise `StopInspection`."""

    def close(self) -> None:
        """Give back what is held; the run has ended, however it did."""


_begun: Final[list[Inspector]] = []


def begin(spec: RunSpec) -> None:
    """Make the inspector of a worker's first run before its script begins, so that it sees all of the script.

    Raises:
        UsageError: as `inspector_of` does.
    """
    if (found := inspector_of(spec)) is not None:
        _begun.append(found)


def inspector_of(spec: RunSpec) -> Inspector | None:
    """Return the inspector that the settings of a run name; None: the run is not inspected.

    Raises:
        UsageError: there is no such inspector, or the run has no directory of its own.
    """
    if _begun:
        return _begun.pop()
    name, _, settings = spec.settings.inspect.partition(":")
    if not name:
        return None
    if not spec.settings.run_dir:
        raise UsageError("an inspected run needs a directory of its own, so that it does not write into another run's")
    if name not in INSPECTORS:
        raise UsageError(f"there is no inspector {name!r}; there are {', '.join(sorted(INSPECTORS)) or 'none'}")
    module, _, kind = INSPECTORS[name].partition(":")
    inspector: Inspector = getattr(importlib.import_module(module), kind)(settings)
    return inspector
