"""The time of a step, the memory of a worker and its CPU seconds, against DistributedDataParallel and plain loops.

python -m benchmarks.step_time                                  # everything
python -m benchmarks.step_time --quick --json step_time.json    # under five minutes
python -m benchmarks.step_time --cases mlp --workers 2 --microbatches 2
python -m benchmarks.step_time --quick --against HEAD~1         # and beside the library of another commit

With several workers there are more sides. ``compute`` is that many plain loops at once: each computes its share of
the micro-batches and the whole update, and exchanges nothing. ``in_step`` is the same with a barrier before each
update, and nothing else: what it takes longer than ``compute`` is waiting for the slowest, and that all update at the
same time, when what limits them is the memory they share. What Unisono takes longer than ``in_step`` are the sums.
``ddp_whole`` is DDP as most run it: each process computes its part of the batch in one pass, uncut. ``--sides`` chooses
others, those of `benchmarks.peers` among them; one that is not installed or fails is left out, and the result says why.

All sides train the same model on the same data with the same optimizer, one thread a worker. They are started together
and take turns, a block of steps each; who is not on turn waits without using the processor. So what else happens on the
machine hits all sides alike, and each ratio is taken between neighbours in time. The side ``before`` is
another commit's library, trained by that commit's own `benchmarks.sides`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from benchmarks.models import CASES
from benchmarks.peers import PEERS, missing
from benchmarks.report import median_interval, print_table, write_json
from benchmarks.same_as import checked_out

ROOT = Path(__file__).resolve().parents[1]
BLOCK_S = 0.6
"""About how long a block takes; at least `LEAST_STEPS`."""
LEAST_STEPS = 3
START_S = 120.0
ANSWER_S = 300.0
"""A side that has not done its steps by then hangs."""
MEMORY_S = 1.5
LIMIT_S = {"quick": 8.0, "full": 45.0}
"""How long the sides of one comparison take turns, together."""
LEAST_TURNS = 5
OWN = "unisono"
ALONE, SEVERAL = ("plain", "ddp"), ("compute", "in_step", "ddp", "ddp_whole")
"""The sides beside Unisono, with one worker and with several."""


class SideFailed(RuntimeError):
    """A side has ended, or says nothing."""

    def __init__(self, side: str, message: str) -> None:
        super().__init__(f"{side}: {message}")
        self.side = side


@dataclass
class Block:
    """Some steps of one side."""

    step_s: float
    """The median."""
    cpu_s: float
    """Of all its processes, per step."""


@dataclass
class Team:
    """The processes of one side."""

    name: str
    processes: list[subprocess.Popen[bytes]]
    pipes: list[Connection] = field(default_factory=list)  # by rank
    pids: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    peak_bytes: float = 0.0
    """Of a worker."""
    share_bytes: float = 0.0
    """Of all processes of the side together, by worker."""
    workers_steady_bytes: float = 0.0
    """Of all workers together, between two steps."""
    workers_peak_bytes: float = 0.0
    """Of all workers together, while they train."""

    def steps(self, number: int) -> list[float]:
        """Let all workers do steps; the times of rank 0."""
        for pipe in self.pipes:
            pipe.send(number)
        replies = [_receive(pipe, self) for pipe in self.pipes]
        times: list[float] = replies[0]["times"]
        return times

    def measure(self, number: int) -> None:
        before = self.cpu_s()
        times = self.steps(number + 1)[1:]  # the first finds cold caches: the others' turn is over
        self.blocks.append(Block(statistics.median(times), (self.cpu_s() - before) / (number + 1)))

    def measure_memory(self, seconds: float) -> None:
        """The proportional set sizes while all workers wait for their turn, and the largest ones, looked at again and
        again while they train. This process looks, and 2 ms after it has seen the last one it begins anew.
        """
        self.workers_steady_bytes = self.workers_peak_bytes = sum(map(_pss, self.pids))
        over = threading.Event()
        number = max(3, round(seconds / self.blocks[-1].step_s))

        def train() -> None:
            self.steps(number)
            over.set()

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        while not over.wait(0.002):
            sizes = {pid: _pss(pid) for process in self.processes for pid in _tree(process.pid)}
            own = [sizes.get(pid, 0.0) for pid in self.pids]
            self.peak_bytes = max(self.peak_bytes, *own)
            self.workers_peak_bytes = max(self.workers_peak_bytes, sum(own))
            self.share_bytes = max(self.share_bytes, sum(sizes.values()) / len(self.pids))
        thread.join()

    def finish(self) -> None:
        for pipe in self.pipes:
            pipe.send(0)
        for process in self.processes:
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                raise SideFailed(self.name, f"process {process.pid} has not ended after its last step") from None
            if code != 0:
                raise SideFailed(self.name, f"process {process.pid} ended with exit code {code}")

    def end(self) -> None:
        """Whatever happened: nothing is left."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in self.pipes:
            pipe.close()

    def cpu_s(self) -> float:
        """Return the CPU seconds that all processes of the side have used."""
        return sum(_cpu_s(pid) for process in self.processes for pid in _tree(process.pid))


def _receive(pipe: Connection, team: Team) -> dict[str, Any]:
    deadline = time.monotonic() + ANSWER_S
    while not pipe.poll(1.0):
        if time.monotonic() > deadline:
            raise SideFailed(team.name, f"no answer within {ANSWER_S:.0f} s")
        for process in team.processes:
            if process.poll() is not None:
                raise SideFailed(team.name, f"process {process.pid} ended with exit code {process.returncode}")
    try:
        message: dict[str, Any] = pipe.recv()
    except EOFError:
        raise SideFailed(team.name, "a process has ended") from None
    return message


def _tree(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return
    for child in children:
        yield from _tree(child)


def _cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, to the nanosecond."""
    try:
        return time.clock_gettime(((~pid) << 3) | 2)  # the kernel's number for that clock (clock_getcpuclockid)
    except OSError:
        return 0.0


def _pss(pid: int) -> float:
    """Bytes, where a page that n processes share counts 1/n."""
    with suppress(OSError):  # a helper that has ended meanwhile
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return float(line.split()[1]) * 1024
    return 0.0


@contextmanager
def teams(
    case: str, microbatches: int, workers: int, names: Sequence[str], *, same_allocator: bool, before: Path | None
) -> Iterator[list[Team]]:
    """All sides of one comparison, started and ready for their first step.

    Args:
        before: a checkout of another commit.
    """
    options = [case, *(["--keep-freed-memory"] if same_allocator else [])]
    roots = {} if before is None else {"before": before}
    sides = {name: partial(_commands, name, options, microbatches, workers) for name in [*names, *roots]}
    with started(sides, workers, roots) as ready:
        yield ready


@contextmanager
def started(
    sides: Mapping[str, Callable[[Path], list[list[str]]]],
    workers: int | Mapping[str, int],
    roots: Mapping[str, Path] | None = None,
) -> Iterator[list[Team]]:
    """Sides that take turns, started and ready for their first step.

    Args:
        sides: by name, the commands of a side, given the folder in which it may leave what it likes; its workers
            connect to the socket ``NAME.socket`` there.
        workers: of each side; or by name.
        roots: checkouts of the sides that are of another commit.
    """
    folder = Path(tempfile.mkdtemp(prefix="unisono-benchmark-"))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "UNISONO_PARENT": str(os.getpid()),
    }
    teams: list[Team] = []
    try:
        with ExitStack() as doors:
            waiting = []
            for name, commands in sides.items():
                waiting.append(doors.enter_context(Listener(str(folder / f"{name}.socket"), family="AF_UNIX")))
                teams.append(team := Team(name, []))
                root = (roots or {}).get(name, ROOT)
                paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
                log = doors.enter_context((folder / f"{name}.log").open("ab"))
                for command in commands(folder):
                    team.processes.append(
                        subprocess.Popen(
                            command,
                            cwd=root,
                            env={**environment, "PYTHONPATH": paths},
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                        )
                    )
            for team, listener in zip(teams, waiting, strict=True):
                _connect(team, listener, workers if isinstance(workers, int) else workers[team.name])
        yield teams
    except BaseException as error:
        for written in sorted(folder.glob("*.log")):
            error.add_note(f"{written.stem}:\n{written.read_text(errors='replace')[-4000:]}")
        raise
    finally:
        for team in teams:
            team.end()
        shutil.rmtree(folder, ignore_errors=True)


def _commands(side: str, options: list[str], microbatches: int, workers: int, folder: Path) -> list[list[str]]:
    cut = ["--microbatches", str(microbatches)]
    if side == "ddp_whole":
        whole = CASES[options[0]].microbatch_size * microbatches // workers
        cut = ["--microbatches", str(workers), "--microbatch-size", str(whole)]
    shared = [*options, *cut, "--control", str(folder / f"{side}.socket")]
    programs = {"compute": "plain", "in_step": "plain", "before": OWN, "ddp_whole": "ddp"}
    program = programs.get(side, side)
    this = [sys.executable, "-m", "benchmarks.sides", program, *shared]
    if program == OWN and workers > 1:
        head = [sys.executable, "-m", "unisono", "run", "-m", "benchmarks.sides", "--workers", str(workers)]
        return [[*head, "--run-dir", str(folder / side), "--", program, *shared]]
    if program == OWN:
        return [[*this, "--directory", str(folder / side)]]
    if side == "plain":
        return [this]
    meeting = [] if side == "compute" else ["--meeting", str(folder / f"{side}.meeting")]
    return [[*this, "--workers", str(workers), *meeting, "--rank", str(rank)] for rank in range(workers)]


def _connect(team: Team, listener: Listener, workers: int) -> None:
    """Wait for all workers of a side; the processes that wait for their turn are those that have said hello."""
    deadline = time.monotonic() + START_S
    # The listener's own accept would wait for ever.
    listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
    found: dict[int, tuple[Connection, int]] = {}
    waiting: list[Connection] = []
    while len(found) < workers:
        if time.monotonic() > deadline or any(process.poll() is not None for process in team.processes):
            raise SideFailed(
                team.name, f"{len(found)} of {workers} workers came within {START_S:.0f} s, or one has ended"
            )
        with suppress(TimeoutError):
            waiting.append(listener.accept())
        for pipe in list(waiting):
            if pipe.poll(0.2):
                hello = pipe.recv()
                found[hello["rank"]] = (pipe, hello["pid"])
                waiting.remove(pipe)
    team.pipes = [found[rank][0] for rank in range(workers)]
    team.pids = [found[rank][1] for rank in range(workers)]


def take_turns(
    sides: Sequence[Team],
    limit_s: float,
    measure_memory: Callable[[Team], None] = lambda team: team.measure_memory(MEMORY_S),
    least_turns: int = LEAST_TURNS,
) -> int:
    """Measure the sides in turns for a while, then their memory, and end them; returns the steps of a turn."""
    for team in sides:
        team.measure(LEAST_STEPS)  # buffers are made, DDP has rebuilt its buckets
        team.measure(LEAST_STEPS)
    number = max(LEAST_STEPS, round(BLOCK_S / min(team.blocks[-1].step_s for team in sides)))
    for team in sides:
        team.blocks.clear()
    start, turn = time.monotonic(), 0
    while turn < least_turns or time.monotonic() - start < limit_s:
        for team in sides if turn % 2 == 0 else reversed(sides):
            team.measure(number)
        turn += 1
    for team in sides:
        measure_memory(team)
    for team in sides:
        team.finish()
    return number


def compare_those_that_can(
    names: Sequence[str], measured: Callable[[Sequence[str]], dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Compare, without the peers that fail; return the result, and why each of them is left out."""
    left_out = {name: reason for name in names if (reason := missing(name))}
    while True:
        try:
            return measured([name for name in names if name not in left_out]), left_out
        except SideFailed as error:
            if error.side not in PEERS:
                raise
            notes = [line for note in getattr(error, "__notes__", []) for line in note.splitlines() if line.strip()]
            print(f"{error.side} is left out: {error}", *notes, sep="\n", file=sys.stderr, flush=True)
            left_out[error.side] = str(error)


def compare(
    case: str, microbatches: int, workers: int, names: Sequence[str], limit_s: float, *, same_allocator: bool,
    before: Path | None = None, least_turns: int = LEAST_TURNS,
) -> dict[str, Any]:  # fmt: skip
    """Let the sides take turns for a while."""
    with teams(case, microbatches, workers, names, same_allocator=same_allocator, before=before) as sides:
        number = take_turns(sides, limit_s, least_turns=least_turns)
        return {
            "case": case,
            "microbatches": microbatches,
            "workers": workers,
            "same_allocator": same_allocator,
            "steps_per_block": number,
            "step_ms": {team.name: [round(1000 * block.step_s, 3) for block in team.blocks] for team in sides},
            "cpu_ms": {team.name: [round(1000 * block.cpu_s, 3) for block in team.blocks] for team in sides},
            "peak_mib": {team.name: round(team.peak_bytes / 2**20, 1) for team in sides},
            "share_mib": {team.name: round(team.share_bytes / 2**20, 1) for team in sides},
        }


def figures_of(result: dict[str, Any]) -> tuple[dict[str, float], list[list[str]]]:
    """The named figures of one comparison, and its rows for the table."""
    name = result["case"] + ("" if result["microbatches"] == 2 else f"_m{result['microbatches']}")
    workers, step, cpu = result["workers"], result["step_ms"], result["cpu_ms"]
    memory, whole = result["peak_mib"], result["share_mib"]
    figures: dict[str, float] = {}
    rows = []
    for other in step:
        if other == OWN:
            continue
        ratio = median_interval([a / b for a, b in zip(step["unisono"], step[other], strict=True)])
        cpu_ratio = statistics.median(a / b for a, b in zip(cpu["unisono"], cpu[other], strict=True))
        place = name if other == "plain" else f"{name}.{workers}"
        figures[f"ratio_to_{other}.{place}"] = ratio.median
        figures[f"ratio_to_{other}_low.{place}"] = ratio.low
        figures[f"ratio_to_{other}_high.{place}"] = ratio.high
        figures[f"memory_to_{other}.{place}"] = memory["unisono"] / memory[other]
        figures[f"whole_memory_to_{other}.{place}"] = whole["unisono"] / whole[other]
        figures[f"cpu_to_{other}.{place}"] = cpu_ratio
        rows.append(
            [
                name,
                str(workers),
                other,
                f"{statistics.median(step['unisono']):.1f}",
                f"{statistics.median(step[other]):.1f}",
                str(ratio),
                f"{statistics.median(cpu['unisono']):.0f} / {statistics.median(cpu[other]):.0f}",
                f"{memory['unisono']:.0f} / {memory[other]:.0f}",
                f"{whole['unisono']:.0f} / {whole[other]:.0f}",
            ]
        )
    return figures, rows


HEADER = (
    "case",
    "workers",
    "against",
    "step ms",
    "theirs",
    "ratio (95%)",
    "CPU ms a step",
    "peak MiB a worker",
    "with all else",
)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer turns; one worker with the fewest micro-batches only"
    )
    parser.add_argument("--json", metavar="FILE", help="write figures, machine, commit and all turns")
    parser.add_argument("--cases", default=",".join(CASES), metavar="A,B")
    parser.add_argument("--workers", type=_numbers, default=[1, 2], metavar="N,N")
    parser.add_argument("--microbatches", type=_numbers, default=[2, 8], metavar="M,M", help="cuts of a global batch")
    parser.add_argument("--seconds", type=float, help="how long the sides of one comparison take turns")
    parser.add_argument("--turns", type=int, default=LEAST_TURNS, help="at least so many")
    everybody = [*dict.fromkeys([*ALONE, *SEVERAL, *PEERS])]
    parser.add_argument("--sides", metavar="A,B", help=f"beside Unisono, of {', '.join(everybody)}")
    parser.add_argument(
        "--same-allocator",
        action="store_true",
        help="let all sides keep freed memory, which the library does by itself and the others by default do not",
    )
    parser.add_argument("--against", metavar="COMMIT", help="one more side: the library of this commit")
    options = parser.parse_args(arguments)
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if unknown := {*filter(None, (options.sides or "").split(","))} - {*everybody}:
        parser.error(f"unknown sides {', '.join(sorted(unknown))}; there are {', '.join(everybody)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was made is removed
    limit_s = options.seconds or LIMIT_S["quick" if options.quick else "full"]
    with tempfile.TemporaryDirectory(prefix="unisono-before-") as name:
        before = checked_out(options.against, Path(name)) if options.against else None
        _measure(options, limit_s, before, parser)


def _measure(options: argparse.Namespace, limit_s: float, before: Path | None, parser: argparse.ArgumentParser) -> None:
    runs, figures, rows, left_out = [], {}, [], dict[str, str]()
    for case in options.cases.split(","):
        for workers in options.workers:
            names = [OWN, *(options.sides.split(",") if options.sides else SEVERAL if workers > 1 else ALONE)]
            for microbatches in options.microbatches:
                if options.quick and workers == 1 and microbatches > min(options.microbatches):
                    continue
                if microbatches % workers:
                    parser.error(
                        f"{microbatches} micro-batches cannot be shared evenly by {workers} workers, which DDP needs"
                    )
                measured = partial(
                    compare, case, microbatches, workers, limit_s=limit_s, same_allocator=options.same_allocator,
                    before=before, least_turns=options.turns,
                )  # fmt: skip
                result, without = compare_those_that_can([each for each in names if each not in left_out], measured)
                left_out.update(without)
                found, lines = figures_of(result)
                runs.append(result)
                figures.update(found)
                rows += lines
                for line in lines:
                    print("  ".join(line), file=sys.stderr, flush=True)
    print_table(HEADER, rows)
    if options.json:
        write_json(options.json, figures, runs, left_out)


if __name__ == "__main__":
    main()
