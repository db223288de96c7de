"""Wire: one ``torch.distributed`` process group, with waits that end.

The group is built directly (never the global default group), so that a generation can make its own. Neither the
forming of a group nor a blocked collective can be woken: ``abort()`` and ``shutdown()`` do not, and deleting a
group with a pending operation blocks. So no thread of the run waits *in* torch. The group is formed by a
thread of its own, and the pump (`unisono.engine.exchange.pump`) waits for messages; these threads, a collective's
future and `interrupt` notify the same condition; and an abandoned group is kept until its last operation has ended. Its
connections are shut, which ends the operations of gloo at both ends at once; those of a library of accelerators (NCCL)
are aborted.

Members on accelerators tell each other first on which cards they compute. Where each has its own, and the kind of
device has a library, that connects them, in the thread that forms the group: a member that is lost there is lost as
everywhere else. Otherwise, where two share a card too, their tensors travel over gloo, as copies in the host's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from unisono.core.coding_rules import Mode
from unisono.core.errors import DeadlineExceeded, PeerLost, UsageError
from unisono.core.link_speed import LinkSpeed, LinkUse
from unisono.core.words import listed
from unisono.engine.exchange.checking import Checks
from unisono.engine.exchange.coder import Coder
from unisono.engine.exchange.gloo import make_group, own_connections, prove
from unisono.engine.exchange.pump import Job, Pump
from unisono.engine.exchange.script_group import ScriptGroup
from unisono.engine.exchange.sockets import Port, TcpSocket, counted, shut, tcp_sockets
from unisono.system import accelerators
from unisono.system.process import tell

__all__ = ["DIGEST_BYTES", "Collective", "Wire", "release_abandoned", "wire_of_one"]

SLICE_S = 0.2  # a wait checks its condition this often even if a notification was missed
DIGEST_BYTES = 8
"""Of what a vote begins with."""
POLL_S = 1e-4  # a library of accelerators sends no notification
CONNECT_S = 20.0
"""Longest time from the arrival of all members until they are connected. A member behind a firewall, which the others
cannot reach, must not delay them for as long as an exchange may take."""
LIBRARY_S = 60.0
"""The same where a library of accelerators connects them, which has to be loaded and to look at the machine."""
MAX_TAG = 1 << 30
MEASURED = 8
"""Connections whose speed is looked at; of more, these stand for all."""
LOOK_S = 0.004
"""Least time between two looks at them, in a sum."""
FORM_GRACE_S = 3.0  # beyond the timeout, until it is known which members have not come to a group

_abandoned: list[tuple[Any, list[Any]]] = []
"""Groups that were closed while collectives were pending, with those collectives."""
_shared: set[tuple[str, ...]] = set()
"""Workers that share a card, and this process has said so."""
_overruled: set[str] = set()
"""What of the environment was overruled, and this process has said so."""
_abandoning = threading.Lock()
"""Held while these are changed: wires are closed by the thread of the run, and formed by others."""


class Wire:
    """Collectives over tensors of bytes between ``size`` members.

    Args:
        store: the members find each other there; one prefix for one group.
        device: of the tensors that will be sent.
        address: the address that gloo listens on.
        timeout_s: how long any one wait may take.
        names: the ids of the members' workers, by rank, for errors; empty: they have none.
        secret: every member must prove that it has the same one (`unisono.engine.exchange.gloo`). gloo only.
        checks: compare the digests of what streams send and of what arrives (`unisono.engine.exchange.checking`).
        coding: whether messages are coded.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        device: torch.device,
        address: str,
        timeout_s: float,
        names: Sequence[str] = (),
        secret: bytes = b"",
        checks: bool = False,
        coding: Mode = Mode.AUTO,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._library = ""
        """The backend that connects the members' cards, as soon as it is known; "": gloo does."""
        self._copies = device.type != "cpu"
        self.sent_bytes = 0
        """Data that this member has sent to others."""
        self.checks = Checks(size, names) if checks and size > 1 else None
        """Whether what has arrived is what was sent; None: that is not looked at."""
        self.coder = Coder(rank, size, coding, names)
        """Of messages; collectives carry what lies in memory."""
        self.changed = threading.Condition()
        """Is notified whenever something has happened that a wait may wait for."""
        self._timeout_s = timeout_s
        self._error: Exception | None = None
        self._pump = Pump(self.changed)
        self._num_tags = 0
        self._pending: list[Any] = []
        self._store = store
        self._group: Any = None
        self._given: ScriptGroup | None = None
        self._failure: Exception | None = None
        self._missing: list[str] = []
        self._connections: Mapping[int, TcpSocket] = {}
        """Of the group, by inode, when it is formed. gloo only."""
        self._speed = LinkSpeed()
        """Of some of them."""
        self._looked_at = 0.0
        self._all_here_at: float | None = None
        self._closed = False

        def connect() -> None:
            group, failure = None, None
            port = Port()
            missing: list[str] = []
            try:
                # A member may arrive late, from its work between two steps: that is no reason to give the member up.
                store.set(f"here-{rank}", _described(device))
                store.wait([f"here-{each}" for each in range(size)], timedelta(seconds=timeout_s))
                self._library = _choose_library(store, size, device, names)
                self._all_here_at = time.perf_counter()
                if self._library:
                    self._copies = False
                    group = self._connect_cards(store, timedelta(seconds=timeout_s))
                else:
                    before = tcp_sockets()
                    formed = make_group(store, rank, size, address, timeout_s, port)
                    if size > 1:
                        prove(formed, rank, size, secret, names)
                        self._connections = own_connections(store, size, port, before)
                    group = formed
                port.close()
            except Exception as error:  # of many kinds; `_connected` raises it as PeerLost
                failure = error
                port.forget()
                if self._all_here_at is None:
                    missing = _missing(store, names)
            release_abandoned()  # of the generation before
            with self.changed:
                self._failure, self._missing = failure, missing
                if not self._closed:
                    self._group, group = group, None
                self.changed.notify_all()
            if self._library:
                _abort(group)  # it was formed too late

        threading.Thread(target=connect, name="unisono-connect", daemon=True).start()

    def _connect_cards(self, store: dist.Store, timeout: timedelta) -> Any:
        """Return the group of the library, connected: each member has heard from each other one."""
        device = self.device
        if device.index is not None:
            accelerators.use(device)  # of this thread
        group, overruled = accelerators.open_library(self._library, store, self.rank, self.size, timeout)
        if news := [one for one in overruled if one not in _overruled]:
            _overruled.update(news)
            tell(f"unisono: {listed(news)} in the environment would end workers that lose a peer: overridden")
        found = torch.zeros(self.size, dtype=torch.int64, device=device)
        own = torch.full((1,), self.rank + 1, dtype=torch.int64, device=device)
        try:
            group._allgather_base(found, own, AllgatherOptions()).wait()
            if (heard := found.tolist()) != [*range(1, self.size + 1)]:
                raise RuntimeError(f"{self._library} gave {heard} for the numbers of {self.size} members")
        except Exception:
            _abort(group)
            raise
        return group

    def all_to_all(self, out: Tensor, out_sizes: list[int], data: Tensor, in_sizes: list[int]) -> Collective:
        """Send ``in_sizes[j]`` bytes of ``data`` to member j; ``out`` receives ``out_sizes[j]`` from it."""
        self._count(sum(in_sizes) - in_sizes[self.rank])
        return self._start(
            lambda group, there, here: group.alltoall_base(there, here, out_sizes, in_sizes, AllToAllOptions()),
            out,
            data,
        )

    def all_gather(self, out: Tensor, data: Tensor) -> Collective:
        """Gather the ``data`` of all members in ``out``, by rank; equal sizes."""
        self._count((self.size - 1) * data.nbytes)
        return self._start(lambda group, there, here: group._allgather_base(there, here, AllgatherOptions()), out, data)

    def all_gather_equal(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of all members, by rank, equally long and not empty. Blocks for one round trip."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        found = torch.empty(self.size * len(data), dtype=torch.uint8, device=self.device)
        self.all_gather(found, own).wait()
        rows = found.cpu().view(self.size, len(data))
        return [ctypes.string_at(row.data_ptr(), len(data)) for row in rows]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of all members, by rank. Blocks for two round trips."""
        lengths = [int.from_bytes(size, "little") for size in self.all_gather_equal(len(data).to_bytes(8, "little"))]
        padded = self.all_gather_equal(data.ljust(max(*lengths, 1), b"\0"))
        return [payload[:length] for payload, length in zip(padded, lengths, strict=True)]

    def vote(self, digest: int, data: bytes) -> tuple[int, list[bytes]]:
        """Announce to all members that this one holds all sums; return when every member does. Blocks.

        Args:
            digest: of the sums of this member.
            data: equally long on all members.

        Returns:
            The digest of all sums, and the ``data`` of all members, by rank.
        """
        return count_votes(self.all_gather_equal(digest.to_bytes(DIGEST_BYTES, "little") + data))

    # -- messages from member to member: gloo only --------------------------------------------------------

    def reserve_tags(self, number: int) -> int:
        """Return the first of so many numbers for messages. Collective, in the same order on all members."""
        first, self._num_tags = self._num_tags, (self._num_tags + number) % MAX_TAG
        return first

    def post(self, out: Tensor, source: int, tag: int) -> Any:
        """Begin to receive a message that fills ``out``. Waits for nobody, but for the group to form."""
        return self._begin(lambda group: group.recv([out], source, tag))

    def send(self, data: Tensor, target: int, tag: int) -> Any:
        """Begin to send a message; hold what this returns until it has left. Until then, ``data`` must not change."""
        self._count(data.nbytes)
        return self._begin(lambda group: group.send([data], target, tag))

    def look_at_links(self, *, at_once: bool = False) -> None:
        """Look how much of what was sent has arrived, if that was not done a moment ago. In one thread at a time."""
        now = time.perf_counter()
        if at_once or now > self._looked_at + LOOK_S:
            self._looked_at = now
            measured = {inode: self._connections[inode] for inode in sorted(self._connections)[:MEASURED]}
            self._speed.note(now, counted(measured))

    def link_uses(self) -> list[LinkUse]:
        """Return what the links to others have carried since the last call, as far as that says how fast they are."""
        self.look_at_links(at_once=True)
        each = len(self._connections) / min(MEASURED, max(1, len(self._connections)))
        return [use._replace(nbytes=round(each * use.nbytes)) for use in self._speed.take()]

    def in_background(self, run: Callable[[], None]) -> Job:
        """Let the pump do something, after what it was given before."""
        job = Job(run)
        self._pending.append(job)
        self._pump.add(job)
        return job

    def wait_in_background(self, done: Callable[[], bool]) -> bool:
        """Wait, in a job, for something that this member does; False: this member has left."""
        with self.changed:
            while not done() and not self._pump.is_stopped:
                self.changed.wait()
        return not self._pump.is_stopped

    def finish_in_background(self, message: Any) -> None:
        """Wait, in a job, until a message has arrived, or has left."""
        message.wait(timedelta(seconds=self._timeout_s))

    def await_job(self, job: Job, done: Callable[[], bool]) -> None:
        """Wait until a job has published something, or is over.

        Raises:
            PeerLost: a member is gone. DeadlineExceeded: a member did not send in time.
        """
        job.is_awaited = True  # before the first look at it
        self._await(lambda: done() or job.is_completed(), "the messages")
        if job.failure is not None:
            raise self._lost(job.failure) from job.failure
        if not done():
            raise PeerLost(f"this member has left its group of {self.size} members")
        if job.is_completed() and job in self._pending:
            self._pending.remove(job)

    def _count(self, nbytes: int) -> None:
        with self.changed:  # the pump sends too
            self.sent_bytes += nbytes

    def _begin(self, operation: Callable[[Any], Any]) -> Any:
        group = self._connected()
        try:
            return operation(group)
        except RuntimeError as failure:
            raise self._lost(failure) from failure

    def _lost(self, failure: Exception) -> Exception:
        """Return the error of this member for a failure of an operation."""
        if self._error is not None:
            return self._error
        if isinstance(failure, (PeerLost, DeadlineExceeded)):
            return failure
        if "Timed out" in str(failure):
            return DeadlineExceeded(f"a collective took longer than {self._timeout_s:.0f} s: {failure}")
        return PeerLost(f"a member left in the middle of a collective: {failure}")

    # ------------------------------------------------------------------------------------------------------

    def process_group(self) -> dist.ProcessGroup:
        """Return this group, when it is formed, for functions of ``torch.distributed``; ends with `interrupt`."""
        backend = self._connected()
        with self.changed:
            if self._error is not None:
                raise self._error
            if self._given is None:
                self._given = ScriptGroup.backed_by(
                    backend, self._store, self.rank, self.size, self.device, self._library
                )
            return self._given

    def interrupt(self, error: Exception) -> None:
        with self.changed:
            self._error = error
            if self._given is not None:
                self._given.end()  # the script may wait for a member that never comes
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self._error = PeerLost(f"this member has left its group of {self.size} members")
            group, self._group = self._group, None
            given, self._given = self._given, None
        self._pump.stop()
        pending, self._pending = self._pending, []
        if given is not None:
            given.end()
            pending += given.pending()
        if self._library:
            # abort() takes long if a peer is gone, and ends the pending collectives.
            threading.Thread(target=_abort, args=(group,), name="unisono-abort", daemon=True).start()
            return
        with _abandoning:
            _abandoned.append((group, pending))
        del group
        if release_abandoned():
            shut(self._connections)

    def _connected(self) -> Any:
        """Return the group, when it is formed. Raise if this member was interrupted."""
        if self._error is not None:
            raise self._error
        # A little later than the store's own limit, whose error names the members that were not there.
        self._await(self._is_formed, "the group to form", grace_s=FORM_GRACE_S)
        if isinstance(self._failure, UsageError):
            raise self._failure
        if self._failure is not None:
            waited_for = f" (not there: {listed(self._missing)})" if self._missing else ""
            raise PeerLost(
                f"no group of {self.size} members could be formed: {self._failure}{waited_for}", self._missing
            ) from self._failure
        return self._group

    def _is_formed(self) -> bool:
        if self._group is None and self._failure is None and self._all_here_at is not None:
            waited_s = time.perf_counter() - self._all_here_at
            if self._library and waited_s > LIBRARY_S:
                raise DeadlineExceeded(
                    f"{self._library} could not connect {self.size} members within {LIBRARY_S:g} s: each must reach "
                    "every other one, over the interfaces that the library chose"
                )
            if not self._library and waited_s > CONNECT_S:
                raise DeadlineExceeded(
                    f"{self.size} members could not be connected within {CONNECT_S:g} s: each must reach every other "
                    "one, at any port of the address with which it reaches the head; look for a firewall between them"
                )
        return self._group is not None or self._failure is not None

    def _start(self, operation: Callable[[Any, Tensor, Tensor], Any], out: Tensor, data: Tensor) -> Collective:
        """Start a collective that sends ``data``, and in the end gives ``out``: in the host's memory, if the backend
        reaches no other.
        """
        group = self._connected()
        there = torch.empty_like(out, device="cpu") if self._copies else out
        here = data.to("cpu", copy=True) if self._copies else data
        try:
            work = operation(group, there, here)
        except RuntimeError as failure:
            raise PeerLost(f"a collective of {self.size} members could not be started: {failure}") from failure
        self._pending.append(work)
        return Collective(self, work, (there, here), out)

    def _finish(self, work: Any) -> None:
        if not self._library:
            future = work.get_future()
            future.then(self._notify)
            self._await(future.done, "a collective")
        else:
            # Its wait() makes only the stream wait; reading the result then blocks where nothing wakes the thread.
            self._await(work.is_completed, "a collective", POLL_S)
        try:
            work.wait()
        except RuntimeError as failure:
            raise self._lost(failure) from failure
        self._pending.remove(work)

    def _await(self, done: Callable[[], bool], what: str, slice_s: float = SLICE_S, grace_s: float = SLICE_S) -> None:
        if done():
            return
        started = time.perf_counter()
        # A little later than torch's own limit, whose error names the member that was late.
        deadline = started + self._timeout_s + grace_s
        with self.changed:
            while not done():
                if self._error is not None:
                    raise self._error
                if time.perf_counter() > deadline:
                    raise DeadlineExceeded(f"waited {self._timeout_s:.0f} s for {what} of {self.size} members")
                self.changed.wait(slice_s)

    def _notify(self, _: Any) -> None:
        with self.changed:
            self.changed.notify_all()


class Collective:
    """A started collective. Keeps its tensors alive.

    Args:
        tensors: of the collective; the first one receives.
        out: a copy of that is made here in the end, if it is another.
    """

    def __init__(self, wire: Wire, work: Any, tensors: tuple[Tensor, ...], out: Tensor) -> None:
        self._wire = wire
        self._work = work
        self._tensors = tensors
        self._out = out

    def wait(self) -> None:
        """Block until the collective is done.

        Raises:
            PeerLost: a member is gone. DeadlineExceeded: the collective took too long.
        """
        self._wire._finish(self._work)
        if self._tensors and self._tensors[0] is not self._out:
            self._out.copy_(self._tensors[0])
        self._tensors = ()


def count_votes(votes: Sequence[bytes]) -> tuple[int, list[bytes]]:
    """Return the sum of the digests that the votes begin with, and the data of each."""
    total = sum(int.from_bytes(each[:DIGEST_BYTES], "little") for each in votes)
    return total & 0xFFFFFFFFFFFFFFFF, [each[DIGEST_BYTES:] for each in votes]


def wire_of_one(device: torch.device) -> Wire:
    """Return the wire of a worker that is alone."""
    return Wire(dist.HashStore(), 0, 1, device=device, address="127.0.0.1", timeout_s=CONNECT_S)


def release_abandoned() -> bool:
    """Delete the abandoned groups whose last operation has ended. Called whenever a wire is closed or formed.

    Returns:
        Whether a group is left: deleting it would block until its operation times out, also at the end of the process.
    """
    with _abandoning:
        pending = [each for each in _abandoned if not all(work.is_completed() for work in each[1])]
        _abandoned[:] = pending
        return bool(pending)


def _missing(store: dist.Store, names: Sequence[str]) -> list[str]:
    """Return the members that have not arrived, as far as the store can be asked."""
    with contextlib.suppress(Exception):  # the store may be what has failed
        return [names[rank] for rank in _absent(store, range(len(names)))]
    return []


def _absent(store: dist.Store, ranks: Sequence[int]) -> list[int]:
    """Return the members of these ranks that have not arrived. All who wait for them ask at the same time."""
    if not ranks or store.check([f"here-{rank}" for rank in ranks]):
        return []
    half = len(ranks) // 2
    return [*_absent(store, ranks[:half]), *_absent(store, ranks[half:])] if half else [*ranks]


def _abort(group: Any) -> None:
    if group is not None:
        group.abort()


def _described(device: torch.device) -> str:
    """Return what the members of a group tell each other of where they compute."""
    return json.dumps([device.type, [] if device.type == "cpu" else accelerators.cards(device)])


def _choose_library(store: dist.Store, size: int, device: torch.device, names: Sequence[str]) -> str:
    """Return the name of the backend that connects these members' cards, the same on all; "": gloo.

    Raises:
        UsageError: some compute on another kind of device.
    """
    if device.type == "cpu":  # those on another kind of device see it
        return ""
    found = [json.loads(each) for each in store.multi_get([f"here-{rank}" for rank in range(size)])]
    if len({kind for kind, _ in found}) > 1:
        there = listed(
            [f"{name} on {kind}" for name, (kind, _) in zip(names or map(str, range(size)), found, strict=True)]
        )
        raise UsageError(
            f"all workers of a run must use the same kind of device, and these do not: {there}; use the same kind of "
            'machine for all, or unisono.Run(device="cpu")'
        )
    cards = Counter(card for _, cards in found for card in cards)
    shared = [name for name, (_, own) in zip(names, found, strict=False) if any(cards[card] > 1 for card in own)]
    library = accelerators.library(device)
    if library and shared and tuple(shared) not in _shared:
        _shared.add(tuple(shared))
        tell(f"unisono: {listed(shared)} share a card, so sums go through the host's memory")
    return library if max(cards.values()) == 1 else ""
