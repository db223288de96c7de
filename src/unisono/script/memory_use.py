"""What of a worker's memory is what: read from the tracked objects when memory was used up, or once in a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from unisono.core.ownership import MemberPlace
from unisono.engine.exchange.slots import Slots
from unisono.engine.state.tracked import Tracked
from unisono.record.problems.fit import Held
from unisono.record.problems.limits import memory_limit, own_address_space, own_memory, own_peak
from unisono.system import accelerators

__all__ = ["Among", "MemoryAtStart", "data_bytes", "held_now", "kinds"]

SOME: Final = 1_000
"""So many items of a list are looked at; the others are taken to be as large."""
NUM_BIGGEST: Final = 8
LEAST_BYTES: Final = 100_000
"""A smaller tensor is not among the largest."""
PROGRAM: Final = "the program itself"


@dataclass(frozen=True)
class MemoryAtStart:
    """The memory of a process at the beginning of its training."""

    used: int = 0
    """All of it, with parameters and data; 0: what is on an accelerator counts."""
    data: int = 0
    """Of the data set."""


@dataclass(frozen=True)
class Among:
    """The members of a run, and which of them this process is."""

    members: Sequence[MemberPlace] = ()
    """In the order of their ranks."""
    own_id: str = ""


NOBODY: Final = Among()


def kinds(tracked: Tracked, slots: Slots, beginning: MemoryAtStart, among: Among = NOBODY) -> dict[str, int]:
    """Return the bytes of what does not depend on the size of a micro-batch, by name."""
    parameters = sum(map(_bytes, {id(one): one for _, one in tracked.parameters()}.values()))
    buffers = sum(_bytes(one) for module in tracked.modules.values() for one in module.buffers())
    known = {
        PROGRAM: max(0, beginning.used - parameters - buffers - beginning.data),
        "data set": beginning.data,
        "parameters": parameters,
        "buffers": buffers,
        "gradients": _slot_bytes(slots),
        "optimizer state": sum(number for _, number in _optimizer_tensors(tracked)),
    }
    if to_come := _state_to_come(tracked, among):
        known["optimizer state, from the first update on"] = to_come
    return {name: number for name, number in known.items() if number}


def held_now(
    tracked: Tracked,
    slots: Slots,
    device: torch.device,
    beginning: MemoryAtStart,
    among: Among = NOBODY,
    *,
    asked: int,
    num_workers: int,
) -> Held:
    """Return what holds the memory of this process now, that of its accelerator if it computes there.

    Args:
        asked: bytes that it could not get.
        num_workers: on this machine.
    """
    if device.type != "cpu":
        used, limit, of, shared = *accelerators.memory(device), str(device), 0
    else:
        used, limit, of, shared = _cpu(num_workers)
    named = [(f"{name} {tuple(one.shape)} {_dtype(one)}", _bytes(one)) for name, one in tracked.parameters()]
    named += list(_optimizer_tensors(tracked))
    return Held(
        kinds=kinds(tracked, slots, beginning, among),
        used=used,
        asked=asked,
        limit=limit,
        of=of,
        shared=shared,
        biggest=sorted((item for item in named if item[1] >= LEAST_BYTES), key=lambda item: -item[1])[:NUM_BIGGEST],
    )


def data_bytes(dataset: object, device: torch.device) -> int:
    """Return the memory of the tensors and arrays that a data set holds itself: in its attributes, or as its items."""
    if isinstance(dataset, Tensor):
        return _bytes_on(dataset, device)
    if isinstance(dataset, (list, tuple)):
        some = dataset[:SOME]
        return sum(_bytes_on(one, device) for one in some) * len(dataset) // max(1, len(some))
    held = getattr(dataset, "__dict__", {}).values()
    flat = [one for value in held for one in (value if isinstance(value, (list, tuple)) else (value,))]
    return sum(_bytes_on(one, device) for one in flat[: 10 * SOME])


def _bytes_on(value: object, device: torch.device) -> int:
    if isinstance(value, Tensor):
        return _bytes(value) if value.device.type == device.type else 0
    if device.type != "cpu" or type(value).__name__ == "memmap":  # that is on its disk
        return 0
    found = getattr(value, "nbytes", 0)
    return found if isinstance(found, int) else 0


def _cpu(num_workers: int) -> tuple[int, int, str, int]:
    """Return what is used, the limit, of what, and what all workers together could have."""
    used = own_peak() or own_memory()
    space, limit = own_address_space(), memory_limit()
    if space is not None and (limit is None or space.limit - space.used < limit.limit - limit.used):
        # Address space that is mapped and not used counts as well: what is left of it is what this process could have.
        return used, used + max(0, space.limit - space.used), space.of, 0
    if limit is None:
        return used, 0, "memory", 0
    left = max(0, limit.limit - limit.used)
    return used, used + left, limit.of, num_workers * used + left


def _slot_bytes(slots: Slots) -> int:
    in_use = {id(slot.memory): slot for slot in (*slots.nodes.values(), *slots.results)}
    sizes = [slot.memory.numel() for slot in in_use.values()]
    if slots.layout is not None and not slots.nodes:
        sizes.append(slots.layout.slot_bytes)  # of the micro-batch that is being computed
    return sum(sizes)


def _optimizer_tensors(tracked: Tracked) -> Iterator[tuple[str, int]]:
    for name, optimizer in tracked.optimizers.items():
        for state in optimizer.state.values():
            if isinstance(state, dict):
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        yield f"{name}: {key} {tuple(value.shape)} {_dtype(value)}", _bytes(value)


def _state_to_come(tracked: Tracked, among: Among) -> int:
    """Return what optimizers will add at their first update, as far as that is known by their kind."""
    found = 0
    for name, optimizer in tracked.optimizers.items():
        sharded = tracked.sharded.get(name)
        if any(optimizer.state.values()) or (sharded is not None and any(sharded.holders)):
            continue
        owners = sharded.plan(among.members) if sharded is not None and among.members else {}
        index = 0
        for group in optimizer.param_groups:
            copies = _copies(type(optimizer).__name__, group)
            for parameter in group["params"]:
                if parameter.requires_grad and (not owners or among.own_id in owners[index]):
                    found += copies * _bytes(parameter)
                index += 1
    return found


def _copies(kind: str, group: dict[str, Any]) -> int:
    if "Adam" in kind:
        return 3 if group.get("amsgrad") else 2
    return int(bool(group.get("momentum")))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
