"""The exchange of several members on each of several hosts: shared memory inside, a network between.

The rows are cut into **lanes**, as many as the smallest host has members. Member ``l`` of every host that has
one carries lane ``l``: it adds the lane's rows of its host's nodes as far up the tree as they go, sums
them with member ``l`` of the other hosts over the network, and shows the result to its own host. So a row leaves a
host once for each node that the host as a whole holds, not for each member.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from unisono.decisions.tree import schedule
from unisono.errors import UsageError
from unisono.exchange import NUM_FACTS, Combined, Share, Work
from unisono.exchange.flat import ROW_BYTES, FlatLayout, Rows, Slot, fold_rows
from unisono.exchange.host import MAX_TEAM, Host, split_rows
from unisono.exchange.network import broadcast_over
from unisono.exchange.reduce import Reduction, padded_rows
from unisono.exchange.wire import Wire
from unisono.faults import point

__all__ = ["TwoLevel"]


class TwoLevel:
    """Shared memory within a host, one process group a lane between hosts.

    Args:
        host: this member among those of its host.
        wire: this member's lane: rank = place of the host, size = number of hosts. None where the host has more
            members than there are lanes.
        num_lanes: members of the smallest host.
        hosts: by place, the ranks of each host's members, in local order. Contiguous and ascending, so that a
            host's leaves are contiguous too.
        rank: of this member in the generation.
    """

    def __init__(self, host: Host, wire: Wire | None, *, num_lanes: int, hosts: Sequence[range], rank: int) -> None:
        self._host = host
        self._wire = wire
        self._num_lanes = num_lanes
        self._hosts = hosts
        self.rank = rank
        self.size = sum(len(ranks) for ranks in hosts)
        if self.size > MAX_TEAM:
            raise UsageError(f"{self.size} workers are more than the {MAX_TEAM} that can tell each other their timings")

    def prepare(self, layout: FlatLayout, slots: Sequence[Slot] = ()) -> list[Slot]:
        self._host.all_gather(b"")  # nobody is in a combine any more
        self._layout = layout
        self._lanes = split_rows(layout.num_rows, self._num_lanes)
        result_rows = padded_rows(self._lanes[self._host.rank], self._wire.size) if self._wire else 0
        return self._host.prepare(layout, result_rows, slots)

    def slot(self) -> Slot:
        return self._host.slot()

    def release(self, slot: Slot) -> None:
        self._host.release(slot)

    def offer(self, share: Share, rows_ready: int) -> None:
        # A lane needs the nodes of the whole host, so nothing can leave before all its members are done.
        pass

    def work(self) -> tuple[Work, Sequence[int]] | None:
        # What a host's members hold together is the same, whoever of them has computed it.
        return self._host, next(ranks for ranks in self._hosts if self.rank in ranks)

    def combine(self, share: Share, facts: Sequence[float]) -> Combined:
        host = self._host
        host.waiting_s = 0.0
        slots = list(share.slots.values()) or [host.slot()]
        with host.or_leave():
            host.publish(share.slots, facts)
            point("published")
            if self._wire is None:
                point("reduced")  # its chunk is empty
                host.commit(0)
            else:
                host.commit(*self._carry_lane(share, self._wire))
        digest = host.collect(self._lanes, host.total_weight(self._lanes), slots[0])
        for slot in slots[1:]:
            host.release(slot)
        numbers = host.team_facts(0)
        everyones = tuple(tuple(numbers[i : i + NUM_FACTS]) for i in range(0, len(numbers), NUM_FACTS))
        waiting_s = host.waiting_s + (self._wire.waiting_s if self._wire else 0.0)
        return Combined(slots[0], digest, everyones, waiting_s)

    def _carry_lane(self, share: Share, wire: Wire) -> tuple[int, list[float]]:
        """Sum this member's lane over all hosts; returns its digest and, in the first lane, everybody's facts."""
        wire.waiting_s = 0.0
        lane = self._lanes[self._host.rank]
        layout, num_leaves = self._layout, share.num_leaves
        nbytes = padded_rows(lane, wire.size) * ROW_BYTES
        plan = [schedule([n for r in ranks for n in share.plan[r]], num_leaves)[1] for ranks in self._hosts]
        own = {node: Rows(torch.zeros(nbytes, dtype=torch.uint8), lane.start) for node in plan[wire.rank]}
        if own:
            fold_rows(layout, self._host.nodes(), num_leaves, lane.start, lane.stop, list(own.values()))
        self._host.verify()  # before anything of it leaves the host
        reduction = Reduction(wire, layout, lane, plan, num_leaves)
        reduction.send(own, len(lane))
        part = reduction.finish(self._host.result(lane.start).memory, layout.multipliers)
        point("reduced")
        # The vote of this lane: all hosts hold its sums. In the first lane, what a host's members tell goes with it:
        # over a long way the number of gathers is the time of a step.
        tells = [len(ranks) * NUM_FACTS if self._host.rank == 0 else 0 for ranks in self._hosts]
        numbers = [number for facts in self._host.facts() for number in facts][: tells[wire.rank]]
        vote = struct.pack(f"<Q{max(tells)}d", part, *numbers, *(0.0,) * (max(tells) - len(numbers)))
        votes = [struct.unpack(f"<Q{max(tells)}d", letter) for letter in wire.all_gather_equal(vote)]
        told = [number for (_, *numbers), count in zip(votes, tells, strict=True) for number in numbers[:count]]
        return sum(int(digest) for digest, *_ in votes) & 0xFFFFFFFFFFFFFFFF, told

    def all_gather(self, data: bytes) -> list[bytes]:
        with self._host.or_leave():
            local = self._host.all_gather(data)
            team = b""
            if self._host.rank == 0 and self._wire is not None:
                hosts = self._wire.all_gather_bytes(msgspec.msgpack.encode(local))
                team = msgspec.msgpack.encode([msgspec.msgpack.decode(letters, type=list[bytes]) for letters in hosts])
            by_host = msgspec.msgpack.decode(self._host.all_gather(team)[0], type=list[list[bytes]])
        return [letter for letters in by_host for letter in letters]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        place = next(p for p, ranks in enumerate(self._hosts) if source in ranks)
        mine = self.rank in self._hosts[place]
        with self._host.or_leave():
            if mine:  # to the one that carries lane 0 there ...
                self._host.broadcast(tensor, self._hosts[place].index(source))
            if self._host.rank == 0 and self._wire is not None:  # ... from there to the other hosts ...
                broadcast_over(self._wire, tensor, place)
            if not mine:  # ... and to everybody there
                self._host.broadcast(tensor, 0)

    def interrupt(self, error: Exception) -> None:
        self._host.interrupt(error)
        if self._wire is not None:
            self._wire.interrupt(error)

    def close(self) -> None:
        self._host.close()
        if self._wire is not None:
            self._wire.close()
