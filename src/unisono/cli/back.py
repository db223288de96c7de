"""A run that goes back: a worker was found to compute wrong values, and the command starts the run again without it."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.cli.saying import say
from unisono.cluster.launchers import HERE, Machine
from unisono.core.errors import RunGoesBack, UsageError
from unisono.core.words import count, listed
from unisono.record import checkpoint_files as files
from unisono.system.capacity import Workers

__all__ = ["Again", "again", "by_hand"]


@dataclass(frozen=True)
class Again:
    """How the run is started again."""

    changes: dict[str, Any]
    """Of the command line, by the names of its options."""
    dropped: frozenset[str]
    """The machines that take no part, by the names that the launcher has for them."""


def again(back: RunGoesBack, workers: Workers, machines: Sequence[Machine]) -> Again:
    """Return how the run is started again, from before what is to be doubted, and without the faulty machine.

    Where there is only one machine, it goes on with one worker fewer, or one group.

    Args:
        workers, machines: with which it was started.

    Raises:
        UsageError: that cannot be decided here; says what to do.
    """
    if not back.run_dir:
        raise UsageError(
            f"{back}. The run's directory is not on this machine: start the run again with --resume and a checkpoint "
            f"of at most {count(back.steps, 'step')}, without {listed(list(back.hosts))}"
        )
    checkpoint = _checkpoint(back)
    changes = {"resume": str(checkpoint), "overwrite": False, "run_dir": back.run_dir}
    dropped = frozenset(name for label in back.hosts if (name := _name_of(label, machines)) is not None)
    hint = f"start it again without that machine: {_command(checkpoint)}"
    if len(dropped) < len(back.hosts):
        raise UsageError(f"{back}. It is not known which machine {listed(list(back.hosts))} is; {hint}")
    left = [machine for machine in machines if machine.name not in dropped]
    if left:
        say(f"unisono: goes back to {checkpoint.name}, without {listed(list(back.hosts))}", err=True)
        return Again(changes, dropped)
    noun = "worker" if workers.parts == 1 else "group"
    start, least, most = (number // workers.parts for number in (workers.start, workers.minimum, workers.maximum))
    if start < 2:
        raise UsageError(f"{back}. No {noun} is left to continue with; {hint}")
    number = start - 1
    left_over = count(number, noun)
    text = str(number) if workers.grows else f"{min(least, number)}:{max(most - 1, number)}"
    if workers.parts > 1:
        text += f"x{workers.parts}"
        left_over += f" of {workers.parts} workers"
    say(
        f"unisono: goes back to {checkpoint.name}, with {left_over}, on the machine that has "
        "computed wrong values: there is no other one. Test it soon",
        err=True,
    )
    return Again({**changes, "workers": text}, frozenset())


def by_hand(back: RunGoesBack) -> UsageError:
    """Return what to do where this command does not start the run again."""
    return UsageError(
        f"{back}. Start it again from there, without {listed(list(back.hosts))}: "
        f"{_command(back.run_dir or 'DIR')} takes the newest checkpoint from before that"
    )


def _checkpoint(back: RunGoesBack) -> Path:
    """Return the newest checkpoint that is not to be doubted.

    Raises:
        UsageError: there is none. To begin anew would remove the run, which is not decided here.
    """
    known = files.complete(Path(back.run_dir) / files.FOLDER)
    for path in reversed(known):
        if files.step_of(path) <= back.steps:
            return path
    hint = f", or, if you know that the oldest one is right, resume from it: {_command(known[0])}" if known else ""
    raise UsageError(
        f"{back}. There is no such checkpoint in {back.run_dir}, so start over (--overwrite){hint}; without "
        f"{listed(list(back.hosts))}"
    )


def _name_of(label: str, machines: Sequence[Machine]) -> str | None:
    """Return the launcher's name for the machine with this label; None: it cannot be told."""

    def is_host(name: str) -> bool:
        return label == name or label.startswith((f"{name}-", f"{name.split('.')[0]}-"))

    names = [machine.name for machine in machines if machine.name == HERE or is_host(machine.name)]
    if is_host(socket.gethostname()):
        return HERE if HERE in names else next((name for name in names if is_host(name)), None)
    others = [machine.name for machine in machines if machine.name != HERE]
    named = [name for name in names if name != HERE]
    if len(named) == 1:
        return named[0]
    return others[0] if len(others) == 1 and not named else None


def _command(place: object) -> str:
    return shlex.join(["unisono", "run", "--resume", str(place)])
