"""`Stages`: a model that is cut into logical stages, of which a worker may have some."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unisono.cluster.worker import member as members
from unisono.core.errors import UsageError
from unisono.core.groups import parts_of
from unisono.strategies.stages.tied import untie

__all__ = ["Carrier", "Stages", "stages_in"]


class Carrier(Protocol):
    """Computes the stages that are on this worker within a training step."""

    def forward(self, args: tuple[Any, ...]) -> Any:
        """Return the output of the last stage."""


class Stages(nn.Module):
    """A sequence of modules that is cut into stages: ``unisono.Stages(embed, *blocks, head, cuts=4)``.

    The stages are part of the recipe: automatic differentiation and random numbers are cut between them, on one process
    as well. Which processes carry them is not: ``unisono run train.py --workers 2x4`` trains with two groups of four
    processes, each with a fourth of the stages, and gives the bits of one process with all of them.

    Each module gets what the one before has returned: a tensor, or a tuple of tensors as its arguments. What the first
    one gets may be anything. The inner loop of a training is one call::

        for step in run.steps(data, batch_size=64, microbatches=8):
            step.compute(lambda x, y: F.cross_entropy(model(x), y))
            optimizer.step()

    The output of the last stage exists on the processes that have the last stage only. The function is called on all of
    them; on the others it ends at ``model(x)``.

    A weight that is tied over several stages becomes a parameter of each of them. All of these get the sum of their
    gradients, and stay equal.

    Until the first training loop every process has all stages, so that initial values may be drawn as usual. Then it
    keeps its own, and the parameters of the others are meta tensors. A module may be given as a function without
    arguments that makes it: then a process never has more than one module of other stages at a time.

    Args:
        modules: at least one for each stage; modules or functions that make one.
        cuts: the number S of stages, which get equally many modules as far as that goes (the first ones one more); or
            the indices of the modules with which the second and each following stage begins.

    Raises:
        UsageError: the cuts make no stages of these modules, or the run has more parts than there are stages.
    """

    def __init__(self, *modules: nn.Module | Callable[[], nn.Module], cuts: int | Sequence[int]) -> None:
        super().__init__()
        self.cuts = _starts(cuts, len(modules))
        """By stage, the index of its first module."""
        member = members.current()
        self.num_parts = member.spec.run.settings.parts if member is not None else 1
        self.part = member.part if member is not None else 0
        if self.num_parts > self.num_stages:
            raise UsageError(
                f"unisono.Stages has {self.num_stages} stages, and a group of this run has {self.num_parts} processes, "
                f"each of which carries at least one: give more cuts, or start with --workers Nx{self.num_stages}"
            )
        self._carrier: Carrier | None = None
        self.is_cut = False
        """Whether this process has its own stages only."""
        for index, given in enumerate(modules):
            module = given if isinstance(given, nn.Module) else given()
            if not isinstance(module, nn.Module):
                raise UsageError(
                    f"unisono.Stages takes modules, or functions that make one; got a {type(module).__qualname__}"
                )
            if not isinstance(given, nn.Module) and not self._is_here(index):
                _empty(module)
            self.add_module(str(index), module)
        self.ties = untie([[*self.modules_of(stage)] for stage in range(self.num_stages)])
        """Weights that are tied over stages: by stage, the parameter."""

    @property
    def num_stages(self) -> int:
        return len(self.cuts)

    @property
    def of_parts(self) -> list[range]:
        """By part, the stages that it carries."""
        return parts_of(self.num_stages, self.num_parts)

    def part_of(self, stage: int) -> int:
        """Return the part that carries a stage."""
        return next(part for part, own in enumerate(self.of_parts) if stage in own)

    @property
    def own(self) -> range:
        """The stages that this process carries."""
        return self.of_parts[self.part]

    @property
    def device(self) -> torch.device:
        """Of the parameters that are here."""
        return next((one.device for one in self.parameters() if not one.is_meta), torch.device("cpu"))

    def modules_of(self, stage: int) -> Iterator[nn.Module]:
        """Yield the modules of a stage, in their order."""
        ends = [*self.cuts[1:], len(self._modules)]
        for index in range(self.cuts[stage], ends[stage]):
            module = self._modules[str(index)]
            assert module is not None
            yield module

    def stage_of(self, index: int) -> int:
        """Return the stage of a module."""
        return sum(start <= index for start in self.cuts) - 1

    def run_stage(self, stage: int, given: tuple[Any, ...]) -> Any:
        """Return the output of a stage that is here."""
        for module in self.modules_of(stage):
            found = module(*given)
            given = found if isinstance(found, tuple) else (found,)
        return found

    def forward(self, *args: Any) -> Any:
        if self._carrier is not None:
            return self._carrier.forward(args)
        if self.is_cut:
            raise UsageError(
                f"unisono.Stages was called outside of step.compute and run.evaluate(...).compute, and this process "
                f"has {len(self.own)} of its {self.num_stages} stages: call it there"
            )
        found: Any = None
        for stage in range(self.num_stages):
            found = self.run_stage(stage, args)
            args = found if isinstance(found, tuple) else (found,)
        return found

    def carry(self, carrier: Carrier | None) -> None:
        """Have calls of the model go through a carrier. Local."""
        self._carrier = carrier

    def cut(self) -> None:
        """Keep the stages of this process only. Local; before the first training loop."""
        if self.is_cut or self.num_parts == 1:
            return
        self.is_cut = True
        for index in range(len(self._modules)):
            module = self._modules[str(index)]
            if module is not None and not self._is_here(index):
                _empty(module)

    def _is_here(self, index: int) -> bool:
        return self.stage_of(index) in self.own

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Stages:
        """Convert what is here; of what is elsewhere, the dtypes."""

        def convert(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return fn(tensor)
            return torch.empty_like(tensor, dtype=fn(torch.empty(0, dtype=tensor.dtype)).dtype)

        super()._apply(convert, recurse)  # type: ignore[no-untyped-call]
        return self


def stages_in(module: nn.Module) -> list[tuple[str, Stages]]:
    """Return the `Stages` of a module, by path: itself, or those in it."""
    return [(path, each) for path, each in module.named_modules() if isinstance(each, Stages)]


def _starts(cuts: int | Sequence[int], num_modules: int) -> tuple[int, ...]:
    """Return by stage the index of its first module."""
    if isinstance(cuts, int):
        if not 1 <= cuts <= num_modules:
            raise UsageError(f"unisono.Stages cannot make {cuts} stages of {num_modules} modules, at least one each")
        small, num_big = divmod(num_modules, cuts)
        return tuple(stage * small + min(stage, num_big) for stage in range(cuts))
    found = (0, *cuts)
    if any(after <= before for before, after in itertools.pairwise(found)) or found[-1] >= num_modules:
        raise UsageError(
            f"the cuts of unisono.Stages are indices of its {num_modules} modules, ascending, from 1 to "
            f"{num_modules - 1}; got {tuple(cuts)}"
        )
    return found


def _empty(module: nn.Module) -> None:
    """Make meta tensors of the parameters and persistent buffers of a module. Whoever holds one holds it after that."""
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None and not parameter.is_meta:
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, empty)
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                owner._buffers[name] = torch.empty_like(buffer, device="meta")
