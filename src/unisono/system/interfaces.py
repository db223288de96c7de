"""The network addresses of this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Final, NamedTuple

__all__ = ["Interface", "interfaces", "is_local", "route_to"]

_OF_CONTAINERS: Final = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "lxc")


class Interface(NamedTuple):
    """An address at which this machine may be reached from others."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """Return the addresses of this machine on networks that it shares with others; those of IPv4 first.

    Neither the loopback interface is among them nor those to this machine's own containers.
    """
    import psutil  # a head needs none

    return [
        Interface(name, found.address)
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, all_found in psutil.net_if_addrs().items()
        for found in all_found
        if found.family == family and not name.startswith(("lo", *_OF_CONTAINERS)) and "%" not in found.address
    ]


def route_to(host: str, port: int = 9) -> tuple[socket.AddressFamily, str]:
    """Return the address at which a machine reaches this one: that of the interface by which this one reaches it.

    No packet is sent.

    Raises:
        OSError: there is no way to that machine.
    """
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return family, str(probe.getsockname()[0])
        except OSError as error:
            failure = error
    raise failure


def is_local(host: str) -> bool:
    """Return whether only this machine can reach this address."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False
