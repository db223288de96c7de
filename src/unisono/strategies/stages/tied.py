"""Weights that are tied over several stages: each stage has a parameter of its own, and all get the sum of gradients.

So every one of them gets the same updates, and they stay equal. The gradients are summed over the micro-batches stage
by stage, as all gradients are, and the sums are added in the order of the stages: on one process as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from unisono.core.errors import UsageError
from unisono.core.plan import Plan
from unisono.engine.exchange import Parcel
from unisono.engine.rounds.members import Gathered, Members, Undivided
from unisono.system.faults import point

__all__ = ["TiedRound", "Ties", "untie"]

Ties = Sequence[Mapping[int, nn.Parameter]]
"""By tie: by stage, the parameter."""


def untie(modules_of: Sequence[Sequence[nn.Module]]) -> list[dict[int, nn.Parameter]]:
    """Give each stage a parameter of its own where several have the same; return those that belong together.

    Args:
        modules_of: by stage.

    Raises:
        UsageError: a module itself is in several stages.
    """
    stage_of: dict[int, int] = {}
    first: dict[int, tuple[int, nn.Parameter]] = {}
    found: dict[int, dict[int, nn.Parameter]] = {}
    for stage, modules in enumerate(modules_of):
        for module in (each for outer in modules for each in outer.modules()):
            own = stage_of.setdefault(id(module), stage)
            if own != stage and (module._parameters or module._buffers):
                raise UsageError(
                    f"one {type(module).__qualname__} is in stages {own} and {stage} of unisono.Stages, and a module "
                    "belongs to one stage: make two modules, and give the second the weights of the first "
                    "(b.weight = a.weight) if they are to be the same"
                )
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                began, _ = first.setdefault(id(parameter), (stage, parameter))
                if began == stage:
                    continue
                tie = found.setdefault(id(parameter), {began: parameter})
                if stage not in tie:
                    tie[stage] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                    first[id(tie[stage])] = (stage, tie[stage])
                module._parameters[name] = tie[stage]
    return list(found.values())


class TiedRound(Undivided):
    """Members tell each other the gradients of tied weights, each of which belongs to another part. Collective.

    It ends with an exchange in which each member says that it has all: who has passed it may change its gradients.

    Args:
        ties: by tie, by stage: the parts that carry its weight, and the gradient; where it is elsewhere, a meta tensor.
    """

    kind: Final = "tied"
    title: Final = "the gradients of tied weights"

    def __init__(
        self, members: Members, ties: Sequence[Mapping[int, tuple[Sequence[int], Tensor]]], device: torch.device
    ) -> None:
        super().__init__(members)
        self._ties = ties
        self._device = device
        self.found: list[dict[int, Tensor]] = []
        """By tie, by stage: the gradient. Of a tie that this member has no part of: {}."""

    def compute(self, plan: Plan) -> Iterator[object]:
        yield from ()

    def combine(self, plan: Plan) -> Gathered:
        members = self._members
        if not any(letter.is_final for letter in members.letters(b"")):
            found, parcels = [], []
            part, parts = members.team.part, members.team.parts
            for tie in self._ties:
                own = dict[int, Tensor]()
                carriers = {one for parts_with, _ in tie.values() for one in parts_with}
                for stage, (holders, gradient) in tie.items():
                    source = next(rank for rank, each in enumerate(parts) if each in holders)
                    targets = tuple(rank for rank, each in enumerate(parts) if each in carriers and each not in holders)
                    there = gradient
                    if part in carriers and part not in holders:
                        there = torch.empty_like(gradient, device=self._device)
                    if part in carriers:
                        own[stage] = there
                    if targets:
                        parcels.append(Parcel(source, targets, there))
                found.append(own)
            members.deliver(parcels)
            self.found = found
            point("stages.tied")
            members.gather(b"")
        return Gathered(members, b"")
