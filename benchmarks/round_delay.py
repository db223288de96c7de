"""How long a round of local steps takes on a slow link, with and without delay=1.

python -m benchmarks.round_delay                             # some minutes; root, for namespaces of this machine
python -m benchmarks.round_delay --link 1g --rounds 12

Four hosts with a worker and a replica each, as in `benchmarks.strategies`, but each side runs by itself without a
pause: a side whose exchange goes on while the script computes would otherwise send in the turn of the other one. The
time of a round is the median time between two lines of its journal; bytes are those that the first host has sent, for
each round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.network import LINKS, Lab
from benchmarks.report import print_table, write_json
from benchmarks.strategies import Plan, Setting, commands_of, sent_bytes

SIDES = ("unisono local", "unisono local delay", "unisono local fresh", "unisono local fresh delay")
LIMIT_S = 600.0
SKIPPED = 2
"""Rounds at the beginning, in which workers still come."""


def measure(side: str, link: str, plan: Plan, num_rounds: int) -> dict[str, Any]:
    """Run a side by itself; returns the seconds between two lines of its journal, and the bytes of a round."""
    folder = Path(tempfile.mkdtemp(prefix="unisono-benchmark-"))
    try:
        with ExitStack() as stack:
            lab = Lab(plan.workers, LINKS[link], stack)
            found = commands_of(side, Setting(size=4, link=link), plan, lab, folder)
            for command in found:
                if "--control" in command:
                    place = command.index("--control")
                    command[place : place + 2] = [
                        *("--steps", str(num_rounds * plan.inner_steps)),
                        *("--result", str(folder / "result.json")),
                    ]
            before = sent_bytes(lab)
            processes = [subprocess.Popen(one, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for one in found]
            for process in processes:
                stack.callback(process.kill)
            for process in processes:
                said = process.communicate(timeout=LIMIT_S)[1]
                if process.returncode != 0:
                    raise RuntimeError(f"{side}: exit code {process.returncode}\n{said.decode()[-2000:]}")
            sent = sent_bytes(lab) - before
        journal = folder / side.replace(" ", "-") / "journal.jsonl"
        lines = [json.loads(text) for text in journal.read_text().splitlines()]
        lines = [line for line in lines if line["kind"] == "step"]
        times = [line["time"] for line in lines[SKIPPED:] if line["generation"] == lines[-1]["generation"]]
        return {"round_s": [b - a for a, b in itertools.pairwise(times)], "mb": sent / 1e6 / num_rounds}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", choices=LINKS, default="100m")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    plan = Plan(workers=4, microbatches=4, inner_steps=options.inner_steps, turns=1)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides.split(",")}
    for _ in range(options.turns):
        for side, runs in found.items():
            runs.append(measure(side, options.link, plan, options.rounds))
            print(side, runs[-1], flush=True)
    rows, figures = [], {}
    for side, runs in found.items():
        round_s = statistics.median(time for run in runs for time in run["round_s"])
        mb = statistics.median(run["mb"] for run in runs)
        rows.append([side, f"{round_s:.2f}", f"{mb:.1f}"])
        figures |= {f"round_s.{side.replace(' ', '_')}": round_s, f"mb.{side.replace(' ', '_')}": mb}
    print_table(("side", "s a round", "MB sent a round"), rows)
    if options.json:
        write_json(options.json, figures, [{"side": side, "runs": runs} for side, runs in found.items()])


if __name__ == "__main__":
    main()
