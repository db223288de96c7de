"""Process of the head, which the agent of ``unisono run`` starts, and its listening socket.

The socket belongs to the agent, so it survives a head that dies.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from unisono.decisions.membership import Policy
from unisono.errors import UsageError
from unisono.lifetime import PARENT, TOKEN_FILE, Memory
from unisono.machine.children import TERMINATE_S, Child, spawn

__all__ = ["MAX_HEADS", "HeadProcess", "Service", "address", "listen", "reachable"]

MAX_HEADS: Final = 4
HEADS_WITHIN_S: Final = 30.0
BACKLOG: Final = 4096  # when a head has died, all workers and agents call at once


@dataclass(frozen=True, kw_only=True)
class Service:
    """The head that ``unisono run`` starts."""

    policy: Policy
    bind: str = "127.0.0.1"
    port: int = 0


def listen(service: Service) -> socket.socket:
    """Return the socket on which the run's heads listen.

    Raises:
        UsageError: this address cannot be used; says why.
    """
    try:
        family = socket.AF_INET6 if ":" in service.bind else socket.AF_INET
        # "All interfaces" includes those of IPv4: joining machines get an IPv4 address where there is one.
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server((service.bind, service.port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except (OSError, TypeError) as error:  # TypeError: no name of a host can look like this
        raise UsageError(
            f"cannot listen on {service.bind} port {service.port}: {getattr(error, 'strerror', None) or error}; use "
            "another --bind or --port (0: any)"
        ) from error


def reachable(bind: str) -> str:
    """Return the address at which workers, here and elsewhere, reach a socket that listens on ``bind``."""
    with contextlib.suppress(ValueError):
        if not ipaddress.ip_address(bind).is_unspecified:
            return bind
        routes = [(socket.AF_INET, "192.0.2.1")] + [(socket.AF_INET6, "2001:db8::1")] * (":" in bind)
        for family, far in routes:
            # No packet is sent: this only asks which interface the default route uses.
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))
                return str(probe.getsockname()[0])
        return "127.0.0.1"
    return bind


def address(host: str, port: int) -> str:
    """Return the URL of a head."""
    return f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}"


class HeadProcess:
    """Starts and ends the heads of this agent, one after the other."""

    def __init__(self, settings: dict[str, Any], listener: socket.socket, secret: Memory) -> None:
        self._settings = settings
        self._descriptors = (listener.fileno(), secret.descriptor)
        self._environment = {**os.environ, TOKEN_FILE: secret.inherited_path, PARENT: str(os.getpid())}
        self._starts: deque[float] = deque(maxlen=MAX_HEADS)
        self.child: Child | None = None

    def start(
        self, term: int, snapshot: bytes, on_line: Callable[[str, bool], None], on_end: Callable[[Child], None]
    ) -> None:
        """Start a head of this term. It listens on the socket of the head before, so connections only have to wait.

        Args:
            snapshot: the newest state of the head before; empty for the first head.
        """
        self._starts.append(time.monotonic())
        with Memory("unisono-head", snapshot) as memory:
            settings = {**self._settings, "term": term, "snapshot": memory.descriptor if snapshot else -1}
            command = [sys.executable, "-P", "-m", "unisono.head", msgspec.json.encode(settings).decode()]
            descriptors = (*self._descriptors, memory.descriptor)
            self.child = spawn("head", command, self._environment, descriptors, on_line=on_line, on_end=on_end)

    def may_start_again(self) -> bool:
        """Return False if several heads have died within a short time: the cause is then probably in their state."""
        return len(self._starts) < MAX_HEADS or time.monotonic() - self._starts[0] > HEADS_WITHIN_S

    async def end(self) -> None:
        if self.child is None:
            return
        if self.child.exit_code is None:
            os.kill(self.child.pid, signal.SIGTERM)
        if not await self.child.ended_within(TERMINATE_S):
            self.child.kill()
            await self.child.ended_within(TERMINATE_S)
