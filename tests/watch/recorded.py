"""Directories of runs as a training would leave them, of any size, for tests of what shows them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from unisono.events import (
    Announcement,
    EvaluationFinished,
    Event,
    GpuUse,
    LinkSlow,
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
from unisono.journal import Journal
from unisono.journal.thinning import Thinned

__all__ = ["HOSTILE", "record"]

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u202e\x1b[31m"
BEGAN = 1_790_000_000.0


def _seconds(rng: random.Random, slow: float, *, num_hosts: int) -> Seconds:
    compute = 0.041 * slow * rng.uniform(0.95, 1.08)
    return Seconds(
        data=0.004 * rng.uniform(0.6, 2.0),
        compute=compute,
        exchange=0.006 * rng.uniform(0.8, 1.3),
        network=0.007 * rng.uniform(0.7, 1.6) if num_hosts > 1 else 0.0,
        waiting=max(0.0, 0.052 - compute) * rng.uniform(0.7, 1.2),
        update=0.003,
        other=0.0008,
    )


def record(
    directory: Path,
    *,
    steps: int = 600,
    workers: int = 4,
    hosts: int = 2,
    name: str = "",
    seed: int = 0,
    ok: bool = True,
    is_over: bool = True,
    hostile: bool = False,
    nan_at: int = -1,
    gpus: int = 0,
) -> Path:
    """Write a run into a directory. One worker is lost after a third, and another joins.

    Args:
        hostile: every text in it tries to be markup.
        nan_at: the step whose loss is not a number; -1: none.
    """
    rng = random.Random(seed)
    directory.mkdir(parents=True)
    bad = HOSTILE if hostile else ""
    host = [f"node-{number:02}{bad}" for number in range(hosts)]
    ids = [f"w{number}{bad}" for number in range(workers)]
    where = {worker_id: host[number * hosts // workers] for number, worker_id in enumerate(ids)}
    recipe: dict[str, int | bool | str] = {"batch_size": 256, "microbatches": 2 * workers, "seed": 7, f"note{bad}": bad or "x"}
    facts = {
        "schema": 1,
        "run_id": f"{name or 'run'}-{seed}{bad}",
        "recipe": recipe,
        "command": {"script": f"train.py{bad}", "arguments": ["--lr", "0.002"]},
        "environment": {"python": "3.11.9", "torch": "2.6.0", "hosts": {each: {"cores": 16} for each in host}},
    }
    (directory / "run.json").write_text(json.dumps(facts))
    story: list[Event] = [RunStarted(time=BEGAN, run_id="r", directory=str(directory), step=0, recipe=recipe)]
    story += [MachineJoined(time=BEGAN + 1, agent_id=f"a{at}", host=each, num_workers=workers) for at, each in enumerate(host)]
    story += [
        WorkerJoined(
            time=BEGAN + 2, worker_id=each, host=where[each], device="cpu", pid=100, generation=1, step=0,
            reason=f"the run begins{bad}",
        )
        for each in ids
    ]
    story.append(MembershipChanged(time=BEGAN + 2, generation=1, worker_ids=tuple(ids), reason="the run begins"))
    use = Thinned(directory / "use", {})
    now, generation = BEGAN + 3, 1
    slow = {each: rng.uniform(0.9, 1.1) for each in ids}
    slow[ids[-1]] = 1.5
    lost_at, back_at = steps // 3, steps // 3 + max(2, steps // 20)
    journal = Journal(directory / "journal.jsonl")
    journal.start(writer=True)
    if True:
        for step in range(steps):
            if workers > 1 and step == lost_at:
                gone = ids.pop(0)
                generation += 1
                story += [
                    WorkerGone(time=now, worker_id=gone, host=where[gone], how="lost", reason=f"was killed by signal 9{bad}", step=step - 1),
                    MembershipChanged(time=now + 0.4, generation=generation, worker_ids=tuple(ids), reason=f"{gone} is lost"),
                    Announcement(time=now + 0.5, text=f"generation {generation} with {len(ids)} workers{bad}"),
                ]
                now += 4.0
            if workers > 1 and step == back_at:
                fresh = f"w{workers}{bad}"
                ids.append(fresh)
                where[fresh], slow[fresh] = where[gone], 1.0
                generation += 1
                story += [
                    WorkerJoined(time=now, worker_id=fresh, host=where[fresh], device="cpu", pid=101, generation=generation, step=step, reason=f"{gone} was lost"),
                    MembershipChanged(time=now, generation=generation, worker_ids=tuple(ids), reason=f"{fresh} joins"),
                    LinkSlow(time=now, source=host[0], target=host[-1], bytes_per_s=1.2e6, usual_bytes_per_s=1.1e8, seconds=0.4),
                    Problem(time=now, problem="nan", text=f"The loss of step {step} is not a number{bad}", worker_id=fresh, step=step, evidence=f"problems/nan-1{bad}.txt"),
                ]
            times = {each: _seconds(rng, slow[each], num_hosts=hosts) for each in ids}
            step_s = max(each.total() for each in times.values())
            now += step_s
            loss = 2.3 * math.exp(-3 * step / steps) + 0.05 + abs(rng.gauss(0, 0.05))
            event = StepFinished(
                time=now, step=step, epoch=step // 100, loss=math.nan if step == nan_at else loss, weight=256.0, samples=256, digest="00" * 8,
                num_steps=steps if is_over else 2 * steps, generation=generation, seconds=times[ids[0]],
                workers={
                    each: WorkerTimes(
                        leaves=2, data=spent.data, compute=spent.compute, last=spent,
                        waits_for="" if slow[each] > 1.4 else max(ids, key=slow.__getitem__), waits_s=spent.waiting,
                    )
                    for each, spent in times.items()
                },
                logs={f"accuracy{bad}": 1 - loss / 3, "learning rate": 0.002 * 0.99 ** (step // 100)},
                checkpoint={"saved": step, "directory": f"checkpoints/step-{step:010}"} if step and step % 100 == 0 else {},
                sent_bytes=1_200_000,
            )  # fmt: skip
            journal.emit(event)
            if step % 100 == 99:
                totals = {"accuracy": 0.9 - 0.5 * math.exp(-step / steps), "loss": loss * 1.1}
                evaluation = EvaluationFinished(time=now, step=step + 1, totals=totals)
                journal.emit(evaluation)
            if step % max(1, steps // 200) == 0:
                used = [_used(now, each, [i for i in ids if where[i] == each], gpus, rng) for each in host]
                use.add(now, {each.host: {k: v for k, v in msgspec.to_builtins(each).items() if k not in ("kind", "time", "host")} for each in used})
                if step + max(1, steps // 200) >= steps:
                    story += used
        if is_over:
            end = RunEnded(time=now, ok=ok, reason="finished" if ok else f"w1 raised ValueError: no{bad}", digests={"model": "ab" * 8}, step=steps - 1)
            journal.emit(end)
            story.append(end)
    journal.close()
    use.close()
    with (directory / "events.jsonl").open("w") as file:
        file.writelines(line + "\n" for line in _lines(story))
    return directory


def _lines(story: list[Event]) -> Iterator[str]:
    for event in sorted(story, key=lambda each: each.time):
        yield msgspec.json.encode(event).decode()


def _used(now: float, host: str, ids: list[str], gpus: int, rng: random.Random) -> MachineUsed:
    each: dict[str, Any] = {i: WorkerUse(cores=rng.uniform(0.8, 1.0), memory_bytes=700_000_000) for i in ids}
    return MachineUsed(
        time=now, host=host, cores=len(ids) * rng.uniform(0.8, 1.1), num_cores=16, memory_bytes=int(rng.uniform(8e9, 9e9)),
        memory_total_bytes=64_000_000_000, sent_bytes_per_s=rng.uniform(1e6, 2e7), received_bytes_per_s=rng.uniform(1e6, 2e7),
        gpus=[GpuUse(utilization=rng.uniform(0.6, 0.95), memory_bytes=30_000_000_000, memory_total_bytes=80_000_000_000)] * gpus, workers=each,
    )  # fmt: skip
