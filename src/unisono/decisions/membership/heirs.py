"""Which agents hold the table's state, so that another head can follow, and which of them starts it."""

from __future__ import annotations

import dataclasses
import itertools

from unisono.decisions.following import MAX_HEIRS
from unisono.decisions.membership.dispatch import Event, Lags
from unisono.decisions.membership.roster import State
from unisono.messages import Lost

__all__ = ["heirs", "keepers", "successor", "without_lost_heir"]


def heirs(state: State) -> tuple[str, ...]:
    """Return the agents that must hold a decision before others hear of it: the first that joined, and answer."""
    able = (agent.agent_id for agent in state.agents.values() if not (agent.lags or agent.is_sent_away))
    return tuple(itertools.islice(able, MAX_HEIRS))


def keepers(state: State) -> tuple[str, ...]:
    """Return the agents that are sent the state: the heirs, and those that are left out until they answer again."""
    return (
        *heirs(state),
        *(agent.agent_id for agent in state.agents.values() if agent.lags and not agent.is_sent_away),
    )


def successor(state: State) -> str:
    """Return the agent that starts the next head: the one whose child the head is ("": it is not known yet)."""
    return next((agent.agent_id for agent in state.agents.values() if agent.primary), "")


def without_lost_heir(state: State, event: Event) -> State:
    """Return the state of a run that has ended, after an event: only that the end is known to the heirs matters."""
    agent = state.agents.get(event.source)
    if agent is None or not isinstance(event.message, Lost | Lags):
        return state
    return dataclasses.replace(state, agents={**state.agents, event.source: dataclasses.replace(agent, lags=True)})
