"""Keys for certificates: Ed25519, as ssh and openssl keep them, by the library cryptography."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from unisono.core.errors import UsageError
from unisono.system.extras import install_words
from unisono.system.owned import read_regular
from unisono.tools.certificate.statement import Envelope, Signature, Statement, signed_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["check_signature", "fingerprint_of", "is_named", "make_key", "read_key", "sign", "text_of"]

MOST_BYTES: Final = 1 << 20
"""Of a file with keys."""
KIND: Final = "ssh-ed25519"


def make_key(path: Path) -> None:
    """Make a key of its own for certificates: ``path``, and ``path.pub`` beside it, as ``ssh-keygen -t ed25519`` does.

    Raises:
        UsageError: one of these files exists, or cannot be written.
    """
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    public = path.with_name(f"{path.name}.pub")
    for file, data, mode in ((path, secret, 0o600), (public, f"{text_of(key)} unisono\n".encode(), 0o644)):
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        except FileExistsError:
            raise UsageError(f"{file} exists, and a new key would not replace it; leave out --make-key") from None
        except OSError as error:
            raise UsageError(f"the key {file} cannot be written: {error.strerror}") from None
        with open(descriptor, "wb") as opened:
            opened.write(data)


def read_key(path: Path, password: Callable[[], str]) -> Ed25519PrivateKey:
    """Return the private key in a file: as OpenSSH, or as PEM (PKCS #8).

    Args:
        password: asked for where the file is encrypted.

    Raises:
        UsageError: it cannot be read, or is no Ed25519 key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    data = _content(path)
    load = form.load_ssh_private_key if b"BEGIN OPENSSH" in data else form.load_pem_private_key
    try:
        try:
            key = load(data, None)
        except TypeError:  # it is encrypted
            key = load(data, password().encode())
    except UnsupportedAlgorithm as error:
        raise UsageError(f"{path} cannot be read: {error}; {install_words('keys')}, or give a key without") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} holds no private key that can be read: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} holds a key of another kind; a certificate takes Ed25519 (ssh-keygen -t ed25519)")
    return key


def text_of(key: Ed25519PrivateKey) -> str:
    """Return the public part of a key in one line, as ssh writes it, without a comment."""
    from cryptography.hazmat.primitives import serialization as form

    return key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).decode()


def fingerprint_of(text: str) -> str:
    """Return the fingerprint of a public key, as ``ssh-keygen -l`` shows it.

    Args:
        text: as `text_of` returns it.
    """
    blob = base64.b64decode(text.split()[1])
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def sign(content: bytes, key: Ed25519PrivateKey | None) -> Envelope:
    """Return the envelope of a statement.

    Args:
        content: the statement as JSON.
        key: None: nobody signs.
    """
    payload = base64.b64encode(content).decode()
    if key is None:
        return Envelope(payload=payload, signatures=[])
    signature = base64.b64encode(key.sign(signed_bytes(content))).decode()
    return Envelope(payload=payload, signatures=[Signature(fingerprint_of(text_of(key)), signature)])


def check_signature(envelope: Envelope, statement: Statement) -> str | None:
    """Return the public key that has signed a certificate, in one line; "": nobody has. None: the signature is wrong,
    or is not of the key that the certificate names.
    """
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    named = statement.predicate.signer
    if not envelope.signatures and named is None:
        return ""
    if len(envelope.signatures) != 1 or named is None or not re.fullmatch(f"{KIND} [A-Za-z0-9+/]+=*", named):
        return None
    try:
        key = form.load_ssh_public_key(named.encode())
        if not isinstance(key, Ed25519PublicKey):
            return None
        key.verify(base64.b64decode(envelope.signatures[0].sig, validate=True), signed_bytes(envelope.content))
    except (ValueError, InvalidSignature, UnsupportedAlgorithm):
        return None
    return named


def is_named(signer: str, wanted: Sequence[str]) -> bool:
    """Return whether a key is among those that the user has named.

    Args:
        signer: the key in one line.
        wanted: each a fingerprint (``SHA256:...``), a key in one line, or a file with keys of ssh.

    Raises:
        UsageError: a file cannot be read, or holds no such key.
    """
    return any(signer == key or fingerprint_of(signer) == key for one in wanted for key in _keys(one))


def _keys(wanted: str) -> Iterator[str]:
    if wanted.startswith("SHA256:"):
        yield wanted
        return
    text = wanted if wanted.startswith(f"{KIND} ") else _content(Path(wanted)).decode(errors="replace")
    found = False
    for line in text.splitlines():
        words = line.split("#")[0].split()
        for word, key in pairwise(words):
            if word == KIND:
                found = True
                yield f"{KIND} {key}"
    if not found:
        raise UsageError(
            f"--signer {wanted} names no key: give a fingerprint (SHA256:...), a line `{KIND} ...`, or a file of them"
        )


def _content(path: Path) -> bytes:
    try:
        return read_regular(path.resolve(), MOST_BYTES)
    except OSError as error:
        raise UsageError(f"the key {path} cannot be read: {error.strerror}") from None
