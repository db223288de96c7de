"""Mean changes of replicas that are summed and not applied yet: with ``run.local_steps(delay=1)``, that of one round.

Between two rounds they are a part of the run's state, as parameters and momentum are: newcomers and checkpoints get
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unisono.state.pending import Unapplied

__all__ = ["NAME", "Late", "MeanChange"]

NAME = "late changes"
"""Of this part of the run's state."""


@dataclass
class MeanChange:
    """The mean change of a round, and what else its replicas have ended with."""

    number: int
    """Of the round within ``run.local_steps``."""
    digest: int
    means: Sequence[Tensor]
    """By trained parameter, in the dtype of the sum."""
    buffers: Sequence[Tensor]
    """The changes of the buffers."""
    scalars: tuple[float, float]
    """The total weight, scaled, and the weighted loss."""
    common: bytes
    """What all replicas have alike, as `to_bytes` gives it."""
    digests: dict[str, str]
    """Of the same, by name."""
    names: list[str]
    """What the steps of replicas have changed of it since the loop began."""
    sums: dict[int, bytes]
    """The sums of ``step.add`` by replica, as `to_bytes` gives them."""


class Late(Unapplied[MeanChange]):
    """The changes that are not applied yet."""

    def state_dict(self) -> list[dict[str, Any]]:
        return [
            {
                **vars(each),
                "digest": f"{each.digest:016x}",
                "means": list(each.means),
                "buffers": list(each.buffers),
                "scalars": list(each.scalars),
            }
            for each in self.current() or self.loaded
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        self.loaded = [
            MeanChange(**{**each, "digest": int(each["digest"], 16), "scalars": tuple(each["scalars"])})
            for each in state
        ]
