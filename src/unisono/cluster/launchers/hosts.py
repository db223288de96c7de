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

__all__ = ["Host", "is_this_machine", "parse_hostfile", "parse_hosts", "parts_of", "read_hostfile", "spread"]

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
    parts: int = 1
    """In groups of so many."""

    @property
    def text(self) -> str:
        if self.slots is None:
            return self.name
        return f"{self.name}:{self.slots // self.parts}x{self.parts}" if self.parts > 1 else f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> list[Host]:
    """Read the value of ``--hosts``: ``a,b:2,user@c,[fe80::1]:4``, or with groups ``a:1x4,b:2x4``.

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
                host = Host(host.name, *_number(value, f"{path}, line {number}: {line.strip()}"))
            elif key not in _IGNORED:
                raise UsageError(f"{path}, line {number}: a line is HOST, HOST:N or HOST slots=N; got {line.strip()!r}")
        hosts.append(host)
    if not hosts:
        raise UsageError(f"the hostfile {path} names no machine; write one a line, such as: node1 slots=2")
    return _merged(hosts)


def parts_of(hosts: Sequence[Host]) -> int:
    """Return how many workers a group has, as the numbers of these machines say; 1: they name no groups.

    Raises:
        UsageError: they say different numbers.
    """
    named = [host for host in hosts if host.slots is not None]
    first = named[0] if named else Host("")
    for host in named:
        if host.parts != first.parts:
            raise UsageError(
                f"all groups of a run have the same number of workers; {first.text} names groups of {first.parts}, and "
                f"{host.text} of {host.parts}: write HOST:NxP with the same P for all"
            )
    return first.parts


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
    has the largest part of its room left. Beyond their room go only machines without a number. Groups of workers are
    first on one machine each, as far as there is room.

    Args:
        workers: the value of ``--workers``.
        room: for how many workers each machine has room; for those with a number, the number.
        is_auto: ``--workers`` is "auto": every machine starts as many as it has room for.

    Raises:
        UsageError: more workers are asked for than the numbers of the machines allow, or there is no room for a group.
    """
    offered = sum(room)
    parts = workers.parts
    if is_auto:
        wanted = Workers.found(offered, parts).start // parts * parts
    else:
        most = min(workers.maximum, max(workers.start, offered // parts * parts))
        wanted = workers.start if workers.grows else most
    if wanted > offered and all(host.slots is not None for host in hosts):
        raise UsageError(
            f"--workers asks for {wanted}, and the hosts are given {offered} in all "
            f"({', '.join(host.text for host in hosts)}); raise their numbers, or use fewer workers"
        )
    numbers = [host.slots or 0 for host in hosts]
    if sum(numbers) > wanted:
        numbers = [0] * len(hosts)
    for unit, fits in ((parts, True), (1, True), (1, False)):  # first within the room, then beyond it
        queue = [
            ((numbers[index] + unit) / size, index)
            for index, size in enumerate(room)
            if (numbers[index] + unit <= size if fits else size and hosts[index].slots is None)
        ]
        heapq.heapify(queue)
        while queue and sum(numbers) + unit <= wanted:
            _, index = heapq.heappop(queue)
            numbers[index] += unit
            if not fits or numbers[index] + unit <= room[index]:
                heapq.heappush(queue, ((numbers[index] + unit) / room[index], index))
    return numbers


def _host(word: str, where: str) -> Host:
    found = _NAME.match(word)
    name, rest = (word[: found.end()], word[found.end() :]) if found else ("", word)
    if not name or (rest and not rest.startswith(":")):
        raise UsageError(f"{where}: {word!r} is not the name of a machine; write NAME, NAME:N or USER@NAME:N")
    name = name.replace("[", "").replace("]", "")
    return Host(name, *_number(rest[1:], f"{where}: {word}")) if rest else Host(name)


def _number(text: str, where: str) -> tuple[int, int]:
    """Return the number of workers that a text names, and how many of them are a group."""
    number, x, parts = text.partition("x")
    for each in (number, parts) if x else (number,):
        if not (each.isascii() and each.isdecimal() and 1 <= int(each) <= 1_000_000):
            groups = ", and NxP stands for N groups of P" if x and number else ""
            raise UsageError(f"{where}: the number of workers of a machine is 1 or more{groups}, got {text!r}")
    size = int(parts) if x else 1
    return int(number) * size, size


def _merged(hosts: Sequence[Host]) -> list[Host]:
    """Return each machine once, with the sum of its numbers."""
    parts_of(hosts)  # raises
    lines: dict[str, list[Host]] = {}
    for host in hosts:
        lines.setdefault(host.name, []).append(host)
    found = [
        own[0] if len(own) == 1 else Host(name, sum(host.slots or 1 for host in own), max(host.parts for host in own))
        for name, own in lines.items()
    ]
    parts_of(found)  # raises
    return found
