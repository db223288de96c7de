"""Machines that the command can get and give back (`Policy.elastic`): how many it needs, and which are free."""

from __future__ import annotations

from unisono.decisions.membership.draft import Draft
from unisono.decisions.membership.roster import ALIVE
from unisono.messages import Ended, Wanted
from unisono.words import count

__all__ = ["free_machines", "tell_wanted"]


def tell_wanted(draft: Draft) -> None:
    """Tell the command for how many workers it is to have machines, when the number changes.

    Workers of machines that have joined by themselves count, and the command does not get machines for them.
    """
    state = draft.state
    if not state.policy.elastic or state.finishing or state.stopping:
        return
    guests = {i for i, agent in state.agents.items() if not (agent.primary or agent.launched)}
    alive = [w for w in draft.workers(*ALIVE) if not w.draining]
    wanted = max(state.policy.maximum - sum(w.agent in guests for w in alive), 0)
    if wanted != state.wanted:
        draft.put(wanted=wanted)
        for agent_id, agent in state.agents.items():
            if agent.primary:
                draft.send(agent_id, Wanted(num_workers=wanted))


def free_machines(draft: Draft) -> None:
    """Let the agents of launched machines end that have no workers any more, while the run has as many as it wants."""
    state = draft.state
    if not state.policy.elastic or not state.held or state.finishing or state.stopping:
        return
    staying = [w for w in draft.workers(*ALIVE) if not w.draining]
    if len(staying) < state.policy.maximum:
        return
    for agent_id, agent in state.agents.items():
        if agent.launched and not agent.is_sent_away and not draft.workers_of([agent_id]):
            why = f"{agent.host} is free again: the run wants {count(state.policy.maximum, 'worker')}"
            draft.put_agent(agent_id, freed=why)
            draft.reasons.append(why)
            draft.send(agent_id, Ended(ok=True, reason=why))
