"""Which agents hold the table's state, so that another head can follow, and which of them starts it."""

from __future__ import annotations

import msgspec

from unisono.core.following import MAX_HEIRS, is_majority
from unisono.core.messages import Lost, MachineInfo
from unisono.membership.dispatch import Event, Lags
from unisono.membership.roster import State, WorkerState, seat_of

__all__ = [
    "heirs",
    "holders",
    "is_cut_off",
    "is_first_elsewhere",
    "keepers",
    "machines",
    "without_lost_heir",
]


def heirs(state: State) -> tuple[str, ...]:
    """Return the agents that must hold a decision before others hear of it: the first that joined, and answer."""
    seat = seat_of(state)
    able = [agent.agent_id for agent in state.agents.values() if not (agent.lags or agent.is_sent_away)]
    return tuple(sorted(able, key=lambda agent_id: agent_id != seat)[:MAX_HEIRS])


def keepers(state: State) -> tuple[str, ...]:
    """Return the agents that are sent the state: the heirs, and those that are left out until they answer again."""
    return (
        *heirs(state),
        *(agent.agent_id for agent in state.agents.values() if agent.lags and not agent.is_sent_away),
    )


def machines(state: State) -> list[MachineInfo]:
    """Return the machines of the run for those that may need them when the head is away, first the heirs."""
    order = dict.fromkeys((*heirs(state), *state.agents))
    agents = [state.agents[agent_id] for agent_id in order if not state.agents[agent_id].refused]
    return [MachineInfo(agent_id=agent.agent_id, url=agent.url) for agent in agents if agent.url]


def holders(state: State) -> list[str]:
    """Return the agents on whose machines workers hold the run's state."""
    holding = {worker.agent for worker in state.workers.values() if worker.state is WorkerState.HOLDING}
    return sorted(holding) if state.held else []


def is_first_elsewhere(before: State, after: State, worker_id: str) -> bool:
    """Return whether, with this event of a worker, the run's state is held on another machine than the head's.

    Until the heirs hear of that, they believe that the state is lost with the head's machine.
    """
    worker, was = after.workers.get(worker_id), before.workers.get(worker_id)
    if not after.held or worker is None or worker.state is not WorkerState.HOLDING:
        return False
    seat = seat_of(after)
    if worker.agent == seat or (was is not None and was.state is WorkerState.HOLDING):
        return False
    return not any(w.state is WorkerState.HOLDING and w.agent != seat for w in before.workers.values())


def is_cut_off(state: State) -> bool:
    """Return whether these machines are to wait for others, from which they are cut off."""
    if state.settings.when_cut != "majority":
        return False
    gone = {agent_id for agent_id, agent in state.absent.items() if agent.wanted}
    return not is_majority(state.agents.keys(), state.agents.keys() | gone)


def without_lost_heir(state: State, event: Event) -> State:
    """Return the state of a run that has ended, after an event: only that the end is known to the heirs matters."""
    agent = state.agents.get(event.source)
    if agent is None or not isinstance(event.message, Lost | Lags):
        return state
    return msgspec.structs.replace(
        state, agents={**state.agents, event.source: msgspec.structs.replace(agent, lags=True)}
    )
