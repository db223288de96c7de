"""The rules for plain scripts, without a process: who is started when, and what each process is told."""

from __future__ import annotations

import msgspec
import pytest

from unisono.decisions.membership import Event, Send, State, Tick, next_deadline, step
from unisono.decisions.membership.attempts import Part, spread
from unisono.decisions.membership.plain import END_S, SETTLE_S
from unisono.decisions.membership.roster import resumed
from unisono.decisions.policy import Policy
from unisono.errors import ProtocolError
from unisono.machine.plain import variables
from unisono.messages import (
    AgentHello,
    Drain,
    Ended,
    Evict,
    Hello,
    Lost,
    MachinesGone,
    Meet,
    MeetingPoint,
    MemberInfo,
    Message,
    Offer,
    Scale,
    Start,
    Stop,
    Team,
    WorkerExit,
)

HERE, THERE = "agent0", "agent1"


class Story:
    """A head without connections, of a run that begins with a command on the machine "lab"."""

    def __init__(
        self,
        start: int,
        *,
        minimum: int = 1,
        maximum: int = 0,
        restarts: int = 0,
        grows: bool = True,
        wait_for: int = 0,
    ) -> None:
        policy = Policy(
            start=start,
            minimum=minimum,
            maximum=maximum or start,
            grows=grows,
            max_restarts=restarts,
            wait_for=wait_for,
            plain=True,
        )
        self.state = State(policy=policy)
        self.now = 0.0
        self.sent: list[tuple[str, Message]] = []
        self.reason = ""

    def says(self, source: str, message: Message | Tick) -> None:
        self.state, actions, self.reason, self.happened = step(self.state, Event(source, message), self.now)
        self.sent = [(action.to, action.message) for action in actions if isinstance(action, Send)]

    def joins(self, agent_id: str, num_workers: int, *, primary: bool = False) -> None:
        self.says(agent_id, AgentHello(host=agent_id, pid=1, num_workers=num_workers, primary=primary))

    def meets(self, agent_id: str, attempt: int) -> dict[str, Start]:
        """The agent of rank 0 answers; returns the orders to the machines."""
        assert (agent_id, Meet(attempt=attempt)) in self.sent
        self.says(agent_id, MeetingPoint(attempt=attempt, address=f"address of {agent_id}", port=29500))
        return {to: message for to, message in self.sent if isinstance(message, Start)}

    def exits(self, agent_id: str, name: str, code: int = 0, words: str = "", at: float = 0.0) -> None:
        self.says(agent_id, WorkerExit(worker_id=name, exit_code=code, last_output=words, failed_at=at))

    def evicted(self) -> list[tuple[str, str]]:
        return [(to, message.worker_id) for to, message in self.sent if isinstance(message, Evict)]

    @property
    def ended(self) -> Ended | None:
        return self.state.ended


def two_machines(restarts: int = 0) -> Story:
    """Three processes, two on the machine of the command, are started."""
    story = Story(3, restarts=restarts, grows=False)
    story.joins(HERE, 2, primary=True)
    story.joins(THERE, 2)
    story.meets(HERE, 1)
    story.now = SETTLE_S
    return story


def test_processes_are_started_when_all_machines_are_there_and_know_each_other() -> None:
    story = Story(3, grows=False)
    story.joins(HERE, 2, primary=True)
    assert story.sent == [], "one process is missing"
    story.joins(THERE, 2)
    orders = story.meets(HERE, 1)
    assert {agent: order.worker_ids for agent, order in orders.items()} == {
        HERE: ["rank0", "rank1"],
        THERE: ["rank2"],
    }
    for position, order in enumerate(orders.values()):
        team = Team(
            first_rank=2 * position,
            world_size=3,
            group_rank=position,
            num_groups=2,
            address="address of agent0",
            port=29500,
            restarts=0,
            max_restarts=0,
        )
        assert order.team == team
    assert story.state.label == "training"


def test_each_process_is_told_what_torchrun_would_tell_it() -> None:
    team = Team(first_rank=2, world_size=4, group_rank=1, num_groups=2, address="a", port=5, restarts=1, max_restarts=3)
    told = variables(team, ["rank2", "rank3"], "run")
    assert {told["rank3"][name] for name in ("RANK", "ROLE_RANK")} == {"3"}
    assert {told["rank3"][name] for name in ("LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")} == {"1"}
    assert {told["rank2"][name] for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")} == {"2"}
    assert {told["rank2"][name] for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE")} == {"4"}
    assert (told["rank2"]["MASTER_ADDR"], told["rank2"]["MASTER_PORT"]) == ("a", "5")


def test_rank_0_is_elsewhere_where_the_command_has_no_processes() -> None:
    story = Story(2, grows=False)
    story.joins(HERE, 0, primary=True)
    story.joins(THERE, 2)
    assert list(story.meets(THERE, 1)) == [THERE]


def test_the_run_ends_well_when_all_processes_have() -> None:
    story = two_machines()
    story.exits(HERE, "rank1")
    story.exits(THERE, "rank2")
    assert story.ended is None
    story.exits(HERE, "rank0")
    assert story.ended is not None
    assert (story.ended.ok, story.ended.reason) == (True, "all 3 processes have ended with exit code 0")


def test_a_failure_ends_the_run_with_the_last_lines_of_the_process() -> None:
    story = two_machines()
    story.exits(THERE, "rank2", 3, "ValueError: no data")
    assert story.ended is None
    story.exits(HERE, "rank0", -15)
    story.exits(HERE, "rank1", -15)
    ended = story.ended
    assert ended is not None
    assert not ended.ok
    assert (ended.reason, ended.traceback) == ("rank2 on agent1 ended with exit code 3", "ValueError: no data")
    assert ended.exit_code == 3
    assert [to for to, message in story.sent if isinstance(message, Ended)][-2:] == [HERE, THERE]


def test_after_a_failure_all_are_ended_and_then_all_are_started_again() -> None:
    story = two_machines(restarts=1)
    story.exits(HERE, "rank0", -9)
    assert story.evicted() == [(HERE, "rank1"), (THERE, "rank2")]
    assert [message.patience_s for _, message in story.sent if isinstance(message, Evict)] == [END_S, END_S]
    assert story.reason == "rank0 on agent0 was killed by signal 9 (SIGKILL); all processes are ended"
    story.exits(THERE, "rank2", -15)
    assert story.sent == [], "one still runs"
    story.exits(HERE, "rank1", -15)
    assert story.reason == "rank0 on agent0 was killed by signal 9 (SIGKILL); restart 1 of 1"
    orders = story.meets(HERE, 2)
    assert orders[HERE].worker_ids == ["rank0.2", "rank1.2"]
    assert {order.team.restarts for order in orders.values() if order.team} == {1}
    story.exits(HERE, "rank1.2", 1)
    story.exits(HERE, "rank0.2", -15)
    story.exits(THERE, "rank2.2", -15)
    assert story.ended is not None
    assert story.ended.reason.endswith("the only restart is used (--max-restarts)")


def test_the_process_that_has_failed_first_is_named_whichever_ends_first() -> None:
    story = two_machines()
    story.exits(HERE, "rank0", 1, "connection closed by peer", at=10.2)
    story.exits(THERE, "rank2", 2, "no data", at=10.1)
    story.exits(HERE, "rank1", 1, "connection closed by peer", at=10.3)
    assert story.ended is not None
    assert (story.ended.reason, story.ended.traceback) == ("rank2 on agent1 ended with exit code 2", "no data")


def test_a_lost_connection_is_no_cause_whenever_it_was_noted() -> None:
    story = two_machines()
    story.exits(HERE, "rank0", 1, "RuntimeError: Connection closed by peer [127.0.0.1]:5", at=10.1)
    story.exits(HERE, "rank1", -15, "", at=0.0)
    story.exits(THERE, "rank2", -15, "ValueError: no data", at=10.2)
    assert story.ended is not None
    assert (story.ended.reason, story.ended.exit_code) == ("rank2 on agent1 failed", 1)


def test_a_process_that_fails_at_the_loss_of_a_machine_costs_no_restart() -> None:
    story = two_machines()
    story.says(THERE, Lost())
    story.exits(HERE, "rank0", 1)
    story.exits(HERE, "rank1", -15)
    assert story.ended is None
    assert story.meets(HERE, 2)


def test_a_process_that_ends_late_belongs_to_the_attempt_before() -> None:
    story = two_machines(restarts=3)
    story.exits(HERE, "rank0", 1)
    story.exits(HERE, "rank1", 1)
    story.exits(THERE, "rank2", 1)
    story.meets(HERE, 2)
    story.exits(THERE, "rank2", 1)
    assert story.evicted() == []
    assert story.state.attempt is not None
    assert story.state.attempt.restarts == 1


def test_a_lost_machine_costs_no_restart_and_the_others_go_on() -> None:
    story = two_machines()
    story.says(THERE, Lost(reason="gone"))
    assert story.evicted() == [(HERE, "rank0"), (HERE, "rank1")]
    story.exits(HERE, "rank0", -15)
    story.exits(HERE, "rank1", -15)
    order = story.meets(HERE, 2)[HERE]
    assert order.team is not None
    assert (order.team.world_size, order.team.restarts, order.worker_ids) == (2, 0, ["rank0.2", "rank1.2"])


def test_a_machine_that_is_lost_after_its_processes_have_ended_well_costs_nothing() -> None:
    story = two_machines()
    story.exits(THERE, "rank2")
    story.says(THERE, Lost())
    assert story.evicted() == []
    story.exits(HERE, "rank0")
    story.exits(HERE, "rank1")
    assert story.ended is not None
    assert story.ended.ok


def test_too_few_machines_are_waited_for() -> None:
    story = Story(3, minimum=3, grows=False)
    story.joins(HERE, 2, primary=True)
    story.joins(THERE, 1)
    story.meets(HERE, 1)
    story.says(THERE, Lost())
    story.exits(HERE, "rank0", -15)
    story.exits(HERE, "rank1", -15)
    assert story.reason == "paused: the machines have room for 2 of at least 3 processes"
    assert story.sent == []
    story.joins("agent2", 1)
    assert story.meets(HERE, 2)["agent2"].worker_ids == ["rank2.2"]


def test_a_run_that_waits_for_machines_says_so_once_for_each_number_and_begins_when_they_are_there() -> None:
    story = Story(2, wait_for=4)
    story.joins(HERE, 2, primary=True)
    assert story.reason == "there is room for 2 of 4 processes; they start when there is room for all 4"
    story.says("", Tick())
    assert story.reason == ""
    story.joins(THERE, 1)
    assert (
        story.reason
        == "agent1 joins with 1 worker; there is room for 3 of 4 processes; they start when there is room for all 4"
    )
    story.joins("agent2", 1)
    assert story.meets(HERE, 1).keys() == {HERE, THERE, "agent2"}
    story.says("agent2", Lost())
    story.exits(HERE, "rank0", -15)
    story.exits(HERE, "rank1", -15)
    story.exits(THERE, "rank2", -15)
    assert story.meets(HERE, 2).keys() == {HERE, THERE}, "it has begun: now the least number counts"


def test_who_scales_a_run_that_waits_lets_it_begin_with_what_is_there() -> None:
    story = Story(2, wait_for=4)
    story.joins(HERE, 2, primary=True)
    story.says(HERE, Scale(num_workers=2))
    assert story.meets(HERE, 1)[HERE].worker_ids == ["rank0", "rank1"]


def test_machines_that_come_are_gathered_before_all_start_again() -> None:
    story = Story(2, maximum=8, grows=False)
    story.joins(HERE, 2, primary=True)
    assert story.sent == []
    assert next_deadline(story.state) == SETTLE_S
    story.now = SETTLE_S
    story.says("", Tick())
    story.meets(HERE, 1)
    story.joins(THERE, 2)
    assert story.evicted() == []
    story.now = next_deadline(story.state) or 0.0
    story.says("", Tick())
    assert story.evicted() == [(HERE, "rank0"), (HERE, "rank1")]
    assert "room for 4 processes instead of 2" in story.reason


def test_nobody_is_started_again_for_a_machine_that_comes_when_a_process_is_through() -> None:
    story = Story(2, maximum=4, grows=False)
    story.joins(HERE, 2, primary=True)
    story.now = SETTLE_S
    story.says("", Tick())
    story.meets(HERE, 1)
    story.exits(HERE, "rank0")
    story.joins(THERE, 2)
    assert story.evicted() == []


def test_a_machine_that_leaves_takes_its_processes_with_it() -> None:
    story = two_machines()
    story.says(THERE, Drain())
    assert len(story.evicted()) == 3
    for agent, name in ((HERE, "rank0"), (HERE, "rank1"), (THERE, "rank2")):
        story.exits(agent, name, -15)
    assert list(story.meets(HERE, 2)) == [HERE]


def test_the_number_of_processes_can_be_changed() -> None:
    story = two_machines()
    story.says("", Scale(num_workers=5))
    assert story.reason == "scaled to 5 processes, from 3; all processes are ended"
    for agent, name in ((HERE, "rank0"), (HERE, "rank1"), (THERE, "rank2")):
        story.exits(agent, name, -15)
    orders = story.meets(HERE, 2)
    assert {agent: len(order.worker_ids) for agent, order in orders.items()} == {HERE: 3, THERE: 2}


def test_a_stop_ends_all_processes_and_then_the_run() -> None:
    story = two_machines()
    story.says("", Stop(reason="enough"))
    assert len(story.evicted()) == 3
    for agent, name in ((HERE, "rank0"), (HERE, "rank1"), (THERE, "rank2")):
        story.exits(agent, name, -15)
    assert story.ended is not None
    assert (story.ended.ok, story.ended.reason) == (True, "enough")


def test_a_stop_before_the_start_ends_the_run() -> None:
    story = Story(2)
    story.joins(HERE, 1, primary=True)
    story.says("", Stop(reason="enough"))
    assert story.ended is not None


def test_the_end_of_the_command_ends_the_run() -> None:
    story = two_machines()
    story.says(HERE, Ended(ok=False, reason="interrupted", exit_code=130))
    assert story.ended is not None
    assert story.ended.exit_code == 130


def test_a_machine_that_is_lost_before_the_start_is_not_waited_for() -> None:
    story = Story(2, grows=False)
    story.joins(HERE, 1, primary=True)
    story.joins(THERE, 1)
    story.now = SETTLE_S
    story.says(THERE, Lost())
    assert list(story.meets(HERE, 2)) == [HERE]
    story.says(HERE, MeetingPoint(attempt=1, address="late", port=1))
    assert story.sent == []


def test_a_head_that_follows_repeats_the_orders() -> None:
    story = two_machines()
    story.state = resumed(story.state, 2, story.now)
    story.says(THERE, AgentHello(host=THERE, pid=1, num_workers=2, agent_id=THERE))
    assert [message.worker_ids for to, message in story.sent if isinstance(message, Start) and to == THERE] == [
        ["rank2"]
    ]


def test_a_machine_that_does_not_come_back_to_the_next_head_is_lost() -> None:
    story = two_machines()
    story.state = resumed(story.state, 2, story.now)
    story.now += story.state.policy.away_s
    story.says("", Tick())
    assert THERE not in story.state.agents
    assert story.evicted() == [(HERE, "rank0"), (HERE, "rank1")]


def test_what_runs_on_a_machine_that_was_cut_off_is_ended_when_it_is_back() -> None:
    story = two_machines()
    story.says(THERE, Lost())
    story.exits(HERE, "rank0", -15)
    story.exits(HERE, "rank1", -15)
    story.meets(HERE, 2)
    story.says(THERE, AgentHello(host=THERE, pid=1, num_workers=2, agent_id=THERE))
    assert (THERE, "rank2") in story.evicted()


def test_a_script_that_speaks_to_the_head_is_refused() -> None:
    story = two_machines()
    with pytest.raises(ProtocolError, match="to a run of a plain script"):
        story.says("w0", Hello(info=MemberInfo(worker_id="w0", host="x", pid=1, device="cpu"), fingerprint={}))


def test_a_machine_that_offers_less_ends_its_processes_and_all_start_again() -> None:
    story = two_machines()
    story.says(HERE, Offer(num_workers=1, reason="somebody uses the machine"))
    assert len(story.evicted()) == 3
    for agent, name in ((HERE, "rank0"), (HERE, "rank1"), (THERE, "rank2")):
        story.exits(agent, name, -15)
    assert {agent: len(order.worker_ids) for agent, order in story.meets(HERE, 2).items()} == {HERE: 1, THERE: 2}


def test_machines_of_the_command_that_cannot_come_are_not_waited_for() -> None:
    story = Story(4, grows=False)
    story.state = msgspec.structs.replace(story.state, policy=msgspec.structs.replace(story.state.policy, machines=2))
    story.joins(HERE, 0, primary=True)
    story.joins(THERE, 2)
    story.now = SETTLE_S
    story.says("", Tick())
    assert story.state.attempt is None, "the other machine may come"
    story.says(HERE, MachinesGone(number=1))
    assert list(story.meets(THERE, 1)) == [THERE]


def test_processes_are_spread_in_the_order_of_machines() -> None:
    assert spread({"a": 2, "b": 3, "c": 1}, 4) == (Part(agent="a", num_processes=2), Part(agent="b", num_processes=2))
    assert spread({}, 4) == ()


def test_the_state_can_be_handed_to_the_next_head() -> None:
    from unisono.head.memory import Memory

    story = two_machines()
    found = Memory.decode(Memory(story.state, 0.0, "").encode()).state
    assert msgspec.structs.replace(found, attempt=None, workers={}) == msgspec.structs.replace(
        story.state, attempt=None, workers={}
    )
    assert found.attempt == story.state.attempt
