"""Process of the head, which an agent starts, and its listening socket.

The socket belongs to the agent, so it survives a head that dies. Every agent has one, and listens when it starts a
head: until then the machine answers that nobody listens there.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import shlex
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from unisono.cluster.machine.children import Child, spawn
from unisono.cluster.trust.certificate import Identity, derived, given
from unisono.cluster.trust.invitation import HeadUrl, Invitation
from unisono.cluster.worker.link import host_and_port
from unisono.core.errors import UsageError
from unisono.core.policy import Policy
from unisono.core.settings import DEFAULTS, RunSettings
from unisono.core.words import listed
from unisono.system.interfaces import Interface, interfaces, is_local, route_to
from unisono.system.lifetime import PARENT, TOKEN_FILE, Memory
from unisono.system.tasks import is_for_person

__all__ = [
    "MAX_HEADS",
    "HeadProcess",
    "Service",
    "address_like",
    "at_first_free",
    "listen",
    "local_url",
    "other_addresses",
    "reachable",
    "reserve",
    "url_of",
    "welcome_words",
]

MAX_HEADS: Final = 4
HEADS_WITHIN_S: Final = 30.0
BACKLOG: Final = 4096  # when a head has died, all workers and agents call at once


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """The head that ``unisono run`` starts."""

    policy: Policy
    settings: RunSettings = DEFAULTS
    bind: str = "127.0.0.1"
    """The address at which it listens."""
    token: str = ""
    """The run's token; "": one is made."""

    def identity(self, listener: socket.socket, token: str) -> Identity | None:
        """Return the certificate of the heads that listen on this socket; None: they speak no TLS.

        Raises:
            UsageError: the certificate's files cannot be used.
        """
        settings = self.settings
        is_asked = bool(settings.certificate) or not is_local(str(listener.getsockname()[0]))
        if not (is_asked if settings.tls is None else settings.tls):
            return None
        if settings.certificate:
            return given(Path(settings.certificate), Path(settings.private_key))
        return derived(token)


def listen(service: Service) -> socket.socket:
    """Return the socket on which the run's heads listen.

    Raises:
        UsageError: this address cannot be used; says why.
    """
    family = socket.AF_INET6 if ":" in service.bind else socket.AF_INET
    # "All interfaces" includes those of IPv4: joining machines get an IPv4 address where there is one.
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()

    def open_at(port: int) -> socket.socket:
        return socket.create_server((service.bind, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)

    try:
        return at_first_free(service.settings.ports, open_at)
    except (OSError, TypeError) as error:  # TypeError: no name of a host can look like this
        first, last = service.settings.ports
        where = f"port {first}" if first == last else f"a port from {first} to {last}"
        raise UsageError(
            f"cannot listen on {service.bind} {where}: {getattr(error, 'strerror', None) or error}; use another "
            "--bind, or --set port=N (0: any) or --set port=A:B"
        ) from error


def at_first_free(ports: tuple[int, int], open_at: Callable[[int], socket.socket]) -> socket.socket:
    """Return a socket at the first port of the range that no other socket has.

    Raises:
        OSError: there is none, or the address cannot be used.
    """
    first, last = ports
    for port in range(first, last):
        try:
            return open_at(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return open_at(last)


def reserve(url: str, ports: tuple[int, int] = (0, 0)) -> tuple[socket.socket, str]:
    """Return a socket on which a head of this machine can listen later, and the address of that head.

    It is on the interface by which this machine reaches the head at ``url``.

    Raises:
        OSError: there is no way to that head, or no port.
    """
    family, here = route_to(*host_and_port(url))

    def open_at(port: int) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((here, port))
        except BaseException:
            listener.close()
            raise
        return listener

    listener = at_first_free(ports, open_at)
    return listener, address_like(url, here, listener.getsockname()[1])


def reachable(bind: str) -> str:
    """Return the address at which workers, here and elsewhere, reach a socket that listens on ``bind``."""
    with contextlib.suppress(ValueError):
        if not ipaddress.ip_address(bind).is_unspecified:
            return bind
        for far in ("192.0.2.1", *["2001:db8::1"] * (":" in bind)):
            with contextlib.suppress(OSError):
                return route_to(far)[1]
        return next((found.address for found in _listening(bind)), "127.0.0.1")
    return bind


def _listening(bind: str) -> list[Interface]:
    """Return the interfaces at which a socket listens that is bound to all of them."""
    return [found for found in interfaces() if ":" in bind or ":" not in found.address]


def other_addresses(service: Service) -> list[Interface]:
    """Return where the head can be reached besides the address that was chosen; none where the user has named one."""
    with contextlib.suppress(ValueError):
        if not service.settings.advertise and ipaddress.ip_address(service.bind).is_unspecified:
            chosen = reachable(service.bind)
            return [found for found in _listening(service.bind) if found.address != chosen]
    return []


def local_url(service: Service, url: str) -> str:
    """Return the URL for this machine itself: it may not reach the address that others are told (NAT)."""
    return str(replace(HeadUrl.parse(url), host=reachable(service.bind))) if service.settings.advertise else url


def url_of(service: Service, listener: socket.socket, identity: Identity | None) -> HeadUrl:
    """Return the URL at which workers, here and elsewhere, reach the heads that listen on this socket."""
    host = service.settings.advertise.strip("[]") or reachable(service.bind)
    fingerprint = identity.fingerprint if identity is not None else ""
    return HeadUrl(host, listener.getsockname()[1], identity is not None, fingerprint)


def address_like(url: str, host: str, port: int) -> str:
    """Return the URL of another head of the run whose head is at ``url``."""
    return str(replace(HeadUrl.parse(url), host=host, port=port))


class HeadProcess:
    """Starts and ends the heads of this agent, one after the other.

    Args:
        settings: of `unisono.cluster.head`.
        listener: a socket that is bound; closed by the caller.
        secret: the run's token.
        url: where heads that listen on it are reached.
        identity: the heads' certificate and private key; None: no TLS.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        listener: socket.socket,
        secret: Memory,
        url: str,
        identity: Identity | None = None,
    ) -> None:
        self.url = url
        self._certificate = Memory("unisono-head", identity.pem) if identity is not None else None
        held = self._certificate
        self._settings = {**settings, "identity": held.inherited_path if held is not None else ""}
        self._listener = listener
        self._inherited = (secret.descriptor, *([held.descriptor] if held is not None else []))
        self._environment = {**os.environ, TOKEN_FILE: secret.inherited_path, PARENT: str(os.getpid())}
        self._starts: deque[float] = deque(maxlen=MAX_HEADS)
        self.child: Child | None = None

    def start(
        self,
        term: int,
        snapshot: bytes,
        on_line: Callable[[str, bool], None],
        on_end: Callable[[Child], None],
        **settings: str,
    ) -> None:
        """Start a head of this term. It listens on the socket of the head before, so connections only have to wait.

        Args:
            snapshot: the newest state of the head before; empty for the first head.
            settings: those that were not known before.
        """
        self._starts.append(time.monotonic())
        self._listener.listen(BACKLOG)
        known = {**self._settings, **settings, "url": self.url, "listener": self._listener.fileno()}
        known |= {"term": term, "name": secrets.token_hex(4)}
        with (
            Memory("unisono-head", snapshot) as memory,
            # Not an argument: other users of this machine must not read those of the script.
            Memory("unisono-head", msgspec.json.encode(known)) as written,
        ):
            command = [
                sys.executable,
                "-P",
                "-m",
                "unisono.cluster.head",
                str(written.descriptor),
                str(memory.descriptor),
            ]
            descriptors = (self._listener.fileno(), *self._inherited, written.descriptor, memory.descriptor)
            self.child = spawn("head", command, self._environment, descriptors, on_line=on_line, on_end=on_end)

    def renew(self, url: str) -> None:
        """Stop listening, when this machine follows a head elsewhere (``url``): choose another port for later heads."""
        listener, self.url = reserve(url, self._settings["spec"].ports)
        self._listener.close()
        self._listener = listener

    def close(self) -> None:
        """Let go of the port. No head is started any more."""
        self._listener.close()
        if self._certificate is not None:
            self._certificate.close()

    def may_start_again(self) -> bool:
        """Return False if several heads have died within a short time: the cause is then probably in their state."""
        return len(self._starts) < MAX_HEADS or time.monotonic() - self._starts[0] > HEADS_WITHIN_S

    async def end(self) -> None:
        if self.child is not None:
            await self.child.close()


def welcome_words(invitation: Invitation, service: Service, run_dir: str) -> list[str]:
    """Return how other machines join, if they can reach the run; on a terminal, also where to look at it.

    Lines with a token are for a terminal. They are not written into a file or a pipe, which others may be able to read:
    whoever has the run's token can run code as this user.
    """
    is_terminal = any(is_for_person(stream, os.environ) for stream in (sys.stdout, sys.stderr))  # see `watch.terminal`
    found = []
    host = HeadUrl.parse(invitation.url).host
    if not is_local(host):
        status = shlex.join(["unisono", "watch", "--once", run_dir]) if run_dir else "unisono watch --once RUN"
        words = f"other machines join with the line that `{status}` shows (it is secret, so it is not written here)"
        if is_terminal:
            words = f"other machines join with: {invitation.command}"
        others = [f"{each.address} ({each.name})" for each in other_addresses(service)]
        if others:
            words += f"\nthe head is reached at {host}; this machine also has {listed(others)}: "
            words += "--set advertise=HOST names another"
        found.append(words)
    if is_terminal:
        found.append(f"watch it in a browser: {invitation.page}")
    return found
