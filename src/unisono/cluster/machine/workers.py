"""The workers of one machine: the agent's children that compute, and the GPU and the cores that each has for itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from unisono.cluster.machine.children import NOT_STARTED, TERMINATE_S, Child, Listener
from unisono.cluster.machine.placement import PLACEMENTS, start_method
from unisono.cluster.worker.beatpage import BeatPage, BeatSlot
from unisono.core.messages import WorkerExit
from unisono.core.spec import MachineSpec, WorkerSpec
from unisono.core.words import count, listed
from unisono.record.problems.kinds import place_of_dump
from unisono.record.problems.limits import Kills
from unisono.system import seats
from unisono.system.capacity import machine_cores, machine_gpus
from unisono.system.lifetime import Memory

__all__ = ["NO_GPU", "Places", "WorkerProcesses", "machine_label"]

NO_GPU: Final = -1


def machine_label() -> str:
    """Return a label that is equal for processes that can share memory: host name, kernel, process namespace."""
    marks = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            marks.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())
    return f"{socket.gethostname()}-{hashlib.blake2b(' '.join(marks).encode(), digest_size=8).hexdigest()}"


FORGET_S: Final = 0.05
MOST_QUOTED: Final = 16
FEW_LINES: Final = 10


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
            whose = f", and {len(taken)} of them {'is' if len(taken) == 1 else 'are'} used by other runs (pid " + (
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


class _Delayed(msgspec.Struct, frozen=True):
    timer: asyncio.TimerHandle


class _Starting(msgspec.Struct, frozen=True):
    local_rank: int
    is_evicted: bool = False


class _Started(msgspec.Struct, frozen=True):
    """Running, or ended: `Child.exit_code` says which."""

    local_rank: int
    child: Child

    @property
    def is_running(self) -> bool:
        return self.child.exit_code is None


class _Evicted(msgspec.Struct, frozen=True):
    """Evicted before its start, and so never started."""


_State = _Delayed | _Starting | _Started | _Evicted


class WorkerProcesses:
    """Starts the workers of a machine, reports their ends, ends them.

    Args:
        spec: the machine's part of the run.
        head: the head's address.
        host: label of this machine: equal for workers that can share memory.
        secret: the run's token.
        on_exit: receives the end of a worker's process, or why the process could not be started.
    """

    def __init__(
        self,
        spec: MachineSpec,
        *,
        head: str,
        host: str,
        secret: Memory,
        listener: Listener,
        on_exit: Callable[[WorkerExit], None],
    ) -> None:
        self._spec = spec
        self._head = head
        self._where: Memory | None = None  # the address of the head that the workers are to follow
        self._host = host
        self._on_exit = on_exit
        self._placement = PLACEMENTS[start_method(spec.run)](spec.run, secret, listener, self._report)
        self._listener = listener
        self._places = Places(spec.run.threads)
        self._beats: BeatPage | None = None  # made for the first worker
        self._states: dict[str, _State] = {}
        self._is_closing = False
        self._kills = Kills()

    def open(self) -> None:
        """Start the processes that workers are forked from.

        Raises:
            OSError, UsageError: see `Spawn.open`.
        """
        self._where = Memory("unisono-where")
        self.follow(self._head)
        number = self._spec.num_workers
        reserved = 0 if self._spec.condition else number + self._spec.num_evaluators
        if words := self._places.reserve(reserved):
            self._listener.on_notice(words)
        if number:
            self._placement.open()

    def follow(self, url: str) -> None:
        """Have the workers follow the head at this address; "": those that are not connected wait for one."""
        self._head = url or self._head
        if self._where is not None:
            os.pwrite(self._where.descriptor, f"{url}\n".encode(), 0)

    def start(self, worker_ids: Iterable[str], delay_s: float = 0.0) -> None:
        """Start these workers, each of them once in its life: a head that follows another one may repeat an order."""
        for worker_id in worker_ids:
            if worker_id in self._states:
                continue
            if delay_s > 0:
                timer = asyncio.get_running_loop().call_later(delay_s, self._start, worker_id)
                self._states[worker_id] = _Delayed(timer)
            else:
                self._start(worker_id)

    def evict(self, worker_id: str) -> None:
        """Kill a worker. A delayed one does not start; one that is being forked is killed as soon as it is there."""
        match self._states.get(worker_id):
            case _Delayed(timer):
                timer.cancel()
                self._states[worker_id] = _Evicted()
            case _Starting(local_rank):
                self._states[worker_id] = _Starting(local_rank, is_evicted=True)
            case _Started(child=child):
                child.kill()
            case None:
                self._states[worker_id] = _Evicted()

    def gpu_of_evaluator(self, number: int) -> int:
        """Return the GPU of an evaluator of this machine, which lies behind those of its first workers."""
        return self._places.of(self._spec.num_workers + number).gpu

    def kill(self) -> None:
        """Kill all workers, with the processes that they have started."""
        for state in self._started():
            state.child.kill()

    def have_started(self) -> bool:
        """Return whether this machine has or had a running worker."""
        return bool(self._started())

    def running(self) -> list[str]:
        """Return the ids of the workers whose process has not ended."""
        return [state.child.name for state in self._started() if state.is_running]

    def processes(self) -> list[tuple[str, int]]:
        """Return the running workers: (id, process id)."""
        return [(state.child.name, state.child.pid) for state in self._started() if state.is_running]

    def last_lines(self, worker_id: str) -> dict[str, str]:
        """Return the end of the standard error of each worker that runs or has not ended well, if it has written any.

        Args:
            worker_id: comes first, with more than the others.
        """
        children = [state.child for state in self._started() if state.child.exit_code != 0]
        children.sort(key=lambda child: child.name != worker_id)
        lines = {child.name: list(child.output.more_lines) for child in children[:MOST_QUOTED]}
        return {
            name: "\n".join(found if name == worker_id else found[-FEW_LINES:])
            for name, found in lines.items()
            if found
        }

    async def ended_within(self, seconds: float) -> bool:
        """Return whether all workers have ended by themselves within this time. From now on none starts."""
        self._is_closing = True
        for state in self._states.values():
            if isinstance(state, _Delayed):
                state.timer.cancel()
        return all(await asyncio.gather(*(state.child.ended_within(seconds) for state in self._started())))

    async def forget(self) -> None:
        """Kill all workers and forget their ids: another head will order workers by ids of its own."""
        for worker_id, state in list(self._states.items()):
            if isinstance(state, _Starting):
                self._states[worker_id] = _Starting(state.local_rank, is_evicted=True)
            elif isinstance(state, _Delayed):
                state.timer.cancel()
        self.kill()
        while any(isinstance(state, _Starting) for state in self._states.values()):
            await asyncio.sleep(FORGET_S)
        await asyncio.gather(*(state.child.ended_within(TERMINATE_S) for state in self._started()))
        self._states.clear()

    async def close(self) -> None:
        """End all workers (SIGTERM, then SIGKILL), and the process that has forked them."""
        await self.ended_within(0.0)  # from now on none starts
        await asyncio.gather(*(state.child.close() for state in self._started()))
        await self._placement.close()
        seats.release()
        beats, self._beats = self._beats, None
        if beats is not None:
            beats.close()
        where, self._where = self._where, None
        if where is not None:
            where.close()

    def slots(self) -> dict[str, BeatSlot]:
        """Return the slots in which running workers leave their heartbeats, by the workers' ids."""
        if self._beats is None:
            return {}
        found = {state.child.name: self._beats.slot(state.local_rank) for state in self._started() if state.is_running}
        return {worker_id: slot for worker_id, slot in found.items() if slot is not None}

    def _report(self, child: Child) -> None:
        assert child.exit_code is not None
        words = "\n".join(child.output.last_lines) if child.exit_code != 0 else ""
        state = self._states.get(child.name)
        if child.exit_code == 0 and isinstance(state, _Started):
            self._places.give_back(state.local_rank)  # it is not replaced
        killed_for = self._kills.new() if child.exit_code == -signal.SIGKILL and not child.is_killed else ""
        limit = self._kills.limit if killed_for else None
        self._on_exit(
            WorkerExit(
                worker_id=child.name,
                exit_code=child.exit_code,
                last_output=words,
                place=place_of_dump(list(child.output.more_lines)) if child.exit_code < 0 else "",
                killed_for=killed_for,
                peak_bytes=child.peak_bytes,
                limit_bytes=limit.limit if limit is not None else 0,
                step=self._last_step(state),
            )
        )

    def _last_step(self, state: object) -> int:
        """Return the step that a worker has noted last; -1: none."""
        if self._beats is None or not isinstance(state, _Started):
            return -1
        slot = self._beats.slot(state.local_rank)
        return slot.step if slot is not None else -1

    # -- one worker ------------------------------------------------------------------------------------

    def _start(self, worker_id: str) -> None:
        if self._is_closing:
            return
        local_rank = self._free_local_rank()
        self._states[worker_id] = _Starting(local_rank)
        spec = self._worker_spec(worker_id, local_rank, self._cleared_slot(local_rank))

        def on_started(result: Child | OSError) -> None:
            state = self._states.pop(worker_id)
            assert isinstance(state, _Starting)
            if isinstance(result, OSError):
                words = f"it {NOT_STARTED.format(result)}"
                self._on_exit(WorkerExit(worker_id=worker_id, exit_code=1, last_output=words))
                return
            self._states[worker_id] = _Started(local_rank, result)
            if self._is_closing or state.is_evicted:
                result.kill()

        self._placement.start(spec, on_started)

    def _free_local_rank(self) -> int:
        """Return the smallest local rank that no worker has: a replacement takes that of the lost worker."""
        taken = {
            state.local_rank
            for state in self._states.values()
            if isinstance(state, _Starting) or (isinstance(state, _Started) and state.is_running)
        }
        return next(rank for rank in range(len(taken) + 1) if rank not in taken)

    def _cleared_slot(self, local_rank: int) -> str:
        """Prepare the slot of this local rank for another worker; return the path to all slots."""
        if self._beats is None:
            self._beats = BeatPage()
        if (slot := self._beats.slot(local_rank)) is not None:
            slot.clear()
        return self._beats.path

    def _worker_spec(self, worker_id: str, local_rank: int, beats: str) -> WorkerSpec:
        spec, host = self._spec, self._host
        if (hosts := spec.run.settings.simulate_hosts) > 1:
            host += f"-{local_rank * hosts // max(spec.num_workers, local_rank + 1)}"
        return WorkerSpec(
            run=spec.run,
            head=self._head,
            where=self._where.path if self._where is not None else "",
            worker_id=worker_id,
            host=host,
            agent=os.getpid(),
            local_rank=local_rank,
            gpu=self._places.of(local_rank).gpu,
            beats=beats,
            address=spec.address,
        )

    def _started(self) -> list[_Started]:
        return [state for state in self._states.values() if isinstance(state, _Started)]
