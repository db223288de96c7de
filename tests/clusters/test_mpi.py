"""Runs whose agents mpiexec starts, with Open MPI and with MPICH: the bits of a run alone, also after a lost rank."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.clusters.conftest import CHECKPOINTED, LONG, SMALL, STEPS
from tests.waiting import PATIENT, WAIT_S
from tests.workers.conftest import Command, marked, wait_until_gone
from tests.workers.gates import Gates
from unisono.cli.reach import ask_status, find
from unisono.record.checkpoint_files import FOLDER, complete
from unisono.record.journal import compare
from unisono.system.lifetime import NURSERY

MPIEXEC = {
    "Open MPI": ("mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe"),
    "MPICH": ("mpiexec.mpich",),
}

Mpiexec = Callable[..., Command]


@pytest.fixture(params=list(MPIEXEC))
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if shutil.which(MPIEXEC[name][0]) is None:
        pytest.skip(f"{MPIEXEC[name][0]} is not installed: tests/needs.sh")
    return name


@pytest.fixture
def mpiexec(engine: str, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mpiexec]:
    """Start ``unisono WORDS`` on so many ranks; afterwards no file of a rendezvous is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # mpiexec leaves folders there
    started: list[Command] = []

    def start(ranks: int, command: str, *words: object, hosts: Sequence[str] = ()) -> Command:
        unisono = [shutil.which("env") or "env", "-u", "UNISONO_PARENT", *_unisono(command), *map(str, words)]
        places = _on_hosts(engine, hosts, tmp_path / "shell") if hosts else []
        started.append(Command([*MPIEXEC[engine], *places, "-n", str(ranks), *unisono], tmp_path, mark))
        return started[-1]

    yield start
    for command in started:
        command.end()


SHELL = """#!/bin/sh
# In place of ssh: a machine is a set of namespaces, and dies with its first process.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec unshare --pid --uts --ipc --mount --fork --kill-child=KILL --mount-proc sh -c "hostname $host; $*"
"""


def _on_hosts(engine: str, hosts: Sequence[str], shell: Path) -> list[str]:
    """Options to start one rank on each of these hosts."""
    shell.write_text(SHELL)
    shell.chmod(0o755)
    if engine == "MPICH":
        names = ["-hosts", ",".join(hosts), "-launcher", "ssh", "-launcher-exec", str(shell)]
        return [*names, "-localhost", "127.0.0.1", "-iface", "lo"]
    names = ["--host", ",".join(f"{host}:1" for host in hosts), "--mca", "plm_rsh_agent", str(shell)]
    return [*names, "--mca", "oob_tcp_if_include", "lo", "--mca", "btl_tcp_if_include", "lo"]


def _unisono(command: str) -> list[str]:
    return [sys.executable, "-P", "-m", "unisono", command, *PATIENT]


def files_of_rendezvous(folder: Path) -> Sequence[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".unisono")]


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("number", [2, 3])
def test_ranks_compute_the_bits_of_one_worker(number: int, mpiexec: Mpiexec, calm: Path, tmp_path: Path) -> None:
    done = mpiexec(number, "run", SMALL, "--run-dir", tmp_path / "run", "--", "--steps", STEPS)
    assert done.wait() == 0, done.out + done.err
    assert compare(calm, tmp_path / "run").startswith(f"identical: {STEPS} steps")
    done.line(f"generation 1 with {number} workers")
    assert files_of_rendezvous(tmp_path) == []


@pytest.mark.usefixtures("nursery")
def test_unisono_run_is_an_agent_under_mpiexec_and_workers_are_shared_out(
    mpiexec: Mpiexec, calm: Path, tmp_path: Path
) -> None:
    words = ["--workers", 3, SMALL, "--run-dir", tmp_path / "run", "--", "--steps", STEPS]
    done = mpiexec(2, "run", *words)
    assert done.wait() == 0, done.out + done.err
    assert compare(calm, tmp_path / "run").startswith(f"identical: {STEPS} steps")
    done.line("generation 1 with 3 workers")


@pytest.mark.usefixtures("nursery")
def test_no_process_stays_where_mpiexec_is_killed(mpiexec: Mpiexec, engine: str, tmp_path: Path, mark: str) -> None:
    """MPICH kills the ranks, so their file stays until the next job in that directory."""
    with Gates(tmp_path / "gates", [3]) as gates:
        words = ["--gates", gates.folder, "--steps", STEPS]
        job = mpiexec(2, "run", SMALL, "--run-dir", tmp_path / "run", "--", *words)
        gates.wait(3, workers=2)
        job.process.kill()
        wait_until_gone(set(marked(mark)), time.monotonic() + WAIT_S)
    assert marked(mark) == {}
    assert engine == "MPICH" or files_of_rendezvous(tmp_path) == []


@pytest.mark.usefixtures("nursery")
def test_two_jobs_in_one_directory_do_not_meet(mpiexec: Mpiexec, calm: Path, tmp_path: Path) -> None:
    names = ("left", "right")
    jobs = [mpiexec(2, "run", SMALL, "--run-dir", tmp_path / name, "--", "--steps", STEPS) for name in names]
    for job, name in zip(jobs, names, strict=True):
        assert job.wait() == 0, job.out + job.err
        assert compare(calm, tmp_path / name).startswith(f"identical: {STEPS} steps")
        job.line("generation 1 with 2 workers")


@pytest.mark.usefixtures("nursery")
def test_a_worker_that_is_lost_is_no_lost_rank(mpiexec: Mpiexec, engine: str, calm: Path, tmp_path: Path) -> None:
    """It is replaced, and mpiexec does not notice."""
    with Gates(tmp_path / "gates", [3]) as gates:
        words = ["--gates", gates.folder, "--steps", STEPS]
        job = mpiexec(2, "run", SMALL, "--run-dir", tmp_path / "run", "--", *words)
        gates.wait(3, workers=2)
        os.kill(_worker(tmp_path / "run"), signal.SIGKILL)
        gates.open(3, job.generation("was killed by signal 9"))
        assert job.wait() == 0, job.out + job.err
    assert compare(calm, tmp_path / "run").startswith(f"identical: {STEPS} steps")


def _worker(run: Path) -> int:
    """The process of one of the workers."""
    workers = ask_status(find(str(run)))["workers"]
    return max(int(worker["pid"]) for worker in workers)


@pytest.mark.parametrize("lost", [0, 1], ids=["first", "other"])
def test_after_a_lost_rank_the_next_mpiexec_goes_on_with_the_same_bits(
    lost: int,
    mpiexec: Mpiexec,
    engine: str,
    calm_checkpointed: Path,
    standing_nursery: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mark: str,
) -> None:
    """Whatever mpiexec does to the others: the checkpoint is there."""
    run = tmp_path / "run"
    words = [CHECKPOINTED, "--run-dir", run, "--resume", "auto", "--", "--steps", LONG, "--every", 2, "--wait-for-disk"]
    with Gates(tmp_path / "gates", range(3, LONG)) as gates:
        job = mpiexec(2, "run", *words, "--gates", gates.folder)
        for step in range(3, LONG):
            gates.wait(step, workers=2)
            if complete(run / FOLDER):
                break
            gates.open(step)
        os.kill(_agent(mark, lost), signal.SIGKILL)
        assert job.wait() != 0
    if lost == 1 and engine == "Open MPI":
        job.line("SIGTERM")
    monkeypatch.setenv(NURSERY, standing_nursery)  # not before: what it forks does not die with a killed agent
    again = mpiexec(3, "run", *words)
    assert again.wait() == 0, again.out + again.err
    again.line("resuming at step")
    assert compare(calm_checkpointed, run).startswith(f"identical: {LONG} steps")
    again.line("with 3 workers")
    assert files_of_rendezvous(tmp_path) == [], "the file that a killed first rank has left, too"


def test_after_a_lost_machine_the_next_mpiexec_goes_on_with_the_same_bits(
    mpiexec: Mpiexec,
    calm_checkpointed: Path,
    standing_nursery: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mark: str,
) -> None:
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("machines that can die take root and unshare")
    run = tmp_path / "run"
    words = [CHECKPOINTED, "--run-dir", run, "--resume", "auto", "--", "--steps", LONG, "--every", 2, "--wait-for-disk"]
    with Gates(tmp_path / "gates", range(3, LONG)) as gates:
        job = mpiexec(2, "run", *words, "--gates", gates.folder, hosts=("left", "right"))
        for step in range(3, LONG):
            gates.wait(step, workers=2)
            if complete(run / FOLDER):
                break
            gates.open(step)
        os.kill(next(pid for pid, words in marked(mark).items() if "hostname right" in words), signal.SIGKILL)
        assert job.wait() != 0
    monkeypatch.setenv(NURSERY, standing_nursery)
    again = mpiexec(2, "run", *words)
    assert again.wait() == 0, again.out + again.err
    again.line("resuming at step")
    assert compare(calm_checkpointed, run).startswith(f"identical: {LONG} steps")
    assert files_of_rendezvous(tmp_path) == []


def _agent(mark: str, rank: int) -> int:
    """The process of an agent, by its rank."""
    for pid, command in marked(mark).items():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = (f"OMPI_COMM_WORLD_RANK={rank}", f"PMI_RANK={rank}")
        if "-m unisono run" in command and any(name.encode() in environment for name in names):
            return pid
    raise AssertionError(f"there is no agent of rank {rank}: {marked(mark)}")
