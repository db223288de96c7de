"""Samples that are left out: the text that names them, the cut of a batch without them, and their first use."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.test_cursor import cursors
from unisono.core.cursor import Cursor, PartOfCursor, Without
from unisono.core.errors import UsageError
from unisono.core.orders import Drawn, Sequential, Shuffled
from unisono.core.without import chosen, first_use, order_named, ranges_in, shards_in
from unisono.record.without import MOST_BYTES, read_ranges

MORE = 3
"""Epochs that are looked at."""


def named(text: str, num_samples: int = 1000) -> set[int]:
    return {*chosen(ranges_in(text, "gone.txt", num_samples), "gone.txt", num_samples).samples}


@st.composite
def leaving(draw: st.DrawFn) -> tuple[Cursor, Cursor]:
    """A cursor, and the same without some samples."""
    cursor = draw(cursors())
    samples = frozenset(draw(st.sets(st.integers(0, cursor.num_samples - 1), min_size=1)))
    return cursor, dataclasses.replace(cursor, without=Without(samples, ""))


def test_a_list_has_indices_ranges_blank_lines_and_comments() -> None:
    assert named("# asked for\n\n7\r\n 3 \n3 # twice\n10-12\n20 - 20\n") == {3, 7, 10, 11, 12, 20}


@given(st.sets(st.integers(0, 998), min_size=1), st.randoms())
def test_the_same_samples_have_the_same_name_however_they_are_written(samples: set[int], draw: object) -> None:
    written = list(samples) * 2
    draw.shuffle(written)  # type: ignore[attr-defined]
    one = chosen(ranges_in("\n".join(map(str, written)), "a", 1000), "a", 1000)
    other = chosen([range(each, each + 1) for each in sorted(samples)], "b", 1000)
    assert one.name == other.name
    assert one.text == "".join(f"{each}\n" for each in sorted(samples))
    assert one.name != chosen([range(999, 1000), *(range(each, each + 1) for each in samples)], "c", 1000).name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3\n-5\n", "gone.txt, line 2: '-5' is neither"),
        ("1\n\nseven\n", "gone.txt, line 3: 'seven' is neither"),
        ("9-7", "line 1: '9-7' is neither"),
        ("1.5", "'1.5' is neither"),
        ("٣", "is neither"),
        ("1" * 100, "is neither"),
        ("2\n1000", "gone.txt, line 2: there is no sample 1000: the dataset has 1000 samples, and the last one"),
        ("990-1003", "there is no sample 1003"),
        ("# nothing\n", "gone.txt names no sample"),
        ("0-999", "leaves out all 1000 samples"),
    ],
)
def test_a_wrong_list_is_refused_with_its_line_and_value(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        named(text)
    assert words in str(refused.value)


def test_a_shard_stands_for_its_samples() -> None:
    shards = shards_in(
        {"a b": range(3, 5), "c": [5, 9], "odd": range(0, 9, 2), "far": (0, 11), "no": "text", 7: (0, 1)}, 10
    )
    assert shards == {"a b": (3, 5), "c": (5, 9)}
    assert ranges_in("shard a b\n1 # and one more\nshard  c\n", "gone.txt", 10, shards) == [
        range(3, 5),
        range(1, 2),
        range(5, 9),
    ]
    assert ranges_in("shard nobody knows yet", "gone.txt") == [range(0)]
    with pytest.raises(UsageError, match=r"gone.txt, line 2: the dataset has no shard 'd': it has a b, c\. A Concat"):
        ranges_in("3\nshard d", "gone.txt", 10, shards)
    with pytest.raises(UsageError, match="it names no shards"):
        ranges_in("shard d", "gone.txt", 10)


def test_a_range_is_not_counted_out_before_the_data_set_is_known() -> None:
    assert ranges_in(f"0-{10**18 - 1}", "gone.txt") == [range(10**18)]


def test_a_file_that_is_no_list_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe1\n")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", MOST_BYTES + 1)
    for name, words in {
        "pipe": "cannot be read: it is not a regular file",
        "large": "cannot be read: it has more than 64 MiB",
        "bytes": "is not text",
        "absent": "cannot be read: No such file",
        ".": "cannot be read: it is not a regular file",
    }.items():
        with pytest.raises(UsageError, match=words):
            read_ranges(str(tmp_path / name))
    (tmp_path / "list").write_text("7\n1-2\n")
    assert read_ranges(str(tmp_path / "list"), 8) == [range(7, 8), range(1, 3)]


@settings(max_examples=50)
@given(leaving())
def test_each_micro_batch_has_its_samples_without_those_that_are_left_out(pair: tuple[Cursor, Cursor]) -> None:
    whole, cursor = pair
    assert cursor.without is not None
    out = cursor.without.samples
    for step in range(MORE * whole.steps_per_epoch):
        position, before = cursor.position(step), whole.position(step)
        assert position.num_leaves == before.num_leaves
        for leaf in range(position.num_leaves):
            expected = [index for index in whole.indices(step, leaf) if index not in out]
            assert cursor.indices(step, leaf) == expected
            assert cursor.keys(step, leaf) == [key for key in whole.keys(step, leaf) if key[0] not in out]
            assert len(position.leaf(leaf)) == len(expected)
        assert position.num_samples == sum(len(position.leaf(leaf)) for leaf in range(position.num_leaves))
    assert {**whole.recipe, "without": cursor.without.name} == cursor.recipe


@given(leaving(), st.integers(1, 9))
def test_the_parts_of_replicas_have_the_same_samples_together(pair: tuple[Cursor, Cursor], size: int) -> None:
    cursor = pair[1]
    cursor = dataclasses.replace(cursor, batch_size=cursor.microbatches * size, drop_last=False)
    if cursor.num_samples % cursor.batch_size:
        return  # its last batch may have no sample for each replica
    parts = [PartOfCursor.of(cursor, number, cursor.microbatches) for number in range(cursor.microbatches)]
    for step in range(cursor.steps_per_epoch):
        position = cursor.position(step)
        expected = [cursor.indices(step, leaf) for leaf in range(position.num_leaves)]
        assert [part.indices(step, 0) for part in parts] == expected
        assert sum(part.position(step).num_samples for part in parts) == position.num_samples


@given(leaving(), st.integers(1, 4), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_the_first_use_is_found_from_the_journal(pair: tuple[Cursor, Cursor], inner: int, lengths: list[int]) -> None:
    """Of a run with several calls of ``run.steps``, which begin a new epoch each, and of rounds of several steps."""
    whole, cursor = pair
    assert cursor.without is not None
    lines, expected, epoch = [], None, 0
    for length in lengths:
        phase = dataclasses.replace(cursor, first_epoch=epoch)
        full = dataclasses.replace(whole, first_epoch=epoch)
        for first in range(0, length, inner):
            steps = range(first, min(first + inner, length))
            if expected is None and any(phase.position(step).left_out for step in steps):
                expected = len(lines)
            lines.append((full.position(first).epoch, sum(full.position(step).num_samples for step in steps)))
        epoch += -(-length // whole.steps_per_epoch)
    full_batches = whole.num_samples // whole.batch_size * whole.batch_size
    used = full_batches if whole.drop_last else whole.num_samples
    assert first_use(lines, whole.order, whole.seed, used, cursor.without.samples) == expected


@given(leaving(), st.integers(0, 40))
def test_a_worker_finds_the_first_use_by_itself(pair: tuple[Cursor, Cursor], steps: int) -> None:
    whole, cursor = pair
    fewer = [cursor.position(step).num_samples < whole.position(step).num_samples for step in range(steps)]
    assert cursor.first_left_out(steps) == (fewer.index(True) if any(fewer) else None)


@pytest.mark.parametrize("order", [Sequential.of(40), Shuffled.of(40), Shuffled(16, 40), Drawn(16, 40)])
def test_an_order_that_its_name_says_whole_is_found_by_it(order: Shuffled) -> None:
    assert order_named(order.name, 40) == order


@pytest.mark.parametrize("name", ["drawn by weights 00ff", "subset 00ff, shuffled", "tar shards, lengths 00ff", ""])
def test_no_other_order_is_known_by_its_name(name: str) -> None:
    assert order_named(name, 40) is None
