"""Proof that the members of a group hold the run's secret, over the connections that the group will use.

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
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import AllToAllOptions

from unisono.core.errors import PeerLost
from unisono.core.words import listed

__all__ = ["NONCE_BYTES", "code", "prove"]

NONCE_BYTES: Final = 32
PROOF_S: Final = 10.0  # whoever is connected answers at once


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
            "may have connected to the port of a worker (docs/security.md)"
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
            "to the port of a worker, or a worker of another run. Nothing was sent to it (docs/security.md)"
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
