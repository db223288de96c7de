"""The members of one host: what each shows to the others in shared memory, and the moves that they make.

A worker has one **board** for its whole life; its address is told to the others once. For every generation that it
enters it makes a new **sheet** and names it on the board. A sheet has one writer, its member. Four counters say how
far that member is; they only grow, and the others wait for them::

    published   my nodes (of combine number `published`) are complete; read them
    reduced     my chunk is summed; read it. All say so: the combine is committed
    mailed      my letter is in the mail segment
    opened      I have read everybody's letters

Why nobody reads what is being overwritten, within a generation: nodes are written again only after the member itself
has seen ``reduced`` from all, and nobody reads a node after its own ``reduced``. A result is written again only after
all have ``published`` the next combine, and they do that after they have collected this one. A letter is written again
only after all have ``opened`` it.

**Helping.** Before it publishes, a member shows the leaves that it has ``todo`` and how many of them it has
``started``. One that is done with its own takes leaves from the end of the list of one that is late, and says so on its
own sheet (``taken``). Whoever has said so computes the leaf before it publishes, without exception; so the owner leaves
out a leaf that it sees taken. It may not see it in time; then both compute it, and both results are the same. Nothing
depends on who sees what first: a leaf is left out only by its owner, and only after another has said that it will be in
its nodes. Two nodes of a tree are disjoint or nested, so of all published ones the outermost are the sum, and cover
every leaf once. These lists are those of combine number ``work``, and are looked at by members that have not
published it: until then nobody can begin the next.

**Leaving.** A member whose wait fails leaves: it says ``left`` and never writes to its sheet, result or letter of that
generation again. Members leave at different points, and some go on to the next generation, or the one after, while
others still work in this one; since every generation has a sheet of its own, they cannot be mixed up. Only the slots
belong to the worker and live on, so a member that has left may change a node while another still adds it up. Hence
the order: who leaves says ``left`` *before* it touches a node, and who has read nodes looks for ``left`` *afterwards*
(`Host.verify`) and only then says ``reduced``. So ``reduced`` is a statement about memory that no longer changes,
and a combine that all have ``reduced`` is committed, whatever happens next.

**Dying.** What a dead member showed stays readable where it is mapped. Everything that is read after the commit is
mapped before it, so after a commit all can collect it, whoever dies or closes. And who sees all counters at
``reduced`` has committed even if it is interrupted at the same time: survivors disagree on a commit only if
one of them left before the last ``reduced`` was said.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from unisono.decisions.tree import Node, outermost
from unisono.errors import DeadlineExceeded, PeerLost, RecipeError
from unisono.exchange import NUM_FACTS
from unisono.exchange.flat import ROW_BYTES, FlatLayout, Rows, Slot, blocks, divide_rows
from unisono.exchange.memory import Segment, fence, futex_wait, futex_wake
from unisono.exchange.pool import Pool

__all__ = ["MAX_TEAM", "Board", "Host", "split_rows"]

MAX_NODES = 256
MAX_WORK = 512
"""Leaves of one member that others may help with."""
MAX_TEAM = 4096
"""Members of one generation, on all hosts, whose facts fit on a sheet."""
PIECE_BYTES = 2 << 20  # of a broadcast: written by one and read by the others while it is in a cache
SLICE_S = 0.05  # a wait looks around this often even if a wake-up was missed

_Address = ctypes.c_char * 160
_Word = ctypes.c_uint32 * 16  # a counter and the rest of its cache line


class _Cover(ctypes.Structure):
    """The board: the generation that its worker is in (counted from 1; 0: none yet), and the sheet."""

    _fields_ = [("generation", _Word), ("sheet", _Address)]


class _Node(ctypes.Structure):
    _fields_ = [("level", ctypes.c_uint64), ("index", ctypes.c_uint64), ("slot", _Address)]


class _Sheet(ctypes.Structure):
    _fields_ = [
        ("published", _Word),
        ("reduced", _Word),
        ("mailed", _Word),
        ("opened", _Word),
        ("left", _Word),
        ("work", _Word),
        ("started", _Word),
        ("num_taken", _Word),
        ("num_todo", ctypes.c_uint64),
        ("todo", ctypes.c_uint32 * MAX_WORK),
        ("taken", ctypes.c_uint32 * MAX_WORK),
        ("num_nodes", ctypes.c_uint64),
        ("num_team_facts", ctypes.c_uint64),
        ("digest", ctypes.c_uint64),
        ("letter_bytes", ctypes.c_uint64),
        ("result", _Address),
        ("mail", _Address),
        ("nodes", _Node * MAX_NODES),
        ("facts", ctypes.c_double * NUM_FACTS),
        ("team_facts", ctypes.c_double * (NUM_FACTS * MAX_TEAM)),
    ]


def _word(page: ctypes.Structure, name: str) -> ctypes.c_uint32:
    """One of the counters, to wait for or to wake."""
    return ctypes.c_uint32.from_buffer(page, getattr(type(page), name).offset)


class Board:
    """A worker's address in its host's shared memory, and its slots: both live longer than a generation."""

    def __init__(self) -> None:
        self._segment = Segment.create(ctypes.sizeof(_Cover))
        self._cover = _Cover.from_buffer(self._segment.map)
        self._segments: dict[int, Segment] = {}  # by the place in memory where a slot begins
        self.slots = Pool(self._allocate)
        self.address = self._segment.address

    @classmethod
    def create(cls) -> Board:
        return cls()

    def enter(self, generation: int, sheet: str) -> None:
        """Tell the others that this worker is in ``generation`` now."""
        word = _word(self._cover, "generation")
        if generation + 1 <= word.value:
            raise ValueError(
                f"this worker has been in generation {word.value - 1} and cannot enter {generation}: they only grow"
            )
        self._cover.sheet = sheet.encode()
        fence()
        word.value = generation + 1
        futex_wake(word)

    def keep(self, layout: FlatLayout, slots: Sequence[Slot]) -> list[Slot]:
        """Free all slots but these; for each of them one of this board, itself or a copy."""
        self.slots.keep(layout, [slot for slot in slots if slot in self.slots])
        for place in self._segments.keys() - {slot.memory.data_ptr() for slot in self.slots}:
            self._segments.pop(place).close()
        return [slot if slot in self.slots else slot.copy_to(self.slots.slot()) for slot in slots]

    def find(self, slot: Slot) -> str:
        """Where others find a slot of this board."""
        return self._segments[slot.memory.data_ptr()].address

    def _allocate(self, layout: FlatLayout) -> Tensor:
        segment = Segment.create(layout.slot_bytes)
        memory = segment.tensor()
        self._segments[memory.data_ptr()] = segment
        return memory

    def close(self) -> None:
        """The end of the worker: nobody can open anything of it any more."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self.slots.clear()
        self._segment.close()


class _Peer:
    """One member of this generation as this member sees it."""

    def __init__(self, sheet: Segment) -> None:
        self.sheet = _Sheet.from_buffer(sheet.map)
        self.left = _word(self.sheet, "left")
        self.started = _word(self.sheet, "started")
        self.work = _word(self.sheet, "work")
        self.words = {name: _word(self.sheet, name) for name in ("published", "reduced", "mailed", "opened")}
        self.mapped: dict[str, Tensor] = {}

    def map(self, address: bytes) -> Tensor:
        key = address.decode()
        if key not in self.mapped:
            self.mapped[key] = Segment.open(key).tensor()
        return self.mapped[key]


class Host:
    """This member among those of its host, in one generation.

    Every wait ends: when the others are there, at `interrupt`, when one of them has left, or after ``timeout_s``.

    Args:
        board: this member's own. It may have served earlier generations, whose hosts are closed.
        addresses: the boards of all members of the host, by local rank.
        rank: this member's local rank.
        generation: a number that all members agree on, and that grows from one to the next.
        timeout_s: how long any one wait may take.
        names: the ids of the members' workers, by local rank, for errors; empty: they have none.
    """

    def __init__(
        self,
        board: Board,
        addresses: Sequence[str],
        rank: int,
        *,
        generation: int,
        timeout_s: float,
        names: Sequence[str] = (),
    ) -> None:
        self.rank = rank
        self.size = len(addresses)
        self.waiting_s = 0.0
        self._board = board
        self._addresses = list(addresses)
        self._generation = generation
        self._timeout_s = timeout_s
        self._names = names
        self._error: Exception | None = None
        self._watched: ctypes.c_uint32 | None = None
        self._turn = 0
        self._num_letters = 0
        self._work_deadline = 0.0
        self._segments: dict[str, Segment] = {}  # of this generation: sheet, result, mail
        segment = self._allocate("sheet", ctypes.sizeof(_Sheet))
        self._me = _Peer(segment)
        self._sheet = self._me.sheet
        self._peers: list[_Peer] = []
        self._nodes: dict[Node, Rows] = {}
        self._results: list[Tensor] = []
        self._result = self._mail = torch.empty(0, dtype=torch.uint8)
        try:
            board.enter(generation, segment.address)
        except ValueError:
            segment.close()
            raise

    # -- slots ---------------------------------------------------------------------------------------

    def prepare(self, layout: FlatLayout, result_rows: int, slots: Sequence[Slot]) -> list[Slot]:
        """See `Exchange.prepare`. The caller makes sure that no member is in a combine.

        Args:
            result_rows: room for the sum of this member's chunk.
        """
        self._layout = layout
        self._nodes, self._results = {}, []
        for peer in self._peers:
            peer.mapped.clear()
        self._result, self._sheet.result = torch.empty(0, dtype=torch.uint8), b""
        if result_rows:
            # A new one: a sum does not write the padding in its rows, which has to be zero for the digest.
            segment = self._allocate("result", result_rows * ROW_BYTES)
            self._result, self._sheet.result = segment.tensor(), segment.address.encode()
        return self._board.keep(layout, slots)

    def slot(self) -> Slot:
        return self._board.slots.slot()

    def release(self, slot: Slot) -> None:
        self._board.slots.release(slot)

    # -- the moves of a combine ----------------------------------------------------------------------

    def publish(self, slots: Mapping[Node, Slot], facts: Sequence[float]) -> None:
        """Show this member's nodes and facts, wait until everybody has, and map what they show."""
        if len(slots) > MAX_NODES:
            raise RecipeError(
                f"this worker holds {len(slots)} nodes of the summation tree and can show {MAX_NODES}; "
                "use fewer micro-batches"
            )
        self._begin()
        sheet = self._sheet
        for place, (node, slot) in enumerate(slots.items()):
            sheet.nodes[place] = _Node(node.level, node.index, self._board.find(slot).encode())
        sheet.num_nodes = len(slots)
        sheet.facts[:NUM_FACTS] = facts
        self._turn += 1
        self._advance("published", self._turn)
        self._wait("published", self._turn)
        places, results = {}, []
        for rank, peer in enumerate(self._peers):
            for record in peer.sheet.nodes[: peer.sheet.num_nodes]:
                places[Node(record.level, record.index)] = (rank, record.slot)
            results.append(self._map(rank, peer.sheet.result))
        counted = outermost(places)
        self._nodes = {node: Rows(self._map(*place), 0) for node, place in places.items() if node in counted}
        self._results = results

    def show_work(self, todo: Sequence[int]) -> None:
        """Say which leaves this member is going to compute before its next `publish`. Local.

        The first of them counts as started, so that nobody is left with nothing to measure its pace by.
        """
        sheet = self._sheet
        sheet.work[0] = 0
        fence()
        shown = todo if len(todo) <= MAX_WORK else ()
        sheet.todo[: len(shown)] = list(shown)
        sheet.num_todo = len(shown)
        sheet.started[0] = min(1, len(shown))
        sheet.num_taken[0] = 0
        self._work_deadline = time.perf_counter() + self._timeout_s
        fence()
        sheet.work[0] = self._next_turn
        futex_wake(self._me.work)

    def start(self, place: int, leaf: int) -> bool:
        """This member comes to a leaf of its list. Local.

        Returns:
            False: another member has taken it; leave it out.
        """
        if place:
            self._sheet.started[0] = place + 1
            fence()
            futex_wake(self._me.started)
        return leaf not in self._taken()

    def take(self, paces: Sequence[float], elapsed_s: float) -> int | None:
        """A leaf of another member for this one, which is done with its own; None if that is not worth it. Local.

        What was taken **must** be computed and be in the nodes that this member publishes next.

        Args:
            paces: by local rank, seconds for a leaf, as known.
            elapsed_s: since the members have started their leaves.
        """
        if self._me.left.value or self._sheet.num_taken[0] >= MAX_WORK:
            return None
        taken = self._taken()
        best: tuple[float, int] | None = None
        for rank, peer in enumerate(self._peers):
            if rank == self.rank or not self._is_at_work(peer):
                continue
            started, left = self._left_of(peer, taken)
            if not left:
                continue
            # It may be slower than it was, and is in the middle of the one that it has started last.
            pace = max(paces[rank], elapsed_s / (started - 0.5))
            begins_last_in_s = (len(left) - 0.5) * pace
            if begins_last_in_s > paces[self.rank] and (best is None or begins_last_in_s > best[0]):
                best = (begins_last_in_s, left[-1])
        if best is None:
            return None
        number = self._sheet.num_taken[0]
        self._sheet.taken[number] = best[1]
        fence()
        self._sheet.num_taken[0] = number + 1
        fence()
        return best[1]

    def pause(self, seconds: float) -> bool:
        """Wait for a moment, if another member may yet need help: it has leaves that it has not started, or has not
        shown its work so far.

        Returns:
            False: there is nothing to wait for.
        """
        if self._error is not None or self._me.left.value or time.perf_counter() > self._work_deadline:
            return False
        taken = self._taken()
        for peer in self._peers:
            if peer is self._me or peer.left.value:
                continue
            shown = peer.work.value
            if shown != self._next_turn:
                futex_wait(peer.work, shown, seconds)
                return True
            fence()
            started, left = self._left_of(peer, taken)
            if left:
                futex_wait(peer.started, started, seconds)
                return True
        return False

    def _left_of(self, peer: _Peer, taken: set[int]) -> tuple[int, list[int]]:
        """How many leaves a member has started, and those that nobody has."""
        started = peer.sheet.started[0]
        return started, [leaf for leaf in peer.sheet.todo[started : peer.sheet.num_todo] if leaf not in taken]

    def _taken(self) -> set[int]:
        at_work = [peer.sheet for peer in self._peers if self._is_at_work(peer)]
        return {leaf for sheet in at_work for leaf in sheet.taken[: sheet.num_taken[0]]}

    @property
    def _next_turn(self) -> int:
        """The number of the combine that this member will publish next, as a counter shows it."""
        return (self._turn + 1) & 0xFFFFFFFF

    def _is_at_work(self, peer: _Peer) -> bool:
        """Whether its lists are those of the combine that this member will publish next."""
        at_work: bool = peer.work.value == self._next_turn
        fence()
        return at_work

    def nodes(self) -> Mapping[Node, Rows]:
        """The published nodes of all members, to read only, until this member's `verify`."""
        return self._nodes

    def result(self, first_row: int) -> Rows:
        """Where this member writes the sum of its chunk, which starts with ``first_row``."""
        return Rows(self._result, first_row)

    def verify(self) -> None:
        """Make sure that all `nodes` were still as published when they were read. Local.

        Raises:
            PeerLost: a member has left, and may have changed one.
        """
        fence()
        for rank, peer in enumerate(self._peers):
            if peer.left.value:
                raise self._gone(rank)

    def commit(self, digest: int, team_facts: Sequence[float] = ()) -> None:
        """Say that this member's chunk is summed, and wait until everybody's is. After `verify`.

        Args:
            team_facts: what came from other hosts, for the others of this one.
        """
        self._sheet.digest = digest
        self._sheet.team_facts[: len(team_facts)] = team_facts
        self._sheet.num_team_facts = len(team_facts)
        self._advance("reduced", self._turn)
        self._wait("reduced", self._turn)

    def collect(self, chunks: Sequence[range], total: float, out: Slot) -> int:
        """Read every owner's chunk into ``out``, divided by the total weight; returns the digest.

        Args:
            chunks: rows by owner (local ranks 0, 1, ...), covering the layout.
        """
        digest = 0
        for rank, chunk in enumerate(chunks):
            digest += self._peers[rank].sheet.digest
            rows = Rows(self._results[rank], chunk.start)
            for first, end in blocks(chunk.start, chunk.stop, out.memory.device):
                divide_rows(self._layout, rows, total, first, end, out)
        return digest & 0xFFFFFFFFFFFFFFFF

    def total_weight(self, chunks: Sequence[range]) -> float:
        """The total weight, from the chunk that holds it. After `commit`."""
        entry = self._layout.scalars
        row = entry.offset * entry.sum_dtype.itemsize // ROW_BYTES
        rank = next(r for r, chunk in enumerate(chunks) if row in chunk)
        start = entry.offset - chunks[rank].start * ROW_BYTES // entry.sum_dtype.itemsize
        return float(self._results[rank].view(entry.sum_dtype)[start])

    def facts(self) -> list[tuple[float, ...]]:
        """What the members of this host published, by local rank. Between `publish` and `commit`."""
        return [tuple(peer.sheet.facts) for peer in self._peers]

    def team_facts(self, rank: int) -> list[float]:
        """What that member gave to `commit`. After `commit`."""
        sheet = self._peers[rank].sheet
        return list(sheet.team_facts[: sheet.num_team_facts])

    # -- letters -------------------------------------------------------------------------------------

    def all_gather(self, data: bytes) -> list[bytes]:
        """Everyone's ``data``, by local rank."""
        ctypes.memmove(self._letter(len(data)).data_ptr(), data, len(data))
        letters = [ctypes.string_at(letter.data_ptr(), letter.numel()) for letter in self._post()]
        self._settle()
        return letters

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite ``tensor`` with that of local rank ``source``: one copy in, one copy out."""
        tensor = tensor.detach()
        own = self.rank == source
        flat = tensor.cpu().contiguous()  # the tensor itself where it can be
        data = flat.view(-1).view(torch.uint8)
        for piece in data.split(PIECE_BYTES) if data.numel() else ():
            letter = self._letter(piece.numel() if own else 0)
            if own:
                letter.copy_(piece)
            letters = self._post()
            if not own:
                piece.copy_(letters[source])
            self._settle()
        if not own and flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)

    def _letter(self, nbytes: int) -> Tensor:
        """(nbytes,) where this member writes its next letter."""
        if self._mail.numel() < nbytes:
            # By doubling, as the others keep the old ones mapped.
            segment = self._allocate("mail", max(4096, nbytes, 2 * self._mail.numel()))
            self._mail, self._sheet.mail = segment.tensor(), segment.address.encode()
        self._sheet.letter_bytes = nbytes
        return self._mail[:nbytes]

    def _post(self) -> list[Tensor]:
        """Show this member's letter, and wait for all; everyone's, to be read before `_settle`."""
        self._begin()
        self._num_letters += 1
        self._advance("mailed", self._num_letters)
        self._wait("mailed", self._num_letters)
        return [self._map(rank, p.sheet.mail)[: p.sheet.letter_bytes] for rank, p in enumerate(self._peers)]

    def _settle(self) -> None:
        """Wait until all have read all letters, so that any member may write again, or close."""
        self._advance("opened", self._num_letters)
        self._wait("opened", self._num_letters)

    # -- inside --------------------------------------------------------------------------------------

    def interrupt(self, error: Exception) -> None:
        self._error = error
        watched = self._watched
        if watched is not None:
            futex_wake(watched)

    def leave(self) -> None:
        """Take no further part, and tell the others: this member's nodes may change from now on. Local."""
        if not self._me.left.value:
            self._me.left.value = 1
            fence()
            for word in self._me.words.values():
                futex_wake(word)

    @contextlib.contextmanager
    def or_leave(self) -> Iterator[None]:
        """What is inside either succeeds, or this member leaves."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def close(self) -> None:
        self.leave()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        # Whoever holds the error that ended this holds its frames, and with them this object: let go of the memory.
        self._error = self._gone(self.rank)
        self._peers, self._nodes, self._results = [], {}, []
        self._result = self._mail = torch.empty(0, dtype=torch.uint8)

    def _allocate(self, use: str, nbytes: int) -> Segment:
        segment = Segment.create(nbytes)
        if use in self._segments:
            self._segments[use].close()
        self._segments[use] = segment
        return segment

    def _map(self, rank: int, address: bytes) -> Tensor:
        if not address:
            return torch.empty(0, dtype=torch.uint8)
        try:
            return self._peers[rank].map(address)
        except FileNotFoundError as error:
            raise self._gone(rank) from error

    def _gone(self, rank: int) -> PeerLost:
        return PeerLost(
            f"{self._name(rank)} has left generation {self._generation}; nothing of it can be committed any more",
            self._names[rank : rank + 1],
        )

    def _name(self, rank: int) -> str:
        return f"worker {self._names[rank]}" if self._names else f"local rank {rank} of {self.size}"

    def _begin(self) -> None:
        """Before the first word of a move: whoever was interrupted, or has left, says nothing any more."""
        if self._error is not None:
            self.leave()
            raise self._error
        if self._me.left.value:
            raise self._gone(self.rank)

    def _advance(self, counter: str, value: int) -> None:
        word = self._me.words[counter]
        fence()
        word.value = value
        futex_wake(word)

    def _wait(self, counter: str, value: int) -> None:
        """Wait until the counter of every member has reached ``value``; whoever cannot leaves."""
        started = time.perf_counter()
        deadline = started + self._timeout_s
        try:
            with self.or_leave():
                if not self._peers:
                    self._peers = self._meet(deadline)
                for rank, peer in enumerate(self._peers):
                    self._watch(rank, peer.words[counter], value, peer.left, deadline, counter)
        finally:
            self._watched = None
            self.waiting_s += time.perf_counter() - started
        fence()

    def _meet(self, deadline: float) -> list[_Peer]:
        """Wait until all members are in this generation, and open their sheets."""
        peers = []
        for rank, address in enumerate(self._addresses):
            if rank == self.rank:
                peers.append(self._me)
                continue
            try:
                board = Segment.open(address)
                cover = _Cover.from_buffer(board.map)
                word = _word(cover, "generation")
                self._watch(rank, word, self._generation + 1, None, deadline, "generation")
                fence()
                sheet = cover.sheet.decode()
                fence()
                # It may have gone on while its sheet's address was read.
                if word.value != self._generation + 1:
                    raise self._gone(rank)
                peers.append(_Peer(Segment.open(sheet)))
            except FileNotFoundError as error:
                raise self._gone(rank) from error
        return peers

    def _watch(
        self, rank: int, word: ctypes.c_uint32, value: int, left: ctypes.c_uint32 | None, deadline: float, what: str
    ) -> None:
        self._watched = word
        while _behind(seen := word.value, value):
            if self._error is not None:
                raise self._error
            if left is not None and left.value:
                fence()
                if _behind(word.value, value):  # it did not say it and then leave
                    raise self._gone(rank)
                return
            remaining = deadline - time.perf_counter()
            if remaining <= 0:
                raise DeadlineExceeded(
                    f"waited {self._timeout_s:.0f} s for {self._name(rank)} "
                    f"in generation {self._generation}: '{what}' is {seen}, needs {value}",
                    self._names[rank : rank + 1],
                )
            futex_wait(word, seen, min(remaining, SLICE_S))


def _behind(seen: int, value: int) -> bool:
    """Whether a 32-bit counter has yet to reach ``value``.

    Members are at most one apart, so it does not matter when the counter passes 2**32 and starts again.
    """
    return (seen - value) & 0x80000000 != 0


def split_rows(num_rows: int, num_chunks: int) -> list[range]:
    """Rows ``[0, num_rows)`` in ``num_chunks`` contiguous chunks of nearly equal size."""
    edges = [num_rows * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]
