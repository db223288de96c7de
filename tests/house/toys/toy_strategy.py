"""A strategy that the library does not know, and a tap, in a training: each gradient is applied one step later.

``unisono run toy_strategy.py -- STEPS``: a gradient that waits is on two workers only, so no worker has the whole state
of the run. The gradient comes to all workers before it is applied, whoever was lost meanwhile, and into checkpoints. A
tap looks on at the sums.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import unisono
from unisono.core.cursor import Recipe
from unisono.core.events import StepResult
from unisono.core.holdings import Holders
from unisono.core.ownership import MemberPlace
from unisono.engine.loop.step import Step
from unisono.engine.loop.strategies import Strategy
from unisono.engine.microbatch.guards import UnusedGradients
from unisono.engine.rounds.gradient import StepContext
from unisono.engine.rounds.moving import MovingRound
from unisono.engine.rounds.taps import Computed, Place, Tap
from unisono.system.process import Process

COPIES = 2
Owners = Mapping[int, tuple[str, ...]]


class Window:
    """The gradients that are not applied yet, one a parameter. It is an `engine.state.spread.Spread` and a
    `engine.rounds.moving.HeldUnits`, whose units are these gradients.
    """

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}
        self.shapes: list[list[int]] = []
        self.owners: Owners = {}

    def keep(self, gradients: Sequence[Tensor], worker_ids: Sequence[str]) -> None:
        """Put new gradients, which all have, in the place of those that are applied."""
        self.shapes = [list(each.shape) for each in gradients]
        self.owners = self._cut(worker_ids)
        self.held = dict(enumerate(gradients))

    def drop(self, worker_id: str) -> None:
        """Drop what others keep."""
        self.held = {unit: each for unit, each in self.held.items() if worker_id in self.owners[unit]}

    def _cut(self, ids: Sequence[str]) -> Owners:
        copies = range(min(COPIES, len(ids)))
        return {unit: tuple(ids[(unit + copy) % len(ids)] for copy in copies) for unit in range(len(self.shapes))}

    # -- of the run's state

    @property
    def is_spread(self) -> bool:
        return bool(self.shapes)

    @property
    def holders(self) -> Sequence[tuple[str, ...]]:
        return [self.owners.get(unit, ()) for unit in range(len(self.shapes))]

    def unit(self, path: str) -> int | None:
        return int(path.removeprefix("['gradients'][").removesuffix("]")) if path.startswith("['gradients']") else None

    def plan(self, members: Sequence[MemberPlace]) -> Owners:
        return self._cut([each.worker_id for each in members])

    def state_dict(self) -> dict[str, Any]:
        units = range(len(self.shapes))
        return {"shapes": self.shapes, "gradients": [self.held.get(unit, self.placeholder(unit)) for unit in units]}

    def outline(self) -> dict[str, Any]:
        return {"shapes": self.shapes, "owners": self.owners}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shapes, self.owners = state["shapes"], state.get("owners", {})
        gradients = enumerate(state.get("gradients", ()))
        self.held = {unit: gradient for unit, gradient in gradients if not gradient.is_meta}

    def load_shares(self, state: dict[str, Any], holders: Owners) -> None:
        self.load_state_dict(state | {"owners": holders})

    # -- on the way

    def here(self) -> list[int]:
        return sorted(self.held)

    def state(self, unit: int) -> Tensor:
        return self.held[unit]

    def made(self, unit: int) -> Tensor:
        return torch.empty(self.shapes[unit])

    def placeholder(self, unit: int) -> Tensor:
        return torch.empty(self.shapes[unit], device="meta")

    def put(self, unit: int, state: Tensor) -> None:
        self.held[unit] = state


class Coming(MovingRound):
    """The gradients that wait come to all members."""

    def __init__(self, context: StepContext, window: Window, num_units: int) -> None:
        super().__init__(context.rounds.members, window, "the gradients that wait", context.clock)
        self._window, self._num_units = window, num_units

    def choose(self, now: Holders, staying: Sequence[int]) -> Owners:
        if lost := [unit for unit in range(len(self._window.shapes)) if unit not in now]:
            raise unisono.StateLost(f"all workers that held the gradients {lost} are lost")
        return dict.fromkeys(range(self._num_units), tuple(self._members.worker_ids))

    def finish(self) -> None:
        self._window.owners = self.wanted


class Late(Strategy):
    """The gradient of a step is applied in the next one; that of the last step is not."""

    def __init__(self, window: Window) -> None:
        self.window = window

    @property
    def recipe(self) -> Recipe:
        return {"late": 1}

    def make_step(self, number: int, unused: UnusedGradients, process: Process) -> Step:
        return LateStep(self._context, number, strategy=self, unused=unused, process=process)

    def come(self) -> Coming:
        """Bring all that waits to all members. Collective."""
        coming = Coming(self._context, self.window, len(self._context.folder().trained))
        for _ in self._context.rounds.play(coming):
            pass
        self._context.clock.switch("update")
        return coming

    def settle(self) -> None:
        self.come()  # so who leaves takes nothing with it


class LateStep(Step):
    def __init__(self, *given: Any, strategy: Late, **named: Any) -> None:
        super().__init__(*given, **named)
        self.strategy = strategy

    def _run(self, *, reseed: bool = False) -> Iterator[Any]:
        yield from super()._run(reseed=reseed)
        window, ids = self.strategy.window, self.strategy.come().wanted[0]
        due, parameters = window.held, [parameter for _, parameter in self._context.folder().trained]
        window.keep([parameter.grad.clone() for parameter in parameters if parameter.grad is not None], ids)
        window.drop(self._context.rounds.team.worker_ids[self._context.rounds.team.rank])
        for unit, parameter in enumerate(parameters):
            parameter.grad = due.get(unit)


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
        self._rounds.tracked.own("window", self.window)
        self._begin_training = self._training.begin
        setattr(self._training, "begin", self._begin_late)  # noqa: B010

    def _begin_late(self, planned: Any, strategy: Strategy, *given: Any, **named: Any) -> Any:
        return self._begin_training(planned, Late(self.window), *given, **named)


def main() -> None:
    with Run(seed=5, checkpoint=unisono.Checkpoints(every_steps=4)) as run:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        data = list(torch.randn(24, 6))
        for step in run.steps(data, batch_size=12, microbatches=6, epochs=3, max_steps=int(sys.argv[1])):
            for batch in step:
                step.backward(model(batch).square().mean())
            optimizer.step()
            step.log(seen=run.watch.loss, late=len(run.window.shapes), here=len(run.window.held))


if __name__ == "__main__":
    main()
