"""The trainings that `benchmarks.recovery` hurts: the same model with Unisono, with torchrun, and with torchft.

Every process writes a line for every step into a pipe that the benchmark reads; `Told` is such a line.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono
from benchmarks.models import CASES
from unisono.system.lifetime import PARENT, bind_to_parent

__all__ = ["CHECKPOINT_EVERY", "MICROBATCHES", "SIDES", "WANTED", "Told"]

CASE = CASES["cnn"]
MICROBATCHES = 8
BATCHES = 64
CHECKPOINT_EVERY = 50
WANTED = "wanted"
"""A file of this name in the folder asks torchft's supervisor to start the replicas that are missing."""


@dataclass(frozen=True)
class Told:
    """What a process tells about a step. Times: CLOCK_MONOTONIC, in seconds."""

    pid: int
    step: int
    num_workers: int
    count: int
    """Micro-batches that it computed."""
    head: float
    """The step began."""
    computed: float
    """Its last backward was done."""
    committed: float
    """The gradient was there."""

    def __str__(self) -> str:
        return " ".join(map(str, astuple(self)))

    @classmethod
    def read(cls, line: str) -> Told:
        pid, step, num_workers, count, *times = line.split()
        return cls(int(pid), int(step), int(num_workers), int(count), *map(float, times))


class Pipe:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def tell(self, step: int, num_workers: int, count: int, head: float, computed: float) -> None:
        self._file.write(f"{Told(os.getpid(), step, num_workers, count, head, computed, time.monotonic())}\n")


def with_unisono(pipe: Pipe, folder: Path) -> None:
    """Nothing here is about losses."""
    with unisono.Run(seed=1) as run:
        model = CASE.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run.track(model=model, optimizer=optimizer)
        batch_size = CASE.microbatch_size * MICROBATCHES
        data = CASE.data(batch_size * BATCHES)
        for step in run.steps(data, batch_size=batch_size, microbatches=MICROBATCHES, epochs=1 << 20):
            head = computed = time.monotonic()
            count = 0
            for inputs, labels in step:
                step.backward(CASE.loss(model, inputs, labels), weight=len(labels))
                computed = time.monotonic()
                count += 1
            pipe.tell(step.number, run.num_workers, count, head, computed)
            optimizer.step()


def with_torchrun(pipe: Pipe, folder: Path) -> None:
    """DistributedDataParallel with a checkpoint every 50 steps, from which all processes begin again."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(CASE.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    kept, first = folder / "checkpoint.pt", 0
    if kept.exists():
        state = torch.load(kept)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    data = CASE.data(CASE.microbatch_size * MICROBATCHES * BATCHES)
    step = first
    while True:
        head = time.monotonic()
        compute(model, step, rank, size, data.tensors)
        pipe.tell(step, size, MICROBATCHES // size, head, time.monotonic())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % CHECKPOINT_EVERY == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "part")
            (folder / "part").replace(kept)


def compute(model: nn.Module, step: int, rank: int, size: int, tensors: tuple[torch.Tensor, ...]) -> None:
    """This process's micro-batches of a step, forward and backward."""
    own = MICROBATCHES // size
    for place in range(own):
        leaf = rank * own + place
        begin = ((step * MICROBATCHES + leaf) * CASE.microbatch_size) % (len(tensors[0]) - CASE.microbatch_size)
        inputs, labels = (tensor[begin : begin + CASE.microbatch_size] for tensor in tensors)
        quiet = place < own - 1 and isinstance(model, DistributedDataParallel)
        with model.no_sync() if quiet else nullcontext():  # type: ignore[operator]
            (CASE.loss(model, inputs, labels) / own).backward()


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long torchft waits for whom, in milliseconds."""

    heartbeat_ms: int
    """The lighthouse takes a replica for dead that has been silent for so long."""
    join_ms: int
    """The lighthouse waits so long for replicas that it takes for alive and that have not come to the next step."""
    tick_ms: int
    """The lighthouse looks so often."""
    collective_ms: int
    """A collective of gloo fails after so long."""


DOCUMENTED = Deadlines(heartbeat_ms=5000, join_ms=10000, tick_ms=100, collective_ms=5000)
"""Join and tick: the lighthouse's command line in the README. Heartbeat: its default. Collective: `train_ddp.py`."""
TUNED = Deadlines(heartbeat_ms=1000, join_ms=10000, tick_ms=10, collective_ms=1000)
"""As short as torchft's issue 35 says is fine for the heartbeat (they are sent every 100 ms), and all else with it."""


def with_torchft(pipe: Pipe, folder: Path, *, deadlines: Deadlines) -> None:
    """torchft: one worker a replica group, a lighthouse, and somebody who starts again who was killed."""
    if "REPLICA" not in os.environ:
        bind_to_parent(signal.SIGTERM)
        _supervise(folder, deadlines)
    bind_to_parent(signal.SIGKILL)
    from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank, size = int(os.environ["REPLICA"]), int(os.environ["REPLICAS"])
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = CASE.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(milliseconds=deadlines.collective_ms)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"replica{rank}",
        hostname="localhost",
    )
    guarded = Optimizer(manager, optimizer)
    data = CASE.data(CASE.microbatch_size * MICROBATCHES * BATCHES)
    head = time.monotonic()
    while True:
        step = manager.current_step()
        guarded.zero_grad()  # asks who is there
        compute(model, step, rank, size, data.tensors)
        computed = time.monotonic()
        # In one piece, and not by its DistributedDataParallel: over gloo that one raises at the first lost peer, in
        # all survivors (torchft 0.2.0 with torch 2.13: ddp.py line 76, `assert fut._fut`).
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        manager.allreduce(flat).wait()
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        guarded.step()  # only if all were there to the end; else the step is done again
        if manager.current_step() > step:
            # Not `step`: who was behind has got the state of the others in between, and with it the number.
            pipe.tell(manager.current_step() - 1, manager.num_participants(), MICROBATCHES // size, head, computed)
            head = time.monotonic()


def _supervise(folder: Path, deadlines: Deadlines) -> NoReturn:
    """Be the lighthouse, and start all replicas; those that ended again, each time that it is `WANTED`."""
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=deadlines.join_ms,
        quorum_tick_ms=deadlines.tick_ms,
        heartbeat_timeout_ms=deadlines.heartbeat_ms,
    )
    address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
    replicas: dict[int, subprocess.Popen[bytes]] = {}
    wanted = folder / WANTED
    wanted.touch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": address, PARENT: str(os.getpid())}
    try:
        while True:
            if wanted.exists():
                wanted.unlink()
                for number in range(int(os.environ["REPLICAS"])):
                    if number not in replicas or replicas[number].poll() is not None:
                        command = [sys.executable, *sys.argv]
                        replicas[number] = subprocess.Popen(command, env={**environment, "REPLICA": str(number)})
            time.sleep(0.05)
    finally:
        for replica in replicas.values():
            replica.kill()
            replica.wait()
        lighthouse.shutdown()


SIDES: dict[str, Callable[[Pipe, Path], None]] = {
    "unisono": with_unisono,
    "torchrun": with_torchrun,
    "torchft": partial(with_torchft, deadlines=DOCUMENTED),
    "torchft_tuned": partial(with_torchft, deadlines=TUNED),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="a training that is hurt; started by benchmarks.recovery")
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("pipe", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    SIDES[arguments.side](Pipe(arguments.pipe), arguments.folder)


if __name__ == "__main__":
    main()
