"""``unisono run --plain``: a script for torchrun is told the same, computes the same bits, and is started again."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.waiting import WAIT_S
from tests.workers import ddp_training
from tests.workers.conftest import Unisono, marked, wait_until_gone

pytestmark = pytest.mark.more

SCRIPT = Path(ddp_training.__file__)
OWN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
"""What differs from start to start, or from machine to machine."""
OURS = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"}
"""How lines of the output begin."""


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, SCRIPT, folder],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def environments(folder: Path) -> list[dict[str, str]]:
    return [json.loads((folder / f"environment{rank}").read_text()) for rank in range(2)]


def assert_same_bits(folder: Path, other: Path) -> None:
    found, expected = (torch.load(path / "snapshot.pt") for path in (folder, other))
    assert found["epochs"] == expected["epochs"]
    assert found["model"].keys() == expected["model"].keys()
    for name, value in found["model"].items():
        assert torch.equal(value, expected["model"][name]), name


def test_a_script_for_torchrun_is_told_the_same_and_computes_the_same_bits(
    unisono: Unisono, tmp_path: Path, by_torchrun: Path
) -> None:
    run = unisono("run", "--plain", "--workers", 2, SCRIPT, "--", tmp_path)
    assert run.wait() == 0, run.err
    assert_same_bits(tmp_path, by_torchrun)
    for told, expected in zip(environments(tmp_path), environments(by_torchrun), strict=True):
        assert told.keys() - OURS == expected.keys()
        assert [(name, told[name]) for name in told if name not in OWN | OURS and told[name] != expected[name]] == []


def test_after_a_failure_the_script_goes_on_from_its_snapshot_with_the_same_bits(
    unisono: Unisono, tmp_path: Path, by_torchrun: Path
) -> None:
    run = unisono("run", "--plain", "--workers", 2, "--max-restarts", 1, SCRIPT, "--", tmp_path, "--fail-at", 1)
    assert run.wait() == 0, run.err
    run.line("ValueError: the disk of rank 1 is full", pattern=r"\[rank1\] ")
    run.line("[rank1] goes on at epoch 1")
    assert_same_bits(tmp_path, by_torchrun)
    assert [told["TORCHELASTIC_RESTART_COUNT"] for told in environments(tmp_path)] == ["1", "1"]


WAITS = """
    import fcntl, os, sys
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "at", os.environ["MASTER_ADDR"],
          "with", sys.argv[1:])
    fcntl.flock(open("gate"), fcntl.LOCK_SH)
    """


@pytest.fixture
def gate(tmp_path: Path) -> Callable[[], None]:
    """Processes of the script `WAITS` wait until this is called."""
    file = (tmp_path / "gate").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file.close


def test_a_failure_ends_all_processes_and_gives_the_exit_code_of_torchrun(
    unisono: Unisono, script: Callable[[str], str]
) -> None:
    name = script("""
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit("no data here")
        time.sleep(1000)
        """)
    run = unisono("run", "--plain", "--workers", 2, name)
    assert run.wait() == 1
    run.line("[rank1] no data here")


def test_a_process_may_take_its_time_to_end(unisono: Unisono, script: Callable[[str], str], tmp_path: Path) -> None:
    """It gets SIGTERM first."""
    name = script("""
        import os, signal, sys
        def end(number, frame):
            open("saved", "w").close()
            sys.exit()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            sys.exit()
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, end)
            open("ready", "w").close()
            signal.pause()
        open("ready")
        sys.exit(5)
        """)
    os.mkfifo(tmp_path / "ready")
    run = unisono("run", "--plain", "--workers", 2, "--max-restarts", 1, name)
    assert run.wait() == 0, run.err
    assert (tmp_path / "saved").exists()


def torchrun_of(mark: str) -> int:
    (found,) = (pid for pid, words in marked(mark).items() if "unisono.cluster.machine.torchrunner" in words)
    return found


def holder_of(mark: str) -> int:
    (found,) = (pid for pid, words in marked(mark).items() if "unisono.cluster.machine.holder" in words)
    return found


@pytest.mark.parametrize("killed", ["the command", "the holder", "torchrun"])
def test_nothing_is_left_when_a_process_is_killed(
    killed: str, unisono: Unisono, script: Callable[[str], str], tmp_path: Path, mark: str, gate: Callable[[], None]
) -> None:
    """No process of the script, and no file in which torchrun keeps its output."""
    (tmp_path / "files").mkdir()
    run = unisono("run", "--plain", "--workers", 2, script(WAITS), before=("env", f"TMPDIR={tmp_path / 'files'}"))
    run.line("[rank0] rank 0 of 2")
    run.line("[rank1] rank 1 of 2")
    assert len([*(tmp_path / "files").iterdir()]) == 1
    os.kill({"the command": run.pid, "the holder": holder_of(mark), "torchrun": torchrun_of(mark)}[killed], 9)
    wait_until_gone(set(marked(mark)), time.monotonic() + WAIT_S)
    assert marked(mark) == {}
    assert [*(tmp_path / "files").iterdir()] == []
    assert run.wait() == {"the command": -9, "the holder": 137, "torchrun": 137}[killed]
    gate()


def test_a_signal_ends_the_processes_with_time_to_end(
    unisono: Unisono, script: Callable[[str], str], mark: str, gate: Callable[[], None]
) -> None:
    run = unisono("run", "--plain", "--workers", 2, script(WAITS), "--", "--lr", "0.1")
    run.line("[rank1] rank 1 of 2 at 127.0.0.1 with ['--lr', '0.1']")
    os.kill(run.pid, signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT
    assert marked(mark) == {}
    gate()


def test_several_torchruns_of_one_command_meet(unisono: Unisono, tmp_path: Path, by_torchrun: Path) -> None:
    """Two tasks, as Open MPI starts them, are two machines with a process each."""
    task = {"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "PMIX_NAMESPACE": "job1"}
    ranks = [{**task, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank} for rank in range(2)]
    words = [[f"{name}={value}" for name, value in rank.items()] for rank in ranks]
    runs = [unisono("run", "--plain", "--workers", 2, SCRIPT, "--", tmp_path, before=("env", *each)) for each in words]
    assert [run.wait() for run in runs] == [0, 0], [run.err for run in runs]
    assert_same_bits(tmp_path, by_torchrun)
    assert [told["GROUP_WORLD_SIZE"] for told in environments(tmp_path)] == ["2", "2"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".unisono")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume", "run"], "--resume is for scripts that use Unisono"),
        (["--run-dir", "run"], "--run-dir is for scripts that use Unisono"),
        (["--sink", "tensorboard"], "--sink is for scripts that use Unisono"),
        (["--evaluators", "1"], "--evaluators is for scripts that use Unisono"),
        (["--workers", "1:2"], "--workers 1:2 is for several machines (--hosts, Slurm)"),
        (["--launcher", "none"], "--plain starts torchrun with the launchers auto, local, ssh, slurm; got none"),
    ],
)
def test_what_torchrun_does_not_do_is_refused(
    words: list[str], message: str, unisono: Unisono, script: Callable[[str], str]
) -> None:
    run = unisono("run", "--plain", *words, script("print()"))
    assert run.wait() == 2
    run.line(message)


@pytest.mark.usefixtures("nursery")
def test_only_a_plain_script_gets_the_variables_of_torchrun(unisono: Unisono, script: Callable[[str], str]) -> None:
    name = script("""
        import os
        print(sorted({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & {*os.environ}))
        """)
    run = unisono("run", "--workers", 1, name)
    run.line("[w0] []")
    run.wait()


def test_a_script_of_unisono_is_refused_where_each_process_would_train_alone(
    unisono: Unisono, script: Callable[[str], str]
) -> None:
    name = script("""
        import unisono
        with unisono.Run():
            print("each trains alone")
        """)
    run = unisono("run", "--plain", "--workers", 2, name)
    assert run.wait() == 1
    run.line("its 2 processes would train the same thing 2 times. Start it with unisono run SCRIPT --workers 2")
    assert not any("each trains alone" in line for line in run.out)
    alone = unisono("run", "--plain", "--workers", 1, name)
    assert alone.wait() == 0, alone.err


@pytest.mark.usefixtures("nursery")
def test_who_starts_a_script_for_torchrun_as_one_of_unisono_is_told_how_it_is_started(
    unisono: Unisono, script: Callable[[str], str]
) -> None:
    name = script("""
        import torch.distributed
        torch.distributed.init_process_group("gloo")
        """)
    run = unisono("run", "--workers", 1, name)
    assert run.wait() == 1
    assert run.err[-1] == "(a script for torchrun is started by `unisono run --plain`)"
