"""Course of a run: whether this worker is in it, how many steps are done, and who is told of each of them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.cluster.worker import member as members
from unisono.core.cursor import Cursor, Recipe
from unisono.core.events import RunStarted
from unisono.engine.loop.step import Iteration
from unisono.engine.microbatch.doubts import Doubts
from unisono.engine.rounds.clock import Clock
from unisono.engine.rounds.finite import Finiteness
from unisono.engine.rounds.life import Rounds
from unisono.engine.state.sums import plain
from unisono.script.batches import Batches
from unisono.script.inspecting import Inspector
from unisono.script.keeping import Keeper
from unisono.script.profiling import Profiling
from unisono.script.recording import OUTSIDE, Recorder, Role
from unisono.script.worker_troubles import OwnTroubles
from unisono.strategies.audit.audits import Audits, spoil

__all__ = ["Beginning", "Course"]


@dataclass(frozen=True)
class Beginning:
    """The step of the run at which this worker has begun, where that is not the first.

    Args:
        is_newcomer: other workers have done the steps before it; else a run that was resumed from a checkpoint.
    """

    step: int
    is_newcomer: bool


class Course:
    """The course of a run on this worker. The training loop tells it of each step, and it tells all others.

    Args:
        rounds, keeper, recorder, troubles: of the run, for all that take part in its course.
        inspector: None: nobody looks.
        audits: find out which worker is wrong where two differ; None: the run ends there.
        profiling: None: no step is profiled.

    Attributes:
        has_joined: whether this worker is in the run.
        beginning: where it has begun; None: at the first step, or nowhere yet.
        num_steps: of the run, that are done.
        num_more: steps of the run after the training loop that has begun last; None: nobody knows.
        in_batches: the loop over ``run.batches`` that the script is in, or has left before its end.
        finiteness: looks at the gradient of each step.
        doubts: looks at the losses of the first micro-batches.
    """

    def __init__(
        self,
        rounds: Rounds,
        keeper: Keeper,
        recorder: Recorder,
        troubles: OwnTroubles,
        *,
        inspector: Inspector | None,
        audits: Audits | None,
        profiling: Profiling | None,
    ) -> None:
        self.has_joined = False
        self.beginning: Beginning | None = None
        self.num_steps = 0
        self.num_more: int | None = None
        self.in_batches: Batches | None = None
        self.finiteness = Finiteness(troubles.not_finite)
        self.doubts = Doubts(inspector.doubted if inspector is not None else None)
        self.inspector = inspector
        self.audits = audits
        self.rounds = rounds
        self.keeper = keeper
        self.recorder = recorder
        self.troubles = troubles
        self._profiling = profiling
        keeper.tell_saved = lambda: recorder.last_checkpoint(keeper.saver.news(keep=True), self.role())

    def joins(self) -> None:
        """Note that this worker is in the run, at the position of its rounds."""
        total, is_newcomer = self.rounds.position.total, self.rounds.number > 0
        self.has_joined = True
        self.num_steps = total
        self.beginning = Beginning(total, is_newcomer=is_newcomer) if total > 0 else None
        if self.audits is not None and not is_newcomer:
            self.audits.record.begins = total

    def started(self, run_id: str, recipe: Recipe) -> None:
        """Record that this worker is in the run."""
        event = RunStarted(
            time=round(time.time(), 3),
            run_id=run_id,
            directory=str(self.keeper.directory or ""),
            step=self.num_steps,
            recipe=recipe,
        )
        self.recorder.run_started(event, self.role(), is_newcomer=self.rounds.number > 0)

    def check_not_in_batches(self, what: str) -> None:
        """Raise StepError if the script is in a loop over ``run.batches``, or has left one before its end.

        Args:
            what: what the script has done, for the error: "run.barrier was called".
        """
        if self.in_batches is not None:
            self.in_batches.check_not_open(what)

    def step_begins(self, number: int, clock: Clock) -> None:
        """Note that the script gets a step now.

        Args:
            number: of the step in the run.
            clock: of the parts of the step.
        """
        spoil(self.rounds.tracked)
        if self._profiling is not None:
            self._profiling.step_begins(number, clock)

    def step_ends(self, step: Iteration, seconds: dict[str, float], cursor: Cursor, end: int) -> None:
        """Record a step that the script has left. Once for each step; collective in the last step of a profile.

        Args:
            seconds: by part of the step.
            cursor: of the training loop.
            end: steps of the run at the end of the training loop.
        """
        self.check_not_in_batches("the step was ended")
        if step.has_result:
            self._record(step, seconds, end + self.num_more if self.num_more is not None else 0)
        self.troubles.tell_memory(self.rounds, cursor)
        own_work, team = self.rounds.members.balancing.own_work, self.rounds.team
        if team.rank == 0 and (words := own_work.advice(cursor.microbatches, len(team.groups))):
            warnings.warn(words, stacklevel=6)
        if self._profiling is not None:
            self._profiling.step_ends(step.number, self.rounds, sees=self.keeper.reaches)

    def evaluated(self, num_steps: int, totals: Mapping[str, Any], *, logs: Mapping[str, float] | None = None) -> None:
        """Record the totals of an evaluation, or what ``run.log`` was given, after so many steps of the run."""
        self.recorder.evaluation_finished(num_steps, plain(totals), self.role(), logs=logs)

    def ends(self) -> None:
        """Bring a profile to its end, at the end of the run. Collective."""
        if self._profiling is not None:
            self._profiling.run_ends(self.num_steps, self.rounds, sees=self.keeper.reaches)

    def role(self) -> Role:
        """Return the role of this worker in the run, now. Local."""
        team, is_alone = self.rounds.team, members.current() is None
        # In a team no worker has a rank before it has joined; the first writer writes the events until then.
        # A worker that was evicted is not the writer any more, whatever its rank was.
        if not (self.has_joined or is_alone):
            return OUTSIDE
        writes = self.keeper.writes(team) if self.keeper.directory is not None else team.rank == 0
        return Role(
            rank=team.rank,
            generation=team.generation,
            worker_ids=team.worker_ids,
            hosts=team.hosts,
            is_writer=writes and not team.is_evicted(),
            reason=team.reason,
        )

    def _record(self, step: Iteration, seconds: dict[str, float], num_steps: int) -> None:
        """Record a step.

        Args:
            num_steps: of the whole run; 0: nobody knows.
        """
        self.num_steps += 1
        result = step.result()
        self.keeper.note({**({"loss": result.loss} if step.has_gradient else {}), **step.logs})
        if self.inspector is not None:
            self.inspector.after_step(result)
        self.recorder.step_finished(
            result,
            self.role(),
            num_steps=num_steps,
            seconds=seconds,
            telemetry=step.telemetry,
            logs=step.logs,
            checkpoint=self.keeper.saver.news(),
            balance=step.news,
            audits=self.audits.take_digests() if self.audits is not None else {},
            warnings=self.rounds.team.take_warnings(),
            sent_bytes=step.sent_bytes + self.rounds.members.take_delivered_bytes(),
        )
