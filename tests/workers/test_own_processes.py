"""Processes that the script starts: they are no workers, and runs of theirs are runs of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import unisono
from tests.waiting import WAIT_S
from tests.workers.conftest import Command, Unisono
from unisono.record import checkpoint_files as files
from unisono.record.history import History
from unisono.record.journal import compare
from unisono.testing import run_workers

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

Script = Callable[..., str]

OWN = """
    import sys, torch, unisono

    def train(directory, overwrite=True):
        policy = unisono.Checkpoints(every_steps=2)
        with unisono.Run(directory, seed=1, checkpoint=policy, overwrite=overwrite) as run:
            model = torch.nn.Linear(2, 1)
            run.track(model=model)
            for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=4, epochs=4):
                for batch in step:
                    step.backward(model(batch).mean())

    if __name__ == "__main__":
        train(sys.argv[1])
"""
WITH_CHILDREN = """
    import json, multiprocessing, os, subprocess, sys, torch, unisono
    from own import train

    def start_children():
        subprocess.run([sys.executable, "own.py", "by-subprocess"], check=True)
        for way in ("spawn", "fork"):
            child = multiprocessing.get_context(way).Process(target=train, args=(f"by-{way}",))
            child.start()
            child.join()
            assert child.exitcode == 0, way
        command = [sys.executable, "-m", "unisono", "run", "-n", "1", "--run-dir", "by-command", "own.py", "--", "x"]
        subprocess.run(command, check=True)
        told = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout.split()
        names = [line.partition("=")[0] for line in told if line.startswith(("UNISONO", "PYTHONUNBUFFERED"))]
        print("told", *sorted(names), flush=True)

    if __name__ == "__main__":
        with unisono.Run("ignored", seed=1, checkpoint=unisono.Checkpoints(every_steps=2, keep=9)) as run:
            model = torch.nn.Linear(2, 1)
            run.track(model=model)
            for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=4, epochs=8):
                for batch in step:
                    step.backward(model(batch).mean())
                if step.number == 5:
                    start_children()
"""


def test_runs_of_a_script_s_children_are_runs_of_their_own(
    unisono: Unisono, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a command, by multiprocessing, by a fork; nothing that the worker was told reaches them."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    script(OWN, "own.py")
    name = script(WITH_CHILDREN)
    command = unisono("run", name, "-n", 1, "--run-dir", "run", "--overwrite", "--threads", 2)
    told = command.line("told").partition("told ")[2].split()
    assert command.wait() == 0, command.err
    assert set(told) <= {"UNISONO_TEST", "UNISONO_NURSERY", "UNISONO_LEDGER"}, "those of the fixtures only"
    done = files.complete(tmp_path / "run" / files.FOLDER)
    assert files.step_of(done[0]) <= 5, "the checkpoints of before are there"
    for path in done:
        files.verify(path)
    assert [History(tmp_path / "run").status()[word] for word in ("state", "step")] == ["finished", 7]
    for way in ("subprocess", "spawn", "fork", "command"):
        assert files.complete(tmp_path / f"by-{way}" / files.FOLDER), way
        assert compare(tmp_path / f"by-{way}", tmp_path / "by-subprocess").startswith("identical: 4 steps"), way
        assert json.loads((tmp_path / f"by-{way}" / "run.json").read_text())["recipe"]["threads"] == 1, way


READS_TOKEN = """
    import os, subprocess, sys, pathlib
    from unisono.cluster.worker import member

    token = pathlib.Path("run/token").read_text()
    code = "import pathlib\\nfor path in pathlib.Path('/proc/self/fd').iterdir():\\n    print(path.resolve())"
    for command in ("env", "cat $UNISONO_TOKEN_FILE < /dev/null", f'{sys.executable} -c "{code}"'):
        said = subprocess.run(command, shell=True, close_fds=False, stdout=subprocess.PIPE, text=True, check=True)
        assert token not in said.stdout and "unisono-token" not in said.stdout, said.stdout
    print("said", said.stdout.count("/proc/"))
    me = member.current()
    me.ready(0)
    me.holding(me.wait_notice(0).generation)
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_token_does_not_reach_a_script_s_children(start: str, unisono: Unisono, script: Script) -> None:
    """Not even those that inherit what is open."""
    command = unisono("run", script(READS_TOKEN), "-n", 1, "--run-dir", "run", "--set", f"start={start}")
    assert command.wait() == 0, command.err
    assert int(command.line("said").split()[-1]) > 0


def say_and_pause(descriptor: int) -> None:
    os.write(descriptor, b"1")
    signal.pause()


def test_a_child_of_a_script_that_runs_alone_ends_at_sigterm(tmp_path: Path) -> None:
    """It has inherited the handler of the run, which finishes the step, and has no step to finish."""
    reading, writing = os.pipe()
    with unisono.Run(tmp_path / "run", checkpoint=unisono.Checkpoints(every_steps=1, exit_code_on_sigterm=75)) as run:
        model = torch.nn.Linear(2, 1)
        run.track(model=model)
        for step in run.steps([torch.ones(2)] * 8, batch_size=8, microbatches=4):
            for batch in step:
                step.backward(model(batch).mean())
            child = multiprocessing.get_context("fork").Process(target=say_and_pause, args=(writing,))
            child.start()
            assert os.read(reading, 1) == b"1"
            child.terminate()
            child.join(WAIT_S)
            assert child.exitcode == -signal.SIGTERM
    os.close(reading)
    os.close(writing)


FORKS = """
    import atexit, os, sys, torch, unisono

    def fork(then=lambda: None):
        if sys.argv[1:] == ["calm"]:
            return False
        pid = os.fork()
        if pid == 0:
            then()
            return True
        print("the child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        return False

    def evaluate(run):
        run.evaluate([torch.ones(2)], lambda _: {}, batch_size=1)

    def main():
        with unisono.Run("alone", seed=1, checkpoint=unisono.Checkpoints(every_steps=2)) as run:
            model = torch.nn.Linear(2, 1)
            run.track(model=model)
            for step in run.steps([torch.ones(2)] * 32, batch_size=8, microbatches=4, epochs=2, loader_workers=1):
                if step.number == 1 and fork():
                    return "unwound"
                if step.number == 2:
                    fork(lambda: sys.exit(3))
                    fork(run.save)
                    fork(lambda: evaluate(run))
                    fork()  # goes on with the inner loop
                for number, batch in enumerate(step):
                    loss = model(batch).mean()
                    if step.number == 4 and number == 0:
                        fork(lambda: 1 / 0)
                        fork()  # goes on with backward
                    step.backward(loss)
                if step.number == 5:
                    fork()  # goes on with the outer loop
        return "done"

    pid = os.getpid()
    atexit.register(lambda: print("atexit of", "the worker" if os.getpid() == pid else "a child", flush=True))
    print("it has", main(), flush=True)
"""


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "workers"])
def test_a_fork_of_a_worker_takes_no_part(
    alone: bool, unisono: Unisono, script: Script, tmp_path: Path, mark: str
) -> None:
    """It may leave the script in any way, and is told so where it goes on training; the run continues without it."""
    name = script(FORKS)
    calm = run_workers(tmp_path / name, 1, directory=tmp_path / "calm", arguments=["calm"])
    assert calm.exit_code == 0, calm.output
    if alone:
        command = Command([sys.executable, name], tmp_path, mark)
    else:
        command = unisono("run", name, "-n", 2, "--run-dir", "workers")
    try:
        assert command.wait() == 0, command.err
    finally:
        command.end()
    each = 1 if alone else 2
    out = [line.partition("] ")[2] if line.startswith("[") else line for line in command.out]
    assert [out.count(f"it has {what}") for what in ("unwound", "done")] == [each, each]
    assert [out.count(f"atexit of {who}") for who in ("the worker", "a child")] == [each, 8 * each]
    codes = [int(line.split()[-1]) for line in out if "the child ended with" in line]
    assert sorted(codes) == sorted([0, 3, 1, 1, 1, 1, 1, 1] * each)
    assert compare(tmp_path / "calm", tmp_path / ("alone" if alone else "workers")).startswith("identical: 8 steps")
    for use in ("step.backward", "run.steps", "run.save", "run.evaluate", "for batch in step"):
        assert sum(f"UsageError: {use} was called in process" in line for line in command.err) == each, use
    assert sum("ZeroDivisionError: division by zero" in line for line in command.err) == each
