"""Invitation: one line with which another machine joins a run, ``wss://TOKEN@HOST:PORT#SHA256``.

It holds what the machine must know: where the head listens, the run's token, and the fingerprint of the certificate
with which the head proves who it is. Without TLS it is ``ws://TOKEN@HOST:PORT``. Whoever has the line can run code as
the user who has started the run, so no process puts it into a command line, an environment variable or a log.

With another token (`unisono.cluster.trust.secret.reader_token`) the line is one for watchers: who has it may look, and
do nothing else.

A head's URL is the line without the token, ``wss://HOST:PORT#SHA256``; none of its parts is secret.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from unisono.cluster.trust.secret import is_reader, reader_token
from unisono.core.errors import UsageError

__all__ = ["HeadUrl", "Invitation", "is_invitation", "shown"]

_HOST: Final = r"\[(?=[^\]]*:[^\]]*:)[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\[\]@:/#\s]+"
_FORM: Final = re.compile(
    rf"(?P<scheme>wss?)://(?:(?P<token>[^@/#\s]*)@)?(?P<host>{_HOST})(?::(?P<port>\d+))?/?(?:#(?P<fingerprint>\S*))?"
)
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")


class HeadUrl(msgspec.Struct, frozen=True):
    """Address of a head, and the fingerprint of its certificate."""

    host: str
    port: int
    is_secure: bool = False
    """The head speaks TLS."""
    fingerprint: str = ""
    """SHA-256 of the certificate (hexadecimal); "" where the URL does not say it."""

    def __str__(self) -> str:
        return f"{self.place}#{self.fingerprint}" if self.fingerprint else self.place

    @staticmethod
    def is_host(text: str) -> bool:
        """Return whether this can stand as the host in a URL."""
        return re.fullmatch(_HOST, f"[{text}]" if ":" in text else text) is not None

    @property
    def place(self) -> str:
        """The URL without the fingerprint."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'wss' if self.is_secure else 'ws'}://{host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> HeadUrl:
        """Read a URL.

        Raises:
            UsageError: it is none; says what is wrong with it. A token in it is not repeated.
        """
        found = _FORM.fullmatch(url)
        if found is None:
            raise _wrong(url, "")
        secure, port, fingerprint = found["scheme"] == "wss", int(found["port"] or 0), found["fingerprint"] or ""
        if not 0 < port < 65536:
            raise _wrong(url, ": the port is a number from 1 to 65535")
        if found["fingerprint"] is not None and not _FINGERPRINT.fullmatch(fingerprint.lower()):
            raise _wrong(
                url, f": the fingerprint after # has 64 hexadecimal digits, this one {len(fingerprint)} characters"
            )
        if fingerprint and not secure:
            raise _wrong(url, ": a fingerprint is that of a TLS certificate, so the URL begins with wss://")
        return cls(found["host"].strip("[]"), port, secure, fingerprint.lower())


@dataclass(frozen=True)
class Invitation:
    """What another machine needs to reach a run."""

    url: str
    """Of the head, with the fingerprint."""
    token: str

    @property
    def line(self) -> str:
        """The invitation as text. Secret: it holds the token."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{quote(self.token, safe='')}@{rest}"

    @property
    def command(self) -> str:
        """The line to paste on another machine. Secret. The token stands in no process list there."""
        return f"unisono {'watch' if self.is_for_looking else 'join'} - <<< '{self.line}'"

    @property
    def is_for_looking(self) -> bool:
        """Whoever has this invitation may look at the run, and do nothing else."""
        return is_reader(self.token)

    @property
    def for_looking(self) -> Invitation:
        """The invitation for those who may look only."""
        return self if self.is_for_looking else Invitation(self.url, reader_token(self.token))

    @property
    def page(self) -> str:
        """The address of the page for a browser. It holds the token for looking, and never the run's.

        A browser keeps the fingerprint to itself. `unisono watch` needs it: the token for looking proves no head.
        """
        head = HeadUrl.parse(self.url)
        scheme, _, rest = head.place.partition("://")
        mark = f"#{head.fingerprint}" if head.fingerprint else ""
        return f"{'https' if scheme == 'wss' else 'http'}://{rest}/?token={self.for_looking.token}{mark}"

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Read an invitation.

        Raises:
            UsageError: the text is none; says what is wrong with it, without the token.
        """
        text = text.strip().strip("'\"")
        found = _FORM.fullmatch(text)
        url = str(HeadUrl.parse(_without_token(text)))
        if found is None or not (token := unquote(found["token"] or "")):
            raise UsageError(
                f"the invitation has no token: {shown(url)} is where the head listens, and {_SHAPE} is an invitation; "
                "`unisono watch --once RUN` shows it on the machine that has started the run"
            )
        if not token.isascii() or not token.isprintable() or " " in token:
            raise UsageError(f"the token in the invitation to {shown(url)} has characters that no token has")
        return cls(url, token)

    def __repr__(self) -> str:
        return f"Invitation({self.url!r})"


_SHAPE: Final = "wss://TOKEN@HOST:PORT#FINGERPRINT"


def is_invitation(text: str) -> bool:
    """Return whether a command was given an invitation or a URL, and not a directory."""
    return "://" in text


def shown(url: str) -> str:
    """Return a head's URL for a sentence: without the fingerprint."""
    return url.partition("#")[0]


def _without_token(text: str) -> str:
    scheme, slashes, rest = text.partition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"


def _wrong(url: str, why: str) -> UsageError:
    return UsageError(
        f"the address of a run is ws://HOST:PORT or wss://HOST:PORT#FINGERPRINT, got {_without_token(url)!r}{why}"
    )
