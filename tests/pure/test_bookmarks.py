"""Bookmarks: a stream that moves goes on from a state, with the samples that reading from its beginning gives."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from tests.pure.test_streams import cursor
from unisono.core.errors import UsageError
from unisono.core.orders import Sequential
from unisono.core.stream_plan import StreamCursor, WantedSamples
from unisono.engine.microbatch.bookmarks import (
    FOLLOWING,
    STRIDE,
    Bookmark,
    Bookmarks,
    News,
    Taken,
    digest_of_sample,
    together,
)
from unisono.engine.microbatch.data import Loading
from unisono.engine.microbatch.streamfetcher import StreamFetcher
from unisono.engine.microbatch.streamreader import Reader
from unisono.engine.microbatch.streams import Streams
from unisono.engine.state.packing import from_bytes, to_bytes
from unisono.script.schedule import Bookmarking

LENGTH = 1000


class Numbers:
    """The numbers of a stream with a random one each, and a state: as torchdata and Hugging Face have it."""

    num_read = 0

    def __init__(self, length: int, lacks: int = 0) -> None:
        self._length, self._lacks = length, lacks
        self._first = self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._first = state["next"] + self._lacks

    def __iter__(self) -> Iterator[tuple[int, float]]:
        self._next, self._first = self._first % self._length, 0  # from the state of its end it begins again
        while self._next < self._length:
            number, self._next = self._next, self._next + 1
            Numbers.num_read += 1
            yield number, random.random()


def streams(*, known: bool, shuffle: int = 0, length: int = LENGTH, lacks: int = 0) -> Streams:
    def make(stream: int, num_streams: int, epoch: int) -> Numbers:
        return Numbers(length, lacks)

    return Streams(make, lengths=[length] * 2 if known else None, shuffle=shuffle)


def where(*, known: bool, length: int = LENGTH) -> StreamCursor:
    if known:
        return cursor([length, length], 10)
    return StreamCursor(order=Sequential(80, 104, "streams"), batch_size=20, microbatches=2, seed=1, num_steps=300)


def read(data: Streams, wanted: list[WantedSamples]) -> tuple[list[Any], list[Bookmark]]:
    """Return the samples in a row, and the bookmarks that were taken."""
    reader = Reader(data, 1, marks=True)
    return [reader.read(one) for one in wanted], [bookmark for _, bookmark in reader.news().taken]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("shuffle", [0, 1, 7, 300])
def test_a_bookmark_gives_the_samples_that_reading_gives(shuffle: int, known: bool) -> None:
    """Of each pass over the data, and of each place after the bookmark."""
    data, at = streams(known=known, shuffle=shuffle), where(known=known)
    wanted = [at.wanted(step, 1) for step in range(250)]
    samples, bookmarks = read(data, wanted)
    assert {one.epoch for one in bookmarks} == {0, 1, 2}
    for bookmark in bookmarks:
        assert from_bytes(bookmark.state) == {"next": bookmark.position - 1}
        served = [place for place, one in enumerate(wanted) if bookmark.serves(one)]
        if not served:
            assert bookmark is bookmarks[-1]  # it was read ahead
            continue
        for place in (served[0], served[len(served) // 3]):
            reader = Reader(data, 1)
            reader._is_checked = True
            Numbers.num_read = 0
            assert reader.read(wanted[place], bookmark) == samples[place]
            assert Numbers.num_read <= wanted[place].first - bookmark.start + 2 * shuffle + FOLLOWING + 10


class Files:
    """Lines of files in an order of the epoch that is drawn when an iteration begins, with a random number each."""

    def __init__(self) -> None:
        self._first = self._next = (0, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first = state["next"]

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        files = random.sample(range(3), 3)
        first_file, first_line = self._first
        for place in range(first_file, 3):
            for line in range(first_line if place == first_file else 0, 400):
                self._next = (place, line + 1)
                yield files[place], line, random.random()


class Eager(Files):
    """Reads its first sample before it is asked for it, if it has a state: as torchdata.nodes.Loader."""

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        samples = super().__iter__()
        return samples if self._first == (0, 0) else itertools.chain([next(samples)], samples)


@pytest.mark.parametrize("kind", [Files, Eager])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_drawn_when_an_iteration_begins_is_drawn_again(seed: int, kind: type[Files]) -> None:
    data = Streams(lambda *_: kind())
    at = where(known=False)
    wanted = [at.wanted(step, 0) for step in range(130)]  # of the second pass as well
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader = Reader(data, seed, marks=True)
        samples = [reader.read(one) for one in wanted]
        bookmarks = [bookmark for _, bookmark in reader.news().taken]
        assert len(bookmarks) == 4
        for bookmark in bookmarks:
            place = -(-bookmark.start // 10)
            other = Reader(data, seed, marks=True)
            assert [other.read(one, bookmark) for one in wanted[place:]] == samples[place:]
            assert other._open[0]._epoch == wanted[-1].first // 1200


class Wrapped:
    """An iterable with a state of its own, and an object that keeps one."""

    def __init__(self, inner: Numbers) -> None:
        self.parts = {"inner": [inner]}

    def state_dict(self) -> Any:
        return self.parts["inner"][0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.parts["inner"][0].load_state_dict(state)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(self.parts["inner"][0])


class Kept(Numbers):
    """Begins at a state that was loaded whenever it is iterated over, as datasets.IterableDataset."""

    def __iter__(self) -> Iterator[tuple[int, float]]:
        first = self._first
        yield from super().__iter__()
        self._first = first


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_state_is_not_loaded_into_an_object_that_comes_again(is_wrapped: bool) -> None:
    """It would stay there, and the next pass would begin in the middle."""
    kept = Kept(LENGTH)
    data, at = Streams(lambda *_: Wrapped(kept) if is_wrapped else kept), where(known=False)
    wanted = [at.wanted(step, 0) for step in range(250)]
    with pytest.warns(UserWarning, match="an object that it had returned before"):
        samples, bookmarks = read(data, wanted)
    assert bookmarks == []
    assert [number for batch in samples for number, _ in batch] == [place % LENGTH for place in range(2500)]
    bookmark = Bookmark(0, 0, 512, to_bytes({"next": 511}), digest_after(data, 512))
    reader = Reader(data, 1, marks=True)
    with pytest.warns(UserWarning, match="an object that it had returned before"):
        assert [reader.read(one, bookmark) for one in wanted[60:]] == samples[60:]


def digest_after(data: Streams, position: int) -> bytes:
    source = iter(Numbers(LENGTH))
    following = [data.sample(source, 1, 0, 0, number) for number in range(position + FOLLOWING)][position:]
    return together(map(digest_of_sample, following))


class Failing(Numbers):
    """Cannot be opened with a state at first, as where a server does not answer."""

    has_failed = False

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not Failing.has_failed:
            Failing.has_failed = True
            raise OSError("no answer")
        super().load_state_dict(state)


def test_an_error_is_no_reason_to_use_no_states_any_more() -> None:
    data, at = Streams(lambda *_: Failing(LENGTH), lengths=[LENGTH] * 2), where(known=True)
    wanted = [at.wanted(step, 0) for step in range(90)]
    samples, bookmarks = read(data, wanted)
    reader = Reader(data, 1, marks=True)
    with pytest.warns(
        UserWarning, match=("is read from its beginning, because its state could not be used: OSError: no ans")
    ):
        assert reader.read(wanted[60], bookmarks[0]) == samples[60]
    assert reader.news().able
    reader.close(0)
    Numbers.num_read = 0
    assert reader.read(wanted[80], bookmarks[-1]) == samples[80]
    assert Numbers.num_read < 100


@pytest.mark.parametrize("lacks", [1, 740])
def test_a_state_that_gives_other_samples_is_not_used(lacks: int) -> None:
    """As that of a shuffle buffer whose content is not in the state; or there are none any more."""
    data, at = streams(known=True, lacks=lacks), where(known=True)
    wanted = [at.wanted(step, 0) for step in range(90)]
    samples, bookmarks = read(data, wanted)
    reader = Reader(data, 1, marks=True)
    with pytest.warns(UserWarning, match="stream 0 of 2 does not continue from its state.*read from its beginning"):
        assert reader.read(wanted[60], bookmarks[0]) == samples[60]
    assert reader.news().able is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert reader.read(wanted[89], bookmarks[-1]) == samples[89]


def test_no_state_is_taken_at_the_end_of_a_pass() -> None:
    """There, many an iterable begins again, and its state says so."""
    data, at = streams(known=False, length=2 * STRIDE), where(known=False)
    _, bookmarks = read(data, [at.wanted(step, 0) for step in range(110)])
    assert [(one.epoch, one.begin, one.position) for one in bookmarks] == [
        (epoch, epoch * 2 * STRIDE, STRIDE) for epoch in range(2)
    ]


class Unsendable(Numbers):
    def state_dict(self) -> Any:
        return {"next": object()}


class Large(Numbers):
    def state_dict(self) -> Any:
        return {"next": bytes(1 << 20)}


class Counted(Numbers):
    def state_dict(self) -> Any:
        return {"next": [Counter("ab")]}


class Truncated:
    def tobytes(self) -> bytes:
        raise OSError("image file is truncated")


class Unread(Numbers):
    def __iter__(self) -> Iterator[Any]:
        return (Truncated() for _ in super().__iter__())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Unsendable, "is a builtins.object"),
        (Large, "has 1,048,... bytes"),
        (Counted, r"state_dict\(\)\['next'\]\[0\] is a Counter"),
        (Unread, "OSError: image file is truncated"),
    ],
)
def test_a_state_that_cannot_travel_is_not_used(kind: type[Numbers], words: str) -> None:
    at = where(known=True)
    data = Streams(lambda *_: kind(LENGTH), lengths=[LENGTH] * 2)
    with pytest.warns(UserWarning, match=words):
        _, bookmarks = read(data, [at.wanted(step, 0) for step in range(90)])
    assert bookmarks == []


def test_what_is_told_is_not_ahead_of_what_was_trained_on() -> None:
    """Loader processes read ahead, and so does the shuffling."""
    at = where(known=True)
    fetcher = StreamFetcher(
        streams(known=True, shuffle=300),
        at,
        device=torch.device("cpu"),
        loading=Loading(collate=list),
        find_bookmark=lambda wanted: None,
    )
    found = []
    for step in range(100):
        fetcher.fetch(step, 1)
        found.append([one.position for one in fetcher.bookmarks().values()])
    assert fetcher.taken.able
    assert len(fetcher.taken._taken[1]) == 1  # older ones are forgotten
    assert found == [[]] * 29 + [[300]] * 30 + [[600]] * 30 + [[900]] * 11


def test_whoever_has_a_bookmark_compares_what_lies_near_it() -> None:
    data, at = streams(known=True, length=9000), where(known=True, length=9000)
    _, bookmarks = read(data, [at.wanted(step, 0) for step in range(600)])
    bookmark = bookmarks[-1]

    def fetcher(found: Bookmark | None) -> StreamFetcher:
        return StreamFetcher(
            data, at, device=torch.device("cpu"), loading=Loading(), find_bookmark=lambda wanted: found
        )

    assert fetcher(bookmark).is_near(700, 0)
    assert not fetcher(None).is_near(700, 0)


def test_workers_agree_on_the_newest_bookmarks() -> None:
    def mark(epoch: int, position: int) -> Bookmark:
        return Bookmark(epoch, 0, position, b"state", b"digest")

    known = Bookmarks()
    wanted = WantedSamples(0, 2, 1, 700, 10, LENGTH)
    known.agree("data", [True, None], [{0: mark(0, 512), 1: mark(0, 256)}, {}])
    known.agree("data", [True, True], [{1: mark(0, 512)}, {0: mark(1, 256), 1: mark(0, 256)}])
    assert known.find("data", wanted) == mark(1, 256)
    assert known.find("other data", wanted) is None
    assert known.find("data", wanted._replace(first=255)) is None
    assert known.find("data", wanted._replace(epoch=2)) is None
    known.agree("without", [None, False, True], [{}, {}, {}])
    known.agree("idle", [None, None], [{}, {}])
    again = Bookmarks()
    again.load_state_dict(from_bytes(to_bytes(known.state_dict())))
    assert again.state_dict() == known.state_dict()
    assert again.find("data", wanted._replace(stream=1, epoch=0)) == mark(0, 512)
    assert [again.has_none(key) for key in ("data", "without", "idle")] == [False, True, False]
    again.try_again()
    assert not again.has_none("without")
    assert known.knows("data", 0, mark(0, 512))
    assert not known.knows("data", 0, mark(1, 512))
    for number in range(20):
        known.agree(f"data {number}", [True], [{}])
    assert len(known.state_dict()["known"]) < 10


def test_older_bookmarks_are_forgotten() -> None:
    taken = Taken()
    marks = [Bookmark(0, 0, STRIDE * number, b"", b"") for number in range(1, 5)]
    taken.note(News(True, [(0, one) for one in marks]))
    assert taken.newest({0: WantedSamples(0, 1, 0, 600, 0, LENGTH)}) == {0: marks[1]}
    assert taken._taken[0] == marks[1:]
    assert taken.newest({}) == {}
    taken.note(News(False, []))
    taken.note(News(True, [(0, marks[3])]))  # of a loader process that does not know yet
    assert (taken.able, taken._taken) == (False, {})


def test_bookmarks_are_told_rarely_with_a_delay_and_over_calls() -> None:
    def steps(**options: int) -> list[int]:
        exchanges = Bookmarking(Bookmarks(), "data", 32, **options)
        return [step for step in range(200) if exchanges.is_due(step - 1, step)]

    assert steps() == [32, 64, 96, 128, 160, 192]
    assert steps(first=992) == [1, 33, 65, 97, 129, 161, 193]
    assert steps(delay=4) == [64, 128, 192]


def test_a_digest_is_of_what_a_sample_holds() -> None:
    class Item:
        def __init__(self, value: Any) -> None:
            self.value = value

    samples: list[Any] = [
        *({"a": [1, 2.0, "x"]}, {"a": [1, 2.5, "x"]}, {"b": [1, 2.0, "x"]}, [1, 2], [12], (1, 2), ["1", 2], [[1], 2]),
        *(b"ab", bytearray(b"ab"), "ab", None, True, 1, 1.0, -0.0, 0.0, [], [[]], {}),
        *(torch.ones(2), torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.int32), torch.zeros(0)),
        *(numpy.ones(2), numpy.ones(2, dtype="f4"), numpy.float32(1), numpy.array(["a", 1], dtype=object)),
        *(Item(1), Item(2), {"a", "b"}, {"a", "c"}, frozenset("a"), deque("a"), deque("b")),
    ]
    digests = [digest_of_sample(sample) for sample in samples]
    assert len(set(digests)) == len(samples)
    assert [digest_of_sample(sample) for sample in samples] == digests
    assert digest_of_sample(numpy.array(["a", 1], dtype=object)) == digests[-8]
    with pytest.raises(UsageError, match="a sample has a object"):
        digest_of_sample([object()])


def test_a_stream_that_was_closed_is_opened_again() -> None:
    at = where(known=True)
    reader = Reader(streams(known=True), 1)
    for step in range(30):
        reader.read(at.wanted(step, 0))
    Numbers.num_read = 0
    reader.close(0)
    reader.close(0)
    reader.read(at.wanted(30, 0))
    assert Numbers.num_read == 310
