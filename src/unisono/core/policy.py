"""How many workers a run has: first as its command line says, then as the run has been told, or has found out.

The command that starts a run makes the first one; `unisono.membership`, in the head, goes by it and by the settings.
"""

from __future__ import annotations

import msgspec

from unisono.core.errors import UsageError

__all__ = ["Policy"]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers. Times in seconds."""

    start: int
    """Generation 1 waits for this many workers."""
    wait_for: int = 0
    """The run begins with this many, and never with fewer, however many are ordered; 0: with ``start``, or what is left
    of these."""
    parts: int = 1
    """The parts of the model, one on each worker of a group: the run needs all of them. All numbers here are of
    workers, and not of groups."""
    minimum: int = 1
    """With fewer the run pauses."""
    maximum: int
    """More are not admitted."""
    grows: bool = True
    """A machine that joins raises ``maximum`` by its number of workers, as long as it is connected."""
    machines: int = 0
    """The command starts agents on so many other machines; generation 1 waits for those that may still come."""
    efficiency: float = 0.0
    """``maximum`` changes by itself, up to ``most``, while the next worker has this efficiency; 0: it does not."""
    most: int = 0
    elastic: bool = False
    """The command can get more machines, and give machines back (`unisono.cluster.launchers.Launcher.ensure`)."""
    grace_s: float = 0.05
    """A worker that no agent watches is lost so long after its connection closed."""
    reconnect_s: float = 1.0
    """A worker that an agent watches may connect again for so long after its connection closed."""
    suspect_s: float = 1.0
    """Time in which a loss may explain a broken exchange, before the same members try again."""

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= self.minimum:
            raise UsageError(
                f"a run with {self.parts} parts of the model needs a worker for each of them, got a minimum of "
                f"{self.minimum} workers"
            )
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
                f"the run would wait forever: --wait-for {self.wait_for} is more than the {self.maximum} workers that "
                "--workers allows"
            )

    @property
    def groups(self) -> int:
        """How many whole groups ``maximum`` allows."""
        return self.maximum // self.parts

    @property
    def begins_with(self) -> int:
        """The number of workers at which the run begins at once."""
        return self.wait_for or self.start

    @property
    def least(self) -> int:
        """The smallest number of workers that the run may begin with, where no others are on their way."""
        return max(self.minimum, self.wait_for)
