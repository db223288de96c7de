"""Keys that everybody who holds the run's token can derive from it, one for each purpose."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

__all__ = ["KEY_BYTES", "key_for"]

KEY_BYTES: Final = 32
_SALT: Final = b"unisono"


def key_for(token: str, purpose: str) -> bytes:
    """Return a key of `KEY_BYTES` bytes (HKDF-SHA256). It says nothing about the token, nor about other keys."""
    extracted = hmac.digest(_SALT, token.encode(), hashlib.sha256)
    return hmac.digest(extracted, purpose.encode() + b"\x01", hashlib.sha256)
