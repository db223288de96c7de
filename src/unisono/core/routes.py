"""Where the sums of a step go: which members need which rows of them, and who adds them up.

Without routes all members need all rows, and each adds up an equal part. Where only some members need the gradient of a
parameter, the sum of its rows goes to these: the first of them adds it up. A row in which two parameters meet goes to
those that need either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Piece", "Ranges", "Route", "routed", "routes_of", "rows_for", "split_rows", "through", "within"]

Ranges = tuple[range, ...]
"""Rows: disjoint, ascending, none of them empty."""


class Route(NamedTuple):
    """Where the sum of some rows goes."""

    rows: range
    ranks: tuple[int, ...]
    """The members that need it; the first adds it up. (): all need it, and each adds up a part."""


def split_rows(rows: range, num_chunks: int) -> list[range]:
    """Return ``rows`` in ``num_chunks`` contiguous chunks of nearly equal size."""
    edges = [rows.start + len(rows) * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def routes_of(needed: Iterable[tuple[range, tuple[int, ...]]]) -> tuple[Route, ...]:
    """Return the routes of rows that may meet in a row: it goes to all that need one of the two.

    Args:
        needed: (rows, ranks as in `Route`), by ascending rows; those that follow may share the last row.
    """
    found: list[Route] = []
    for rows, ranks in needed:
        if found and rows and rows.start < found[-1].rows.stop:
            last = found.pop()
            shared = range(rows.start, rows.start + 1)
            if last.rows.start < shared.start:
                found.append(Route(range(last.rows.start, shared.start), last.ranks))
            found.append(Route(shared, _both(last.ranks, ranks)))
            rows = range(shared.stop, rows.stop)
        if not rows:
            continue
        if found and found[-1].ranks == ranks and found[-1].rows.stop == rows.start:
            rows = range(found.pop().rows.start, rows.stop)
        found.append(Route(rows, ranks))
    return tuple(found)


def through(routes: Sequence[Route], places: Sequence[int]) -> tuple[Route, ...]:
    """Return the routes between other members, which stand for these: e.g. hosts.

    Args:
        places: by rank, who stands for the member.
    """
    return tuple(Route(one.rows, tuple(dict.fromkeys(places[rank] for rank in one.ranks))) for one in routes)


def rows_for(routes: Sequence[Route], rank: int, rows: range) -> Ranges:
    """Return which of some rows a member needs."""
    if not routes:
        return (rows,) if rows else ()
    return _joined(within(one.rows, rows) for one in routes if not one.ranks or rank in one.ranks)


class Piece(NamedTuple):
    """Rows whose sums travel together."""

    added: tuple[Ranges, ...]
    """By rank: the rows that the member adds up."""
    wanted: Mapping[tuple[int, int], Ranges] | None
    """By (who adds up, who gets it): the rows of the sum that travel. None: all that somebody else adds up."""

    def sum_for(self, source: int, target: int) -> Ranges:
        """Return the rows whose sum a member sends to another one."""
        return self.added[source] if self.wanted is None else self.wanted.get((source, target), ())


def routed(rows: range, size: int, routes: Sequence[Route]) -> Piece:
    """Return who adds up which of some rows, and who gets the sums. Pure: the same on all members.

    Args:
        size: number of members.
    """
    if not routes:
        return Piece(tuple((part,) if part else () for part in split_rows(rows, size)), None)
    added: list[list[range]] = [[] for _ in range(size)]
    wanted: dict[tuple[int, int], list[range]] = {}
    for one in routes:
        if not (part := within(one.rows, rows)):
            continue
        adding = enumerate(split_rows(part, size)) if not one.ranks else [(one.ranks[0], part)]
        for source, own in adding:
            added[source].append(own)
            for target in one.ranks or range(size):
                if target != source:
                    wanted.setdefault((source, target), []).append(own)
    return Piece(tuple(map(_joined, added)), {pair: _joined(each) for pair, each in wanted.items()})


def _both(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*one, *other))) if one and other else ()


def within(rows: range, limits: range) -> range:
    """Return those of some rows that lie within others."""
    return range(max(rows.start, limits.start), min(rows.stop, limits.stop))


def _joined(parts: Iterable[range]) -> Ranges:
    """Return ascending rows without those that are empty, and neighbours as one."""
    found: list[range] = []
    for part in parts:
        if part and found and found[-1].stop == part.start:
            found[-1] = range(found[-1].start, part.stop)
        elif part:
            found.append(part)
    return tuple(found)
