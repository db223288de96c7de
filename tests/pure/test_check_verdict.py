"""The verdict of ``unisono check``, from what trials have left."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.core.errors import UsageError
from unisono.tools.check.records import LeafRecord, Record, StateRecord, Where
from unisono.tools.check.trials import ALONE, TRIALS, Runner, Trial, TrialOutcome
from unisono.tools.check.verdict import CheckVerdict, check_script
from unisono.tools.trialrun import Script


def records(num_steps: int, loss: str = "1.0") -> list[Record]:
    leaves = [LeafRecord(Where(step, "leaf", leaf=0), loss, {"model.weight": loss}) for step in range(num_steps)]
    return [StateRecord(0, {}), *(each for leaf in leaves for each in (leaf, StateRecord(leaf.where.step + 1, {})))]


class Played(Runner):
    """Gives outcomes that are made up."""

    def __init__(self, **outcomes: TrialOutcome) -> None:
        super().__init__(Script(command=(), directory=Path()), 4, 1.0)
        self.outcomes = outcomes

    def run(self, trial: Trial, *, traces: bool = False, watches: bool = False) -> TrialOutcome:
        if traces:
            raise UsageError("the first 4 steps took longer than 1 s")
        return self.outcomes.get(trial.name.replace(" ", "_"), TrialOutcome(trial, 0, "", {"w0": records(4)}, []))


def checked(**outcomes: TrialOutcome) -> CheckVerdict:
    return check_script(Played(**outcomes), lambda _: None)


def test_trials_that_have_done_the_same_keep_the_promise() -> None:
    verdict = checked()
    assert (verdict.keeps, verdict.steps, verdict.microbatches) == (True, 4, 4)
    assert [each.trial for each in verdict.found] == list(TRIALS)


@pytest.mark.parametrize(
    ("code", "output", "num_steps", "said"),
    [
        (3, "", 4, "it ended with exit code 3"),
        (3, "no rank 1\n", 4, "no rank 1"),
        (0, "", 2, "the script ended after 2 steps, and alone after 4"),
    ],
)
def test_a_trial_with_the_same_bits_that_fails_or_ends_early_breaks_the_promise(
    code: int, output: str, num_steps: int, said: str
) -> None:
    verdict = checked(
        two_workers=TrialOutcome(Trial("two workers", workers=2), code, output, {"w0": records(num_steps)}, [])
    )
    assert not verdict.keeps
    assert [each.failure for each in verdict.found if each.failure] == [said]


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ([(2, "a"), (4, "b")], ""),
        ([(2, "a")], "the evaluation after step 3: b and missing"),
        ([(2, "a"), (4, "b"), (4, "b")], "the evaluation after step 3: missing and b"),
        ([(4, "b")], "the evaluation after step 1: a and done after step 3 (b)"),
        ([(2, "c"), (4, "b")], "the evaluation after step 1: a and c"),
    ],
)
def test_evaluations_are_compared_also_where_one_is_missing_or_there_is_one_more(
    theirs: list[tuple[int, str]], said: str
) -> None:
    alone = TrialOutcome(ALONE, 0, "", {"w0": records(4)}, [(2, "a"), (4, "b")])
    outcomes = {
        trial.name.replace(" ", "_"): TrialOutcome(trial, 0, "", {"w0": records(4)}, alone.evaluations)
        for trial in TRIALS
    }
    two = outcomes["two_workers"].trial
    verdict = checked(
        **outcomes | {"alone": alone, "two_workers": TrialOutcome(two, 0, "", {"w0": records(4)}, theirs)}
    )
    assert [each.difference.said() for each in verdict.found if each.difference is not None] == ([said] if said else [])


def test_a_trial_that_failed_lacks_evaluations_and_is_not_said_to_differ_in_them() -> None:
    alone = TrialOutcome(ALONE, 0, "", {"w0": records(4)}, [(4, "b")])
    trials = {
        trial.name.replace(" ", "_"): TrialOutcome(trial, 0, "", {"w0": records(4)}, [(4, "b")]) for trial in TRIALS
    }
    failed = TrialOutcome(Trial("two workers", workers=2), 3, "no rank 1\n", {"w0": records(4)}, [])
    verdict = checked(**trials | {"alone": alone, "two_workers": failed})
    assert [each.failure for each in verdict.found if not each.is_same] == ["no rank 1"]
    assert all(each.difference is None for each in verdict.found)


def test_a_difference_counts_also_if_the_search_for_its_line_takes_too_long() -> None:
    verdict = checked(two_workers=TrialOutcome(Trial("two workers", workers=2), 0, "", {"w0": records(4, "2.0")}, []))
    assert not verdict.keeps
    assert [each.trial.name for each in verdict.found if each.difference is not None] == ["two workers"]
    assert len([each for each in verdict.unchecked if "took longer than 1 s" in each]) == 1


def test_a_script_that_fails_alone_before_its_first_step_cannot_be_checked() -> None:
    with pytest.raises(UsageError, match="fails when it runs alone"):
        checked(alone=TrialOutcome(ALONE, 1, "no data", {}, []))
