"""How far the models of other strategies are from what comes: their steps and memory, in turns with plain steps.

python -m benchmarks.planned_strategies                                  # some minutes for each round
python -m benchmarks.planned_strategies --cases cnn --links host --workers 2,4 --rounds 2

In each round the script is tried as ``unisono plan`` tries it, and then trained with each strategy on some workers of
one host, and between hosts with one worker each (network namespaces of this machine, as in `benchmarks.planning`;
root). What other programs do at the same time only adds time. So of each trial and training the fastest third of the
steps counts, and a strategy's step is compared as a part of the plain step of the same round: "forecast" and "came" are
that part. The spread is half of the distance between the rounds' extremes. Memory is that of the worker with the most,
in MB, with its part of what it shares with others.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planned import COPIES, INNER_STEPS, SPENT, STRATEGIES
from benchmarks.planning import HOST, ROOM, STEPS, roster_over, train
from benchmarks.report import print_table, write_json
from unisono.core.rehearsals import is_compared
from unisono.record.journal.times import by_step
from unisono.system.lifetime import scratch_folder
from unisono.tools.plan.forecast import ForecastInputs, Sample
from unisono.tools.plan.found import NUM_COUNTED, ProbeSettings
from unisono.tools.plan.measuring import hosts_in, sample_of
from unisono.tools.plan.probing import Script, facts_of, memories_of, trial
from unisono.tools.plan.strategy_models import STRATEGIES as MODELS
from unisono.tools.plan.strategy_models import StrategyOptions, WorkerMemory

OPTIONS = StrategyOptions(copies=COPIES, inner_steps=INNER_STEPS)
MB = 1e6
PLAIN = STRATEGIES[0]
BLOCK_S = 4.0
"""Alone, the steps of a training take so long, on a machine that does nothing else."""
LEAST_STEPS, MOST_STEPS = STEPS, 48
LEAST_ROUNDS = 14
"""Of local steps."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One strategy in one round."""

    case: str
    link: str
    workers: int
    strategy: str
    forecast_s: float
    came_s: float
    forecast_bytes: float
    came_bytes: float
    processor_s: float
    """Of a processor, that a worker has used for a step: the mean of the workers."""
    facts: ForecastInputs
    """The forecast is made from these."""
    memory: WorkerMemory


def one_round(case: str, microbatches: int, links: Sequence[str], workers: Sequence[int]) -> Iterator[Compared]:
    """Try the script, and train it with each strategy."""
    with scratch_folder("unisono-plan-") as folder:
        words = ["-m", "benchmarks.planned", case, str(microbatches)]
        script = Script(command=words, directory=folder)
        alone = trial(script, ProbeSettings(steps=STEPS, seconds=BLOCK_S))
        same = ProbeSettings(steps=max(LEAST_STEPS, min(MOST_STEPS, round(BLOCK_S / alone.sample.step))))
        trials = [alone, *(trial(script, same, workers=number) for number in sorted({2, ROOM}))]
        if any(link != HOST for link in links):
            trials.append(trial(script, same, workers=2, hosts=2))
        calm = [_calm(next(folder.glob(f"{one.sample.workers}-{one.sample.hosts}-*")) / "run") for one in trials]
        facts = dataclasses.replace(facts_of(trials, ROOM), samples=calm)
        memories = memories_of(trials)
        for link in links:
            for number in workers:
                roster = roster_over(link, number)
                memory = memories[min(memories, key=lambda each: abs(each - roster.neighbours))]
                for strategy in STRATEGIES:
                    model = MODELS[strategy]
                    if model.refuses(facts, roster):
                        continue
                    came_s, processor_s, came_bytes = _trained(folder, words, strategy, link, number, same.steps)
                    yield Compared(
                        case=case,
                        link=link,
                        workers=number,
                        strategy=strategy,
                        forecast_s=model.parts(facts, roster, OPTIONS).step,
                        came_s=came_s,
                        forecast_bytes=model.memory(memory, roster, OPTIONS, -(-microbatches // number)),
                        came_bytes=came_bytes,
                        processor_s=processor_s,
                        facts=facts,
                        memory=memory,
                    )


def _trained(
    folder: Path, words: Sequence[str], strategy: str, link: str, workers: int, steps: int
) -> tuple[float, float, float]:
    """Train with a strategy; returns the seconds of a step, those of a processor, and the most bytes of a worker."""
    rounds = max(LEAST_ROUNDS, steps // INNER_STEPS) if strategy == "local" else steps
    place = folder / f"{strategy}-{link}-{workers}"
    place.mkdir()
    script = Script(command=[*words, "--strategy", strategy, "--replicas", str(workers)], directory=place)
    train(script, link, workers, rounds)
    came = _calm(next(place.glob("train-*")) / "run").step
    found = re.findall(rf"{SPENT}(\d+) (\S+)", (place / "output").read_text(errors="replace"))
    inner = INNER_STEPS if strategy == "local" else 1
    used = statistics.fmean(float(seconds) for _, seconds in found)
    return came / inner, used / inner, max(float(nbytes) for nbytes, _ in found)


def _calm(run: Path) -> Sample:
    """Return the sample of the fastest third of a run's steps with all its workers."""
    steps = [times for step, times in by_step(run).items() if not is_compared(step)]
    size = max(map(len, steps))
    whole = [step for step in steps if len(step) == size and all(None not in each.values() for each in step.values())]
    whole.sort(key=lambda step: sample_of([step], size).step)
    hosts = len(set(hosts_in(run).values()))
    return sample_of(whole[: max(NUM_COUNTED, len(whole) // 3)], size, hosts)


def rows(found: Sequence[Compared]) -> Iterator[list[str]]:
    """Yield the rows of the table: a row for each strategy on so many workers."""
    kinds = dict.fromkeys((one.case, one.link, one.workers, one.strategy) for one in found)
    for kind in kinds:
        own = [one for one in found if (one.case, one.link, one.workers, one.strategy) == kind]
        plain = [one for one in found if (one.case, one.link, one.workers, one.strategy) == (*kind[:3], PLAIN)]
        pairs = list(zip(own, plain, strict=False))
        expected = statistics.median(one.forecast_s / base.forecast_s for one, base in pairs)
        parts = [one.came_s / base.came_s for one, base in pairs]
        came, spread = statistics.median(parts), (max(parts) - min(parts)) / 2
        yield [
            *(kind[0], kind[1], str(kind[2]), kind[3], f"{1000 * statistics.median(one.came_s for one in own):.1f}"),
            *(f"{expected:.2f}", f"{came:.2f}", f"{spread:.2f}", f"{expected / came - 1:+.0%}"),
            f"{statistics.median(one.forecast_bytes for one in own) / MB:.0f}",
            f"{statistics.median(one.came_bytes for one in own) / MB:.0f}",
        ]


HEADER = (
    *(
        "case",
        "link",
        "workers",
        "strategy",
        "step ms",
        "forecast",
        "came",
        "spread",
        "error",
        "MB forecast",
        "MB came",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="cnn,mlp", metavar="A,B")
    parser.add_argument("--links", default=f"{HOST},1g", metavar="A,B")
    parser.add_argument("--workers", default="2,4", metavar="A,B")
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write machine, commit and all rounds")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what it has started ends
    workers = [int(each) for each in options.workers.split(",")]
    found, told = [], list[dict[str, Any]]()
    for number in range(options.rounds):
        for case in options.cases.split(","):
            for one in one_round(case, options.microbatches, options.links.split(","), workers):
                found.append(one)
                print(
                    number,
                    one.case,
                    one.link,
                    one.workers,
                    one.strategy,
                    one.came_s,
                    one.processor_s,
                    file=sys.stderr,
                    flush=True,
                )
                scalars = {name: value for name, value in vars(one).items() if isinstance(value, int | float | str)}
                told.append({"round": number, **scalars})
                if options.json is not None:
                    write_json(options.json, {}, told)
    print_table(HEADER, list(rows(found)))


if __name__ == "__main__":
    main()
