"""Clipping of gradients that are not on all workers: `unisono.clip_grad_norm_` and `unisono.clip_grad_value_`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from unisono.core.errors import StateLost
from unisono.core.plan import Plan
from unisono.engine.rounds.apart import loop_with
from unisono.engine.rounds.gathering import Gather
from unisono.engine.rounds.members import Members
from unisono.engine.state.elsewhere import Elsewhere
from unisono.engine.state.packing import from_bytes, to_bytes
from unisono.system.faults import point

__all__ = ["NormsRound", "clip_grad_norm_", "clip_grad_value_"]


class NormsRound(Gather):
    """Each member says the norms of the gradients that it has, and all end with all norms.

    Args:
        norms: by number of the gradient, of those that are here; each ().
        number: of gradients.
    """

    def __init__(self, members: Members, norms: Mapping[int, Tensor], number: int) -> None:
        super().__init__(members, "unisono.clip_grad_norm_", "norms", lambda: _packed(norms))
        self._number = number

    def compute(self, plan: Plan) -> Iterator[object]:
        point("shard.norms")
        yield from ()

    def merge(self, said: Mapping[str, bytes]) -> bytes:
        found = {number: norm for one in said.values() for number, norm in _unpacked(one).items()}
        if len(found) < self._number:
            raise StateLost(
                f"{self._number - len(found)} of {self._number} gradients were on workers that are lost "
                '(unisono.shard with gradients="owners"): the run cannot continue from here. Resume from '
                f"{self._members.newest()}; with more copies a run survives more simultaneous losses"
            )
        return _packed({number: found[number] for number in range(self._number)})

    @property
    def norms(self) -> dict[int, Tensor]:
        """Of all gradients, by number. After the round."""
        return _unpacked(self.result)


def _packed(norms: Mapping[int, Tensor]) -> bytes:
    """Return norms as bytes: those of a dtype in one tensor."""
    kinds: dict[torch.dtype, list[int]] = {}
    for number, norm in norms.items():
        kinds.setdefault(norm.dtype, []).append(number)
    return to_bytes([(numbers, torch.stack([norms[one].cpu() for one in numbers])) for numbers in kinds.values()])


def _unpacked(data: bytes) -> dict[int, Tensor]:
    return {number: norm for numbers, norms in from_bytes(data) for number, norm in zip(numbers, norms, strict=True)}


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the norm of the gradients of some parameters as ``torch.nn.utils.clip_grad_norm_`` does: with the same bits.

    For a training in which a worker does not have all gradients, by ``unisono.shard(..., gradients="owners")`` or
    because it carries a part of the model (`unisono.Stages`): each
    worker takes the norms of those that it has, all of them get all norms, and the norm of these is the total norm.
    Elsewhere it is the function of torch. To be called after the inner loop and before ``optimizer.step()``.

    Collective in such a training loop: all workers call it, with the same arguments.

    Args:
        parameters: those whose gradients are clipped; those without a gradient are left out.
        max_norm: the largest norm that is left as it is.
        norm_type: p of the p-norm; ``inf``: the largest absolute value.
        error_if_nonfinite: raise an error if the total norm is infinite or not a number.
        foreach: the faster implementation of torch, or not; None: where there is one.

    Returns:
        () The total norm before clipping; equal bits on all workers.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
        StateLost: all workers that had some gradient are lost.
    """
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    loop = loop_with(chosen)
    if loop is None:
        return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
    gradients = [one.grad for one in chosen if one.grad is not None]
    here = {number: one for number, one in enumerate(gradients) if _is_here(one)}
    # One by one: the norm of a single number is its absolute value, so the norms of parts have the norm of the whole.
    norms = {number: torch.nn.utils.get_total_norm([one], norm_type, False, foreach) for number, one in here.items()}
    with torch.no_grad():
        round_ = NormsRound(loop.members, norms, len(gradients))
        for _ in loop.play(round_):
            pass
        found = round_.norms
        device = next((one.device for one in here.values()), torch.device("cpu"))
        parts = [found[number].to(device).view(1) for number in range(len(gradients))]
        total = torch.nn.utils.get_total_norm(parts, norm_type, error_if_nonfinite, foreach)
        clipped = [one for one in chosen if one.grad is not None and _is_here(one.grad)]
        torch.nn.utils.clip_grads_with_norm_(clipped, max_norm, total, foreach)
    return total


def _is_here(gradient: Tensor) -> bool:
    return not isinstance(gradient, Elsewhere) and not gradient.is_meta


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Clip each element of the gradients of some parameters, as ``torch.nn.utils.clip_grad_value_`` does.

    With ``unisono.shard(..., gradients="owners")`` each worker clips the gradients that it has. Local.

    Args:
        parameters: those whose gradients are clipped; those without a gradient are left out.
        clip_value: elements end up in ``[-clip_value, clip_value]``.
        foreach: the faster implementation of torch, or not; None: where there is one.
    """
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    here = [one for one in chosen if one.grad is not None and _is_here(one.grad)]
    torch.nn.utils.clip_grad_value_(here, clip_value, foreach)
