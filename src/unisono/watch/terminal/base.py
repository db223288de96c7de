"""What the two views of a terminal have in common: what they tell apart, and the speed of the run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from unisono.events import Announcement, Event, LinkSlow, Problem, RunEnded, StepFinished, WorkerOutput
from unisono.overview import Overview, link_words
from unisono.watch.terminal.text import duration
from unisono.words import count, evidence_words, progress
from unisono.words import duration as length

__all__ = ["BALANCE_EVERY_S", "Pace", "Terminal", "done", "on_workers", "summary"]

BALANCE_EVERY_S: Final = 60.0
"""Least time between two sentences about the balance: with steps of milliseconds nothing else would be seen.

The journal has all of them.
"""


class Pace:
    """Speed of the run, from the reported steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = self._samples = 0.0  # of a step; smoothed alike, so that a short last batch shows no slump
        self.started = clock()
        self.last: StepFinished | None = None
        self._first = 0

    def add(self, step: StepFinished) -> bool:
        """Count a step. Return False if it was counted before: after a loss, a step may be reported twice."""
        if self.last is None:
            self._first = step.step
        elif step.step <= self.last.step:
            return False
        weight = 1.0 if self.last is None else 0.1
        self._seconds += weight * (step.seconds.total() - self._seconds)
        self._samples += weight * (step.samples - self._samples)
        self.last = step
        return True

    def num_steps(self, last: int) -> int:
        """Return how many steps were finished, by their numbers: some may not have been reported here.

        Args:
            last: the number of the last one, where that is known; else -1.
        """
        return 0 if self.last is None else max(self.last.step, last) + 1 - self._first

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self.started

    @property
    def samples_per_second(self) -> float:
        return self._samples / self._seconds if self._seconds > 0 else 0.0

    @property
    def left_s(self) -> float:
        if self.last is None or not self.last.num_steps:
            return 0.0
        return max(0.0, (self.last.num_steps - self.last.step - 1) * self._seconds)


def summary(pace: Pace, ended: RunEnded, traceback: str = "") -> str:
    """Return the run in one line.

    Args:
        traceback: is shown after it. It ends with the message of an error of the library, which is long, and is said
            once.
    """
    if not ended.ok:
        error, _, message = traceback.rstrip().rpartition("\n")[2].partition(": ")
        is_said = message and error.startswith("unisono.errors.")
        return f"failed: {ended.reason.replace(f': {message}', '') if is_said else ended.reason}"
    last = pace.last
    if last is None:
        without = ", without a step" if ended.reason == "finished" else ""  # of a script that makes no `unisono.Run`
        return f"{ended.reason} after {length(pace.elapsed_s)}{without}"
    ended_as = "finished" if ended.reason == "finished" else f"finished ({ended.reason})"
    steps = count(pace.num_steps(ended.step), last.unit)
    on = f" on {known}" if (known := on_workers(last)) else ""
    return f"{ended_as}: {steps} in {length(pace.elapsed_s)}{on}"


SAID_OTHERWISE: Final = ("crash", "error", "failed-join")
"""Kinds of problems that an announcement tells with the same words, and with what follows from them."""


class Terminal(ABC):
    """A sink that shows an agent's stream of events. Complete: `Plain` for files and pipes, `Live` for a terminal."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pace = Pace(clock)
        self._balance_at = -math.inf

    def emit(self, event: Event) -> None:
        match event:
            case WorkerOutput():
                self._output(event)
            case Announcement():
                self._say(event.text)
            case LinkSlow():
                self._say(link_words(event))
            case Problem():
                if words := problem_words(event):
                    self._say(words)
            case StepFinished():
                if self._pace.add(event):
                    self._say_balance(event.balance)
                    self._step(event)
            case RunEnded():
                self._end(event)

    def _say_balance(self, text: str) -> None:
        now = self._clock()
        if text and now - self._balance_at > BALANCE_EVERY_S:
            self._balance_at = now
            self._say(text)

    def _left(self, last: StepFinished) -> str:
        return f"{duration(self._pace.left_s)} left" if last.num_steps else ""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _output(self, line: WorkerOutput) -> None: ...

    @abstractmethod
    def _say(self, text: str) -> None: ...

    @abstractmethod
    def _step(self, step: StepFinished) -> None: ...

    @abstractmethod
    def _end(self, ended: RunEnded) -> None: ...


def problem_words(event: Problem) -> str:
    """Return what to show of a problem; "": nothing. The end of the run, or an announcement, may say it as well."""
    where = f"{evidence_words(event.problem)}: {event.evidence} in the run's directory" if event.evidence else ""
    if event.ends_run or event.problem in SAID_OTHERWISE:
        return where
    return f"{event.text}. {where[:1].upper()}{where[1:]}" if where else event.text


def on_workers(step: StepFinished) -> str:
    """Return how many workers have computed a step; "" where it was computed before the run was resumed."""
    return count(len(step.workers), "worker") if step.workers else ""


def done(at: StepFinished | Overview) -> str:
    """Return how far the run is; where nobody knows how long it is, with its epoch."""
    epoch = f", epoch {at.epoch}" if at.epoch and not at.num_steps else ""
    return progress(at.step + 1, at.num_steps, at.unit) + epoch
