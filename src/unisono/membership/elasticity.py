"""How many workers a run that decides by itself wants (`Policy.efficiency`), and machines for them (`Policy.elastic`).

The command can get machines and give them back: it is told how many it needs, and those that are free end.
"""

from __future__ import annotations

from unisono.core.efficiency import Bounds
from unisono.core.messages import Ended, StepDone, Wanted
from unisono.core.words import count
from unisono.membership.agents import resize
from unisono.membership.draft import Draft
from unisono.membership.parts import numbers_of
from unisono.membership.roster import ALIVE

__all__ = ["free_machines", "measure", "tell_wanted"]


def measure(draft: Draft, message: StepDone) -> None:
    """Learn from a step how much its workers are worth, and have more or fewer of them where that says so."""
    state, policy = draft.state, draft.state.policy
    is_steady = draft.is_taken() and len(draft.workers(*ALIVE)) == len(state.members)
    if not (policy.efficiency and is_steady and message.samples and message.seconds > 0):
        return
    groups, *others = set(numbers_of(draft.members(*ALIVE), policy.parts))
    if others:  # a group is incomplete
        return
    room = sum(agent.offers for agent in state.agents.values() if not agent.is_sent_away)
    most = policy.most if policy.elastic else min(policy.most, room)
    bounds = Bounds(
        least=policy.minimum // policy.parts,
        most=most // policy.parts,
        efficiency=policy.efficiency,
        noun="worker" if policy.parts == 1 else "group",
    )
    measured = state.measured.after(groups, message.samples, message.seconds)
    measured, change = measured.decide(message.step, bounds)
    draft.put(measured=measured)
    is_new = change is not None and not groups <= change.size <= policy.groups  # else it is waited for
    if change is not None and is_new:
        resize(draft, change.size * policy.parts, f"{change.why} (--set efficiency={policy.efficiency:g})")


def tell_wanted(draft: Draft) -> None:
    """Tell the command which machines need no other agent, and for how many workers it is to have machines.

    Workers of machines that have joined by themselves count, and the command does not get machines for them.
    """
    state = draft.state
    if not (state.policy.elastic or state.policy.machines) or state.finishing or state.stopping:
        return
    guests = {i for i, agent in state.agents.items() if not (agent.primary or agent.launched)}
    alive = draft.staying()
    wanted = max(state.policy.maximum - sum(w.agent in guests for w in alive), 0)
    sent_away = [agent for agent in state.absent.values() if agent.is_sent_away]
    names = {agent.launched for agent in (*state.agents.values(), *sent_away)}
    present = tuple(sorted(names.intersection(state.ended_machines)))
    if (wanted, present) != (state.wanted, state.present):
        draft.put(wanted=wanted, present=present)
        for agent_id, agent in state.agents.items():
            if agent.primary:
                draft.send(agent_id, Wanted(num_workers=wanted, present=present))


def free_machines(draft: Draft) -> None:
    """Let the agents of launched machines end that have no workers any more, while the run has as many as it wants."""
    state = draft.state
    if not state.policy.elastic or not state.held or state.finishing or state.stopping:
        return
    if draft.room() > 0:
        return
    for agent_id, agent in state.agents.items():
        if agent.launched and not agent.is_sent_away and not draft.workers_of([agent_id]):
            why = f"{agent.host} is free again: the run wants {count(state.policy.maximum, 'worker')}"
            draft.put_agent(agent_id, freed=why)
            draft.reasons.append(why)
            draft.send(agent_id, Ended(ok=True, reason=why))
