"""Places of a machine's workers: the GPU and the cores that each of them has for itself, as far as they are free."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from unisono.core.words import count, listed
from unisono.system import seats
from unisono.system.capacity import machine_cores, machine_gpus

__all__ = ["NO_GPU", "Places", "WorkerPlace"]

NO_GPU: Final = -1


class WorkerPlace(msgspec.Struct, frozen=True):
    """What one worker gets."""

    gpu: int
    """Number of its GPU among those that this process may use; `NO_GPU` where there is none."""
    held: tuple[str, ...]
    """The seats that it has for itself (`unisono.system.seats`)."""
    is_own: bool
    """It shares neither its GPU nor, on a machine without GPUs, its cores."""


class Places:
    """Hands out places by local rank. A replacement has the place of the lost worker.

    Workers are not bound to their cores: the kernel moves them, so that a process of another user on one core does not
    hold up one worker, and with it all others.

    Args:
        threads: CPU threads of a worker.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._gpus = machine_gpus()
        self._cores = machine_cores()
        self._places: dict[int, WorkerPlace] = {}

    def reserve(self, num_workers: int) -> str:
        """Take places for so many workers, and give back what this process has taken before and does not need.

        Returns:
            A sentence for the user if they do not get all that they need; else "".
        """
        for local_rank in range(num_workers):
            self.of(local_rank)
        needed = {name for place in self._places.values() for name in place.held}
        seats.release([name for name in (*self._gpus, *self._cores) if name not in needed])
        return self._shortage(num_workers)

    def of(self, local_rank: int) -> WorkerPlace:
        """Return the place of a worker; a free one is taken if the worker has none for itself yet."""
        place = self._places.get(local_rank)
        if place is None or not place.is_own:
            self.give_back(local_rank)
            place = self._places[local_rank] = self._find(local_rank)
        return place

    def give_back(self, local_rank: int) -> None:
        """Give the place of a worker that has left back to the machine."""
        place = self._places.pop(local_rank, None)
        if place is not None:
            seats.release(place.held)

    def _find(self, local_rank: int) -> WorkerPlace:
        given = {name for place in self._places.values() for name in place.held}
        cores = _first_free([name for name in self._cores if name not in given], self._threads)
        if not self._gpus:
            return WorkerPlace(NO_GPU, tuple(cores), is_own=len(cores) == min(self._threads, len(self._cores)))
        own = _first_free([name for name in self._gpus if name not in given], 1)
        gpu = self._gpus.index(own[0]) if own else self._shared_gpu(local_rank)
        return WorkerPlace(gpu, (*own, *cores), is_own=bool(own))

    def _shared_gpu(self, local_rank: int) -> int:
        """Return the GPU of this run that the fewest of its workers use; of others only where this run has none."""
        used = Counter(place.gpu for place in self._places.values())
        own = [place.gpu for place in self._places.values() if place.is_own]
        return min(own, key=lambda gpu: (used[gpu], gpu), default=local_rank % len(self._gpus))

    def _shortage(self, num_workers: int) -> str:
        if all(place.is_own for place in self._places.values()):
            return ""
        names = self._gpus or self._cores
        others = {name: seats.holder(name) for name in names}
        own = {name for place in self._places.values() for name in place.held}
        taken = [name for name, pid in others.items() if pid and name not in own]
        kind, needed = ("GPU", num_workers) if self._gpus else ("core", num_workers * self._threads)
        free = len(names) - len(taken)
        whose = ""
        if taken:
            pids = sorted({others[name] for name in taken})
            whose = f", and {len(taken)} of them {'is' if len(taken) == 1 else 'are'} taken by other runs (pid " + (
                f"{listed([str(pid) for pid in pids])})"
            )
        want = "wants" if num_workers == 1 else "want"
        return (
            f"{count(num_workers, 'worker')} {want} {count(needed, kind)}; this machine has {len(names)}{whose}: they "
            f"share {count(free, kind) if free else f'the {kind}s of others'}, and a step takes longer"
        )


def _first_free(names: list[str], number: int) -> list[str]:
    """Take up to so many of these seats; return those that were had."""
    found: list[str] = []
    for name in names:
        if len(found) == number:
            break
        found += seats.take([name])
    return found
