"""Orders to the doctor's program on a machine, one JSON object a line, and its answers, also one a line."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.tools.doctor.facts import MachineFacts, Scope, find_out
from unisono.tools.doctor.path import Server, measure

__all__ = ["ProbeReply", "ProbeRequest", "carry_out"]


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do: one of "facts", "clock", "serve", "measure", "make", "see", "remove"."""

    what: str
    asked: Scope = Scope()
    addresses: list[str] = []
    port: int = 0
    word: str = ""
    file: str = ""


class ProbeReply(msgspec.Struct, frozen=True, kw_only=True):
    facts: MachineFacts | None = None
    time: float = 0.0
    port: int = 0
    word: str = ""
    address: str = ""
    latency_s: float = 0.0
    bandwidth: float = 0.0
    is_there: bool = False
    error: str = ""


def carry_out(order: ProbeRequest) -> ProbeReply:
    """Carry out an order on this machine; an error is an answer, too."""
    try:
        return ProbeReply(**_DOING[order.what](order))
    except (OSError, ValueError) as error:
        return ProbeReply(error=str(error) or type(error).__name__)


def _serve(order: ProbeRequest) -> dict[str, Any]:
    server = Server(order.asked.ports, ipv6=order.asked.ipv6)
    return {"port": server.port, "word": server.word}


def _measure(order: ProbeRequest) -> dict[str, Any]:
    why = "the machine has no address that others can reach"
    for address in order.addresses:
        try:
            latency_s, bandwidth = measure(address, order.port, order.word)
        except OSError as error:
            why = f"{address} port {order.port}: {error.strerror or error}"
        else:
            return {"address": address, "latency_s": latency_s, "bandwidth": bandwidth}
    raise OSError(why)


def _make(order: ProbeRequest) -> dict[str, Any]:
    os.close(os.open(order.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    return {"is_there": True}


def _see(order: ProbeRequest) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        os.listdir(Path(order.file).parent)  # a network file system may remember that the file was not there
    return {"is_there": os.path.exists(order.file)}


def _remove(order: ProbeRequest) -> dict[str, Any]:
    os.unlink(order.file)
    return {}


_DOING: Final[dict[str, Callable[[ProbeRequest], dict[str, Any]]]] = {
    "facts": lambda order: {"facts": find_out(order.asked)},
    "clock": lambda order: {"time": time.time()},
    "serve": _serve,
    "measure": _measure,
    "make": _make,
    "see": _see,
    "remove": _remove,
}
