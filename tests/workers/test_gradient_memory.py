"""Where gradients lie in memory: as an optimizer expects it, and never where the next backward writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def data(*shape: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(8, *shape, generator=draw), torch.arange(8) % 2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, samples: TensorDataset) -> list[Tensor]:
    """The parameters after two steps of two micro-batches each."""
    with unisono.Run(seed=1) as run:
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(samples, batch_size=8, microbatches=2, epochs=2, shuffle=False):
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.stride() == parameter.stride()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def convolutions(memory_format: torch.memory_format) -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2))
    return model.to(memory_format=memory_format)  # type: ignore[call-overload, no-any-return]


SGD: Callable[..., torch.optim.Optimizer] = torch.optim.SGD


@pytest.mark.parametrize("optimizer", [SGD, torch.optim.AdamW])
@pytest.mark.filterwarnings("ignore:.* was made before")
def test_a_fused_optimizer_updates_a_model_in_channels_last_as_another_one(optimizer: Callable[..., Any]) -> None:
    """A fused one goes through the memory of parameter and gradient side by side, whatever their strides."""
    ends = []
    for fused in (False, True):
        model = convolutions(torch.channels_last)
        ends.append(trained(model, optimizer(model.parameters(), lr=0.1, fused=fused), data(3, 5, 5)))
    for plain, fused_end in zip(*ends, strict=True):
        torch.testing.assert_close(fused_end, plain)  # a rounding of another order, and no other element


class OneBuffer(torch.autograd.Function):
    """Writes its gradients to the same memory each time, as a replayed CUDA graph does."""

    memory = torch.empty(6, 2)

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        torch.mm(inputs.t(), grads[0], out=OneBuffer.memory)
        return None, OneBuffer.memory.detach()


class OneArray(torch.autograd.Function):
    """The same with memory of numpy, of which torch sees one tensor only."""

    memory = np.empty((6, 2), dtype=np.float32)

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        OneArray.memory[...] = (inputs.t() @ grads[0]).numpy()
        return None, torch.from_numpy(OneArray.memory)


class Product(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).view(6, 2))
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs, self.weight)


@pytest.mark.filterwarnings("ignore:.* was made before")
@pytest.mark.parametrize("again", [OneBuffer, OneArray])
def test_a_gradient_in_memory_that_is_written_again_is_not_kept(again: type[torch.autograd.Function]) -> None:
    ends = []
    for function in (torch.matmul, again.apply):
        model = Product(function)
        ends += trained(model, SGD(model.parameters(), lr=0.1), data(6))
    assert torch.equal(*ends)
