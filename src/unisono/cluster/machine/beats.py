"""Heartbeats of a machine's workers, reported by their agent in one message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

from unisono.cluster.worker.beatpage import BeatSlot
from unisono.core.errors import ProtocolError
from unisono.core.messages import Beat, BeatOf, Beats, decode

__all__ = ["BeatReporter", "next_tick"]

LATER: Final = 0.2
"""The agent reads the heartbeats so much of a period after the workers have left them."""


def next_tick(now: float, period_s: float) -> float:
    """Return the next multiple of a period: all processes of a machine see the same ones."""
    return now + period_s - now % period_s


class BeatReporter:
    """Reports heartbeats until it is closed.

    Args:
        slots: returns the slots of the workers that run now, by their ids.
        send: sends a message to the head if it can be sent now; returns whether it was sent.
    """

    def __init__(
        self, slots: Callable[[], Mapping[str, BeatSlot]], send: Callable[[Beats], bool], period_s: float
    ) -> None:
        self._slots = slots
        self._send = send
        self._period_s = period_s
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    def report(self) -> None:
        """Report the heartbeats that are new. What cannot be sent now is not taken, so the workers send it."""
        now = time.monotonic()
        found, beats = [], []
        for worker_id, slot in self._slots().items():
            if (left := slot.read()) is not None and (beat := _decoded(left.data)) is not None:
                found.append((slot, left))
                beats.append(BeatOf(worker_id, max(0.0, now - left.at), beat))
        if beats and self._send(Beats(beats=beats)):
            for slot, left in found:
                slot.take(left)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        late_s = LATER * self._period_s
        due = next_tick(time.monotonic() - late_s, self._period_s) + late_s
        self._timer = asyncio.get_running_loop().call_later(due - time.monotonic(), self._tick)

    def _tick(self) -> None:
        self._wait()
        self.report()


def _decoded(data: bytes) -> Beat | None:
    try:
        beat = decode(data)
    except ProtocolError:
        return None  # a worker's memory belongs to its script as well
    return beat if isinstance(beat, Beat) else None
