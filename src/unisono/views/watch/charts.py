"""Charts of a run in another program: the same names in every one, each step and evaluation once, however many writers
the run has had.

A tool that keeps what it gets (TensorBoard's files, MLflow's server) outlives the worker that wrote into it. The next
writer asks the tool where it stands and takes the rest from the journal, so no step is lost or doubled there; and a
tool that is added to a run late gets the run from its beginning.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from unisono.core.events import EvaluationFinished, Event, Once, RunEnded, RunStarted, StepFinished
from unisono.record.journal import JOURNAL, from_line
from unisono.record.journal.file import BLOCK_BYTES
from unisono.system.owned import open_regular, write_whole

__all__ = ["Charts", "ToolBookmark", "scalars", "since"]

TOOLS: Final = "tools"
"""Folder in the directory of a run."""
BURST_S: Final = 0.005
PAUSE_S: Final = 0.01
"""An old journal is read in bursts, because a thread that computes takes the interpreter from the training."""
_BROKEN: Final = (ValueError, KeyError, TypeError, RecursionError)
_ANY: Final[Mapping[str, Any]] = MappingProxyType({})


class Charts(ABC):
    """Puts the numbers of a run into charts. A writer that follows another one puts what is missing, by the journal."""

    def __init__(self) -> None:
        self._once = Once()
        self._is_open = False
        """There is something to put numbers into."""
        self._next_step = 0
        """All steps before are in the charts."""

    def emit_all(self, events: Sequence[Event]) -> None:
        """Put what these events have."""
        for event in events:
            match event:
                case RunStarted():
                    self._next_step = self._begin(event)
                    self._is_open, self._once = True, Once()
                    if event.directory:
                        for earlier in since(Path(event.directory), self._next_step):
                            self._put_once(earlier)
                case StepFinished() | EvaluationFinished() if self._is_open:
                    self._put_once(event)
                case RunEnded() if self._is_open:
                    self._end(event)
                    self._is_open = False
        self._keep()

    def _put_once(self, event: StepFinished | EvaluationFinished) -> None:
        if isinstance(event, StepFinished):
            if event.step < self._next_step:
                return  # the tool has it, and the journal may lack it
            self._next_step = event.step + 1
        if self._once.is_new(event):
            self._put(event)

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


def since(directory: Path, step: int) -> Iterator[StepFinished | EvaluationFinished]:
    """Yield the journal's events from this step on: steps, and the evaluations after the line of the step before.

    An evaluation beside the training has its line where the script asks for the result, after later steps.

    A line that is broken ends it; a journal that cannot be read has no events.
    """
    with contextlib.suppress(OSError, *_BROKEN), open_regular(directory / JOURNAL) as file:
        file.seek(_offset(file, step))
        began, is_there = time.monotonic(), step <= 0
        for text in file:
            if not text.endswith(b"\n"):
                return
            event = from_line(json.loads(text))
            if isinstance(event, StepFinished):
                is_there = is_there or event.step >= step - 1
            if isinstance(event, StepFinished | EvaluationFinished) and (
                event.step >= step or (is_there and isinstance(event, EvaluationFinished))
            ):
                yield event
            if time.monotonic() - began > BURST_S:
                time.sleep(PAUSE_S)
                began = time.monotonic()


def _offset(file: Any, step: int) -> int:
    """Return where the first line after the step before this one begins, or a place before it."""
    start = file.seek(0, os.SEEK_END)
    while step > 0 and start > 0:
        start = max(0, start - BLOCK_BYTES)
        file.seek(start)
        if start > 0:
            file.readline()  # a part of a line
        place = file.tell()
        for text in file:
            line = json.loads(text) if text.endswith(b"\n") else {}
            if line.get("kind") == "step":
                if int(line["step"]) < step:
                    return int(place)
                break
    return 0


class ToolBookmark:
    """What a tool must remember of a run (its name for the run, how far it has got): a file in the run's directory.

    Where there is no directory, nothing is remembered.
    """

    def __init__(self, directory: str, tool: str) -> None:
        self._path = Path(directory) / TOOLS / f"{tool}.json" if directory else None

    def read(self, same: Mapping[str, Any] = _ANY) -> dict[str, Any]:
        """Return what was written last; empty where there is nothing, or one of these values is another one there."""
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(self._path.read_text(encoding="utf-8"))
                if isinstance(found, dict) and all(found.get(name) == value for name, value in same.items()):
                    return found
        return {}

    def write(self, values: dict[str, Any]) -> None:
        """Keep these values instead of those before.

        Raises:
            OSError: the file cannot be written.
        """
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            write_whole(self._path, f"{json.dumps(values)}\n".encode())


def scalars(event: StepFinished | EvaluationFinished) -> dict[str, float]:
    """Return the numbers of an event by their names.

    ``loss``, ``samples_per_s``, ``step_s``, ``epoch``, ``workers``, ``seconds/PART``, ``log/NAME``, ``total/NAME``, and
    ``evaluation/NAME``. Totals that are lists are left out.
    """
    if isinstance(event, EvaluationFinished):
        return _numbers("evaluation", event.values)
    whole = event.seconds.total()
    found = {
        "loss": event.loss,
        "samples_per_s": event.samples / whole if whole > 0 else 0.0,
        "step_s": whole,
        "epoch": float(event.epoch),
        **_numbers("seconds", msgspec.structs.asdict(event.seconds)),
        **_numbers("log", event.logs),
        **_numbers("total", event.totals),
    }
    if event.workers:  # a line of the journal has them no more
        found["workers"] = float(len(event.workers))
    return found


def _numbers(group: str, values: dict[str, Any]) -> dict[str, float]:
    return {f"{group}/{name}": value for name, each in values.items() if (value := _number(each)) is not None}


def _number(value: Any) -> float | None:
    """Return a number, also one that JSON has as a string; None for anything else."""
    if isinstance(value, str) and value.lower() in ("nan", "inf", "-inf"):
        return float(value)
    return float(value) if isinstance(value, int | float) else None
