"""Five examples give the same bits on any number of workers, whatever happens.

The product is example x workers x exchange x event. The checks run a part of it, in which every two values of different
axes meet. UNISONO_TEST_ALL=1 runs all of it.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.parts import ALL
from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import IMPORTS, Unisono, forked, marked, wait_until_gone
from tests.workers.gates import Gates
from tests.workers.losses import ended_workers
from tests.workers.scripts import run_script
from unisono.record.journal import compare, read
from unisono.record.journal.times import by_step
from unisono.testing import Faults, Outcome, run_workers

pytestmark = pytest.mark.more

ROOT = Path(__file__).resolve().parents[2]
GATED = Path(__file__).with_name("gated.py")
STEPS = 6
"""Of each run: two epochs of three."""
LATE = 4
"""The step in which something happens, in the middle of the second epoch."""

ARGUMENTS = {
    "gan": ["--width", "8", "--batch-size", "384"],
    "recurrent_language_model": ["--width", "16", "--length", "8", "--batch-size", "12"],
    "graph_network": ["--labels", "3", "--batch-size", "12"],
    "imbalanced_digits": ["--batch-size", "138"],
    "reinforcement": ["--episodes", "32", "--batch-size", "12", "--longest", "20"],
}
SHORT = ["--epochs", "2", "--microbatches", "6", "--checkpoint-every", str(LATE)]
WORKERS = (1, 2, 3, 5)
EXCHANGES = ("shared", "gloo")
EVENTS = ("calm", "kill", "join", "resume")
POINTS = ("before_combine", "published", "reduced", "committed", "after_step")
"""Those that every worker comes to, also one whose micro-batches others have computed."""

Case = tuple[str, int, str, str]
"""Example, number of workers, exchange, event."""


def spread() -> Iterator[Case]:
    """Yield, for each example, every number of workers and every event."""
    for number, example in enumerate(ARGUMENTS):
        for place, workers in enumerate(WORKERS):
            yield example, workers, EXCHANGES[(place // 2 + number) % 2], EVENTS[(place + number) % 4]


EVERYTHING = list(itertools.product(ARGUMENTS, WORKERS, EXCHANGES, EVENTS))
CASES = EVERYTHING if ALL else list(spread())
PASSES = [(point, nth) for nth in (0, 1) for point in POINTS[:-1]]
"""Point, and how often the worker passes by it before."""
if not ALL:
    PASSES = [(point, number % 2) for number, point in enumerate(POINTS[:-1])]


def test_in_the_part_that_is_run_every_two_values_meet() -> None:
    for one, other in itertools.combinations(range(4), 2):
        met = {(case[one], case[other]) for case in spread()}
        assert met == {(case[one], case[other]) for case in EVERYTHING}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of documents: one to test on, and one to train on."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "tutorial").mkdir()
    lines = [f"{number} green bottles hanging on the wall,\n" for number in range(10)]
    (folder / "tutorial" / "1.rst.txt").write_text("".join(lines[:3]))
    (folder / "tutorial" / "2.rst.txt").write_text("".join(lines)[: 3 * 8 * 12 + 1])
    return folder


@dataclass(frozen=True)
class Example:
    """An example with few steps, and where it has run alone."""

    script: Path
    arguments: list[str]
    alone: Path

    def gated(self, gates: Path) -> Example:
        """Return the same example, with gates between its steps."""
        return replace(self, script=GATED, arguments=[str(self.script), str(gates), *self.arguments])


@pytest.fixture(scope="session")
def prepare(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Example]:
    prepared: dict[str, Example] = {}

    def prepare(name: str) -> Example:
        if name not in prepared:
            script, alone = ROOT / "examples" / f"{name}.py", tmp_path_factory.mktemp(name) / "alone"
            data = ["--data", str(text)] if name == "recurrent_language_model" else []
            arguments = [*ARGUMENTS[name], *SHORT, *data]
            code, output = run_script(script, *arguments, "--run-dir", alone, imports=IMPORTS)
            assert code == 0, output
            prepared[name] = Example(script, arguments, alone)
            assert [line["kind"] for line in results(alone)].count("step") == STEPS
        return prepared[name]

    return prepare


def results(run_dir: Path) -> list[dict[str, Any]]:
    """What must be the same in every run."""
    names = ("kind", "step", "epoch", "loss", "losses", "samples", "digest", "totals", "ok", "digests")
    return [{name: line.get(name) for name in names} for line in read(run_dir)]


def run(
    example: Example, workers: int, directory: Path, options: Sequence[str], faults: Faults | None = None
) -> Outcome:
    return run_workers(
        example.script,
        workers,
        directory=directory,
        arguments=example.arguments,
        options=options,
        faults=faults,
        timeout_s=WAIT_S,
    )


def join(example: Example, workers: int, exchange: str, directory: Path, unisono: Unisono) -> None:
    """Let another worker join in the middle of the second epoch: on a machine of its own, or on the same one."""
    with Gates(directory.parent / "gates", [LATE - 1]) as gates:
        gated = example.gated(gates.folder)
        options = ["-n", workers, "--exchange", exchange, "--run-dir", directory]
        command = unisono("run", gated.script, *options, "--", *gated.arguments)
        gates.wait(LATE - 1)
        if exchange == "gloo":
            address = json.loads((directory / "head.json").read_text())["url"]
            unisono("join", address, "--token-file", directory / "token", "-n", 1)
        else:
            assert unisono("scale", directory, workers + 1).wait() == 0
        gates.open(LATE - 1, command.generation(f"generation 2 with {workers + 1} workers"))
        assert command.wait() == 0, command.err
    sizes = [len(workers) for workers in by_step(directory).values()]
    assert sizes == [workers] * LATE + [workers + 1] * (STEPS - LATE)


def kill(example: Example, workers: int, options: Sequence[str], directory: Path) -> None:
    """Kill a worker in the middle of the second epoch. One that is alone is killed before it has any state to lose."""
    step = LATE if workers > 1 else 0
    point = POINTS[(list(ARGUMENTS).index(example.script.stem) + workers) % len(POINTS)] if step else "before_combine"
    outcome = run(example, workers, directory, options, Faults().kill(f"w{workers - 1}", step=step, at=point))
    assert outcome.exit_code == 0, outcome.output
    assert ended_workers(outcome.output) == {f"w{workers - 1}"}


def resume(example: Example, workers: int, options: Sequence[str], directory: Path, mark: str) -> None:
    """Kill everything in the middle of the second epoch, and go on with another number of workers."""
    example = example.gated(Path("none"))  # waits for its checkpoints
    faults = Faults()
    for step in (LATE, LATE + 1):  # whenever the disk has it
        faults = faults.kill_run("w0", step=step, at="checkpoint_renamed")
    outcome = run(example, workers, directory, options, faults)
    assert outcome.exit_code == -signal.SIGKILL, outcome.output
    wait_until_gone({*marked(mark), *forked()}, time.monotonic() + WAIT_S)  # who still ends holds the directory
    other = WORKERS[(WORKERS.index(workers) + 1) % len(WORKERS)]
    outcome = run(example, other, directory, [*options, "--resume", str(directory)])
    assert outcome.exit_code == 0, outcome.output
    assert re.search(f"resuming at step [{LATE}{LATE + 1}],", outcome.output)  # within the second epoch


@pytest.mark.parametrize(("name", "workers", "exchange", "event"), CASES)
def test_an_example_gives_the_same_bits(
    name: str,
    workers: int,
    exchange: str,
    event: str,
    prepare: Callable[[str], Example],
    nursery_with_data: str,
    unisono: Unisono,
    mark: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    example, directory, options = prepare(name), tmp_path / "run", [*PATIENT, "--exchange", exchange]
    monkeypatch.setenv("UNISONO_NURSERY", nursery_with_data)
    match event:
        case "calm":
            outcome = run(example, workers, directory, options)
            assert outcome.exit_code == 0, outcome.output
        case "kill":
            kill(example, workers, options, directory)
        case "join":
            join(example, workers, exchange, directory, unisono)
        case "resume":
            resume(example, workers, options, directory, mark)
    assert compare(example.alone, directory).startswith(f"identical: {STEPS} steps")
    assert results(directory) == results(example.alone)


@pytest.mark.parametrize(("point", "nth"), PASSES)
def test_a_kill_in_either_pass_over_a_batch_changes_no_bit(
    point: str,
    nth: int,
    prepare: Callable[[str], Example],
    nursery_with_data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a kill in the second pass, the others still have the gradients, losses and sums of the first."""
    example, directory = prepare("gan"), tmp_path / "run"
    monkeypatch.setenv("UNISONO_NURSERY", nursery_with_data)
    outcome = run(example, 3, directory, PATIENT, Faults().kill("w1", step=LATE, at=point, skip=nth))
    assert outcome.exit_code == 0, outcome.output
    assert ended_workers(outcome.output) == {"w1"}
    assert results(directory) == results(example.alone)
