"""Keys that everybody who holds the run's token can derive from it, one for each purpose."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

__all__ = ["KEY_BYTES", "PROOF", "key_for", "proof_of"]

KEY_BYTES: Final = 32
PROOF: Final = "/proof"
"""Where a head without TLS answers `proof_of`, to a question in the query."""
_SALT: Final = b"unisono"


def key_for(token: str, purpose: str) -> bytes:
    """Return a key of `KEY_BYTES` bytes (HKDF-SHA256). It says nothing about the token, nor about other keys."""
    extracted = hmac.digest(_SALT, token.encode(), hashlib.sha256)
    return hmac.digest(extracted, purpose.encode() + b"\x01", hashlib.sha256)


def proof_of(token: str, question: str) -> str:
    """Return the answer to a question that only holders of the token can give. It says nothing about the token."""
    return hmac.digest(key_for(token, "proof of the head"), question.encode(), hashlib.sha256).hex()
