"""Delivery of tensors from some members to others: `Exchange.deliver`.

`unisono.core.delivery` says in which rounds the bytes travel. On a host they are written once into memory that all
map (`unisono.engine.exchange.staging`); between hosts they cross in a collective, which is under way while the next
round departs. What is sent and received lies in memory of this module, and not in the tensors: a collective that was
abandoned may go on to read and to write. Where members code what they send (`unisono.engine.exchange.coder`), what goes
to a host in a round is a message instead, and of a parameter its change, where the earlier value is known.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono.core.delivery import Freight, HostStop, Slice, Turn, check_freight, turns_of
from unisono.engine.exchange import Parcel
from unisono.engine.exchange.coding import most_bytes
from unisono.engine.exchange.staging import STAGE_BYTES, Stage
from unisono.engine.exchange.wire import Wire
from unisono.system.faults import point

__all__ = ["Courier"]


class Courier:
    """One member's part in the deliveries of a generation.

    Args:
        rank: of this member in the generation.
        hosts: by index, the ranks of each host's members: contiguous and ascending. Members that share no memory are
            hosts of their own.
        stage: of this member's host, where it has more than one member.
        wire: of this member's lane: rank = index of the host. None where the member has no lane.
    """

    def __init__(
        self, rank: int, hosts: Sequence[range], *, stage: Stage | None = None, wire: Wire | None = None
    ) -> None:
        self._rank = rank
        self._hosts = tuple(hosts)
        self._size = sum(map(len, hosts))
        self._stage = stage
        self._wire = wire
        self._device = torch.device("cpu") if wire is None else wire.device
        self._halves = (_Half(), _Half())

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        """See `Exchange.deliver`."""
        freight = tuple(Freight(each.source, tuple(each.targets), each.tensor.nbytes) for each in parcels)
        check_freight(freight, self._size)
        turns = turns_of(freight, self._hosts, self._rank, STAGE_BYTES)
        luggage = _Luggage(parcels, self._rank, self._device)
        before = self._wire.sent_bytes if self._wire is not None else 0
        with self._stage.counters.or_leave() if self._stage is not None else contextlib.nullcontext():
            under_way: _Crossing | None = None
            for number, turn in enumerate(turns):
                crossing = self._depart(turn, self._halves[number % 2], luggage)
                if under_way is not None:
                    self._arrive(under_way, luggage)
                under_way = crossing
            if under_way is not None:
                self._arrive(under_way, luggage)
        return self._wire.sent_bytes - before if self._wire is not None else 0

    def _depart(self, turn: Turn, half: _Half, luggage: _Luggage) -> _Crossing:
        """Pass the slices of a round on to the members of this host, and begin to send those that cross."""
        own = {part: luggage.content(part) for part in turn.loads}
        crossing = _Crossing(turn, half, self._device, luggage)
        for part, data in own.items():
            crossing.load(part, data)
        for part, data in self._stop(turn.departing, own):
            crossing.load(part, data)
            luggage.put(part, data)  # afterwards: here may be the earlier value
        if turn.crosses and self._wire is not None:
            crossing.start(self._wire)
            point("deliver.sent")
        return crossing

    def _arrive(self, crossing: _Crossing, luggage: _Luggage) -> None:
        """Take what has crossed, and pass it on to the members of this host."""
        crossing.finish()
        for part, data in crossing.incoming.items():
            luggage.put(part, data)
        for part, data in self._stop(crossing.turn.arriving, crossing.incoming):
            luggage.put(part, data)

    def _stop(self, stop: HostStop, own: Mapping[Slice, Tensor]) -> Iterator[tuple[Slice, Tensor]]:
        """Write what others of this host read, and yield what this member reads, to be read at once."""
        stage = self._stage
        if not stop.is_made or stage is None:
            return
        memory = stage.begin(bool(stop.writes))
        for leg in stop.writes:
            memory[leg.position :][: leg.part.stop - leg.part.start].copy_(own[leg.part])
        stage.show(stop.readers)
        point("deliver.staged")
        for writer, legs in itertools.groupby(stop.reads, key=lambda leg: leg.writer):
            memory = stage.of(writer)
            for leg in legs:
                yield leg.part, memory[leg.position :][: leg.part.stop - leg.part.start]
        stage.take()


class _Half:
    """Memory for what one round sends and receives. It is kept for the next ones."""

    def __init__(self) -> None:
        self._memory = [torch.empty(0, dtype=torch.uint8)] * 2

    def of(self, index: int, nbytes: int, device: torch.device) -> Tensor:
        """Return (nbytes,) uint8. ``index``: 0 for what is sent, 1 for what is received."""
        if self._memory[index].numel() < nbytes or self._memory[index].device != device:
            self._memory[index] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._memory[index][:nbytes]


class _Crossing:
    """The slices of a round that this member's lane carries from host to host."""

    def __init__(self, turn: Turn, half: _Half, device: torch.device, luggage: _Luggage) -> None:
        self.turn = turn
        self._luggage = luggage
        self._sent_sizes = [_nbytes(parts) for parts in turn.sent]
        self._received_sizes = [_nbytes(parts) for parts in turn.received]
        self._sent = half.of(0, sum(self._sent_sizes), device)
        self._received = half.of(1, sum(self._received_sizes), device)
        self._places: dict[Slice, list[Tensor]] = {}
        for part, place in _laid_out(self._sent, turn.sent):
            self._places.setdefault(part, []).append(place)
        self._earlier: dict[Slice, Tensor] = {}
        """What was there before, of what is sent."""
        self.incoming = dict(_laid_out(self._received, turn.received))
        """What arrives for this host; after `finish`."""
        self._finish: Callable[[], None] | None = None

    def load(self, part: Slice, data: Tensor) -> None:
        """Copy a slice to where it is sent from, once for each host that needs it from this member."""
        places = self._places.get(part, ())
        for place in places:
            place.copy_(data)
        if places and (earlier := self._luggage.earlier(part)) is not None:
            self._earlier[part] = earlier.clone()

    def start(self, wire: Wire) -> None:
        if wire.coder.is_used:
            self._start_messages(wire)
        else:
            sent = wire.all_to_all(self._received, self._received_sizes, self._sent, self._sent_sizes)
            self._finish = sent.wait

    def finish(self) -> None:
        if self._finish is not None:
            self._finish()
            point("deliver.received")

    def _start_messages(self, wire: Wire) -> None:
        """Send each host one message, where members code what they send. gloo only."""
        coder, tag, luggage = wire.coder, wire.reserve_tags(1), self._luggage
        under_way: list[Any] = []
        arriving: list[tuple[int, Tensor, Tensor, Tensor | None, Any]] = []
        for host, (parts, out) in enumerate(self._by_host(self.turn.received, self._received)):
            if parts:
                message, earlier = out, None
                if coder.senders[host]:
                    message = torch.empty(most_bytes(out.numel()), dtype=torch.uint8)
                    earlier = _joined(parts, [luggage.earlier(part) for part in parts])
                arriving.append((host, out, message, earlier, wire.post(message, host, tag)))
        coded: dict[tuple[Slice, ...], Tensor] = {}
        for host, (parts, data) in enumerate(self._by_host(self.turn.sent, self._sent)):
            if parts and parts not in coded:
                earlier = _joined(parts, [self._earlier.get(part) for part in parts])
                coded[parts] = coder.encode(data, partial(luggage.width, parts), earlier)
            if parts:
                under_way.append(wire.send(coded[parts], host, tag))

        def arrive() -> None:
            for host, out, message, earlier, receive in arriving:
                wire.finish_in_background(receive)
                if message is not out:
                    coder.decode(message, out, host, earlier)
            for each in under_way:
                wire.finish_in_background(each)

        job = wire.in_background(arrive)
        self._finish = lambda: wire.await_job(job, job.is_completed)

    @staticmethod
    def _by_host(parts: Sequence[tuple[Slice, ...]], memory: Tensor) -> Iterator[tuple[tuple[Slice, ...], Tensor]]:
        """Yield the slices of each host with their memory."""
        return zip(parts, memory.split([_nbytes(each) for each in parts]), strict=True)


class _Luggage:
    """The tensors of a delivery, as bytes."""

    def __init__(self, parcels: Sequence[Parcel], rank: int, device: torch.device) -> None:
        self._parcels = parcels
        self._rank = rank
        self._device = device
        self._open: dict[int, Tensor] = {}
        """By parcel: the bytes of its tensor, or of a copy where the tensor has others between its own, or lies on
        another device."""
        self._earlier: dict[int, Tensor] = {}
        """The same of what was there before."""
        self._missing = {index: each.tensor.nbytes for index, each in enumerate(parcels) if rank in each.targets}

    def content(self, part: Slice) -> Tensor:
        """Return the bytes of a slice whose source is this member. In order, once for each slice."""
        index, tensor = part.parcel, self._parcels[part.parcel].tensor.detach()
        if index not in self._open:
            self._open[index] = _bytes_of(tensor.to(self._device).contiguous())
        whole = self._open[index] if part.stop < tensor.nbytes else self._open.pop(index)
        return whole[part.start : part.stop]

    def earlier(self, part: Slice) -> Tensor | None:
        """Return the bytes that all members had there before; None: that is not known. Before `put`."""
        if (earlier := self._parcels[part.parcel].earlier) is None:
            return None
        if part.parcel not in self._earlier:
            self._earlier[part.parcel] = _bytes_of(earlier.detach().contiguous())
        return self._earlier[part.parcel][part.start : part.stop]

    def width(self, parts: Iterable[Slice]) -> int:
        """Return the bytes of the numbers that most of these slices are; 0: they are none."""
        found: Counter[int] = Counter()
        for part in parts:
            dtype = self._parcels[part.parcel].tensor.dtype
            found[dtype.itemsize if dtype.is_floating_point else 0] += part.stop - part.start
        return found.most_common(1)[0][0]

    def put(self, part: Slice, data: Tensor) -> None:
        """Write the bytes of a slice to the tensor, if this member is one of its targets."""
        index = part.parcel
        if index not in self._missing:
            return
        tensor = self._parcels[index].tensor.detach()
        is_direct = tensor.device == self._device and tensor.is_contiguous()
        if index not in self._open:
            place = tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            self._open[index] = _bytes_of(place)
        self._open[index][part.start : part.stop].copy_(data)
        self._missing[index] -= part.stop - part.start
        if not self._missing[index]:
            whole = self._open.pop(index)
            if not is_direct:
                tensor.copy_(whole.view(tensor.dtype).view(tensor.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _joined(parts: Sequence[Slice], data: Sequence[Tensor | None]) -> Tensor | None:
    """Return a copy of the data of some slices, with zeros for those that have none; None: all have none."""
    if all(each is None for each in data):
        return None
    zeros = [torch.zeros(part.stop - part.start, dtype=torch.uint8) for part in parts]
    return torch.cat([zero if each is None else each for zero, each in zip(zeros, data, strict=True)])


def _nbytes(parts: Iterable[Slice]) -> int:
    return sum(part.stop - part.start for part in parts)


def _laid_out(memory: Tensor, parts: Iterable[Iterable[Slice]]) -> Iterator[tuple[Slice, Tensor]]:
    """Yield the slices with their places in memory, one after the other."""
    position = 0
    for part in itertools.chain.from_iterable(parts):
        end = position + part.stop - part.start
        yield part, memory[position:end]
        position = end
