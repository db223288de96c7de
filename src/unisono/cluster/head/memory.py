"""Memory of a head that the next head takes over: one value, encoded for the heirs."""

from __future__ import annotations

import time

import msgspec

from unisono.cluster.head.story import NOTHING, StoryState
from unisono.core.policy import Policy
from unisono.core.spec import RunSpec
from unisono.membership import State

__all__ = ["HeadMemory"]


class HeadMemory(msgspec.Struct, frozen=True):
    """State of the membership table, and the values that `unisono watch --once` shows besides."""

    state: State
    started: float
    reason: str
    run_dir: str = ""
    """The run directory, if the script has chosen it."""
    facts: str = ""
    """The run's description (`unisono.record.rundir.describe`), as JSON."""
    seers: tuple[str, ...] = ()
    """The agents on whose machines a worker has seen the run directory."""
    story: StoryState = NOTHING
    """What was told last."""
    clock: float | None = None
    """The time of this machine's clock (`time.monotonic`), of which times in ``state`` are."""

    @staticmethod
    def first(policy: Policy, run: RunSpec) -> HeadMemory:
        """Return the memory of the first head of a run."""
        return HeadMemory(State(policy=policy, settings=run.settings, script=run.script), time.time(), "starting")

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> HeadMemory:
        return msgspec.msgpack.decode(data, type=HeadMemory)
