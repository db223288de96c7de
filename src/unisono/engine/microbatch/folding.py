"""Folding the gradients of micro-batches into nodes, parameter by parameter, as backward finishes them.

The nodes that a worker holds are a binary counter: when leaf 7 arrives and ``n6``, ``n45`` and ``n03`` are held, its
gradient runs up the whole **chain**, ``((g7 + n6) + n45) + n03``. That happens for each parameter in the hook that
autograd calls when the parameter's gradient is complete, while the gradient is still in the cache; then ``.grad`` is
dropped. So there is never more than one gradient beside the nodes, and there are at most ``log2(M) + 1`` of those.

A leaf that is first in its chain has nothing to be added to. When its sibling comes next on this worker, its gradients
are **adopted**: kept as they are, and added to the sibling's straight into the slot, without a copy of their own. A
gradient in memory that something else holds as well (a buffer of a CUDA graph, or of a function that writes all its
gradients to the same place) is copied: the next backward may write there.

Where the layout rounds, each node from a fixed level on is rounded as soon as it is formed, in the same hook; a leaf of
that level is rounded before it is added to anything, and is never adopted.

The **tail** of a micro-batch (its weight, loss, changes of buffers and extras) runs up the same chain when the
micro-batch ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from unisono.core.cursor import MASK
from unisono.core.errors import StepError
from unisono.core.tree import Node, leaf, parent, sibling
from unisono.engine.exchange.flat import (
    ROW_BYTES,
    Extra,
    FlatLayout,
    Piece,
    Rows,
    Sections,
    Slot,
    SlotEntry,
    digest_there,
    num_tensors_on,
    round_in_place,
    with_flipped_bit,
)
from unisono.engine.exchange.shared_memory import transient
from unisono.engine.exchange.slots import Slots
from unisono.engine.microbatch.guards import ParameterCheck
from unisono.engine.state.buffers import Buffers
from unisono.engine.state.packing import digest_of_each
from unisono.engine.state.tracked import Calls
from unisono.system import accelerators
from unisono.system.faults import spoils
from unisono.system.reading import read

__all__ = ["Fingerprint", "GradientFolder", "gradient_of"]

PART = 1 << 17
"""Values that are rounded together."""

OnRows = Callable[[int], None]
"""Callback: so many rows of the current leaf's node are complete."""
WriteExtras = Callable[[Sequence[Tensor]], None]
"""Callback: write the extras of a leaf to these views, in the order of the layout."""


class Fingerprint(msgspec.Struct, frozen=True):
    """Digests of one micro-batch on one worker, to be compared with those of another worker."""

    leaf: int
    digest: int
    """Digest of everything: gradients, loss, weight, changes of buffers."""
    weighted_loss: float
    parts: dict[str, str]
    """The digests of the gradients and of the changes of buffers, by name."""
    places: dict[int, int] = {}
    """Where workers carry parts of the model: the digests of what this worker has got, by place
    (`unisono.core.groups.places`)."""
    batch: int = 0
    """Digest of the tensors that the script was given; 0: unknown."""

    @property
    def by_place(self) -> dict[int, int]:
        """The digests by place; a worker that has the whole model has one place."""
        return self.places or {0: self.digest}

    def difference(self, other: Fingerprint, name: str, other_name: str) -> str:
        """Return a sentence about the first difference."""
        if self.weighted_loss != other.weighted_loss:
            loss = f"The weighted loss is {self.weighted_loss!r} on {name} and {other.weighted_loss!r} on {other_name}"
        else:
            loss = "The loss is the same"
        parts = [part for part in self.parts if self.parts[part] != other.parts.get(part)]
        if not parts:
            return loss
        more = f" (and {len(parts) - 1} more)" if len(parts) > 1 else ""
        return f"{loss}; the first gradient or buffer that differs is that of {parts[0]!r}{more}"


class _Leaf:
    """The leaf whose gradients are coming in.

    Attributes:
        chain: (node, its slot) that the gradients are added to, one after the other; of a leaf whose sibling is not
            held, the node of its own.
        is_left: of each node of the chain, whether it is the left operand of the addition.
        rounds: of each node of the chain, whether the sum with it is rounded.
        rounds_itself: whether the leaf is rounded before anything is added to it.
        target: the node that the leaf completes, and its slot.
        alone: a copy of the leaf by itself, where one is wanted and the leaf is added to others at once.
        is_first_of_chain: whether no sibling of the leaf is held, to which it could be added.
        parts: by parameter, the parts of its gradient that the current call of backward has given so far.
        pending: by parameter, the sum of the calls so far.
        is_left_out: () bool, where it is not known yet whether the leaf has a weight.
    """

    def __init__(
        self, node: Node, slots: Slots, num_leaves: int, num_parameters: int, rounds: Callable[[Node, int], bool]
    ) -> None:
        self.chain: list[tuple[Node, Slot]] = []
        self.is_left: list[bool] = []
        self.rounds: list[bool] = []
        self.rounds_itself = rounds(node, num_leaves)
        while (other := sibling(node, num_leaves)) is not None and other in slots.nodes:
            self.chain.append((other, slots.nodes[other]))
            self.is_left.append(other.index < node.index)
            node = parent(node, num_leaves)
            self.rounds.append(rounds(node, num_leaves))
        self.node = node
        self.is_first_of_chain = not self.chain
        self.is_apart = False
        self.alone: Slot | None = None
        self.adopts = False
        self.folded = [False] * num_parameters
        self.used = [0] * num_parameters
        self.parts = [0] * num_parameters
        self.most_parts = [0] * num_parameters
        self.first_complete = num_parameters  # parameters from here on are folded
        self.num_calls = 0
        self.pending: dict[int, Tensor] = {}
        self.to_come: list[int] | None = None  # by parameter, of the current call if it is the last; None: it is not
        self.is_left_out: Tensor | None = None
        self.in_backward = False

    @property
    def target(self) -> tuple[Node, Slot]:
        return self.node, self.chain[-1][1]

    @property
    def own(self) -> Slot:
        """The slot that holds the leaf by itself, if it is the first of its chain, or a copy was wanted."""
        return self.alone if self.alone is not None else self.chain[-1][1]


class GradientFolder:
    """Folds the gradients of a worker's micro-batches into the nodes of a step.

    Args:
        parameters: (name, parameter), those that need a gradient.
        buffers: of the tracked modules.
        frozen: (name, parameter), those that need none.
        calls: known number of backward calls of a micro-batch; updated here.
        slots: the worker's slots in use; the nodes of the step are kept there.
        extras: what else the micro-batches add up.
        means: the gradients of a step are means over its total weight; False: sums.
        rounds: the sums are rounded from a fixed level of the tree on.
        sections: which of the parameters and buffers are here; of the others shape and dtype count. None: all are.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        buffers: Buffers,
        frozen: Sequence[tuple[str, nn.Parameter]] = (),
        calls: Calls | None = None,
        slots: Slots | None = None,
        *,
        extras: Sequence[Extra] = (),
        means: bool = True,
        rounds: bool = False,
        sections: Sections | None = None,
    ) -> None:
        self._owners = buffers.owners
        self.layout = FlatLayout(parameters, buffers.named(), extras, means=means, rounds=rounds, sections=sections)
        self.sections = sections
        self.every = list(parameters)
        """(name, parameter), those whose gradients the members sum together."""
        if sections is not None:
            parameters = [one for one, own in zip(parameters, sections.parameters, strict=True) if own in sections.here]
            buffers = buffers.only([number for number, own in enumerate(sections.buffers) if own in sections.here])
        self.buffers = buffers
        self.chain: Callable[[], None] = _nothing
        """Called within a call of `backward`, after it: the backward of the earlier stages of a model that is cut."""
        self._is_rounded = [rounds and entry.sum_dtype == torch.float32 for entry in self.layout.gradients]
        self._extras = list(extras)
        self.trained = list(parameters)
        """(name, parameter), those whose gradients are summed."""
        self._slots = slots if slots is not None else Slots()
        self._parameters = [parameter for _, parameter in parameters]
        self._check = ParameterCheck(parameters, frozen)
        self._calls = calls if calls is not None else Calls()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))
            for index, parameter in enumerate(self._parameters)
        ]
        # Only with one kind of sum do the rows become complete in the order of the parameters.
        self._in_order = len({entry.sum_dtype for entry in self.layout.gradients}) == 1
        # Where the sums are made: where the parameters are, or on the CPU.
        self._device = accelerators.adds_on(self._parameters[0].device if self._parameters else torch.device("cpu"))
        self._moves = any(parameter.device != self._device for parameter in self._parameters)
        self._tail = _Tail(self.layout, self._device)
        # By pass over the global batch: by parameter, the parts of its gradient that one call gives.
        self._parts_known: dict[int, list[int]] = {}
        self._turn = 0
        self._compares = False
        self._leaf: _Leaf | None = None
        self._last: _Leaf | None = None
        self._on_rows: OnRows | None = None
        # By parameter, the adopted gradient that belongs into the slot `_adopter`.
        self._adopted: dict[int, Tensor] = {}
        self._adopter: Slot | None = None

    def is_for(
        self, parameters: Sequence[tuple[str, nn.Parameter]], buffers: Buffers, extras: Sequence[Extra] = ()
    ) -> bool:
        """Return whether the folder sums exactly these parameters, buffers and extras."""
        return (
            len(parameters) == len(self.every)
            and all(one is own for (_, one), (_, own) in zip(parameters, self.every, strict=True))
            and buffers.owners == self._owners
            and list(extras) == self._extras
        )

    @property
    def is_new(self) -> bool:
        """Whether this worker has not finished a micro-batch of the run yet."""
        return not self._calls.has_looked

    @property
    def target(self) -> tuple[Node, Slot]:
        """The node that the current leaf completes, and its slot."""
        assert self._leaf is not None
        return self._leaf.target

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._slots.nodes, self._adopted = {}, {}

    # -- a step --------------------------------------------------------------------------------------

    def start_step(self, num_leaves: int, turn: int = 0, *, compares: bool = False) -> None:
        """Begin to fold a pass over a global batch.

        Args:
            turn: number of the pass over this batch, from 0.
            compares: compare the bits of the parameters before and after its first micro-batch on this worker.
        """
        self._compares = compares
        self._num_leaves = num_leaves
        self._turn = turn
        self._adopted, self._adopter = {}, None
        self._leaf = self._last = None
        self.buffers.start_step()
        for parameter in self._parameters:
            parameter.grad = None

    def show(
        self,
        combined: Slot,
        used: Sequence[int] | None = None,
        *,
        may_break: bool = True,
        stand_ins: Sequence[Tensor | None] = (),
    ) -> None:
        """Make the combined means the parameters' ``.grad`` and the model's buffers. A gradient is a view of the slot
        where dtype and strides allow.

        Args:
            used: the slot's; None: it is not known yet.
            may_break: of the slot's buffers; see `Buffers.apply`.
            stand_ins: by parameter, what is its ``.grad`` where the slot has no mean of it; (): it has all.
        """
        counts = combined.used.tolist() if used is None else used
        others = stand_ins or [None] * len(counts)
        for parameter, mean, count, other in zip(self._parameters, combined.gradients, counts, others, strict=True):
            parameter.grad = None if not count else gradient_of(parameter, mean) if other is None else other
        self.buffers.apply(combined.buffers, may_break=may_break)

    # -- a micro-batch -------------------------------------------------------------------------------

    def start_leaf(
        self,
        index: int,
        new_slot: Callable[[], Slot],
        following: int | None = None,
        *,
        apart: bool = False,
        keep: bool = False,
    ) -> None:
        """Begin leaf ``index``, to which the next gradients belong.

        Args:
            new_slot: returns an empty slot, for a leaf whose sibling is not there yet.
            following: the leaf that will probably be computed after this one.
            apart: the leaf is another member's. It is not added to the nodes, only `fingerprint` is of interest.
            keep: keep the leaf by itself as well, so that `fingerprint` is known wherever it is in its chain.
        """
        self.forget_last()
        # A script that writes parameters where nobody counts it does so in all micro-batches or in a worker's first,
        # but not in all steps: a temperature is clamped when it has become too large. So some steps are looked at.
        self._check.start(compare_bits=self._compares or keep or not self._calls.has_looked)
        self._compares = False
        own = leaf(index, self._num_leaves)
        slots = Slots() if apart else self._slots
        current = _Leaf(own, slots, self._num_leaves, len(self._parameters), self.layout.rounds)
        current.is_apart = apart
        if self._adopter is not (None if current.is_first_of_chain else current.chain[0][1]):
            self.copy_adopted()
        if current.is_first_of_chain:
            current.chain = [(own, self._own_slot() if apart else new_slot())]
        elif keep:
            current.alone = self._own_slot()
        current.adopts = (
            current.is_first_of_chain
            and not current.rounds_itself
            and not keep
            and following is not None
            and leaf(following, self._num_leaves) == sibling(own, self._num_leaves)
        )
        if current.adopts:
            self._adopter = current.chain[0][1]
        self._leaf = current
        self._on_rows = None

    def watch_rows(self, callback: OnRows | None) -> None:
        """Until the current leaf ends, call ``callback`` with the number of complete rows of its node, as it grows."""
        self._on_rows = callback

    def backward(
        self, loss: Tensor, seed: Tensor, is_left_out: Tensor | None = None, *, retain_graph: bool = False
    ) -> None:
        """Fold the gradients of ``seed * loss`` into the current leaf.

        Args:
            seed: () on the device of the loss.
            is_left_out: () bool, whether the leaf does not count: its gradients are 0; None: it does.
        """
        with self.calling(is_left_out):
            loss.backward(gradient=seed.to(loss.dtype).view(loss.shape), retain_graph=retain_graph)
            self.chain()

    @contextmanager
    def calling(self, is_left_out: Tensor | None = None) -> Iterator[None]:
        """Return a context in which gradients of the current leaf are computed: one call of backward."""
        current = self._leaf
        assert current is not None
        current.num_calls += 1
        current.is_left_out = is_left_out
        current.parts = [0] * len(self._parameters)
        parts, known = self._parts_known.get(self._turn), self._calls.known.get(self._turn, 0)
        current.to_come = [*parts] if parts is not None and current.num_calls == known else None
        if parts is not None and current.num_calls > known:
            raise StepError(
                f"step.backward was called {current.num_calls} times for this micro-batch and {known} times for the "
                "first one; call it the same number of times for every micro-batch (at most as often as for the "
                "first), or add up the losses and call it once"
            )
        current.in_backward = True
        try:
            yield
        finally:
            current.in_backward = False

    def finish_leaf(
        self, weight: float | Tensor, weighted_loss: float | Tensor, write_extras: WriteExtras | None = None
    ) -> list[Slot]:
        """Finish the current leaf: add its tail, and keep the node that it completes.

        Args:
            write_extras: writes the extras of the leaf to views of zeros.

        Returns:
            Slots of nodes that were merged into a larger one: free for use.
        """
        current = self._leaf
        assert current is not None
        self._check.check()
        self._calls.has_looked = True
        for index in range(len(self._parameters)):
            if not current.folded[index]:
                self._fold(current, index, current.pending.pop(index, None))
        if self._turn not in self._parts_known and current.num_calls:
            self._calls.known[self._turn] = max(self._calls.known.get(self._turn, 0), current.num_calls)
            self._parts_known[self._turn] = current.most_parts
        self._add_tail(current, weight, weighted_loss, write_extras)
        if self._on_rows is not None:
            self._on_rows(self.layout.num_rows)
        self._leaf, self._last = None, current
        if current.is_apart:
            return []
        node, slot = current.target
        freed = [] if current.is_first_of_chain else [self._slots.nodes.pop(merged) for merged, _ in current.chain][:-1]
        self._slots.nodes[node] = slot
        return freed

    def abandon_leaf(self) -> list[Slot]:
        """Forget the current leaf, if its backward has not ended, and the nodes that its gradients were added to: they
        have some of them. Return their slots.
        """
        current, self._leaf = self._leaf, None
        if current is None or current.is_apart:
            return []
        slots = [slot for _, slot in current.chain]
        if self._adopter in slots:
            self._adopted, self._adopter = {}, None
        for node, _ in current.chain:
            self._slots.nodes.pop(node, None)
        return slots

    def not_finite(self) -> list[str]:
        """Return the parameters whose gradients are not finite in the leaf that was finished last."""
        assert self._last is not None
        gradients = self._last.target[1].gradients
        return [
            name for (name, _), one in zip(self.trained, gradients, strict=True) if not bool(torch.isfinite(one).all())
        ]

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the fingerprint of the leaf that was finished last, which was the first one of its chain or kept."""
        assert self._last is not None
        slot = self._last.own
        multipliers = self.layout.multipliers.to(slot.memory.device)
        names = [
            *(name for name, _ in self.trained),
            *self.buffers.names,
            *(entry.name for entry in self.layout.extras),
        ]
        parts = digest_of_each([*slot.gradients, *slot.buffers, *slot.extras])
        digest, loss = read([digest_there(Rows(slot.memory, 0), multipliers, 0, self.layout.num_rows), slot.scalars[1]])
        return Fingerprint(
            leaf=index,
            digest=int(digest) & MASK,
            weighted_loss=float(loss),
            parts={name: f"{part:016x}" for name, part in zip(names, parts, strict=True)},
        )

    def gradients_of_last(self) -> dict[str, Tensor]:
        """Return the gradients of the leaf that was finished last, by name, where `fingerprint` can be asked: views."""
        assert self._last is not None
        return dict(zip((name for name, _ in self.trained), self._last.own.gradients, strict=True))

    def forget_last(self) -> None:
        """Forget the leaf that was folded last, of which nothing is asked any more: its slot may be as large as all
        gradients.
        """
        self._last = None

    def copy_adopted(self) -> None:
        """Copy adopted gradients to their slot, because the nodes are read, or the sibling does not come next. Between
        two leaves.
        """
        adopted, self._adopted = self._adopted, {}
        for index, gradient in adopted.items():
            assert self._adopter is not None
            self._adopter.gradients[index].copy_(gradient)
        self._adopter = None

    # -- inside --------------------------------------------------------------------------------------

    def _own_slot(self) -> Slot:
        """Return a private slot, which is freed after its use: it is seldom needed."""
        if self._device.type == "cpu":
            return Slot(self.layout, transient(self.layout.slot_bytes))
        return Slot(self.layout, torch.zeros(self.layout.slot_bytes, dtype=torch.uint8, device=self._device))

    def _add_tail(
        self, current: _Leaf, weight: float | Tensor, weighted_loss: float | Tensor, write_extras: WriteExtras | None
    ) -> None:
        tail = self._tail
        # A copy to a GPU that blocks would wait until the whole backward pass is done.
        if isinstance(weight, Tensor) or isinstance(weighted_loss, Tensor):
            for scalar, given in zip(tail.scalars, (weight, weighted_loss), strict=True):
                scalar.copy_(torch.as_tensor(given, dtype=torch.float64), non_blocking=True)
        else:
            tail.scalars.copy_(torch.tensor([weight, weighted_loss], dtype=torch.float64), non_blocking=True)
        tail.used.copy_(torch.tensor(current.used, dtype=torch.int32), non_blocking=True)
        if current.is_left_out is not None:
            tail.used.masked_fill_(current.is_left_out, 0)
        self.buffers.take_changes(tail.buffers, weight)
        for extra in tail.extras:
            extra.zero_()
        if write_extras is not None:
            write_extras(tail.extras)
        value = tail.pieces
        if current.alone is not None:
            _each(torch.Tensor.copy_, current.alone.tail, value)
        if current.is_first_of_chain:
            _each(torch.Tensor.copy_, current.chain[0][1].tail, value)
            return
        for _, slot in current.chain:
            _each(torch.Tensor.add_, slot.tail, value)
            value = slot.tail

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        current = self._leaf
        if current is None:
            return
        name = self.trained[index][0]
        if not current.in_backward:
            raise StepError(
                f"the gradient of {name!r} was computed by a call that cannot stand for step.backward(loss): "
                "torch.autograd.backward, or backward() of a tensor with more than one element, with gradient=, "
                "inputs= or create_graph=, or in another thread. Inside `for ... in step` call loss.backward() or "
                "step.backward(loss); for other gradients use torch.autograd.grad"
            )
        gradient = parameter.grad
        if gradient is None:
            return
        # Out of the user's reach: zero_grad() anywhere in the loop must do no harm.
        parameter.grad = None
        if self._moves:
            gradient = gradient.to(self._device)
        if index == 0 and (bit := spoils("gradient", current.node.index)) is not None:
            gradient = with_flipped_bit(gradient, bit)
        if current.folded[index]:
            raise StepError(
                f"in one backward pass, {name!r} got its gradient in more parts than in the first "
                "micro-batch (this happens to a layer that is used several times under "
                "checkpoint(..., use_reentrant=True)); use torch.utils.checkpoint with use_reentrant=False"
            )
        if current.pending and (before := current.pending.pop(index, None)) is not None:
            gradient = before + gradient  # both may be views of memory that is still in use: see `_carry`
        if current.to_come is None:
            current.parts[index] += 1
            current.most_parts[index] = max(current.most_parts[index], current.parts[index])
            current.pending[index] = gradient  # folded when the micro-batch ends
            return
        current.to_come[index] -= 1
        if current.to_come[index] > 0:
            current.pending[index] = gradient
            return
        self._fold(current, index, gradient)
        if self._on_rows is not None and self._in_order and index == current.first_complete - 1:
            while current.first_complete > 0 and current.folded[current.first_complete - 1]:
                current.first_complete -= 1
            if current.first_complete > 0:
                self._on_rows(self.layout.gradients[current.first_complete].end_row - 1)

    def _fold(self, current: _Leaf, index: int, gradient: Tensor | None) -> None:
        if gradient is None:
            if current.is_first_of_chain:
                current.chain[0][1].gradients[index].zero_()
            else:
                self._carry(current, index, 0.0)
        else:
            if gradient.layout is not torch.strided:
                raise StepError(
                    f"the gradient of {self.trained[index][0]!r} is sparse ({gradient.layout}), and gradients are "
                    "summed as dense tensors: use nn.Embedding(sparse=False), or freeze the parameter. SparseAdam gets "
                    "a sparse gradient after the inner loop by weight.grad = weight.grad.to_sparse(1)"
                )
            if current.is_left_out is not None:
                gradient = gradient.masked_fill(current.is_left_out, 0.0)
            if current.alone is not None:
                self._write(current, index, gradient, current.alone)
            self._fold_dense(current, index, gradient)
            current.used[index] = 1
        current.folded[index] = True

    def _fold_dense(self, current: _Leaf, index: int, gradient: Tensor) -> None:
        if not current.is_first_of_chain:
            self._carry(current, index, gradient)
            return
        slot = current.chain[0][1]
        if current.adopts and gradient.dtype == slot.gradients[index].dtype and _is_private(gradient):
            self._adopted[index] = gradient
        else:
            self._write(current, index, gradient, slot)

    def _write(self, current: _Leaf, index: int, gradient: Tensor, slot: Slot) -> None:
        """Write a gradient of the current leaf into a slot, as it enters the sums."""
        target = slot.gradients[index]
        if current.rounds_itself and self._is_rounded[index]:
            for part in _parts(target):
                target[part].copy_(gradient[part].to(torch.bfloat16))
        else:
            target.copy_(gradient)

    def _carry(self, current: _Leaf, index: int, running: Tensor | float) -> None:
        """Add a gradient to the nodes of the chain, one after the other. All sums are written into slots: the gradient
        may be a view of memory that is still on its way to other parameters.
        """
        adopted = self._adopted.pop(index, None)
        targets = [slot.gradients[index] for _, slot in current.chain]
        if not self._is_rounded[index] or not current.rounds[-1]:
            self._add_up(current, running, adopted, targets)
            return
        for part in _parts(targets[0]):  # from here to the last node of the chain in the cache
            own = running[part] if isinstance(running, Tensor) else running
            if current.rounds_itself and isinstance(own, Tensor):
                own = own.to(torch.bfloat16).to(torch.float32)  # a copy
            other = adopted[part] if adopted is not None else None
            self._add_up(current, own, other, [target[part] for target in targets], rounds=True)

    @staticmethod
    def _add_up(
        current: _Leaf,
        running: Tensor | float,
        other: Tensor | None,
        targets: Sequence[Tensor],
        *,
        rounds: bool = False,
    ) -> None:
        """Add to ``other``, or to what is in the first target, and so on; each sum goes to its target."""
        for target, is_left, is_rounded in zip(targets, current.is_left, current.rounds, strict=True):
            if other is None:
                other = target
            # The left node first: where both are NaN, the sum has the bits of the first.
            if is_left or isinstance(running, float):
                running = torch.add(other, running, out=target)
            else:
                running = torch.add(running, other, out=target)
            if rounds and is_rounded:
                round_in_place(target)
            other = None


class _Tail:
    """The tail of one micro-batch, laid out like that of a slot."""

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        first, end = layout.tail_row, layout.num_rows
        rows = Rows(torch.zeros((end - first) * ROW_BYTES, dtype=torch.uint8, device=device), first)
        self.pieces = [rows.piece(piece) for piece in layout.pieces(first, end)]

        def view(entry: SlotEntry) -> Tensor:
            whole = Piece(entry.sum_dtype, entry.offset, entry.offset + entry.shape.numel(), mean=False)
            return rows.piece(whole).view(entry.shape)

        self.scalars = view(layout.scalars)
        self.used = view(layout.used)
        self.buffers = [view(entry) for entry in layout.buffers]
        self.extras = [view(entry) for entry in layout.extras]


def _parts(tensor: Tensor) -> list[Any]:
    """Return indices that cut a tensor into parts that stay in the cache, wherever it lies."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if tensor.numel() <= PART or rows < 2 or tensor.device.type != "cpu":
        return [...]
    each = max(1, rows * PART // tensor.numel())
    return [slice(start, start + each) for start in range(0, rows, each)]


def _each(operation: Callable[[Tensor, Tensor], Tensor], targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        operation(target, value)


def _nothing() -> None:
    pass


def gradient_of(parameter: Tensor, mean: Tensor) -> Tensor:
    """Return the mean as the gradient of a parameter: with its dtype and its strides, as autograd's own gradients.

    A fused optimizer goes through the memory of a parameter and of its gradient side by side. With other strides (a
    model in ``torch.channels_last``) it would take the gradient of another element, without an error on the CPU.

    Returns:
        A view of ``mean``, by which the slot knows that somebody holds it (`Slot.is_shared`); or a copy.
    """
    if mean.device == parameter.device and mean.dtype == parameter.dtype and mean.stride() == parameter.stride():
        return mean.view_as(mean)
    return torch.empty_like(parameter, requires_grad=False).copy_(mean)


def _is_private(gradient: Tensor) -> bool:
    """Return whether nothing else holds the memory of a gradient. Else the next backward may write there: a replayed
    CUDA graph does, and so does a function that has one buffer for all its gradients. Torch counts who uses memory of
    its own, and nobody counts who uses that of others, e.g. of numpy, which torch may not resize.
    """
    is_cached = torch._C._is_cached_tensor(gradient)  # type: ignore[attr-defined]  # torch.compile's CUDA graphs
    return num_tensors_on(gradient) == 1 and gradient.untyped_storage().resizable() and not is_cached
