"""Predicted parameters: those that are expected when a gradient that is computed now is applied.

With ``run.steps(delay=D)`` a gradient meets parameters that are D updates newer than those with which it was computed.
Where updates change slowly, as momentum makes them, the newest one says what the next D will be::

    predicted = parameters + D (parameters - those before the newest update)

Micro-batches are computed with these, and the gradients are applied to the parameters themselves, so no error is
carried on. (Chen et al., "SpecTrain", 2018, predict from momentum. For D = 1 predicted parameters change by the newest
update and by what the one before has missed of it: the idea of error feedback, as in Zmushko et al., 2026.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["NAME", "Prediction"]

NAME = "prediction"
"""Of the part of the run's state."""


class Prediction:
    """The parameters before the newest update. A part of the run's state; all methods are local."""

    def __init__(self) -> None:
        self._before: list[Tensor] = []  # between `put` and `take_back`: those that are not predicted

    def put(self, parameters: Sequence[Tensor], num_updates: int) -> None:
        """Put the predicted parameters in force; without an earlier update to go by, none is changed.

        Each operation is on one element, and rounds once: no bit depends on how the elements are divided.

        Args:
            num_updates: D, for which it predicts.
        """
        with torch.no_grad():
            if [one.shape for one in self._before] != [one.shape for one in parameters]:
                self._before = [parameter.detach().clone() for parameter in parameters]
            self._before = [one.to(new.device) for one, new in zip(self._before, parameters, strict=True)]
            for parameter, before in zip(parameters, self._before, strict=True):
                change = torch.sub(parameter, before).mul_(num_updates)
                before.copy_(parameter)
                parameter.add_(change)

    def take_back(self, parameters: Sequence[Tensor]) -> None:
        """Put the parameters in force again that `put` has found."""
        with torch.no_grad():
            for parameter, before in zip(parameters, self._before, strict=True):
                parameter.copy_(before)

    def clear(self) -> None:
        """Forget the newest update, because a training begins or ends."""
        self._before = []

    def state_dict(self) -> list[Tensor]:
        return self._before

    def load_state_dict(self, state: list[Tensor]) -> None:
        self._before = [before.clone() for before in state]
