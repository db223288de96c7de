"""Trials: the first steps of a script, computed in several ways."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from unisono.core.errors import UsageError
from unisono.core.words import count
from unisono.record.journal import JOURNAL, read
from unisono.system.extras import need
from unisono.system.faults import ENVIRONMENT, Fault, encode
from unisono.system.lifetime import NURSERY, started
from unisono.system.process import tell
from unisono.tools.check.records import Record, StateRecord, records_of
from unisono.tools.trialrun import Script, trial_run

__all__ = ["ALONE", "KILL", "TRIALS", "Runner", "Trial", "TrialOutcome"]

KNOWN_TO_NURSERY: Final = {"PYTHONPATH"}
"""Variables that a process from which workers are forked need not have been started with."""
MOST_SOCKET_BYTES: Final = 100
"""Of a path at which a process can listen; the systems allow 103 or 107."""


@dataclass(frozen=True)
class Trial:
    """One way to compute the first steps.

    Attributes:
        name: in words.
        hashing: the ``PYTHONHASHSEED`` of its workers.
        faults: what happens to workers; each that is lost is replaced.
    """

    name: str
    workers: int = 1
    hosts: int = 1
    hashing: int = 0
    faults: tuple[Fault, ...] = ()


KILL: Final = Fault(action="kill", worker="w1", at="before_combine", step=0)
"""A worker is lost in the first step."""
ALONE: Final = Trial("alone")
TRIALS: Final = (
    Trial("alone, once more"),
    Trial("alone, with another order of sets", hashing=1),
    Trial("two workers", workers=2),
    Trial("two hosts, a worker lost, one joins", workers=2, hosts=2, faults=(KILL,)),
)


@dataclass(frozen=True)
class TrialOutcome:
    """What a trial has left."""

    trial: Trial
    exit_code: int
    output: str
    workers: dict[str, list[Record]] = field(repr=False)
    evaluations: list[tuple[int, str]] = field(repr=False)
    """Of each: the steps before it, and its totals."""
    run: Path = Path()
    """The directory of its run."""

    @property
    def num_steps(self) -> int:
        """The steps of the run that were done, by any of the workers."""
        records = (each for own in self.workers.values() for each in own)
        return max((each.step for each in records if isinstance(each, StateRecord)), default=0)

    @property
    def has_joined(self) -> bool:
        """Whether a worker came instead of the one that was lost."""
        return len(self.workers) > self.trial.workers


@dataclass
class Runner:
    """Runs trials of one script, each in a folder of its own.

    Args:
        steps: how many of the run are done.
        timeout_s: of one trial.
        nurseries: by ``PYTHONHASHSEED``, where a process listens from which workers are forked; others are started.
    """

    script: Script
    steps: int
    timeout_s: float
    nurseries: dict[int, str] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _number: int = 0

    def __enter__(self) -> Runner:
        need("torch", "a worker", "torch")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, trial: Trial, *, traces: bool = False, watches: bool = False) -> TrialOutcome:
        """Compute the first steps. Blocks until the trial is over.

        Args:
            traces: write down what the statements of the script read and write.
            watches: of a traced trial, look after each statement of a micro-batch whether it has changed a parameter.

        Raises:
            UsageError: it takes too long.
        """
        self._number += 1
        folder = self.script.directory / f"trial{self._number}"
        records, run_dir = folder / "records", folder / "run"
        records.mkdir(parents=True)
        settings = {
            "folder": str(records),
            "steps": self.steps,
            "traces": traces,
            "watches": watches,
            "members": trial.workers if trial.faults else 1,
        }
        why = ", to find the statement" if traces else ""
        tell(f"unisono: computes the first {count(self.steps, 'step')}: {trial.name}{why}")
        try:
            code, output = trial_run(
                self.script,
                run_dir,
                ("check", json.dumps(settings)),
                workers=trial.workers,
                hosts=trial.hosts,
                restarts=len(trial.faults),
                variables=self._variables(trial),
                limit_s=self.timeout_s,
                name=trial.name,
                steps=self.steps,
            )
        except TimeoutError:
            raise UsageError(
                f"the first {self.steps} steps took longer than {self.timeout_s:.0f} s; allow more time (--timeout, "
                "timeout_s=), use fewer steps, or make the script smaller with its arguments"
            ) from None
        evaluations = list(_evaluations(run_dir / JOURNAL))
        return TrialOutcome(trial, code, output, records_of(records), evaluations, run_dir)

    def _variables(self, trial: Trial) -> dict[str, str]:
        return {
            "PYTHONHASHSEED": str(trial.hashing),
            **({NURSERY: found} if (found := self._nursery(trial.hashing)) else {}),
            **({ENVIRONMENT: encode(list(trial.faults))} if trial.faults else {}),
        }

    def _nursery(self, hashing: int) -> str:
        """Return where the process listens from which workers are forked; it has imported torch, once for all."""
        if sys.platform != "linux":
            return ""
        if hashing == 0 and not self.script.variables.keys() - KNOWN_TO_NURSERY and (given := os.environ.get(NURSERY)):
            return given
        if hashing not in self.nurseries:
            path = str(self.script.directory / f"nursery{hashing}")
            if len(os.fsencode(path)) > MOST_SOCKET_BYTES:
                return ""
            environment = {**os.environ, **self.script.variables, "PYTHONHASHSEED": str(hashing)}
            environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
            command = [sys.executable, "-P", "-m", "unisono.script.nursery", "--listen", path]
            nursery = started(command, environment=environment, stdout=subprocess.PIPE)
            process = self._stack.enter_context(nursery)
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], self.timeout_s)
            if not ready or b"listens" not in process.stdout.readline():
                raise UsageError(
                    f"the process that forks workers did not start within {self.timeout_s:.0f} s; give --timeout more"
                )
            self.nurseries[hashing] = path
        return self.nurseries[hashing]


def _evaluations(journal: Path) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError, ValueError):
        for line in read(journal):
            if line["kind"] == "evaluation":
                yield line["step"], json.dumps(line["totals"])
