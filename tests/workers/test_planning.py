"""``unisono plan``: trials of a script, and the plan that is made from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.waiting import WAIT_S
from unisono.cli.plan import plan as command_of_plans
from unisono.core.errors import UsageError
from unisono.record.rundir import PLAN_FILE
from unisono.tools.plan.finder import search, shown_search
from unisono.tools.plan.forecast import Roster
from unisono.tools.plan.found import FILE, ProbeSettings, found_in
from unisono.tools.plan.plans import read_plan, write_plan
from unisono.tools.plan.probing import OutOfMemory, Script, TrialFailed, facts_of, memories_of, trial

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

SCRIPT = """
import sys, torch, unisono

print("batches of", sys.argv[1])
with unisono.Run("runs/never", seed=1, checkpoint=unisono.Checkpoints(every_steps=1)) as run:
    model = torch.nn.Linear(64, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(1000, (64,)))
    for step in run.steps(data, batch_size=int(sys.argv[1]), microbatches=4, epochs=int(sys.argv[2])):
        for vectors, labels in step:
            torch.nn.functional.cross_entropy(model(vectors), labels).backward()
        optimizer.step()
print("the end is reached")
"""
LOCAL = """
import torch, unisono

with unisono.Run(None, seed=1) as run:
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
    for turn in run.local_steps(data, batch_size=16, microbatches=4, replicas=2, inner_steps=2, epochs=100):
        for step in turn:
            for vectors, labels in step:
                torch.nn.functional.cross_entropy(model(vectors), labels).backward()
            optimizer.step()
"""
STAGED = """
import torch, unisono

with unisono.Run(None, seed=1) as run:
    modules = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)]
    model = unisono.Stages(*modules, cuts=3)
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(2, (64,)))
    for step in run.steps(data, batch_size=16, microbatches=4, epochs=100):
        step.compute(lambda x, y: torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
"""
BYTES = 4 * (64 * 1000 + 1000)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def planned(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "plan", str(script), *arguments]
    return subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=WAIT_S)


def test_a_trial_stops_after_its_steps_measures_them_and_keeps_nothing(script: Path, tmp_path: Path) -> None:
    found = trial(
        Script(command=[str(script), "16", "1000"], directory=tmp_path),
        ProbeSettings(steps=15, microbatches=8),
        workers=2,
    )
    assert found.sample.workers == 2
    assert found.sample.step > 0.0
    assert (found.found.first, found.found.done) == (0, 15)
    assert found.found.recipe["microbatches"] == 8, "the trial's, and not the script's"
    assert found.found.gradient_bytes == BYTES
    assert 0.0 <= found.found.held_up < 1.0
    assert found.found.parts["optimizer state"] >= 2 * BYTES
    assert not (Path.cwd() / "runs" / "never").exists()
    assert not list(tmp_path.rglob("checkpoints"))
    facts = facts_of([found], room=4)
    assert (facts.microbatches, facts.batch_size, facts.gradient_bytes) == (8, 16, BYTES)
    assert memories_of([found])[found.sample.workers].total(4) == pytest.approx(found.found.peak, rel=0.01)


def test_a_loop_that_ends_before_the_time_of_a_trial_is_measured_to_its_end(script: Path, tmp_path: Path) -> None:
    found = trial(Script(command=[str(script), "16", "4"], directory=tmp_path), ProbeSettings(steps=15, seconds=600.0))
    assert found.found.done == 16


def test_the_epochs_of_a_script_with_a_loop_for_each_are_one_training(script: Path, tmp_path: Path) -> None:
    """Two short phases that are something else, and then epochs of four steps."""
    loop = "    for size in (32, 32, 8, *[int(sys.argv[1])] * int(sys.argv[2])):\n"
    head, body = SCRIPT.split("    for step in")
    body, end = "    for step in".join(["", body]).replace("int(sys.argv[1])", "size").rsplit("print", 1)
    body = "".join(f"    {line}\n" for line in body.replace("int(sys.argv[2])", "1").splitlines())
    script.write_text(f"{head}{loop}{body}print{end}")
    found = trial(
        Script(command=[str(script), "16", "4"], directory=tmp_path), ProbeSettings(steps=15, seconds=60.0), workers=1
    )
    assert (found.found.first, found.found.done, found.found.recipe["batch_size"]) == (12, 16, 16)
    with pytest.raises(TrialFailed, match="steps of one training were done: it did 12, and a plan needs 15"):
        trial(Script(command=[str(script), "16", "3"], directory=tmp_path), ProbeSettings(steps=16))


def test_a_loop_that_is_left_early_after_enough_steps_is_measured(script: Path, tmp_path: Path) -> None:
    """A trial alone goes on for some seconds, which a short training does not have."""
    script.write_text(
        SCRIPT.replace("        optimizer.step()\n", "        optimizer.step()\n        if step.number == 15: break\n")
    )
    found = trial(
        Script(command=[str(script), "16", "1000"], directory=tmp_path), ProbeSettings(steps=15, seconds=100.0)
    )
    assert found.found.done == 16
    assert found.sample.step > 0.0


def test_a_script_that_ends_before_or_fails_says_so(script: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TrialFailed, match=r"ended before 15 steps(.|\n)*it did 8, and a plan needs 15;(.|\n)*the end is reached"
    ):
        trial(Script(command=[str(script), "16", "2"], directory=tmp_path), ProbeSettings(steps=16))
    with pytest.raises(TrialFailed, match=r"exit code(.|\n)*IndexError"):
        trial(Script(command=[str(script)], directory=tmp_path), ProbeSettings(steps=15))


def test_the_command_writes_a_plan_and_compares_it_with_the_run_that_follows(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    made = planned(script, "--workers", "1", "--run-dir", str(run), "--price", "2", "--", "16", "1000")
    assert made.returncode == 0, made.stderr
    assert "batches of 16 samples in 4 micro-batches" in made.stdout
    assert "1*" in made.stdout
    command = [sys.executable, "-m", "unisono", "run", str(script), "--workers", "1", "--run-dir", str(run)]
    trained = subprocess.run([*command, "--", "16", "5"], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert trained.returncode == 0, trained.stderr
    compared = subprocess.run(
        [sys.executable, "-m", "unisono", "plan", str(run), "--json"], capture_output=True, text=True, timeout=WAIT_S
    )
    (came,) = json.loads(compared.stdout)
    assert came["workers"] == 1
    assert came["expected_s"] > 0.0
    assert came["step_s"] > 0.0
    further = planned(run, "--workers", "1:32", "--link", "100mbit", "--price", "1")
    assert further.returncode == 0, further.stderr
    assert "from the steps of" in further.stdout
    assert "the network" in further.stdout
    kept = read_plan(run)
    assert kept is not None
    of_others = [msgspec.structs.replace(one, workers=3) for one in kept.forecasts]
    write_plan(run / PLAN_FILE, msgspec.structs.replace(kept, forecasts=of_others))
    assert command_of_plans.main([str(run)], standalone_mode=False) == 1
    told = capsys.readouterr().err
    assert "the plan is about 3 workers, and the run has done enough steps (15 from its beginning, or 9" in told
    assert told.endswith("with 1 worker\n")
    write_plan(run / PLAN_FILE, msgspec.structs.replace(kept, batch_size=32))
    with pytest.raises(UsageError, match="batch_size=32 in the plan and 16 in the run"):
        command_of_plans.main([str(run)], standalone_mode=False)
    with pytest.raises(UsageError, match="--price is for making a plan"):
        command_of_plans.main([str(run), "--price", "1"], standalone_mode=False)


def test_a_script_that_trains_with_local_steps_is_refused_by_name(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOCAL)
    refused = planned(script, "--workers", "1:2")
    assert refused.returncode == 2
    assert "this script calls run.local_steps" in refused.stderr
    assert refused.stderr.count("measuring") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workers", "4:2"), "A:B with 1 <= A <= B"),
        (("--workers", "1:999"), "give the link between them, e.g. --link 1gbit"),
        (("--link", "fast"), "--link is a rate"),
        (("--steps", "2"), "at least 15 steps"),
        (("--inner-steps", "0"), "--inner-steps"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_is_started(
    script: Path, arguments: tuple[str, ...], words: str
) -> None:
    refused = planned(script, *arguments, "--", "16", "1000")
    assert refused.returncode == 2
    assert words in refused.stderr
    assert "measuring" not in refused.stderr


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "unisono", "plan", str(tmp_path)], capture_output=True, text=True, timeout=WAIT_S
    )
    assert refused.returncode == 2
    assert "there is no run in" in refused.stderr


def test_what_a_killed_trial_has_left_is_nothing(tmp_path: Path) -> None:
    assert found_in(tmp_path) is None
    (tmp_path / FILE).write_text('{"first": 0')
    assert found_in(tmp_path) is None


def test_a_trial_that_needs_more_memory_than_it_may_have_is_told_from_one_that_fails(
    script: Path, tmp_path: Path
) -> None:
    script.write_text(SCRIPT.replace("Linear(64, 1000)", "Linear(64, 100_000)"))  # more than what is free in the heap
    command = Script(command=[str(script), "16", "1000"], directory=tmp_path)
    with pytest.raises(OutOfMemory):
        trial(command, ProbeSettings(steps=15, room=1 << 18))


def test_the_finder_tries_sizes_of_the_script_and_changes_nothing(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Script(command=[str(script), "16", "1000"], directory=tmp_path)
    alone = trial(command, ProbeSettings(steps=15))
    made = search(command, alone.found, 10, ["microbatches"])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("unisono: tries ")]
    assert {one.size for one in made.tried} <= {1, 2, 4, 8, 16}
    assert len(made.tried) == len(said) >= 2
    assert all(one.fits for one in made.tried)
    assert (made.batch_size, made.microbatches) == (16, 4)


def test_no_batch_is_found_that_the_data_set_does_not_have(script: Path, tmp_path: Path) -> None:
    """Also where a DataLoader has the batch size, of which trials need others. Large ones have fewer steps: here 12."""
    size = "batch_size=int(sys.argv[1])"
    script.write_text(
        SCRIPT.replace(f"run.steps(data, {size},", f"run.steps(torch.utils.data.DataLoader(data, {size}),")
    )
    assert "DataLoader" in script.read_text()
    command = Script(command=[str(script), "16", "3"], directory=tmp_path)
    alone = trial(command, ProbeSettings(steps=12))
    made = search(command, alone.found, 16, ["batch"])
    assert max(one.size for one in made.tried) == 16, "4 of these are the 64 samples that there are"
    text = shown_search(made, facts_of([alone], room=4), Roster(workers=2, per_host=4), ["batch"])
    assert "batch_size=64, microbatches=4" in text
    assert "more than the 64 samples of the dataset" in text


def test_a_plan_of_groups_says_what_each_process_holds(tmp_path: Path) -> None:
    script = tmp_path / "staged.py"
    script.write_text(STAGED)
    found = planned(script, "--steps", "15", "--workers", "1:2x3", "--json")
    assert found.returncode == 0, found.stderr
    made = json.loads(found.stdout)
    assert [(one["groups"], one["parts"], len(one["memory_bytes"])) for one in made["groups"]] == [(1, 3, 3), (2, 3, 3)]
    assert {one["workers"] for one in made["forecasts"]} == {1}
    assert all(one["least_step_s"] > 0.0 for one in made["groups"])
    found = planned(script, "--steps", "15", "--workers", "1")
    assert found.returncode == 0, found.stderr
    assert "in groups, which share out the 3 stages of the model" in found.stdout
    assert "  1x2  " in found.stdout
    assert "  1x3  " in found.stdout
    found = planned(script, "--steps", "15", "--workers", "2x4")
    assert "unisono.Stages of the script has 3 stages" in found.stderr


def test_a_plan_of_groups_needs_a_model_in_stages_and_one_machine(script: Path) -> None:
    found = planned(script, "--steps", "15", "--workers", "2x4", "--", "16", "1000")
    assert "the script tracks no unisono.Stages: plan it with --workers N" in found.stderr
    found = planned(script, "--workers", "2x4", "--link", "1gbit", "--", "16", "1000")
    assert "--link is not part of a plan of groups" in found.stderr
