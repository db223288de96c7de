"""Launcher: starts agents on other machines (by ssh, srun, mpirun, Ray, Kubernetes ...).

The command that starts a run keeps the head. Where `Launcher.machines` names `HERE`, the command also starts workers on
its own machine. On every other machine the launcher starts an agent, which is ``unisono join``::

    command (head, agent of HERE)  --Launcher.start-->  agent on machine a  -->  its workers
                                   --Launcher.start-->  agent on machine b  -->  its workers

An agent reads the invitation (`unisono.cluster.trust.invitation`) from its standard input, so the token is on no
command line and in no environment. The standard input then stays open: at its end the agent ends its workers and
itself. So no process outlives a command that was killed, if the launcher passes on the end of the pipe (``srun`` and
``mpirun`` do so; for ``ssh`` there is `unisono.cluster.machine.holder`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec
from unisono.system.capacity import Workers
from unisono.system.tasks import FIRST_SPECIAL_STEP

__all__ = [
    "HERE",
    "RAY_JOB",
    "AgentCommand",
    "Handle",
    "Kind",
    "Launcher",
    "Machine",
    "Request",
    "in_allocation",
    "in_ray_job",
    "names_hosts",
]

HERE: Final = ""
"""Name of the machine that the command runs on: its workers need no other agent."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line asks of a launcher."""

    workers: Workers
    """The value of ``--workers``."""
    environment: Mapping[str, str]
    """That of the command: a batch system says there what it has given to the job."""
    spec: RunSpec = RunSpec()
    bind: str = ""
    """The address at which the head is to listen; "" where the user has not said it (`Launcher.bind`)."""
    port: int = 0
    """The head's port; 0 for any."""

    @property
    def settings(self) -> RunSettings:
        """The settings of the run."""
        return self.spec.settings


RAY_JOB: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets this variable for the command of ``ray job submit``."""


def names_hosts(request: Request) -> bool:
    """Return whether a command line names machines."""
    return bool(request.settings.hosts or request.settings.hostfile)


def in_allocation(request: Request) -> bool:
    """Return whether this is a batch script or a shell in an allocation of Slurm, and no task of ``srun``."""
    environment = request.environment
    step = environment.get("SLURM_STEP_ID", "")
    is_task = step.isdecimal() and int(step) < FIRST_SPECIAL_STEP
    return "SLURM_JOB_ID" in environment and "SLURM_JOB_NODELIST" in environment and not is_task


def in_ray_job(request: Request) -> bool:
    """Return whether the command runs in a job of Ray."""
    return RAY_JOB in request.environment


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


class Handle(ABC):
    """An agent that was started. It belongs to the event loop: nothing blocks, or calls back in another thread."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """None while the agent runs; negative: killed by that signal."""

    @abstractmethod
    def follow(self, on_line: Callable[[str], None], on_end: Callable[[int], None]) -> None:
        """Have these called from now on. Called once, right after the start.

        Args:
            on_line: receives each line that the agent prints, its standard error included.
            on_end: receives the exit code, after the last line.
        """

    @abstractmethod
    def terminate(self) -> None:
        """Ask the agent to end its workers and itself; does not wait."""

    @abstractmethod
    async def close(self) -> None:
        """End the agent by force, if it still runs."""

    def explain(self, exit_code: int, last_lines: Sequence[str]) -> str:
        """Return how the agent has ended, as a predicate that follows its name; "" for the usual words.

        Args:
            last_lines: what the agent has printed last.
        """
        return ""


class Launcher(ABC):
    """Starts agents on machines. Derive a class, and add a row to `unisono.cluster.launchers.LAUNCHERS`.

    Two methods are a launcher: `machines` and `start`. The machines that it has named are kept: where an
    agent is lost, `start` is called for its machine again, after a pause (`unisono.cluster.launchers.fleet`).
    """

    is_elastic = False
    """It can get more machines, and give machines back, while the run goes on: by its own `ensure`."""

    @abstractmethod
    def machines(self) -> Sequence[Machine]:
        """Return the machines of the run, with unique names. Called once."""

    @abstractmethod
    def start(self, machine: Machine, command: AgentCommand) -> Handle:
        """Start an agent on a machine other than `HERE`; do not wait until it is up. Called in the event loop.

        Raises:
            UsageError: the agent cannot be started; says why, and what to do.
        """

    def close(self) -> None:  # noqa: B027 - most launchers have nothing but their agents
        """Free the resources of the launcher, if it has any. The run is over, and every agent's handle was closed."""

    def bind(self) -> str:
        """Return the address at which the head is to listen, if the user has not said it; "": the launcher does not
        know better. Called after `machines`.
        """
        return ""

    def ensure(self, num_workers: int, lost: Sequence[Machine]) -> Sequence[Machine]:
        """Return machines for which `start` is to be called now.

        Called every few seconds, and whenever something changes, in a thread of its own, never twice at the same time.
        Do not block for long: where machines are not there yet, ask for them and return those that are.

        Args:
            num_workers: for a launcher that is elastic, how many workers the run wants in all, those of `HERE`
                included. ``unisono scale`` and ``--set efficiency`` change it. What is too much need not be ended:
                agents without wanted workers end by themselves, with exit code 0. A request for machines that have not
                come yet is to be taken back here. Further machines have names that were not used before.
            lost: machines whose agent was lost, and whose pause is over.
        """
        return lost


class Kind(msgspec.Struct, frozen=True):
    """One row of `unisono.cluster.launchers.LAUNCHERS`."""

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
