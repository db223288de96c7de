"""Whether a script keeps the promise: the trials one after the other, and the statements that broke it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from unisono.core.errors import UsageError
from unisono.core.words import count, exit_words, without_evidence
from unisono.tools.check.blame import Culprit, FindStatements, blame
from unisono.tools.check.records import Changed, DoubtRecord, LeafRecord, Record, Section, StateRecord, Where
from unisono.tools.check.statements import Statements, read_scripts
from unisono.tools.check.tracing import MAX_EVENTS
from unisono.tools.check.trial_diff import TrialDifference, first_difference, places_of, sections_of
from unisono.tools.check.trials import ALONE, TRIALS, Runner, Trial, TrialOutcome

__all__ = ["CheckVerdict", "TrialFinding", "check_script"]

LAST_LINES: Final = 12
CUT: Final = f"statements beyond the first {MAX_EVENTS // 2:,} of a micro-batch or an update"
TWICE: Final = "more workers: the script alone does not compute the same twice"
MORE: Final = "more workers: the script is refused already alone"
ATTEMPTS: Final = 3
"""How often a trial is traced: what depends on chance may go well this time."""


@dataclass(frozen=True)
class TrialFinding:
    """What a trial has shown.

    Attributes:
        difference: from the script alone; None: the same bits.
        failure: why the trial did not come to its end; "" where it did.
        culprit: the statement that is the reason; None where none was found.
        run: the directory of its run.
    """

    trial: Trial
    difference: TrialDifference | None = None
    failure: str = ""
    culprit: Culprit | None = None
    run: Path = Path()

    @property
    def is_same(self) -> bool:
        return self.difference is None and not self.failure


@dataclass(frozen=True)
class CheckVerdict:
    """Whether the promise is kept, as far as it was looked at.

    Attributes:
        steps, microbatches: that were computed alone.
        doubts: what the script alone probably means otherwise than a step takes it.
        unchecked: what could not be looked at, in words.
    """

    steps: int
    microbatches: int
    found: list[TrialFinding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    doubts: list[DoubtRecord] = field(default_factory=list)

    @property
    def keeps(self) -> bool:
        """Whether all trials have computed the same bits."""
        return all(each.is_same for each in self.found)


def check_script(
    runner: Runner, say: Callable[[TrialFinding | TrialOutcome], None], trials: Sequence[Trial] = TRIALS
) -> CheckVerdict:
    """Compute the first steps of a script in all ways, and find the statements that make them differ.

    Args:
        say: is told each result as it comes; first the trial with which the others are compared.
        trials: the ways, besides the script alone.

    Raises:
        UsageError: the script fails already alone, or trains nothing.
    """
    alone = runner.run(ALONE)
    if (refused := _refused(runner, alone)) is not None:
        say(refused)
        return CheckVerdict(alone.num_steps, _microbatches(alone), [refused], [MORE], _doubts(alone))
    reference = _reference(alone)
    verdict = CheckVerdict(alone.num_steps, _microbatches(alone), doubts=_doubts(alone))
    tracing = _Tracing(runner, verdict)
    if alone.exit_code != 0:
        found = tracing.explained(TrialFinding(ALONE, first_difference(reference, alone.workers)))
        verdict.found.append(found)
        verdict.unchecked.append(TWICE)
        say(found)
        return verdict
    say(alone)
    for trial in trials:
        outcome = runner.run(trial)
        found = tracing.explained(_found(outcome, alone, reference))
        if found.is_same and trial.faults and not outcome.has_joined:
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

    def __init__(self, runner: Runner, verdict: CheckVerdict) -> None:
        self._runner = runner
        self._verdict = verdict
        self._alone: TrialOutcome | None = None
        self._known: dict[Where | None, Culprit] = {}  # by where trials differ: most often for the same reason

    def explained(self, found: TrialFinding) -> TrialFinding:
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
            if any(each.is_cut for records in again.workers.values() for each in sections_of(records)):
                self._note(CUT)
        return None

    def _note(self, unchecked: str) -> None:
        if unchecked not in self._verdict.unchecked:
            self._verdict.unchecked.append(unchecked)


def _refused(runner: Runner, alone: TrialOutcome) -> TrialFinding | None:
    """Return the statement that changes a parameter within a micro-batch, if the script has failed for that; None: it
    has not.
    """
    if alone.exit_code == 0 or not any(isinstance(each, StateRecord) for own in alone.workers.values() for each in own):
        return None
    again = runner.run(ALONE, traces=True, watches=True)
    records = (each for own in again.workers.values() for each in own)
    found = next((each for each in records if isinstance(each, Changed)), None)
    if found is None:
        return None
    culprit = Culprit("changes", found.file, found.line, found.text, found.parameter)
    return TrialFinding(ALONE, failure=_last_lines(alone.output), culprit=culprit)


def _microbatches(outcome: TrialOutcome) -> int:
    records = (each for own in outcome.workers.values() for each in own)
    return sum(isinstance(each, LeafRecord) and not each.aside for each in records)


def _reference(outcome: TrialOutcome) -> list[Record]:
    records = next(iter(outcome.workers.values()), [])
    if outcome.exit_code != 0 and first_difference(records, {"w0": records}) is None:
        raise UsageError(f"the script fails when it runs alone:\n{_last_lines(outcome.output)}")
    if not any(isinstance(each, LeafRecord) for each in records):
        raise UsageError("the script has trained no step: run.steps (or run.local_steps) was not iterated")
    return records


def _doubts(outcome: TrialOutcome) -> list[DoubtRecord]:
    return [each for records in outcome.workers.values() for each in records if isinstance(each, DoubtRecord)]


def _found(outcome: TrialOutcome, alone: TrialOutcome, reference: Sequence[Record]) -> TrialFinding:
    failure = _failure(outcome, alone)
    difference = first_difference(reference, outcome.workers) or _evaluations(alone, outcome, is_whole=not failure)
    return TrialFinding(outcome.trial, difference, failure, run=outcome.run)


def _evaluations(alone: TrialOutcome, outcome: TrialOutcome, *, is_whole: bool) -> TrialDifference | None:
    """Return the first evaluation that differs from that of the script alone; None: there is none.

    Args:
        is_whole: the trial has come to its end, so an evaluation that only one of the two has is a difference as well.
    """
    for number, (ours, theirs) in enumerate(itertools.zip_longest(alone.evaluations, outcome.evaluations)):
        if ours == theirs or (not is_whole and None in (ours, theirs)):
            continue
        step = min(each[0] for each in (ours, theirs) if each is not None)
        values = _totals(ours, step), _totals(theirs, step)
        return TrialDifference(Where(step, "evaluation", leaf=number), "w0", values=values)
    return None


def _totals(evaluation: tuple[int, str] | None, step: int) -> str:
    if evaluation is None:
        return "missing"
    at, totals = evaluation
    return totals if at == step else f"done after step {at - 1} ({totals})"


def _failure(outcome: TrialOutcome, alone: TrialOutcome) -> str:
    """Return why a trial has not done what the script did alone; "" if it has."""
    if outcome.exit_code != 0:
        return _last_lines(outcome.output) or f"it {exit_words(outcome.exit_code)}"
    if outcome.num_steps != alone.num_steps:
        return f"the script ended after {count(outcome.num_steps, 'step')}, and alone after {alone.num_steps}"
    return ""


def _culprit(outcome: TrialOutcome, alone: TrialOutcome) -> Culprit | None:
    """Return the statement that is the reason of the first difference of two traced trials; None: it was not found."""
    reference = next(iter(alone.workers.values()), [])
    ours = sections_of(reference)
    difference = first_difference(reference, outcome.workers)
    workers = [difference.worker] if difference is not None else list(outcome.workers)
    for worker in workers:
        theirs = sections_of(outcome.workers[worker])
        looked = difference or TrialDifference(Where(0, "evaluation"), worker)
        script = _scripts([*ours, *theirs])
        culprit = blame(ours, theirs, places_of(looked, theirs), script, aside=looked.aside)
        if culprit is not None:
            return culprit
    return None


def _scripts(sections: Sequence[Section]) -> FindStatements:
    """Return the statements of all files that sections name, by path."""
    texts = {}
    for path in sorted({event.file for section in sections for event in section.events}):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            texts[path] = Path(path).read_text(encoding="utf-8")
    scripts = read_scripts(texts)
    return lambda path: scripts.get(path, Statements())


def _last_lines(output: str) -> str:
    return "\n".join(without_evidence(output.rstrip().splitlines())[-LAST_LINES:])
