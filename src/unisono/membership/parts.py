"""Which part of the model each worker has, where a run has groups of several workers (`Policy.parts`).

A worker gets its part when it is ordered, and keeps it: the part that the fewest workers have. So the replacement of a
lost worker gets the lost part, and workers that are ordered together fill groups. Numbers of workers need not be
multiples of those of parts: the last group is then incomplete, and its workers stay.

With one part, every worker has the whole model, and each rule here is that of single workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.core.policy import Policy
from unisono.membership.roster import ALIVE, State, Worker, WorkerState

__all__ = ["bare_parts", "next_parts", "numbers_of", "part_of", "room_beside", "to_admit", "twins_of"]

_COUNTS = ALIVE | {WorkerState.FINISHED}


def numbers_of(workers: Iterable[Worker], num_parts: int) -> list[int]:
    """Return how many of these workers each part has."""
    numbers = [0] * num_parts
    for worker in workers:
        numbers[worker.part] += 1
    return numbers


def bare_parts(workers: Iterable[Worker], num_parts: int) -> list[int]:
    """Return the parts that none of these workers has."""
    return [part for part, number in enumerate(numbers_of(workers, num_parts)) if not number]


def next_parts(state: State, num_workers: int) -> list[int]:
    """Return the parts of so many new workers: each gets the one that the fewest have, the lowest of these.

    Those that leave do not count. Those that have finished do: nobody takes their place.
    """
    counts = (w for w in state.workers.values() if w.state in _COUNTS and not w.draining)
    numbers = numbers_of(counts, state.policy.parts)
    found = []
    for _ in range(num_workers):
        part = numbers.index(min(numbers))
        numbers[part] += 1
        found.append(part)
    return found


def part_of(state: State, worker_id: str) -> int:
    """Return the part of a worker; for one that nobody has ordered, the part that it gets with its hello."""
    worker = state.workers.get(worker_id)
    return worker.part if worker is not None else next_parts(state, 1)[0]


def twins_of(worker: Worker, workers: Iterable[Worker]) -> list[Worker]:
    """Return those that can compute what a worker computes: the others that have its part."""
    return [other for other in workers if other.part == worker.part and other.worker_id != worker.worker_id]


def room_beside(staying: Sequence[Worker], policy: Policy) -> int:
    """Return how many more workers there may be than these; negative: there are too many.

    A part that lacks workers has room for them, whatever the others have too many.
    """
    free = policy.maximum - len(staying)
    return max(free, _missing(numbers_of(staying, policy.parts), policy)) if policy.parts > 1 else free


def to_admit(staying: Sequence[Worker], ready: Sequence[Worker], policy: Policy) -> list[Worker]:
    """Return which of the workers that are ready become members beside these: those first whose part has the fewest.

    None takes the room of a part that lacks workers.
    """
    if policy.parts == 1:
        return list(ready[: max(policy.maximum - len(staying), 0)])
    numbers = numbers_of(staying, policy.parts)
    waiting = [[worker for worker in reversed(ready) if worker.part == part] for part in range(policy.parts)]
    found: list[Worker] = []
    while left := [part for part, workers in enumerate(waiting) if workers]:
        part = min(left, key=numbers.__getitem__)
        is_needed = numbers[part] < policy.groups
        if not is_needed and sum(numbers) + _missing(numbers, policy) >= policy.maximum:
            break
        numbers[part] += 1
        found.append(waiting[part].pop())
    return sorted(found, key=lambda worker: worker.number)


def _missing(numbers: Iterable[int], policy: Policy) -> int:
    """Return how many workers the parts lack that have fewer than there are whole groups."""
    return sum(max(policy.groups - number, 0) for number in numbers)
