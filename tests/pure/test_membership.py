"""The membership table, without a process: its decisions, and what must hold for 64 members in any order of events.

Situations that are told in a few events are rows of `tests/pure/test_situations.py`.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import membership
from unisono.cluster.head.versions import HeadMemory
from unisono.core.efficiency import SETTLED, SKIPPED
from unisono.core.errors import ProtocolError, UsageError
from unisono.core.events import Event as Happening
from unisono.core.messages import (
    PROTOCOL,
    AgentHello,
    Beat,
    BeatOf,
    Drain,
    Ended,
    Evict,
    Failed,
    Finished,
    Hello,
    Holding,
    Leaving,
    Left,
    Lost,
    MachinesGone,
    MemberInfo,
    Message,
    Notice,
    Offer,
    Ready,
    Scale,
    Start,
    StepDone,
    Stop,
    Suspect,
    TalkAnswer,
    TalkCall,
    TalkDone,
    UserSentence,
    Wanted,
    WorkerExit,
    WriteStacks,
)
from unisono.core.policy import Policy
from unisono.core.settings import RunSettings
from unisono.membership import (
    TRANSITIONS,
    Action,
    Event,
    Hangup,
    Invite,
    Send,
    Tick,
    agent_name,
    routine_of_many,
    step,
)
from unisono.membership.hellos import differences, refusal
from unisono.membership.roster import ALIVE, State, Worker, WorkerState, noted, resumed

AGENT = "agent0"
M = TypeVar("M", bound=Message)


def info(worker_id: str, host: str = "lab") -> MemberInfo:
    return MemberInfo(worker_id=worker_id, host=host, pid=1000 + int(worker_id[1:]), device="cpu")


def step_done(number: int, seconds: float = 0.1) -> StepDone:
    return StepDone(step=number, seconds=seconds)


class Story:
    """A head without connections: says events to the table and remembers what came of them."""

    def __init__(self, start: int = 3, **policy: int | float | bool) -> None:
        own = {"start": start, "maximum": start, **policy}
        settings = {name: own.pop(name) for name in policy if name not in Policy.__struct_fields__}
        self.state = State(policy=Policy(**own), settings=RunSettings(**settings))  # type: ignore[arg-type]
        self.now = 0.0
        self.actions: list[Action] = []
        self.reason = ""
        self.happened: Sequence[Happening] = ()

    def says(self, source: str, message: Message | Tick) -> list[Action]:
        self.state, actions, self.reason, self.happened = step(self.state, Event(source, message), self.now)
        self.actions = list(actions)
        return self.actions

    def agent(
        self, num_workers: int, agent_id: str = AGENT, *, primary: bool = True, host: str = "lab", launched: str = ""
    ) -> list[str]:
        """An agent joins; returns the ids of the workers that it is to start."""
        hello = AgentHello(host=host, pid=1, num_workers=num_workers, primary=primary, launched=launched)
        self.says(agent_id, hello)
        return [i for start in self.sent(agent_id, Start) for i in start.worker_ids]

    def arrive(self, *worker_ids: str, host: str = "lab") -> None:
        """These workers are up and ready."""
        for worker_id in worker_ids:
            self.says(worker_id, Hello(info=info(worker_id, host), fingerprint={"torch": "2"}))
            self.says(worker_id, Ready(phase=0))

    def hold(self, *worker_ids: str) -> None:
        """These workers (all members) have taken the newest generation."""
        for worker_id in worker_ids or self.state.members:
            self.says(worker_id, Holding(generation=self.state.generation))

    def exits(self, worker_id: str, exit_code: int = -9) -> list[Action]:
        return self.says(AGENT, WorkerExit(worker_id=worker_id, exit_code=exit_code))

    def beat(
        self,
        worker_id: str,
        *,
        seconds_at: float = 0.0,
        waiting: bool = False,
        progress: int = 1,
        num_steps: int = 5,
        phase: int = 0,
        step: int = 4,
        microbatch: int = 2,
        evaluates: bool = False,
        samples: Sequence[int] = (),
        generation: int = 0,
        waits_in: tuple[int, str] = (-1, ""),
    ) -> list[Action]:
        return self.says(
            worker_id,
            Beat(
                generation=generation or self.state.generation,
                round=waits_in[0],
                title=waits_in[1],
                phase=phase,
                step=step,
                microbatch=microbatch,
                progress=progress,
                num_steps=num_steps,
                waiting=waiting,
                seconds_at=seconds_at,
                evaluates=evaluates,
                samples=list(samples),
            ),
        )

    def tick(self, now: float) -> list[Action]:
        self.now = now
        return self.says("", Tick())

    def sent(self, to: str, kind: type[M]) -> list[M]:
        found = [a.message for a in self.actions if isinstance(a, Send) and a.to == to]
        return [message for message in found if isinstance(message, kind)]

    def notices(self) -> dict[str, Notice]:
        """Who has just heard of a generation."""
        return {a.to: a.message for a in self.actions if isinstance(a, Send) and isinstance(a.message, Notice)}

    def worker(self, worker_id: str) -> Worker:
        return self.state.workers[worker_id]

    @property
    def ended(self) -> Ended | None:
        return self.state.ended


def training(num_workers: int = 3, **policy: int | float | bool) -> Story:
    """A run whose first generation everybody has taken."""
    story = Story(num_workers, **policy)
    story.arrive(*story.agent(num_workers))
    story.hold()
    return story


# -- the first generation ----------------------------------------------------------------------------


def test_the_agent_is_told_whom_to_start() -> None:
    assert Story(3).agent(3) == ["w0", "w1", "w2"]


def test_the_first_generation_waits_for_all() -> None:
    story = Story(3)
    story.agent(3)
    story.arrive("w2", "w0")
    assert story.state.notice is None
    story.arrive("w1")
    notice = story.notices()["w1"]
    assert (notice.generation, notice.immediate, notice.paused) == (1, False, False)
    assert [member.worker_id for member in notice.members] == ["w0", "w1", "w2"]
    assert set(story.notices()) == {"w0", "w1", "w2"}
    assert story.worker("w0").state is WorkerState.ADMITTED
    story.hold("w0")
    assert story.worker("w0").state is WorkerState.HOLDING


def test_members_of_a_host_stand_together() -> None:
    story = Story(4)
    story.agent(4)
    for worker_id, host in (("w0", "a"), ("w1", "b"), ("w2", "a"), ("w3", "b")):
        story.arrive(worker_id, host=host)
    assert story.state.members == ("w0", "w2", "w1", "w3")


def test_numbers_count_as_numbers() -> None:
    story = Story(11)
    story.arrive(*story.agent(11))
    assert story.state.members[2] == "w2"
    assert story.state.members[10] == "w10"


def test_a_script_that_never_trains_may_finish() -> None:
    story = Story(2)
    story.agent(2)
    for worker_id in ("w0", "w1"):
        story.says(worker_id, Hello(info=info(worker_id), fingerprint={}))
        assert story.ended is None
        story.says(worker_id, Finished())
    assert story.ended is not None
    assert story.ended.ok


def test_an_exit_before_anything_was_trained_ends_the_run() -> None:
    story = Story(2)
    story.agent(2)
    story.exits("w1", 3)
    assert story.ended is not None
    assert not story.ended.ok
    assert "w1" in story.ended.reason
    assert story.ended.exit_code == 3


@pytest.mark.parametrize(
    "end",
    [WorkerExit(worker_id="w2", exit_code=1, last_output="No module named foo"), Failed(error="E", traceback="T")],
    ids=lambda message: type(message).__name__,
)
def test_a_guest_that_fails_before_the_first_generation_fails_alone(end: Message) -> None:
    """What its machine lacks, the machine that has started the run has."""
    story = Story(2)
    story.agent(2)
    story.agent(1, "agent1", primary=False)
    story.says("w2", Hello(info=info("w2", "office"), fingerprint={"torch": "2"}))
    story.says("agent1" if isinstance(end, WorkerExit) else "w2", end)
    assert story.ended is None
    assert story.worker("w2").state is WorkerState.LOST
    assert story.sent("agent1", Start) == [], "another process there would fare no better"
    assert story.sent("agent1", UserSentence)[0].text in (
        "the last output of worker w2 (pid 1002):\nNo module named foo",
        "T",
    )
    story.arrive("w0", "w1")
    assert story.state.members == ("w0", "w1")


def test_a_guest_on_whom_everything_hangs_ends_the_run() -> None:
    story = Story(1)
    story.agent(0)
    story.agent(1, "agent1", primary=False)
    story.says("agent1", WorkerExit(worker_id="w0", exit_code=3))
    assert story.ended is not None
    assert story.ended.exit_code == 3


def test_machines_that_the_command_has_started_are_waited_for_until_they_are_known_not_to_come() -> None:
    story = Story(4, machines=3)
    own = story.agent(1)
    left = story.agent(1, "agent1", primary=False, host="left", launched="left")
    story.arrive(*own, *left)
    assert not story.state.members, "two machines are on their way"
    story.says(AGENT, MachinesGone(names=("middle",)))
    assert not story.state.members, "one is"
    story.says(AGENT, MachinesGone(names=("middle", "right")))
    assert story.state.members == ("w0", "w1")


def test_a_machine_that_has_come_and_gone_is_not_one_that_never_came() -> None:
    story = Story(3, machines=2)
    story.arrive(*story.agent(1))
    story.agent(1, "agent1", primary=False, host="left", launched="left")
    story.says("agent1", Lost(reason="its connection has closed"))
    story.says(AGENT, MachinesGone(names=("left",)))
    assert not story.state.members, "the other is on its way"
    story.arrive(*story.agent(1, "agent2", primary=False, host="right", launched="right"))
    assert story.state.members == ("w0", "w2")


def with_two_machines() -> Story:
    story = Story(2, machines=2)
    story.agent(0)
    for number, name in ((1, "left"), (2, "right")):
        story.arrive(*story.agent(1, f"agent{number}", primary=False, host=name, launched=name), host=name)
    story.hold()
    return story


def test_the_command_is_told_which_machines_need_no_other_agent() -> None:
    """Their ssh has ended; one goes on without it, and is lost later."""
    story = with_two_machines()
    story.sent(AGENT, Wanted)
    story.says(AGENT, MachinesGone(names=("left",)))
    assert [wanted.present for wanted in story.sent(AGENT, Wanted)] == [("left",)]
    story.says("agent1", Lost(reason="its connection has closed"))
    assert [wanted.present for wanted in story.sent(AGENT, Wanted)] == [()]
    started = story.agent(1, "agent3", primary=False, host="left", launched="left")
    assert [wanted.present for wanted in story.sent(AGENT, Wanted)] == [("left",)]
    assert len(started) == 1, "it has as many workers as before"
    assert "agent1" not in story.state.absent, "it is followed by the new one"
    assert story.state.policy.maximum == 4, "as with the lost one"


def test_a_machine_has_one_agent_that_a_launcher_has_started() -> None:
    """The first one was out of reach, so another one was started, and then it comes back."""
    story = with_two_machines()
    story.says("agent1", Lost(reason="its connection has closed"))
    story.agent(1, "agent3", primary=False, host="left", launched="left")
    hello = AgentHello(host="left", pid=1, num_workers=1, launched="left", agent_id="agent1", url="wss://left:1")
    story.says("agent4", hello)
    (ended,) = story.sent("agent4", Ended)
    assert (ended.ok, ended.exit_code) == (True, 0)
    assert ended.reason == "left already has another agent, agent3, which was started while this one was out of reach"
    assert story.sent("agent4", Start) == []


def test_a_machine_that_was_sent_away_gets_no_other_agent() -> None:
    story = with_two_machines()
    story.arrive(*story.agent(0, "agent3", primary=False, host="bad", launched="bad"))
    agents = {
        **story.state.agents,
        "agent3": msgspec.structs.replace(story.state.agents["agent3"], refused="bad is sent away"),
    }
    story.state = msgspec.structs.replace(story.state, agents=agents)
    story.says("agent3", Lost(reason="its connection has closed"))
    story.sent(AGENT, Wanted)
    story.says(AGENT, MachinesGone(names=("bad",)))
    assert [wanted.present for wanted in story.sent(AGENT, Wanted)] == [("bad",)]


def test_only_the_command_says_which_machines_are_gone() -> None:
    story = Story(2)
    story.agent(1)
    story.agent(1, "agent1", primary=False)
    with pytest.raises(ProtocolError, match="an agent may not send MachinesGone"):
        story.says("agent1", MachinesGone(names=("left",)))


# -- replacements ------------------------------------------------------------------------------------


def test_restarts_back_off_and_come_to_an_end() -> None:
    story = training(2, max_restarts=4)
    delays = []
    for number in range(2, 6):
        story.exits(story.state.members[1])
        start = story.sent(AGENT, Start)[0]
        delays.append(start.delay_s)
        story.hold()
        story.arrive(f"w{number}")
        story.hold()
    assert delays == [0.0, 1.0, 2.0, 4.0]
    story.exits(story.state.members[1])
    assert story.sent(AGENT, Start) == []
    assert "all 4 restarts are used" in story.reason
    assert story.ended is None


def test_progress_forgives_restarts() -> None:
    story = training(2, max_restarts=1)
    story.says("w0", step_done(0))
    story.exits("w1")
    assert story.state.agents[AGENT].used_restarts == 1
    story.says("w0", step_done(100))
    assert story.state.agents[AGENT].used_restarts == 0


def test_the_end_of_a_worker_tells_how_far_the_run_is() -> None:
    """Of steps that come fast, the head has not heard of all."""
    story = training(2)
    story.says("w0", step_done(3))
    story.says(AGENT, WorkerExit(worker_id="w1", exit_code=-9, step=7))
    assert story.state.committed == 7
    story.says("w0", step_done(5))
    assert story.state.committed == 7


# -- joining, leaving, scaling -----------------------------------------------------------------------


def test_an_agent_takes_its_workers_away() -> None:
    story = training(2)
    story.arrive(*story.agent(2, "agent1", primary=False))
    story.hold()
    story.hold()
    assert len(story.state.members) == 4
    story.says("agent1", Drain())
    assert story.state.members == ("w0", "w1")
    assert set(story.notices()) == {"w0", "w1", "w2", "w3"}
    story.hold()
    for worker_id in ("w2", "w3"):
        story.says(worker_id, Left())
        story.says("agent1", WorkerExit(worker_id=worker_id, exit_code=0))
    assert story.state.generation == 3 + 1
    assert story.sent("agent1", Start) == []


def test_a_drained_worker_that_is_not_a_member_just_ends() -> None:
    story = training(1)
    story.agent(1, "agent1", primary=False)
    story.says("w1", Hello(info=info("w1"), fingerprint={"torch": "2"}))
    story.says("agent1", Drain())
    assert story.sent("agent1", Evict)
    assert story.worker("w1").state is WorkerState.LEFT


def test_a_machine_raises_the_maximum_only_as_long_as_it_is_there() -> None:
    story = training(2)
    for _ in range(3):
        story.agent(3, "agent1", primary=False)
        assert story.state.policy.maximum == 5
        story.says("agent1", Lost(reason="closed"))
        assert story.state.policy.maximum == 2
    story.agent(3, "agent1", primary=False)
    story.says("", Scale(num_workers=4))
    story.says("agent1", Lost(reason="closed"))
    assert story.state.policy.maximum == 4


def test_a_machine_that_comes_when_members_have_finished_does_not_hold_the_run_up() -> None:
    story = training(2)
    story.says("w0", Finished())
    story.agent(2, "agent1", primary=False)
    assert {evict.worker_id for evict in story.sent("agent1", Evict)} == {"w2", "w3"}
    story.says("w1", Finished())
    assert story.ended is not None
    assert story.ended.ok


def test_who_comes_and_goes_is_told_in_a_sentence() -> None:
    story = training(2, maximum=5)
    assert story.agent(3, "agent1", primary=False, host="shed") == ["w2", "w3", "w4"]
    assert story.reason == "shed joins with 3 workers"
    story.arrive("w2")
    assert story.reason == "w2 joins; generation 2 with 3 workers"
    story.arrive("w3", "w4")
    story.hold("w0", "w1")
    story.hold("w2")
    assert story.reason == "w3 and w4 join; generation 3 with 5 workers"
    story.hold()
    story.says("agent1", Drain(reason="shed leaves"))
    assert story.reason == "shed leaves; w2, w3 and w4 leave; generation 4 with 2 workers"


def placed(story: Story) -> dict[str, int]:
    """How many workers each machine starts by the last event."""
    return {agent_id: sum(len(s.worker_ids) for s in story.sent(agent_id, Start)) for agent_id in story.state.agents}


def on_machines(start: int, *offers: int) -> Story:
    """A run on the machines agent0, agent1 ..., that have come with so many workers, all of them training."""
    story = training(start)
    for number, offer in enumerate(offers, 1):
        ids = story.agent(offer, f"agent{number}", primary=False, host=f"host{number}")
        story.arrive(*ids, host=f"host{number}")
        for _ in range(2):
            story.hold()
    return story


def of_machines(story: Story) -> dict[str, int]:
    """How many members each machine has."""
    found = [story.state.workers[member].agent for member in story.state.members]
    return {agent_id: found.count(agent_id) for agent_id in story.state.agents}


def test_scaling_up_fills_the_machines_that_have_room_first() -> None:
    story = on_machines(2, 4, 3)
    story.says("", Scale(num_workers=3))
    for worker in [w for w in story.state.workers.values() if w.draining]:
        story.says(worker.worker_id, Left())
    story.hold()
    assert of_machines(story) == {AGENT: 1, "agent1": 1, "agent2": 1}
    story.says("", Scale(num_workers=9))
    assert placed(story) == {AGENT: 1, "agent1": 3, "agent2": 2}
    assert story.reason.endswith("6 new workers: 3 on host1, 2 on host2 and 1 on lab")


def test_scaling_beyond_the_room_is_in_proportion() -> None:
    story = on_machines(2, 4)
    story.says("", Scale(num_workers=12))
    assert placed(story) == {AGENT: 2, "agent1": 4}


def test_nine_workers_do_not_all_go_to_the_machine_of_the_command() -> None:
    story = on_machines(1, 1, 1)
    story.says("", Scale(num_workers=9))
    assert placed(story) == {AGENT: 2, "agent1": 2, "agent2": 2}


def test_a_machine_that_only_starts_the_run_gets_no_worker() -> None:
    story = Story(2)
    story.agent(0)
    story.arrive(*story.agent(2, "agent1", primary=False))
    story.hold()
    story.says("", Scale(num_workers=4))
    assert placed(story) == {AGENT: 0, "agent1": 2}


def test_scaling_down_takes_from_the_machine_with_the_highest_load() -> None:
    story = on_machines(2, 4)
    story.says("", Scale(num_workers=7))
    story.arrive(*(i for agent_id in placed(story) for start in story.sent(agent_id, Start) for i in start.worker_ids))
    story.hold()
    assert of_machines(story) == {AGENT: 2, "agent1": 5}
    story.says("", Scale(num_workers=5))
    assert of_machines(story) == {AGENT: 2, "agent1": 3}


def test_the_last_worker_beside_the_command_stays() -> None:
    """The run's directory may be on its disk only."""
    story = on_machines(1, 4)
    story.says("", Scale(num_workers=1))
    assert story.state.members == ("w0",)


def test_the_replacement_of_a_lost_worker_is_on_the_same_machine() -> None:
    story = on_machines(4, 1)
    story.says("agent1", WorkerExit(worker_id="w4", exit_code=-9))
    assert placed(story) == {AGENT: 0, "agent1": 1}


def elastic(start: int, maximum: int) -> Story:
    """A run whose command gets machines, of 2 workers each, for all of its workers."""
    story = Story(start, maximum=maximum, grows=False, elastic=True)
    story.agent(0)
    for number in range(1, start // 2 + 1):
        launch(story, number)
    return story


def launch(story: Story, number: int) -> None:
    agent_id = f"agent{number}"
    hello = AgentHello(host=f"node{number}", pid=1, num_workers=2, launched=f"node{number}")
    story.says(agent_id, hello)
    story.arrive(*(i for start in story.sent(agent_id, Start) for i in start.worker_ids), host=f"node{number}")
    for _ in range(2):
        story.hold()


def test_the_command_is_told_for_how_many_workers_it_is_to_have_machines() -> None:
    story = Story(2, maximum=6, grows=False, elastic=True)
    story.agent(0)
    assert [wanted.num_workers for wanted in story.sent(AGENT, Wanted)] == [6]
    launch(story, 1)
    assert story.sent(AGENT, Wanted) == []
    story.says("", Scale(num_workers=4))
    assert [wanted.num_workers for wanted in story.sent(AGENT, Wanted)] == [4]
    assert placed(story) == {AGENT: 0, "agent1": 0}, "the command gets a machine for them"
    launch(story, 2)
    assert of_machines(story) == {AGENT: 0, "agent1": 2, "agent2": 2}
    story.says(AGENT, AgentHello(host="lab", pid=1, num_workers=0, primary=True, agent_id=AGENT))
    assert [wanted.num_workers for wanted in story.sent(AGENT, Wanted)] == [4], "to a head that follows, too"


def test_no_machine_is_got_for_workers_of_machines_that_join_by_themselves() -> None:
    story = elastic(2, 6)
    story.agent(3, "guest", primary=False, host="desk")
    assert [wanted.num_workers for wanted in story.sent(AGENT, Wanted)] == [3]


def test_machines_of_a_fixed_number_of_workers_do_not_raise_it() -> None:
    story = Story(4, elastic=True)
    story.agent(0)
    launch(story, 1)
    launch(story, 2)
    assert story.state.policy.maximum == 4
    assert story.state.wanted == 4


def test_to_shrink_whole_machines_are_given_back() -> None:
    story = elastic(6, 6)
    story.says("", Scale(num_workers=3))
    leaving = [w for w in story.state.workers.values() if w.draining]
    assert {w.worker_id for w in leaving} == {"w3", "w4", "w5"}
    assert story.sent("agent3", Ended) == [], "its workers are still there"
    ended = []
    for worker in leaving:
        story.says(worker.worker_id, Left())
        ended += story.sent("agent3", Ended)
    story.hold()
    assert [(end.ok, end.exit_code) for end in ended] == [(True, 0)]
    assert story.state.agents["agent3"].freed == "node3 is free again: the run wants 3 workers"
    assert story.state.agents["agent2"].freed == ""
    story.says("", Scale(num_workers=4))
    assert placed(story) == {AGENT: 0, "agent1": 0, "agent2": 1, "agent3": 0}
    story.says("agent3", AgentHello(host="node3", pid=1, num_workers=2, launched="node3", agent_id="agent3"))
    assert [end.ok for end in story.sent("agent3", Ended)] == [True], "it may have missed that"


def steps(story: Story, number: int, rate: float) -> None:
    """So many steps of 100 samples at this rate."""
    first = story.state.committed + 1
    for step_ in range(first, first + number):
        story.says(story.state.members[0], StepDone(step=step_, seconds=100 / rate, samples=100))


MEASURED = SKIPPED + SETTLED


def test_a_run_that_decides_by_itself_gets_machines_while_the_next_worker_is_worth_it() -> None:
    story = Story(2, minimum=2, maximum=2, most=6, grows=False, elastic=True, efficiency=0.7)
    story.agent(0)
    assert [wanted.num_workers for wanted in story.sent(AGENT, Wanted)] == [2]
    launch(story, 1)
    steps(story, MEASURED, rate=20)
    assert [wanted.num_workers for wanted in story.sent(AGENT, Wanted)] == [3]
    assert story.reason == ("scaled to 3 workers, from 2: to measure what one more adds (--set efficiency=0.7)")
    launch(story, 2)
    assert of_machines(story) == {AGENT: 0, "agent1": 2, "agent2": 1}, "not both of its workers"
    steps(story, MEASURED, rate=22)
    assert story.reason.startswith("scaled to 2 workers, from 3: the last 1 worker of 3 adds 20% of what one adds")
    story.hold()
    (leaving,) = [w for w in story.state.workers.values() if w.draining]
    story.says(leaving.worker_id, Left())
    assert [end.ok for end in story.sent("agent2", Ended)] == [True]
    assert story.state.wanted == 2


def test_a_run_that_decides_by_itself_takes_no_more_than_its_machines_have_room_for() -> None:
    story = Story(1, minimum=1, maximum=1, most=8, grows=False, efficiency=0.5)
    assert story.agent(2) == ["w0"], "it begins with the smallest number"
    story.arrive("w0")
    story.hold()
    steps(story, MEASURED, rate=10)
    assert [start.worker_ids for start in story.sent(AGENT, Start)] == [["w1"]]
    story.arrive("w1")
    story.hold()
    story.hold()
    steps(story, 3 * MEASURED, rate=20)
    assert story.sent(AGENT, Start) == []
    assert story.state.policy.maximum == 2
    story.agent(2, "agent1", primary=False)
    assert story.sent("agent1", Start) == [], "until it was measured"
    steps(story, MEASURED, rate=20)
    assert [(w.worker_id, w.agent) for w in story.state.workers.values()][2:] == [("w2", "agent1")]


def test_what_was_measured_goes_on_with_the_next_head() -> None:
    story = Story(1, minimum=1, maximum=1, most=8, grows=False, efficiency=0.5)
    story.agent(4)
    story.arrive("w0")
    story.hold()
    steps(story, MEASURED, rate=10)
    story.agent(0, "agent1", primary=False)
    state = HeadMemory.decode(HeadMemory(story.state, 0.0, "").encode()).state
    assert state.measured.rates == story.state.measured.rates
    assert state.measured.rates[1] == pytest.approx(10)
    assert state.agents == story.state.agents
    assert resumed(state, 2, 0.0).policy == story.state.policy


def test_a_number_that_the_user_sets_stays() -> None:
    story = Story(1, minimum=1, maximum=1, most=8, grows=False, efficiency=0.5)
    story.agent(4)
    story.arrive("w0")
    story.hold()
    story.says("", Scale(num_workers=1))
    steps(story, 2 * MEASURED, rate=10)
    assert story.state.policy.maximum == 1


def desktop(start: int = 1) -> Story:
    """A run with a machine that has joined, and offers nothing yet."""
    story = training(start)
    assert story.agent(0, "agent1", primary=False, host="desk") == []
    assert story.reason == "desk joins, and offers workers only at certain times (--while)"
    return story


def test_a_machine_offers_workers_while_nobody_uses_it() -> None:
    story = desktop()
    for first in (1, 3):
        story.says("agent1", Offer(num_workers=2, reason="desk: idle"))
        assert story.reason == "desk offers 2 workers: desk: idle"
        ids = [f"w{first}", f"w{first + 1}"]
        assert story.sent("agent1", Start)[0].worker_ids == ids
        assert story.state.policy.maximum == 3
        story.arrive(*ids, host="desk")
        story.hold()
        story.hold()
        assert story.state.members == ("w0", *ids)
        story.says("agent1", Offer(num_workers=0, reason="desk: somebody uses it"))
        assert story.state.members == ("w0",), "at the next boundary"
        assert story.notices()[ids[0]].immediate is False
        for worker_id in ids:
            story.says(worker_id, Left())
        story.hold()
        assert story.state.policy.maximum == 1
        assert story.sent("agent1", Start) == [], "a machine in use is left alone"


def test_a_machine_that_is_used_before_its_workers_were_admitted_sends_them_away_at_once() -> None:
    story = desktop()
    story.says("agent1", Offer(num_workers=2, reason="idle"))
    story.arrive("w1", host="desk")
    story.says("agent1", Offer(num_workers=0, reason="used"))
    assert {evict.worker_id for evict in story.sent("agent1", Evict)} == {"w2"}
    story.hold()
    assert story.state.members == ("w0",), "w1 was admitted just before"


def test_the_last_worker_of_a_run_stays_until_another_has_the_state() -> None:
    story = desktop()
    story.says("agent1", Offer(num_workers=2, reason="idle"))
    story.arrive("w1", "w2", host="desk")
    story.hold()
    story.hold()
    story.says(AGENT, Drain(worker_ids=["w0"]))
    story.says("w0", Left())
    story.hold()
    story.says("agent1", Offer(num_workers=0, reason="desk: somebody uses it"))
    assert "w1 stays, as the last one that holds the run's state" in story.reason
    story.says("w2", Left())
    story.hold()
    assert story.state.members == ("w1",)
    assert story.ended is None
    story.arrive(*story.agent(1, "agent2", primary=False, host="shed"), host="shed")
    story.hold()
    story.hold()
    assert story.state.members == ("w3",)
    story.says("w1", Left())
    assert story.ended is None


def test_an_offer_is_taken_as_far_as_the_run_wants_workers() -> None:
    story = desktop(2)
    story.says("", Scale(num_workers=3))
    story.says("agent1", Offer(num_workers=4, reason="idle"))
    assert [s.worker_ids for s in story.sent("agent1", Start)] == []
    story.says("", Scale(num_workers=5))
    assert len(story.sent("agent1", Start)[0].worker_ids) == 2


def test_an_offer_that_is_repeated_changes_nothing() -> None:
    story = desktop()
    story.says("agent1", Offer(num_workers=2, reason="idle"))
    story.says("agent1", Offer(num_workers=2, reason="idle"))
    assert (story.actions, story.reason) == ([], "")


def invitations(story: Story) -> int:
    return sum(isinstance(action, Invite) for action in story.actions)


def test_a_run_waits_for_workers_of_other_machines_and_says_how_many_are_there() -> None:
    story = Story(2, wait_for=6)
    story.agent(2)
    story.arrive("w0")
    assert story.reason == "", "w1 is on its way"
    story.arrive("w1")
    assert story.reason == "2 of 6 workers are there; the run starts when all 6 are"
    assert invitations(story) == 1
    story.says("", Tick())
    assert (story.reason, invitations(story)) == ("", 0), "said once"
    story.agent(3, "agent1", primary=False, host="shed")
    story.arrive("w2", "w3", "w4", host="shed")
    assert story.reason == "5 of 6 workers are there; the run starts when all 6 are"
    assert story.state.notice is None
    story.agent(3, "agent2", primary=False, host="attic")
    story.arrive("w5", host="attic")
    assert story.state.members == ("w0", "w1", "w2", "w3", "w4", "w5")
    assert story.state.policy.maximum == 8
    story.hold()
    story.arrive("w6", "w7", host="attic")
    assert story.state.policy.maximum == 8
    assert "w6" in story.state.members


def test_a_run_that_waits_says_again_who_is_there_when_a_machine_has_gone() -> None:
    story = Story(1, wait_for=3)
    story.agent(1)
    story.arrive("w0")
    story.agent(1, "agent1", primary=False)
    story.arrive("w1")
    assert "2 of 3" in story.reason
    story.says("agent1", Drain(worker_ids=["w1"]))
    assert "1 of 3 workers are there" in story.reason
    assert invitations(story) == 1


def test_a_run_that_waits_can_be_scaled_to_what_is_there_and_stopped() -> None:
    story = Story(2, wait_for=4)
    story.agent(2)
    story.arrive("w0", "w1")
    story.says("", Scale(num_workers=2))
    assert story.state.members == ("w0", "w1")
    story = Story(2, wait_for=4)
    story.agent(2)
    story.arrive("w0", "w1")
    story.says("", Stop(reason="enough"))
    assert story.ended is not None
    assert story.ended.ok


def test_a_gather_before_the_training_waits_for_all_that_the_run_waits_for() -> None:
    story = Story(1, wait_for=2)
    story.agent(1)
    story.says("w0", Hello(info=info("w0"), fingerprint={"torch": "2"}))
    story.says("w0", TalkCall(number=0, kind="run.all_gather", value=b"0"))
    assert "1 of 2 workers are there" in story.reason
    assert story.sent("w0", TalkAnswer) == []
    story.agent(1, "agent1", primary=False)
    story.says("w1", Hello(info=info("w1"), fingerprint={"torch": "2"}))
    story.says("w1", TalkCall(number=0, kind="run.all_gather", value=b"1"))
    assert story.sent("w0", TalkAnswer)[0].values == [b"0", b"1"]


def test_scaling_to_nothing_is_refused() -> None:
    story = training(2)
    before = story.state
    with pytest.raises(ProtocolError, match="at least 1 worker, got 0"):
        story.says("", Scale(num_workers=0))
    assert story.state is before


# -- the end -----------------------------------------------------------------------------------------


def test_the_run_ends_when_all_have_finished() -> None:
    story = training(2)
    story.says("w0", Finished())
    assert story.ended is None
    story.says("w1", Finished())
    assert story.ended == Ended(ok=True, reason="finished")
    assert story.sent(AGENT, Ended)
    assert story.sent("w0", Ended), "those who have finished wait for it"


def test_the_end_says_how_far_the_run_has_come() -> None:
    story = training(1)
    for number in (0, 1, 1, 0):
        story.says("w0", step_done(number))
    story.says("w0", Finished())
    assert story.ended == Ended(ok=True, reason="finished", step=1)


def test_nobody_is_admitted_after_the_first_has_finished() -> None:
    story = training(2, maximum=4)
    story.says(AGENT, Scale(num_workers=4))
    story.arrive("w2")
    story.says("w0", Finished())
    assert story.sent("w2", Ended)
    assert story.sent(AGENT, Evict)
    assert {w.state for w in story.state.workers.values()} & {WorkerState.STARTING, WorkerState.READY} == set()
    story.says("w1", Finished())
    assert story.ended is not None
    assert story.ended.ok


def test_after_the_end_nothing_happens() -> None:
    story = training(1)
    story.says("w0", Finished())
    assert story.exits("w0") == []
    assert story.reason == ""


def test_the_run_ends_with_the_command() -> None:
    story = training(2)
    story.says(AGENT, Lost(reason="closed"))
    assert story.ended is not None
    assert not story.ended.ok
    assert story.sent("w0", Ended)


def test_an_agent_that_comes_back_is_who_it_was() -> None:
    """Its connection broke, its workers train on: it gets no second set of them, and its name is nobody else's."""
    story = training(2)
    story.arrive(*story.agent(2, "agent1", primary=False, host="office"), host="office")
    story.hold()
    story.hold()
    assert len(story.state.members) == 4
    story.says("agent1", Lost(reason="closed"))
    hello = AgentHello(host="office", pid=1, num_workers=2, agent_id="agent1")
    assert agent_name(story.state, AgentHello(host="shed", pid=2, num_workers=1)) == "agent2"
    assert agent_name(story.state, msgspec.structs.replace(hello, pid=7)) == "agent2", "not by another's name"
    assert agent_name(story.state, hello) == "agent1"
    assert story.says("agent1", hello) == []
    assert story.state.policy.maximum == 4
    story.says("agent1", WorkerExit(worker_id="w2", exit_code=-9))
    assert story.sent("agent1", Start), "and what it brings is replaced there again"


def test_a_connection_of_an_agent_that_is_half_open_is_taken_over() -> None:
    story = training(1)
    story.agent(1, "agent1", primary=False)
    hello = AgentHello(host="lab", pid=1, num_workers=1, agent_id="agent1")
    assert agent_name(story.state, hello) == "agent1"
    story.says("agent1", hello)
    assert story.sent("agent1", Start) == [Start(worker_ids=["w1"])], "who has not come may not have been ordered"
    with pytest.raises(ProtocolError, match="said hello twice"):
        story.says("agent1", AgentHello(host="lab", pid=1, num_workers=1))


def test_whom_a_broken_connection_has_cost_is_started_again_when_the_agent_is_back() -> None:
    story = training(1)
    story.agent(2, "agent1", primary=False)
    story.arrive("w1")
    story.hold()
    story.says("agent1", Lost(reason="closed"))
    assert story.worker("w2").state is WorkerState.LEFT
    story.says("agent1", AgentHello(host="lab", pid=1, num_workers=2, agent_id="agent1"))
    assert [start.worker_ids for start in story.sent("agent1", Start)] == [["w3"]]


def test_a_machine_whose_connections_all_broke_gets_its_workers_again() -> None:
    """Its own connection broke a moment before theirs, so nobody was there to replace them."""
    story = training(1)
    story.arrive(*story.agent(2, "agent1", primary=False, host="office"), host="office")
    story.hold()
    story.says("agent1", Lost(reason="closed"))
    for worker_id in ("w1", "w2"):
        story.says(worker_id, Lost(reason="closed"))
    story.tick(story.state.policy.grace_s)
    story.hold()
    assert story.state.members == ("w0",)
    story.says("agent1", AgentHello(host="office", pid=1, num_workers=2, agent_id="agent1"))
    assert [start.worker_ids for start in story.sent("agent1", Start)] == [["w3", "w4"]]
    story.says("agent1", Lost(reason="closed"))
    story.says("agent1", AgentHello(host="office", pid=1, num_workers=2, agent_id="agent1"))
    assert [start.worker_ids for start in story.sent("agent1", Start)] == [["w5", "w6"]]


def test_a_machine_that_comes_back_gets_no_more_workers_than_it_had_or_than_there_shall_be() -> None:
    hello = AgentHello(host="office", pid=1, num_workers=2, agent_id="agent1")
    drained, scaled = training(1), training(1)
    for story in (drained, scaled):
        story.arrive(*story.agent(2, "agent1", primary=False, host="office"), host="office")
        story.hold()
        story.hold()
    drained.says("agent1", Drain(worker_ids=["w2"]))
    drained.hold("w0", "w1")
    drained.says("w2", Left())
    drained.says("agent1", Lost(reason="closed"))
    drained.says("agent1", hello)
    assert drained.sent("agent1", Start) == []
    scaled.says("agent1", Lost(reason="closed"))
    scaled.says("", Scale(num_workers=1))
    scaled.hold("w0")
    for worker_id in ("w1", "w2"):
        scaled.says(worker_id, Left())
    scaled.says("agent1", hello)
    assert scaled.sent("agent1", Start) == []


def test_a_start_that_was_lost_with_the_head_is_said_again() -> None:
    story = Story(2)
    story.agent(2)
    story.state = resumed(story.state, 2, 1.0)
    story.now = 1.0
    story.says(AGENT, AgentHello(host="lab", pid=1, num_workers=2, primary=True, agent_id=AGENT))
    assert [start.worker_ids for start in story.sent(AGENT, Start)] == [["w0"], ["w1"]]


def test_a_start_that_is_said_again_is_no_earlier() -> None:
    story = training(2)
    story.exits("w1")
    story.exits("w2")
    assert story.sent(AGENT, Start)[0].delay_s == 1.0
    story.state = resumed(story.state, 2, 0.25)
    story.now = 0.25
    story.says(AGENT, AgentHello(host="lab", pid=1, num_workers=2, primary=True, agent_id=AGENT))
    assert [start.delay_s for start in story.sent(AGENT, Start)] == [0.75]


def test_who_never_comes_is_lost() -> None:
    story = Story(2, hang_s=60.0)
    story.agent(2)
    story.arrive("w0")
    story.beat("w0")
    for story.now in range(50, 600, 50):
        story.beat("w0")
        story.tick(story.now)
    assert story.worker("w1").state is WorkerState.ORDERED
    story.tick(600.0)
    assert story.worker("w1").state is WorkerState.LOST
    assert "w1 has not connected within 600 s of its start" in story.reason
    assert story.sent(AGENT, Evict)
    assert story.sent(AGENT, Start)[0].worker_ids == ["w2"]


def test_a_machine_that_died_while_the_head_was_away_is_gone() -> None:
    story = training(2)
    story.arrive(*story.agent(1, "agent1", primary=False))
    story.hold()
    story.state = resumed(story.state, 2, 1.0)
    story.now = 1.0
    story.says(AGENT, AgentHello(host="lab", pid=1, num_workers=2, primary=True, agent_id=AGENT))
    for story.now in range(1, 22):
        story.beat("w0")
        story.beat("w1")
        story.tick(story.now)
    assert story.state.members == ("w0", "w1")
    assert set(story.state.agents) == {AGENT}
    assert story.state.policy.maximum == 2
    assert story.reason == "the agent of lab is gone; w3 will not come"
    assert story.worker("w3").state is WorkerState.LEFT, "it was to replace the worker that died with its machine"
    assert not story.state.workers.keys() - {"w0", "w1", "w2", "w3"}


# -- errors of user code -----------------------------------------------------------------------------


def failure(step_: int = 4, microbatch: int = 2, *, retry: bool = True, exit_code: int = 1) -> Failed:
    return Failed(
        error="ValueError: no",
        traceback="Traceback ...",
        step=step_,
        microbatch=microbatch,
        samples=[5, 6],
        retry=retry,
        exit_code=exit_code,
    )


def test_an_error_outside_of_a_micro_batch_ends_the_run() -> None:
    story = training(3)
    story.says("w1", failure(retry=False, exit_code=7))
    assert story.ended is not None
    assert (story.ended.ok, story.ended.worker_id, story.ended.exit_code) == (False, "w1", 7)
    assert story.ended.traceback == "Traceback ..."
    assert "step 4, micro-batch 2 (samples 5, 6): ValueError: no" in story.ended.reason


def test_an_error_in_a_micro_batch_is_tried_by_another_worker() -> None:
    story = training(3)
    story.says("w1", failure())
    assert story.ended is None
    assert story.state.members == ("w0", "w2")
    assert story.sent(AGENT, Start) == [], "not before it is known whose fault it is"
    assert any(isinstance(action, Hangup) and action.worker_id == "w1" for action in story.actions)
    assert story.state.tried
    assert HeadMemory.decode(HeadMemory(story.state, 0.0, "").encode()).state.tried == story.state.tried


def test_where_it_passes_elsewhere_the_first_worker_is_suspect_and_replaced() -> None:
    story = training(3)
    story.says("w1", failure())
    story.hold()
    story.says("w0", step_done(3))
    assert story.reason == ""
    story.says("w0", step_done(4))
    assert "w1 (pid 1001) is suspect" in story.reason
    assert story.sent(AGENT, Start)[0].worker_ids == ["w3"]
    assert story.state.tried == {}


def test_a_member_that_has_joined_last_and_differs_is_lost_alone() -> None:
    """Another process would compute what this one has."""
    story = training(3)
    story.says("w2", Failed(error="DivergenceError: w2 computes other values", traceback="T", goes_on=True))
    assert story.ended is None
    assert story.state.members == ("w0", "w1")
    assert story.worker("w2").state is WorkerState.LOST
    assert "w2 (pid 1002) is sent away and not replaced" in story.reason
    assert story.sent(AGENT, Start)[1:] == []


def test_a_newcomer_that_cannot_start_does_not_end_the_run() -> None:
    story = training(2)
    story.agent(1, "agent1", primary=False)
    story.says("w2", Hello(info=info("w2"), fingerprint={"torch": "2"}))
    story.says("w2", Failed(error="ImportError: no", traceback="Traceback ..."))
    assert story.ended is None
    assert story.state.generation == 1
    assert story.sent("agent1", UserSentence)[0].text == "Traceback ..."


# -- silence, hangs, broken links --------------------------------------------------------------------


def test_silence_is_a_loss() -> None:
    story = training(2, heartbeat_timeout_s=5.0)
    for story.now in (1.5, 3.0):
        story.beat("w0")
    assert story.state.due_at == 5.0
    story.tick(4.9)
    assert story.state.generation == 1
    story.tick(5.0)
    assert story.state.members == ("w0",)
    assert story.sent(AGENT, Evict)[0].worker_id == "w1"
    assert "w1 (pid 1001) has been silent for 5.0 s" in story.reason


def test_silence_of_all_is_no_loss_of_anybody() -> None:
    """The machine stands still, or all are in the same long call: nobody is there who could go on without them."""
    story = training(3, heartbeat_timeout_s=5.0, hang_s=60.0)
    story.beat("w0")
    story.now = 0.4
    story.beat("w1")
    story.beat("w2")
    story.tick(59.9)
    assert story.state.members == ("w0", "w1", "w2")
    story.now = 60.1
    story.beat("w2")
    story.tick(60.1)
    assert story.state.members == ("w0", "w1", "w2"), "the others have not had their chance to say something"
    for story.now in (62.0, 64.0):
        story.beat("w0")
        story.beat("w2")
    story.tick(65.2)
    assert story.state.members == ("w0", "w2"), "and who then stays silent alone is lost"


def test_silence_of_all_for_very_long_is_the_end() -> None:
    story = training(2, heartbeat_timeout_s=5.0, hang_s=60.0)
    story.says("w0", step_done(0))
    assert story.state.due_at == 5.0, "one of them may be heard until then"
    story.tick(5.0)
    assert story.state.generation == 1
    assert story.state.due_at == 60.0
    story.tick(60.0)
    assert story.ended is not None


def test_who_only_waits_to_be_admitted_is_no_witness_of_silence() -> None:
    story = training(2, maximum=3, heartbeat_timeout_s=5.0)
    story.arrive("w5")
    assert story.worker("w5").state is WorkerState.ADMITTED
    for now in range(1, 20):
        story.now = float(now)
        story.beat("w5")
        story.tick(story.now)
    assert story.state.members == ("w0", "w1", "w5")
    story.beat("w0")
    for now in range(20, 27):
        story.now = float(now)
        story.beat("w0")
        story.tick(story.now)
    assert story.state.members == ("w0",), "what was heard of it meanwhile does not put it off for ever"


@pytest.mark.parametrize("heartbeat_s", [0.5, 4.5])
def test_the_time_between_two_beats_is_no_silence_of_all(heartbeat_s: float) -> None:
    story = training(2, heartbeat_timeout_s=5.0, heartbeat_s=heartbeat_s)
    while story.now < 4 * heartbeat_s or story.now < 5.0:
        story.now += heartbeat_s
        story.beat("w0")
        story.tick(story.now)
    assert story.state.members == ("w0",)


def test_before_it_is_a_member_a_worker_may_be_silent_for_longer() -> None:
    story = Story(1, heartbeat_timeout_s=5.0, hang_s=60.0)
    story.agent(1)
    story.says("w0", Hello(info=info("w0"), fingerprint={}))
    assert story.state.due_at == 60.0


def test_a_closed_connection_may_come_back() -> None:
    story = training(2)
    story.says("w1", Lost(reason="closed"))
    assert story.state.generation == 1
    story.now = 0.5
    story.says("w1", Hello(info=info("w1"), fingerprint={"torch": "2"}, generation=1))
    assert story.notices()["w1"].generation == 1, "it hears again where the run is"
    story.tick(2.0)
    assert story.state.generation == 1


def test_who_was_left_out_while_it_was_away_hears_of_it() -> None:
    aside = training(2, aside_s=10.0)
    aside.beat("w0", waiting=True)
    aside.says("w1", Lost(reason="closed"))
    aside.beat("w1", seconds_at=11.0)
    assert aside.state.members == ("w0",)
    aside.says("w1", Hello(info=info("w1"), fingerprint={"torch": "2"}, generation=1))
    assert aside.notices()["w1"].generation == 2

    leaving = training(3)
    leaving.says(AGENT, Drain(worker_ids=["w2"]))
    leaving.says("w2", Lost(reason="closed"))
    leaving.hold("w0")
    leaving.exits("w1")
    assert leaving.state.members == ("w0",)
    leaving.says("w2", Hello(info=info("w2"), fingerprint={"torch": "2"}, generation=1))
    assert leaving.notices()["w2"].generation == 3


def test_a_closed_connection_that_does_not_come_back_is_a_loss() -> None:
    story = training(2)
    story.says("w1", Lost(reason="closed"))
    deadline = story.state.due_at
    assert deadline == story.state.policy.reconnect_s
    story.tick(deadline)
    assert story.state.members == ("w0",)


def test_a_closed_connection_of_an_unwatched_worker_is_a_loss_soon() -> None:
    story = Story(2)
    story.arrive("w0", "w1")
    story.hold()
    story.says("w1", Lost(reason="closed"))
    assert story.state.due_at == story.state.policy.grace_s


def test_another_process_cannot_take_a_name() -> None:
    story = training(2)
    before = story.state
    stranger = MemberInfo(worker_id="w1", host="lab", pid=4, device="cpu")
    with pytest.raises(ProtocolError, match="pid 4 uses its name"):
        story.says("w1", Hello(info=stranger, fingerprint={}))
    assert story.state is before


def test_a_lost_worker_cannot_come_back() -> None:
    story = training(2)
    story.exits("w1")
    actions = story.says("w1", Hello(info=info("w1"), fingerprint={}))
    assert [type(action) for action in actions] == [Hangup]
    assert story.state.members == ("w0",)


def test_who_was_dismissed_while_it_was_starting_cannot_come_either() -> None:
    """The agent was told to end it, and perhaps it was not there yet."""
    story = training(2)
    story.says("", Scale(num_workers=3))
    story.says("", Scale(num_workers=2))
    assert story.worker("w2").state is WorkerState.LEFT
    actions = story.says("w2", Hello(info=info("w2"), fingerprint={}))
    assert actions == [Hangup("w2", "the run continues without worker w2: it was sent away")]


def test_a_slow_first_step_is_no_hang() -> None:
    """Everybody compiles, or loads: the first who is done would throw all others out, again and again."""
    story = training(3, aside_s=10.0, hang_s=60.0)
    story.beat("w0", waiting=True, num_steps=1)
    story.beat("w1", seconds_at=38.0, num_steps=1)
    assert story.state.members == ("w0", "w1", "w2")
    story.beat("w1", seconds_at=601.0, num_steps=1)
    assert story.state.members == ("w0", "w2")


def test_a_newcomer_in_its_first_step_is_given_time() -> None:
    story = training(1, maximum=2, aside_s=10.0, hang_s=60.0)
    story.arrive("w5")
    story.hold()
    story.beat("w0", waiting=True)
    story.beat("w5", seconds_at=30.0, num_steps=1)
    assert story.state.members == ("w0", "w5")
    story.beat("w5", seconds_at=30.0, num_steps=2)
    assert story.state.members == ("w0",)


def test_an_exchange_that_breaks_before_a_planned_generation_is_taken_is_formed_again() -> None:
    story = training(2, maximum=3)
    story.arrive("w5")
    assert story.state.generation == 2
    story.says("w0", Suspect(generation=1, reason="timed out"))
    story.says("w1", Suspect(generation=1, reason="timed out"))
    story.tick(story.state.policy.suspect_s)
    assert story.state.notice is not None
    assert story.state.notice.immediate
    assert story.state.members == ("w0", "w1")


def test_a_newcomer_that_cannot_take_over_the_state_ends_alone() -> None:
    story = training(2, maximum=3)
    story.arrive("w5")
    story.says("w5", Failed(error="RuntimeError: size mismatch", traceback="..."))
    assert story.state.ended is None
    assert story.state.members == ("w0", "w1")


def test_a_late_worker_is_reported_once() -> None:
    story = training(2, late_s=3.0)
    story.beat("w0", waiting=True)
    story.beat("w1", seconds_at=3.5, progress=7)
    late = story.sent("w1", WriteStacks)[0]
    assert (late.worker_id, late.step, late.microbatch) == ("w1", 4, 2)
    assert "w1 (pid 1001) is late: no progress for 3.5 s at step 4, micro-batch 2" in story.reason
    assert story.beat("w1", seconds_at=4.0, progress=7) == []
    assert story.beat("w1", seconds_at=3.5, progress=8) != []


def test_nobody_is_late_while_nobody_waits() -> None:
    story = training(2, late_s=3.0)
    story.beat("w0", seconds_at=100.0, microbatch=1)
    assert story.beat("w1", seconds_at=100.0, microbatch=2) == []


def test_two_workers_that_hang_in_the_same_micro_batch_at_once_end_the_run() -> None:
    """In a rehearsal two compute it, so nobody may be left who waits."""
    story = training(2, hang_s=60.0)
    story.beat("w0", seconds_at=59.0)
    story.beat("w1", seconds_at=61.0)
    assert story.ended is None
    story.beat("w0", seconds_at=62.0, samples=[17])
    assert story.ended is not None
    assert "w0 (pid 1000) hangs" in story.ended.reason
    assert "(sample 17), where worker w1" in story.ended.reason


def test_slow_steps_are_not_late() -> None:
    story = training(2, late_s=3.0)
    story.says("w0", step_done(0, seconds=10.0))
    story.beat("w0", waiting=True)
    assert story.beat("w1", seconds_at=30.0) == []
    assert story.beat("w1", seconds_at=51.0) != []


def test_nothing_that_a_worker_aside_says_counts() -> None:
    story = training(2, aside_s=10.0)
    story.beat("w0", waiting=True)
    story.beat("w1", seconds_at=11.0)
    before = story.state.members
    for message in (Holding(generation=1), Suspect(generation=2, reason="late"), Left()):
        story.says("w1", message)
    assert story.state.members == before
    assert story.state.workers["w1"].state is WorkerState.ASIDE


def waits_at_the_end() -> Story:
    """w1 is at the end of the run and waits there; w0 has left the loop at the same step, and writes an export."""
    story = training(2, late_s=3.0, aside_s=10.0, hang_s=60.0)
    story.says("w0", step_done(4))
    story.says("w1", Leaving(phase=0, step=5))
    story.beat("w1", waiting=True)
    return story


def test_a_worker_that_takes_long_after_the_loop_is_late_and_stays() -> None:
    """An export of the main worker is no hang, and nobody could go on with anything."""
    story = waits_at_the_end()
    story.beat("w0", seconds_at=14.0, microbatch=3)
    assert story.sent("w0", WriteStacks), "its stack is shown"
    story.beat("w0", seconds_at=599.0, microbatch=3)
    assert story.worker("w0").state is WorkerState.HOLDING
    assert story.state.members == ("w0", "w1")
    story.says("w0", Finished())
    story.says("w1", Finished())
    assert story.ended == Ended(ok=True, reason="finished", step=4)


def test_a_run_is_no_success_whose_last_worker_never_comes_to_the_end() -> None:
    story = waits_at_the_end()
    story.beat("w0", seconds_at=601.0, microbatch=3)
    assert story.ended is not None
    assert not story.ended.ok
    assert story.ended.worker_id == "w0"
    assert "w0 (pid 1000) has not reached the end of the run: no progress for 601 s" in story.ended.reason


def test_a_worker_is_left_aside_as_before_while_one_of_those_who_wait_is_not_at_the_end() -> None:
    story = training(3, aside_s=10.0)
    story.says("w1", Leaving(phase=0, step=5, goes_on=True))
    story.beat("w1", waiting=True)
    story.beat("w0", seconds_at=11.0)
    assert story.worker("w0").state is WorkerState.ASIDE


def finished_without_one_aside() -> Story:
    """w0 was left aside in the last step, the other worker has finished."""
    story = training(2, aside_s=10.0, hang_s=60.0)
    story.beat("w1", waiting=True)
    story.beat("w0", seconds_at=11.0)
    story.hold("w1")
    story.says("w1", Finished())
    return story


def test_a_worker_aside_is_not_ended_at_once_when_the_others_have_finished() -> None:
    """What it does may be slow and of use: it has until `hang_s`, as at any other time."""
    story = finished_without_one_aside()
    assert story.worker("w0").state is WorkerState.ASIDE
    assert not story.sent(AGENT, Evict)
    assert story.ended is None
    story.exits("w0", 1)
    assert story.ended == Ended(ok=True, reason="finished")
    story = finished_without_one_aside()
    story.beat("w0", seconds_at=61.0)
    assert story.ended == Ended(ok=True, reason="finished")
    assert story.sent(AGENT, Evict)[0].worker_id == "w0"


def test_a_worker_aside_whose_script_ends_is_not_waited_for() -> None:
    story = finished_without_one_aside()
    story.says("w0", Finished())
    assert story.ended == Ended(ok=True, reason="finished")


def test_a_drained_worker_that_hangs_when_the_others_have_gone_on_is_ended() -> None:
    """Nobody waits for it, but the end of the run does."""
    for waiting in (False, True):  # in a call, or for a generation that it has no part in
        story = training(3, aside_s=10.0, hang_s=60.0)
        story.says(AGENT, Drain(worker_ids=["w2"]))
        story.beat("w2", seconds_at=61.0, waiting=waiting)
        assert story.worker("w2").state is WorkerState.HOLDING, "the others may still need it"
        story.hold("w0", "w1")
        story.says("w0", Finished())
        story.says("w1", Finished())
        story.beat("w2", seconds_at=59.0, waiting=waiting)
        assert story.ended is None
        story.beat("w2", seconds_at=61.0, waiting=waiting)
        assert story.worker("w2").state is WorkerState.LOST
        assert story.ended == Ended(ok=True, reason="finished")
        assert story.sent(AGENT, Evict)[0].worker_id == "w2"


def test_a_place_between_two_steps_is_not_remembered_as_one_where_a_worker_hung() -> None:
    """All members may be there for long, in the same call, and none of them hangs."""
    story = training(3, aside_s=10.0, hang_s=60.0)
    story.beat("w2", waiting=True)
    story.beat("w0", seconds_at=11.0, microbatch=-1)
    assert story.worker("w0").state is WorkerState.ASIDE
    assert story.state.hangs == ()
    story.hold("w1", "w2")
    story.beat("w2", seconds_at=600.0, microbatch=-1)
    assert story.beat("w1", seconds_at=600.0, microbatch=-1) == []
    assert story.ended is None


def left_alone_where_another_hung(**policy: float) -> Story:
    """Of two workers, w0 was left aside at step 4, micro-batch 2; w1 computes that now, and nobody waits for it."""
    story = training(2, aside_s=10.0, hang_s=60.0, **policy)
    story.beat("w1", waiting=True)
    story.beat("w0", seconds_at=11.0, samples=[17, 3])
    story.hold("w1")
    assert story.worker("w0").state is WorkerState.ASIDE
    return story


def test_a_micro_batch_that_hangs_on_a_second_worker_ends_the_run() -> None:
    """It is the script or its data. Nobody else may be left who waits, or who could be lost before."""
    story = left_alone_where_another_hung()
    story.beat("w1", seconds_at=3.5, progress=7, samples=[17, 3])
    assert story.sent("w1", WriteStacks), "its stack is shown"
    story.beat("w1", seconds_at=59.0, samples=[17, 3])
    assert story.ended is None
    story.beat("w1", seconds_at=61.0, samples=[17, 3])
    assert story.ended is not None
    assert not story.ended.ok
    assert story.ended.worker_id == "w1"
    assert (
        "w1 (pid 1001) hangs: no progress for 61 s at step 4, micro-batch 2 (samples 17, 3), where worker w0 (pid "
        "1000) hung as well (for 11 s)" in story.ended.reason
    )


def test_a_second_worker_that_hangs_at_the_same_micro_batch_is_not_left_aside_as_well() -> None:
    """Else one after the other would be, until nobody holds the state."""
    story = training(3, aside_s=10.0, hang_s=60.0)
    story.beat("w2", waiting=True)
    story.beat("w0", seconds_at=11.0)
    story.hold("w1", "w2")
    story.beat("w1", seconds_at=50.0)
    assert story.state.members == ("w1", "w2")
    story.beat("w1", seconds_at=61.0)
    assert story.ended is not None


def test_a_replacement_that_hangs_where_another_has_needs_no_patience_for_its_first_step() -> None:
    story = left_alone_where_another_hung()
    story.beat("w1", seconds_at=61.0, num_steps=1)
    assert story.ended is not None


@pytest.mark.parametrize("other", [{"step": 5}, {"microbatch": 3}, {"evaluates": True}], ids=str)
def test_a_hang_at_another_place_is_another_case(other: dict[str, int | bool]) -> None:
    story = left_alone_where_another_hung()
    place: dict[str, int | bool] = {"step": 4, "microbatch": 2, **other}
    assert story.beat("w1", seconds_at=61.0, **place) == []  # type: ignore[arg-type]
    assert story.ended is None


def test_a_micro_batch_that_has_passed_elsewhere_may_hang_again() -> None:
    story = left_alone_where_another_hung()
    story.beat("w1", step=5)
    assert story.state.hangs == ()


def test_a_worker_that_hangs_in_its_first_step_and_is_ended_is_remembered() -> None:
    story = training(2, hang_s=60.0)
    story.beat("w1", waiting=True, num_steps=1)
    story.beat("w0", seconds_at=601.0, num_steps=1)
    assert story.worker("w0").state is WorkerState.LOST
    story.hold("w1")
    story.beat("w1", seconds_at=61.0, num_steps=1)
    assert story.ended is not None


def last_holder_with_a_newcomer() -> Story:
    """w0 holds the state, w5 is being admitted and waits for it."""
    story = training(1, maximum=2, late_s=3.0, aside_s=10.0, hang_s=60.0)
    story.arrive("w5")
    story.beat("w5", waiting=True, num_steps=0, step=-1, microbatch=-1)
    assert story.worker("w5").state is WorkerState.ADMITTED
    return story


def test_a_member_that_hangs_while_only_a_newcomer_waits_is_reported_and_ended_late() -> None:
    """To leave it aside would be the end of the run: nobody else has the state."""
    story = last_holder_with_a_newcomer()
    story.beat("w0", seconds_at=3.5)
    assert story.sent("w0", WriteStacks)
    story.beat("w0", seconds_at=599.0)
    assert story.worker("w0").state is WorkerState.HOLDING
    story.beat("w0", seconds_at=601.0)
    assert story.sent(AGENT, Evict)[0].worker_id == "w0"


def test_between_two_steps_members_may_take_long_while_a_newcomer_waits() -> None:
    """They all do the same, which may be a validation of an hour."""
    story = last_holder_with_a_newcomer()
    assert story.beat("w0", seconds_at=3600.0, microbatch=-1) == []


def test_a_broken_exchange_is_tried_again_when_nobody_is_lost() -> None:
    story = training(3)
    story.says("w1", Suspect(generation=1, reason="timed out"))
    assert story.state.generation == 1
    story.tick(story.state.policy.suspect_s)
    assert story.state.generation == 2
    assert story.state.members == ("w0", "w1", "w2")
    assert story.state.notice is not None
    assert story.state.notice.immediate
    assert "timed out; no member was lost: trying again" in story.reason


def test_a_broken_exchange_is_tried_again_by_the_head_that_follows() -> None:
    """The members say `Suspect` once and wait for the answer."""
    story = training(3)
    for worker_id in story.state.members:
        story.says(worker_id, Suspect(generation=1, reason="timed out"))
    story.state = resumed(story.state, 2, 7.0)
    assert story.state.due_at == 7.0 + story.state.policy.suspect_s
    story.tick(7.0 + story.state.policy.suspect_s)
    assert story.state.generation == 2
    assert story.state.members == ("w0", "w1", "w2")


def test_a_broken_exchange_with_a_known_cause_is_not_tried_again() -> None:
    story = training(3)
    story.says("w0", Suspect(generation=1, reason="closed by peer"))
    assert story.reason == "", "the cause will be told, and is on its way"
    story.exits("w1")
    story.tick(5.0 - 0.1)
    assert story.state.generation == 2


def test_after_three_broken_exchanges_the_one_to_blame_goes() -> None:
    story = training(3)
    for _ in range(3):
        generation = story.state.generation
        story.says("w0", Suspect(generation=generation, reason="timed out", peers=["w2"]))
        story.says("w1", Suspect(generation=generation, reason="timed out", peers=["w2"]))
        for worker_id in ("w0", "w1", "w2"):
            story.beat(worker_id)
        story.tick(story.now + story.state.policy.suspect_s)
        story.hold()
    assert story.worker("w2").state is WorkerState.LOST
    assert story.state.members == ("w0", "w1")


def hangs_while_it_says_that_it_waits(*, names: Sequence[str]) -> Story:
    """w1 stands in a call that does not return and beats as one that waits; the others' exchanges break for it."""
    story = training(3)
    story.says("w0", step_done(0))
    for _ in range(3):
        generation = story.state.generation
        for worker_id in ("w0", "w2"):
            story.says(worker_id, Suspect(generation=generation, reason="waited 300 s", peers=list(names)))
        for worker_id in ("w0", "w1", "w2"):
            story.beat(worker_id, waiting=True)
        story.tick(story.now + story.state.policy.suspect_s)
    return story


@pytest.mark.parametrize("names", [["w1"], []], ids=["named", "unknown"])
def test_who_reports_a_broken_exchange_is_not_blamed_for_it(names: Sequence[str]) -> None:
    """Whoever reports works. The one that goes is the one that they waited for, also where they cannot name it."""
    story = hangs_while_it_says_that_it_waits(names=names)
    assert story.worker("w1").state is WorkerState.LOST
    assert story.sent(AGENT, Evict)[0].worker_id == "w1"
    assert story.state.members == ("w0", "w2")


def test_a_healthy_member_that_reports_later_than_another_does_not_go() -> None:
    """The first report of an exchange interrupts the others in their waits: they come to say nothing."""
    story = training(3)
    story.says("w0", step_done(0))
    for _ in range(3):
        story.says("w0", Suspect(generation=story.state.generation, reason="waited 300 s", peers=["w1"]))
        story.tick(story.now + story.state.policy.suspect_s)
    assert story.worker("w1").state is WorkerState.LOST
    assert story.state.members == ("w0", "w2")


def test_of_members_that_name_each_other_the_one_goes_that_most_cannot_reach() -> None:
    """Its own link is broken: it reports as well, and names one of the others each time."""
    story = training(3)
    story.says("w0", step_done(0))
    for _ in range(3):
        for worker_id, peer in (("w0", "w1"), ("w1", "w0"), ("w2", "w1")):
            story.says(worker_id, Suspect(generation=story.state.generation, reason="timed out", peers=[peer]))
        story.tick(story.now + story.state.policy.suspect_s)
    assert story.worker("w1").state is WorkerState.LOST


def test_an_exchange_that_breaks_on_every_member_by_itself_ends_the_run() -> None:
    """No room for shared memory, say: to try for ever, or to throw workers out one by one, mends nothing."""
    story = Story(2)
    story.arrive(*story.agent(2))
    for _ in range(3):
        assert story.ended is None
        for worker_id in ("w0", "w1"):
            story.says(worker_id, Suspect(generation=story.state.generation, reason="File too large"))
        story.tick(story.now + story.state.policy.suspect_s)
    assert story.ended is not None
    assert "3 exchanges in a row broke, and no single member is to blame: " in story.ended.reason
    assert "File too large" in story.ended.reason


def cannot_exchange(story: Story, *, by: Sequence[str] = ("w0", "w1")) -> None:
    """The members of the newest generation do not get their exchange."""
    generation = story.state.generation
    for worker_id in by:
        story.says(worker_id, Suspect(generation=generation, reason="connecting took longer than 20 s"))
    story.tick(story.now + story.state.policy.suspect_s)


def test_newcomers_that_the_others_cannot_exchange_with_are_sent_away() -> None:
    """A firewall between the machines: the run must not stand still for them again and again."""
    story = training(2)
    story.arrive(*story.agent(1, "agent1", primary=False, host="office"), host="office")
    assert story.state.members == ("w0", "w1", "w2")
    cannot_exchange(story, by=("w0", "w1", "w2"))
    assert story.state.members == ("w0", "w1")
    assert "the others continue without w2" in story.reason
    story.hold()
    story.says("w0", step_done(0))
    assert story.state.members == ("w0", "w1", "w2"), "another attempt"
    cannot_exchange(story)
    assert story.state.members == ("w0", "w1")
    assert story.worker("w2").state is WorkerState.LEFT
    assert "w2 (pid 1002) at 127.0.0.1 is sent away" in story.reason
    assert "firewall" in story.sent("w2", Ended)[0].reason
    assert story.sent("agent1", Evict)
    story.hold()
    assert story.state.members == ("w0", "w1")


def test_of_two_machines_only_the_one_goes_that_cannot_exchange() -> None:
    story = training(2)
    story.agent(1, "agent1", primary=False, host="office")
    story.agent(1, "agent2", primary=False, host="shed")
    story.exits("w1")
    story.arrive("w2", host="office")
    story.arrive("w3", host="shed")
    story.hold()
    assert story.state.members == ("w0", "w2", "w3")
    cannot_exchange(story, by=["w0"])
    story.hold()
    assert story.state.members == ("w0", "w2"), "which of them is it?"
    cannot_exchange(story, by=["w0"])
    assert story.worker("w2").state is WorkerState.LEFT
    story.hold()
    assert story.state.members == ("w0", "w3")
    story.hold()
    assert story.worker("w3").num_unreached == 0


def test_an_exchange_that_breaks_for_the_newcomer_alone_is_not_held_against_it() -> None:
    """It begins to wait for the others when they are told of it; they come at the end of a step that may be long."""
    story = training(2)
    story.arrive(*story.agent(1, "agent1", primary=False))
    for _ in range(4):
        cannot_exchange(story, by=["w2"])
        assert "the members have not reached a step boundary yet: trying again" in story.reason
        story.hold("w0", "w1")
        assert story.state.members == ("w0", "w1", "w2"), "nor against the members"
        assert story.worker("w2").state is WorkerState.ADMITTED


# -- who leaves the training loop --------------------------------------------------------------------


def test_a_worker_that_leaves_the_loop_alone_ends_the_run() -> None:
    """The number of steps is part of the result, and nobody can say which of the workers is right."""
    story = training(3)
    story.beat("w0", step=4)
    story.says("w1", Leaving(phase=0, step=5))
    assert story.ended is None, "perhaps the others are about to"
    story.beat("w2", step=5)
    assert story.ended is not None
    assert not story.ended.ok
    assert story.ended.worker_id == "w1"
    assert story.ended.reason.startswith(
        "worker w1 (pid 1001) left the training loop before step 5 (by a break or a return that only it reached?), "
        "but worker w2 (pid 1002) has begun step 5. "
    )


def test_all_may_leave_the_loop_at_the_same_step_at_different_times() -> None:
    story = training(2)
    story.beat("w0", step=4)
    story.says("w1", Leaving(phase=0, step=5))
    story.beat("w0", step=4)
    story.beat("w0", step=5, evaluates=True)  # after the loop, or at the head of a step that it leaves
    story.says("w0", Leaving(phase=0, step=5))
    story.beat("w1", step=4)
    story.says("w0", Finished())
    story.says("w1", Finished())
    assert story.ended == Ended(ok=True, reason="finished")


def test_all_may_leave_one_loop_for_another() -> None:
    story = training(2)
    story.beat("w0", step=4)
    for worker_id in ("w1", "w0"):
        story.says(worker_id, Leaving(phase=0, step=5, goes_on=True))
        story.beat(worker_id, phase=1, step=0)
    story.beat("w1", phase=1, step=7)
    assert story.ended is None
    story.says("w1", Leaving(phase=1, step=8))
    story.beat("w0", phase=1, step=8)
    assert story.ended is not None


def test_a_script_that_ends_in_the_middle_is_a_loss_when_others_miss_it() -> None:
    story = training(3)
    story.says("w1", Finished(phase=0, step=5))
    assert story.state.members == ("w0", "w1", "w2"), "perhaps the others are about to"
    story.says("w0", Suspect(generation=1, reason="worker w1 has left", peers=["w1"]))
    assert story.state.members == ("w0", "w2")
    assert "w1 (pid 1001) left the training loop at step 4 and ended with exit code 0" in story.reason
    assert story.sent(AGENT, Start)[0].worker_ids == ["w3"]
    story.hold()
    story.arrive("w3")
    assert story.state.members == ("w0", "w2", "w3"), "the door is open"


def test_all_may_end_their_scripts_at_the_same_step() -> None:
    story = training(3, maximum=4)
    story.says(AGENT, Scale(num_workers=4))
    story.says("w3", Hello(info=info("w3"), fingerprint={"torch": "2"}))
    for worker_id in ("w0", "w1", "w2"):
        assert story.ended is None
        story.says(worker_id, Finished(phase=0, step=5))
    assert story.ended == Ended(ok=True, reason="finished")
    assert story.worker("w3").state is WorkerState.LEFT


def test_the_only_member_may_end_its_script_in_the_middle() -> None:
    story = training(1, maximum=2)
    story.says("w0", step_done(4))
    story.arrive("w5")
    story.says("w0", Finished(phase=0, step=5))
    story.says("w5", Failed(error="E", traceback="T"))
    assert story.ended is not None
    assert story.ended.ok


def test_what_was_said_of_a_loop_is_forgotten_when_all_have_left_it() -> None:
    """While it is known, no heartbeat is one from which nothing follows."""
    story = training(3)
    for worker_id in ("w0", "w1", "w2"):
        story.says(worker_id, Leaving(phase=0, step=5, goes_on=True))
    story.beat("w0", phase=1, step=0)
    story.beat("w1", phase=1, step=0)
    assert story.state.leaving, "w2 has not come to the next loop"
    story.beat("w2", phase=1, step=0)
    assert story.state.leaving == {}


def test_what_the_lost_had_said_of_a_loop_is_forgotten() -> None:
    story = training(3)
    story.says("w1", Leaving(phase=0, step=5))
    story.exits("w1")
    story.hold()
    story.beat("w0", step=4)
    assert story.state.leaving == {}


def test_a_machine_that_is_gone_costs_one_generation_however_its_connections_end() -> None:
    story = Story(6, maximum=6)
    story.arrive(*story.agent(2))
    guests = story.agent(4, "agent1", primary=False, host="far")
    story.arrive(*guests, host="far")
    story.hold()
    story.says("agent1", Lost())
    for worker_id in guests:
        story.now += 0.01
        story.says(worker_id, Lost())
    due = story.state.due_at
    assert due is not None
    story.tick(due)
    assert story.state.members == ("w0", "w1")
    assert {story.worker(worker_id).state for worker_id in guests} == {WorkerState.LOST}


# -- members that wait for each other in different rounds -------------------------------------------

STEP, UPDATE = (7, "a step of 8 micro-batches"), (7, "optimizer.step()")


def test_members_that_wait_in_different_rounds_meet_and_find_out() -> None:
    story = training(3)
    story.beat("w0", waiting=True, waits_in=UPDATE)
    story.beat("w2", waiting=True, waits_in=UPDATE)
    assert story.state.generation == 1
    story.beat("w1", waiting=True, waits_in=STEP)
    notice = story.notices()["w0"]
    assert (notice.generation, notice.immediate) == (2, True)
    assert [member.worker_id for member in notice.members] == ["w0", "w1", "w2"]
    assert notice.reason.startswith(
        "worker w1 (pid 1001) waits in a step of 8 micro-batches, and worker w0 (pid 1000) in optimizer.step(); "
    )


@pytest.mark.parametrize(
    "other",
    [
        {"waits_in": UPDATE},
        {"waits_in": (8, STEP[1])},
        {"waits_in": (-1, "")},
        {"waits_in": STEP, "generation": 2},
    ],
    ids=["the same round", "the next round", "no round", "another generation"],
)
def test_members_whose_waiting_ends_by_itself_are_left_alone(other: dict[str, object]) -> None:
    story = training(2)
    story.beat("w0", waiting=True, waits_in=UPDATE)
    story.beat("w1", waiting=True, **other)  # type: ignore[arg-type]
    assert story.state.generation == 1


def test_a_member_that_has_left_its_round_waits_for_nobody() -> None:
    """An error that the script has caught: it may come to the round in which the others are."""
    story = training(2)
    story.beat("w0", waiting=True, waits_in=UPDATE)
    story.beat("w0")
    story.beat("w1", waiting=True, waits_in=STEP)
    assert story.state.generation == 1
    story.beat("w0", waiting=True, waits_in=STEP)
    assert story.state.generation == 1


def test_of_many_members_that_wait_together_one_heartbeat_is_looked_at() -> None:
    story = training(3)
    beats = [BeatOf(worker_id=f"w{number}", seconds_ago=0.0, beat=waiting_in(*STEP)) for number in range(3)]
    assert len(routine_of_many(story.state, beats, 0.1)[1]) == 3
    story.beat("w0", waiting=True, waits_in=STEP)
    assert routine_of_many(story.state, beats, 0.1)[1] == ()


def waiting_in(number: int, title: str) -> Beat:
    return msgspec.structs.replace(beat(waiting=True), round=number, title=title)


# -- heartbeats --------------------------------------------------------------------------------------


def beat(seconds_at: float = 0.0, *, waiting: bool = False) -> Beat:
    return Beat(
        generation=1, phase=0, step=4, microbatch=2, progress=1, num_steps=5, waiting=waiting, seconds_at=seconds_at
    )


@pytest.mark.parametrize("kind", [WorkerState.STARTING, WorkerState.READY, WorkerState.ADMITTED, WorkerState.HOLDING])
def test_a_heartbeat_costs_the_same_however_many_workers_there_are(kind: WorkerState) -> None:
    counts = []
    for num_workers in (16, 256):
        story = Story(num_workers)
        *ids, last = story.agent(num_workers)
        for worker_id in (*ids, last):
            story.says(worker_id, Hello(info=info(worker_id), fingerprint={}))
        if kind is not WorkerState.STARTING:
            story.arrive(*ids)
        if kind in (WorkerState.ADMITTED, WorkerState.HOLDING):
            story.arrive(last)
        if kind is WorkerState.HOLDING:
            story.hold()
        assert {story.worker(worker_id).state for worker_id in ids} == {kind}
        story.now = 0.4
        story.state = msgspec.structs.replace(story.state, workers=Unvisited(story.state.workers))
        with counting() as calls:
            story.state, *_ = step(story.state, Event("w7", beat()), story.now)
        assert story.worker("w7").beat == beat()
        counts.append(len(calls))
    assert counts[0] == counts[1]


class Unvisited(dict[str, Worker]):
    """Workers of whom one is looked up, and not all are looked at."""

    def values(self) -> NoReturn:
        raise AssertionError("all workers are looked at")

    items = keys = values


@contextlib.contextmanager
def counting() -> Iterator[list[str]]:
    """The functions that are called meanwhile."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("seed", range(30))
def test_a_heartbeat_from_which_nothing_follows_changes_what_any_other_would(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short way and the long way come to the same decisions at the same times, whoever falls silent or hangs."""
    ends = []
    for takes_short_way in (True, False):
        with monkeypatch.context() as patch:
            if not takes_short_way:
                patch.setattr(membership, "routine", lambda *_: None)
            ends.append(decisions_of_a_run(random.Random(seed)))
    assert ends[0] == ends[1]


def decisions_of_a_run(rng: random.Random) -> list[tuple[float, str, tuple[Action, ...]]]:
    """What is decided when, about workers that beat, are silent for a while, stand still and come."""
    story = Story(3, maximum=5, heartbeat_timeout_s=5.0, hang_s=20.0, aside_s=10.0)
    story.arrive(*story.agent(3))
    story.hold(*rng.choice([("w0", "w1", "w2"), ("w0",), ()]))
    found: list[tuple[float, str, tuple[Action, ...]]] = []
    silent_until = dict.fromkeys(("w0", "w1", "w2", "w3", "w4", "w5"), 0.0)
    for _ in range(300):
        now = story.now + rng.choice([0.01, 0.3, 0.5])
        if rng.random() < 0.02:
            now += rng.choice([2.0, 2.5, 3.0, 8.0])  # all are silent
        while (due := story.state.due_at) is not None and due <= now:
            story.tick(max(due, story.now))
            if story.actions:
                found.append((story.now, story.reason, tuple(story.actions)))
        story.now = now
        who = rng.choice(list(silent_until))
        if rng.random() < 0.05:
            silent_until[who] = now + rng.choice([1.0, 4.0, 7.0, 30.0])
        if who not in story.state.workers or story.worker(who).state is WorkerState.ORDERED:
            if rng.random() < 0.2:
                story.says(who, Hello(info=info(who), fingerprint={"torch": "2"}))
                story.says(who, Ready(phase=0))
        elif now >= silent_until[who]:
            if rng.random() < 0.2 and story.worker(who).state is WorkerState.ADMITTED:
                story.says(who, Holding(generation=story.state.generation))
            seconds_at = rng.choice([0.0, 0.0, 0.0, 2.9, 3.5, 11.0]) if rng.random() < 0.1 else 0.0
            story.says(who, beat(seconds_at, waiting=rng.random() < 0.5))
            if story.actions:
                found.append((story.now, story.reason, tuple(story.actions)))
        found.append((story.now, str({i: w.heard_at for i, w in story.state.workers.items()}), ()))
        check_deadline(story.state, story.now)
    return found


def check_deadline(state: State, now: float) -> None:
    """The next deadline, which is found by groups of workers, is the first of all."""
    times = list(state.silent_at(now).values())
    waited = state.settings.head_away_s
    times += [agent.away_at + waited for agent in state.agents.values() if agent.away_at is not None]
    if state.suspected_at is not None:
        times.append(state.suspected_at + state.policy.suspect_s)
    if state.ended is None:
        assert noted(state, now).due_at == min(times, default=None)


def test_no_event_costs_the_square_of_the_number_of_workers() -> None:
    """With 8 times as many workers an event costs 8 times as many calls at most, and not 64 times as many."""
    small, large = calls_of_events(32), calls_of_events(256)
    for name, calls in small.items():
        assert large[name] < 10 * calls + 100, (name, calls, large[name])


def calls_of_events(num_workers: int) -> dict[str, int]:
    """How many functions the table calls for some events of a run with so many members."""
    story = Story(num_workers)
    ids = story.agent(num_workers)
    for worker_id in ids:
        story.says(worker_id, Hello(info=info(worker_id), fingerprint={}))
    for worker_id in ids[:-1]:
        story.says(worker_id, Ready(phase=0))
    found = {}
    acts: dict[str, Callable[[], object]] = {
        "the last is ready": lambda: story.says(ids[-1], Ready(phase=0)),
        "the first holds": lambda: story.hold(ids[0]),
        "others hold": lambda: story.hold(*ids[1:-1]),
        "the last holds": lambda: story.hold(ids[-1]),
        "a step is done": lambda: story.says("w0", step_done(1)),
        "one is lost": lambda: story.exits("w7"),
        "one is drained": lambda: story.says(AGENT, Drain(worker_ids=["w8"])),
    }
    for name, act in acts.items():
        with counting() as calls:
            act()
        found[name] = len(calls) // (num_workers if name == "others hold" else 1)
    assert story.state.generation == 2
    return found


class Agents:
    """A story whose workers' heartbeats come together, as an agent reports them: some of them late, some twice."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.found: list[tuple[str, tuple[Action, ...]]] = []

    def report(self, beats: Sequence[BeatOf]) -> None:
        self.story.state, rest = routine_of_many(self.story.state, beats, self.story.now)
        while rest:
            first, *rest = rest
            self.say(first.worker_id, first.beat)
            self.story.state, rest = routine_of_many(self.story.state, rest, self.story.now)

    def say(self, worker_id: str, message: Message | Tick) -> None:
        self.story.says(worker_id, message)
        if self.story.actions:
            self.found.append((self.story.reason, tuple(self.story.actions)))


@pytest.mark.parametrize("seed", range(40))
def test_heartbeats_that_an_agent_reports_decide_what_those_of_the_workers_would(seed: int) -> None:
    """In any state of the workers, who are silent, hang, leave and come; and a report is all that a head hears."""
    rng = random.Random(seed)
    many, single = (Agents(Story(4, maximum=6, hang_s=20.0, aside_s=10.0)) for _ in range(2))
    both = (many, single)
    for each in both:
        each.story.arrive(*each.story.agent(4))
        if seed % 4:
            each.story.hold()
    for progress in range(1, 150):
        now = many.story.now + rng.choice([0.1, 0.5, 0.5, 3.0])
        for each in both:
            while (due := each.story.state.due_at) is not None and due <= now:
                each.story.now = max(due, each.story.now)
                each.say("", Tick())
            each.story.now = now
        act = rng.choice(["beats"] * 12 + ["exit", "leave", "scale", "ready", "close"])
        who = f"w{rng.randrange(6)}"
        named = [f"w{number}" for number in range(6) if f"w{number}" in many.story.state.workers]
        beats = [
            BeatOf(i, 0.0, msgspec.structs.replace(
                beat(rng.choice([0.0, 0.0, 0.0, 3.5, 11.0, 30.0]), waiting=rng.random() < 0.5),
                progress=progress,
                step=rng.choice([3, 4, 5]),
            ))
            for i in rng.sample(named, rng.randint(0, len(named)))
        ]  # fmt: skip
        for each in both:
            state = each.story.state
            known = state.workers.get(who)
            if act == "beats" and each is many:
                each.report(beats)
            elif act == "beats":
                for one in beats:
                    worker = each.story.state.workers[one.worker_id]
                    if worker.closed_at is None and Beat in TRANSITIONS[worker.state]:
                        each.say(one.worker_id, one.beat)
            elif act == "exit":
                each.say(AGENT, WorkerExit(worker_id=who, exit_code=-9))
            elif act == "scale":
                each.say("", Scale(num_workers=5))
            elif act == "close" and known is not None:
                each.say(who, Lost())
            elif act == "leave" and known is not None and known.state is WorkerState.HOLDING:
                each.say(who, Leaving(phase=0, step=5))
            elif act == "ready" and known is not None and known.state is WorkerState.ORDERED:
                each.say(who, Hello(info=info(who), fingerprint={"torch": "2"}))
                each.say(who, Ready(phase=0))
        assert many.found == single.found
        assert many.story.state.workers == single.story.state.workers
        if many.story.ended is not None:
            break


def test_a_report_counts_from_when_the_worker_has_left_it() -> None:
    """So a worker that stands still is lost as soon as if it had sent its last heartbeat itself."""
    story = training(2, heartbeat_timeout_s=5.0)
    story.now = 10.0
    for worker_id in ("w0", "w1"):
        story.beat(worker_id)
    left = BeatOf("w1", 0.4, beat())
    story.now = 10.8
    story.state, rest = routine_of_many(story.state, [left], story.now)
    assert not rest
    assert story.worker("w1").heard_at == pytest.approx(10.4)
    for now in (12.0, 13.5, 15.0):
        story.now = now
        story.beat("w0")
    assert story.tick(15.3) == []
    story.tick(15.4)
    assert story.worker("w1").state is WorkerState.LOST


def test_an_older_heartbeat_that_comes_late_does_not_take_a_worker_back() -> None:
    story = training(2)
    story.now = 1.0
    story.beat("w1", progress=9, step=7)
    story.now = 1.2
    story.state, rest = routine_of_many(story.state, [BeatOf("w1", 0.1, beat())], story.now)
    known = story.worker("w1")
    assert (rest, known.heard_at, known.beat and known.beat.step) == ((), pytest.approx(1.1), 7)


# -- a head whose memory is old ----------------------------------------------------------------------


def test_the_number_of_a_generation_is_not_used_again_by_a_head_that_has_not_known_it() -> None:
    """Members listen to newer ones only."""
    story = training(3)
    story.state = resumed(story.state, 2, story.now)
    story.says("w0", Hello(info=info("w0"), fingerprint={"torch": "2"}, generation=4))
    assert "worker w0 (pid 1000) holds generation 4, which this head does not know" in story.reason
    assert {to: notice.generation for to, notice in story.notices().items()} == {"w0": 5, "w1": 5, "w2": 5}
    assert story.notices()["w0"].immediate
    story.says("w0", Holding(generation=4))
    story.says("w1", Hello(info=info("w1"), fingerprint={"torch": "2"}, generation=4))
    assert story.notices()["w1"].generation == 5
    story.hold()
    assert story.state.generation == 5


def test_before_the_first_generation_that_it_knows_only_the_number_counts() -> None:
    story = Story(2)
    story.agent(2)
    story.says("w0", Hello(info=info("w0"), fingerprint={"torch": "2"}, generation=3))
    story.says("w0", Ready(phase=0))
    story.says("w0", Holding(generation=3))
    story.arrive("w1")
    assert story.state.generation == 4
    assert story.state.members == ("w0", "w1")


def test_who_was_in_a_generation_that_the_head_has_not_known_hears_that_it_is_out() -> None:
    story = training(2, maximum=3)
    story.says("", Scale(num_workers=3))
    story.says("w2", Hello(info=info("w2"), fingerprint={"torch": "2"}))
    story.says("w0", Hello(info=info("w0"), fingerprint={"torch": "2"}, generation=2))
    story.says("w2", Hello(info=info("w2"), fingerprint={"torch": "2"}, generation=2))
    assert story.notices()["w2"].generation == 3
    assert story.state.members == ("w0", "w1")


# -- who computes otherwise --------------------------------------------------------------------------


def test_a_different_fingerprint_is_a_warning() -> None:
    story = Story(2)
    story.agent(2)
    story.arrive("w0")
    story.says("w1", Hello(info=info("w1"), fingerprint={"torch": "3"}))
    assert "torch is '3' and not '2'" in story.reason
    assert "no longer hold" in story.reason
    assert story.worker("w1").state is WorkerState.STARTING


def test_a_different_fingerprint_is_refused_where_strict() -> None:
    story = training(1, strict=True)
    story.agent(1, "agent1", primary=False)
    story.says("w1", Hello(info=info("w1"), fingerprint={"torch": "3"}))
    assert story.worker("w1").state is WorkerState.LEFT
    assert not story.sent("w1", Ended)[0].ok
    assert story.ended is None


@pytest.mark.parametrize(
    ("held", "settings", "is_refused"),
    [
        (True, {"workers": "1x2"}, True),
        (True, {"workers": "1x2", "arithmetic": "avx2"}, False),
        (False, {"workers": "1x2"}, False),
        (True, {"workers": "2"}, False),
    ],
)
def test_where_a_model_is_in_parts_a_newcomer_of_another_fingerprint_is_refused(
    held: bool, settings: dict[str, Any], is_refused: bool
) -> None:
    """Its values would count at once, beside those of its group."""
    state = State(
        policy=Policy(start=2, maximum=2), settings=RunSettings(**settings), fingerprint={"torch": "2"}, held=held
    )
    words = refusal(state, Hello(info=info("w2"), fingerprint={"torch": "3"}))
    assert ("cannot be tried" in words) == bool(words) == is_refused


def test_other_results_in_the_probe_are_refused_and_other_names_are_not() -> None:
    story = Story(3)
    story.agent(3)
    probed = {"device": "cpu", "results": "product=aa, sums=bb"}
    story.says("w0", Hello(info=info("w0"), fingerprint={**probed, "processor": "old"}))
    story.says("w1", Hello(info=info("w1"), fingerprint={**probed, "processor": "new"}))
    assert "processor is 'new' and not 'old'" in story.reason
    assert "the same bits in a probe" in story.reason
    story.says("w2", Hello(info=info("w2"), fingerprint={**probed, "results": "product=aa, sums=b0"}))
    assert "gets different bits in sums (processor is 'unknown' and not 'old')" in story.reason
    assert [story.worker(f"w{number}").state for number in (1, 2)] == [WorkerState.STARTING, WorkerState.LEFT]


def says_hello(story: Story, worker_id: str, script: str) -> None:
    story.says(worker_id, Hello(info=info(worker_id), fingerprint={"torch": "2"}, script=script))


def test_another_text_of_the_script_is_refused() -> None:
    story = training(1)
    story.agent(1, "agent1", primary=False, host="office")
    story.state = msgspec.structs.replace(story.state, script="aaaa")
    says_hello(story, "w1", "bbbb")
    assert story.worker("w1").state is WorkerState.LEFT
    assert "has a different text of the script (checksum bbbb) than the run (checksum aaaa)" in story.reason
    assert "--set allow-different-script=yes" in story.reason
    assert story.ended is None
    assert story.state.members == ("w0",)


def test_a_replacement_whose_script_was_edited_is_not_replaced_again() -> None:
    """The next one would read the same text."""
    story = training(2)
    story.state = msgspec.structs.replace(story.state, script="aaaa")
    story.exits("w1")
    story.hold()
    says_hello(story, "w2", "bbbb")
    assert story.sent(AGENT, Start) == []
    assert story.state.agents[AGENT].used_restarts == 1
    assert [evict.worker_id for evict in story.sent(AGENT, Evict)] == ["w2"]
    assert "was the script edited" in story.reason


def test_the_text_that_counts_is_that_of_the_command_whoever_comes_first() -> None:
    story = Story(1)
    story.state = msgspec.structs.replace(story.state, script="aaaa")
    story.agent(1)
    story.agent(1, "agent1", primary=False, host="office")
    says_hello(story, "w1", "bbbb")
    says_hello(story, "w0", "aaaa")
    assert story.worker("w1").state is WorkerState.LEFT
    assert story.worker("w0").state is WorkerState.STARTING


def test_a_text_that_nobody_knows_is_no_other_text() -> None:
    story = Story(2)
    story.agent(2)
    says_hello(story, "w0", "")
    says_hello(story, "w1", "aaaa")
    assert story.state.script == "aaaa"
    assert story.worker("w1").state is WorkerState.STARTING


def test_who_is_admitted_with_a_warning_is_named_once_in_its_first_generation() -> None:
    story = training(1, allow_different_script=True)
    story.agent(1, "agent1", primary=False, host="office")
    story.state = msgspec.structs.replace(story.state, policy=msgspec.structs.replace(story.state.policy, maximum=3))
    story.state = msgspec.structs.replace(story.state, script="aaaa")
    says_hello(story, "w1", "bbbb")
    assert "no longer hold" in story.reason
    story.says("w1", Ready(phase=0))
    assert story.notices()["w0"].warnings == [story.worker("w1").warning]
    assert "has a different text of the script" in story.worker("w1").warning
    story.hold()
    story.says("", Scale(num_workers=3))
    story.arrive("w2")
    assert story.notices()["w0"].warnings == []


def test_a_machine_none_of_whose_workers_can_take_part_is_sent_away_with_their_reason() -> None:
    """And costs nobody a restart."""
    story = training(1)
    story.agent(2, "agent1", primary=False, host="office")
    for worker_id in ("w1", "w2"):
        assert story.sent("agent1", Ended) == []
        story.says(worker_id, Hello(info=info(worker_id, "office"), fingerprint={"torch": "2"}))
        story.says(worker_id, Failed(error="FileNotFoundError: data", traceback="Traceback ..."))
        assert story.sent("agent1", Start) == []
    (told,) = story.sent("agent1", Ended)
    assert (told.ok, told.exit_code) == (False, 1)
    assert told.reason.endswith("the last failure: worker w2 (pid 1002) failed: FileNotFoundError: data")
    assert [agent.used_restarts for agent in story.state.agents.values()] == [0, 0]
    story.says("agent1", AgentHello(host="office", pid=1, num_workers=2, agent_id="agent1"))
    assert story.sent("agent1", Ended) == [told], "it may not have heard it"
    story.says("agent1", Lost())
    assert story.ended is None


def test_a_machine_one_of_whose_workers_takes_part_stays() -> None:
    story = training(1)
    story.agent(2, "agent1", primary=False, host="office")
    story.state = msgspec.structs.replace(story.state, policy=msgspec.structs.replace(story.state.policy, maximum=3))
    story.arrive("w1", host="office")
    story.hold()
    story.says("w2", Hello(info=info("w2", "office"), fingerprint={"torch": "2"}))
    story.says("w2", Failed(error="E", traceback="T"))
    assert story.sent("agent1", Ended) == []
    story.says("agent1", WorkerExit(worker_id="w1", exit_code=1))
    assert story.sent("agent1", Ended) == []
    assert story.state.agents["agent1"].used_restarts == 2


def test_a_machine_uses_up_its_own_restarts_only() -> None:
    story = training(1, max_restarts=1)
    story.agent(1, "agent1", primary=False, host="office")
    story.state = msgspec.structs.replace(story.state, policy=msgspec.structs.replace(story.state.policy, maximum=3))
    said = []
    for number in (1, 2):
        story.arrive(f"w{number}", host="office")
        story.hold()
        story.says("agent1", WorkerExit(worker_id=f"w{number}", exit_code=-9))
        said.append(story.reason)
        story.hold()
    assert "worker w2 replaces it" in said[0]
    assert "on office all 1 restarts are used" in said[1]
    story.says("", Scale(num_workers=2))
    story.arrive("w3")
    story.hold()
    story.exits("w3")
    assert [start.worker_ids for start in story.sent(AGENT, Start)] == [["w4"]]


def test_differences_are_said_in_words() -> None:
    assert differences({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == [
        "b is 'unknown' and not '2'",
        "c is '3' and not 'unknown'",
    ]


# -- the table itself --------------------------------------------------------------------------------

SAID: Sequence[Message] = (
    Ready(phase=0),
    Holding(generation=1),
    Suspect(generation=1, reason="x"),
    step_done(0),
    failure(),
    Leaving(phase=0, step=5),
    Finished(),
    Left(),
    Beat(generation=1, phase=0, step=0, microbatch=0, progress=1, waiting=False),
    TalkCall(number=0, kind="run.barrier"),
    TalkDone(number=0),
)


@pytest.mark.parametrize("state", [s for s in WorkerState if s in ALIVE], ids=lambda s: s.value)
@pytest.mark.parametrize("message", SAID, ids=lambda m: type(m).__name__)
def test_the_table_says_who_may_say_what(state: WorkerState, message: Message) -> None:
    """What the table does not allow raises and changes nothing; what it allows leads where it says."""
    story = training(3)
    story.state = msgspec.structs.replace(
        story.state, workers={**story.state.workers, "w1": msgspec.structs.replace(story.worker("w1"), state=state)}
    )
    before = story.state
    if type(message) not in TRANSITIONS[state]:
        with pytest.raises(ProtocolError, match=f"is {state.value} and may not send {type(message).__name__}"):
            story.says("w1", message)
        assert story.state is before
        return
    story.says("w1", message)
    if not isinstance(message, Failed) and TRANSITIONS[state][type(message)] is not WorkerState.READY:
        assert story.worker("w1").state is (TRANSITIONS[state][type(message)] or state)


@pytest.mark.parametrize("state", [WorkerState.FINISHED, WorkerState.LEFT, WorkerState.LOST], ids=lambda s: s.value)
@pytest.mark.parametrize("message", SAID, ids=lambda m: type(m).__name__)
def test_what_the_gone_had_still_to_say_is_ignored(state: WorkerState, message: Message) -> None:
    story = training(3)
    gone = msgspec.structs.replace(story.worker("w1"), state=state)
    story.state = msgspec.structs.replace(story.state, workers={**story.state.workers, "w1": gone})
    story.says("w1", message)
    assert story.worker("w1") == gone


def test_a_generation_that_was_never_announced_cannot_be_held() -> None:
    story = training(2)
    with pytest.raises(ProtocolError, match="holds generation 7, the newest is 1"):
        story.says("w0", Holding(generation=7))


def test_somebody_without_a_hello_is_not_heard() -> None:
    with pytest.raises(ProtocolError, match="before a hello"):
        Story(1).says("w5", Ready(phase=0))


@pytest.mark.parametrize(
    "hello",
    [
        Hello(info=info("w0"), fingerprint={}, protocol=99),
        AgentHello(host="office", pid=7, num_workers=1, protocol=99),
    ],
    ids=lambda message: type(message).__name__,
)
def test_another_version_is_refused(hello: Message) -> None:
    story = Story(1)
    story.agent(1)
    before = story.state
    with pytest.raises(ProtocolError, match=f"speaks protocol 99 and the head {PROTOCOL}; install the same version"):
        story.says("agent1" if isinstance(hello, AgentHello) else "w0", hello)
    assert story.state is before


def test_an_agent_cannot_speak_for_a_worker() -> None:
    story = training(1)
    with pytest.raises(ProtocolError, match="an agent may not send Finished"):
        story.says(AGENT, Finished())


@pytest.mark.parametrize(
    "values",
    [
        {"start": 0, "maximum": 1},
        {"start": 3, "maximum": 2},
        {"start": 2, "minimum": 3, "maximum": 4},
        {"start": 2, "minimum": 2, "maximum": 4, "wait_for": 1},
        {"start": 2, "maximum": 4, "wait_for": 5, "grows": False},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Policy(**values)


# -- anything in any order ---------------------------------------------------------------------------


class World:
    """Simulated members that behave: they hear notices, move together, and may die at any point.

    What the members do is what the library's do: a planned generation is taken at a boundary by all of the old
    members that live, an immediate one by each on its own.
    """

    def __init__(self, rng: random.Random, start: int, **policy: int | float | bool) -> None:
        self.rng = rng
        self.story = Story(start, **policy)
        self.heard: dict[str, Notice] = {}
        self.at: dict[str, int] = {}  # the generation that a member is in
        self.up: set[str] = set()
        self.ordered: list[str] = []
        self.perform(lambda: self.story.agent(start))

    def perform(self, act: Callable[[], object]) -> None:
        before = self.story.state
        act()
        for action in self.story.actions:
            if isinstance(action, Send) and isinstance(action.message, Notice):
                self.heard[action.to] = action.message
            elif isinstance(action, Send) and isinstance(action.message, Start):
                self.ordered += action.message.worker_ids
            elif isinstance(action, Send) and isinstance(action.message, Ended) and action.to in self.up:
                self.up.discard(action.to)
            elif isinstance(action, Send) and isinstance(action.message, Evict):
                self.up.discard(action.message.worker_id)
                self.ordered = [i for i in self.ordered if i != action.message.worker_id]
        self.check(before)

    def check(self, before: State) -> None:
        """What must hold after every event."""
        state = self.story.state
        announced = {
            a.message.generation for a in self.story.actions if isinstance(a, Send) and isinstance(a.message, Notice)
        }
        assert len(announced) <= 1, "one generation for one event"
        assert state.generation >= before.generation
        members = [state.workers[i] for i in state.members]
        if state.notice is not None and state.notice is not before.notice:
            assert len({m.worker_id for m in members}) == len(members)
            assert all(m.state in (WorkerState.ADMITTED, WorkerState.HOLDING) for m in members)
            hosts = [m.info.host for m in members if m.info]
            assert len(set(hosts)) == sum(a != b for a, b in zip(["", *hosts], hosts, strict=False)), "hosts together"
            if state.notice.immediate and state.committed >= 0:
                assert all(m.state is WorkerState.HOLDING for m in members)
            if not state.notice.immediate and before.notice is not None:
                for old in before.members:
                    worker = state.workers[old]
                    assert worker.state not in ALIVE or worker.generation == before.generation, "taken before planned"
            assert state.notice.paused == (0 < len(members) < state.policy.minimum)
            assert state.notice.reason
            assert sum(not m.draining for m in members) <= state.policy.maximum
            survivors = {w.worker_id for w in state.workers.values() if w.state is WorkerState.HOLDING}
            told = set(self.story.notices())
            assert set(state.members) <= told
            assert told & survivors >= set(before.members) & survivors, "who is left out hears of it as well"
        numbers = [w.number for w in state.workers.values()]
        assert len(set(numbers)) == len(numbers)
        assert all(agent.used_restarts <= state.settings.max_restarts for agent in state.agents.values())
        check_deadline(state, self.story.now)

    def says(self, source: str, message: Message | Tick) -> None:
        self.perform(lambda: self.story.says(source, message))

    # -- what may happen

    def start(self) -> None:
        if self.ordered:
            worker_id = self.ordered.pop(0)
            self.up.add(worker_id)
            host = f"host{int(worker_id[1:]) % 3}"
            self.says(worker_id, Hello(info=info(worker_id, host), fingerprint={}))
            if worker_id in self.up:
                self.says(worker_id, Ready(phase=0))

    def kill(self) -> None:
        if self.up:
            worker_id = self.rng.choice(sorted(self.up))
            self.up.discard(worker_id)
            self.says(AGENT, WorkerExit(worker_id=worker_id, exit_code=-9))

    def drain(self) -> None:
        if len(self.story.state.members) > 1:
            self.says(AGENT, Drain(worker_ids=[self.rng.choice(self.story.state.members)]))

    def scale(self) -> None:
        self.says("", Scale(num_workers=self.rng.randint(1, 64)))

    def machine(self) -> None:
        """Another machine joins."""
        count = self.rng.randint(1, 3)
        agent_id = f"agent{len(self.story.state.agents)}"
        self.perform(lambda: self.story.agent(count, agent_id, primary=False, host=f"host{self.rng.randint(0, 9)}"))

    def offer(self) -> None:
        """A machine that has joined is used by somebody, or by nobody any more."""
        guests = [i for i, agent in self.story.state.agents.items() if not agent.primary]
        if guests:
            self.says(self.rng.choice(guests), Offer(num_workers=self.rng.choice((0, 0, 1, 3)), reason="somebody"))

    def finish(self) -> None:
        """A member has made its last step."""
        state = self.story.state
        if members := [m for m in state.members if m in self.up and state.workers[m].generation == state.generation]:
            worker_id = self.rng.choice(members)
            self.up.discard(worker_id)
            self.says(worker_id, Finished())

    def boundary(self) -> None:
        """Everybody moves to the newest generation that it is asked to, in a random order."""
        newest = self.story.state.notice
        if newest is None:
            return
        movers = [i for i in self.up if i in self.heard and self.at.get(i, 0) < self.heard[i].generation]
        self.rng.shuffle(movers)
        for worker_id in movers:
            notice = self.heard[worker_id]
            if worker_id not in self.up or notice is not self.story.state.notice:
                continue  # overtaken meanwhile
            self.at[worker_id] = notice.generation
            if worker_id in {m.worker_id for m in notice.members}:
                self.says(worker_id, Holding(generation=notice.generation))
            elif self.story.worker(worker_id).state is WorkerState.HOLDING:
                self.up.discard(worker_id)
                self.says(worker_id, Left())
                self.says(AGENT, WorkerExit(worker_id=worker_id, exit_code=0))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), start=st.integers(1, 64), minimum=st.integers(1, 4))
def test_64_members_join_leave_and_die_in_any_order(seed: int, start: int, minimum: int) -> None:
    """Whatever happens, `World.check` holds; in a calm that follows all who are there take part; and it ends."""
    rng = random.Random(seed)
    world = World(rng, start, minimum=min(minimum, start), maximum=64, max_restarts=10_000)
    moves = [world.start] * 6 + [world.boundary] * 4 + [world.kill] * 2 + [world.drain, world.scale]
    moves += [world.machine, world.offer]
    for _ in range(120):
        rng.choice(moves)()
        if world.story.ended is not None:
            break
    else:
        while world.ordered and world.story.ended is None:
            world.start()
        for _ in range(6):
            world.boundary()
        state = world.story.state
        if state.ended is None:
            there = [w for w in state.workers.values() if w.state in ALIVE and not w.draining]
            if state.label in ("paused", "waiting"):  # the second where it has to begin again
                assert len(there) < state.policy.minimum, "nothing keeps it from going on"
            else:
                assert len(state.members) == min(len(there), state.policy.maximum)
            assert all(state.workers[m].generation == state.generation for m in state.members), "all have taken it"
            if seed % 4 == 0:
                world.says("", Stop(reason="enough"))
            moves = [world.finish] * (4 if seed % 4 else 0) + [world.machine, world.start, world.kill]
            for _ in range(1000):
                rng.choice(moves)()
                world.boundary()  # an immediate generation, if somebody was lost
            assert world.story.ended is not None or world.story.state.label in ("paused", "waiting")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), start=st.integers(1, 4), most=st.integers(4, 16), efficiency=st.sampled_from((0.3, 0.9))
)
def test_a_run_that_decides_its_size_in_any_order(seed: int, start: int, most: int, efficiency: float) -> None:
    """Machines come, are used, and are lost; the number that the run wants stays within what was asked for."""
    rng = random.Random(seed)
    policy = {"minimum": start, "maximum": start, "most": most, "efficiency": efficiency, "elastic": seed % 2 == 0}
    world = World(rng, start, grows=False, max_restarts=10_000, **policy)

    def machine() -> None:
        agent_id = f"agent{world.story.state.num_agents}"
        hello = AgentHello(
            host=agent_id, pid=1, num_workers=rng.randint(1, 3), launched=agent_id if rng.random() < 0.5 else ""
        )
        world.perform(lambda: world.story.says(agent_id, hello))

    def steps_of_all() -> None:
        members = [m for m in world.story.state.members if m in world.up]
        for _ in range(rng.randint(5, 40)):
            if not members or world.story.worker(members[0]).state is not WorkerState.HOLDING:
                return
            seconds = (1 + rng.random() / 5) / len(world.story.state.members)
            world.says(members[0], StepDone(step=world.story.state.committed + 1, seconds=seconds, samples=100))

    moves = [world.start] * 6 + [world.boundary] * 4 + [steps_of_all] * 4
    moves += [world.kill, world.drain, machine, machine, world.offer]
    for _ in range(200):
        rng.choice(moves)()
        state = world.story.state
        if state.ended is not None:
            break
        assert start <= state.policy.maximum <= most
        assert state.wanted <= state.policy.maximum


def test_a_number_that_the_machines_cannot_reach_is_waited_for() -> None:
    """Too few are there: what they add is measured, and the number that is wanted does not fall for it."""
    story = Story(4, minimum=2, maximum=4, most=8, grows=False, efficiency=0.5)
    story.agent(8)
    story.arrive("w0", "w1")
    story.says(AGENT, WorkerExit(worker_id="w2", exit_code=-9))
    story.state = msgspec.structs.replace(story.state, settings=RunSettings(max_restarts=0))
    for worker in [w for w in story.state.workers.values() if w.state is WorkerState.ORDERED]:
        story.says(AGENT, WorkerExit(worker_id=worker.worker_id, exit_code=-9))
    story.hold()
    assert len(story.state.members) == 2
    steps(story, 2 * MEASURED, rate=20)
    assert story.state.policy.maximum == 4


def test_64_members_form_a_generation_quickly() -> None:
    """The decision itself is no cost: a kill in a run of 64 is answered by exactly one generation of 63."""
    story = training(64)
    story.exits("w40")
    assert len(story.notices()) == 63
    assert len(story.state.members) == 63
