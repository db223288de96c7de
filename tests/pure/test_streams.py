"""Streams as decisions: which samples a micro-batch has, how shards are cut, and samples in tar files."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.errors import RecipeError
from unisono.core.orders import Sequential
from unisono.core.stream_plan import StreamBatches, StreamCursor, StreamPart, cut, window_order
from unisono.engine.microbatch.data import Loading
from unisono.engine.microbatch.shards import TarShards, count_samples, samples_of
from unisono.engine.microbatch.streamfetcher import StreamFetcher
from unisono.engine.microbatch.streamreader import Reader, is_alike
from unisono.engine.microbatch.streams import Streams

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def cursor(lengths: list[int], share: int, *, drop_last: bool = False) -> StreamCursor:
    return StreamCursor(
        order=Sequential(sum(lengths), max(lengths) * len(lengths), "streams"),
        batch_size=share * len(lengths),
        microbatches=len(lengths),
        seed=1,
        lengths=tuple(lengths),
        drop_last=drop_last,
    )


@given(LENGTHS, st.integers(1, 7))
def test_an_epoch_has_every_sample_once(lengths: list[int], share: int) -> None:
    where = cursor(lengths, share)
    indices: list[int] = []
    for step in range(where.steps_per_epoch):
        position = where.position(step)
        assert position.num_leaves >= 1
        assert position.num_samples == sum(len(position.leaf(leaf)) for leaf in range(position.num_leaves))
        for leaf in range(position.num_leaves):
            wanted = where.wanted(step, leaf)
            assert wanted.stream == where.stream(step, leaf)
            assert len(where.indices(step, leaf)) == wanted.number >= 1
            indices += where.indices(step, leaf)
    assert len(indices) == sum(lengths)
    assert max(indices) < where.order.num_indices
    assert {(index % len(lengths), index // len(lengths)) for index in indices} == {
        (stream, sample) for stream, length in enumerate(lengths) for sample in range(length)
    }


@given(LENGTHS, st.integers(1, 7))
def test_without_the_rest_every_batch_is_full(lengths: list[int], share: int) -> None:
    if min(lengths) < share:
        with pytest.raises(RecipeError, match="drop_last=True leaves nothing"):
            cursor(lengths, share, drop_last=True)
        return
    where = cursor(lengths, share, drop_last=True)
    assert {where.position(step).num_samples for step in range(where.steps_per_epoch)} == {where.batch_size}


@given(LENGTHS, st.integers(1, 7), st.integers(1, 3))
def test_replicas_share_out_the_streams(lengths: list[int], share: int, num_parts: int) -> None:
    whole = cursor(lengths * num_parts, share)
    parts = [StreamPart.of(whole, part, num_parts) for part in range(num_parts)]
    for step in range(whole.steps_per_epoch + 1):
        found = []
        for part in parts:
            position = part.position(step)
            own = [part.wanted(step, leaf) for leaf in range(position.num_leaves)]
            assert own
            assert {one.stream for one in own} <= set(part.streams)
            assert [part.stream(step, leaf) for leaf in range(position.num_leaves)] == [one.stream for one in own]
            assert position.num_samples == sum(one.number for one in own)
            found += own
        assert found == [whole.wanted(step, leaf) for leaf in range(whole.position(step).num_leaves)]


def test_where_lengths_are_unknown_all_streams_go_on() -> None:
    where = StreamCursor(
        order=Sequential(80, 104, "streams"), batch_size=8, microbatches=4, seed=1, num_steps=10, first_sample=6
    )
    assert where.wanted(3, 2)[:5] == (2, 4, 0, 12, 2)
    assert where.steps_per_epoch == 10
    assert "num_samples" not in where.recipe  # another max_steps is no other recipe
    assert where.recipe["order"] == "streams, from sample 6 on"


def test_a_recipe_has_the_length_of_each_stream() -> None:
    assert cursor([10, 20], 2).recipe == cursor([10, 20], 2).recipe != cursor([20, 10], 2).recipe


@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_an_evaluation_has_every_batch_once(lengths: list[int], size: int, drop_last: bool) -> None:
    batches = StreamBatches(tuple(lengths), size, 1, drop_last)
    wanted = [batches.wanted(0, leaf) for leaf in range(batches.num_batches)]
    assert sum(one.number for one in wanted) == batches.num_samples
    for stream, length in enumerate(lengths):
        own = [one for one in wanted if one.stream == stream]
        assert [one.first for one in own] == [place * size for place in range(len(own))]
        assert sum(one.number for one in own) == (length - length % size if drop_last else length)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 9))
def test_shards_are_cut_into_streams_of_equal_length(lengths: list[int], num_streams: int) -> None:
    if sum(lengths) < num_streams:
        with pytest.raises(
            RecipeError, match=f"{sum(lengths)} samples in all cannot be cut into {num_streams} streams"
        ):
            cut(lengths, num_streams)
        return
    streams = cut(lengths, num_streams)
    sizes = [sum(piece.stop - piece.first for piece in pieces) for pieces in streams]
    assert max(sizes) - min(sizes) <= 1
    samples = Counter((p.shard, n) for pieces in streams for p in pieces for n in range(p.first, p.stop))
    assert samples == Counter((shard, n) for shard, length in enumerate(lengths) for n in range(length))


@given(st.integers(0, 200), st.integers(0, 2**63))
def test_a_window_is_shuffled(size: int, seed: int) -> None:
    assert sorted(window_order(seed, 3, size)) == list(range(size))


# -- reading -----------------------------------------------------------------------------------------


class Sought:
    """The numbers of one stream, which can be opened in the middle."""

    def __init__(self, first: int, stop: int, tell: Callable[[int], int] = int) -> None:
        self.first, self.stop, self._tell = first, stop, tell

    def seek(self, sample: int) -> None:
        self.first += sample

    def __iter__(self) -> Any:
        return map(self._tell, range(self.first, self.stop))


@pytest.mark.parametrize("shuffle", [0, 1, 7])
@pytest.mark.parametrize("seekable", [False, True])
def test_a_position_has_the_same_sample_however_it_is_reached(shuffle: int, seekable: bool) -> None:
    """In a row, or by a reader that begins there, or goes back."""

    def make(stream: int, num_streams: int, epoch: int) -> Any:
        numbers = Sought(stream * 50, stream * 50 + 50)
        return numbers if seekable else iter(numbers)

    data = Streams(make, lengths=[50, 50], shuffle=shuffle)
    where = cursor([50, 50], 5)
    wanted = [where.wanted(step, leaf) for step in range(2 * where.steps_per_epoch) for leaf in range(2)]
    whole = Reader(data, 1)
    in_a_row = {one: whole.read(one) for one in wanted}
    for epoch in range(2):
        seen = sorted(number for one in wanted if one.epoch == epoch for number in in_a_row[one])
        assert seen == list(range(100))
    other = Reader(data, 1)
    for one in (*wanted[::-3], *wanted[::4]):
        assert other.read(one) == in_a_row[one]


def test_a_stream_that_has_moved_away_is_closed() -> None:
    opened = Counter[int]()
    closed: list[int] = []

    def numbers(stream: int, num_streams: int, epoch: int) -> Any:
        opened[stream] += 1
        try:
            yield from range(200)
        finally:
            closed.append(stream)

    where = cursor([200] * 8, 1)
    reader = Reader(Streams(numbers, lengths=[200] * 8), 1)
    for step in range(20):
        for leaf in range(8):
            reader.read(where.wanted(step, leaf))
    assert opened.total() == 8 + 2  # two to compare
    closed.clear()
    for step in range(20, 60):
        for leaf in (0, 5):
            reader.read(where.wanted(step, leaf))
    assert sorted(closed) == [1, 2, 3, 4, 6, 7]
    assert opened.total() == 8 + 2


def test_a_file_is_no_stream_that_can_be_sought() -> None:
    def file(*_: int) -> Any:
        return io.StringIO("0\n1\n2\n3\n")

    def lines(*_: int) -> Any:
        yield from file()

    where = cursor([4], 1)
    with pytest.raises(RecipeError, match="is a StringIO, which is a file"):
        Reader(Streams(file, lengths=[4]), 1).read(where.wanted(0, 0))
    assert Reader(Streams(lines, lengths=[4]), 1).read(where.wanted(2, 0)) == ["2\n"]


@pytest.mark.parametrize("kind", ["function", "shards"])
def test_a_batch_draws_the_same_numbers_however_it_is_reached(kind: str, tmp_path: Path) -> None:
    """In a row, once more, or as the first one that is read; also where no sample draws any."""
    lengths = [15, 15]
    data = (
        Streams(lambda stream, num_streams, epoch: iter(range(15)), lengths=lengths)
        if kind == "function"
        else TarShards(write(tmp_path / "0.tar", SAMPLES), lengths=30)
    )
    loading = Loading(collate=lambda samples: (torch.rand(2).tolist(), random.random()))

    def fetcher() -> StreamFetcher:
        return StreamFetcher(data, cursor(lengths, 5), device=torch.device("cpu"), loading=loading)

    whole = fetcher()
    in_a_row = {(step, leaf): whole.fetch(step, leaf) for step in range(3) for leaf in range(2)}
    assert len(set(map(str, in_a_row.values()))) == 6
    assert whole.fetch(2, 1, 1) == in_a_row[2, 1]
    for step, leaf in reversed(in_a_row):
        torch.manual_seed(step)
        assert fetcher().fetch(step, leaf) == in_a_row[step, leaf]


@pytest.mark.parametrize("seekable", [False, True])
def test_nobody_reads_far_only_to_compare(seekable: bool) -> None:
    """Unless the stream can be sought, or lies near because this worker reads it."""
    num_read = [0]

    def counted(number: int) -> int:
        num_read[0] += 1
        return number

    def make(stream: int, num_streams: int, epoch: int) -> Any:
        return Sought(0, 50_000, counted) if seekable else map(counted, range(50_000))

    where = cursor([50_000, 50_000], 2)
    fetcher = StreamFetcher(
        Streams(make, lengths=[50_000, 50_000]), where, device=torch.device("cpu"), loading=Loading()
    )
    assert fetcher.comes(2000, 1)
    assert fetcher.comes(12_000, 1) is seekable
    assert fetcher.comes(3000, 0) is seekable
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert fetcher.fetch(12_000, 1).tolist() == [24_000, 24_001]
    assert ["is read past 24000 samples" in str(one.message) for one in told] == ([] if seekable else [True])
    assert fetcher.comes(12_001, 1)
    assert fetcher.is_near(12_000, 1)  # read last
    assert fetcher.is_near(11_999, 1) is seekable  # behind
    assert fetcher.is_near(100, 1)
    assert fetcher.is_near(25_001, 1)
    assert fetcher.is_near(25_000 + 12_001, 1) is seekable  # in the next epoch, which has 25,000 steps as well
    before = num_read[0]
    assert fetcher.fetch(20_000, 1).tolist() == [40_000, 40_001]
    assert (num_read[0] - before < 10) is seekable


# -- tar files ---------------------------------------------------------------------------------------


def write(path: Path, samples: list[dict[str, bytes]], kind: int = tarfile.PAX_FORMAT, prefix: str = "") -> Path:
    with tarfile.open(path, "w", format=kind) as archive:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for number, sample in enumerate(samples):
            for ending, content in sample.items():
                entry = tarfile.TarInfo(f"{prefix}a/{number:04}.{ending}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return path


SAMPLES = [{"jpg": bytes([number]) * (500 + number), "Seg.png": b"x" * number} for number in range(30)]


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("prefix", ["", "long/" * 25])
def test_samples_are_files_with_one_name_up_to_the_dot(kind: int, prefix: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", SAMPLES, kind, prefix)
    expected = [
        {"__key__": f"{prefix}a/{number:04}", "jpg": sample["jpg"], "seg.png": sample["Seg.png"]}
        for number, sample in enumerate(SAMPLES)
    ]
    assert list(samples_of(str(path))) == expected
    assert list(samples_of(str(path), 17)) == expected[17:]
    assert count_samples(str(path)) == 30
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert list(samples_of(str(packed), 3)) == expected[3:]


def test_files_that_belong_to_no_sample_are_passed_over(tmp_path: Path) -> None:
    with tarfile.open(path := tmp_path / "a.tar", "w") as archive:
        for name in ("README", "__meta__", "a.b/0.txt", "a.b/LICENSE", "__all__/x.txt", "a.b/._0.txt", "a.b/0.cls"):
            entry = tarfile.TarInfo(name)
            entry.size = len(name)
            archive.addfile(entry, io.BytesIO(name.encode()))
    assert list(samples_of(str(path))) == [{"__key__": "a.b/0", "txt": b"a.b/0.txt", "cls": b"a.b/0.cls"}]
    assert count_samples(str(path)) == 1


@pytest.mark.parametrize("size", [0, 700, 1024, 5000, 20480])
def test_a_shard_that_was_cut_is_found(size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", SAMPLES)
    path.write_bytes(path.read_bytes()[:size])
    for read in (count_samples, lambda name: list(samples_of(name))):
        with pytest.raises(RecipeError, match=r"a\.tar was cut: .* after byte \d+"):
            read(str(path))


@pytest.mark.parametrize("byte", [0, 130, 135, 150])
def test_a_header_that_is_not_what_was_written_is_found(byte: int, tmp_path: Path) -> None:
    """Else a file would have another size, and the sample be another one."""
    path = write(tmp_path / "a.tar", SAMPLES)
    with tarfile.open(path) as archive:
        second = archive.getmembers()[1].offset
    content = bytearray(path.read_bytes())
    content[second + byte] ^= 1
    path.write_bytes(content)
    for read in (count_samples, lambda name: list(samples_of(name))):
        with pytest.raises(
            RecipeError, match=rf"a\.tar is damaged: the header of '.*' at byte {second} has the checksum"
        ):
            read(str(path))


def test_a_checksum_of_signed_bytes_counts_as_well(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("ä.txt"))
    content = bytearray(path.read_bytes())
    signed = sum(byte - 256 * (byte > 127) for byte in content[:148] + b" " * 8 + content[156:512])
    content[148:156] = b"%06o\0 " % signed
    path.write_bytes(content)
    assert list(samples_of(str(path))) == [{"__key__": "ä", "txt": b""}]


def test_shards_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "0.tar", SAMPLES)
    (tmp_path / "1.tar").write_bytes(b"no tar " * 1000)
    data = TarShards(str(tmp_path / "{0..1}.tar"))
    with pytest.raises(RecipeError, match=r"1\.tar is not a tar archive: no entry begins at byte 0"):
        data.lengths(2)
    with pytest.raises(RecipeError, match=r"2\.tar cannot be opened \(FileNotFoundError"):
        TarShards(tmp_path / "2.tar").lengths(2)
    with pytest.raises(RecipeError, match=r"2 shards and 3 lengths"):
        TarShards(str(tmp_path / "{0,1}.tar"), lengths=[1, 2, 3])
    with pytest.raises(RecipeError, match="got an empty list"):
        TarShards([])
    with pytest.raises(RecipeError, match=r"\{127\.\.000\} counts from 127 to 0"):
        TarShards("train-{127..000}.tar")


def test_shards_are_urls_as_well(tmp_path: Path) -> None:
    content = write(tmp_path / "0.tar", SAMPLES).read_bytes()
    with fsspec.open("memory://streams/0.tar", "wb") as file:
        file.write(content)
    data = TarShards("memory://streams/{0..0}.tar", shuffle=0)
    where = cursor([30], 10)
    keys = [sample["__key__"] for step in (2, 0) for sample in Reader(data, 1).read(where.wanted(step, 0))]
    assert keys == [f"a/{number:04}" for number in (*range(20, 30), *range(10))]


@pytest.mark.parametrize(("said", "words"), [(31, "has 30 samples, not 31"), (29, "has more than 29 samples")])
def test_a_shard_of_another_length_is_found(said: int, words: str, tmp_path: Path) -> None:
    data = TarShards(write(tmp_path / "0.tar", SAMPLES), lengths=said, shuffle=0)
    where = cursor([said], said)
    with pytest.raises(RecipeError, match=words):
        Reader(data, 1).read(where.wanted(0, 0))


def test_numbers_in_braces_stand_for_shards() -> None:
    assert TarShards("s3://b/{a,b}-{08..10}.tar", lengths=1).shards == [
        f"s3://b/{part}-{number}.tar" for part in "ab" for number in ("08", "09", "10")
    ]


def test_samples_are_compared_by_what_they_hold() -> None:
    pairs: list[tuple[Any, Any, bool]] = [
        ({"a": [1, 2.0, "x"]}, {"a": [1, 2.0, "x"]}, True),
        ({"a": [1, 2.0, "x"]}, {"a": [1, 2.5, "x"]}, False),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.ones(2), torch.ones(3), False),
        (b"a", "a", False),
        (torch.tensor(1.0, dtype=torch.float8_e5m2), torch.tensor(1.0, dtype=torch.float8_e5m2), True),
        (torch.tensor(1.0, dtype=torch.float8_e5m2), torch.tensor(2.0, dtype=torch.float8_e5m2), False),
        (numpy.float32(1), numpy.float32(1), True),
        (numpy.float32(1), numpy.float32(2), False),
        (object(), object(), True),
    ]
    for a, b, expected in pairs:
        assert is_alike(a, b) is expected
    assert not is_alike({"a": [object()]}, {"a": [object()]}, unknown=False)
