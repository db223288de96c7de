"""Rows that are carried from step to step with their sample: hidden states, memory banks, weights of samples.

Every worker holds all rows. A micro-batch reads the rows as they were when the pass began, and writes rows that count
after the pass. The written rows travel in the tail of the slot, as integers: each micro-batch has room of its own there
and zeros everywhere else, so the sum over the tree puts them side by side, bit by bit. So a row reaches every worker
with the commit of the step, over losses and help as a gradient does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.errors import StepError, UsageError
from unisono.exchange.flat import Extra

__all__ = ["Carried", "Keys"]

Keys = int | slice | Sequence[int] | Tensor
WORD_BYTES = 8


class Carried:
    """Rows that are found by key, and carried from step to step.

    Give it to ``run.track``: it goes to workers that join and into checkpoints. Within ``for batch in step``,
    ``carried[keys]`` gives the rows as they were before this pass over the batch, and ``carried[keys] = rows`` writes
    rows that count afterwards, on all workers, whichever worker computes the key's sample next::

        hidden = unisono.Carried(torch.zeros(num_streams, layers, width))
        run.track(model=model, optimizer=optimizer, hidden=hidden)
        for step in run.steps(chunks, batch_size=num_streams, microbatches=4, shuffle=False):
            for tokens, targets, stream in step:
                logits, after = model(tokens, hidden[stream])
                F.cross_entropy(logits, targets).backward()
                hidden[stream] = after

    Between two passes all workers may read and write ``carried.rows`` alike, e.g. set it to zero at a new epoch.

    Args:
        rows: (number of keys, ...) the first values, on any device; the tensor itself is kept, as `rows`.
        writes_per_sample: how many rows a micro-batch may write for each of its samples.

    Raises:
        UsageError: ``rows`` is no tensor with at least one row.

    If several samples of a step write the same key, the last one in the order of the batch counts.
    """

    def __init__(self, rows: Tensor, *, writes_per_sample: int = 1) -> None:
        if not isinstance(rows, Tensor) or rows.dim() < 1 or rows.shape[0] < 1 or rows.layout is not torch.strided:
            raise UsageError(
                "unisono.Carried takes a tensor with one row for each key, e.g. torch.zeros(num_streams, width); got "
                + (f"shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else f"a {type(rows).__qualname__}")
            )
        if writes_per_sample < 1:
            raise UsageError(f"writes_per_sample must be at least 1, got {writes_per_sample}")
        self.rows = rows.detach()
        self._writes_per_sample = writes_per_sample
        self._writes: list[tuple[Tensor, Tensor]] | None = None  # None: not within a micro-batch

    def __len__(self) -> int:
        return self.rows.shape[0]

    def __getitem__(self, keys: Keys) -> Tensor:
        """Return a copy of some rows: (n, ...); of a single int: (...)."""
        found = self.rows[self._index(keys)]
        return found[0] if isinstance(keys, int) else found

    def __setitem__(self, keys: Keys, values: Tensor | float) -> None:
        """Write some rows: within a micro-batch for the time after this pass, else at once (on all workers alike).

        Raises:
            UsageError: a key is out of range, or the rows have another shape.
        """
        index = self._index(keys)
        shape = (len(index), *self.rows.shape[1:])
        given = torch.as_tensor(values).detach().to(device=self.rows.device, dtype=self.rows.dtype)
        given = given[None] if isinstance(keys, int) and given.dim() else given
        try:
            rows = given.expand(shape)
        except RuntimeError:
            raise UsageError(
                f"rows of shape {shape} are to be written ({len(index)} keys), and the values have shape "
                f"{tuple(given.shape)}"
            ) from None
        if self._writes is None:
            self._put(index, rows)
        else:
            self._writes.append((index.cpu(), rows.clone()))

    # -- a micro-batch -------------------------------------------------------------------------------

    def extras(self, name: str, num_leaves: int, leaf_size: int) -> list[Extra]:
        """Return what the slot has room for: the keys and the rows that each micro-batch writes.

        Args:
            leaf_size: samples of a micro-batch.
        """
        room = leaf_size * self._writes_per_sample
        return [
            Extra(f"{name}: keys", torch.Size([num_leaves, room]), torch.int64),
            Extra(f"{name}: rows", torch.Size([num_leaves, room, self._row_words]), torch.int64),
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
        if not writes:
            return
        keys = torch.cat([index for index, _ in writes])
        room = views[0].shape[1]
        if len(keys) > room:
            raise StepError(
                f"{where} has written {len(keys)} rows of a unisono.Carried, and there is room for {room}: "
                "say how many rows a sample writes, unisono.Carried(rows, writes_per_sample=...)"
            )
        data = torch.cat([rows for _, rows in writes]).contiguous()
        nbytes = data[0].numel() * data.element_size()
        words = torch.zeros(len(keys), self._row_words * WORD_BYTES, dtype=torch.uint8, device=data.device)
        words[:, :nbytes] = data.view(len(keys), -1).view(torch.uint8)
        views[0][leaf, : len(keys)] = (keys + 1).to(views[0].device)
        views[1][leaf, : len(keys)] = words.view(torch.int64)

    def discard(self) -> bool:
        """End a micro-batch whose writes do not count; returns whether it has written any."""
        writes, self._writes = self._writes, None
        return bool(writes)

    def apply(self, views: Sequence[Tensor]) -> None:
        """Put the rows of all micro-batches in force, after the commit of a pass."""
        keys = views[0].flatten()
        written = keys.nonzero().flatten()
        if not len(written):
            return
        shape = self.rows.shape[1:]
        nbytes = shape.numel() * self.rows.element_size()
        raw = views[1].flatten(0, 1)[written].contiguous().view(torch.uint8)[:, :nbytes].contiguous()
        self._put(keys[written] - 1, raw.view(self.rows.dtype).view(len(written), *shape))

    # -- a tracked object ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rows"].shape != self.rows.shape:
            raise UsageError(
                f"a unisono.Carried of shape {tuple(self.rows.shape)} cannot load one of shape "
                f"{tuple(state['rows'].shape)}"
            )
        self.rows.copy_(state["rows"])

    # -- inside --------------------------------------------------------------------------------------

    @property
    def _row_words(self) -> int:
        return -(-self.rows.shape[1:].numel() * self.rows.element_size() // WORD_BYTES)

    def _index(self, keys: Keys) -> Tensor:
        if isinstance(keys, slice):
            return torch.arange(*keys.indices(len(self)), device=self.rows.device)
        index = torch.as_tensor([keys] if isinstance(keys, int) else keys)
        if index.dim() != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise UsageError(
                "the keys of a unisono.Carried are an int, a slice, a list of ints or an (n,) tensor of ints; got "
                f"{f'shape {tuple(index.shape)} of {index.dtype}' if index.dim() != 1 else index.dtype}"
            )
        index = index.to(dtype=torch.int64)
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise UsageError(
                f"keys from {int(index.min())} to {int(index.max())} were given, and the unisono.Carried has rows "
                f"0 to {len(self) - 1}"
            )
        return index.to(self.rows.device)

    def _put(self, index: Tensor, values: Tensor) -> None:
        """Write rows; of a key that stands there twice, the last one."""
        last = {key: position for position, key in enumerate(index.tolist())}
        with torch.no_grad():
            if len(last) == len(index):
                self.rows[index] = values
            elif last:
                device = self.rows.device
                self.rows[torch.tensor(list(last), device=device)] = values[
                    torch.tensor([*last.values()], device=device)
                ]
