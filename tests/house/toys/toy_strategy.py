"""A strategy that the library does not know, and a tap, in a training: each gradient is applied one step later.

``unisono run toy_strategy.py``: the newest gradient is a part of the run's state, so that workers which join and runs
that are resumed have it; a tap looks on at the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import unisono
from unisono.core.cursor import Recipe
from unisono.core.events import StepResult
from unisono.engine.loop.step import Step
from unisono.engine.loop.strategies import Strategy
from unisono.engine.microbatch.guards import UnusedGradients
from unisono.engine.rounds.taps import Computed, Place, Tap
from unisono.system.process import Process


class Window(dict[str, Tensor]):
    """The gradients that are not applied yet, by parameter."""

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.clear()
        self.update(state)


class Late(Strategy):
    """The gradient of a step is applied in the next one; that of the last step is not."""

    def __init__(self, window: Window) -> None:
        self.window = window

    @property
    def recipe(self) -> Recipe:
        return {"late": 1}

    def make_step(self, number: int, unused: UnusedGradients, process: Process) -> Step:
        return LateStep(self._context, number, window=self.window, unused=unused, process=process)


class LateStep(Step):
    def __init__(self, *given: Any, window: Window, **named: Any) -> None:
        super().__init__(*given, **named)
        self.window = window

    def _run(self, *, reseed: bool = False) -> Iterator[Any]:
        yield from super()._run(reseed=reseed)
        for name, parameter in self._context.folder().trained:
            assert parameter.grad is not None
            due, self.window[name] = self.window.get(name), parameter.grad.clone()
            parameter.grad = due


class Watch(Tap):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.loss, self.num_leaves = 0.0, 0

    def looks_at(self, place: Place) -> bool:
        return place.leaf == 0

    def after_microbatch(self, place: Place, computed: Computed) -> None:
        self.num_leaves += 1

    def after_sum(self, place: Place, result: StepResult) -> None:
        self.loss = result.loss


class Run(unisono.Run):
    """A run with both: the row by which they are chosen."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.window, self.watch = Window(), Watch()
        assert self._rounds is not None
        self._rounds.taps.append(self.watch)
        self._begin_training = self._training.begin
        setattr(self._training, "begin", self._begin_late)  # noqa: B010

    def _begin_late(self, planned: Any, strategy: Strategy, *given: Any, **named: Any) -> Any:
        return self._begin_training(planned, Late(self.window), *given, **named)


def main() -> None:
    with Run(seed=5) as run:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer, window=run.window)
        for step in run.steps(list(torch.randn(24, 6)), batch_size=12, microbatches=6, epochs=3):
            for batch in step:
                step.backward(model(batch).square().mean())
            optimizer.step()
            step.log(seen=run.watch.loss, late=len(run.window))


if __name__ == "__main__":
    main()
