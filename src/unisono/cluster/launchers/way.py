"""The way to other machines: the system's ``ssh``, with the user's keys, configuration and jump hosts.

`Way.ask` sends a program to the Python of a machine, which says what is there (`unisono.cluster.launchers.probe`): a
launcher asks before a run, the doctor before its own questions.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Final, TypeVar

import msgspec

from unisono.cluster.launchers import probe
from unisono.core.errors import UsageError
from unisono.core.words import exit_words
from unisono.system.fingerprint import package_checksum
from unisono.system.lifetime import Done, run_bound

__all__ = [
    "OPTIONS",
    "SSH_FAILED",
    "VERSION",
    "Answer",
    "Unfit",
    "Way",
    "call",
    "for_all",
    "why_no_answer",
    "why_ssh_failed",
]

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
VERSION: Final[str] = importlib.import_module("unisono").__version__
SSH_FAILED: Final = 255
"""ssh's own exit code; a holder never ends with it."""
NOT_FOUND: Final = 127

_CAUSES: Final = (
    (r"client_loop|read from remote host|closed by remote|not responding", "has lost its connection"),
    (r"permission denied|too many authentication", "refuses the key of this user"),
    (r"host key verification failed|identification has changed", "has an unknown or a changed host key"),
    (r"could not resolve|connection refused|timed out|no route|unreachable|banner exchange", "cannot be reached"),
    (r"closed by|broken pipe|reset by|connection abort|connection closed", "has lost its connection"),
)
_ADVICE: Final = {
    "refuses the key of this user": "`ssh-copy-id {name}`, or an agent (`ssh-add`): ssh must not have to ask",
    "has an unknown or a changed host key": "run `ssh {name}` once by hand and check the key",
    "cannot be reached": "see `ssh {name}`, and the name, port and jump host in the configuration of ssh",
}


class Answer(msgspec.Struct, frozen=True):
    """What `probe.answer` returns."""

    python: tuple[int, int, int]
    executable: str
    host: str
    unisono: str = ""
    has_source: bool = False
    torch: str = ""
    arithmetic: dict[str, str] = {}
    error: str = ""
    room: int = 0
    has_folder: bool = False
    script: str = ""
    has_tree: bool = False
    copy: str = ""
    reached: tuple[str, ...] = ()

    def why_not(self, python: str) -> str:
        """Return why the Python there cannot run an agent; "" if it can."""
        version = ".".join(map(str, self.python))
        other = "name another interpreter with --set remote-python=PATH"
        if self.python < (3, 11, 0):
            return f"{python} is Python {version} there, and Unisono needs at least 3.11; {other}"
        if not self.unisono:
            return f"{python} has no unisono there ({self.error}); install version {VERSION}, or {other}"
        if self.unisono != VERSION:
            return f"{python} has unisono {self.unisono} there, and this is {VERSION}; install the same version"
        if not self.has_source:
            return (
                f"{python} has another unisono {self.unisono} there than this one (its source differs); update both to "
                "the same commit"
            )
        if not self.torch:
            return f"{python} has no torch there ({self.error}); install it, or {other}"
        return ""


def why_ssh_failed(lines: Sequence[str]) -> tuple[str, str]:
    """Return what ssh's own words mean, as a predicate that follows the name of a machine, and the line that says so.

    Args:
        lines: the last lines of its output.
    """
    for line in reversed(lines):
        for pattern, meaning in _CAUSES:
            if re.search(pattern, line, re.IGNORECASE):
                return meaning, line.strip()
    said = [line.strip() for line in lines if line.strip()]
    return "has lost its connection", said[-1] if said else "ssh printed nothing"


def why_no_answer(name: str, python: str, code: int | None, output: str) -> str:
    """Return why a program on a machine has not said what it was to say.

    Args:
        code: the exit code of ssh; None if it took too long.
        output: what was printed, to standard error if there was something.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "nothing was printed"
    if code is None:
        return f"it did not answer in time; see `ssh {name}`"
    if code == SSH_FAILED:
        cause, line = why_ssh_failed(lines)
        advice = _ADVICE.get(cause, "").format(name=name)
        return f"it {cause} ({line}){'; ' + advice if advice else ''}"
    if code == NOT_FOUND or "not found" in last.lower() or "no such file" in last.lower():
        return (
            f"there is no {python} there ({last}); install Python with unisono {VERSION} at the same path, "
            "or say where it is with --set remote-python=PATH"
        )
    return f"{python} there {exit_words(code)}: {last}"


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
