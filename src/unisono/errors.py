"""Every error that Unisono raises. The class says what to do about it::

    UnisonoError
    +-- UsageError            change the script or the command        (also a ValueError)
    |   +-- RecipeError       batch, micro-batches, seed, data do not fit together
    |   +-- StepError         the inner loop was used in a way that has no meaning
    |   +-- LossError         the loss of one micro-batch cannot be trained on
    |   +-- RunDirectoryError the directory belongs to another run
    +-- DivergenceError       workers do not agree: find out which step of the script, or which machine, differs
    +-- PeerLost              a member is gone; nothing was applied; call again in the next generation
    +-- RunStopped            somebody ended the run; leave, there is nothing to repair
    +-- CheckpointError       a checkpoint is broken, missing, or could not be written
    +-- LaunchError           the workers of `unisono.launch` failed; the message has the worker's traceback
    +-- ProtocolError         the other side of a connection speaks another language
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
    "RunStopped",
    "StepError",
    "UnisonoError",
    "UsageError",
]


class UnisonoError(Exception):
    """Base of all errors of this library."""


class UsageError(UnisonoError, ValueError):
    """The script or the command asks for something that cannot be done. Change it."""


class RecipeError(UsageError):
    """Batch size, micro-batches, seed or data do not fit together. Nothing was trained."""


class StepError(UsageError):
    """The inner loop of a step was used in a way that has no meaning."""


class LossError(UsageError):
    """The loss of one micro-batch cannot be trained on. Names step and micro-batch."""


class RunDirectoryError(UsageError):
    """The run directory belongs to another run. Nothing in it was changed."""


class DivergenceError(UnisonoError):
    """Workers have other values where they must have the same bits, so the run cannot go on as one.

    Either the script does something that depends on the worker, or a machine computes wrongly. The message names what
    differs, and on which workers.
    """


class _AboutPeers(UnisonoError):
    """An error that other members may be the cause of.

    Args:
        peers: the ids of the workers that were waited for, or are gone, as far as that is known.
    """

    def __init__(self, message: str = "", peers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class PeerLost(_AboutPeers):
    """A member of the generation is gone. Nothing was applied."""


class RunStopped(UnisonoError):
    """The run was ended from outside; the reason is the message."""


class CheckpointError(UnisonoError):
    """A checkpoint is broken or missing, or could not be written. Names it, and what is wrong."""


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
