"""Rows that are carried from step to step with their sample: hidden states, memory banks, weights of samples.

Every worker holds all rows. A micro-batch reads the rows as they were when the pass began, and writes rows that count
after the pass. The written rows travel in the tail of the slot, as integers: each micro-batch has room of its own there
and zeros everywhere else, so the sum over the tree puts them side by side, bit by bit. So a row reaches every worker
with the commit of the step, over losses and help as a gradient does.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor

from unisono.core.errors import StepError, UsageError
from unisono.engine.exchange.flat import Extra

__all__ = ["Carried", "Keys"]

Keys = int | slice | Sequence[int] | Tensor
WORD_BYTES = 8


class Carried:
    """Rows that are found by key, and carried from step to step.

    Give it to ``run.track``: it goes to workers that join and into checkpoints. Within ``for batch in step``,
    ``carried[keys]`` gives the rows as they were before this pass over the batch, and ``carried[keys] = rows`` writes
    rows that count afterwards, on all workers, whichever worker computes the key's sample next::

        hidden = unisono.Carried(model.init_hidden(num_streams), dim=1)  # (h, c) of an LSTM
        run.track(model=model, optimizer=optimizer, hidden=hidden)
        for step in run.steps(chunks, batch_size=num_streams, microbatches=4, shuffle=False):
            for tokens, targets, stream in step:
                logits, hidden[stream] = model(tokens, hidden[stream])
                F.cross_entropy(logits, targets).backward()

    Between two passes all workers may read and write `rows` alike, e.g. set them to zero at a new epoch.

    Args:
        rows: the first values, on any device: a tensor with one row for each key, or a tuple or list of such tensors,
            which are read and written together. The tensors themselves are kept.
        dim: the dimension of the keys; 1 for the hidden state of ``nn.LSTM``: (layers, keys, width).
        writes_per_sample: how many rows a micro-batch may write for each of its samples.

    Raises:
        UsageError: ``rows`` is no tensor with at least one row.

    If several samples of a step write the same key, the last one in the order of the batch counts.
    """

    def __init__(self, rows: Tensor | Sequence[Tensor], *, dim: int = 0, writes_per_sample: int = 1) -> None:
        given = [rows] if isinstance(rows, Tensor) else list(rows)
        for one in given:
            if not isinstance(one, Tensor) or not -one.dim() <= dim < one.dim() or one.layout is not torch.strided:
                raise UsageError(
                    f"unisono.Carried takes tensors with one row per key along dimension {dim}, e.g. "
                    "torch.zeros(num_streams, width); got "
                    + (f"shape {tuple(one.shape)}" if isinstance(one, Tensor) else f"a {type(one).__qualname__}")
                )
        lengths = {one.shape[dim] for one in given}
        if len(lengths) != 1 or 0 in lengths:
            raise UsageError(
                f"unisono.Carried takes tensors with the same number of rows, at least 1, along dimension {dim}; got "
                f"{', '.join(str(tuple(one.shape)) for one in given) or 'none'}"
            )
        if writes_per_sample < 1:
            raise UsageError(f"writes_per_sample must be at least 1, got {writes_per_sample}")
        self._dim = dim
        self._tensors = [one.detach() for one in given]
        self._kind = None if isinstance(rows, Tensor) else tuple if isinstance(rows, tuple) else list
        self._stacks = [_Stack(one.movedim(dim, 0)) for one in self._tensors]
        self._writes_per_sample = writes_per_sample
        self._writes: list[tuple[Tensor, list[Tensor]]] | None = None  # None: not within a micro-batch

    @property
    def rows(self) -> Any:
        """The tensor or tensors, as they were given. To be written between two passes only, on all workers alike."""
        return self._as_given(self._tensors)

    @property
    def versions(self) -> tuple[int, ...]:
        """Counts the writes to each tensor."""
        return tuple(one._version for one in self._tensors)

    def __len__(self) -> int:
        return len(self._stacks[0].rows)

    def __getitem__(self, keys: Keys) -> Any:
        """Return a copy of some rows, with the keys along ``dim`` as in the whole; of a single int: without it."""
        index = self._index(keys)
        found = [stack.rows[index.to(stack.rows.device)] for stack in self._stacks]
        if _is_one(keys):
            return self._as_given([one[0] for one in found])
        return self._as_given([one.movedim(0, self._dim).contiguous() for one in found])

    def __setitem__(self, keys: Keys, values: Any) -> None:
        """Write some rows: within a micro-batch for the time after this pass, else at once (on all workers alike).

        Args:
            values: shaped as ``self[keys]`` is, or a number; gradients do not flow through them.

        Raises:
            UsageError: a key is out of range, or the rows have another shape.
        """
        index = self._index(keys)
        is_number = isinstance(values, (int, float))
        given = [values] * len(self._stacks) if is_number or self._kind is None else list(values)
        if len(given) != len(self._stacks):
            raise UsageError(
                f"a unisono.Carried of {len(self._stacks)} tensors was given {len(given)} values: write them together"
            )
        dim = None if _is_one(keys) else self._dim
        rows = [stack.shaped(value, len(index), dim) for stack, value in zip(self._stacks, given, strict=True)]
        if self._writes is None:
            self._put(index, rows)
        else:
            self._writes.append((index, [one.clone() for one in rows]))

    # -- a micro-batch -------------------------------------------------------------------------------

    @property
    def num_extras(self) -> int:
        return 1 + len(self._stacks)

    def extras(self, name: str, num_leaves: int, leaf_size: int) -> list[Extra]:
        """Return what the slot has room for: the keys and the rows that each micro-batch writes.

        Args:
            leaf_size: samples of a micro-batch.
        """
        room = leaf_size * self._writes_per_sample
        shapes = [torch.Size([num_leaves, room]), *(torch.Size([num_leaves, room, one.words]) for one in self._stacks)]
        return [
            Extra(f"{name}: {'rows' if number else 'keys'}", each, torch.int64) for number, each in enumerate(shapes)
        ]

    def open(self) -> None:
        """Begin a micro-batch: keep what it writes apart."""
        self._writes = []

    def close(self, views: Sequence[Tensor], leaf: int, where: str) -> None:
        """End a micro-batch: write its keys and rows to views of zeros in the order of `extras`.

        Args:
            where: of the micro-batch, for an error.

        Raises:
            StepError: the micro-batch has written more rows than there is room for.
        """
        writes, self._writes = self._writes or [], None
        if not any(len(index) for index, _ in writes):
            return
        keys = torch.cat([index for index, _ in writes])
        room = views[0].shape[1]
        if len(keys) > room:
            raise StepError(
                f"{where} wrote {len(keys)} rows of a unisono.Carried, but there is room for {room}: give the number "
                "of rows that a sample writes, unisono.Carried(rows, writes_per_sample=...)"
            )
        views[0][leaf, : len(keys)] = (keys + 1).to(views[0].device)
        for number, view in enumerate(views[1:]):
            view[leaf, : len(keys)] = _to_words(torch.cat([rows[number] for _, rows in writes])).to(view.device)

    def discard(self) -> bool:
        """End a micro-batch whose writes do not count; returns whether it has written any."""
        writes, self._writes = self._writes, None
        return bool(writes)

    def apply(self, views: Sequence[Tensor]) -> None:
        """Put the rows of all micro-batches in force, after the commit of a pass."""
        keys = views[0].flatten()
        written = keys.nonzero().flatten()
        if len(written):
            words = [view.flatten(0, 1)[written] for view in views[1:]]
            rows = [stack.from_words(each) for stack, each in zip(self._stacks, words, strict=True)]
            self._put((keys[written] - 1).cpu(), rows)

    # -- a tracked object ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        return {str(number): one for number, one in enumerate(self._tensors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        theirs = [tuple(one.shape) for one in state.values()]
        if theirs != [tuple(one.shape) for one in self._tensors]:
            raise UsageError(
                f"a unisono.Carried of shape {', '.join(str(tuple(one.shape)) for one in self._tensors)} cannot load "
                f"one of shape {', '.join(map(str, theirs))}"
            )
        for own, one in zip(self._tensors, state.values(), strict=True):
            own.copy_(one)

    # -- inside --------------------------------------------------------------------------------------

    def _as_given(self, tensors: list[Tensor]) -> Any:
        return tensors[0] if self._kind is None else self._kind(tensors)

    def _index(self, keys: Keys) -> Tensor:
        """Return keys as (n,) int64 on the CPU."""
        if isinstance(keys, slice):
            return torch.arange(*keys.indices(len(self)))
        index = torch.as_tensor([int(cast(int, keys))] if _is_one(keys) else keys)
        if index.numel() == 0:
            index = index.to(torch.int64)
        if index.dim() != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise UsageError(
                "the keys of a unisono.Carried are an int, a slice, a list of ints or an (n,) tensor of ints; got "
                f"{f'shape {tuple(index.shape)}' if index.dim() != 1 else str(index.dtype)}"
            )
        index = index.to(device="cpu", dtype=torch.int64)
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise UsageError(
                f"keys from {int(index.min())} to {int(index.max())} were given, but the unisono.Carried has rows 0 to "
                f"{len(self) - 1}"
            )
        return index

    def _put(self, index: Tensor, rows: Sequence[Tensor]) -> None:
        """Write rows; of a key that stands there twice, the last one."""
        last = {key: position for position, key in enumerate(index.tolist())}
        if len(last) < len(index):
            positions = torch.tensor(list(last.values()))
            index, rows = index[positions], [one[positions.to(one.device)] for one in rows]
        with torch.no_grad():
            for stack, values in zip(self._stacks, rows, strict=True):
                stack.rows[index.to(stack.rows.device)] = values


def _is_one(keys: object) -> bool:
    """Return whether this is one key: an int of Python, numpy or torch."""
    if isinstance(keys, Tensor):
        return keys.dim() == 0 and keys.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    return isinstance(keys, Integral) and not isinstance(keys, bool)


class _Stack:
    """One tensor of the rows, with the keys along its first dimension.

    Args:
        rows: a view of the tensor.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._row_bytes = rows.shape[1:].numel() * rows.element_size()
        self.words = -(-self._row_bytes // WORD_BYTES)

    def shaped(self, value: Any, num_keys: int, dim: int | None) -> Tensor:
        """Return a value as (num_keys, ...) rows.

        Args:
            dim: where the value has the keys; None: it is one row.
        """
        given = torch.as_tensor(value).detach().to(device=self.rows.device, dtype=self.rows.dtype)
        if given.dim():
            fits = given.dim() == self.rows.dim() - (dim is None)
            given = given[None] if dim is None else given.movedim(dim, 0) if fits else given
        shape = (num_keys, *self.rows.shape[1:])
        if given.dim() and given.shape != shape:
            raise UsageError(
                f"rows of shape {shape} are to be written ({num_keys} keys), and the values have shape "
                f"{tuple(given.shape)} (keys first)"
            )
        return given.expand(shape)

    def from_words(self, words: Tensor) -> Tensor:
        """Return (n, words) int64 as n rows."""
        raw = words.contiguous().view(torch.uint8)[:, : self._row_bytes].contiguous().to(self.rows.device)
        return raw.view(self.rows.dtype).view(len(words), *self.rows.shape[1:])


def _to_words(rows: Tensor) -> Tensor:
    """Return n rows as (n, words) int64, filled up with zeros."""
    raw = rows.contiguous().view(len(rows), -1).view(torch.uint8)
    width = -(-raw.shape[1] // WORD_BYTES) * WORD_BYTES
    words = torch.zeros(len(rows), width, dtype=torch.uint8, device=rows.device)
    words[:, : raw.shape[1]] = raw
    return words.view(torch.int64)
