"""A kind of round that the library does not know, in a training: the norm of every parameter, each computed once.

``unisono run toy_round.py -- --die FILE``: the second worker kills itself in the middle of the second such round, once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.core.plan import Plan
from unisono.core.plan import plan as even_plan
from unisono.core.tree import Node, leaf
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.members import Gathered


class Norms:
    """The norms of parameters: a leaf is one parameter, and the result is known to all members."""

    kind = "norms"
    title = "the norms of all parameters"

    def __init__(self, rounds: Rounds, parameters: Sequence[nn.Parameter], before_leaf: Callable[[int], None]) -> None:
        self.members, self.parameters, self.before_leaf = rounds.members, parameters, before_leaf
        self.num_leaves = len(parameters)
        self.found: dict[int, float] = {}

    def first_plan(self) -> Plan:
        return even_plan(self.members.size, self.num_leaves)

    def begin(self, plan: Plan) -> None:
        pass

    def compute(self, plan: Plan) -> Iterator[object]:
        for index in plan.ranges[self.members.rank]:
            if index not in self.found:
                self.before_leaf(index)
                self.found[index] = float(self.parameters[index].detach().norm())
        yield from ()

    def combine(self, plan: Plan) -> Gathered:
        for payload in self.members.gather(json.dumps(self.found).encode()):
            self.found |= {int(index): norm for index, norm in json.loads(payload).items()}
        return Gathered(self.members, json.dumps(self.found).encode())

    def interrupt(self) -> Collection[Node]:
        return [leaf(index, self.num_leaves) for index in self.found]

    def finish(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--die", type=Path)
    arguments = parser.parse_args()
    with unisono.Run(seed=5) as run:
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(list(torch.randn(24, 6)), batch_size=12, microbatches=6, epochs=2):
            for batch in step:
                step.backward(model(batch).square().mean())
            optimizer.step()

            def die(index: int, number: int = step.number) -> None:
                wanted = arguments.die is not None and not arguments.die.exists()
                if wanted and number == 1 and run.rank == 1 and index == 4:
                    arguments.die.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

            norms = run.play(partial(Norms, parameters=list(model.parameters()), before_leaf=die))
            step.log(**{f"norm{index}": norm for index, norm in norms.found.items()})


if __name__ == "__main__":
    main()
