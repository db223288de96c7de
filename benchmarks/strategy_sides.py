"""The processes that `benchmarks.strategies` measures: one training, by each strategy of the library and of others.

All train the same model on the same data, with AdamW of the same learning rate, which is tuned for none of them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import unisono
from benchmarks.models import CASES, Case
from benchmarks.peers import torchft_manager
from benchmarks.sides import Control, as_bfloat16
from unisono.system.lifetime import bind_to_parent

__all__ = ["SIDES", "SIZES", "missing"]

BATCHES = 64
"""Of the data set; then it begins again in another order."""
TEST_SAMPLES = 2048
RATE = 3e-4
STALL_ONE_IN = 8
"""A worker stalls in one of so many steps, chosen by chance, equally for all sides."""


def _taught(num_samples: int, *, seed: int = 1) -> TensorDataset:
    """Noisy vectors, and which of ten directions is nearest to each: something that can be learned."""
    fixed, draw = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_samples, 16, generator=draw)
    labels = (hidden @ torch.randn(16, 10, generator=fixed)).argmax(1)
    noise = torch.randn(num_samples, 1024, generator=draw)
    return TensorDataset(hidden @ torch.randn(16, 1024, generator=fixed) / 4 + noise, labels)


SIZES = {4: replace(CASES["mlp_small"], data=_taught), 100: replace(CASES["mlp"], data=_taught)}
"""MB of gradients, and the training of that size."""


class Watch(Protocol):
    """Who counts the steps."""

    def hello(self, rank: int) -> None: ...

    def go_on(self, steps: int = 1) -> bool: ...


class Counted:
    """Makes no stop."""

    def hello(self, rank: int) -> None:
        pass

    def go_on(self, steps: int = 1) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process does."""

    case: Case
    microbatches: int
    workers: int
    inner_steps: int
    stall_s: float
    balance: bool
    num_steps: int | None
    """After which the loss is written to ``result``; None: until the end of the measurement."""
    result: str
    rank: int
    meeting: str

    @property
    def batch_size(self) -> int:
        return self.case.microbatch_size * self.microbatches

    def data(self) -> TensorDataset:
        return self.case.data(self.batch_size * BATCHES)

    def stall(self, rank: int, step: int) -> None:
        """Be held up, as by something else on the machine; before the step is computed."""
        if self.stall_s and random.Random(1000 * step + rank).randrange(STALL_ONE_IN) == 0:
            time.sleep(self.stall_s)

    def finish(self, model: nn.Module, rank: int) -> None:
        """Write the loss of samples that nobody has trained on."""
        vectors, labels = _taught(TEST_SAMPLES, seed=2).tensors
        with torch.no_grad():
            loss = float(self.case.loss(model, vectors, labels))
        if rank == 0:
            Path(self.result).write_text(json.dumps({"loss": loss}))


# -- the library ---------------------------------------------------------------------------------------


def with_steps(task: Task, watch: Watch, *, copies: int = 0, gradients: str = "worker", **options: Any) -> None:
    """``run.steps``.

    Args:
        copies: of each optimizer state; 0: one on each worker.
        gradients: of `unisono.shard`.
        options: of ``run.steps``.
    """
    with unisono.Run(None, seed=1, balance=task.balance) as run:
        model = task.case.model()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
        if copies:
            optimizer = unisono.shard(optimizer, copies=copies, gradients=gradients)  # type: ignore[arg-type]
        run.track(model=model, optimizer=optimizer)
        is_waited_for = True
        steps = run.steps(
            task.data(),
            batch_size=task.batch_size,
            microbatches=task.microbatches,
            epochs=1 << 20,
            max_steps=task.num_steps,
            **options,
        )
        for step in steps:
            if is_waited_for and run.num_workers >= task.workers:
                watch.hello(run.rank)
                is_waited_for = False
            if not is_waited_for and not watch.go_on():
                break
            task.stall(run.rank, step.number)
            for vectors, labels in step:
                step.backward(task.case.loss(model, vectors, labels), weight=len(labels))
            optimizer.step()
        if task.num_steps:
            task.finish(model, run.rank)


def with_local_steps(task: Task, watch: Watch, *, momentum: float, **options: Any) -> None:
    """``run.local_steps``, with as many replicas as workers.

    It counts rounds. The steps of a round are not as many on all workers: in a rehearsal each computes one of another's
    as well, but one worker may be left out. Who waited for its turn in the middle of a round would be waited for.

    Args:
        momentum: of the outer optimizer; 0: the mean of the replicas as it is.
        options: of ``run.local_steps``.
    """
    with unisono.Run(None, seed=1, balance=task.balance) as run:
        model = task.case.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=momentum, nesterov=True) if momentum else None
        run.track(model=model, optimizer=optimizer, **({"outer": outer} if outer is not None else {}))
        is_waited_for, number = True, 0
        rounds = run.local_steps(
            task.data(),
            batch_size=task.batch_size,
            microbatches=task.microbatches,
            replicas=task.workers,
            inner_steps=task.inner_steps,
            outer=outer,
            epochs=1 << 20,
            max_steps=task.num_steps,
            **options,
        )
        for turn in rounds:
            if is_waited_for and run.num_workers >= task.workers:
                watch.hello(run.rank)
                is_waited_for = False
            if not is_waited_for and not watch.go_on(task.inner_steps):
                break
            for step in turn:
                task.stall(run.rank, number)
                number += 1
                for vectors, labels in step:
                    step.backward(task.case.loss(model, vectors, labels), weight=len(labels))
                optimizer.step()
        if task.num_steps:
            task.finish(model, run.rank)


# -- the others ----------------------------------------------------------------------------------------


def _meet(task: Task) -> None:
    torch.set_num_threads(1)
    # What the library does by default, here for all sides.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(1)
    store = dist.FileStore(task.meeting, task.workers)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.workers)


def with_ddp(task: Task, watch: Watch, *, wire: str = "fp32", is_sharded: bool = False) -> None:
    """DistributedDataParallel; with torch's hook for fewer bytes, or with ZeroRedundancyOptimizer."""
    _meet(task)
    model = DistributedDataParallel(task.case.model(), gradient_as_bucket_view=True)
    if wire == "bf16":
        model.register_comm_hook(None, lambda state, bucket: as_bfloat16(bucket))  # torch looks at annotations
    optimizer: torch.optim.Optimizer
    if is_sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=RATE, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def accumulate(is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else model.no_sync()

    _loop(task, watch, model, optimizer, accumulate)


def with_fsdp(task: Task, watch: Watch) -> None:
    """FSDP2 (``fully_shard``) on CPUs, each layer by itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _meet(task)
    mesh = init_device_mesh("cpu", (task.workers,))
    model = task.case.model()
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def accumulate(is_last: bool) -> AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(is_last)
        return nullcontext()

    _loop(task, watch, model, optimizer, accumulate)


def with_averager(task: Task, watch: Watch) -> None:
    """Local SGD as torch has it: the models are averaged every so many steps."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    _meet(task)
    model = task.case.model()
    averager = PeriodicModelAverager(period=task.inner_steps)
    inner = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    _loop(task, watch, model, PostLocalSGDOptimizer(inner, averager), lambda is_last: nullcontext())


def with_torchft(task: Task, watch: Watch) -> None:
    """Local SGD of torchft, one worker a replica group."""
    from torchft.local_sgd import LocalSGD  # type: ignore[import-not-found]

    _meet(task)
    manager, _servers = torchft_manager(task.rank, task.workers)
    model = task.case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    with LocalSGD(manager, model, optimizer, sync_every=task.inner_steps):
        _loop(task, watch, model, optimizer, lambda is_last: nullcontext())


def _loop(
    task: Task,
    watch: Watch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accumulate: Callable[[bool], AbstractContextManager[None]],
) -> None:
    own = task.microbatches // task.workers
    data = task.data()
    batches = _batches(data, task.batch_size)
    watch.hello(task.rank)
    number = 0
    while (task.num_steps is None or number < task.num_steps) and watch.go_on():
        task.stall(task.rank, number)
        number += 1
        optimizer.zero_grad()
        parts = next(batches).split(task.case.microbatch_size)[task.rank * own : (task.rank + 1) * own]
        for place, index in enumerate(parts):
            vectors, labels = (tensor[index] for tensor in data.tensors)
            with accumulate(place == own - 1):
                (task.case.loss(model, vectors, labels) / own).backward()
        optimizer.step()
    if task.num_steps:
        task.finish(model, task.rank)
    dist.destroy_process_group()


def _batches(dataset: TensorDataset, size: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(2)
    while True:
        yield from torch.randperm(len(dataset), generator=draw).split(size)


def _with_options(side: Callable[..., None], **options: Any) -> Callable[[Task, Watch], None]:
    def run(task: Task, watch: Watch) -> None:
        side(task, watch, **options)

    return run


SIDES: dict[str, Callable[[Task, Watch], None]] = {
    "unisono": with_steps,
    "unisono shard 2": _with_options(with_steps, copies=2),
    "unisono shard 1": _with_options(with_steps, copies=1),
    "unisono shard 1 owners": _with_options(with_steps, copies=1, gradients="owners"),
    "unisono bf16": _with_options(with_steps, wire="bf16"),
    "unisono delay 1": _with_options(with_steps, delay=1),
    "unisono local": _with_options(with_local_steps, momentum=0.0),
    "unisono local fresh": _with_options(with_local_steps, momentum=0.0, inner_state="fresh"),
    "unisono diloco": _with_options(with_local_steps, momentum=0.9),
    "unisono diloco int8": _with_options(with_local_steps, momentum=0.9, delta="int8"),
    "ddp": with_ddp,
    "ddp bf16": _with_options(with_ddp, wire="bf16"),
    "ddp zero": _with_options(with_ddp, is_sharded=True),
    "fsdp2": with_fsdp,
    "torch local": with_averager,
    "torchft local": with_torchft,
}
"""By name. Those of the library begin with "unisono"."""


def missing(side: str) -> str:
    """Return why a side cannot be measured here; "" if it can."""
    steps = inspect.signature(unisono.Run.steps).parameters
    local = inspect.signature(unisono.Run.local_steps).parameters if hasattr(unisono.Run, "local_steps") else {}
    needs = {
        "shard": hasattr(unisono, "shard"),
        "delay": "delay" in steps,
        "local": bool(local) or not side.startswith("unisono"),
        "diloco": bool(local),
        "int8": "delta" in local,
        "bf16": "wire" in steps or not side.startswith("unisono"),
        "torchft": find_spec("torchft") is not None,
    }
    lacking = [word for word in side.split() if not needs.get(word, True)]
    return f"{' and '.join(lacking)} not installed" if lacking else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="one process of a measurement; started by benchmarks.strategies")
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--size", type=int, choices=SIZES, required=True)
    parser.add_argument("--microbatches", type=int, required=True, help="of a global batch, over all workers")
    parser.add_argument("--inner-steps", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--control", default="", help="socket of who measures")
    parser.add_argument("--stall-ms", type=float, default=0.0)
    parser.add_argument("--unbalanced", action="store_true")
    parser.add_argument("--steps", type=int, help="train for so many, without a control")
    parser.add_argument("--result", default="", help="file for the loss after these")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meeting", default="", help="file at which processes of other sides meet")
    options = parser.parse_args()
    bind_to_parent(signal.SIGKILL)
    task = Task(
        case=SIZES[options.size],
        microbatches=options.microbatches,
        workers=options.workers,
        inner_steps=options.inner_steps,
        stall_s=options.stall_ms / 1000,
        balance=not options.unbalanced,
        num_steps=options.steps,
        result=options.result,
        rank=options.rank,
        meeting=options.meeting,
    )
    SIDES[options.side](task, Control(options.control) if options.control else Counted())


if __name__ == "__main__":
    main()
