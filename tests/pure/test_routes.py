"""Where the sums of rows go: every row is added up once, and comes to all that need it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from unisono.core.routes import Route, routed, routes_of, rows_for, split_rows, through

SIZE = 4


@st.composite
def tables(draw: st.DrawFn) -> list[tuple[range, tuple[int, ...]]]:
    """Neighbours, some of which share a row, as two parameters do."""
    found, start = [], 0
    for _ in range(draw(st.integers(1, 8))):
        stop = start + draw(st.integers(1, 6))
        ranks = draw(st.lists(st.integers(0, SIZE - 1), unique=True, max_size=SIZE))
        found.append((range(start, stop), tuple(ranks)))
        start = stop - draw(st.integers(0, 1))
    return found


def needing(table: Sequence[tuple[range, tuple[int, ...]]], row: int) -> set[int]:
    """The ranks that need a row, by the definition."""
    found = set()
    for rows, ranks in table:
        if row in rows:
            found |= set(ranks or range(SIZE))
    return found


@given(tables())
def test_a_row_of_two_parameters_goes_to_all_that_need_either(table: list[tuple[range, tuple[int, ...]]]) -> None:
    routes = routes_of(table)
    end = table[-1][0].stop
    assert [row for one in routes for row in one.rows] == list(range(end))
    for rank in range(SIZE):
        rows = {row for part in rows_for(routes, rank, range(end)) for row in part}
        assert rows == {row for row in range(end) if rank in needing(table, row)}


@given(tables(), st.integers(1, 4))
def test_every_row_is_added_up_once_and_comes_to_all_that_need_it(
    table: list[tuple[range, tuple[int, ...]]], num_pieces: int
) -> None:
    routes, end = routes_of(table), table[-1][0].stop
    added, come = [0] * end, [set[int]() for _ in range(end)]
    for piece in split_rows(range(end), num_pieces):
        found = routed(piece, SIZE, routes)
        for source in range(SIZE):
            for row in (row for part in found.added[source] for row in part):
                assert row in piece
                added[row] += 1
                come[row].add(source)
            for target in set(range(SIZE)) - {source}:
                sent = [row for part in found.sum_for(source, target) for row in part]
                assert set(sent) <= {row for part in found.added[source] for row in part}
                for row in sent:
                    come[row].add(target)
    assert added == [1] * end
    assert come == [needing(table, row) for row in range(end)]


def test_without_routes_all_get_equal_parts() -> None:
    found = routed(range(3, 13), 3, ())
    assert found.added == ((range(3, 6),), (range(6, 9),), (range(9, 13),))
    assert [found.sum_for(source, 1) for source in (0, 2)] == [found.added[0], found.added[2]]
    assert rows_for((), 2, range(3, 13)) == (range(3, 13),)


def test_the_first_that_needs_rows_adds_them_up() -> None:
    routes = (Route(range(6), (2, 0)), Route(range(6, 10), ()))
    found = routed(range(10), 2 + 1, routes)
    assert found.added == ((range(6, 7),), (range(7, 8),), (range(6), range(8, 10)))
    assert found.sum_for(2, 0) == (range(6), range(8, 10))
    assert found.sum_for(2, 1) == (range(8, 10),)


def test_hosts_stand_for_their_members() -> None:
    routes = (Route(range(4), (1, 0)), Route(range(4, 5), (3, 1)), Route(range(5, 6), ()))
    assert [one.ranks for one in through(routes, [0, 0, 1, 1])] == [(0,), (1, 0), ()]
