"""Local steps with a delay: the mean change of a round is applied at the end of the next one, by definition.

So it travels while the next round is computed. In the meantime each replica goes on with its own change. With theta_r
the global parameters at the beginning of round r, d(k, r) the change of replica k in round r, and D(r) their mean::

    replica k begins round r at    theta_r - d(k, r - 1)
    theta_(r + 1)               =  theta_r - outer(D(r - 1))

With one replica and no outer optimizer that is the training without replicas. The method is delayed averaging (Zhou et
al., "DaSGD", 2020); "eager updates" (Kale et al., 2025, arXiv:2502.12996) let a replica go on with 1/K of its change,
and DiLoCo with a plain delay with none of it, which docs/local_steps.md measures.

Everything else that is tracked follows the parameters: after ``for step in round`` a scheduler that the replicas step
is where they had it at the end of the round before, and a replica goes on from where it had it itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from unisono.decisions.cursor import Recipe
from unisono.errors import StepError, UsageError
from unisono.exchange.flat import SUM_DTYPE
from unisono.microbatch.data import Request
from unisono.microbatch.folding import Fingerprint
from unisono.microbatch.guards import UnusedGradients
from unisono.process import Process
from unisono.rounds.arrived import Arrived
from unisono.rounds.changes import Changes
from unisono.rounds.gradient import StepContext
from unisono.rounds.members import Members
from unisono.rounds.overlapped import OWN, Due, LateRound, Overlap
from unisono.rounds.replicas import Trained
from unisono.rounds.team import Team
from unisono.state.late import Late, MeanChange
from unisono.state.packing import from_bytes, to_bytes
from unisono.state.replicas import Common, ReplicaState, Shelf, common, restore
from unisono.state.values import Values
from unisono.training.lateround import LateLocalRound
from unisono.training.local import LocalSteps
from unisono.training.localround import InnerStep
from unisono.training.upcoming import Upcoming

__all__ = ["OverlappedSteps", "check_round_delay"]


def check_round_delay(delay: int) -> None:
    """Check the delay of a training in rounds.

    Raises:
        UsageError: it is neither 0 nor 1.
    """
    if isinstance(delay, bool) or delay not in (0, 1):
        raise UsageError(
            f"delay of run.local_steps is 0, or 1: the mean change of a round is applied one round later; got {delay!r}"
        )


@dataclass
class _Boundary:
    """Where the replicas of a round begin."""

    number: int
    steps: range
    values: Values
    start: list[Tensor]
    buffers: list[Tensor]
    live: Common
    """What all replicas have alike, as the script has it."""
    changes: Changes
    inner: Common | None = None
    """The same, as the replicas begin with it; None: this worker has begun none."""


@dataclass
class _End:
    """What all replicas of a round have ended with."""

    common: Common
    names: set[str] = field(default_factory=set)
    """What steps of replicas have changed of it since the loop began."""


class OverlappedSteps(LocalSteps):
    """Rounds of local steps with ``delay=1``, as a strategy of the training loop.

    Args:
        late: the part of the run's state for changes that are not applied yet.
        arguments: of `LocalSteps`.
    """

    unaudited = "run.local_steps(delay=1)"

    def __init__(self, late: Late, copies: int, **arguments: Any) -> None:
        super().__init__(copies=copies, **arguments)
        self._num_copies = copies  # a replica's own change is a part of its state in any case
        self._replicas.num_copies = copies
        self._late = late
        self._num_rounds = self._replication.num_rounds(self._num_steps)
        self.num_more = 1 if self._num_rounds else 0
        self._overlap: Overlap | None = None
        self._boundaries: dict[int, _Boundary] = {}
        self._at: _Boundary
        self._ends: dict[int, _End] = {}
        self._left: Common | None = None
        self._shapes: list[Any] = []

    @property
    def recipe(self) -> Recipe:
        return {**super().recipe, "delay": 1}

    def num_done(self, number: int) -> int:
        return min(max(0, number - 1), self._num_rounds)

    def round_of(self, number: int) -> range | None:
        return self.steps_of(min(number, self._num_rounds - 1))

    def may_save(self, number: int) -> bool:
        # Before the first update the state is that of the beginning, or of the training before, which has a checkpoint.
        assert self._overlap is not None
        return not self._overlap.holds_back and number != 1

    def open(self, context: StepContext, first: int) -> None:
        super().open(context, first)
        context.folder()  # so that all know what is summed before the first meeting
        for loaded in self._late.loaded:
            self._ends[loaded.number] = _End(Common(loaded.common, loaded.digests), set(loaded.names))
        self._overlap = Overlap(context, self, self._replicas, self._late, self._num_rounds, first, self._device)

    def make_step(self, number: int, unused: UnusedGradients, process: Process) -> LateLocalRound:
        unused.leave_out(self._outer_name)
        self._unused, self._process = unused, process
        self._now = now = LateLocalRound(self, self._context, number, process)
        self._team.round = self._context.first_number + number
        return now

    def settle(self) -> None:
        assert self._overlap is not None
        self._overlap.settle()

    def close(self) -> None:
        super().close()
        if self._overlap is not None:
            self._overlap.leave()
        self._boundaries.clear()

    def forecast(self, upcoming: Upcoming) -> Iterator[Request]:
        last = self._now is not None and self._now.number_in_loop >= self._num_rounds
        return iter(()) if last else super().forecast(upcoming)

    def _warn_of(self, team: Team) -> None:
        if team.size > self.num_replicas:
            warnings.warn(
                f"{team.size} workers share {self.num_replicas} replicas: with delay=1 a replica is computed by one "
                f"worker, so {team.size - self.num_replicas} of them have nothing to compute, and only keep copies of "
                "states; use more replicas or fewer workers",
                stacklevel=3,
            )

    def _predicted(self, members: Members) -> tuple[Sequence[int], tuple[int, int]]:
        ranges = members.predicted(self.num_replicas).ranges
        return (ranges[members.rank] if members.rank < len(ranges) else ()), (0, 1)

    # -- for the iteration ---------------------------------------------------------------------------

    @property
    def playing(self) -> int | None:
        return self._overlap.playing if self._overlap is not None else None

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def num_computed(self) -> int:
        """Replicas that this worker has computed in the newest iteration."""
        assert self._overlap is not None
        return self._overlap.num_computed

    @property
    def news(self) -> str:
        """Why the plan of the newest iteration differs from the one before; "" where it does not."""
        assert self._overlap is not None
        return self._overlap.news

    def iterate(self, number: int) -> Generator[InnerStep, None, Due | None]:
        """Yield the steps of replicas in an iteration, and apply the mean change of the round before, which is returned
        (None: there is none). Collective.
        """
        assert self._overlap is not None
        steps = self._overlap.iterate(number)
        while True:
            try:
                step = next(steps)
            except StopIteration as ended:
                due: Due | None = ended.value
                break
            assert isinstance(step, InnerStep)
            yield step
        if due is not None:
            change = due.change
            restore(self._objects, self._moved(self._at.live, self._ends[change.number]).content)
            self._ends.pop(change.number - 1, None)
            means = [mean.to(self._device) for mean in change.means]
            self._update(
                self._context.first_number + change.number, means, [one.to(self._device) for one in change.buffers]
            )
        self._left = common(self._objects)
        return due

    # -- for the rounds ------------------------------------------------------------------------------

    def remember(self, number: int) -> None:
        self._start = []  # another round may have to be computed from there
        folder = self._remember(self.steps_of(number))
        shapes = [(entry.name, entry.shape) for entry in (*folder.layout.gradients, *folder.layout.buffers)]
        if self._shapes and shapes != self._shapes:
            raise StepError(
                "the parameters that are trained, or the buffers of the model, have changed within "
                "run.local_steps(delay=1), while the change of a round is under way. Change them between two calls of "
                "run.local_steps"
            )
        self._shapes = shapes
        before = self._boundaries.get(number - 1)
        self._check_left(number)
        self._boundaries[number] = self._at = _Boundary(
            number,
            self._steps,
            Values(self._tracked, before.values if before is not None else None),
            self._start,
            [buffer.detach().clone() for buffer in folder.buffers.tensors()],
            self._common,
            self._changes,
        )
        folder.buffers.start_step()

    @contextmanager
    def as_of(self, number: int) -> Iterator[None]:
        now = self._at
        self._enter(self._boundaries[number])
        try:
            yield
        finally:
            self._enter(now)

    def make(self, overlap: Overlap, context: StepContext, number: int, shelf: Shelf) -> LateRound:
        at = self._boundaries[number]
        return LateRound(
            overlap,
            context,
            number,
            self._replicas,
            self.num_replicas,
            self,
            at.changes,
            self._outer_folder,
            at.start,
            shelf,
            copies=self._num_copies,
            groups=self._groups,
        )

    def note_end(self, round_: LateRound) -> None:
        first = round_.ended[0]
        before = self._ends.get(round_.at - 1)
        names = {*(before.names if before is not None else ()), *first.changed}
        names |= self._ends[round_.at].names if round_.at in self._ends else set()
        self._ends[round_.at] = _End(Common(first.common, first.digests), names)
        self._boundaries.pop(round_.at, None)

    def change_of(self, round_: LateRound, arrived: Arrived) -> MeanChange:
        end = self._ends[round_.at]
        return MeanChange(
            number=round_.at,
            digest=round_.changes.digest(arrived.digest),
            means=round_.changes.means(arrived.slot),
            buffers=arrived.slot.buffers,
            scalars=arrived.scalars,
            common=end.common.content,
            digests=end.common.digests,
            names=sorted(end.names),
            sums={replica: one.sums for replica, one in round_.ended.items()},
        )

    # -- one replica ---------------------------------------------------------------------------------

    def train(self, replica: int, *, compares: bool, keeps: bool) -> Generator[InnerStep, None, Trained]:
        trained = yield from super().train(replica, compares=compares, keeps=keeps)
        at, found = self._at, common(self._objects)
        assert at.inner is not None
        changed = sorted(name for name, digest in found.digests.items() if digest != at.inner.digests[name])
        before = self._ends.get(at.number - 1)
        self._ends[at.number] = _End(found, {*changed, *(before.names if before is not None else ())})
        ended = msgspec.structs.replace(trained.ended, changed=changed)
        return Trained(trained.weighted_loss, trained.state, ended, trained.start, trained.first)

    def rehearse(self, replica: int, *, fetches: bool = False) -> Generator[InnerStep, None, Fingerprint | None]:
        found = yield from super().rehearse(replica, fetches=fetches)
        self.return_to_boundary()
        return found

    def return_to_boundary(self) -> None:
        at = self._at
        restore(self._objects, at.live.content)
        self._structure.restore_modes()
        buffers = self._outer_folder.buffers
        with torch.no_grad():
            for buffer, before in zip(buffers.tensors(), at.buffers, strict=True):
                if buffer.shape == before.shape:
                    buffer.copy_(before)
        buffers.start_step()

    def _given(self, replica: int, *, keeps: bool) -> ReplicaState:
        assert self._overlap is not None
        return self._overlap.take_state(self._at.number, replica)

    def _go_to_boundary(self, state: ReplicaState) -> list[Tensor]:
        at = self._at
        if at.inner is None:
            at.inner = self._moved(at.live, self._ends.get(at.number - 1))
        self._common = at.inner
        super()._go_to_boundary(state)
        own = state.get(OWN) if at.number > 0 else None
        if own is None:
            return at.start
        folder = self._outer_folder
        begins = []
        with torch.no_grad():
            for index, ((_, parameter), start) in enumerate(zip(folder.trained, at.start, strict=True)):
                change = own[index].to(parameter.device)
                parameter.copy_(start.to(change.dtype) - change)
                begins.append(parameter.detach().clone())
            num = len(folder.trained)
            buffers = folder.buffers.tensors()
            folder.buffers.apply([own[num + index].to(buffer.device) for index, buffer in enumerate(buffers)])
        folder.buffers.start_step()
        return begins

    def _state_after(self, given: ReplicaState, start: Any) -> ReplicaState:
        state = super()._state_after(given, start)
        folder = self._outer_folder
        with torch.no_grad():
            own = []
            for (_, parameter), before in zip(folder.trained, start, strict=True):
                kind = SUM_DTYPE.get(parameter.dtype, parameter.dtype)
                own.append(before.to(kind) - parameter.detach().to(kind))
            layout = folder.layout.buffers
            changes = [torch.empty(entry.shape, dtype=entry.sum_dtype, device=self._device) for entry in layout]
            folder.buffers.take_changes(changes, 1.0)
        state[OWN] = dict(enumerate([*own, *changes]))
        return state

    # -- inside --------------------------------------------------------------------------------------

    def _enter(self, at: _Boundary) -> None:
        """Put the boundary of a round in force."""
        at.values.put()
        self._at, self._start, self._steps, self._changes = at, at.start, at.steps, at.changes
        restore(self._objects, at.live.content)
        self._structure.renew()
        self._outer_folder.buffers.start_step()
        self._averaged = self._averages()
        self._frozen = [(name, one, one._version) for name, one, _ in self._frozen]
        self._place = -1

    def _moved(self, live: Common, end: _End | None) -> Common:
        """Return what all replicas have alike, with what their steps have changed as it was at the end of a round."""
        if end is None or not end.names:
            return live
        theirs = from_bytes(end.common.content)
        content = {
            name: theirs[name] if name in end.names else state for name, state in from_bytes(live.content).items()
        }
        digests = {
            name: end.common.digests[name] if name in end.names else digest for name, digest in live.digests.items()
        }
        return Common(to_bytes(content, "tracked"), digests)

    def _check_left(self, number: int) -> None:
        """Check that the script has not changed between two rounds what the steps of replicas change.

        Raises:
            StepError: it has.
        """
        end, left = self._ends.get(number - 1), self._left
        if end is None or left is None:
            return
        for name in sorted(end.names):
            if self._common.digests[name] != left.digests[name]:
                raise StepError(
                    f"{name} was changed after `for step in round` of round {number - 1}, and the steps of the "
                    "replicas change it, too. With delay=1 the replicas are a round ahead of what the script has "
                    "between two rounds, so one of the two changes would be lost: change it in one of the two places"
                )
