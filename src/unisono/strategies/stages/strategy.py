"""The strategy of ``run.steps`` for a model that is cut into stages (`unisono.Stages`): a pipeline with the same bits.

The processes of a group pass each micro-batch from part to part, forward and back, in the order 1F1B
(`unisono.strategies.stages.flight`). Each part is summed by those that carry it (`unisono.engine.exchange.lanes`). With
the gradient of its input, a part sends the weight and the loss of the micro-batch and what the script has added up: so
each lane has them, and divides by the same weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono.core.cursor import Recipe, seed_of
from unisono.core.errors import StateLost, StepError, UsageError
from unisono.core.groups import places
from unisono.core.plan import Plan
from unisono.engine.exchange.flat import SUM_DTYPE, Sections, with_flipped_bit
from unisono.engine.exchange.lanes import Lanes
from unisono.engine.loop.step import Step, called_with, loss_and_weight
from unisono.engine.loop.strategies import Strategy
from unisono.engine.microbatch.folding import Fingerprint, gradient_of
from unisono.engine.microbatch.guards import UnusedGradients
from unisono.engine.rounds import Round
from unisono.engine.rounds.apart import forget_loop, note_loop
from unisono.engine.rounds.gradient import GradientRound, Pass, StepContext
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.team import LOST, Team
from unisono.engine.state.buffers import Buffers
from unisono.engine.state.packing import quick_digest
from unisono.engine.state.tracked import Tracked
from unisono.strategies.parallel.layers import layers_in
from unisono.strategies.stages.flight import Away, Flight, OwnBuffers, Pilot, one_forward_one_backward
from unisono.strategies.stages.link import Link
from unisono.strategies.stages.module import Stages, stages_in
from unisono.strategies.stages.spreading import SpreadModule, SpreadOptimizer, drop_elsewhere
from unisono.strategies.stages.tied import TiedRound
from unisono.system.faults import point, spoils
from unisono.system.process import Process

__all__ = ["Staged", "evaluated", "find_stages"]


def find_stages(tracked: Tracked) -> Stages | None:
    """Return the `Stages` that is tracked; None: there is none.

    Raises:
        UsageError: there are several, or layers that are cut into shards are in none.
    """
    found = {id(each): each for module in tracked.modules.values() for _, each in stages_in(module)}
    if len(found) > 1:
        raise UsageError(f"{len(found)} unisono.Stages are tracked, and a run has one: put all modules into one")
    stages = next(iter(found.values()), None)
    placed = {id(layer) for layer in layers_in(stages)} if stages is not None else set()
    for name, module in tracked.modules.items():
        if any(id(layer) not in placed for layer in layers_in(module)):
            raise UsageError(
                f"{name!r} has layers that unisono.parallelize has cut, and they are in no unisono.Stages, which "
                "trains them: model = unisono.Stages(model, cuts=1)"
            )
    return stages


class Staged(Strategy):
    """What an iteration is where the tracked model is cut into stages.

    Args:
        team: of the run.
    """

    def __init__(self, stages: Stages, tracked: Tracked, team: Team) -> None:
        self.stages = stages
        self._tracked = tracked
        self._hooks: list[RemovableHandle] = []
        stages.cut()
        self.section_of = stages.sections_of
        """By id of a parameter."""
        self._check()
        if stages.num_parts > 1:
            self._spread(team)

    @property
    def recipe(self) -> Recipe:
        stages = self.stages
        cuts: Recipe = {"stages": ",".join(map(str, stages.cuts))}
        return {**cuts, "shards": stages.num_shards} if stages.num_shards else cuts

    def sections(self, trained: Sequence[tuple[str, nn.Parameter]], buffers: Buffers) -> Sections:
        stages = self.stages
        of = {
            id(module): stage
            for stage in range(stages.num_stages)
            for outer in stages.modules_of(stage)
            for module in outer.modules()
        }
        here = frozenset(one for one in range(stages.num_sections) if stages.part in stages.parts_with(one))
        last = stages.num_stages - 1
        return Sections(
            tuple(self.section_of[id(one)] for _, one in trained),
            tuple(stages.section(of.get(id(module), last)) for module, _ in buffers.owners),
            here,
            frozenset(one for one in here if stages.parts_with(one)[0] == stages.part),
        )

    def make_step(self, number: int, unused: UnusedGradients, process: Process) -> Step:
        return StagedStep(self, self._context, number, unused=unused, process=process)

    def open(self, context: StepContext, first: int) -> None:
        if self.stages.num_shard_parts > 1 and context.rounds.judge.settles:
            raise UsageError(
                "audits (--audit) compare what each process of a group has computed, and of layers that are cut into "
                "shards every process gets the sums of all: who was wrong cannot be told. Leave --audit out, or give "
                "as many stages as a group has processes"
            )
        super().open(context, first)
        if self.stages.num_parts > 1:
            note_loop(self, context.rounds, lambda one: id(one) in self.section_of)
            optimizers = self._tracked.optimizers.values()
            self._hooks = [one.register_step_pre_hook(drop_elsewhere) for one in optimizers]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        forget_loop(self)
        self.stages.carry(None)

    def _check(self) -> None:
        """Raise UsageError where something is tracked that a model in stages cannot have."""
        for name, optimizer in self._tracked.optimizers.items():
            groups = enumerate(optimizer.param_groups)
            group_of = {id(one): number for number, group in groups for one in group["params"]}
            for tie in self.stages.ties:
                if len({group_of.get(id(one)) for one in tie.values()}) > 1:
                    raise UsageError(
                        f"weights that are tied over stages {', '.join(map(str, tie))} of unisono.Stages are in "
                        f"different parameter groups of {name!r}, which would update them differently: put them into "
                        "one group"
                    )
        for pieces in (each for layer in layers_in(self.stages) for each in layer.pieces()):
            if len({one.requires_grad for one in pieces}) > 1:
                raise UsageError(
                    f"some of the {len(pieces)} shards of a weight of {tuple(pieces[0].shape)} each are trained, and "
                    "others are not: freeze all of them, or none"
                )
        for name, parameter in self._tracked.parameters():
            if id(parameter) not in self.section_of:
                raise UsageError(
                    f"parameter {name} is tracked and is in no stage of unisono.Stages: put its module into it"
                )
        if self.stages.num_parts == 1:
            return
        for name, value in self._tracked.objects.items():
            refused = ""
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                refused = "a GradScaler, which looks at all gradients: use bfloat16, which needs none"
            elif isinstance(value, torch.optim.Optimizer) and any(group.get("fused") for group in value.param_groups):
                refused = "an optimizer with fused=True, which torch allows on one device only: leave it out"
            elif isinstance(value, torch.optim.LBFGS):
                refused = "an LBFGS, which computes with all parameters at once"
            if refused:
                raise UsageError(f"{name!r} is {refused}; or train with one process a group (--workers N)")
        for names, what in ((self._tracked.sharded, "unisono.shard"), (self._tracked.carried, "unisono.Carried")):
            for name in names:
                if name not in self._tracked.spread_apart:
                    raise UsageError(
                        f"{name!r} is of {what}, which cannot be combined with groups of {self.stages.num_parts} "
                        "processes yet: leave it out, or train with one process a group (--workers N)"
                    )

    def _spread(self, team: Team) -> None:
        """Note that each worker holds the state of its own stages only."""
        stages, tracked = self.stages, self._tracked
        for name, module in tracked.modules.items():
            for path, found in stages_in(module):
                tracked.hold_apart(name, SpreadModule(module, path, self.section_of, found, team))
        for name, optimizer in tracked.optimizers.items():
            tracked.hold_apart(name, SpreadOptimizer(optimizer, self.section_of, stages, team))


def evaluated(stages: Stages, rounds: Rounds, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function of an evaluation, for a model of which each worker has some stages: it raises `Away` where
    the last stage is elsewhere.
    """

    def compute(batch: Any) -> Any:
        if not stages.is_cut:
            return function(batch)
        exchange = rounds.members.exchange
        assert isinstance(exchange, Lanes)
        assert exchange.link is not None
        link = Link(exchange.link, stages.device)

        def waited(call: Callable[..., Any], *arguments: Any) -> Any:
            with rounds.members.waiting():
                return call(*arguments)

        pilot = Pilot(
            stages,
            lambda leaf, stage: None,
            lambda value: link.send(stages.part + stages.num_shard_parts, value),
            lambda: waited(link.receive, stages.part - stages.num_shard_parts),
            lambda number, tensor: waited(link.exchange, stages.beside(number), tensor),
        )
        pilot.flight = Flight(0)
        stages.carry(pilot)
        try:
            return function(batch)
        finally:
            stages.carry(None)
            with rounds.members.waiting():
                link.finish()

    return compute


def _meta_sum(parameter: Tensor) -> Tensor:
    """Return a meta tensor like the sum of the gradients of a parameter."""
    return torch.empty(parameter.shape, dtype=SUM_DTYPE.get(parameter.dtype, parameter.dtype), device="meta")


class StagedStep(Step):
    """A step whose micro-batches go through stages: `compute` is its inner loop."""

    def __init__(
        self, strategy: Staged, context: StepContext, number: int, *, unused: UnusedGradients, process: Process
    ) -> None:
        super().__init__(context, number, unused=unused, process=process)
        self._strategy = strategy
        self._loss_of: Callable[..., Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._loss_of is None:
            raise _refused()
        return super().__iter__()

    def again(self, *, reseed: bool = False) -> Iterator[Any]:
        if self._loss_of is None:
            raise _refused()
        return super().again(reseed=reseed)

    def compute(self, loss_of: Callable[..., Any], *, reseed: bool = False) -> None:
        def called(*batch: Any) -> Any:
            found = loss_of(*batch)
            assert isinstance(self._round, StagedRound)
            self._round.check_called()
            return found

        self._loss_of = called
        try:
            super().compute(called, reseed=reseed)
        finally:
            self._loss_of = None
            self._strategy.stages.carry(None)

    def _make_round(self, turn: Pass) -> GradientRound:
        assert self._loss_of is not None
        return StagedRound(self._strategy, self._loss_of, self._context, self._position, turn)


def _refused() -> StepError:
    return StepError(
        "the model is a unisono.Stages, whose last stage may be on another process, so the inner loop is one call: "
        "step.compute(lambda x, y: F.cross_entropy(model(x), y)) instead of `for x, y in step`"
    )


class StagedRound(GradientRound):
    """The sum of a step's gradients, where each micro-batch goes through stages.

    Args:
        loss_of: the script's function, from a micro-batch to its loss.
    """

    def __init__(
        self,
        strategy: Staged,
        loss_of: Callable[..., Any],
        context: StepContext,
        position: Any,
        turn: Pass,
    ) -> None:
        super().__init__(context, position, context.folder(), turn)
        self._stages = stages = strategy.stages
        self._section_of = strategy.section_of
        self._loss_of = loss_of
        self._is_whole = stages.num_parts == 1
        self._following, self._preceding = stages.part + stages.num_shard_parts, stages.part - stages.num_shard_parts
        self._pilot = Pilot(
            stages,
            lambda leaf, stage: self.turn.seed(context.seed, "stage", self.number, leaf, stage),
            self._give,
            lambda: self._received(self._preceding),
            self._exchange,
        )
        self._link_of: tuple[Any, Link] | None = None
        self._tied: TiedRound | None = None
        self._is_apart = False  # what is computed now is not summed
        self._buffers = OwnBuffers(self._folder.buffers.owners)
        self._folder.chain = self._pilot.chain
        stages.carry(self._pilot)

    def check_called(self) -> None:
        """Check that the script's function has called the model for the current micro-batch.

        Raises:
            StepError: it has not.
        """
        if self._pilot.flight is not None and not self._pilot.flight.has_run:
            raise StepError(
                "the function of step.compute has returned without a call of the model: call it for every micro-batch, "
                "and return (loss, 0) to leave one out"
            )

    # -- one process with all stages ---------------------------------------------------------------------

    def _fetch(self, leaf: int) -> Any:
        batch = super()._fetch(leaf)
        if self._is_whole:
            self._pilot.flight = Flight(leaf, self.microbatch)
        return batch

    # -- several processes ------------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        return self._is_whole and super().is_broken

    def compute(self, plan: Plan) -> Iterator[Any]:
        if self._is_whole:
            yield from super().compute(plan)
            return
        nodes, members = self._members.slots.nodes, self._members
        for node in [one for one in nodes if one not in (plan.kept[members.rank] if plan.kept else ())]:
            members.release(nodes.pop(node))
        compared, agreement = self._compared, self._context.agreement
        self._context.note_plan(self.position.number, plan, compared.other, self.turn.number)
        todo = plan.ranges[members.rank]
        for found in self._fly(todo, plan, compared.own):
            agreement.note_own(found)
        if compared.other and self._all_come(compared.other):
            for found in self._fly_apart(compared.other):
                agreement.note_other(found)
        if todo or compared.other:
            self._link.finish()
        self._clock.switch("exchange")

    def compute_uncounted(self, leaf: int) -> Generator[Any, None, Mapping[int, int]]:
        """Return what has come out of a micro-batch here; {} where this member is in no group."""
        if self._is_whole:
            return (yield from super().compute_uncounted(leaf))
        exchange = self._members.exchange
        assert isinstance(exchange, Lanes)
        if exchange.link is None:
            return {}
        try:
            (found,) = self._fly_apart([leaf])
            self._link.finish()
        except LOST:
            self._let_go()
            raise
        return found.by_place

    def interrupt(self) -> Any:
        self._let_go()
        return super().interrupt()

    def _let_go(self) -> None:
        """Leave the flights, because a member was lost. Local."""
        if self._link_of is not None:
            self._link_of[1].let_go()
            self._link_of = None
        self._pilot.flight = self.microbatch = None
        for slot in self._folder.abandon_leaf():
            self._members.release(slot)

    def more(self) -> Iterator[Round]:
        if self._is_whole or not self._ties:
            return
        parts_with, means = self._stages.parts_with, self._means
        ties = [
            {
                stage: (parts_with(self._section_of[id(one)]), means.get(id(one), _meta_sum(one)))
                for stage, one in tie.items()
            }
            for tie in self._ties
        ]
        self._tied = TiedRound(self._members, ties, self._stages.device)
        yield self._tied

    @property
    def _means(self) -> dict[int, Tensor]:
        """By id of a parameter that is here, the mean gradient. After the round."""
        return dict(zip((id(one) for _, one in self._folder.trained), self.slot.gradients, strict=True))

    def apply(self, totals: Any = None) -> None:
        super().apply(totals)
        self._show_tied()
        if not self._is_whole:
            self._show_elsewhere()

    @property
    def _ties(self) -> list[dict[int, nn.Parameter]]:
        """The ties that are trained: by stage, the parameter."""
        return [tie for tie in self._stages.ties if all(one.requires_grad for one in tie.values())]

    def _show_tied(self) -> None:
        """Make the sum of the gradients of tied weights the gradient of each of them that is here."""
        for number, tie in enumerate(self._ties):
            here = [one for one in tie.values() if not one.is_meta]
            if not here or (self._is_whole and all(one.grad is None for one in here)):
                continue
            if self._tied is not None:
                parts = [self._tied.found[number][stage] for stage in tie]
            else:
                parts = [self._means[id(one)] for one in tie.values()]
            total = functools.reduce(torch.add, parts)
            for one in here:
                one.grad = gradient_of(one, total.clone())

    def _show_elsewhere(self) -> None:
        """Give the parameters of other stages gradients without content, where they have one."""
        exchange = self._members.exchange
        assert isinstance(exchange, Lanes)
        numbers, used = dict.fromkeys(exchange.memory.used, 0), dict[int, bool]()
        assert self._folder.sections is not None
        for (_, parameter), section in zip(self._folder.every, self._folder.sections.parameters, strict=True):
            for part in self._stages.parts_with(section):
                used[id(parameter)] = bool(exchange.memory.used[part][numbers[part]])
                numbers[part] += 1
        for tie in self._ties:  # a gradient of one is a gradient of all
            is_used = any(used[id(one)] for one in tie.values())
            used.update((id(one), is_used) for one in tie.values())
        for _, parameter in self._folder.every:
            if parameter.is_meta:
                parameter.grad = torch.empty_like(parameter) if used[id(parameter)] else None
            elif not used[id(parameter)]:
                parameter.grad = None

    @property
    def _link(self) -> Link:
        exchange = self._members.exchange
        assert isinstance(exchange, Lanes)
        if self._link_of is None or self._link_of[0] is not exchange.link:
            assert exchange.link is not None
            self._link_of = exchange.link, Link(exchange.link, self._stages.device)
        return self._link_of[1]

    def _exchange(self, number: int, tensor: Tensor) -> Tensor:
        """Exchange a tensor with another worker that has shards of the same stages, within forward or backward."""
        point("stages.exchange")
        found: Tensor = self._waited(lambda link: link.exchange(self._stages.beside(number), tensor))
        return found

    def _received(self, part: int) -> Any:
        return self._waited(lambda link: link.receive(part))

    def _waited(self, call: Callable[[Link], Any]) -> Any:
        """Return what another worker of the group has sent."""
        self._switch("exchange")
        with self._members.waiting():
            found = call(self._link)
        self._switch("compute")
        return found

    def _give(self, value: tuple[list[Tensor], list[bool]]) -> None:
        """Send the output of the stages here to the next part."""
        flight, part = self._pilot.flight, self._stages.part
        assert flight is not None
        if (bit := spoils("activations", flight.leaf)) is not None:
            value[0][0] = with_flipped_bit(value[0][0], bit)
        if flight.places is not None:
            flight.places[places(part, self._stages.num_parts)[0]] = quick_digest(value)
        self._link.send(self._following, value)

    def _all_come(self, leaves: Sequence[int]) -> bool:
        """Return whether all of the group get these micro-batches where the others come from; the same on all of them.
        Collective in the group.
        """
        fetcher, part, last = self._context.fetcher, self._stages.part, self._stages.num_parts - 1
        found = all(fetcher.comes(self.position.number, leaf, self.turn.number) for leaf in leaves)
        if part > 0:
            found &= self._received(part - 1)
        if part < last:
            self._link.send(part + 1, found)
            return bool(self._received(last))
        for other in range(last):
            self._link.send(other, found)
        return found

    def _fly_apart(self, leaves: Sequence[int]) -> list[Fingerprint]:
        """Compute micro-batches of which nothing is summed."""
        known = {leaf: self._values.pop(leaf, None) for leaf in leaves}
        self._is_apart = True
        try:
            return self._fly(leaves, None, leaves)
        finally:  # also if a member is lost meanwhile
            self._is_apart = False
            for leaf, values in known.items():
                self._values.pop(leaf, None)
                if values is not None:
                    self._values[leaf] = values

    def _fly(self, leaves: Sequence[int], plan: Plan | None, compared: Sequence[int]) -> list[Fingerprint]:
        """Take micro-batches through the stages here, and fold their gradients.

        Args:
            plan: that has them; None: nothing of them is summed.
            compared: those whose fingerprints are returned.
        """
        flights, found = dict[int, Flight](), list[Fingerprint]()
        ahead = (self._stages.num_parts - 1 - self._stages.part) // self._stages.num_shard_parts
        for is_forward, leaf in one_forward_one_backward(leaves, ahead):
            if is_forward:
                flights[leaf] = self._forward(leaf, compares=leaf in compared)
                continue
            flight, index = flights.pop(leaf), leaves.index(leaf)
            following = leaves[index + 1] if index + 1 < len(leaves) else None
            if (fingerprint := self._backward(flight, following, plan)) is not None:
                found.append(fingerprint)
        return found

    def _forward(self, leaf: int, *, compares: bool) -> Flight:
        self._switch("data")
        batch = self._fetch(leaf)
        self._switch("compute")
        if not self._is_apart:
            point("before_backward", leaf)
        flight = self._pilot.flight = Flight(leaf, self.microbatch, places={} if compares else None)
        self._values.pop(leaf, None)  # of a forward before a loss
        if not self._is_empty:
            self._buffers.take_off()
            try:
                self.turn.seed(self._context.seed, "microbatch", self.number, leaf)
                flight.result = called_with(self._loss_of, batch)
            except Away:
                pass
            finally:
                flight.buffers = self._buffers.land()
        self._pilot.flight = self.microbatch = None
        return flight

    def _switch(self, part: str) -> None:
        """Note what takes the time from now on. That of `_fly_apart` must not count for the pace of this member."""
        self._clock.switch("other" if self._is_apart and part != "exchange" else part)

    def _backward(self, flight: Flight, following: int | None, plan: Plan | None) -> Fingerprint | None:
        """Compute the gradients of a micro-batch here, and fold them; returns its fingerprint if it is compared."""
        stages, microbatch, folder = self._stages, flight.microbatch, self._folder
        assert microbatch is not None
        gradients: list[Tensor | None] = []
        is_last = stages.num_stages - 1 in stages.own
        if not is_last and not microbatch.is_empty:
            gradients, weight, weighted_loss, values = self._received(self._following)
            microbatch.take_over(weight, weighted_loss)
            self._values[flight.leaf] = values
        self._switch("compute")
        self.microbatch, self._pilot.flight = microbatch, flight
        alone = following if flight.places is None else None  # a gradient that is compared is not adopted
        folder.start_leaf(flight.leaf, self._members.new_slot, alone, apart=plan is None)
        if following is None and plan is not None:
            self._offer_rows(plan)
        if microbatch.is_empty:
            pass
        elif is_last:
            microbatch.backward(*loss_and_weight(flight.result), None, retain_graph=False)
        elif microbatch.weight:
            with folder.calling():
                self._pilot.back(stages.own.stop - 1, gradients)
        weight, weighted_loss = microbatch.weight, microbatch.weighted_loss
        if not microbatch.is_empty:
            self._buffers.board(flight.buffers)
        try:
            for slot in self._fold():
                self._members.release(slot)
        finally:
            if not microbatch.is_empty:
                self._buffers.land()
        made: list[Tensor | None] = []
        if stages.own.start > 0 and not microbatch.is_empty:
            made = self._pilot.take_gradients() if weight else []
            self._link.send(self._preceding, (made, weight, weighted_loss, self._values.get(flight.leaf, {})))
        self._pilot.flight = None
        found = None
        if flight.places is not None:
            found = folder.fingerprint(flight.leaf)
            flight.places[places(stages.part, stages.num_parts)[1]] = seed_of(0, found.digest, quick_digest(made))
            found = msgspec.structs.replace(found, places=flight.places)
        if self._is_apart:
            self._check_losses()
        else:
            self._computed.append(flight.leaf)
            point("after_backward", flight.leaf)
        return found

    def _compute_again(self, leaf: int) -> Iterator[Any]:
        if not self._is_whole:
            raise StateLost(
                f"all workers of the group that had computed micro-batch {leaf} of {self.name} were lost before the "
                f"names of its sums were known to all: the run cannot go on from here. Go on from "
                f"{self._members.newest()}"
            )
        yield from super()._compute_again(leaf)
