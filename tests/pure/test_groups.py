"""Groups of workers (``--workers 2x4``): each worker of a group has one part of the model; no part is left alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.test_membership import AGENT, Story, info, step_done
from tests.pure.test_settings import options
from unisono.cli.status import _workers
from unisono.cluster.launchers.hosts import Host, parse_hosts, spread
from unisono.core.errors import ProtocolError, UsageError
from unisono.core.events import MembershipChanged, WorkerJoined
from unisono.core.messages import (
    Drain,
    Failed,
    Hello,
    Left,
    Offer,
    Ready,
    Scale,
    WorkerExit,
)
from unisono.core.policy import Policy
from unisono.core.settings import RunSettings
from unisono.membership import part_of
from unisono.membership.parts import to_admit
from unisono.membership.roster import ALIVE, State, Worker, WorkerState, resumed
from unisono.record.overview import OverviewBuilder
from unisono.system.capacity import Workers, parse_workers
from unisono.views.watch.terminal.drawing import workers_rows


def groups(number: int, parts: int, **more: Any) -> Story:
    """A run with so many groups, that has not begun."""
    return Story(number * parts, **{"parts": parts, "minimum": parts, **more})


def training(number: int, parts: int, **more: Any) -> Story:
    story = groups(number, parts, **more)
    story.arrive(*story.agent(number * parts))
    story.hold()
    return story


def parts_of(story: Story, *worker_ids: str) -> list[int]:
    return [story.worker(worker_id).part for worker_id in worker_ids]


def told(story: Story) -> list[int]:
    """The parts in the newest notice, by rank."""
    assert story.state.notice is not None
    return [member.part for member in story.state.notice.members]


def settle(story: Story) -> None:
    """Workers that were ordered come, and all take the generations that follow."""
    for _ in range(4):
        for worker in list(story.state.workers.values()):
            if worker.state is WorkerState.ORDERED:
                story.arrive(worker.worker_id, host=worker.agent)
        for worker in list(story.state.workers.values()):
            if worker.state is WorkerState.HOLDING and worker.worker_id not in story.state.members:
                story.says(worker.worker_id, Left())
        story.hold()


# -- the parts of workers ----------------------------------------------------------------------------


def test_the_workers_of_a_machine_fill_groups() -> None:
    story = groups(2, 4)
    ids = story.agent(8)
    assert parts_of(story, *ids) == [0, 1, 2, 3, 0, 1, 2, 3]
    story.arrive(*ids)
    assert told(story) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_with_one_part_all_have_it() -> None:
    story = Story(3)
    story.arrive(*story.agent(3))
    assert told(story) == [0, 0, 0]


def test_a_group_that_one_machine_cannot_hold_is_filled_by_the_next() -> None:
    story = groups(2, 4, machines=1)
    first, second = story.agent(5), story.agent(3, "agent1", primary=False, launched="there")
    assert parts_of(story, *first) == [0, 1, 2, 3, 0]
    assert parts_of(story, *second) == [1, 2, 3]


def test_what_a_worker_says_of_its_part_is_not_believed() -> None:
    story = groups(1, 2)
    for worker_id in story.agent(2):
        claims = msgspec.structs.replace(info(worker_id), part=7)
        story.says(worker_id, Hello(info=claims, fingerprint={}))
        story.says(worker_id, Ready(phase=0))
    assert told(story) == [0, 1]


def test_a_worker_that_nobody_has_ordered_gets_the_part_that_its_welcome_has_said() -> None:
    story = groups(1, 2)
    story.agent(1)
    said = part_of(story.state, "w5")
    story.says("w5", Hello(info=info("w5"), fingerprint={}))
    assert (said, part_of(story.state, "w5"), part_of(story.state, "w0")) == (1, 1, 0)


@pytest.mark.parametrize("lost", range(8))
def test_the_replacement_of_a_lost_worker_has_its_part(lost: int) -> None:
    story = training(2, 4)
    story.exits(f"w{lost}")
    assert parts_of(story, "w8") == parts_of(story, f"w{lost}")
    assert len(told(story)) == 7, "the others of its group stay"
    assert not story.state.notice.paused  # type: ignore[union-attr]
    story.hold()
    story.arrive("w8")
    assert sorted(told(story)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_two_workers_that_are_lost_are_both_replaced_in_their_parts() -> None:
    story = training(2, 4)
    story.exits("w1")
    story.exits("w6")
    assert parts_of(story, "w8", "w9") == [1, 2]


def test_a_worker_that_is_about_to_leave_does_not_count() -> None:
    story = training(2, 2)
    story.says(AGENT, Drain(worker_ids=["w3"]))
    story.says("", Scale(num_workers=4))
    assert parts_of(story, "w4") == [1]


def test_a_head_that_takes_over_knows_the_parts() -> None:
    """Its state has come as bytes from the head before."""
    story = training(2, 2)
    story.exits("w1")
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(story.state), type=State)
    story.state = resumed(kept, 2, 10.0, seat=AGENT, head="h2")
    assert [worker.part for worker in story.state.workers.values()] == [0, 1, 0, 1, 1]
    assert part_of(story.state, "w4") == 1
    story.says("w0", Hello(info=info("w0"), fingerprint={"torch": "2"}, generation=1))
    assert parts_of(story, "w0") == [0]


# -- a part without a worker -------------------------------------------------------------------------


def test_a_run_begins_when_every_part_has_a_worker() -> None:
    story = groups(2, 2)
    story.arrive(*story.agent(4)[:3])
    assert story.state.notice is None
    story.arrive("w3")
    assert told(story) == [0, 1, 0, 1]


def test_a_run_does_not_begin_without_a_part_though_it_may_begin_with_fewer_workers() -> None:
    story = groups(2, 2, max_restarts=0)
    story.arrive(*story.agent(4)[:2])
    story.exits("w3")
    story.arrive("w2")
    assert told(story) == [0, 1, 0], "one worker idles"
    story = groups(2, 2, max_restarts=0)
    story.agent(4)
    story.exits("w1")
    story.exits("w3")
    story.arrive("w0", "w2")
    assert story.state.notice is None
    assert story.reason == "no worker has part 1 of 2, so the run waits for a machine that joins"
    story.arrive(*story.agent(1, "agent1", primary=False, host="office"))
    assert sorted(told(story)) == [0, 0, 1]


def test_a_run_ends_with_the_last_worker_of_a_part() -> None:
    """Nobody has the state of that part any more; as without groups, where the only worker is lost."""
    story = training(1, 4)
    story.says("w0", step_done(3))
    story.exits("w2")
    assert story.state.ended is not None
    assert story.state.ended.reason.endswith("no worker with the run's state of part 2 of the model is left")


def test_a_run_ends_with_the_last_worker_of_a_part_though_there_are_more_workers_than_parts() -> None:
    story = training(2, 2, max_restarts=0)
    story.exits("w1")
    assert story.state.label == "training"
    story.hold()
    story.exits("w3")
    assert story.state.ended is not None
    assert story.state.ended.reason.endswith("no worker with the run's state of part 1 of the model is left")


@pytest.mark.parametrize(("groups", "is_tried_again"), [(1, False), (2, True)])
def test_a_micro_batch_that_raises_is_tried_by_a_worker_of_the_same_part(groups: int, is_tried_again: bool) -> None:
    story = training(groups, 2)
    story.says("w1", Failed(error="ValueError: x", traceback="where", step=5, microbatch=2, retry=True))
    if is_tried_again:
        assert story.state.label == "training"
        assert "another worker tries it" in story.reason
    else:
        assert story.state.ended is not None
        assert story.state.ended.traceback == "where"


def test_a_spare_worker_of_another_part_does_not_keep_a_lost_one_from_being_replaced() -> None:
    """Beyond the maximum, workers wait to be admitted."""
    story = training(1, 2, grows=False)
    story.arrive(*story.agent(2, "agent1", primary=False, host="office"), host="office")
    assert told(story) == [0, 1]
    story.says("agent1", WorkerExit(worker_id="w2", exit_code=-9))
    story.exits("w0")
    assert parts_of(story, *placed_ids(story)) == [0], "w3 waits, and has part 1"
    settle(story)
    assert story.state.label == "training"
    assert sorted(told(story)) == [0, 1]


def test_nobody_takes_the_room_of_a_part_that_lacks_a_worker() -> None:
    policy = Policy(start=2, minimum=2, maximum=2, parts=2)
    first, other, missing = (
        Worker(worker_id=f"w{number}", state=WorkerState.READY, part=part) for number, part in enumerate((1, 1, 0))
    )
    assert to_admit([first], [other], policy) == []
    assert to_admit([first], [other, missing], policy) == [missing]
    assert to_admit([first], [other, missing], msgspec.structs.replace(policy, maximum=3)) == [other, missing]


def placed_ids(story: Story) -> list[str]:
    return [worker.worker_id for worker in story.state.workers.values() if worker.state is WorkerState.ORDERED]


def test_the_last_worker_of_a_part_is_not_left_aside_when_it_is_late() -> None:
    story = training(1, 2, aside_s=5.0, hang_s=60.0, late_s=1.0)
    story.beat("w0", waiting=True)
    story.beat("w1", seconds_at=10.0)
    assert story.worker("w1").state is WorkerState.HOLDING
    story = training(2, 2, aside_s=5.0, hang_s=60.0, late_s=1.0)
    story.beat("w0", waiting=True)
    story.beat("w1", seconds_at=10.0)
    assert story.worker("w1").state is WorkerState.ASIDE


# -- more groups, and fewer --------------------------------------------------------------------------


def test_scaling_down_drains_one_worker_of_each_part() -> None:
    story = training(3, 2)
    story.says("", Scale(num_workers=2))
    assert [w.worker_id for w in story.state.workers.values() if w.draining] == ["w2", "w3", "w4", "w5"]
    assert told(story) == [0, 1]
    assert story.reason.startswith("scaled to 1 group of 2, 2 workers, from 6")


def test_scaling_up_adds_whole_groups() -> None:
    story = training(1, 3)
    story.says("", Scale(num_workers=9))
    assert parts_of(story, *placed_ids(story)) == [0, 1, 2, 0, 1, 2]
    settle(story)
    assert sorted(told(story)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_scaling_makes_groups_whole() -> None:
    """A lost worker was not replaced, and then there are too many of the others."""
    story = training(2, 3, max_restarts=0)
    story.exits("w1")
    story.hold()
    story.says("", Scale(num_workers=3))
    assert told(story) == [0, 2, 1]
    story = training(2, 3, max_restarts=0)
    story.exits("w1")
    story.hold()
    story.says("", Scale(num_workers=6))
    assert parts_of(story, *placed_ids(story)) == [1]


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_number_that_is_no_number_of_groups_is_refused(number: int) -> None:
    story = training(2, 2)
    with pytest.raises(ProtocolError, match=rf"a group has 2 workers, and {number} worker"):
        story.says("", Scale(num_workers=number))


def test_a_group_on_one_machine_leaves_together() -> None:
    story = training(1, 2)
    for number in (1, 2):
        story.arrive(*story.agent(2, f"agent{number}", primary=False, host=f"host{number}"), host=f"host{number}")
        story.hold()
        story.hold()
    story.says("", Scale(num_workers=4))
    assert [w.agent for w in story.state.workers.values() if w.draining] == ["agent2", "agent2"]
    settle(story)
    story.says("", Scale(num_workers=2))
    assert told(story) == [0, 1]
    assert story.state.members == ("w0", "w1"), "beside the command"


def test_a_machine_that_is_in_use_keeps_the_last_worker_of_a_part() -> None:
    story = groups(1, 2, machines=1)
    story.agent(1)
    story.agent(1, "agent1", primary=False, host="there", launched="there")
    story.arrive("w0")
    story.arrive("w1", host="there")
    story.hold()
    story.says("agent1", Offer(num_workers=0, reason="somebody uses it"))
    assert told(story) == [0, 1]
    assert not story.worker("w1").draining
    story.says("", Scale(num_workers=4))
    settle(story)
    assert story.worker("w1").state is WorkerState.LEFT, "others have its part now"
    assert 1 in told(story)


def test_a_worker_that_leaves_stays_until_a_newcomer_has_its_part() -> None:
    story = training(1, 2, grows=False)
    story.agent(2, "agent1", primary=False, host="office")
    story.says(AGENT, Drain(reason="lab leaves"))
    assert told(story) == [0, 1], "the newcomers are on their way"
    story.arrive("w2", host="office")
    assert sorted(told(story)) == [0, 0, 1]
    story.hold()
    story.hold()
    assert "w1" in story.state.members
    settle(story)
    assert sorted(told(story)) == [0, 1]
    assert story.state.members == ("w2", "w3")


def test_the_workers_of_an_incomplete_group_stay() -> None:
    story = Story(5, parts=4, minimum=4)
    story.arrive(*story.agent(5))
    assert told(story) == [0, 1, 2, 3, 0]
    story.hold()
    story.exits("w0")
    story.hold()
    story.arrive("w5")
    assert sorted(told(story)) == [0, 0, 1, 2, 3]


def test_a_run_that_decides_by_itself_counts_groups() -> None:
    story = training(1, 2, maximum=2, most=6, efficiency=0.5, grows=False)
    story.state = msgspec.structs.replace(
        story.state, agents={AGENT: msgspec.structs.replace(story.state.agents[AGENT], offers=6)}
    )
    for number in range(60):
        story.says("w0", msgspec.structs.replace(step_done(number), samples=8))
        if placed_ids(story):
            break
    assert parts_of(story, *placed_ids(story)) == [0, 1]
    assert story.state.policy.maximum == 4


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), parts=st.integers(1, 4), number=st.integers(1, 3))
def test_whatever_happens_a_run_that_trains_has_every_part(seed: int, parts: int, number: int) -> None:
    """Losses, machines and scaling in any order; in the calm that follows all parts are there, and as many of each."""
    rng = random.Random(seed)
    story = training(number, parts, max_restarts=10_000)
    for _ in range(12):
        members = [i for i in story.state.members if story.worker(i).state is WorkerState.HOLDING]
        others = [agent_id for agent_id in story.state.agents if agent_id != AGENT]
        match rng.randrange(5):
            case 0 if len(members) > 1:
                lost = rng.choice(members)
                agent_id = story.worker(lost).agent
                if agent_id in story.state.agents:
                    story.says(agent_id, WorkerExit(worker_id=lost, exit_code=-9))
            case 1:
                story.says("", Scale(num_workers=parts * rng.randint(1, 3)))
            case 2 if not others:
                story.agent(rng.randint(1, 5), f"agent{story.state.num_agents}", primary=False, host="there")
            case 3 if others:
                story.says(others[0], Offer(num_workers=rng.choice((0, 1, 4)), reason="somebody"))
            case _:
                settle(story)
        if story.state.ended is not None:
            return
        assert all(0 <= worker.part < parts for worker in story.state.workers.values())
        notice = story.state.notice
        assert notice is not None
        if not notice.paused and notice.members:
            assert {member.part for member in notice.members} == set(range(parts))
    for agent_id in [agent_id for agent_id in story.state.agents if agent_id != AGENT]:
        story.says(agent_id, Offer(num_workers=4, reason="nobody uses it"))
    settle(story)
    story.says("", Scale(num_workers=parts * 2))
    settle(story)
    settle(story)
    if story.state.ended is None:
        staying = [
            worker.part for worker in story.state.workers.values() if worker.state in ALIVE and not worker.draining
        ]
        assert sorted(staying) == sorted([*range(parts)] * 2)
        assert sorted(told(story)) == sorted(staying)
        assert story.state.label == "training"


# -- what people see ---------------------------------------------------------------------------------


def with_workers(parts: Sequence[int]) -> OverviewBuilder:
    builder = OverviewBuilder("r1")
    for number, part in enumerate(parts):
        builder.take(
            WorkerJoined(
                worker_id=f"w{number}", host="lab", device="cpu", pid=1, generation=1, step=0, reason="", part=part
            )
        )
    ids = tuple(f"w{number}" for number in range(len(parts)))
    builder.take(MembershipChanged(generation=1, worker_ids=ids, reason="all are ready"))
    return builder


def rows(builder: OverviewBuilder, columns: int) -> list[str]:
    lines = workers_rows(builder.overview(now=0.0), columns, 9, unicode=False)[1:]
    return ["".join(text for text, _ in line) for line in lines]


def test_the_table_of_workers_has_their_parts_where_there_are_several() -> None:
    several, one = with_workers((0, 1, 0, 1)), with_workers((0, 0))
    assert [row[:18].split("  ")[0] for row in rows(several, 110)] == [f"w{n}  part {n % 2} of 2"[:2] for n in range(4)]
    assert ["part 0 of 2" in row for row in rows(several, 110)] == [True, False, True, False]
    assert not any("part" in row for row in (*rows(one, 110), *rows(several, 50)))
    assert {len(row) for row in rows(several, 110)} <= {110, len(rows(several, 110)[0])}


def test_a_status_has_the_parts_of_workers_where_there_are_several() -> None:
    worker = {"worker_id": "w3", "rank": 3, "state": "training", "pid": 7, "device": "cpu", "step": 4, "host": "lab"}
    heading, line = _workers([{**worker, "part": 1}], 2)
    assert (heading.index("part"), line.index("part 1 of 2")) == (8, 8)
    assert heading.index("rank") == line.index("3  ", 20)
    assert _workers([{**worker, "part": 0}], 1) == _workers([worker], 1)
    assert "part" not in "".join(_workers([worker], 1))


# -- the command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts", "workers"),
    [
        ("4", 1, Workers(4, 1, 4, grows=True, parts=1)),
        ("2x4", 4, Workers(8, 4, 8, grows=True, parts=4)),
        ("2x1", 1, Workers(2, 1, 2, grows=True, parts=1)),
        ("1:3x2", 2, Workers(2, 2, 6, grows=False, parts=2)),
        ("autox1000", 1000, Workers(1000, 1000, 1000, grows=True, parts=1000)),
    ],
)
def test_groups_are_read(text: str, parts: int, workers: Workers) -> None:
    assert RunSettings(workers=text).parts == parts
    assert parse_workers(text, 1) == workers


@pytest.mark.parametrize("text", ["0x2", "2x0", "2x", "x4", "2x2x2", "2x-1", "2:1x2", "1:x2", "2x two", "x", "-1x2"])
def test_what_is_no_number_of_groups_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--workers"):
        parse_workers(text, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "2x2", "--evaluators", "1"], "each has one of 2 parts of it; leave one of them out"),
        (["--workers", "2x2", "--wait-for", "3"], "groups of 2: got 3, which is not a multiple; give 4"),
        (["--workers", "2x", "--dry-run"], "--workers 2x: groups of several workers are NxP"),
        (["--hosts", "a:1x4,b:2x3"], "a:1x4 names groups of 4, and b:2x3 of 3"),
        (["--hosts", "a:1x4,b:2"], "a:1x4 names groups of 4, and b:2 of 1"),
        (["--hosts", "a:1x4", "--workers", "2"], "--hosts names groups of 4 workers, and --workers 2 groups of 1"),
        (["--hosts", "a:1x4", "--workers", "2x3"], "--hosts names groups of 4 workers, and --workers 2x3 groups of 3"),
    ],
)
def test_groups_that_make_no_sense_are_refused(words: Sequence[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        options(tmp_path, *words)
    assert said in str(caught.value)


def test_the_groups_of_machines_are_those_of_the_run(tmp_path: Path) -> None:
    found = options(tmp_path, "--hosts", "a:1x4,b:2x4")
    assert (found.parts, found.workers, found.takes_all) == (4, "autox4", True)
    assert parse_hosts("a:1x4,b:2x4,c") == [Host("a", 4, 4), Host("b", 8, 4), Host("c")]
    (tmp_path / "hosts").write_text("a slots=1x4\nb:2x4\n")
    assert options(tmp_path, "--set", f"hostfile={tmp_path / 'hosts'}").parts == 4
    assert options(tmp_path, "--hosts", "a:4,b", "--workers", "2x4").parts == 4


def test_groups_are_on_one_machine_each_where_there_is_room() -> None:
    hosts = [Host("a"), Host("b")]

    def numbers(text: str, *room: int) -> list[int]:
        return spread(parse_workers(text, 1), hosts, room, is_auto=False)

    assert numbers("2x4", 5, 5) == [4, 4]
    assert numbers("2x4", 8, 2) == [8, 0]
    assert numbers("2x4", 6, 2) == [6, 2], "the second group is on both"
    assert numbers("3x2", 3, 3) == [3, 3]
    assert numbers("2x4", 2, 2) == [4, 4], "beyond the room"
    assert sum(numbers("1:9x4", 7, 6)) == 12, "as many groups as there is room for"
    auto = Workers(4, 4, 4, grows=True, parts=4)
    assert spread(auto, hosts, [5, 5], is_auto=True) == [4, 4]
    with pytest.raises(UsageError, match="there is room for 3 workers, and a group has 4"):
        spread(auto, hosts, [2, 1], is_auto=True)


def test_a_policy_needs_a_worker_for_each_part() -> None:
    with pytest.raises(UsageError, match="a run with 4 parts of the model needs a worker for each of them"):
        Policy(start=8, minimum=3, maximum=8, parts=4)
