"""A process that trains a GPT: with the library, in a plain loop, or with DDP. Started by `speed` and `together`.

Every side compiles the model where the device has a compiler, casts to bfloat16, uses a fused optimizer, and has the
same precision of matrix products. It trains as many steps as it is told to by a line of its standard input; or, with
``--told-to FILE``, a fixed number of them, and then writes what it has measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import unisono
from benchmarks.gpu.gpt import GPT, SMALL, TINY
from benchmarks.gpu.training import COMPILER, DEVICE, abilities, import_device
from unisono.system import accelerators
from unisono.system.lifetime import bind_to_parent

__all__ = ["MICROBATCHES", "WARM", "Turn"]

MICROBATCHES: Final = 8
WARM: Final = 10
"""Steps before anything is measured: kernels are compiled, and the library compares its workers' first steps."""
MEASURED: Final = 12
ALONE_SIDES: Final = 4
"""That have their model on one device at a time."""
BYTES_PER_SAMPLE: Final = 1.6e9
"""Of the activations of one sequence of the larger GPT, generously."""

GoOn = Callable[[], bool]
"""Is called at the head of each step."""


class Turn(NamedTuple):
    """What a number of steps has shown."""

    tokens_per_s: float
    peak_bytes: int
    """Of the device's memory that was in use; 0: not known."""


class Model(NamedTuple):
    """The same on all sides."""

    gpt: GPT
    optimizer: torch.optim.Optimizer
    data: TensorDataset
    size: int
    """Of a micro-batch."""

    @property
    def tokens_per_step(self) -> int:
        return self.size * MICROBATCHES * int(self.data.tensors[0].shape[1])

    def loss(self, called: Callable[..., Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return called(tokens, targets)


def _model(device: torch.device) -> Model:
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    is_large = {DEVICE, COMPILER} <= abilities(device.type)
    shape, size = (SMALL, _microbatch_size(device)) if is_large else (TINY, 2)
    tokens = torch.randint(shape.tokens, (size * MICROBATCHES * 4, shape.context + 1))
    gpt = GPT(shape).to(device)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    return Model(gpt, optimizer, TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), size)


def _microbatch_size(device: torch.device) -> int:
    """Return how many sequences fit beside the states of all sides."""
    room = (accelerators.capacity(device) or 0) / ALONE_SIDES - 3e9  # parameters, gradients and states
    return max(1, min(16, int(room / BYTES_PER_SAMPLE)))


def _compiled(model: torch.nn.Module, device: torch.device) -> Any:
    return torch.compile(model) if COMPILER in abilities(device.type) else model


# -- how many steps ------------------------------------------------------------------------------------------------


def _told(device: torch.device, tokens_per_step: int) -> GoOn:
    """Do as many steps as a line of the standard input says; then print what they have shown, and wait for the next."""
    left, steps, began = 0, 0, 0.0

    def go_on() -> bool:
        nonlocal left, steps, began
        if left == 0:
            if steps:
                print(json.dumps(_turn(device, steps * tokens_per_step, began)), flush=True)
            line = sys.stdin.readline()
            if not line:
                return False
            left = steps = int(line)
            began = _now(device)
        left -= 1
        return True

    return go_on


def _fixed(device: torch.device, tokens_per_step: int, tell: Callable[[str], object]) -> GoOn:
    """Do a number of steps, and tell what the later ones have shown."""
    done, began = 0, 0.0

    def go_on() -> bool:
        nonlocal done, began
        if done == WARM:
            began = _now(device)
        if done == WARM + MEASURED:
            tell(json.dumps(_turn(device, MEASURED * tokens_per_step, began)))
            return False
        done += 1
        return True

    return go_on


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        accelerators.synchronize(device)
    return time.perf_counter()


def _turn(device: torch.device, tokens: int, began: float) -> Turn:
    return Turn(tokens / (_now(device) - began), accelerators.peak_bytes(device))


# -- the sides -----------------------------------------------------------------------------------------------------


def with_unisono(device: str, out: Path | None, *, deterministic: bool) -> None:
    run = unisono.Run(seed=1, device="cpu" if device == "cpu" else None, deterministic=deterministic)
    model = _model(run.device)
    run.track(model=model.gpt, optimizer=model.optimizer)
    called = _compiled(model.gpt, run.device)
    go_on = _control(run.device, model, out if run.is_main else None, is_told=out is None)
    data, batch_size = model.data, model.size * MICROBATCHES
    for step in run.steps(data, batch_size=batch_size, microbatches=MICROBATCHES, epochs=1 << 20):
        if not go_on():
            break
        for tokens, targets in step:
            step.backward(model.loss(called, tokens, targets))
        model.optimizer.step()


def plain(device: str, out: Path | None, *, deterministic: bool) -> None:
    """The loop that the library replaces: on one device, or with DDP on as many as the environment has ranks."""
    size = int(os.environ.get("WORLD_SIZE", "0"))
    place = torch.device("cpu") if device == "cpu" else accelerators.choose(int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(1)
    if deterministic:  # what the library sets
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    rank = 0
    if size:
        dist.init_process_group("gloo" if DEVICE not in abilities(device) else None)
        rank = dist.get_rank()
    model = _model(place)
    wrapped: Any = DistributedDataParallel(model.gpt) if size else model.gpt
    called = _compiled(wrapped, place)
    go_on = _control(place, model, out if rank == 0 else None, is_told=out is None)
    draw = torch.Generator().manual_seed(1)
    while True:
        for batch in torch.randperm(len(model.data), generator=draw).split(model.size * MICROBATCHES):
            if not go_on():
                return
            model.optimizer.zero_grad()
            own = batch.split(model.size)[rank :: max(1, size)]
            for number, index in enumerate(own):
                tokens, targets = (each[index].to(place, non_blocking=True) for each in model.data.tensors)
                waits: Any = wrapped.no_sync() if size and number < len(own) - 1 else contextlib.nullcontext()
                with waits:
                    (model.loss(called, tokens, targets) / len(own)).backward()
            model.optimizer.step()


def _control(device: torch.device, model: Model, out: Path | None, *, is_told: bool) -> GoOn:
    if is_told:
        return _told(device, model.tokens_per_step)
    return _fixed(device, model.tokens_per_step, out.write_text if out is not None else lambda _: None)


def main() -> None:
    parser = argparse.ArgumentParser(description="one side of a measurement; started by benchmarks.gpu")
    parser.add_argument("side", choices=["plain", "plain deterministic", "unisono", "unisono free"])
    parser.add_argument("--device", required=True)
    parser.add_argument("--import", dest="module", default="")
    parser.add_argument("--told-to", type=Path)
    arguments = parser.parse_args()
    if arguments.told_to is None:
        bind_to_parent(signal.SIGKILL)
    import_device(arguments.module)
    side = with_unisono if arguments.side.startswith("unisono") else plain
    side(arguments.device, arguments.told_to, deterministic=arguments.side in ("unisono", "plain deterministic"))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
