"""The workers on the head's own machine, as processes that the head may have to end."""

from __future__ import annotations

import signal

from unisono.membership import seat_of
from unisono.membership.roster import ALIVE, State, Worker
from unisono.system.lifetime import end_group, start_time

__all__ = ["Processes"]


class Processes:
    """Process ids and start times of the workers of this machine whose end was not reported to this head.

    The report may have been lost with the head before.

    Args:
        state: what this head goes on from.
    """

    def __init__(self, state: State) -> None:
        self._known: dict[str, tuple[int, str]] = {}
        for worker in state.workers.values():
            self.note(worker, state)

    def note(self, worker: Worker, state: State) -> None:
        """Note a worker, if it lives on this machine."""
        agent = state.agents.get(worker.agent)
        is_here = agent is not None and agent.agent_id == seat_of(state)
        if is_here and worker.info is not None and worker.state in ALIVE:
            self._known[worker.worker_id] = (worker.info.pid, start_time(worker.info.pid))

    def has_ended(self, worker_id: str) -> None:
        """Note that the agent has seen the end of a worker."""
        self._known.pop(worker_id, None)

    def end(self) -> None:
        """End the workers that are left, with their children."""
        for pid, started in self._known.values():
            # The system does not reuse a process id as long as a group has it.
            if start_time(pid) in ("", started):
                end_group(pid, signal.SIGKILL)
