"""Directories of runs as a training would leave them, small and of any kind, for tests of what shows them.

Lines, index, and records by worker and machine are written by the classes that write them in a run.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.core.events import (
    Announcement,
    CheckpointWritten,
    EvaluationFinished,
    Event,
    GpuUse,
    Interruption,
    MachineJoined,
    MachineUsed,
    MembershipChanged,
    Problem,
    RunEnded,
    RunStarted,
    Seconds,
    StepFinished,
    WorkerGone,
    WorkerJoined,
    WorkerTimes,
    WorkerUse,
)
from unisono.record.journal import JOURNAL, Journal, truncate
from unisono.record.journal.newest import Newest
from unisono.record.rundir import RUN_FILE, USE_FILE

__all__ = ["BEGAN", "HOSTILE", "Recording", "record"]

HOSTILE: Final = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u202e\x1b[31m"
"""What a name, a log or an error may hold."""
BEGAN: Final = 1_790_000_000.0


@dataclass
class Recording:
    """A run that is being made up.

    Args:
        bad: put into every text.
        nan_at: the step whose loss is not a number; -1: none.
    """

    directory: Path
    num_workers: int = 4
    num_hosts: int = 2
    num_steps: int = 600
    seed: int = 0
    bad: str = ""
    nan_at: int = -1
    num_gpus: int = 0
    story: list[Event] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.hosts = [f"node-{number:02}{self.bad}" for number in range(self.num_hosts)]
        self._host_of: dict[str, str] = {}
        self._slowness: dict[str, float] = {}
        self._generation = 0
        self._now = BEGAN
        self.directory.mkdir(parents=True)
        self._journal = Journal(self.directory / JOURNAL)
        self._journal.start(writer=True)
        self._use = Newest(self.directory / USE_FILE)

    def begin(self) -> None:
        """Describe the run, and let its machines and workers come."""
        recipe: dict[str, int | bool | str] = {
            "batch_size": 256,
            "microbatches": 2 * self.num_workers,
            f"note{self.bad}": self.bad or "none",
        }
        facts = {
            "schema": 1,
            "run_id": f"made-up-{self.seed}{self.bad}",
            "recipe": recipe,
            "command": {"folder": "/", "arguments": [f"train.py{self.bad}", "--lr", "0.002"]},
            "environment": {"python": "3.11.9", "torch": "2.6.0", "hosts": self.hosts},
        }
        (self.directory / RUN_FILE).write_text(json.dumps(facts))
        run_id = str(facts["run_id"])
        self.story.append(RunStarted(time=BEGAN, run_id=run_id, directory=str(self.directory), step=0, recipe=recipe))
        for number, host in enumerate(self.hosts):
            self.story.append(MachineJoined(time=BEGAN, agent_id=f"a{number}", host=host, num_workers=self.num_workers))
        for number in range(self.num_workers):
            self._join(self.hosts[number * self.num_hosts // self.num_workers], 0, f"the run begins{self.bad}")
        self._slowness[self.ids[-1]] = 1.5
        self._change("the run begins")

    def steps(self, first: int, last: int) -> None:
        """Train these steps. After a third of the run a worker is lost, and soon after it another one comes."""
        lost_at = self.num_steps // 3
        back_at = lost_at + max(2, self.num_steps // 20)
        for step in range(first, last):
            if self.num_workers > 1 and step == lost_at:
                self._lose(step)
            if self.num_workers > 1 and step == back_at:
                self._recover(step)
            self._step(step)
            if self.num_workers > 1 and step in (lost_at, back_at):
                self._interrupt(step)
            if step and step % 100 == 0:
                self.story.append(CheckpointWritten(time=self._now, step=step, bytes=44_700_000, seconds=0.38))
            if step % 100 == 99:
                totals = {"accuracy": 0.9 - 0.5 * math.exp(-step / self.num_steps)}
                self._journal.emit(EvaluationFinished(time=self._now, step=step + 1, totals=totals))
            if step % max(1, self.num_steps // 200) == 0:
                self._measure(is_told=step + max(1, self.num_steps // 200) >= self.num_steps)
        self.save()

    def back_to(self, step: int) -> None:
        """Resume the run from the checkpoint of a step: another run, in the same directory."""
        truncate(self.directory / JOURNAL, step)
        self._journal = Journal(self.directory / JOURNAL)
        self._journal.start(writer=True)
        self._journal.go_on_at(step)
        facts = json.loads((self.directory / RUN_FILE).read_text())
        (self.directory / RUN_FILE).write_text(json.dumps({**facts, "run_id": "resumed", "earlier": [facts["run_id"]]}))

    def end(self, *, ok: bool = True) -> None:
        """End the run."""
        reason = "finished" if ok else f"w1 raised ValueError: it went wrong{self.bad}"
        end = RunEnded(time=self._now, ok=ok, reason=reason, digests={"model": "ab" * 8}, step=self.num_steps - 1)
        self._journal.emit(end)
        self.story.append(end)
        self.save()

    def save(self) -> None:
        """Write what has happened besides steps."""
        lines = [msgspec.json.encode(event) + b"\n" for event in sorted(self.story, key=lambda event: event.time)]
        (self.directory / "events.jsonl").write_bytes(b"".join(lines))

    def _join(self, host: str, step: int, reason: str) -> None:
        worker_id = f"w{len(self._host_of)}{self.bad}"
        self.ids.append(worker_id)
        self._host_of[worker_id] = host
        self._slowness[worker_id] = self._random.uniform(0.9, 1.1)
        generation = self._generation + 1
        who = {"worker_id": worker_id, "host": host, "device": "cpu", "pid": 100, "generation": generation}
        self.story.append(WorkerJoined(time=self._now, step=step, reason=reason, **who))

    def _change(self, reason: str) -> None:
        self._generation += 1
        ids = tuple(self.ids)
        self.story.append(MembershipChanged(time=self._now, generation=self._generation, worker_ids=ids, reason=reason))

    def _lose(self, step: int) -> None:
        gone = self.ids.pop(0)
        reason = f"was killed by signal 9 (SIGKILL){self.bad}"
        host = self._host_of[gone]
        self.story.append(
            WorkerGone(time=self._now, worker_id=gone, host=host, how="lost", reason=reason, step=step - 1)
        )
        self._now += 0.5
        self._change(f"{gone} is lost")
        self.story.append(
            Announcement(time=self._now, text=f"the run continues with {len(self.ids)} workers{self.bad}")
        )
        self._now += 3.0

    def _recover(self, step: int) -> None:
        self._join(self.hosts[0], step, "another worker was lost")
        self._change("a worker joins")
        fresh = self.ids[-1]
        evidence = f"problems/nan-1{self.bad}.txt"
        text = f"The loss of step {step} is not a number{self.bad}"
        self.story += [
            Problem(time=self._now, problem="nan", text=text, worker_id=fresh, step=step, evidence=evidence),
        ]

    def _interrupt(self, step: int) -> None:
        about = {"generation": self._generation, "step": step, "reason": f"a worker came or went{self.bad}"}
        self.story.append(Interruption(time=self._now, seconds=3.5, **about))

    def _step(self, step: int) -> None:
        slowest = max(self.ids, key=self._slowness.__getitem__)
        times = {worker_id: self._seconds(self._slowness[worker_id]) for worker_id in self.ids}
        self._now += max(each.total() for each in times.values())
        loss = 2.3 * math.exp(-3 * step / self.num_steps) + 0.05 + abs(self._random.gauss(0, 0.05))
        is_saved = step > 0 and step % 100 == 0
        self._journal.emit(
            StepFinished(
                time=self._now,
                step=step,
                epoch=step // 100,
                loss=math.nan if step == self.nan_at else loss,
                weight=256.0,
                samples=256,
                digest="00" * 8,
                num_steps=self.num_steps,
                generation=self._generation,
                seconds=times[self.ids[0]],
                means=times[self.ids[0]],
                workers={
                    worker_id: WorkerTimes(
                        leaves=2,
                        data=spent.data,
                        compute=spent.compute,
                        last=spent,
                        waits_for="" if worker_id == slowest else slowest,
                        waits_s=spent.waiting,
                    )
                    for worker_id, spent in times.items()
                },
                logs={f"accuracy{self.bad}": 1 - loss / 3, "learning rate": 0.002 * 0.99 ** (step // 100)},
                checkpoint={"step": step, "bytes": 44_700_000, "seconds": 0.38} if is_saved else {},
                sent_bytes=1_200_000,
            )
        )

    def _seconds(self, slowness: float) -> Seconds:
        draw = self._random.uniform
        compute = 0.041 * slowness * draw(0.95, 1.08)
        return Seconds(
            data=0.004 * draw(0.6, 2.0),
            compute=compute,
            exchange=0.006 * draw(0.8, 1.3),
            network=0.007 * draw(0.7, 1.6) if self.num_hosts > 1 else 0.0,
            waiting=max(0.0, 0.052 - compute) * draw(0.7, 1.2),
            update=0.003,
            other=0.0008,
        )

    def _measure(self, *, is_told: bool) -> None:
        used = [self._used(host) for host in self.hosts]
        self._use.add([msgspec.json.encode(used)])
        if is_told:
            self.story += used

    def _used(self, host: str) -> MachineUsed:
        draw = self._random.uniform
        ids = [worker_id for worker_id in self.ids if self._host_of[worker_id] == host]
        gpu = GpuUse(utilization=draw(0.6, 0.95), memory_bytes=30_000_000_000, memory_total_bytes=80_000_000_000)
        workers: dict[str, Any] = {each: WorkerUse(cores=draw(0.8, 1.0), memory_bytes=700_000_000) for each in ids}
        return MachineUsed(
            time=self._now,
            host=host,
            cores=len(ids) * draw(0.8, 1.1),
            num_cores=16,
            memory_bytes=int(draw(8e9, 9e9)),
            memory_total_bytes=64_000_000_000,
            sent_bytes_per_s=draw(1e6, 2e7),
            received_bytes_per_s=draw(1e6, 2e7),
            gpus=[gpu] * self.num_gpus,
            workers=workers,
        )


def record(directory: Path, *, ok: bool = True, **about: Any) -> Path:
    """Make the directory of a whole run, and return it.

    Args:
        about: as for `Recording`.
    """
    recording = Recording(directory, **about)
    recording.begin()
    recording.steps(0, recording.num_steps)
    recording.end(ok=ok)
    return directory
