"""Names of machines on a command line or in a file, and how the workers of a run are spread over them."""

from __future__ import annotations

import contextlib
import heapq
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unisono.core.errors import UsageError
from unisono.system.capacity import Workers

__all__ = ["Host", "is_this_machine", "parse_hostfile", "parse_hosts", "read_hostfile", "spread"]

_WORD: Final = r"[^\s\-@:\[\],;#=/][^\s@:\[\],;#=/]*"
_NAME: Final = re.compile(rf"(?:{_WORD}@)?(?:{_WORD}|\[[0-9a-fA-F:.%\w]+\])")
_IGNORED: Final = ("max_slots", "max-slots")  # of Open MPI's hostfiles


@dataclass(frozen=True)
class Host:
    """A machine that the user has named."""

    name: str
    """As ``ssh`` takes it: a name or an address, maybe with ``USER@``."""
    slots: int | None = None
    """How many workers the user wants there; None: as many as the machine has room for."""


def parse_hosts(text: str) -> list[Host]:
    """Read the value of ``--hosts``: ``a,b:2,user@c,[fe80::1]:4``.

    Raises:
        UsageError: it names no machine, or one of them cannot be read.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"--hosts is a list of machines such as a,b:2,c; got {text!r}")
    return _merged([_host(word, f"--hosts {text}") for word in words])


def read_hostfile(path: str) -> list[Host]:
    """Read a hostfile (``--set hostfile=FILE``).

    Raises:
        UsageError: it cannot be read, or one of its lines cannot.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise UsageError(f"the hostfile {path} cannot be read: {error.strerror}") from error
    except ValueError:
        raise UsageError(f"the hostfile {path} is not a text file") from None
    return parse_hostfile(text, path)


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Read a hostfile in the form of Open MPI (``host slots=2``) or of MPICH (``host:2``): one machine a line.

    A machine on several lines, as batch systems write it, has one worker for each of its lines that has no number.

    Raises:
        UsageError: a line cannot be read, or none names a machine.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        name, *settings = line.partition("#")[0].split() or [""]
        if not name:
            continue
        host = _host(name, f"{path}, line {number}")
        for setting in settings:
            key, equals, value = setting.partition("=")
            if key == "slots" and equals and host.slots is None:
                host = Host(host.name, _number(value, f"{path}, line {number}: {line.strip()}"))
            elif key not in _IGNORED:
                raise UsageError(f"{path}, line {number}: a line is HOST, HOST:N or HOST slots=N; got {line.strip()!r}")
        hosts.append(host)
    if not hosts:
        raise UsageError(f"the hostfile {path} names no machine; write one a line, such as: node1 slots=2")
    return _merged(hosts)


def is_this_machine(name: str) -> bool:
    """Return whether this is a name or an address of the machine that the process runs on. Asks no name server."""
    if name == "localhost":
        return True
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(name.strip("[]"))
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((str(address), 0))
            except OSError:
                return False
            return True
    own = socket.gethostname()
    if "." in name and "." in own:
        return name == own
    return name.partition(".")[0] == own.partition(".")[0]


def spread(workers: Workers, hosts: Sequence[Host], room: Sequence[int], *, is_auto: bool) -> list[int]:
    """Return how many workers each machine starts.

    Machines with a number get that first, if there are so many workers. Each further worker goes to the machine that
    has the largest part of its room left. Beyond their room go only machines without a number.

    Args:
        workers: the value of ``--workers``.
        room: for how many workers each machine has room; for those with a number, the number.
        is_auto: ``--workers`` is "auto": every machine starts as many as it has room for.

    Raises:
        UsageError: more workers are asked for than the numbers of the machines allow.
    """
    offered = sum(room)
    if is_auto:
        return list(room)
    wanted = workers.start if workers.grows else min(workers.maximum, max(workers.start, offered))
    if wanted > offered and all(host.slots is not None for host in hosts):
        raise UsageError(
            f"--workers asks for {wanted}, and the hosts are given {offered} in all "
            f"({', '.join(f'{host.name}:{host.slots}' for host in hosts)}); raise their numbers, or use fewer workers"
        )
    numbers = [host.slots or 0 for host in hosts]
    if sum(numbers) > wanted:
        numbers = [0] * len(hosts)
    for fits in (True, False):  # first within the room, then beyond it
        queue = [
            ((numbers[index] + 1) / size, index)
            for index, size in enumerate(room)
            if (numbers[index] < size if fits else size and hosts[index].slots is None)
        ]
        heapq.heapify(queue)
        while queue and sum(numbers) < wanted:
            _, index = heapq.heappop(queue)
            numbers[index] += 1
            if not fits or numbers[index] < room[index]:
                heapq.heappush(queue, ((numbers[index] + 1) / room[index], index))
    return numbers


def _host(word: str, where: str) -> Host:
    found = _NAME.match(word)
    name, rest = (word[: found.end()], word[found.end() :]) if found else ("", word)
    if not name or (rest and not rest.startswith(":")):
        raise UsageError(f"{where}: {word!r} is no name of a machine; write NAME, NAME:N or USER@NAME:N")
    name = name.replace("[", "").replace("]", "")
    return Host(name, _number(rest[1:], f"{where}: {word}") if rest else None)


def _number(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 1_000_000):
        raise UsageError(f"{where}: the number of workers of a machine is 1 or more, got {text!r}")
    return int(text)


def _merged(hosts: Sequence[Host]) -> list[Host]:
    """Return each machine once, with the sum of its numbers."""
    lines: dict[str, list[int | None]] = {}
    for host in hosts:
        lines.setdefault(host.name, []).append(host.slots)
    return [
        Host(name, slots[0] if len(slots) == 1 else sum(1 if number is None else number for number in slots))
        for name, slots in lines.items()
    ]
