"""Exchange of several members on each of several hosts: shared memory within a host, a network between hosts.

The rows are cut into **lanes**, as many as the smallest host has members. Member ``l`` of every host
carries lane ``l``: it adds the lane's rows of its host's nodes as far up the tree as they go, sums
them with member ``l`` of the other hosts over the network, and publishes the result on its own host. So a row leaves a
host once for each node that the host as a whole holds, not for each member.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import msgspec
import torch

from unisono.core.errors import UsageError
from unisono.core.routes import split_rows, through
from unisono.core.tree import schedule
from unisono.engine.exchange import TELEMETRY_BYTES, Combine, Committed, Share
from unisono.engine.exchange.context import Context
from unisono.engine.exchange.counters import Counters
from unisono.engine.exchange.delivering import Courier
from unisono.engine.exchange.flat import ROW_BYTES, FlatLayout, Rows, fold_rows
from unisono.engine.exchange.helping import HostWork
from unisono.engine.exchange.host import HostCombine, SharedMemory
from unisono.engine.exchange.pages import MAX_TEAM
from unisono.engine.exchange.stream import Ballot, RangeSum, cut
from unisono.engine.exchange.wire import Wire

__all__ = ["TwoLevel", "build"]


def build(context: Context) -> TwoLevel:
    """Return the exchange of members on any hosts that compute on CPUs."""
    counters = context.open_host()
    number, lane = counters.rank, None
    if number < min(map(len, context.hosts)):
        lane = context.open_wire(f"lane-{number}", [ranks[number] for ranks in context.hosts])
    return TwoLevel(counters, lane, hosts=context.hosts, rank=context.rank)


class TwoLevel(SharedMemory):
    """Shared memory within a host, one process group a lane between hosts.

    Args:
        counters: of this member among those of its host.
        wire: this member's lane: rank = index of the host, size = number of hosts. None where the host has more
            members than there are lanes.
        hosts: by index, the ranks of each host's members, in local order. Contiguous and ascending, so that a
            host's leaves are contiguous too.
        rank: of this member in the generation.
    """

    def __init__(self, counters: Counters, wire: Wire | None, *, hosts: Sequence[range], rank: int) -> None:
        super().__init__(counters)
        self.wire = wire
        self._num_lanes = min(map(len, hosts))
        self.hosts = hosts
        self._ranks = next(ranks for ranks in hosts if rank in ranks)
        self.rank = rank
        self.size = sum(map(len, hosts))
        self._courier = Courier(rank, hosts, stage=self._stage, wire=wire)
        if self.size > MAX_TEAM:
            raise UsageError(f"{self.size} workers are more than the {MAX_TEAM} that this exchange can connect")

    def work(self) -> tuple[HostWork, Sequence[int]] | None:
        # The nodes of a host's members together are the same, whichever member has computed a leaf.
        return self.helping, self._ranks

    @property
    def wants_earlier(self) -> bool:
        return self.wire is not None and self.wire.coder.is_used

    def begin(self, share: Share) -> Combine:
        if self.wire is not None:
            self.wire.sent_bytes = 0
        lanes = split_rows(range(self._layout.num_rows), self._num_lanes)
        return _TwoLevelCombine(self, self._layout, share, lanes)

    def all_gather(self, data: bytes) -> list[bytes]:
        with self.counters.or_leave():
            local = super().all_gather(data)
            team = b""
            if self.counters.rank == 0 and self.wire is not None:
                hosts = self.wire.all_gather_bytes(msgspec.msgpack.encode(local))
                team = msgspec.msgpack.encode(
                    [msgspec.msgpack.decode(payloads, type=list[bytes]) for payloads in hosts]
                )
            by_host = msgspec.msgpack.decode(super().all_gather(team)[0], type=list[list[bytes]])
        return [payload for payloads in by_host for payload in payloads]

    def interrupt(self, error: Exception) -> None:
        super().interrupt(error)
        if self.wire is not None:
            self.wire.interrupt(error)

    def close(self) -> None:
        super().close()
        if self.wire is not None:
            self.wire.close()


class _TwoLevelCombine(HostCombine):
    """The chunks of a host are the lanes."""

    def __init__(self, exchange: TwoLevel, layout: FlatLayout, share: Share, lanes: Sequence[range]) -> None:
        super().__init__(exchange, layout, share, lanes)
        self._wire = exchange.wire
        self._hosts = exchange.hosts
        self._num_members = exchange.size
        self._ballot: Ballot | None = None

    def sum_chunk(self) -> int:
        """Sum this member's lane over all hosts: what its host has added up leaves piece by piece."""
        wire = self._wire
        if wire is None:
            return 0
        lane = self.chunks[self.rank]
        num_leaves = self.share.num_leaves
        plan = [schedule([n for r in ranks for n in self.share.plan[r]], num_leaves)[1] for ranks in self._hosts]
        self._ballot = Ballot(wire, max(self._telemetry_sizes()))
        on_host = [host for host, ranks in enumerate(self._hosts) for _ in ranks]
        routes = through(self.share.routes, on_host)
        stream = RangeSum(wire, self.layout, lane, plan, num_leaves, self.own_sum(), self.layout.multipliers, routes)
        own = {
            node: Rows(torch.zeros(len(lane) * ROW_BYTES, dtype=torch.uint8), lane.start) for node in plan[wire.rank]
        }
        for piece in cut(lane):
            if own:
                fold_rows(self.layout, self.nodes, num_leaves, piece.start, piece.stop, list(own.values()))
                self.host.counters.verify()  # before any of these sums leaves the host
            stream.send(own, piece.stop - lane.start)
        return stream.fold()

    def _telemetry_sizes(self) -> list[int]:
        """Return the bytes that go with the vote of this lane, by host."""
        return [len(ranks) * TELEMETRY_BYTES if self.rank == 0 else 0 for ranks in self._hosts]

    def commit(self, telemetry: bytes) -> Committed:
        counters, digest, sent_bytes = self.host.counters, self.digest, 0
        with counters.or_leave():
            counters.check()
            self.publish_telemetry(telemetry)
            shown = counters.advance("shown")
            if self._wire is not None:
                digest = self._vote(digest, shown)
                sent_bytes = self._wire.sent_bytes
            digest = self.count_reduced(digest)
        fields = counters.pages[0].fields
        team = ctypes.string_at(fields.team_telemetry, self._num_members * TELEMETRY_BYTES)
        told = tuple(team[i : i + TELEMETRY_BYTES] for i in range(0, len(team), TELEMETRY_BYTES))
        return Committed(digest, told, sent_bytes)

    def _vote(self, digest: int, shown: int) -> int:
        """Make sure that all hosts hold the sums of this lane; return its digest over all hosts.

        In the first lane the telemetry of a host's members goes with the vote, and the telemetry of all hosts goes to
        this member's page: on a high-latency link the number of gathers decides the time of a step.
        """
        counters, own, sizes = self.host.counters, b"", self._telemetry_sizes()
        if self.rank == 0:
            counters.wait("shown", shown)
            own = b"".join(self.telemetry())
        assert self._ballot is not None  # made with the stream
        total, everyones = self._ballot.vote(digest, own.ljust(max(sizes), b"\0"))
        team = b"".join(each[:size] for each, size in zip(everyones, sizes, strict=True))
        ctypes.memmove(counters.own.fields.team_telemetry, team, len(team))
        return total
