"""Parameters may not change within a micro-batch: the worker that computes it would drift away from all others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from unisono.core.errors import StepError
from unisono.engine.state.packing import digest_of_each

__all__ = ["ParameterCheck"]


class ParameterCheck:
    """Compares the parameters before and after a micro-batch. Local.

    Args:
        trained: (name, parameter), those that need a gradient.
        frozen: (name, parameter), those that need none.
    """

    def __init__(self, trained: Sequence[tuple[str, nn.Parameter]], frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._named = [*trained, *frozen]
        self._frozen = list(frozen)
        self._needs_gradient = [True] * len(trained) + [False] * len(frozen)
        self._versions: list[int] = []
        self._gradients: list[Tensor | None] = []
        self._digests: list[int] | None = None

    def start(self, *, compare_bits: bool) -> None:
        """Remember the parameters before a micro-batch.

        Args:
            compare_bits: also take digests, which see what is written through ``.data`` and not counted.
        """
        self._versions = [parameter._version for _, parameter in self._named]
        self._gradients = [parameter.grad for _, parameter in self._frozen]
        if compare_bits:
            self._digests = digest_of_each([parameter for _, parameter in self._named])

    def check(self) -> None:
        """Compare the parameters after the micro-batch.

        Raises:
            StepError: one was written, frozen, thawed, or has got a gradient though it is frozen.
        """
        changed = _first_difference(self._versions, [parameter._version for _, parameter in self._named])
        digests, self._digests = self._digests, None
        if changed is None and digests:
            changed = _first_difference(digests, digest_of_each([parameter for _, parameter in self._named]))
        if changed is not None:
            raise StepError(
                f"parameter {self._named[changed][0]!r} was changed within a micro-batch, only on the worker that "
                "computed the micro-batch. Update parameters after the inner loop; use nn.Embedding without max_norm "
                "(or renormalise after optimizer.step()); if the first batch initialises parameters, pass one batch "
                "through the model before run.steps. `unisono check SCRIPT` names the line"
            )
        other = _first_difference(self._needs_gradient, [parameter.requires_grad for _, parameter in self._named])
        if other is None:
            pairs = zip(self._frozen, self._gradients, strict=True)
            learned = (index for index, ((_, one), before) in enumerate(pairs) if one.grad is not before)
            first = len(self._named) - len(self._frozen)
            other = next((first + index for index in learned), None)
        if other is not None:
            was_trained = self._needs_gradient[other]
            raise StepError(
                f"parameter {self._named[other][0]!r} was {'frozen' if was_trained else 'unfrozen'} within a "
                f"micro-batch (requires_grad was {was_trained} when the step began), so its gradient differs between "
                "the workers. Freeze and unfreeze parameters before the inner loop, or set requires_grad back before "
                "the micro-batch ends, and let a parameter that was frozen get no gradient meanwhile"
            )


def _first_difference(before: Sequence[int], now: Sequence[int]) -> int | None:
    if before == now:
        return None
    return next(index for index, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
