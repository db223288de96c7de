"""A round in which a member waits: two members that wait in different rounds of the same number never meet."""

from __future__ import annotations

import msgspec

from unisono.core.messages import Beat

__all__ = ["BegunRound"]


class BegunRound(msgspec.Struct, frozen=True, kw_only=True):
    """A round in which a member was seen to wait for the others for a while."""

    worker_id: str
    generation: int
    number: int
    title: str

    @staticmethod
    def of(worker_id: str, beat: Beat) -> BegunRound | None:
        """Return the round that a heartbeat names; None if it names none."""
        if beat.round < 0:
            return None
        return BegunRound(worker_id=worker_id, generation=beat.generation, number=beat.round, title=beat.title)

    def is_of(self, beat: Beat | None) -> bool:
        """Return whether a worker with this heartbeat waits in this round."""
        return beat is not None and self._is_at(beat) and beat.title == self.title

    def differs_from(self, beat: Beat) -> bool:
        """Return whether a worker with this heartbeat waits in another round of the same number."""
        return self._is_at(beat) and beat.title != self.title

    def _is_at(self, beat: Beat) -> bool:
        return (beat.generation, beat.round) == (self.generation, self.number)
