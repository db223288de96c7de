"""Bookmarks: states of streams at exact positions, so that a stream that moves need not be read from its beginning.

An iterable with ``state_dict()`` and ``load_state_dict()`` (torchdata, Hugging Face) can go on from a state. Each
worker takes the states of the streams that it reads every `STRIDE` samples, between two samples, and where a window of
the shuffling begins, so that the window can be read again. The workers tell each other their newest bookmarks from time
to time (`unisono.script.schedule`); these are a part of the run's state, so newcomers and checkpoints have them.

A bookmark also has the digest of the samples that follow it. A reader that goes on from a bookmark compares them, and
reads from the beginning where they differ: a state may lack something, as the content of a shuffle buffer. So a
bookmark saves time, and changes no sample.

The state is taken one sample before the place of the bookmark. Whoever goes on from it reads that sample with the
random numbers of the first sample of a pass, and drops it: what an iterable draws when its iteration begins, as the
order of its files, is then what it draws at the beginning, and each sample after it has its own random numbers.
"""

from __future__ import annotations

import collections
import hashlib
import struct
import types
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from unisono.core.errors import UsageError
from unisono.core.stream_plan import WantedSamples
from unisono.engine.state.packing import to_bytes

__all__ = [
    "FOLLOWING",
    "NAME",
    "BadState",
    "Bookmark",
    "Bookmarks",
    "Marker",
    "News",
    "NotOpened",
    "Notes",
    "Taken",
    "digest_of_sample",
    "is_stateful",
    "share_states",
    "together",
]

NAME = "streams"
"""Of the bookmarks in the run's state."""
STRIDE = 256
"""Samples of a stream between two bookmarks, at least."""
FOLLOWING = 16
"""Samples after a bookmark that are compared."""
MOST_BYTES = 1 << 18
"""Of a state; a larger one is not kept, as it would travel, and be in each checkpoint."""
MOST_TOGETHER = 1 << 22
"""Bytes of the states of all streams of a data set."""
MOST_KEPT = 2
"""Data sets of which bookmarks are kept."""
MOST_WITHOUT = 64
"""Data sets of which it is known that they have no bookmarks."""
MOST_PARTS = 1000
"""Parts of an iterable that are looked at."""


class BadState(Exception):
    """A stream does not go on from its states; the message says why."""


class NotOpened(Exception):
    """A stream could not be opened with a bookmark this time; the message says why."""


class Bookmark(msgspec.Struct, frozen=True, array_like=True):
    """The state of a stream between two samples."""

    epoch: int
    """Of the pass over the stream."""
    begin: int
    """Samples of the passes before it, where the length of the stream is unknown; else 0."""
    position: int
    """Samples of the pass that were read before."""
    state: bytes
    digest: bytes
    """Of the `FOLLOWING` samples after it."""

    @property
    def start(self) -> int:
        """The sample that follows, as `WantedSamples.first` counts."""
        return self.begin + self.position

    def serves(self, wanted: WantedSamples) -> bool:
        """Return whether a reader can come to these samples from here."""
        return self.start <= wanted.first and (wanted.length < 0 or self.epoch == wanted.epoch)


class News(NamedTuple):
    """What a reader has found out since it was asked last."""

    able: bool | None
    """Whether the streams have states that can be used; None: no stream was opened."""
    taken: list[tuple[int, Bookmark]]
    """(stream, bookmark)."""


class Notes:
    """What a reader finds out about the states of its streams."""

    def __init__(self) -> None:
        self.able: bool | None = None
        self.taken: list[tuple[int, Bookmark]] = []

    def opened(self, *, able: bool) -> None:
        """Note that a stream was opened, and whether its iterable has states."""
        if self.able is not False:
            self.able = able

    def news(self) -> News:
        """Return what is new."""
        taken, self.taken = self.taken, []
        return News(self.able, taken)

    def give_up(self, words: str) -> None:
        """Use no states any more, and warn of it."""
        if self.able is not False:
            warnings.warn(
                f"{words}. So a stream is read from its beginning when it moves to another worker", stacklevel=2
            )
        self.stop()

    def stop(self) -> None:
        """Use no states any more."""
        self.able, self.taken = False, []


class Marker:
    """Takes the states of one pass over one stream, which is open.

    Args:
        wanted: samples of the stream.
        begin: samples of the passes before.
        window: samples of a window of the shuffling; 0: there are none.
    """

    def __init__(self, source: Any, wanted: WantedSamples, epoch: int, begin: int, window: int, notes: Notes) -> None:
        self._source, self._stream, self._epoch, self._begin = source, wanted.stream, epoch, begin
        self._most_bytes = min(MOST_BYTES, MOST_TOGETHER // wanted.num_streams)
        self._stride = window * -(-STRIDE // window) if window else STRIDE
        self._notes = notes
        self._pending: tuple[int, bytes] | None = None  # (its position, state), until the samples after it are read
        self._following: list[bytes] = []

    def before(self, position: int) -> None:
        """Take the state, if this is a place for it, before sample ``position`` of the pass is read."""
        if (position + 1) % self._stride or self._notes.able is False:
            return
        try:
            found = self._source.state_dict()
            _check_kinds(found, "state_dict()")
            state = to_bytes(found, "state_dict()")
        except Exception as error:  # of the script's own iterable
            self._notes.give_up(f"the state of a stream cannot be used: {type(error).__name__}: {error}")
            return
        if len(state) > self._most_bytes:
            self._notes.give_up(
                f"the state of a stream has {len(state):,} bytes, and at most {self._most_bytes:,} are kept "
                f"({MOST_TOGETHER:,} of all streams together)"
            )
            return
        self._pending, self._following = (position + 1, state), []

    def after(self, position: int, sample: Any) -> None:
        """Note sample ``position``, which was read."""
        if self._pending is None or position < self._pending[0]:
            return
        try:
            self._following.append(digest_of_sample(sample))
        except Exception as error:  # of the script's own sample
            self._pending = None
            self._notes.give_up(f"the states of streams are not used: {type(error).__name__}: {error}")
            return
        if len(self._following) == FOLLOWING:
            position, state = self._pending
            digest = together(self._following)
            self._notes.taken.append((self._stream, Bookmark(self._epoch, self._begin, position, state, digest)))
            self._pending = None


class Taken:
    """Bookmarks that the readers of this worker have taken, in this process and in loader processes."""

    def __init__(self) -> None:
        self.able: bool | None = None
        self._taken: dict[int, list[Bookmark]] = {}

    def note(self, news: News) -> None:
        """Note what a reader has found out."""
        if self.able is False:
            return
        if news.able is False:
            self.stop()
            return
        if news.able is not None:
            self.able = news.able
        for stream, bookmark in news.taken:
            self._taken.setdefault(stream, []).append(bookmark)

    def stop(self) -> None:
        """Keep none any more."""
        self.able, self._taken = False, {}

    def newest(self, ends: Mapping[int, WantedSamples]) -> dict[int, Bookmark]:
        """Return the newest bookmark of each stream that is not ahead of what was trained on, and forget older ones.

        Args:
            ends: by stream, what would be read next.
        """
        found: dict[int, Bookmark] = {}
        for stream, known in self._taken.items():
            if stream not in ends or not (behind := [one for one in known if one.serves(ends[stream])]):
                continue
            found[stream] = max(behind, key=lambda one: one.start)
            self._taken[stream] = known[known.index(found[stream]) :]
        return found


class Bookmarks:
    """The bookmarks that all workers know: a part of the run's state."""

    def __init__(self) -> None:
        self._known: dict[str, dict[int, Bookmark]] = {}
        self._without: list[str] = []

    def find(self, key: str, wanted: WantedSamples) -> Bookmark | None:
        """Return the bookmark from which a reader comes to these samples.

        Args:
            key: of the data, the same on all workers.
        """
        found = self._known.get(key, {}).get(wanted.stream)
        return found if found is not None and found.serves(wanted) else None

    def knows(self, key: str, stream: int, bookmark: Bookmark) -> bool:
        """Return whether there is one of this stream that is as new."""
        known = self._known.get(key, {}).get(stream)
        return known is not None and _place(known) >= _place(bookmark)

    def has_none(self, key: str) -> bool:
        """Return whether it is known that these data have no bookmarks."""
        return key in self._without

    def try_again(self) -> None:
        """Forget which data have none: the run goes on from a checkpoint, with another script perhaps."""
        self._without = []

    def agree(self, key: str, able: Iterable[bool | None], found: Iterable[Mapping[int, Bookmark]]) -> None:
        """Note what all workers have said; equal on all of them.

        Args:
            able: whether the streams have states that can be used, by worker.
            found: by worker, the newest bookmark of each stream that it has read.
        """
        known = self._known.pop(key, {})
        if False in able:
            self._without = [*(one for one in self._without if one != key), key][-MOST_WITHOUT:]
            return
        for one in found:
            for stream, bookmark in one.items():
                if stream not in known or _place(bookmark) > _place(known[stream]):
                    known[stream] = bookmark
        self._known[key] = known  # the last one
        for oldest in list(self._known)[:-MOST_KEPT]:
            del self._known[oldest]

    def state_dict(self) -> Any:
        known = {
            key: {stream: msgspec.to_builtins(one, builtin_types=(bytes,)) for stream, one in streams.items()}
            for key, streams in self._known.items()
        }
        return {"known": known, "without": list(self._without)}

    def load_state_dict(self, state: Any) -> None:
        self._known = {
            key: {stream: Bookmark(*one) for stream, one in streams.items()} for key, streams in state["known"].items()
        }
        self._without = list(state["without"])


def _place(bookmark: Bookmark) -> tuple[int, int]:
    return bookmark.epoch, bookmark.start


def is_stateful(source: Any) -> bool:
    """Return whether an iterable can go on from a state."""
    return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


def share_states(one: Any, other: Any) -> bool:
    """Return whether two iterables are the same object, or have a part with a state in common.

    Then a state that is loaded into one of them is in the other one as well. Parts are looked for in attributes, lists,
    tuples and dicts.
    """
    return not _parts_with_states(one).isdisjoint(_parts_with_states(other))


def _parts_with_states(whole: Any) -> set[int]:
    found, seen, ahead = {id(whole)}, set[int](), collections.deque([whole])
    while ahead and len(seen) < MOST_PARTS:
        part = ahead.popleft()
        if id(part) in seen or isinstance(part, (type, types.ModuleType, torch.nn.Module, Tensor)):
            continue
        seen.add(id(part))
        if callable(getattr(type(part), "state_dict", None)):
            found.add(id(part))
        if isinstance(part, dict):
            ahead.extend(list(part.values())[:MOST_PARTS])
        elif isinstance(part, (list, tuple)):
            ahead.extend(part[:MOST_PARTS])
        else:
            ahead.extend(getattr(part, "__dict__", {}).values())
    return found


_KINDS = (dict, collections.OrderedDict, list, tuple, set, frozenset)


def _check_kinds(state: Any, path: str) -> None:
    """Raise UsageError if a state has a container that would come back as one of another type (a Counter as a dict)."""
    if not isinstance(state, (Mapping, list, tuple, set, frozenset)):
        return
    if type(state) not in _KINDS:
        raise UsageError(f"{path} is a {type(state).__qualname__}; use a dict, list, tuple or set")
    for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        _check_kinds(value, f"{path}[{key!r}]")


# -- samples -----------------------------------------------------------------------------------------


def digest_of_sample(sample: Any) -> bytes:
    """Return a digest of a sample that is made of tensors, arrays, images, collections and plain values, by what they
    hold: equal in all processes for equal samples.

    Raises:
        UsageError: there is something else in it.
    """
    found = hashlib.blake2b(digest_size=16)
    _add(found, sample)
    return found.digest()


def together(digests: Iterable[bytes]) -> bytes:
    """Return one digest for several, in their order."""
    return hashlib.blake2b(b"".join(digests), digest_size=16).digest()


def _add(found: Any, value: Any) -> None:
    found.update(f"{type(value).__qualname__} ".encode())
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise UsageError(f"a sample has a tensor ({value.layout}) that cannot be compared")
        found.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        found.update(_bytes_of(value).cpu().numpy())
    elif isinstance(value, (str, int, float, complex, type(None))):
        text = struct.pack("<d", value) if isinstance(value, float) else repr(value).encode()
        found.update(len(text).to_bytes(8, "little") + text)
    elif isinstance(value, (bytes, bytearray, memoryview)):
        found.update(len(value).to_bytes(8, "little"))
        found.update(value)
    elif isinstance(value, Mapping):
        found.update(f"{len(value)} ".encode())
        for key, item in value.items():
            _add(found, key)
            _add(found, item)
    elif isinstance(value, (set, frozenset)):
        for digest in sorted(map(digest_of_sample, value)):
            found.update(digest)
    elif isinstance(value, (list, tuple, collections.deque)):
        found.update(f"{len(value)} ".encode())
        for item in value:
            _add(found, item)
    elif callable(content := getattr(value, "tobytes", None)):  # arrays of numpy, images of PIL
        found.update(f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')} ".encode())
        _add_array(found, value, content)
    elif hasattr(value, "__dict__"):
        _add(found, vars(value))
    else:
        raise UsageError(f"a sample has a {type(value).__qualname__}, which cannot be compared")


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return what a dense tensor holds, as (n,) uint8."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _add_array(found: Any, value: Any, content: Any) -> None:
    if getattr(getattr(value, "dtype", None), "hasobject", False):
        _add(found, value.tolist())
    else:
        found.update(content())
