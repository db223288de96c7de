"""The settings of a run's membership: how many workers, and how long who is waited for.

The command that starts a run makes them; `unisono.membership`, in the head, goes by them.
"""

from __future__ import annotations

import msgspec

from unisono.core.errors import UsageError
from unisono.core.settings import DEFAULTS, Partition

__all__ = ["Policy"]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the membership. Times in seconds."""

    start: int
    """Generation 1 waits for this many workers."""
    wait_for: int = 0
    """The run begins with this many, and never with fewer, however many are ordered; 0: with ``start``, or what is left
    of these."""
    minimum: int = 1
    """With fewer the run pauses."""
    maximum: int
    """More are not admitted."""
    grows: bool = True
    """A machine that joins raises ``maximum`` by its number of workers, as long as it is connected."""
    machines: int = 0
    """The command starts agents on so many other machines; generation 1 waits for those that may still come."""
    efficiency: float = DEFAULTS.efficiency
    """``maximum`` changes by itself, up to ``most``, while the next worker has this efficiency; 0: it does not."""
    most: int = 0
    elastic: bool = False
    """The command can get more machines, and give machines back (`unisono.cluster.launchers.Launcher.ensure`)."""
    max_restarts: int = 10
    """How many lost workers of a machine are replaced; every `FORGIVE_STEPS` steps forgive one."""
    strict: bool = DEFAULTS.strict
    """Refuse a worker whose arithmetic may differ."""
    allow_different_script: bool = DEFAULTS.allow_different_script
    """Admit, with a warning, a worker whose script has another text than the run's."""
    heartbeat_s: float = DEFAULTS.heartbeat_s
    """Time between two heartbeats of a worker."""
    heartbeat_timeout_s: float = DEFAULTS.heartbeat_timeout_s
    """A member that sends nothing for this long, while others do, is lost."""
    late_s: float = DEFAULTS.late_s
    """A member that others wait for and that makes no progress for this long is reported."""
    aside_s: float = DEFAULTS.aside_s
    """A member that others wait for and that makes no progress for this long is left aside: the others compute
    its micro-batches."""
    hang_s: float = DEFAULTS.hang_s
    """... and for this long is ended."""
    grace_s: float = 0.05
    """A worker that no agent watches is lost so long after its connection closed."""
    reconnect_s: float = 1.0
    """A worker that an agent watches may connect again for so long after its connection closed."""
    away_s: float = 60.0
    """Time for a machine to connect to a head that has taken over."""
    suspect_s: float = 1.0
    """Time in which a loss may explain a broken exchange, before the same members try again."""
    partition: Partition = DEFAULTS.when_cut
    """What machines do that are cut off from others."""

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.start <= self.maximum:
            raise UsageError(
                f"a run needs 1 <= minimum <= start <= maximum workers, got {self.minimum}, {self.start} and "
                f"{self.maximum}"
            )
        if self.wait_for and self.wait_for < self.minimum:
            raise UsageError(
                f"a run that needs {self.minimum} workers cannot begin with {self.wait_for}; got --wait-for "
                f"{self.wait_for}"
            )
        if self.wait_for > self.maximum and not self.grows:
            raise UsageError(
                f"the run would wait for ever: --wait-for {self.wait_for} is more than the {self.maximum} workers that "
                "--workers admits at most"
            )
        if not 0.0 <= self.efficiency < 1.0:
            raise UsageError(f"an efficiency is above 0 and below 1, got {self.efficiency}")
        if self.max_restarts < 0:
            raise UsageError(f"max_restarts is at least 0, got {self.max_restarts}")
        for name in ("heartbeat_timeout_s", "late_s", "aside_s", "hang_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is a time in seconds above 0, got {getattr(self, name)}")

    @property
    def begins_with(self) -> int:
        """The number of workers at which the run begins at once."""
        return self.wait_for or self.start

    @property
    def least(self) -> int:
        """The smallest number of workers that the run may begin with, where no others are on their way."""
        return max(self.minimum, self.wait_for)
