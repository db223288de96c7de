"""What the head does with a worker that computes wrong values, and how a command starts its run again without it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.pure.test_alarms import alarms
from tests.pure.test_membership import AGENT, training
from unisono.cli.back import again
from unisono.cluster.launchers import HERE, Machine
from unisono.core.errors import RunGoesBack, UsageError
from unisono.core.messages import Convicted, Ended, Evict, Failed, Notice, Start
from unisono.membership.roster import WorkerState
from unisono.record.problems.kinds import text
from unisono.system.capacity import Workers
from unisono.system.faults import arm, decode, encode, forget_passing, spoils
from unisono.testing import Faults


def convicted(*worker_ids: str, goes_back: bool = False, doubtful_from: int = 7, is_lasting: bool = True) -> Convicted:
    return Convicted(
        worker_ids=list(worker_ids),
        step=9,
        doubtful_from=doubtful_from,
        sound=5,
        goes_back=goes_back,
        what="micro-batch 3",
        is_lasting=is_lasting,
    )


def test_it_is_ended_without_a_replacement_and_the_others_go_on() -> None:
    story = training(4)
    story.says("w0", convicted("w2"))
    assert [evict.worker_id for evict in story.sent(AGENT, Evict)] == ["w2"]
    assert not story.sent(AGENT, Start)
    (notice,) = story.sent("w1", Notice)
    assert notice.immediate
    assert [member.worker_id for member in notice.members] == ["w0", "w1", "w3"]
    assert "computes wrong values: micro-batch 3 of step 9" in notice.reason
    assert (story.state.workers["w2"].state, story.state.workers["w2"].how) == (WorkerState.LOST, "evicted")


def test_worker_machine_device_and_what_is_to_be_doubted_are_named() -> None:
    story = training(3)
    story.says("w0", convicted("w2"))
    (trouble,) = alarms(story)
    assert (trouble.kind, trouble.worker_id, trouble.host, trouble.step) == ("corruption", "w2", "lab", 9)
    words = text(trouble)
    assert "w2 on host lab computes wrong values on device cpu" in words
    assert "the steps 7 to 8 is doubtful" in words


@pytest.mark.parametrize(
    ("is_lasting", "words"), [(True, "each time that it computed it"), (False, "the fault is intermittent")]
)
def test_it_is_said_whether_the_fault_is_always_there(is_lasting: bool, words: str) -> None:
    story = training(3)
    story.says("w0", convicted("w2", is_lasting=is_lasting))
    assert words in text(alarms(story)[0])


def test_the_reports_of_the_others_say_nothing_new() -> None:
    story = training(3)
    story.says("w0", convicted("w2"))
    generation = story.state.generation
    assert not story.says("w1", convicted("w2"))
    assert story.state.generation == generation


def test_nobody_can_accuse_others_to_save_itself() -> None:
    story = training(3)
    assert not story.says("w2", convicted("w2"))
    assert story.state.workers["w2"].state is WorkerState.HOLDING


def test_a_run_that_goes_back_ends_for_all_and_names_the_step_and_the_machine() -> None:
    story = training(3)
    story.says("w0", convicted("w2", goes_back=True))
    (ended,) = story.sent(AGENT, Ended)
    assert (ended.ok, ended.worker_id, ended.back_to, ended.without) == (False, "w2", 5, ["lab"])
    assert "in the steps 7 to 8 is doubtful" in ended.reason
    assert story.sent("w0", Ended)


def test_a_run_that_ends_because_bits_differ_says_which_checkpoints_are_sound() -> None:
    story = training(2)
    story.says("w0", Failed(error="DivergenceError: two workers differ", traceback="", sound=7, kind="divergence"))
    (ended,) = story.sent(AGENT, Ended)
    assert (ended.sound, ended.back_to) == (7, -1)


def test_a_value_that_was_wrong_once_is_not_wrong_again_when_the_run_goes_back() -> None:
    faults = Faults().corrupt("w1", "gradient", step=3).corrupt("w2", "gradient", lasting=True).kill("w0", at="reduced")
    left = decode(forget_passing(encode(list(faults.faults))))
    assert [(each.action, each.worker) for each in left] == [("corrupt", "w2"), ("kill", "w0")]


def test_a_value_that_comes_and_goes_is_wrong_each_so_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.system.faults._armed", [])
    arm(encode(list(Faults().corrupt("w1", "gradient", bit=3, lasting=True, every=4).faults)), "w1", 0)
    assert [spoils("gradient") for _ in range(9)] == [None, None, None, 3] * 2 + [None]


def test_a_run_goes_back_also_where_the_wrong_worker_is_lost_meanwhile() -> None:
    story = training(3)
    story.exits("w2")
    story.says("w0", convicted("w2", goes_back=True))
    assert story.sent(AGENT, Ended)[-1].back_to == 5


def test_a_worker_that_is_lost_meanwhile_is_named_once_and_nobody_else_is_ended() -> None:
    story = training(4)
    story.exits("w2")
    generation = story.state.generation
    story.says("w0", convicted("w2"))
    (trouble,) = [one for one in alarms(story) if one.kind == "corruption"]
    assert (trouble.worker_id, trouble.host, trouble.step) == ("w2", "lab", 9)
    assert "it was lost before it could be ended" in text(trouble)
    assert not story.says("w1", convicted("w2"))
    assert story.state.generation == generation


# -- the command -------------------------------------------------------------------------------------

LABEL = f"{socket.gethostname()}-8c34"


def run_with(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / "checkpoints" / f"step-{step:010}").mkdir(parents=True)
    return folder


def four() -> Workers:
    return Workers(4, 1, 4, grows=True)


def machines(**workers: int) -> list[Machine]:
    return [Machine(name=name.removeprefix("here"), num_workers=number) for name, number in workers.items()]


def test_it_goes_back_to_the_newest_checkpoint_that_is_not_to_be_doubted(tmp_path: Path) -> None:
    back = RunGoesBack("w2 is wrong", str(run_with(tmp_path, 3, 6, 9, 12)), 7, ["nodeb-1234"])
    found = again(back, four(), machines(nodea=2, nodeb=2))
    assert Path(found.changes["resume"]).name == "step-0000000006"
    assert found.changes["run_dir"] == str(tmp_path)
    assert found.dropped == {"nodeb"}


def test_a_machine_that_the_command_runs_on_is_left_out_where_there_are_others(tmp_path: Path) -> None:
    back = RunGoesBack("w0 is wrong", str(run_with(tmp_path, 3)), 7, [LABEL])
    assert again(back, four(), machines(here=2, nodeb=2)).dropped == {HERE}


def test_on_one_machine_it_goes_on_with_one_worker_fewer(tmp_path: Path) -> None:
    back = RunGoesBack("w2 is wrong", str(run_with(tmp_path, 3)), 7, [LABEL])
    found = again(back, four(), machines(here=4))
    assert (found.changes["workers"], found.dropped) == ("3", frozenset())
    assert again(back, Workers(2, 2, 6, grows=False), machines(here=6)).changes["workers"] == "1:5"


@pytest.mark.parametrize(
    ("steps", "label", "words"),
    [((9, 12), LABEL, "There is no such checkpoint"), ((3,), "elsewhere-1", "not known")],
)
def test_what_cannot_be_decided_is_said_with_what_to_do(
    steps: tuple[int, ...], label: str, words: str, tmp_path: Path
) -> None:
    back = RunGoesBack("w2 is wrong", str(run_with(tmp_path, *steps)), 7, [label])
    with pytest.raises(UsageError, match=words) as raised:
        again(back, four(), machines(nodea=2, nodeb=2, nodec=2))
    assert "--resume" in str(raised.value)


def test_a_run_without_a_directory_here_is_not_started_again() -> None:
    with pytest.raises(UsageError, match="a checkpoint of at most 7 steps"):
        again(RunGoesBack("w2 is wrong", "", 7, [LABEL]), four(), machines(here=4))


def test_the_last_worker_does_not_go_on(tmp_path: Path) -> None:
    back = RunGoesBack("w0 is wrong", str(run_with(tmp_path, 3)), 7, [LABEL])
    with pytest.raises(UsageError, match="No worker is left"):
        again(back, Workers(1, 1, 1, grows=True), machines(here=1))
