"""Sums of gradients go to the owners of their parameters only: `unisono.shard` with ``gradients="owners"``.

An owner gets the gradient before it updates the parameter, and nobody else needs it. A parameter whose owners are all
lost goes to all members: without a state, any of them can update it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from unisono.core.ownership import living
from unisono.core.routes import Route, routes_of
from unisono.engine.exchange.flat import ROW_BYTES, FlatLayout, SlotEntry
from unisono.engine.rounds.routing import Named, Routing
from unisono.engine.state.elsewhere import Elsewhere
from unisono.strategies.shard.sharding import ShardedOptimizer

__all__ = ["OwnedGradients"]


class OwnedGradients(Routing):
    """The routing of a loop in which some optimizers want gradients on the owners only.

    Args:
        optimizers: all that are tracked.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        owned = [one._shares for one in optimizers if isinstance(one, ShardedOptimizer) and one._shares.to_owners]
        self._owned = owned
        self._whole = {
            id(parameter)
            for one in optimizers
            if not (isinstance(one, ShardedOptimizer) and one._shares in owned)
            for group in one.param_groups
            for parameter in group["params"]
        }
        """Parameters that some other optimizer updates, too, on all members."""
        self._stand_ins: dict[int, Elsewhere] = {}
        self._known: tuple[object, tuple[Route, ...]] = (None, ())

    def routes(self, layout: FlatLayout, trained: Named, worker_ids: Sequence[str]) -> tuple[Route, ...]:
        key = (layout, tuple(worker_ids), [id(one) for _, one in trained], [one.owners for one in self._owned])
        if self._known[0] != key:
            owners = self._owners(worker_ids)
            needed = [
                (_rows_of(entry), tuple(worker_ids.index(one) for one in owners.get(id(parameter), ())))
                for entry, (_, parameter) in zip(layout.gradients, trained, strict=True)
            ]
            needed.append((range(layout.tail_row, layout.num_rows), ()))
            self._known = key, routes_of(sorted(needed, key=lambda one: (one[0].start, one[0].stop)))
        return self._known[1]

    def stand_ins(self, trained: Named, worker_ids: Sequence[str], own_id: str) -> Sequence[Tensor | None]:
        owners = self._owners(worker_ids)
        return [
            None if own_id in (has := owners.get(id(parameter), ())) or not has else self._stand_in(name, parameter)
            for name, parameter in trained
        ]

    def _owners(self, worker_ids: Sequence[str]) -> Mapping[int, tuple[str, ...]]:
        """Return by id of a parameter the members that need its gradient; none: all do."""
        found: dict[int, tuple[str, ...]] = {}
        for shares in self._owned:
            for parameter, owners in zip(shares.parameters(), living(shares.owners or (), worker_ids), strict=False):
                if owners and id(parameter) not in self._whole:
                    found[id(parameter)] = tuple(dict.fromkeys((*found.get(id(parameter), ()), *owners)))
        return found

    def _stand_in(self, name: str, parameter: Tensor) -> Elsewhere:
        found = self._stand_ins.get(id(parameter))
        if found is None or found.shape != parameter.shape or found.stride() != parameter.stride():
            found = self._stand_ins[id(parameter)] = Elsewhere(
                parameter,
                f'the gradient of {name!r} is not on this worker: unisono.shard(..., gradients="owners") gives it to '
                "the owners of the parameter only. To clip gradients, call unisono.clip_grad_norm_ or "
                "unisono.clip_grad_value_ instead of the functions of torch; to read gradients, or for a GradScaler, "
                'leave out gradients="owners"',
            )
        return found


def _rows_of(entry: SlotEntry) -> range:
    return range(entry.offset * entry.sum_dtype.itemsize // ROW_BYTES, entry.end_row)
