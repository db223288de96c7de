"""Trainings on the CPU, on the emulated device alone, and there on two workers."""

from __future__ import annotations

import json
import sys

import torch

from tests.emulated.apart import use_the_device
from tests.workers.models import RECIPES, Outcome
from tests.workers.processes import Seat, Team
from tests.workers.static_team import Place, train_on
from unisono import Run

SEED, MICROBATCHES = 3, 6
Outcomes = dict[str, Outcome]


def train(name: str, run: Run) -> Outcome:
    with run:
        return RECIPES[name].train(run, MICROBATCHES)


def _alone(seat: Seat, names: list[str]) -> tuple[Outcomes, Outcomes]:
    torch.set_num_threads(1)
    device = use_the_device()
    there = {}
    for name in names:
        run = Run(None, seed=SEED)
        assert run.device == device, "it is chosen by itself"
        there[name] = train(name, run)
    return {name: train(name, Run(None, seed=SEED, device="cpu")) for name in names}, there


def _together(seat: Seat, place: Place, names: list[str]) -> Outcomes:
    place.device = use_the_device()
    return {name: train(name, place.run(None, seed=SEED)) for name in names}


def main(names: list[str]) -> None:
    """Print which of them differ from the CPU."""
    with Team(1, _alone, names) as team:
        ((here, there),) = team.results()
    first, second = train_on("gloo", 2, _together, names)
    found = {"alone": there, "first of two": first, "second of two": second}
    print(json.dumps({where: [name for name in names if one[name] != here[name]] for where, one in found.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
