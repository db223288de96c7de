"""What a run has lived through, from its files alone: who came and went, when, why, where, and how the run ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import WAIT_S
from tests.workers import small_training
from tests.workers.conftest import Command, Unisono
from tests.workers.gates import Gates
from tests.workers.test_elastic import join, pid_of
from unisono.cluster.machine.workers import machine_label
from unisono.record.journal import read
from unisono.record.rundir import EVENTS_FILE, read_facts
from unisono.testing import run_workers

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]
SCRIPT = Path(small_training.__file__)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def start(unisono: Unisono, run_dir: Path, gates: Gates, workers: int, steps: int, *options: object) -> Command:
    place = ("--steps", steps, "--gates", gates.folder)
    return unisono("run", SCRIPT, "-n", workers, "--run-dir", run_dir, *options, "--", *place)


def story(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    """The lines of these kinds; all of them: sound, none twice."""
    lines = [json.loads(line) for line in (run_dir / EVENTS_FILE).read_text().splitlines()]
    run_id = read_facts(run_dir)["run_id"]
    assert all(line["run_id"] == run_id for line in lines)
    assert all(abs(line["time"] - time.time()) < 3600 for line in lines), "each has its time of day"
    assert len({json.dumps(line) for line in lines}) == len(lines), "nothing is told twice"
    return [line for line in lines if line["kind"] in kinds]


def ways(run_dir: Path) -> list[tuple[str, str]]:
    return [(line["worker_id"], line["how"]) for line in story(run_dir, "gone")]


def test_a_run_that_loses_a_worker_gets_a_machine_and_is_stopped(
    unisono: Unisono, run_dir: Path, tmp_path: Path
) -> None:
    with Gates(tmp_path / "gates", (3, 8, 14, 20)) as gates:
        command = start(unisono, run_dir, gates, 2, 60)
        gates.wait(3, workers=2)
        os.kill(pid_of("w1", run_dir), signal.SIGKILL)
        gates.open(3, command.generation("with 1 worker"))
        gates.wait(8)
        gates.open(8, command.generation("w2 joins"))
        gates.wait(14, workers=2)
        guest = join(unisono, run_dir, 1)
        gates.open(14, command.generation("w3 joins"))
        gates.wait(20, workers=3)
        assert unisono("stop", run_dir).wait() == 0
        gates.open(20)
        assert (command.wait(), guest.wait()) == (0, 0)
    host = machine_label()
    joined = [(line["worker_id"], line["host"], line["reason"]) for line in story(run_dir, "joined")]
    assert sorted(joined[:2]) == [(worker_id, host, "the run begins") for worker_id in ("w0", "w1")]
    assert joined[2:] == [("w2", host, "replaces w1"), ("w3", host, f"{host} has joined")]
    assert story(run_dir, "joined")[2]["step"] in range(4, 10)
    first, *others = story(run_dir, "gone")
    assert (first["worker_id"], first["host"], first["how"]) == ("w1", host, "lost")
    assert "SIGKILL" in first["reason"] or "closed its connection" in first["reason"]
    stopped = {(line["worker_id"], line["how"], line["reason"]) for line in others}
    assert stopped == {(each, "left", "stopped by `unisono stop`") for each in ("w0", "w2", "w3")}
    generations = [(line["generation"], len(line["worker_ids"])) for line in story(run_dir, "membership")]
    assert generations[0] == (1, 2)
    assert [size for _, size in generations][-1] == 3
    assert all(line["reason"] for line in story(run_dir, "membership"))
    assert [line["num_workers"] for line in story(run_dir, "machine-joined")] == [2, 1]
    interrupted = story(run_dir, "interruption")
    assert [line["generation"] for line in interrupted][-1] == generations[-1][0]
    assert all(line["seconds"] >= 0 and line["reason"] for line in interrupted)
    (end,) = story(run_dir, "end")
    assert (end["ok"], end["reason"]) == (True, "stopped by `unisono stop`")
    assert end["step"] == max(line["step"] for line in read(run_dir) if line["kind"] == "step")
    (begin,) = story(run_dir, "start")
    assert begin["recipe"]["microbatches"] == 8


def test_another_head_tells_nothing_twice_and_loses_nothing(unisono: Unisono, run_dir: Path, tmp_path: Path) -> None:
    with Gates(tmp_path / "gates", (3,)) as gates:
        command = start(unisono, run_dir, gates, 2, 8)
        gates.wait(3, workers=2)
        os.kill(json.loads((run_dir / "head.json").read_text())["pid"], signal.SIGKILL)
        command.line("another one takes over")
        gates.open(3)
        assert command.wait() == 0, command.err
    assert sorted(line["worker_id"] for line in story(run_dir, "joined")) == ["w0", "w1"]
    assert sorted(ways(run_dir)) == [("w0", "finished"), ("w1", "finished")]
    assert len(story(run_dir, "machine-joined")) == len(story(run_dir, "end")) == 1
    assert any("another one takes over" in line["text"] for line in story(run_dir, "announcement"))
    assert story(run_dir, "end")[0]["digests"]


def test_when_the_command_is_killed_the_machine_that_goes_on_writes_the_rest(
    unisono: Unisono, run_dir: Path, tmp_path: Path
) -> None:
    """The head, the agent that wrote, and its workers end with the command."""
    with Gates(tmp_path / "gates", (3, 8)) as gates:
        command = start(unisono, run_dir, gates, 1, 12, "--set", "head-away=2s")
        gates.wait(3)
        guest = join(unisono, run_dir, 1)
        gates.open(3, command.generation("w1 joins"))
        gates.wait(8, workers=2)
        command.process.kill()
        guest.line("this machine runs the next head")
        gates.open(8)
        assert guest.wait() == 0, guest.err
    assert [line["agent_id"] for line in story(run_dir, "machine-joined")] == ["agent0", "agent1"]
    assert [line["agent_id"] for line in story(run_dir, "machine-gone")] == ["agent0"]
    assert sorted(ways(run_dir)) == [("w0", "lost"), ("w1", "finished")]
    assert [line["worker_id"] for line in story(run_dir, "joined")] == ["w0", "w1"]
    (end,) = story(run_dir, "end")
    assert (end["ok"], end["reason"], end["step"]) == (True, "finished", 11)


def test_when_all_but_one_command_are_killed_it_writes_why_the_run_has_ended(
    unisono: Unisono, run_dir: Path, tmp_path: Path
) -> None:
    with Gates(tmp_path / "gates", (3, 8)) as gates:
        command = start(unisono, run_dir, gates, 1, 12, "--set", "head-away=2s")
        gates.wait(3)
        guest = join(unisono, run_dir, 1)
        gates.open(3, command.generation("w1 joins"))
        gates.wait(8, workers=2)
        last = pid_of("w1", run_dir)
        command.process.kill()
        os.kill(last, signal.SIGKILL)
        assert guest.wait() == 1
    (end,) = story(run_dir, "end")
    assert not end["ok"]
    assert end["reason"] in " ".join(guest.err)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_story_with_its_name(
    number: signal.Signals, unisono: Unisono, run_dir: Path, tmp_path: Path
) -> None:
    with Gates(tmp_path / "gates", (3,)) as gates:
        command = start(unisono, run_dir, gates, 2, 8)
        gates.wait(3, workers=2)
        command.process.send_signal(number)
        command.wait()
    (end,) = story(run_dir, "end")
    assert end["reason"] == ("ended by SIGTERM" if number == signal.SIGTERM else "interrupted")
    assert any(line.endswith(f"unisono: failed: {end['reason']}") for line in command.err)


ALONE = """
import sys
import torch, unisono

with unisono.Run(sys.argv[1], seed=3, resume="auto") as run:
    model = torch.nn.Linear(1, 1)
    run.track(model=model)
    for step in run.steps(torch.arange(8.0), batch_size=4, microbatches=2, epochs=2, max_steps=int(sys.argv[2])):
        if step.number == 3 and len(sys.argv) > 3:
            raise ValueError("no such luck")
        for inputs in step:
            step.backward(model(inputs[:, None]).mean())
"""


def test_a_run_alone_writes_its_own(script: Callable[[str], str], tmp_path: Path) -> None:
    name, run_dir = script(ALONE), tmp_path / "run"

    def run(*arguments: object) -> int:
        command = [sys.executable, "-P", name, str(run_dir), *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=WAIT_S, check=False)
        return done.returncode

    assert run(4, "fails") == 1
    lines = [json.loads(line) for line in (run_dir / EVENTS_FILE).read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start", "membership", "problem", "end"]
    assert (lines[-1]["ok"], lines[-1]["step"]) == (False, 2)
    assert "ValueError: no such luck" in lines[-1]["reason"]
    assert run(4) == 0
    more = [json.loads(line) for line in (run_dir / EVENTS_FILE).read_text().splitlines()]
    assert more[: len(lines)] == lines, "a run that goes on appends"
    assert [line["kind"] for line in more[len(lines) :]] == ["start", "membership", "end"]
    assert len({line["run_id"] for line in more}) == 2, "each line says of which run it is"


def test_machine_use_is_kept_in_the_directory(tmp_path: Path) -> None:
    text = """
import threading, torch, unisono
from pathlib import Path

with unisono.Run(seed=3) as run:
    model = torch.nn.Linear(1, 1)
    run.track(model=model)
    pause = threading.Event()
    for step in run.steps(torch.arange(8.0), batch_size=4, microbatches=2, epochs=500):
        for inputs in step:
            step.backward(model(inputs[:, None]).mean())
        pause.wait(0.02)
        used = run.directory / "use.jsonl"
        if step.number > 900 or run.broadcast(used.exists() and '"workers":{"w' in used.read_text()):
            break
"""
    (tmp_path / "train.py").write_text(text)
    outcome = run_workers(tmp_path / "train.py", 2, directory=tmp_path / "run")
    assert outcome.exit_code == 0, outcome.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "use.jsonl").read_text().splitlines()]
    (used,) = rows[-1]
    assert used["host"] == machine_label()
    assert sorted(used["workers"]) == ["w0", "w1"]
    assert used["num_cores"] >= 1
    assert 0 < used["memory_bytes"] < used["memory_total_bytes"]
