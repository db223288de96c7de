"""A training of a moment, whose bits have to be the same on any number of workers.

``unisono run -m benchmarks.gpu.training --workers 2 --run-dir RUN -- channels-last --device cuda`` runs one.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import unisono
from benchmarks.gpu.gpt import GPT, TINY

__all__ = ["CASES", "Case", "abilities", "import_device"]

COMPILER, DEVICE, GRAPHS = "compiler", "accelerator", "graphs"

NUM_SAMPLES, BATCH_SIZE, MICROBATCHES = 96, 24, 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is tried."""

    says: str
    model: Callable[[], nn.Module]
    """Makes a module of (inputs, labels) that returns the loss."""
    is_language: bool = True
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any]
    autocast: torch.dtype | None = None
    scales: bool = False
    wrap: Callable[[nn.Module, torch.device], Callable[..., Tensor]] = lambda model, _: model
    channels_last: bool = False
    loaders: int = 0
    needs: frozenset[str] = frozenset()
    """Of `abilities`."""


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(),
            nn.AvgPool2d(8), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 10),
        )  # fmt: skip

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(inputs), labels)


def _gpt() -> nn.Module:
    return GPT(TINY, dropout=0.1)


def _still_gpt() -> nn.Module:
    return GPT(TINY)


def _compiled(mode: str) -> Callable[[nn.Module, torch.device], Callable[..., Tensor]]:
    def wrapped(model: nn.Module, device: torch.device) -> Callable[..., Tensor]:
        made: Any = torch.compile(model, mode=mode)
        return made

    return wrapped


def _graphed(model: nn.Module, device: torch.device) -> Callable[..., Tensor]:
    """The model as one CUDA graph; each micro-batch has as many samples, or the graph would not fit."""
    tokens = torch.zeros(BATCH_SIZE // MICROBATCHES, TINY.context, dtype=torch.int64, device=device)
    made: Any = torch.cuda.make_graphed_callables(model, (tokens, tokens))
    return made


def _recomputed(model: nn.Module, device: torch.device) -> Callable[..., Tensor]:
    """The model with activation checkpointing: each block is computed again in the backward pass."""
    assert isinstance(model, GPT)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def abilities(device: str) -> frozenset[str]:
    """Return what this kind of device has: a compiler, graphs; and whether it is an accelerator."""
    found = {"cpu": {COMPILER}, "cuda": {COMPILER, DEVICE, GRAPHS}, "xpu": {COMPILER, DEVICE}}
    return frozenset(found.get(device, {DEVICE}))


def import_device(module: str) -> None:
    """Import what makes a device known to torch, if anything has to."""
    if module:
        importlib.import_module(module)


ADAMW = {"lr": 1e-3}
FUSED = {"lr": 1e-3, "fused": True}

CASES = {
    "plain": Case(says="float32, dropout", model=_gpt, options=ADAMW),
    "fused": Case(says="a fused optimizer", model=_gpt, options=FUSED),
    "capturable": Case(says="an optimizer with its step on the GPU", model=_gpt,
                       options={"lr": 1e-3, "capturable": True}, needs=frozenset({DEVICE})),
    "bf16": Case(says="autocast to bfloat16", model=_gpt, options=FUSED, autocast=torch.bfloat16),
    "fp16": Case(says="autocast to float16, with a GradScaler", model=_gpt, options=FUSED, autocast=torch.float16,
                 scales=True, needs=frozenset({DEVICE})),
    "pictures": Case(says="convolutions and BatchNorm", model=Pictures, is_language=False,
                     optimizer=torch.optim.SGD, options={"lr": 0.1, "momentum": 0.9}),
    "channels-last": Case(says="convolutions in channels-last, a fused optimizer", model=Pictures, is_language=False,
                          optimizer=torch.optim.SGD, options={"lr": 0.1, "fused": True}, channels_last=True),
    "loaders": Case(says="loader processes, pinned memory", model=Pictures, is_language=False,
                    optimizer=torch.optim.SGD, options={"lr": 0.1}, loaders=1),
    "recomputed": Case(says="activation checkpointing, with dropout", model=_gpt, options=FUSED, wrap=_recomputed),
    "compiled": Case(says="torch.compile", model=_gpt, options=FUSED, wrap=_compiled("default"),
                     needs=frozenset({COMPILER})),
    "max-autotune": Case(says="torch.compile, asked to measure kernels", model=_gpt, options=FUSED,
                         wrap=_compiled("max-autotune-no-cudagraphs"), needs=frozenset({COMPILER})),
    "compiled graphs": Case(says="torch.compile with CUDA graphs", model=_gpt, options=FUSED,
                            wrap=_compiled("reduce-overhead"), needs=frozenset({GRAPHS})),
    "graphs": Case(says="torch.cuda.make_graphed_callables", model=_still_gpt, options=FUSED, wrap=_graphed,
                   needs=frozenset({GRAPHS})),
}  # fmt: skip


def data_of(case: Case) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    if case.is_language:
        tokens = torch.randint(TINY.tokens, (NUM_SAMPLES, TINY.context + 1), generator=draw)
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    pictures = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=draw)
    return TensorDataset(pictures, torch.randint(10, (NUM_SAMPLES,), generator=draw))


@contextmanager
def _scaled(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The update that follows the block, by way of the scaler."""
    yield
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def train(case: Case, steps: int, device: str, *, balance: bool = True) -> None:
    policy = unisono.Checkpoints(every_steps=max(1, steps // 2), keep=2)
    with unisono.Run(seed=7, device=device if device == "cpu" else None, checkpoint=policy, balance=balance) as run:
        model = case.model().to(run.device)
        if case.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = case.optimizer(model.parameters(), **case.options)
        scaler = torch.amp.GradScaler(run.device.type) if case.scales else None
        run.track(model=model, optimizer=optimizer, **({"scaler": scaler} if scaler is not None else {}))
        call = case.wrap(model, run.device)
        data: Any = data_of(case)
        options: dict[str, Any] = {"batch_size": BATCH_SIZE}
        if case.loaders:
            data, options = DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=case.loaders), {}
        for step in run.steps(data, microbatches=MICROBATCHES, epochs=1000, max_steps=steps, **options):
            with _scaled(scaler, optimizer):
                for inputs, labels in step:
                    if case.channels_last:
                        inputs = inputs.contiguous(memory_format=torch.channels_last)
                    cast: AbstractContextManager[Any] = nullcontext()
                    if case.autocast is not None:
                        cast = torch.autocast(run.device.type, case.autocast)
                    with cast:
                        loss = call(inputs, labels)
                    step.backward(loss, scaler=scaler)


def main() -> None:
    parser = argparse.ArgumentParser(description="a training of a moment, for python -m benchmarks.gpu")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--import", dest="module", default="", help="a module that makes the device known to torch")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--even", action="store_true", help="all workers compute as many micro-batches")
    arguments = parser.parse_args()
    import_device(arguments.module)
    train(CASES[arguments.case], arguments.steps, arguments.device, balance=not arguments.even)


if __name__ == "__main__":
    main()
