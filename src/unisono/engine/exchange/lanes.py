"""Exchange of members that carry parts of a model: each part is summed by the members that have it, its lane.

A combine of the lanes is committed when every lane holds its sum, and all members know that. So it takes two steps:

1. the combine of each lane, among its members, as that of any exchange. What it gives is **prepared**: it is the sum of
   this part of the step, if the step is committed;
2. a vote of all members, in which each says the digest of its lane. Who has all votes has seen the commit.

Until the vote is over no node is modified, so that a combine that was not committed can be repeated with the nodes.
When some members have seen the commit and others have not, because a member was lost in the vote, then every member
that is left has a prepared sum, or has seen the commit. So the repetition is a vote alone, in which nobody brings a
node (`unisono.core.groups.replan_groups`), and whoever is behind takes what it has prepared.

What the lanes need from one generation to the next is in `LaneMemory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from unisono.engine.exchange import Combine, Committed, Exchange, Parcel, Share
from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.exchange.helping import HostWork
from unisono.engine.exchange.pages import WorkerPage
from unisono.engine.exchange.pairs import Pairs
from unisono.system.faults import point

__all__ = ["LaneMemory", "Lanes"]


@dataclass(frozen=True)
class _Said:
    """What a member says of its lane in a vote."""

    digest: int
    used: bytes
    """By parameter of the part: 1 where some micro-batch had a gradient of it."""


@dataclass(frozen=True)
class _Prepared:
    """The sum of the lane, if the step is committed."""

    slot: Slot
    said: _Said


class _Vote(msgspec.Struct, frozen=True, array_like=True):
    digest: int
    used: bytes
    telemetry: bytes


class LaneMemory:
    """What a worker keeps for the lanes of all generations.

    Args:
        page: in shared memory, for lanes; None: it has none.
    """

    def __init__(self, page: WorkerPage | None) -> None:
        self.page = page
        self.prepared: _Prepared | None = None
        self.said = _Said(0, b"")
        """In the newest vote that this worker has seen the end of."""
        self.used: Mapping[int, bytes] = {}
        """By part, which of its parameters were used in the newest step."""


class Lanes:
    """The lanes of a generation.

    Args:
        whole: between all members; it sums nothing.
        lanes: by part, the ranks of the members that carry it, ascending; each has one at least.
        connect: begins to connect the members of this worker's lane, by the addresses of their pages.
        link: between the members of this worker's group, by part; None: it is in no group now.
    """

    def __init__(
        self,
        whole: Exchange,
        lanes: Sequence[tuple[int, ...]],
        connect: Callable[[Sequence[str]], Exchange],
        memory: LaneMemory,
        link: Pairs | None,
    ) -> None:
        self.rank, self.size = whole.rank, whole.size
        self.memory = memory
        self.lanes = lanes
        self.own = next(ranks for ranks in lanes if whole.rank in ranks)
        """The ranks of this worker's lane."""
        self.whole = whole
        self.link = link
        self._connect = connect
        self._lane: Exchange | None = None
        self._error: Exception | None = None

    @property
    def lane(self) -> Exchange:
        """The exchange of this worker's lane. After `prepare`."""
        assert self._lane is not None
        return self._lane

    @property
    def wants_earlier(self) -> bool:
        return self.whole.wants_earlier

    def prepare(self, layout: FlatLayout, slots: Sequence[Slot] = ()) -> list[Slot]:
        if self._lane is None:
            page = self.memory.page
            pages = self.whole.all_gather(page.address.encode() if page is not None else b"")
            lane = self._connect([pages[rank].decode() for rank in self.own])
            self._lane = lane
            if self._error is not None:
                lane.interrupt(self._error)
        prepared = self.memory.prepared
        if prepared is not None and prepared.slot.layout != layout:
            prepared = self.memory.prepared = None
        kept = self.lane.prepare(layout, [*slots, *([prepared.slot] if prepared is not None else [])])
        if prepared is not None:
            self.memory.prepared = replace(prepared, slot=kept.pop())
        return kept

    def slot(self) -> Slot:
        return self.lane.slot()

    def release(self, slot: Slot) -> None:
        self.lane.release(slot)

    def work(self) -> tuple[HostWork, Sequence[int]] | None:
        return None  # a micro-batch is computed by a whole group

    def offer(self, share: Share, rows_ready: int) -> None:
        self.lane.offer(self._in_lane(share), rows_ready)

    def begin(self, share: Share) -> Combine:
        if not any(share.plan):
            return _LaneCombine(self, None)
        if self.memory.prepared is not None:  # of a combine that nobody has seen the commit of
            self.lane.release(self.memory.prepared.slot)
            self.memory.prepared = None
        return _LaneCombine(self, self.lane.begin(self._in_lane(share)))

    def _in_lane(self, share: Share) -> Share:
        return Share(share.num_leaves, tuple(share.plan[rank] for rank in self.own), share.slots)

    def all_gather(self, data: bytes) -> list[bytes]:
        return self.whole.all_gather(data)

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        return self.whole.deliver(parcels)

    def interrupt(self, error: Exception) -> None:
        self._error = error
        for each in (self.whole, self._lane, self.link):
            if each is not None:
                each.interrupt(error)

    def close(self) -> None:
        for each in (self._lane, self.link, self.whole):
            if each is not None:
                each.close()


class _LaneCombine:
    """The phases of a combine.

    Args:
        inner: of the lane; None: some have seen the commit, and only the vote is repeated.
    """

    def __init__(self, lanes: Lanes, inner: Combine | None) -> None:
        self._lanes = lanes
        self._inner = inner
        self._slot: Slot | None = None

    def publish(self) -> None:
        if self._inner is not None:
            self._inner.publish()

    def reduce(self) -> None:
        if self._inner is not None:
            self._inner.reduce()

    def commit(self, telemetry: bytes) -> Committed:
        lanes, memory, sent_bytes = self._lanes, self._lanes.memory, 0
        if self._inner is not None:
            committed = self._inner.commit(telemetry)
            sent_bytes = committed.sent_bytes
            slot = self._inner.collect(lanes.slot())  # into none of the nodes: these may be needed again
            used = bytes(bool(count) for count in slot.used.tolist())
            memory.prepared = _Prepared(slot, _Said(committed.digest, used))
        point("lanes.prepared")
        own = memory.prepared.said if memory.prepared is not None else memory.said
        votes = [
            msgspec.msgpack.decode(vote, type=_Vote)
            for vote in lanes.whole.all_gather(msgspec.msgpack.encode(_Vote(own.digest, own.used, telemetry)))
        ]
        memory.said = own
        memory.used = {part: votes[ranks[0]].used for part, ranks in enumerate(lanes.lanes)}
        if memory.prepared is not None:
            self._slot, memory.prepared = memory.prepared.slot, None
        digest = sum(votes[ranks[0]].digest for ranks in lanes.lanes) & 0xFFFFFFFFFFFFFFFF
        return Committed(digest, tuple(vote.telemetry for vote in votes), sent_bytes)

    def collect(self, out: Slot | None = None) -> Slot:
        if self._slot is None:  # this member has the sum from before
            return out if out is not None else self._lanes.slot()
        if out is None:
            return self._slot
        found = self._slot.copy_to(out)
        self._lanes.release(self._slot)
        return found
