"""Questions to the graph of a loss: what it reaches, and whether it is a sum or a mean. Cheap, and never of values."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

from torch import Tensor
from torch.autograd.function import BackwardCFunction

__all__ = ["divided_by", "is_sum", "reaches"]

MEAN, SUM = 1, 2  # values of `_saved_reduction`
MOST_TERMS: Final = 16
MOST_ACCUMULATED: Final = 64
"""A loss that is divided by more was hardly divided for gradient accumulation."""
LEAST_FACTOR: Final = 0.5
"""A smaller factor may be there to make a mean of a sum."""
ELEMENTWISE: Final = frozenset({"PowBackward0", "AbsBackward0", "SubBackward0", "AddBackward0", "NegBackward0"})
"""Nodes below a sum that leave it one: of squares, of differences."""
LEAF: Final = "torch::autograd::AccumulateGrad"
SCALING: Final = (LEAF, "DivBackward", "MulBackward")
"""Nodes below these: of a penalty on a parameter, or of values that may be divided by their number already."""


def reaches(loss: Tensor, parameters: Collection[int]) -> bool:
    """Return whether backward of this loss gives a gradient to one of the parameters, named by their `id`.

    True also where a function of the script's own is found, which may hide parameters (reentrant checkpointing does).
    """
    if loss.grad_fn is None:
        return id(loss) in parameters
    todo: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == LEAF:
            if id(node.variable) in parameters:
                return True
        elif isinstance(node, BackwardCFunction):
            return True
        else:
            todo.extend(child for child, _ in node.next_functions if child is not None)
    return False


def is_sum(loss: Tensor, num_samples: int) -> bool:
    """Return whether the loss is clearly a sum over the samples of its batch. Never for a mean."""
    if num_samples == 1 or loss.grad_fn is None:
        return False
    terms = list(_terms(loss.grad_fn))
    return any(_is_sum(term, num_samples) for term in terms) and not any(_is_mean(term) for term in terms)


def divided_by(loss: Tensor) -> int | None:
    """Return the small integer by which the loss, clearly one mean, was divided; None: it was not.

    A sum of several terms is divided for the mean of these: ``(start_loss + end_loss) / 2``.
    """
    node: Any = loss.grad_fn
    number = _number(node) if node is not None and node.name() == "DivBackward0" else None
    if number is None or not 2 <= number <= MOST_ACCUMULATED or not number.is_integer():
        return None
    terms = list(_terms(node.next_functions[0][0]))
    return int(number) if len(terms) == 1 and _is_mean(terms[0]) else None


def _terms(node: Any) -> Iterator[Any]:
    """Yield what the value of this node is the sum of, without factors that are plain numbers."""
    todo = [node]
    for _ in range(MOST_TERMS):
        if not todo:
            return
        node = todo.pop()
        children = [child for child, _ in node.next_functions if child is not None]
        is_scaled = node.name() == "MulBackward0" and abs(_number(node) or 0.0) >= LEAST_FACTOR
        if is_scaled or node.name() in ("AddBackward0", "SubBackward0", "NegBackward0"):
            todo.extend(children)
        else:
            yield node


def _number(node: Any) -> float | None:
    """Return the plain number that is the other operand of a node."""
    other = getattr(node, "_saved_other", None)
    is_plain = isinstance(other, Tensor) and other.ndim == 0 and other.device.type == "cpu"
    is_constant = len(node.next_functions) < 2 or node.next_functions[1][0] is None
    return float(other) if isinstance(other, Tensor) and is_plain and is_constant else None


def _is_mean(node: Any) -> bool:
    return node.name() in ("MeanBackward0", "MeanBackward1") or getattr(node, "_saved_reduction", None) == MEAN


def _is_sum(node: Any, num_samples: int) -> bool:
    if getattr(node, "_saved_reduction", None) == SUM:
        return True
    if node.name() != "SumBackward0" or tuple(node._saved_self_sym_sizes)[:1] != (num_samples,):
        return False
    below = node.next_functions[0][0]
    if getattr(below, "_saved_reduction", None) == 0:
        return True  # a loss for each sample
    names = [child.name() for child, _ in below.next_functions if child is not None]
    return below.name() in ELEMENTWISE and not any(name.startswith(SCALING) for name in names)
