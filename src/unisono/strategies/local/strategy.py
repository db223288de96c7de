"""Local steps: replicas train for some steps by themselves, then their parameters are averaged (local SGD, DiLoCo).

A **round** is one iteration of the training loop. Within it a worker computes the replicas that it was given, one after
the other. For the steps of a replica the worker is a run alone: these have the same class, the same checks and the same
summation tree as those of a plain ``run.steps``, with this process as their only member.

Local SGD: Stich, "Local SGD converges fast and communicates little", ICLR 2019. DiLoCo: Douillard et al., "DiLoCo:
Distributed low-communication training of language models", 2023.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from unisono.core.cursor import Recipe, seed_of
from unisono.core.errors import StepError, UsageError
from unisono.core.events import StepResult
from unisono.core.plan import Plan, plan
from unisono.core.rehearsals import Twice
from unisono.core.telemetry import Compared
from unisono.engine.exchange.flat import FlatLayout
from unisono.engine.loop.strategies import Strategy, Upcoming
from unisono.engine.microbatch.data import BatchSource, Request
from unisono.engine.microbatch.folding import Fingerprint, GradientFolder, gradient_of
from unisono.engine.microbatch.guards import Structure, UnusedGradients
from unisono.engine.microbatch.randomness import seed_at
from unisono.engine.rounds.agreement import Agreement
from unisono.engine.rounds.gradient import StepContext
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.members import Members
from unisono.engine.rounds.taps import Computed, Place, Tap
from unisono.engine.rounds.team import Team
from unisono.engine.state.packing import pack, to_bytes
from unisono.engine.state.sums import Sums, as_sum
from unisono.engine.state.tracked import Tracked
from unisono.strategies.local.changes import ERROR, Changes, Coded
from unisono.strategies.local.grouping import Groups, groups_of
from unisono.strategies.local.localround import InnerStep, LocalRound, ReplicaSamples, Replication, check_count
from unisono.strategies.local.replica_states import Header, Replicas, ReplicaState, common, give, restore, take
from unisono.strategies.local.replicas import LeavingRound, ReplicaEnd, ReplicaRound, Trained
from unisono.system.faults import point
from unisono.system.process import Process

__all__ = ["Delta", "InnerState", "LocalSteps"]

InnerState = Literal["kept", "fresh"]
"""Whether a replica keeps the state of its optimizers from round to round."""
Delta = Literal["fp32", "int8"]
"""What the changes of the replicas travel as."""
AVERAGE: Final = "average"


class LocalSteps(Strategy):
    """Rounds of local steps, as a strategy of the training loop.

    Args:
        outer: gets the mean change of the replicas as a gradient; None: parameters become the mean of the replicas'.
    """

    overlaps = False
    """The steps of a replica change parameters before all members have told each other of their checkpoints."""

    def __init__(
        self,
        replication: Replication,
        samples: ReplicaSamples,
        num_steps: int,
        *,
        tracked: Tracked,
        replicas: Replicas,
        device: torch.device,
        outer: torch.optim.Optimizer | None,
        inner_state: InnerState,
        copies: int,
        delta: Delta,
        rehearses: bool,
    ) -> None:
        if inner_state not in ("kept", "fresh"):
            raise UsageError(f'inner_state must be "kept" or "fresh", got {inner_state!r}')
        if delta not in ("fp32", "int8"):
            raise UsageError(f'delta must be "fp32" or "int8", got {delta!r}')
        check_count("copies", copies)
        self._replication = replication
        self._samples = samples
        self._num_steps = num_steps
        self._replicas = replicas
        self._device = device
        self._outer = outer
        self._outer_name = _name_of(tracked, outer)
        self._inner_state = inner_state
        self._keeps = inner_state == "kept"
        self._delta = delta
        self._num_copies = copies if self._keeps or delta == "int8" else 0
        replicas.num_copies = max(1, self._num_copies)
        self._rehearses = rehearses
        self._tracked = tracked.apart(self._outer_name)
        self._optimizers = self._tracked.optimizers
        self._objects = {
            name: value for name, value in self._tracked.objects.items() if not isinstance(value, nn.Module)
        }
        self._start: list[Tensor] = []
        self._steps = range(0)
        self._is_applying = False
        self._folder: GradientFolder | None = None
        self._handles: list[RemovableHandle] = []
        self._now: LocalRound | None = None
        self._place = -1
        self._changes: Changes
        self._check(tracked)

    def _check(self, tracked: Tracked) -> None:
        """Refuse what has no meaning in rounds.

        Raises:
            UsageError: names it.
        """
        if not self._optimizers:
            raise UsageError(
                "run.local_steps trains replicas with a tracked optimizer of their own: run.track(optimizer=optimizer)"
            )
        if sharded := [*tracked.sharded]:
            raise UsageError(
                f"{sharded[0]} is sharded (unisono.shard), but within run.local_steps each replica has its own state, "
                "which is on the workers that compute it and on copies= others anyway; use the optimizer itself"
            )
        if self._tracked.carried:
            raise UsageError(
                f"{next(iter(self._tracked.carried))} is a unisono.Carried, whose rows pass from each step to the "
                "next; within run.local_steps each replica would have its own rows. Use run.steps for them"
            )
        for name, value in self._objects.items():
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                raise UsageError(
                    f"{name} is a GradScaler, whose scale follows the gradients of each replica, but must be the same "
                    "for all replicas; train in bfloat16, or in float32 with GradScaler(enabled=False)"
                )

    @property
    def num_replicas(self) -> int:
        return self._replication.replicas

    @property
    def recipe(self) -> Recipe:
        return {
            "replicas": self._replication.replicas,
            "inner_steps": self._replication.inner_steps,
            "inner_state": self._inner_state,
            "delta": self._delta,
            "outer": type(self._outer).__qualname__ if self._outer is not None else AVERAGE,
        }

    @property
    def scale(self) -> float:
        """A power of two that all weights are divided by, so that changes have the magnitude of a mean."""
        part = self._samples.part(0)
        samples = part.batch_size // self.num_replicas * self._replication.inner_steps
        return float(2.0 ** math.floor(math.log2(samples)))

    def steps_of(self, number: int) -> range:
        """Return the global batches of a round."""
        return self._replication.steps_of(number, self._num_steps)

    # -- the loop ------------------------------------------------------------------------------------

    def round_of(self, number: int) -> range | None:
        return self.steps_of(number)

    def open(self, context: StepContext, first: int) -> None:
        self._context = context
        context.agreement.unit = "the first micro-batch of replica"
        team = context.rounds.team
        if team.rank == 0:
            self._warn_of(team)
        if self._outer is not None:
            self._handles.append(self._outer.register_step_pre_hook(lambda *_: self._check_outer()))
        self._groups = Groups(team, self._device, f"phase-{context.phase}")
        self._team = self._groups.team
        self._folder_of = self._team.exchange
        balances = context.rounds.members.balancing.is_enabled
        self._inner_rounds = Rounds(self._team, self._tracked, balance=balances)
        self._structure = Structure(self._tracked)
        ids = context.rounds.members.worker_ids
        has_state = self._num_copies > 0
        self._replicas.begin(self._optimizers, self.num_replicas, ids, keep=has_state)
        if has_state:
            context.rounds.before_departure = self._hand_over

    def _hand_over(self) -> None:
        """Give the states of members that leave to those that stay. Collective."""
        rounds, clock = self._context.rounds, self._context.clock
        for _ in rounds.play(LeavingRound(rounds.members, self._replicas, self._num_copies, clock)):
            pass
        clock.switch("other")

    def _warn_of(self, team: Team) -> None:
        """Say where workers exchange more than they would with other replicas."""
        num_replicas, num_hosts = self.num_replicas, len(set(team.hosts))
        if self._context.rounds.judge.settles and team.size > num_replicas:
            warnings.warn(
                f"audit: {team.size} workers share {num_replicas} replicas, and a replica that several compute "
                "together is not audited; use at least as many replicas as workers",
                stacklevel=3,
            )
        if num_hosts > num_replicas > 1:
            warnings.warn(
                f"{num_hosts} hosts share {num_replicas} replicas: workers of several hosts compute a replica "
                f"together, and exchange gradients in each of its steps; with replicas={num_hosts} they would do so "
                "once in a round",
                stacklevel=3,
            )

    def make_step(self, number: int, unused: UnusedGradients, process: Process) -> LocalRound:
        unused.leave_out(self._outer_name)
        self._unused, self._process = unused, process
        self._now = LocalRound(self, self._context, number, process)
        self._team.round = self._context.first_number + number
        return self._now

    def close(self) -> None:
        self._context.rounds.before_departure = None
        for handle in self._handles:
            handle.remove()
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        self._groups.close()
        self._start = []

    def forecast(self, upcoming: Upcoming) -> Iterator[Request]:
        """Yield the micro-batches that this worker will probably compute next, by `Replication.place`."""
        replication, members = self._replication, upcoming.members
        replicas, share = self._predicted(members)
        if self._place >= 0:
            inner = self._inner_rounds.members
            share = (inner.rank, inner.size)
            step, replica = replication.at(self._place)
            round_ = step // replication.inner_steps
            yield from self._requests(range(step, self.steps_of(round_).stop), replica, share)
            for other in replicas:
                if other > replica:
                    yield from self._requests(self.steps_of(round_), other, share)
            first = round_ + 1
        else:
            first = self._now.number_in_loop if self._now is not None else 0
        for number in range(first, replication.num_rounds(self._num_steps)):
            for replica in replicas:
                yield from self._requests(self.steps_of(number), replica, share)

    def _predicted(self, members: Members) -> tuple[Sequence[int], tuple[int, int]]:
        """Return the replicas that this worker will probably compute in a round, and its (rank, size) in its group."""
        rank = members.rank
        if members.size > self.num_replicas:
            grouping = groups_of(plan(members.size, self.num_replicas), members.team.hosts)
            group = grouping.group_of(rank) or (rank,)
            return grouping.replicas(rank), (group.index(rank), len(group))
        ranges = members.balancing.predicted(self.num_replicas).ranges
        return (ranges[rank] if rank < len(ranges) else ()), (0, 1)

    def _requests(self, steps: range, replica: int, share: tuple[int, int]) -> Iterator[Request]:
        rank, size = share
        for step in steps:
            num_leaves = self._samples.part(replica).position(step).num_leaves
            planned = plan(size, num_leaves)
            if self._place >= 0 and self._inner_rounds.members.size == size:
                planned = self._inner_rounds.members.balancing.predicted(num_leaves)
            for leaf in planned.ranges[rank]:
                yield self._replication.place(step, replica), 0, leaf

    # -- a round -------------------------------------------------------------------------------------

    def begin_round(self, now: LocalRound) -> ReplicaRound:
        """Remember the boundary from which all replicas of the round begin. Local.

        Raises:
            StepError: an optimizer of the replicas has made a step between two rounds.
        """
        context = self._context
        self._outer_folder = folder = context.folder()
        if any(optimizer.state for optimizer in self._optimizers.values()):
            raise StepError(
                "an optimizer of the replicas made a step between two rounds, outside any of them: update the model "
                "within `for step in round`, or let the outer optimizer do it"
            )
        with torch.no_grad():
            parameters = [parameter for _, parameter in folder.trained]
            if len(self._start) != len(parameters) or any(
                a.shape != b.shape or a.dtype != b.dtype for a, b in zip(self._start, parameters, strict=True)
            ):
                self._start = [torch.empty_like(parameter) for parameter in parameters]
            for start, parameter in zip(self._start, parameters, strict=True):
                start.copy_(parameter)
                parameter.grad = None
        context.rounds.members.release_results()
        self._structure.renew()
        self._structure.enter("round")
        self._averaged = self._averages()
        self._common = common(self._objects)
        self._frozen = [(name, one, one._version) for name, one in self._tracked.parameters() if not one.requires_grad]
        self._place, self._steps = -1, now.steps
        self._changes = Changes(folder) if self._delta == "fp32" else Coded(folder)
        return ReplicaRound(
            context,
            now.number_in_loop,
            self._replicas,
            self.num_replicas,
            self,
            self._changes,
            folder,
            self._start,
            copies=self._num_copies,
            groups=self._groups,
        )

    def apply(self, done: ReplicaRound) -> None:
        """Make the new global model of the mean over the replicas. The same on all members."""
        self._structure.leave("round")
        restore(self._objects, done.ended[0].common)
        context, folder = self._context, self._outer_folder
        members = context.rounds.members
        slot = members.slots.results[-1]  # it may have moved since the commit
        self._structure.restore_modes()
        folder.buffers.apply(slot.buffers)
        seed_at(context.seed, "update", done.number)
        context.clock.switch("update")
        owned, counts = _parameters(self._outer), done.scalars[0] != 0.0  # else no replica has moved
        with torch.no_grad():
            for (_, parameter), mean in zip(folder.trained, self._changes.means(slot), strict=True):
                if id(parameter) in owned:
                    parameter.grad = gradient_of(parameter, mean) if counts else None
                else:
                    parameter.copy_(parameter.to(mean.dtype) - mean)
        if self._outer is not None and counts:
            self._is_applying = True
            try:
                self._outer.step()
            finally:
                self._is_applying = False
        for _, parameter in folder.trained:
            parameter.grad = None
        members.release_results()

    def train(self, replica: int, *, compares: bool, keeps: bool) -> Generator[InnerStep, None, Trained]:
        """Train one replica from the round's boundary."""
        self._meet_group()
        context = self._inner_context(replica, compares=compares)
        given = self._replicas.now.take(replica, keeps=keeps) if self._num_copies else {}
        self._go_to_boundary(given)
        weight = weighted_loss = 0.0
        totals: dict[str, Tensor] = {}
        for number in self._steps:
            step = yield from self._step(context, number, replica)
            if self._team.lost is not None:  # this worker has completed the step without its group
                lost = self._team.lost
                point("local.ungrouped", replica)
                self.undo()
                raise lost
            gradient = step.round
            share = gradient.weight / self.scale
            weight += share
            if gradient.has_gradient:
                weighted_loss += gradient.loss * (share if context.reduction == "mean" else 1.0)
            for name, value in step.totals.items():
                totals[name] = totals[name] + as_sum(name, value) if name in totals else as_sum(name, value)
        state = self._state_after(given)
        self._check_end(replica)
        found = common(self._objects)
        self._structure.restore_modes()
        header = Header.of(pack(state, "replica"))
        ended = ReplicaEnd(found.digests, to_bytes(totals), header, weight, found.content if replica == 0 else b"")
        for _, parameter in self._outer_folder.trained:
            parameter.grad = None
        self._inner_rounds.members.release_results()
        first = context.agreement.own if isinstance(context.agreement, _FirstMicrobatch) else None
        return Trained(weighted_loss, state, ended, first)

    def rehearse(self, replica: int, *, fetches: bool = False) -> Generator[InnerStep, None, Fingerprint | None]:
        """Compute the first step of a replica of another member, and forget it."""
        self._meet_group()
        context = self._inner_context(replica, compares=True, aside=True)
        if not fetches and not context.fetcher.comes(self._steps.start, 0):
            return None
        self._go_to_boundary({})
        yield from self._step(context, self._steps.start, replica)
        self._check_end(replica)
        self.undo()
        assert isinstance(context.agreement, _FirstMicrobatch)
        return context.agreement.own

    def undo(self) -> None:
        """Put everything back to the round's boundary, and drop what a replica has learned since. Local."""
        take(self._optimizers)
        restore(self._objects, self._common.content)
        self._structure.restore_modes()
        with torch.no_grad():
            for (_, parameter), start in zip(self._outer_folder.trained, self._start, strict=True):
                parameter.copy_(start)
                parameter.grad = None
        self._outer_folder.buffers.restore()
        self._inner_rounds.members.release_results()

    def _meet_group(self) -> None:
        """Begin anew with the sums of steps where this worker has come into another group, as all of that do."""
        if self._folder_of is self._team.exchange:
            return
        self._folder_of = self._team.exchange
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        slots = self._inner_rounds.slots
        slots.layout, slots.nodes, slots.results = None, {}, []

    def _go_to_boundary(self, state: ReplicaState) -> None:
        """Begin a replica: what all replicas have alike is that of the boundary. Parameters and buffers are already."""
        restore(self._objects, self._common.content)
        self._structure.restore_modes()
        give(self._optimizers, state if self._keeps else {})

    def _state_after(self, given: ReplicaState) -> ReplicaState:
        """Take the state of a replica whose steps are done.

        Args:
            given: with which it has begun.
        """
        state = take(self._optimizers)
        if not self._keeps:
            state = {}
        if self._delta == "int8":
            state[ERROR] = {0: self._error(given)}
        return state

    def _step(self, context: StepContext, number: int, replica: int) -> Generator[InnerStep, None, InnerStep]:
        """Yield one step of a replica to the script."""
        now = self._now
        assert now is not None
        self._place = self._replication.place(number, replica)
        seed_at(context.seed, "step", number)
        point("local.inner_step", replica)
        step = InnerStep(context, number, unused=self._unused, process=self._process)
        now.enter(step)
        yield step  # after an error of the script, `now` still knows the step
        now.enter(None)
        step.close()
        self._check_trained(replica)
        return step

    def _error(self, given: ReplicaState) -> Tensor:
        """Return what was lost of a replica's changes so far."""
        known: Tensor | None = given.get(ERROR, {}).get(0)
        if known is None:
            return torch.zeros(Coded.num_values(self._outer_folder), device=self._device)
        return known.to(self._device)

    def layout(self, folder: GradientFolder) -> FlatLayout:
        """Return the layout of what the members sum."""
        return (Changes if self._delta == "fp32" else Coded).layout_of(folder)

    def _check_trained(self, replica: int) -> None:
        """Raise StepError if the script has frozen or unfrozen a parameter within a round."""
        trained, before = self._tracked.trained(), self._outer_folder.trained
        if len(trained) != len(before) or any(a is not b for (_, a), (_, b) in zip(trained, before, strict=True)):
            raise StepError(
                f"a parameter was frozen or unfrozen within the steps of replica {replica}: do that between two rounds"
            )

    def _check_end(self, replica: int) -> None:
        """Check that a replica has changed only what it may change.

        Raises:
            StepError: a frozen parameter was written, or an average of weights was updated.
        """
        for name, parameter, version in self._frozen:
            if parameter._version != version:
                raise StepError(
                    f"parameter {name!r} needs no gradient and was written within the steps of replica {replica}; "
                    "write it after `for step in round`"
                )
        for name, count in self._averages().items():
            if count != self._averaged[name]:
                raise StepError(
                    f"{name} (an AveragedModel) was updated within the steps of replica {replica}: update it after "
                    "`for step in round`, with the new global model"
                )

    # -- what the steps of a replica need ------------------------------------------------------------

    def _inner_context(self, replica: int, *, compares: bool, aside: bool = False) -> StepContext:
        """Return the context of a replica's steps: a run with this process as its only member.

        Args:
            compares: take the fingerprint of the first micro-batch of the first step.
            aside: the replica is another member's.
        """
        context, now = self._context, self._now
        if now is not None:
            self._inner_rounds.taps = [
                _InReplica(tap, step=now.number, first=now.steps.start, replica=replica, aside=aside)
                for tap in context.rounds.taps
            ]
        self._tracked.sums = Sums()
        kind = _FirstMicrobatch if compares else Agreement
        agreement = kind(self._inner_rounds, self._tracked, rehearses=self._rehearses, last_step=None)
        return dataclasses.replace(
            context,
            rounds=self._inner_rounds,
            folder=self._inner_folder,
            fetcher=_Batches(context.fetcher, self._replication, replica),
            cursor=self._samples.part(replica),
            seed=seed_of(context.seed, "replica", context.phase, replica),
            first_number=0,
            replica=f"replica {replica} of round {now.number}" if now is not None else "",
            first_of_round=now.steps.start if now is not None else 0,
            note_plan=lambda number, *_: self._note(number, replica),
            agreement=agreement,
            tracked=self._tracked,
        )

    def _note(self, number: int, replica: int) -> None:
        self._place = self._replication.place(number, replica)

    def _inner_folder(self) -> GradientFolder:
        outer = self._outer_folder
        extras = self._tracked.sums.extras()
        if self._folder is not None and self._folder.is_for(outer.trained, self._tracked.buffers(), extras):
            return self._folder
        if self._folder is not None:
            self._folder.close()
        frozen = [(name, one) for name, one in self._tracked.parameters() if not one.requires_grad]
        self._folder = GradientFolder(
            outer.trained,
            self._tracked.buffers(),
            frozen,
            self._tracked.calls,
            self._inner_rounds.slots,
            extras=extras,
            means=self._context.reduction == "mean",
        )
        self._inner_rounds.use_layout(self._folder.layout)
        return self._folder

    def _averages(self) -> dict[str, int]:
        """Return how often each average of weights was updated."""
        modules = self._tracked.modules.items()
        return {name: int(module.n_averaged) for name, module in modules if isinstance(module, AveragedModel)}

    def _check_outer(self) -> None:
        if not self._is_applying:
            raise StepError(
                f"{self._outer_name}.step() was called by the script; run.local_steps calls it itself, at the end of "
                "each `for step in round`, with the mean change of the replicas as the gradient"
            )


class _Batches:
    """The micro-batches of one replica, counted from 0."""

    def __init__(self, whole: BatchSource, replication: Replication, replica: int) -> None:
        self._whole = whole
        self._replication = replication
        self._replica = replica

    def fetch(self, step: int, leaf: int, turn: int = 0) -> Any:
        return self._whole.fetch(self._replication.place(step, self._replica), leaf, turn)

    def comes(self, step: int, leaf: int, turn: int = 0) -> bool:
        return self._whole.comes(self._replication.place(step, self._replica), leaf, turn)

    def is_near(self, step: int, leaf: int) -> bool:
        return self._whole.is_near(self._replication.place(step, self._replica), leaf)


class _FirstMicrobatch(Agreement):
    """Takes the fingerprint of the first micro-batch of a replica, to be compared with another worker's.

    Attributes:
        own: that fingerprint.
    """

    own: Fingerprint | None = None

    def start_step(self, number: int, total: int) -> None:
        pass

    def compared(self, plan: Plan, turn: int) -> Twice:
        return Twice(own=(0,)) if self.own is None else super().compared(plan, turn)

    def note_own(self, fingerprint: Fingerprint) -> None:
        self.own = fingerprint

    def says(self) -> Compared:
        return Compared()

    def check(self, said: Mapping[str, Compared], *, is_disputed: bool = False) -> bool:
        return True


class _InReplica(Tap):
    """Tells a tap about the steps of a replica.

    Args:
        step: the round, by its number in the run.
        first: the first global batch of the round, within the loop.
        aside: the replica is another member's, and is only compared.
    """

    def __init__(self, tap: Tap, *, step: int, first: int, replica: int, aside: bool) -> None:
        self._tap = tap
        self._step = step
        self._first = first
        self._replica = replica
        self._aside = aside

    def looks_at(self, place: Place) -> bool:
        return self._tap.looks_at(self._at(place))

    def before_microbatch(self, place: Place, batch: Any) -> None:
        self._tap.before_microbatch(self._at(place), batch)

    def after_microbatch(self, place: Place, computed: Computed) -> None:
        self._tap.after_microbatch(self._at(place), computed)

    def after_sum(self, place: Place, result: StepResult) -> None:
        self._tap.after_sum(self._at(place), result)

    def _at(self, place: Place) -> Place:
        return msgspec.structs.replace(
            place,
            step=self._step,
            replica=self._replica,
            inner=place.step - self._first,
            aside=place.aside or self._aside,
        )


def _name_of(tracked: Tracked, outer: torch.optim.Optimizer | None) -> str:
    """Return the name under which the outer optimizer is tracked.

    Raises:
        UsageError: it is not tracked, or it is no optimizer.
    """
    if outer is None:
        return ""
    if not isinstance(outer, torch.optim.Optimizer):
        raise UsageError(f"outer is an optimizer of torch over the model's parameters, or None; got {outer!r}")
    for name, value in tracked.optimizers.items():
        if value is outer:
            return name
    raise UsageError(
        "the outer optimizer is not tracked, so its momentum would reach neither workers that join nor checkpoints: "
        "run.track(outer=outer)"
    )


def _parameters(optimizer: torch.optim.Optimizer | None) -> set[int]:
    """Return the ids of an optimizer's parameters."""
    groups = optimizer.param_groups if optimizer is not None else []
    return {id(parameter) for group in groups for parameter in group["params"]}
