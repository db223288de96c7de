"""The network addresses of this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Interface", "interfaces", "is_local"]

_SIOCGIFADDR: Final = 0x8915
_GLOBAL_SCOPE: Final = "00"
_OF_CONTAINERS: Final = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "lxc")


class Interface(NamedTuple):
    """An address at which this machine may be reached from others."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """Return the addresses of this machine on networks that it shares with others; those of IPv4 first.

    Neither the loopback interface is among them nor those to this machine's own containers.
    """
    if sys.platform != "linux":
        return []
    return [found for found in _ipv4() + _ipv6() if not found.name.startswith(("lo", *_OF_CONTAINERS))]


def is_local(host: str) -> bool:
    """Return whether only this machine can reach this address."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False


def _ipv4() -> list[Interface]:
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address of IPv4
                answer = fcntl.ioctl(asks.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    return found


def _ipv6() -> list[Interface]:
    found = []
    with contextlib.suppress(OSError):  # a system without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == _GLOBAL_SCOPE:
                found.append(Interface(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found
