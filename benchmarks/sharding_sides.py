"""The processes of `benchmarks.sharding`: one training with the states of its optimizer shared out in several ways.

``python -m benchmarks.sharding_sides SIDE CASE ...`` is started by `benchmarks.sharding`, which says over a socket
whose turn it is. All sides train the same model on the same micro-batches with AdamW, one thread a worker.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import unisono
from benchmarks.models import CASES, Case, large
from benchmarks.sides import BATCHES, Control, _batches, prepare
from unisono.engine.loop.process_settings import keep_freed_memory
from unisono.engine.state.elsewhere import Elsewhere
from unisono.system.lifetime import bind_to_parent

__all__ = ["NAMES", "PEERS", "SIDES", "UNISONO"]

UNISONO: dict[str, dict[str, Any] | None] = {
    "unisono": None,
    "shard": {"copies": 2},
    "shard-1": {"copies": 1},
    "host": {"copies": 2, "parameters": "host"},
    "host-1": {"copies": 1, "parameters": "host"},
    "owners-1": {"copies": 1, "gradients": "owners"},
}
"""Arguments of ``unisono.shard``; None: it is not called, and every worker has everything."""
PEERS = ("ddp", "ddp-zero", "fsdp2")
SIDES = (*UNISONO, *PEERS)
LARGE = "large"
NAMES = (*CASES, LARGE)


def with_unisono(
    case: Case, arguments: argparse.Namespace, control: Control, options: dict[str, Any] | None
) -> dict[str, int]:
    """The library as its users use it; returns the bytes of what a worker holds.

    Args:
        options: of ``unisono.shard``.
    """
    microbatches = arguments.microbatches
    with unisono.Run(seed=1) as run:
        model = case.model()
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
        if options is not None:
            optimizer = unisono.shard(optimizer, **options)
        is_one_copy = options is not None and options.get("parameters") == "host"
        run.track(model=model, optimizer=optimizer)
        batch_size = case.microbatch_size * microbatches
        dataset, has_begun = case.data(batch_size * BATCHES), False
        for step in run.steps(dataset, batch_size=batch_size, microbatches=microbatches, epochs=1 << 20):
            if not has_begun and run.num_workers >= arguments.workers:
                control.hello(run.rank)
                has_begun = True
            if has_begun and not control.go_on():
                break
            for inputs, labels in step:
                step.backward(case.loss(model, inputs, labels), weight=len(labels))
            optimizer.step()
            held = bytes_of(model, optimizer, sharers=run.num_workers if is_one_copy else 1)
        return held


def with_peer(case: Case, arguments: argparse.Namespace, control: Control) -> dict[str, int]:
    """What torch offers for the same; returns the bytes of what a worker holds."""
    prepare()
    rank, size, microbatches = arguments.rank, arguments.workers, arguments.microbatches
    dist.init_process_group("gloo", store=dist.FileStore(arguments.meeting, size), rank=rank, world_size=size)
    model: nn.Module = case.model()
    optimizer: Optimizer
    if arguments.side == "fsdp2":
        mesh = init_device_mesh("cpu", (size,))
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if arguments.side == "ddp-zero":
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), AdamW, parameters_as_bucket_view=False, lr=1e-4, fused=True
            )
        else:
            optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    control.hello(rank)
    own = microbatches // size
    batches = _batches(case.data(case.microbatch_size * microbatches * BATCHES), case.microbatch_size)
    held: dict[str, int] = {}
    while control.go_on():
        optimizer.zero_grad()
        everyones = [next(batches) for _ in range(microbatches)]
        for place, fetch in enumerate(everyones[rank * own : (rank + 1) * own]):
            inputs, labels = fetch()
            with synchronised(model, place == own - 1):
                (case.loss(model, inputs, labels) / own).backward()
        optimizer.step()
        held = held or bytes_of(model, optimizer)
    dist.destroy_process_group()
    return held


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the parts that FSDP2 gathers one after the other, as its documentation wraps them: layer by layer."""
    layers: list[nn.Module] = [each for each in model.modules() if isinstance(each, nn.TransformerEncoderLayer)]
    return layers or [each for each in model.modules() if isinstance(each, nn.Linear)]


def synchronised(model: nn.Module, is_last: bool) -> Any:
    """Return a context in which gradients are summed over the workers only with the last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        return nullcontext()
    assert isinstance(model, DistributedDataParallel)
    return nullcontext() if is_last else model.no_sync()


def bytes_of(model: nn.Module, optimizer: Optimizer, *, sharers: int = 1) -> dict[str, int]:
    """Return how many bytes this worker holds of parameters, gradients and states, after an update.

    Args:
        sharers: workers that hold the parameters together, of which each counts an equal part.
    """
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    states = (value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor))
    gradients = (one.grad for one in model.parameters() if one.grad is not None and not isinstance(one.grad, Elsewhere))
    return {
        "parameters": sum(map(_local_bytes, model.parameters())) // sharers,
        "gradients": sum(map(_local_bytes, gradients)),
        "states": sum(map(_local_bytes, states)),
    }


def _local_bytes(tensor: Tensor) -> int:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor
    return local.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description="one process of a measurement; started by benchmarks.sharding")
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("case", choices=NAMES)
    parser.add_argument("--size", type=int, required=True, help=f"MB of the parameters of {LARGE}")
    parser.add_argument("--microbatches", type=int, required=True, help="of a global batch, over all workers")
    parser.add_argument("--control", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--meeting", default="", help="file at which the processes of torch meet")
    parser.add_argument("--held", required=True, help="folder for what each worker holds")
    arguments = parser.parse_args()
    bind_to_parent(signal.SIGKILL)
    keep_freed_memory(os.environ)
    case = large(arguments.size) if arguments.case == LARGE else CASES[arguments.case]
    control = Control(arguments.control)
    if arguments.side in UNISONO:
        held = with_unisono(case, arguments, control, UNISONO[arguments.side])
    else:
        held = with_peer(case, arguments, control)
    Path(arguments.held, f"{arguments.side}-{os.getpid()}.json").write_text(json.dumps(held))


if __name__ == "__main__":
    main()
