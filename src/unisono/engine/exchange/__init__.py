"""Sum the nodes of a step's members: the phases of a combine, and the interface of all exchanges.

Every member holds some nodes of the summation tree, each in a slot (`unisono.engine.exchange.flat`). A **combine** sums
them, in four phases:

1. **publish**: this member's nodes are complete;
2. **reduce**: the rows are cut into one chunk per member; the chunk's owner reads it from every node, adds up the tree
   in the fixed order, and takes the chunk's part of the digest;
3. **commit**: all owners are done, so the sum of the step exists;
4. **collect**: everyone reads all chunks into a slot of its own and divides by the total weight.

Until the commit no member's nodes are modified, so after a failure the survivors can repeat the combine. After the
commit every survivor can finish, whichever member dies. When ``commit`` returns, the combine is committed; when any
phase raises, it is not, as far as this member knows. (Another member may have seen the commit. It keeps the step; those
that raised repeat it, with the same bits.)

The implementations differ in where chunks are read from:

==================  ==========================================  =====================================
`Alone`             one member                                  nothing to exchange
`SharedMemory`      members of one host                         read in place, no copy
`Network`           ``torch.distributed``: gloo, NCCL           messages; all-to-all, then all-gather
`TwoLevel`          several members on each of several hosts    the two above, composed
==================  ==========================================  =====================================

All of them give the same bits: the order of additions is `unisono.core.tree`'s, never theirs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from unisono.core.routes import Route
from unisono.core.telemetry import TELEMETRY_BYTES
from unisono.core.tree import Node
from unisono.engine.exchange.flat import FlatLayout, Slot
from unisono.engine.exchange.helping import HostWork
from unisono.system.faults import point

__all__ = [
    "TELEMETRY_BYTES",
    "Combine",
    "Combined",
    "Committed",
    "Exchange",
    "Parcel",
    "Share",
    "combine",
]


@dataclass(frozen=True)
class Share:
    """Nodes that one member brings to a combine."""

    num_leaves: int
    plan: tuple[tuple[Node, ...], ...]
    """By rank: the nodes that each member holds; together they cover every leaf once. Equal on all members."""
    slots: Mapping[Node, Slot]
    """This member's nodes. They are complete when they are published, and not modified before the commit."""
    routes: tuple[Route, ...] = ()
    """Which members need which rows of the sum; equal on all members. (): all need all. What a member gets of the
    others is arbitrary."""


@dataclass(frozen=True)
class Parcel:
    """A tensor that one member has, and others get."""

    source: int
    """The rank of the member that has the content."""
    targets: tuple[int, ...]
    """The ranks of the members that get it, ascending; without the source. Equal on all members, as the source is."""
    tensor: Tensor
    """The content, where this member is the source; where it goes, where this member is a target. On another member
    only shape and dtype count, and it may be a meta tensor."""
    earlier: Tensor | None = None
    """What every member had there before, with equal bits, of the same shape and dtype. Where it is given, and not
    None on any member whose exchange `wants_earlier`, the change may travel instead of the content. It may be
    ``tensor`` itself on members that are not the source."""


@dataclass(frozen=True)
class Committed:
    """Result of a commit; equal on all members, but for ``sent_bytes``."""

    digest: int
    telemetry: tuple[bytes, ...]
    """By rank: the bytes that each member gave to `Combine.commit`."""
    sent_bytes: int = 0
    """Data that this member has sent to other hosts for the combine; no headers, and nothing that is sent again."""


@dataclass(frozen=True, kw_only=True)
class Combined(Committed):
    """The whole sum after a commit; equal bits on all members."""

    slot: Slot
    """Gradients and float buffers are means, the rest of the tail are sums. Valid until the next step's first node.
    Where the share has routes: what this member needs of it."""
    committed_at: float
    """When this member has seen the commit, by ``time.perf_counter``. No member sees it before all hold their sums, so
    members see it at the same moment, but for the time that a message takes."""


class Combine(Protocol):
    """One combine. Each phase is called once, in this order: `publish`, `reduce`, `commit`, `collect`. All but
    `collect` are collective, and wait for the other members where they need them.

    Raises:
        PeerLost: a member did not answer, or has left.
        DeadlineExceeded: a member did not arrive in time.
        Exception: the one that was given to `Exchange.interrupt`.
            In all three cases there was no commit, as far as this member knows. Its nodes are unharmed, and the
            exchange is over: `close` the exchange, and give the nodes to the `prepare` of the next one.
    """

    def publish(self) -> None:
        """Announce that all nodes of this member are complete. Waits for nobody."""

    def reduce(self) -> None:
        """Sum this member's chunk, when all members have published their nodes."""

    def commit(self, telemetry: bytes) -> Committed:
        """Announce that this member's chunk is summed, and wait for the chunks of all members.

        Args:
            telemetry: `TELEMETRY_BYTES` bytes for all members.
        """

    def collect(self, out: Slot | None = None) -> Slot:
        """Write the sum to ``out``, divided by the total weight where it is a mean, and return that. Local.

        After the commit, also if other members have died or left since then.

        Args:
            out: None: where it costs least, in one of the share's slots or in one that the exchange has made. It
                belongs to the caller.
        """


class Exchange(Protocol):
    """The complete interface between a step and its peers; one conformance suite holds all implementations.

    One instance serves one generation. Every method but `slot`, `release`, `work`, `offer`, `interrupt` and `close` is
    collective: every member calls it, in the same order.
    """

    rank: int
    size: int

    @property
    def wants_earlier(self) -> bool:
        """Whether `deliver` makes use of `Parcel.earlier` for now; it may change with a commit."""

    def prepare(self, layout: FlatLayout, slots: Sequence[Slot] = ()) -> list[Slot]:
        """Make slots of this layout from now on. Collective; before the first slot.

        Args:
            slots: nodes of this layout to keep, from this exchange or from an earlier one of this worker, which is
                closed. All other slots are forgotten.

        Returns:
            For each of ``slots``, one of this exchange with the same content: itself, or, where members cannot
            reach it here, a copy.
        """

    def slot(self) -> Slot:
        """Return a free slot; its entries are arbitrary. Local."""

    def release(self, slot: Slot) -> None:
        """Give a slot back. One that was given back or forgotten already is left alone. Local."""

    def work(self) -> tuple[HostWork, Sequence[int]] | None:
        """Return the `HostWork` and the ranks of the members of this host; None: they cannot help each other. Local.

        With helping, the nodes of one member in a combine may differ from the plan; those of a host together do not.
        """

    def offer(self, share: Share, rows_ready: int) -> None:
        """Announce that rows ``[0, rows_ready)`` of all of this member's nodes are complete. Local, optional.

        An exchange that crosses a network begins to send them while the last backward still runs. The next `begin` is
        of this share.
        """

    def begin(self, share: Share) -> Combine:
        """Begin to sum the nodes of all members in tree order; `combine` goes on. Waits for nobody.

        Collective: every member of the generation, once per step.
        """

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return everyone's ``data``, by rank. Collective; for small things between steps."""

    def deliver(self, parcels: Sequence[Parcel]) -> int:
        """Bring tensors from the members that have them to those that need them. Collective.

        The same parcels in the same order on all members; any number of them may have this member as their source, and
        none or all. What a member gets in one parcel is part of no other that it gets or sends. A parcel travels once
        to each host that needs it, and on a host its bytes are written once and read by all. When this returns, this
        member has all that it gets; other members may still wait for theirs, and a round that acts on all of them
        follows with `all_gather`. If this raises, what this member gets is arbitrary.

        Returns:
            How many bytes this member has sent to other hosts, where the exchange counts them.

        Raises:
            ValueError: a source or target is no rank of this generation, or a source is its own target.
        """

    def interrupt(self, error: Exception) -> None:
        """Make the current wait (in another thread) and all later waits raise ``error``. Local."""

    def close(self) -> None:
        """Leave, and free everything but the slots that are in use. Local; never waits for a peer."""


def combine(exchange: Exchange, share: Share, telemetry: bytes, out: Slot | None = None) -> Combined:
    """Sum the nodes of all members in tree order, and divide by the total weight. Collective.

    The share's slots belong to the exchange afterwards: the result lies in one of them or in another, the rest is free.

    Args:
        telemetry: `TELEMETRY_BYTES` bytes for all members.
        out: a slot of the caller's own for the result; then the share's slots stay the caller's, too.

    Raises:
        PeerLost, DeadlineExceeded, Exception: see `Combine`.
    """
    current = exchange.begin(share)
    current.publish()
    point("published")
    current.reduce()
    point("reduced")
    committed = current.commit(telemetry)
    committed_at = time.perf_counter()
    slot = current.collect(out)
    if out is None:
        for other in share.slots.values():
            if other is not slot:
                exchange.release(other)
    return Combined(committed.digest, committed.telemetry, committed.sent_bytes, slot=slot, committed_at=committed_at)
