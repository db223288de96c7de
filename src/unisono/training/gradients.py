"""Folding the gradients of micro-batches into nodes, parameter by parameter, as backward finishes them.

The nodes that a worker holds are a binary counter: when leaf 7 arrives and ``n6``, ``n45`` and ``n03`` are held, its
gradient runs up the whole **chain**, ``((g7 + n6) + n45) + n03``. That happens for each parameter in the hook that
autograd calls when the parameter's gradient is complete, while the gradient is still in the cache; then ``.grad`` is
dropped. So there is never more than one gradient beside the nodes, and there are at most ``log2(M) + 1`` of those.

A leaf that is first in its chain has nothing to be added to. When its sibling comes next on this worker, its gradients
are **adopted**: kept as they are, and added to the sibling's straight into the slot, without a copy of their own.

What a micro-batch did to weights, loss and buffers, its **tail**, runs up the same chain when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch import Tensor, nn

from unisono.decisions.tree import Node, leaf, parent, sibling
from unisono.errors import StepError
from unisono.exchange.flat import Entry, FlatLayout, Rows, Slot, digest_rows
from unisono.state import digest_of_tensor

__all__ = ["Buffers", "Calls", "Fingerprint", "GradientFolder"]

COMPARED_FROM = 1 << 16
"""Buffers of more elements (masks, tables, codebooks) are compared before they are subtracted."""

SlotSource = Callable[[], Slot]


class Buffers:
    """The buffers of the tracked modules: every micro-batch starts from the step's, and its changes are summed.

    One that is not persistent and gets another shape is a cache (of a mask, of rotations): it is left alone.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module, str]], shapes: Mapping[int, torch.Size]) -> None:
        """
        Args:
            named: (full name, the module that owns it, its name there).
            shapes: by place in ``named``, of those that are not persistent: their shape when they were tracked.
        """
        self._shapes = shapes
        self.places = [(module, attribute) for _, module, attribute in named]
        self.names = [name for name, _, _ in named]
        self._start: list[Tensor] = []
        self._seen: list[tuple[Tensor, int]] = []

    def tensors(self) -> list[Tensor]:
        return [self._tensor(place) for place in range(len(self.places))]

    def named(self) -> list[tuple[str, Tensor]]:
        """For the layout: a cache has the shape that it had when it was tracked, which all workers know."""
        tensors = self.tensors()
        for place, shape in self._shapes.items():
            if tensors[place].shape != shape:
                tensors[place] = torch.empty(shape, dtype=tensors[place].dtype, device="meta")
        return list(zip(self.names, tensors, strict=True))

    def start_step(self) -> None:
        """Remember what every micro-batch of this step starts from."""
        current = self.tensors()
        if not self._start:
            self._start = [now.detach().clone() for now in current]
        else:
            for place, now in enumerate(current):
                if self._touched(place, now):
                    self._start[place] = now.detach().clone()
        self._seen = [(now, now._version) for now in current]

    def take_changes(self, out: Sequence[Tensor], weight: float) -> None:
        """Write what the micro-batch changed to ``out`` (float buffers: times its weight), and undo it."""
        for place, (start, now) in enumerate(zip(self._start, self.tensors(), strict=True)):
            change = out[place]
            if change.shape != now.shape and start.shape == now.shape:  # a cache that has grown before
                change.zero_()
                continue
            if not self._touched(place, now):
                change.zero_()
                continue
            if start.shape != now.shape or start.is_complex():
                self._refuse(place, start, now)
                change.zero_()
                continue
            torch.sub(now.to(change.dtype), start.to(change.dtype), out=change)
            if start.dtype.is_floating_point:
                # inf - inf is NaN: what did not change, changed by 0.
                change.mul_(weight).masked_fill_(now == start, 0.0)
            now.copy_(start)
            self._seen[place] = (now, now._version)

    def restore(self) -> None:
        """Undo all changes since `start_step`; a buffer that has another shape now is left as it is."""
        for place, (start, now) in enumerate(zip(self._start, self.tensors(), strict=True)):
            if start.shape == now.shape and self._touched(place, now):
                now.copy_(start)
                self._seen[place] = (now, now._version)

    def apply(self, changes: Sequence[Tensor]) -> None:
        """Add the step's changes: the weighted mean for float buffers, the sum for integer ones, any for flags."""
        for place, (start, now, change) in enumerate(zip(self._start, self.tensors(), changes, strict=True)):
            if change.numel() and bool(change.any()):
                # A flag was turned over by one micro-batch or by several: that is the same.
                step = change.sign() if start.dtype is torch.bool else change
                moved = (start.to(change.dtype) + step).to(start.dtype)
                if start.dtype.is_floating_point and bool((start.isinf() & moved.isnan()).any()):
                    raise StepError(
                        f"buffer {self.names[place]!r} was infinite and is finite after this step: such a change has "
                        "no mean over the micro-batches. Give the buffer finite values before run.steps, e.g. by one "
                        "forward pass"
                    )
                now.copy_(torch.where(change == 0, start, moved))

    def _tensor(self, place: int) -> Tensor:
        module, attribute = self.places[place]
        found = module._buffers.get(attribute)
        if found is None:
            raise StepError(
                f"buffer {self.names[place]!r} was a tensor, and is None or missing now. Keep it a tensor, or remove "
                "it between two calls of run.steps"
            )
        return found

    def _refuse(self, place: int, start: Tensor, now: Tensor) -> None:
        """What has no difference may not change, except for a cache.

        Raises:
            StepError: it did.
        """
        module, attribute = self.places[place]
        if start.shape != now.shape and attribute not in module._non_persistent_buffers_set:
            raise StepError(
                f"buffer {self.names[place]!r} had shape {tuple(start.shape)} and has {tuple(now.shape)} after a "
                "micro-batch, only on the worker that computed the micro-batch. Give the buffer its final shape before "
                "run.steps, e.g. by one forward pass; or register it with persistent=False if it is a cache"
            )
        if start.shape == now.shape and not torch.equal(start, now):
            raise StepError(
                f"buffer {self.names[place]!r} ({start.dtype}) was changed within a micro-batch, and changes of "
                "complex buffers cannot be summed; register its real and imaginary parts (torch.view_as_real)"
            )

    def _touched(self, place: int, now: Tensor) -> bool:
        if 0 in now.stride() and now.numel() > 1:  # it is expanded, and cannot be written
            return not torch.equal(now, self._start[place])
        tensor, version = self._seen[place]
        if now is not tensor or now._version != version or now.numel() <= COMPARED_FROM:
            return True
        # The version counter alone does not tell: batch_norm does not count, nor does what is written through `.data`.
        return not torch.equal(now, self._start[place])


class Fingerprint(msgspec.Struct, frozen=True):
    """What one worker has computed of one micro-batch, to be compared with what another one has."""

    leaf: int
    digest: int
    """Of everything: gradients, loss, weight, changes of buffers."""
    weighted_loss: float
    parts: dict[str, str]
    """The digests of the gradients and of the changes of buffers, by name."""

    def difference(self, other: Fingerprint, name: str, other_name: str) -> str:
        """Return a sentence that says what differs first."""
        if self.weighted_loss != other.weighted_loss:
            loss = f"The weighted loss is {self.weighted_loss!r} on {name} and {other.weighted_loss!r} on {other_name}"
        else:
            loss = "The loss is the same"
        parts = [part for part in self.parts if self.parts[part] != other.parts.get(part)]
        if not parts:
            return loss
        more = f" (and {len(parts) - 1} more)" if len(parts) > 1 else ""
        return f"{loss}; the first gradient or buffer that differs is that of {parts[0]!r}{more}"


@dataclass
class Calls:
    """How often a script calls backward for one micro-batch, at most. Part of the state: who joins does not know it."""

    known: int = 0
    has_looked: bool = False
    """This worker has compared the parameters before and after a micro-batch, bit by bit."""


class GradientFolder:
    """What one worker has summed of a step so far.

    Args:
        parameters: (name, parameter), those that need a gradient.
        buffers: of the tracked modules.
        frozen: (name, parameter), those that need none.
        calls: what is known of the backward calls of a micro-batch; added to.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        buffers: Buffers,
        frozen: Sequence[tuple[str, nn.Parameter]] = (),
        calls: Calls | None = None,
    ) -> None:
        self.buffers = buffers
        self.layout = FlatLayout(parameters, buffers.named())
        self._held: dict[Node, Slot] = {}
        self.on_rows: Callable[[int], None] | None = None
        """Told how many rows of the current leaf's node are complete, as they become so."""
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._everything = [*parameters, *frozen]
        self._needs_gradient = [True] * len(parameters) + [False] * len(frozen)
        self._digests: list[int] | None = None  # of these, before the first micro-batch
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))
            for index, parameter in enumerate(self._parameters)
        ]
        # Only with one kind of sum do the rows become complete in the order of the parameters.
        self._in_order = len({entry.sum_dtype for entry in self.layout.gradients}) == 1
        self._tail = _Tail(self.layout, self._parameters[0].device if self._parameters else torch.device("cpu"))
        self._calls_known = calls if calls is not None else Calls()
        # By parameter, the parts of its gradient that one call gives; empty before this worker's first micro-batch.
        self._parts_known: list[int] = []
        self._to_come: list[int] | None = None  # by parameter, of the current call if it is the last; None: it is not
        self._pending: dict[int, Tensor] = {}  # by parameter, the sum of the micro-batch's calls so far
        self._adopts = False
        self._adopted: dict[int, Tensor] = {}  # by parameter, what belongs into `_adopter`
        self._adopter: Slot | None = None
        self._inside = self._in_backward = False

    @property
    def identities(self) -> list[int]:
        """Which parameters these are, to notice that others are trained now."""
        return [id(parameter) for parameter in self._parameters]

    @property
    def held(self) -> dict[Node, Slot]:
        """The nodes that are complete."""
        if not self._inside:
            self._settle()
        return self._held

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._held, self._adopted = {}, {}

    # -- a step --------------------------------------------------------------------------------------

    def start_step(self, num_leaves: int) -> None:
        self._num_leaves = num_leaves
        self._held, self._adopted = {}, {}
        self._inside = False
        self.buffers.start_step()
        for parameter in self._parameters:
            parameter.grad = None

    def show(self, combined: Slot) -> None:
        """Make the combined means the parameters' ``.grad`` (views where the dtype allows) and the model's buffers."""
        counts = combined.used.tolist()
        for parameter, mean, count in zip(self._parameters, combined.gradients, counts, strict=True):
            if count == 0:
                parameter.grad = None
            elif mean.dtype == parameter.dtype:
                parameter.grad = mean
            else:
                parameter.grad = mean.to(parameter.dtype)
        self.buffers.apply(combined.buffers)

    # -- a micro-batch -------------------------------------------------------------------------------

    def start_leaf(
        self, index: int, new_slot: SlotSource, following: int | None = None, *, apart: bool = False
    ) -> None:
        """The next gradients are those of leaf ``index``.

        Args:
            new_slot: where an empty slot comes from if this leaf has nobody to be added to yet.
            following: the leaf that will probably be computed after this one.
            apart: the leaf is another member's. It is not added to the nodes, only `fingerprint` is of interest.
        """
        self._is_apart = apart
        self._versions = [parameter._version for _, parameter in self._everything]
        self._frozen_gradients = [parameter.grad for _, parameter in self._everything[len(self._parameters) :]]
        if self._digests is None and not self._calls_known.has_looked:
            self._digests = [digest_of_tensor(parameter) for _, parameter in self._everything]
        node = leaf(index, self._num_leaves)
        self._chain: list[tuple[Node, Slot]] = []
        self._is_left: list[bool] = []  # of the nodes of the chain
        while not apart and (other := sibling(node, self._num_leaves)) in self._held:
            assert other is not None
            self._chain.append((other, self._held[other]))
            self._is_left.append(other.index < node.index)
            node = parent(node, self._num_leaves)
        self._opens = not self._chain
        if self._adopter is not (None if self._opens else self._chain[0][1]):
            self._settle()
        if self._opens:
            self._chain = [(node, self._own_slot() if apart else new_slot())]
        self._adopts = (
            self._opens
            and following is not None
            and leaf(following, self._num_leaves) == sibling(node, self._num_leaves)
        )
        if self._adopts:
            self._adopter = self._chain[0][1]
        self.target = (node, self._chain[-1][1])
        self._folded = [False] * len(self._parameters)
        self._used = [0] * len(self._parameters)
        self._parts = [0] * len(self._parameters)  # of the current call
        self._most_parts = [0] * len(self._parameters)
        self._complete = len(self._parameters)  # parameters from here on are folded
        self._calls = 0
        self._pending = {}
        self.on_rows = None
        self._inside = True

    def backward(self, loss: Tensor, seed: float, *, retain_graph: bool = False) -> None:
        """Fold the gradients of ``seed * loss`` into the current leaf."""
        self._calls += 1
        self._parts = [0] * len(self._parameters)
        is_last = bool(self._parts_known) and self._calls == self._calls_known.known
        self._to_come = [*self._parts_known] if is_last else None
        if self._parts_known and self._calls > self._calls_known.known:
            raise StepError(
                f"step.backward was called {self._calls} times for this micro-batch and {self._calls_known.known} "
                "times for the first one; call it equally often for every micro-batch (at most as often as for the "
                "first), or add up the losses and call it once"
            )
        self._in_backward = True
        try:
            loss.backward(gradient=torch.full_like(loss, seed), retain_graph=retain_graph)
        finally:
            self._in_backward = False

    def finish_leaf(self, weight: float, weighted_loss: float) -> list[Slot]:
        """Everything of this leaf is there: add its tail, and keep the node that it completes.

        Returns:
            Slots of nodes that were merged into a larger one: free for use.
        """
        self._check_unchanged()
        for index in range(len(self._parameters)):
            if not self._folded[index]:
                self._fold(index, self._pending.pop(index, None))
        if not self._parts_known and self._calls:
            self._calls_known.known = max(self._calls_known.known, self._calls)
            self._parts_known = self._most_parts
        tail = self._tail
        tail.scalars.copy_(torch.tensor([weight, weighted_loss], dtype=torch.float64))
        tail.used.copy_(torch.tensor(self._used, dtype=torch.int32))
        self.buffers.take_changes(tail.buffers, weight)
        value = tail.pieces
        if self._opens:
            _each(torch.Tensor.copy_, self._chain[0][1].tail, value)
        else:
            for _, slot in self._chain:
                _each(torch.Tensor.add_, slot.tail, value)
                value = slot.tail
        if self.on_rows is not None:
            self.on_rows(self.layout.num_rows)
        self._inside = False
        node, slot = self.target
        if self._is_apart:
            return []
        freed = [] if self._opens else [self._held.pop(merged) for merged, _ in self._chain][:-1]
        self._held[node] = slot
        return freed

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the fingerprint of the leaf that was finished last, which was the first one of its chain."""
        slot = self.target[1]
        multipliers = self.layout.multipliers.to(slot.memory.device)
        named = [*zip(self._names, slot.gradients, strict=True), *zip(self.buffers.names, slot.buffers, strict=True)]
        return Fingerprint(
            leaf=index,
            digest=digest_rows(Rows(slot.memory, 0), multipliers, 0, self.layout.num_rows),
            weighted_loss=float(slot.scalars[1]),
            parts={name: f"{digest_of_tensor(part):016x}" for name, part in named},
        )

    def _own_slot(self) -> Slot:
        """Return a slot that nobody else sees, and that is gone when it is not used any more: it is seldom needed."""
        device = self._parameters[0].device
        return Slot(self.layout, torch.zeros(self.layout.slot_bytes, dtype=torch.uint8, device=device))

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter), those whose gradients are summed."""
        return self._everything[: len(self._parameters)]

    def _check_unchanged(self) -> None:
        """A micro-batch may not write parameters: its worker would go on with others than the rest."""
        changed = _first_difference(self._versions, [parameter._version for _, parameter in self._everything])
        if changed is None and self._digests:
            # What is written through `.data` is not counted; who does it, does it in every micro-batch or in the first.
            changed = _first_difference(
                self._digests, [digest_of_tensor(parameter) for _, parameter in self._everything]
            )
        self._digests, self._calls_known.has_looked = None, True
        if changed is not None:
            raise StepError(
                f"parameter {self._everything[changed][0]!r} was changed within a micro-batch, only on the worker that "
                "computed the micro-batch. Update parameters after the inner loop; use nn.Embedding without max_norm "
                "(or renormalise after optimizer.step()); if the first batch initialises parameters, pass one batch "
                "through the model before run.steps"
            )
        other = _first_difference(self._needs_gradient, [parameter.requires_grad for _, parameter in self._everything])
        if other is None:
            frozen = self._everything[len(self._parameters) :]
            pairs = zip(frozen, self._frozen_gradients, strict=True)
            learned = (place for place, ((_, one), before) in enumerate(pairs) if one.grad is not before)
            other = next((len(self._parameters) + place for place in learned), None)
        if other is not None:
            was_trained = self._needs_gradient[other]
            raise StepError(
                f"parameter {self._everything[other][0]!r} was {'frozen' if was_trained else 'unfrozen'} within a "
                f"micro-batch (requires_grad was {was_trained} when the step began), so its gradient differs between "
                "the workers. Freeze and unfreeze parameters before the inner loop, or set requires_grad back before "
                "the micro-batch ends, and let a parameter that was frozen get no gradient meanwhile"
            )

    # -- inside --------------------------------------------------------------------------------------

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        if not self._inside:
            return
        if not self._in_backward:
            raise StepError(
                f"the gradient of {self._names[index]!r} was computed by loss.backward(); "
                "inside `for ... in step` call step.backward(loss) instead"
            )
        gradient = parameter.grad
        if gradient is None:
            return
        # Out of the user's reach: zero_grad() at any place of the loop shall do no harm.
        parameter.grad = None
        if self._folded[index]:
            raise StepError(
                f"in one backward pass, {self._names[index]!r} got its gradient in more parts than in the first "
                "micro-batch (this happens to a layer that is used several times under "
                "checkpoint(..., use_reentrant=True)); use torch.utils.checkpoint with use_reentrant=False"
            )
        if self._pending and (before := self._pending.pop(index, None)) is not None:
            gradient = before + gradient  # neither is ours to write to: see `_carry`
        if self._to_come is None:
            self._parts[index] += 1
            self._most_parts[index] = max(self._most_parts[index], self._parts[index])
            self._pending[index] = gradient  # folded when the micro-batch ends
            return
        self._to_come[index] -= 1
        if self._to_come[index] > 0:
            self._pending[index] = gradient
            return
        self._fold(index, gradient)
        if self.on_rows is not None and self._in_order and index == self._complete - 1:
            while self._complete > 0 and self._folded[self._complete - 1]:
                self._complete -= 1
            if self._complete > 0:
                entries = self.layout.gradients
                self.on_rows(entries[self._complete].end_row - 1)

    def _fold(self, index: int, gradient: Tensor | None) -> None:
        if gradient is None:
            if self._opens:
                self._chain[0][1].gradients[index].zero_()
            else:
                self._carry(index, 0.0)
        else:
            if gradient.layout is not torch.strided:
                raise StepError(
                    f"the gradient of {self._names[index]!r} is sparse ({gradient.layout}), and gradients are summed "
                    "as dense tensors: use nn.Embedding(sparse=False), or freeze the parameter"
                )
            self._fold_dense(index, gradient)
            self._used[index] = 1
        self._folded[index] = True

    def _fold_dense(self, index: int, gradient: Tensor) -> None:
        if not self._opens:
            self._carry(index, gradient)
            return
        target = self._chain[0][1].gradients[index]
        if self._adopts and gradient.dtype == target.dtype:
            self._adopted[index] = gradient
        else:
            target.copy_(gradient)

    def _carry(self, index: int, running: Tensor | float) -> None:
        """Add a gradient to the nodes of the chain, one after the other. All sums are written into slots: the gradient
        may be a view of memory that is still on its way to other parameters.
        """
        other = self._adopted.pop(index, None)
        for (_, slot), is_left in zip(self._chain, self._is_left, strict=True):
            target = slot.gradients[index]
            if other is None:
                other = target
            # The left node first: where both are NaN, the sum has the bits of the first.
            if is_left or isinstance(running, float):
                running = torch.add(other, running, out=target)
            else:
                running = torch.add(running, other, out=target)
            other = None

    def _settle(self) -> None:
        """Copy what was adopted to where it belongs: its sibling does not come next after all."""
        adopted, self._adopted = self._adopted, {}
        for index, gradient in adopted.items():
            assert self._adopter is not None
            self._adopter.gradients[index].copy_(gradient)
        self._adopter = None


def _first_difference(before: Sequence[int], now: Sequence[int]) -> int | None:
    if before == now:
        return None
    return next(place for place, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)


class _Tail:
    """The tail of one micro-batch, laid out like that of a slot."""

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        pieces = list(layout.pieces(layout.tail_row, layout.num_rows))
        self.pieces = [torch.zeros(piece.stop - piece.start, dtype=piece.dtype, device=device) for piece in pieces]
        by_dtype: dict[torch.dtype, list[tuple[int, int, Tensor]]] = {}
        for piece, tensor in zip(pieces, self.pieces, strict=True):
            by_dtype.setdefault(piece.dtype, []).append((piece.start, piece.stop, tensor))

        def view(entry: Entry) -> Tensor:
            for start, stop, tensor in by_dtype.get(entry.sum_dtype, []):
                if start <= entry.offset < stop or entry.offset == stop == start:
                    return tensor[entry.offset - start : entry.offset - start + entry.shape.numel()].view(entry.shape)
            return torch.empty(entry.shape, dtype=entry.sum_dtype, device=device)

        self.scalars = view(layout.scalars)
        self.used = view(layout.used)
        self.buffers = [view(entry) for entry in layout.buffers]


def _each(operation: Callable[[Tensor, Tensor], Tensor], targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        operation(target, value)
