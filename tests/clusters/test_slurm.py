"""Runs in jobs of a real Slurm of two nodes: the bits of a run alone, whatever is lost; and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.conftest import CHECKPOINTED, LONG, SMALL, STEPS
from tests.clusters.slurm import Cluster, running
from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import Command, Unisono, marked, wait_until_gone
from tests.workers.gates import Gates
from unisono.record.checkpoint_files import FOLDER, complete
from unisono.record.journal import compare
from unisono.system.lifetime import PARENT

DETACHED = ("env", "--default-signal=INT", "-u", PARENT)
"""What a job starts is a child of Slurm, not of the test."""
UNISONO = (sys.executable, "-P", "-m", "unisono")


@pytest.fixture(scope="module")
def cluster_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def cluster(cluster_of_two: Cluster, mark: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    """Both nodes are up; afterwards no job, no step's folder and no file of a rendezvous is left."""
    monkeypatch.setenv("SLURM_CONF", str(cluster_of_two.configuration))
    cluster_of_two.up()
    try:
        yield cluster_of_two
    finally:
        cluster_of_two.clear()
    assert cluster_of_two.cgroups() == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".unisono")] == []


class Job:
    """A command that starts a job, in the test's folder."""

    def __init__(self, folder: Path, mark: str) -> None:
        self._folder = folder
        self._mark = mark
        self.commands: list[Command] = []

    def __call__(self, *words: object) -> Command:
        command = Command([*DETACHED, *map(str, words)], self._folder, self._mark)
        self.commands.append(command)
        return command


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path, mark: str) -> Iterator[Job]:
    job = Job(tmp_path, mark)
    yield job
    for command in job.commands:
        command.end()


def agents(mark: str) -> list[int]:
    """The processes of agents that a launcher has started."""
    return [pid for pid, command in marked(mark).items() if "--launched" in command and "srun" not in command]


def train(
    number: int | str, run: Path, *options: object, steps: int = STEPS, before: tuple[object, ...] = ()
) -> list[object]:
    training = [SMALL, *options, "--", "--steps", steps]
    return [*before, *UNISONO, "run", *PATIENT, "--workers", number, "--run-dir", run, *training]


@pytest.mark.parametrize("number", [2, 3])
def test_the_workers_of_an_allocation_compute_the_bits_of_one(
    number: int, cluster: Cluster, calm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch script with nothing but the command that is used everywhere else."""
    script = tmp_path / "job.sh"
    words = " ".join(str(word) for word in train(number, tmp_path / "run"))
    script.write_text(f"#!/bin/sh\nexec {words}\n")
    monkeypatch.delenv(PARENT, raising=False)
    cluster.run("sbatch", "--nodes=2", f"--output={tmp_path}/out", script)
    cluster.wait_for("squeue", "--noheader", until="")
    assert compare(calm, tmp_path / "run").startswith(f"identical: {STEPS} steps")
    assert f"generation 1 with {number} workers" in (tmp_path / "out").read_text()
    assert f"{cluster.nodes[1]}-" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("number", [2, 3])
def test_the_tasks_of_srun_compute_the_bits_of_one(number: int, start: Job, calm: Path, tmp_path: Path) -> None:
    done = start(*train("auto", tmp_path / "run", before=("srun", "--nodes=2", f"--ntasks={number}")))
    assert done.wait() == 0, done.err
    assert compare(calm, tmp_path / "run").startswith(f"identical: {STEPS} steps")
    done.line(f"generation 1 with {number} workers")


def test_a_shell_of_salloc_uses_all_cores_of_its_nodes(start: Job, calm: Path, tmp_path: Path) -> None:
    """The shell runs beside the nodes: all workers are on others."""
    done = start(*train("auto", tmp_path / "run", before=("salloc", "--nodes=2", "--ntasks=2", "--cpus-per-task=2")))
    assert done.wait() == 0, done.err
    assert compare(calm, tmp_path / "run").startswith(f"identical: {STEPS} steps")
    done.line("generation 1 with 4 workers")


def test_an_agent_that_is_killed_costs_no_bit(start: Job, calm: Path, tmp_path: Path, mark: str) -> None:
    with Gates(tmp_path / "gates", [3]) as gates:
        job = start(*train(2, tmp_path / "run", before=("salloc", "--nodes=2")), "--gates", gates.folder)
        gates.wait(3, workers=2)
        os.kill(agents(mark)[0], signal.SIGKILL)
        gates.open(3, job.generation("with 1 worker"))
        assert job.wait() == 0, job.err
    assert compare(calm, tmp_path / "run").startswith(f"identical: {STEPS} steps")


def test_a_lost_node_costs_no_bit_and_the_run_goes_on_with_the_rest(
    start: Job, cluster: Cluster, calm: Path, tmp_path: Path
) -> None:
    with Gates(tmp_path / "gates", [3]) as gates:
        job = start(*train(2, tmp_path / "run", before=("salloc", "--nodes=2", "--no-kill")), "--gates", gates.folder)
        gates.wait(3, workers=2)
        cluster.kill(cluster.nodes[1])
        gates.open(3, job.generation("with 1 worker"))
        assert job.wait() == 0, job.err
    assert compare(calm, tmp_path / "run").startswith(f"identical: {STEPS} steps")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["int", "kill"])
def test_nothing_is_left_of_a_command_that_is_ended(
    number: signal.Signals, start: Job, cluster: Cluster, tmp_path: Path, mark: str
) -> None:
    """The agents on the nodes end with it, while the allocation is still there."""
    with Gates(tmp_path / "gates", [3]) as gates:
        then_stay = ("sh", "-c", '"$@"; exec sleep 1000000', "-")
        before = ("salloc", "--nodes=2", "--kill-command", *then_stay)
        allocation = start(*train(2, tmp_path / "run", before=before), "--gates", gates.folder)
        gates.wait(3, workers=2)
        command = next(
            pid
            for pid, words in marked(mark).items()
            if "unisono run" in words and "salloc" not in words and "sh -c" not in words
        )
        left = set(agents(mark))
        assert left
        os.kill(command, number)
        wait_until_gone(left, time.monotonic() + WAIT_S)
        assert agents(mark) == []
        assert len(cluster.jobs()) == 1
        cluster.clear()
        allocation.wait()


def test_a_job_that_is_asked_to_end_goes_on_in_its_next_turn(
    unisono: Unisono, cluster: Cluster, calm_checkpointed: Path, tmp_path: Path
) -> None:
    """Slurm sends SIGTERM to the batch script before the time limit (``--signal=B:TERM@90``)."""
    with Gates(tmp_path / "gates", [4, 6]) as gates:
        options = ["--nodes", 2, "--time", 5, "--workers", 3, "--run-dir", "runs/a"]
        patient = [f"--run={word}" for word in PATIENT]
        script = [CHECKPOINTED, "--", "--steps", LONG, "--every", 0, "--gates", gates.folder]
        followed = unisono("slurm", *options, *patient, *script, before=DETACHED)
        gates.wait(4, workers=3)
        (job,) = cluster.jobs()
        cluster.run("scancel", "--batch", "--signal=TERM", job)
        followed.line("with a checkpoint")
        gates.open(4)
        followed.line("turn 2")
        gates.wait(6, workers=3)
        gates.open(6)
        assert followed.wait() == 0, followed.out + followed.err
    followed.line("resuming at step")
    assert compare(calm_checkpointed, tmp_path / "runs" / "a").startswith(f"identical: {LONG} steps")


def test_a_job_whose_first_node_is_lost_goes_on_on_another(
    unisono: Unisono, cluster: Cluster, calm_checkpointed: Path, tmp_path: Path
) -> None:
    """The head and the batch script are lost with it: Slurm starts the job anew."""
    run = tmp_path / "runs" / "a"
    options = ["--cpus-per-node", 2, "--run-dir", run, *(f"--run={word}" for word in PATIENT)]
    with Gates(tmp_path / "gates", range(3, LONG)) as gates:
        script = [CHECKPOINTED, "--", "--steps", LONG, "--every", 2, "--wait-for-disk", "--gates", gates.folder]
        followed = unisono("slurm", *options, *script, before=DETACHED)
        for step in range(3, LONG):
            gates.wait(step, workers=2)
            if complete(run / FOLDER):
                break
            gates.open(step)
        cluster.kill(cluster.nodes[0])
        for later in range(step, LONG):
            gates.open(later)
        followed.line(f"runs on {cluster.nodes[1]}, turn 2")
        assert followed.wait() == 0, followed.out + followed.err
    assert compare(calm_checkpointed, run).startswith(f"identical: {LONG} steps")


def test_a_job_that_is_cancelled_writes_a_checkpoint_and_does_not_come_back(
    unisono: Unisono, cluster: Cluster, calm_checkpointed: Path, tmp_path: Path
) -> None:
    """``scancel`` sends SIGTERM to the batch script and to the agents, and waits a while until it kills."""
    run = tmp_path / "runs" / "a"
    script = [CHECKPOINTED, "--", "--steps", LONG, "--every", 0]
    patient = [f"--run={word}" for word in PATIENT]
    with Gates(tmp_path / "gates", [4]) as gates:
        options = ["--nodes", 2, "--workers", 2, "--run-dir", run, *patient]
        followed = unisono("slurm", *options, *script, "--gates", gates.folder, before=DETACHED)
        gates.wait(4, workers=2)
        cluster.run("scancel", *cluster.jobs())
        followed.line("with a checkpoint")
        gates.open(4)
        assert followed.wait() != 0
    followed.line("cancelled")
    cluster.wait_for("squeue", "--noheader", until="")
    assert len(complete(run / FOLDER)) == 1
    again = unisono("run", "--workers", 1, "--resume", run)
    assert again.wait() == 0, again.err
    assert compare(calm_checkpointed, run).startswith(f"identical: {LONG} steps")


def test_another_job_joins_a_run_that_is_going(unisono: Unisono, cluster: Cluster, calm: Path, tmp_path: Path) -> None:
    options = ["--cpus-per-node", 1, "--workers", 1]
    patient = [f"--run={word}" for word in PATIENT]
    with Gates(tmp_path / "gates", [3]) as gates:
        script = [SMALL, "--", "--steps", STEPS, "--gates", gates.folder]
        followed = unisono("slurm", *options, "--run-dir", "runs/a", *patient, *script, before=DETACHED)
        gates.wait(3)
        joined = unisono("slurm", "--join", "runs/a", *options, before=DETACHED)
        gates.open(3, followed.generation("with 2 workers"))
        assert followed.wait() == 0, followed.out + followed.err
        assert joined.wait() == 0, joined.out + joined.err
    assert compare(calm, tmp_path / "runs" / "a").startswith(f"identical: {STEPS} steps")


def test_a_job_outlives_the_command_that_follows_it(unisono: Unisono, cluster: Cluster, tmp_path: Path) -> None:
    """Ctrl-C leaves it to itself, and says how to end it."""
    options = ["--cpus-per-node", 1, "--run-dir", "runs/%j", *(f"--run={word}" for word in PATIENT)]
    with Gates(tmp_path / "gates", [3]) as gates:
        script = [SMALL, "--", "--steps", STEPS, "--gates", gates.folder]
        followed = unisono("slurm", *options, *script, before=DETACHED)
        gates.wait(3)
        (job,) = cluster.jobs()
        followed.process.send_signal(signal.SIGINT)
        assert followed.wait() == 130
        followed.line(f"to end it with a checkpoint: unisono stop runs/{job}; to end it at once: scancel {job}")
        assert cluster.jobs() == [job]
    cluster.wait_for("squeue", "--noheader", until="")
    assert (tmp_path / "runs" / job).is_dir()


def test_the_number_of_a_detached_job_is_all_that_is_printed(
    unisono: Unisono, cluster: Cluster, tmp_path: Path
) -> None:
    submitted = unisono("slurm", "--detach", "--cpus-per-node", 1, SMALL, "--", "--steps", 1, before=DETACHED)
    assert submitted.wait() == 0
    (job,) = submitted.out
    assert job.isdecimal()
    submitted.line(f"to end it: scancel {job}")


def test_a_job_that_slurm_refuses_is_an_error_in_slurms_words(
    unisono: Unisono, cluster: Cluster, tmp_path: Path
) -> None:
    refused = unisono("slurm", SMALL, "--partition", "nowhere")
    assert refused.wait() == 2
    refused.line("unisono: Slurm rejects the job: ", pattern="invalid partition")
    assert subprocess.run(["squeue", "--noheader"], capture_output=True, check=True).stdout == b""


def test_the_other_tasks_go_on_without_the_node_of_the_first(
    start: Job, cluster: Cluster, calm: Path, tmp_path: Path
) -> None:
    """Another agent starts the next head."""
    with Gates(tmp_path / "gates", [3]) as gates:
        before = ("salloc", "--nodes=2", "--no-kill", "srun", "--no-kill", "--ntasks=2")
        job = start(*train("auto", tmp_path / "run", before=before), "--gates", gates.folder)
        gates.wait(3, workers=2)
        cluster.kill(cluster.nodes[0])
        gates.open(3)
        job.wait()
    assert compare(calm, tmp_path / "run").startswith(f"identical: {STEPS} steps")
