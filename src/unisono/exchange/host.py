"""The members of one host: a board for each in shared memory, and the moves that they make on it.

A board has one writer, its member. Three counters say how far that member is; they only grow, and the others
wait for them::

    published   my nodes (of combine number `published`) are complete; read them
    reduced     my chunk is summed; read it. All say so: the combine is committed
    mailed      my letter is in the mail segment; `opened` says that I have read everybody's

Why nobody reads what is being overwritten: nodes are written again only after the member itself has seen
``reduced`` from all, and nobody reads a node after its own ``reduced``. A result is written again only after all have
``published`` the next combine, and they do that after they have collected this one.

A member that dies leaves its counters and memory behind, mapped by the others. So the survivors
all see the same truth about whether a combine was committed, and after a commit all can collect it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.errors import DeadlineExceeded
from unisono.exchange import NUM_FACTS
from unisono.exchange.memory import Segment, futex_wait, futex_wake
from unisono.flat import ROW_BYTES, FlatLayout, Rows, Slot, blocks, divide_rows
from unisono.tree import Node

__all__ = ["Board", "Host", "split_rows"]

MAX_NODES = 128
MAX_SLOTS = 64
MAX_FACTS = 4096
SLICE_S = 0.2  # a wait looks around this often even if a wake-up was missed


class _Address(ctypes.Structure):
    """A segment, and a serial number: addresses are used again, numbers are not."""

    _fields_ = [("path", ctypes.c_char * 112), ("nbytes", ctypes.c_uint64), ("serial", ctypes.c_uint64)]


class _Node(ctypes.Structure):
    _fields_ = [("level", ctypes.c_uint32), ("slot", ctypes.c_uint32), ("index", ctypes.c_uint64)]


class _Page(ctypes.Structure):
    _fields_ = [
        ("published", ctypes.c_uint32),
        ("_space0", ctypes.c_uint32 * 15),  # one cache line for each counter
        ("reduced", ctypes.c_uint32),
        ("_space1", ctypes.c_uint32 * 15),
        ("mailed", ctypes.c_uint32),
        ("_space2", ctypes.c_uint32 * 15),
        ("opened", ctypes.c_uint32),
        ("_space3", ctypes.c_uint32 * 15),
        ("num_nodes", ctypes.c_uint32),
        ("num_team_facts", ctypes.c_uint32),
        ("digest", ctypes.c_uint64),
        ("letter_bytes", ctypes.c_uint64),
        ("result", _Address),
        ("mail", _Address),
        ("slots", _Address * MAX_SLOTS),
        ("nodes", _Node * MAX_NODES),
        ("facts", ctypes.c_double * NUM_FACTS),
        ("team_facts", ctypes.c_double * MAX_FACTS),
    ]


class Board:
    """One member's page. `create` one's own, `open` those of the others."""

    NBYTES = ctypes.sizeof(_Page)

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.page = _Page.from_buffer(segment.map)
        self.address = segment.address

    @classmethod
    def create(cls) -> Board:
        return cls(Segment.create(cls.NBYTES))

    @classmethod
    def open(cls, address: str) -> Board:
        return cls(Segment.open(address, cls.NBYTES))

    def word(self, counter: str) -> ctypes.c_uint32:
        """One of the counters, to wait for or to wake."""
        return ctypes.c_uint32.from_buffer(self.page, getattr(_Page, counter).offset)

    def close(self) -> None:
        self._segment.close()


class Host:
    """This member among those of its host.

    Args:
        board: this member's own.
        addresses: the boards of all members of the host, by local rank.
        rank: this member's local rank.
        timeout_s: how long any one wait may take.
    """

    def __init__(self, board: Board, addresses: Sequence[str], rank: int, *, timeout_s: float) -> None:
        self.rank = rank
        self.size = len(addresses)
        self.waiting_s = 0.0
        self._timeout_s = timeout_s
        self._boards = [board if r == rank else Board.open(address) for r, address in enumerate(addresses)]
        self._page = board.page
        self._words = {
            name: [other.word(name) for other in self._boards] for name in ("published", "reduced", "mailed", "opened")
        }
        self._turn = self._page.published
        self._letters = self._page.mailed
        self._serial = 0
        self._owned: list[Segment] = []
        self._mapped: dict[tuple[int, int], Tensor] = {}
        self._error: Exception | None = None
        self._watched: ctypes.c_uint32 | None = None

    # -- slots ---------------------------------------------------------------------------------------

    def prepare(self, layout: FlatLayout) -> None:
        """Forget all slots. The caller makes sure that no member is still reading."""
        self._layout = layout
        self._free: list[Slot] = []
        self._close_owned()
        self._mapped.clear()
        self._num_slots = 0
        self._result = torch.empty(0, dtype=torch.uint8)
        self._slot_index: dict[int, int] = {}

    def slot(self) -> Slot:
        if self._free:
            return self._free.pop()
        if self._num_slots == MAX_SLOTS:
            raise RuntimeError(f"a worker holds {MAX_SLOTS} nodes at once, the most that a board can name")
        memory, address = self._allocate(self._layout.num_rows * ROW_BYTES)
        self._page.slots[self._num_slots] = address
        slot = Slot(self._layout, memory, key=address.serial)
        self._slot_index[slot.key] = self._num_slots
        self._num_slots += 1
        return slot

    def release(self, slot: Slot) -> None:
        self._free.append(slot)

    # -- the moves of a combine ----------------------------------------------------------------------

    def publish(self, slots: Mapping[Node, Slot], facts: Sequence[float]) -> None:
        """Show this member's nodes and facts, and wait until everybody has."""
        page = self._page
        for place, (node, slot) in enumerate(slots.items()):
            page.nodes[place] = _Node(node.level, self._slot_index[slot.key], node.index)
        page.num_nodes = len(slots)
        page.facts[:NUM_FACTS] = facts
        self._turn += 1
        self._advance("published", self._turn)
        self._wait("published", self._turn)

    def nodes(self) -> dict[Node, Rows]:
        """The published nodes of all members, to read only, until this member's `commit`."""
        found = {}
        for rank, board in enumerate(self._boards):
            for place in range(board.page.num_nodes):
                record = board.page.nodes[place]
                memory = self._map(rank, board.page.slots[record.slot])
                found[Node(record.level, record.index)] = Rows(memory, 0)
        return found

    def result(self, first_row: int, end_row: int) -> Rows:
        """Where this member writes the sum of its chunk."""
        nbytes = max(1, end_row - first_row) * ROW_BYTES
        if self._result.numel() < nbytes:
            self._result, self._page.result = self._allocate(nbytes)
        return Rows(self._result, first_row)

    def commit(self, digest: int, team_facts: Sequence[float] = ()) -> None:
        """Say that this member's chunk is summed, and wait until everybody's is.

        Args:
            team_facts: what came from other hosts, for the others of this one.
        """
        self._page.digest = digest
        self._page.team_facts[: len(team_facts)] = team_facts
        self._page.num_team_facts = len(team_facts)
        self._advance("reduced", self._turn)
        self._wait("reduced", self._turn)

    def collect(self, chunks: Sequence[range], total: float, out: Slot) -> int:
        """Read every owner's chunk into ``out``, divided by the total weight; returns the digest.

        Args:
            chunks: rows by owner (local ranks 0, 1, ...), covering the layout.
        """
        digest = 0
        for rank, chunk in enumerate(chunks):
            page = self._boards[rank].page
            digest += page.digest
            if chunk:
                rows = Rows(self._map(rank, page.result), chunk.start)
                for first, end in blocks(chunk.start, chunk.stop, out.memory.device):
                    divide_rows(self._layout, rows, total, first, end, out)
        return digest & 0xFFFFFFFFFFFFFFFF

    def total_weight(self, chunks: Sequence[range]) -> float:
        """The total weight, from the chunk that holds it. After `commit`."""
        entry = self._layout.scalars
        row = entry.offset * entry.sum_dtype.itemsize // ROW_BYTES
        rank = next(r for r, chunk in enumerate(chunks) if row in chunk)
        memory = self._map(rank, self._boards[rank].page.result)
        start = entry.offset - chunks[rank].start * ROW_BYTES // entry.sum_dtype.itemsize
        return float(memory.view(entry.sum_dtype)[start])

    def facts(self) -> list[tuple[float, ...]]:
        """What the members of this host published, by local rank. Between `publish` and `commit`."""
        return [tuple(board.page.facts) for board in self._boards]

    def team_facts(self, rank: int) -> list[float]:
        """What that member gave to `commit`. After `commit`."""
        page = self._boards[rank].page
        return page.team_facts[: page.num_team_facts]

    # -- letters -------------------------------------------------------------------------------------

    def all_gather(self, data: bytes) -> list[bytes]:
        """Everyone's ``data``, by local rank."""
        page = self._page
        self._wait("opened", self._letters)
        if page.mail.nbytes < len(data):
            self._mail, page.mail = self._allocate(max(4096, len(data)))
        if data:
            self._mail[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        page.letter_bytes = len(data)
        self._letters += 1
        self._advance("mailed", self._letters)
        self._wait("mailed", self._letters)
        letters = []
        for rank, board in enumerate(self._boards):
            length = board.page.letter_bytes
            letters.append(ctypes.string_at(self._map(rank, board.page.mail).data_ptr(), length) if length else b"")
        self._advance("opened", self._letters)
        return letters

    # -- inside --------------------------------------------------------------------------------------

    def interrupt(self, error: Exception) -> None:
        self._error = error
        watched = self._watched
        if watched is not None:
            futex_wake(watched)

    def close(self) -> None:
        self._free = []
        self._mapped.clear()
        self._close_owned()
        for rank, board in enumerate(self._boards):
            if rank != self.rank:
                board.close()

    def _close_owned(self) -> None:
        for segment in self._owned:
            segment.close()
        self._owned.clear()
        # A new mail segment is made with the next letter.
        self._page.mail = _Address()

    def _allocate(self, nbytes: int) -> tuple[Tensor, _Address]:
        segment = Segment.create(nbytes)
        self._owned.append(segment)
        self._serial += 1
        memory = segment.tensor()
        self._mapped[self.rank, self._serial] = memory
        return memory, _Address(segment.address.encode(), nbytes, self._serial)

    def _map(self, rank: int, address: _Address) -> Tensor:
        key = (rank, address.serial)
        if key not in self._mapped:
            self._mapped[key] = Segment.open(address.path.decode(), address.nbytes).tensor()
        return self._mapped[key]

    def _advance(self, counter: str, value: int) -> None:
        word = self._words[counter][self.rank]
        word.value = value
        futex_wake(word)

    def _wait(self, counter: str, value: int) -> None:
        """Wait until the counter of every member has reached ``value``."""
        started = time.perf_counter()
        deadline = started + self._timeout_s
        for rank, word in enumerate(self._words[counter]):
            self._watched = word
            while (seen := word.value) < value:
                if self._error is not None:
                    raise self._error
                left = deadline - time.perf_counter()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"waited {self._timeout_s:.0f} s for local rank {rank} to say '{counter}' (at {seen}, needs {value})"
                    )
                futex_wait(word, seen, min(left, SLICE_S))
        self._watched = None
        self.waiting_s += time.perf_counter() - started


def split_rows(num_rows: int, num_chunks: int) -> list[range]:
    """Rows ``[0, num_rows)`` in ``num_chunks`` contiguous chunks of nearly equal size."""
    edges = [num_rows * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]

