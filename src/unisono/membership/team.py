"""Ids of the members of a generation. Almost every rule asks for them, so they are found once for each notice."""

from __future__ import annotations

from typing import NamedTuple

from unisono.core.messages import Notice

__all__ = ["TeamIds", "team_of"]


class TeamIds(NamedTuple):
    """Ids of the workers in a notice."""

    by_rank: tuple[str, ...] = ()
    ids: frozenset[str] = frozenset()


_newest: list[tuple[Notice | None, TeamIds]] = [(None, TeamIds())]
"""The notice that was asked about last: a value that is not changed is asked about again and again."""


def team_of(notice: Notice | None) -> TeamIds:
    """Return the members in a notice; without one, nobody."""
    known, team = _newest[0]
    if known is not notice:
        by_rank = tuple(info.worker_id for info in notice.members) if notice is not None else ()
        team = TeamIds(by_rank, frozenset(by_rank))
        _newest[0] = (notice, team)
    return team
