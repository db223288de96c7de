"""Every error that Unisono raises. The class says what to do about it::

    UnisonoError
    +-- UsageError            change the script or the command        (also a ValueError)
    |   +-- RecipeError       batch, micro-batches, seed, data do not fit together
    |   +-- StepError         the inner loop does something that only one worker would have
    |   +-- LossError         the loss of one micro-batch is not finite, or no scalar, or has no gradient
    |   +-- RunDirectoryError the directory belongs to another run
    +-- DivergenceError       workers have different bits: find out which line of the script, or which machine, differs
    +-- PeerLost              a member is lost; nothing was applied; call again in the next generation
    +-- RunStopped            the run was ended from outside; leave the script, there is nothing to repair
    +-- CheckpointError       a checkpoint is broken, missing, or could not be written
    +-- StateLost             all workers that held a part of a sharded state are lost; go on from a checkpoint
    +-- RunGoesBack           a machine computes wrong values: go on from an earlier checkpoint without it
    +-- LaunchError           the workers of `unisono.launch` failed; the message has the worker's traceback
    +-- ProtocolError         a message over a connection was not allowed; all machines need one version of unisono
    +-- DeadlineExceeded      a wait took longer than its deadline

Messages say what happened, the numbers, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "DeadlineExceeded",
    "DivergenceError",
    "LaunchError",
    "LossError",
    "PeerLost",
    "ProtocolError",
    "RecipeError",
    "RunDirectoryError",
    "RunGoesBack",
    "RunStopped",
    "StateLost",
    "StepError",
    "UnisonoError",
    "UsageError",
]


class UnisonoError(Exception):
    """Base of all errors of this library."""


class UsageError(UnisonoError, ValueError):
    """The script or the command asks for something that cannot be done. Change the script or the command."""


class RecipeError(UsageError):
    """Batch size, micro-batches, seed or data do not fit together. Nothing was trained."""


class StepError(UsageError):
    """The inner loop of a step was not used as it must be, or left something behind that only this worker has."""


class LossError(UsageError):
    """The loss of one micro-batch cannot be trained on. The message names the step and the micro-batch.

    Args:
        microbatch: whose loss is not finite; -1: something else is wrong.
    """

    def __init__(self, message: str = "", *, microbatch: int = -1) -> None:
        super().__init__(message)
        self.microbatch = microbatch


class RunDirectoryError(UsageError):
    """The run directory belongs to another run. Nothing in it was changed."""


class DivergenceError(UnisonoError):
    """Workers have different values where they must have the same bits, so the run cannot go on.

    Either the script does something that depends on the worker, or a machine computes wrongly. The message names the
    value that differs, and the workers.

    Args:
        sound: a checkpoint of more steps of the run may hold wrong values; 0: nothing is known of any; -1: none does.
        goes_on: it is this worker alone that differs, and it has joined last: the others go on without it.
    """

    def __init__(self, message: str = "", *, sound: int = 0, goes_on: bool = False) -> None:
        super().__init__(message)
        self.sound = sound
        self.goes_on = goes_on


class _AboutPeers(UnisonoError):
    """Base of errors that other members may have caused.

    Args:
        peers: the ids of the workers that were waited for, or are lost, as far as they are known.
    """

    def __init__(self, message: str = "", peers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class PeerLost(_AboutPeers):
    """A member of the generation is lost. Nothing was applied."""


class RunStopped(UnisonoError):
    """The run was ended from outside. The message is the reason."""


class StopInspection(RunStopped):
    """An inspector has ended the run that it inspects (`unisono.script.inspecting`). The message says why.

    Args:
        code: exit code of the process, where the script runs alone.
    """

    def __init__(self, message: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class CheckpointError(UnisonoError):
    """A checkpoint is broken or missing, or could not be written. The message names it, and says what is wrong."""


class StateLost(UnisonoError):
    """All workers that held a part of the state of a sharded optimizer are lost. The message names the checkpoint from
    which the run can go on.
    """


class RunGoesBack(UnisonoError):
    """A worker computes wrong values, and what the run has done since that worker was last right is to be doubted.

    Args:
        reason: which worker, and how it was found.
        run_dir: directory of the run; "": it has none, or it is not on this machine.
        steps: a checkpoint of more steps may hold wrong values.
        hosts: labels of the machines that are to take no part any more.
    """

    def __init__(self, reason: str, run_dir: str, steps: int, hosts: Sequence[str]) -> None:
        super().__init__(reason)
        self.run_dir = run_dir
        self.steps = steps
        self.hosts = tuple(hosts)


class LaunchError(UnisonoError):
    """The workers of `unisono.launch` failed. The message holds the reason and the worker's traceback."""

    def __init__(self, reason: str, traceback: str, exit_code: int) -> None:
        super().__init__(f"{reason}\n\n{traceback}" if traceback else reason)
        self.reason = reason
        self.traceback = traceback
        self.exit_code = exit_code


class ProtocolError(UnisonoError):
    """A message was not what the protocol allows. The connection is closed."""


class DeadlineExceeded(_AboutPeers, TimeoutError):
    """A wait took longer than its deadline."""
