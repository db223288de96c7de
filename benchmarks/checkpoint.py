"""What a checkpoint costs a training, and how fast it is written and read.

python -m benchmarks.checkpoint                                  # 100 MB and 1 GB
python -m benchmarks.checkpoint --quick --json checkpoint.json   # a few rounds
python -m benchmarks.checkpoint --sizes 100MB --directory /some/disk

One training on one worker, its state as large as it is called. In every round, between ordinary steps, each side
saves the same state to the same disk: this library, ``torch.distributed.checkpoint.async_save``, ``torch.save``; and
two things that nobody can undercut are done with the same bytes: one copy in memory, and one file that is written and
synchronized while the training goes on. So what else happens on the machine hits all alike.

The **stall** is the time that the training loop does not go on. For this library: from the end of one step to the head
of the next, less that of an ordinary step, and what the next step's end waited for the copy. For the others: their
call. What the threads of both cost the step after is shown by itself. ``resume`` is from the call of ``run.steps`` to
its first step; ``read`` is reading the same files into new memory. Before both, the system is asked to forget them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from benchmarks.report import median_interval, print_table, write_json
from unisono.engine.state.packing import pack
from unisono.record import checkpoint_files as files
from unisono.record.journal import read

SIZES = {"100MB": 100 * 10**6, "1GB": 10**9}
ROUNDS = {"quick": 4, "full": 10}
WIDTH = 1024
WRITE_BYTES = 1 << 24


@dataclass
class Times:
    """Seconds, one for each round."""

    copy: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    dcp: list[float] = field(default_factory=list)
    dcp_done: list[float] = field(default_factory=list)
    torch_save: list[float] = field(default_factory=list)
    resume: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    """Between two ordinary steps."""
    step_after: list[float] = field(default_factory=list)
    """The step during which this library copies and begins to write."""
    dcp_step_after: list[float] = field(default_factory=list)
    """The step after the call of DCP."""


class Training:
    """A model whose parameters, with two moments each, are ``num_bytes``."""

    def __init__(self, num_bytes: int) -> None:
        layers = max(1, round(num_bytes / 3 / 4 / (WIDTH * WIDTH)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.data = TensorDataset(torch.randn(64, WIDTH))

    def steps(self, run: unisono.Run) -> Iterator[unisono.Step]:
        run.track(model=self.model, optimizer=self.optimizer)
        return iter(run.steps(self.data, batch_size=4, microbatches=1, epochs=1 << 20))

    def do(self, step: unisono.Step) -> None:
        for (inputs,) in step:
            step.backward(self.model(inputs).square().mean())
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @property
    def tensors(self) -> list[Tensor]:
        return pack(self.state).tensors


class Loop:
    """The steps of a training, one at a time, and how long the loop was away between them."""

    def __init__(self, training: Training, run: unisono.Run) -> None:
        self._training = training
        self._steps = training.steps(run)
        self._ended = time.perf_counter()

    def step(self) -> tuple[float, float]:
        """Do one. Returns how long it took to come to its head, and itself."""
        ended = time.perf_counter()
        step = next(self._steps)
        head = time.perf_counter()
        self._training.do(step)
        return head - ended, time.perf_counter() - head


def measure(num_bytes: int, rounds: int, folder: Path) -> tuple[Times, int]:
    times = Times()
    with unisono.Run(folder / "run", seed=1, checkpoint=unisono.Checkpoints(keep=1)) as run:
        training = Training(num_bytes)
        loop = Loop(training, run)
        for _ in range(3):
            loop.step()
        tensors = training.tensors
        size = sum(tensor.nbytes for tensor in tensors)
        buffers = [torch.zeros_like(tensor) for tensor in tensors]
        block = memoryview(bytearray(os.urandom(1 << 20) * (WRITE_BYTES >> 20)))
        for number in range(rounds + 1):
            before = (
                Times() if number == 0 else times
            )  # the first round is not counted: memory is found, files are made
            _ordinary(loop, before)
            before.copy.append(_copy(tensors, buffers))
            _ours(run, loop, before, folder)
            before.disk.append(_in_background(loop, lambda: _write_raw(folder / "raw", size, block)))
            _dcp(training, loop, before, folder)
            before.torch_save.append(_torch_save(training, folder / "whole.pt"))
    for number in range(rounds + 1):
        before = Times() if number == 0 else times
        before.read.append(_read_raw(folder / "run"))
        before.resume.append(_resume(num_bytes, folder / "run"))
    return times, size


def _ordinary(loop: Loop, times: Times) -> None:
    for _ in range(3):
        gap, step = loop.step()
        times.gap.append(gap)
        times.step.append(step)


def _copy(tensors: list[Tensor], buffers: list[Tensor]) -> float:
    began = time.perf_counter()
    with torch.no_grad():
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
    return time.perf_counter() - began


def _ours(run: unisono.Run, loop: Loop, times: Times, folder: Path) -> None:
    """Save, and train on until it is on the disk."""
    known = _saved(folder)
    run.save()
    steps = [loop.step()]
    while (found := _saved(folder)) == known:
        steps.append(loop.step())
    gap, step = max(steps)
    times.stall.append(gap - statistics.median(times.gap) + found[-1]["waited_s"])
    times.step_after.append(step)
    times.write.append(found[-1]["write_s"])


def _saved(folder: Path) -> list[dict[str, Any]]:
    return [line["checkpoint"] for line in read(folder / "run") if "checkpoint" in line]


def _in_background(loop: Loop, work: Callable[[], float]) -> float:
    """Do something in a thread, and train on meanwhile."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    while thread.is_alive():
        loop.step()
    thread.join()
    return found[0]


def _write_raw(path: Path, size: int, block: memoryview) -> float:
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        left = size
        while left:
            left -= os.write(descriptor, block[: min(left, len(block))])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def _dcp(training: Training, loop: Loop, times: Times, folder: Path) -> None:
    path = folder / "dcp"
    state = training.state
    began = time.perf_counter()
    done: Any = dcp.async_save(state, checkpoint_id=path)
    times.dcp.append(time.perf_counter() - began)
    times.dcp_step_after.append(loop.step()[1])
    done.result()
    times.dcp_done.append(time.perf_counter() - began)
    shutil.rmtree(path)


def _torch_save(training: Training, path: Path) -> float:
    began = time.perf_counter()
    with path.open("wb") as file:
        torch.save(training.state, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def _newest_files(run: Path) -> list[Path]:
    return sorted(files.complete(run / files.FOLDER)[-1].iterdir())


def _forget(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _read_raw(run: Path) -> float:
    paths = _newest_files(run)
    _forget(paths)
    began = time.perf_counter()
    for path in paths:
        data = torch.empty(path.stat().st_size, dtype=torch.uint8)
        view = files.memory_at(data.data_ptr(), data.numel(), data)
        with path.open("rb", buffering=0) as file:
            while view:
                view = view[file.readinto(view) :]
    return time.perf_counter() - began


def _resume(num_bytes: int, directory: Path) -> float:
    with unisono.Run(directory, seed=1, resume="auto") as run:
        training = Training(num_bytes)
        _forget(_newest_files(directory))
        began = time.perf_counter()
        steps = training.steps(run)
        step = next(steps)
        seconds = time.perf_counter() - began
        training.do(step)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--directory", type=Path, help="on the disk that is meant; default: the temporary directory")
    parser.add_argument("--json", help="write the figures into this file")
    arguments = parser.parse_args()
    rounds = arguments.rounds or ROUNDS["quick" if arguments.quick else "full"]
    warnings.filterwarnings("ignore", module="torch")
    figures: dict[str, float] = {}
    runs: list[dict[str, Any]] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for size in arguments.sizes:
            with tempfile.TemporaryDirectory(prefix="unisono-checkpoint-", dir=arguments.directory) as folder:
                times, num_bytes = measure(SIZES[size], rounds, Path(folder))
            figures |= report(size, num_bytes, times)
            runs.append({"size": size, "bytes": num_bytes, **vars(times)})
    finally:
        dist.destroy_process_group()
    if arguments.json:
        write_json(arguments.json, figures, runs)


def report(size: str, num_bytes: int, times: Times) -> dict[str, float]:
    """Print what was measured. Ratios are taken round by round."""

    def ratio(above: list[float], below: list[float]) -> list[float]:
        return [a / b for a, b in zip(above, below, strict=True)]

    ratios = {
        "stall_to_copy": ratio(times.stall, times.copy),
        "stall_to_dcp": ratio(times.stall, times.dcp),
        "bandwidth_to_disk": ratio(times.disk, times.write),
        "resume_to_read": ratio(times.resume, times.read),
    }
    step = statistics.median(times.step)
    print(f"\n{size}: a state of {num_bytes / 1e6:,.0f} MB, steps of {step:.3f} s, {len(times.copy)} rounds")
    rows = [
        ("one copy in memory", times.copy),
        ("stall: unisono", times.stall),
        ("stall: DCP async_save", times.dcp),
        ("stall: torch.save", times.torch_save),
        ("an ordinary step", times.step),
        ("the step after: unisono", times.step_after),
        ("the step after: DCP async_save", times.dcp_step_after),
        ("on the disk: a plain file", times.disk),
        ("on the disk: unisono", times.write),
        ("on the disk: DCP async_save", times.dcp_done),
        ("reading the files", times.read),
        ("resume to the first step", times.resume),
    ]
    print_table(
        ["", "seconds", "of a step", "MB/s"],
        [
            [
                name,
                str(median_interval(values)),
                f"{statistics.median(values) / step:.2f}",
                f"{num_bytes / 1e6 / max(statistics.median(values), 1e-9):,.0f}",
            ]
            for name, values in rows
        ],
    )
    print()
    print_table(
        ["figure", "median (95%)"], [[f"{name}.{size}", str(median_interval(each))] for name, each in ratios.items()]
    )
    return {f"{name}.{size}": statistics.median(each) for name, each in ratios.items()}


if __name__ == "__main__":
    main()
