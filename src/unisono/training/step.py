"""One step as the user sees it: the inner loop, ``backward``, ``loss`` and ``log``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono.decisions.checks import Rehearsal
from unisono.decisions.cursor import Cursor, StepPosition
from unisono.decisions.plan import Plan
from unisono.errors import LossError, StepError
from unisono.exchange import Combined, Share
from unisono.exchange.flat import Slot
from unisono.faults import point
from unisono.telemetry import PARTS, StepSeconds, StepTelemetry
from unisono.training.agreement import Agreement
from unisono.training.data import Fetcher
from unisono.training.gradients import GradientFolder
from unisono.training.guards import Guards, UnusedGradients
from unisono.training.process import Process
from unisono.training.randomness import seed_place
from unisono.training.rounds import Rounds
from unisono.training.team import LOST

__all__ = ["Clock", "Step", "StepContext"]


@dataclass
class StepContext:
    """What all steps of one ``run.steps`` share."""

    rounds: Rounds
    folder: Callable[[], GradientFolder]
    """What sums the gradients of what is trained now. Collective when that has changed."""
    fetcher: Fetcher
    cursor: Cursor
    seed: int
    first_number: int
    """Steps that earlier calls of ``run.steps`` made: random numbers never repeat within a run."""
    note_plan: Callable[[int, Plan, int | None], None]
    """Told what this member will compute, of its own and of another member's, for those who fetch ahead."""
    guards: Guards
    """Of what the inner loop may not change."""
    unused: UnusedGradients
    """Gradients that the script has not used."""
    agreement: Agreement
    """Compares this worker with the others."""
    process: Process
    """That of the run."""


@dataclass
class Clock:
    """Where the wall time of a step goes, in seconds. One thing at a time, so the parts add up."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    last: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """The parts of the step before."""
    _now: str = "other"
    _since: float = field(default_factory=time.perf_counter)

    def switch(self, part: str) -> None:
        """What follows belongs to ``part``."""
        now = time.perf_counter()
        self.parts[self._now] += now - self._since
        self._now, self._since = part, now

    def move(self, seconds: float, source: str, target: str) -> None:
        """It turned out that so much of ``source`` was ``target``."""
        seconds = min(seconds, self.parts[source])
        self.parts[source] -= seconds
        self.parts[target] += seconds

    def reset(self) -> dict[str, float]:
        """The parts since the last reset."""
        self.switch(self._now)
        self.last, self.parts = self.parts, dict.fromkeys(PARTS, 0.0)
        return self.last


class Step:
    """One optimizer update on one global batch. Made by ``run.steps``.

    Iterate over it once, calling `backward` for every micro-batch; then ``.grad`` of every parameter is the mean
    gradient of the global batch, equal on all workers, and `loss` the mean loss. Breaking out of the inner
    loop leaves the step without a gradient and raises `StepError`.
    """

    def __init__(self, context: StepContext, number: int, clock: Clock) -> None:
        self._context = context
        self._position: StepPosition = context.cursor.position(number)
        self._clock = clock
        self.place = context.first_number + number
        """Of this step within the run, from 0: of all calls of ``run.steps``."""
        self._state = "new"
        self._num_computed = 0
        self.news = ""
        """Why this step's plan is another than that of the step before; empty where it is not."""
        # Of the micro-batch that is being computed:
        self._calls = 0
        self._weight = self._weighted_loss = 0.0
        self._wanted_weight = 0.0
        self._folder: GradientFolder | None = None
        self._leaf: int | None = None
        self._scale = 2.0 ** math.floor(math.log2(self._position.microbatch_size))
        self._loss = math.nan
        self._combined: Combined | None = None
        self._logs: dict[str, float] = {}

    # -- what the user reads -------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Of this step within ``run.steps``, from 0."""
        return self._position.number

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete, from 0."""
        return self._position.epoch

    @property
    def is_last_of_epoch(self) -> bool:
        """Whether the next step begins another epoch."""
        return (self.number + 1) % self._context.cursor.steps_per_epoch == 0

    @property
    def num_samples(self) -> int:
        """Samples of this global batch; fewer in an epoch's last one."""
        return self._position.num_samples

    @property
    def loss(self) -> float:
        """The mean loss of the global batch: sum of weight * loss over sum of weights. After the inner loop."""
        if self._state != "done":
            raise StepError(f"step.loss of step {self.number} is known after the inner loop `for ... in step`")
        return self._loss

    @property
    def microbatch(self) -> int | None:
        """The micro-batch that is being loaded or computed; None outside of one."""
        return self._leaf

    def log(self, **values: float | Tensor) -> None:
        """Write numbers into this step's line of the journal (those of rank 0 count).

        Raises:
            StepError: called within the inner loop.
        """
        if self._leaf is not None:
            raise StepError(
                "step.log was called inside of `for batch in step`, where each worker is at another micro-batch: call "
                "it after that loop (step.loss is the mean loss then; run.evaluate gives exact totals)"
            )
        self._logs.update({name: float(v.detach() if isinstance(v, Tensor) else v) for name, v in values.items()})

    @property
    def has_begun(self) -> bool:
        """Whether its inner loop was entered."""
        return self._state != "new"

    @property
    def is_complete(self) -> bool:
        """Whether its inner loop has come to its end: it has its gradient."""
        return self._state == "done"

    # -- the inner loop ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches that fall to this worker; ends when the step's gradient is complete. Collective."""
        self._context.process.check("for batch in step")
        if self._state != "new":
            raise StepError(f"step {self.number} was iterated before; `for ... in step` can be run once for each step")
        return self._run()

    def backward(
        self, loss: Tensor, weight: float | Tensor | None = None, *, scaler: Any = None, retain_graph: bool = False
    ) -> None:
        """Add a micro-batch's gradient to that of the step.

        Args:
            loss: () the **mean** loss of this micro-batch.
            weight: what the mean is over: samples (the default), tokens ... The step's gradient is
                ``sum(weight * gradient) / sum(weight)`` over all micro-batches of all workers. A micro-batch with
                weight 0 does not count. When a micro-batch calls this several times, all calls need the same weight.
                It is rounded to the loss's dtype: for exact weights, give a loss in float32.
            scaler: a tracked ``torch.amp.GradScaler`` whose scale the gradients shall have; the loss is recorded
                without it.
            retain_graph: keep the graph for another loss of this micro-batch that shares a part of it.

        Raises:
            LossError: the loss is not a scalar, needs no gradient, or is not finite; or the weight makes no sense.
            StepError: called outside of the inner loop.
        """
        self._context.process.check("step.backward")
        if self._leaf is None:
            raise StepError(
                f"step.backward was called outside of the inner loop `for ... in step` of step {self.number}"
            )
        where = f"step {self.number}, micro-batch {self._leaf}"
        value = self._check(loss, where)
        share = _weight(weight, len(self._position.leaf(self._leaf)), where) / self._scale
        if self._calls and share != self._wanted_weight:
            raise LossError(
                f"{where}: the losses of one micro-batch have weights {self._wanted_weight * self._scale:g} and "
                f"{share * self._scale:g}; "
                "one division by the total weight cannot serve both: give them the same weight and scale the "
                "loss itself"
            )
        self._calls += 1
        self._wanted_weight = share
        if share == 0.0:
            self._weight = 0.0
            return
        if not math.isfinite(value):
            raise LossError(
                f"the loss of {where} is {value} (samples {self.sample_indices(self._leaf)}); nothing was updated. "
                "torch.autograd.set_detect_anomaly(True) names the operation"
            )
        # The weight as the loss's own dtype can express it, so that sum and total agree.
        rounded = float(torch.tensor(share, dtype=loss.dtype))
        if not math.isfinite(rounded):
            raise LossError(
                f"{where}: the weight {share * self._scale:g} is too large for a loss of {loss.dtype}; "
                "give the loss in float32: step.backward(loss.float(), ...)"
            )
        share = rounded
        self._weight = share
        self._weighted_loss += share * value
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
        assert self._folder is not None
        self._folder.backward(loss, share * scale, retain_graph=retain_graph)

    def sample_indices(self, microbatch: int) -> list[int]:
        """The samples of one of this step's micro-batches."""
        return self._context.cursor.indices(self.number, microbatch)

    # -- inside --------------------------------------------------------------------------------------

    def close(self) -> None:
        """The outer loop goes on.

        Raises:
            StepError: the step has no gradient.
        """
        if self._state == "new":
            raise StepError(
                f"step {self.number} was not iterated: write `for batch in step:` with step.backward(loss) in it"
            )
        if self._state != "done":
            raise StepError(
                f"the inner loop of step {self.number} was left before its end (break, return or an exception): "
                f"the step has no gradient. "
                "To leave out a micro-batch, call step.backward(loss, weight=0) and go on"
            )
        self._context.rounds.release_result()

    def _run(self) -> Iterator[Any]:
        self._state = "inside"
        rounds, num_leaves = self._context.rounds, self._position.num_leaves
        # Not before: user code may freeze and thaw at the head of the step.
        self._context.unused.start_step()
        folder = self._folder = self._context.folder()
        folder.start_step(num_leaves)
        guards, agreement = self._context.guards, self._context.agreement
        guards.start_step()
        plan = rounds.start("step", num_leaves)
        self.news = rounds.news
        agreement.start_step(self.number, self.place)
        rehearsal = agreement.rehearsal(plan)
        while True:
            try:
                self._context.note_plan(self.number, plan, rehearsal.other if rehearsal is not None else None)
                yield from self._compute(plan, folder, rehearsal)
                guards.finish_step(self.number)
                self._clock.switch("exchange")
                rounds.team.at(phase=rounds.phase, step=self.number, microbatch=-1)
                point("before_combine")
                combined = rounds.combine(plan, folder.held, agreement.add_to(self._telemetry()))
                break
            except LOST as lost:
                self._clock.switch("waiting")
                plan = rounds.recover(lost, folder.held)
                rehearsal = None
        rounds.team.at(phase=rounds.phase, step=self.number, microbatch=-1)
        agreement.check(rounds.telemetry)
        self._finish(combined, folder)

    def _compute(self, plan: Plan, folder: GradientFolder, rehearsal: Rehearsal | None) -> Iterator[Any]:
        """Yield this member's micro-batches, and fold what comes back."""
        rounds, agreement = self._context.rounds, self._context.agreement
        todo = plan.ranges[rounds.team.rank]
        helping = rounds.helping(plan)
        for place, leaf in enumerate(todo):
            if helping is not None and not helping.start(place, leaf):
                continue
            is_last = place == len(todo) - 1
            is_rehearsed = rehearsal is not None and leaf == rehearsal.own
            following = None if is_last or is_rehearsed else todo[place + 1]
            yield from self._compute_leaf(leaf, folder, following, plan if is_last else None)
            if is_rehearsed:
                agreement.note_own(folder.fingerprint(leaf))
        other = rehearsal.other if rehearsal is not None else None
        if other is not None and self._context.fetcher.comes(self.number, other):
            yield from self._rehearse(other, folder)
        while helping is not None and len(folder.held) <= 2 + plan.num_leaves.bit_length():
            self._clock.switch("waiting")
            taken = helping.take()
            if taken is None:
                break
            yield from self._compute_leaf(taken, folder, None, None)
        self._clock.switch("exchange")

    def _compute_leaf(
        self, leaf: int, folder: GradientFolder, following: int | None, last_of: Plan | None
    ) -> Iterator[Any]:
        """Yield one micro-batch, and fold what comes back.

        Args:
            following: the leaf that will probably be computed after this one.
            last_of: the plan, if this is the last leaf of it for this member.
        """
        rounds = self._context.rounds
        self._clock.switch("data")
        batch = self._fetch(leaf)
        self._clock.switch("compute")
        point("before_backward", leaf)
        folder.start_leaf(leaf, rounds.team.exchange.slot, following)
        if last_of is not None:
            self._offer_rows(last_of, folder)
        yield from self._give(batch, leaf)
        for slot in self._take(leaf, folder):
            rounds.team.exchange.release(slot)
        self._num_computed += 1
        point("after_backward", leaf)

    def _rehearse(self, leaf: int, folder: GradientFolder) -> Iterator[Any]:
        """Yield a micro-batch that another member computes and sums, to compare the two gradients."""
        rounds = self._context.rounds
        self._clock.switch("other")  # it says nothing about how fast this member is
        batch = self._fetch(leaf)
        folder.start_leaf(leaf, rounds.team.exchange.slot, apart=True)
        yield from self._give(batch, leaf)
        self._take(leaf, folder)
        self._context.agreement.note_other(folder.fingerprint(leaf))

    def _fetch(self, leaf: int) -> Any:
        rounds = self._context.rounds
        rounds.team.check()
        samples = partial(self.sample_indices, leaf)
        rounds.team.at(phase=rounds.phase, step=self.number, microbatch=leaf, samples=samples)
        self._leaf, self._calls, self._weight, self._weighted_loss = leaf, 0, 0.0, 0.0
        return self._context.fetcher.fetch(self.number, leaf)

    def _give(self, batch: Any, leaf: int) -> Iterator[Any]:
        seed_place(self._context.seed, "microbatch", self.place, leaf)
        yield batch
        self._leaf = None
        if not self._calls:
            raise StepError(
                f"micro-batch {leaf} of step {self.number} ended without step.backward(loss); "
                "to leave it out, call step.backward(loss, weight=0)"
            )

    def _take(self, leaf: int, folder: GradientFolder) -> list[Slot]:
        """Fold what the script has computed; returns slots that are free again."""
        freed = folder.finish_leaf(self._weight, self._weighted_loss)
        self._context.guards.finish_microbatch(f"step {self.number}, micro-batch {leaf}", folder.trained)
        return freed

    def _offer_rows(self, plan: Plan, folder: GradientFolder) -> None:
        """While the last backward runs, tell the exchange which rows of this member's nodes are complete."""
        rounds = self._context.rounds
        node, slot = folder.target
        slots = {
            **{held: folder.held[held] for held in folder.held if held in plan.nodes[rounds.team.rank]},
            node: slot,
        }
        if set(slots) != set(plan.nodes[rounds.team.rank]):
            return
        share = Share(plan.num_leaves, plan.nodes, slots)
        offer = rounds.team.exchange.offer

        def on_rows(rows_ready: int) -> None:
            try:
                offer(share, rows_ready)
            except LOST:
                folder.on_rows = None  # the combine will find out

        folder.on_rows = on_rows

    def _finish(self, combined: Combined, folder: GradientFolder) -> None:
        weight, weighted_loss = combined.slot.scalars.tolist()
        if weight == 0.0:
            raise StepError(f"all micro-batches of step {self.number} have weight 0: there is no mean gradient")
        self._combined = combined
        self._state = "done"
        self._weight_total, self._loss = weight * self._scale, weighted_loss / weight
        folder.show(combined.slot)
        self._context.unused.finish_step(self.number)
        self._clock.switch("other")
        self._clock.move(combined.waiting_s, "exchange", "waiting")
        seed_place(self._context.seed, "update", self.place)

    def _check(self, loss: Tensor, where: str) -> float:
        if not isinstance(loss, Tensor):
            raise LossError(f"{where}: step.backward needs the loss as a tensor, got a {type(loss).__qualname__}")
        if loss.numel() != 1:
            raise LossError(f"{where}: the loss has shape {tuple(loss.shape)}, it must be a scalar: take its mean")
        if not loss.requires_grad:
            raise LossError(
                f"{where}: the loss needs no gradient: it does not depend on a parameter that requires one "
                "(detached, computed under torch.no_grad(), or everything is frozen)"
            )
        return float(loss.detach())

    @property
    def line(self) -> dict[str, Any]:
        """What the journal says about this step, except for times. After the inner loop."""
        assert self._combined is not None
        return {
            "kind": "step",
            "step": self.place,
            "epoch": self.epoch,
            "loss": self._loss,
            "weight": self._weight_total,
            "samples": self.num_samples,
            "digest": f"{self._combined.digest:016x}",
        }

    @property
    def logs(self) -> dict[str, float]:
        return dict(self._logs)

    def _telemetry(self) -> StepTelemetry:
        now, last = self._clock.parts, self._clock.last
        return StepTelemetry(
            leaves=self._num_computed, data_s=now["data"], compute_s=now["compute"], last=StepSeconds(**last)
        )


def _weight(weight: float | Tensor | None, num_samples: int, where: str) -> float:
    value = float(num_samples) if weight is None else float(weight)
    if not math.isfinite(value) or value < 0:
        raise LossError(f"{where}: a weight must be finite and at least 0, got {value}")
    return value
