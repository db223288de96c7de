"""Following a head: what is sent when, which version of its state counts, and who starts the next head."""

from __future__ import annotations

import msgspec
import pytest

from tests.pure.test_membership import AGENT, Story, info, training
from unisono.core.following import (
    GONE_S,
    HEIR_ANSWERS_S,
    MAX_HEIRS,
    TURN_S,
    Absence,
    Followed,
    StaleHead,
    Undelivered,
    is_majority,
    learn_term,
)
from unisono.core.messages import AgentHello, Foreign, HeadSnapshot, Hello, Kept, Lost, Proposal, Stop, Verdict
from unisono.core.settings import Partition
from unisono.core.sides import Allegiance, HelloAnswer, Rank, Standpoint, admission, merged, verdict
from unisono.membership import Lags, TookOver, heirs, holders, is_first_elsewhere, keepers, seat_of
from unisono.membership.roster import WorkerState, resumed


def version(term: int, number: int, successor: str = AGENT) -> HeadSnapshot:
    return HeadSnapshot(term=term, number=number, state=f"{term}.{number}".encode(), successor=successor)


def with_guests(num_guests: int) -> Story:
    """A run with the agent that has started it and as many others."""
    story = training(1, maximum=8)
    for number in range(num_guests):
        story.agent(1, f"agent{number + 1}", primary=False, host=f"host{number + 1}")
    return story


# -- decisions wait for the heirs --------------------------------------------------------------------


def test_a_decision_is_sent_when_all_heirs_hold_it() -> None:
    decisions = Undelivered[str]().add(1, ["a", "b"], now=0.0)
    for heir in ("agent0", "agent1"):
        sent, decisions = decisions.release(["agent0", "agent1"], now=0.1)
        assert sent == []
        decisions = decisions.hold(heir, 1)
    sent, decisions = decisions.release(["agent0", "agent1"], now=0.2)
    assert sent == ["a", "b"]
    assert decisions.release(["agent0", "agent1"], now=0.3)[0] == [], "once"


def test_decisions_are_sent_in_their_order() -> None:
    """Who holds a version holds those before it; a later decision does not overtake an earlier one."""
    decisions = Undelivered[str]().add(1, ["a"], 0.0).add(2, ["b"], 0.0).add(4, ["c"], 0.0)
    sent, decisions = decisions.hold("agent0", 3).release(["agent0"], 0.1)
    assert sent == ["a", "b"]
    assert decisions.hold("agent0", 1).release(["agent0"], 0.2)[0] == [], "an old answer takes nothing back"
    assert decisions.hold("agent0", 4).release(["agent0"], 0.2)[0] == ["c"]


def test_without_heirs_nothing_waits() -> None:
    assert Undelivered[str]().add(1, ["a"], 0.0).release([], 0.0)[0] == ["a"]


def test_an_heir_that_does_not_answer_in_time_is_named() -> None:
    decisions = Undelivered[str]().hold("agent0", 1).add(1, ["a"], now=5.0)
    pair = ["agent0", "agent1"]
    assert decisions.silent(pair, 5.0 + HEIR_ANSWERS_S / 2) == []
    assert decisions.silent(pair, 5.0 + HEIR_ANSWERS_S) == ["agent1"]
    assert decisions.release(["agent0"], 6.0)[0] == ["a"], "without it, nothing is left to wait for"


def test_the_time_of_an_heir_counts_from_the_oldest_decision_that_waits() -> None:
    decisions = Undelivered[str]().add(1, ["a"], now=0.0).add(2, ["b"], now=0.9)
    _, decisions = decisions.hold("agent0", 1).release(["agent0"], now=0.9)
    assert decisions.silent(["agent0"], 0.9 + HEIR_ANSWERS_S / 2) == []
    assert decisions.silent(["agent0"], 0.9 + HEIR_ANSWERS_S) == ["agent0"]


# -- who is an heir ----------------------------------------------------------------------------------


def test_the_first_agents_that_joined_are_the_heirs() -> None:
    assert heirs(with_guests(1).state) == ("agent0", "agent1")
    assert heirs(with_guests(5).state) == ("agent0", "agent1", "agent2")
    assert MAX_HEIRS == 3


def test_an_heir_that_is_silent_is_left_out_until_it_answers() -> None:
    story = with_guests(3)
    story.says("agent1", Lags())
    assert heirs(story.state) == ("agent0", "agent2", "agent3")
    assert set(keepers(story.state)) == {"agent0", "agent1", "agent2", "agent3"}, "it is still sent the state"
    story.says("agent1", Kept(term=1, number=9))
    assert heirs(story.state) == ("agent0", "agent1", "agent2")


def test_an_heir_that_comes_back_is_one_again() -> None:
    story = with_guests(1)
    story.says(AGENT, Lags())
    assert heirs(story.state) == ("agent1",)
    story.says(AGENT, AgentHello(host="lab", pid=1, num_workers=1, primary=True, agent_id=AGENT))
    assert heirs(story.state) == ("agent0", "agent1")


@pytest.mark.parametrize("has_ended", [False, True])
def test_an_heir_whose_connection_closes_is_left_out_at_once(has_ended: bool) -> None:
    """Also at the end of the run: the others are still to hear of it."""
    story = with_guests(2)
    if has_ended:
        story.says("w0", Lost())
        story.exits("w0")
        story.says(AGENT, Stop(reason="enough"))
        assert story.ended is not None
    story.says("agent1", Lost(reason="its connection closed"))
    assert heirs(story.state) == ("agent0", "agent2")


def test_the_agent_whose_child_the_head_is_starts_the_next() -> None:
    assert seat_of(with_guests(2).state) == AGENT
    assert seat_of(Story(1).state) == ""


# -- terms and versions ------------------------------------------------------------------------------


def test_an_agent_does_not_listen_to_a_head_of_a_lower_term() -> None:
    followed = Followed().learn(2)
    with pytest.raises(StaleHead, match="this head has term 1, and another one has taken over with term 2"):
        followed.learn(1)
    with pytest.raises(StaleHead):
        followed.keep(version(1, 99))
    assert learn_term(2, 2) == 2
    assert followed.learn(3).term == 3


def test_an_older_version_never_replaces_a_newer_one() -> None:
    followed, answer = Followed().keep(version(1, 5))
    assert answer == Kept(term=1, number=5)
    followed, answer = followed.keep(version(1, 4))
    assert followed.snapshot == version(1, 5)
    assert answer == Kept(term=1, number=4)
    assert followed.keep(version(1, 6))[0].snapshot == version(1, 6)
    assert followed.keep(version(2, 1))[0].snapshot == version(2, 1), "of a later term"


def test_only_the_successor_starts_the_next_head() -> None:
    assert Followed().is_successor("agent0"), "of a head that has never sent its state"
    followed, _ = Followed().keep(version(1, 1, successor="agent0"))
    assert followed.is_successor("agent0")
    assert not followed.is_successor("agent1")


def test_a_head_that_follows_has_its_term_in_its_state() -> None:
    state = training(2).state
    assert state.term == 1
    assert resumed(state, 2, now=1.0).term == 2


# -- another machine starts the next head ------------------------------------------------------------


def starts(
    agent_id: str,
    absence: Absence,
    now: float,
    partition: Partition = "go-on",
    *,
    majority: bool = False,
    has_workers: bool = True,
) -> bool:
    """Whether this agent starts the next head now; it knows the head's state, as three machines do."""
    newest = HeadSnapshot(
        term=1,
        number=1,
        state=b"",
        successor="agent0",
        heirs=["agent0", "agent1", "agent2"],
        holders=["agent0", "agent1"],
    )
    followed, _ = Followed().keep(newest)
    return followed.may_start(
        agent_id, absence, partition, away_s=20.0, has_majority=majority, has_workers=has_workers, now=now
    )


def test_where_nobody_listens_any_more_the_next_machine_starts_a_head_soon() -> None:
    """The agent keeps the port as long as it lives: so it is gone."""
    gone = Absence(since=0.0).tried(True, now=1.0)
    assert not starts("agent1", gone, 1.0 + GONE_S / 2)
    assert starts("agent1", gone, 1.0 + GONE_S)
    assert not starts("agent2", gone, 1.0 + GONE_S), "the second waits for the first"
    assert starts("agent2", gone, 1.0 + GONE_S + TURN_S)
    assert not starts("agent3", gone, 100.0), "it does not hold the state"


def test_a_head_that_does_not_answer_is_waited_for() -> None:
    away = Absence(since=0.0).tried(True, now=1.0).tried(False, now=2.0)
    assert not starts("agent1", away, 19.0)
    assert starts("agent1", away, 20.0)
    assert starts("agent2", away, 20.0 + TURN_S)


def test_the_policy_says_who_goes_on_without_knowing_what_became_of_the_head() -> None:
    away, gone = Absence(since=0.0), Absence(since=0.0, refused_since=0.0)
    assert not starts("agent1", away, 100.0, "wait")
    assert starts("agent1", gone, 100.0, "wait")
    assert not starts("agent1", away, 100.0, "majority")
    assert starts("agent1", away, 100.0, "majority", majority=True)


def test_a_machine_does_not_start_a_head_for_a_state_that_is_lost_or_elsewhere() -> None:
    alone = HeadSnapshot(
        term=1, number=1, state=b"", successor="agent0", heirs=["agent0", "agent1"], holders=["agent0"]
    )
    followed, _ = Followed().keep(alone)
    gone = Absence(since=0.0, refused_since=0.0)
    assert not followed.may_start("agent1", gone, "go-on", away_s=1.0, has_majority=True, has_workers=True, now=100.0)
    away = Absence(since=0.0)
    assert not starts("agent1", away, 100.0, has_workers=False), "its workers have ended since then"
    assert starts("agent2", away, 100.0, has_workers=False), (
        "it never had the state, and may have a head for those that do"
    )


def test_the_first_worker_elsewhere_that_has_the_state_is_news_for_the_heirs() -> None:
    """Until they hear of it, none of them starts a head where the machine of this one is lost."""
    story = training(1, maximum=8)
    own = story.state.members
    left = story.agent(2, "agent1", primary=False, host="left")
    right = story.agent(1, "agent2", primary=False, host="right")

    def is_news(worker_id: str) -> bool:
        before = story.state
        story.hold(worker_id)
        return is_first_elsewhere(before, story.state, worker_id)

    before = story.state
    story.arrive(left[0], host="left")
    assert not is_first_elsewhere(before, story.state, left[0]), "it is being admitted and has no state yet"
    assert not is_first_elsewhere(before, story.state, AGENT), "an event of somebody who is no worker"
    assert [is_news(worker_id) for worker_id in (*own, left[0], left[0])] == [False, True, False]
    story.arrive(left[1], host="left")
    story.arrive(*right, host="right")
    for _ in range(2):
        assert not any(is_news(worker_id) for worker_id in story.state.members), "it is held elsewhere already"
    assert holders(story.state) == [AGENT, "agent1", "agent2"]
    for worker_id in (*left, *right):
        story.exits(worker_id)
    story.hold()
    story.arrive(*(replaced := story.agent(1, "agent3", primary=False, host="attic")), host="attic")
    story.hold(*own)
    assert is_news(*replaced), "all that were elsewhere are lost"


@pytest.mark.parametrize("order", [("w0", "w1"), ("w1", "w0")], ids="-".join)
def test_where_all_begin_at_once_the_worker_beside_the_head_is_no_such_news(order: tuple[str, str]) -> None:
    story = Story(2)
    own, others = story.agent(1), story.agent(1, "agent1", primary=False, host="left")
    story.arrive(*own)
    story.arrive(*others, host="left")
    for worker_id in order:
        before = story.state
        story.hold(worker_id)
        assert is_first_elsewhere(before, story.state, worker_id) == (worker_id == "w1")


def test_an_agent_whose_head_has_given_way_starts_one_if_nobody_answers() -> None:
    """After the other heirs: they had no head to give way."""
    away = Absence(since=0.0)
    assert not starts("agent0", away, 20.0 + TURN_S)
    assert starts("agent0", away, 20.0 + 2 * TURN_S)
    assert not starts("agent0", away, 100.0, has_workers=False)


def test_of_two_halves_the_one_with_the_first_machine_is_the_majority() -> None:
    four = ["agent0", "agent1", "agent2", "agent10"]
    assert is_majority(four[1:], four)
    assert is_majority(["agent0", "agent10"], four)
    assert not is_majority(["agent1", "agent10"], four)
    assert not is_majority(["agent0"], four)


def story_of_two() -> Story:
    """A worker on each of two machines, both in the generation that trains; the first has the head."""
    story = training(1, maximum=8)
    story.state = msgspec.structs.replace(story.state, head="h1", heirs=heirs(story.state))
    story.arrive(*story.agent(1, "agent1", primary=False, host="far"), host="far")
    story.hold()
    return story


def test_who_takes_over_goes_on_without_the_machine_of_the_head_before() -> None:
    story = story_of_two()
    story.state = resumed(story.state, 2, 0.0, seat="agent1", head="h2")
    story.says("", TookOver(before=AGENT))
    assert story.worker("w0").state is WorkerState.LOST
    assert story.notices()["w1"].members == [info("w1", "far")]
    assert story.reason == (
        "lab is out of reach, with the head: the run continues without w0; generation 3 with 1 worker"
    )
    assert (seat_of(story.state), heirs(story.state)) == ("agent1", ("agent1",))


def test_who_takes_over_from_a_machine_without_workers_goes_on() -> None:
    story = Story(1)
    story.agent(0)
    story.arrive(*story.agent(1, "agent1", primary=False, host="far"), host="far")
    story.hold()
    story.state = resumed(story.state, 2, 0.0, seat="agent1", head="h2")
    story.says("", TookOver(before=AGENT))
    assert story.ended is None


def test_a_head_that_goes_on_without_an_heir_begins_a_branch() -> None:
    story = story_of_two()
    before = story.state.branch_name
    story.says("agent1", Lost(reason="cut"))
    assert story.state.branch_name != before
    assert story.state.is_own(before), "who has followed it until then may come back"
    assert not resumed(story.state, 2, 0.0, seat="agent1", head="h2").is_own("h1.99")


def test_a_worker_that_has_followed_another_branch_is_not_taken() -> None:
    story = story_of_two()
    story.says("w1", Hello(info=info("w1", "far"), fingerprint={}, generation=9, branch="h2.0"))
    assert story.worker("w1").state is WorkerState.LOST
    assert story.state.generation == 3, "it is that of the others, not of the other side"


def test_times_of_another_machines_clock_are_translated() -> None:
    story = story_of_two()
    state = resumed(story.state, 2, now=5.0, seat="agent1", head="h2", since=1000.0)
    assert {worker.heard_at for worker in state.workers.values()} == {5.0}
    assert state.agents[AGENT].away_at == 5.0


def test_a_majority_that_is_lost_pauses_the_run() -> None:
    story = training(1, maximum=8, when_cut="majority")
    for number in (1, 2):
        name = f"agent{number}"
        story.arrive(*story.agent(1, name, primary=False, host=name), host=name)
        story.hold()
    story.says("agent1", Lost(reason="cut"))
    story.says("agent2", Lost(reason="cut"))
    assert story.state.notice is not None
    assert story.state.notice.paused
    story.hold()
    story.says("agent1", AgentHello(host="agent1", pid=1, num_workers=1, agent_id="agent1"))
    assert not story.state.notice.paused


# -- two heads of one run ----------------------------------------------------------------------------


def stand(step: int, term: int = 1, agent_id: str = "agent0") -> Standpoint:
    return Standpoint(Rank.of(step, term, agent_id))


def proposal(step: int, term: int = 1, agent_id: str = "agent1") -> Proposal:
    return Proposal(run_id="x", agent_id=agent_id, term=term, step=step, url="ws://there:1")


def test_the_side_that_is_behind_gives_way() -> None:
    assert verdict(stand(7), proposal(6)) == (stand(7), Verdict(gives_way="you", step=7))
    own, answer = verdict(stand(7), proposal(8))
    assert (own.gives_way_to, answer.gives_way) == ("ws://there:1", "me")
    assert verdict(own, proposal(3))[1].gives_way == "", "it moves already"


@pytest.mark.parametrize(
    ("term", "agent_id", "who"), [(2, "agent1", "me"), (1, "agent2", "you"), (1, "agent10", "you")]
)
def test_of_two_that_are_as_far_one_gives_way(term: int, agent_id: str, who: str) -> None:
    assert verdict(stand(7, agent_id="agent1"), proposal(7, term, agent_id))[1].gives_way == who


def test_a_head_that_waits_for_an_answer_gives_way_to_nobody_else() -> None:
    asking = msgspec.structs.replace(stand(7), is_asking=True)
    assert verdict(asking, proposal(8)) == (asking, Verdict(gives_way=""))


def test_a_head_gives_way_only_to_one_that_has_said_it_stays() -> None:
    asking = msgspec.structs.replace(stand(7), is_asking=True)
    for answer in (None, Verdict(gives_way="me"), Verdict(gives_way="")):
        assert merged(asking, "ws://there:1", answer) == stand(7), answer
    assert merged(asking, "ws://there:1", Verdict(gives_way="you", step=9)).gives_way_to == "ws://there:1"


def test_a_head_that_does_not_know_yet_whether_its_side_holds_the_state_decides_nothing() -> None:
    waiting = msgspec.structs.replace(stand(-1), is_waiting=True)
    assert not waiting.may_ask
    assert verdict(waiting, proposal(8)) == (waiting, Verdict(gives_way=""))


@pytest.mark.parametrize("gives_way", [False, True], ids=["stays", "gives way"])
@pytest.mark.parametrize("term", [1, 2, 3])
@pytest.mark.parametrize("is_own", [False, True], ids=["foreign", "own"])
@pytest.mark.parametrize("fresh", [False, True], ids=["with workers", "fresh"])
def test_no_hello_makes_a_head_give_way(gives_way: bool, term: int, is_own: bool, fresh: bool) -> None:
    own = msgspec.structs.replace(stand(7, term=2), gives_way_to="ws://there:1" if gives_way else "")
    agent = AgentHello(host="far", pid=1, num_workers=1, term=term, fresh=fresh)
    may_stay = is_own and term <= 2
    expected = HelloAnswer.WELCOME if fresh or may_stay else HelloAnswer.FOREIGN
    assert admission(own, agent, is_own=is_own) is (HelloAnswer.MOVED if gives_way else expected)
    worker = Hello(info=info("w1", "far"), fingerprint={}, term=term)
    turned_away = gives_way or term > 2
    assert admission(own, worker, is_own=is_own) is (HelloAnswer.HANG_UP if turned_away else HelloAnswer.WELCOME)


def test_a_machine_joins_another_side_unless_it_could_go_on_by_itself_and_has_come_further() -> None:
    newest = HeadSnapshot(
        term=1, number=1, state=b"", successor="agent0", heirs=["agent0", "agent1"], holders=["agent0", "agent1"]
    )
    side = Allegiance(followed=Followed().keep(newest)[0], branch="h1.0")

    def joins(step: int, agent_id: str = "agent1", *, has_workers: bool = True) -> str:
        return side.offered("ws://a:1", Foreign(step=step), agent_id, has_workers=has_workers, last_step=7).joins

    assert joins(6) == ""
    assert joins(7) == joins(8) == "ws://a:1"
    assert joins(6, has_workers=False) == "ws://a:1", "it has nothing to lose"
    assert joins(6, "agent2") == "ws://a:1", "it cannot have a head of its own"


def test_a_machine_keeps_what_it_knows_until_the_head_that_it_joins_answers() -> None:
    """If that head is lost just then, this machine can still have one."""
    side = Allegiance(branch="h1.0").seated()
    sent = side.sent("ws://a:1")
    assert (sent.followed, sent.branch, sent.has_seat) == (side.followed, "h1.0", False)
    assert sent.sent("").joins == "ws://a:1", "its head has ended then"
    assert sent.joined() == Allegiance(joins="ws://a:1", is_fresh=True)
    assert sent.seated().joins == "", "nobody has answered"
