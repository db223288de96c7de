"""What a step, also of a strategy, reads from the device by line, and what comes of values that are read late."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.emulated.apart import use_the_device
from tests.workers.processes import Seat, Team
from tests.workers.static_team import Place, train_on
from unisono.core.errors import LossError
from unisono.core.rehearsals import is_compared
from unisono.engine.state.packing import digest_of_tensor
from unisono.script.run import Run

FIRST = 9
"""Up to the eighth step, states are compared and micro-batches rehearsed; with a delay, looked at some steps later."""
STEPS = 11
OWN = "emulated/counted.py"
"""What the script reads is its own."""


def training(run: Run, **tracked: Any) -> tuple[TensorDataset, nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(512, 1, 8, 8, generator=generator), torch.randint(0, 10, (512,), generator=generator)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer, **tracked)
    return TensorDataset(images, labels), model, optimizer


def count(run: Run, *, scaler: bool = False, weighs: bool = False, delay: int = 0) -> dict[str, Any]:
    """Train, and return the most that a step has read, from one update to the next: by line, between forward and
    backward, in bytes of copies.
    """
    device = importlib.import_module("tests.emulated.accelerator")
    steps = STEPS + 2 * delay
    with run:
        tracked = {"scaler": torch.amp.GradScaler("emu")} if scaler else {}
        data, model, optimizer = training(run, **tracked)
        most: list[Any] = []
        between = staged = 0
        for step in run.steps(data, batch_size=16, microbatches=4, max_steps=steps + delay + 1, delay=delay):
            near = range(step.number - delay, step.number + delay + 1)  # what is under way
            is_counted = step.number >= FIRST + delay and not any(
                is_compared(one, is_last=one >= steps) for one in near
            )
            for inputs, targets in step:
                inputs, targets = inputs.to(run.device), targets.to(run.device)
                out = model(inputs)
                loss = F.cross_entropy(out, targets)
                before = len(device.reads)
                step.backward(loss, weight=(targets > 4).sum() if weighs else None, scaler=tracked.get("scaler"))
                here = [read for read in device.reads[before:] if read.thread == "MainThread"]
                between += len(here) if is_counted else 0
                step.add(right=(out.argmax(1) == targets).sum(), loss=loss, seen=len(targets))
            found = [read for read in device.control_reads() if read.file != OWN]
            if is_counted:
                most = max(most, found, key=len)
                staged = max(staged, device.staged_bytes())
            device.reads.clear()
            if scaler:
                tracked["scaler"].step(optimizer)
                tracked["scaler"].update()
                device.reads.clear()  # torch's own: it looks whether gradients are infinite
            else:
                optimizer.step()
    return {"lines": dict(Counter(read.place for read in most)), "between": between, "staged": staged}


def count_local(run: Run) -> dict[str, Any]:
    """Train by local steps; return the most that an inner step of the last round but one, which is not compared, has
    read, and what that round has read beside its steps.
    """
    device = importlib.import_module("tests.emulated.accelerator")
    with run:
        data, model, optimizer = training(run)
        inner: list[list[Any]] = []
        around: list[list[Any]] = []
        device.reads.clear()
        for round_ in run.local_steps(
            data, replicas=2, inner_steps=2, batch_size=16, microbatches=4, max_steps=24, drop_last=True
        ):
            most: list[Any] = []
            for number, step in enumerate(round_):
                begun = len(device.reads)
                for inputs, targets in step:
                    step.backward(F.cross_entropy(model(inputs), targets))
                if number:  # the first micro-batch of a round is compared
                    most = max(most, device.control_reads(device.reads[begun:]), key=len)
                optimizer.step()
                del device.reads[begun:]
            inner.append(most)
            around.append(device.control_reads())
            device.reads.clear()
    return {
        "inner": dict(Counter(read.place for read in inner[-2])),
        "around": dict(Counter(read.place for read in around[-2])),
    }


def weighed(device: str) -> dict[str, int]:
    """Train with losses that are 0 / 0 where their weight is 0, as those of texts without a word that counts; return
    digests of the parameters and buffers.
    """
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(64, 1, 6, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator)
    with Run(None, seed=3, device=device) as run:
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 4)).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(TensorDataset(images, labels), batch_size=16, microbatches=8, epochs=2):
            for inputs, targets in step:
                targets = targets.to(run.device)
                keep = targets > 1
                losses = F.cross_entropy(model(inputs.to(run.device)), targets, reduction="none")
                step.backward((losses * keep).sum() / keep.sum(), weight=keep.sum())
            optimizer.step()
        return {name: digest_of_tensor(value) for name, value in model.state_dict().items()}


def refusal(value: float, weight: float) -> str:
    """Return what is said of the third micro-batch's loss or weight."""
    try:
        with Run(None, seed=3) as run:
            model = nn.Linear(2, 1).to(run.device)
            run.track(model=model)
            for step in run.steps(TensorDataset(torch.ones(8, 2)), batch_size=8, microbatches=4, shuffle=False):
                for number, (inputs,) in enumerate(step):
                    factor, share = (value, weight) if number == 2 else (1.0, 1.0)
                    loss = model(inputs.to(run.device)).mean() * factor
                    step.backward(loss, weight=torch.tensor(share, device=run.device))
    except LossError as error:
        return str(error)
    return ""


def digests_differ() -> list[str]:
    """Return the kinds of tensors whose digest is another on the device."""
    large = torch.randn(3 * (1 << 17) + 5)
    tensors = {
        "nothing": torch.empty(0, 3),
        "one byte": torch.tensor(True),
        "odd": torch.arange(11, dtype=torch.int16),
        "some blocks": large,
        "a part": large[1:700],
        "turned": torch.randn(5, 7).T,
    }
    return [name for name, one in tensors.items() if digest_of_tensor(one) != digest_of_tensor(one.to("emu"))]


def _alone(seat: Seat) -> dict[str, Any]:
    torch.set_num_threads(1)
    use_the_device()
    found: dict[str, Any] = {
        "alone": count(Run(None, seed=3)),
        "with a scaler": count(Run(None, seed=3), scaler=True),
        "with weights": count(Run(None, seed=3), weighs=True),
        "refusals": [refusal(math.nan, 1.0), refusal(1.0, -1.0), refusal(math.nan, 0.0)],
        "digests": digests_differ(),
    }
    return {**found, "weighed": [weighed("cpu"), weighed("emu:0")]}


def _together(seat: Seat, place: Place) -> dict[str, Any]:
    place.device = use_the_device()
    return {"of two": count(place.run(None, seed=3, balance=False))}


def _strategies_alone(seat: Seat) -> dict[str, Any]:
    torch.set_num_threads(1)
    use_the_device()
    return {
        "sums under way": count(Run(None, seed=3), delay=2),
        "local steps": count_local(Run(None, seed=3)),
    }


def _strategies_together(seat: Seat, place: Place) -> dict[str, Any]:
    place.device = use_the_device()
    return {
        "of two, sums under way": count(place.run(None, seed=3, balance=False), delay=2),
        "of two, local steps": count_local(place.run(None, seed=3, balance=False)),
    }


def main(of_strategies: bool) -> None:
    with Team(1, _strategies_alone if of_strategies else _alone) as team:
        (alone,) = team.results()
    first, second = train_on("gloo", 2, _strategies_together if of_strategies else _together)
    both = {
        f"{nth} {name}": one for nth, found in (("first", first), ("second", second)) for name, one in found.items()
    }
    print(json.dumps({**alone, **both}))


if __name__ == "__main__":
    main("strategies" in sys.argv)
