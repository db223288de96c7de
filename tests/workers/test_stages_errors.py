"""What a model in stages cannot do is refused in words, on one process and on several; nobody waits for ever."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.waiting import PATIENT
from tests.workers import refused_training
from tests.workers.static_team import AloneRun
from tests.workers.trainings import Training
from unisono.core.errors import LossError, StepError, UnisonoError, UsageError

train = Training("refused_training.py")

ALONE: list[tuple[str, type[UnisonoError], str]] = [
    ("two_models", UsageError, "2 unisono.Stages are tracked, and a run has one: put all modules into one"),
    ("outside_of_stages", UsageError, r"parameter head\.weight is tracked and is in no stage .*put its module into it"),
    ("plain_loop", StepError, "the inner loop is one call: step.compute"),
    ("another_pass", StepError, "the inner loop is one call: step.compute"),
    ("no_call", StepError, "has returned without a call of the model"),
    ("two_calls", StepError, "called once for each micro-batch.*the second one"),
    ("no_loss", LossError, "loss"),
    ("not_finite", LossError, "is inf"),
    ("no_tensor", StepError, r"stage 1 of unisono.Stages returned \(dict\): between two stages go a tensor or a tuple"),
    ("in_no_stages", UsageError, r"'model' has layers that unisono.parallelize has cut.*model = unisono.Stages\(model"),
    ("in_shards", StepError, "stage 1 of unisono.Stages returned a tensor in shards: between a layer"),
    ("delay", UsageError, r"run\.steps\(delay=\.\.\.\) is for models that are not cut"),
    ("local_steps", UsageError, r"run\.local_steps trains replicas of a whole model, not of one that is cut"),
]


@pytest.mark.parametrize(("name", "kind", "message"), ALONE, ids=[each[0] for each in ALONE])
def test_refused_on_one_process(name: str, kind: type[UnisonoError], message: str) -> None:
    with pytest.raises(kind, match=message), AloneRun(seed=3) as run:
        refused_training.TRAININGS[name](run)


@pytest.mark.parametrize(
    "name",
    ["scaler", "shard", "carried", "batches", "evaluation_beside", "called_outside", "torch_clipping", "torchscript"],
)
def test_allowed_on_one_process(name: str) -> None:
    with AloneRun(seed=3) as run:
        refused_training.TRAININGS[name](run)


GROUPS: list[tuple[str, str]] = [
    ("no_stages", r"has groups of 2 processes \(--workers Nx2\).* no unisono.Stages is tracked: cut the model"),
    (
        "more_parts",
        r"unisono.Stages has 1 stage and no layers that are cut into shards.* 2 processes \(1 x 2\).* --workers Nx1",
    ),
    ("in_shards", "stage 1 of unisono.Stages returned a tensor in shards: between a layer"),
    ("torchscript", r"module 1 of unisono\.Stages has a part of TorchScript.*--workers N"),
    ("plain_loop", "the inner loop is one call: step.compute"),
    ("no_call", "has returned without a call of the model"),
    ("two_calls", "called once for each micro-batch.*the second one"),
    ("no_loss", "loss"),
    ("not_finite", "the loss of step 0, micro-batch [0-3] is inf"),
    ("no_tensor", r"stage 1 of unisono.Stages returned \(dict\)"),
    ("scaler", r"'scaler' is a GradScaler.*use bfloat16.*--workers N\)"),
    ("lbfgs", r"'optimizer' is an LBFGS.*--workers N\)"),
    ("shard", r"'optimizer' is of unisono.shard, which cannot be combined with groups of 2 processes yet"),
    ("carried", r"'rows' is of unisono.Carried, which cannot be combined with groups of 2 processes yet"),
    ("delay", r"run\.steps\(delay=\.\.\.\) is for models that are not cut"),
    ("local_steps", r"run\.local_steps"),
    ("batches", r"run\.batches gives batches to the script.*--workers Nx2\): use run\.evaluate"),
    ("called_outside", r"unisono.Stages was called outside of step.compute.*2 of its 3 stages|1 of its 3 stages"),
    ("torch_clipping", r"gradients that are on other workers.*call unisono\.clip_grad_norm_ instead"),
    ("wrong_evaluation", r"the function of run.evaluate must return totals by name"),
]


@pytest.mark.more
@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(("name", "message"), GROUPS, ids=[each[0] for each in GROUPS])
def test_refused_in_groups(name: str, message: str, tmp_path: Path) -> None:
    """The run ends with the message, and does not try again."""
    outcome = train(tmp_path / "run", "1x2", None, PATIENT, [name])
    assert outcome.exit_code not in (0, None), outcome.output
    assert re.search(message, outcome.output, re.DOTALL), outcome.output
    assert "AssertionError" not in outcome.output, outcome.output
    assert not outcome.final


@pytest.mark.more
@pytest.mark.usefixtures("nursery")
def test_an_evaluation_that_need_not_be_waited_for_is_computed_by_the_groups(tmp_path: Path) -> None:
    found = [train(tmp_path / layout, layout, None, PATIENT, ["evaluation_beside"]) for layout in ("1", "1x3")]
    assert [each.exit_code for each in found] == [0, 0], found[1].output
    assert found[0].evaluations == found[1].evaluations
    assert len(found[0].evaluations) == 4
    assert found[0].final == found[1].final


@pytest.mark.more
@pytest.mark.usefixtures("nursery")
def test_more_processes_than_shards_are_refused(tmp_path: Path) -> None:
    outcome = train(tmp_path / "run", "1x4", None, PATIENT, ["few_shards"])
    assert outcome.exit_code not in (0, None), outcome.output
    assert "1 stage and layers in 2 shards, and a group of this run has 4 processes (1 x 4)" in outcome.output


@pytest.mark.more
@pytest.mark.usefixtures("nursery")
def test_audits_of_shards_are_refused(tmp_path: Path) -> None:
    outcome = train(tmp_path / "run", "1x2", None, [*PATIENT, "--audit", "0.1"], ["few_shards"])
    assert outcome.exit_code not in (0, None), outcome.output
    assert "who was wrong cannot be told. Leave --audit out" in outcome.output


OPTIONS: list[tuple[list[str], str]] = [
    (["--evaluators", "1"], r"--evaluators 1 are single workers with the whole model.*--workers 1x2"),
    (["--wait-for", "3"], r"--wait-for counts workers, and --workers 1x2 makes groups of 2: got 3"),
]


@pytest.mark.more
@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[" ".join(each[0]) for each in OPTIONS])
def test_options_that_do_not_go_with_groups(options: list[str], message: str, tmp_path: Path) -> None:
    outcome = train(tmp_path / "run", "1x2", None, [*PATIENT, *options], ["whole"])
    assert outcome.exit_code in (1, 2), outcome.output
    assert not outcome.digests
    assert re.search(message, outcome.output, re.DOTALL), outcome.output
