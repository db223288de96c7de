"""Plans of the coming steps, from the paces in the telemetry, and help for late members within a step."""

from __future__ import annotations

import time
from collections.abc import Sequence

from unisono.core.balance import Balance
from unisono.core.plan import Plan, plan
from unisono.core.small import OwnWork
from unisono.core.telemetry import StepTelemetry
from unisono.engine.exchange import Share
from unisono.engine.exchange.helping import HostWork
from unisono.engine.rounds.team import Team

__all__ = ["Balancing", "Helping"]

LEAST_PAUSE_S = 0.0005
MOST_PAUSE_S = 0.02
"""A member that is done checks this often whether another one is late: four times in the time of a micro-batch."""


class Helping:
    """Within one step: leave out leaves that others have claimed, and claim leaves of members that are late."""

    def __init__(self, team: Team, work: HostWork, paces: Sequence[float], todo: Sequence[int]) -> None:
        self._team = team
        self._work = work
        self._paces = paces
        self._pause_s = min(max(min(paces) / 4, LEAST_PAUSE_S), MOST_PAUSE_S)
        self._since = time.perf_counter()
        work.show_work(todo)

    def start(self, index: int, leaf: int) -> bool:
        """Return False if another member has claimed this leaf, which is number ``index`` of ``todo``."""
        return self._work.start(index, leaf)

    def take(self) -> int | None:
        """Claim a leaf of another member; None when all others have started their last one.

        A claimed leaf must be computed before the next combine.

        Raises:
            PeerLost, DeadlineExceeded: as the combine would.
        """
        with self._team.waiting():
            while (leaf := self._work.take(self._paces, time.perf_counter() - self._since)) is None:
                if not self._work.pause(self._pause_s):
                    return None
                self._team.check()
        return leaf


class Balancing:
    """Plans of the coming steps. All members compute the same, from the telemetry that came with every combine.

    Args:
        enabled: False gives all members equal parts.
    """

    def __init__(self, team: Team, *, enabled: bool) -> None:
        self._team = team
        self._enabled = enabled
        self._balance = Balance(1)
        self._generation = 0
        self.own_work = OwnWork()
        """Of this member, for the micro-batches that it computes."""

    @property
    def is_enabled(self) -> bool:
        """Whether faster members get more."""
        return self._enabled

    @property
    def is_first_of_generation(self) -> bool:
        """Whether no step was summed in this generation yet; the same on all members at the beginning of a step."""
        return self._generation != self._team.generation

    def decide(self, num_leaves: int, *, everybody: bool = False) -> tuple[Plan, str]:
        """Return the plan of the next step, and why it differs from the plan before ("" if it does not).

        Args:
            everybody: give each member at least one leaf, if there are enough.
        """
        if not self._is_known:
            return plan(self._team.size, num_leaves), ""
        chosen, change = self._balance.decide(num_leaves), self._balance.change
        if everybody and num_leaves >= self._team.size and not all(chosen.ranges):
            return plan(self._team.size, num_leaves), ""
        return chosen, change.say(self._team.worker_ids) if change is not None else ""

    def predicted(self, num_leaves: int) -> Plan:
        """Return the most likely plan of the coming steps."""
        return self._balance.peek(num_leaves) if self._is_known else plan(self._team.size, num_leaves)

    def helping(self, plan: Plan) -> Helping | None:
        """Begin to help and to be helped with a plan; None where members do not see each other's work."""
        paces, found = self._balance.paces(), self._team.exchange.work()
        if paces is None or found is None or not self._is_known:
            return None
        work, ranks = found
        return Helping(self._team, work, [paces[rank] for rank in ranks], plan.ranges[self._team.rank])

    def observe(self, telemetry: Sequence[StepTelemetry], share: Share) -> None:
        """Record the telemetry of all members, by rank, after a combine."""
        if self.is_first_of_generation:
            self._generation = self._team.generation
            self._balance = Balance(self._team.size, [each.first_of_host for each in telemetry])
        self._balance.observe([each.leaves for each in telemetry], [each.data_s + each.compute_s for each in telemetry])
        # The last member to arrive has not waited: its time is the time of the exchange itself.
        last_seconds = min(each.last.exchange + each.last.network + each.last.waiting for each in telemetry)
        self._balance.observe_exchange(last_seconds, share.plan, share.num_leaves)

    @property
    def _is_known(self) -> bool:
        # In the first step of a generation no member knows a pace yet.
        return self._enabled and not self.is_first_of_generation
