"""Samples that a run leaves out: the text that names them, and the first step that has used one. Without I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from unisono.core.cursor import EpochOrder, SampleOrder, Without
from unisono.core.errors import UsageError
from unisono.core.orders import Drawn, Sequential, Shuffled
from unisono.core.words import count

__all__ = ["Shards", "chosen", "first_use", "order_named", "ranges_in", "shards_in"]

Shards = Mapping[str, tuple[int, int]]
"""Of a data set, by the name of a shard: its first sample, and the one after its last."""

SHARD: Final = "shard "
NO_SHARDS: Final[Shards] = MappingProxyType({})
LINE: Final = re.compile(r"([0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?")
SHUFFLED: Final = re.compile(r"shuffled from ([0-9]{1,18})")
DRAWN: Final = re.compile(r"drawn from ([0-9]{1,18}) with replacement")


def ranges_in(text: str, name: str, num_samples: int | None = None, shards: Shards = NO_SHARDS) -> list[range]:
    """Return the samples that a text names: one index a line, a range such as 100-199, which includes its end, or
    ``shard NAME``. A blank line, and what follows a #, counts for nothing.

    Args:
        name: of the file, for errors.
        num_samples: of the data set; None: neither they nor its shards are known, so these lines are not looked up.
        shards: of the data set.

    Raises:
        UsageError: a line has another form, or names a sample that is not there; or no line names one.
    """
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        if words.startswith(SHARD):
            shard = words.removeprefix(SHARD).strip()
            found.append(_shard(shard, f"{name}, line {number}", shards) if num_samples is not None else range(0))
            continue
        match = LINE.fullmatch(words)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first:
            raise UsageError(
                f"{name}, line {number}: {words[:40]!r} is neither the index of a sample, which is 0 or more, nor a "
                "range of them such as 100-199"
            )
        if num_samples is not None and last >= num_samples:
            raise UsageError(
                f"{name}, line {number}: there is no sample {last}: the dataset has {count(num_samples, 'sample')}, "
                f"and the last one is {num_samples - 1}"
            )
        found.append(range(first, last + 1))
    if not found:
        raise UsageError(f"{name} names no sample: write one index a line, or a range of them such as 100-199")
    return found


def _shard(shard: str, where: str, shards: Shards) -> range:
    """Return the samples of a shard.

    Raises:
        UsageError: there is no such shard.
    """
    if shard in shards:
        return range(*shards[shard])
    known = f"it has {', '.join([*shards][:5])}{' ...' if len(shards) > 5 else ''}" if shards else "it names no shards"
    raise UsageError(
        f"{where}: the dataset has no shard {shard!r}: {known}. A ConcatDataset has shards by number, from 0; any "
        "other dataset names them in its attribute `shards`: a dict of names and ranges of indices"
    )


def shards_in(value: Any, num_samples: int) -> Shards:
    """Return the shards of which a data set, or a run's description, says which samples they have.

    Args:
        value: ranges or (first, after the last) by name; what is none is left out.
    """
    found = {}
    for name, samples in value.items() if isinstance(value, Mapping) else ():
        match [samples.start, samples.stop] if isinstance(samples, range) and samples.step == 1 else samples:
            case [int(first), int(end)] if 0 <= first < end <= num_samples and isinstance(name, str):
                found[name] = (first, end)
    return found


def chosen(ranges: Iterable[range], name: str, num_samples: int) -> Without:
    """Return the samples of `ranges_in` of a data set of ``num_samples``.

    Raises:
        UsageError: they are all that it has.
    """
    samples = frozenset[int]().union(*ranges)
    if len(samples) == num_samples:
        raise UsageError(f"{name} leaves out all {count(num_samples, 'sample')}: nothing is left to train on")
    return Without(samples, "".join(f"{sample}\n" for sample in sorted(samples)))


def order_named(name: str, num_samples: int) -> SampleOrder | None:
    """Return the order with a name of a recipe; None: the name does not say all that the order depends on."""
    if name == "sequential":
        return Sequential.of(num_samples)
    if name == "shuffled":
        return Shuffled.of(num_samples)
    if match := SHUFFLED.fullmatch(name):
        return Shuffled(int(match[1]), num_samples)
    if match := DRAWN.fullmatch(name):
        return Drawn(int(match[1]), num_samples)
    return None


def first_use(
    steps: Sequence[tuple[int, int]], order: SampleOrder, seed: int, length: int, samples: frozenset[int]
) -> int | None:
    """Return the first step of a run that has used one of these samples; None: none has.

    Args:
        steps: (epoch, number of samples) of each step from the first on; of a round of local steps, the epoch in which
            it begins. A step that begins another epoch than the one before begins at its first sample.
        length: samples of an epoch that are trained on.
    """
    epoch, place = -1, 0
    places: EpochOrder = ()
    for number, (begins, size) in enumerate(steps):
        for within in range(size):
            if (within == 0 and begins > epoch) or place == length:
                epoch, place = begins if within == 0 else epoch + 1, 0
                places = order.epoch(seed, epoch)
            if places[place] in samples:
                return number
            place += 1
    return None
