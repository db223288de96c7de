"""The rounds of a member that are open beside the one that it plays: here none; with a delay, those under way."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.engine.rounds.standing import Open

__all__ = ["Book"]


class Book:
    """A member that plays one round after the other has no open round beside that one, so all of this does nothing.

    `unisono.strategies.delay.pipeline.Pipeline` is the book of steps whose sums are under way while the script goes on.
    All methods are local, but for `drain` and `give`.
    """

    @property
    def is_under_way(self) -> bool:
        """Whether there are sums that `drain` would wait for."""
        return False

    @property
    def holds_back(self) -> bool:
        """Whether sums are computed again later, after a loss or because they are wrong: until then members do not
        change.
        """
        return False

    def drain(self) -> None:
        """Wait until no sum is under way, so that the caller may use the exchange. Collective.

        Raises:
            PeerLost, DeadlineExceeded: a member was lost.
        """

    def interrupt(self) -> None:
        """Stop what is under way, because a member was lost."""

    def report(self) -> Open:
        """Return what this member has of the open rounds, for the others when they meet."""
        return Open()

    def met(self, reports: Sequence[Open]) -> None:
        """Note, after a loss, what each member has reported, by rank."""

    def give(self, source: int, targets: Sequence[int]) -> None:
        """Send the result of the newest commit from rank ``source`` to the ranks that have not seen it. Collective."""
        raise AssertionError("no member says that it can send a result, so nobody asks for it")

    def redo(self) -> None:
        """Forget the sums that are committed and not applied, because a member that is wrong has a part in them: they
        are made again. On all members alike.
        """

    def abandon(self) -> None:
        """Stop what is under way, because the run ends in this process."""
