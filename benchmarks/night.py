"""Every benchmark of the documentation, one after the other on one machine, with its raw results in a file each.

    python -m benchmarks.night                      # eight hours: leave the machine alone
    python -m benchmarks.night --quick              # some 25 to 40 minutes: the same files, with less in them
    python -m benchmarks.night --only peers,recovery
    make figures                                    # tables and figures of the documentation, from the newest results

Each benchmark is a process of its own with a limit of time, and writes ``--json``. Its file in
``benchmarks/results/DATE`` has every repetition, not only what is printed, and what the figures depend on: machine,
load before and after, commit, whether tracked files differed from it, date, seconds, exit code. A benchmark that fails
or takes too long has a file that says so, and the others go on. A peer that could not take part is in the ``left_out``
of its benchmark, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.report import ROOT, commit, compact, machine, print_table

__all__ = ["BENCHMARKS", "RESULTS", "Benchmark", "arguments_of", "measure", "newest"]

RESULTS: Final = ROOT / "benchmarks" / "results"
PEERS: Final = ROOT / ".peers"
"""The environment of the packages that are only compared with, and what pip said of each (`make night`)."""
END_S: Final = 30.0
"""A benchmark that took too long has so long to end what it has started."""
QUIET: Final = 0.5
"""The machine is busy if its load is above that."""
Size = Literal["full", "quick", "smoke"]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """How a benchmark is called."""

    module: str
    full: str = ""
    quick: str = "--quick"
    smoke: str
    """Only to see that it starts and writes its file."""
    minutes: tuple[float, float]
    """About how long it takes on two cores: in full, and quick. The limit is three times that, and some minutes."""
    answers: str
    """What the documentation has from it."""


_CASES = "--cases cnn,mlp,transformer"
_PEERS = "--sides ddp,zero,fsdp2,accelerate,lightning,torchft,deepspeed"
_TINY = "--cases cnn --microbatches 2 --seconds 0.1 --turns 1"
_WIRES = "--sides unisono,ddp,plain,unisono-bf16,ddp-bf16"

BENCHMARKS: Final = {
    "step_time": Benchmark(
        module="step_time",
        full=f"{_CASES} --workers 2 --seconds 150",
        quick=f"{_CASES} --workers 2 --seconds 6 --turns 4",
        smoke=f"{_TINY} --workers 2 --sides ddp",
        minutes=(20, 4),
        answers="a step beside DDP, an uncut batch, loops in step and alone",
    ),
    "peers": Benchmark(
        module="step_time",
        full=f"{_CASES} --workers 2 --microbatches 8 --seconds 240 {_PEERS}",
        quick=f"{_CASES} --workers 2 --microbatches 8 --seconds 8 --turns 3 {_PEERS}",
        smoke=f"{_TINY} --workers 2 --sides zero",
        minutes=(18, 4),
        answers="a step beside ZeRO, FSDP2, Accelerate, Lightning, torchft, DeepSpeed",
    ),
    "one_worker": Benchmark(
        module="step_time",
        full=f"{_CASES} --workers 1 --same-allocator --seconds 60 --sides plain",
        quick=f"{_CASES} --workers 1 --microbatches 2 --same-allocator --seconds 6 --sides plain",
        smoke=f"{_TINY} --workers 1 --sides plain",
        minutes=(9, 1),
        answers="one worker beside a plain loop",
    ),
    "recovery": Benchmark(
        module="recovery", quick="--kills 4", smoke="--kills 1", minutes=(20, 2.5), answers="killed workers"
    ),
    "uneven": Benchmark(
        module="uneven",
        quick="--quick --cases two_2x,two_4x,equal",
        smoke="--quick --cases equal",
        minutes=(20, 3),
        answers="uneven workers",
    ),
    "network": Benchmark(
        module="network",
        full=f"--links 100m,100m_20ms,1g --sizes 4 --turns 12 {_WIRES}",
        quick=f"--links 100m,1g --hosts 2 --sizes 4 --turns 3 {_WIRES}",
        smoke="--links 1g --hosts 2 --sizes 4 --turns 1 --steps 2 --sides unisono,ddp",
        minutes=(15, 1.3),
        answers="hosts, 4 MB of gradients",
    ),
    "network_large": Benchmark(
        module="network",
        full=f"--links 100m,1g,10g --hosts 2 --sizes 100 --turns 8 {_WIRES}",
        quick=f"--links 1g --hosts 2 --sizes 100 --turns 3 {_WIRES}",
        smoke="--links 10g --hosts 2 --sizes 4 --turns 1 --steps 2 --sides unisono",
        minutes=(40, 2),
        answers="hosts, 100 MB of gradients",
    ),
    "network_members": Benchmark(
        module="network",
        full=f"--links 100m,1g --hosts 2 --sizes 4 --members 2 --turns 12 {_WIRES}",
        quick=f"--links 100m --hosts 2 --sizes 4 --members 2 --turns 3 {_WIRES}",
        smoke="--links 1g --hosts 2 --sizes 4 --members 2 --turns 1 --steps 2 --sides unisono",
        minutes=(8, 1),
        answers="hosts of two workers",
    ),
    "strategies": Benchmark(
        module="strategies",
        full="--settings host,1g,100m,stalls --turns 8",
        quick="--quick --settings host",
        smoke="--quick --turns 1 --settings stalls --sides unisono",
        minutes=(60, 2.5),
        answers="strategies",
    ),
    "model_parallel": Benchmark(
        module="model_parallel",
        quick="--quick --seconds 1 --width 256 --depth 8",
        smoke="--quick --seconds 0.1 --width 64 --depth 4 --sides 1x2",
        minutes=(5, 1),
        answers="models in stages",
    ),
    "loading": Benchmark(module="loading", smoke="--quick --sides unisono", minutes=(5, 0.5), answers="loading data"),
    "checkpoint": Benchmark(
        module="checkpoint",
        quick="--quick --sizes 100MB",
        smoke="--quick --sizes 100MB --rounds 1",
        minutes=(6, 0.7),
        answers="checkpoints",
    ),
    "planning": Benchmark(
        module="planning",
        quick="--cases cnn --links host --workers 1,2 --rounds 1",
        smoke="--cases cnn --links host --workers 1 --rounds 1",
        minutes=(40, 1),
        answers="forecasts, against what came",
    ),
    "planning_simulated": Benchmark(
        module="planning",
        full="--simulate 1024 --cases transformer --links 1g,10g --microbatches 12",
        quick="--simulate 8 --cases cnn --links 1g",
        smoke="--simulate 4 --cases cnn --links 1g",
        minutes=(4, 1),
        answers="where a forecast sees the end of efficiency",
    ),
    "start_time": Benchmark(
        module="start_time", full="--runs 15", quick="--runs 3", smoke="--runs 1", minutes=(6, 1.5), answers="start"
    ),
    "watching": Benchmark(
        module="watching", quick="--blocks 4", smoke="--blocks 1", minutes=(12, 1.3), answers="cost of watching"
    ),
    "membership": Benchmark(
        module="membership",
        quick="--workers 200 --agents 25 --seconds 5",
        smoke="--workers 9 --agents 3 --seconds 1 --processes 1",
        minutes=(4, 1),
        answers="1,000 workers",
    ),
    "watchers": Benchmark(
        module="watchers",
        quick="--watchers 50 --seconds 2 --settle-s 1 --kills 1 --rounds 1 --only='in the clear'",
        smoke="--watchers 2 --seconds 1 --settle-s 0.5 --kills 1 --rounds 1 --processes 1 --only='in the clear'",
        minutes=(9, 1),
        answers="1,000 viewers",
    ),
    "curves": Benchmark(module="curves", quick="", smoke="", minutes=(2, 2), answers="loss curves"),
    "quality": Benchmark(
        module="quality",
        quick="--replicas 4 --inner-steps 10 --outer average --steps 20",
        smoke="--replicas 2 --inner-steps 2 --outer average --steps 2",
        minutes=(60, 0.2),
        answers="loss of local steps",
    ),
    "staleness": Benchmark(
        module="staleness",
        full="quality",
        quick="quality --delays 0,1 --optimizers adamw --seeds 1 --steps 10",
        smoke="quality --delays 0 --optimizers adamw --seeds 1 --steps 2",
        minutes=(40, 0.2),
        answers="loss with a delay",
    ),
    "rounding": Benchmark(
        module="rounding",
        quick="--seeds 1 --steps 20 --microbatches 8 --turns 2",
        smoke="--seeds 1 --steps 2 --microbatches 8 --turns 1",
        minutes=(12, 0.3),
        answers="loss with bfloat16 on the way",
    ),
    "audits": Benchmark(
        module="audits",
        quick="--leaves 60 --cases cnn --repeats 1 --only cost",
        smoke="--cases cnn --repeats 1 --steps 70 --size 1 --only cost",
        minutes=(15, 0.5),
        answers="cost of audits",
    ),
    "messages": Benchmark(
        module="messages",
        quick="--sizes 1 --hosts 2,3",
        smoke="--sizes 1 --hosts 2,3",
        minutes=(2, 0.3),
        answers="cost of messages",
    ),
    "history": Benchmark(
        module="history",
        quick="--steps 2000 --workers 4",
        smoke="--steps 200 --workers 2",
        minutes=(6, 0.1),
        answers="long runs",
    ),
}
"""What the night measures, in this order."""


def arguments_of(benchmark: Benchmark, size: Size) -> list[str]:
    """Return the words that follow the module."""
    return shlex.split({"full": benchmark.full, "quick": benchmark.quick, "smoke": benchmark.smoke}[size])


def measure(name: str, size: Size, folder: Path) -> dict[str, Any]:
    """Run one benchmark, and write its file into the folder, whatever comes of it."""
    benchmark = BENCHMARKS[name]
    command = ["-m", f"benchmarks.{benchmark.module}", *arguments_of(benchmark, size)]
    began, load = time.monotonic(), os.getloadavg()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="unisono-night-") as scratch:
        raw = Path(scratch, "raw.json")
        code, printed = _run([sys.executable, *command, "--json", str(raw)], _limit_s(benchmark, size), Path(scratch))
        told = json.loads(raw.read_text()) if raw.exists() else {}
    status = "late" if code is None else "measured" if code == 0 and told else "failed"
    here = told.get("commit") or commit()
    result = {
        "benchmark": name,
        "answers": benchmark.answers,
        "command": " ".join(["python", *command]),
        "size": size,
        "status": status,
        "reason": "" if status == "measured" else printed[-2000:],
        "exit_code": code,
        "date": now,
        "seconds": round(time.monotonic() - began, 1),
        "load": {"before": [*load], "after": [*os.getloadavg()]},
        "machine": told.get("machine") or machine(),
        "commit": here.removesuffix("+"),
        "clean": not here.endswith("+"),
        "left_out": {side: _why(side, reason) for side, reason in told.get("left_out", {}).items()},
        "figures": told.get("figures", {}),
        "runs": told.get("runs", []),
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = compact(result)
    for path in (scratch, ROOT):  # of this machine, and of no use to a reader
        text = text.replace(f"{path}/", "")
    (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return result


def _limit_s(benchmark: Benchmark, size: Size) -> float:
    return 60 * (3 * benchmark.minutes[size != "full"] + 5)


def _run(command: Sequence[str], limit_s: float, scratch: Path) -> tuple[int | None, str]:
    """Run a command; return its exit code, or None if it took too long, and what it printed."""
    log = scratch / "log"
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
    return code, log.read_text(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the processes that a benchmark has left, if any."""
    if process.poll() is None:
        process.terminate()  # so that it ends what it has started
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _why(side: str, reason: str) -> str:
    """Add to the reason what pip said when the package could not be installed."""
    log = PEERS / f"{side.split()[0]}.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line.strip() for line in lines if "error" in line.lower()]
    return f"{reason}; pip: {errors[-1]}" if errors and "not installed" in reason else reason


def newest(results: Path = RESULTS, *, sizes: Sequence[Size] = ("full", "quick")) -> dict[str, dict[str, Any]]:
    """Return by benchmark the result that was measured last, without those that failed."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(results.glob("*/*.json")):
        result = json.loads(path.read_text())
        other = found.get(result["benchmark"])
        is_newer = other is None or result["date"] > other["date"]
        if result["status"] == "measured" and result["size"] in sizes and is_newer:
            found[result["benchmark"]] = result
    return found


def _row(name: str, result: Mapping[str, Any]) -> list[str]:
    load = "{:.1f} to {:.1f}".format(result["load"]["before"][0], result["load"]["after"][0])
    words = result["reason"].strip().splitlines()[-1:] or [", ".join(f"no {side}" for side in result["left_out"])]
    return [name, result["status"], f"{result['seconds']:.0f} s", load, words[0][:80]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_const", const="quick", dest="size", help="a part of everything")
    sizes.add_argument("--smoke", action="store_const", const="smoke", dest="size", help="see that everything starts")
    parser.add_argument("--only", default=",".join(BENCHMARKS), metavar="A,B", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"default: {RESULTS.relative_to(ROOT)}/DATE")
    options = parser.parse_args(arguments)
    size: Size = options.size or "full"
    names = options.only.split(",")
    if unknown := {*names} - {*BENCHMARKS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if size == "smoke" and options.out is None:
        parser.error("what --smoke writes are no results: say where to with --out DIR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    folder = options.out or RESULTS / datetime.now(UTC).date().isoformat()
    if (load := os.getloadavg()[0]) > QUIET:
        print(f"the load is {load:.1f}: figures of a busy machine say little", file=sys.stderr, flush=True)
    rows = []
    minutes = sum(BENCHMARKS[name].minutes[size != "full"] for name in names)
    print(f"{len(names)} benchmarks, about {minutes:.0f} minutes on two cores", file=sys.stderr, flush=True)
    for name in names:
        result = measure(name, size, folder)
        rows.append(_row(name, result))
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    print_table(("benchmark", "status", "time", "load", ""), rows)
    print(f"{folder}: {len(rows)} files")
    return int(any(row[1] != "measured" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
