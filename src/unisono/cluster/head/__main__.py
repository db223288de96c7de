"""The head as a process of its own: ``python -m unisono.cluster.head SETTINGS SNAPSHOT``.

An agent starts it (`unisono.cluster.machine.headprocess`). Both arguments are descriptors of memory.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import sys
from asyncio.sslproto import SSLProtocol
from typing import Final

import msgspec

from unisono.cluster.head.server import Head, Settings
from unisono.cluster.trust.certificate import server_context
from unisono.core.following import SUPERSEDED
from unisono.system.lifetime import (
    bind_to_parent,
    close_inherited,
    name_process,
    raise_file_limit,
    take_inherited,
    take_token,
)

__all__ = ["main"]

TLS_BUFFER_BYTES: Final = 32_768
"""The event loop gives every TLS connection a buffer of 256 KB, a quarter of a gigabyte for a thousand of them; what
members and viewers send is short.
"""


async def _serve(settings: Settings, snapshot: bytes, token: str) -> int:
    """Be the head. Returns the exit code.

    Args:
        snapshot: the newest state of the head before; empty for the first head.
    """
    tls = server_context(settings.identity) if settings.identity else None
    close_inherited(settings.identity)
    head = Head(settings, token, snapshot)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, head.over.set)
    try:
        await head.run(socket.socket(fileno=settings.listener), tls)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # the head is ending already
        if not head.has_given_way:
            head.end_workers()  # nothing is left to do, unless the command was killed
    return SUPERSEDED if head.has_given_way else 0


def main() -> int:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    bind_to_parent(signal.SIGTERM)
    name_process("unisono head")
    raise_file_limit()
    SSLProtocol.max_size = TLS_BUFFER_BYTES
    written, snapshot = (take_inherited(descriptor) for descriptor in sys.argv[1:])
    settings = msgspec.json.decode(written, type=Settings)
    token = take_token(os.environ)
    os.set_inheritable(settings.listener, False)
    return asyncio.run(_serve(settings, snapshot, token))


if __name__ == "__main__":
    sys.exit(main())
