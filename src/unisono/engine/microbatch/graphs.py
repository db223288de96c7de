"""Questions to the graph of a loss: what it reaches, whether it is a sum or a mean, and over what. Of no values."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

__all__ = [
    "Leaves",
    "WeightedMean",
    "divided_by",
    "is_sum",
    "leaves_of",
    "normalizes_samples",
    "number_in_mean",
    "reaches",
    "weighted_means",
]

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
SUMS: Final = frozenset({"AddBackward0", "SubBackward0", "NegBackward0"})
SAME_VALUE: Final = frozenset({"ToCopyBackward0", "ViewBackward0", "SqueezeBackward0", "CloneBackward0"})
MOST_NODES: Final = 64


class WeightedMean(NamedTuple):
    """A mean of ``F.cross_entropy`` or ``F.nll_loss`` in a loss, which need not be one over samples."""

    total: Tensor
    """() What it is divided by: the weights of the classes of all targets that are not ignored; without, their number.
    """
    factor: float
    """The plain numbers by which the mean was multiplied."""
    class_weights: Tensor | None
    targets: Tensor
    ignore_index: int


class Leaves(NamedTuple):
    """What a loss reaches."""

    variables: list[Tensor]
    first: int
    """Number of the oldest operation; all numbers grow as a thread computes."""
    last: int
    names: frozenset[str]
    """Of the operations."""


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
        number = abs(_number(node) or 0.0)
        is_scaled = node.name() == "MulBackward0" and number >= LEAST_FACTOR
        is_scaled |= node.name() == "DivBackward0" and 0.0 < number < 1 / LEAST_FACTOR
        if is_scaled or node.name() in ("AddBackward0", "SubBackward0", "NegBackward0"):
            todo.extend(children)
        else:
            yield node


def _number(node: Any) -> float | None:
    """Return the plain number that is the other operand of a node."""
    other = getattr(node, "_saved_other", None)
    if isinstance(other, (int, float)):
        return float(other)
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


def number_in_mean(loss: Tensor) -> int | None:
    """Return over how many values the loss is a mean, if it clearly is one mean; None: it is not."""
    terms = list(_terms(loss.grad_fn)) if loss.grad_fn is not None else []
    if len(terms) != 1 or not _is_mean(terms[0]):
        return None
    of: Any = getattr(terms[0], "_saved_target", None)
    if of is None:
        of = getattr(terms[0], "_saved_self", None)
    if of is None:
        return getattr(terms[0], "_saved_self_sym_numel", None)
    return int(of.numel())


def weighted_means(loss: Tensor) -> list[WeightedMean]:
    """Return the means by class weights, or over targets of which some may be ignored, that the loss is a sum of."""
    found: list[WeightedMean] = []
    todo: list[tuple[Any, float]] = [(loss.grad_fn, 1.0)]
    for _ in range(MOST_NODES):
        if not todo:
            break
        node, factor = todo.pop()
        if node is None:
            continue
        name, children = node.name(), [child for child, _ in node.next_functions]
        if name in SUMS or name in SAME_VALUE:
            todo.extend((child, factor) for child in reversed(children))
        elif name.startswith("MulBackward") and (number := _number(node)) is not None:
            todo.append((children[0], factor * number))
        elif name.startswith("DivBackward") and (number := _number(node)):
            todo.append((children[0], factor / number))
        elif name in ("NllLossBackward0", "NllLoss2DBackward0") and node._saved_reduction == MEAN:
            index = node._saved_ignore_index
            signed = index - (1 << 64) if index >= 1 << 63 else index
            found.append(WeightedMean(node._saved_total_weight, factor, node._saved_weight, node._saved_target, signed))
    return found


def leaves_of(loss: Tensor) -> Leaves:
    """Return what a loss reaches. Looks at its whole graph."""
    variables, numbers, names = list[Tensor](), list[int](), set[str]()
    for node in _nodes(loss):
        if node.name() == LEAF:
            variables.append(node.variable)
        else:
            numbers.append(node._sequence_nr())
            names.add(node.name())
    return Leaves(variables, min(numbers, default=0), max(numbers, default=0), frozenset(names))


def normalizes_samples(loss: Tensor) -> bool:
    """Return whether a BatchNorm in training has one value per channel in each sample, so that it needs two samples.
    Looks at the whole graph.
    """
    for node in _nodes(loss):
        if "BatchNorm" in node.name() and getattr(node, "_saved_training", False):
            shape = node._saved_input.shape
            if shape.numel() == shape[0] * shape[1]:
                return True
    return False


def _nodes(loss: Tensor) -> Iterator[Any]:
    todo: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo.extend(child for child, _ in node.next_functions)
