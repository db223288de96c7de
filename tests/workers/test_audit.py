"""``unisono run --audit``: a worker that computes wrong values is found and evicted, and no bit changes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unisono
from tests.parts import ALL
from tests.waiting import PATIENT
from tests.workers.conftest import served_by
from tests.workers.losses import ended_workers
from tests.workers.models import bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from tests.workers.trainings import Training
from unisono.core.errors import CheckpointError, DivergenceError, UsageError
from unisono.core.plan import plan
from unisono.core.rehearsals import key_of
from unisono.core.settings import DEFAULTS, RunSettings
from unisono.core.telemetry import Compared
from unisono.engine.rounds.life import Rounds
from unisono.record.journal import compare
from unisono.script.resuming import sound_ones
from unisono.strategies.audit.audits import Audits, make_audits
from unisono.testing import Faults, Outcome, flip_bit

SMALL = "small_training.py"
CHECKPOINTED = "checkpointed_training.py"
SHARDED = "sharded_training.py"
STEPS = 12
GO_ON = ("--audit", "0.5", "--set", "audit-then=go-on")
pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]


def train(
    directory: Path,
    workers: int,
    *options: str,
    script: str = SMALL,
    steps: int = STEPS,
    faults: Faults | None = None,
) -> Outcome:
    # Else a worker that is late is given nothing to compute, and a micro-batch that is taken over is not audited; and
    # it would depend on the speed of the disk whether there is still a checkpoint from before the fault.
    needs = {SMALL: ["--even"], CHECKPOINTED: ["--even", "--wait-for-disk", "--keep", "99"]}
    return Training(script, "--steps", steps, *needs.get(script, []))(directory, workers, faults, [*PATIENT, *options])


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with served_by(standing_nursery):
        found = train(tmp_path_factory.mktemp("calm") / "run", 1)
    assert found.exit_code == 0, found.output
    return found


def has_same_bits(outcome: Outcome, calm: Outcome) -> bool:
    return (outcome.digests, outcome.final, outcome.evaluations) == (calm.digests, calm.final, calm.evaluations)


EXCHANGES = [("shared", 3, "1"), ("two-level", 4, "2"), ("gloo", 3, "1")]


@pytest.mark.parametrize(("exchange", "workers", "hosts"), EXCHANGES if ALL else EXCHANGES[:2])
def test_a_worker_that_computes_wrong_gradients_is_evicted_and_no_bit_changes(
    exchange: str, workers: int, hosts: str, calm: Outcome, tmp_path: Path
) -> None:
    faults = Faults().corrupt("w1", "gradient", step=9, lasting=True)
    options = ["--exchange", exchange, "--set", f"simulate-hosts={hosts}", *GO_ON]
    found = train(tmp_path / "run", workers, *options, faults=faults)
    assert found.exit_code == 0, found.output
    assert has_same_bits(found, calm), found.output
    assert re.search(r"w1 on host \S+ computes wrong values on device cpu: micro-batch \d of step \d+", found.output)
    assert not re.search(r"\bw[023] on host \S+ computes wrong", found.output)
    assert "replaces" not in found.output
    (evidence,) = (tmp_path / "run" / "problems").glob("*-corruption-step*.txt")
    assert "w1" in evidence.read_text()


def test_the_journal_has_the_digests_of_what_was_audited(calm: Outcome, tmp_path: Path) -> None:
    """A digest belongs to a micro-batch, whoever has computed it: two runs have the same where both have one."""
    found: list[dict[int, dict[str, str]]] = []
    for workers in (2, 3):
        outcome = train(tmp_path / str(workers), workers, "--audit", "0.3")
        assert outcome.exit_code == 0, outcome.output
        assert has_same_bits(outcome, calm)
        found.append({line["step"]: line["audits"] for line in outcome.lines if line.get("audits")})
    alike = [(step, leaf) for step in found[0] for leaf in found[0][step] if leaf in found[1].get(step, {})]
    assert len(alike) >= 4
    assert all(found[0][step][leaf] == found[1][step][leaf] for step, leaf in alike)
    assert not any("audits" in line and line["audits"] for line in calm.lines)
    assert compare(tmp_path / "2", tmp_path / "3").startswith(f"identical: {STEPS} steps")


@pytest.mark.parametrize("value", ["parameter", "optimizer"])
def test_a_state_that_a_machine_has_spoilt_is_found_by_the_next_audit(value: str, tmp_path: Path) -> None:
    """Evicted in the same step, or in the one after it: the state of the optimizer shows one update later."""
    found = train(tmp_path / "run", 3, *GO_ON, faults=Faults().corrupt("w1", value, step=6))
    assert found.exit_code == 0, found.output
    assert re.search(r"w1 on host \S+ computes wrong values on device cpu: .* of step [67] has", found.output)


AT = [("w0", "committed"), ("w1", "talked"), ("w0", "in_talk")]
MORE = [("w1", "committed"), ("w1", "in_talk"), ("w0", "talked"), ("w0", "in_recovery")]


@pytest.mark.parametrize(("lost", "at"), [*AT, *MORE] if ALL else AT)
def test_a_loss_while_it_is_found_out_who_is_wrong_changes_no_bit(
    lost: str, at: str, calm: Outcome, tmp_path: Path
) -> None:
    """Also where the one that is lost is the one that is wrong, which is named if all have been asked before."""
    faults = Faults().corrupt("w1", "gradient", step=9, lasting=True).kill(lost, step=9, at=at)
    found = train(tmp_path / "run", 4, *GO_ON, faults=faults)
    assert found.exit_code == 0, found.output
    assert has_same_bits(found, calm), found.output
    assert ended_workers(found.output), "nobody was killed"
    assert not re.search(r"\bw[023] on host \S+ computes wrong values", found.output)
    if (lost, at) in AT:  # else w1 may be lost before all have been asked
        assert re.search(r"\bw1 on host \S+ computes wrong values", found.output)
        assert len(list((tmp_path / "run" / "problems").glob("*-corruption-step*.txt"))) == 1


def test_the_copy_of_a_shared_state_that_most_holders_do_not_have_is_found(tmp_path: Path) -> None:
    """Before the wrong copy has updated anything."""
    calm = train(tmp_path / "calm", 1, script=SHARDED, steps=6)
    faults = Faults().corrupt("w1", "optimizer", step=3)
    found = Training(SHARDED, "--steps", 6, "--copies", 3)(tmp_path / "run", 4, faults, [*PATIENT, *GO_ON])
    assert found.exit_code == 0, found.output
    assert re.search(r"w1 on host \S+ computes wrong values on device cpu: its copy of a state of ", found.output)
    assert (found.digests, found.final) == (calm.digests, calm.final)


def test_a_spoilt_state_that_an_evaluation_shows_is_found_and_the_evaluation_done_again(
    calm: Outcome, tmp_path: Path
) -> None:
    """The totals are those of the others: the run of one worker has the same."""
    faults = Faults().corrupt("w1", "optimizer", step=11, bit=30)  # the evaluation after step 11 is the first to see it
    options = ["--audit", "0.0001", "--set", "audit-then=go-on"]
    found = train(tmp_path / "run", 3, *options, faults=faults)
    assert found.exit_code == 0, found.output
    assert re.search(r"w1 on host \S+ computes wrong values on device cpu: its state of step 11 has", found.output)
    assert has_same_bits(found, calm), found.output


@pytest.mark.parametrize(("exchange", "hosts"), [("gloo", "1"), ("two-level", "2")])
def test_sums_that_arrive_as_other_bytes_are_sent_again(
    exchange: str, hosts: str, calm: Outcome, tmp_path: Path
) -> None:
    """Nobody is convicted for that: it may be the network."""
    options = ["--exchange", exchange, "--set", f"simulate-hosts={hosts}", "--audit", "0.1"]
    found = train(tmp_path / "run", 3, *options, faults=Faults().corrupt("w0", "sums", step=9))
    assert found.exit_code == 0, found.output
    assert re.search(r"what was sent from w\d to w0 arrived with different bytes", found.output)
    assert has_same_bits(found, calm), found.output
    assert not ended_workers(found.output)


def test_a_run_goes_back_to_before_what_is_to_be_doubted(tmp_path: Path) -> None:
    """And has the bits of a run in which no machine was faulty."""
    calm = train(tmp_path / "calm", 1, script=CHECKPOINTED, steps=18)
    faults = Faults().corrupt("w3", "gradient", step=10, lasting=True)  # the second start has no such worker
    found = train(
        tmp_path / "run", 4, "--exchange", "gloo", "--audit", "0.001", script=CHECKPOINTED, steps=18, faults=faults
    )
    assert found.exit_code == 0, found.output
    assert "what it computed in the steps 7 to 15 is doubtful" in found.output
    assert "goes back to step-0000000006, with 3 workers" in found.output
    assert (found.digests, found.final) == (calm.digests, calm.final)
    assert compare(tmp_path / "calm", tmp_path / "run").startswith("identical: 18 steps")


def test_a_run_goes_back_to_before_the_audits_that_a_fault_may_have_passed(tmp_path: Path) -> None:
    """Every 20th micro-batch of w2 is wrong from step 69 on. An audit that it has passed since says nothing."""
    calm = train(tmp_path / "calm", 1, script=CHECKPOINTED, steps=84)
    faults = Faults().corrupt("w2", "gradient", step=69, lasting=True, every=20)
    found = train(tmp_path / "run", 3, "--audit", "0.4", script=CHECKPOINTED, steps=84, faults=faults)
    assert found.exit_code == 0, found.output
    assert re.search(r"goes back to step-00000000\d\d, with 2 workers", found.output)
    assert (found.digests, found.final) == (calm.digests, calm.final), found.output


def test_where_no_checkpoint_is_from_before_what_is_to_be_doubted_the_run_ends(tmp_path: Path) -> None:
    faults = Faults().corrupt("w2", "gradient", step=20, lasting=True, every=5)
    found = train(tmp_path / "run", 3, "--audit", "0.4", script=CHECKPOINTED, steps=36, faults=faults)
    assert found.exit_code != 0, found.output
    assert re.search(r"w2 .* computes wrong values .* what it computed in the steps 0 to", found.output)
    assert "There is no such checkpoint" in found.output


def test_a_worker_that_is_wrong_in_evaluations_only_is_evicted_and_no_bit_changes(
    calm: Outcome, tmp_path: Path
) -> None:
    """A third worker evaluates the batch."""
    faults = Faults().corrupt("w1", "evaluation", step=2, lasting=True)
    found = train(tmp_path / "run", 3, "--audit", "0.0001", "--set", "audit-then=go-on", faults=faults)
    assert found.exit_code == 0, found.output
    assert re.search(
        r"w1 on host \S+ computes wrong values on device cpu: evaluation batch \d of step \d+", found.output
    )
    assert has_same_bits(found, calm), found.output


def test_two_workers_that_differ_in_an_evaluation_blame_nobody(tmp_path: Path) -> None:
    """And doubt no checkpoint from before what the audits have seen to be right."""
    faults = Faults().corrupt("w1", "evaluation", step=14, lasting=True)
    found = train(tmp_path / "run", 2, "--audit", "0.2", script=CHECKPOINTED, steps=24, faults=faults)
    assert found.exit_code != 0
    assert "with two workers nobody can say who is wrong" in found.output
    assert "may hold wrong values; to resume from before that: unisono run --resume" in found.output
    assert "every checkpoint may hold wrong values" not in found.output


def test_without_audits_an_evaluation_that_differs_blames_nobody_and_doubts_no_checkpoint(tmp_path: Path) -> None:
    faults = Faults().corrupt("w1", "evaluation", step=14, lasting=True)
    found = train(tmp_path / "run", 3, script=CHECKPOINTED, steps=24, faults=faults)
    assert found.exit_code != 0
    assert (
        "Either the script computes different totals on different workers, or one of the two machines" in found.output
    )
    assert "may hold wrong values" not in found.output
    assert "the newest checkpoint is step-00000000" in found.output


def test_two_workers_that_differ_name_the_checkpoint_from_before_what_is_to_be_doubted(tmp_path: Path) -> None:
    """Whoever resumes the run goes on from it, and gets the bits of a run in which no machine was faulty."""
    calm = train(tmp_path / "calm", 1, script=CHECKPOINTED, steps=18)
    faults = Faults().corrupt("w1", "gradient", step=10, lasting=True)
    found = train(tmp_path / "run", 2, "--audit", "0.001", script=CHECKPOINTED, steps=18, faults=faults)
    assert found.exit_code != 0
    assert re.search(r"what they have computed in (step \d+|the steps \d+ to \d+) is to be doubted", found.output)
    assert "may hold wrong values; to resume from before that: unisono run --resume" in found.output
    (place,) = {Path(one) for one in re.findall(r"unisono run --resume (\S+)", found.output)}
    assert place.name <= "step-0000000010"
    again = train(
        tmp_path / "again", 1, "--resume", str(tmp_path / "run" / "checkpoints"), script=CHECKPOINTED, steps=18
    )
    assert f"from {place}" in again.output
    assert again.exit_code == 0, again.output
    assert again.final == calm.final


# -- without a head, where nobody can be evicted -----------------------------------------------------


def _train(seat: Seat, place: Place, wrong: int, share: float) -> Any:
    """The final bits, or what the error says; rank ``wrong`` doubles the gradient from step 10 on."""
    try:
        with place.run(seed=1, audit=share) as run:
            return _steps(run, seat.rank == wrong)
    except DivergenceError as error:
        return str(error)


def _steps(run: unisono.Run, is_wrong: bool) -> str:
    model = nn.Linear(vectors().tensors[0].shape[1], 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=9, max_steps=15):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            step.backward(loss * 2 if is_wrong and step.number >= 10 else loss, weight=len(y))
        optimizer.step()
    return bits_of(model.state_dict())


def test_a_third_says_who_is_wrong() -> None:
    words = train_on("shared", 3, _train, 1, 0.5)
    assert all("w1 computes wrong values: micro-batch" in each for each in words), words


@pytest.mark.filterwarnings("ignore:audit. two workers")
def test_two_workers_end_in_words() -> None:
    words = train_on("shared", 2, _train, 1, 0.5)
    assert all("with two workers nobody can say who is wrong" in each for each in words), words


def test_without_a_fault_nothing_is_found_and_no_bit_changes() -> None:
    with AloneRun(seed=1) as run:
        alone = _steps(run, is_wrong=False)
    assert train_on("shared", 3, _train, -1, 0.5) == [alone] * 3


def test_a_checkpoint_that_rots_on_the_disk_is_found_and_an_older_one_used(tmp_path: Path) -> None:
    def train_up_to(folder: Path, num_steps: int) -> str:
        with AloneRun(folder, seed=1, checkpoint=unisono.Checkpoints(every_steps=3), resume="auto") as run:
            model = nn.Linear(vectors().tensors[0].shape[1], 5)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=9, max_steps=num_steps):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y), weight=len(y))
                optimizer.step()
        return bits_of(model.state_dict())

    whole = train_up_to(tmp_path / "whole", 12)
    for num_steps in (4, 7):  # the end of each has a checkpoint, however busy the disk is
        train_up_to(tmp_path / "run", num_steps)
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    flip_bit(next(newest.glob("part-*")), bit=5)
    with pytest.warns(UserWarning, match=rf"{newest.name}.* is used instead"):
        assert train_up_to(tmp_path / "run", 12) == whole


def test_a_share_that_cannot_be_audited_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"from 0 to 0\.5"):
        AloneRun(tmp_path, audit=0.7)


@pytest.mark.parametrize(
    ("settings", "then"),
    [(DEFAULTS, "go-back"), (RunSettings(audit_then="go-on"), "go-on"), (RunSettings(audit=0.1), "go-back")],
)
def test_each_option_of_the_command_line_wins_over_its_argument_by_itself(settings: RunSettings, then: str) -> None:
    audits = make_audits(settings, 0.2, "go-back", 0, None)
    assert audits is not None
    assert audits.then == then


def test_the_journal_has_the_digests_of_the_first_pass() -> None:
    audits = Audits(share=0.5, then="go-on", seed=0, convict=None)
    team = SimpleNamespace(generation=1, hosts=("", ""), num_parts=1, groups=((0,), (1,)))
    members = SimpleNamespace(worker_ids=("w0", "w1"), team=team, size=2, rank=0)
    audits.enter(cast(Rounds, SimpleNamespace(members=members, taps=[])))
    part = audits.twice(plan(2, 16), 5, 0)
    assert len(part.own) > 1
    key = key_of(part.own)
    for turn, digest in enumerate([7, 9]):
        said = {
            "w0": Compared(own_leaf=key, own_digest=digest),
            "w1": Compared(other_leaf=key, other_digest=digest),
        }
        assert not audits.compare(said, 5, turn, is_disputed=False)
    assert audits.take_digests() == {",".join(map(str, part.own)): f"{7:016x}"}
    assert audits.take_digests() == {}


def test_a_copy_that_may_hold_wrong_values_is_not_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As far as the directory of its run is there, which says so."""
    (tmp_path / "run.json").write_text('{"run_id": "r1", "sound": 6}')
    copies = cast(Any, [(None, SimpleNamespace(step=step, facts={"run_id": "r1"})) for step in (9, 6, 3)])
    assert [copy.step for _, copy in sound_ones(copies, tmp_path)] == [6, 3]
    assert "copies of more than 6 steps may hold wrong values" in capfd.readouterr().err
    with pytest.raises(CheckpointError, match="every copy may hold wrong values"):
        sound_ones(copies[:1], tmp_path)
    (tmp_path / "run.json").write_text('{"run_id": "r2", "sound": 6}')
    assert len(sound_ones(copies, tmp_path)) == 3
