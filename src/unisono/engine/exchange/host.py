"""Exchange of the members of one host, in shared memory; why no member reads memory that is being overwritten.

A worker has one `WorkerPage` for its whole life, and one `GenerationPage` for every generation that it enters. A page
has one writer, its member. Counters on it say how far that member is; they only grow, and others wait for them::

    published   one for each combine: my nodes are complete; read them
    shown       one for each combine of several hosts: my telemetry is on my page
    reduced     one for each combine: my chunk is summed; read it. All count: the combine is committed
    posted      my payload is in its memory
    read        I have read everybody's payloads
    staged      one for each turn of a delivery: what I pass on in it is on my stage
    copied      the same: I have copied all that I need of it

**Within a generation** no member reads memory that is being overwritten. Each kind of memory has a moment after which
it is not read any more, and is written again only after that:

- *The list of nodes*, *the address of the result* and *nodes* are read between ``published`` and the reader's own
  ``reduced``. Their member writes them again after it has seen ``reduced`` from all.
- *The result of a chunk* is read after the commit, until its reader publishes the next combine (which it does when it
  has collected all chunks). Its owner writes it in the reduce of the next combine, which begins with a wait until all
  have published.
- *Digest and telemetry* are read before the reader's commit returns, so before it publishes the next combine. They are
  written again when their member commits the next one; it has reduced by then, so all have published.
- *A payload* is written again only after all have ``read`` it.
- *A half of a stage* is read between its writer's ``staged`` and the reader's ``copied`` of the same turn. Its writer
  writes it again, two turns later at the earliest, after it has seen ``copied`` of that turn from all that read it. Who
  reads what is known to all from the parcels; whoever reads nothing is not waited for.

**Helping.** Before it publishes, a member shows the leaves that it has ``todo`` and how many of them it has
``started``. A member that is done takes leaves from the end of a late member's list, and writes them on its own page
(``taken``). It computes every leaf that it has taken before it publishes, without exception; so the owner skips a leaf
that it sees taken. If the owner does not see it in time, both compute the leaf, with the same result. The order in
which members see each other's writes does not matter: only its owner skips a leaf, and only after another member has
promised to have it in its nodes. Two nodes of a tree are disjoint or nested, so of all published ones the outermost are
the sum, and cover every leaf once. These lists are those of combine number ``work``, and are looked at by members that
have not published yet: until then nobody can commit it, or begin the next.

**Leaving.** A member whose wait fails leaves: it sets ``left`` and never writes to its page, result or payload of that
generation again. Members leave at different points, and some go on to the next generation, or the one after, while
others still work in this one; since every generation has a page of its own, they cannot be mixed up. Only the slots
belong to the worker and live on, so a member that has left may change a node while another still adds it up. Hence the
order: a member that leaves sets ``left`` *before* it touches a node, and a member that has read nodes looks for
``left`` *afterwards* and only then counts ``reduced``. So ``reduced`` is a statement about memory that no longer
changes, and a combine that all have ``reduced`` is committed, whatever happens next.

**Dying.** The memory of a dead member stays readable where it is mapped. Everything that is read after the commit is
mapped before it, so after a commit every member can collect every chunk, whichever others die or close. And a member
that sees all counters at ``reduced`` has committed, even if it is interrupted at the same time: survivors disagree on a
commit only if one of them left before the last ``reduced`` was counted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.core.errors import RecipeError
from unisono.core.routes import rows_for, split_rows
from unisono.core.tree import Node, outermost
from unisono.engine.exchange import Combine, Committed, Parcel, Share
from unisono.engine.exchange.context import Context
from unisono.engine.exchange.counters import Counters
from unisono.engine.exchange.delivering import Courier
from unisono.engine.exchange.flat import ROW_BYTES, FlatLayout, Rows, Slot, blocks, divide_rows, fold_rows
from unisono.engine.exchange.helping import HostWork
from unisono.engine.exchange.pages import MAX_NODES, NodeFields
from unisono.engine.exchange.shared_memory import Segment
from unisono.engine.exchange.staging import Gathering, Stage

__all__ = ["HostCombine", "SharedMemory", "build"]


def build(context: Context) -> SharedMemory:
    """Return the exchange of the members of one host."""
    return SharedMemory(context.open_host())


class SharedMemory:
    """Nodes lie in shared memory and are read in place: each row is read once from every node.

    Args:
        counters: of the members of this host. This member's page may have served earlier generations, whose exchanges
            are closed.
    """

    def __init__(self, counters: Counters) -> None:
        self.rank, self.size = counters.rank, counters.size
        self.page = counters.worker_page
        self.counters = counters
        self.helping = HostWork(counters)
        self.result = torch.empty(0, dtype=torch.uint8)
        """Memory into which this member writes the sum of its chunk."""
        self._chunks: Sequence[range] = ()
        self._segment: Segment | None = None
        self._gathering = Gathering(counters)
        self._stage = Stage(counters)
        self._courier = Courier(self.rank, [range(self.size)], stage=self._stage)

    @property
    def wants_earlier(self) -> bool:
        return False

    def prepare(self, layout: FlatLayout, slots: Sequence[Slot] = ()) -> list[Slot]:
        self._gathering.all_gather(b"")  # no member is in a combine any more
        self._layout = layout
        self._chunks = ()
        for page in self.counters.pages:
            page.mapped.clear()
        return self.page.keep(layout, slots)

    def slot(self) -> Slot:
        return self.page.slots.slot()

    def release(self, slot: Slot) -> None:
        self.page.slots.release(slot)

    def work(self) -> tuple[HostWork, Sequence[int]] | None:
        return self.helping, range(self.size)

    def offer(self, share: Share, rows_ready: int) -> None:
        pass  # nothing can be summed before all members of the host are done

    def begin(self, share: Share) -> Combine:
        return HostCombine(self, self._layout, share, split_rows(range(self._layout.num_rows), self.size))

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._gathering.all_gather(data)

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        return self._courier.deliver(parcels)

    def interrupt(self, error: Exception) -> None:
        self.counters.interrupt(error)

    def make_room(self, chunks: Sequence[range]) -> None:
        """Get memory for the sum of this member's chunk.

        Args:
            chunks: by owner (local ranks 0, 1, ...), the rows that this owner sums.

        The memory is new whenever its rows are others: a sum does not write the padding in its rows, which has to be
        zero for the digest. Members that still collect the last combine have mapped its sums.
        """
        if chunks == self._chunks:
            return
        if self._segment is not None:
            self._segment.close()
        self._segment, self.result, address = None, torch.empty(0, dtype=torch.uint8), ""
        rank = self.counters.rank
        num_rows = len(chunks[rank]) if rank < len(chunks) else 0
        if num_rows:
            self._segment = Segment.create(num_rows * ROW_BYTES)
            self.result, address = self._segment.tensor(), self._segment.address
        self.counters.own.fields.result = address.encode()
        self._chunks = chunks

    def close(self) -> None:
        self.counters.close()
        self._gathering.close()
        self._stage.close()
        if self._segment is not None:
            self._segment.close()
        # The error that ended this generation keeps its frames alive, and with them this object: free the memory.
        self.result = torch.empty(0, dtype=torch.uint8)


class HostCombine:
    """The phases of a combine among the members of a host. Where there are other hosts, a subclass sums and commits.

    Args:
        chunks: by owner (local ranks 0, 1, ...), the rows that this owner sums. Members beyond the last sum nothing.
    """

    def __init__(self, host: SharedMemory, layout: FlatLayout, share: Share, chunks: Sequence[range]) -> None:
        self.host = host
        self.rank = host.counters.rank
        """Among the members of the host."""
        self.layout = layout
        self.share = share
        self.chunks = chunks
        self.nodes: Mapping[Node, Rows] = {}
        """The nodes of all members, when all have published."""
        self.digest = 0
        """Of all that this member has summed."""
        self._counters = host.counters
        self._fields = host.counters.own.fields
        self._turn = 0  # the number that ``published`` has shown
        self._results: list[Tensor] = []
        with self._counters.or_leave():
            host.make_room(chunks)

    def publish(self) -> None:
        with self._counters.or_leave():
            self._counters.check()
            self._show_nodes()
            self.host.helping.end()
            self._turn = self._counters.advance("published")

    def _show_nodes(self) -> None:
        slots = self.share.slots
        if len(slots) > MAX_NODES:
            raise RecipeError(
                f"this worker holds {len(slots)} nodes of the summation tree and can publish {MAX_NODES}; "
                "use fewer micro-batches"
            )
        for index, (node, slot) in enumerate(slots.items()):
            self._fields.nodes[index] = NodeFields(node.level, node.index, self.host.page.find(slot).encode())
        self._fields.num_nodes = len(slots)

    def reduce(self) -> None:
        self._meet()
        with self._counters.or_leave():
            self.digest = self.sum_chunk()

    def _meet(self) -> None:
        """Wait until all have published, and map the nodes and results of all members."""
        counters = self._counters
        counters.wait("published", self._turn)
        with counters.or_leave():
            found = {}
            for rank, page in enumerate(counters.pages):
                for record in page.fields.nodes[: page.fields.num_nodes]:
                    found[Node(record.level, record.index)] = (rank, record.slot)
            counted = outermost(found)
            self.nodes = {node: Rows(counters.map(*source), 0) for node, source in found.items() if node in counted}
            self._results = [counters.map(rank, page.fields.result) for rank, page in enumerate(counters.pages)]

    def sum_chunk(self) -> int:
        """Write the sum of this member's chunk to `own_sum`; return its digest."""
        rows = self.chunks[self.rank]
        if not rows:
            return 0
        layout, out = self.layout, [self.own_sum()]
        return fold_rows(
            layout, self.nodes, self.share.num_leaves, rows.start, rows.stop, out, multipliers=layout.multipliers
        )

    def own_sum(self) -> Rows:
        """Return where this member writes the sum of its chunk."""
        return Rows(self.host.result, self.chunks[self.rank].start)

    def commit(self, telemetry: bytes) -> Committed:
        self.publish_telemetry(telemetry)
        return Committed(self.count_reduced(self.digest), tuple(self.telemetry()))

    def publish_telemetry(self, telemetry: bytes) -> None:
        """Write this member's telemetry to its page; others read it after this member has advanced a counter."""
        ctypes.memmove(self._fields.telemetry, telemetry, len(telemetry))

    def telemetry(self) -> list[bytes]:
        """Return the telemetry of the members of this host, by local rank."""
        return [bytes(page.fields.telemetry) for page in self._counters.pages]

    def count_reduced(self, digest: int) -> int:
        """Count ``reduced``; return the digest of all chunks, when all members have counted."""
        with self._counters.or_leave():
            self._counters.verify()
            self._fields.digest = digest & 0xFFFFFFFFFFFFFFFF
            return self._await_commit(self._counters.advance("reduced"))

    def _await_commit(self, reduced: int) -> int:
        self._counters.wait("reduced", reduced)
        total: int = sum(page.fields.digest for page in self._counters.pages)
        return total & 0xFFFFFFFFFFFFFFFF

    def _total_weight(self) -> float:
        """Return the total weight, from the chunk that holds it."""
        entry = self.layout.scalars
        row = entry.offset * entry.sum_dtype.itemsize // ROW_BYTES
        owner, rows = next((owner, rows) for owner, rows in enumerate(self.chunks) if row in rows)
        start = entry.offset - rows.start * ROW_BYTES // entry.sum_dtype.itemsize
        return float(self._results[owner].view(entry.sum_dtype)[start])

    def collect(self, out: Slot | None = None) -> Slot:
        """Read what this member needs of every owner's chunk into ``out``, divided by the total weight."""
        total, out = self._total_weight(), out or next(iter(self.share.slots.values()), None) or self.host.slot()
        for chunk, result in zip(self.chunks, self._results, strict=False):
            for rows in rows_for(self.share.routes, self.host.rank, chunk):
                for first, end in blocks(rows.start, rows.stop, out.memory.device):
                    divide_rows(self.layout, Rows(result, chunk.start), total, first, end, out)
        return out
