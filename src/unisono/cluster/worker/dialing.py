"""Connections to heads from an event loop."""

from __future__ import annotations

import asyncio
import socket

from unisono.cluster.worker.link import Link, host_and_port

__all__ = ["answer_to", "open_link"]

MAX_BYTES = 65536


async def open_link(url: str, token: str, open_s: float) -> Link:
    """Connect to a head.

    Raises:
        Refused, OSError: as `Link`; TimeoutError: no answer within ``open_s``.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(open_s):
            sock = await _connect(*host_and_port(url))
            try:
                link = Link(sock, url, token)
                while not link.is_open:
                    link.feed(await loop.sock_recv(sock, MAX_BYTES))
                return link
            except BaseException:
                sock.close()
                raise
    except TimeoutError:
        raise TimeoutError(f"no answer within {open_s:.0f} s") from None


async def answer_to(message: bytes, link: Link, timeout_s: float) -> bytes:
    """Send one message to a head; returns the first answer.

    Raises:
        OSError: the connection broke; TimeoutError: no answer within ``timeout_s``.
    """
    link.put(message)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        while not (found := link.take()):
            await _readable(loop, link.sock)
    return found[0]


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


async def _connect(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that is connected to the first address of this host that answers."""
    loop = asyncio.get_running_loop()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name, whose look-up may take long
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure
