"""Several runs share a machine: each core and each GPU is handed out once, and is free when its run has ended."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workers.conftest import Unisono
from tests.workers.gates import Gates
from unisono.cli.reach import ask_status, find
from unisono.cluster.machine.children import Child
from unisono.cluster.machine.placement import PLACEMENTS
from unisono.cluster.machine.workers import NO_GPU, Places, WorkerProcesses
from unisono.core.spec import MachineSpec, RunSpec, WorkerSpec
from unisono.system import seats
from unisono.system.capacity import cpu_limit, free_workers, machine_cores, machine_gpus, parse_workers
from unisono.system.lifetime import Memory

pytestmark = pytest.mark.more

SCRIPT = Path(__file__).with_name("small_training.py")
HOLD = "import sys; from unisono.system import seats; print(seats.take(sys.argv[1:]), flush=True); sys.stdin.read()"


@pytest.fixture
def others() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that takes these seats."""
    started: list[subprocess.Popen[str]] = []

    def start(*names: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        process.taken = process.stdout.readline().strip()  # type: ignore[attr-defined]
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_who_holds_a_seat_is_known_however_often_it_is_asked(others: Callable[..., subprocess.Popen[str]]) -> None:
    """More often than a socket has room for connections that nobody accepts."""
    other = others("asked")
    assert {seats.holder("asked") for _ in range(300)} == {other.pid}
    other.kill()
    other.wait()
    assert seats.holder("asked") == 0


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")


def test_a_seat_is_given_once_and_is_free_when_its_process_was_killed(
    others: Callable[..., subprocess.Popen[str]],
) -> None:
    assert seats.take(["a", "b"]) == ["a", "b"]
    other = others("a", "c")
    assert other.taken == "['c']"  # type: ignore[attr-defined]
    assert seats.take(["a", "c"]) == ["a"], "what this process holds already it still holds"
    assert [seats.holder(name) for name in "acd"] == [os.getpid(), other.pid, 0]
    other.kill()
    other.wait()
    assert seats.take(["c"]) == ["c"]
    seats.release(["a"])
    assert others("a").taken == "['a']"  # type: ignore[attr-defined]


def test_what_other_runs_hold_is_not_counted(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch, others: Callable[..., subprocess.Popen[str]]
) -> None:
    others("gpu-3", "gpu-7")
    assert len(machine_gpus()) == 4
    assert parse_workers("auto", 1)[:3] == (2, 1, 2)
    assert parse_workers("1:4", 1).on_one_machine(1) == 2
    assert parse_workers("3:4", 1).on_one_machine(1) == 3, "it has asked for that"
    assert parse_workers("4", 1).on_one_machine(1) == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    assert free_workers(1) == 1, "a run has at least one worker"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seats.release()
    others(*machine_cores()[1:])
    assert free_workers(1) == 1


def test_workers_get_the_gpus_that_are_free_and_their_successors_get_the_same(
    four_gpus: None, others: Callable[..., subprocess.Popen[str]]
) -> None:
    other = others("gpu-2", "gpu-5")
    places = Places(1)
    assert places.reserve(2) == ""
    assert [places.of(rank).gpu for rank in (0, 1, 0)] == [1, 3, 1]
    other.kill()
    other.wait()
    assert places.of(2).gpu == 0, "one more worker takes what is free now"
    places.give_back(1)
    assert seats.holder("gpu-7") == 0
    assert machine_gpus() == ["gpu-2", "gpu-3", "gpu-5", "gpu-7"]


def test_more_workers_than_free_gpus_share_those_of_their_own_run_and_it_is_said(
    four_gpus: None, others: Callable[..., subprocess.Popen[str]]
) -> None:
    other = others("gpu-2", "gpu-5")
    places = Places(1)
    assert places.reserve(4) == (
        f"4 workers want 4 GPUs; this machine has 4, and 2 of them are used by other runs (pid {other.pid}): they "
        "share 2 GPUs, and a step takes longer"
    )
    assert [places.of(rank).gpu for rank in range(4)] == [1, 3, 1, 3]
    other.kill()
    other.wait()
    assert [places.of(rank).gpu for rank in range(4)] == [1, 3, 0, 2], "who starts now has a GPU for itself"


def test_one_worker_is_spoken_of_in_the_singular(four_gpus: None, others: Callable[..., subprocess.Popen[str]]) -> None:
    others(*machine_gpus())
    assert Places(1).reserve(1).startswith("1 worker wants 1 GPU; ")


def test_what_was_counted_and_is_not_used_is_given_back(four_gpus: None) -> None:
    assert parse_workers("1:4", 1).on_one_machine(1) == 4
    assert Places(1).reserve(1) == ""
    assert [seats.holder(name) == os.getpid() for name in machine_gpus()] == [True, False, False, False]


def test_without_gpus_cores_are_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cores = machine_cores()
    places = Places(len(cores))
    assert places.reserve(1) == ""
    assert places.of(0).held == tuple(cores)
    assert places.of(0).gpu == NO_GPU
    number = 2 * len(cores)
    assert places.reserve(2).startswith(f"2 workers want {number} cores; this machine has {len(cores)}: they share")


def control_group(root: Path, group: str, files: dict[str, str]) -> Path:
    """The files of a machine on which this process is in this control group."""
    for name, text in {"proc/self/cgroup": group, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_limit_of_cpu_time_is_found(tmp_path: Path) -> None:
    """Of both versions of control groups; the smallest on the way to the top counts."""
    assert cpu_limit(control_group(tmp_path / "none", "0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"})) is None
    assert cpu_limit(tmp_path / "no such machine") is None
    newer = {
        "sys/fs/cgroup/job/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
        "sys/fs/cgroup/other/cpu.max": "100000 100000\n",
    }
    assert cpu_limit(control_group(tmp_path / "newer", "0::/job/step\n", newer)) == 2.5
    older = {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    group = "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n0::/\n"
    assert cpu_limit(control_group(tmp_path / "older", group, older)) == 0.5


class Recorder:
    """Starts nothing, and remembers what it was to start."""

    def __init__(self, *_: object) -> None:
        self.specs: list[WorkerSpec] = []

    def open(self) -> None:
        pass

    def start(self, spec: WorkerSpec, on_started: Callable[[Child | OSError], None]) -> None:
        self.specs.append(spec)

    async def close(self) -> None:
        pass


class Listener:
    def __init__(self) -> None:
        self.notices: list[str] = []

    def on_line(self, name: str, text: str, is_error: bool) -> None:
        pass

    def on_notice(self, text: str) -> None:
        self.notices.append(text)


def test_each_worker_is_told_its_gpu(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch, others: Callable[..., subprocess.Popen[str]]
) -> None:
    others("gpu-2")
    recorder, listener = Recorder(), Listener()
    monkeypatch.setitem(PLACEMENTS, "fork", lambda *_: recorder)  # type: ignore[arg-type]

    async def work() -> None:
        with Memory("unisono-token", b"token") as secret:
            spec = MachineSpec(run=RunSpec(), num_workers=3)
            workers = WorkerProcesses(
                spec, head="", host="here", secret=secret, listener=listener, on_exit=lambda message: None
            )
            workers.open()
            workers.start(["w0", "w1", "w2", "w3"])
            await workers.close()

    asyncio.run(work())
    assert [spec.gpu for spec in recorder.specs] == [1, 2, 3, 1]
    assert WorkerSpec.decode(recorder.specs[1].encode(), "").gpu == 2
    assert listener.notices == []
    assert seats.holder("gpu-3") == 0, "all is given back at the end"


@pytest.mark.usefixtures("nursery", "four_gpus")
def test_two_runs_on_one_machine_have_different_gpus(unisono: Unisono, tmp_path: Path) -> None:
    """The second takes what the first has left; a run that was killed has left all."""
    with Gates(tmp_path / "gates", (3,)) as gates:
        place = ("--", "--steps", 5, "--gates", gates.folder)
        first = unisono("run", SCRIPT, "-n", 3, "--run-dir", tmp_path / "first", *place)
        gates.wait(3, workers=3)
        second = unisono("run", SCRIPT, "-n", "auto", "--run-dir", tmp_path / "second", *place)
        gates.wait(3, workers=4)
        assert [seats.holder(name) for name in machine_gpus()] == [first.pid] * 3 + [second.pid]
        assert len(ask_status(find(str(tmp_path / "second")))["workers"]) == 1
        third = unisono("run", SCRIPT, "-n", 2, "--run-dir", tmp_path / "third", "--", "--steps", 5)
        said = third.line("2 workers want 2 GPUs; this machine has 4, and 4 of them are used by other runs")
        assert all(str(pid) in said for pid in (first.pid, second.pid))
        first.process.kill()
        first.process.wait()
        assert [seats.holder(name) for name in machine_gpus()] == [0, 0, 0, second.pid]
        gates.open(3)
    for command in (second, third):
        assert command.wait() == 0, command.err
    assert json.loads((tmp_path / "second" / "journal.jsonl").read_text().splitlines()[-1])["ok"]
