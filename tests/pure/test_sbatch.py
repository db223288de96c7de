"""The batch scripts that are rendered for Slurm: each word of them is known (``tests/pure/golden``)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.waiting import WAIT_S
from unisono.cli.slurm import OVER, _Following, job_facts, slurm, state_words
from unisono.core.errors import UsageError

GOLDEN = Path(__file__).parent / "golden"

COMMANDS = {
    "slurm-plain": ["train.py"],
    "slurm-gpus": [
        *("train.py", "--nodes", "4", "--time", "2:00:00", "--partition", "gpu", "--account", "lab", "--qos", "high"),
        *("--gpus-per-node", "8", "--mem", "100G", "--sbatch=--constraint=a100|h100", "--sbatch=--mail-type=END"),
        *("--threads", "2", "--run=--strict", "--", "--lr", "0.01", "--name", "it's $HOME"),
    ],
    "slurm-array": [
        *("-m", "package.train", "--array", "1-3", "--cpus-per-node", "16", "--workers", "2:8", "--warn", "300s"),
        *("--run-dir", "/data/my runs/$a-%j", "--job-name", "sweep", "--output", "logs/%A-%a.txt"),
    ],
    "slurm-join": ["--join", "runs/a", "--nodes", "2-4", "--array", "1-8", "--cpus-per-node", "4", "--workers", "3"],
}


def render(words: Sequence[str], folder: Path) -> str:
    done = CliRunner().invoke(slurm, ["--dry-run", *words], catch_exceptions=False, standalone_mode=False)
    return done.output.replace(sys.executable, "/venv/bin/python").replace(str(folder), "/lab/ada")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").touch()
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_is_what_it_was_last_time(name: str, folder: Path) -> None:
    assert render(COMMANDS[name], folder) == (GOLDEN / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_shell_can_read_the_script(name: str) -> None:
    subprocess.run([shutil.which("sh") or "sh", "-n", GOLDEN / f"{name}.sh"], check=True, timeout=WAIT_S)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["missing.py"], "there is no script missing.py"),
        (["train.py", "--nodes", "many"], "--nodes must be a number, or A-B; got 'many'"),
        (["train.py", "--join", "runs/a"], "runs the run's own script; give no other"),
        ([], "which script?"),
        (["train.py", "--sbatch", "constraint=a100"], "--sbatch takes an option of sbatch"),
    ],
)
def test_what_does_not_fit_is_said_before_a_job_is_submitted(words: list[str], why: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=why.replace("?", r"\?")):
        render(words, folder)


# -- what the script does, with a Slurm that only writes down what it is asked ---------------------------


def run_rendered(tmp_path: Path, body: str, *, asked: str) -> tuple[int, str]:
    """Run the script with another program in place of the training.

    Args:
        asked: when Slurm asks the job to end: "first" (before the program is started), "early" (before the script
            knows the program's process id), "later" (while the program runs), or "never".
    """
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    for name, says in (("squeue", "echo RUNNING"), ("scontrol", f'echo "$@" >> {tmp_path}/asked')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    text = render(["train.py"], tmp_path).replace("/venv/bin/python", str(program))
    if asked == "first":
        text = text.replace("trap 'asked=early' TERM", "trap 'asked=early' TERM; kill -TERM $$")
    if asked == "early":
        text = text.replace("run=$!", f"while [ ! -e {tmp_path}/runs ]; do :; done; kill -TERM $$; run=$!")
    (tmp_path / "job.sh").write_text(text)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(
        ["sh", "job.sh"], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "began\n"
            if asked == "later":
                job.terminate()
            job.communicate(timeout=WAIT_S)
        except BaseException:
            os.killpg(job.pid, signal.SIGKILL)
            raise
    requests = tmp_path / "asked"
    return job.returncode, requests.read_text() if requests.exists() else ""


STOPS = "trap 'exit 75' TERM; echo began; touch \"${0%/*}/runs\"; while :; do :; done"
ENDS_WELL = "trap 'exit 0' TERM; echo began; while :; do :; done"


@pytest.mark.parametrize(
    ("body", "asked", "expected"),
    [
        ("echo began; exit 0", "never", (0, "")),
        ("echo began; exit 3", "never", (3, "")),
        (STOPS, "later", (75, "requeue 7\n")),
        (STOPS, "first", (75, "requeue 7\n")),
        (STOPS, "early", (75, "requeue 7\n")),
        (ENDS_WELL, "later", (0, "")),
    ],
    ids=[
        "finished",
        "failed",
        "asked to end",
        "asked before it began",
        "asked at the very beginning",
        "asked to end, and finished",
    ],
)
def test_only_a_run_that_was_asked_to_end_and_is_not_finished_goes_back_into_the_queue(
    body: str, asked: str, expected: tuple[int, str], tmp_path: Path
) -> None:
    assert run_rendered(tmp_path, body, asked=asked) == expected


# -- following a job ---------------------------------------------------------------------------------

SHOWN = """JobId=7 JobName=train Comment=StdOut=/no
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   JobState=PREEMPTED Reason=None Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:15
   NodeList=n[1-2]
   WorkDir=/data/my runs
   StdErr=/data/my runs/train 7.out
   StdIn=/dev/null
   StdOut=/data/my runs/train 7.out
   Power=
"""


def test_a_path_with_blanks_is_read_whole() -> None:
    facts = job_facts(SHOWN)
    assert facts["StdOut"] == "/data/my runs/train 7.out"
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("PREEMPTED", "2", "0:15")


def test_following_ends_in_each_state_in_which_slurm_does_nothing_more() -> None:
    """The states of a job in slurm.h, those that are flags as well."""
    goes_on = (
        *("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "STAGE_OUT", "STOPPED", "RESIZING"),
        *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "UPDATE_DB", "POWER_UP_NODE"),
        *("RECONFIG_FAIL", "EXPEDITING", "SIGNALING"),
    )
    ended = (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
        *("PREEMPTED", "REVOKED", "TIMEOUT"),
    )
    assert {*ended} == OVER
    assert not {*goes_on} & OVER
    assert (
        state_words("7", job_facts(SHOWN))
        == "job 7 is preempted, turn 3; to resume from its newest checkpoint: scontrol requeue 7"
    )


@pytest.fixture
def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose file `shown` is what Slurm says."""
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\ncat {folder}/shown\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_character_is_shown_whole_wherever_what_is_read_ends(
    scontrol: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = scontrol / "a b.out"
    text = "é, \N{PARTY POPPER}\n"
    (scontrol / "shown").write_text(f"JobId=7\n   JobState=RUNNING\n   StdOut={output}\n")
    output.write_bytes(b"")
    left = [*text.encode()]

    def write(seconds: float) -> None:
        with output.open("ab") as file:
            file.write(bytes(left[:1]))
        del left[:1]
        if not left:
            (scontrol / "shown").write_text(f"JobId=7\n   JobState=PREEMPTED ExitCode=0:0\n   StdOut={output}\n")

    monkeypatch.setattr("unisono.cli.slurm.time.sleep", write)
    assert _Following("7", "runs/a").follow() == 1
    assert capfd.readouterr().out == text
