"""Runs of a script in tests, and the faults that happen to their workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from unisono.record.journal import JOURNAL, read
from unisono.record.journal.times import by_step
from unisono.system.faults import ENVIRONMENT, POINTS, VALUES, Fault, encode
from unisono.system.lifetime import PARENT

__all__ = ["POINTS", "VALUES", "Faults", "Outcome", "flip_bit", "run_workers"]

STOP_S: Final = 10.0


class Faults:
    """What shall happen to which worker, at which point. Each call adds one fault and returns a new `Faults`.

    Workers are named by their id: ``w0``, ``w1`` ... in the order of their start (at first also their rank); a
    replacement has an id of its own. ``at`` is one of `POINTS`. ``step`` is counted from 0 over the whole run, as in
    the journal, however often the script calls ``run.steps``; ``microbatch`` is counted from 0 within its step; -1:
    any. ``skip`` is how often the worker passes by that point before: 1 for the second pass over a batch
    (``step.again``). A fault happens once in a worker's life.

    Raises:
        ValueError: there is no such point, or no such value to corrupt.
    """

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self.faults = tuple(faults)

    def kill(self, worker: str, *, at: str, step: int = -1, microbatch: int = -1, skip: int = 0) -> Faults:
        """SIGKILL: no handler runs, nothing is closed."""
        return self._and(Fault(action="kill", worker=worker, at=at, step=step, microbatch=microbatch, skip=skip))

    def kill_run(self, worker: str, *, at: str, step: int = -1, microbatch: int = -1, skip: int = 0) -> Faults:
        """SIGKILL to the command and to this worker; the others follow, because nobody outlives the command."""
        return self._and(Fault(action="kill_run", worker=worker, at=at, step=step, microbatch=microbatch, skip=skip))

    def stop(self, worker: str, *, at: str, step: int = -1, microbatch: int = -1, skip: int = 0) -> Faults:
        """SIGSTOP: the process is there and does nothing any more, heartbeats included."""
        return self._and(Fault(action="stop", worker=worker, at=at, step=step, microbatch=microbatch, skip=skip))

    def delay(
        self, worker: str, seconds: float, *, at: str, step: int = -1, microbatch: int = -1, skip: int = 0
    ) -> Faults:
        """The main thread sleeps for so many seconds; the heartbeats go on."""
        return self._and(
            Fault(action="delay", worker=worker, at=at, step=step, microbatch=microbatch, skip=skip, seconds=seconds)
        )

    def fail(self, worker: str, *, at: str, step: int = -1, microbatch: int = -1, skip: int = 0) -> Faults:
        """An exception, as if the script had raised it there."""
        return self._and(Fault(action="fail", worker=worker, at=at, step=step, microbatch=microbatch, skip=skip))

    def corrupt(
        self,
        worker: str,
        value: str,
        *,
        step: int = -1,
        microbatch: int = -1,
        bit: int = 12,
        lasting: bool = False,
        every: int = 1,
    ) -> Faults:
        """The worker computes or stores a wrong value: one bit of it is another (``unisono run --audit`` finds it).

        Args:
            value: one of `VALUES`.
            bit: of the first number; of a float32, 0 is the least one of its fraction and 31 its sign.
            lasting: not once, but from then on each time.
            every: of a lasting one: not each time, but every so many times, as a fault that comes and goes.
        """
        if value not in VALUES:
            raise ValueError(f"there is no value {value!r} to corrupt; there are {', '.join(VALUES)}")
        return Faults(
            (
                *self.faults,
                Fault(
                    action="corrupt",
                    worker=worker,
                    at=value,
                    step=step,
                    microbatch=microbatch,
                    bit=bit,
                    is_lasting=lasting,
                    every=every,
                    skip=every - 1,
                ),
            )
        )

    def environment(self) -> dict[str, str]:
        """What arms the workers of a command that inherits it."""
        return {ENVIRONMENT: encode(list(self.faults))} if self.faults else {}

    def _and(self, fault: Fault) -> Faults:
        if fault.at not in POINTS:
            raise ValueError(f"there is no fault point {fault.at!r}; there are {', '.join(POINTS)}")
        return Faults((*self.faults, fault))


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    exit_code: int
    output: str
    """Standard output and error of the command."""
    lines: list[dict[str, Any]] = field(repr=False)
    """The journal."""
    times: dict[int, dict[str, dict[str, float | None]]] = field(default_factory=dict, repr=False)
    """By step, what each worker's time went into: `unisono.record.journal.times.by_step`."""

    @property
    def digests(self) -> list[str]:
        """Of each step's gradient, in the order of the steps."""
        return [line["digest"] for line in self.lines if line["kind"] == "step"]

    @property
    def final(self) -> dict[str, str]:
        """Digests of the tracked objects at the end; empty if the run failed."""
        ends = [line for line in self.lines if line["kind"] == "end"]
        return dict(ends[-1]["digests"]) if ends else {}

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The totals of each evaluation."""
        return [line["totals"] for line in self.lines if line["kind"] == "evaluation"]

    @property
    def generations(self) -> list[int]:
        """The generation in which each step was committed."""
        return [line["generation"] for line in self.lines if line["kind"] == "step"]


def flip_bit(file: str | os.PathLike[str], bit: int = 0) -> None:
    """Change one bit in the middle of a file, as a disk that rots does.

    Args:
        bit: 0 to 7, of the byte in the middle.
    """
    with Path(file).open("r+b") as opened:
        middle = opened.seek(0, os.SEEK_END) // 2
        opened.seek(middle)
        (byte,) = opened.read(1)
        opened.seek(middle)
        opened.write(bytes([byte ^ 1 << bit]))


def run_workers(
    script: str | os.PathLike[str],
    workers: int | str,
    *,
    directory: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    options: Sequence[str] = (),
    faults: Faults | None = None,
    timeout_s: float = 120.0,
) -> Outcome:
    """Run a script under ``unisono run`` and wait for its end; it ends when this process does.

    Args:
        workers: as after ``--workers``.
        directory: of the run; must not hold another.
        arguments: of the script.
        options: further options of ``unisono run``.
        faults: what shall happen on the way.
        timeout_s: then every process of the run is ended.

    Raises:
        TimeoutError: it took longer; the message has the output.
    """
    command = [sys.executable, "-m", "unisono", "run", "--workers", str(workers), "--run-dir", os.fspath(directory)]
    command += [*options, os.fspath(script), "--", *arguments]
    environment = {**os.environ, **(faults.environment() if faults is not None else {}), PARENT: str(os.getpid())}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, errors="replace"
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as expired:
        output = _end(process)
        words = " ".join(command)
        raise TimeoutError(f"{words} took longer than {timeout_s:.0f} s; its output:\n{output}") from expired
    finally:
        if process.poll() is None:
            _end(process)
    journal = Path(directory) / JOURNAL
    lines = list(read(journal)) if journal.exists() else []
    return Outcome(process.returncode, output, lines, by_step(Path(directory)))


def _end(process: subprocess.Popen[str]) -> str:
    """Returns what it has said."""
    process.send_signal(signal.SIGTERM)
    try:
        output, _ = process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return output
