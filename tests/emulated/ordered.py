"""What is used on two streams without an event in between."""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.emulated.apart import use_the_device
from tests.workers.processes import Seat, Team
from tests.workers.static_team import Place, train_on
from unisono.script.run import Run
from unisono.system import accelerators

STEPS = 6


def train(run: Run, *, aside: bool = False, **options: Any) -> dict[str, Any]:
    """Train, and return what was not in order.

    Args:
        aside: the script computes its micro-batches on a stream of its own, which waits for the current one; it lets
            the current one wait for nothing.
    """
    device: Any = importlib.import_module("tests.emulated.accelerator")
    device.order = order = device.new_order()
    side = device.Stream()
    draw = torch.Generator().manual_seed(1)
    images, labels = torch.randn(96, 1, 8, 8, generator=draw), torch.randint(0, 10, (96,), generator=draw)
    with run:
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)]
        model = nn.Sequential(*layers).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)
        data = TensorDataset(images, labels)
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=2, max_steps=STEPS, **options):
            for inputs, targets in step:
                side.wait_stream(device.current_stream())
                with device.on_stream(side) if aside else nullcontext():
                    targets = targets.to(run.device)
                    out = model(inputs.to(run.device))
                    weight = (targets > 4).sum() if aside else None
                    step.backward(F.cross_entropy(out, targets), weight=weight)
                    step.add(right=(out.argmax(1) == targets).sum())
            optimizer.step()
    device.order = None
    return {"found": order.found, "streams": len(order.streams)}


def without_events() -> None:
    """Let nothing wait for an event any more."""
    vars(accelerators).update(follow=lambda *_: None)


def _alone(seat: Seat) -> dict[str, Any]:
    torch.set_num_threads(1)
    use_the_device()
    found = {
        "plain": train(Run(None, seed=3)),
        "the script's own stream": train(Run(None, seed=3), aside=True),
        "sums under way": train(Run(None, seed=3), delay=2),
        "sums under way, the script's own stream": train(Run(None, seed=3), delay=2, aside=True),
    }
    without_events()
    found["without events: the script's own stream"] = train(Run(None, seed=3), aside=True)
    found["without events: sums under way"] = train(Run(None, seed=3), delay=2)
    return found


def _together(seat: Seat, place: Place) -> dict[str, Any]:
    place.device = use_the_device()
    return {
        "on two": train(place.run(None, seed=3, balance=False)),
        "on two, sums under way": train(place.run(None, seed=3, balance=False), delay=2),
        "on two, sums under way, the script's own stream": train(
            place.run(None, seed=3, balance=False), delay=2, aside=True
        ),
    }


def main() -> None:
    with Team(1, _alone) as team:
        (alone,) = team.results()
    first, second = train_on("gloo", 2, _together)
    print(json.dumps({**alone, **first, **{f"{name}, second": one for name, one in second.items()}}))


if __name__ == "__main__":
    main()
