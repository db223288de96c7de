"""`Stages`: a model that is cut into logical stages, of which a worker may have some.

The processes of a group are a grid: those of a column have the same stages, and of the layers that are cut into shards
(`unisono.parallelize`) each a part. Neighbours in a column have neighbouring numbers.

What a process has is told in **sections**, which do not depend on the number of processes: of each stage a section for
each shard, and one for the parameters that are not cut, which all processes with that stage have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unisono.cluster.worker import member as members
from unisono.core.errors import UsageError
from unisono.core.groups import columns_of, parts_of
from unisono.core.words import count
from unisono.strategies.parallel.layers import layers_in
from unisono.strategies.parallel.place import Place
from unisono.strategies.stages.tied import untie

__all__ = ["Carrier", "Stages", "stages_in"]


class Carrier(Protocol):
    """Computes the stages that are on this worker within a training step."""

    def forward(self, args: tuple[Any, ...]) -> Any:
        """Return the output of the last stage."""

    def exchange(self, shard_part: int, tensor: Tensor) -> Tensor:
        """Send a tensor to the process of this column with that number, and return what it has sent."""


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

    Modules may have layers that are cut into shards (`unisono.parallelize`). Of P processes of a group, as many as
    possible carry stages of their own: p, the largest divisor of P that is not above S. The other factor t of P = p x t
    divides the shards. ``cuts=1``: all processes have shards of one stage.

    Args:
        modules: at least one for each stage; modules or functions that make one.
        cuts: the number S of stages, which get equally many modules as far as that goes (the first ones one more); or
            the indices of the modules with which the second and each following stage begins.

    Raises:
        UsageError: the cuts make no stages of these modules, or the run has more parts than there are stages and
            shards.
    """

    def __init__(self, *modules: nn.Module | Callable[[], nn.Module], cuts: int | Sequence[int]) -> None:
        super().__init__()
        self.cuts = _starts(cuts, len(modules))
        """By stage, the index of its first module."""
        member = members.current()
        self.num_parts = member.spec.run.settings.parts if member is not None else 1
        """Processes of a group."""
        self.part = member.part if member is not None else 0
        self.num_stage_parts = columns_of(self.num_stages, self.num_parts)
        self.num_shard_parts = self.num_parts // self.num_stage_parts
        self.of_parts = parts_of(self.num_stages, self.num_parts, self.num_shard_parts)
        """By part, the stages that it carries."""
        self.place = Place(1)
        """The shards that are here, of layers that are cut."""
        self._carrier: Carrier | None = None
        self._are_made = any(not isinstance(given, nn.Module) for given in modules)
        self.is_cut = False
        """Whether this process has its own stages only."""
        for index, given in enumerate(modules):
            module = given if isinstance(given, nn.Module) else given()
            if not isinstance(module, nn.Module):
                raise UsageError(
                    f"unisono.Stages takes modules, or functions that make one; got a {type(module).__qualname__}"
                )
            self.add_module(str(index), module)
            self._put_in_place(module)
            if not isinstance(given, nn.Module):
                self._keep_own(index)
        if self.place.num_shards % self.num_shard_parts:
            cut = f"layers in {self.num_shards} shards" if self.num_shards else "no layers that are cut into shards"
            raise UsageError(
                f"unisono.Stages has {count(self.num_stages, 'stage')} and {cut}, and a group of this run has "
                f"{self.num_parts} processes ({self.num_stage_parts} x {self.num_shard_parts}), each of which carries "
                "stages or shards of its own: give more cuts, cut layers by unisono.parallelize, or start with "
                f"--workers Nx{self.num_stages}"
            )
        self.ties = untie([[*self.modules_of(stage)] for stage in range(self.num_stages)])
        """Weights that are tied over stages: by stage, the parameter."""

    @property
    def num_stages(self) -> int:
        return len(self.cuts)

    @property
    def num_shards(self) -> int:
        """T of the layers that are cut into shards; 0: there are none."""
        return self.place.num_shards if self.place.num_shards > 1 else 0

    @property
    def own(self) -> range:
        """The stages that this process carries."""
        return self.of_parts[self.part]

    def beside(self, number: int) -> int:
        """Return the part with the same stages as this process that has that number among them."""
        return self.part - self.part % self.num_shard_parts + number

    @property
    def num_sections(self) -> int:
        return self.num_stages * (self.num_shards + 1)

    def section(self, stage: int, shard: int | None = None) -> int:
        """Return the section of a shard of a stage; None: of what is not cut."""
        return stage * (self.num_shards + 1) + (self.num_shards if shard is None else shard)

    def parts_with(self, section: int) -> list[int]:
        """Return the parts that carry a section."""
        stage, shard = divmod(section, self.num_shards + 1)
        with_stage = [part for part, own in enumerate(self.of_parts) if stage in own]
        if shard == self.num_shards:
            return with_stage
        return [with_stage[shard * self.num_shard_parts // self.num_shards]]

    @property
    def sections_of(self) -> dict[int, int]:
        """By id of a parameter, its section.

        Raises:
            UsageError: a parameter is in several stages.
        """
        found: dict[int, int] = {}
        for stage in range(self.num_stages):
            modules = list(self.modules_of(stage))
            of_shard = {
                id(one): shard
                for module in modules
                for layer in layers_in(module)
                for pieces in layer.pieces()
                for shard, one in enumerate(pieces)
            }
            for name, one in (each for module in modules for each in module.named_parameters()):
                section = self.section(stage, of_shard.get(id(one)))
                if found.setdefault(id(one), section) != section:
                    raise UsageError(
                        f"parameter {name!r} of stage {stage} of unisono.Stages is in stage "
                        f"{found[id(one)] // (self.num_shards + 1)} as well: tie weights before unisono.Stages gets "
                        "the modules"
                    )
        return found

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
        self.place.exchange = carrier.exchange if carrier is not None else None

    def cut(self) -> None:
        """Keep the stages of this process only. Local; before the first training loop."""
        if self.is_cut or self.num_parts == 1:
            return
        self.is_cut = True
        self._divide()
        for index in range(len(self._modules)):
            self._keep_own(index)

    def _divide(self) -> None:
        if self.place.num_shards % self.num_shard_parts == 0:
            self.place.divide(self.part % self.num_shard_parts, self.num_shard_parts)

    def _put_in_place(self, module: nn.Module) -> None:
        """Note which shards of the layers of a module are here.

        Raises:
            UsageError: they are cut into other numbers than those of another module.
        """
        for layer in layers_in(module):
            if layer.place is self.place:
                continue
            if self.num_shards and layer.place.num_shards != self.num_shards:
                raise UsageError(
                    f"modules of unisono.Stages have layers in {self.num_shards} and in {layer.place.num_shards} "
                    "shards: cut all of them into equally many"
                )
            if not self.num_shards:
                self.place = Place(layer.place.num_shards)
                if self._are_made:
                    self._divide()
            layer.place = self.place

    def _keep_own(self, index: int) -> None:
        """Make meta tensors of what a module has and other processes carry."""
        module = self._modules[str(index)]
        if module is None:
            return
        if not self._is_here(index):
            if any(isinstance(one, torch.jit.ScriptModule) for one in module.modules()):
                raise UsageError(
                    f"module {index} of unisono.Stages has a part of TorchScript, which keeps its parameters itself, "
                    "so a process that carries other stages cannot leave them out: give unisono.Stages the module as "
                    "it was before torch.jit.script or torch.jit.trace, or start with whole models: --workers N"
                )
            _empty(module)
        for layer in layers_in(module):
            for pieces in layer.pieces():
                for shard, one in enumerate(pieces):
                    if shard not in self.place.own:
                        _empty_parameter(one)

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
            if parameter is not None:
                _empty_parameter(parameter)
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                owner._buffers[name] = torch.empty_like(buffer, device="meta")


def _empty_parameter(parameter: Tensor) -> None:
    if not parameter.is_meta:
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, empty)
