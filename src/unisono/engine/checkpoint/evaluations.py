"""Snapshots that wait for an evaluator: models go from a run to evaluators by files, and totals come back by files.

    RUN/evaluations/
        evaluators          each evaluator holds a shared lock of this file as long as it lives
        0000000007/         of evaluation 7: the models, as checkpoints have them (`record.checkpoint_files`)
            order.msgpack   what is to be computed (`EvaluationOrder`)
            claim           locked by the evaluator that computes it, which also touches it while it gets on
            totals.msgpack  what the evaluator has found; or
            failed          why it could not find it

A snapshot and the totals get their names when they are complete. The kernel frees a lock when its process ends, however
that happens: so another evaluator takes what a killed one has left, and a run knows whether there is one at all. A
checkpoint is never older than an evaluation that is under way, so nothing here is needed by a run that goes on from
one: the run that begins or goes on in the directory removes what it finds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from unisono.record import checkpoint_files as files
from unisono.record.rundir import EVALUATIONS
from unisono.system.faults import point
from unisono.system.owned import NotOwned, read_owned, write_whole
from unisono.system.process import tell

__all__ = ["CANNOT", "REFUSED", "EvaluationOrder", "Snapshots", "claimed", "get_on", "give_up", "hand_in", "order_of"]

ORDER: Final = "order.msgpack"
TOTALS: Final = "totals.msgpack"
FAILED: Final = "failed"
CLAIM: Final = "claim"
EVALUATORS: Final = "evaluators"
RETRY_S: Final = 0.02
TRIES: Final = 50
TOUCH_S: Final = 1.0
MOST_WORDS: Final = 300
CANNOT: Final = 1
"""Exit code of an evaluator's script that does not come to the call."""
REFUSED: Final = 2
"""Exit code of one that would compute other bits, from this snapshot and from all others."""


class EvaluationOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What an evaluator is to compute: the totals of one call of ``run.evaluate(..., wait=False)``."""

    number: int
    """Of the evaluation, counted over the run."""
    phases: int
    """Calls of ``run.steps`` that had begun at the call."""
    step: int
    """Of the run, in which the call stands; -1: it stands between two training loops."""
    samples: int
    """Of the dataset that are evaluated."""
    batch_size: int
    number_in_loop: int = 0
    """Of that step within its ``run.steps``."""
    call: int = 0
    """Of the calls of ``run.evaluate`` with ``wait=False`` at this place, from 0."""
    loss: float = 0.0
    """Of that step."""
    totals: bytes = b""
    """`Step.totals` of that step."""
    num_steps: int = 0
    """Steps of the run that were done at the call."""

    @property
    def place(self) -> str:
        """Where the call stands, in words."""
        return f"step {self.step}" if self.step >= 0 else f"the end of training loop {self.phases}"


class Snapshots:
    """The snapshots of a run that wait for an evaluator.

    Args:
        run: directory of the run.
        patience_s: after so long without progress, nobody waits for an evaluator any more.
    """

    def __init__(self, run: Path, patience_s: float) -> None:
        self._folder = run / EVALUATIONS
        self._patience_s = patience_s
        self._progress: dict[int, tuple[float, float]] = {}

    # -- the run -------------------------------------------------------------------------------------

    def has_evaluators(self) -> bool:
        """Return whether an evaluator waits for snapshots of this run, or computes one."""
        with contextlib.suppress(OSError), (self._folder / EVALUATORS).open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back when the file is closed
            except BlockingIOError:
                return True
        return False

    def put(self, order: EvaluationOrder, write: Callable[[Path, Mapping[str, bytes]], None]) -> None:
        """Write a snapshot; it is there with its name, or not at all.

        Args:
            write: writes the models into a directory, and these files.

        Raises:
            OSError: it cannot be written.
        """
        final = self.path(order.number)
        if final.exists():  # by a worker that was lost before the others knew: it has the same bits
            return
        partial = final.with_name(f".{final.name}-{socket.gethostname()}-{os.getpid()}.partial")
        partial.mkdir(parents=True)
        try:
            write(partial, {ORDER: msgspec.msgpack.encode(order)})
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        point("evaluation.written")

    def path(self, number: int) -> Path:
        """Return the directory of a snapshot, which may be gone."""
        return self._folder / f"{number:010d}"

    def outcome(self, number: int) -> bytes | None:
        """Return the totals of an evaluation; empty: no evaluator computes them any more; None: they are on the way."""
        path = self.path(number)
        try:
            return read_owned(path, TOTALS)
        except NotOwned as error:
            tell(f"unisono: {error}: these totals are not used, and the workers compute them")
            return b""
        except OSError:
            pass
        if (path / FAILED).exists() or not self.has_evaluators() or self._stands_still(number):
            return b""
        return None

    def why(self, number: int) -> str:
        """Return in words why no evaluator computes an evaluation."""
        with contextlib.suppress(OSError, NotOwned):
            return read_owned(self.path(number), FAILED).decode(errors="replace")[:MOST_WORDS]
        return "its evaluator makes no progress" if self.has_evaluators() else "there is no evaluator any longer"

    def _stands_still(self, number: int) -> bool:
        """Return whether nobody has got on with an evaluation for a long time, by the clock of this process."""
        claim = self.path(number) / CLAIM
        touched = _modified(claim) or max(map(_modified, self._folder.glob(f"*/{CLAIM}")), default=0.0)
        before, since = self._progress.get(number, (-1.0, 0.0))
        if touched != before:
            self._progress[number] = touched, time.monotonic()
            return False
        return time.monotonic() - since > self._patience_s

    def remove(self, number: int) -> None:
        """Remove the snapshot of an evaluation whose totals all members know, as far as it is still there."""
        self._progress.pop(number, None)
        with contextlib.suppress(OSError):
            files.remove(self.path(number))

    def clear(self) -> None:
        """Remove what an earlier run, or this one before it was killed, has left. Evaluators stay, and so does what is
        no snapshot: the script's user may have a folder of this name.
        """
        digits = "[0-9]" * 10
        left = [path.parent for path in self._folder.glob(f"{digits}/{ORDER}")]
        for path in [*left, *self._folder.glob(f".{digits}.removed"), *self._folder.glob(f".{digits}-*.partial")]:
            shutil.rmtree(path, ignore_errors=True)

    # -- an evaluator --------------------------------------------------------------------------------

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Be an evaluator of the run within the block.

        Raises:
            OSError: the run's directory cannot be written, or its file system has no locks.
        """
        self._folder.mkdir(exist_ok=True)
        with (self._folder / EVALUATORS).open("ab") as file:
            for number in range(TRIES):
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # a worker looks whether there are evaluators, which takes a moment
                    if number + 1 == TRIES:
                        raise
                    time.sleep(RETRY_S)
            yield

    def waiting(self) -> list[Path]:
        """Return the snapshots without totals, the oldest first."""
        found = sorted(self._folder.glob("[0-9]*"))
        return [path for path in found if not (path / TOTALS).exists() and not (path / FAILED).exists()]


@contextmanager
def claimed(snapshot: Path) -> Iterator[bool]:
    """Take a snapshot for the time of the block; gives False if another evaluator has it, or it is gone."""
    with contextlib.ExitStack() as held:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(snapshot / CLAIM, flags, 0o666)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        is_over = (snapshot / TOTALS).exists() or (snapshot / FAILED).exists()  # since it was listed
        if not is_over:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield not is_over


def order_of(snapshot: Path) -> EvaluationOrder:
    """Return what is to be computed of a snapshot.

    Raises:
        NotOwned: another user has written it. OSError, msgspec.MsgspecError: it cannot be read.
    """
    return msgspec.msgpack.decode(read_owned(snapshot, ORDER), type=EvaluationOrder)


def get_on(snapshot: Path) -> None:
    """Note that the evaluator of a snapshot gets on with it. Cheap."""
    if time.time() - _modified(snapshot / CLAIM) >= TOUCH_S:
        with contextlib.suppress(OSError):
            os.utime(snapshot / CLAIM)


def hand_in(snapshot: Path, totals: bytes) -> None:
    """Give the run the totals. Does nothing if the run does not wait for them any more."""
    _leave(snapshot, TOTALS, totals)


def give_up(snapshot: Path, why: str) -> None:
    """Let the workers compute the totals."""
    _leave(snapshot, FAILED, why.encode())


def _leave(snapshot: Path, name: str, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the run has removed the snapshot
        write_whole(snapshot / name, data)


def _modified(path: Path) -> float:
    """Return when a file was changed last; 0: there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
