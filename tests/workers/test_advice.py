"""Advice about loading comes true: a run that follows it is as much faster as was said.

(That about the number of micro-batches is tried with the report.)
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence

import pytest
import torch

import unisono
from tests.pure.test_watch import Kept
from unisono.core.events import Seconds, StepFinished
from unisono.record.advice import AdviceSetting, Load, advise

pytestmark = pytest.mark.more

SAMPLE_S = 0.01
BATCH, MICROBATCHES = 8, 2
STEPS = 36
LAST = 12
TRIALS = 4
"""So many steps are looked at: on a busy machine the loader processes of a run come late."""


class Slow:
    """A dataset whose samples take a while, on any machine."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        threading.Event().wait(SAMPLE_S)
        return torch.full((4,), index / len(self))


def steps_with(loader_workers: int) -> Sequence[StepFinished]:
    """The steps of a run that computes a little longer than one process loads, the last ones."""
    sink = Kept()
    with unisono.Run(seed=1, sinks=[sink]) as run:
        model = torch.nn.Linear(4, 1)
        run.track(model=model, optimizer=(optimizer := torch.optim.SGD(model.parameters(), lr=0.01)))
        steps = run.steps(
            Slow(), batch_size=BATCH, microbatches=MICROBATCHES, max_steps=STEPS, loader_workers=loader_workers
        )
        for step in steps:
            for batch in step:
                threading.Event().wait(1.2 * SAMPLE_S * BATCH / MICROBATCHES)
                model(batch).square().mean().backward()
            optimizer.step()
    return [event for event in sink.events if isinstance(event, StepFinished)][-LAST:]


def load_in(steps: Sequence[StepFinished]) -> Load:
    """What the only worker of these steps did, as a mean."""
    (worker_id,) = steps[-1].workers
    times = [step.workers[worker_id] for step in steps]
    parts = {part: statistics.fmean(getattr(each.last, part) for each in times) for part in Seconds.__struct_fields__}
    return Load(worker_id=worker_id, seconds=Seconds(**parts), leaves=statistics.fmean(each.leaves for each in times))


def test_as_many_loader_processes_as_are_advised_bring_what_was_said() -> None:
    tried: list[tuple[float, float]] = []
    # Whatever else runs on the machine makes steps longer, and nothing makes them shorter than they can be.
    while len(tried) < TRIALS and not any(brought > said / 2 for said, brought in tried):
        before = steps_with(0)
        found = advise([load_in(before)], AdviceSetting(microbatches=MICROBATCHES, batch_size=BATCH))[0]
        assert found.change.startswith("loader_workers=")
        after = steps_with(int(found.change.removeprefix("loader_workers=")))
        slow, fast = (sorted(step.seconds.total() for step in steps)[2] for steps in (before, after))
        tried.append((found.gain, (slow - fast) / slow))
    assert any(brought > said / 2 for said, brought in tried), tried
    assert tried[-1][0] > 0.2, "nearly half of a step is loading"
