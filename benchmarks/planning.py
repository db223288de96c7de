"""How far forecasts of steps are from what comes: trials of a script, and then the script itself, in turns.

python -m benchmarks.planning                                          # a quarter of an hour
python -m benchmarks.planning --cases cnn --links host --rounds 2
python -m benchmarks.planning --simulate 1000                          # forecasts only: where efficiency ends

In each round the script is tried as ``unisono plan`` tries it (alone, with 2 and with 4 workers, and with 2 as if on 2
machines), and then trained by 1 to 4 workers: on one host, and between hosts with one worker each (network namespaces
of this machine, as in `benchmarks.network`; root). A forecast is made from the trials of its own round. "Unseen" is one
from the trials with 1 and 2 workers only, so those of 3 and 4 workers are for numbers that nobody has measured.

The error is that of the median forecast, and the spread is half of the distance between the extremes of the measured
steps, of trainings and of trials with as many workers: what the same run, started again, differs by on this machine.
What other programs do only ever adds time, so on a machine that is not quiet the least of several rounds says more:
"least" compares the forecast from the shortest trials with the shortest training.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.network import LINKS, PORT, Lab
from benchmarks.report import print_table, write_json
from unisono.system.lifetime import scratch_folder
from unisono.tools.plan.forecast import ForecastInputs, Roster, Sample, forecast
from unisono.tools.plan.found import ProbeSettings
from unisono.tools.plan.measuring import samples_in
from unisono.tools.plan.probing import Script, facts_of, trial
from unisono.tools.plan.wires import NetworkLink

HOST = "host"
ROOM = 4
LIMIT_S = 300.0
SECONDS = 3.0
STEPS = 16
PATIENCE_S = 60


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one round has found of one case."""

    facts: ForecastInputs
    came: Mapping[tuple[str, int], Sample]
    """By link and number of workers."""


def one_turn(case: str, microbatches: int, links: Sequence[str], workers: Sequence[int]) -> Turn:
    """Try the script, and train it."""
    with scratch_folder("unisono-plan-") as folder:
        script = Script(
            command=["-m", "benchmarks.planned", case, str(microbatches)],
            directory=folder,
        )
        alone = trial(script, ProbeSettings(steps=STEPS, seconds=SECONDS))
        steps = alone.found.done
        trials, came = [alone], {}
        # What is compared stands next to each other: a machine that others use is not as busy a minute later.
        for number in sorted({*workers, 2, ROOM}):
            if number in (2, ROOM):
                trials.append(trial(script, ProbeSettings(steps=steps), workers=number))
            if HOST in links and number in workers:
                came[HOST, number] = train(script, HOST, number, steps)
        for place, link in enumerate(each for each in links if each != HOST):
            if place == 0:
                trials.append(trial(script, ProbeSettings(steps=steps), workers=2, hosts=2))
            for number in (each for each in workers if each > 1):
                came[link, number] = train(script, link, number, steps)
        return Turn(facts=facts_of(trials, ROOM), came=came)


def train(script: Script, link: str, workers: int, steps: int) -> Sample:
    """Train the script without an inspector, and return what its own files say."""
    run = Path(tempfile.mkdtemp(prefix="train-", dir=script.directory)) / "run"
    base, named = [sys.executable, "-P", "-m", "unisono"], list(script.command[1:2])
    head = [*base, "run", "-m", *named, "--run-dir", str(run)]
    own = ["--", *script.command[2:], "--steps", str(steps)]
    with ExitStack() as stack:
        if link == HOST:
            commands = [[*head, "--workers", str(workers), *own]]
        else:
            lab = Lab(workers, LINKS[link], stack)
            address = lab.address(1)
            ready = ["sh", "-c", 'until test -s "$0"; do sleep 0.1; done; exec "$@"', str(run / "head.json")]
            joins = [*base, "join", f"wss://{address}:{PORT}", "--token-file", str(run / "token"), "--workers", "1"]
            meeting = ["--workers", "1", "--wait-for", str(workers), "--bind", address, "--set", f"port={PORT}"]
            commands = [
                [*lab.inside(1), *head, *meeting, *own],
                *([*lab.inside(host), *ready, *joins] for host in range(2, workers + 1)),
            ]
        _run_all(commands, script.directory / "output")
    found = [one for one in samples_in(run) if one.workers == workers]
    if not found:
        raise RuntimeError(f"{' '.join(script.command)}: no steps of {workers} workers over {link}")
    return max(found, key=lambda one: one.hosts)


def _run_all(commands: Sequence[Sequence[str]], output: Path) -> None:
    with output.open("ab") as told:
        processes = [subprocess.Popen(command, stdout=told, stderr=told) for command in commands]
        try:
            for process in processes:
                if process.wait(LIMIT_S) != 0:
                    raise RuntimeError(f"a run ended with exit code {process.returncode}: {output.read_text()[-2000:]}")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
            for process in processes:
                try:
                    process.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def link_of(name: str) -> NetworkLink | None:
    """Return the link of this name; None: there is one host."""
    if name == HOST:
        return None
    return NetworkLink(bits_per_s=LINKS[name].rate_mbit * 1e6, round_trip_s=2 * LINKS[name].delay_s)


def roster_over(link: str, workers: int) -> Roster:
    """Return the workers of one host, or of hosts with one worker each."""
    own = link_of(link)
    return Roster(workers=workers, per_host=ROOM if own is None else 1, link=own, on_one_machine=own is not None)


def _unseen(facts: ForecastInputs) -> ForecastInputs:
    """Return the facts without the trial of the most workers."""
    return dataclasses.replace(facts, samples=[one for one in facts.samples if one.workers < ROOM])


def _least(turns: Sequence[Turn]) -> ForecastInputs:
    """Return the facts of the shortest trial of each kind."""
    kinds = [(one.workers, one.hosts) for one in turns[0].facts.samples]
    samples = [
        min((one for turn in turns for one in turn.facts.samples if (one.workers, one.hosts) == kind), key=_step)
        for kind in kinds
    ]
    return dataclasses.replace(turns[0].facts, samples=samples)


def _is_of(one: Sample, workers: int) -> bool:
    """Return whether the trial was of so many workers on one host."""
    return (one.workers, one.hosts) == (workers, 1)


def _step(one: Sample) -> float:
    return one.step


def compared(case: str, turns: Sequence[Turn]) -> Iterator[tuple[dict[str, float], list[str]]]:
    """Yield the figures and the row of each link and number of workers."""
    for link, number in turns[0].came:
        came = [turn.came[link, number].step for turn in turns]
        again = [
            *came,
            *(each.step for turn in turns for each in turn.facts.samples if link == HOST and _is_of(each, number)),
        ]
        middle, spread = statistics.median(came), (max(again) - min(again)) / 2
        roster = roster_over(link, number)
        expected = statistics.median(forecast(turn.facts, roster).step for turn in turns)
        unseen = statistics.median(forecast(_unseen(turn.facts), roster).step for turn in turns)
        error, blind = expected / middle - 1, unseen / middle - 1
        least = _least(turns)
        calm, calm_unseen = (forecast(each, roster).step / min(came) - 1 for each in (least, _unseen(least)))
        place = f"{case}.{link}.{number}"
        figures = {
            f"error.{place}": error,
            f"error_unseen.{place}": blind,
            f"error_least.{place}": calm,
            f"error_least_unseen.{place}": calm_unseen,
            f"spread.{place}": spread / middle,
            f"step_ms.{place}": 1000 * middle,
        }
        row = [
            *(case, link, str(number), f"{1000 * middle:.1f}", f"{spread / middle:.0%}", f"{1000 * expected:.1f}"),
            *(f"{error:+.1%}", f"{blind:+.1%}", f"{1000 * min(came):.1f}", f"{calm:+.1%}", f"{calm_unseen:+.1%}"),
        ]
        yield figures, row


HEADER = (
    *("case", "link", "workers", "step ms", "spread", "forecast ms", "error", "unseen", "least ms", "error", "unseen"),
)


def simulated(facts: ForecastInputs, most: int, per_host: int, links: Sequence[str]) -> Iterator[list[str]]:
    """Yield the rows of a forecast for ever more workers."""
    alone = forecast(facts, Roster(workers=1, per_host=per_host)).step
    for link in links:
        number = per_host
        while number <= most:
            roster = Roster(workers=number, per_host=per_host, link=link_of(link))
            # As many micro-batches as workers, each as large as it was measured: what suits many workers most.
            parts = forecast(facts, roster, number, number / facts.microbatches)
            ideal = alone / facts.microbatches
            row = [link, str(number), str(roster.hosts), f"{1000 * parts.step:.0f}", f"{ideal / parts.step:.0%}"]
            spent = (parts.compute, parts.waiting, parts.exchange, parts.network, parts.update + parts.other)
            yield [*row, *(f"{1000 * part:.0f}" for part in spent), parts.bottleneck]
            number *= 2


def _simulate(case: str, microbatches: int, most: int, links: Sequence[str]) -> dict[str, Any]:
    with scratch_folder("unisono-plan-") as folder:
        script = Script(command=["-m", "benchmarks.planned", case, str(microbatches)], directory=folder)
        alone = trial(script, ProbeSettings(steps=STEPS, seconds=SECONDS))
        same = ProbeSettings(steps=alone.found.done)
        trials = [alone, trial(script, same, workers=2), trial(script, same, workers=ROOM)]
        facts = facts_of([*trials, trial(script, same, workers=2, hosts=2)], ROOM)
    header = (
        "link",
        "workers",
        "hosts",
        "step ms",
        "efficiency",
        "compute",
        "waiting",
        "sums",
        "network",
        "own",
        "most",
    )
    rows = list(simulated(facts, most, ROOM, links))
    print_table(header, rows)
    return {"case": case, "simulated": [dict(zip(header, row, strict=True)) for row in rows]}


def _told(turn: Turn) -> dict[str, Any]:
    samples = [dataclasses.asdict(one) for one in turn.facts.samples]
    return {"samples": samples, "came": {f"{link}.{number}": one.step for (link, number), one in turn.came.items()}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="cnn,mlp,transformer", metavar="A,B")
    parser.add_argument("--links", default=f"{HOST},1g", metavar="A,B", help=f"of {HOST}, {', '.join(LINKS)}")
    parser.add_argument("--workers", default="1,2,3,4", metavar="A,B")
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulate", type=int, default=0, metavar="W", help="forecasts for up to so many workers")
    parser.add_argument("--json", metavar="FILE", help="write figures, machine, commit and all rounds")
    options = parser.parse_args(arguments)
    links = options.links.split(",")
    for link in (each for each in links if each != HOST and each not in LINKS):
        parser.error(f"unknown: {link}; there are {HOST}, {', '.join(LINKS)}")
    lacking = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if lacking and links != [HOST] and not options.simulate:
        parser.error(f"hosts on one machine need {', '.join(lacking)} (Debian: iproute2, util-linux)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    figures, rows, runs = dict[str, float](), list[list[str]](), list[Mapping[str, Any]]()
    for case in options.cases.split(","):
        if options.simulate:
            print(case)
            over = [each for each in links if each != HOST]
            runs.append(_simulate(case, options.microbatches, options.simulate, over))
            if options.json:
                write_json(options.json, figures, runs)
            continue
        workers = [int(each) for each in options.workers.split(",")]
        turns: list[Turn] = []
        for number in range(options.rounds):
            turns.append(one_turn(case, options.microbatches, links, workers))
            print(f"{case}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            found = list(compared(case, turns))
            for values, row in found:
                figures.update(values)
                print("  ".join(row), file=sys.stderr, flush=True)
            figures[f"error.{case}"] = max(
                abs(values[name]) for values, _ in found for name in values if "error." in name
            )
            if options.json:
                write_json(options.json, figures, [*runs, *map(_told, turns)])
        rows += [row for _, row in found]
        runs += map(_told, turns)
    if rows:
        print_table(HEADER, rows)


if __name__ == "__main__":
    main()
