"""Following a head: what is sent when, which version of its state counts, and who starts the next head."""

from __future__ import annotations

import pytest

from tests.pure.test_membership import AGENT, Story, training
from unisono.decisions.following import HEIR_ANSWERS_S, MAX_HEIRS, Followed, StaleHead, Undelivered, learn_term
from unisono.decisions.membership import Lags, heirs, keepers, successor
from unisono.decisions.membership.roster import resumed
from unisono.messages import AgentHello, Kept, Lost, Snapshot, Stop


def version(term: int, number: int, successor: str = AGENT) -> Snapshot:
    return Snapshot(term=term, number=number, state=f"{term}.{number}".encode(), successor=successor)


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
    assert successor(with_guests(2).state) == AGENT
    assert successor(Story(1).state) == ""


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
