"""Reads samples of streams: opens them, goes to a position, shuffles within windows.

Before they are trained on it looks at them: do they give the same samples again, and do they differ?
"""

from __future__ import annotations

import collections
import copy
import itertools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.core.cursor import seed_of
from unisono.core.errors import RecipeError
from unisono.core.stream_plan import WantedSamples, window_order
from unisono.core.words import count as counted
from unisono.engine.microbatch.bookmarks import (
    FOLLOWING,
    BadState,
    Bookmark,
    Marker,
    News,
    Notes,
    NotOpened,
    digest_of_sample,
    is_stateful,
    share_states,
    together,
)
from unisono.engine.microbatch.randomness import seed_everything
from unisono.engine.microbatch.streams import Streams, as_torch_worker, pass_seed, seek_of
from unisono.engine.state.packing import from_bytes, same_bits

__all__ = ["LoadedSamples", "Reader", "is_alike"]

NEAR = 64
"""Samples that are read over rather than sought."""
PATIENCE = 4
"""A stream is closed when so many times as many batches as streams are open have come from other ones."""
MANY = 10_000
"""Samples; whoever has to pass over more is told so."""
COMPARED = 16
"""Samples of two streams, at least, that are alike only by mistake."""


class _Pass:
    """One pass over one stream: its samples in the order in which they are given.

    Args:
        begin: samples of the passes before.
        first: the sample to begin with, where the stream can be sought.
        bookmark: of this pass, to go on from.
        notes: takes the bookmarks of this pass; None: none are taken.

    Raises:
        BadState: the stream does not go on from the bookmark.
        NotOpened: that has failed this time.
    """

    def __init__(
        self,
        data: Streams,
        seed: int,
        wanted: WantedSamples,
        epoch: int,
        *,
        begin: int = 0,
        first: int = 0,
        bookmark: Bookmark | None = None,
        notes: Notes | None = None,
    ) -> None:
        self._data = data
        self._run_seed, self._stream, self._epoch = seed, wanted.stream, epoch
        self._seed = pass_seed(seed, wanted.stream, epoch)
        self.position = 0  # of the next sample
        self._num_read = 0
        self._window: list[Any] = []
        self._following: list[Any] = []  # of the next window, as far as it was read
        self._compared: collections.deque[Any] = collections.deque()  # samples that were read, and are to be given
        source = data.opened(seed, wanted.stream, wanted.num_streams, epoch)
        seek = seek_of(source, wanted)
        self.can_seek = seek is not None
        has_states = seek is None and is_stateful(source)
        if bookmark is not None:
            if not has_states:
                raise BadState("its iterable no longer has state_dict() and load_state_dict()")
            self._source = self._from(source, bookmark)
        else:
            if first and seek is not None:
                self.position = self._num_read = first - first % max(1, data.shuffle)
                seek(self._num_read)
            self._source = iter(source)
        self._marker: Marker | None = None
        if notes is not None:
            notes.opened(able=has_states)
            if has_states:
                self._marker = Marker(source, wanted, epoch, begin, data.shuffle, notes)

    def __next__(self) -> Any:
        sample = self._next()
        if self._data.transform is None:
            return sample
        seed_everything(seed_of(self._seed, "transform", self.position - 1))
        return self._data.transform(sample)

    def skip(self) -> None:
        """Leave out one sample."""
        self._next()

    def has_more(self) -> bool:
        """Return whether there is another sample; reads it if need be."""
        try:
            self._next()
        except StopIteration:
            return False
        return True

    def _next(self) -> Any:
        sample = self._of_window() if self._data.shuffle else self._read()
        self.position += 1
        return sample

    def _of_window(self) -> Any:
        size = self._data.shuffle
        place = self.position % size
        if place == 0:
            while len(self._following) < size and self._read_ahead():
                pass
            order = window_order(self._seed, self.position // size, len(self._following))
            self._window, self._following = [self._following[index] for index in order], []
        if place >= len(self._window):
            raise StopIteration
        sample, self._window[place] = self._window[place], None
        self._read_ahead()  # one for one, so that no window has to be read at once but the first
        return sample

    def _read_ahead(self) -> bool:
        try:
            self._following.append(self._read())
        except StopIteration:
            return False
        return True

    def _read(self) -> Any:
        if self._compared:
            sample = self._compared.popleft()
        else:
            if self._marker is not None:
                self._marker.before(self._num_read)
            sample = self._sample(self._source, self._num_read)
            if self._marker is not None:
                self._marker.after(self._num_read, sample)
        self._num_read += 1
        return sample

    def _sample(self, source: Iterator[Any], position: int) -> Any:
        return self._data.sample(source, self._run_seed, self._stream, self._epoch, position)

    def _from(self, source: Any, bookmark: Bookmark) -> Iterator[Any]:
        """Return the samples that follow a bookmark, after the first ones have been compared.

        Raises:
            BadState: they are other ones.
            NotOpened: an error of the iterable.
        """
        following: list[Any] = []
        try:
            source.load_state_dict(from_bytes(bookmark.state))
            samples: Iterator[Any] = iter(source)
            self._sample(samples, 0)  # the body of a generator begins now, and draws what it draws at the beginning
            following = [self._sample(samples, bookmark.position + number) for number in range(FOLLOWING)]
            digest = together(map(digest_of_sample, following))
        except StopIteration:
            digest = b""
        except Exception as error:  # of the script's own iterable, or of the network
            raise NotOpened(f"{type(error).__name__}: {error}") from error
        if digest != bookmark.digest:
            raise BadState(
                "it gives different samples after load_state_dict() than after state_dict(), at position "
                f"{bookmark.position} of its epoch {bookmark.epoch} (a shuffle buffer whose content is not in the "
                "state? unisono.Streams(..., shuffle=n) needs none)"
            )
        self._compared.extend(following)
        self.position = self._num_read = bookmark.position
        return samples


class _Open:
    """A stream that is open, and can give samples from its position on.

    Args:
        bookmark: to go on from, unless its state turns out to be of no use.
    """

    def __init__(
        self,
        data: Streams,
        seed: int,
        wanted: WantedSamples,
        bookmark: Bookmark | None = None,
        notes: Notes | None = None,
    ) -> None:
        self._data, self._seed, self._notes = data, seed, notes
        self._epoch = wanted.epoch
        self._begin = 0  # where its current pass has begun
        found = self._from(bookmark, wanted) if bookmark is not None else None
        first = wanted.first if wanted.length >= 0 else 0
        self._pass = found if found is not None else _Pass(data, seed, wanted, wanted.epoch, first=first, notes=notes)

    def reaches(self, wanted: WantedSamples, bookmark: Bookmark | None) -> bool:
        """Return whether these samples lie ahead, and not so far that it is better to open the stream anew there."""
        is_same = wanted.length < 0 or wanted.epoch == self._epoch
        at = self._begin + self._pass.position
        opened = wanted.first if self._pass.can_seek else bookmark.start if bookmark is not None else at
        return is_same and wanted.first >= at and opened - at <= NEAR + 2 * self._data.shuffle

    def _from(self, bookmark: Bookmark, wanted: WantedSamples) -> _Pass | None:
        """Return the pass of a bookmark, at its position; None: its state is of no use."""
        begin, epoch, notes = bookmark.begin, bookmark.epoch, self._notes
        place = f"stream {wanted.stream} of {wanted.num_streams}"
        try:
            found = _Pass(self._data, self._seed, wanted, epoch, begin=begin, bookmark=bookmark, notes=notes)
        except BadState as error:
            if notes is not None:
                notes.give_up(f"{place} does not continue from its state: {error}")
            return None
        except NotOpened as error:
            warnings.warn(
                (f"{place} is read from its beginning, because its state could not be used: {error}"), stacklevel=2
            )
            return None
        self._begin, self._epoch = begin, epoch
        return found

    def take(self, wanted: WantedSamples) -> list[Any]:
        if (gap := wanted.first - self._begin - self._pass.position) > MANY:
            warnings.warn(
                f"stream {wanted.stream} of {wanted.num_streams} is read past {gap} samples to reach the one that is "
                "needed, because it cannot be opened in the middle: give its iterable a method seek(n), and "
                "unisono.Streams the lengths, or state_dict() and load_state_dict(); or use unisono.TarShards",
                stacklevel=2,
            )
        while self._begin + self._pass.position < wanted.first:
            self._step(wanted, skips=True)
        samples = [self._step(wanted) for _ in range(wanted.number)]
        if wanted.length == wanted.first + wanted.number and self._pass.has_more():
            raise RecipeError(
                f"stream {wanted.stream} of {wanted.num_streams} gives more than {wanted.length} samples in epoch "
                f"{wanted.epoch}, but lengths says {wanted.length}: give unisono.Streams the true number for each "
                "stream, or leave lengths out and give max_steps"
            )
        return samples

    def _step(self, wanted: WantedSamples, *, skips: bool = False) -> Any:
        """Return the next sample, or leave it out; where a pass has ended, that of the next pass."""
        try:
            return self._pass.skip() if skips else next(self._pass)
        except StopIteration:
            at = self._pass.position
        place = f"stream {wanted.stream} of {wanted.num_streams}"
        if wanted.length >= 0:
            raise RecipeError(
                f"{place} has ended after {counted(at, 'sample')} of epoch {wanted.epoch}, but lengths says "
                f"{wanted.length}: give unisono.Streams the true number for each stream, or leave lengths out and give "
                "max_steps"
            )
        if at == 0:
            raise RecipeError(
                f"{place} gives no sample in its epoch {self._epoch}: every micro-batch needs a stream with data. Use "
                f"fewer micro-batches than {wanted.num_streams}, or cut the data differently"
            )
        self._begin, self._epoch = self._begin + at, self._epoch + 1
        self._pass = _Pass(self._data, self._seed, wanted, self._epoch, begin=self._begin, notes=self._notes)
        return self._step(wanted, skips=skips)


class LoadedSamples(list[Any]):
    """Samples of a micro-batch, from a loader process."""

    news: News


class Reader:
    """Reads samples of streams, wherever they lie. One for each process.

    Args:
        seed: of the run.
        copies: hand out copies of samples that may be asked for again, because whoever gets them may write into them.
        at_once: batches of one stream that are read in a row, before some of another one.
        marks: take bookmarks, which `news` gives.
    """

    def __init__(self, data: Streams, seed: int, *, copies: bool = True, at_once: int = 1, marks: bool = False) -> None:
        self._data, self._seed, self._copies = data, seed, copies
        self._patience = PATIENCE * at_once
        self._notes = Notes() if marks else None
        self._open: dict[int, _Open] = {}
        self._newest: dict[int, tuple[WantedSamples, list[Any]]] = {}  # for another pass over the same global batch
        self._num_reads = 0
        self._last_read: dict[int, int] = {}  # by stream, the number of the read
        self._is_checked = False
        self._can_load = True

    def read(self, wanted: WantedSamples, bookmark: Bookmark | None = None, *, marks: bool = True) -> list[Any]:
        """Return samples of a stream, with the random generators set for what makes a batch of them.

        Args:
            bookmark: to open the stream with, if that is nearer.
            marks: False: no bookmarks are needed any more.

        Raises:
            RecipeError: the stream has other samples than it should.
        """
        if not marks and self._notes is not None:
            self._notes.stop()
        known = self._newest.get(wanted.stream)
        if known is None or known[0] != wanted:
            # In a loader process torch would say that it is worker 0 of 1, and in the worker itself nothing.
            with as_torch_worker(None):
                if not self._is_checked:
                    self._can_load = _check_streams(self._data, self._seed, wanted)
                    self._is_checked = True
                    if not self._can_load and self._notes is not None:
                        self._notes.give_up(
                            "the states of streams are not used, because the function of unisono.Streams returned an "
                            "object that it had returned before, or one that shares parts with it: a loaded state "
                            "would stay in it. Make a new object each time"
                        )
                known = self._newest[wanted.stream] = wanted, self._read(wanted, bookmark)
        self._close_what_has_moved(wanted.stream)
        samples = copy.deepcopy(known[1]) if self._copies else list(known[1])
        # However they were reached, and whatever was drawn for that.
        seed_everything(seed_of(pass_seed(self._seed, wanted.stream, wanted.epoch), "collate", wanted.first))
        return samples

    def __getitems__(self, keys: Sequence[tuple[WantedSamples, Bookmark | None, bool]]) -> LoadedSamples:
        """Return the samples of a micro-batch, in a loader process."""
        samples = LoadedSamples(
            sample for wanted, bookmark, marks in keys for sample in self.read(wanted, bookmark, marks=marks)
        )
        samples.news = self.news()
        return samples

    def news(self) -> News:
        """Return what is new about the states of the streams."""
        return self._notes.news() if self._notes is not None else News(None, [])

    def close(self, stream: int) -> None:
        """Close a stream, which is read elsewhere now."""
        for known in (self._last_read, self._open, self._newest):
            known.pop(stream, None)

    def _close_what_has_moved(self, stream: int) -> None:
        """Note a read, and close the streams that another worker seems to read now: whoever reads streams in turn comes
        to each of them again and again.
        """
        self._num_reads += 1
        self._last_read[stream] = self._num_reads
        oldest = self._num_reads - self._patience * len(self._open)
        for other in [other for other, number in self._last_read.items() if number < oldest]:
            self.close(other)

    def _read(self, wanted: WantedSamples, bookmark: Bookmark | None) -> list[Any]:
        if not self._can_load or (self._notes is not None and self._notes.able is False):
            bookmark = None
        is_open = (stream := self._open.get(wanted.stream)) is not None and stream.reaches(wanted, bookmark)
        if not is_open:
            self._open[wanted.stream] = _Open(self._data, self._seed, wanted, bookmark, self._notes)
        return self._open[wanted.stream].take(wanted)


# -- a look at streams before they are trained on ------------------------------------------------------


def _check_streams(data: Streams, seed: int, wanted: WantedSamples) -> bool:
    """Read the first samples of a stream twice, and where a mistake is likely those of another stream.

    Args:
        seed: of the run.

    Returns:
        Whether a state could be loaded into a stream: not if its iterable, or a part of it with a state, is the same
        object when the stream is made again, and would then begin in the middle.

    Raises:
        RecipeError: the samples differ from one time to the other, or two streams give the same ones.
    """
    number = max(COMPARED if data.divides else 2, wanted.number)
    (one, first), (another, second) = (_begin(data, seed, wanted, wanted.stream, number) for _ in range(2))
    if (place := _first_difference(first, second)) is not None:
        raise RecipeError(
            f"stream {wanted.stream} of {wanted.num_streams} gave two different samples at position {place} of epoch "
            f"{wanted.epoch} when it was made twice with the same state of the random generators. Each worker that "
            "computes its micro-batch makes the stream itself, so it must follow from (stream, num_streams, epoch) "
            "and the global generators of torch, numpy and random: no clock, no pid, no self-seeded generator "
            "(WebDataset: shuffle(n, seed=...) or no shuffle, and unisono.Streams(..., shuffle=n)), no order of a set "
            "or of the file system, no earlier state"
        )
    if data.divides and wanted.num_streams > 1:
        _check_divided(data, seed, wanted, first)
    return not (is_stateful(one) and share_states(one, another))


def _check_divided(data: Streams, seed: int, wanted: WantedSamples, first: list[Any]) -> None:
    """Raise RecipeError if another stream begins with the same samples."""
    other = (wanted.stream + 1) % wanted.num_streams
    _, theirs = _begin(data, seed, wanted, other, len(first))
    is_constant = all(is_alike(first[0], one) for one in first[1:])
    if first and not is_constant and _first_difference(first, theirs, unknown=False) is None:
        raise RecipeError(
            f"streams {wanted.stream} and {other} of {wanted.num_streams} begin with the same {len(first)} samples: "
            "this dataset does not divide its data. Its __iter__ must read the part that "
            "torch.utils.data.get_worker_info() names (id of num_workers), as for a DataLoader with worker processes; "
            "or use unisono.Streams(lambda stream, num_streams, epoch: ...)"
        )


def _begin(data: Streams, seed: int, wanted: WantedSamples, stream: int, number: int) -> tuple[Any, list[Any]]:
    """Return the iterable of a stream, and its first samples, before they are shuffled."""
    opened = data.opened(seed, stream, wanted.num_streams, wanted.epoch)
    source = iter(opened)
    samples: list[Any] = []
    for position in range(number):
        try:
            samples.append(data.sample(source, seed, stream, wanted.epoch, position))
        except StopIteration:
            break
    return opened, samples


def _first_difference(first: Sequence[Any], second: Sequence[Any], *, unknown: bool = True) -> int | None:
    missing = object()
    pairs = itertools.zip_longest(first, second, fillvalue=missing)
    return next((place for place, (a, b) in enumerate(pairs) if not is_alike(a, b, unknown=unknown)), None)


def is_alike(a: Any, b: Any, *, unknown: bool = True) -> bool:
    """Return whether two samples are equal, as far as they are made of tensors, arrays, collections and plain values.

    Args:
        unknown: whether anything else counts as equal to what has its type.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if a.layout is not torch.strided or a.is_quantized:
            return unknown
        return same_bits(a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(a, (numpy.ndarray, numpy.generic)):
        if a.dtype.hasobject:
            return unknown
        return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(is_alike(a[key], b[key], unknown=unknown) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_alike(*pair, unknown=unknown) for pair in zip(a, b, strict=True))
    if isinstance(a, (str, bytes, bytearray, int, bool, type(None))):
        return bool(a == b)
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    return unknown
