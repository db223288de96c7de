"""What a head knows and the head that follows it has to: one value, encoded for the heirs."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import msgspec

from unisono.decisions.membership import Policy, State
from unisono.messages import Failed

__all__ = ["Memory"]


@dataclass(frozen=True)
class Memory:
    """The state of the membership table, and what `unisono status` shows besides it."""

    state: State
    started: float
    reason: str
    run_dir: str = ""
    """The run directory, if the script has chosen it."""
    tried: list[tuple[tuple[int, int], tuple[str, Failed]]] = dataclasses.field(default_factory=list)
    """`State.tried`: tuples are no keys in MessagePack."""

    @staticmethod
    def first(policy: Policy, script: str) -> Memory:
        """Return what the first head of a run knows."""
        return Memory(State(policy=policy, script=script), time.time(), "starting")

    def encode(self) -> bytes:
        flat = dataclasses.replace(self.state, tried={})
        return msgspec.msgpack.encode(dataclasses.replace(self, state=flat, tried=list(self.state.tried.items())))

    @staticmethod
    def decode(data: bytes) -> Memory:
        memory = msgspec.msgpack.decode(data, type=Memory)
        return dataclasses.replace(memory, state=dataclasses.replace(memory.state, tried=dict(memory.tried)), tried=[])
