"""Doubts: what is probably meant otherwise than the step takes it, and changes the gradients without an error.

A micro-batch counts by its samples, and its loss is taken as their mean, unless the script says otherwise. Whether
that is true can be seen of a few losses, in the graph that autograd has made. A run looks at the first micro-batches of
each worker, tells each doubt once, at the line of the script, and ``unisono check`` finds it. Where a program may be
right nothing is said: a mean over tokens, say, is one over samples where all samples have as many.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor, nn

from unisono.cluster.worker import member as members
from unisono.core.cursor import StepPosition
from unisono.core.words import count
from unisono.engine.microbatch.graphs import (
    Leaves,
    divided_by,
    is_sum,
    leaves_of,
    normalizes_samples,
    number_in_mean,
    weighted_means,
)
from unisono.system.reading import read
from unisono.system.stacks import frame_outside

__all__ = ["About", "Doubt", "Doubts", "rows_of"]

MOST_LOOKED: Final = 8
"""Micro-batches of a worker whose losses are looked at."""
TOLERANCE: Final = 1e-4
"""Relative; weights of classes are added up in float32."""
OF_INPUTS: Final = frozenset({"AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "ClampBackward1"})
"""Operations on an input before a model gets it."""


class Doubt(NamedTuple):
    """What is probably meant otherwise, and the line of the script."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class About:
    """What is known of a micro-batch before its loss."""

    where: str
    """``step 3, micro-batch 2``."""
    num_samples: int
    num_microbatches: int
    """Of its step: with one the weights have no effect."""
    reduction: Literal["mean", "sum"]
    num_rows: int | None = None
    """See `rows_of`."""


class _Mean(NamedTuple):
    where: str
    total: float
    num_samples: int
    per_sample: float
    is_uneven: bool
    """Its targets have different weights, or some are ignored."""


class _Filled(NamedTuple):
    """A backward that has filled the ``.grad`` of tensors that are no parameters."""

    line: tuple[str, int]
    tensors: list[Tensor]
    leaves: Leaves


class Doubts:
    """The doubts of a run, on one worker.

    Args:
        listener: is told of each doubt as well; None: nobody is.

    Attributes:
        last_batch: an epoch's last batch, if its last micro-batch has one sample; None: it has more.
    """

    def __init__(self, listener: Callable[[Doubt], None] | None = None) -> None:
        self.last_batch: StepPosition | None = None
        self._listener = listener
        self._told: set[str] = set()
        self._num_ended = 0
        self._means: dict[int, _Mean] = {}
        self._calls: list[tuple[int | None, bool]] = []
        self._last_call = "", 0
        self._filled: _Filled | None = None
        self._fits = False  # a batch has had as many rows as samples
        self._unfit: tuple[About, tuple[str, int]] | None = None

    def look(self, about: About, loss: Tensor, *, has_weight: bool, retain_graph: bool) -> None:
        """Look at a loss before its backward.

        Args:
            has_weight: the script has said what the loss counts.
        """
        is_default = about.reduction == "mean" and not has_weight and about.num_microbatches > 1
        if is_default and about.num_rows is not None:
            self._look_at_rows(about)
        if self._num_ended >= MOST_LOOKED or not _tells():
            return
        if self._num_ended == 0:
            self._look_at_scale(about, loss)
            self._look_at_last_batch(loss)
            self._calls.append((number_in_mean(loss) if is_default else None, retain_graph))
            self._last_call = _line()
        if is_default:
            self._look_at_means(about, loss)

    def look_taken(self, about: About, loss: Tensor, trained: Collection[int]) -> None:
        """Look at a loss before plain ``loss.backward()``, which the script may mean for the gradient of an input.

        Args:
            trained: the parameters, by their `id`.
        """
        if self._num_ended or not _tells():
            return
        leaves, before = leaves_of(loss), self._filled
        others = [one for one in leaves.variables if id(one) not in trained and not isinstance(one, nn.Parameter)]
        if others:
            self._filled = _Filled(_line(), others, leaves)
        if before is None or leaves.first <= before.leaves.last or not before.leaves.names - leaves.names <= OF_INPUTS:
            return
        if {id(one) for one in others} <= {id(one) for one in before.tensors}:
            shape = tuple(before.tensors[0].shape)
            self._tell(
                "input",
                f"two calls of loss.backward() in {about.where} are both part of the gradients, and the first has also "
                f"filled the .grad of a tensor of shape {shape} that is no parameter. If it is for that tensor only "
                "(an adversarial example, say), write torch.autograd.grad(loss, x) instead; if both are meant, write "
                "step.backward(loss)",
                before.line,
            )

    def end(self, about: About) -> None:
        """Note that a micro-batch has ended."""
        if self._num_ended >= MOST_LOOKED:
            return
        if self._num_ended == 0:
            self._look_at_calls(about)
        self._num_ended += 1
        self._calls, self._filled = [], None

    # -- inside --------------------------------------------------------------------------------------

    def _tell(self, kind: str, text: str, line: tuple[str, int] | None = None) -> None:
        """Warn once in a run."""
        if kind in self._told:
            return
        self._told.add(kind)
        file, number = line if line is not None else _line()
        warnings.warn_explicit(text, UserWarning, file, number)
        if self._listener is not None:
            self._listener(Doubt(file, number, text))

    def _look_at_scale(self, about: About, loss: Tensor) -> None:
        if (number := divided_by(loss)) is not None:
            self._tell(
                "scale",
                f"the loss of {about.where} is a mean divided by {number}. If the division is for gradient "
                "accumulation, remove it: a step takes the mean over its micro-batches itself, and the gradients are "
                f"{number} times too small",
            )
        elif about.reduction == "mean" and is_sum(loss, about.num_samples):
            self._tell(
                "scale",
                f"the loss of {about.where} is a sum over its {about.num_samples} samples, but is taken as their mean: "
                "the gradients are then the mean of the sums of all micro-batches. Add reduction='sum' to run.steps "
                "for their sum, or call step.backward(loss / n) with the mean over the n samples of the micro-batch",
            )

    def _look_at_last_batch(self, loss: Tensor) -> None:
        last = self.last_batch
        if last is not None and normalizes_samples(loss):
            self._tell(
                "single",
                f"the last batch of an epoch (step {last.number}) has {count(last.num_samples, 'sample')}, and its "
                f"micro-batch {last.num_leaves - 1} has one, too few for a BatchNorm in training: "
                "torch will raise an error there. Add drop_last=True, or give another number of microbatches",
            )

    def _look_at_calls(self, about: About) -> None:
        """Tell of a backward for each sample: each of its losses is a mean over fewer values than samples, or over a
        number that the samples do not divide.
        """
        size = about.num_samples
        if len(self._calls) == size > 1 and all(
            number is not None and number % size and not retains for number, retains in self._calls
        ):
            self._tell(
                "calls",
                f"backward was called {size} times in {about.where}, once for each of its {size} samples, and each "
                "loss counts as the mean over all of them: the gradients are the mean over the sums of "
                f"{about.num_microbatches} micro-batches. Add reduction='sum' to run.steps for the sum over all "
                "samples, or call backward once, with the mean over the samples of the micro-batch",
                self._last_call,
            )

    def _look_at_rows(self, about: About) -> None:
        if about.num_rows == about.num_samples:
            self._fits = self._fits or about.num_samples > 1
        elif self._unfit is None:
            self._unfit = about, _line()
        if self._fits and self._unfit is not None:
            other, line = self._unfit
            self._tell(
                "rows",
                f"the batch of {other.where} has {other.num_rows} rows for {other.num_samples} samples (does collate "
                f"leave some out, or make several of one?), but counts as {other.num_samples}. Write "
                "step.backward(loss, weight=len(y)), with y the targets",
                line,
            )

    def _look_at_means(self, about: About, loss: Tensor) -> None:
        """Tell of a mean over other things than samples, where two micro-batches have different numbers of these."""
        for number, one in enumerate(weighted_means(loss)):
            weights, ignored = one.class_weights, one.targets == one.ignore_index
            spread = () if weights is None else (weights.min(), weights.max())
            total, is_ignored, *ends = (float(each) for each in read([one.total, ignored.any(), *spread]))
            by_class = bool(ends) and ends[0] != ends[1]
            if not total or not one.factor:
                continue
            per_sample = total / abs(one.factor) / about.num_samples
            new = _Mean(about.where, total, about.num_samples, per_sample, by_class or bool(is_ignored))
            before = self._means.setdefault(number, new)
            is_even = abs(new.per_sample - before.per_sample) <= TOLERANCE * before.per_sample
            if is_even or not (new.is_uneven or before.is_uneven):
                continue
            has_ignored = not by_class or bool(is_ignored)
            kept = f"y[y != {one.ignore_index}]" if has_ignored else "y"
            weight = f"w[{kept}].sum(), with w the weights of the classes and y the targets"
            what = "a mean by the weights of the classes, whose sum is"
            if not by_class:
                weight = f"(y != {one.ignore_index}).sum(), with y the targets"
                what = f"a mean over the targets that are not {one.ignore_index}, whose number is"
            self._tell(
                "mean",
                f"the loss of {new.where} is {what} {new.total:g} for {new.num_samples} samples, and "
                f"{before.total:g} for {before.num_samples} in {before.where}. Each counts by its samples, so the "
                "gradients are not those of one process with the whole batch. Write step.backward(loss, weight="
                f"{weight.replace(', with', '), with', 1)}",
            )


def rows_of(batch: Any, num_samples: int) -> int | None:
    """Return the length of all tensors of a batch; None: they have none in common, the batch may be a list of samples,
    or another of their dimensions is as long as there are samples (sequences first).
    """
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else (batch,)
    if len(values) == num_samples:
        return None  # perhaps a list of samples
    shapes = [value.shape for value in values if isinstance(value, Tensor) and value.dim()]
    if len({shape[0] for shape in shapes}) != 1:
        return None
    rows = shapes[0][0]
    return None if rows != num_samples and any(num_samples in shape[1:] for shape in shapes) else rows


def _tells() -> bool:
    """Return whether this worker tells what all workers see."""
    member = members.current()
    return member is None or member.worker_id == "w0"


def _line() -> tuple[str, int]:
    """Return the file and the line of the script's call."""
    frame = frame_outside()
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
