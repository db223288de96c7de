"""The inspector that measures the first steps of a run, stops it, and leaves what it found in the run's directory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from unisono.cluster.worker import member
from unisono.core.cursor import Recipe
from unisono.core.errors import StopInspection
from unisono.core.events import StepResult
from unisono.engine.rounds.taps import Loop
from unisono.engine.state.tracked import Tracked
from unisono.record.problems.limits import limit_growth, memory_limit, own_memory, own_peak, own_share, reset_peak
from unisono.script.inspecting import Inspector
from unisono.strategies.parallel.layers import layers_in
from unisono.strategies.stages.module import Stages
from unisono.strategies.stages.strategy import find_stages
from unisono.system import accelerators
from unisono.system.owned import write_whole
from unisono.tools.plan.found import FILE, PROGRAM, ProbeSettings, StageFindings, WorkerFindings

__all__ = ["Probe"]

MOST_STEPS: Final = 400


class Probe(Inspector):
    """Stops the run when a training has done enough steps, and writes `FILE`, on the first worker.

    A training is a loop, or several with the same recipe that follow each other: an epoch each. Where none has so many
    steps, `FILE` tells of the one with the most.

    Args:
        settings: `ProbeSettings` as JSON.
    """

    def __init__(self, settings: str) -> None:
        self._settings = msgspec.json.decode(settings, type=ProbeSettings)
        self._directory = Path(member.spec().run.settings.run_dir)
        self._loop: Loop | None = None
        self._first = 0  # step of the training
        self._done = 0
        self._best: WorkerFindings | None = None
        self._before = 0
        self._since = 0.0
        self._without_core = 0.0

    def arguments(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted = {"microbatches": self._settings.microbatches, "batch_size": self._settings.batch_size}
        return {name: wanted.get(name) or value for name, value in given.items()}

    def before_loop(self, loop: Loop) -> None:
        self._note()
        before, self._loop = self._loop, loop
        if before is not None and _alike(before.recipe, loop.recipe):
            return
        self._first, self._done = loop.steps.start, 0
        self._since, self._without_core = time.monotonic(), without_core()
        self._before = own_share()
        reset_peak()
        if self._settings.room is not None:
            limit_growth(self._settings.room)
        accelerators.reset_peak()

    def after_step(self, result: StepResult) -> None:
        loop = self._loop
        if loop is None:
            return
        if self._best is not None and self._best.done >= self._settings.steps:
            raise StopInspection("")  # the loop before this one was left early, with enough steps
        self._done = done = result.step - self._first + 1
        if done < self._settings.steps:
            return
        may_go_on = done < MOST_STEPS and result.step + 1 < loop.steps.stop
        if self._settings.seconds and may_go_on and time.monotonic() - self._since < self._settings.seconds:
            return
        self._note()
        raise StopInspection("")

    def at_end(self) -> None:
        self._note()

    def _note(self) -> None:
        """Write what the newest training has shown, unless one before it has shown more."""
        if self._loop is None or self._done <= (0 if self._best is None else self._best.done):
            return
        self._best = self._look(self._loop, self._done)
        if self._loop.worker_id in ("", "w0"):
            write_whole(self._directory / FILE, msgspec.json.encode(self._best))

    def _look(self, loop: Loop, done: int) -> WorkerFindings:
        tracked = loop.tracked
        device = loop.device
        held = {
            "parameters": tracked.num_bytes(),
            "buffers": sum(one.nbytes for module in tracked.modules.values() for one in module.buffers()),
        }
        gradient_bytes = tracked.gradient_bytes()
        limit: int | None = None
        if device.type != "cpu":
            program, peak = 0, accelerators.peak_bytes(device)
            limit = accelerators.capacity(device)
        else:
            program, peak = max(0, self._before - sum(held.values())), own_peak() - (own_memory() - own_share())
            if (known := memory_limit()) is not None:
                limit = max(0, known.limit - known.used) + own_share()
        states = sum(
            _state_bytes(optimizer, one) for optimizer in tracked.optimizers.values() for one in optimizer.state
        )
        stages = find_stages(tracked)
        leaves = -(-int(loop.recipe.get("microbatches", 1)) // self._settings.workers)
        return WorkerFindings(
            first=self._first,
            done=done,
            device=str(device),
            recipe=loop.recipe,
            is_sharded=bool(tracked.sharded),
            parameter_bytes=held["parameters"],
            gradient_bytes=gradient_bytes,
            parts={
                PROGRAM: program,
                **held,
                "gradients": gradient_bytes * max(1, leaves).bit_length(),
                "optimizer state": states,
            },
            peak=peak,
            limit=limit,
            stages=[_look_at_stage(stages, stage, tracked) for stage in range(stages.num_stages)] if stages else [],
            shards=stages.place.num_shards if stages else 1,
            held_up=(without_core() - self._without_core) / max(1e-9, time.monotonic() - self._since),
        )


def _state_bytes(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    """Return the bytes of what an optimizer keeps of a parameter."""
    state = optimizer.state.get(parameter)
    values = state.values() if isinstance(state, dict) else ()
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _look_at_stage(stages: Stages, stage: int, tracked: Tracked) -> StageFindings:
    modules = [*stages.modules_of(stage)]
    parameters = [one for module in modules for one in module.parameters()]
    buffers = [one for module in modules for one in module.buffers()]
    optimizers = tracked.optimizers.values()
    cut = sum(
        one.nbytes for module in modules for layer in layers_in(module) for each in layer.pieces() for one in each
    )
    return StageFindings(
        held=sum(one.nbytes for one in (*parameters, *buffers)),
        states=sum(_state_bytes(optimizer, one) for optimizer in optimizers for one in parameters),
        gradient=sum(one.numel() * max(4, one.element_size()) for one in parameters if one.requires_grad),
        cut=cut / max(1, sum(one.nbytes for one in parameters)),
    )


def _alike(one: Recipe, other: Recipe) -> bool:
    """Return whether two loops are epochs of one training."""
    position = {"first_epoch": 0, "order": ""}  # of the loop within it
    return {**one, **position} == {**other, **position}


def without_core() -> float:
    """Return for how many seconds this thread could have run, and had no core; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9
    return 0.0
