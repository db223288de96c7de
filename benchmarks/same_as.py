"""Does this version give the same bits as an earlier one, and read what that one has written?

python -m benchmarks.same_as COMMIT --workers 1 2 3 4 5

Every recipe of the tests and every example is trained twice alone, by the library at COMMIT and by this one, and by
this one on each number of workers. The scripts are those of this version, so only the library differs. Compared are the
digests of all steps, evaluations and final states, bit by bit. This version reads the journals of the earlier one to do
so; then it goes on from a checkpoint that the earlier one has written, to the end of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import benchmarks
from unisono.record.journal import Difference, compare

ROOT = Path(benchmarks.__file__).resolve().parents[1]
LIMIT_S = 1800.0
MICROBATCHES = 6
STEPS_BEFORE, STEPS = 6, 12
RECIPE = "from tests.workers.models import main\n\nmain()\n"
"""The script of a recipe: ``recipe.py NAME M DIRECTORY``."""
RESUMED = """
import sys

import torch
import unisono
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

directory, steps = sys.argv[1] if len(sys.argv) > 2 else None, int(sys.argv[-1])
with unisono.Run(directory, seed=3, checkpoint=unisono.Checkpoints(every_steps=3)) as run:
    data = TensorDataset(torch.randn(54, 12), torch.randint(0, 4, (54,)))
    model = nn.Sequential(nn.Linear(12, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, average=average)
    for step in run.steps(data, batch_size=24, microbatches=8, epochs=10**9, max_steps=steps):
        for inputs, labels in step:
            step.backward(F.cross_entropy(model(inputs), labels), weight=len(labels))
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        if step.number % 4 == 2:
            run.evaluate(data, lambda batch: {"right": (model(batch[0]).argmax(1) == batch[1]).sum()}, batch_size=7)
"""
"""The script that one version begins and the other resumes: ``resumed.py [DIRECTORY] STEPS``, public names only."""
EXAMPLES = {
    "digits": ("examples/digits.py", "--epochs", "2"),
    "fashion_mnist": ("examples/fashion_mnist.py", "--epochs", "1", "--samples", "2048"),
    "language_model": ("examples/language_model.py", "--epochs", "1", "--documents", "40"),
}
NEEDS = {"fashion_mnist": "data/fashion-mnist", "language_model": "data/english"}
"""What ``make data`` fetches."""


DIRECTORY = "{directory}"
"""In the arguments of a script: where its run goes, if it is alone."""


@dataclass(frozen=True)
class Training:
    """A script with its arguments, to be run by either version."""

    name: str
    script: Path
    arguments: tuple[str, ...]

    def arguments_for(self, directory: Path) -> list[str]:
        return [str(directory) if argument == DIRECTORY else argument for argument in self.arguments]


@dataclass(frozen=True)
class Library:
    """One version of the library."""

    source: Path

    def run(self, *command: str | Path) -> None:
        """Run a command with this version.

        Raises:
            RuntimeError: it failed; with what it said.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.source), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")

    def train_alone(self, training: Training, directory: Path) -> None:
        self.run(training.script, *training.arguments_for(directory))

    def train(self, training: Training, directory: Path, workers: int, *options: str | Path) -> None:
        command = ("-P", "-m", "unisono", "run", training.script, "--workers", str(workers), "--run-dir", directory)
        self.run(*command, *options, "--", *training.arguments_for(directory))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the version to compare with")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--only", nargs="*", default=[], help="names of recipes and examples")
    parser.add_argument(
        "--at-once", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="trainings side by side"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unisono-same-as-") as name:
        folder = Path(name)
        before, now = Library(checked_out(arguments.commit, folder / "before") / "src"), Library(ROOT / "src")
        found = [one for one in trainings(folder) if not arguments.only or one.name in arguments.only]

        def judge(training: Training) -> str:
            return judged(lambda: compare_training(training, before, now, folder, arguments.workers))

        with ThreadPoolExecutor(arguments.at_once) as threads:
            verdicts = dict(zip([one.name for one in found], threads.map(judge, found), strict=True))
        if not arguments.only or "resumed" in arguments.only:
            verdicts["resumed"] = judged(lambda: compare_resumed(before, now, folder, arguments.workers))
    for training_name, verdict in verdicts.items():
        print(f"{training_name:15}  {verdict}")
    different = [name for name, verdict in verdicts.items() if not verdict.startswith(("identical", "skipped"))]
    print(f"{len(verdicts)} trainings, {len(different)} of them not as at {arguments.commit}")
    return 1 if different else 0


def checked_out(commit: str, folder: Path) -> Path:
    """Put the sources and the benchmarks of a commit into a folder, and return it."""
    archive = subprocess.run(
        ["git", "archive", commit, "src", "benchmarks"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def trainings(folder: Path) -> Iterator[Training]:
    """All recipes of the tests, and all examples."""
    from tests.workers.models import RECIPES

    script = folder / "recipe.py"
    script.write_text(RECIPE)
    for name in RECIPES:
        yield Training(name, script, (name, str(MICROBATCHES), DIRECTORY))
    for name, (path, *arguments) in EXAMPLES.items():
        yield Training(name, ROOT / path, (*arguments, "--run-dir", DIRECTORY))


def compare_training(training: Training, before: Library, now: Library, folder: Path, workers: Sequence[int]) -> str:
    """Train by both versions, and compare.

    Raises:
        Difference, RuntimeError: they are not the same; a run failed.
    """
    if (need := NEEDS.get(training.name)) and not (ROOT / need).exists():
        return f"skipped: {need} is missing; `make data` fetches it"
    place = folder / training.name.replace(" ", "-")
    before.train_alone(training, place / "before")
    now.train_alone(training, place / "now")
    verdict = compare(place / "before", place / "now")
    for number in workers:
        now.train(training, place / f"now-{number}", number)
        compare(place / "before", place / f"now-{number}")
    return f"{verdict}; also on {', '.join(map(str, workers))} workers" if workers else verdict


def compare_resumed(before: Library, now: Library, folder: Path, workers: Sequence[int]) -> str:
    """Go on by this version from a checkpoint of the earlier one.

    Raises:
        Difference, RuntimeError: it does not end as a run that was never stopped; a run failed.
    """
    place, script = folder / "resumed", folder / "resumed.py"
    script.write_text(RESUMED)

    def training(steps: int) -> Training:
        return Training("resumed", script, (DIRECTORY, str(steps)))

    before.train_alone(training(STEPS), place / "calm")
    verdict = ""
    for number in workers or [1]:
        directory = place / f"now-{number}"
        before.train(training(STEPS_BEFORE), directory, 2)
        now.train(training(STEPS), directory, number, "--resume", directory)
        verdict = compare(place / "calm", directory)
    return verdict


def judged(compared: Callable[[], str]) -> str:
    """What a comparison comes to, as text."""
    try:
        return compared()
    except Difference as difference:
        return f"different: {difference}"
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"


if __name__ == "__main__":
    sys.exit(main())
