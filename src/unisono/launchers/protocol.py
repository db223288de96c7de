"""Launcher: starts agents on other machines (by ssh, srun, mpirun, Ray, Kubernetes ...).

The command that starts a run keeps the head. Where `Launcher.machines` names `HERE`, the command also starts workers on
its own machine. On every other machine the launcher starts an agent, which is ``unisono join``::

    command (head, agent of HERE)  --Launcher.start-->  agent on machine a  -->  its workers
                                   --Launcher.start-->  agent on machine b  -->  its workers

An agent reads the invitation (`unisono.invitation`) from its standard input, so the token is on no command line and in
no environment. The standard input then stays open: at its end the agent ends its workers and itself. So no process
outlives a command that was killed, if the launcher passes on the end of the pipe (``srun`` and ``mpirun`` do so; for
``ssh`` there is `unisono.machine.holder`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

import msgspec

from unisono.capacity import Workers
from unisono.spec import RunSpec

__all__ = [
    "HERE",
    "AgentCommand",
    "Elastic",
    "Explained",
    "Handle",
    "Kind",
    "Launcher",
    "Machine",
    "Reached",
    "Remote",
    "Request",
]

HERE: Final = ""
"""Name of the machine that the command runs on: its workers need no other agent."""


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line says of machines that are reached by ssh."""

    hosts: str = ""
    hostfile: str = ""
    ssh: str = "ssh"
    """The command, with options."""
    python: str = ""
    """The interpreter there; "": at the same path as here."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that are passed on."""
    ship: bool = False
    """Send the run's folder to machines that lack it."""
    ship_mb: float = 100.0
    """Largest size of the folder."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line asks of a launcher."""

    workers: Workers
    """The value of ``--workers``."""
    threads: int
    """CPU threads of a worker."""
    environment: Mapping[str, str]
    """That of the command: a batch system says there what it has given to the job."""
    launcher: str = "auto"
    """A name in `unisono.launchers.LAUNCHERS`, or "auto"."""
    takes_all: bool = False
    """``--workers auto``: as many workers as the machines have room for."""
    spec: RunSpec = RunSpec()
    bind: str = ""
    """The address at which the head is to listen; "" where the user has not said it (`Reached`)."""
    port: int = 0
    """The head's port; 0 for any."""
    allow_different_script: bool = False
    remote: Remote = Remote()


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that takes part in a run from its beginning."""

    name: str
    num_workers: int


class AgentCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The command of an agent. Its first line of standard input is ``secret``; the standard input is then kept open."""

    words: tuple[str, ...]
    """The command, for `subprocess.Popen` or, quoted, for a shell."""
    secret: str

    def __repr__(self) -> str:
        return f"AgentCommand({self.words!r})"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("words", self.words)]


class Handle(Protocol):
    """An agent that was started. A `subprocess.Popen` with ``text=True`` is one."""

    @property
    def stdout(self) -> Iterable[str] | None:
        """The lines that the agent prints, its standard error included. Read once, in a thread; ends with the agent."""

    def poll(self) -> int | None:
        """Return the exit code; None while the agent runs."""

    def wait(self) -> int:
        """Block until the agent has ended; return its exit code."""

    def terminate(self) -> None:
        """Ask the agent to end (SIGTERM); does not wait."""


class Launcher(Protocol):
    """Starts agents on machines. Implement this protocol and add a row to `unisono.launchers.LAUNCHERS`."""

    def machines(self) -> Sequence[Machine]:
        """Return the machines of the run, with unique names. Called once."""

    def start(self, machine: Machine, command: AgentCommand) -> Handle:
        """Start an agent on a machine other than `HERE`; do not wait until it is up.

        Raises:
            UsageError: the agent cannot be started; says why, and what to do.
        """

    def close(self) -> None:
        """End every agent that still runs, and free all resources of the launcher. The run is over."""


@runtime_checkable
class Elastic(Protocol):
    """A `Launcher` that can get more machines, and give machines back, while the run goes on. Optional.

    ``unisono scale`` and ``--efficiency`` change the number of workers that the run wants; the command tells the
    launcher. Where a machine's workers are all sent away, its agent ends with exit code 0: the machine is free.
    """

    def resize(self, num_workers: int) -> Sequence[Machine]:
        """Get machines for ``num_workers`` workers of the whole run; called whenever the wanted number changes.

        Called in a thread of its own, never twice at the same time. Do not block for long: where machines are not there
        yet, ask for them and return those that are; `resize` is called again every few seconds, with the same number,
        as long as the run goes on.

        Args:
            num_workers: how many workers the run wants in all from now on, those of `HERE` included. More or fewer than
                before, or the same.

        Returns:
            Further machines, with names that were not used before; `start` is called for each of them now. What is too
            much need not be ended: agents without wanted workers end by themselves, and the launcher sees that by their
            handles. A request for machines that have not come yet is to be taken back here.
        """


@runtime_checkable
class Reached(Protocol):
    """A `Launcher` that knows at which address its machines reach this one. Optional."""

    def bind(self) -> str:
        """Return the address at which the head is to listen, if the user has not said it. Called after `machines`."""


@runtime_checkable
class Explained(Protocol):
    """A `Handle` that can say in words how its agent has ended. Optional."""

    def explain(self, exit_code: int, last_lines: Sequence[str]) -> str:
        """Return a predicate that follows the name of the agent, with the cause; "" for the usual words.

        Args:
            last_lines: what the agent has printed last.
        """


class Kind(msgspec.Struct, frozen=True):
    """One row of `unisono.launchers.LAUNCHERS`."""

    path: str
    """Module and class of the launcher, ``MODULE:CLASS``, which is made from a `Request`; imported when it is taken."""
    is_asked: Callable[[Request], bool]
    """Whether the request, or the environment that the command runs in, asks for this launcher."""

    def build(self, request: Request) -> Launcher:
        """Make the launcher.

        Raises:
            UsageError: it cannot do what is asked.
        """
        module, _, name = self.path.partition(":")
        launcher: Launcher = getattr(importlib.import_module(module), name)(request)
        return launcher
