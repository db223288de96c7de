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
OWN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}
"""What differs from start to start, or says who listens at the port."""
OF_TORCHRUN = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""Where torchrun itself looks for a report, and its own setting."""


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
        assert told.keys() | OF_TORCHRUN == expected.keys()
        assert [(name, told[name]) for name in told if name not in OWN and told[name] != expected[name]] == []


def test_after_a_failure_the_script_goes_on_from_its_snapshot_with_the_same_bits(
    unisono: Unisono, tmp_path: Path, by_torchrun: Path
) -> None:
    run = unisono("run", "--plain", "--workers", 2, "--max-restarts", 1, SCRIPT, "--", tmp_path, "--fail-at", 1)
    assert run.wait() == 0, run.err
    run.line("; restart 1 of 1", pattern="rank1 on ")
    run.line("unisono: [rank1]: ValueError: the disk of rank 1 is full")
    run.line("[rank1.2] goes on at epoch 1")
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


def test_a_machine_that_joins_and_leaves_changes_the_world(
    unisono: Unisono, script: Callable[[str], str], tmp_path: Path, gate: Callable[[], None]
) -> None:
    run = unisono("run", "--plain", "--workers", 2, "--run-dir", "run", script(WAITS), "--", "--lr", "0.1")
    run.line("[rank1] rank 1 of 2 at 127.0.0.1 with ['--lr', '0.1']")
    url = json.loads((tmp_path / "run" / "head.json").read_text())["url"]
    other = unisono("join", url, "--token-file", "run/token", "--workers", 1)
    run.line("there is room for 3 processes instead of 2; all processes are ended")
    other.line("[rank2.2] rank 2 of 3 at 127.0.0.1")
    run.line("[rank0.2] rank 0 of 3")
    os.kill(other.pid, signal.SIGTERM)
    run.line("[rank1.3] rank 1 of 2")
    assert other.wait() == 0
    gate()
    assert run.wait() == 0, run.err
    run.line("all 2 processes have ended with exit code 0")


def test_a_failure_ends_the_run_at_once_with_the_last_lines(unisono: Unisono, script: Callable[[str], str]) -> None:
    name = script("""
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit("no data here")
        time.sleep(1000)
        """)
    run = unisono("run", "--plain", "--workers", 2, name)
    assert run.wait() == 1
    run.line("unisono: failed: rank1 on ")
    assert run.err[-1] == "no data here"


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


def test_nothing_is_left_when_the_command_is_killed(
    unisono: Unisono, script: Callable[[str], str], mark: str, gate: Callable[[], None]
) -> None:
    run = unisono("run", "--plain", "--workers", 2, script(WAITS))
    run.line("[rank0] rank 0 of 2")
    run.line("[rank1] rank 1 of 2")
    os.kill(run.pid, signal.SIGKILL)
    wait_until_gone(set(marked(mark)), time.monotonic() + WAIT_S)
    assert marked(mark) == {}
    gate()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume", "run"], "--resume is for scripts that use Unisono"),
        (["--strict"], "--strict is for scripts that use Unisono"),
    ],
)
def test_options_for_scripts_that_use_unisono_are_refused(
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
    run.line("its 2 processes would train 2 times the same. Start it by unisono run SCRIPT --workers 2")
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
