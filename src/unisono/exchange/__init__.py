"""How the partial sums of a step's members meet.

Every member holds some nodes of the summation tree, each in a slot (`unisono.exchange.flat`). A combine has the same
shape everywhere:

1. **publish**: everyone's nodes are complete;
2. **reduce**: the rows are cut into one chunk per member; the chunk's owner reads it from every node, adds up the tree
   in the fixed order, and takes the chunk's part of the digest;
3. **commit**: all owners are done, so the sum of the step exists;
4. **collect**: everyone reads all chunks into a slot of its own and divides by the total weight.

Until the commit nobody's nodes are modified, so a combine that fails can be done again by those who are left.
After it everybody can finish, whoever dies: a combine that returns is committed, and one that raises is not, as far as
this member knows. (Another member may know more. It holds the step; those who raised do it again, with the same bits.)

What differs between the implementations is where chunks are read from:

==================  ==========================================  =============================
`Alone`             one member                                  nothing to exchange
`SharedMemory`      members of one host                         read in place, no copy
`Network`           ``torch.distributed``: gloo, NCCL           all-to-all, then all-gather
`TwoLevel`          several members on each of several hosts    the two above, composed
==================  ==========================================  =============================

All of them give the same bits: the order of additions is `unisono.decisions.tree`'s, never theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from unisono.decisions.tree import Node
from unisono.exchange.flat import FlatLayout, Slot

__all__ = ["NUM_FACTS", "Combined", "Exchange", "Share", "Work"]

NUM_FACTS = 32
"""Float64 numbers that each member tells all others with every combine (`unisono.facts`)."""


@dataclass(frozen=True)
class Share:
    """What one member brings to a combine."""

    num_leaves: int
    plan: tuple[tuple[Node, ...], ...]
    """By rank: the nodes that each member holds; together they cover every leaf once. Equal on all members."""
    slots: Mapping[Node, Slot]
    """This member's nodes, complete. Not modified before the commit."""


@dataclass(frozen=True)
class Combined:
    """What all members hold after a commit; equal bits on each of them."""

    slot: Slot
    """Gradients and float buffers are means, the rest of the tail are sums. Valid until the next step's first node."""
    digest: int
    facts: tuple[tuple[float, ...], ...]
    """By rank: what each member gave to `Exchange.combine`."""
    waiting_s: float
    """How long this member waited for others."""


class Work(Protocol):
    """What the members of one host still have to do for the next combine: who is done computes leaves of who is late.

    Local, all of it. See `unisono.exchange.host` for why no leaf is lost, or counted twice.
    """

    def show_work(self, todo: Sequence[int]) -> None:
        """Say which leaves this member is going to compute, in this order, before the next `Exchange.combine`."""
        ...

    def start(self, place: int, leaf: int) -> bool:
        """This member comes to the leaf at ``place`` of its list. False: another has taken it; leave it out."""
        ...

    def take(self, paces: Sequence[float], elapsed_s: float) -> int | None:
        """A leaf of a late member, for this one, which is done; None if that is not worth it.

        What was taken **must** be computed and be among the nodes that this member brings to the next combine.

        Args:
            paces: by place in the host, seconds for a leaf, as known.
            elapsed_s: since the members have shown their work.
        """
        ...

    def pause(self, seconds: float) -> bool:
        """Wait for a moment, if another member has leaves that it has not started, or has not shown its work so far.
        False: nothing to wait for.

        Until then there is nothing to gain from beginning the combine, for which that member has to come anyway.
        """
        ...


class Exchange(Protocol):
    """The complete interface between a step and its peers; one conformance suite holds all implementations.

    One instance serves one generation. Every method but `slot`, `release`, `offer`, `interrupt` and `close` is
    collective: every member calls it, in the same order.
    """

    rank: int
    size: int

    def prepare(self, layout: FlatLayout, slots: Sequence[Slot] = ()) -> list[Slot]:
        """Make slots of this layout from now on. Collective; before the first slot.

        Args:
            slots: nodes of this layout to keep, from this exchange or from an earlier one of this worker, which is
                closed. All other slots are forgotten.

        Returns:
            For each of ``slots``, one of this exchange with the same content: itself, or, where members cannot
            reach it here, a copy.
        """
        ...

    def slot(self) -> Slot:
        """A free slot; its entries are arbitrary. Local."""
        ...

    def release(self, slot: Slot) -> None:
        """Give a slot back. One that was given back or forgotten already is left alone. Local."""
        ...

    def work(self) -> tuple[Work, Sequence[int]] | None:
        """Where the members of this host see each other's work, and their ranks; None where they cannot. Local.

        Where it is used, the nodes that a member brings to a combine are not those of the plan any more; those of
        a host together are.
        """
        ...

    def offer(self, share: Share, rows_ready: int) -> None:
        """Say that rows ``[0, rows_ready)`` of all of this member's nodes are complete. Local, optional.

        An exchange that crosses a network begins to send them while the last backward still runs.
        """
        ...

    def combine(self, share: Share, facts: Sequence[float]) -> Combined:
        """Sum the nodes of all members in tree order, and divide by the total weight.

        Collective: every member of the generation, once per step. Takes the share's slots: the result lies in
        one of them or in another, all others are free again.

        Args:
            facts: `NUM_FACTS` numbers that everyone shall know.

        Raises:
            PeerLost: a member did not answer, or has left.
            DeadlineExceeded: a member did not arrive in time.
            Exception: the one that was given to `interrupt`.
                Whatever was raised: as far as this member knows there was no commit, its nodes are unharmed, and
                this exchange is over; `close` it and give the nodes to the `prepare` of the next.
        """
        ...

    def all_gather(self, data: bytes) -> list[bytes]:
        """Everyone's ``data``, by rank. Collective; for small things between steps."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite ``tensor`` with that of rank ``source``. Collective; equal shape and dtype on all members.

        When it raises, the content of ``tensor`` is arbitrary (but at the source).
        """
        ...

    def interrupt(self, error: Exception) -> None:
        """Let the wait that another thread of this process is in, and every later one, raise ``error``. Local."""
        ...

    def close(self) -> None:
        """Leave, and give back everything but the slots that are in use. Local; never waits for a peer."""
        ...
