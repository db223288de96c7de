"""The way to other machines: the system's ``ssh``, with the user's keys, configuration and jump hosts.

`Way.ask` sends a program to the Python of a machine, which says what is there (`unisono.cluster.launchers.probe`): a
launcher asks before a run, the doctor before its own questions.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Final, TypeVar

import msgspec

from unisono.cluster.launchers import probe
from unisono.cluster.launchers.answers import VERSION, Answer, why_no_answer
from unisono.core.errors import UsageError
from unisono.system.fingerprint import package_checksum
from unisono.system.lifetime import Done, run_bound

__all__ = ["OPTIONS", "Unfit", "Way", "call", "for_all"]

T = TypeVar("T")

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
"""Options of ssh. Those of the user's command (`Way.parse`) go before, so they count."""

ASK_S: Final = 60.0
AT_ONCE: Final = 32


class Unfit(Exception):
    """Why one machine cannot take part."""


@dataclass(frozen=True)
class Way:
    """How machines are reached.

    Args:
        ssh: the command, as words.
        python: the interpreter there.
    """

    ssh: tuple[str, ...]
    python: str

    @classmethod
    def parse(cls, ssh: str, python: str = "", *, option: str = "--set ssh") -> Way:
        """Read the command and the interpreter that the user has given.

        Args:
            option: by which the command was given, for an error.

        Raises:
            UsageError: the first one is no command.
        """
        try:
            words = tuple(shlex.split(ssh))
        except ValueError as error:
            raise UsageError(f"{option} is a command with options, such as 'ssh -F conf'; {ssh!r}: {error}") from None
        if not words:
            raise UsageError(f"{option} is a command with options, such as 'ssh -F conf'; got ''")
        return cls(words, python or sys.executable)

    def to(self, name: str, module: str, *arguments: str) -> tuple[str, ...]:
        """Return the command that runs a module on a machine. Words that any shell there reads alike."""
        return self._at(name, shlex.join([self.python, "-P", "-m", module, *arguments]))

    def ask(self, name: str, **question: Any) -> Answer:
        """Return what is on a machine, which has the Unisono and the torch that a run needs.

        Args:
            question: for `probe.answer`, beside the version.

        Raises:
            Unfit: it has not, or does not answer.
        """
        about = {**_NOTHING, **question, "unisono": VERSION, "source": package_checksum()}
        command = self._at(name, f"{shlex.quote(self.python)} -")
        done = call(command, probe.program(about).encode(), ASK_S)
        answer = probe.find_answer(done.output)
        if answer is None:
            raise Unfit(why_no_answer(name, self.python, done.code, done.errors or done.output))
        found = msgspec.convert(answer, Answer)
        if why := found.why_not(self.python):
            raise Unfit(why)
        return found

    def _at(self, name: str, command: str) -> tuple[str, ...]:
        return (*self.ssh, *OPTIONS, name, f"exec {command}")


_NOTHING: Final[Mapping[str, Any]] = {
    "folder": "/",
    "arguments": (),
    "threads": 1,
    "addresses": (),
    "port": 0,
    "secret": "",
    "shipped": None,
    "variables": {},
}


def call(command: Sequence[str], given: bytes | IO[bytes], seconds: float) -> Done:
    """Run ssh.

    Raises:
        UsageError: there is no such program.
    """
    try:
        return run_bound(command, seconds, given=given)
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from error


def for_all(names: Sequence[str], work: Callable[[str], T]) -> dict[str, T | Unfit]:
    """Do something for all machines at once; return the result for each, or why it failed."""

    def attempt(name: str) -> T | Unfit:
        try:
            return work(name)
        except Unfit as reason:
            return reason

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(attempt, names), strict=True))
