"""Memory and bytes sent by a process, and the time of a step, where a model is cut into stages.

python -m benchmarks.model_parallel                             # 38 million parameters in 4 stages
python -m benchmarks.model_parallel --quick --width 256 --depth 6
python -m benchmarks.model_parallel --sides 1,1x4,1f1b

The sides: `unisono.Stages` in one process (``1``), in a group of two and of four (``1x2``, ``1x4``), and in two groups
of two (``2x2``); `unisono.parallelize` with four shards in one stage, in one process (``1s``), in a group of two and of
four (``1x2s``, ``1x4s``); ``torch.distributed.pipelining`` with its schedule 1F1B (``1f1b``), FSDP2 (``fsdp2``), and
tensor parallelism by DTensor (``dtensor``), on four processes each. All compute the same modules on the same
micro-batches on CPUs of one host, torch's sides over gloo, with AdamW (not fused: torch refuses that where some
parameters are elsewhere) and one thread a process. They take turns, a block of steps each, so each ratio to ``1`` is
taken between neighbours in time. FSDP2 computes several micro-batches side by side, each with the whole model, of which
it gathers block by block.

Memory is the kernel's own peak (VmHWM, set back before the last turn) without pages of files, and without what the
process had before it made its model: Python, torch and the library. Of shared memory a page that n processes have
mapped counts 1/n. Freed memory goes back to the kernel (MALLOC_TRIM_THRESHOLD_), which costs time. Bytes are those that
the kernel has sent over TCP connections of a process, per step of a turn; what goes through shared memory is not in
them.

Beside the peak stands what the code says, for the processes of Unisono, of P bytes of parameters each. Some tens of MiB
that it leaves out are threads and small things. Several groups share memory on a host, and its pages count in parts.

    P          parameters
    2 P        the states of AdamW
    K P        sums of gradients: the nodes of the tree that are open at once, K = log2 of a group's micro-batches
               (rounded up, at least 1)
    P          the gradients of a micro-batch, until those of the next one are added to them
    P          groups of several processes: the sum of the lane, which is not written over the nodes
    n A        activations A that autograd keeps of a micro-batch (counted as it keeps them), n micro-batches under way:
               as many as parts follow, and one more
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.model_parallel_sides import SIDES, STAGES, UNISONO, Shape, activation_bytes, parameters_of
from benchmarks.report import median_interval, print_table, write_json
from benchmarks.step_time import Team, started, take_turns

BASE = "1"
LIMIT_S = {"quick": 15.0, "full": 90.0}
MEMORY_STEPS = 3
MIB = 2**20


def _commands(side: str, shape: Shape, held: str, folder: Path) -> list[list[str]]:
    shared = [side, *shape.options, "--held", held, "--control", str(folder / f"{side}.socket")]
    module = "benchmarks.model_parallel_sides"
    if side in UNISONO:
        head = [sys.executable, "-m", "unisono", "run", "-m", module, "--workers", side.removesuffix("s")]
        return [[*head, "--run-dir", str(folder / f"run-{side}"), "--", *shared]]
    this = [sys.executable, "-m", module, *shared, "--meeting", str(folder / f"meeting-{side}")]
    return [[*this, "--rank", str(rank)] for rank in range(SIDES[side])]


def _peak(pid: int) -> int:
    """Return the peak of memory of a process, in bytes, as the head of this file says.

    Slots of sums are mapped twice in a process, so of shared memory the proportional size counts. It does not change
    between steps.
    """
    kib = {}
    for name in ("status", "smaps_rollup"):
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
        kib.update({line.partition(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")})
    return (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"] + kib["Pss_Shmem"]) * 1024


def _sent(pids: Sequence[int]) -> dict[int, int]:
    """Return by process the bytes that its TCP connections have sent."""
    found = dict.fromkeys(pids, 0)
    for line in subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout.splitlines():
        sent = re.search(r" bytes_sent:(\d+)", line)
        for pid in {int(each) for each in re.findall(r"pid=(\d+)", line)} & set(pids):
            found[pid] += int(sent[1]) if sent is not None else 0
    return found


def measure(team: Team) -> tuple[list[int], list[float]]:
    """Let a side do a few steps; return by rank the peak of memory, and the bytes sent in a step."""
    before = _sent(team.pids)
    for pid in team.pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM begins anew
    team.steps(MEMORY_STEPS)
    after = _sent(team.pids)
    return [_peak(pid) for pid in team.pids], [(after[pid] - before[pid]) / MEMORY_STEPS for pid in team.pids]


def expected(shape: Shape, side: str) -> list[int]:
    """Return by part the bytes that the code says, of a process of Unisono."""
    layout, num_stages = side.removesuffix("s"), STAGES
    groups, num_parts = map(int, layout.split("x")) if "x" in layout else (1, 1)
    is_in_group, num_shard_parts = num_parts > 1, 0
    if side.endswith("s"):  # all parts of a group are alike
        num_stages, num_shard_parts, num_parts = 1, num_parts, 1
    parameters, activations = parameters_of(shape, num_shard_parts), activation_bytes(shape, num_shard_parts)
    num_nodes = max(1, math.ceil(math.log2(shape.microbatches / groups)))
    found = []
    for part in range(num_parts):
        own = range(part * num_stages // num_parts, (part + 1) * num_stages // num_parts)
        copies = 1 + 2 + num_nodes + 1 + is_in_group
        under_way = min(num_parts - part, shape.microbatches)
        found.append(
            copies * sum(parameters[each] for each in own) + under_way * sum(activations[each] for each in own)
        )
    return found


def compare(shape: Shape, names: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Let the sides take turns for a while, and measure their memory then."""
    with tempfile.TemporaryDirectory(prefix="unisono-benchmark-") as held:
        sides = {name: partial(_commands, name, shape, held) for name in names}
        found: dict[str, Any] = {"shape": vars(shape), "step_ms": {}, "peak_mib": {}, "sent_mb": {}, "expected_mib": {}}
        peaks = {}

        def measure_memory(team: Team) -> None:
            peaks[team.name], sent = measure(team)
            found["sent_mb"][team.name] = [round(each / 1e6, 3) for each in sent]

        with started(sides, {name: SIDES[name] for name in names}) as teams:
            take_turns(teams, limit_s, measure_memory)
            for team in teams:
                programs = [int(Path(held, f"{team.name}-{pid}").read_text()) for pid in team.pids]
                own = [peak - program for peak, program in zip(peaks[team.name], programs, strict=True)]
                found["peak_mib"][team.name] = [round(each / MIB, 1) for each in own]
                found["step_ms"][team.name] = [round(1000 * block.step_s, 3) for block in team.blocks]
                if team.name in UNISONO:
                    found["expected_mib"][team.name] = [round(each / MIB, 1) for each in expected(shape, team.name)]
        return found


def rows_of(result: Mapping[str, Any]) -> tuple[dict[str, float], list[list[str]]]:
    """Return the named figures of a comparison, and its table."""
    figures: dict[str, float] = {}
    rows = []
    for name, times in result["step_ms"].items():
        ratio = median_interval([a / b for a, b in zip(times, result["step_ms"][BASE], strict=True)])
        figures[f"ratio_to_one.{name}"] = ratio.median
        figures[f"peak_mib.{name}"] = max(result["peak_mib"][name])
        figures[f"sent_mb.{name}"] = max(result["sent_mb"][name])
        rows.append(
            [
                name,
                *(
                    " ".join(f"{each:.{digits}f}" for each in result[what].get(name, ()))
                    for what, digits in (("peak_mib", 0), ("expected_mib", 0), ("sent_mb", 2))
                ),
                f"{statistics.median(times):.0f}",
                str(ratio),
            ]
        )
    return figures, rows


HEADER = (
    "side",
    "peak MiB by process",
    "by the formula, by part",
    "MB sent a step, by process",
    "step ms",
    "to 1 (95%)",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", metavar="FILE", help="write figures, machine, commit and all turns")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=12, help="blocks")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample")
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--sides", default=",".join(SIDES), metavar="A,B", help=f"{BASE} is always among them")
    parser.add_argument("--seconds", type=float, help="how long the sides take turns")
    options = parser.parse_args(arguments)
    if unknown := set(options.sides.split(",")) - set(SIDES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; sides: {', '.join(SIDES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was made is removed
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "131072")
    shape = Shape(options.width, options.depth, options.length, options.microbatch_size, options.microbatches)
    names = [name for name in SIDES if name == BASE or name in options.sides.split(",")]
    result = compare(shape, names, options.seconds or LIMIT_S["quick" if options.quick else "full"])
    figures, rows = rows_of(result)
    parameters = sum(parameters_of(shape))
    print(f"{parameters // 4:,} parameters, {parameters / MIB:.0f} MiB, {options.microbatches} micro-batches")
    print_table(HEADER, rows)
    if options.json:
        write_json(options.json, figures, [result])


if __name__ == "__main__":
    main()
