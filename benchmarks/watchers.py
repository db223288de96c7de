"""What those who look at a run cost it: a training, its head, and many viewers of that head.

python -m benchmarks.watchers                                     # 1,000 in the clear, then 1,000 by TLS; seven minutes
python -m benchmarks.watchers --watchers 100 --ask-s 5 --json watchers.json

A real run of some workers trains at about 50 steps a second (each step sleeps for most of its time, so the cores are
left to who needs them). The viewers are connections to its head from a few other processes of this machine, with the
token for looking: each reads all that it is told, and asks for a series of the run every ``--ask-s`` seconds.

`steps_s`: steps a second; `head_cpu`: the head's share of one core; `head_mb`: its memory at the end; `reader_cpu`,
`reader_mb`: of the process that answers questions; `watch_cpu`: of all viewers together; `told_s`: how often a viewer
is told something, in seconds; `mb_s`: what the head sends to all viewers; `answer_ms`: from a question to its answer,
99th percentile; `attach_s`: until all viewers are connected. Then workers are killed (SIGKILL), one after the other,
each when the others train, some while nobody looks and some under the eyes of all viewers, in turns: `notice_ms`: from
the kill to the notice at the last survivor, median; `notice_90_ms`, `notice_max_ms`. At the end the head is killed, and
all viewers connect again as a page does (after about a second): `head_s`: from the kill until the next head answers,
and knows of all workers; `again_s`: until it has all viewers, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benchmarks.report import print_table, write_json

ROOT: Final = Path(__file__).resolve().parents[1]
WORKERS: Final = 4
STEP_S: Final = 0.019
TIMEOUT_S: Final = 120.0
FLAVOURS: Final = {"in the clear": ("--set", "tls=no"), "by TLS": ("--tls",)}


# -- the training ------------------------------------------------------------------------------------


def train(notes: str) -> None:
    """What a worker of the run does; it notes when it hears of a generation."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    import unisono
    from unisono.cluster.worker.member import Member

    heard = Member._notify

    def note(member: Member, notice: Any) -> None:
        if notice is not None:
            with open(notes, "a") as file:
                file.write(f"{time.time()} {member.worker_id} {notice.generation}\n")
        heard(member, notice)

    Member._notify = note  # type: ignore[method-assign,assignment]
    with unisono.Run(seed=1) as run:
        model = nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        data = TensorDataset(torch.randn(512, 64), torch.zeros(512, dtype=torch.long))
        for step in run.steps(data, batch_size=32, microbatches=8, epochs=10**6):
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            step.log(norm=float(model.weight.detach().norm()))
            time.sleep(STEP_S)


# -- the viewers -------------------------------------------------------------------------------------


async def _view(url: str, header: dict[str, str], context: Any, ask_s: float, seen: dict[str, Any]) -> None:
    """Look at the run, also at the next head."""
    from websockets.exceptions import ConnectionClosed

    while True:
        with suppress(OSError, EOFError, ConnectionClosed):
            await _view_head(url, header, context, ask_s, seen)
        await asyncio.sleep(random.uniform(0.75, 1.25))


async def _view_head(url: str, header: dict[str, str], context: Any, ask_s: float, seen: dict[str, Any]) -> None:
    from websockets.asyncio.client import connect

    options: dict[str, Any] = {
        "additional_headers": header,
        "ssl": context,
        "proxy": None,
        "ping_interval": None,
        "compression": None,
    }
    async with connect(url, max_size=None, open_timeout=TIMEOUT_S, **options) as connection:
        seen["open"] += 1
        asked_at = 0.0

        async def ask() -> None:
            nonlocal asked_at
            await asyncio.sleep(random.uniform(0, ask_s))
            number = 0
            while True:
                asked_at = time.monotonic()
                number += 1
                question = {"id": number, "get": "series", "names": ["loss", "samples_per_s"], "points": 400}
                await connection.send(json.dumps(question))
                await asyncio.sleep(ask_s)

        asking = asyncio.create_task(ask())
        try:
            async for text in connection:
                assert isinstance(text, str)
                seen["bytes"] += len(text)
                if text.startswith('{"id"'):
                    seen["answers"].append(time.monotonic() - asked_at)
                    seen["errors"] += "error" in text[:40]
                else:
                    seen["told"] += 1
        finally:
            asking.cancel()
            seen["open"] -= 1


async def _view_all(pipe: Connection, url: str, token: str, number: int, ask_s: float) -> None:
    from unisono.cluster.trust.certificate import client_context

    seen: dict[str, Any] = {"open": 0, "bytes": 0, "told": 0, "answers": [], "errors": 0}
    context = client_context() if url.startswith("wss") else None
    header = {"Authorization": f"Bearer {token}"}
    tasks = []
    for first in range(0, number, 16):
        count = min(16, number - first)
        tasks += [asyncio.create_task(_view(url, header, context, ask_s, seen)) for _ in range(count)]
        while seen["open"] < len(tasks) and not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, pipe.recv) == "count":
        pipe.send({**seen, "failed": sum(task.done() for task in tasks), "cpu": time.process_time()})
        seen["answers"] = []
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _viewers(pipe: Connection, url: str, token: str, number: int, ask_s: float) -> None:
    with suppress(EOFError):
        asyncio.run(_view_all(pipe, url, token, number, ask_s))


class Viewers:
    """Processes with many viewers."""

    def __init__(self, url: str, token: str, number: int, num_processes: int, ask_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []
        for index in range(num_processes):
            share = number // num_processes + (index < number % num_processes)
            here, there = context.Pipe()
            process = context.Process(target=_viewers, args=(there, url, token, share, ask_s), daemon=True)
            process.start()
            self._members.append((process, here))

    def count(self) -> dict[str, Any]:
        """What all of them have seen since the beginning; the answers since the last call."""
        for _, pipe in self._members:
            pipe.send("count")
        found = [pipe.recv() for _, pipe in self._members]
        total: dict[str, Any] = {key: sum(each[key] for each in found) for key in ("open", "bytes", "told", "errors")}
        total |= {key: sum(each[key] for each in found) for key in ("failed", "cpu")}
        return {**total, "answers": [seconds for each in found for seconds in each["answers"]]}

    def close(self) -> None:
        for process, pipe in self._members:
            with suppress(OSError):
                pipe.send("end")
            process.join(10)
            process.kill()


# -- what is measured --------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def memory_mb(pid: int) -> float:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
    return 0.0


def reader_of(head: int) -> int:
    """The process that answers questions for a head; 0: there is none."""
    with suppress(OSError):
        for child in Path(f"/proc/{head}/task/{head}/children").read_text().split():
            if b"unisono.views.page.reader" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return 0


@contextmanager
def training(folder: Path, tls: Sequence[str]) -> Iterator[Path]:
    """A run that goes on until the end of the ``with``; gives its directory."""
    run_dir, log = folder / "run", folder / "log"
    command = [sys.executable, "-m", "unisono", "run", "-n", str(WORKERS), "--run-dir", str(run_dir), *tls]
    command += ["--max-restarts", "1000", "-m", "benchmarks.watchers", "--", "--train", str(folder / "notes")]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
    try:
        yield run_dir
    except BaseException:
        print(log.read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def status_of(run_dir: Path) -> dict[str, Any]:
    from unisono.cli.reach import NotGoing, ask_status, find
    from unisono.core.errors import UsageError

    with suppress(NotGoing, UsageError):
        return ask_status(find(str(run_dir)))
    return {"workers": [], "step": None}


def wait_for_team(run_dir: Path, step: int) -> dict[str, Any]:
    """Return the status of the run as soon as all workers train at a later step."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found = status_of(run_dir)
        members = [worker for worker in found["workers"] if worker["state"] == "training"]
        if len(members) == WORKERS and (found["step"] or 0) > step:
            return found
        time.sleep(0.2)
    raise TimeoutError(f"the run has no {WORKERS} workers that train: {found}")


def notices(path: Path, since: float) -> dict[str, float]:
    """When each worker has first heard of a generation after a moment."""
    found: dict[str, float] = {}
    for line in path.read_text().splitlines():
        at, worker, _ = line.split()
        if float(at) > since:
            found.setdefault(worker, float(at))
    return found


def kill_one(run_dir: Path, draw: random.Random) -> float:
    """Kill a worker; return the seconds to the notice at the last survivor."""
    found = wait_for_team(run_dir, (status_of(run_dir)["step"] or 0) + 20)
    time.sleep(draw.random())
    victim = draw.choice(found["workers"])
    survivors = {worker["worker_id"] for worker in found["workers"]} - {victim["worker_id"]}
    killed_at = time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        heard = notices(run_dir.parent / "notes", killed_at)
        if survivors <= heard.keys():
            return max(heard[worker] for worker in survivors) - killed_at
        time.sleep(0.05)
    raise TimeoutError("the survivors have heard nothing")


def kill_head(run_dir: Path, head: int, viewers: Viewers, number: int) -> dict[str, float]:
    """Kill the head, and wait until all are with the next one."""
    wait_for_team(run_dir, (status_of(run_dir)["step"] or 0) + 20)
    began = time.monotonic()
    os.kill(head, signal.SIGKILL)
    members, found = 0, {"head_s": 0.0}
    while members < WORKERS:
        members = len([worker for worker in status_of(run_dir)["workers"] if worker["state"] == "training"])
        found["head_s"] = time.monotonic() - began
        if found["head_s"] > TIMEOUT_S:
            raise TimeoutError(f"the next head has {members} workers")
        time.sleep(0.02)
    while viewers.count()["open"] < number and time.monotonic() - began < TIMEOUT_S:
        time.sleep(0.05)
    return {**found, "again_s": time.monotonic() - began if number else 0.0}


def measure(tls: Sequence[str], options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures without viewers and with them, taken in turns in one run: what else the machine does is then
    the same for both.
    """
    from unisono.cli.reach import find
    from unisono.cluster.trust.invitation import HeadUrl

    alone: dict[str, float] = {}
    watched: dict[str, float] = {}
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as name, training(Path(name), tls) as run_dir:
        wait_for_team_there(run_dir)
        invitation = find(str(run_dir)).for_looking
        head = json.loads((run_dir / "head.json").read_text())["pid"]
        url = f"{HeadUrl.parse(invitation.url).place}/watch"
        draw = random.Random(1)
        nobody = Viewers(url, invitation.token, 0, 0, options.ask_s)
        for turn in range(options.rounds):
            if turn == 0:
                alone = watch(run_dir, head, nobody, 0, options.seconds) | {"head_mb": memory_mb(head)}
            times[False] += [1000 * kill_one(run_dir, draw) for _ in range(options.kills)]
            viewers = Viewers(url, invitation.token, options.watchers, options.processes, options.ask_s)
            try:
                attach_s = wait_for_viewers(viewers, options.watchers)
                if turn == 0:
                    time.sleep(options.settle_s)
                    watched = watch(run_dir, head, viewers, options.watchers, options.seconds)
                    watched["attach_s"] = attach_s
                times[True] += [1000 * kill_one(run_dir, draw) for _ in range(options.kills)]
                if turn == options.rounds - 1:
                    watched["head_mb"] = memory_mb(head)
                    watched |= kill_head(run_dir, head, viewers, options.watchers)
            finally:
                viewers.close()
        head = json.loads((run_dir / "head.json").read_text())["pid"]
        alone |= kill_head(run_dir, head, nobody, 0)
    for figures, found in ((alone, times[False]), (watched, times[True])):
        figures |= {"notice_ms": statistics.median(found), "notice_max_ms": max(found)}
        figures["notice_90_ms"] = sorted(found)[int(0.9 * len(found))]
    return alone, watched


def wait_for_viewers(viewers: Viewers, number: int) -> float:
    """Return how long it took until all viewers were connected."""
    began = time.monotonic()
    while (seen := viewers.count())["open"] < number:
        if seen["failed"] or time.monotonic() - began > TIMEOUT_S:
            raise RuntimeError(f"of {number} viewers, {seen['open']} are connected, {seen['failed']} failed")
        time.sleep(0.1)
    return time.monotonic() - began


def wait_for_team_there(run_dir: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not (run_dir / "head.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    wait_for_team(run_dir, 100)


def watch(run_dir: Path, head: int, viewers: Viewers, number: int, seconds: float) -> dict[str, float]:
    """Look for some time at a run that nothing happens to."""
    reader = reader_of(head)
    before, seen, step = time.monotonic(), viewers.count(), status_of(run_dir)["step"]
    head_s, reader_s = cpu_seconds(head), cpu_seconds(reader)
    time.sleep(seconds)
    after, told, last = time.monotonic() - before, viewers.count(), status_of(run_dir)["step"]
    answers = sorted(told["answers"])
    pushes = told["told"] - seen["told"]
    return {
        "steps_s": (last - step) / after,
        "head_cpu": (cpu_seconds(head) - head_s) / after,
        "reader_cpu": (cpu_seconds(reader_of(head)) - reader_s) / after,
        "reader_mb": memory_mb(reader_of(head)),
        "watch_cpu": (told["cpu"] - seen["cpu"]) / after,
        "told_s": after * number / pushes if pushes else 0.0,
        "mb_s": (told["bytes"] - seen["bytes"]) / 1e6 / after,
        "answers": len(answers),
        "answer_ms": 1000 * answers[int(0.99 * len(answers))] if answers else 0.0,
        "errors": told["errors"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--watchers", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2, help="that hold the viewers")
    parser.add_argument("--ask-s", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--settle-s", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=FLAVOURS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    columns: dict[str, dict[str, float]] = {}
    for name, tls in FLAVOURS.items():
        if options.only in (None, name):
            columns[f"nobody, {name}"], columns[name] = measure(tls, options)
            print(name, columns[name], columns[f"nobody, {name}"], flush=True)
    names = list(dict.fromkeys(figure for column in columns.values() for figure in column))
    rows = [
        (figure, *(f"{column[figure]:.3f}" if figure in column else "" for column in columns.values()))
        for figure in names
    ]
    print_table(("", *columns), rows)
    if options.json:
        figures = {f"{side}: {figure}": value for side, column in columns.items() for figure, value in column.items()}
        write_json(options.json, figures, [{"side": side, **column} for side, column in columns.items()])


if __name__ == "__main__":
    main()
