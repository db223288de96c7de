"""Processes that the script starts: they are no workers, and runs of theirs are runs of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers.conftest import Unisono
from unisono.checkpoint import files
from unisono.journal import compare, summary

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("nursery")]

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
    told = command.line("told", 150).partition("told ")[2].split()
    assert command.wait() == 0, command.err
    assert set(told) <= {"UNISONO_TEST", "UNISONO_NURSERY"}, "what is for this worker alone"
    done = files.complete(tmp_path / "run" / files.FOLDER)
    assert files.step_of(done[0]) <= 5, "the checkpoints of before are there"
    for path in done:
        files.verify(path)
    assert [summary(tmp_path / "run")[word] for word in ("state", "step")] == ["finished", 7]
    for way in ("subprocess", "spawn", "fork", "command"):
        assert files.complete(tmp_path / f"by-{way}" / files.FOLDER), way
        assert compare(tmp_path / f"by-{way}", tmp_path / "by-subprocess").startswith("identical: 4 steps"), way
        assert json.loads((tmp_path / f"by-{way}" / "run.json").read_text())["recipe"]["threads"] == 1, way


READS_TOKEN = """
    import os, subprocess, sys, pathlib
    from unisono import member

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
    command = unisono("run", script(READS_TOKEN), "-n", 1, "--run-dir", "run", "--start", start)
    assert command.wait() == 0, command.err
    assert int(command.line("said").split()[-1]) > 0
