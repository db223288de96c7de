"""Round that is over when the first member has done its work: a checkpoint that all members wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from unisono.decisions.plan import Plan
from unisono.rounds.life import CHECKPOINT, Rounds
from unisono.rounds.members import Gathered, Members, Undivided

__all__ = ["Together", "together"]


class Together(Undivided):
    """Work that counts once the first member has done it. When that member is lost meanwhile, the next one does it.

    Args:
        work: called on all members, perhaps more than once; it may do nothing on all but the first.
        payload: sent to all members.
    """

    kind: Final = CHECKPOINT
    title: Final = "a checkpoint or the end of the run"

    def __init__(self, members: Members, work: Callable[[], None], payload: bytes = b"") -> None:
        super().__init__(members)
        self._work = work
        self._payload = payload
        self.payloads: list[bytes] = []
        """Of all members, by rank, once the round is over."""

    def compute(self, plan: Plan) -> Iterator[object]:
        with self._members.waiting():
            self._work()
        yield from ()

    def combine(self, plan: Plan) -> Gathered:
        self.payloads = self._members.gather(self._payload)
        return Gathered(self._members, self._payload)


def together(rounds: Rounds, work: Callable[[], None], payload: bytes = b"") -> list[bytes]:
    """Do something that counts once the first member has done it; the others wait for that. Collective.

    Returns:
        The payloads of all members, by rank.
    """
    round_ = Together(rounds.members, work, payload)
    for _ in rounds.play(round_):
        pass
    return round_.payloads
