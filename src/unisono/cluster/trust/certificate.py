"""The certificate with which a head proves who it is, and the client's side of the check.

By default it is derived from the run's token: every process that holds the token can serve as the head with the same
certificate, and every client can tell that certificate from any other. So a head proves in the TLS handshake that it
knows the token, before the client has sent anything.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unisono.cluster.trust.invitation import HeadUrl
from unisono.cluster.trust.secret import is_reader, key_for
from unisono.core.errors import UsageError

__all__ = ["Identity", "Untrusted", "check", "client_context", "derived", "given", "server_context"]

_PURPOSES: Final = ("certificate of the head, 1", "certificate of the head, 2")
_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of the group of P-256."""
_FROM: Final = datetime.datetime(2020, 1, 1)
_UNTIL: Final = datetime.datetime(9999, 12, 31, 23, 59, 59)  # "no end" (RFC 5280): a run's token ends with the run


class Untrusted(ConnectionError):
    """The process that answers has not proved that it is the run's head. Nothing was sent to it."""


@dataclass(frozen=True)
class Identity:
    """A head's certificate, and the private key that goes with it."""

    pem: bytes
    """Key and certificates, for `server_context`. Secret."""
    fingerprint: str
    """SHA-256 of the certificate, hexadecimal."""

    def __repr__(self) -> str:
        return f"Identity({self.fingerprint!r})"


def derived(token: str) -> Identity:
    """Return the certificate that belongs to a token: the same bytes in every process.

    Its key is one of ECDSA on the curve P-256, because browsers take no Ed25519. It is signed without random numbers
    (RFC 6979): with them, its fingerprint would be another one each time.

    Raises:
        UsageError: the OpenSSL of this machine cannot do that.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, derive_private_key
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    # Twice as many bits as the group has: the remainder is as good as drawn from all its numbers.
    drawn = int.from_bytes(b"".join(key_for(token, purpose) for purpose in _PURPOSES))
    key = derive_private_key(drawn % (_ORDER - 1) + 1, SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "unisono")])
    unsigned = x509.CertificateBuilder(name, name, key.public_key(), 1, _FROM, _UNTIL)
    try:
        certificate = unsigned.sign(key, SHA256(), ecdsa_deterministic=True)
    except UnsupportedAlgorithm as error:
        raise UsageError(
            f"the run's certificate cannot be made: {error}. The package cryptography here uses an OpenSSL before 3.2, "
            "or one in FIPS mode; install it from PyPI, or start the run with --set certificate and --set private-key"
        ) from error
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Identity(private + certificate.public_bytes(Encoding.PEM), _digest(certificate.public_bytes(Encoding.DER)))


def given(certificate: Path, private_key: Path) -> Identity:
    """Return the certificate in these files (PEM). The first file may go on with the certificates that vouch for it.

    Raises:
        UsageError: they cannot be read, or do not belong together; says which.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
    )

    try:
        chain = x509.load_pem_x509_certificates(certificate.read_bytes())
    except OSError as error:
        raise UsageError(f"the certificate {certificate} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{certificate} holds no certificate in PEM form: {error}") from error
    try:
        key = load_pem_private_key(private_key.read_bytes(), None)
    except OSError as error:
        raise UsageError(f"the private key {private_key} cannot be read: {error.strerror}") from error
    except TypeError as error:
        raise UsageError(f"the private key {private_key} has a password; give one without") from error
    except ValueError as error:
        raise UsageError(f"{private_key} holds no private key in PEM form: {error}") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != chain[0].public_key().public_bytes(*form):
        raise UsageError(f"the private key {private_key} does not belong to the certificate {certificate}")
    # Read once: the files may be renewed while the run is going.
    parts = [key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())]
    parts += [each.public_bytes(Encoding.PEM) for each in chain]
    return Identity(b"".join(parts), _digest(chain[0].public_bytes(Encoding.DER)))


def server_context(path: str) -> ssl.SSLContext:
    """Return the TLS settings of a head, with the `Identity.pem` in this file.

    Raises:
        OSError, ssl.SSLError: the file cannot be read, or TLS cannot use such a key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session is resumed: a recorded one is worth nothing
    context.load_cert_chain(path)
    return context


@functools.cache
def client_context() -> ssl.SSLContext:
    """Return the TLS settings of a client. They trust every certificate: `check` is to be called after the handshake.

    The handshake itself proves that the other end has the private key of the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the fingerprint says more than a name
    context.verify_mode = ssl.CERT_NONE
    return context


def check(certificate: bytes | None, url: HeadUrl, token: str) -> None:
    """Check the certificate (DER) of the process that answers at a URL.

    It is the one that the URL names, or the one that belongs to the token: the next head of a run may be on a machine
    that has no other. Who holds a token for looking only goes by the URL: that token gives no such proof.

    Raises:
        Untrusted: it is neither.
    """
    if is_reader(token) and not url.fingerprint:
        raise Untrusted(
            f"nothing was sent to {url.place}: this address lacks the fingerprint of the head's certificate. Use the "
            "whole line or page address that `unisono watch --once RUN` shows, with the part after #"
        )
    found = _digest(certificate or b"")
    if found == url.fingerprint or (not is_reader(token) and found == _derived_fingerprint(token)):
        return
    known = f"the invitation's is {url.fingerprint[:16]}..." if url.fingerprint else "the token has another one."
    raise Untrusted(
        f"the process at {url.place} is not the head of this run: its certificate is {found[:16]}..., {known} Nothing "
        "was sent to it. Is the invitation from an earlier run?"
    )


@functools.lru_cache(maxsize=4)
def _derived_fingerprint(token: str) -> str:
    return derived(token).fingerprint


def _digest(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()
