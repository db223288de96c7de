"""The launcher of ``unisono run --hosts``: agents on machines that ``ssh`` reaches.

The system's ``ssh`` does the work, with the user's keys, configuration and jump hosts. Before anything is started, all
machines are asked at once what is there (`unisono.launchers.probe`), and every reason against a start is shown. What
runs on a machine is held there (`unisono.machine.holder`): nothing of it outlives the connection.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from unisono.capacity import check_open_files, check_workers, free_workers
from unisono.errors import UsageError
from unisono.fingerprint import SWITCHES, package_checksum, script_checksum
from unisono.launchers import probe
from unisono.launchers.answers import SSH_FAILED, VERSION, Answer, why_no_answer, why_ssh_failed
from unisono.launchers.asked import names_hosts
from unisono.launchers.beacon import Beacon, own_addresses
from unisono.launchers.hosts import Host, is_this_machine, parse_hosts, read_hostfile, spread
from unisono.launchers.processes import Processes
from unisono.launchers.protocol import HERE, AgentCommand, Handle, Machine, Remote, Request
from unisono.launchers.shipping import MEGABYTE, Parcel, inspect, pack
from unisono.machine import holder, shipped
from unisono.machine.headprocess import reachable
from unisono.words import count, exit_words

__all__ = ["OPTIONS", "Ssh"]

OPTIONS: Final = (
    *("-T", "-x", "-a"),
    *("-o", "BatchMode=yes"),  # never a question: nobody is asked twice, in the middle of a run
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "ControlMaster=no"),  # use a shared connection that the user has, and make none that would stay
    *("-o", "ClearAllForwardings=yes"),
    *("-o", "RemoteCommand=none"),
)
"""Options of ssh. Those of ``--ssh`` go before, so they count."""

PROBE_S: Final = 60.0
SHIP_S: Final = 600.0
AT_ONCE: Final = 32
CLOSE_S: Final = 2 * holder.TERMINATE_S
VARIABLES: Final = ("PYTHONHASHSEED", *SWITCHES)
"""Always passed on where they are set here: the bits depend on them."""


@dataclass(frozen=True)
class _Place:
    """What is known of one machine after it was asked."""

    host: Host
    python: str
    room: int
    folder: str = ""
    """Where the run's folder is there, if not at the same place."""
    reached: tuple[str, ...] = ()
    is_here: bool = False


class Ssh:
    """Starts agents by ssh; workers of this machine, where it is among the hosts, belong to the command itself."""

    def __init__(self, request: Request) -> None:
        remote = request.remote
        if remote.hosts and remote.hostfile:
            raise UsageError("--hosts and --hostfile both name the machines of the run; give one of them")
        if not names_hosts(request):
            raise UsageError("the launcher ssh needs --hosts a,b:2,c or --hostfile FILE")
        self._hosts = parse_hosts(remote.hosts) if remote.hosts else read_hostfile(remote.hostfile)
        self._request = request
        self._command = _ssh_command(remote)
        self._environment = _environment(remote.variables)
        self._places: dict[str, _Place] = {}
        self._processes = Processes()
        self._sessions: list[_Session] = []

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
        with Beacon(request.bind, request.port) as beacon:
            question = self._question(beacon, parcel)
            found = _for_all(far, lambda host: self._ask(host, question))
        known |= {place.host.name: place for place in found}
        if parcel is not None:
            self._check_script(parcel)
            lacking = [place for place in found if not place.folder]
            known |= {place.host.name: place for place in self._ship(parcel, lacking)}
        places = [known[host.name] for host in self._hosts]
        self._bind = self._choose_address([place for place in places if not place.is_here])
        numbers = spread(request.workers, self._hosts, [place.room for place in places], is_auto=request.takes_all)
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
        words = [place.python, *command.words[1:]]
        lock = ""
        if place.folder != self._folder:
            words += ["--folder", place.folder]
            lock = os.path.join(os.path.dirname(place.folder), shipped.LOCK)
        order = holder.Order(words, self._environment, lock)
        there = AgentCommand(
            words=self._at(place.host, place.python, "unisono.machine.holder"),
            secret=f"{order.encode()}\n{command.secret}",
        )
        session = _Session(place.host.name, self._processes.start(there))
        self._sessions.append(session)
        return session

    def close(self) -> None:
        """End what still runs: first with time for the holders to leave nothing, then at once."""
        for session in self._sessions:
            session.terminate()
        deadline = time.monotonic() + CLOSE_S
        while time.monotonic() < deadline and any(session.poll() is None for session in self._sessions):
            time.sleep(0.02)
        self._processes.close()

    # -- before the run ------------------------------------------------------------------------------

    @property
    def _folder(self) -> str:
        return self._request.spec.folder or os.getcwd()

    def _place_here(self, host: Host) -> _Place:
        room = host.slots or free_workers(self._request.threads)
        return _Place(host, sys.executable, room, folder=self._folder, is_here=True)

    def _parcel(self) -> Parcel | None:
        remote = self._request.remote
        if not remote.ship:
            return None
        without = self._request.spec.run_dir
        return inspect(self._folder, without=without, max_bytes=int(remote.ship_mb * MEGABYTE))

    def _check_script(self, parcel: Parcel) -> None:
        script, *_ = self._request.spec.arguments
        if script == "-m":
            return
        if os.path.normpath(script) not in parcel.names:
            raise UsageError(
                f"--ship sends {parcel.folder} (without what .gitignore names), and the script {script} is not in it; "
                "go to the folder of the script, and name the script without a leading path"
            )

    def _question(self, beacon: Beacon, parcel: Parcel | None) -> dict[str, Any]:
        request = self._request
        addresses = [reachable(request.bind)] if request.bind else ["", *own_addresses()]
        names = {"names": parcel.names, "checksum": parcel.checksum} if parcel is not None else None
        return {
            "unisono": VERSION,
            "source": package_checksum(),
            "folder": self._folder,
            "arguments": request.spec.arguments,
            "threads": request.threads,
            "addresses": addresses,
            "port": beacon.port,
            "secret": beacon.secret,
            "shipped": names,
        }

    def _ask(self, host: Host, question: Mapping[str, Any]) -> _Place:
        python = self._request.remote.python or sys.executable
        command = [*self._command, *OPTIONS, host.name, f"exec {shlex.quote(python)} -"]
        output, words, code = _run(command, probe.program(dict(question)).encode(), PROBE_S)
        answer = probe.find_answer(output)
        if answer is None:
            raise _Unfit(why_no_answer(host.name, python, code, words or output))
        found = msgspec.convert(answer, Answer)
        if why := found.why_not(python):
            raise _Unfit(why)
        folder = self._folder_there(found, question["shipped"] is not None)
        if not found.reached:
            raise _Unfit(self._why_not_reached(question))
        return _Place(host, python, host.slots or found.room, folder, tuple(found.reached))

    def _folder_there(self, found: Answer, ships: bool) -> str:
        """Return where the run's folder is on a machine; "" where it has to be sent."""
        if ships:
            return self._folder if found.has_tree else found.copy
        if not found.has_folder:
            raise _Unfit(
                f"there is no folder {self._folder} there; put the project at the same path (a shared folder, or a "
                "copy), or send it with --ship"
            )
        arguments = self._request.spec.arguments
        own = script_checksum(arguments)
        if own and not found.script:
            name = " ".join(arguments[: 2 if arguments[0] == "-m" else 1])
            raise _Unfit(f"{name} is not in {self._folder} there; copy the project to it, or send it with --ship")
        if found.script != own and not self._request.allow_different_script:
            raise _Unfit(
                f"{arguments[0]} has another text there (checksum {found.script}, and {own} here), so it would compute "
                "something else; copy it, send it with --ship, or give --allow-different-script"
            )
        return self._folder

    def _why_not_reached(self, question: Mapping[str, Any]) -> str:
        tried = [address for address in question["addresses"] if address] or ["the address that ssh comes from"]
        return (
            f"it does not reach this machine at {' or '.join(tried)}, port {question['port']}, where the run's head "
            "would listen; start the run on a machine that it reaches, open one port in the firewall of this machine "
            "and name it (--port N), or name an address that it reaches (--bind ADDRESS)"
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

    def _ship(self, parcel: Parcel, places: Sequence[_Place]) -> list[_Place]:
        if not places:
            return []
        with tempfile.TemporaryDirectory(prefix="unisono-ship-") as folder:
            archive = Path(folder, "archive")
            with archive.open("wb") as target:
                pack(parcel, target)
            by_name = {place.host.name: place for place in places}

            def send(host: Host) -> _Place:
                place = by_name[host.name]
                arguments = (parcel.checksum, str(parcel.num_bytes))
                command = self._at(host, place.python, "unisono.machine.shipped", *arguments)
                with archive.open("rb") as source:
                    output, words, code = _run(command, source, SHIP_S)
                for line in output.splitlines():
                    if line.startswith(shipped.MARK):
                        answer = msgspec.json.decode(line.removeprefix(shipped.MARK), type=dict[str, str])
                        if "folder" in answer:
                            return _Place(host, place.python, place.room, answer["folder"], place.reached)
                        raise _Unfit(f"it did not take the folder: {answer['error']}")
                raise _Unfit(why_no_answer(host.name, place.python, code, words or output))

            return _for_all([place.host for place in places], send)

    def _at(self, host: Host, python: str, module: str, *arguments: str) -> tuple[str, ...]:
        """Return the command that runs a module on a machine. Words that any shell there reads alike."""
        return (*self._command, *OPTIONS, host.name, f"exec {shlex.join([python, '-P', '-m', module, *arguments])}")


class _Session:
    """An agent at the other end of ssh."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self._name = name
        self._process = process
        self.pid = process.pid

    @property
    def stdout(self) -> Iterable[str] | None:
        return self._process.stdout

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self) -> int:
        return self._process.wait()

    def terminate(self) -> None:
        """End the standard input of the holder there: it ends all that it holds, and then itself."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.close()

    def explain(self, exit_code: int, last_lines: Sequence[str]) -> str:
        if exit_code == SSH_FAILED:
            cause, line = why_ssh_failed(last_lines)
            if cause == "has lost its connection":
                return f"is out of reach by ssh ({line}); it goes on if it reaches the head"
            return f"could not be started: {self._name} {cause} ({line})"
        if exit_code > 128:
            return exit_words(128 - exit_code)
        return (
            f"is out of reach: its ssh {exit_words(exit_code)}; it goes on if it reaches the head"
            if exit_code < 0
            else ""
        )


class _Unfit(Exception):
    """Why one machine cannot take part."""


def _run(command: Sequence[str], given: bytes | IO[bytes], seconds: float) -> tuple[str, str, int | None]:
    """Run a command; return its standard output, its standard error, and its exit code (None: it took too long)."""
    data, stream = (given, None) if isinstance(given, bytes) else (None, given)
    source = stream if stream is not None else subprocess.PIPE
    try:
        with subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                output, words = process.communicate(data, timeout=seconds)
            except BaseException as error:
                process.kill()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return "", "", None
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from error
    return output.decode(errors="replace"), words.decode(errors="replace"), process.returncode


def _for_all(hosts: Sequence[Host], work: Callable[[Host], _Place]) -> list[_Place]:
    """Do something for all machines at once.

    Raises:
        UsageError: it failed for some; names each of them, with the reason.
    """

    def attempt(host: Host) -> _Place | str:
        try:
            return work(host)
        except _Unfit as reason:
            return str(reason)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(attempt, hosts))
    bad = [f"  {host.name}: {reason}" for host, reason in zip(hosts, found, strict=True) if isinstance(reason, str)]
    if bad:
        which = f"{len(bad)} of {count(len(hosts), 'host')}" if len(hosts) > 1 else "the host"
        verb = "is" if len(bad) == 1 else "are"
        raise UsageError("\n".join([f"{which} {verb} not ready, so nothing was started:", *bad]))
    return [place for place in found if not isinstance(place, str)]


def _ssh_command(remote: Remote) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(remote.ssh))
    except ValueError as error:
        raise UsageError(f"--ssh is a command with options, such as 'ssh -F conf'; {remote.ssh!r}: {error}") from None
    if not words:
        raise UsageError("--ssh is a command with options, such as 'ssh -F conf'; got ''")
    return words


def _environment(names: Sequence[str]) -> dict[str, str]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UsageError(f"--pass-env {missing[0]}: there is no such variable here")
    return {name: os.environ[name] for name in (*VARIABLES, *names) if name in os.environ}
