"""Which strategy for which bottleneck: those of the library and of others, each in turns with DistributedDataParallel.

python -m benchmarks.strategies                              # everything: half an hour
python -m benchmarks.strategies --quick --settings host      # some minutes
python -m benchmarks.strategies --settings 100m --sides "unisono,unisono bf16,ddp bf16"

The same model, data, optimizer and micro-batches for all sides (`benchmarks.strategy_sides`), in some settings:

- ``host``: four workers of one host, 100 MB of gradients: the update and the memory are what costs.
- ``stalls``: the same workers, 4 MB, and now and then one of them is held up for 60 ms.
- ``1g`` and ``100m``: four hosts on links of 1 Gbit/s and 100 Mbit/s, 4 MB (namespaces of this machine, as in
  `benchmarks.network`; root).

In each setting the sides that may help there take part.

Each side is started together with DDP, and they take turns, a whole number of averaging rounds each; a time is the mean
over a turn, because what a strategy saves in one step it may spend in another. Bytes are those that leave the first
host's network device, whoever sent them. The loss is that of samples that nobody trained on, after as many steps of the
smaller model for all sides, with one learning rate for all, which is tuned for none. Workers have equal shares (no
balance), so that all take as many steps.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.network import DEVICE, LINKS, PORT, Lab
from benchmarks.report import Interval, median_interval, print_table, write_json
from benchmarks.step_time import Block, Team, started
from benchmarks.strategy_sides import SIDES, missing

__all__ = ["SETTINGS", "Plan", "Setting", "commands_of", "sent_bytes"]

BASE = "ddp"
BLOCK_S = 1.5
MEMORY_S = 1.5
LOSS_LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is slow."""

    size: int
    link: str = ""
    """Of the hosts, each with one worker; "": all workers on one."""
    stall_ms: float = 0.0
    sides: tuple[str, ...] = tuple(SIDES)
    """That are measured here if the caller names none."""


_SHARDED = ("unisono", "unisono shard 2", "unisono shard 1", "ddp zero", "fsdp2")
_LATE = ("unisono delay 1", "unisono local", "unisono diloco", "torch local", "torchft local")
_FEWER_BYTES = (
    "unisono bf16",
    "ddp bf16",
    "unisono shard 1 owners",
    "ddp zero",
    "unisono local fresh",
    "unisono diloco int8",
)

SETTINGS = {
    "host": Setting(size=100, sides=_SHARDED),
    "stalls": Setting(size=4, stall_ms=60.0, sides=("unisono", *_LATE)),
    "1g": Setting(size=4, link="1g", sides=("unisono", *_FEWER_BYTES, *_LATE)),
    "100m": Setting(size=4, link="100m", sides=("unisono", *_FEWER_BYTES, *_LATE)),
}
LOSS_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    workers: int
    microbatches: int
    inner_steps: int
    turns: int

    def options(self, setting: Setting) -> list[str]:
        return [
            *("--size", str(setting.size), "--stall-ms", str(setting.stall_ms), "--workers", str(self.workers)),
            *("--microbatches", str(self.microbatches), "--inner-steps", str(self.inner_steps)),
        ]


def commands_of(side: str, setting: Setting, plan: Plan, lab: Lab | None, folder: Path) -> list[list[str]]:
    """Return the commands of a side's processes, each on its host."""
    name = side.replace(" ", "-")
    options = [side, *plan.options(setting), "--unbalanced", "--control", str(folder / f"{side}.socket")]
    if not side.startswith("unisono"):
        this = [sys.executable, "-m", "benchmarks.strategy_sides", *options, "--meeting", str(folder / name)]
        own = [[*this, "--rank", str(rank)] for rank in range(plan.workers)]
        if lab is None:
            return own
        device = ["env", f"GLOO_SOCKET_IFNAME={DEVICE}"]
        return [[*lab.inside(1 + rank), *device, *command] for rank, command in enumerate(own)]
    this, run = [sys.executable, "-m", "unisono"], folder / name
    head = [
        *this,
        "run",
        "-m",
        "benchmarks.strategy_sides",
        "--run-dir",
        str(run),
        "--set",
        "go-on-without-after=600s",
        "--set",
        "kill-after=600s",
    ]
    if lab is None:
        return [[*head, "--workers", str(plan.workers), "--", *options]]
    address = lab.address(1)
    head += ["--workers", "1", "--bind", address, "--set", f"port={PORT}"]
    patient = ["sh", "-c", 'until test -s "$0"; do sleep 0.1; done; exec "$@"', str(run / "head.json")]
    join = [*this, "join", f"wss://{address}:{PORT}", "--token-file", str(run / "token"), "--workers", "1"]
    return [
        [*lab.inside(1), *head, "--", *options],
        *([*lab.inside(host), *patient, *join] for host in range(2, plan.workers + 1)),
    ]


def sent_bytes(lab: Lab | None) -> int:
    """Return the bytes that have left the first host."""
    if lab is None:
        return 0
    path = f"/sys/class/net/{DEVICE}/statistics/tx_bytes"
    # The files of another network namespace are seen with a /sys of its own.
    show = ["unshare", "--mount", "sh", "-c", 'mount -t sysfs none /sys && cat "$0"', path]
    return int(subprocess.run([*lab.inside(1), *show], check=True, capture_output=True, text=True).stdout)


def compare(side: str, setting: Setting, plan: Plan) -> dict[str, Any]:
    """Let a side and DDP take turns."""
    with ExitStack() as stack:
        lab = Lab(plan.workers, LINKS[setting.link], stack) if setting.link else None
        sides = [side] if side == BASE else [side, BASE]
        commands = {name: partial(commands_of, name, setting, plan, lab) for name in sides}
        ready = stack.enter_context(started(commands, plan.workers))
        numbers = {}
        for team in ready:
            team.steps(plan.inner_steps)  # buffers are made, DDP has rebuilt its buckets
            start = time.perf_counter()
            team.steps(plan.inner_steps)
            rounds = BLOCK_S / (time.perf_counter() - start)
            numbers[team.name] = plan.inner_steps * max(1, math.ceil(rounds))
        sent: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(plan.turns):
            for team in ready if turn % 2 == 0 else reversed(ready):
                before = sent_bytes(lab)
                _measure(team, numbers[team.name])
                sent[team.name].append((sent_bytes(lab) - before) / numbers[team.name])
        for team in ready:
            team.measure_memory(MEMORY_S)
        return {
            "step_ms": {team.name: [round(1000 * block.step_s, 3) for block in team.blocks] for team in ready},
            "cpu_ms": {team.name: [round(1000 * block.cpu_s, 3) for block in team.blocks] for team in ready},
            "sent_mb": {name: [round(each / 1e6, 4) for each in values] for name, values in sent.items()},
            "peak_mib": {team.name: round(team.peak_bytes / 2**20, 1) for team in ready},
        }


def _measure(team: Team, number: int) -> None:
    before = team.cpu_s()
    times = team.steps(number)
    team.blocks.append(Block(statistics.mean(times), (team.cpu_s() - before) / number))


def final_loss(side: str, plan: Plan, num_steps: int) -> float:
    """Train on one host, and return the loss of samples that nobody has trained on."""
    folder = Path(tempfile.mkdtemp(prefix="unisono-benchmark-"))
    result = folder / "result.json"
    setting = Setting(size=LOSS_SIZE)
    try:
        environment = {"steps": str(num_steps), "result": str(result)}
        with started({side: partial(_trainings, side, setting, plan, environment)}, 0) as (team,):
            deadline = time.monotonic() + LOSS_LIMIT_S
            for process in team.processes:
                if process.wait(deadline - time.monotonic()) != 0:
                    raise RuntimeError(f"{side}: process {process.pid} ended with exit code {process.returncode}")
        loss: float = json.loads(result.read_text())["loss"]
        return loss
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _trainings(side: str, setting: Setting, plan: Plan, given: Mapping[str, str], folder: Path) -> list[list[str]]:
    """Return the commands of a side that trains without a control."""
    commands = commands_of(side, setting, plan, None, folder)
    for command in commands:
        place = command.index("--control")
        command[place : place + 2] = ["--steps", given["steps"], "--result", given["result"]]
    return commands


HEADER = ("setting", "side", "step ms", "DDP", "ratio (95%)", "CPU ms", "peak MiB a worker", "MB sent", "loss")


def row_of(name: str, side: str, result: Mapping[str, Any], loss: float | None) -> tuple[dict[str, float], list[str]]:
    """Return the named figures of one comparison, and its row for the table."""
    step = result["step_ms"]
    place = f"{side.replace(' ', '_')}.{name}"
    ratio = Interval(1.0, 1.0, 1.0)
    if side != BASE:
        ratio = median_interval([a / b for a, b in zip(step[side], step[BASE], strict=True)])
    figures = {
        f"step_ms.{place}": statistics.median(step[side]),
        f"ratio_to_ddp.{place}": ratio.median,
        f"cpu_ms.{place}": statistics.median(result["cpu_ms"][side]),
        f"peak_mib.{place}": result["peak_mib"][side],
        f"sent_mb.{place}": statistics.median(result["sent_mb"][side]),
        **({} if loss is None else {f"loss.{side.replace(' ', '_')}": loss}),
    }
    row = [
        *(name, side, f"{figures[f'step_ms.{place}']:.1f}", f"{statistics.median(step[BASE]):.1f}", str(ratio)),
        *(f"{figures[f'cpu_ms.{place}']:.0f}", f"{result['peak_mib'][side]:.0f}"),
        *(f"{figures[f'sent_mb.{place}']:.2f}", "" if loss is None else f"{loss:.4f}"),
    ]
    return figures, row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS), metavar="A,B", help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--sides", default="", metavar="A,B", help=f"of {', '.join(SIDES)}; default: the setting's")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, help="of a global batch; default: one a worker")
    parser.add_argument("--inner-steps", type=int, default=10, help="between two averagings, where a side averages")
    parser.add_argument("--loss-steps", type=int, default=200, help="steps to the loss; 0: leave it out")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="at most three turns, and no loss")
    parser.add_argument("--json", metavar="FILE", help="write figures, machine, commit and all turns")
    options = parser.parse_args(arguments)
    settings, wanted = options.settings.split(","), [side for side in options.sides.split(",") if side]
    for named, there in ((settings, SETTINGS), (wanted, SIDES)):
        if unknown := [name for name in named if name not in there]:
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(there)}")
    lacking = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if lacking and any(SETTINGS[name].link for name in settings):
        parser.error(f"hosts on one machine need {', '.join(lacking)} (Debian: iproute2, util-linux)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was made is removed
    plan = Plan(
        workers=options.workers,
        microbatches=options.microbatches or options.workers,
        inner_steps=options.inner_steps,
        turns=min(3, options.turns) if options.quick else options.turns,
    )
    runs, figures, rows, losses = [], dict[str, float](), [], dict[str, float]()
    left_out = dict[str, str]()
    for name in settings:
        for side in wanted or SETTINGS[name].sides:
            if reason := missing(side):
                left_out[side] = reason
                print(f"{name}: {side} is left out: {reason}", file=sys.stderr, flush=True)
                continue
            try:
                for each in (side, BASE) if options.loss_steps and not options.quick else ():
                    if each not in losses:
                        losses[each] = final_loss(each, plan, options.loss_steps)
                result = compare(side, SETTINGS[name], plan)
            except (RuntimeError, subprocess.SubprocessError) as error:
                notes = "\n".join(getattr(error, "__notes__", []))
                left_out[f"{side}, {name}"] = str(error)
                print(f"{name}: {side} is left out, it failed: {error}\n{notes}", file=sys.stderr, flush=True)
                continue
            runs.append({"setting": name, "side": side, **result})
            for shown in (side,) if f"step_ms.{BASE}.{name}" in figures or side == BASE else (BASE, side):
                found, row = row_of(name, shown, result, losses.get(shown))
                figures.update(found)
                rows.append(row)
                print("  ".join(row), file=sys.stderr, flush=True)
            if options.json:
                write_json(options.json, figures, runs, left_out)
    print_table(HEADER, rows)


if __name__ == "__main__":
    main()
