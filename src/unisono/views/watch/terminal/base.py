"""What the views of a terminal have in common: what they tell apart, and where a run stands, in words."""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from unisono.core.events import Announcement, Event, Note, Problem, RunEnded, StepFinished, WorkerOutput
from unisono.core.words import clock_duration, count, duration, evidence_words, number, progress
from unisono.record.overview import Overview, OverviewBuilder

__all__ = ["Terminal", "done", "is_progress", "left_words", "loss_words", "progress_line", "summary"]


_PROGRESS: Final = re.compile(r"\d+-\d\d-\d\d [\d:]+ unisono: [\d,]+ (of [\d,]+ )?[a-z-]+(, epoch \d+)?  loss \S")


def summary(overview: Overview, ended: RunEnded, traceback: str = "") -> str:
    """Return the run in one line.

    Args:
        traceback: is shown after it. It ends with the message of an error of the library, which is long, and is said
            once.
    """
    if not ended.ok:
        error, _, message = traceback.rstrip().rpartition("\n")[2].partition(": ")
        is_said = message and error.startswith("unisono.core.errors.")
        return f"failed: {ended.reason.replace(f': {message}', '') if is_said else ended.reason}"
    took = duration(overview.elapsed_s)
    last = max(overview.step, ended.step)
    if last < overview.first:
        without = ", without a step" if ended.reason == "finished" else ""  # of a script that makes no `unisono.Run`
        return f"{ended.reason} after {took}{without}"
    ended_as = "finished" if ended.reason == "finished" else f"finished ({ended.reason})"
    steps = count(last + 1 - overview.first, overview.unit)  # by their numbers: some may not have been told here
    on = f" on {known}" if (known := on_workers(overview)) else ""
    return f"{ended_as}: {steps} in {took}{on}"


SAID_OTHERWISE: Final = ("crash", "error", "failed-join")
"""Kinds of problems that an announcement tells with the same words, and with what follows from them."""


class Terminal(ABC):
    """A sink that shows an agent's stream of events: `PlainTerminal` for files and pipes, `Live` for a terminal.

    Args:
        now: seconds since 1970.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._builder = OverviewBuilder(started=now())
        self._lock = threading.Lock()
        self._evidence = ""  # of a problem that the next announcement tells

    def emit(self, event: Event) -> None:
        with self._lock:
            self._builder.take(event)
        match event:
            case WorkerOutput():
                self._output(event)
            case Announcement():
                self._say(event.text)
                self._say_evidence()
            case Problem():
                self._say_problem(event)
            case Note(about="balance"):
                self._say(event.text)
            case StepFinished():
                self._step()
            case RunEnded():
                self._say_evidence()
                self._end(event)

    def _say_problem(self, event: Problem) -> None:
        """Say what a problem is and where its evidence lies; of one that an announcement tells, after that."""
        words = problem_words(event)
        if event.problem in SAID_OTHERWISE and not event.ends_run:
            self._say_evidence()
            self._evidence = words
        elif words:
            self._say(words)

    def _say_evidence(self) -> None:
        words, self._evidence = self._evidence, ""
        if words:
            self._say(words)

    def _overview(self) -> Overview:
        with self._lock:
            return self._builder.overview(self._now())

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _output(self, line: WorkerOutput) -> None: ...

    @abstractmethod
    def _say(self, text: str) -> None: ...

    @abstractmethod
    def _step(self) -> None: ...

    @abstractmethod
    def _end(self, ended: RunEnded) -> None: ...


def problem_words(event: Problem) -> str:
    """Return what to show of a problem; "": nothing. The end of the run, or an announcement, may say it as well."""
    where = f"{evidence_words(event.problem)}: {event.evidence} in the run's directory" if event.evidence else ""
    if event.ends_run or event.problem in SAID_OTHERWISE:
        return where
    return f"{event.text}. {where[:1].upper()}{where[1:]}" if where else event.text


def progress_line(overview: Overview) -> str:
    """Return where a run stands, in one line: the same in every view that is made of lines."""
    parts = (
        done(overview),
        f"loss {loss_words(overview)}",
        f"{overview.samples_per_s:,.0f} samples/s" if overview.samples_per_s else "",
        left_words(overview),
        on_workers(overview),
    )
    return "  ".join(filter(None, parts))


def is_progress(line: str) -> bool:
    """Return whether a line of `PlainTerminal` is one of `progress_line`: the next of them says all that it says."""
    return _PROGRESS.match(line) is not None


def on_workers(overview: Overview) -> str:
    """Return how many workers have computed the last step; "" where it was computed before the run was resumed."""
    return count(overview.num_workers, "worker") if overview.num_workers else ""


def loss_words(overview: Overview) -> str:
    """Return the loss of the last step; "-": there is none."""
    return number(overview.loss) if overview.loss is not None else overview.loss_is or "-"


def left_words(overview: Overview) -> str:
    """Return the time left; "": nobody knows."""
    return f"{clock_duration(overview.left_s)} left" if overview.left_s is not None else ""


def done(overview: Overview) -> str:
    """Return how far the run is; where nobody knows how long it is, with its epoch."""
    epoch = f", epoch {overview.epoch}" if overview.epoch and not overview.num_steps else ""
    return progress(overview.step + 1, overview.num_steps, overview.unit) + epoch
