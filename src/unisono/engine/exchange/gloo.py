"""Groups of gloo: how the members of a wire are connected, and prove that they hold the run's secret.

gloo asks nobody who connects to it. So every pair of members proves itself before the first collective counts: each
sends the other a number that was never used before, and answers with a code over that number which only holders of the
secret can compute. Every pair of connected members does so directly: what another one passes on would prove nothing
about the connection.

This keeps out whoever connects to a member's port in place of another member, and workers of another run. It does not
keep out somebody who can change packets on the path between two members: connections are not encrypted, and whoever
passes the proof on can change what follows. For that, the network itself must be protected (docs/security.md).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllToAllOptions

from unisono.core.errors import PeerLost
from unisono.core.words import listed
from unisono.engine.exchange.sockets import Port, TcpSocket, tcp_sockets

__all__ = ["AddressStore", "code", "make_group", "own_connections", "prove"]

NONCE_BYTES: Final = 32
PROOF_S: Final = 10.0  # whoever is connected answers at once


def make_group(store: dist.Store, rank: int, size: int, address: str, timeout_s: float, port: Port) -> Any:
    """Return the group of gloo, connected; blocks. ``port`` is where this member listens for it."""
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [port.opened_by(lambda: dist.ProcessGroupGloo.create_device(hostname=address))]
    store.set(f"port-{rank}", " ".join(map(str, port.address)))
    gloo._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(AddressStore(store, size), rank, size, gloo)


def own_connections(store: dist.Store, size: int, port: Port, before: Mapping[int, TcpSocket]) -> dict[int, TcpSocket]:
    """Return the connections that gloo has made for a group: to this member's port, or to that of another one."""
    told = [each.decode().rsplit(" ", 1) for each in store.multi_get([f"port-{rank}" for rank in range(size)])]
    ports = {(host, int(number)) for host, number in told if host}
    return {
        inode: each
        for inode, each in tcp_sockets().items()
        if inode not in before and not each.listens and (each.here == port.address or each.there in ports)
    }


class AddressStore(dist.Store):
    """A store of a group, for ``ProcessGroupGloo``.

    Gloo waits for each member's address and then gets it, one member after the other: in groups of 125, a thousand
    members would call the head's store a quarter of a million times for a generation. Each member needs all addresses
    before it can go on, so the first question for one of them asks for all.

    Args:
        size: of the group. Members publish their addresses as ``PREFIX/RANK``.
    """

    def __init__(self, store: dist.Store, size: int) -> None:
        super().__init__()
        self._store = store
        self._size = size
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._known[key] if self._learn(key) else self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        unknown = [key for key in keys if not self._learn(key)]
        if unknown:
            self._store.wait(unknown, timeout) if timeout is not None else self._store.wait(unknown)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self._store.timeout  # type: ignore[attr-defined]
        return found

    def clone(self) -> AddressStore:
        return AddressStore(self._store, self._size)

    def _learn(self, key: str) -> bool:
        """Wait until the addresses of all members are known, if ``key`` is that of one; return whether it is."""
        if key in self._known:
            return True
        prefix, slash, rank = key.rpartition("/")
        if not (slash and rank.isdecimal() and int(rank) < self._size):
            return False
        keys = [f"{prefix}/{each}" for each in range(self._size)]
        self._known.update(zip(keys, self._store.multi_get(keys), strict=True))
        return True


def prove(group: Any, rank: int, size: int, secret: bytes, names: Sequence[str] = ()) -> None:
    """Prove to the other members of a group of ``torch.distributed`` that this one holds the secret, and check them.

    Collective; blocks for two round trips.

    Args:
        names: of the members' workers, by rank, for the error.

    Raises:
        PeerLost: a member has not proved itself. RuntimeError: a connection broke.
    """
    asked = [secrets.token_bytes(NONCE_BYTES) for _ in range(size)]
    try:
        asked_by = _swap(group, asked)
        answers = _swap(group, [code(secret, rank, other, asked_by[other]) for other in range(size)])
    except RuntimeError as failure:
        if "Timed out" not in str(failure):
            raise
        raise PeerLost(
            f"not all of {size} members have proved within {PROOF_S:g} s that they belong to this run: another program "
            "may have connected to a worker's port (docs/security.md)"
        ) from failure
    wrong = [
        other
        for other in range(size)
        if other != rank and not hmac.compare_digest(answers[other], code(secret, other, rank, asked[other]))
    ]
    if wrong:
        shown = listed([names[other] if names else f"rank {other}" for other in wrong])
        raise PeerLost(
            f"what answers as {shown} has not proved that it belongs to this run: another program may have connected "
            "to a worker's port, or a worker of another run. Nothing was sent to it (docs/security.md)"
        )


def code(secret: bytes, sender: int, receiver: int, nonce: bytes) -> bytes:
    """Return the answer of a member to a number that another one has sent to it."""
    return hmac.digest(secret, b"%d to %d:" % (sender, receiver) + nonce, hashlib.sha256)


def _swap(group: Any, messages: list[bytes]) -> list[bytes]:
    """Send each member its message, all of 32 bytes; return what they have sent, by rank."""
    data = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
    found = torch.empty_like(data)
    options = AllToAllOptions()
    options.timeout = timedelta(seconds=PROOF_S)
    group.alltoall_base(found, data, [], [], options).wait()
    received = bytes(found.tolist())
    return [received[first : first + NONCE_BYTES] for first in range(0, len(received), NONCE_BYTES)]
