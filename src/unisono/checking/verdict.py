"""Whether a script keeps the promise: the trials one after the other, and the statements that broke it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from unisono.checking.blame import Culprit, FindScript, blame
from unisono.checking.comparing import Difference, first_difference, places_of, sections_of
from unisono.checking.records import Leaf, Record, Section, Where
from unisono.checking.statements import Script, read_scripts
from unisono.checking.tracing import MAX_EVENTS
from unisono.checking.trials import ALONE, TRIALS, Outcome, Runner, Trial
from unisono.errors import UsageError
from unisono.words import count, without_evidence

__all__ = ["Found", "Verdict", "check_script"]

LAST_LINES: Final = 12
CUT: Final = f"statements beyond the first {MAX_EVENTS // 2:,} of a micro-batch or an update"
TWICE: Final = "more workers: the script alone does not compute the same twice"
ATTEMPTS: Final = 3
"""How often a trial is traced: what depends on chance may go well this time."""


@dataclass(frozen=True)
class Found:
    """What a trial has shown.

    Attributes:
        difference: from the script alone; None: the same bits.
        failure: why the trial did not come to its end; "" where it did.
        culprit: the statement that is the reason; None where none was found.
    """

    trial: Trial
    difference: Difference | None = None
    failure: str = ""
    culprit: Culprit | None = None

    @property
    def is_same(self) -> bool:
        return self.difference is None and not self.failure


@dataclass(frozen=True)
class Verdict:
    """Whether the promise is kept, as far as it was looked at.

    Attributes:
        steps, microbatches: that were computed alone.
        unchecked: what could not be looked at, in words.
    """

    steps: int
    microbatches: int
    found: list[Found] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def keeps(self) -> bool:
        """Whether all trials have computed the same bits."""
        return all(each.is_same for each in self.found)


def check_script(runner: Runner, say: Callable[[Found | Outcome], None]) -> Verdict:
    """Compute the first steps of a script in all ways, and find the statements that make them differ.

    Args:
        say: is told each result as it comes; first the trial with which the others are compared.

    Raises:
        UsageError: the script fails already alone, or trains nothing.
    """
    alone = runner.run(ALONE)
    reference = _reference(alone)
    verdict = Verdict(alone.num_steps, sum(isinstance(each, Leaf) and not each.aside for each in reference))
    tracing = _Tracing(runner, verdict)
    if alone.exit_code != 0:
        found = tracing.explained(Found(ALONE, first_difference(reference, alone.workers)))
        verdict.found.append(found)
        verdict.unchecked.append(TWICE)
        say(found)
        return verdict
    say(alone)
    for trial in TRIALS:
        outcome = runner.run(trial)
        found = tracing.explained(_found(outcome, alone, reference))
        if found.is_same and trial.joins and not outcome.has_joined:
            verdict.unchecked.append("what a worker does that joins: none has joined within these steps")
        verdict.found.append(found)
        say(found)
        if not found.is_same and trial is TRIALS[0]:
            verdict.unchecked.append(TWICE)
            break
    return verdict


class _Tracing:
    """Computes trials again, traced, to find the statements that make them differ.

    Args:
        verdict: is told what could not be looked at.
    """

    def __init__(self, runner: Runner, verdict: Verdict) -> None:
        self._runner = runner
        self._verdict = verdict
        self._alone: Outcome | None = None
        self._known: dict[Where | None, Culprit] = {}  # by where trials differ: most often for the same reason

    def explained(self, found: Found) -> Found:
        """Return what a trial has shown with the statement that is the reason, if it can be found."""
        if found.is_same:
            return found
        where = found.difference.where if found.difference is not None else None
        if where not in self._known:
            try:
                culprit = self._find(found.trial)
            except UsageError as error:  # what was found counts all the same
                self._note(f"which line is the reason: with its statements written down, {error}")
                return found
            if culprit is None:
                return found
            self._known[where] = culprit
        return replace(found, culprit=self._known[where])

    def _find(self, trial: Trial) -> Culprit | None:
        if self._alone is None:
            self._alone = self._runner.run(ALONE, traces=True)
        for _ in range(ATTEMPTS):
            again = self._runner.run(trial, traces=True) if trial is not ALONE else self._alone
            if (culprit := _culprit(again, self._alone)) is not None:
                return culprit
            if _is_cut(again):
                self._note(CUT)
        return None

    def _note(self, unchecked: str) -> None:
        if unchecked not in self._verdict.unchecked:
            self._verdict.unchecked.append(unchecked)


def _reference(outcome: Outcome) -> list[Record]:
    records = next(iter(outcome.workers.values()), [])
    if outcome.exit_code != 0 and first_difference(records, {"w0": records}) is None:
        raise UsageError(f"the script fails when it runs alone:\n{_last_lines(outcome.output)}")
    if not any(isinstance(each, Leaf) for each in records):
        raise UsageError("the script has trained no step: run.steps (or run.local_steps) was not iterated")
    return records


def _found(outcome: Outcome, alone: Outcome, reference: Sequence[Record]) -> Found:
    difference = first_difference(reference, outcome.workers)
    if difference is None:
        for (step, ours), (_, theirs) in zip(alone.evaluations, outcome.evaluations, strict=False):
            if ours != theirs:
                difference = Difference(Where(step, "evaluation"), "w0", values=(ours, theirs))
                break
    return Found(outcome.trial, difference, _failure(outcome, alone))


def _failure(outcome: Outcome, alone: Outcome) -> str:
    """Return why a trial has not done what the script did alone; "" if it has."""
    if outcome.exit_code != 0:
        return _last_lines(outcome.output) or f"it ended with exit code {outcome.exit_code}"
    if outcome.num_steps != alone.num_steps:
        return f"the script ended after {count(outcome.num_steps, 'step')}, and alone after {alone.num_steps}"
    return ""


def _culprit(outcome: Outcome, alone: Outcome) -> Culprit | None:
    """Return the statement that is the reason of the first difference of two traced trials; None: it was not found."""
    reference = next(iter(alone.workers.values()), [])
    ours = sections_of(reference)
    difference = first_difference(reference, outcome.workers)
    workers = [difference.worker] if difference is not None else list(outcome.workers)
    for worker in workers:
        theirs = sections_of(outcome.workers[worker])
        looked = difference or Difference(Where(0, "evaluation"), worker)
        script = _scripts([*ours, *theirs])
        culprit = blame(ours, theirs, places_of(looked, theirs), script, aside=looked.aside)
        if culprit is not None:
            return culprit
    return None


def _is_cut(outcome: Outcome) -> bool:
    return any(each.is_cut for records in outcome.workers.values() for each in sections_of(records))


def _scripts(sections: Sequence[Section]) -> FindScript:
    """Return the statements of all files that sections name, by path."""
    texts = {}
    for path in sorted({event.file for section in sections for event in section.events}):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            texts[path] = Path(path).read_text(encoding="utf-8")
    scripts = read_scripts(texts)
    return lambda path: scripts.get(path, Script())


def _last_lines(output: str) -> str:
    return "\n".join(without_evidence(output.rstrip().splitlines())[-LAST_LINES:])
