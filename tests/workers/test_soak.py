"""Workers are killed and stopped, join and leave at random, for dozens of generations, and not one bit changes.

A part of it is armed beforehand (kills at random points of random steps), a part comes from outside, at no particular
point of anything. Seeded: what is done does not depend on the machine; when exactly it hits, does. The checks do one
such training; `make soak` repeats it for an hour (UNISONO_SOAK_S=3600), each time with another seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import SILENCE_S
from tests.workers.conftest import Command, Unisono, served_by
from tests.workers.gates import Gates
from unisono.cli.reach import ask_status, find
from unisono.record.journal import compare, read
from unisono.system.faults import POINTS
from unisono.testing import Faults, run_workers

SOAK_S = float(os.environ.get("UNISONO_SOAK_S", "0"))

pytestmark = [pytest.mark.timeout(900 + 2 * SOAK_S), pytest.mark.usefixtures("nursery"), pytest.mark.more]

SCRIPT = Path(__file__).with_name("small_training.py")
STEPS = 480
EVERY = 24
"""Steps between two gates."""
LEAST_GENERATIONS = 24
LANES = range(2 if SOAK_S else 1)
"""Trainings that go on side by side."""
IMMORTAL = "w1"
"""Nothing happens to this worker, and it belongs to no machine that leaves: so somebody always holds the state."""
MOST_WORKERS = 5


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one worker, to which nothing happens."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    with served_by(standing_nursery):
        outcome = run_workers(SCRIPT, 1, directory=folder, arguments=["--steps", str(STEPS)])
    assert outcome.exit_code == 0, outcome.output
    return folder


class Weather:
    """What happens to one run."""

    def __init__(self, seed: int, unisono: Unisono, run_dir: Path) -> None:
        self._draw = random.Random(seed)
        self._unisono = unisono
        self._run_dir = run_dir
        self.guests: list[Command] = []
        self._gone: set[int] = set()
        """Guests that were told to leave, or killed."""

    def faults(self) -> Faults:
        """Kills for every third worker that there may be."""
        faults = Faults()
        for number in range(0, 150, 3):
            at, step = self._draw.choice([at for at in POINTS if "." not in at]), self._draw.randrange(1, STEPS)
            faults = faults.kill(f"w{number}", at=at, step=step)
        return faults

    def strike(self) -> None:
        """One thing, from outside."""
        training = [w for w in ask_status(find(str(self._run_dir)))["workers"] if w["state"] == "training"]
        targets = [w for w in training if w["worker_id"] != IMMORTAL]
        present = [guest for guest in self.guests if guest.pid not in self._gone and guest.process.poll() is None]
        what = self._draw.random()
        if len(training) < 3 or (what < 0.4 and len(training) < MOST_WORKERS):
            self._join(self._draw.randint(1, 2))
        elif what < 0.8 and targets:
            number = signal.SIGSTOP if what > 0.74 else signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._draw.choice(targets)["pid"], number)
        elif present and len(training) > 3:
            guest = self._draw.choice(present)
            self._gone.add(guest.pid)
            guest.process.send_signal(self._draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGKILL]))

    def _join(self, workers: int) -> None:
        known = json.loads((self._run_dir / "head.json").read_text())
        guest = self._unisono("join", known["url"], "--token-file", self._run_dir / "token", "-n", workers)
        self.guests.append(guest)


@pytest.mark.parametrize("lane", LANES)
def test_random_kills_stops_joins_and_leaves(
    lane: int,
    unisono: Unisono,
    calm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Whatever happens to whom: gradients, evaluations and final state are those of one worker that nobody touched."""
    until, seed = time.monotonic() + SOAK_S, lane + 1
    while seed == lane + 1 or time.monotonic() < until:
        folder = tmp_path / f"seed-{seed}"
        folder.mkdir()
        run_dir = folder / "run"
        weather = Weather(seed, unisono, run_dir)
        monkeypatch.setenv(*next(iter(weather.faults().environment().items())))
        options = ["--max-restarts", 1000, "--set", f"heartbeat-timeout={SILENCE_S}s"]
        at = range(EVERY, STEPS, EVERY)
        with Gates(folder / "gates", at) as gates:
            command = unisono(
                *("run", SCRIPT, "-n", 3, "--run-dir", run_dir, *options),
                *("--", "--steps", STEPS, "--gates", gates.folder),
            )
            for step in at:
                try:
                    gates.wait(step)
                except AssertionError as error:
                    command.give_up(str(error))
                weather.strike()
                gates.open(step)
                weather.strike()
            assert command.wait() == 0, command.err
        assert compare(calm, run_dir).startswith(f"identical: {STEPS} steps"), f"seed {seed}"
        generations = {line["generation"] for line in read(run_dir) if line["kind"] == "step"}
        assert max(generations) >= LEAST_GENERATIONS, f"seed {seed} had only {max(generations)} generations"
        for guest in weather.guests:
            guest.wait()
        record_property("found", f"seed {seed}: identical after {max(generations)} generations")
        seed += len(LANES)
