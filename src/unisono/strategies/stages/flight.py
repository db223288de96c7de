"""Flights: the way of one micro-batch through the stages of this worker, forward and back.

Automatic differentiation is cut between two stages: the output of one is detached, and what the next one has computed
with it gives the gradient with which the backward of the first begins. On one process and on several, the same
operations are computed in the same order, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unisono.core.errors import StepError
from unisono.engine.microbatch.losses import Microbatch
from unisono.strategies.parallel.place import Exchange
from unisono.strategies.parallel.value import Sharded
from unisono.strategies.stages.module import Stages

__all__ = ["Away", "Flight", "OwnBuffers", "Pilot", "one_forward_one_backward"]

Tensors = tuple[Tensor, ...]


class Away(BaseException):
    """Ends the script's function at the call of the model, where the last stage is on another process."""


@dataclass
class Flight:
    """One micro-batch between its forward and its backward."""

    leaf: int
    microbatch: Microbatch | None = None
    inputs: dict[int, Tensors] = field(default_factory=dict)
    """By stage but the first one of all: what it has got, cut from what has made it."""
    outputs: dict[int, Tensors] = field(default_factory=dict)
    """By stage but the last one of all."""
    has_run: bool = False
    result: Any = None
    """Of the script's function, where the last stage is."""
    buffers: list[Tensor | None] = field(default_factory=list)
    """After the forward."""
    places: dict[int, int] | None = None
    """Digests of what has come out here, by place (`unisono.core.groups.places`); None: nobody compares them."""


class Pilot:
    """Takes micro-batches through the stages that are on this worker.

    Args:
        seed: sets the generators for a stage of the current micro-batch.
        send: sends the output of the last stage here to the next part; receive: returns that of the part before.
        exchange: sends a tensor to another part with the same stages, and returns what it has sent.
    """

    def __init__(
        self,
        stages: Stages,
        seed: Callable[[int, int], None],
        send: Callable[[Any], None] | None = None,
        receive: Callable[[], Any] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.flight: Flight | None = None
        self._stages = stages
        self._seed = seed
        self._send = send
        self._receive = receive
        self._exchange = exchange

    def exchange(self, shard_part: int, tensor: Tensor) -> Tensor:
        """Send a tensor to the process of this column with that number, and return what it has sent."""
        assert self._exchange is not None
        return self._exchange(shard_part, tensor)

    def forward(self, args: tuple[Any, ...]) -> Any:
        """Return the output of the last stage; raise `Away` where that is elsewhere."""
        flight, stages = self.flight, self._stages
        if flight is None or flight.has_run:
            raise StepError(
                "unisono.Stages is called once for each micro-batch, within the function of step.compute; this call is "
                + ("the second one" if flight is not None else "where no micro-batch is computed")
            )
        flight.has_run = True
        own = stages.own
        given = args
        if own.start > 0:
            assert self._receive is not None
            tensors, needed = self._receive()
            given = flight.inputs[own.start] = tuple(
                tensor.requires_grad_() if needs else tensor for tensor, needs in zip(tensors, needed, strict=True)
            )
        for stage in own:
            self._seed(flight.leaf, stage)
            found = stages.run_stage(stage, given)
            if stage == stages.num_stages - 1:
                return found
            made = flight.outputs[stage] = _checked(found, stage)
            if stage + 1 in own:
                given = flight.inputs[stage + 1] = tuple(
                    each.detach().contiguous().requires_grad_(each.requires_grad) for each in made
                )
        assert self._send is not None
        self._send(([each.detach().contiguous() for each in made], [each.requires_grad for each in made]))
        raise Away

    def chain(self) -> None:
        """Compute the gradients of the stages here before the last one, whose backward is over."""
        assert self.flight is not None
        self.back(self._stages.own.stop - 2)

    def back(self, last: int, gradients: Sequence[Tensor | None] | None = None) -> None:
        """Compute the gradients of the stages here, from the last one of these that is to be computed.

        Args:
            gradients: of its outputs; None: they are here.
        """
        flight = self.flight
        assert flight is not None
        for stage in range(last, self._stages.own.start - 1, -1):
            if gradients is None:
                gradients = _contiguous(flight.inputs.pop(stage + 1))
            pairs = [
                (made, gradient)
                for made, gradient in zip(flight.outputs.pop(stage), gradients, strict=True)
                if gradient is not None and made.requires_grad
            ]
            if pairs:
                torch.autograd.backward([made for made, _ in pairs], [gradient for _, gradient in pairs])
            gradients = None

    def take_gradients(self) -> list[Tensor | None]:
        """Return the gradients of what the first stage here has got."""
        assert self.flight is not None
        return _contiguous(self.flight.inputs.get(self._stages.own.start, ()))


def _contiguous(inputs: Tensors) -> list[Tensor | None]:
    """Return the gradients of what a stage has got, in the layout in which they travel between processes."""
    return [None if each.grad is None else each.grad.contiguous() for each in inputs]


def _checked(found: Any, stage: int) -> Tensors:
    made = found if isinstance(found, tuple) else (found,)
    if not made or not all(isinstance(each, Tensor) for each in made):
        kinds = ", ".join(type(each).__qualname__ for each in made)
        raise StepError(
            f"stage {stage} of unisono.Stages returned ({kinds}): between two stages go a tensor or a tuple of tensors"
        )
    if any(isinstance(each, Sharded) for each in made):
        raise StepError(
            f"stage {stage} of unisono.Stages returned a tensor in shards: between a layer that unisono.parallelize "
            "has cut by columns and the one that is cut by rows there can be no cut of the stages"
        )
    return made


class OwnBuffers:
    """Buffers of a micro-batch that is under way while others begin: each has tensors of its own.

    Args:
        owners: (module, name) of each buffer.
    """

    def __init__(self, owners: Sequence[tuple[nn.Module, str]]) -> None:
        self._owners = owners
        self._before: list[Tensor | None] = []

    def take_off(self) -> None:
        """Put copies in the place of the buffers."""
        self._before = [module._buffers[name] for module, name in self._owners]
        self._put([None if one is None else one.clone() for one in self._before])

    def land(self) -> list[Tensor | None]:
        """Put the buffers back, and return what was in their place."""
        found = [module._buffers[name] for module, name in self._owners]
        self._put(self._before)
        return found

    def board(self, buffers: Sequence[Tensor | None]) -> None:
        """Put what `land` has returned in the place of the buffers."""
        self._before = [module._buffers[name] for module, name in self._owners]
        self._put(buffers)

    def _put(self, buffers: Sequence[Tensor | None]) -> None:
        for (module, name), buffer in zip(self._owners, buffers, strict=True):
            module._buffers[name] = buffer


def one_forward_one_backward(leaves: Sequence[int], ahead: int) -> list[tuple[bool, int]]:
    """Return the order in which a worker computes: (whether it is the forward, micro-batch).

    Source: PipeDream-Flush (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021), known as
    1F1B: at most ``ahead + 1`` micro-batches are under way on a worker.

    Args:
        ahead: how many parts follow the worker's own.
    """
    warm = min(ahead, len(leaves))
    order = [(True, leaf) for leaf in leaves[:warm]]
    for index, leaf in enumerate(leaves[warm:]):
        order += [(True, leaf), (False, leaves[index])]
    return order + [(False, leaf) for leaf in leaves[len(leaves) - warm :]]
