"""Charts of a run in another program: each step and evaluation once, however many writers the run has had."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from unisono.core.events import EvaluationFinished, Event, Once, RunEnded, RunStarted, StepFinished
from unisono.views.watch.since import since

__all__ = ["Charts"]


class Charts(ABC):
    """Puts the numbers of a run into charts. A writer that follows another one puts what is missing, by the journal."""

    def __init__(self) -> None:
        self._once = Once()
        self._next_step = 0
        """All steps before are in the charts."""

    def emit_all(self, events: Sequence[Event]) -> None:
        """Put what these events have."""
        for event in events:
            match event:
                case RunStarted():
                    self._next_step = self._begin(event)
                    self._once = Once()
                    if event.directory:
                        for earlier in since(Path(event.directory), self._next_step):
                            self._put_once(earlier)
                case StepFinished() | EvaluationFinished():
                    if self._is_open:
                        self._put_once(event)
                case RunEnded():
                    self._end(event)
        self._keep()

    def _put_once(self, event: StepFinished | EvaluationFinished) -> None:
        if isinstance(event, StepFinished):
            if event.step < self._next_step:
                return  # the tool has it, and the journal may lack it
            self._next_step = event.step + 1
        if self._once.is_new(event):
            self._put(event)

    @property
    @abstractmethod
    def _is_open(self) -> bool:
        """Whether there is something to put numbers into."""

    @abstractmethod
    def _begin(self, started: RunStarted) -> int:
        """Open the charts; returns the first step that they lack."""

    @abstractmethod
    def _put(self, event: StepFinished | EvaluationFinished) -> None:
        """Put one point into each chart."""

    @abstractmethod
    def _keep(self) -> None:
        """Hand over what was put, and note how far that reaches."""

    @abstractmethod
    def _end(self, ended: RunEnded) -> None:
        """Note how the run has ended."""
