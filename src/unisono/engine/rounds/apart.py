"""Training loops in which a worker does not have all gradients, for functions that a script calls with parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from unisono.engine.rounds.life import Rounds

__all__ = ["forget_loop", "loop_with", "note_loop"]

_loops: dict[int, tuple[Rounds, Callable[[Tensor], bool]]] = {}
"""Those of this process that are under way, by id of who has noted them."""


def note_loop(owner: object, rounds: Rounds, is_apart: Callable[[Tensor], bool]) -> None:
    """Note that a training loop is under way in which the gradients of some parameters may be elsewhere. Local."""
    _loops[id(owner)] = rounds, is_apart


def forget_loop(owner: object) -> None:
    """Note that the loop is over. Local."""
    _loops.pop(id(owner), None)


def loop_with(parameters: Iterable[Tensor]) -> Rounds | None:
    """Return the rounds of the training loop in which gradients of these may be elsewhere; None: all are here."""
    wanted = list(parameters)
    return next((rounds for rounds, is_apart in _loops.values() if any(map(is_apart, wanted))), None)
