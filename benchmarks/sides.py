"""The processes that are measured: the same training with Unisono, with DistributedDataParallel, and as a plain loop.
Those of other peers are in `benchmarks.peers`.

``python -m benchmarks.sides SIDE CASE ...`` is started by `benchmarks.step_time`, which says over a socket whose turn
it is. A side that is not measured waits in a blocking read.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from multiprocessing.connection import Client
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import unisono
from benchmarks.models import CASES, Case
from unisono.engine.loop.process_settings import keep_freed_memory
from unisono.system.lifetime import bind_to_parent

__all__ = ["SIDES", "Control", "adamw", "as_bfloat16", "loop", "meet", "prepare", "shares"]

BATCHES = 16  # of the data set; then it begins again in another order


class Control:
    """The other end of `benchmarks.step_time`: says how many steps to do, and hears how long each took."""

    def __init__(self, path: str) -> None:
        self._pipe = Client(path, family="AF_UNIX")
        self._times: list[float] = []
        self._left = 0
        self._until = 0.0
        self._since = 0.0

    def hello(self, rank: int) -> None:
        self._pipe.send({"rank": rank, "pid": os.getpid()})

    def go_on(self, steps: int = 1) -> bool:
        """At the head of every step; blocks while it is the turn of others. False: this was the last step.

        A step counts from its head to that of the next one, so nothing of it is left out.

        Args:
            steps: that are done from one call to the next, equal on all workers; a turn ends after a whole number of
                calls.
        """
        now = time.perf_counter()
        if self._left > 0:
            self._times += [(now - self._since) / steps] * steps
            if self._until == 0.0 or now >= self._until:
                self._left -= steps
        if self._left <= 0:
            if self._times:
                used = resource.getrusage(resource.RUSAGE_SELF)
                self._pipe.send({"times": self._times, "cpu_s": used.ru_utime + used.ru_stime})
            self._times = []
            turn = self._pipe.recv()  # a number of steps, or seconds
            if turn == 0:
                return False
            now = time.perf_counter()
            self._left, self._until = (1, now + turn) if isinstance(turn, float) else (turn, 0.0)
        self._since = now
        return True


class Stalls:
    """Stops this worker for a while now and then, each worker at times of its own; the same in every run.

    Args:
        chance: of a stall in a step.
    """

    def __init__(self, seed: int, chance: float, seconds: float) -> None:
        self._draw = random.Random(seed)
        self._chance, self._seconds = chance, seconds

    def wait(self) -> None:
        """Once in every step."""
        if self._draw.random() < self._chance:
            time.sleep(self._seconds)


def with_unisono(
    case: Case,
    microbatches: int,
    control: Control,
    *,
    directory: str,
    balance: bool,
    workers: int = 1,
    wire: Literal["fp32", "bf16"] = "fp32",
    delay: int = 0,
    stalls: tuple[float, float] = (0.0, 0.0),
) -> None:
    """The library as its users use it: alone, or one of the workers of ``unisono run``.

    Args:
        workers: are waited for before the first step that counts; some of them may join the run.
        stalls: chance of a stall in a step of a worker, and its seconds.
    """
    with unisono.Run(directory or None, seed=1, balance=balance) as run:
        model = case.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        run.track(model=model, optimizer=optimizer)
        batch_size = case.microbatch_size * microbatches
        dataset = case.data(batch_size * BATCHES)
        is_waited_for = True
        stalled = Stalls(run.rank, *stalls)
        options: dict[str, Any] = {"batch_size": batch_size, "microbatches": microbatches, "epochs": 1 << 20}
        for step in run.steps(dataset, **options, wire=wire, delay=delay):
            if is_waited_for and run.num_workers >= workers:
                control.hello(run.rank)
                is_waited_for = False
            if not is_waited_for and not control.go_on():
                break
            stalled.wait()
            for inputs, labels in step:
                step.backward(case.loss(model, inputs, labels), weight=len(labels))
            optimizer.step()


def with_ddp(
    case: Case,
    microbatches: int,
    control: Control,
    *,
    rank: int,
    size: int,
    meeting: str,
    wire: str = "fp32",
    stalls: tuple[float, float] = (0.0, 0.0),
) -> None:
    """DistributedDataParallel, one replica; "bf16": gradients are sent, and added up, as bfloat16."""
    prepare()
    meet(rank, size, meeting)
    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True)
    if wire == "bf16":
        model.register_comm_hook(None, lambda state, bucket: as_bfloat16(bucket))  # torch looks at annotations
    control.hello(rank)
    loop(model, case, microbatches, control, rank=rank, size=size, stalls=stalls, accumulate=_quiet(model))
    dist.destroy_process_group()


def as_bfloat16(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What torch's ``bf16_compress_hook`` does, which it refuses on gloo."""
    gradients = bucket.buffer()
    sent = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda _: gradients.copy_(sent))
    return future


def with_plain_loop(
    case: Case, microbatches: int, control: Control, *, rank: int, size: int = 1, meeting: str = ""
) -> None:
    """One process, accumulating gradients as PyTorch does. It exchanges nothing, whatever its rank.

    Args:
        size: the micro-batches are divided by so many processes; each computes its part.
        meeting: file at which the processes meet, to wait for each other before each update; "": nobody waits.
    """
    prepare()
    if meeting:
        meet(rank, size, meeting)
    control.hello(rank)
    wait = dist.barrier if meeting else None
    loop(case.model(), case, microbatches, control, rank=rank if size > 1 else 0, size=size, before_update=wait)
    if meeting:
        dist.destroy_process_group()


def meet(rank: int, size: int, meeting: str) -> None:
    """Make the group of torch's processes, with a file at which they meet."""
    dist.init_process_group("gloo", store=dist.FileStore(meeting, size), rank=rank, world_size=size)


def prepare() -> None:
    """Make this process one of torch's sides."""
    torch.set_num_threads(1)
    # What the library does by default, here for all sides.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(1)


def loop(
    model: nn.Module,
    case: Case,
    microbatches: int,
    control: Control,
    *,
    rank: int,
    size: int,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: Callable[[bool], AbstractContextManager[None]] = lambda is_last: nullcontext(),
    before_update: Callable[[], object] | None = None,
    stalls: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Train as PyTorch's own loops do, each process its share of the micro-batches.

    Args:
        optimizer: default: fused AdamW.
        accumulate: in which each micro-batch is computed, given whether it is the last of its step.
    """
    stalled = Stalls(rank, *stalls)
    optimizer = optimizer or adamw(model)
    own = microbatches // size
    parts = shares(case, microbatches, rank, size)
    while control.go_on():
        stalled.wait()
        optimizer.zero_grad()
        for place, fetch in enumerate(next(parts)):
            inputs, labels = fetch()
            with accumulate(place == own - 1):
                (case.loss(model, inputs, labels) / own).backward()
        if before_update is not None:
            before_update()
        optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all sides."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _quiet(model: DistributedDataParallel) -> Callable[[bool], AbstractContextManager[None]]:
    """Let DDP sum gradients once in a step."""
    return lambda is_last: nullcontext() if is_last else model.no_sync()


def shares(case: Case, microbatches: int, rank: int, size: int) -> Iterator[list[_Fetch]]:
    """Yield a process's micro-batches of each step."""
    own = microbatches // size
    batches = _batches(case.data(case.microbatch_size * microbatches * BATCHES), case.microbatch_size)
    while True:
        everyones = [next(batches) for _ in range(microbatches)]
        yield everyones[rank * own : (rank + 1) * own]


class _Fetch:
    """One micro-batch, not fetched yet."""

    def __init__(self, tensors: tuple[Tensor, ...], index: Tensor) -> None:
        self._tensors, self._index = tensors, index

    def __call__(self) -> list[Tensor]:
        return [tensor[self._index] for tensor in self._tensors]


def _batches(dataset: TensorDataset, size: int) -> Iterator[_Fetch]:
    draw = torch.Generator().manual_seed(2)
    while True:
        for index in torch.randperm(len(dataset), generator=draw).split(size):
            yield _Fetch(dataset.tensors, index)


SIDES = ("unisono", "ddp", "plain")


def main() -> None:
    from benchmarks.peers import PEERS

    parser = argparse.ArgumentParser(description="one process of a measurement; started by benchmarks.step_time")
    parser.add_argument("side", choices=[*SIDES, *PEERS])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--microbatches", type=int, required=True, help="of a global batch, over all workers")
    parser.add_argument("--microbatch-size", type=int, default=0, help="samples; default: the case's")
    parser.add_argument("--control", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--meeting", default="", help="file at which processes that wait for each other meet")
    parser.add_argument("--directory", default="", help="run directory")
    parser.add_argument("--keep-freed-memory", action="store_true", help="as the library does it, also on other sides")
    parser.add_argument("--unbalanced", action="store_true", help="every worker computes as many micro-batches")
    parser.add_argument("--wire", choices=["fp32", "bf16"], default="fp32", help="as what gradients travel")
    parser.add_argument("--delay", type=int, default=0, help="of run.steps")
    parser.add_argument("--stalls", type=float, nargs=2, default=(0.0, 0.0), metavar=("CHANCE", "SECONDS"))
    arguments = parser.parse_args()
    stalls = (arguments.stalls[0], arguments.stalls[1])
    bind_to_parent(signal.SIGKILL)
    if arguments.keep_freed_memory:
        keep_freed_memory(os.environ)
    case, microbatches = CASES[arguments.case], arguments.microbatches
    if arguments.microbatch_size:
        case = replace(case, microbatch_size=arguments.microbatch_size)
    control = Control(arguments.control)
    if arguments.side == "unisono":
        with_unisono(
            case,
            microbatches,
            control,
            directory=arguments.directory,
            balance=not arguments.unbalanced,
            workers=arguments.workers,
            wire=arguments.wire,
            delay=arguments.delay,
            stalls=stalls,
        )
    elif arguments.side == "ddp":
        with_ddp(
            case,
            microbatches,
            control,
            rank=arguments.rank,
            size=arguments.workers,
            meeting=arguments.meeting,
            wire=arguments.wire,
            stalls=stalls,
        )
    elif arguments.side in PEERS:
        prepare()
        meet(arguments.rank, arguments.workers, arguments.meeting)
        PEERS[arguments.side](case, microbatches, control, rank=arguments.rank, size=arguments.workers)
        dist.destroy_process_group()
    else:
        with_plain_loop(
            case, microbatches, control, rank=arguments.rank, size=arguments.workers, meeting=arguments.meeting
        )


if __name__ == "__main__":
    main()
