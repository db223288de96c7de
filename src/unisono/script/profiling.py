"""torch.profiler on all workers for some steps of a run, as one trace."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from unisono.core.clocks import Meeting, offset
from unisono.core.errors import UsageError
from unisono.engine.rounds.clock import Clock
from unisono.engine.rounds.gathering import together
from unisono.engine.rounds.life import Rounds
from unisono.record.traces import ABOUT, About, TracePart, part_name
from unisono.system.controlgroups import machine_name
from unisono.system.process import tell

__all__ = ["FOLDER", "Profiling"]

FOLDER: Final = "profile"
LOG_LEVEL: Final = "KINETO_LOG_LEVEL"
MEETINGS: Final = 8
MOST_BYTES: Final = 32 << 20
"""Of a compressed trace that travels to the worker that writes."""
PATIENCE_S: Final = 120.0


class _Sent(msgspec.Struct, frozen=True):
    """What a worker tells the others about its trace."""

    worker_id: str
    host: str
    clock: str
    """Equal for workers that have the same clock."""
    pid: int
    meetings: list[Meeting]
    trace: bytes
    """Empty where the worker has written it into the run's directory, or it is too large to travel."""
    num_bytes: int
    sees: bool
    """The worker sees the run's directory: the first one that does writes for all."""


class Profiling:
    """Profiles this worker for some steps, and brings the traces of all workers together.

    Args:
        steps: of the run.
        directory: of the run.

    Raises:
        UsageError: the steps are none, or there is no directory.
    """

    def __init__(self, steps: range, directory: Path | None, device: torch.device) -> None:
        if not 0 <= steps.start < steps.stop or steps.step != 1:
            raise UsageError(f"steps to profile are A:B, from step A up to, but not including, step B; got {steps}")
        if directory is None:
            raise UsageError("a profile needs the directory of the run: unisono.Run(directory), or --run-dir")
        self._steps = steps
        self._directory = directory
        self._device = device
        self._profiler: Any = None
        self._sets_level = LOG_LEVEL not in os.environ
        self._clock: Clock | None = None
        self._marks: list[Any] = []  # the step, and the part of it
        self._is_done = False
        self._merging: subprocess.Popen[bytes] | None = None

    def step_begins(self, step: int, clock: Clock) -> None:
        """Begin to profile, if it is time; mark the step. Local."""
        if self._is_done or step not in self._steps:
            return
        if self._profiler is None:
            activities = torch.profiler.supported_activities()
            if self._device.type == "cpu":
                activities = {torch.profiler.ProfilerActivity.CPU}
                if self._sets_level:
                    os.environ[LOG_LEVEL] = "6"  # or it tells every user that it begins, and ends
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        self._mark(f"step {step}")
        self._clock = clock
        clock.on_switch = self._part_begins

    def step_ends(self, step: int, rounds: Rounds, *, sees: bool) -> None:
        """End the step's mark, and after the last step bring the traces together. Collective in that step."""
        if self._is_done or step not in self._steps:
            return
        self._unmark()
        if step == self._steps[-1]:
            self._finish(rounds, step + 1, sees=sees)

    def run_ends(self, num_steps: int, rounds: Rounds, *, sees: bool) -> None:
        """Bring the traces together if the run ends before the last step that was to be profiled. Collective then."""
        if self._is_done:
            return
        if num_steps - 1 in self._steps:
            self._finish(rounds, num_steps, sees=sees)
        elif rounds.team.rank == 0 and num_steps <= self._steps.start:
            tell(
                f"unisono: the run has ended after {num_steps} steps, so there is no profile of the steps "
                f"{self._steps.start} to {self._steps[-1]}"
            )

    def close(self) -> None:
        """Stop, and wait for the trace."""
        self._unmark()
        if self._sets_level:
            os.environ.pop(LOG_LEVEL, None)
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            with contextlib.suppress(RuntimeError):
                profiler.stop()
        merging, self._merging = self._merging, None
        if merging is not None:
            try:
                merging.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                merging.kill()
                merging.wait()
                tell(f"unisono: the profile was not written within {PATIENCE_S:.0f} s after the end of the run")

    # -- marks ---------------------------------------------------------------------------------------

    def _part_begins(self, part: str) -> None:
        if len(self._marks) > 1:
            self._marks.pop().__exit__(None, None, None)
        self._mark(part)

    def _mark(self, name: str) -> None:
        mark = torch.profiler.record_function(name)
        mark.__enter__()
        self._marks.append(mark)

    def _unmark(self) -> None:
        if self._clock is not None:
            self._clock.on_switch = None
        while self._marks:
            self._marks.pop().__exit__(None, None, None)

    # -- together ------------------------------------------------------------------------------------

    def _finish(self, rounds: Rounds, stop: int, *, sees: bool) -> None:
        self._is_done = True
        team = rounds.team
        worker_id = team.worker_ids[team.rank]
        name = f"steps-{self._steps.start}-{stop}"
        folder = (self._directory / FOLDER / f".{name}").absolute()
        with team.waiting():  # for the profiler and a disk, which is nobody's fault
            trace, num_bytes = self._export(folder / part_name(worker_id) if sees else None)
        meetings = list(self._meet(rounds))
        own = _Sent(worker_id, socket.gethostname(), machine_name(), os.getpid(), meetings, trace, num_bytes, sees)
        received = [
            msgspec.msgpack.decode(payload, type=_Sent)
            for payload in together(rounds, lambda: None, msgspec.msgpack.encode(own)).values()
        ]
        if worker_id == next((each.worker_id for each in received if each.sees), ""):
            self._write(folder, About(first=self._steps.start, stop=stop, parts=_parts(received)), received)

    def _export(self, path: Path | None) -> tuple[bytes, int]:
        """Write this worker's trace to ``path``. Without one, return its bytes, if they are not too many.

        Returns:
            Them, else nothing; and the size of the trace.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:  # a worker that has joined after the last step
            return b"", 0
        profiler.stop()
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(os.fspath(path))
                return b"", path.stat().st_size
            with tempfile.TemporaryDirectory(prefix="unisono-profile-") as folder:
                scratch = Path(folder) / "trace.json.gz"
                profiler.export_chrome_trace(os.fspath(scratch))
                size = scratch.stat().st_size
                return (scratch.read_bytes() if size <= MOST_BYTES else b""), size
        except OSError as error:
            tell(f"unisono: the profile of this worker could not be written: {error}; the run continues")
            return b"", 0

    def _meet(self, rounds: Rounds) -> Iterator[Meeting]:
        for _ in range(MEETINGS):
            came = time.time()
            together(rounds, lambda: None)
            yield came, time.time()

    def _write(self, folder: Path, about: About, received: list[_Sent]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for each in received:
                path = folder / part_name(each.worker_id)
                if each.trace:
                    path.write_bytes(each.trace)
                elif each.num_bytes > MOST_BYTES and not path.exists():
                    mib = each.num_bytes / 2**20
                    tell(
                        f"unisono: the profile of worker {each.worker_id} on {each.host} is left out: it has "
                        f"{mib:.0f} MiB, and at most {MOST_BYTES >> 20} MiB travel between machines; profile fewer "
                        "steps, or name a --run-dir that all machines see"
                    )
            (folder / ABOUT).write_bytes(msgspec.json.encode(about))
            target = folder.with_name(f"{folder.name.removeprefix('.')}.json.gz")
            command = [sys.executable, "-P", "-m", "unisono.record.traces", os.fspath(folder), os.fspath(target)]
            self._merging = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            tell(f"unisono: the profile could not be written: {error}; the run continues")


def _parts(received: list[_Sent]) -> list[TracePart]:
    """Return the workers, with their clocks compared to that of the first one."""
    first, parts = received[0], []
    for each in received:
        ahead, error = (0.0, 0.0) if each.clock == first.clock else offset(first.meetings, each.meetings)
        parts.append(TracePart(worker_id=each.worker_id, host=each.host, pid=each.pid, ahead_s=ahead, error_s=error))
    return parts
