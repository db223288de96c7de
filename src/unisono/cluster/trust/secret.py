"""Keys that everybody who holds the run's token can derive from it, one for each purpose."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

__all__ = ["KEY_BYTES", "PROOF", "READER_PROOF", "is_reader", "key_for", "proof_of", "reader_token"]

KEY_BYTES: Final = 32
PROOF: Final = "/proof"
"""Where a head without TLS answers `proof_of`, to a question in the query."""
READER_PROOF: Final = "/proof/reader"
"""The same, for those who hold the token for looking only (`reader_token`)."""
_SALT: Final = b"unisono"
READER_BYTES: Final = 16  # 128 bits: nobody guesses them, and the address for a browser fits into a line
_READER: Final = re.compile("r-[0-9a-f]{32}")


def key_for(token: str, purpose: str) -> bytes:
    """Return a key of `KEY_BYTES` bytes (HKDF-SHA256). It says nothing about the token, nor about other keys."""
    extracted = hmac.digest(_SALT, token.encode(), hashlib.sha256)
    return hmac.digest(extracted, purpose.encode() + b"\x01", hashlib.sha256)


def proof_of(token: str, question: str) -> str:
    """Return the answer to a question that only holders of the token can give. It says nothing about the token."""
    return hmac.digest(key_for(token, "proof of the head"), question.encode(), hashlib.sha256).hex()


def reader_token(token: str) -> str:
    """Return the token of those who may look at the run and do nothing else: every head of the run knows it."""
    return f"r-{key_for(token, 'token for looking only')[:READER_BYTES].hex()}"


def is_reader(token: str) -> bool:
    """Return whether a token is one for looking only; none of a run looks like this."""
    return _READER.fullmatch(token) is not None
