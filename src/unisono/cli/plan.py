"""``unisono plan``: how long a step will take on more workers, what they need, and what will be the bottleneck."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import msgspec
from click.core import ParameterSource

from unisono.cli.given import check_directory, script_arguments
from unisono.cli.saying import say, say_json, say_lines
from unisono.core.errors import UsageError
from unisono.core.settings import split_parts
from unisono.core.words import count, listed, script_in
from unisono.record.rundir import PLAN_FILE, holder, read_facts
from unisono.system.capacity import machine_cores, machine_gpus
from unisono.system.lifetime import scratch_folder
from unisono.tools.plan.finder import WHAT, Search, plain_search, search, shown_search
from unisono.tools.plan.forecast import ForecastInputs, Roster, Sample
from unisono.tools.plan.found import IN_A_ROW, IN_A_ROW_ALONE, ProbeSettings
from unisono.tools.plan.layouts import check_layouts, forecast_groups, sizes_of
from unisono.tools.plan.measuring import check_recipe, facts_of_run, samples_in
from unisono.tools.plan.plans import PlanRecord, came, differs, forecasts, read_plan, roster_of, write_plan
from unisono.tools.plan.probing import Measurement, Script, facts_of, memories_of, trial
from unisono.tools.plan.strategy_models import StrategyOptions, WorkerMemory
from unisono.tools.plan.told import (
    shown_came,
    shown_conclusions,
    shown_groups,
    shown_missing,
    shown_strategies,
    shown_workers,
)
from unisono.tools.plan.wires import NetworkLink, parse_link

__all__ = ["plan"]

SECONDS: Final = 3.0
EACH: Final = 16
"""Up to so many workers, each number has a row; of more, every doubling."""
MOST: Final = 1024
"""Workers, at most: so far the model was followed (docs/benchmarks.md), and more of them take minutes to reckon."""
SOME_HOSTS: Final = 4
"""Where a link is given and no number of workers."""
NO_TRIAL: Final = ("steps", "find", "run_dir")
"""Options that mean nothing for a run that has been."""
OF_A_PLAN: Final = ("threads", "link", "per_host", "price", "copies", "inner_steps")
"""Options that mean nothing for a plan that was made."""
NOT_OF_GROUPS: Final = ("link", "per_host", "price", "copies", "inner_steps")
"""Options that mean nothing for a plan of groups."""
BUSY: Final = 0.05
"""Of the time, for which a worker had no core: from then on the plan says so."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the plan is to be made for."""

    workers: Sequence[int]
    """Ascending."""
    link: NetworkLink | None
    per_host: int
    price: float
    options: StrategyOptions
    layouts: Sequence[tuple[int, int]] = ()
    """Of a model in stages: (groups, processes of a group). ``workers`` is then what they are reckoned from: one."""

    @property
    def rosters(self) -> list[Roster]:
        return [roster_of(number, self.per_host, self.link) for number in self.workers]

    @property
    def largest(self) -> Roster:
        return self.rosters[-1]


@click.command()
@click.argument("target", required=False, metavar="[SCRIPT|RUN]")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "module", metavar="MODULE", help="Plan a module instead of a script, as `python -m` runs it.")
@click.option(
    "-n",
    "--workers",
    default="",
    metavar="N|A:B|GxP",
    help=(
        "Numbers of workers to plan for, or groups of P workers. Default: from 1 to as many as this machine has room "
        "for; with --link, as 4 such machines have."
    ),
)
@click.option("--steps", default=16, show_default=True, metavar="N", help="The least number of steps in each trial.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="CPU threads of a worker.")
@click.option(
    "--link",
    default="",
    metavar="RATE[+DELAY]",
    help="The link between machines like this one: 1gbit, 100mbit+20ms. Without it, the plan covers this machine only.",
)
@click.option(
    "--per-host",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="as many as this machine has room for",
    help="Workers per machine.",
)
@click.option("--price", type=float, default=0.0, metavar="AMOUNT", help="Price of one worker per hour.")
@click.option(
    "--copies",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help=("Copies kept of each state, for unisono.shard and local steps."),
)
@click.option(
    "--inner-steps",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help=("Inner steps of a round of local steps."),
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Write the plan into the directory of the run to come: `unisono plan DIR` compares the two afterwards.",
)
@click.option(
    "--find",
    default="",
    metavar="microbatches,batch",
    help=(
        "Try other micro-batch sizes; report the fastest number of micro-batches and the largest batch that fits. "
        "Changes nothing."
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    target: str | None,
    arguments: tuple[str, ...],
    module: str | None,
    workers: str,
    steps: int,
    threads: int,
    link: str,
    per_host: int | None,
    price: float,
    copies: int,
    inner_steps: int,
    run_dir: Path | None,
    find: str,
    as_json: bool,
) -> int:
    """Predict from the first steps of SCRIPT how long a step takes on more workers, and what they need.

    The script runs for some steps, alone and with several workers of this machine, in temporary directories. Nothing is
    kept, but whatever else the script does beside training happens too.

        unisono plan train.py --workers 1:16 --link 1gbit --price 2.5 -- --lr 0.01

    Given the directory of a RUN: compare the plan with what happened; with --workers, plan from the run's steps.
    """
    if not 0.0 <= price < math.inf:
        raise UsageError(f"--price is the price of one worker per hour, at least 0; got {price}")
    room = max(1, len(machine_gpus()) or len(machine_cores()) // max(1, threads))
    numbers, parts = split_parts(workers)
    if parts > 1:
        _refuse(NOT_OF_GROUPS, "is not part of a plan of groups, which is about one machine")
    layouts = [(groups, parts) for groups in _numbers(numbers, MOST, 0, False)] if parts > 1 else []
    asked = PlanRequest(
        workers=[1] if layouts else _numbers(numbers, room, per_host or 0, bool(link)),
        layouts=layouts,
        link=parse_link(link) if link else None,
        per_host=per_host or room,
        price=price,
        options=StrategyOptions(copies=copies, inner_steps=inner_steps),
    )
    if target is not None and not module and Path(target).is_dir():
        _refuse(NO_TRIAL, "is for trials of a script, and a run has already done its steps")
        if arguments:
            raise UsageError(f"{target} is a run, which takes no arguments of a script, got {' '.join(arguments)}")
        if layouts:
            raise UsageError(
                f"--workers {workers}: groups are planned from a script; a run does not say what a stage holds"
            )
        return _plan_of_run(Path(target), workers, room, asked, as_json=as_json)
    if steps < IN_A_ROW:
        raise UsageError(f"a trial needs at least {IN_A_ROW} steps (the first ones do not count), got --steps {steps}")
    wanted = _wanted(find)
    command = script_arguments(target, module, arguments, command="plan SCRIPT")
    if run_dir is not None:
        _check_run(run_dir)

    with scratch_folder("unisono-plan-") as folder:
        script = Script(command=command, threads=threads, directory=folder)
        trials = _trials(script, steps, room, asked)
        found = search(script, trials[0].found, steps, wanted) if wanted else None
    facts = facts_of(trials, room)
    layouts = layouts or [(1, size) for size in sizes_of(trials[0].found)]
    in_groups = forecast_groups(trials[0].found, trials[0].sample, layouts, room)
    made = msgspec.structs.replace(_made(script_in(command), facts, memories_of(trials), asked), groups=in_groups)
    _tell(made, trials, facts, asked, found, as_json=as_json)
    if found is not None and not as_json:
        say_lines("\n" + shown_search(found, facts, asked.largest, wanted))
    if run_dir is not None:
        if holder(run_dir) is not None and (other := differs(made, read_facts(run_dir).get("recipe") or {})):
            raise UsageError(f"the plan was not written: {run_dir} has a run of a different training: {other}")
        write_plan(run_dir / PLAN_FILE, made)
        say(f"the plan is {run_dir / PLAN_FILE}; after the run, compare with `unisono plan {run_dir}`", err=as_json)
    return 1 if found is not None and not found.tried else 0


def _refuse(names: Sequence[str], why: str) -> None:
    """Raise UsageError if one of these options was given."""
    context = click.get_current_context()
    for param in context.command.params:
        if param.name in names and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{max(param.opts, key=len)} {why}")


def _check_run(run_dir: Path) -> None:
    """Check a directory in which a plan is to be left.

    Raises:
        UsageError: it cannot be written, or there is a run of which no plans are made.
    """
    check_directory(run_dir)
    if holder(run_dir) is not None and (recipe := read_facts(run_dir).get("recipe")):
        try:
            check_recipe(recipe)
        except UsageError as error:
            raise UsageError(
                f"--run-dir {run_dir} already has a run that no plan can be compared with: {error}"
            ) from None


def _wanted(text: str) -> list[str]:
    """Return what is to be found.

    Raises:
        UsageError: that cannot be found.
    """
    wanted = [word for word in text.split(",") if word]
    for word in (word for word in wanted if word not in WHAT):
        raise UsageError(f"--find {word}: it can find {listed(WHAT)}")
    return wanted


def _numbers(text: str, room: int, per_host: int, has_link: bool) -> Sequence[int]:
    """Return the numbers of workers that are asked for; of more than `EACH`, some of those above it.

    Raises:
        UsageError: it is no number and no range, or needs more machines than one and there is no link.
    """
    own = per_host or room
    first, colon, last = (text or f"1:{min(MOST, own * (SOME_HOSTS if has_link else 1))}").partition(":")
    try:
        low, high = int(first), int(last if colon else first)
    except ValueError:
        raise UsageError(f"--workers must be a number from 1, or A:B with 1 <= A <= B; got {text!r}") from None
    if not 1 <= low <= high:
        raise UsageError(f"--workers must be a number from 1, or A:B with 1 <= A <= B; got {text!r}")
    if high > MOST:
        raise UsageError(f"plans go up to {MOST} workers, the most for which the model was tested; got {text!r}")
    if high > own and not has_link:
        raise UsageError(
            f"a machine has room for {own} workers, so --workers {text} needs several machines: give the link between "
            "them, e.g. --link 1gbit"
        )
    above = itertools.takewhile(lambda number: number < high, (EACH * 2**power for power in itertools.count(1)))
    few = [low, *range(low, min(high, EACH) + 1), *(number for number in above if number > low), high]
    return sorted(set(range(low, high + 1) if high - low < EACH else few))


def _trials(script: Script, steps: int, room: int, asked: PlanRequest) -> list[Measurement]:
    """Measure the script alone, with two workers, with as many as the machine has room for, and between two hosts."""
    say("unisono: measuring the first steps, alone", err=True)
    alone = trial(script, ProbeSettings(steps=steps, seconds=SECONDS))
    check_recipe(alone.found.recipe)
    check_layouts(asked.layouts, alone.found)
    found = [alone]
    same = ProbeSettings(steps=alone.found.done)
    together = min(room, asked.per_host, asked.workers[-1])
    for number in sorted({min(2, together), together} - {1}):
        say(f"unisono: measuring the first steps, with {number} workers", err=True)
        found.append(trial(script, same, workers=number))
    if asked.link is not None and room > 1:
        say("unisono: measuring the first steps, with 2 workers, as if on two machines", err=True)
        found.append(trial(script, same, workers=2, hosts=2))
    return found


def _made(name: str, facts: ForecastInputs, memories: Mapping[int, WorkerMemory], asked: PlanRequest) -> PlanRecord:
    """Return the plan from what was measured.

    Args:
        name: of what is planned: the script, or the directory of a run.
        memories: of a worker, by the number of workers; empty: unknown.
    """
    return PlanRecord(
        time=time.time(),
        script=name,
        link=str(asked.link or ""),
        per_host=asked.per_host,
        batch_size=facts.batch_size,
        microbatches=facts.microbatches,
        spread=max(one.spread for one in facts.samples),
        forecasts=forecasts(facts, memories, asked.rosters, asked.options, asked.price),
    )


def _tell(
    made: PlanRecord,
    trials: list[Measurement],
    facts: ForecastInputs,
    asked: PlanRequest,
    found: Search | None,
    *,
    as_json: bool,
) -> None:
    if as_json:
        say_json(made if found is None else {**msgspec.to_builtins(made), "found": plain_search(found)})
        return
    where = [(one.sample.workers, one.sample.hosts) for one in trials]
    say(f"plan of {made.script}: {_batches(made)}; measured {trials[0].found.done} steps of {_measured(where)}")
    if (held_up := max(one.found.held_up for one in trials)) > BUSY:
        say(
            f"other programs use this machine: workers had no core for {held_up:.0%} of the time, so this is a plan "
            "for a machine that is as busy"
        )
    _show(made, facts, asked, trials[0].found.limit)
    if made.groups:
        say_lines("\n" + shown_groups(made.groups, len(trials[0].found.stages)))


def _show(made: PlanRecord, facts: ForecastInputs, asked: PlanRequest, room_bytes: int | None) -> None:
    say_lines("\n" + shown_workers(made, asked.price) + "\n  * measured\n")
    most = asked.workers[-1]
    roster = asked.largest
    if most > 1:
        between = f" on {-(-most // asked.per_host)} hosts, {asked.link}" if most > asked.per_host else ""
        say_lines(f"with {most} workers{between}, other strategies by their models (docs/benchmarks.md):\n")
        say_lines(shown_strategies(made, most, asked.options) + "\n")
        if missing := shown_missing(facts, roster):
            say_lines(missing)
    for sentence in shown_conclusions(facts, made, roster, room_bytes):
        say_lines(sentence)


def _plan_of_run(directory: Path, workers: str, room: int, asked: PlanRequest, *, as_json: bool) -> int:
    """Compare a run with the plan in its directory, and make another one from the steps that it has done."""
    if holder(directory) is None:
        raise UsageError(f"there is no run in {directory}, and no script; give one of them")
    samples = samples_in(directory)
    before = read_plan(directory)
    if before is not None and not workers:
        _refuse(OF_A_PLAN, "is for making a plan, and this run has one to compare with; give --workers to make another")
        return _compare(directory, before, samples, as_json=as_json)
    facts = facts_of_run(directory, samples, room)
    made = _made(str(directory), facts, {}, asked)
    if as_json:
        say_json(made)
        return 0
    where = sorted({(one.workers, one.hosts) for one in facts.samples})
    say(f"plan from the steps of {directory} with {_measured(where)}: {_batches(made)}")
    _show(made, facts, asked, None)
    return 0


def _compare(directory: Path, before: PlanRecord, samples: Sequence[Sample], *, as_json: bool) -> int:
    """Tell what was expected of a run beside what came; 1: they cannot be compared."""
    recipe = read_facts(directory).get("recipe") or {}
    check_recipe(recipe)
    if other := differs(before, recipe):
        raise UsageError(f"the plan in {directory} is for a different training: {other}")
    found = came(before, samples)
    if not found:
        planned = sorted({(one.workers, one.hosts) for one in before.forecasts})
        had = _measured([(one.workers, one.hosts) for one in samples]) if samples else "no number of workers"
        say(
            f"nothing to compare: the plan is about {_measured(planned)}, and the run has done enough steps "
            f"({IN_A_ROW} from its beginning, or {IN_A_ROW_ALONE} in a row later or with one worker) with {had}",
            err=True,
        )
    if as_json:
        say_json(found)
    elif found:
        say_lines(shown_came(found))
    return 0 if found else 1


def _measured(sizes: list[tuple[int, int]]) -> str:
    return listed([count(workers, "worker") + (f" on {hosts} hosts" if hosts > 1 else "") for workers, hosts in sizes])


def _batches(made: PlanRecord) -> str:
    return f"batches of {count(made.batch_size, 'sample')} in {made.microbatches} micro-batches"
