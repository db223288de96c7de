"""Whom the membership table names when something goes wrong, before it acts on it."""

from __future__ import annotations

import signal

from tests.pure.test_membership import AGENT, Story, info, training
from unisono.core.messages import Evict, Failed, Finished, Hello, Leaving, Ready, WorkerExit
from unisono.membership import Action, Alarm, Send
from unisono.record.problems.kinds import Trouble, sentence

HANG_S = 60.0


def alarms(story: Story) -> list[Trouble]:
    return [action.trouble for action in story.actions if isinstance(action, Alarm)]


def place(story: Story, kind: type[object]) -> int:
    """Where among the actions the first is that says so."""

    def says(action: Action) -> bool:
        return isinstance(action, kind) or (isinstance(action, Send) and isinstance(action.message, kind))

    return next(number for number, action in enumerate(story.actions) if says(action))


def test_a_member_that_is_left_aside_hangs_and_the_others_go_on() -> None:
    story = training(3)
    for other in ("w0", "w2"):
        story.beat(other, waiting=True)
    story.beat("w1", seconds_at=11.0, samples=[17, 3])
    (trouble,) = alarms(story)
    assert (trouble.kind, trouble.worker_id, trouble.host, trouble.ends_run) == ("hang", "w1", "lab", False)
    assert sentence(trouble) == (
        "w1 on host lab hung in step 4, micro-batch 2 (samples 17, 3): it has made no progress for 11 s; the others "
        "compute its micro-batches"
    )


def test_a_hang_is_said_before_the_process_is_ended() -> None:
    story = training(3, aside_s=1000.0)
    for other in ("w0", "w2"):
        story.beat(other, waiting=True)
    story.beat("w1", seconds_at=HANG_S + 1)
    assert place(story, Alarm) < place(story, Evict)


def test_a_hang_where_another_has_hung_ends_the_run_and_names_both() -> None:
    story = training(3)
    for other in ("w0", "w2"):
        story.beat(other, waiting=True)
    story.beat("w1", seconds_at=11.0)
    story.hold("w0", "w2")
    story.beat("w2", waiting=True)
    story.beat("w0", seconds_at=HANG_S + 1)
    (trouble,) = alarms(story)
    assert trouble.worker_id == "w0"
    assert trouble.ends_run
    assert "w1 hung there as well" in sentence(trouble)
    assert story.ended is not None


def test_a_silent_worker_is_named_with_what_it_did_last() -> None:
    story = training(2, heartbeat_timeout_s=5.0)
    story.beat("w1")
    for story.now in (1.5, 3.0):
        story.beat("w0")
    story.tick(5.0)
    (trouble,) = alarms(story)
    assert (trouble.kind, trouble.worker_id) == ("hang", "w1")
    assert "has sent nothing for 5.0 s, last in step 4, micro-batch 2" in sentence(trouble)
    assert place(story, Alarm) < place(story, Evict)


def test_a_process_that_ends_by_a_signal_has_crashed() -> None:
    story = training(3)
    story.beat("w1", samples=[17])
    story.exits("w1", -signal.SIGSEGV)
    (trouble,) = alarms(story)
    assert sentence(trouble) == (
        "w1 on host lab was killed by signal 11 (SIGSEGV) in step 4, micro-batch 2 (sample 17)"
    )


def test_a_process_that_the_kernel_has_killed_for_memory_ran_out_of_it() -> None:
    story = training(3)
    message = WorkerExit(worker_id="w1", exit_code=-9, killed_for="its group was full", peak_bytes=3 * 10**9)
    story.says(AGENT, message)
    (trouble,) = alarms(story)
    assert sentence(trouble) == "w1 on host lab ran out of memory: its group was full when it had 3.0 GB"


def test_the_end_of_a_worker_that_was_sent_away_is_no_problem() -> None:
    story = training(3, aside_s=1000.0)
    for other in ("w0", "w2"):
        story.beat(other, waiting=True)
    story.beat("w1", seconds_at=HANG_S + 1)
    story.exits("w1")
    assert alarms(story) == []


def test_an_error_is_said_of_each_worker_that_has_tried_it() -> None:
    story = training(3)
    failed = Failed(error="ValueError: x", traceback="...", step=5, microbatch=2, samples=[17], retry=True)
    story.says("w1", failed)
    (first,) = alarms(story)
    assert sentence(first) == (
        "w1 on host lab failed in step 5, micro-batch 2 (sample 17): ValueError: x; another worker tries it"
    )
    story.says("w0", failed)
    (second,) = alarms(story)
    assert (second.worker_id, second.ends_run) == ("w0", True)
    assert "w1 has failed there as well" in sentence(second)


def test_what_the_worker_has_found_out_about_its_error_is_kept() -> None:
    story = training(3)
    story.says("w1", Failed(error="e", traceback="t", kind="out-of-memory", detail="parameters 3 GB", advice="half"))
    (trouble,) = alarms(story)
    assert (trouble.kind, trouble.detail, trouble.advice) == ("out-of-memory", "parameters 3 GB", "half")


def test_a_newcomer_that_lacks_a_file_could_not_join() -> None:
    story = training(2, maximum=3)
    (newcomer,) = story.agent(1, "agent1", primary=False, host="guest")
    story.says(newcomer, Hello(info=info(newcomer, "guest"), fingerprint={"torch": "2"}))
    story.says(newcomer, Failed(error="FileNotFoundError: data.npy", traceback="..."))
    (trouble,) = alarms(story)
    assert sentence(trouble) == (
        f"{newcomer} on host guest could not join the run: FileNotFoundError: data.npy; the others continue"
    )
    assert story.ended is None


def test_a_worker_with_another_script_could_not_join() -> None:
    story = Story(2, maximum=3)
    for worker_id in story.agent(2):
        story.says(worker_id, Hello(info=info(worker_id), fingerprint={"torch": "2"}, script="aa"))
        story.says(worker_id, Ready(phase=0))
    story.hold()
    (newcomer,) = story.agent(1, "agent1", primary=False, host="guest")
    story.says(newcomer, Hello(info=info(newcomer, "guest"), fingerprint={"torch": "2"}, script="bb"))
    (trouble,) = alarms(story)
    assert (trouble.kind, trouble.worker_id, trouble.host) == ("failed-join", newcomer, "guest")
    assert "a different text of the script" in sentence(trouble)


def test_a_worker_that_leaves_the_loop_alone_has_diverged() -> None:
    story = training(2)
    story.says("w1", Leaving(phase=0, step=4))
    story.beat("w0", step=4)
    (trouble,) = alarms(story)
    assert (trouble.kind, trouble.worker_id, trouble.ends_run) == ("divergence", "w1", True)
    assert sentence(trouble) == "w1 left the training loop before step 4, but w0 has begun step 4"


def test_a_good_run_raises_no_alarm() -> None:
    story = training(2)
    seen = [*alarms(story)]
    for worker_id in ("w0", "w1"):
        story.beat(worker_id)
        seen += alarms(story)
    for worker_id in ("w0", "w1"):
        story.says(worker_id, Leaving(phase=0, step=9))
        story.says(worker_id, Finished())
        seen += alarms(story)
    for worker_id in ("w0", "w1"):
        story.exits(worker_id, 0)
        seen += alarms(story)
    assert seen == []
