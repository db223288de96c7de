"""What BatchNorm over the whole global batch costs where the global batch is computed in micro-batches.

python -m benchmarks.sync_batch_norm                                # some minutes
python -m benchmarks.sync_batch_norm --microbatches 1,4 --steps 2   # seconds

The statistics of a layer need the activations of **all** micro-batches, so a worker has to bring the forward passes of
all its micro-batches to this layer before one of them can go on, and in the backward pass the same again. This is a
trial of that in one process, for the docs, and no part of the library: a thread for each micro-batch, of which one runs
at a time and hands on a baton at each layer. What is compared is a small residual network with BatchNorm, which takes
its micro-batches one after the other, and the same network with all statistics in common.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.report import print_table, write_json
from unisono.core.tree import leaf, schedule

__all__ = ["Common", "Together"]

SIDES = ("one", "common")


class Together:
    """Runs a function once for each micro-batch: a thread each, one at a time, in their order.

    Args:
        num_leaves: micro-batches.

    Attributes:
        num_stops: how often all have waited for each other.
    """

    def __init__(self, num_leaves: int) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(num_leaves)]
        self._values: list[Tensor] = []
        self._sum = torch.empty(0)
        self._index = threading.local()
        self._errors: list[BaseException] = []
        self.num_stops = 0

    def run(self, function: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=self._run, args=(function, i)) for i in range(len(self._turns))]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, function: Callable[[int], None], index: int) -> None:
        self._index.value = index
        self._turns[index].acquire()
        try:
            function(index)
        except BaseException as error:
            self._errors.append(error)
        if index + 1 < len(self._turns):
            self._turns[index + 1].release()

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all micro-batches, in the order of the summation tree, when all have given theirs."""
        index: int = self._index.value
        self._values.append(value)
        if index + 1 == len(self._turns):
            self._sum, self._values = _fold(self._values), []
            self.num_stops += 1
        if len(self._turns) > 1:
            self._turns[(index + 1) % len(self._turns)].release()
            self._turns[index].acquire()
        return self._sum


def _fold(values: Sequence[Tensor]) -> Tensor:
    held = {leaf(i, len(values)): value for i, value in enumerate(values)}
    for left, right, parent in schedule(held, len(values))[0]:
        held[parent] = held.pop(left) + held.pop(right)
    (total,) = held.values()
    return total


class _Normalize(torch.autograd.Function):
    """Normalize by statistics over all micro-batches."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, eps: float, together: Together) -> Tensor:
        axes, count = (0, 2, 3), inputs.numel() // inputs.shape[1]
        squares = (inputs * inputs).sum(axes)
        own = torch.stack([inputs.sum(axes).double(), squares.double(), torch.full_like(squares.double(), count)])
        sums, squared, counts = together.sum(own)
        mean = sums / counts
        variance = squared / counts - mean * mean
        mean, variance = mean.to(inputs.dtype), variance.to(inputs.dtype)
        ctx.save_for_backward(inputs, weight, mean, torch.rsqrt(variance + eps), counts.to(inputs.dtype))
        ctx.together = together
        return F.batch_norm(inputs, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        inputs, weight, mean, scale, counts = ctx.saved_tensors
        centred = (inputs - mean[:, None, None]) * scale[:, None, None]
        own_bias, own_weight = gradient.sum((0, 2, 3)), (gradient * centred).sum((0, 2, 3))
        of_bias, of_weight = ctx.together.sum(torch.stack([own_bias.double(), own_weight.double()])).to(gradient.dtype)
        means, slopes = (of_bias / counts)[:, None, None], (of_weight / counts)[:, None, None]
        result = (gradient - means - centred * slopes) * (weight * scale)[:, None, None]
        return result, own_weight, own_bias, None, None


class Common(nn.Module):
    """BatchNorm whose statistics are those of all micro-batches of a step."""

    def __init__(self, num_features: int, together: Together) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))
        self._together = together

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = _Normalize.apply(inputs, self.weight, self.bias, 1e-5, self._together)  # type: ignore[no-untyped-call]
        return result


class _Block(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(norm(width) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.norms[0](self.first(inputs)))
        return torch.relu(inputs + self.norms[1](self.second(hidden)))


def network(norm: Callable[[int], nn.Module], *, width: int = 32, blocks: int = 8) -> nn.Module:
    """A residual network with two normalizing layers a block."""
    body = [_Block(width, norm) for _ in range(blocks)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *body, *head)


def measure(side: str, num_leaves: int, samples: int, steps: int) -> dict[str, float]:
    """Train for some steps in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    together = Together(num_leaves)
    model = network(nn.BatchNorm2d if side == "one" else lambda features: Common(features, together))
    pictures, labels = torch.randn(num_leaves, samples, 3, 32, 32), torch.randint(10, (num_leaves, samples))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def compute(index: int) -> None:
        (F.cross_entropy(model(pictures[index]), labels[index]) / num_leaves).backward()

    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        model.zero_grad()
        if side == "common":
            together.run(compute)
        else:
            for index in range(num_leaves):
                compute(index)
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "step_ms": 1000 * statistics.median(times[1:]),
        "activations_mib": (peak - before) / 1024,
        "stops": together.num_stops / (steps + 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--samples", type=int, default=16, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.side:
        print(json.dumps(measure(options.side, options.microbatches[0], options.samples, options.steps)))
        return
    rows, figures, runs = [], {}, []
    for num_leaves in options.microbatches:
        found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(options.turns):
            for side in SIDES:  # each in a process of its own: the peak of memory is that of a process
                size = ["--microbatches", str(num_leaves), "--samples", str(options.samples)]
                command = [sys.executable, "-m", "benchmarks.sync_batch_norm", "--side", side, *size]
                done = subprocess.run([*command, "--steps", str(options.steps)], capture_output=True, check=True)
                found[side].append(json.loads(done.stdout))
        one, common = (
            {name: statistics.median(each[name] for each in found[side]) for name in found[side][0]} for side in SIDES
        )
        for name in ("step_ms", "activations_mib"):
            figures[f"{name}.one.{num_leaves}"], figures[f"{name}.common.{num_leaves}"] = one[name], common[name]
        figures[f"stops.{num_leaves}"] = common["stops"]
        rows.append(
            [
                *(str(num_leaves), f"{one['step_ms']:.0f}", f"{common['step_ms']:.0f}"),
                *(f"{one['activations_mib']:.0f}", f"{common['activations_mib']:.0f}", f"{common['stops']:.0f}"),
            ]
        )
        runs.append({"microbatches": num_leaves, **found})
    print_table(("micro-batches", "step ms", "in common", "activations MiB", "in common", "stops a step"), rows)
    if options.json:
        write_json(options.json, figures, runs)


if __name__ == "__main__":
    main()
