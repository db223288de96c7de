"""One copy of the parameters a host: where a worker writes new values, and how the workers of its host map them.

Each parameter has one writer on a host, and the memory has one writer, too: the worker to which it belongs. It is two
**halves**. The value that counts lies in one of them, and the new one is written into the other; they change places
when all members have said that the new values of all parameters are there (`unisono.strategies.shard.update`). A worker
that dies in the middle of a write leaves the value that counts as it was. A worker that was taken for dead, and goes on
writing, writes where nobody reads any more: whoever takes over has memory of its own.

All workers of the host, the writer among them, map the halves **copy-on-write**. So a script may write into its
parameters (clamp them, load them, average them) as it always could, and every worker does it for itself: a page that
was written is a copy from then on, until the parameter gets its next value, with a new mapping.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from unisono.core.errors import UsageError
from unisono.engine.exchange.shared_memory import Segment, transient

__all__ = ["HostMemory", "Written", "check_hosted", "is_mapped", "mapped", "scratch"]

ALIGNMENT = 64
"""Bytes. Of where a parameter begins: a cache line."""


class Written(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker has written values, for the workers of its host."""

    address: str
    laid: list[int]
    """The parameters that have a place there, in the order in which they lie."""
    parameters: list[int]
    """Those of them whose values are to be taken from there."""


class HostMemory:
    """The memory into which this worker writes values of parameters. It opens nothing before the first of them."""

    def __init__(self) -> None:
        self._halves: list[Segment] = []
        self._laid: list[int] = []
        self._in_half: dict[int, int] = {}
        """By parameter: the half in which its value lies; none where it lies in neither."""

    def places(
        self, parameters: Sequence[Tensor], indices: Collection[int], *, anew: bool = False
    ) -> dict[int, Tensor]:
        """Return by parameter where its next value is to be written: nobody reads there.

        Args:
            parameters: all of the optimizer.
            indices: the parameters of which this worker is the writer.
            anew: in memory for these and no others.
        """
        if anew or not set(indices).issubset(self._laid):
            self.close()
            self._laid = sorted(indices)
            nbytes = sum(size for _, size in _laid_out(parameters, self._laid))
            self._halves = [Segment.create(nbytes) for _ in range(2)] if nbytes else []
        found: dict[int, Tensor] = {}
        for number, half in enumerate(self._halves):
            own = {index for index in indices if self._next(index) == number}
            found |= _views(half.map, parameters, self._laid, own)
        return found

    def written(self, indices: Collection[int]) -> list[Written]:
        """Return where the next values of these parameters are."""
        found = []
        for number, half in enumerate(self._halves):
            if own := [index for index in sorted(indices) if self._next(index) == number]:
                found.append(Written(half.address, self._laid, own))
        return found

    def commit(self, indices: Collection[int]) -> None:
        """Note that the next values of these parameters are those that count."""
        self._in_half.update({index: self._next(index) for index in set(indices).intersection(self._laid)})

    def close(self) -> None:
        """Close the memory; it is freed when no parameter of any worker lies there any more."""
        for half in self._halves:
            half.close()
        self._halves, self._laid, self._in_half = [], [], {}

    def _next(self, index: int) -> int:
        return 1 - self._in_half.get(index, 1)


def mapped(parameters: Sequence[Tensor], written: Written) -> dict[int, Tensor]:
    """Return by parameter the value that a worker of this host has written, mapped copy-on-write.

    Raises:
        FileNotFoundError: the worker is gone.
    """
    segment = Segment.open(written.address, copy_on_write=True)
    return _views(segment.map, parameters, written.laid, set(written.parameters))


def scratch(value: Tensor) -> Tensor:
    """Return a copy of a parameter that lives for the time of an update."""
    flat = transient(value.nbytes).view(value.dtype)
    return flat.as_strided(value.shape, value.stride()).copy_(value)


def is_mapped(value: Tensor) -> bool:
    """Return whether a tensor lies in memory that is not torch's own, as that of a host's parameters."""
    return value.device.type == "cpu" and not value.untyped_storage().resizable()


def check_hosted(name: str, parameters: Sequence[Tensor], others: Mapping[str, Tensor]) -> None:
    """Raise UsageError if these parameters cannot lie in memory that the workers of a host share.

    Args:
        name: of the optimizer.
        others: tensors that do not, by name.
    """
    storages = {tensor.untyped_storage().data_ptr(): repr(other) for other, tensor in others.items()}
    for index, parameter in enumerate(parameters):
        what = f"parameter {index} of {name}"
        if parameter.device.type != "cpu":
            raise UsageError(
                f'{what} is on {parameter.device}, and unisono.shard(..., parameters="host") is for workers that '
                "compute on CPUs: their memory is the host's. Leave it out on an accelerator"
            )
        if not _is_dense(parameter):
            raise UsageError(
                f"{what} has elements that are not side by side (strides {tuple(parameter.stride())}), so it cannot be "
                'moved to memory that workers share: make it contiguous, or leave out parameters="host"'
            )
        place = parameter.untyped_storage().data_ptr()
        if parameter.numel() and (other := storages.setdefault(place, what)) != what:
            raise UsageError(
                f'{what} lies in the same memory as {other}, which it would leave with parameters="host": clone one of '
                "them, or use one Parameter in both places"
            )


def _laid_out(parameters: Sequence[Tensor], laid: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (parameter, the bytes that its place takes)."""
    for index in laid:
        yield index, -(-parameters[index].nbytes // ALIGNMENT) * ALIGNMENT


def _views(
    memory: Any, parameters: Sequence[Tensor], laid: Sequence[int], wanted: Collection[int]
) -> dict[int, Tensor]:
    """Return the places of some parameters, each as a tensor with a storage of its own: some libraries take tensors of
    one storage for one tensor. One without elements has no place.
    """
    found, offset = {}, 0
    for index, size in _laid_out(parameters, laid):
        like = parameters[index]
        if size and index in wanted:
            flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset)
            found[index] = flat.as_strided(like.shape, like.stride())
        offset += size
    return found


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill a run of memory, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
