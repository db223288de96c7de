"""The processes of `benchmarks.model_parallel`: one training of a transformer that is cut in several ways.

``python -m benchmarks.model_parallel_sides SIDE ...`` is started by `benchmarks.model_parallel`, which says over a
socket whose turn it is. All sides train the same modules on the same micro-batches with AdamW, one thread a process.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from benchmarks.sharding_sides import synchronised
from benchmarks.sides import BATCHES, Control, _batches, prepare
from unisono.engine.loop.process_settings import keep_freed_memory
from unisono.strategies.parallel.layers import layers_in
from unisono.system.lifetime import bind_to_parent

__all__ = ["PEERS", "SIDES", "UNISONO", "Shape", "activation_bytes", "parameters_of"]

UNISONO = {"1": 1, "1x2": 2, "1x4": 4, "2x2": 4, "1s": 1, "1x2s": 2, "1x4s": 4}
"""By value of ``--workers``, the number of processes; with an s behind it: one stage, and layers in shards."""
PEERS = {"1f1b": 4, "fsdp2": 4, "dtensor": 4}
SIDES = {**UNISONO, **PEERS}
STAGES = 4
SHARDS = 4
WORDS = 256


class Shape:
    """The sizes of the model and of a micro-batch."""

    def __init__(self, width: int, depth: int, length: int, microbatch_size: int, microbatches: int) -> None:
        self.width, self.depth, self.length = width, depth, length
        self.microbatch_size, self.microbatches = microbatch_size, microbatches

    @property
    def options(self) -> list[str]:
        """Of the command line."""
        return [str(value) for value in vars(self).values()]

    def modules(self) -> list[Callable[[], nn.Module]]:
        """Functions that make the modules."""
        blocks = [partial(_Block, self.width)] * self.depth
        return [partial(_Embedding, self.length, self.width), *blocks, partial(nn.Linear, self.width, WORDS)]

    def data(self, num_samples: int) -> TensorDataset:
        draw = torch.Generator().manual_seed(1)
        tokens = torch.randint(WORDS, (num_samples, self.length + 1), generator=draw)
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class _Embedding(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.words(tokens) + self.places
        return found


class _Block(nn.Module):
    HEADS = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.keys, self.values, self.mixed = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_width = width // self.HEADS

    def forward(self, x: Tensor) -> Tensor:
        seen = self.before_attention(x)
        queries, keys, values = (
            layer(seen).view(*x.shape[:2], -1, self.head_width).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.mixed(found.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.before_mlp(x))))
        return result


COLUMNS, ROWS = ("queries", "keys", "values", "up"), ("mixed", "down")
"""Layers of a block, by how they are cut into shards."""


def in_shards(model: nn.Sequential) -> nn.Sequential:
    """Return the model with layers that are cut; those at its ends are whole."""
    how = dict.fromkeys(COLUMNS, "columns") | dict.fromkeys(ROWS, "rows")
    return unisono.parallelize(model, {f"*.{name}": each for name, each in how.items()}, shards=SHARDS)


def ranges(num_modules: int, num_stages: int = STAGES) -> list[range]:
    """Return by stage the modules of it, as ``unisono.Stages(cuts=num_stages)`` has them."""
    small, num_big = divmod(num_modules, num_stages)
    starts = [stage * small + min(stage, num_big) for stage in range(num_stages + 1)]
    return [range(first, end) for first, end in itertools.pairwise(starts)]


def parameters_of(shape: Shape, num_shard_parts: int = 0) -> list[int]:
    """Return by stage the bytes of its parameters; with shards there is one stage, and a part has some of them."""
    with torch.device("meta"):
        if num_shard_parts:
            named = [one for make in shape.modules() for one in make().named_parameters()]
            # Biases of rows are whole.
            cut = {f"{name}.weight" for name in (*COLUMNS, *ROWS)} | {f"{name}.bias" for name in COLUMNS}
            return [sum(one.nbytes // (num_shard_parts if name in cut else 1) for name, one in named)]
        sizes = [sum(one.nbytes for one in make().parameters()) for make in shape.modules()]
    return [sum(sizes[index] for index in each) for each in ranges(len(sizes))]


def activation_bytes(shape: Shape, num_shard_parts: int = 0) -> list[int]:
    """Return by stage the bytes that autograd keeps of one micro-batch, parameters not counted.

    Args:
        num_shard_parts: with shards, into so many parts; 0: there are no shards.
    """
    torch.manual_seed(1)
    found, made = [], [make() for make in shape.modules()]
    parts = ranges(len(made))
    if num_shard_parts:
        made, parts = [in_shards(nn.Sequential(*made))], [range(1)]
        place = layers_in(made[0])[0].place
        place.divide(0, num_shard_parts)
        place.exchange = lambda number, tensor: tensor.clone()  # of the same size
    value = shape.data(shape.microbatch_size).tensors[0]
    for each in parts:
        own = {one.untyped_storage().data_ptr() for index in each for one in made[index].parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for index in each:
                value = made[index](value)
        found.append(sum(kept.values()))
        value = value.detach().requires_grad_()
    return found


def own_bytes() -> int:
    """Return the memory of this process, without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def loss_of(found: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(found.flatten(0, 1), following.flatten())


def with_unisono(shape: Shape, control: Control, processes: int, *, has_shards: bool) -> None:
    """The library as its users use it."""
    with unisono.Run(seed=1) as run:
        if has_shards:
            model = unisono.Stages(in_shards(nn.Sequential(*(make() for make in shape.modules()))), cuts=1)
        else:
            model = unisono.Stages(*shape.modules(), cuts=STAGES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run.track(model=model, optimizer=optimizer)
        batch_size, has_begun = shape.microbatch_size * shape.microbatches, False
        dataset = shape.data(batch_size * BATCHES)
        for step in run.steps(dataset, batch_size=batch_size, microbatches=shape.microbatches, epochs=1 << 20):
            if not has_begun:
                assert run.num_workers == processes
                control.hello(run.rank)
                has_begun = True
            if not control.go_on():
                break
            step.compute(lambda tokens, following: loss_of(model(tokens), following))
            optimizer.step()


def with_pipelining(shape: Shape, control: Control, rank: int, processes: int) -> None:
    """torch.distributed.pipelining: one stage a process, schedule 1F1B."""
    modules = shape.modules()
    model = nn.Sequential(*(modules[index]() for index in ranges(len(modules), processes)[rank]))
    stage = PipelineStage(model, rank, processes, torch.device("cpu"))
    schedule = Schedule1F1B(stage, shape.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch_size = shape.microbatch_size * shape.microbatches
    batches = _batches(shape.data(batch_size * BATCHES), batch_size)
    control.hello(rank)
    while control.go_on():
        optimizer.zero_grad()
        tokens, following = next(batches)()
        if rank == 0:
            schedule.step(tokens)
        elif rank == processes - 1:
            schedule.step(target=following)
        else:
            schedule.step()
        optimizer.step()


def with_fsdp(shape: Shape, control: Control, rank: int, processes: int) -> None:
    """FSDP2, each block and the rest; gradients are summed over the processes once a step."""
    with torch.device("meta"):
        model = nn.Sequential(*(make() for make in shape.modules()))
    mesh = init_device_mesh("cpu", (processes,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    own = shape.microbatches // processes
    batches = _batches(shape.data(shape.microbatch_size * shape.microbatches * BATCHES), shape.microbatch_size)
    control.hello(rank)
    while control.go_on():
        optimizer.zero_grad()
        everyones = [next(batches) for _ in range(shape.microbatches)]
        for place, fetch in enumerate(everyones[rank * own : (rank + 1) * own]):
            tokens, following = fetch()
            with synchronised(model, place == own - 1):
                (loss_of(model(tokens), following) / own).backward()
        optimizer.step()


def with_dtensor(shape: Shape, control: Control, rank: int, processes: int) -> None:
    """Tensor parallelism by DTensor: every process computes all micro-batches, with a part of each layer."""
    model = nn.Sequential(*(make() for make in shape.modules()))
    mesh = init_device_mesh("cpu", (processes,))
    plan: dict[str, ParallelStyle] = {
        **{f"*.{name}": ColwiseParallel() for name in COLUMNS},
        **{f"*.{name}": RowwiseParallel() for name in ROWS},
    }
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = _batches(shape.data(shape.microbatch_size * shape.microbatches * BATCHES), shape.microbatch_size)
    control.hello(rank)
    while control.go_on():
        optimizer.zero_grad()
        for _ in range(shape.microbatches):
            tokens, following = next(batches)()
            (loss_of(model(tokens), following) / shape.microbatches).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description="one process of a measurement; started by benchmarks.model_parallel")
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("shape", type=int, nargs=5, help="width, depth, length, microbatch_size, microbatches")
    parser.add_argument("--control", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meeting", default="", help="file at which the processes of torch meet")
    parser.add_argument("--held", required=True, help="folder for what each process had before it made its model")
    arguments = parser.parse_args()
    bind_to_parent(signal.SIGKILL)
    keep_freed_memory(os.environ)
    program = own_bytes()
    shape, processes = Shape(*arguments.shape), SIDES[arguments.side]
    control = Control(arguments.control)
    if arguments.side in UNISONO:
        with_unisono(shape, control, processes, has_shards=arguments.side.endswith("s"))
    else:
        prepare()
        store = dist.FileStore(arguments.meeting, processes)
        dist.init_process_group("gloo", store=store, rank=arguments.rank, world_size=processes)
        peers = {"1f1b": with_pipelining, "fsdp2": with_fsdp, "dtensor": with_dtensor}
        peers[arguments.side](shape, control, arguments.rank, processes)
        dist.destroy_process_group()
    Path(arguments.held, f"{arguments.side}-{os.getpid()}").write_text(str(program))


if __name__ == "__main__":
    main()
