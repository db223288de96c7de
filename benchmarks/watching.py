"""What it costs to watch a run: processor time with everything that watches all the time, against none of it.

python -m benchmarks.watching                                # about ten minutes
python -m benchmarks.watching --quick --json watching.json   # two
python -m benchmarks.watching --compute                      # steps compute instead of sleeping: four free cores

Two runs with two workers each take turns, a block of steps each, at 50 steps/s; so what else happens on the machine
hits both alike. Processor time is that of all processes of a run (agent, head, workers; user and system), and of each
of their threads: `aside_ms` is that of all but the training loops, for each step. One side is
watched: the live view in a terminal, the journal with its index and times, events, machine use, a page that is attached
over a WebSocket, and Prometheus every 15 s. For the other one, the variable UNISONO_WATCH=0 turns all of it off at its
sources.

The figure `overhead` is the median of the ratios of neighbouring blocks, for a training that keeps its workers busy: a
step takes 20 ms of processor time on each. With --compute it really does. By default a step sleeps for this time, and
the 20 ms are added to both sides, because on a machine that is busy otherwise fewer steps a second would be done, and
each would bear a larger part of what is done once a second.
"""

from __future__ import annotations

import argparse
import os
import pty
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from torch.utils.data import TensorDataset

import unisono
from benchmarks.report import median_interval, print_table, write_json
from benchmarks.sides import Control
from benchmarks.step_time import ROOT, Team, _connect, _tree
from unisono.cli.reach import find
from unisono.cluster.head.client import Watching
from unisono.cluster.trust.invitation import Invitation
from unisono.system.lifetime import bind_to_parent

STEP_S = 0.02
"""Wall time of a step, and its processor time on each worker."""
WORKERS = 2
SCRAPE_S = 15.0
BLOCK_S = 7.5
"""A block holds every part of what is done once a second, and each second block a scrape."""
BLOCKS = {"quick": 8, "full": 40}
PROCESSES = {"head": "unisono.cluster.head", "reader": "unisono.views.page.reader", "nursery": "unisono.script.nursery"}
"""By name, the module of a process that computes nothing."""
SIZE = (40, 160)
"""Lines and columns of the terminal."""


def train(control: str, *, computes: bool) -> None:
    """A training of 50 steps/s.

    Args:
        computes: a step takes as much processor time, exactly; else it sleeps.
    """
    bind_to_parent(signal.SIGKILL)
    pipe = Control(control)
    with unisono.Run(seed=1) as run:
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        data = TensorDataset(torch.randn(4096, 64))
        ready = False
        for step in run.steps(data, batch_size=16, microbatches=WORKERS, epochs=1 << 20):
            if not ready:
                pipe.hello(run.rank)
                ready = True
            if not pipe.go_on():
                break
            began, due = time.thread_time(), time.monotonic() + STEP_S
            for (inputs,) in step:
                step.backward(model(inputs).square().mean())
            if not computes:
                time.sleep(max(0.0, due - time.monotonic()))
            while (
                computes and time.thread_time() - began < STEP_S
            ):  # not in a micro-batch, of which one worker may compute both
                torch.mm(model.weight.detach(), model.weight.detach())
            optimizer.step()
            step.log(learning_rate=0.01)


# -- what watches -------------------------------------------------------------------------------------


@contextmanager
def terminal() -> Iterator[int]:
    """A terminal that somebody looks at; yields its file descriptor."""
    import fcntl
    import struct
    import termios

    screen, own = pty.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))

    def look() -> None:
        with suppress(OSError):
            while os.read(screen, 1 << 16):
                pass

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield own
    finally:
        os.close(own)
        os.close(screen)


def scrape(invitation: Invitation, over: threading.Event) -> Iterator[int]:
    """Be Prometheus; yields the number of samples that it got each time."""
    url = invitation.url.replace("ws", "http", 1).rstrip("/")
    while not over.wait(SCRAPE_S):
        token = invitation.for_looking.token
        request = Request(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
        with urlopen(request, timeout=SCRAPE_S) as answer:
            yield sum(not line.startswith(b"#") for line in answer.read().splitlines())


def attach(invitation: Invitation, over: threading.Event) -> Iterator[int]:
    """Be a page; yields 1 for each push."""
    with Watching(invitation) as page:
        while not over.is_set():
            if page.next(1.0) is not None:
                yield 1


class Spectator(threading.Thread):
    """Somebody who watches, in this process: the time that it takes is no time of the run.

    Attributes:
        seen: the sum of what ``work`` has yielded.
        error: what it has ended with too early; None: nothing.
    """

    def __init__(
        self, work: Callable[[Invitation, threading.Event], Iterator[int]], run_dir: Path, over: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self.seen = 0
        self.error: Exception | None = None
        self._work, self._run_dir, self._over = work, run_dir, over

    def run(self) -> None:
        try:
            for number in self._work(find(str(self._run_dir)), self._over):
                self.seen += number
        except Exception as error:
            self.error = error


# -- two runs that take turns ---------------------------------------------------------------------------


@contextmanager
def sides(*, computes: bool) -> Iterator[tuple[Team, Team]]:
    """The two runs, ready for their first step that counts; the first one is watched.

    Raises:
        RuntimeError: nobody has watched it.
    """
    folder = Path(tempfile.mkdtemp(prefix="unisono-benchmark-"))
    over = threading.Event()
    teams = {name: Team(name, []) for name in ("watched", "unwatched")}
    try:
        with ExitStack() as doors:
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "UNISONO_PARENT": str(os.getpid()),
                "TERM": "xterm-256color",
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            for name, team in teams.items():
                control = folder / f"{name}.socket"
                listener = doors.enter_context(Listener(str(control), family="AF_UNIX"))
                command = [sys.executable, "-m", "unisono", "run", "-m", "benchmarks.watching"]
                command += ["--workers", str(WORKERS), "--run-dir", str(folder / name), "--", "--train", str(control)]
                command += ["--compute"] if computes else []
                if name == "watched":
                    out: Any = doors.enter_context(terminal())
                    own = environment
                else:
                    out = doors.enter_context((folder / "log").open("ab"))
                    own = {**environment, "UNISONO_WATCH": "0"}
                team.processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=own, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
                )
                _connect(team, listener, WORKERS)
            spectators = [Spectator(work, folder / "watched", over) for work in (attach, scrape)]
            for spectator in spectators:
                spectator.start()
            yield teams["watched"], teams["unwatched"]
            over.set()
            for spectator in spectators:
                spectator.join(2 * SCRAPE_S)
                if spectator.error is not None or not spectator.seen:
                    raise RuntimeError(f"nobody has watched: {spectator.error!r}")
            for team in teams.values():
                team.finish()
    finally:
        over.set()
        for team in teams.values():
            team.end()
        shutil.rmtree(folder, ignore_errors=True)


class Parts:
    """Processor time of a run, by what each process is and by its threads: as the kernel has it, to the nanosecond."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._names: dict[int, str] = {}
        self._before = self._now()
        self._num_steps = 0
        self.ms: dict[str, float] = {}
        """Per step."""

    def count(self, num_steps: int) -> None:
        """Add what was used since the last call, in which so many steps were done; 0: it does not count."""
        now = self._now()
        self._num_steps += num_steps
        if num_steps:
            for thread, (name, ms) in now.items():
                used = ms - self._before.get(thread, (name, 0.0))[1]
                self.ms[name] = self.ms.get(name, 0.0) + used
        self._before = now

    def per_step(self) -> dict[str, float]:
        return {name: round(value / max(1, self._num_steps), 4) for name, value in sorted(self.ms.items())}

    def _now(self) -> dict[int, tuple[str, float]]:
        """Return, by thread, what it is and its milliseconds so far."""
        (process,) = self._team.processes
        found = {}
        for pid in _tree(process.pid):
            if pid not in self._names:
                self._names[pid] = self._name(pid, process.pid)
            with suppress(OSError):  # what has ended meanwhile
                for task in Path(f"/proc/{pid}/task").iterdir():
                    thread = "" if task.name == str(pid) else (task / "comm").read_text().strip()
                    nanoseconds = int((task / "schedstat").read_text().split()[0])
                    name = f"{self._names[pid]}: {thread}" if thread else self._names[pid]
                    found[int(task.name)] = name, nanoseconds / 1e6
        return found

    def _name(self, pid: int, agent: int) -> str:
        if pid == agent:
            return "agent"
        if pid in self._team.pids:
            return "first worker" if pid == self._team.pids[0] else "other workers"
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            return next((name for name, module in PROCESSES.items() if module in words), "other")
        return "other"


def measure(num_blocks: int, *, computes: bool) -> dict[str, Any]:
    """Let the two runs take turns."""
    steps = round(BLOCK_S / STEP_S)
    with sides(computes=computes) as (watched, unwatched):
        pair = [watched, unwatched]
        for team in pair:
            team.measure(steps // 2)  # what is imported at the first use, is
            team.blocks.clear()
        parts = {team.name: Parts(team) for team in pair}
        for number in range(num_blocks):
            for team in pair if number % 2 == 0 else reversed(pair):
                parts[team.name].count(0)
                team.measure(steps)
                parts[team.name].count(steps + 1)
            print(
                f"block {number + 1} of {num_blocks}: "
                + ", ".join(f"{team.name} {1000 * team.blocks[-1].cpu_s:.3f} ms" for team in pair),
                file=sys.stderr,
                flush=True,
            )
        return {
            "steps_per_block": steps,
            "computes": computes,
            "cpu_ms": {team.name: [round(1000 * block.cpu_s, 4) for block in team.blocks] for team in pair},
            "by_process_ms": {name: each.per_step() for name, each in parts.items()},
            "step_ms": {team.name: [round(1000 * block.step_s, 3) for block in team.blocks] for team in pair},
        }


def figures_of(result: dict[str, Any]) -> tuple[dict[str, float], list[list[str]]]:
    """The figures, and a row of the table for each."""
    computing = 0.0 if result["computes"] else 1000 * STEP_S * WORKERS
    watched, unwatched = ([ms + computing for ms in result["cpu_ms"][name]] for name in ("watched", "unwatched"))
    ratio = median_interval([one / other for one, other in zip(watched, unwatched, strict=True)])
    wall = result["step_ms"]
    times = median_interval([one / other for one, other in zip(wall["watched"], wall["unwatched"], strict=True)])
    figures = {
        "overhead": ratio.median,
        "overhead_low": ratio.low,
        "overhead_high": ratio.high,
        "step_time_ratio": times.median,
        "watched_cpu_ms": statistics.median(watched),
        "unwatched_cpu_ms": statistics.median(unwatched),
        "steps_per_s": 1000 / statistics.median(wall["watched"]),
    }
    rows = [["overhead", str(ratio)], ["step time", str(times)]]
    rows += [[name, f"{figures[name]:.3f}"] for name in ("watched_cpu_ms", "unwatched_cpu_ms", "steps_per_s")]
    by_process = result["by_process_ms"]
    for name in sorted({*by_process["watched"], *by_process["unwatched"]}):
        more = by_process["watched"].get(name, 0.0) - by_process["unwatched"].get(name, 0.0)
        used = by_process["watched"].get(name, 0.0)
        figures[f"ms_{_figure(name)}"], figures[f"more_ms_{_figure(name)}"] = used, more
        rows.append([f"{name}: ms, and more than unwatched", f"{used:.3f}, {more:.3f}"])
    aside = sum(ms for name, ms in by_process["watched"].items() if not _sums(name))
    figures["aside_ms"] = aside
    rows.append(["all but the threads that sum (ms)", f"{aside:.3f}"])
    return figures, rows


def _figure(name: str) -> str:
    return "_".join(name.replace(":", "").replace("-", " ").split())


def _sums(name: str) -> bool:
    """Return whether a thread is that of a training loop, or one of torch's in its process."""
    process, _, thread = name.partition(": ")
    return process.endswith(("worker", "workers")) and not thread.startswith("unisono")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer blocks")
    parser.add_argument("--json", metavar="FILE", help="write figures, machine, commit and all blocks")
    parser.add_argument("--blocks", type=int, help="of each side")
    parser.add_argument("--compute", action="store_true", help="steps compute, and do not sleep")
    parser.add_argument("--train", metavar="SOCKET", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train:
        train(options.train, computes=options.compute)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was made is removed
    result = measure(options.blocks or BLOCKS["quick" if options.quick else "full"], computes=options.compute)
    figures, rows = figures_of(result)
    print_table(("figure", "value"), rows)
    if options.json:
        write_json(options.json, figures, [result])


if __name__ == "__main__":
    main()
