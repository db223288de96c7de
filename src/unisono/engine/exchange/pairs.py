"""Memory through which two members of a group pass values to each other, where they are on one host.

The members of a group carry one model together. What passes between two of them has one reader, and both may wait for
it in every micro-batch. So it goes through shared memory, without any other thread.

Each member has a `GroupPage`, whose address the others get when the group meets, over its wire. On the page it has for
each of them::

    sent    messages that I have written for you; each lies in a slot, whose address is on the page
    taken   messages of yours that I have read; you may write their slots again
    shown   turns of swaps that I have written for you

**Messages.** A slot is a segment of its own. Its writer uses it again after its reader has counted ``taken``, and until
then another one; so whoever sends does not wait, up to `MAX_MESSAGES`. `Pairs.settle` waits until few are unread.

**Swaps.** Two members give each other tensors of one size, a piece in each turn. Each has memory of two halves: it
writes its piece into half ``turn % 2``, counts ``shown``, waits for ``shown`` of the other one, and reads. Nobody
counts what it has read, which would be one more wake-up: a half is written again two turns later. By then its writer
has seen the other one's ``shown`` of the turn between, which is counted after the reading of the turn before that.

**Leaving** is as in `unisono.engine.exchange.host`. What was sent before can still be read where it is mapped.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

from torch import Tensor

from unisono.engine.exchange.pages import MAX_MESSAGES, GroupPage, Partner
from unisono.engine.exchange.shared_memory import Segment, fence, futex_wake
from unisono.engine.exchange.watcher import Watcher, is_behind
from unisono.engine.exchange.wire import Wire

__all__ = ["AHEAD", "SWAP_BYTES", "Pairs"]

SWAP_BYTES = 1 << 20
"""Of a piece: it stays in the cache between the copy into shared memory and that out of it."""
ADDRESS_BYTES = 160
LEAST_BYTES = 4096
"""Of a slot."""
AHEAD = 2
"""Messages to one member that may be unread after `Pairs.settle`."""


class Pairs(Watcher):
    """Connections of this member with each other one of its group: a wire, and shared memory with those on its host.

    Args:
        wire: between all members of the group.
        hosts: by member, a number that is equal for those that share memory.
    """

    def __init__(
        self, wire: Wire, hosts: Sequence[int], *, generation: int, timeout_s: float, names: Sequence[str] = ()
    ) -> None:
        self.wire = wire
        self._hosts = hosts
        self._segment = Segment.create(GroupPage.num_bytes(wire.size))
        self._own = GroupPage(self._segment, wire.size)
        super().__init__(self._own, wire.rank, wire.size, generation=generation, timeout_s=timeout_s, names=names)
        self._has_met = False
        self._pairs: dict[int, _Pair] = {}
        """By member, those with whom memory is shared; empty before the group has met."""

    def shares(self, partner: int) -> bool:
        """Return whether this member shares memory with another one. The first call waits until all of the group call.

        Raises:
            PeerLost, DeadlineExceeded: a member was lost.
        """
        self.check()
        if not self._has_met:
            with self.or_leave():
                self._meet()
        return partner in self._pairs

    def slot(self, target: int, nbytes: int) -> Tensor:
        """Return memory for the next message to a member, (nbytes,) uint8; `post` it when it is written.

        Raises:
            PeerLost, DeadlineExceeded: the member has left, or has too many messages that it does not read.
        """
        self.check()
        pair = self._pairs[target]
        self._wait(target, pair.theirs.taken, pair.ours.sent.value + 1 - MAX_MESSAGES, "taken")
        return pair.slot(nbytes)

    def post(self, target: int) -> None:
        """Let a member read the message that was written last."""
        _advance(self._pairs[target].ours.sent)

    def message(self, source: int) -> Tensor:
        """Return the next message of a member, when it is there, to be read before `take`: uint8.

        Raises:
            PeerLost, DeadlineExceeded: the member has left, or has sent nothing in time.
        """
        self.check()
        pair = self._pairs[source]
        self._wait(source, pair.theirs.sent, pair.ours.taken.value + 1, "sent")
        try:
            return pair.message()
        except FileNotFoundError as error:
            raise self.gone(source) from error

    def take(self, source: int) -> None:
        """Let a member write the slot of the message that was read last."""
        _advance(self._pairs[source].ours.taken)

    def swap(self, partner: int, given: Tensor, out: Tensor) -> None:
        """Give a member the bytes of a tensor, and write its bytes to ``out``.

        Args:
            given, out: contiguous, on the CPU, and of one size on both members.

        Raises:
            PeerLost, DeadlineExceeded: the member has left, or has given nothing in time.
        """
        self.check()
        pair, source, target = self._pairs[partner], given.data_ptr(), out.data_ptr()
        for start in range(0, given.nbytes, SWAP_BYTES):
            nbytes = min(SWAP_BYTES, given.nbytes - start)
            turn = pair.ours.shown.value + 1
            ctypes.memmove(pair.half(turn), source + start, nbytes)
            _advance(pair.ours.shown)
            self._wait(partner, pair.theirs.shown, turn, "shown")
            try:
                ctypes.memmove(target + start, pair.their_half(turn), nbytes)
            except FileNotFoundError as error:
                raise self.gone(partner) from error

    def settle(self) -> None:
        """Wait until few of the messages to each member are unread.

        Raises:
            PeerLost, DeadlineExceeded: a member has left, or does not read.
        """
        self.check()
        for partner, pair in self._pairs.items():
            self._wait(partner, pair.theirs.taken, pair.ours.sent.value - AHEAD, "taken")

    def interrupt(self, error: Exception) -> None:
        self.wire.interrupt(error)
        super().interrupt(error)

    def close(self) -> None:
        """Leave, and unmap the memory of the other members."""
        self.leave()
        self._segment.close()
        for pair in self._pairs.values():
            pair.close()
        self.wire.close()
        # The error that ended this generation keeps its frames alive, and with them this object.
        self.error = self.gone(self.rank)
        self._pairs = {}

    def _meet(self) -> None:
        """Tell the others the address of this member's page, and open those of its host; nothing where none share."""
        if len(set(self._hosts)) < self.size:
            own = self._segment.address.encode().ljust(ADDRESS_BYTES, b"\0")
            for rank, address in enumerate(self.wire.all_gather_equal(own)):
                if rank == self.rank or self._hosts[rank] != self._hosts[self.rank]:
                    continue
                try:
                    page = GroupPage(Segment.open(address.rstrip(b"\0").decode()), self.size)
                except FileNotFoundError as error:
                    raise self.gone(rank) from error
                self._pairs[rank] = _Pair(self._own.partners[rank], page.partners[self.rank], page.left)
        self._has_met = True

    def _wait(self, partner: int, word: ctypes.c_uint32, value: int, what: str) -> None:
        if is_behind(word.value, value):
            try:
                with self.or_leave():
                    left, deadline = self._pairs[partner].left, time.perf_counter() + self.timeout_s
                    self._watch(partner, word, value, left, deadline, what)
            finally:
                self._watched = None
        fence()


class _Pair:
    """What this member has for another one, and that one for this.

    Args:
        left: of the other one.
    """

    def __init__(self, ours: Partner, theirs: Partner, left: ctypes.c_uint32) -> None:
        self.ours, self.theirs, self.left = ours, theirs, left
        self._slots: dict[int, Segment] = {}
        """By number of a message, its slot, until that may be written again."""
        self._free: list[Segment] = []
        self._mapped: dict[bytes, Segment] = {}
        self._swap: Segment | None = None
        self._halves: tuple[int, int] | None = None
        self._their_halves: tuple[int, int] | None = None

    def slot(self, nbytes: int) -> Tensor:
        """Return memory for the next message."""
        taken, number = self.theirs.taken.value, self.ours.sent.value + 1
        for each in [each for each in self._slots if each == number or not is_behind(taken, each)]:
            self._free.append(self._slots.pop(each))
        found = min((each for each in self._free if each.nbytes >= nbytes), key=_size, default=None)
        if found is not None:
            self._free.remove(found)
        else:
            if self._free:
                self._free.pop().close()
            # By doubling, because the other member keeps the old segments mapped.
            found = Segment.create(max(LEAST_BYTES, 1 << (nbytes - 1).bit_length()))
        self._slots[number] = found
        self.ours.fields.slots[number % MAX_MESSAGES].value = found.address.encode()
        return found.tensor()[:nbytes]

    def message(self) -> Tensor:
        """Return the next message of the other one, which is there.

        Raises:
            FileNotFoundError: the other one is gone.
        """
        return self._map(self.theirs.fields.slots[(self.ours.taken.value + 1) % MAX_MESSAGES].value).tensor()

    def half(self, turn: int) -> int:
        """Return where in memory this member writes in a turn."""
        if self._halves is None:
            self._swap = Segment.create(2 * SWAP_BYTES)
            self.ours.fields.swap = self._swap.address.encode()
            self._halves = _halves(self._swap)
        return self._halves[turn % 2]

    def their_half(self, turn: int) -> int:
        """Return where in memory the other one has written in a turn.

        Raises:
            FileNotFoundError: the other one is gone.
        """
        if self._their_halves is None:
            self._their_halves = _halves(self._map(self.theirs.fields.swap))
        return self._their_halves[turn % 2]

    def _map(self, address: bytes) -> Segment:
        if address not in self._mapped:
            self._mapped[address] = Segment.open(address.decode())
        return self._mapped[address]

    def close(self) -> None:
        """Give the memory back."""
        for each in (*self._slots.values(), *self._free, *([self._swap] if self._swap is not None else ())):
            each.close()
        self._slots, self._free, self._mapped = {}, [], {}
        self._swap = self._halves = self._their_halves = None


def _size(segment: Segment) -> int:
    return segment.nbytes


def _halves(segment: Segment) -> tuple[int, int]:
    """Return where in memory the halves of memory for swaps begin. It must be held as long as they are used."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(segment.map))
    return start, start + SWAP_BYTES


def _advance(word: ctypes.c_uint32) -> None:
    """Add one to a word of this member, after everything that was written before."""
    fence()
    word.value += 1
    futex_wake(word)
