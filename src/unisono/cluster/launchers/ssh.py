"""The launcher of ``unisono run --hosts``: agents on machines that ``ssh`` reaches.

The system's ``ssh`` does the work, with the user's keys, configuration and jump hosts. Before anything is started, all
machines are asked at once what is there (`unisono.cluster.launchers.probe`), and every reason against a start is shown.
What runs on a machine is held there (`unisono.cluster.machine.holder`): nothing of it outlives the connection.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.cluster.launchers.agent_processes import AgentProcess
from unisono.cluster.launchers.hosts import Host, is_this_machine, parse_hosts, read_hostfile, spread
from unisono.cluster.launchers.protocol import HERE, AgentCommand, Handle, Launcher, Machine, Request, names_hosts
from unisono.cluster.launchers.shipping import MEGABYTE, ShippedFiles, inspect, pack
from unisono.cluster.launchers.way import SSH_FAILED, Answer, Unfit, Way, call, for_all, why_no_answer, why_ssh_failed
from unisono.cluster.machine import holder, shipped
from unisono.cluster.machine.headprocess import reachable
from unisono.core.errors import UsageError
from unisono.core.words import count, exit_words
from unisono.system.capacity import check_open_files, check_workers, free_workers
from unisono.system.fingerprint import SWITCHES, foretold, script_checksum
from unisono.system.interfaces import interfaces

__all__ = ["Ssh"]

SHIP_S: Final = 600.0
CLOSE_S: Final = 2 * holder.TERMINATE_S
VARIABLES: Final = ("PYTHONHASHSEED", *SWITCHES)
"""Always passed on where they are set here: the bits depend on them."""


@dataclass(frozen=True)
class _Place:
    """What is known of one machine after it was asked."""

    host: Host
    room: int
    folder: str = ""
    """Where the run's folder is there, if not at the same place."""
    reached: tuple[str, ...] = ()
    arithmetic: Mapping[str, str] = field(default_factory=dict)
    is_here: bool = False


class Ssh(Launcher):
    """Starts agents by ssh; workers of this machine, where it is among the hosts, belong to the command itself."""

    def __init__(self, request: Request) -> None:
        settings = request.settings
        if settings.hosts and settings.hostfile:
            raise UsageError("--hosts and --set hostfile both name the machines of the run; give one of them")
        if not names_hosts(request):
            raise UsageError("the launcher ssh needs --hosts a,b:2,c or --set hostfile=FILE")
        self._hosts = parse_hosts(settings.hosts) if settings.hosts else read_hostfile(settings.hostfile)
        self._request = request
        self._way = Way.parse(settings.ssh, settings.remote_python)
        self._environment = _environment(settings.pass_env)
        self._places: dict[str, _Place] = {}

    def machines(self) -> Sequence[Machine]:
        """Ask all machines, send the folder to those that lack it, and spread the workers.

        Raises:
            UsageError: some machine cannot take part; says which, why, and what to do.
        """
        request = self._request
        here = [host for host in self._hosts if is_this_machine(host.name)]
        if len(here) > 1:
            raise UsageError(f"{' and '.join(host.name for host in here)} are both this machine; name it once")
        far = [host for host in self._hosts if host not in here]
        known = {host.name: self._place_here(host) for host in here}
        parcel = self._parcel() if far else None
        with beacon(request.bind, request.port) as (port, secret):
            question = {**self._question(parcel), "port": port, "secret": secret}
            found = self._for_all(far, lambda host: self._ask(host, question))
        known |= found
        if parcel is not None:
            self._check_script(parcel)
            known |= self._ship(parcel, [place for place in found.values() if not place.folder])
        places = [known[host.name] for host in self._hosts]
        if request.settings.strict:
            _check_alike(places)
        self._bind = self._choose_address([place for place in places if not place.is_here])
        numbers = spread(
            request.workers, self._hosts, [place.room for place in places], is_auto=request.settings.takes_all
        )
        total = sum(numbers)
        check_workers(total, len(places))
        check_open_files(total)
        self._places = {place.host.name: place for place in places}
        return [
            Machine(name=HERE if place.is_here else place.host.name, num_workers=number)
            for place, number in zip(places, numbers, strict=True)
            if number
        ]

    def bind(self) -> str:
        """Return the address at which all machines have reached this one."""
        return self._bind

    def start(self, machine: Machine, command: AgentCommand) -> Handle:
        """Start a holder by ssh, and in its hands the agent."""
        place = self._places[machine.name]
        words = [self._way.python, *command.words[1:]]
        lock = ""
        if place.folder != self._folder:
            words += ["--folder", place.folder]
            lock = os.path.join(os.path.dirname(place.folder), shipped.LOCK)
        order = holder.HolderOrder(words, self._environment, lock)
        there = AgentCommand(
            words=self._way.to(place.host.name, "unisono.cluster.machine.holder"),
            secret=f"{order.encode()}\n{command.secret}",
        )
        return _Session(place.host.name, there)

    def _for_all(self, hosts: Sequence[Host], work: Callable[[Host], _Place]) -> dict[str, _Place]:
        by_name = {host.name: host for host in hosts}
        return _all_or_none(for_all(list(by_name), lambda name: work(by_name[name])))

    # -- before the run ------------------------------------------------------------------------------

    @property
    def _folder(self) -> str:
        return self._request.spec.folder or os.getcwd()

    def _place_here(self, host: Host) -> _Place:
        room = host.slots or free_workers(self._request.spec.threads)
        return _Place(host, room, folder=self._folder, arithmetic=foretold(os.environ), is_here=True)

    def _parcel(self) -> ShippedFiles | None:
        settings = self._request.settings
        if not settings.ship:
            return None
        without = self._request.spec.settings.run_dir
        return inspect(self._folder, without=without, max_bytes=int(settings.ship_limit * MEGABYTE))

    def _check_script(self, parcel: ShippedFiles) -> None:
        script, *_ = self._request.spec.arguments
        if script == "-m":
            return
        if os.path.normpath(script) not in parcel.names:
            raise UsageError(
                f"--ship sends {parcel.folder} (without what .gitignore names), and the script {script} is not in it; "
                "go to the folder of the script, and name the script without a leading path"
            )

    def _question(self, parcel: ShippedFiles | None) -> dict[str, Any]:
        request = self._request
        addresses = [reachable(request.bind)] if request.bind else ["", *_own_addresses()]
        names = {"names": parcel.names, "checksum": parcel.checksum} if parcel is not None else None
        return {
            "folder": self._folder,
            "arguments": request.spec.arguments,
            "threads": request.spec.threads,
            "addresses": addresses,
            "shipped": names,
            "variables": self._switches(),
        }

    def _switches(self) -> dict[str, str]:
        """Return the variables of an agent's environment by which libraries choose their kernels."""
        return {name: value for name, value in self._environment.items() if name in SWITCHES}

    def _ask(self, host: Host, question: Mapping[str, Any]) -> _Place:
        found = self._way.ask(host.name, **question)
        folder = self._folder_there(found, question["shipped"] is not None)
        if not found.reached:
            raise Unfit(self._why_not_reached(question))
        return _Place(host, host.slots or found.room, folder, tuple(found.reached), found.arithmetic)

    def _folder_there(self, found: Answer, ships: bool) -> str:
        """Return where the run's folder is on a machine; "" where it has to be sent."""
        if ships:
            return self._folder if found.has_tree else found.copy
        if not found.has_folder:
            raise Unfit(
                f"there is no folder {self._folder} there; put the project at the same path (a shared folder, or a "
                "copy), or send it with --ship"
            )
        arguments = self._request.spec.arguments
        own = script_checksum(arguments)
        if own and not found.script:
            name = " ".join(arguments[: 2 if arguments[0] == "-m" else 1])
            raise Unfit(f"{name} is not in {self._folder} there; copy the project to it, or send it with --ship")
        if found.script != own and not self._request.settings.allow_different_script:
            raise Unfit(
                f"{arguments[0]} differs there (checksum {found.script}, and {own} here), so it would compute "
                "something else; copy it, send it with --ship, or give --set allow-different-script=yes"
            )
        return self._folder

    def _why_not_reached(self, question: Mapping[str, Any]) -> str:
        tried = [address for address in question["addresses"] if address] or ["the address that ssh comes from"]
        return (
            f"it does not reach this machine at {' or '.join(tried)}, port {question['port']}, where the run's head "
            "would listen; start the run on a machine that it reaches, open one port in the firewall of this machine "
            "and name it (--set port=N), or name an address that it reaches (--bind ADDRESS)"
        )

    def _choose_address(self, places: Sequence[_Place]) -> str:
        """Return an address at which all these machines reach this one."""
        if self._request.bind:
            return self._request.bind
        if not places:
            return "127.0.0.1"
        for address in places[0].reached:
            if all(address in place.reached for place in places):
                return address
        seen = "; ".join(f"{place.host.name} reaches it at {' or '.join(place.reached)}" for place in places)
        raise UsageError(
            f"the hosts reach this machine at no address in common ({seen}); name one that all of them reach with "
            "--bind ADDRESS"
        )

    def _ship(self, parcel: ShippedFiles, places: Sequence[_Place]) -> dict[str, _Place]:
        if not places:
            return {}
        with tempfile.TemporaryDirectory(prefix="unisono-ship-") as folder:
            archive = Path(folder, "archive")
            with archive.open("wb") as target:
                pack(parcel, target)
            by_name = {place.host.name: place for place in places}

            def send(host: Host) -> _Place:
                place = by_name[host.name]
                arguments = (parcel.checksum, str(parcel.num_bytes))
                command = self._way.to(host.name, "unisono.cluster.machine.shipped", *arguments)
                with archive.open("rb") as source:
                    done = call(command, source, SHIP_S)
                for line in done.output.splitlines():
                    if line.startswith(shipped.MARK):
                        answer = msgspec.json.decode(line.removeprefix(shipped.MARK), type=dict[str, str])
                        if "folder" in answer:
                            return replace(place, folder=answer["folder"])
                        raise Unfit(f"it did not take the folder: {answer['error']}")
                raise Unfit(why_no_answer(host.name, self._way.python, done.code, done.errors or done.output))

            return self._for_all([place.host for place in places], send)


class _Session(AgentProcess):
    """An agent at the other end of ssh."""

    def __init__(self, name: str, command: AgentCommand) -> None:
        super().__init__(command, patience_s=CLOSE_S)  # in which a holder leaves nothing behind
        self._name = name

    def explain(self, exit_code: int, last_lines: Sequence[str]) -> str:
        if exit_code == SSH_FAILED:
            cause, line = why_ssh_failed(last_lines)
            if cause == "has lost its connection":
                return f"is out of reach over ssh ({line}); it continues if it reaches the head"
            return f"could not be started: {self._name} {cause} ({line})"
        if exit_code > 128:
            return exit_words(128 - exit_code)
        return (
            f"is out of reach: its ssh {exit_words(exit_code)}; it continues if it reaches the head"
            if exit_code < 0
            else ""
        )


def _all_or_none(found: Mapping[str, _Place | Unfit]) -> dict[str, _Place]:
    """Return the machines, if all of them can take part.

    Raises:
        UsageError: some cannot; names each of them, with the reason.
    """
    bad = [f"  {name}: {place}" for name, place in found.items() if isinstance(place, Unfit)]
    if bad:
        which = f"{len(bad)} of {count(len(found), 'host')}" if len(found) > 1 else "the host"
        verb = "is" if len(bad) == 1 else "are"
        raise UsageError("\n".join([f"{which} {verb} not ready, so nothing was started:", *bad]))
    return {name: place for name, place in found.items() if isinstance(place, _Place)}


def _check_alike(places: Sequence[_Place]) -> None:
    """Raise UsageError where machines may compute other bits than this one, or than the first one without this one."""
    first = next((place for place in places if place.is_here), places[0])
    # The first machine may be the odd one; what is installed is compared with what the command is.
    own = dict(first.arithmetic) | {name: foretold(os.environ)[name] for name in ("torch", "python")}

    def compared(place: _Place) -> _Place | Unfit:
        other = place.arithmetic
        differ = [
            f"{name} is {other.get(name) or 'not set'} there, and {own.get(name) or 'not set'} "
            f"on {'this machine' if first.is_here or name in ('torch', 'python') else first.host.name}"
            for name in sorted(own.keys() | other.keys())
            if own.get(name) != other.get(name)
        ]
        return Unfit(f"it may compute different bits (--strict): {'; '.join(differ)}") if differ else place

    _all_or_none({place.host.name: compared(place) for place in places})


def _own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine's interfaces, that of the default route first."""
    found = [reachable("0.0.0.0"), *(each.address for each in interfaces() if ":" not in each.address)]
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


def _environment(names: Sequence[str]) -> dict[str, str]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UsageError(f"--pass-env {missing[0]}: there is no such variable here")
    return {name: os.environ[name] for name in (*VARIABLES, *names) if name in os.environ}


@contextlib.contextmanager
def beacon(bind: str, port: int) -> Iterator[tuple[int, str]]:
    """Send a fresh secret to whoever connects, while the context lasts. Who has read the secret has reached this one.

    Args:
        bind: where to listen; "": on all interfaces.
        port: 0 for any.

    Returns:
        The port, and the secret.

    Raises:
        UsageError: this port or this address is not free.
    """
    both = not bind and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in bind else socket.AF_INET
    try:
        listener = socket.create_server((bind, port), family=family, dualstack_ipv6=both)
    except (OSError, TypeError) as error:
        where = f"{bind or 'all interfaces'} port {port}"
        raise UsageError(
            f"cannot listen on {where}: {getattr(error, 'strerror', None) or error}; use another --bind or --set port "
            "(0: any)"
        ) from error
    secret = secrets.token_hex(16)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError), connection:
                connection.sendall(secret.encode())

    thread = threading.Thread(target=serve, name="unisono-beacon", daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], secret
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes up the thread
        thread.join()
        listener.close()
