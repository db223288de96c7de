"""Which part of the model each worker has, where a run has groups of several workers (`Policy.parts`).

A worker gets its part when it is ordered, and keeps it: the part that the fewest workers have. So the replacement of a
lost worker gets the lost part, and workers that are ordered together fill groups.
"""

from __future__ import annotations

from collections.abc import Iterable

from unisono.membership.roster import ALIVE, State, Worker

__all__ = ["next_parts", "numbers_of", "part_of"]


def numbers_of(workers: Iterable[Worker], num_parts: int) -> list[int]:
    """Return how many of these workers each part has."""
    numbers = [0] * num_parts
    for worker in workers:
        numbers[worker.part] += 1
    return numbers


def next_parts(state: State, num_workers: int) -> list[int]:
    """Return the parts of so many new workers: each gets the part that the fewest have, the lowest of these."""
    numbers = numbers_of(
        (worker for worker in state.workers.values() if worker.state in ALIVE and not worker.draining),
        state.policy.parts,
    )
    found = []
    for _ in range(num_workers):
        part = min(range(len(numbers)), key=numbers.__getitem__)
        numbers[part] += 1
        found.append(part)
    return found


def part_of(state: State, worker_id: str) -> int:
    """Return the part of a worker; for one that nobody has ordered, the part that it gets with its hello."""
    worker = state.workers.get(worker_id)
    return worker.part if worker is not None else next_parts(state, 1)[0]
