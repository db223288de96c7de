"""Strategies: what one iteration of a training loop is, and so how batches become an update.

A training loop (`unisono.script.loop`) goes from boundary to boundary; a **strategy** says what lies between two of
them. `Synchronous` is that of a plain ``run.steps``: one global batch, one mean gradient, one update. Another strategy
is a folder of `unisono.strategies` with a class that has the methods of `Strategy`, and the call by which a script
chooses it. What a strategy changes of the bits is in its `Strategy.recipe`, so a run that goes on with another one is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from unisono.core.cursor import Recipe
from unisono.engine.exchange.flat import FlatLayout
from unisono.engine.loop.step import Iteration, Step
from unisono.engine.loop.upcoming import Upcoming
from unisono.engine.microbatch.data import Request
from unisono.engine.microbatch.folding import GradientFolder
from unisono.engine.microbatch.guards import UnusedGradients
from unisono.engine.rounds.gradient import StepContext
from unisono.system.process import Process

__all__ = ["Strategy", "Synchronous"]


class Strategy(Protocol):
    """What one iteration of a training loop is. Made for one call of ``run.steps``; the loop calls the methods."""

    @property
    def recipe(self) -> Recipe:
        """What it adds to the recipe of the phase; empty where it changes no bit of a plain ``run.steps``."""

    @property
    def num_more(self) -> int:
        """Iterations after the one with the last global batch, which bring to an end what is under way."""

    def num_done(self, number: int) -> int:
        """Return how many updates of this loop are done before iteration ``number``. Local."""

    @property
    def overlaps(self) -> bool:
        """Whether parameters stay as they are in an iteration until the members have met, so that a checkpoint may copy
        them meanwhile.
        """

    def round_of(self, number: int) -> range | None:
        """Return the global batches of iteration ``number``, where it is a round of several steps; None: it is one."""

    def layout(self, folder: GradientFolder) -> FlatLayout:
        """Return the layout of what the members sum. Local, equal on all members.

        Args:
            folder: of the parameters that are trained now.
        """

    def forecast(self, upcoming: Upcoming) -> Iterator[Request]:
        """Yield the micro-batches that this worker will probably compute next, in the order of need. Local.

        Args:
            upcoming: the forecast of a plain ``run.steps``.
        """

    def open(self, context: StepContext, first: int) -> None:
        """Get ready, before the first iteration of this worker. Local."""

    def make_step(self, number: int, unused: UnusedGradients, process: Process) -> Iteration:
        """Return what the script gets in iteration ``number`` of this loop. Local."""

    def settle(self) -> None:
        """Bring to an end what other members still need of this one, before they change and before a snapshot.

        Called at a boundary where something happens, before it does. Collective.
        """

    def may_save(self, number: int) -> bool:
        """Return whether a snapshot may be taken before iteration ``number``; the same on all members. Local."""

    def close(self) -> None:
        """Give back what is held; also after an error. Local."""


class Synchronous:
    """One global batch, one mean gradient, one update."""

    num_more = 0
    overlaps = True

    @property
    def recipe(self) -> Recipe:
        return {}

    def num_done(self, number: int) -> int:
        return number

    def round_of(self, number: int) -> range | None:
        return None

    def layout(self, folder: GradientFolder) -> FlatLayout:
        return folder.layout

    def forecast(self, upcoming: Upcoming) -> Iterator[Request]:
        return upcoming()

    def open(self, context: StepContext, first: int) -> None:
        self._context = context

    def make_step(self, number: int, unused: UnusedGradients, process: Process) -> Step:
        return Step(self._context, number, unused=unused, process=process)

    def settle(self) -> None:
        pass

    def may_save(self, number: int) -> bool:
        return True

    def close(self) -> None:
        pass
