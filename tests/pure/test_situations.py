"""The membership table in situations: what is given, what happens, and what is so then.

`tests/pure/test_membership.py` has what takes more than that to say, and what holds in any order of events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from tests.pure.test_membership import AGENT, Story, failure, info, step_done, training
from unisono.core.messages import (
    Drain,
    Ended,
    Evict,
    Finished,
    Hello,
    Leaving,
    Left,
    Lost,
    Message,
    Scale,
    Start,
    Stop,
    Suspect,
)
from unisono.membership.roster import WorkerState

ADMITTED, HOLDING, READY, ASIDE = WorkerState.ADMITTED, WorkerState.HOLDING, WorkerState.READY, WorkerState.ASIDE
FINISHED, LEFT, LOST = WorkerState.FINISHED, WorkerState.LEFT, WorkerState.LOST

Given = Callable[[], Story]
Act = Callable[[Story], object]


@dataclass(frozen=True)
class Then:
    """What is so now; what is None is not looked at."""

    members: str | None = None
    """Of the newest generation, in their order: "w0 w2"."""
    generation: int | None = None
    immediate: bool | None = None
    """Whether the newest generation begins at once, and not at a boundary."""
    paused: bool | None = None
    label: str | None = None
    """What the run is said to do: "training", "paused"."""
    states: Mapping[str, WorkerState] = field(default_factory=dict)
    starts: str | None = None
    """Whom the command's machine is to start by the last event."""
    evicts: str | None = None
    """Whose processes machines are to end by the last event."""
    told: str | None = None
    """Who hears of a generation by the last event."""
    says: str = ""
    """Part of what is told of the last event."""
    ended: str | None = None
    """"no"; or "well" or "badly" by the last event, of which the command hears."""
    because: str = ""
    """Part of why the run has ended."""
    culprit: str | None = None
    """Who has ended it."""

    def check(self, story: Story) -> None:
        state, notice, ended = story.state, story.state.notice, story.ended
        found = {
            "members": " ".join(state.members),
            "generation": state.generation,
            "immediate": notice.immediate if notice else None,
            "paused": notice.paused if notice else None,
            "label": state.label,
            "starts": " ".join(i for start in story.sent(AGENT, Start) for i in start.worker_ids),
            "evicts": " ".join(evict.worker_id for agent_id in state.agents for evict in story.sent(agent_id, Evict)),
            "told": " ".join(sorted(story.notices())),
            "culprit": ended.worker_id if ended else None,
            "ended": "no" if ended is None else "well" if ended.ok else "badly",
        }
        wanted = {name: value for name in found if (value := getattr(self, name)) is not None}
        assert {name: found[name] for name in wanted} == wanted
        assert {worker_id: story.worker(worker_id).state for worker_id in self.states} == self.states
        assert self.ended in (None, "no") or story.sent(AGENT, Ended)
        assert self.says in story.reason
        assert self.because in (ended.reason if ended else "")


def of(num_workers: int, **policy: float) -> Given:
    """A run whose first generation all have taken."""
    return lambda: training(num_workers, **policy)


def starting(num_workers: int, **policy: float) -> Given:
    """A run whose workers were ordered, and are not there yet."""

    def made() -> Story:
        story = Story(num_workers, **policy)
        story.agent(num_workers)
        return story

    return made


def arrived(num_workers: int, **policy: float) -> Given:
    """A run whose first generation was announced, and nobody has taken it."""

    def made() -> Story:
        story = Story(num_workers, **policy)
        story.arrive(*story.agent(num_workers))
        return story

    return made


def says(source: str, message: Message) -> Act:
    return lambda story: story.says(source, message)


def arrive(*worker_ids: str) -> Act:
    return lambda story: story.arrive(*worker_ids)


def greets(worker_id: str) -> Act:
    """It connects, and is not ready to train."""
    return says(worker_id, Hello(info=info(worker_id), fingerprint={"torch": "2"}))


def hold(*worker_ids: str) -> Act:
    """These (none: all) members take the newest generation."""
    return lambda story: story.hold(*worker_ids)


def exits(worker_id: str, exit_code: int = -9) -> Act:
    return lambda story: story.exits(worker_id, exit_code)


def beat(worker_id: str, **what: object) -> Act:
    return lambda story: story.beat(worker_id, **what)  # type: ignore[arg-type]


def machine(num_workers: int, agent_id: str = "agent1") -> Act:
    """Another machine joins, and is to start so many workers."""
    return lambda story: story.agent(num_workers, agent_id, primary=False)


def scale(num_workers: int) -> Act:
    return says("", Scale(num_workers=num_workers))


def drain(*worker_ids: str, by: str = AGENT) -> Act:
    """The machine takes these (none: all) of its workers away."""
    return says(by, Drain(worker_ids=list(worker_ids)))


def left(worker_id: str) -> Act:
    return says(worker_id, Left())


def finished(worker_id: str) -> Act:
    return says(worker_id, Finished())


def step(number: int) -> Act:
    return says("w0", step_done(number))


def tick(at: float) -> Act:
    return lambda story: story.tick(at)


STOP = says("", Stop(reason="enough"))
AT_ONCE = {"aside_s": 10.0, "hang_s": 60.0}

SITUATIONS: dict[str, tuple[Given, *tuple[Act | Then, ...]]] = {
    # -- the first generation
    "a kill before anything was trained is replaced":
        (starting(2), exits("w1"), Then(starts="w2"), arrive("w0", "w2"), Then("w0 w2")),
    "a loss while the first generation forms lets the others begin":
        (arrived(3), exits("w0"), Then("w1 w2", immediate=True), hold(), Then(states={"w1": HOLDING})),
    "before the first step is done the others begin again: the one who had the state is lost, and nothing else":
        (arrived(2), hold("w0"), exits("w0"), Then("w1", ended="no")),
    "after the first step the run ends with the only one who is known to have the state":
        (arrived(2), hold("w0"), step(0), exits("w0"), Then(ended="badly")),
    "a run whose only worker is killed before the first step begins again":
        (of(1), exits("w0"), Then("", says="no step was done, so the run starts again"),
         arrive("w1"), Then("w1", immediate=False), hold(), Then(states={"w1": HOLDING})),
    "it does not begin again without anybody":
        (of(1, max_restarts=0), exits("w0"), Then(ended="badly")),
    "those who will not come are not waited for":
        (starting(3, max_restarts=0), exits("w0"), arrive("w1", "w2"), Then("w1 w2")),
    "a run may begin before all of its own workers are there":
        (starting(4, wait_for=2), arrive("w0", "w1"), Then("w0 w1")),
    # -- losses
    "a loss is announced at once to the survivors":
        (of(3), exits("w1"), Then("w0 w2", generation=2, immediate=True, told="w0 w2",
                                  says="worker w1 (pid 1001) was killed by signal 9 (SIGKILL)")),
    "a second loss in the recovery is announced as well":
        (of(3), exits("w1"), exits("w0"), Then("w2", generation=3)),
    "down to the last worker and then the end":
        (of(3, max_restarts=0), exits("w0"), exits("w1"), Then("w2"), exits("w2"),
         Then(ended="badly", because="no worker with the run's state is left")),
    "the end comes although newcomers are there":
        (of(1), step(0), exits("w0"), Then(ended="badly")),
    "a newcomer is no survivor: its state is under way, so it goes back and is planned again":
        (of(2, maximum=3), scale(3), arrive("w2"), Then("w0 w1 w2"), exits("w0"),
         Then("w1", states={"w2": READY}, told="w1 w2"), hold("w1"), Then("w1 w2", immediate=False)),
    "a newcomer that has taken the generation is a survivor":
        (of(2, maximum=3), scale(3), arrive("w2"), hold("w2"), exits("w0"), Then("w1 w2")),
    "the loss of a newcomer breaks its generation":
        (of(2, maximum=3), scale(3), arrive("w2"), exits("w2"), Then("w0 w1", immediate=True)),
    "the loss of somebody who is no member moves nobody":
        (of(2, maximum=3), scale(3), greets("w2"), exits("w2"), Then(generation=1, starts="w3")),
    "one who leaves survives until somebody has moved: it still holds nodes of the step, and leaves afterwards":
        (of(3), drain("w2"), Then("w0 w1"), exits("w1"), Then("w0 w2"), hold(), Then("w0")),
    "one who leaves is no survivor when somebody has moved":
        (of(3), drain("w2"), hold("w0"), exits("w1"), Then("w0")),
    "a lost worker is replaced, and admitted when all have recovered":
        (of(3), exits("w1"), Then(starts="w3", says="w3 replaces it"), arrive("w3"), Then("w0 w2"),
         hold("w0"), Then("w0 w2"), hold("w2"), Then("w0 w2 w3", immediate=False)),
    # -- joining, leaving, scaling
    "a machine joins, and there is one plan at a time":
        (of(2), machine(2), arrive("w2"), Then("w0 w1 w2"), arrive("w3"), Then(generation=2), hold(),
         Then("w0 w1 w2 w3")),
    "with an explicit maximum the rest waits as spares, and a spare is the replacement":
        (of(2, maximum=3, grows=False), machine(2), arrive("w2", "w3"), hold(), Then("w0 w1 w2"), exits("w0"),
         Then(starts=""), hold(), Then("w1 w2 w3")),
    "a drained worker whose admission is overtaken just ends, and is not admitted only to leave again":
        (of(2), machine(1), arrive("w2"), Then(states={"w2": ADMITTED}), drain(by="agent1"), exits("w1"),
         Then("w0", states={"w2": LEFT}, evicts="w2"), hold("w0"), Then("w0")),
    "the last members stay until a newcomer has the state":
        (of(1), machine(1), drain(), Then("w0"), arrive("w1"), Then("w0 w1"), hold(), Then("w1"), left("w0"),
         hold("w1"), Then(ended="no")),
    "members that leave take no place from who comes":
        # Two members are left, both about to leave. w3 goes, of the machine that is full; not the replacement of w0.
        (of(3), drain("w1", "w2"), machine(1), exits("w0"), scale(1), arrive("w4"), hold(), hold(), Then("w4")),
    "when all leave the run ends well":
        (of(2), drain(), Then(""), left("w0"), Then(ended="no"), left("w1"), Then(ended="well")),
    "leaving unasked is a loss, and nobody comes for it":
        (of(3), left("w1"), Then("w0 w2", immediate=True, starts="")),
    "scaling down takes the highest numbers":
        (of(4), scale(2),
         Then("w0 w1", says="scaled to 2 workers, from 4; w2 and w3 leave; generation 2 with 2 workers")),
    "who cannot leave yet will: the next plan waits for the one under way":
        (of(2, maximum=3), scale(3), arrive("w2"), scale(1),
         Then(says="scaled to 1 worker, from 3; w1 and w2 will leave"), hold(),
         Then(says="w1 and w2 leave; generation 3 with 1 worker")),
    "scaling up starts more":
        (of(2), scale(4), Then(starts="w2 w3")),
    "scaling below the minimum lowers it":
        (of(4, minimum=3), scale(1), Then(paused=False)),
    "stop ends the run at a boundary":
        (of(2), STOP, Then("", told="w0 w1"), left("w0"), left("w1"), Then(ended="well", because="enough")),
    "stop before training ends at once":
        (starting(2), STOP, Then(ended="well")),
    "stop waits until a plan under way is taken":
        (of(2, maximum=3), scale(3), arrive("w2"), STOP, Then(generation=2), hold(), Then("")),
    "a loss during a stop still ends it well":
        (of(2), STOP, exits("w0"), Then("w1"), hold(), Then(""), left("w1"), Then(ended="well", because="enough")),
    # -- too few
    "fewer than the minimum pause, and go on when another comes":
        (of(3, minimum=2), exits("w0"), Then(label="training"), exits("w1"),
         Then("w2", label="paused", paused=True, immediate=True, says="paused: 1 of at least 2 workers"), hold(),
         arrive("w3"), Then("w2 w3", paused=False, immediate=False)),
    "a run that stays below the minimum does not move":
        (of(4, minimum=3), exits("w0"), exits("w1"), exits("w2"), hold(), Then(generation=4), arrive("w4"),
         Then(generation=4), arrive("w5"), Then("w3 w4 w5")),
    # -- the end
    "a loss after the first has finished concerns the others only":
        (of(3), finished("w0"), exits("w1"), Then("w2", starts=""), hold(), finished("w2"), Then(ended="well")),
    "the exit of one who has finished is no loss":
        (of(2), finished("w0"), exits("w0", 0), Then(generation=1)),
    "losing all others after one has finished ends well":
        (of(2), finished("w0"), exits("w1"), Then(ended="well")),
    "another agent may go, and its workers follow quickly and are not replaced on another machine":
        (of(1), machine(1), arrive("w1"), hold(), says("agent1", Lost(reason="closed")),
         says("w1", Lost(reason="closed")), lambda story: story.tick(story.state.policy.grace_s),
         Then("w0", starts="")),
    # -- errors of user code
    "the same error on two workers is a bug":
        (of(3), says("w1", failure()), hold(), says("w2", failure()),
         Then(ended="badly", because="as before on worker w1", culprit="w2")),
    "errors in two micro-batches are two cases":
        (of(3), says("w1", failure(microbatch=2)), says("w2", failure(microbatch=3)), Then("w0", ended="no")),
    "with one worker an error ends the run":
        (of(1), says("w0", failure()), Then(ended="badly")),
    # -- broken links, hangs
    "the exit after the closed connection counts at once":
        (of(2), says("w1", Lost(reason="closed")), exits("w1"), Then("w0")),
    "a worker that hangs is ended and replaced":
        (of(2, hang_s=60.0), beat("w0", waiting=True), beat("w1", seconds_at=61.0),
         Then("w0", evicts="w1", starts="w2",
              says="w1 (pid 1001) hangs: no progress for 61 s at step 4, micro-batch 2")),
    "the others continue without a worker that hangs and may wake up, and it is told":
        (of(3, **AT_ONCE), beat("w0", waiting=True), beat("w1", seconds_at=11.0),
         Then("w0 w2", generation=2, states={"w1": ASIDE}, evicts="", told="w0 w1 w2",
              says="w1 (pid 1001) makes no progress for 11 s at step 4, micro-batch 2 and is left aside")),
    "a worker aside that ends is replaced":
        (of(2, aside_s=10.0), beat("w0", waiting=True), beat("w1", seconds_at=11.0), exits("w1", 1), Then(starts="w2")),
    "a worker aside that stays is ended and replaced":
        (of(2, **AT_ONCE), beat("w0", waiting=True), beat("w1", seconds_at=11.0), beat("w1", seconds_at=61.0),
         Then(evicts="w1", starts="w2")),
    # -- exchanges that break without a loss
    "what is told is the error of the one that the others have waited for":
        (of(3), says("w1", Suspect(generation=1, reason="w0 has left", peers=["w0"])),
         says("w0", Suspect(generation=1, reason="other bytes", peers=["w2"])),
         says("w2", Suspect(generation=1, reason="w0 has left", peers=["w0"])), tick(5.0),
         Then("w0 w1 w2", generation=2, says="w0 (pid 1000): other bytes; no member was lost: trying again")),
    "of two that have waited for each other, the first error is told":
        (of(3), says("w1", Suspect(generation=1, reason="cut", peers=["w0"])),
         says("w0", Suspect(generation=1, reason="cut as well", peers=["w1"])), tick(5.0),
         Then(generation=2, says="w1 (pid 1001): cut; no member was lost")),
    "an error of an exchange before, which a loss has explained, is told no more":
        (of(3), says("w0", Suspect(generation=1, reason="old", peers=["w2"])), exits("w2"), hold("w0", "w1"),
         says("w1", Suspect(generation=2, reason="new", peers=["w0"])), tick(5.0),
         Then(says="w1 (pid 1001): new; no member was lost")),
    # -- who leaves the training loop
    "a loop that a worker leaves alone ends the run also when the others had gone on before":
        (of(2), beat("w0", step=5), says("w1", Leaving(phase=0, step=5)), Then(ended="badly")),
    "one run.steps after another is no leaving":
        (of(2), says("w1", Leaving(phase=1, step=5)), beat("w0", step=100), Then(ended="no")),
    "a worker that leaves one loop alone for another ends the run: steps of two loops would be summed":
        (of(2), says("w1", Leaving(phase=0, step=5, goes_on=True)), beat("w0", step=5),
         Then(ended="badly", because="w1 (pid 1001) left the training loop before step 5")),
    "a script that ends in the middle is a loss as well when a member is seen further on":
        (of(3), says("w1", Finished(phase=0, step=5)), beat("w0", step=5), Then("w0 w2")),
    "it is a loss as well when they missed it before it was heard of":
        (of(3), says("w0", Suspect(generation=1, reason="worker w1 has left", peers=["w1"])),
         says("w1", Finished(phase=0, step=5)), Then("w0 w2", starts="w3")),
    "it is no loss where it is another worker that they miss":
        (of(3), says("w1", Finished(phase=0, step=5)),
         says("w0", Suspect(generation=1, reason="worker w2 has left", peers=["w2"])), Then(states={"w1": FINISHED})),
    "it is no loss where they had missed another worker before":
        (of(3), says("w0", Suspect(generation=1, reason="worker w2 has left", peers=["w2"])),
         says("w1", Finished(phase=0, step=5)), Then(states={"w1": FINISHED})),
    "it is a loss where nobody can say whom they miss":
        (of(3), says("w1", Finished(phase=0, step=5)), says("w0", Suspect(generation=1, reason="timed out")),
         Then(states={"w1": LOST})),
    "a loss after all others have ended their scripts ends well":
        (of(3), step(4), says("w0", Finished(phase=0, step=5)), says("w2", Finished(phase=0, step=5)), exits("w1"),
         Then(ended="well")),
    "one script that ends in the middle makes no success of the loss of all others":
        (of(3, max_restarts=0), step(4), says("w0", Finished(phase=0, step=5)), exits("w1"), exits("w2"),
         Then(ended="badly", because="no worker with the run's state is left")),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_follows(name: str) -> None:
    given, *what = SITUATIONS[name]
    story = given()
    for one in what:
        if isinstance(one, Then):
            one.check(story)
        else:
            one(story)
