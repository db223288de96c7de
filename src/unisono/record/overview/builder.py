"""The rule that folds the events of a run into its overview."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from unisono.core.events import (
    Announcement,
    CheckpointWritten,
    EvaluationFinished,
    Event,
    Interruption,
    LinesLost,
    MachineGone,
    MachineJoined,
    MachineUsed,
    MembershipChanged,
    Problem,
    RunEnded,
    RunStarted,
    Seconds,
    StepFinished,
    WorkerGone,
    WorkerJoined,
    WorkerLate,
    WorkerOutput,
    WorkerTimes,
)
from unisono.record.asides import written
from unisono.record.checkpoint_files import step_name
from unisono.record.overview.loss_curve import Curve
from unisono.record.overview.past import Past, PastBuilder
from unisono.record.overview.sentences import Told, finite, text_of
from unisono.record.overview.values import INTERRUPTIONS, Overview, WorkerNow, efficiency, mean_seconds

__all__ = ["OverviewBuilder"]

_WINDOW_S: Final = 10.0
"""What is said of "the last steps" is a mean over so many seconds of steps, and at least `_LEAST_STEPS` of them."""
_LEAST_STEPS: Final = 8
_KEPT_TIMES: Final = 512
"""For so many steps of a worker the times are kept: for 128 steps of 4 workers."""
_STALLED_S: Final = 5.0
"""Without a step for so long, and for `_STALLED_STEPS` times as long as a step takes, a run is said to wait."""
_STALLED_STEPS: Final = 5.0
_GONE_S: Final = 60.0
"""For so long a worker that has gone is still shown, but not more than `_GONE_SHOWN` of them."""
_GONE_SHOWN: Final = 8
_WORKERS_KEPT: Final = 256
"""Of those that are no members: a run may go on for months with workers that come and go."""
_UNUSED_S: Final = 60.0
"""A machine that has not said for so long what it uses is left out, while the run goes on."""
_NO_TIME: Final = Seconds()
_NO_CHECKPOINT: Final = CheckpointWritten(step=-1)
_PAUSED: Final = "paused: "
"""In the reason of a generation that does not train (`unisono.membership`)."""


class OverviewBuilder:
    """Overview of a run, folded from its events. Knows no clock: times come from the events and from the caller.

    The events may begin anywhere in the run. None is given twice (`unisono.core.events.Once`).

    Args:
        interrupted_s: by which interruptions before the events have made the run longer.
    """

    def __init__(
        self,
        run_id: str = "",
        run_dir: str = "",
        script: str = "",
        started: float = 0.0,
        interrupted_s: float = 0.0,
    ) -> None:
        self._run_id, self._run_dir, self._script, self._started = run_id, run_dir, script, started
        self._last: StepFinished | None = None
        self._done: tuple[StepFinished, int, float, float] | None = None
        """Of an earlier run in the same directory: its last step, its first one, and from when to when it went."""
        self._first = -1
        """The first step since the workers have begun; -1: unknown."""
        self._before = -1
        """The last step that counts as done, where `_last` does not know it."""
        self._steps: deque[StepFinished] = deque()
        """The last ones of one generation."""
        self._kept_steps = _KEPT_TIMES
        self._curve = Curve()
        self._members: tuple[str, ...] = ()
        self._generation = 0
        self._reason = ""
        """Of the generation."""
        self._workers: dict[str, _Worker] = {}
        self._parts = 1
        self._late: dict[str, WorkerLate] = {}
        self._machines: dict[str, MachineUsed] = {}
        self._agents: dict[str, str] = {}
        self._evaluation: EvaluationFinished | None = None
        self._checkpoint = _NO_CHECKPOINT
        self._ended: RunEnded | None = None
        self._told = Told()
        self._past = PastBuilder(run_id)
        self._interruptions = deque[Interruption](maxlen=INTERRUPTIONS)
        self._interrupted_s = interrupted_s
        self._computing_s = self._total_s = 0.0
        """Of a worker in the mean, in all steps."""

    def take(self, event: Event) -> None:
        """Count an event."""
        if isinstance(event, StepFinished):
            self._take_step(event)
        elif not isinstance(event, Announcement | WorkerOutput):
            self._take_other(event)

    def _take_step(self, step: StepFinished) -> None:
        last, steps = self._last, self._steps
        self._first = step.step if self._first < 0 else self._first
        if last is None or step.generation != last.generation:
            steps.clear()
            self._kept_steps = max(_LEAST_STEPS, _KEPT_TIMES // max(1, len(step.workers)))
        elif len(steps) >= self._kept_steps:
            steps.popleft()
        steps.append(step)
        self._last = step
        self._curve.add(step.step, step.loss)
        self._computing_s += step.means.compute
        self._total_s += step.means.total()
        if self._late:  # all members have taken part
            self._late.clear()
        if step.checkpoint and isinstance(event := written(step.time, step.checkpoint), CheckpointWritten):
            self._save(event)  # one that was lost is told as an event of its own
        for warning in step.warnings:
            self._told.add(step.time, warning, "warning")

    def _take_other(self, event: Event) -> None:
        self._past.take(event)
        match event:
            case RunStarted():
                self._begin(event)
            case MembershipChanged():
                self._change(event)
            case WorkerJoined():
                self._join(event)
            case WorkerGone():
                self._go(event)
            case WorkerLate():
                self._late[event.worker_id] = event
                self._told.replace(event, f"late {event.worker_id}")
            case MachineUsed():
                self._machines[event.host] = event
            case MachineGone():
                self._forget(event)
            case EvaluationFinished():
                self._evaluate(event)
            case CheckpointWritten() if event.step >= self._checkpoint.step:
                self._save(event)
            case Interruption():
                self._interruptions.append(event)
                self._interrupted_s = round(self._interrupted_s + event.seconds, 6)
            case RunEnded():
                self._end(event)
            case Problem():
                self._told.wrong(event)
            case MachineJoined():
                self._agents[event.agent_id] = event.host
                self._told.tell(event)
            case LinesLost():
                self._told.tell(event)

    def go_on_as(self, run_id: str, started: float) -> None:
        """Let the events from here on be those of another run in the same directory.

        Args:
            started: when it began; 0: as is known.
        """
        self._past.go_on_as(run_id)
        self._interruptions.clear()
        self._interrupted_s = 0.0
        if self._last is not None:
            ended = self._ended.time if self._ended is not None else self._last.time
            self._done = (self._last, self._first, self._started, ended)
        self._started, self._ended = started or self._started, None
        self._generation, self._members = 0, ()
        self._workers.clear()

    def past(self) -> Past:
        """Return who took part, and what interrupted the run."""
        return self._past.past()

    # -- the run -------------------------------------------------------------------------------------

    def _evaluate(self, event: EvaluationFinished) -> None:
        """Keep the evaluation of the newest models: one beside the training may be told after a later one."""
        if self._evaluation is None or event.step >= self._evaluation.step:
            self._evaluation = event
            self._told.replace(event, "evaluation")

    def _begin(self, event: RunStarted) -> None:
        """Begin, or go on from a checkpoint: the steps after it are done again."""
        self._run_id = event.run_id or self._run_id
        self._run_dir = event.directory or self._run_dir
        self._started = self._started or event.time
        if self._ended is not None:
            self._started = event.time or self._started
            self._workers.clear()
        self._ended = None
        self._last, self._before, self._first = None, event.step - 1, event.step
        self._steps.clear()
        self._late.clear()
        self._curve.cut(event.step)
        if self._evaluation is not None and self._evaluation.step > event.step:
            self._evaluation = None
        if event.step == 0:
            self._checkpoint = _NO_CHECKPOINT
        self._told.begins(event)

    def _save(self, event: CheckpointWritten) -> None:
        self._checkpoint = event
        self._told.replace(event, "checkpoint")

    def _end(self, event: RunEnded) -> None:
        if self._ended is not None:  # a worker has said it before the head, or several workers have
            known = self._ended
            better = event.reason if event.reason not in ("", "finished") else known.reason or event.reason
            self._ended = msgspec.structs.replace(
                event,
                ok=event.ok and known.ok,
                reason=better,
                time=known.time or event.time,
                digests=event.digests or known.digests,
            )
        elif event.ok and self._last is None and self._done is not None and self._done[0].step == self._before:
            self._last, self._first, self._started, time = self._done  # nothing was left to do
            self._ended = msgspec.structs.replace(event, time=time)
        else:
            self._ended = event
        self._told.replace(self._ended, "end")

    # -- who is there --------------------------------------------------------------------------------

    def _change(self, event: MembershipChanged) -> None:
        if event.generation < self._generation:
            return
        if event.generation > self._generation:
            self._told.changed(event, set(self._members) ^ set(event.worker_ids))
        self._generation, self._reason = event.generation, event.reason
        for worker_id in set(self._members) - set(event.worker_ids):
            worker = self._workers.get(worker_id)
            if worker is not None and not worker.how:
                worker.how, worker.gone_at = "gone", event.time
        self._members = event.worker_ids
        for worker_id in event.worker_ids:
            self._workers.setdefault(worker_id, _Worker()).how = ""

    def _join(self, event: WorkerJoined) -> None:
        worker = self._workers.setdefault(event.worker_id, _Worker())
        worker.host, worker.device, worker.part, worker.how = event.host, event.device, event.part, ""
        self._parts = max(self._parts, event.part + 1)  # a run begins when every part has a worker
        self._told.joined(event)

    def _go(self, event: WorkerGone) -> None:
        worker = self._workers.setdefault(event.worker_id, _Worker())
        worker.host, worker.how, worker.gone_at = event.host or worker.host, event.how, event.time
        self._late.pop(event.worker_id, None)
        if event.how != "finished":  # all of them do, and the run says so
            self._told.gone(event)
        if len(self._workers) > _WORKERS_KEPT + len(self._members):
            gone = {worker_id: each.gone_at for worker_id, each in self._workers.items() if each.how}
            self._workers.pop(min(gone, key=gone.__getitem__, default=""), None)

    def _forget(self, event: MachineGone) -> None:
        self._agents.pop(event.agent_id, None)
        if event.host not in self._agents.values():
            self._machines.pop(event.host, None)
        self._told.tell(event)

    # -- the value -----------------------------------------------------------------------------------

    def overview(self, now: float) -> Overview:
        """Return the run as it is at ``now`` (seconds since 1970)."""
        last, ended = self._last, self._ended
        window = self._window()
        seconds = math.fsum(step.seconds.total() for step in window)  # `sum` depends on the version of Python
        samples = sum(step.samples for step in window)
        step_s = seconds / len(window) if window else 0.0
        is_stalled = last is not None and 0 < last.time < now - max(_STALLED_S, _STALLED_STEPS * step_s)
        loss = last.loss if last is not None else None
        is_finite = loss is not None and math.isfinite(loss)
        state, reason = self._state(is_stalled=is_stalled)
        return Overview(
            run_id=self._run_id,
            run_dir=self._run_dir,
            script=self._script,
            state=state,
            reason=reason,
            time=now,
            started=self._started,
            ended=(ended.time or now) if ended is not None else 0.0,
            step=self._before if last is None else last.step,
            first=max(0, self._first),
            num_steps=last.num_steps if last is not None else 0,
            unit=last.unit if last is not None else "step",
            epoch=last.epoch if last is not None else 0,
            loss=loss if is_finite else None,
            loss_is="" if is_finite or loss is None else str(loss),
            logs=finite(last.logs) if last is not None else {},
            evaluation=finite(self._evaluation.values) if self._evaluation is not None else {},
            samples_per_s=samples / seconds if seconds > 0 else 0.0,
            steps_per_s=1 / step_s if step_s > 0 else 0.0,
            left_s=None if ended is not None else _left_s(last, step_s),
            generation=max(self._generation, last.generation if last is not None else 0),
            num_workers=len(last.workers) if last is not None else 0,
            digest=last.digest if last is not None else "",
            digests=ended.digests if ended is not None else {},
            efficiency=efficiency(self._computing_s, self._total_s),
            interruptions=[*self._interruptions],
            interrupted_s=self._interrupted_s,
            checkpoint=step_name(self._checkpoint.step) if self._checkpoint.step >= 0 else "",
            checkpoint_step=self._checkpoint.step,
            curve=self._curve.points(),
            parts=self._parts,
            workers=self._workers_now(window, now, is_stalled=is_stalled),
            machines=[
                self._machines[host]
                for host in sorted(self._machines)
                if ended is not None or not 0 < self._machines[host].time < now - _UNUSED_S
            ],
            recent=self._told.recent(),
        )

    def _window(self) -> list[StepFinished]:
        """Return the last steps, of which the means are taken, the newest first."""
        found: list[StepFinished] = []
        seconds = 0.0
        for step in reversed(self._steps):
            if len(found) >= _LEAST_STEPS and seconds >= _WINDOW_S:
                break
            seconds += step.seconds.total()
            found.append(step)
        return found

    def _state(self, *, is_stalled: bool) -> tuple[str, str]:
        ended, last = self._ended, self._last
        if ended is not None and not ended.ok:
            return "failed", ended.reason
        if ended is not None:
            return ("finished", "") if ended.reason in ("", "finished") else ("stopped", ended.reason)
        if _PAUSED in self._reason:
            return "paused", self._reason.partition(_PAUSED)[2]
        if self._late:
            late = self._late[min(self._late)]
            return "waiting", text_of(late)
        if last is None:
            return "starting", ""
        return ("waiting", "") if is_stalled else ("training", "")

    def _ranks(self) -> tuple[str, ...]:
        """Return the members by rank."""
        last = self._last
        if last is not None and last.workers and (last.generation > self._generation or not self._members):
            return tuple(last.workers)
        return self._members

    def _workers_now(self, window: Sequence[StepFinished], now: float, *, is_stalled: bool) -> list[WorkerNow]:
        means = _means(window)
        uses = {worker_id: use for machine in self._machines.values() for worker_id, use in machine.workers.items()}
        hosts = {worker_id: machine.host for machine in self._machines.values() for worker_id in machine.workers}
        members = self._ranks()
        ranks = {worker_id: rank for rank, worker_id in enumerate(members)}
        waits = bool(self._late) or is_stalled or _PAUSED in self._reason
        shown = []
        for worker_id in (*members, *self._others(ranks, now)):
            worker = self._workers.get(worker_id) or _Worker()
            mean = means.get(worker_id) or _Mean()
            use = uses.get(worker_id)
            shown.append(
                WorkerNow(
                    worker_id=worker_id,
                    host=worker.host or hosts.get(worker_id, ""),
                    device=worker.device,
                    part=worker.part,
                    rank=ranks.get(worker_id),
                    state=self._worker_state(worker_id, worker, mean, waits=waits, is_member=worker_id in ranks),
                    share=mean.share,
                    seconds=mean.seconds,
                    waits_for=mean.waits_for,
                    cores=use.cores if use is not None else 0.0,
                    memory_bytes=use.memory_bytes if use is not None else 0,
                )
            )
        return shown

    def _others(self, members: Mapping[str, int], now: float) -> list[str]:
        """Return the workers that are no members: those that join, and those that have gone a short while ago."""
        others = [(worker_id, worker) for worker_id, worker in self._workers.items() if worker_id not in members]
        since = self._ended.time if self._ended is not None and self._ended.time else now
        joining = [worker_id for worker_id, worker in others if not worker.how]
        gone = [
            worker_id
            for worker_id, worker in sorted(others, key=lambda each: each[1].gone_at)
            if worker.how and not 0 < worker.gone_at < since - _GONE_S
        ]
        return joining + gone[-_GONE_SHOWN:]

    def _worker_state(self, worker_id: str, worker: _Worker, mean: _Mean, *, waits: bool, is_member: bool) -> str:
        if worker.how:
            return worker.how
        if self._ended is not None:
            return "finished" if self._ended.ok else "ended"
        if worker_id in self._late:
            return "late"
        if not is_member or (mean.num_steps == 0 and self._last is None):
            return "joining"
        return "waiting" if waits else "training"


@dataclass
class _Worker:
    """What is known of a worker."""

    host: str = ""
    device: str = ""
    part: int = 0
    how: str = ""
    """It has gone; "": it has not."""
    gone_at: float = 0.0


@dataclass(frozen=True)
class _Mean:
    """Means of the last steps of a worker."""

    num_steps: int = 0
    share: float = 0.0
    seconds: Seconds = field(default_factory=Seconds)
    waits_for: str = ""


def _means(window: Sequence[StepFinished]) -> dict[str, _Mean]:
    """Return the means by worker id."""
    told: dict[str, list[WorkerTimes]] = {}
    for step in window:
        for worker_id, times in step.workers.items():
            told.setdefault(worker_id, []).append(times)
    total = sum(times.leaves for each in told.values() for times in each)
    return {
        worker_id: _Mean(
            num_steps=len(each),
            share=sum(times.leaves for times in each) / total if total else 0.0,
            seconds=mean_seconds([times.last for times in each if times.last != _NO_TIME]),
            waits_for=_waits_for(each),
        )
        for worker_id, each in told.items()
    }


def _waits_for(told: Sequence[WorkerTimes]) -> str:
    """Return the worker for which one has waited longest in all; "": for none."""
    waits: dict[str, float] = {}
    for times in told:
        if times.waits_for:
            waits[times.waits_for] = waits.get(times.waits_for, 0.0) + times.waits_s
    return max(waits, key=waits.__getitem__, default="")


def _left_s(last: StepFinished | None, step_s: float) -> float | None:
    """Return the time left; None where the script does not say how long it trains."""
    if last is None or not last.num_steps:
        return None
    return max(0.0, (last.num_steps - last.step - 1) * step_s)
