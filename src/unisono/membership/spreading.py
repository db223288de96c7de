"""Spreading workers over machines by capacity: which machine starts the next worker, and which gives one back.

A machine's load is its number of workers divided by the number that it offers. The next worker goes where the load is
smallest afterwards: to machines with free room first, and in proportion to what they offer beyond that. The first to
leave is the newest worker of the machine with the highest load.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from unisono.membership.roster import Agent, Worker

__all__ = ["to_leave", "to_start"]


def to_start(agents: Sequence[Agent], running: Mapping[str, int], num_workers: int) -> dict[str, int]:
    """Return how many new workers each of these machines starts, by agent; empty where there is no machine.

    Args:
        running: by agent, the number of its workers that stay.
    """
    able = [agent for agent in agents if agent.offers] or agents[:1]
    counts = Counter(dict(running))
    started: Counter[str] = Counter()
    for _ in range(num_workers if able else 0):
        chosen = min(able, key=lambda agent: ((counts[agent.agent_id] + 1) / max(agent.offers, 1), not agent.primary))
        counts[chosen.agent_id] += 1
        started[chosen.agent_id] += 1
    return dict(started)


def to_leave(
    workers: Sequence[Worker], agents: Mapping[str, Agent], num_workers: int, *, empties: bool = False
) -> list[Worker]:
    """Return the workers that leave, the last to have been started first.

    Workers of a machine that is not connected leave before all others, and the last one of the command's own machine
    leaves last: the run's directory may be on its disk.

    Args:
        workers: those that may leave.
        agents: the machines that are connected.
        empties: take all workers of one machine before those of the next, the machine with the fewest first, so that
            machines become free.
    """
    left = list(workers)
    counts = Counter(worker.agent for worker in left)
    gone = []

    def load(worker: Worker) -> tuple[float, int]:
        agent, number = agents.get(worker.agent), counts[worker.agent]
        if agent is None:
            return math.inf, worker.number
        if agent.primary and (empties or number == 1):
            return -math.inf, worker.number
        return -number if empties else number / max(agent.offers, 1), worker.number

    for _ in range(min(num_workers, len(left))):
        chosen = max(left, key=load)
        left.remove(chosen)
        counts[chosen.agent] -= 1
        gone.append(chosen)
    return gone
